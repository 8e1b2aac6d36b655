"""Rows of append planes on the host, in blocks that equal texts share."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from statecore._errors import UnsupportedError
from statecore._typing import PyTree
from statecore.backend import Backend
from statecore.state import Geometry, row_axis, take
from statecore.store import _planes

# The blocks of one entry: for each append plane, its rows in order.
Blocks = tuple[tuple[bytes, ...], ...]


class BlockStore:
    """Keeps the first rows of append planes as bytes, each different block once.

    Two blocks are shared only if all their bits are equal, so what is read back is exact
    even where the same tokens were computed in another way. A block is forgotten with the
    last entry that holds it.

    Args:
      backend: of the states.
      geometry: of its states, at any batch.
      block_size: rows of a block; the last one of an entry may have fewer.

    Raises:
      UnsupportedError: an append plane holds what cannot be kept as bytes, such as PRNG keys.
    """

    def __init__(self, backend: Backend, geometry: Geometry, block_size: int):
        self.backend = backend
        self.block_size = block_size
        self._geometry = geometry
        self._indices = backend.layout.indices("append")
        self._layout = _planes.part(backend.layout, self._indices)
        self._counts: dict[bytes, int] = {}
        self._kept: dict[bytes, bytes] = {}
        for index in self._indices:
            plane = geometry.planes[index]
            if jnp.issubdtype(plane.dtype, jax.dtypes.extended):
                raise UnsupportedError(
                    f"Plane `{plane.path}` is {plane.describe()}, which has no bytes to keep on the host."
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks; what is shared counts once."""
        return sum(map(len, self._kept))

    def read(self, state: PyTree, row: int, num_rows: int) -> Blocks:
        """Returns the first rows of sequence `row` as blocks of their own, and waits for the device."""
        layout, leaves = self._layout, self.backend.layout.leaves(state)

        def body(leaves, rows):
            taken = take(layout, leaves, rows)
            return [
                jnp.moveaxis(leaf, row_axis(plane, leaf), 0) for plane, leaf in zip(layout.planes, taken, strict=True)
            ]

        run = self.backend.compile(("rows_read",), lambda: jax.jit(body))
        found = jax.device_get(run([leaves[i] for i in self._indices], np.array([row], np.int32)))
        starts = range(0, num_rows, self.block_size)
        return tuple(
            tuple(rows[start : min(start + self.block_size, num_rows)].tobytes() for start in starts) for rows in found
        )

    def keep(self, blocks: Blocks) -> Blocks:
        """Returns the same blocks, the ones already kept by reference, and counts them as held."""
        return tuple(tuple(map(self._keep, plane)) for plane in blocks)

    def drop(self, blocks: Blocks) -> None:
        """Gives up what `keep` returned."""
        for block in (block for plane in blocks for block in plane):
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block], self._kept[block]

    def planes(self, blocks: Blocks | None) -> dict[int, np.ndarray]:
        """Returns, by the index of the plane, one sequence that has these rows and zeros after them."""
        each: Sequence[tuple[bytes, ...]] = ((),) * len(self._indices) if blocks is None else blocks
        return {index: self._plane(index, b"".join(rows)) for index, rows in zip(self._indices, each, strict=True)}

    def _keep(self, block: bytes) -> bytes:
        self._counts[block] = self._counts.get(block, 0) + 1
        return self._kept.setdefault(block, block)

    def _plane(self, index: int, rows: bytes) -> np.ndarray:
        plane = self._geometry.planes[index]
        axis, batch_axis = plane.plane.axis, plane.plane.batch_axis
        assert axis is not None and batch_axis is not None
        shape = list(plane.shape)
        shape[batch_axis] = 1
        shape.insert(0, shape.pop(axis))
        whole = np.zeros(shape, plane.dtype)
        whole.reshape(-1).view(np.uint8)[: len(rows)] = np.frombuffer(rows, np.uint8)
        return np.moveaxis(whole, 0, axis)
