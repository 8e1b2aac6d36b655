"""Generations: sampler, prompt, snapshots, branches, and the draft protocol."""

from statecore.generation._draft import Draft as Draft
from statecore.generation._generation import Branch as Branch
from statecore.generation._generation import Generation as Generation
from statecore.generation._generation import Snapshot as Snapshot
from statecore.generation._prompt import CHUNK_LENGTHS as CHUNK_LENGTHS
from statecore.generation._run import Speculation as Speculation
from statecore.generation._sampler import Sampler as Sampler
from statecore.generation._sampler import choose as choose

__all__ = ["CHUNK_LENGTHS", "Branch", "Draft", "Generation", "Sampler", "Snapshot", "Speculation", "choose"]
