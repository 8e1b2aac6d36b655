"""`PrefixCache`: states of token prefixes, to go on from instead of reading a text again."""

import dataclasses

import numpy as np

from statecore._errors import BudgetError, GeometryError, IdentityError, LifecycleError
from statecore._typing import IntLike, PyTree
from statecore.backend import Backend, checks
from statecore.state import is_marked, mark, validate
from statecore.store import _planes
from statecore.store._blocks import BlockStore
from statecore.store._constants import InitialConstants
from statecore.store._hit import CacheStats, Hit, Kept, Lease, explain
from statecore.store._pool import SnapshotPool, check_backend
from statecore.store._prefix_tree import Entry, PrefixTree
from statecore.store._sizing import POOLED_KINDS


class PrefixCache:
    """States of token prefixes, found by the tokens. Not thread-safe.

        hit = cache.lookup(tokens)
        state = cache.restore(state, row, hit)
        # extend row `row` with tokens[hit.num_tokens:], then
        cache.insert(state, tokens, row)

    What has one size whatever a sequence's length (position, shift, recurrent and sliding
    planes) is a slot of a `SnapshotPool` on the device. Rows of append planes are kept on
    the host, in blocks that entries share where all bits are equal. Nothing restored
    shares a buffer with the cache.

    An entry is what tokens made of an empty state, so nothing else may have: a constant
    plane of a sequence must hold what `init` gives, and states must come from these
    parameters. That much of a state shows no mistake; the caller answers for it. A state
    fresh from `patch` or `interpolate`, or of a patched sequence, is refused.

    Args:
      backend: of the states.
      params: the parameters of the states, for `init` to say what an empty one is.
      capacity: tokens that the states may hold.
      num_slots: entries kept at once; 0 keeps none.
      block_size: tokens of a block, the unit in which rows are shared and checkpoints planned.
      interval: blocks between planned checkpoints.

    Raises:
      UnsupportedError: the backend has an opaque plane, or rows that have no bytes.
      GeometryError: a size is out of range, or a plane has no elements.
    """

    def __init__(
        self,
        backend: Backend,
        params: PyTree,
        *,
        capacity: int,
        num_slots: int = 16,
        block_size: int = 16,
        interval: int = 4,
    ):
        check_backend(backend)
        self.backend = backend
        self.params = params
        self.capacity = checks.whole(capacity, "capacity", least=1)
        self.block_size = checks.whole(block_size, "block_size", least=1)
        self.interval = checks.whole(interval, "interval", least=1)
        self._geometries = {1: backend.geometry(params, batch=1, capacity=capacity)}
        kinds = (*POOLED_KINDS, "sliding")
        self._pool = SnapshotPool(backend, params, num_slots=num_slots, capacity=capacity, kinds=kinds)
        self._blocks = BlockStore(backend, self._geometries[1], block_size)
        self._tree: PrefixTree[Kept] = PrefixTree()
        self._constants = InitialConstants(backend, params, capacity)
        self._stats = CacheStats()

    def __repr__(self) -> str:
        lengths = sorted(entry.num_tokens for entry in self._tree)
        return f"PrefixCache({self.backend.name}, prefixes of {lengths} tokens, {self._pool.num_slots} slots)"

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def stats(self) -> CacheStats:
        """What has happened so far."""
        return self._stats

    @property
    def nbytes(self) -> int | None:
        """Bytes held: the pool's, allocated once, and those of the rows; None if unknown."""
        return None if self._pool.nbytes is None else self._pool.nbytes + self._blocks.nbytes

    def occupancy(self) -> tuple[int, int] | None:
        """Returns slots in use and slots in all; None for a cache of none."""
        return self._pool.occupancy

    def should_checkpoint(self, num_tokens: int, last: int | None = None) -> bool:
        """Returns whether a sequence is due for an `insert`, by its length alone. Has no effect.

        The length need not be at a boundary, as a commit may step over it: what is then
        inserted is the state of all `num_tokens` tokens, never of fewer.

        Args:
          num_tokens: tokens in the state now.
          last: full blocks, `num_tokens // block_size`, at the last checkpoint; None if
            there is none.

        Raises:
          GeometryError: a number is negative or not whole.
        """
        checks.whole(num_tokens, "num_tokens")
        if last is not None:
            checks.whole(last, "last")
        end_block = num_tokens // self.block_size
        return 0 < end_block and end_block % self.interval == 0 and end_block != last and num_tokens <= self.capacity

    def insert(self, state: PyTree, tokens: IntLike, row: int = 0) -> bool:
        """Keeps sequence `row` of `state` as the state of `tokens`. Donates nothing of `state`.

        A full cache evicts one entry; if all are leased, nothing is kept and no error is
        raised, since a request does not depend on it. A prefix that is kept already stays
        as it is and counts as used.

        Args:
          state: of `B` sequences; committed, not a window.
          tokens: all that sequence `row` was fed, from the first.
          row: which sequence.

        Returns:
          whether the cache now holds this prefix.

        Raises:
          IdentityError: the length of the sequence is not that of `tokens`, so that it is
            the state of another text, though every shape fits; or it depends on a constant
            plane that is not `init`'s; or the state was patched.
          GeometryError: the state has another geometry, or no such row, or a token is
            outside the vocabulary.
          FencedError: the pool is lost; nothing was evicted, and a cache must be made anew.
          StateConsumedError, RefusedError: the state cannot be used.
          UnsupportedError: called inside a trace.
        """
        prefix = _host_tokens(tokens)
        length = int(self._check_state(state, row)[row])
        self._check_unpatched(state)
        if length != len(prefix):
            raise IdentityError(
                f"Sequence {row} holds {length} tokens (`{self._position_path}`), but {len(prefix)} were given, so "
                "it is the state of another text. Give all tokens that are in the state, without the pending one, "
                "and commit an open window first."
            )
        checks.check_vocab(np.array(prefix, np.int64), None, self.backend.vocab_size(self.params, state))
        self._pool.check_unfenced()
        if not prefix or self._pool.num_slots == 0:
            return False
        self._constants.check(state, row)
        known = self._tree.get(prefix)
        if known is not None:
            self._tree.touch(known)
            return True
        return self._keep(state, prefix, row)

    def lookup(self, tokens: IntLike, *, max_tokens: int | None = None) -> Hit:
        """Finds the longest kept prefix of `tokens`, and counts it as used.

        Args:
          tokens: a text, from the first token.
          max_tokens: the longest prefix wanted. None leaves at least one token, since logits
            come from feeding one; give `len(tokens)` if none are needed.

        Returns:
          the hit; `num_tokens` is 0 and `reason` says why if nothing was found.

        Raises:
          GeometryError: `tokens` is no list of integers, or `max_tokens` is negative.
        """
        text = _host_tokens(tokens)
        most = len(text) - 1 if max_tokens is None else checks.whole(max_tokens, "max_tokens")
        entry, matched = self._tree.find(text, most)
        deepest, _ = self._tree.find(text)
        reason = explain(self._tree, entry, deepest, matched, len(text))
        if entry is None:
            self._count(misses=1)
            return Hit(num_tokens=0, num_matched=matched, reason=reason, cache=self)
        self._tree.touch(entry)
        self._count(hits=1)
        return Hit(num_tokens=entry.num_tokens, num_matched=matched, reason=reason, cache=self, entry=entry)

    def restore(self, state: PyTree, row: int, hit: Hit, *, donate: bool = False) -> PyTree:
        """Returns `state` with the prefix of `hit` as sequence `row`. Donates `state` if `donate`.

        All that can be read of the sequence has the bits of what was inserted; go on with
        `tokens[hit.num_tokens:]`. A miss gives an empty sequence. The entry stays as it is.

        Args:
          state: of `B` sequences; what row `row` holds does not matter.
          row: which sequence is overwritten.
          hit: from `lookup`.
          donate: whether `state` may be consumed.

        Raises:
          StateConsumedError: the entry was evicted since the lookup, or the state donated.
          IdentityError: the hit is another cache's, or a constant plane of the sequence is
            not what `init` gives.
          GeometryError, RefusedError, AliasError, UnsupportedError: the state cannot be used.
        """
        kept = self._kept(hit)
        self._check_state(state, row)
        self._constants.check(state, row)
        new = {**self._blocks.planes(kept and kept.rows), **self._pool.planes(kept and kept.handle)}
        patched = len(self.backend.layout.lengths(state)) > 1 and is_marked(state)
        restored = _planes.write_row(self.backend, state, row, new, donate=donate)
        if patched:
            mark(restored)  # the other sequences are what they were
        self._count(reused_tokens=hit.num_tokens)
        return restored

    def lease(self, hit: Hit) -> Lease:
        """Keeps the entry of `hit` until the lease is released, or its `with` block ends.

        Raises:
          StateConsumedError: the entry was evicted since the lookup.
          IdentityError: the hit is another cache's.
        """
        self._kept(hit)
        return Lease(self._tree, hit.entry)

    def evict(self) -> bool:
        """Drops the entry used longest ago of those nobody leases; returns whether there was one."""
        victim = self._tree.victim()
        if victim is None:
            return False
        self._drop(victim)
        self._count(evictions=1)
        return True

    def clear(self) -> None:
        """Drops all entries.

        Raises:
          LifecycleError: an entry is leased; nothing is dropped.
        """
        leased = [entry.num_tokens for entry in self._tree if entry.num_leases]
        if leased:
            raise LifecycleError(f"The entries of {leased} tokens are leased. Release the leases, then clear.")
        for entry in self._tree:
            self._drop(entry)

    # Entries.

    def _keep(self, state: PyTree, prefix: tuple[int, ...], row: int) -> bool:
        # What can fail comes first: nothing is evicted for a state that cannot be read.
        rows = self._blocks.read(state, row, len(prefix))
        try:
            handle = self._pool.claim()
        except BudgetError:
            if not self.evict():
                return False
            handle = self._pool.claim()
        try:
            self._pool.save(handle, state, row)
            self._tree.insert(prefix, Kept(handle, self._blocks.keep(rows)))
        except BaseException:
            self._pool.free(handle)
            raise
        self._count(inserts=1)
        return True

    def _drop(self, entry: Entry[Kept]) -> None:
        try:
            self._tree.remove(entry)
            self._blocks.drop(entry.value.rows)
        finally:
            if self._pool.is_live(entry.value.handle):
                self._pool.free(entry.value.handle)

    def _kept(self, hit: Hit) -> Kept | None:
        """Returns what a hit has found, None for a miss; raises if it is not there to be used."""
        if not isinstance(hit, Hit):
            raise GeometryError(f"A prefix is restored and leased by the hit that `lookup` returned, but got {hit!r}.")
        if hit.cache is not self:
            raise IdentityError("This hit is another cache's. Look the tokens up in the cache that restores them.")
        if hit.entry is None:
            return None
        hit.entry.check_alive()
        return hit.entry.value

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self._stats, name) + number for name, number in more.items()}
        self._stats = dataclasses.replace(self._stats, **counts)

    # Checks.

    def _check_unpatched(self, state: PyTree) -> None:
        paths = [path for path, leaf in self.backend.layout.named(state) if is_marked(leaf)]
        if paths:
            raise IdentityError(
                f"{', '.join(f'`{path}`' for path in paths)} of this state was patched or mixed, or follows from what "
                "was, so the state is not what its tokens give. Insert the state from before the patch, or feed the "
                "tokens to an empty one."
            )

    @property
    def _position_path(self) -> str:
        return self.backend.layout.paths[self.backend.layout.position]

    def _check_state(self, state: PyTree, row: int) -> np.ndarray:
        """Returns the lengths `[B]` of a state of this cache's geometry."""
        lengths = _planes.check_state(self.backend.layout, state, row)
        batch = len(lengths)
        if batch not in self._geometries:
            self._geometries[batch] = self.backend.geometry(self.params, batch=batch, capacity=self.capacity)
        validate(self._geometries[batch], state)
        rows = self.backend.layout.capacity(self.backend.layout.leaves(state))
        if rows is not None and lengths[row] > rows:
            raise GeometryError(
                f"`{self._position_path}` says that sequence {row} holds {lengths[row]} tokens, but its append planes "
                f"have {rows} rows. Was the position written by hand?"
            )
        return lengths


def _host_tokens(tokens: IntLike) -> tuple[int, ...]:
    """Returns the tokens `[T]` as a tuple of its own: the caller's buffer may be used again."""
    array = checks.host_ints(tokens, "tokens")
    if array.ndim != 1:
        raise GeometryError(f"tokens have shape {list(array.shape)}, but one sequence's are [T].")
    return tuple(array.tolist())
