"""What a prefix cache is given, and a pool under it that is lost."""

import numpy as np
import pytest
from helpers import CAPACITY, cases, refuses
from sequences import cached, start

import statecore as sc
from statecore import ssm


def fed(tokens):
    case = cases()["digit"]
    return sc.extend(case.backend, None, case.backend.init(None, capacity=CAPACITY), [tokens])[0]


@pytest.mark.parametrize("name", ["block_size", "interval", "capacity"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_sizes_are_whole_numbers(name, value):
    case = cases()["digit"]
    with pytest.raises(sc.GeometryError):
        sc.PrefixCache(case.backend, None, **({"capacity": CAPACITY} | {name: value}))


def test_lengths_are_whole_numbers():
    cache = cached()
    for value in (float("nan"), True, 2.5, "a", -1):
        with pytest.raises(sc.GeometryError, match="max_tokens"):
            cache.lookup([1, 2], max_tokens=value)
        with pytest.raises(sc.GeometryError, match="num_tokens"):
            cache.should_checkpoint(value)
        with pytest.raises(sc.GeometryError, match="last"):
            cache.should_checkpoint(4, value)
    assert cache.stats == sc.PrefixCache(cache.backend, None, capacity=8).stats


@pytest.mark.parametrize("token", [-1, 10, 991])
def test_tokens_outside_the_vocabulary_are_no_prefix(token):
    """The state cannot have been fed them."""
    cache, state = cached(), fed([1, 2])
    refuses(sc.GeometryError, lambda: cache.insert(state, [1, token]), state, str(token), "vocabulary")
    assert len(cache) == 0 and cache.insert(state, [1, 2])


def test_what_is_no_hit_is_refused():
    cache, state = cached(), fed([1, 2])
    for call in (lambda: cache.restore(state, 0, None), lambda: cache.lease(None)):
        refuses(sc.GeometryError, call, state, "`lookup`")


def lost(cache, monkeypatch):
    """Loses the slots of a cache as a failed write in place does."""

    def fails(pool, *args):
        for leaf in pool:
            leaf.delete()
        raise RuntimeError("out of memory")

    pool, entry = cache._pool, next(iter(cache._tree))
    with monkeypatch.context() as patched:
        patched.setitem(cache.backend.compiled, ("pool_write", pool._indices), fails)
        with pytest.raises(RuntimeError):
            pool.save(entry.value.handle, fed([5, 6, 7]), 0)


def test_f23_a_lost_pool_evicts_nothing(monkeypatch):
    """F23: refused before an entry makes room for what cannot be kept."""
    cache = cached(num_slots=2)
    for tokens in ([1], [1, 2]):
        cache.insert(fed(tokens), tokens)
    lost(cache, monkeypatch)
    before = cache.stats, len(cache)
    state = fed([7, 8])
    for _ in range(3):
        refuses(sc.FencedError, lambda: cache.insert(state, [7, 8]), state, "lost")
    assert (cache.stats, len(cache)) == before


def test_s39_a_lost_pool_fails_no_request(monkeypatch):
    """S39: the sequence goes on as it was, and a warning says why nothing was kept."""
    cache = cached(num_slots=2, block_size=1, interval=1)
    cache.insert(fed([1]), [1])
    lost(cache, monkeypatch)
    seq = start()
    with pytest.warns(RuntimeWarning, match="No checkpoint of 3 tokens was kept.*lost"):
        same = ssm.marconi_checkpoint(seq, cache)
    assert same is seq
    assert ssm.step(None, same, [4, 4])[0].lengths.tolist() == [4, 4]


def test_sb05_a_checkpoint_of_started_work_is_of_the_finished_work():
    """SB05: a rollback was started and nobody waited; what is kept is the state after its rows."""
    cache = cached(num_slots=2, block_size=1, interval=1)
    opened, _ = ssm.verify(None, ssm.checkpoint(start(prompt=[[1, 2, 3]])), [[4, 5, 6, 7]])
    started = ssm.start_rollback_and_checkpoint(opened, 2)
    assert started.pending
    ssm.marconi_checkpoint(started, cache)
    hit = cache.lookup([1, 2, 3, 4, 5, 6])
    restored = cache.restore(cache.backend.init(None, capacity=CAPACITY), 0, hit)
    assert hit.num_tokens == 5 and restored["h"].item() == 12345
    assert np.array(restored["kv"])[0, :5].tolist() == [1, 2, 3, 4, 5]
