"""Generations: sampler, prompt, life, snapshots, branches, search, and the draft protocol."""

from statecore.generation._beam import Beam as Beam
from statecore.generation._beam import beam_search as beam_search
from statecore.generation._best_of import Future as Future
from statecore.generation._best_of import best_of_n as best_of_n
from statecore.generation._clock import Clock as Clock
from statecore.generation._constraint import Constraint as Constraint
from statecore.generation._constraint import OneOf as OneOf
from statecore.generation._draft import Draft as Draft
from statecore.generation._draft import DraftState as DraftState
from statecore.generation._draft import Drawing as Drawing
from statecore.generation._draft import Guess as Guess
from statecore.generation._draft import Proposal as Proposal
from statecore.generation._draft import StatefulDraft as StatefulDraft
from statecore.generation._emit import Piece as Piece
from statecore.generation._generation import Generation as Generation
from statecore.generation._guard import LoopGuard as LoopGuard
from statecore.generation._lifecycle import Control as Control
from statecore.generation._lifecycle import Lifecycle as Lifecycle
from statecore.generation._lifecycle import Status as Status
from statecore.generation._llguidance import Grammars as Grammars
from statecore.generation._prompt import CHUNK_LENGTHS as CHUNK_LENGTHS
from statecore.generation._row import Finish as Finish
from statecore.generation._run import Speculation as Speculation
from statecore.generation._sampler import Mirostat as Mirostat
from statecore.generation._sampler import Sampler as Sampler
from statecore.generation._sampler import choose as choose
from statecore.generation._sampler import kept_logits as kept_logits
from statecore.generation._saved import SnapshotSupport as SnapshotSupport
from statecore.generation._snapshot import Branch as Branch
from statecore.generation._snapshot import Snapshot as Snapshot
from statecore.generation._tree import RunNode as RunNode
from statecore.generation._tree import Tree as Tree

__all__ = [
    "CHUNK_LENGTHS", "Beam", "Branch", "Clock", "Constraint", "Control", "Draft", "DraftState", "Drawing",
    "Finish", "Future",
    "Generation", "Grammars", "Guess", "Lifecycle", "LoopGuard", "Mirostat", "OneOf", "Piece",
    "RunNode", "Proposal", "Sampler", "Snapshot", "SnapshotSupport", "Speculation", "StatefulDraft", "Status", "Tree",
    "beam_search", "best_of_n", "choose", "kept_logits",
]  # fmt: skip
