"""Pytree helpers: plane paths, traced or not, alive or not, which buffer."""

from collections.abc import Iterable, Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from statecore._errors import AliasError, GeometryError, StateConsumedError
from statecore._typing import PyTree


def path_name(path: tuple) -> str:
    """Returns a path as text, `cache.0.key`; `state` for a state that is one array."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "state"


def named_leaves(tree: PyTree) -> list[tuple[str, jax.Array]]:
    """Returns the leaves with the names of their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), leaf) for path, leaf in leaves]


def is_traced(*trees: PyTree) -> bool:
    """Returns whether any leaf is a tracer, so that nothing can be read or raised."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def any_gone(arrays: Iterable[jax.Array]) -> bool:
    """Returns whether a buffer is gone, of what are known to be arrays: to ask whether they are costs much more."""
    for array in arrays:  # `any` over a map takes twice as long
        if array.is_deleted():
            return True
    return False


def is_deleted(leaf: object) -> bool:
    """Returns whether a leaf is an array whose buffer is gone."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def check_alive(named: Iterable[tuple[str, jax.Array]], what: str = "state") -> None:
    """Raises StateConsumedError if a leaf's buffer is gone."""
    for path, leaf in named:
        if is_deleted(leaf):
            raise StateConsumedError(
                f"Plane `{path}` of this {what} is gone. Either it has been donated: the {what} was advanced "
                "with `donate=True`, or given as `into=`, and only the result can be used. Keep the result, or "
                "`capture` the state before it is donated. Or its array was deleted by hand."
            )


def check_kept(named: Iterable[tuple[str, jax.Array]]) -> None:
    """Raises GeometryError for an array of NumPy whose numbers JAX would narrow without a word."""
    for path, leaf in named:
        if not isinstance(leaf, np.ndarray | np.generic):
            continue
        kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if kept != leaf.dtype:
            raise GeometryError(
                f"Plane `{path}` is an array of NumPy in {leaf.dtype}, which JAX would make {kept} and so change its "
                "numbers. Convert it yourself, or set `jax_enable_x64`."
            )


def buffers(leaf: jax.Array) -> list[int]:
    """Returns the addresses of an array's buffers, one a device; none if it is empty or gone."""
    if leaf.size == 0 or leaf.is_deleted():
        return []
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if len(leaf.devices()) == 1:
        return [leaf.unsafe_buffer_pointer()]
    return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


def check_unaliased(named: Sequence[tuple[str, jax.Array]]) -> None:
    """Raises AliasError if two of the leaves share a buffer."""
    seen: dict[int, str] = {}
    for path, leaf in named:
        if not isinstance(leaf, jax.Array):
            continue
        for address in buffers(leaf):
            if address in seen:
                raise AliasError(
                    f"`{seen[address]}` and `{path}` are the same buffer, so donating one "
                    "would destroy the other. Was the same array put into two places? "
                    "Use `jnp.copy` for one of them."
                )
            seen[address] = path


def check_alike(state: PyTree, other: PyTree, name: str) -> None:
    """Raises GeometryError unless `other`, called `name`, has the structure, shapes and dtypes of `state`."""
    if jax.tree.structure(state) != jax.tree.structure(other):
        raise GeometryError(
            f"{name} has the structure {jax.tree.structure(other)}, but the state has {jax.tree.structure(state)}. "
            "Is it a state of another backend?"
        )
    for (path, leaf), (_, found) in zip(named_leaves(state), named_leaves(other), strict=True):
        for array in (leaf, found):
            if not hasattr(array, "shape") or not hasattr(array, "dtype"):
                raise GeometryError(f"Plane `{path}` must be an array, but is {array!r}.")
        if (leaf.shape, leaf.dtype) != (found.shape, found.dtype):
            raise GeometryError(
                f"Plane `{path}` of {name} is {found.dtype}{list(found.shape)}, but the state has "
                f"{leaf.dtype}{list(leaf.shape)}. Was it made for another batch or capacity?"
            )


def unshared(leaves: PyTree) -> PyTree:
    """Returns results of a jit as they are, or copies with jit disabled, where they may be arguments."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.tree.map(jnp.copy, leaves)
    return leaves


@jax.jit
def copy_leaves(leaves: PyTree) -> PyTree:
    """Returns independent copies of all leaves in one call. Donates nothing."""
    return jax.tree.map(jnp.copy, leaves)
