"""Native state: captures of each mode, exchange, estimates, growth, host time a token.

Run it alone with `python bench/native.py`, or with the others by `python -m bench`.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import statecore as sc
from bench.harness import Case, Fact, Record, Timing, compare, measure
from bench.spine import Sizes, memcpy_case, synthetic_state, tiny_model
from statecore import native, testing
from statecore import planes as pl
from statecore.backend import launch

_HOST_REPEAT = 200
_MIB = 2**20
_CAPACITY = 512
_ROWS = 4096


def wide_model(num_mib: int, num_rows: int = _ROWS) -> sc.Model:
    """Returns a model that is nothing but an append plane of `num_mib` MiB and a position."""
    width = num_mib * _MIB // (4 * num_rows)

    def init(params, batch, capacity):
        del params
        kv = jax.numpy.zeros((batch, capacity, width))
        return {"kv": kv, "pos": jax.numpy.zeros(batch, jax.numpy.int32)}

    def step(params, state, tokens):
        row = state["kv"].at[jax.numpy.arange(tokens.shape[0]), state["pos"]].set(1.0)
        return {"kv": row, "pos": state["pos"] + 1}, jax.numpy.zeros((tokens.shape[0], 4))

    backend = sc.Backend(name="wide", init=init, step=step, planes={"kv": pl.append(axis=1), "pos": pl.position()})
    return sc.load((backend, None))


def wide_runtime(num_mib: int, length: int = 0) -> sc.Runtime:
    """Returns a runtime of `num_mib` MiB that holds `length` tokens."""
    runtime = sc.Runtime(wide_model(num_mib), capacity=_ROWS)
    lengths = np.array([length])
    state = runtime.state | {"pos": jax.numpy.asarray(lengths, jax.numpy.int32)}
    runtime.replace_state(state, is_patched=False, lengths=lengths)
    return runtime


def pooled(sizes: Sizes) -> Iterator[Record]:
    """Captures into a pooled slot, on values and through a runtime, against NumPy."""
    state = synthetic_state(sizes.state_mib)
    memcpy = memcpy_case(list(state.values()), f"np.copyto, {sizes.state_mib} MiB")
    pool = [sc.capture(state)]

    def on_values():
        pool[0] = sc.capture(state, into=pool[0])
        return pool[0]

    case = Case(what="sc.capture(state, into=slot)", call=on_values)
    yield compare("native pooled capture / memcpy", case, memcpy, num_pairs=sizes.num_pairs, goal="<= 1.11")

    runtime = wide_runtime(sizes.state_mib, _ROWS)
    slot = [runtime.capture()]

    def through_runtime():
        slot[0] = runtime.capture(into=slot[0])

    memcpy = memcpy_case([runtime.state["kv"]], f"np.copyto, {sizes.state_mib} MiB")
    case = Case(what="runtime.capture(into=slot)", call=through_runtime)
    yield compare("runtime pooled capture / memcpy", case, memcpy, num_pairs=sizes.num_pairs, goal="<= 1.11")


def _exchange_case(runtime: sc.Runtime, what: str, *, is_full: bool = False) -> Case:
    held = [runtime.capture()]

    def call():
        held[0] = runtime.exchange(held[0])

    def validated():
        held[0].use.seal = None  # as for a slot that another runtime made
        held[0] = runtime.exchange(held[0])

    return Case(what=what, call=validated if is_full else call)


def exchanges(sizes: Sizes) -> Iterator[Record]:
    """Exchange, sealed and fully validated, and of a large state against a small one."""
    runtime = sc.Runtime(tiny_model(), capacity=_CAPACITY)
    for name, goal, is_full in (("interned", "<= 5 us", False), ("validated", "<= 50 us", True)):
        case = _exchange_case(runtime, f"runtime.exchange, 7 planes, {name}", is_full=is_full)
        yield measure(f"exchange, {name}", case, num_runs=sizes.num_pairs, repeat=_HOST_REPEAT, goal=goal)
    large = _exchange_case(wide_runtime(sizes.large_mib), f"{sizes.large_mib} MiB")
    small = _exchange_case(wide_runtime(1), "1 MiB")
    name = "runtime exchange, large / small"
    yield compare(name, large, small, num_pairs=sizes.num_pairs, repeat=_HOST_REPEAT, goal="<= 1.2")


def estimates(sizes: Sizes) -> Iterator[Record]:
    """Estimates that were asked for before."""
    runtime = sc.Runtime(tiny_model(), capacity=_CAPACITY)
    geometry = runtime.geometry
    cases: dict[str, Callable] = {
        "sc.estimate(geometry)": lambda: sc.estimate(geometry),
        "sc.estimate_growth(geometry, 100, 16)": lambda: sc.estimate_growth(geometry, 100, 16),
        "runtime.estimate()": runtime.estimate,
    }
    for what, call in cases.items():
        case = Case(what=what, call=call)
        yield measure("estimate, cached", case, num_runs=sizes.num_pairs, repeat=_HOST_REPEAT, goal="<= 2 us")


def lazy(sizes: Sizes) -> Iterator[Record]:
    """A lazy capture, and the transition after it, which writes elsewhere."""
    runtime = sc.Runtime(tiny_model(), capacity=_CAPACITY)
    runtime.step([101])
    runtime.settle()
    case = Case(what="runtime.capture(mode='lazy')", call=lambda: runtime.capture(mode="lazy"))
    yield measure("lazy capture", case, num_runs=sizes.num_pairs, repeat=20, goal="<= 50 us")


def compact(sizes: Sizes) -> Iterator[Record]:
    """Compact captures at 1/16, 1/4 and all of the capacity, against a whole one."""
    for part, goal in ((16, "about 1/16"), (4, "about 1/4"), (1, "about 1")):
        runtime = wide_runtime(sizes.state_mib, _ROWS // part)
        slots = {mode: runtime.capture(mode=mode) for mode in ("compact", "fresh")}

        def call(mode: str, runtime=runtime, slots=slots):
            slots[mode] = runtime.capture(mode=mode, into=slots[mode])

        cut = Case(what=f"compact, 1/{part} used", call=functools.partial(call, "compact"))
        whole = Case(what=f"fresh, {sizes.state_mib} MiB", call=functools.partial(call, "fresh"))
        yield compare(f"compact / fresh, 1/{part} used", cut, whole, num_pairs=sizes.num_pairs, goal=goal)


def growth(sizes: Sizes) -> Iterator[Record]:
    """What was estimated to grow over what grew, measured on the states of each model."""
    del sizes
    models = {
        "digit": sc.load((testing.digit_backend(), None)),
        "decay": sc.load((testing.decay_backend(), testing.decay_params())),
        "tiny-hybrid": tiny_model(),
    }
    for name, model in models.items():
        runtime = sc.Runtime(model, capacity=_CAPACITY)
        runtime.extend(np.ones((1, 16), int))
        before = runtime.capture()
        estimated = runtime.estimate_growth(None, 32)
        runtime.extend(np.ones((1, 32), int))
        grown = native.measured_growth(runtime.geometry.layout, before.state, runtime.state)
        yield Fact(
            name=f"growth / measured, {name}",
            what=f"{estimated:,} bytes for 32 tokens from 16",
            value=(estimated or 0) / grown,
            goal="1",
        )


def host_time(sizes: Sizes) -> Iterator[Record]:
    """Time a token of `run` less that of the bare compiled step, measured in turn."""
    model, num_tokens = tiny_model(), 64
    runtime = sc.Runtime(model, capacity=_CAPACITY)
    token = np.array([101], np.int32)
    state = model.backend.init(model.params, batch=1, capacity=_CAPACITY)
    state, _ = launch.step(model.backend, model.params, state, token, donate=True)
    written, others = launch.split_written(model.backend.layout, "step", state)
    step = model.backend.compiled["step", True]
    excess, wall = [], []
    for turn in range(sizes.num_pairs + 2):
        generation = sc.Generation(runtime, "to be, or not to be", max_tokens=num_tokens + 1)
        generation.step()
        start = time.perf_counter()
        generation.run(num_tokens)
        middle = time.perf_counter()
        for _ in range(num_tokens):
            # As in a run, each token is known before the next one is fed.
            written, logits = step(written, others, model.params, token)
            jax.block_until_ready(logits)
        end = time.perf_counter()
        if turn >= 2:  # the first ones compile
            wall.append((middle - start) / num_tokens)
            excess.append(wall[-1] - (end - middle) / num_tokens)
    for name, what, found, goal in (
        ("run, host time a token", "run less the bare compiled step", excess, "< 100 us"),
        ("run, wall time a token", "generation.run, greedy, tiny-hybrid", wall, ""),
    ):
        p10, median, p90 = np.percentile(found, [10, 50, 90]).tolist()
        yield Timing(name=name, what=what, median=median, p10=p10, p90=p90, num_runs=len(found), goal=goal)


BENCHES: dict[str, Callable[[Sizes], Iterator[Record]]] = {
    "native_pooled": pooled,
    "native_exchange": exchanges,
    "native_estimate": estimates,
    "native_lazy": lazy,
    "native_compact": compact,
    "native_growth": growth,
    "native_host_time": host_time,
}

if __name__ == "__main__":
    from bench.__main__ import main

    main(tuple(BENCHES))
