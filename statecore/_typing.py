"""One legend of dimension letters, used in every docstring and comment.

B batch rows (sequences)     T tokens of a chunk       K tokens of a window
S capacity in rows           R rows of a ring          W attention window
L layers of one kind         H heads                   G key-value heads
D head or model width        N SSM state size          P SSM head width, pool slots
C convolution taps           F convolution channels    V vocabulary
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

# A user's own structure of arrays: dict, tuple, dataclass, anything JAX can flatten.
PyTree: TypeAlias = Any

# What a caller may pass for tokens, rows and counts: host or device, concrete or traced.
IntLike: TypeAlias = int | Sequence[Any] | np.ndarray | jax.Array
