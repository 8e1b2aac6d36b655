"""Recurrent state around a verify, at Mamba-2 shapes: commits, forms, strategies, the ring.

`python bench/ssm.py --quick` runs these alone. The backends are synthetic: a verify only
looks its inputs up in a table, and a commit replays them with the replay of the models.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, `bench` is not found otherwise

import statecore as sc
from bench.harness import Case, Fact, Record, compare, measure
from bench.spine import Sizes, memcpy_case
from statecore import planes as pl
from statecore import ssm
from statecore._typing import PyTree
from statecore.backend import launch
from statecore.models.mixers._causal_conv import shift_layers
from statecore.models.mixers._recurrence import Drive
from statecore.models.mixers._recurrence import replay as replay_masked

_MIB = 2**20
_WIDTHS = (4, 8)
# Tokens index the rows of the table of inputs.
_VOCAB_SIZE = max(_WIDTHS)
_RING_SLOTS = 4
_HOST_REPEAT = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Recurrent planes of some layers of a model; one sequence. Letters as in `statecore._typing`."""

    num_layers: int  # L
    num_heads: int  # H
    head_size: int = 64  # P
    state_size: int = 128  # N
    num_taps: int = 4  # C

    @property
    def conv_width(self) -> int:
        """F: x, B and C side by side."""
        return self.num_heads * self.head_size + 2 * self.state_size


# Quick: a fourth of the 130M model, whose arrays and copies stay within 60 MiB. Full: states of 18 and 20 MiB.
SHAPES = {
    "130M/6": Shape(num_layers=6, num_heads=24),
    "130M": Shape(num_layers=24, num_heads=24),
    "2.7B/8": Shape(num_layers=8, num_heads=80),
}


# The backends.


def replay_closed(hidden: jax.Array, drive: Drive, num_rows: jax.Array) -> jax.Array:
    """Returns what the masked replay does, up to rounding, by one update of rank `K`."""
    kept = jnp.arange(drive.x.shape[2]) < num_rows[:, None]  # [B, K]
    total = jnp.cumsum(jnp.where(kept[..., None], drive.log_decay, 0.0), axis=2)  # [L, B, K, H]
    rest = jnp.where(kept[..., None], jnp.exp(total[:, :, -1:] - total), 0.0)
    x = jnp.where(kept[..., None, None], drive.x * rest[..., None], 0.0)
    update = jnp.einsum("lbkhp,lbkn->lbhpn", x, drive.b[:, :, :, 0])
    return hidden * jnp.exp(total[:, :, -1])[..., None, None] + update


def make_params(shape: Shape) -> PyTree:
    """Returns the table of inputs that tokens look up, `[L, V, ...]` each."""
    rows = (shape.num_layers, _VOCAB_SIZE)
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "drive": Drive(
            -jax.random.uniform(keys[0], (*rows, shape.num_heads), maxval=0.2),
            jax.random.normal(keys[1], (*rows, shape.num_heads, shape.head_size)),
            jax.random.normal(keys[2], (*rows, 1, shape.state_size)),
        ),
        "conv_input": jax.random.normal(keys[3], (*rows, shape.conv_width)),
    }


def make_backend(shape: Shape, replay_hidden: Callable = replay_masked) -> sc.Backend:
    """Returns a backend whose verify looks up what its replay applies; its logits are zeros."""

    def init(params, batch, capacity):
        del params, capacity
        hidden = (shape.num_layers, batch, shape.num_heads, shape.head_size, shape.state_size)
        return {
            "hidden": jnp.zeros(hidden),
            "conv": jnp.zeros((shape.num_layers, batch, shape.num_taps - 1, shape.conv_width)),
            "position": jnp.zeros(batch, jnp.int32),
        }

    def verify(params, state, tokens, num_valid):
        del num_valid
        trace = jax.tree.map(lambda table: table[:, tokens], params)
        return state, jnp.zeros((*tokens.shape, _VOCAB_SIZE)), trace

    def replay(state, trace, num_rows):
        return {
            "hidden": replay_hidden(state["hidden"], trace["drive"], num_rows),
            "conv": shift_layers(state["conv"], trace["conv_input"], num_rows),
            "position": state["position"] + num_rows,
        }

    planes = {"hidden": pl.recurrent(batch_axis=1), "conv": pl.shift(axis=2, batch_axis=1), "position": pl.position()}
    return sc.Backend(name="mamba2-shaped", init=init, verify=verify, replay=replay, planes=planes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bed:
    """A backend at one shape, with a state that is nowhere zero.

    name: of the shape.
    backend: with the masked replay or another.
    params: its table.
    state: after one window, kept usable, so that each case donates a capture.
    """

    name: str
    backend: sc.Backend
    params: PyTree
    state: PyTree

    def fresh(self) -> PyTree:
        """Returns a state to donate."""
        return sc.capture(self.state)

    def planes(self) -> list[jax.Array]:
        """Returns what a commit advances, less the position."""
        return [self.state["hidden"], self.state["conv"]]

    def memcpy(self) -> Case:
        """Returns a copy of those planes by NumPy."""
        num_bytes = sum(leaf.nbytes for leaf in self.planes())
        return memcpy_case(self.planes(), f"np.copyto of {num_bytes / _MIB:.1f} MiB, its planes")

    def commit_case(self, num_rows: int, width: int, mode: str = "fast") -> Case:
        """Returns a donated commit without checks; the window's trace is kept."""
        window = sc.verify(self.backend, self.params, self.state, window_tokens(width), mode=mode)
        trace, counts = window.trace, np.array([num_rows], np.int32)
        what = {"fast": "", "exact": ", selected"}[mode]
        return Case(
            what=f"commit of {num_rows} of {width}{what}",
            call=lambda state: launch.commit(self.backend, state, trace, counts, mode=mode, donate=True),
            setup=self.fresh,
        )

    def committed(self, num_rows: int, width: int) -> PyTree:
        """Returns the state after `num_rows` rows."""
        window = sc.verify(self.backend, self.params, self.state, window_tokens(width))
        return sc.commit(self.backend, window, num_rows)

    def one_by_one(self, width: int) -> PyTree:
        """Returns the state after the rows of a window, each verified and committed alone."""
        state = self.state
        for row in range(width):
            window = sc.verify(self.backend, self.params, state, window_tokens(width)[:, row : row + 1])
            state = sc.commit(self.backend, window, 1)
        return state


def make_bed(name: str, replay_hidden: Callable = replay_masked) -> Bed:
    """Returns a bed at the named shape."""
    shape = SHAPES[name]
    backend, params = make_backend(shape, replay_hidden), make_params(shape)
    empty = backend.init(params, batch=1, capacity=64)
    bed = Bed(name=name, backend=backend, params=params, state=empty)
    return dataclasses.replace(bed, state=bed.committed(_VOCAB_SIZE, _VOCAB_SIZE))


def window_tokens(width: int) -> np.ndarray:
    """Returns a window of different tokens, `[1, K]`."""
    return np.arange(width, dtype=np.int32)[None]


# The measurements.


def commit(sizes: Sizes) -> Iterator[Record]:
    """Commits of a few counts against a copy of the planes, each other, and one compile for all."""
    run = functools.partial(compare, num_pairs=sizes.num_pairs)
    for name in sizes.shapes:
        bed = make_bed(name)
        memcpy = bed.memcpy()
        for width in _WIDTHS:
            for num_rows in (0, width // 2, width):
                case = bed.commit_case(num_rows, width)
                yield run(f"{name}: commit {num_rows} of {width} / memcpy", case, memcpy, goal="<= 1")
            every, none = bed.commit_case(width, width), bed.commit_case(0, width)
            yield run(f"{name}: commit {width} / commit 0 of {width}", every, none, goal="1: any count alike")
        compiled = bed.backend.compiled["commit", True, "fast"]
        yield Fact(
            name=f"{name}: compiles of commit",
            what=f"all counts at {len(_WIDTHS)} widths",
            value=compiled._cache_size(),  # pyright: ignore[reportFunctionMemberAccess]
            goal=f"{len(_WIDTHS)}: one a width",
        )


def forms(sizes: Sizes) -> Iterator[Record]:
    """The exact form (masked replay) against the closed form: time, bits, and how far apart."""
    for name in sizes.shapes:
        masked, closed = make_bed(name), make_bed(name, replay_closed)
        closed = dataclasses.replace(closed, state=masked.state)
        for width in _WIDTHS:
            a, b = masked.commit_case(width, width), closed.commit_case(width, width)
            yield compare(
                f"{name}: masked / closed form, {width} of {width}",
                dataclasses.replace(a, what=f"{a.what}, masked"),
                dataclasses.replace(b, what=f"{b.what}, one einsum"),
                num_pairs=sizes.num_pairs,
                goal="< 1: the fastest form",
            )
            pairs = [(masked.committed(n, width), closed.committed(n, width)) for n in (width // 2, width)]
            yield Fact(
                name=f"{name}: masked - closed form, K = {width}",
                what="greatest difference over the state's greatest value",
                value=max(_difference(one["hidden"], other["hidden"]) for one, other in pairs),
                goal="<= 1e-5",
            )
            yield Fact(
                name=f"{name}: masked - rows one by one, K = {width}",
                what="values of the state that differ in any bit, all rows kept",
                value=_differing(masked.committed(width, width), masked.one_by_one(width)),
                goal="0: the exact form",
            )


def _differing(one: PyTree, other: PyTree) -> int:
    bits = [np.array(state["hidden"]).view(np.int32) for state in (one, other)]
    return int((bits[0] != bits[1]).sum())


def _difference(one: jax.Array, other: jax.Array) -> float:
    return float(jnp.abs(one - other).max() / jnp.abs(one).max())


def kept(sizes: Sizes) -> Iterator[Record]:
    """What a window keeps, what a checkpoint copies, and the commit where every state is kept."""
    for name in sizes.shapes:
        bed = make_bed(name)
        geometry = bed.backend.geometry(bed.params, batch=1, capacity=64)
        for width in _WIDTHS:
            yield from _verify(bed, width, ssm.plan(geometry, width, None))
        yield from _checkpoint(bed, sizes)
        width = _WIDTHS[0]
        case = bed.commit_case(width, width, "exact")
        yield compare(
            f"{name}: select's commit {width} of {width} / memcpy", case, bed.memcpy(), num_pairs=sizes.num_pairs
        )


def _verify(bed: Bed, width: int, planned: ssm.Plan) -> Iterator[Record]:
    """Runs a verify and measures what its window keeps, and which planes it copied."""
    seq = _begin(dataclasses.replace(bed, state=bed.fresh()))
    before = {path: _address(plane) for path, plane in bed.backend.layout.named(seq.state)}
    seq, _ = ssm.verify(bed.params, seq, window_tokens(width), donate=True)
    assert seq.opened is not None
    trace = sum(leaf.nbytes for leaf in jax.tree.leaves(seq.opened.window.trace))
    states = width * sum(plane.nbytes for plane in bed.planes())
    yield Fact(
        name=f"{bed.name}: kept by a verify / {width} states",
        what=f"{trace / _MIB:.2f} MiB in its trace, of {states / _MIB:.1f}, 1/{states / trace:.0f}",
        value=trace / states,
        goal="<= 0.025",
    )
    yield Fact(
        name=f"{bed.name}: kept - planned, K = {width}",
        what=f"bytes of the trace, less the {planned.costs['replay']:,} of `ssm.plan`",
        value=trace - planned.num_bytes,
        goal="0",
    )
    copied = [plane for path, plane in bed.backend.layout.named(seq.state) if _address(plane) != before[path]]
    yield Fact(
        name=f"{bed.name}: bytes copied by a donating verify, K = {width}",
        what=f"planes whose buffers differ, of {len(before)}",
        value=sum(plane.nbytes for plane in copied),
        goal="0",
    )


def _checkpoint(bed: Bed, sizes: Sizes) -> Iterator[Record]:
    seq = _begin(bed)
    held = ssm.checkpoint(seq).checkpoint
    assert held is not None
    live = bed.backend.layout.leaves(seq.state)
    copied = {i: plane for i, plane in held.planes.items() if _address(plane) != _address(live[i])}
    assert len(held.planes) == len(live) and not copied, "a checkpoint copies nothing"
    yield Fact(
        name=f"{bed.name}: bytes copied by a checkpoint",
        what=f"buffers that differ, of {len(live)}",
        value=sum(plane.nbytes for plane in copied.values()),
        goal="0",
    )
    case = Case(what="ssm.checkpoint", call=lambda: ssm.checkpoint(seq).checkpoint)
    yield measure(f"{bed.name}: checkpoint", case, num_runs=sizes.num_pairs, repeat=_HOST_REPEAT)


def _begin(bed: Bed, ring_slots: int = 0) -> ssm.SequenceState:
    fed = [[0] * int(bed.state["position"][0])]
    return ssm.begin(bed.backend, bed.state, tokens=fed, ring_slots=ring_slots)


def _address(plane: jax.Array) -> int:
    return plane.unsafe_buffer_pointer()


def ring(sizes: Sizes) -> Iterator[Record]:
    """Saves into the ring and restores from it against a copy of the planes."""
    for name in sizes.shapes:
        bed = make_bed(name)
        for num_slots in (1, _RING_SLOTS):
            seq = ssm.save_ring(_begin(bed, num_slots))
            cases = {
                "save": Case(what=f"ssm.save_ring, {num_slots} slots", call=lambda s=seq: ssm.save_ring(s).saved),
                "restore": Case(
                    what=f"ssm.restore_ring, {num_slots} slots", call=lambda s=seq: ssm.restore_ring(s, 0).state
                ),
            }
            for what, case in cases.items():
                yield compare(
                    f"{name}: {what} ring / memcpy, {num_slots} slots", case, bed.memcpy(), num_pairs=sizes.num_pairs
                )


BENCHES: dict[str, Callable[[Sizes], Iterator[Record]]] = {
    "ssm-commit": commit,
    "ssm-forms": forms,
    "ssm-kept": kept,
    "ssm-ring": ring,
}

if __name__ == "__main__":
    from bench.__main__ import main

    main(list(BENCHES))
