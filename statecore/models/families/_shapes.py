"""Sizes that many families give alike."""

from typing import Any

from statecore.models.families._options import Options

# How many tokens a window may have beyond what a sliding layer sees.
_RING_SLACK = 32
_MOST_CHUNK = 64


def head_sizes(options: Options, width: int) -> dict[str, Any]:
    """Returns `num_heads`, `num_kv_heads` and `head_size`, which is the width over the heads if not given.

    Raises:
      LoadError: the heads are no multiple of the key-value heads.
    """
    heads = options.whole("num_attention_heads")
    groups = options.whole("num_key_value_heads", heads)
    if heads % groups:
        raise options.fault(f"has {heads} heads, which {groups} key-value heads cannot share evenly")
    size = options.whole("head_dim", width // heads)
    return {"num_heads": heads, "num_kv_heads": groups, "head_size": size}


def chunk_length(options: Options, name: str, default: int) -> int:
    """Returns the tokens that a long pass takes at once: what the family says, or less, which changes no result.

    Within a chunk the work grows with its square, for which longer chunks gain nothing here.
    """
    return min(options.whole(name, default), _MOST_CHUNK)


def ring_rows(window: int) -> int:
    """Returns the rows of a sliding layer's ring: its window, and room for the tokens of a verify."""
    return window + _RING_SLACK


def router_sizes(
    options: Options, *, num_groups: int = 1, num_kept_groups: int = 1, scale: float = 1.0
) -> dict[str, Any]:
    """Returns what `Moe` needs to know of a router as DeepSeek-V3 has it, and the number of experts.

    Args:
      options: of the model.
      num_groups, num_kept_groups, scale: the family's, where the file says nothing.

    Raises:
      LoadError: the groups do not divide the experts, or hold fewer than are to be chosen.
    """
    num, chosen = options.experts("n_routed_experts"), options.whole("num_experts_per_tok")
    groups = options.whole("n_group", num_groups)
    kept = options.whole("topk_group", num_kept_groups)
    if num % groups or kept > groups or (kept < groups and num < 2 * groups):
        raise options.fault(f"has {num} experts, of which {kept} of {groups} groups cannot be kept")
    if chosen > kept * (num // groups):
        raise options.fault(
            f"has `num_experts_per_tok` = {chosen}, but {kept * (num // groups)} experts to choose from"
        )
    return {
        "num_experts": num,
        "num_chosen": chosen,
        "scores": "sigmoid",
        "num_groups": groups,
        "num_kept_groups": kept,
        "has_correction": True,
        "is_normalized": options.flag("norm_topk_prob", True),
        "scale": options.positive("routed_scaling_factor", scale),
    }
