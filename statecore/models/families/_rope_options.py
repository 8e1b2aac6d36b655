"""Rotary positions as configurations name them, in the layouts of transformers 4 and 5."""

from collections.abc import Mapping
from typing import Any

from statecore.models.families._options import Options, shown
from statecore.models.mixers import Rope

_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def take_rope(options: Options, head_size: int, *, base: float = 10_000.0, partial: float | None = None) -> Rope:
    """Returns the rotary positions of a model that has one kind of them.

    Args:
      options: of the model; takes `rope_parameters`, or `rope_theta` and `rope_scaling`.
      head_size: `D`.
      base: the family's theta, where the file says nothing.
      partial: its rotated share, likewise; None if it rotates whole heads, whatever the file says.
    """
    base = options.positive("rope_theta", base)
    if partial is None:
        options.only("partial_rotary_factor", 1.0)
    else:
        partial = options.positive("partial_rotary_factor", partial, most=1.0)
    return make_rope(options, take_scaling(options), head_size, base=base, partial=partial)


def take_scaling(options: Options) -> dict[str, Any]:
    """Returns `rope_scaling`, or else `rope_parameters`: the older name wins, as in the reference."""
    old, new = options.mapping("rope_scaling", {}), options.mapping("rope_parameters", {})
    return old or new


def make_rope(
    options: Options, given: Mapping[str, Any], head_size: int, *, base: float, partial: float | None = None
) -> Rope:
    """Returns rotary positions from a `rope_parameters` or `rope_scaling` of one kind of layer.

    Raises:
      LoadError: a type or a key that is not implemented, or an odd number of dimensions.
    """
    inner = Options({name: value for name, value in given.items() if name != "type"}, f"{options.family} (rope)")
    kind = inner.take("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise options.fault(f"has rope type {shown(kind)}, but implemented is only {', '.join(map(repr, _KEYS))}")
    base = inner.positive("rope_theta", base)
    if kind == "default":
        # Transformers writes a factor of a longer original beside a type that does not use it.
        inner.ignore("factor")
    rope = Rope(
        dim=_rotated(inner, head_size, partial),
        base=base,
        scaling=kind,
        factor=inner.positive("factor") if "factor" in _KEYS[kind] else 1.0,
        **(_llama3(options, inner) if kind == "llama3" else {}),
    )
    inner.done()
    return rope


def _rotated(inner: Options, head_size: int, partial: float | None) -> int:
    """Returns how many dimensions of each head are rotated."""
    if partial is None:
        inner.only("partial_rotary_factor", 1.0)
        dim = head_size
    else:
        dim = int(head_size * inner.positive("partial_rotary_factor", partial, most=1.0))
    if dim % 2 or not dim:
        raise inner.fault(f"rotates {dim} dimensions of each head, but they are rotated in pairs")
    return dim


def _llama3(options: Options, inner: Options) -> dict[str, Any]:
    low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
    if low >= high:
        raise inner.fault(f"has `low_freq_factor` = {low}, but less than the `high_freq_factor` of {high} is needed")
    # Where it is left out, the model was not made longer.
    length = inner.whole("original_max_position_embeddings", options.take("max_position_embeddings", None))
    return {"low_freq_factor": low, "high_freq_factor": high, "original_length": length}
