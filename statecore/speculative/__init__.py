"""Drafts for speculative decoding, and which of their guesses are accepted."""

from statecore.speculative._accept import Accepted as Accepted
from statecore.speculative._accept import accept_greedy as accept_greedy
from statecore.speculative._accept import accept_sampled as accept_sampled
from statecore.speculative._accept import accept_typical as accept_typical
from statecore.speculative._model_draft import ModelDraft as ModelDraft
from statecore.speculative._ngram import NGramDraft as NGramDraft
from statecore.speculative._parity import ModeParity as ModeParity
from statecore.speculative._parity import Parity as Parity
from statecore.speculative._parity import probe_parity as probe_parity
from statecore.speculative._self_draft import SelfDraft as SelfDraft
from statecore.speculative._telemetry import Telemetry as Telemetry
from statecore.speculative._telemetry import run_measured as run_measured

__all__ = [
    "Accepted", "ModeParity", "ModelDraft", "NGramDraft", "Parity", "SelfDraft", "Telemetry", "accept_greedy",
    "accept_sampled", "accept_typical", "probe_parity", "run_measured",
]  # fmt: skip
