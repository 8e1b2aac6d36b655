"""Laws of states for your own backend, toys to try them on, and broken backends.

The Hypothesis strategies are in `statecore.testing.strategies`.
"""

from statecore.testing._decay import decay_backend as decay_backend
from statecore.testing._decay import decay_oracle as decay_oracle
from statecore.testing._decay import decay_params as decay_params
from statecore.testing._digit import digit_backend as digit_backend
from statecore.testing._digit import digit_oracle as digit_oracle
from statecore.testing._digit import digit_rows as digit_rows
from statecore.testing._laws import LawViolation as LawViolation
from statecore.testing._laws import assert_same as assert_same
from statecore.testing._laws import check_capture as check_capture
from statecore.testing._laws import check_chunks as check_chunks
from statecore.testing._laws import check_commit as check_commit
from statecore.testing._laws import check_every_plane as check_every_plane
from statecore.testing._laws import check_exchange as check_exchange
from statecore.testing._laws import check_padding as check_padding
from statecore.testing._laws import check_refusal as check_refusal
from statecore.testing._laws import pick_rows as pick_rows
from statecore.testing._laws import raw_states as raw_states
from statecore.testing._laws import relative_gaps as relative_gaps
from statecore.testing._mutants import AliasingRuntime as AliasingRuntime
from statecore.testing._mutants import clamps as clamps
from statecore.testing._mutants import forgets_conv as forgets_conv
from statecore.testing._mutants import off_by_one as off_by_one

__all__ = [
    "AliasingRuntime", "LawViolation", "assert_same", "check_capture", "check_chunks",
    "check_commit", "check_every_plane", "check_exchange", "check_padding",
    "check_refusal", "clamps", "decay_backend", "decay_oracle", "decay_params",
    "digit_backend", "digit_oracle", "digit_rows", "forgets_conv", "off_by_one",
    "pick_rows", "raw_states", "relative_gaps",
]  # fmt: skip
