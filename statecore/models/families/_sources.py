"""Where parameters come from: tensors of a file by name, and how they are put together.

Files hold matrices as `[out, in]`; ours are `[in, out]`, and those that read the same
input lie side by side, so that one product does for all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from statecore.models.mixers import Attention, Mamba2, Mlp, Moe

# `numpy`, or `jax.numpy` where only shapes are asked for.
ArrayModule = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The tensors that one parameter is made of.

    names: in the file.
    build: `build(xp, *arrays)` puts them together, with NumPy or, for shapes, JAX.
    """

    names: tuple[str, ...]
    build: Callable[..., Any]


_NORMS = ("q_norm", "k_norm")

# From the dotted path of a parameter to its source.
Table = dict[str, Source]


def plain(name: str) -> Source:
    """Returns a tensor as it is."""
    return Source(names=(name,), build=lambda xp, array: array)


def matrix(*names: str) -> Source:
    """Returns matrices `[out, in]` as one `[in, sum of outs]`."""
    return Source(names=names, build=lambda xp, *arrays: xp.concatenate([array.T for array in arrays], axis=1))


def vector(*names: str) -> Source:
    """Returns vectors one after the other."""
    return Source(names=names, build=lambda xp, *arrays: xp.concatenate(arrays))


def taps(name: str) -> Source:
    """Returns the weights of a depthwise convolution, `[F, 1, C]`, as `[C, F]`."""
    return Source(names=(name,), build=lambda xp, array: array[:, 0].T)


def prefixed(prefix: str, table: Table) -> Table:
    """Returns a table whose paths begin with `prefix`."""
    return {f"{prefix}.{path}": source for path, source in table.items()}


def linear(target: str, names: tuple[str, ...], *, has_bias: bool) -> Table:
    """Returns the sources of one fused product: the modules `names` side by side, and their biases."""
    table = {target: matrix(*(f"{name}.weight" for name in names))}
    if has_bias:
        table[f"{target}_bias"] = vector(*(f"{name}.bias" for name in names))
    return table


def attention(mixer: Attention, prefix: str, *, out: str = "o_proj", norms: tuple[str, str] = _NORMS) -> Table:
    """Returns the table of a llama-like attention under `prefix`."""
    table = linear("qkv_proj", tuple(f"{prefix}.{name}_proj" for name in "qkv"), has_bias=mixer.has_qkv_bias)
    table |= linear("out_proj", (f"{prefix}.{out}",), has_bias=mixer.has_out_bias)
    if mixer.head_norm is not None:
        table |= {ours: plain(f"{prefix}.{theirs}.weight") for ours, theirs in zip(_NORMS, norms, strict=True)}
    return table


def mlp(mixer: Mlp, prefix: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Table:
    """Returns the table of an MLP under `prefix`."""
    first = ("gate_up", (gate, up)) if mixer.is_gated else ("up", (up,))
    table = linear(first[0], tuple(f"{prefix}.{name}" for name in first[1]), has_bias=mixer.has_bias)
    return table | linear("down", (f"{prefix}.{down}",), has_bias=mixer.has_bias)


def stacked(names: tuple[tuple[str, ...], ...]) -> Source:
    """Returns for each of `names` the matrices `[out, in]` side by side: `[len(names), in, sum of outs]`."""

    def build(xp: ArrayModule, *arrays: Any) -> Any:
        # The only copy: what follows are views of it.
        rows = xp.stack(arrays)
        return rows.reshape(len(names), -1, rows.shape[-1]).swapaxes(1, 2)

    return Source(names=tuple(name for parts in names for name in parts), build=build)


def moe(mixer: Moe, prefix: str, *, shared: str = "shared_experts") -> Table:
    """Returns the table of a mixture of experts under `prefix`, of which `shared` is the shared expert.

    Those of Nemotron-H alone have `fc1_latent_proj` and `fc2_latent_proj` around the experts.
    """
    first, parts = ("gate_up", ("gate_proj", "up_proj")) if mixer.is_gated else ("up", ("up_proj",))
    experts = [f"{prefix}.experts.{expert}" for expert in range(mixer.num_experts)]
    table = {
        "router": matrix(f"{prefix}.gate.weight"),
        first: stacked(tuple(tuple(f"{expert}.{part}.weight" for part in parts) for expert in experts)),
        "down": stacked(tuple((f"{expert}.down_proj.weight",) for expert in experts)),
    }
    if mixer.has_correction:
        table["correction"] = plain(f"{prefix}.gate.e_score_correction_bias")
    if mixer.latent is not None:
        table |= linear("latent_in", (f"{prefix}.fc1_latent_proj",), has_bias=mixer.has_latent_bias)
        table |= linear("latent_out", (f"{prefix}.fc2_latent_proj",), has_bias=mixer.has_latent_bias)
    if mixer.shared is not None:
        table |= {f"shared_{path}": source for path, source in mlp(mixer.shared, f"{prefix}.{shared}").items()}
    if mixer.has_shared_gate:
        table["shared_gate"] = matrix(f"{prefix}.{shared}_gate.weight")
    return table


def mamba2(mixer: Mamba2, prefix: str) -> Table:
    """Returns the table of a Mamba-2 mixer under `prefix`."""
    table = {
        "conv_weight": taps(f"{prefix}.conv1d.weight"),
        "dt_bias": plain(f"{prefix}.dt_bias"),
        "a_log": plain(f"{prefix}.A_log"),
        "skip": plain(f"{prefix}.D"),
    }
    if mixer.has_conv_bias:
        table["conv_bias"] = plain(f"{prefix}.conv1d.bias")
    if mixer.norm is not None:
        table["norm"] = plain(f"{prefix}.norm.weight")
    table |= linear("in_proj", (f"{prefix}.in_proj",), has_bias=mixer.has_in_bias)
    return table | linear("out_proj", (f"{prefix}.out_proj",), has_bias=mixer.has_out_bias)
