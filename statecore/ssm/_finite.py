"""The finite guard: a recurrent plane that is not finite never gets better."""

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import NonFiniteError
from statecore._typing import PyTree
from statecore.backend import Backend
from statecore.ssm._doors import check_closed
from statecore.ssm._sequence import SequenceState


def check_finite(seq: SequenceState) -> SequenceState:
    """Returns the sequence if all its recurrent planes are finite. Waits for the device.

    Nothing is clamped: a norm that grows large is a fact of some models, and a clamp
    would make warm and cold states drift apart.

    Raises:
      NonFiniteError: names the planes that hold NaN or an infinity.
      LifecycleError: a window is open.
      StateConsumedError: the state was donated.
    """
    check_closed(seq)
    check_planes(seq.backend, seq.state, seq.lengths)
    return seq


def check_planes(backend: Backend, state: PyTree, lengths: np.ndarray) -> None:
    """Raises NonFiniteError unless the recurrent and shift planes of `state` are finite."""
    layout, leaves = backend.layout, backend.layout.leaves(state)
    indices = layout.indices("recurrent", "shift")
    run = backend.compile(("finite",), lambda: jax.jit(lambda planes: [jnp.isfinite(leaf).all() for leaf in planes]))
    found = run([leaves[i] for i in indices])
    wrong = [layout.paths[i] for i, finite in zip(indices, found, strict=True) if not np.array(finite)]
    if wrong:
        raise NonFiniteError(
            f"Plane {', '.join(f'`{path}`' for path in wrong)} holds NaN or an infinity after "
            f"{lengths.tolist()} tokens. Every later token would be wrong; go back to a checkpoint, and look at "
            "the inputs and the dtype."
        )
