"""The tree of token prefixes, and the cache of states that is found through it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits, cases, host, refuses
from hypothesis import given, settings
from hypothesis import strategies as st

import statecore as sc
from statecore import planes as pl
from statecore import store, testing

CAPACITY = 24
WIDTH = 14  # every text is fed in one padded chunk, so that nothing compiles twice
by_toy = pytest.mark.parametrize("name", ["digit", "digit-own", "decay"])


def empty(case, batch: int = 2):
    return case.backend.init(case.params, batch=batch, capacity=CAPACITY)


def feed(case, state, tokens, row: int = 0):
    """Returns `state` with `tokens` fed to sequence `row`, and that sequence's last logits."""
    batch = len(case.backend.layout.lengths(state))
    chunk, counts = np.zeros((batch, WIDTH), int), np.zeros(batch, int)
    chunk[row, : len(tokens)], counts[row] = tokens, len(tokens)
    state, logits = sc.extend(case.backend, case.params, state, chunk, num_valid=counts, logits="last")
    return state, np.array(logits)[row]


def cold(case, tokens, row: int = 0):
    return feed(case, empty(case), tokens, row)[0]


def make(case, **options) -> sc.PrefixCache:
    options = {"capacity": CAPACITY, "num_slots": 4, "block_size": 2} | options
    return sc.PrefixCache(case.backend, case.params, **options)


def inserted(case, cache, *texts):
    for tokens in texts:
        assert cache.insert(cold(case, tokens), tokens)
    return cache


def lengths(cache) -> list[int]:
    return sorted(entry.num_tokens for entry in cache._tree)


def assert_row(case, state, row: int, tokens) -> None:
    """Asserts that sequence `row` has the bits of a cold start."""
    wanted = sc.take_rows(case.backend, cold(case, tokens), [0])
    assert sc.differing_planes(case.backend, sc.take_rows(case.backend, state, [row]), wanted) == ()


# The tree.


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


texts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
tree_ops = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "insert", "use", "lease", "release", "evict", "remove"]), texts),
    max_size=40,
)


class Oracle:
    """What the tree must do, by brute force over a dict of whole prefixes."""

    def __init__(self):
        self.entries: dict[tuple, list[int]] = {}  # prefix: [last used, leases]
        self.clock = 0

    def touch(self, prefix):
        self.clock += 1
        self.entries[prefix] = [self.clock, self.entries.get(prefix, [0, 0])[1]]

    def find(self, tokens, most=None):
        limit = len(tokens) if most is None else most
        fitting = [p for p in self.entries if len(p) <= limit and tokens[: len(p)] == p]
        return max(fitting, key=len, default=None), max((common(p, tokens) for p in self.entries), default=0)

    def victim(self):
        free = [prefix for prefix, (_, leases) in self.entries.items() if not leases]
        return min(free, key=lambda prefix: self.entries[prefix][0], default=None)


def check_shape(node, is_root=True) -> None:
    """Asserts that no node is there for nothing, and that edges lead where they say."""
    assert is_root or node.entry is not None or len(node.children) >= 2
    for first, child in node.children.items():
        assert child.tokens[0] == first and child.parent is node
        check_shape(child, is_root=False)


@settings(max_examples=200)  # no device work
@given(tree_ops, st.integers(0, 5))
def test_s42_s43_the_tree_is_a_dict_of_prefixes(ops, most):
    """S42, S43: the deepest equal prefix, recency alone, a victim whenever one is free."""
    tree, oracle = store.PrefixTree(), Oracle()
    for op, tokens in ops:
        entry = tree.get(tokens)
        assert (entry is not None) == (tokens in oracle.entries)
        if op == "insert":
            if entry is None:
                assert tree.insert(tokens, tokens).value == tokens
                oracle.touch(tokens)
            else:
                with pytest.raises(sc.GeometryError, match="one a prefix"):
                    tree.insert(tokens, "again")
        elif op == "evict":
            if victim := tree.victim():
                tree.remove(victim)
                del oracle.entries[victim.value]
        elif found := tree.find(tokens)[0]:
            if op == "use":
                tree.touch(found)
                oracle.touch(found.value)
            elif op == "lease":
                tree.lease(found)
                oracle.entries[found.value][1] += 1
            elif op == "release" and found.num_leases:
                tree.release(found)
                oracle.entries[found.value][1] -= 1
            elif op == "remove":
                tree.remove(found)
                del oracle.entries[found.value]
                assert not found.is_alive
                with pytest.raises(sc.StateConsumedError, match="evicted"):
                    tree.remove(found)
        for limit in (None, most):
            found, matched = tree.find(tokens, limit)
            assert (found and found.value, matched) == oracle.find(tokens, limit)
        assert {entry.value: [entry.last_used, entry.num_leases] for entry in tree} == oracle.entries
        assert (victim.value if (victim := tree.victim()) else None) == oracle.victim()
        check_shape(tree._root)
    assert len(tree) == len(oracle.entries)


def test_the_tree_has_no_entry_for_nothing():
    tree = store.PrefixTree()
    with pytest.raises(sc.GeometryError, match="empty prefix"):
        tree.insert((), "x")
    assert tree.find(()) == (None, 0) and tree.victim() is None


def test_edges_split_and_join():
    """A branch splits an edge between its tokens, and what ends inside one does too."""
    tree = store.PrefixTree()
    long = tree.insert((1, 2, 3, 4, 5), "long")
    assert [node.tokens for node in tree._root.children.values()] == [(1, 2, 3, 4, 5)]
    branch = tree.insert((1, 2, 3, 9), "branch")
    middle = tree._root.children[1]
    assert middle.tokens == (1, 2, 3) and sorted(middle.children) == [4, 9]
    tree.insert((1, 2), "short")
    assert tree._root.children[1].tokens == (1, 2)
    assert tree.find((1, 2, 3, 4, 4)) == (tree.get((1, 2)), 4)
    tree.remove(branch)
    tree.remove(tree.get((1, 2)))
    assert [node.tokens for node in tree._root.children.values()] == [(1, 2, 3, 4, 5)]
    assert tree.get((1, 2, 3, 4, 5)) is long


# The law.

alphabet = st.lists(st.integers(1, 2), min_size=1, max_size=8).map(tuple)
cache_ops = st.lists(
    st.tuples(st.sampled_from(["insert", "serve", "serve", "evict", "lease"]), alphabet, st.integers(0, 1)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("name", ["digit", "decay"])
@given(ops=cache_ops, num_slots=st.integers(0, 3))
def test_s45_f21_going_on_from_a_hit_is_a_cold_start(name, ops, num_slots):
    """S45, F21, F31: whatever was kept, leased, served and evicted, a served text has the bits of a cold one."""
    case = cases()[name]
    cache, state, leases = make(case, num_slots=num_slots), empty(case), []
    for op, tokens, row in ops:
        if op == "insert":
            assert cache.insert(cold(case, tokens, row), tokens, row) in (True, False)
        elif op == "evict":
            cache.evict()
        elif op == "lease":
            leases.append(cache.lease(cache.lookup(tokens)))
        else:
            hit = cache.lookup(tokens)
            assert 0 <= hit.num_tokens < len(tokens) and hit.num_tokens <= hit.num_matched
            other = host(sc.take_rows(case.backend, state, [1 - row]))
            state = cache.restore(state, row, hit, donate=True)
            state, _ = feed(case, state, tokens[hit.num_tokens :], row)
            assert_row(case, state, row, tokens)
            assert_bits(other, sc.take_rows(case.backend, state, [1 - row]))
            cache.insert(state, tokens, row)
        used = cache.occupancy()
        assert used == ((len(cache), num_slots) if num_slots else None)
    for lease in leases:
        lease.release()
    cache.clear()
    assert cache.occupancy() == ((0, num_slots) if num_slots else None)
    assert (len(cache), cache._blocks.nbytes) == (0, 0)


@by_toy
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 11, 12])
def test_what_is_restored_is_what_was_inserted(name, length):
    """All that can be read has the bits of the inserted state, before and past the ring's window and blocks."""
    case = cases()[name]
    tokens = [(3 * i + 1) % 10 for i in range(length)]
    cache = inserted(case, make(case, block_size=3), tokens)
    hit = cache.lookup(tokens, max_tokens=length)
    assert hit.num_tokens == length
    for row in (0, 1):
        state = cache.restore(cold(case, [7] * 12, row), row, hit)
        assert_row(case, state, row, tokens)
        more, logits = feed(case, state, [5, 6], row)
        np.testing.assert_array_equal(logits, feed(case, cold(case, tokens), [5, 6])[1])
        assert_row(case, more, row, [*tokens, 5, 6])


# Inserting.


@by_toy
@pytest.mark.parametrize("fed", [6, 9])
def test_f19_sb02_a_state_of_another_length_is_refused(name, fed):
    """F19, SB02, SB03, S46: a state of 6 or 9 tokens is not that of 8, however well it fits."""
    case, tokens = cases()[name], list(range(1, 10))
    cache, state = make(case), cold(case, tokens[:fed])
    words = (f"holds {fed} tokens", "`pos`", "8 were given")
    refuses(sc.IdentityError, lambda: cache.insert(state, tokens[:8]), state, *words)
    assert (len(cache), cache.occupancy(), cache.stats) == (0, (0, 4), store.CacheStats())


def test_f27_planes_shorter_than_the_position_are_refused():
    """F27: the position says more tokens than the append planes have rows."""
    case = cases()["digit"]
    cache, state = make(case), cold(case, [1, 2, 3])
    state = state | {"pos": jnp.array([30, 0], jnp.int32)}
    refuses(sc.GeometryError, lambda: cache.insert(state, [1] * 30), state, "`pos`", "30 tokens", "24 rows")


def test_states_that_do_not_fit_are_refused():
    """Other capacities, rows, tokens, windows, refused, traced and donated states."""
    case = cases()["digit"]
    cache, state = make(case), cold(case, [1, 2])
    hit = inserted(case, cache, [1, 2]).lookup([1, 2, 3])
    larger = case.backend.init(None, batch=2, capacity=CAPACITY + 1)
    for call in (lambda s: cache.insert(s, []), lambda s: cache.restore(s, 0, hit)):
        refuses(sc.GeometryError, lambda call=call: call(larger), larger, "`kv`", "capacity 24")
    for row in (-1, 2):
        refuses(sc.GeometryError, lambda row=row: cache.insert(state, [1, 2], row), state, f"Row {row}")
        refuses(sc.GeometryError, lambda row=row: cache.restore(state, row, hit), state, f"Row {row}")
    refuses(sc.GeometryError, lambda: cache.insert(state, [[1, 2]]), state, "[1, 2]", "[T]")
    refuses(sc.GeometryError, lambda: cache.insert(state, [1.0, 2.0]), state, "integers")
    refuses(sc.GeometryError, lambda: cache.lookup([1], max_tokens=-1), state, "-1")
    window = sc.verify(case.backend, None, state, [[3], [4]])
    refuses(sc.GeometryError, lambda: cache.insert(window, [1, 2, 3]), state, "planes")
    refused = jax.jit(lambda s: sc.step(case.backend, None, s, jnp.array([10, 1]))[0])(state)
    refuses(sc.RefusedError, lambda: cache.insert(refused, [1, 2]), refused)
    refuses(sc.RefusedError, lambda: cache.restore(refused, 0, hit), refused)
    with pytest.raises(sc.UnsupportedError, match="outside of `jit`"):
        jax.jit(lambda s: cache.restore(s, 0, hit))(state)
    with pytest.raises(sc.GeometryError, match="at least 1"):
        make(case, block_size=0)
    sc.step(case.backend, None, state, [1, 1], donate=True)
    with pytest.raises(sc.StateConsumedError, match="donate=True"):
        cache.insert(state, [1, 2])
    assert (len(cache), cache.occupancy()) == (1, (1, 4))


def test_s38_sb01_only_committed_states_are_kept():
    """S38, SB01, F26: after a partial commit the kept state is that of the kept rows."""
    case, cache = cases()["digit"], make(cases()["digit"])
    window = sc.verify(case.backend, None, cold(case, [1, 2, 3]), [[4, 5, 6, 7], [0, 0, 0, 0]])
    refuses(sc.IdentityError, lambda: cache.insert(window.state, [1, 2, 3, 4, 5]), window.state, "open window")
    state = sc.commit(case.backend, window, [2, 0])
    assert cache.insert(state, [1, 2, 3, 4, 5])
    restored = cache.restore(empty(case), 1, cache.lookup([1, 2, 3, 4, 5, 6]))
    assert_row(case, restored, 1, [1, 2, 3, 4, 5])
    assert restored["h"].tolist() == [0, 12345]


def test_one_entry_a_prefix():
    """An equal prefix is kept once, whichever row it comes from, and counts as used."""
    case = cases()["digit"]
    cache = inserted(case, make(case, num_slots=2), [1, 2], [3, 4])
    assert cache.insert(cold(case, [1, 2], 1), [1, 2], 1)
    assert (len(cache), cache.occupancy(), cache.stats.inserts) == (2, (2, 2), 2)
    inserted(case, cache, [5, 6])
    assert [cache.lookup([*tokens, 9]).num_tokens for tokens in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]


@by_toy
def test_rows_are_shared_where_all_bits_are_equal(name):
    """Full blocks of a common prefix are kept once, and forgotten with the last who has them."""
    case = cases()[name]
    cache, tokens = make(case, block_size=4), [1, 2, 3, 4, 5, 6, 7, 8]
    inserted(case, cache, tokens)
    row = cache._blocks.nbytes // 8
    inserted(case, cache, [*tokens, 9, 9, 9], tokens[:4])
    assert cache._blocks.nbytes == 11 * row
    inserted(case, cache, [*tokens[:4], 0, 0])
    assert cache._blocks.nbytes == 13 * row
    for _ in range(4):
        assert cache.evict()
    assert (cache._blocks.nbytes, cache._blocks._counts, cache.evict()) == (0, {}, False)


def test_shared_rows_are_exact_even_if_computed_otherwise():
    """Equal tokens with other bits in their rows are kept apart: what is restored is what was inserted."""
    case = cases()["digit"]
    cache, state = inserted(case, make(case), [1, 2, 3, 4]), cold(case, [1, 2, 3, 4, 5])
    other = state | {"kv": state["kv"].at[0, 1].set(77)}
    cache.insert(other, [1, 2, 3, 4, 5])
    restored = cache.restore(empty(case), 0, cache.lookup([1, 2, 3, 4, 5, 6]))
    assert restored["kv"][0, :5].tolist() == [1, 77, 3, 4, 5]
    restored = cache.restore(empty(case), 0, cache.lookup([1, 2, 3, 4, 5]))
    assert restored["kv"][0, :4].tolist() == [1, 2, 3, 4]


def test_constants_are_part_of_what_a_state_depends_on():
    """Two texts of equal tokens and other constants are two: the cache takes only what tokens made."""
    case = cases()["decay"]
    cache, state = make(case), cold(case, [1, 2])
    scaled = state | {"scale": state["scale"].at[0].set(4.0)}
    refuses(sc.IdentityError, lambda: cache.insert(scaled, [1, 2]), scaled, "`scale`", "sequence 0")
    assert cache.insert(scaled, [], 1) is False and cache.insert(state, [1, 2])
    hit = cache.lookup([1, 2, 3])
    refuses(sc.IdentityError, lambda: cache.restore(scaled, 0, hit), scaled, "`scale`")
    assert_row(case, cache.restore(scaled, 1, hit), 1, [1, 2])


# Looking up.


def test_f31_the_deepest_checkpoint_before_the_texts_part():
    """F31: checkpoints at 4 and 8, a query that parts at 6: go on from index 4."""
    case, tokens = cases()["digit"], [1, 2, 3, 4, 5, 6, 7, 8]
    cache = inserted(case, make(case), tokens[:4], tokens)
    query = [1, 2, 3, 4, 5, 6, 0, 0, 0]
    hit = cache.lookup(query)
    assert (hit.num_tokens, hit.num_matched) == (4, 6)
    assert "the state of 4 tokens" in hit.reason and "6 of 9 tokens match" in hit.reason
    state, _ = feed(case, cache.restore(empty(case), 0, hit), query[hit.num_tokens :])
    assert_row(case, state, 0, query)


def test_f29_a_hit_shorter_than_the_match_says_why():
    """F29: 15 tokens shared and 7 of its own, states kept every 8: a hit of 8, and a reason."""
    case = cases()["digit"]
    cache = make(case, block_size=8, interval=1)
    text, query = [i % 10 for i in range(22)], [i % 10 for i in range(15)] + [9] * 7
    state, last = empty(case), None
    for number in range(1, len(text) + 1):
        state, _ = sc.step(case.backend, None, state, [text[number - 1], 0])
        if cache.should_checkpoint(number, last):
            assert cache.insert(state, text[:number])
            last = number // cache.block_size
    assert lengths(cache) == [8, 16]
    hit = cache.lookup(query)
    assert (hit.num_tokens, hit.num_matched) == (8, 15)
    assert hit.reason.startswith("Found the state of 8 tokens: 15 of 22 tokens match a text kept")
    assert "Insert states more often" in hit.reason


def test_f29_every_miss_has_a_reason():
    """F29: nothing kept, nothing alike, nothing within, too long."""
    case = cases()["digit"]
    cache = make(case)
    assert cache.lookup([1, 2]).reason == "Found no state: the cache is empty."
    inserted(case, cache, [1, 2, 3])
    for tokens, matched, words in (
        ([9, 9], 0, "no text kept starts with this token"),
        ([1, 2, 9], 2, "2 of 3 tokens match a text kept, but no state is kept within them"),
        ([1, 2, 3], 3, "that of 3 of the 3 tokens is kept, but longer than was asked for"),
        ([], 0, "no text kept starts"),
    ):
        hit = cache.lookup(tokens)
        assert (hit.num_tokens, hit.num_matched) == (0, matched) and words in hit.reason, hit
    assert "all that matches" in cache.lookup([1, 2, 3, 4]).reason
    assert (cache.stats.hits, cache.stats.misses) == (1, 5)


@by_toy
def test_f32_sb33_a_token_is_left_to_feed(name):
    """F32, SB33: a prompt that is kept whole is gone on from an earlier state, and predicts what a cold one does."""
    case, prompt = cases()[name], [1, 2, 3, 4]
    cache = inserted(case, make(case), prompt[:2], prompt)
    hit = cache.lookup(prompt)
    assert hit.num_tokens == 2 and "longer than was asked for" in hit.reason
    state, logits = feed(case, cache.restore(empty(case), 0, hit), prompt[2:])
    np.testing.assert_array_equal(logits, feed(case, empty(case), prompt)[1])
    assert_row(case, state, 0, prompt)
    whole = cache.lookup(prompt, max_tokens=4)
    assert whole.num_tokens == 4
    assert_row(case, cache.restore(empty(case), 0, whole), 0, prompt)
    assert cache.lookup([*prompt, 5], max_tokens=3).num_tokens == 2


def test_f20_one_unit_of_length():
    """F20: states every 8 tokens and blocks of rows of 2: a hit of 16 restores h of token 16."""
    case = cases()["decay"]
    cache, text = make(case, block_size=2, interval=4), [(5 * i) % 16 for i in range(20)]
    state, last, at_16 = empty(case), None, None
    for number in range(1, 20):
        state, _ = sc.step(case.backend, case.params, state, [text[number - 1], 0])
        if cache.should_checkpoint(number, last):
            cache.insert(state, text[:number])
            last = number // 2
        if number == 16:
            at_16 = sc.capture(state)
    assert lengths(cache) == [8, 16]
    restored = cache.restore(empty(case), 0, cache.lookup(text[:19]))
    assert sc.equal(case.backend, *(sc.take_rows(case.backend, tree, [0]) for tree in (restored, at_16)))


@by_toy
def test_f21_branches_share_nothing(name):
    """F21: two branches from one state, each in place; the kept state is as it was."""
    case = cases()[name]
    cache = inserted(case, make(case), [1, 2, 3])
    hit = cache.lookup([1, 2, 3, 4])
    branches = [cache.restore(empty(case), 0, hit, donate=True) for _ in range(2)]
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((branches, cache._pool._pool))]
    assert len(set(pointers)) == len(pointers)
    for token, branch in zip((4, 5), branches, strict=True):
        branch, _ = sc.step(case.backend, case.params, branch, [token, 0], donate=True)
        wanted, _ = sc.step(case.backend, case.params, cold(case, [1, 2, 3]), [token, 0])
        assert sc.equal(case.backend, branch, wanted)
        if "digit" in name:
            assert branch["conv"][0].tolist() == [2, 3, token]
    assert_row(case, cache.restore(empty(case), 1, hit), 1, [1, 2, 3])


def test_f33_positions_start_anew_with_each_text():
    """F33: no entry is longer than what its own text was fed, and its slot says the same."""
    case = cases()["digit"]
    cache = inserted(case, make(case), [1, 2, 3], [4, 5])
    for entry in cache._tree:
        assert cache._pool.load(entry.value.handle)["pos"].tolist() == [entry.num_tokens]
    assert lengths(cache) == [2, 3]


def test_f42_buffers_may_be_used_again_at_once():
    """F42, SB06: the tokens' buffer is overwritten and the state donated right after an insert."""
    case = cases()["decay"]
    cache, tokens = make(case), np.array([1, 2, 3, 4])
    state = cold(case, tokens)
    assert cache.insert(state, tokens)
    tokens[:] = 9
    for _ in range(3):
        state, _ = sc.step(case.backend, case.params, state, [9, 9], donate=True)
    hit = cache.lookup([1, 2, 3, 4, 5])
    inserted(case, cache, [9, 9, 9])
    assert_row(case, cache.restore(empty(case), 0, hit), 0, [1, 2, 3, 4])


def test_f37_a_miss_restores_an_empty_sequence():
    """F37, F40: whatever the row held, a miss gives it back as `init` makes it."""
    for name in ("digit", "decay"):
        case = cases()[name]
        cache = make(case)
        hit = cache.lookup([1, 2])
        state = cache.restore(cold(case, [7, 8, 9], 1), 1, hit)
        assert_row(case, state, 1, [])
        assert_row(case, feed(case, state, [1, 2], 1)[0], 1, [1, 2])


# Plans, eviction, leases.


def test_s36_when_a_checkpoint_is_due():
    """S36: at a multiple of the interval in full blocks, once, and never past the capacity."""
    case = cases()["digit"]
    cache = make(case, block_size=4, interval=2)
    assert [n for n in range(30) if cache.should_checkpoint(n)] == [8, 9, 10, 11, 16, 17, 18, 19, 24]
    assert not cache.should_checkpoint(9, last=2) and cache.should_checkpoint(16, last=2)
    assert not cache.should_checkpoint(0, last=None)
    default = sc.PrefixCache(case.backend, None, capacity=1000)
    fired, last = [], None
    for number in range(0, 300, 3):  # three tokens a turn step over boundaries
        if default.should_checkpoint(number, last):
            fired.append(number)
            last = number // 16
    assert fired == [66, 129, 192, 258]
    assert default.occupancy() == (0, 16)


@by_toy
def test_s37_sb03_a_checkpoint_is_registered_at_the_true_count(name):
    """S37, SB03: a state of 5 tokens with blocks of 4 is the state of 5, and 4 tokens do not find it."""
    case, tokens = cases()[name], [1, 2, 3, 4, 5]
    cache = make(case, block_size=4, interval=1)
    assert cache.should_checkpoint(5)
    inserted(case, cache, tokens)
    assert lengths(cache) == [5]
    assert cache.lookup(tokens[:4], max_tokens=4).num_tokens == 0
    hit = cache.lookup([*tokens, 6])
    assert hit.num_tokens == 5
    assert_row(case, feed(case, cache.restore(empty(case), 0, hit), [6])[0], 0, [*tokens, 6])


def test_s39_a_full_cache_never_fails_a_request():
    """S39: one entry makes room; if all are leased nothing is kept, and nothing is raised."""
    case = cases()["digit"]
    cache = inserted(case, make(case, num_slots=2), [1], [2], [3])
    assert (cache.occupancy(), cache.stats.evictions) == ((2, 2), 1)
    hits = [cache.lookup([token, 0]) for token in (2, 3)]
    with cache.lease(hits[0]), cache.lease(hits[1]):
        before = cache.stats
        assert not cache.insert(cold(case, [4]), [4])
        assert not cache.evict()
        assert (cache.stats, cache.occupancy(), len(cache)) == (before, (2, 2), 2)
        with pytest.raises(sc.LifecycleError, match=r"\[1, 1\] tokens are leased"):
            cache.clear()
        assert len(cache) == 2
    assert cache.insert(cold(case, [4]), [4])
    none = make(case, num_slots=0)
    assert not none.insert(cold(case, [4]), [4]) and none.lookup([4, 4]).num_tokens == 0


@pytest.mark.parametrize("part", ["claim", "save"])
def test_f23_an_insert_that_fails_leaves_no_slot_taken(part, monkeypatch):
    """F23: a copy that fails takes its slot back, and nobody finds what was never saved."""
    case = cases()["digit"]
    cache, state = inserted(case, make(case), [1, 2]), cold(case, [1, 2, 3])

    def fails(*args):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(cache._pool, part, fails)
        cache.insert(state, [1, 2, 3])
    assert (cache.occupancy(), lengths(cache), cache._blocks.nbytes) == ((1, 4), [2], 8)
    assert cache.insert(state, [1, 2, 3])


def test_s40_s41_f39_occupancy_and_clearing():
    """S40, S41, F39: used and all; None for none; back to nothing when cleared."""
    case = cases()["digit"]
    cache = inserted(case, make(case, num_slots=3), [1, 2], [3])
    assert cache.occupancy() == (2, 3) and make(case, num_slots=0).occupancy() is None
    hit = cache.lookup([1, 2, 3])
    cache.clear()
    assert (cache.occupancy(), len(cache), cache._blocks.nbytes) == ((0, 3), 0, 0)
    state = empty(case)
    refuses(sc.StateConsumedError, lambda: cache.restore(state, 0, hit), state, "2 tokens was evicted", "lease")
    refuses(sc.StateConsumedError, lambda: cache.lease(hit), state, "evicted")
    inserted(case, cache, [8, 9])  # takes the slot that the stale hit had
    refuses(sc.StateConsumedError, lambda: cache.restore(state, 0, hit), state, "evicted")
    other = make(case)
    refuses(sc.IdentityError, lambda: other.restore(state, 0, hit), state, "another cache")
    refuses(sc.IdentityError, lambda: other.lease(hit), state, "another cache")


def test_s42_s43_sb04_only_the_winner_is_refreshed():
    """S42, S43, SB04: of nested prefixes a lookup refreshes the deepest alone; the other is the next to go."""
    case = cases()["digit"]
    cache = inserted(case, make(case, num_slots=3), [1, 2], [1, 2, 3, 4], [7])
    for _ in range(5):
        assert cache.lookup([1, 2, 3, 4, 5]).num_tokens == 4
    inserted(case, cache, [8])
    assert cache.lookup([1, 2, 0]).num_tokens == 0 and cache.lookup([1, 2, 3, 4, 5]).num_tokens == 4
    inserted(case, cache, [9])  # many hits pin nothing: [7] has gone before what was used later
    assert sorted(cache.lookup([token, 0]).num_tokens for token in (7, 8, 9)) == [0, 1, 1]


def test_sb38_a_leased_prompt_outlives_its_decode_checkpoints():
    """SB38: checkpoints made while decoding do not push out the prompt that they go on from."""
    case, prompt = cases()["digit"], [1, 2, 3]
    cache = inserted(case, make(case, num_slots=2), prompt)
    lease = cache.lease(cache.lookup(prompt, max_tokens=3))
    for number in range(1, 5):
        inserted(case, cache, prompt + [5] * number)
    assert lengths(cache) == [3, 7] and cache.lookup([*prompt, 9]).num_tokens == 3
    lease.release()
    lease.release()
    cache.lookup([*prompt, 5, 5, 5, 5, 5])
    inserted(case, cache, [9])
    assert lengths(cache) == [1, 7]


def test_statistics_and_bytes():
    case = cases()["digit"]
    cache = inserted(case, make(case, num_slots=2), [1, 2, 3], [4, 5])
    cache.restore(empty(case), 0, cache.lookup([1, 2, 3, 4]))
    cache.restore(empty(case), 0, cache.lookup([9, 9]))
    inserted(case, cache, [6])
    assert cache.stats == store.CacheStats(hits=1, misses=1, inserts=3, evictions=1, reused_tokens=3)
    assert cache.nbytes == cache._pool.nbytes + 4 * 4
    assert repr(cache) == "PrefixCache(digit, prefixes of [1, 3] tokens, 2 slots)"


# Donation, compiles, other backends.


def test_a_restore_in_place_donates_all_it_writes():
    """One compile a batch, whatever the row and the length; everything written is in place."""
    backend = testing.digit_backend()
    cache = sc.PrefixCache(backend, None, capacity=CAPACITY, num_slots=4, block_size=2)
    state = backend.init(None, batch=2, capacity=CAPACITY)
    for length in range(1, 5):
        fed, _ = sc.extend(backend, None, state, np.ones((2, 4), int), num_valid=length)
        cache.insert(fed, [1] * length, length % 2)
    for length in range(1, 5):
        state = cache.restore(state, length % 2, cache.lookup([1] * (length + 1)), donate=True)
    assert state["h"].tolist() == [1111, 111]
    key, run = next((key, run) for key, run in backend.compiled.items() if key[:2] == ("write_row", True))
    assert run._cache_size() == backend.compiled[("rows_read",)]._cache_size() == 1
    leaves = [backend.layout.leaves(state)[i] for i in key[2]]
    new = {**cache._blocks.planes(None), **cache._pool.planes(None)}
    lowered = run.lower(leaves, np.zeros(1, np.int32), [new[i] for i in key[2]])
    assert lowered.compile().memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in leaves)
    assert len(leaves) == len(backend.layout.planes)


def test_without_donation_the_state_stays_usable():
    case = cases()["decay"]
    cache = inserted(case, make(case), [1, 2, 3])
    state = cold(case, [5, 6])
    before = host(state)
    restored = cache.restore(state, 1, cache.lookup([1, 2, 3, 4]))
    assert_bits(before, state)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state, restored))]
    assert len(set(pointers)) == len(pointers)


def test_axes_anywhere_and_narrow_dtypes():
    """Rows on the last axis, the batch in the middle, bfloat16: the bits come back."""

    def init(params, batch, capacity):
        return {"kv": jnp.zeros((2, batch, 3, capacity), jnp.bfloat16), "pos": jnp.zeros(batch, jnp.int32)}

    def step(params, state, tokens):
        value = jnp.sin(tokens + state["pos"] / 7.0).astype(jnp.bfloat16)
        rows = jnp.arange(len(tokens))
        kv = state["kv"].at[:, rows, :, state["pos"]].set(value[:, None, None], mode="drop")
        return {"kv": kv, "pos": state["pos"] + 1}, jnp.zeros((len(tokens), 10))

    backend = sc.Backend(
        name="attention", init=init, step=step, planes={"kv": pl.append(axis=-1, batch_axis=1), "pos": pl.position()}
    )
    cache = sc.PrefixCache(backend, None, capacity=8, num_slots=2, block_size=2)
    state, _ = sc.extend(backend, None, backend.init(None, batch=2, capacity=8), [[1, 2, 3], [4, 5, 6]])
    assert cache.insert(state, [4, 5, 6], 1)
    restored = cache.restore(backend.init(None, batch=3, capacity=8), 2, cache.lookup([4, 5, 6, 7]))
    assert sc.equal(backend, sc.take_rows(backend, restored, [2]), sc.take_rows(backend, state, [1]))
    assert restored["pos"].tolist() == [0, 0, 3]


def test_rows_without_bytes_and_opaque_planes_are_refused():
    def backend(kind):
        return sc.Backend(
            name="keys",
            init=lambda params, batch, capacity: {
                "keys": jax.random.split(jax.random.key(0), (batch, capacity)),
                "pos": jnp.zeros(batch, jnp.int32),
            },
            step=lambda params, state, tokens: (state, jnp.zeros((tokens.shape[0], 2))),
            planes={"keys": kind, "pos": pl.position()},
        )

    for kind, words in ((pl.append(axis=1), "`keys`.*no bytes"), (pl.opaque(), "`keys`.*opaque")):
        with pytest.raises(sc.UnsupportedError, match=words):
            sc.PrefixCache(backend(kind), None, capacity=4)


@pytest.mark.slow
def test_the_embedded_model_goes_on_from_a_hit(tiny):
    """S45: Mamba-2, sliding and full attention in one state; restored bits, and the tokens of a cold start."""
    backend, params, text = tiny.backend, tiny.params, list(b"HAMLET.\nTo be, or not")
    cache = sc.PrefixCache(backend, params, capacity=64, num_slots=2)
    state, _ = sc.extend(backend, params, tiny.backend.init(params, batch=1, capacity=64), [text[:16]])
    assert cache.insert(state, text[:16])
    hit = cache.lookup(text)
    assert hit.num_tokens == 16
    restored = cache.restore(tiny.backend.init(params, batch=1, capacity=64), 0, hit, donate=True)
    assert sc.equal(backend, restored, state)
    for token in text[16:]:
        state, wanted = sc.step(backend, params, state, [token], donate=True)
        restored, logits = sc.step(backend, params, restored, [token], donate=True)
    np.testing.assert_array_equal(np.array(logits), np.array(wanted))
