"""The sizes of a Mamba-2 mixer as the hybrids' configurations give them, and what is checked of any."""

import math
from typing import Any

from statecore.models.families._options import Options, is_number, shown
from statecore.models.families._shapes import chunk_length
from statecore.models.mixers import Mamba2


def take_mamba(options: Options, width: int, *, eps: float, inner: int | None = None) -> Mamba2:
    """Returns the mixer of a configuration whose keys are `mamba_n_heads` and the like.

    Args:
      options: of the model.
      width: `D`.
      eps: of the gated norm.
      inner: `H * P`; `mamba_expand` times the width if None.

    Raises:
      LoadError: heads, head size and width do not fit.
    """
    expanded = options.whole("mamba_expand", 2) * width
    inner = expanded if inner is None else inner
    heads = options.whole("mamba_n_heads", 128)
    has_bias = options.flag("mamba_proj_bias", False)
    mixer = Mamba2(
        width=width,
        num_heads=heads,
        head_size=_head_size(options, inner, heads),
        state_size=options.whole("mamba_d_state", 256),
        num_groups=options.whole("mamba_n_groups", 1),
        num_taps=options.whole("mamba_d_conv", 4),
        chunk=chunk_length(options, "mamba_chunk_size", 256),
        eps=eps,
        step_limit=step_limit(options, "time_step_limit"),
        has_conv_bias=options.flag("mamba_conv_bias", True),
        has_in_bias=has_bias,
        has_out_bias=has_bias,
    )
    if mixer.inner != inner:
        raise options.fault(
            f"has {heads} Mamba heads (`mamba_n_heads`) of {mixer.head_size} (`mamba_d_head`), "
            f"but the mixer is {inner} wide"
        )
    check_mamba(options, mixer)
    return mixer


def _head_size(options: Options, inner: int, heads: int) -> int:
    if options.take("mamba_d_head", "auto") != "auto":
        return options.whole("mamba_d_head")
    if inner % heads:
        raise options.fault(f"has {heads} Mamba heads (`mamba_n_heads`), which cannot share a width of {inner} evenly")
    return inner // heads


def check_mamba(options: Options, mixer: Mamba2) -> None:
    """Checks what holds for the sizes of every Mamba-2 mixer.

    Raises:
      LoadError: heads cannot share the groups, or the convolution keeps no input.
    """
    if mixer.num_heads % mixer.num_groups:
        raise options.fault(f"has {mixer.num_heads} Mamba heads, which {mixer.num_groups} groups cannot share evenly")
    if mixer.num_taps < 2:
        raise options.fault("has a convolution of one tap, but implemented are only two or more")


def step_limit(options: Options, name: str) -> tuple[float, float]:
    """Returns what step sizes are clamped to: by default from 0, without an end."""
    value = options.take(name, (0.0, math.inf))
    if isinstance(value, list | tuple) and len(value) == 2 and value[1] in (None, math.inf):
        return _least(options, name, _checked(options, name, [value[0], 0.0], 2)[0]), math.inf
    low, high = _checked(options, name, value, 2)
    if low > high:
        raise options.fault(f"has `{name}` = {shown(value)}, of which the first is larger than the second")
    return _least(options, name, low), high


def _least(options: Options, name: str, low: float) -> float:
    if low < 0:
        raise options.fault(f"has {low} in `{name}`, but steps of at least 0 are needed")
    return low


def take_numbers(options: Options, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """Returns a list of as many numbers as `default` has."""
    return _checked(options, name, options.take(name, default), len(default))


def _checked(options: Options, name: str, value: Any, num: int) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != num or not all(map(is_number, value)):
        raise options.wrong(name, value, f"a list of {num} numbers")
    return tuple(float(item) for item in value)
