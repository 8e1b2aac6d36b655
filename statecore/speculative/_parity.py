"""How near a verify comes to decoding on this machine: counted, so it says "none in N" and never "proved"."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import numpy as np

from statecore._typing import PyTree
from statecore.backend import Backend, Model, checks, commit, equal, extend, step, verify

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModeParity:
    """What one mode of verify did differently from decoding.

    mode: `exact` or `fast`.
    num_rows: rows of logits compared.
    num_bits: rows of which some bit differs.
    max_ulp: the most units in the last place by which a logit differs; None if the logits are not float32.
    num_greedy: rows whose likeliest token differs.
    num_states: states compared after a commit.
    num_state_bits: states of which some readable bit differs.
    """

    mode: str
    num_rows: int
    num_bits: int
    max_ulp: int | None
    num_greedy: int
    num_states: int
    num_state_bits: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parity:
    """What `probe_parity` counted.

    model: its name.
    platform: on which it was counted.
    batch, width: of the windows.
    modes: one record a mode.
    """

    model: str
    platform: str
    batch: int
    width: int
    modes: tuple[ModeParity, ...]

    def table(self) -> "Table":
        """Returns the counts as a table for the terminal."""
        from rich.table import Table

        title = f"verify of {self.width} rows against decoding: {self.model}, batch {self.batch}, {self.platform}"
        table = Table("mode", "other bits", "most ulp", "other greedy token", "other state", title=title)
        for one in self.modes:
            table.add_row(
                one.mode,
                _told(one.num_bits, one.num_rows),
                "-" if one.max_ulp is None else str(one.max_ulp),
                _told(one.num_greedy, one.num_rows),
                _told(one.num_state_bits, one.num_states),
            )
        return table


def _told(count: int, total: int) -> str:
    return f"{count or 'none'} in {total}"


def probe_parity(
    model: Model, *, batch: int = 1, width: int = 5, num_windows: int = 16, seed: int = 0, show: bool = True
) -> Parity:
    """Counts how verify differs from decoding, on this machine and for these shapes, and prints it.

    Random tokens are read window after window, by single steps and by a verify with its
    commit, both from the state that steps have made.

    Args:
      model: any loaded model.
      batch: sequences.
      width: rows of a window, the anchor included.
      num_windows: windows read.
      seed: of the tokens.
      show: whether the counts are printed.

    Raises:
      GeometryError: a size that is no whole number of at least one.
      RollbackError: the rings cannot undo windows so wide.
    """
    for name, value in (("batch", batch), ("width", width), ("num_windows", num_windows)):
        checks.whole(value, name, least=1)
    backend, params = model.backend, model.params
    state = backend.init(params, batch=batch, capacity=width * (num_windows + 1))
    shape = batch, num_windows + 1, width
    tokens = np.random.default_rng(seed).integers(0, backend.vocab_size(params, state), shape)
    state, _ = extend(backend, params, state, tokens[:, 0])
    counts: dict[str, list[tuple]] = {"exact": [], **({"fast": []} if backend.has_fast_verify else {})}
    for number in range(1, num_windows + 1):
        after, wanted = _decoded(backend, params, state, tokens[:, number])
        for mode, found in counts.items():
            window = verify(backend, params, state, tokens[:, number], mode=mode)
            other = not equal(backend, commit(backend, window, width), after)
            found.append((*_differences(np.array(window.logits), wanted), other))
        state = after
    modes = tuple(_summed(mode, found, batch * width) for mode, found in counts.items())
    parity = Parity(model=model.name, platform=jax.default_backend(), batch=batch, width=width, modes=modes)
    if show:
        from rich.console import Console

        Console().print(parity.table())
    return parity


def _decoded(backend: Backend, params: PyTree, state: PyTree, tokens: np.ndarray) -> tuple[PyTree, np.ndarray]:
    """Returns the state after `tokens` `[B, K]`, one by one, and the logits `[B, K, V]`."""
    rows = []
    for column in tokens.T:
        state, logits = step(backend, params, state, column)
        rows.append(np.array(logits))
    return state, np.stack(rows, axis=1)


def _differences(found: np.ndarray, wanted: np.ndarray) -> tuple[int, int | None, int]:
    """Returns rows that differ in bits, the most units in the last place, and rows with another likeliest token."""
    bits = (found != wanted) & ~(np.isnan(found) & np.isnan(wanted))
    greedy = found.argmax(axis=-1) != wanted.argmax(axis=-1)
    ulp = int(np.abs(_ordered(found) - _ordered(wanted)).max()) if found.dtype == np.float32 else None
    return int(bits.any(axis=-1).sum()), ulp, int(greedy.sum())


def _ordered(values: np.ndarray) -> np.ndarray:
    """Returns float32 values as integers, neighbours one apart."""
    integers = values.view(np.int32).astype(np.int64)
    return np.where(integers < 0, -(integers & 0x7FFFFFFF), integers)


def _summed(mode: str, found: list[tuple], num_rows: int) -> ModeParity:
    bits, ulps, greedy, states = zip(*found, strict=True)
    return ModeParity(
        mode=mode,
        num_rows=num_rows * len(found),
        num_bits=sum(bits),
        max_ulp=None if None in ulps else max(ulps),
        num_greedy=sum(greedy),
        num_states=len(found),
        num_state_bits=sum(states),
    )
