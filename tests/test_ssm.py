"""Seed 2 on values: checkpoint, verify, rollback, commit, ring, boundary, async."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, assert_bits, cases, host, refuses
from hypothesis import given
from hypothesis import strategies as st
from sequences import (
    PROMPT,
    WINDOW,
    attention_backend,
    begun,
    by_strategy,
    cached,
    opaque_backend,
    same,
    start,
    stepped,
)

import statecore as sc
from statecore import ssm, testing
from statecore.testing import strategies

# Checkpoint, rollback, commit.


def test_s01_a_checkpoint_copies_nothing_and_changes_nothing():
    """S01, S49: it refers to the very planes; attention rows go back by their length."""
    seq = start()
    before = host(seq.state)
    pinned = ssm.checkpoint(seq)
    assert pinned.state is seq.state
    leaves = seq.backend.layout.leaves(seq.state)
    kinds = {seq.backend.layout.planes[i].kind for i in pinned.checkpoint.planes}
    assert kinds == {"position", "shift", "recurrent"}
    assert all(leaves[i] is plane for i, plane in pinned.checkpoint.planes.items())
    assert_bits(before, seq.state)


def test_s02_a_second_checkpoint_replaces_the_first():
    """S02: rollback goes to the later one."""
    seq = ssm.checkpoint(start())
    seq, _ = ssm.step(None, seq, [8, 9])
    seq = ssm.checkpoint(seq)
    seq, _ = ssm.step(None, seq, [7, 7])
    same("digit", ssm.rollback(seq, 0), [[1, 2, 3, 8], [3, 2, 1, 9]])


@by_strategy
def test_s03_rollback_to_0_is_the_checkpoint(name, strategy):
    """S03, S50: after plain steps and after a verify, again and again, bit for bit."""
    case = cases()[name]
    seq = ssm.checkpoint(start(name, strategy))
    later = seq
    for token in (4, 5):
        later, _ = ssm.step(case.params, later, [token, token])
    for _ in range(2):
        back = ssm.rollback(later, 0)
        assert sc.equal(case.backend, back.state, seq.state)
        opened, _ = ssm.verify(case.params, back, WINDOW)
        later = ssm.rollback(opened, 0)
        assert sc.equal(case.backend, later.state, seq.state)


@by_strategy
@pytest.mark.parametrize("counts", [[0, 4], [1, 1], [2, 3], [4, 0]])
def test_s04_rollback_is_the_rows_fed(name, strategy, counts):
    """S04, S07, S55, F07: rows differ by sequence; all K rows are allowed, since a verify leaves the state alone."""
    seq = ssm.checkpoint(start(name, strategy))
    opened, _ = ssm.verify(cases()[name].params, seq, WINDOW)
    rolled = ssm.rollback(opened, counts)
    same(name, rolled, [prompt + row[:n] for prompt, row, n in zip(PROMPT, WINDOW, counts, strict=True)])


@by_strategy
def test_s05_rows_that_were_not_verified_are_refused(name, strategy):
    """S05, SB16: nothing has moved, and the window is still open."""
    seq = ssm.checkpoint(start(name, strategy))
    opened, _ = ssm.verify(cases()[name].params, seq, WINDOW, num_valid=[4, 2])
    for counts in ([5, 0], [0, 3], -1):
        refuses(sc.RollbackError, lambda counts=counts: ssm.rollback(opened, counts), opened.state)
    same(name, ssm.rollback(opened, [4, 2]), [PROMPT[0] + WINDOW[0], PROMPT[1] + WINDOW[1][:2]])


def test_s06_rollback_without_a_checkpoint_is_refused():
    """S06, SB22: absent is an error, not a silent nothing."""
    seq = start()
    refuses(sc.RollbackError, lambda: ssm.rollback(seq, 0), seq.state, "no checkpoint")
    opened, _ = ssm.verify(None, seq, WINDOW)
    refuses(sc.RollbackError, lambda: ssm.rollback(opened, 1), opened.state, "no checkpoint")


@by_strategy
@pytest.mark.parametrize("counts", [1, 4, [1, 4], [3, 2]])
def test_s08_s09_commits_are_steps(name, strategy, counts):
    """S08, S09, S12, S16, S17, S18: the live state is the committed prefix, all rows included."""
    seq = start(name, strategy)
    opened, logits = ssm.verify(cases()[name].params, seq, WINDOW)
    assert logits.shape[:2] == (2, 4)
    done = ssm.commit_accepted_prefix(opened, counts, 4)
    rows = np.broadcast_to(counts, 2)
    same(name, done, [prompt + row[:n] for prompt, row, n in zip(PROMPT, WINDOW, rows, strict=True)])
    assert done.lengths.tolist() == (3 + rows).tolist()


def test_s10_counts_that_are_not_rows_have_distinct_errors():
    """S10, S17, SB15: 0 rows, more than the width, a draft count as k, a wrong k."""
    opened, _ = ssm.verify(None, start(), WINDOW)
    messages = set()
    for counts, k, words in (
        (0, 4, "anchor"),
        ([2, 0], 4, "anchor"),
        (5, 4, "bonus"),
        (2, 3, "drafts"),
        (2, 7, "4 rows wide"),
    ):
        call = lambda counts=counts, k=k: ssm.commit_accepted_prefix(opened, counts, k)  # noqa: E731
        refuses(sc.RollbackError, call, opened.state, words)
        messages.add(words)
    same("digit", ssm.commit_accepted_prefix(opened, 4, 4), [PROMPT[0] + WINDOW[0], PROMPT[1] + WINDOW[1]])


@by_strategy
def test_s11_commit_and_rollback_agree(name, strategy):
    """S11: the same live state; a commit leaves the checkpoint as it was."""
    case = cases()[name]
    seq = ssm.checkpoint(start(name, strategy))
    first, _ = ssm.verify(case.params, seq, WINDOW)
    second, _ = ssm.verify(case.params, seq, WINDOW)
    committed, rolled = ssm.commit_accepted_prefix(first, 2, 4), ssm.rollback(second, 2)
    assert sc.equal(case.backend, committed.state, rolled.state)
    assert committed.checkpoint is seq.checkpoint
    assert sc.equal(case.backend, ssm.rollback(committed, 0).state, seq.state)


def test_s12_whatever_follows_a_commit_is_right():
    """S12, SB01: plain steps, another checkpoint and another window after a partial accept."""
    opened, _ = ssm.verify(None, start(), WINDOW)
    seq = ssm.commit_accepted_prefix(opened, [2, 1], 4)
    seq, _ = ssm.step(None, seq, [9, 9])
    seq = ssm.checkpoint(seq)
    opened, _ = ssm.verify(None, seq, [[1, 1], [2, 2]])
    same("digit", ssm.rollback(opened, 1), [[1, 2, 3, 4, 5, 9, 1], [3, 2, 1, 1, 9, 2]])


def test_s46_a_window_serves_once():
    """S46, S56, SB12, F10: neither the resolved sequence nor an older copy resolves it again."""
    seq = ssm.checkpoint(start())
    opened, _ = ssm.verify(None, seq, WINDOW)
    ssm.rollback(opened, 1)
    for call in (lambda: ssm.rollback(opened, 1), lambda: ssm.commit_accepted_prefix(opened, 1, 4)):
        refuses(sc.LifecycleError, call, seq.state, "serves once")
    refuses(sc.LifecycleError, lambda: ssm.commit_accepted_prefix(seq, 1, 4), seq.state, "No window")
    refuses(sc.LifecycleError, lambda: ssm.rollback(seq, 1), seq.state, "no window is open")


def test_f26_an_open_window_refuses_everything_else():
    """F26: only rollback and commit; nothing half verified can be saved or read on."""
    opened, _ = ssm.verify(None, ssm.checkpoint(start()), WINDOW)
    for call in (
        lambda: ssm.step(None, opened, [1, 2]),
        lambda: ssm.extend(None, opened, WINDOW),
        lambda: ssm.verify(None, opened, WINDOW),
        lambda: ssm.checkpoint(opened),
        lambda: ssm.start_checkpoint(opened),
        lambda: ssm.save_ring(opened, 0),
        lambda: ssm.restore_ring(opened, 0),
        lambda: ssm.take_rows(opened, [0]),
        lambda: ssm.check_finite(opened),
        lambda: ssm.plan_boundary_rollback(opened, np.arange(10) == 0, num_prompt=1, min_drop=1),
        lambda: ssm.apply_boundary_rollback(opened, ssm.Decision()),
    ):
        refuses(sc.LifecycleError, call, opened.state, "window is open")


def test_a_checkpoint_older_than_the_window():
    """Rows of a window are not rows after an older checkpoint; 0 rows are the checkpoint."""
    seq = ssm.checkpoint(start())
    seq, _ = ssm.step(None, seq, [8, 9])
    opened, _ = ssm.verify(None, seq, WINDOW)
    refuses(sc.RollbackError, lambda: ssm.rollback(opened, 1), opened.state, "began at")
    same("digit", ssm.rollback(opened, 0), PROMPT)


@by_strategy
def test_checkpoints_survive_donation(name, strategy):
    """What a checkpoint refers to is not donated; everything else is."""
    case = cases()[name]
    seq = ssm.checkpoint(start(name, strategy))
    before = {i: np.array(plane) for i, plane in seq.checkpoint.planes.items()}
    live = seq
    for token in (4, 5):
        live, _ = ssm.step(case.params, live, [token, token], donate=True)
    opened, _ = ssm.verify(case.params, live, WINDOW)
    live = ssm.commit_accepted_prefix(opened, 2, 4, donate=True)
    for i, plane in seq.checkpoint.planes.items():
        np.testing.assert_array_equal(np.array(plane), before[i])
    same(name, ssm.rollback(live, 0), PROMPT)


# What can go back, and what cannot.


def test_s19_without_recurrent_planes_everything_is_the_length():
    """S19, SB31: no SSM layers; checkpoint and rollback work all the same."""
    seq = begun(attention_backend())
    assert not ssm.has_ssm_layers(seq) and ssm.has_ssm_layers(start())
    opened, _ = ssm.verify(None, ssm.checkpoint(seq), [[4, 5, 6]])
    assert ssm.rollback(opened, 2).state["kv"][0, :5].tolist() == [1, 2, 3, 4, 5]


def test_sb36_a_crop_is_no_rollback_of_a_hybrid():
    """SB36: the length alone leaves what every token overwrote; a rollback takes all planes, and none crops."""
    seq = start()
    later, _ = ssm.step(None, ssm.checkpoint(seq), [8, 9])
    cropped = seq.backend.layout.with_lengths(later.state, seq.state["pos"])
    assert set(sc.differing_planes(seq.backend, cropped, seq.state)) == {"h", "conv"}
    assert sc.equal(seq.backend, ssm.rollback(later, 0).state, seq.state)
    bare, _ = ssm.step(None, seq, [8, 9])
    refuses(sc.RollbackError, lambda: ssm.rollback(bare, 0), bare.state, "no checkpoint")


def test_s20_planes_that_nothing_undoes_are_named():
    """S20: before anything moves."""
    seq = ssm.checkpoint(begun(opaque_backend()))
    assert ssm.rollback_unsupported(seq) == ("seen",) and ssm.rollback_unsupported(start()) == ()
    opened, _ = ssm.verify(None, seq, [[4, 5]])
    for call in (lambda: ssm.rollback(opened, 0), lambda: ssm.rollback(opened, 1)):
        refuses(sc.RollbackError, call, opened.state, "`seen`")
    later = ssm.commit_accepted_prefix(opened, 2, 2)
    refuses(sc.RollbackError, lambda: ssm.rollback(later, 0), later.state, "`seen`")


# Strategies.


def test_strategies_and_their_costs():
    """S32, S48, F11: bytes from the arrays; a budget that none fits has all three costs."""
    own = cases()["digit-own"].backend.geometry(None, batch=2, capacity=CAPACITY)
    derived = cases()["digit"].backend.geometry(None, batch=2, capacity=CAPACITY)
    assert ssm.plan(own, 4, None).strategy == "replay"
    assert ssm.plan(derived, 4, None).costs == {"replay": None, "select": 4 * 2 * (4 + 3 * 4), "rerun": 4 * 2 * 4}
    assert ssm.plan(derived, 4, 127).strategy == "rerun"
    with pytest.raises(sc.BudgetError, match="impossible.*128.*32"):
        ssm.plan(derived, 4, 31)
    opened, _ = ssm.verify(None, start("digit-own", "replay"), WINDOW)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(opened.opened.window.trace))
    assert kept == ssm.plan(own, 4, None).num_bytes


@pytest.mark.parametrize("name", ["digit-own", "decay-own"])
def test_sb11_a_donating_verify_copies_no_recurrent_plane(name):
    """SB11, S49: the window's state has the very buffers; what is kept are the inputs, as many bytes as planned."""
    case = cases()[name]
    seq = start(name, "replay")
    layout = case.backend.layout
    kept = layout.indices("position", "shift", "recurrent")
    before = [layout.leaves(seq.state)[i].unsafe_buffer_pointer() for i in kept]
    opened, _ = ssm.verify(case.params, seq, WINDOW, donate=True)
    assert [layout.leaves(opened.state)[i].unsafe_buffer_pointer() for i in kept] == before
    geometry = case.backend.geometry(case.params, batch=2, capacity=CAPACITY)
    trace = sum(leaf.nbytes for leaf in jax.tree.leaves(opened.opened.window.trace))
    assert trace == ssm.plan(geometry, 4, None).num_bytes
    same(name, ssm.commit_accepted_prefix(opened, 2, 4, donate=True), [PROMPT[0] + [4, 5], PROMPT[1] + [1, 2]])


def test_strategies_that_cannot_be_followed_are_refused():
    state = cases()["digit"].backend.init(None, capacity=8)
    for strategy in ("replay", "guess"):
        with pytest.raises(sc.UnsupportedError, match=strategy):
            ssm.begin(cases()["digit"].backend, state, strategy=strategy)
    with pytest.raises(sc.GeometryError, match="tokens="):
        ssm.begin(cases()["digit"].backend, start().state)


# Asynchronous variants, and the finite guard.


@by_strategy
def test_s13_s14_started_and_synced_is_the_same(name, strategy):
    """S13, S14, S15: live and checkpoint are the state after the rows, bit for bit as synchronously."""
    case = cases()[name]
    seq = ssm.start_checkpoint(start(name, strategy))
    first, _ = ssm.verify(case.params, seq, WINDOW)
    second, _ = ssm.verify(case.params, seq, WINDOW)
    started = ssm.sync(ssm.start_rollback_and_checkpoint(first, [2, 1]))
    done = ssm.checkpoint(ssm.rollback(second, [2, 1]))
    assert sc.equal(case.backend, started.state, done.state)
    later, _ = ssm.step(case.params, started, [1, 2])
    assert sc.equal(case.backend, ssm.rollback(later, 0).state, done.state)
    assert ssm.sync(ssm.sync(started)) is ssm.sync(started)


def test_s53_a_state_that_is_not_finite_is_refused():
    """S53, SB23: named, not clamped."""
    case = cases()["decay"]
    seq = start("decay")
    assert ssm.check_finite(seq) is seq
    for value in (jnp.nan, jnp.inf):
        broken = seq.state | {"h": seq.state["h"].at[1, 0, 2].set(value)}
        wrong = ssm.begin(case.backend, broken, tokens=PROMPT, finite_every=2)
        refuses(sc.NonFiniteError, lambda wrong=wrong: ssm.check_finite(wrong), seq.state, "`h`")
        refuses(sc.NonFiniteError, lambda wrong=wrong: ssm.extend(case.params, wrong, [[1], [2]]), seq.state, "`h`")
        refuses(sc.NonFiniteError, lambda wrong=wrong: ssm.step(case.params, wrong, [1, 2]), seq.state, "[4, 4]")
    unchecked = ssm.begin(case.backend, broken, tokens=PROMPT)
    ssm.step(case.params, unchecked, [1, 2])


# The law, over generated cases.


@by_strategy
@given(data=st.data())
def test_s54_rounds_of_speculation_are_plain_decoding(name, strategy, data):
    """S54, S34: rows accept different counts, padding rows none, round after round."""
    case = cases()[name]
    seq, tokens = start(name, strategy), [list(row) for row in PROMPT]
    for _ in range(3):
        window = data.draw(strategies.windows(vocab_size=case.vocab_size, batch=2, width=4))
        seq = ssm.checkpoint(seq)
        opened, _ = ssm.verify(case.params, seq, window.tokens, num_valid=window.num_valid)
        seq = ssm.rollback(opened, window.num_accepted)
        for row, kept in enumerate(window.num_accepted):
            tokens[row] += window.tokens[row, :kept].tolist()
        same(name, seq, tokens)


# Checkpoints in a prefix cache.


def test_s36_s37_checkpoints_while_decoding():
    """S36, S37, S40, SB03: due by the tokens held, once a boundary, registered at the true count."""
    cache = cached(num_slots=8, block_size=2, interval=2)
    assert ssm.snapshot_occupancy(cache) == (0, 8)
    seq = start(prompt=[[1, 2, 3], [1, 2, 3]])
    kept = []
    for token in range(6):
        opened, _ = ssm.verify(None, seq, [[token, token], [token, token]])
        seq = ssm.marconi_checkpoint(ssm.commit_accepted_prefix(opened, [2, 1], 2), cache)
        kept.append(ssm.snapshot_occupancy(cache)[0])
    # Lengths 5 7 9 11 13 15 and 4 5 6 7 8 9: blocks 2 3 4 5 6 7 and 2 2 3 3 4 4, due at 2, 4 and 6.
    assert kept == [2, 2, 3, 3, 5, 5]
    hit = cache.lookup([*seq.tokens[0][:5].tolist(), 9])
    assert hit.num_tokens == 5  # not floored to 4
    case = cases()["digit"]
    restored = cache.restore(case.backend.init(None, batch=1, capacity=CAPACITY), 0, hit)
    testing.assert_same(case.backend, restored, stepped("digit", [seq.tokens[0][:5].tolist()]), law="S37", case="5")


def test_s38_s39_only_committed_tokens_and_never_a_failure():
    """S38, S39, F26: an open window is refused; a cache without room is no error."""
    opened, _ = ssm.verify(None, start(), WINDOW)
    refuses(sc.LifecycleError, lambda: ssm.marconi_checkpoint(opened, cached()), opened.state, "committed")
    seq = ssm.commit_accepted_prefix(opened, 4, 4)
    none = cached(num_slots=0, block_size=1, interval=1)
    assert ssm.marconi_checkpoint(seq, none).lengths.tolist() == [7, 7]
    assert ssm.snapshot_occupancy(none) is None


# What goes back drops what was kept of the tokens that are gone.


def test_a_checkpoint_does_not_survive_going_back_past_it():
    """F10: otherwise a rollback would jump into another history."""
    seq = ssm.save_ring(start(prompt=[[1, 2]]))
    seq, _ = ssm.extend(None, seq, [[3, 4]])
    seq = ssm.restore_ring(ssm.checkpoint(seq), 0)
    refuses(sc.RollbackError, lambda: ssm.rollback(seq, 0), seq.state, "no checkpoint")
    seq, _ = ssm.extend(None, seq, [[7, 8]])
    refuses(sc.RollbackError, lambda: ssm.rollback(seq, 0), seq.state, "no checkpoint")
    same("digit", seq, [[1, 2, 7, 8]])


def test_tokens_and_slots_are_whole_numbers():
    backend = cases()["digit"].backend
    state, _ = sc.extend(backend, None, backend.init(None, capacity=8), [[1, 2]])
    for tokens in ([[1.7, 2.9]], [[-1, 2]], [[[1, 2], [3, 4]]], [[2**40, 1]], ["ab"]):
        with pytest.raises(sc.GeometryError):
            ssm.begin(backend, state, tokens=tokens)
    for slots in (-1, 1.5, "auto", True):
        with pytest.raises(sc.GeometryError, match="ring_slots"):
            ssm.begin(backend, state, tokens=[[1, 2]], ring_slots=slots)
    seq = ssm.begin(backend, state, tokens=[[1, 2]], ring_slots=2)
    for slot in (0.5, True, "0"):
        with pytest.raises(sc.GeometryError, match="slot"):
            ssm.save_ring(seq, slot)
    for k in (0, -3, 1.5):
        with pytest.raises(sc.GeometryError, match="k must"):
            ssm.plan(backend.geometry(None, capacity=8), k, None)


def test_a_failed_rollback_leaves_the_window_open():
    """The checkpoint's planes were donated elsewhere; the window can still be committed."""
    begun_at = start()
    pinned = ssm.checkpoint(begun_at)
    moved, _ = ssm.step(None, pinned, [2, 2])
    opened, _ = ssm.verify(None, moved, WINDOW)
    ssm.step(None, begun_at, [9, 9], donate=True)
    refuses(sc.StateConsumedError, lambda: ssm.rollback(opened, 0), opened.state)
    same("digit", ssm.commit_accepted_prefix(opened, 1, 4), [PROMPT[0] + [2, 4], PROMPT[1] + [2, 1]])


def test_started_work_may_be_donated_before_it_is_synced():
    seq, _ = ssm.verify(None, ssm.checkpoint(start()), WINDOW)
    seq = ssm.start_rollback_and_checkpoint(seq, 2)
    seq, _ = ssm.step(None, seq, [9, 9], donate=True)
    same("digit", ssm.sync(seq), [PROMPT[0] + [4, 5, 9], PROMPT[1] + [1, 2, 9]])


def test_consumed_sequences_say_so():
    seq = start()
    ssm.step(None, seq, [1, 2], donate=True)
    for call in (ssm.checkpoint, ssm.save_ring, ssm.check_finite, lambda s: ssm.step(None, s, [1, 2])):
        with pytest.raises(sc.StateConsumedError):
            call(seq)


def test_sequences_do_not_run_inside_a_trace():
    seq = start()
    with pytest.raises(sc.UnsupportedError, match="trace"):
        jax.jit(lambda t: ssm.step(None, seq, t)[1])(jnp.array([1, 2]))


def test_checkpoints_are_due_again_after_a_rollback():
    """S36: and a cache of another backend is refused."""
    cache = cached(block_size=2, interval=1)
    seq = ssm.checkpoint(start(prompt=[[1, 2]]))
    ahead, _ = ssm.extend(None, seq, [[3, 4]])
    other, _ = ssm.extend(None, ssm.rollback(ssm.marconi_checkpoint(ahead, cache), 0), [[7, 8]])
    ssm.marconi_checkpoint(other, cache)
    assert cache.lookup([1, 2, 7, 8, 9]).num_tokens == 4
    with pytest.raises(sc.IdentityError):
        ssm.marconi_checkpoint(seq, cached("digit-own"))
