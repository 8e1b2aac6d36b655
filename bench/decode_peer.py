"""The reference's side of `bench/decode.py`: Hugging Face on torch, in a process and an environment of its own.

Reads requests from standard input, one JSON object a line, and answers each with one:
`build` makes a model of random weights and saves it, `warm` reads a prompt into a cache,
and `run` times one forward pass. See `bench/decode_link.py`.
"""

# pyright: reportMissingImports=false, reportArgumentType=false

import copy
import gc
import inspect
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def draw(model: torch.nn.Module, seed: int) -> None:
    """Draws every matrix so that it keeps the size of what it multiplies, and logits come out near 1."""
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in sorted(model.named_parameters()):
        # Vectors, and the taps of convolutions, stay as the family starts them.
        if tensor.ndim == 2:
            tensor.normal_(0.0, 1 / math.sqrt(tensor.shape[1]), generator=generator)


class Session:
    """One model and one warm cache."""

    def __init__(self):
        self._model: Any = None
        self._warm: Any = None
        self._length = 0

    def build(self, config: dict, folder: str, seed: int) -> dict:
        """Makes a model of a configuration and saves it as a folder."""
        options = {key: value for key, value in config.items() if key != "model_type"}
        known = CONFIG_MAPPING[config["model_type"]](**options)
        self._model = AutoModelForCausalLM.from_config(known, dtype=torch.float32).eval()
        draw(self._model, seed)
        self._model.save_pretrained(folder)
        return {
            "num_params": sum(tensor.numel() for tensor in self._model.parameters()),
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
        }

    def warm(self, ids: list[int]) -> dict:
        """Reads a prompt into the cache that a warm `run` starts from."""
        self._warm, self._length = DynamicCache(config=self._model.config), len(ids)
        self._forward(ids, self._warm, 0, keep=0)
        return {}

    def run(self, ids: list[int], is_warm: bool, keep: int = 0, file: str | None = None) -> dict:
        """Times one pass over `ids`, onto a copy of the warm cache or an empty one.

        Args:
          ids: tokens.
          is_warm: whether the warm cache stands before them.
          keep: logits of so many last tokens; 0 is all.
          file: where to save the logits; nowhere if None.
        """
        cache = copy.deepcopy(self._warm) if is_warm else DynamicCache(config=self._model.config)
        start = self._length if is_warm else 0
        began = time.perf_counter()
        logits = self._forward(ids, cache, start, keep)
        seconds = time.perf_counter() - began
        if file is not None:
            np.save(file, logits[0].float().numpy())
        return {"seconds": seconds}

    def _forward(self, ids: list[int], cache: Any, start: int, keep: int) -> torch.Tensor:
        # Bamba counts from zero whatever a cache holds, unless it is told.
        positions = torch.arange(start, start + len(ids))[None]
        accepts = "position_ids" in inspect.signature(self._model.forward).parameters
        options = {"position_ids": positions} if accepts else {}
        return self._model(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=keep, **options).logits


def serve(answers: Any) -> None:
    """Answers requests until the input ends."""
    session = Session()
    known: dict[str, Callable[..., dict]] = {name: getattr(session, name) for name in ("build", "warm", "run")}
    gc.disable()  # as the harness does: a collection would land in one timing
    for line in sys.stdin:
        request = json.loads(line)
        answer = known[request.pop("do")](**request)
        gc.collect()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    # What libraries print must not be taken for an answer.
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        with torch.inference_mode():
            serve(channel)
