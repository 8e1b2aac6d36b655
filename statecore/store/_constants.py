"""Whether a sequence depends on its tokens alone: its constant planes are what `init` gives."""

import jax
import numpy as np

from statecore._errors import IdentityError
from statecore._typing import PyTree
from statecore.backend import Backend
from statecore.state import equality, take
from statecore.store import _planes


class InitialConstants:
    """The constant planes of one empty sequence, to hold others against.

    Args:
      backend: of the states.
      params: its parameters.
      capacity: of the states.
    """

    def __init__(self, backend: Backend, params: PyTree, capacity: int):
        self.backend = backend
        # The position comes along since every layout has one; it is not compared.
        self._indices = backend.layout.indices("position", "constant")
        self._layout = _planes.part(backend.layout, self._indices)
        self._initial: list[jax.Array] = []
        if len(self._indices) > 1:
            leaves = backend.layout.leaves(backend.init(params, batch=1, capacity=capacity))
            self._initial = [leaves[i] for i in self._indices]

    def check(self, state: PyTree, row: int) -> None:
        """Raises IdentityError if a constant plane of sequence `row` has other bits."""
        if not self._initial:
            return
        layout, leaves = self._layout, self.backend.layout.leaves(state)

        def body(leaves, initial, rows):
            found = take(layout, leaves, rows)
            found[layout.position] = initial[layout.position]
            return equality.plane_differs(layout, found, initial)

        run = self.backend.compile(("constants_differ",), lambda: jax.jit(body))
        differs = jax.device_get(run([leaves[i] for i in self._indices], self._initial, np.array([row], np.int32)))
        wrong = [path for path, differ in zip(layout.paths, differs, strict=True) if differ]
        if wrong:
            raise IdentityError(
                f"Plane `{wrong[0]}` of sequence {row} is constant, and not what `init` gives. States are found by "
                "their tokens alone, so a sequence that depends on more than its tokens cannot be kept or restored."
            )
