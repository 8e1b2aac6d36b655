"""What a sequence refuses: NaN, foreign windows, parameters that moved, input of another make."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CAPACITY, assert_bits, cases, host, refuses
from sequences import PROMPT, WINDOW, by_strategy, same, start

import statecore as sc
from statecore import ssm

# The finite guard.


def guarded(strategy="select", *, every=3, bad_at=None):
    """A sequence of the decay model whose state turns to NaN with token 15, if `bad_at` says so."""
    case = cases()["decay-own" if strategy == "replay" else "decay"]
    state = case.backend.init(case.params, batch=2, capacity=CAPACITY)
    seq = ssm.begin(case.backend, state, strategy=strategy, finite_every=every)
    seq, _ = ssm.extend(case.params, seq, PROMPT)
    params = case.params
    if bad_at is not None:
        params = params | {"weight": params["weight"].at[1, 2].set(bad_at)}
    return params, seq


def take(params, seq, how, donate):
    if how == "step":
        return ssm.step(params, seq, [1, 2], donate=donate)[0]
    if how == "extend":
        return ssm.extend(params, seq, [[1, 1, 1], [2, 2, 2]], donate=donate)[0]
    opened, _ = ssm.verify(params, ssm.checkpoint(seq) if how == "rollback" else seq, WINDOW)
    if how == "rollback":
        return ssm.rollback(opened, 4, donate=donate)
    return ssm.commit_accepted_prefix(opened, [4, 2], 4, donate=donate)


@pytest.mark.parametrize("strategy", ["select", "rerun", "replay"])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_s53_sb23_a_speculative_decoder_is_guarded(strategy, value):
    """S53, SB23: a commit and a rollback of enough rows are checked; the window is still open, and all is as it was."""
    params, seq = guarded(strategy, every=4, bad_at=value)
    pinned = ssm.checkpoint(seq)
    opened, _ = ssm.verify(params, pinned, WINDOW)
    for resolve in (
        lambda: ssm.commit_accepted_prefix(opened, [4, 1], 4, donate=True),
        lambda: ssm.rollback(opened, 4, donate=True),
    ):
        refuses(sc.NonFiniteError, resolve, opened.state, "`h`", "7")
    assert sc.equal(seq.backend, ssm.rollback(opened, 0).state, seq.state)


def test_s53_the_guard_counts_tokens_since_its_last_check():
    """S53: commits that step over every multiple of N are checked all the same, and N - 1 tokens are not."""
    params, seq = guarded(every=4, bad_at=jnp.nan)
    assert seq.unchecked == 0
    opened, _ = ssm.verify(params, seq, WINDOW)
    seq = ssm.commit_accepted_prefix(opened, [3, 3], 4)  # 3 tokens since: not yet
    assert seq.unchecked == 3 and np.isnan(np.array(seq.state["h"])).any()
    opened, _ = ssm.verify(params, seq, WINDOW)
    refuses(sc.NonFiniteError, lambda: ssm.commit_accepted_prefix(opened, [3, 1], 4), opened.state, "[9, 7]")


def test_s53_finite_states_pass_and_the_count_starts_anew():
    params, seq = guarded(every=2)
    counts = []
    for _ in range(4):
        seq, _ = ssm.step(params, seq, [1, 2], donate=True)
        counts.append(seq.unchecked)
    assert counts == [1, 0, 1, 0]
    same("decay", seq, [[1, 2, 3, 1, 1, 1, 1], [3, 2, 1, 2, 2, 2, 2]])


@pytest.mark.parametrize("how", ["step", "extend", "commit", "rollback"])
def test_s53_a_refusal_keeps_the_state_it_was_to_donate(how):
    """S53, law 5: the check comes before the old state is lost."""
    params, seq = guarded(every=1, bad_at=jnp.nan)
    refuses(sc.NonFiniteError, lambda: take(params, seq, how, donate=True), seq.state, "`h`")
    good, _ = guarded()
    assert take(good, seq, how, donate=True).lengths.tolist()[0] > 3


# Windows are of one verify, of one sequence, and of the parameters that made them.


def spliced(part):
    """A window with one part of another sequence's, of the same shapes throughout."""
    one, other = (ssm.verify(None, start(prompt=[p]), [w])[0] for p, w in (([1, 2], [3, 4]), ([5, 6], [7, 8])))
    ours, theirs = one.opened, other.opened
    window = dataclasses.replace(ours.window, trace=theirs.window.trace)
    return {
        "window": dataclasses.replace(one, opened=theirs),
        "trace": dataclasses.replace(one, opened=dataclasses.replace(ours, window=window)),
        "tokens": dataclasses.replace(one, opened=dataclasses.replace(ours, tokens=theirs.tokens)),
        "history": dataclasses.replace(one, tokens=other.tokens),
        "state": dataclasses.replace(one, state=other.state),
    }[part]


@pytest.mark.parametrize("part", ["window", "trace", "tokens", "history", "state"])
def test_s46_sb12_a_window_of_another_verify_is_refused(part):
    """S46, SB12: whatever fits by shape and is not what this sequence's verify made."""
    seq = spliced(part)
    refuses(sc.IdentityError, lambda: ssm.commit_accepted_prefix(seq, 2, 2), seq.state, "one verify")
    seq = ssm.checkpoint(start())
    first, _ = ssm.verify(None, seq, WINDOW)
    second, _ = ssm.verify(None, ssm.step(None, seq, [1, 1])[0], WINDOW)
    foreign = dataclasses.replace(first, opened=second.opened)
    refuses(sc.IdentityError, lambda: ssm.rollback(foreign, 2), first.state, "one verify")


def test_s46_a_window_of_another_model_is_refused():
    """S46: two backends of the same planes."""
    one, other = (ssm.verify(None, start(name, "select"), WINDOW)[0] for name in ("digit", "digit-own"))
    seq = dataclasses.replace(one, backend=other.backend)
    refuses(sc.IdentityError, lambda: ssm.commit_accepted_prefix(seq, 1, 4), seq.state)


def test_rerun_runs_with_the_parameters_of_the_verify():
    """NumPy parameters changed in place meanwhile do not count; deleted ones are refused by name."""
    case = cases()["decay"]
    params = {name: np.array(leaf) for name, leaf in case.params.items()}
    opened, _ = ssm.verify(params, start("decay", "rerun"), WINDOW)
    params["weight"][:] = 0
    same("decay", ssm.commit_accepted_prefix(opened, 3, 4), [PROMPT[0] + WINDOW[0][:3], PROMPT[1] + WINDOW[1][:3]])

    moved = jax.tree.map(jnp.copy, case.params)
    opened, _ = ssm.verify(moved, ssm.checkpoint(start("decay", "rerun")), WINDOW)
    moved["weight"].delete()
    for resolve in (lambda: ssm.commit_accepted_prefix(opened, 3, 4), lambda: ssm.rollback(opened, 2)):
        refuses(sc.StateConsumedError, resolve, opened.state, "`weight`", "rerun")


@by_strategy
def test_s50_a_verify_that_fails_has_advanced_nothing(name, strategy, monkeypatch):
    """S50: refused at the door or failed on the way, no sequence has moved, and the next verify is right."""
    case = cases()[name]
    seq = ssm.checkpoint(start(name, strategy))
    for tokens, error in (([[99, 1], [1, 1]], sc.GeometryError), (np.ones((2, 99), int), sc.StateError)):
        refuses(error, lambda tokens=tokens: ssm.verify(case.params, seq, tokens), seq.state)

    def fails(*args):
        raise RuntimeError("out of memory")

    mode = "fast" if strategy == "replay" else "exact"
    with monkeypatch.context() as patched:
        patched.setitem(case.backend.compiled, ("verify", False, mode), fails)
        refuses(RuntimeError, lambda: ssm.verify(case.params, seq, WINDOW), seq.state, "out of memory")
    assert seq.opened is None and seq.lengths.tolist() == [3, 3]
    opened, _ = ssm.verify(case.params, seq, WINDOW)
    same(name, ssm.rollback(opened, 1), [PROMPT[0] + WINDOW[0][:1], PROMPT[1] + WINDOW[1][:1]])


def test_s55_replay_needs_a_backend_that_can():
    """S55: a backend without a replay is refused before anything is verified; with one, n rows are n steps."""
    backend = cases()["digit"].backend
    with pytest.raises(sc.UnsupportedError, match="verify` and `replay"):
        ssm.begin(backend, backend.init(None, capacity=8), strategy="replay")
    seq = start("digit-own", "replay")
    for rows in range(1, 5):
        opened, _ = ssm.verify(None, seq, WINDOW)
        done = ssm.commit_accepted_prefix(opened, rows, 4)
        same("digit-own", done, [PROMPT[0] + WINDOW[0][:rows], PROMPT[1] + WINDOW[1][:rows]])


# Input of another make.


def test_a_state_is_checked_against_itself_when_a_sequence_begins():
    """F27, F73: batches that differ, more tokens than rows, planes that are no arrays; dtypes by the geometry."""
    backend = cases()["digit"].backend
    state, _ = sc.extend(backend, None, backend.init(None, capacity=32), [[1, 2]])
    geometry = backend.geometry(None, batch=1, capacity=32)
    wrong = {
        "h": (sc.GeometryError, {"h": jnp.zeros(2, jnp.int32)}),
        "pos": (sc.GeometryError, {"pos": jnp.array([2], jnp.int16)}),
        "kv": (sc.CapacityError, {"pos": jnp.array([40], jnp.int32)}),
        "conv": (sc.GeometryError, {"conv": 3}),
    }
    for path, (error, planes) in wrong.items():
        broken = state | planes
        length = 40 if path == "kv" else 2
        refuses(error, lambda s=broken, n=length: ssm.begin(backend, s, tokens=[[1] * n]), state, f"`{path}`")
    narrow = state | {"h": state["h"].astype(jnp.float32)}
    refuses(
        sc.GeometryError, lambda: ssm.begin(backend, narrow, tokens=[[1, 2]], geometry=geometry), narrow, "`h`", "int32"
    )
    assert ssm.begin(backend, state, tokens=[[1, 2]], geometry=geometry, vocab_size=10).lengths.tolist() == [2]
    for token in (-1, 991):
        refuses(
            sc.GeometryError,
            lambda token=token: ssm.begin(backend, state, tokens=[[1, token]], vocab_size=10),
            state,
            str(token),
        )


def test_traced_counts_are_refused_by_name():
    """As in `step`: a sequence is on the host, whatever of the call is traced."""
    seq = ssm.checkpoint(start(ring_slots=1))
    opened, _ = ssm.verify(None, seq, WINDOW)
    for call in (
        lambda n: ssm.commit_accepted_prefix(opened, n, 4),
        lambda n: ssm.commit_accepted_prefix(opened, 1, n),
        lambda n: ssm.rollback(opened, n),
        lambda n: ssm.rollback(seq, n),
        lambda n: ssm.start_rollback_and_checkpoint(opened, n),
        lambda n: ssm.take_rows(seq, jnp.array([0, 1]) + n),
        lambda n: ssm.save_ring(seq, n),
        lambda n: ssm.begin(seq.backend, seq.state | {"pos": seq.state["pos"] + n}, tokens=PROMPT),
    ):
        with pytest.raises(sc.UnsupportedError, match="trace"):
            jax.jit(lambda n, call=call: jax.tree.leaves(call(n).state))(0)
    assert not opened.opened.ticket.is_served


def test_what_is_no_sequence_and_no_width_is_refused():
    seq = ssm.checkpoint(start(ring_slots=1))
    opened, _ = ssm.verify(None, seq, WINDOW)
    for k in (np.array([4, 4]), 4.0, True, "4", None):
        refuses(sc.GeometryError, lambda k=k: ssm.commit_accepted_prefix(opened, 1, k), opened.state, "k must")
    for call in (
        ssm.checkpoint,
        ssm.sync,
        ssm.save_ring,
        ssm.check_finite,
        lambda s: ssm.rollback(s, 0),
        lambda s: ssm.commit_accepted_prefix(s, 1, 4),
        lambda s: ssm.step(None, s, [1, 2]),
        lambda s: ssm.extend(None, s, WINDOW),
        lambda s: ssm.verify(None, s, WINDOW),
        lambda s: ssm.restore_ring(s, 0),
        lambda s: ssm.take_rows(s, [0]),
        lambda s: ssm.has_ssm_layers(s),
        lambda s: ssm.rollback_unsupported(s),
        lambda s: ssm.ring_slots(s),
    ):
        refuses(sc.GeometryError, lambda call=call: call(seq.state), seq.state, "`begin`", "dict")
    refuses(sc.GeometryError, lambda: ssm.begin(None, seq.state), seq.state, "NoneType")
    refuses(sc.GeometryError, lambda: ssm.marconi_checkpoint(seq, None), seq.state, "NoneType")
    geometry = seq.backend.geometry(None, batch=2, capacity=CAPACITY)
    for budget in ("x", 1.5, -1):
        with pytest.raises(sc.GeometryError, match="budget"):
            ssm.plan(geometry, 4, budget)


def test_syncing_what_was_donated_meanwhile_is_silent():
    """What took it has waited for it; the started state itself is another matter."""
    opened, _ = ssm.verify(None, ssm.checkpoint(start()), WINDOW)
    started = ssm.start_rollback_and_checkpoint(opened, 2)
    before = host(started.checkpoint.planes)
    ssm.step(None, started, [9, 9], donate=True)
    synced = ssm.sync(started)
    assert synced.pending == ()
    assert_bits(before, synced.checkpoint.planes)
    with pytest.raises(sc.StateConsumedError):
        ssm.step(None, synced, [1, 1])
