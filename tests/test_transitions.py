"""Transitions on values: donation, aliasing, traces, refusals, one compile each."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CASE_NAMES, assert_bits, cases, host, refuses

import statecore as sc
from statecore.backend import launch

by_case = pytest.mark.parametrize("name", CASE_NAMES)
WINDOW = [[4, 5, 6, 7], [1, 2, 3, 4]]


@pytest.fixture
def digit():
    return cases()["digit"]


# Values stay usable; donated ones are gone, and say so.


@by_case
def test_arguments_stay_usable_without_donation(name):
    case = cases()[name]
    backend, params, state = case.backend, case.params, case.state(length=5)
    before = host(state)
    sc.step(backend, params, state, [1, 2])
    sc.extend(backend, params, state, WINDOW)
    window = sc.verify(backend, params, state, WINDOW)
    held = host(window.state)
    first = sc.commit(backend, window, 2)
    sc.step(backend, params, first, [1, 2], donate=True)
    sc.commit(backend, window, 4, donate=False)
    assert_bits(before, state)
    assert_bits(held, window.state)


@by_case
def test_donated_states_are_consumed(name):
    case = cases()[name]
    backend, params = case.backend, case.params
    advances = (
        lambda state: sc.step(backend, params, state, [1, 2], donate=True),
        lambda state: sc.extend(backend, params, state, WINDOW, donate=True),
        lambda state: sc.verify(backend, params, state, WINDOW, donate=True),
        lambda state: sc.capture(case.state(), into=state),
    )
    for advance in advances:
        state = case.state(length=5)
        advance(state)
        with pytest.raises(sc.StateConsumedError, match="`"):
            sc.step(backend, params, state, [1, 2])
        with pytest.raises(sc.StateConsumedError):
            sc.capture(state)


def test_a_donated_window_is_consumed(digit):
    window = sc.verify(digit.backend, None, digit.state(length=5), WINDOW)
    sc.commit(digit.backend, window, 2, donate=True)
    with pytest.raises(sc.StateConsumedError, match="window"):
        sc.commit(digit.backend, window, 2)


def test_f44_a_live_numpy_view_does_not_keep_a_donated_state_alive(digit):
    """F44: a view silently costs the donation; the state is consumed all the same."""
    state = digit.state(length=5)
    view = np.asarray(state["kv"])
    before = view.copy()
    new, _ = sc.step(digit.backend, None, state, [1, 2], donate=True)
    with pytest.raises(sc.StateConsumedError):
        sc.step(digit.backend, None, state, [1, 2])
    np.testing.assert_array_equal(view, before)
    assert new["pos"].tolist() == [6, 6]


def test_f44_the_same_buffer_twice_is_found_before_donation(digit):
    """F44: the message names both planes, and nothing has run."""
    state = digit.state(length=5)
    state["h"] = state["pos"]
    call = lambda: sc.step(digit.backend, None, state, [1, 2], donate=True)  # noqa: E731
    refuses(sc.AliasError, call, {"conv": state["conv"]}, "`h`", "`pos`")
    refuses(sc.AliasError, lambda: sc.capture(digit.state(), into=state), {"conv": state["conv"]})


def test_f44_capture_into_itself_is_refused(digit):
    """F44: source and destination share their buffers."""
    state = digit.state(length=5)
    refuses(sc.AliasError, lambda: sc.capture(state, into=state), state)


@by_case
@pytest.mark.parametrize("operation", ["step", "extend", "verify", "commit"])
def test_donation_is_real(name, operation):
    """The compiled call reuses the bytes of every plane that it writes."""
    case = cases()[name]
    backend, params, state = case.backend, case.params, case.state(length=5)
    counts = np.array([4, 4], np.int32)
    tokens = np.array(WINDOW, np.int32)
    window = sc.verify(backend, params, state, tokens)
    args = {
        "step": (params, tokens[:, 0]),
        "extend": (params, tokens, counts),
        "verify": (params, tokens, counts),
        "commit": (window.trace, counts),
    }[operation]
    calls = {
        "step": lambda s: launch.step(backend, params, s, tokens[:, 0], donate=True),
        "extend": lambda s: launch.extend(backend, params, s, tokens, counts, logits="all", donate=True),
        "verify": lambda s: launch.verify(backend, params, s, tokens, counts, mode=window.mode, donate=True),
        "commit": lambda s: launch.commit(backend, s, window.trace, counts, mode=window.mode, donate=True),
    }
    calls[operation](sc.capture(state))
    (key,) = [
        key for key in backend.compiled if key[:2] == (operation, True) and key[2:] in ((), ("all",), (window.mode,))
    ]
    written, others = launch.split_written(backend.layout, operation, state)
    memory = backend.compiled[key].lower(written, others, *args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in written)


# One compile, whatever the counts.


def test_one_compile_whatever_the_counts():
    case = cases()["digit"]
    functions = case.backend.functions
    traced = chex.assert_max_traces(functions.step, n=6)
    backend = sc.Backend(name="counted", init=functions.init, step=traced, planes=case.backend.planes)
    state = backend.init(None, batch=2, capacity=40)
    for count in ([4, 4], [0, 3], None, 2):
        sc.extend(backend, None, state, WINDOW, num_valid=count)
    for count in ([4, 4], [0, 0], [1, 3], 2):
        window = sc.verify(backend, None, state, WINDOW, num_valid=[4, 3])
        sc.commit(backend, window, np.minimum(count, [4, 3]))
    compiled = {key: run._cache_size() for key, run in backend.compiled.items() if key != ("init",)}
    assert set(compiled.values()) == {1}, compiled


# Inside jit, vmap and scan.


@by_case
def test_transitions_work_under_jit(name):
    case = cases()[name]
    backend, params, state = case.backend, case.params, case.state(length=5)

    @jax.jit
    def turn(state, tokens, counts):
        state, logits = sc.extend(backend, params, state, tokens, num_valid=counts)
        window = sc.verify(backend, params, state, tokens, mode="exact")
        state = sc.commit(backend, window, counts)
        return sc.step(backend, params, state, tokens[:, 0])[0], sc.capture(state), logits

    counts = jnp.array([3, 1])
    got, held, _ = turn(state, jnp.array(WINDOW), counts)
    wanted, _ = sc.extend(backend, params, state, WINDOW, num_valid=[3, 1])
    wanted = sc.commit(backend, sc.verify(backend, params, wanted, WINDOW, mode="exact"), [3, 1])
    tolerance = None if name != "decay-own" else 1e-6
    if tolerance is None:
        assert sc.equal(backend, held, wanted)
    wanted, _ = sc.step(backend, params, wanted, [4, 1])
    assert got["pos"].tolist() == wanted["pos"].tolist() == [12, 8]
    assert jax.jit(lambda a, b: sc.equal(backend, a, b))(got, got)


@by_case
def test_scan_is_steps(name):
    case = cases()[name]
    state = case.state(length=5)
    tokens = jnp.array(WINDOW)
    body = lambda state, token: sc.step(case.backend, case.params, state, token)  # noqa: E731
    scanned, _ = jax.jit(lambda s: jax.lax.scan(body, s, tokens.T))(state)
    for column in tokens.T:
        state, _ = sc.step(case.backend, case.params, state, column)
    assert sc.equal(case.backend, scanned, state)


def test_vmap_over_states(digit):
    states = [digit.state(length=n, seed=n) for n in (2, 7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    step = lambda state: sc.step(digit.backend, None, state, jnp.array([1, 2]))[0]  # noqa: E731
    together = jax.vmap(step)(stacked)
    for row, state in enumerate(states):
        alone, _ = sc.step(digit.backend, None, state, [1, 2])
        assert sc.equal(digit.backend, jax.tree.map(lambda leaf, row=row: leaf[row], together), alone)


def test_gradients_flow_through_an_extend():
    case = cases()["decay"]
    state = case.state(length=3)

    def loss(h):
        _, logits = sc.extend(case.backend, case.params, state | {"h": h}, WINDOW, logits="last")
        return jnp.sum(logits**2)

    gradient = jax.grad(loss)(state["h"])
    assert bool(jnp.all(jnp.isfinite(gradient))) and bool(jnp.any(gradient != 0))


def _traced_refusals(digit):
    backend, tokens = digit.backend, jnp.array(WINDOW)
    commit = lambda s, n: sc.commit(backend, sc.verify(backend, None, s, tokens), n)  # noqa: E731
    return {
        "count": lambda s: commit(s, jnp.array([2, 5])),
        "negative count": lambda s: commit(s, jnp.array([-1, 2])),
        "num_valid": lambda s: sc.extend(backend, None, s, tokens, num_valid=jnp.array([1, 5]))[0],
        "token": lambda s: sc.step(backend, None, s, jnp.array([1, 10]))[0],
        "row": lambda s: sc.take_rows(backend, s, jnp.array([0, 2])),
        "placed row": lambda s: sc.put_rows(backend, s, jnp.array([1, 1]), digit.state(length=3)),
    }


@pytest.mark.parametrize("wrong", ["count", "negative count", "num_valid", "token", "row", "placed row"])
def test_a_refusal_inside_a_trace(digit, wrong):
    """The state is as it was and marked; the mark sticks, and the host raises."""
    state = digit.state(length=5)
    refused = jax.jit(_traced_refusals(digit)[wrong])(state)
    assert bool(sc.is_refused(digit.backend, refused))
    calls = (
        lambda: sc.step(digit.backend, None, refused, [1, 2]),
        lambda: sc.verify(digit.backend, None, refused, WINDOW),
        lambda: sc.take_rows(digit.backend, refused, [0]),
    )
    for call in calls:
        with pytest.raises(sc.RefusedError, match=r"\[5, 5\]"):
            call()
    later, logits = jax.jit(lambda s: sc.step(digit.backend, None, s, jnp.array([1, 2])))(refused)
    assert bool(sc.is_refused(digit.backend, later)) and bool(jnp.all(jnp.isnan(logits)))
    assert sc.equal(digit.backend, sc.clear_refusal(digit.backend, later), state)


def test_a_full_state_refuses_inside_a_trace(digit):
    state = digit.backend.init(None, batch=2, capacity=3)
    body = lambda s, t: sc.step(digit.backend, None, s, t)  # noqa: E731
    full, _ = jax.jit(lambda s: jax.lax.scan(body, s, jnp.ones((5, 2), jnp.int32)))(state)
    assert bool(sc.is_refused(digit.backend, full))
    assert sc.clear_refusal(digit.backend, full)["h"].tolist() == [111, 111]


# Bad input: a clear error, and nothing changed.


@pytest.mark.parametrize("name", ["digit", "digit-own"])
def test_bad_input_is_refused(name):
    case = cases()[name]
    backend, state = case.backend, case.state(length=5)
    window = sc.verify(backend, None, state, WINDOW)
    short = backend.init(None, batch=2, capacity=9)
    calls = [
        (sc.GeometryError, lambda: sc.step(backend, None, state, [1, 10]), ("10", "vocabulary")),
        (sc.GeometryError, lambda: sc.step(backend, None, state, [1, -1]), ("-1",)),
        (sc.GeometryError, lambda: sc.step(backend, None, state, [1.0, 2.0]), ("integers",)),
        (sc.GeometryError, lambda: sc.step(backend, None, state, [1, 2, 3]), ("[3]", "[2]")),
        (sc.GeometryError, lambda: sc.extend(backend, None, state, [1, 2]), ("[2, T]",)),
        (sc.GeometryError, lambda: sc.extend(backend, None, state, WINDOW, num_valid=[1, 5]), ("[1, 5]",)),
        (sc.GeometryError, lambda: sc.extend(backend, None, state, WINDOW, num_valid=[1]), ("[1]",)),
        (sc.UnsupportedError, lambda: sc.extend(backend, None, state, WINDOW, logits="some"), ("some",)),
        (sc.CapacityError, lambda: sc.extend(backend, None, state, np.ones((2, 36), int)), ("40", "`kv`")),
        (sc.RollbackError, lambda: sc.verify(backend, None, state, np.ones((2, 10), int)), ("`ring`", "9")),
        (sc.GeometryError, lambda: sc.verify(backend, None, state, np.ones((2, 0), int)), ("anchor",)),
        (sc.RollbackError, lambda: sc.commit(backend, window, 5), ("5", "4")),
        (sc.RollbackError, lambda: sc.commit(backend, window, [0, -1]), ("-1",)),
        (sc.GeometryError, lambda: sc.commit(backend, window, [1, 2, 3]), ("[3]",)),
        (sc.IdentityError, lambda: sc.commit(cases()["decay"].backend, window, 1), ("another backend",)),
        (sc.GeometryError, lambda: sc.take_rows(backend, state, [0, 2]), ("Row 2",)),
        (sc.GeometryError, lambda: sc.take_rows(backend, state, [-1]), ("Row -1",)),
        (sc.GeometryError, lambda: sc.take_rows(backend, state, []), ("at least one",)),
        (sc.GeometryError, lambda: sc.put_rows(backend, state, [0, 0], state), ("[0, 0]",)),
        (sc.GeometryError, lambda: sc.put_rows(backend, state, [0, 1], short), ("`kv`",)),
        (sc.GeometryError, lambda: sc.equal(backend, state, {"h": state["h"]}), ("missing",)),
        (sc.GeometryError, lambda: sc.capture(state, into=short), ("`kv`",)),
        (sc.GeometryError, lambda: sc.exchange(state, short), ("`kv`",)),
    ]
    for error, call, words in calls:
        refuses(error, call, (state, window.state, short), *words)


def test_modes(digit):
    state = digit.state()
    refuses(sc.UnsupportedError, lambda: sc.verify(digit.backend, None, state, WINDOW, mode="fast"), state, "step")
    refuses(sc.UnsupportedError, lambda: sc.verify(digit.backend, None, state, WINDOW, mode="best"), state, "best")
    assert sc.verify(digit.backend, None, state, WINDOW).mode == "exact"
    assert sc.verify(cases()["digit-own"].backend, None, state, WINDOW).mode == "fast"


def test_exchange_inside_a_trace_is_refused(digit):
    state = digit.state()
    with pytest.raises(sc.UnsupportedError, match="trace"):
        jax.jit(lambda a, b: sc.exchange(a, b))(state, digit.state())


def test_a_step_that_changes_a_dtype_is_named():
    from statecore import planes as pl

    backend = sc.Backend(
        init=lambda params, batch, capacity: {"h": jnp.zeros(batch), "pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, s, t: ({"h": s["h"].astype(jnp.float16), "pos": s["pos"] + 1}, jnp.zeros((2, 4))),
        planes={"h": pl.recurrent(), "pos": pl.position()},
    )
    state = backend.init(None, batch=2, capacity=4)
    with pytest.raises(sc.GeometryError, match="`h`.*float16"):
        sc.step(backend, None, state, [1, 2])


# Logits, rows, and the rest.


@by_case
def test_logits_wanted(name):
    case = cases()[name]
    backend, params, state = case.backend, case.params, case.state(length=5)
    counts = [3, 0]
    _, everything = sc.extend(backend, params, state, WINDOW, num_valid=counts)
    _, last = sc.extend(backend, params, state, WINDOW, num_valid=counts, logits="last")
    _, none = sc.extend(backend, params, state, WINDOW, num_valid=counts, logits="none")
    assert none is None
    np.testing.assert_array_equal(np.array(everything[0, 2]), np.array(last[0]))
    assert np.isnan(np.array(last[1])).all() and np.isnan(np.array(everything[0, 3])).all()
    step_logits = sc.step(backend, params, state, [4, 1])[1]
    np.testing.assert_allclose(np.array(everything[0, 0]), np.array(step_logits[0]), rtol=1e-6)


@by_case
def test_rows_are_taken_and_put(name):
    case = cases()[name]
    state, other = case.state(length=5), case.state(length=9, seed=3)
    swapped = sc.take_rows(case.backend, state, [1, 0])
    assert sc.equal(case.backend, sc.take_rows(case.backend, swapped, [1, 0]), state)
    three = sc.take_rows(case.backend, state, [1, 1, 0])
    assert sc.equal(case.backend, sc.take_rows(case.backend, three, [2, 0]), state)
    mixed = sc.put_rows(case.backend, state, [1], sc.take_rows(case.backend, other, [0]))
    assert sc.equal(case.backend, sc.take_rows(case.backend, mixed, [0]), sc.take_rows(case.backend, state, [0]))
    assert sc.equal(case.backend, sc.take_rows(case.backend, mixed, [1]), sc.take_rows(case.backend, other, [0]))
    assert mixed["pos"].tolist() == [5, 9]


def test_equality_is_of_bits():
    case = cases()["decay"]
    state = case.state(length=4)
    nan = state | {"h": state["h"].at[0, 0, 0].set(jnp.nan)}
    zero, minus = (state | {"h": state["h"].at[0, 0, 0].set(value)} for value in (0.0, -0.0))
    assert sc.equal(case.backend, nan, nan)
    assert not sc.equal(case.backend, zero, minus)
    assert sc.differing_planes(case.backend, zero, minus) == ("h",)


def test_equality_across_capacities():
    case = cases()["digit"]
    small = case.backend.init(None, batch=2, capacity=9)
    small, _ = sc.extend(case.backend, None, small, WINDOW)
    large = case.backend.init(None, batch=2, capacity=30)
    large, _ = sc.extend(case.backend, None, large, WINDOW)
    assert sc.equal(case.backend, small, large)


def test_last_logits_of_the_wrong_axes_are_refused():
    digit = cases()["digit"]
    functions = digit.backend.functions

    def extend_last(params, state, tokens, num_valid):
        return digit.backend.run_extend(params, state, tokens, num_valid)

    backend = sc.Backend(init=functions.init, step=functions.step, extend_last=extend_last, planes=digit.backend.planes)
    with pytest.raises(sc.GeometryError, match="`extend_last` returned logits"):
        sc.extend(backend, None, digit.state(length=5), WINDOW, logits="last")


def test_the_example_step_from_verify_and_replay():
    """A backend with verify and replay alone: its step is a window of one row."""
    digit, own = cases()["digit"], cases()["digit-own"]
    functions = own.backend.functions
    backend = sc.Backend(
        name="windows only",
        init=functions.init,
        verify=functions.verify,
        replay=functions.replay,
        planes=own.backend.planes,
    )
    state = digit.state(length=5)
    got, logits = sc.step(backend, None, state, [7, 8])
    wanted, wanted_logits = sc.step(digit.backend, None, state, [7, 8])
    assert sc.equal(digit.backend, got, wanted)
    np.testing.assert_array_equal(np.array(logits), np.array(wanted_logits))
    chunk, _ = sc.extend(backend, None, state, WINDOW, num_valid=[1, 4])
    assert sc.equal(digit.backend, chunk, sc.extend(digit.backend, None, state, WINDOW, num_valid=[1, 4])[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda b, s: sc.step(b, None, s, jnp.array([1.7, 2.9])),
        lambda b, s: sc.step(b, None, s, jnp.array([True, False])),
        lambda b, s: sc.step(b, None, s, np.array([2**32 + 3, 2**32 + 4])),
        lambda b, s: sc.step(b, None, s, jnp.array([1, 2, 3])),
        lambda b, s: sc.step(b, None, s, jnp.array(1)),
        lambda b, s: sc.extend(b, None, s, jnp.array([1, 2])),
        lambda b, s: sc.extend(b, None, s, jnp.ones((2, 3), int), num_valid=jnp.array([2])),
        lambda b, s: sc.extend(b, None, s, jnp.ones((2, 3), int), num_valid=jnp.array([2.0, 1.0])),
        lambda b, s: sc.commit(b, sc.verify(b, None, s, jnp.ones((2, 3), int)), jnp.array([1.9, 2.1])),
        lambda b, s: sc.commit(b, sc.verify(b, None, s, jnp.ones((2, 3), int)), np.array([2**32 + 1, 1])),
        lambda b, s: sc.commit(b, sc.verify(b, None, s, jnp.ones((2, 3), int)), jnp.array([2])),
        lambda b, s: sc.take_rows(b, s, jnp.array([1.9, 0.2])),
        lambda b, s: sc.take_rows(b, s, jnp.array([[1, 0]])),
        lambda b, s: sc.take_rows(b, s, jnp.array([], int)),
        lambda b, s: sc.put_rows(b, s, jnp.array([0, 1]), sc.take_rows(b, s, jnp.array([0]))),
    ],
)
def test_what_is_wrong_in_shape_or_dtype_raises_while_tracing(digit, call):
    state = digit.state(length=3)
    with pytest.raises(sc.GeometryError):
        jax.jit(lambda s: jax.tree.leaves(call(digit.backend, s)))(state)


def test_ragged_lists_and_stacked_states_are_refused(digit):
    state = digit.state(length=3)
    refuses(sc.GeometryError, lambda: sc.extend(digit.backend, None, state, [[1, 2], [3]]), state, "one length")
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    refuses(sc.GeometryError, lambda: sc.step(digit.backend, None, stacked, [1, 2]), state, "vmap")
    refuses(sc.GeometryError, lambda: sc.commit(digit.backend, state, 1), state, "dict")
    refuses(sc.GeometryError, lambda: sc.exchange({"a": 3}, {"a": 4}), state, "`a`")


def test_equal_of_concrete_states_inside_a_trace(digit):
    state = digit.state(length=3)
    assert jax.jit(lambda n: n * sc.equal(digit.backend, state, state))(3) == 3


def test_refusal_helpers_on_consumed_states(digit):
    state = digit.state(length=3)
    sc.step(digit.backend, None, state, [1, 2], donate=True)
    for call in (sc.is_refused, sc.clear_refusal):
        with pytest.raises(sc.StateConsumedError):
            call(digit.backend, state)


def test_planes_that_a_function_may_not_write_stay_as_they_were():
    """On the host and in a trace alike."""
    from statecore import planes as pl

    backend = sc.Backend(
        init=lambda params, batch, capacity: {
            "c": jnp.zeros(batch),
            "h": jnp.zeros(batch),
            "pos": jnp.zeros(batch, jnp.int32),
        },
        verify=lambda params, s, t, n: (s | {"h": s["h"] + 7, "c": s["c"] + 1}, jnp.zeros((*t.shape, 4)), t),
        replay=lambda s, trace, n: s | {"h": s["h"] + n, "c": s["c"] + 1, "pos": s["pos"] + n},
        planes={"c": pl.constant(), "h": pl.recurrent(), "pos": pl.position()},
    )
    state = backend.init(None, capacity=4)
    turn = lambda s: sc.commit(backend, sc.verify(backend, None, s, jnp.array([[1, 2]])), 2)  # noqa: E731
    for result in (turn(state), jax.jit(turn)(state)):
        assert (result["c"].item(), result["h"].item(), result["pos"].item()) == (0, 2, 2)


def test_donation_without_jit_and_under_a_gradient_destroys_nothing():
    case = cases()["decay"]
    state = case.state(length=3)
    with jax.disable_jit():
        new, _ = sc.step(case.backend, case.params, sc.capture(state), [1, 2], donate=True)
        kept, _ = sc.step(case.backend, case.params, state, [1, 2])
        sc.step(case.backend, case.params, kept, [1, 2], donate=True)
    assert np.isfinite(np.array(new["scale"])).all() and np.isfinite(np.array(state["scale"])).all()

    def loss(params):
        return sc.step(case.backend, params, state, [1, 2], donate=True)[0]["h"].sum()

    assert np.isfinite(np.array(jax.grad(loss)(case.params)["decay"])).all()
    before = host(state)
    spare = sc.capture(state)
    for dtype in (jnp.float32, jnp.int32):
        jax.jit(lambda x: (x, sc.capture(state | {"h": state["h"] + x.sum()}, into=spare)))(jnp.ones(3, dtype))
    assert_bits(before, spare)


def test_a_plane_that_is_a_parameter_too_is_named():
    case = cases()["decay"]
    params = dict(case.params, start=jnp.ones((2, 2, 5)))
    state = case.state(length=3) | {"h": params["start"]}
    with pytest.raises(sc.AliasError, match="`h`.*start"):
        sc.step(case.backend, params, state, [1, 2], donate=True)
    assert not params["start"].is_deleted()


def test_weak_types_do_not_compile_twice():
    from statecore import planes as pl

    backend = sc.Backend(
        init=lambda params, batch, capacity: {"h": jnp.full((batch,), 3.0), "pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, s, t: ({"h": s["h"] * 2.0, "pos": s["pos"] + 1}, jnp.zeros((t.shape[0], 4))),
        planes={"h": pl.recurrent(), "pos": pl.position()},
    )
    state = backend.init(None, capacity=8)
    for _ in range(3):
        state, _ = sc.step(backend, None, state, [1])
    assert backend.compiled["step", False]._cache_size() == 1


def test_shared_constants_must_agree():
    from statecore import planes as pl

    backend = sc.Backend(
        init=lambda params, batch, capacity: {"table": jnp.zeros(3), "pos": jnp.zeros(batch, jnp.int32)},
        step=lambda params, s, t: (s | {"pos": s["pos"] + 1}, jnp.zeros((t.shape[0], 4))),
        planes={"table": pl.constant(batch_axis=None), "pos": pl.position()},
    )
    state = backend.init(None, batch=2, capacity=8)
    one = sc.take_rows(backend, state, [1])
    assert sc.equal(backend, sc.put_rows(backend, state, [0], one), state)
    other = one | {"table": one["table"] + 1}
    refuses(sc.GeometryError, lambda: sc.put_rows(backend, state, [0], other), state, "`table`")
    refused = jax.jit(lambda s, o: sc.put_rows(backend, s, jnp.array([0]), o))(state, other)
    assert bool(sc.is_refused(backend, refused))
