"""The finite guard: a recurrent plane that is not finite never gets better."""

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import NonFiniteError
from statecore._pytree import check_alive
from statecore.ssm._sequence import SequenceState


def check_finite(seq: SequenceState) -> SequenceState:
    """Returns the sequence if all its recurrent planes are finite. Waits for the device.

    Nothing is clamped: a norm that grows large is a fact of some models, and a clamp
    would make warm and cold states drift apart.

    Raises:
      NonFiniteError: names the planes that hold NaN or an infinity.
    """
    layout = seq.backend.layout
    check_alive(layout.named(seq.state), "sequence")
    indices = [i for i in layout.indices("recurrent", "shift")]
    leaves = layout.leaves(seq.state)
    run = seq.backend.compile(
        ("finite",), lambda: jax.jit(lambda planes: [jnp.isfinite(leaf).all() for leaf in planes])
    )
    found = run([leaves[i] for i in indices])
    wrong = [layout.paths[i] for i, finite in zip(indices, found, strict=True) if not np.array(finite)]
    if wrong:
        raise NonFiniteError(
            f"Plane {', '.join(f'`{path}`' for path in wrong)} holds NaN or an infinity after "
            f"{seq.lengths.tolist()} tokens. Every later token would be wrong; go back to a checkpoint, and look at "
            "the inputs and the dtype."
        )
    return seq
