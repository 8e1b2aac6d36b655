"""What the registry knows of each family: how to describe a configuration, and how to load a checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from statecore._errors import LoadError
from statecore.backend import Backend, Model
from statecore.models._decoder import struct
from statecore.models._embedded import load_tiny_hybrid
from statecore.models._fill import HEAD, Placement, as_filed, fill
from statecore.models._module import LanguageModel, plain_params
from statecore.models._planes import decoder_backend
from statecore.models._thin import DecoderLayers
from statecore.models._tiny_hybrid import TinyHybridConfig, tiny_hybrid
from statecore.models.families import FAMILIES, Family, shown
from statecore.models.files import Checkpoint, check_vocabulary

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class FamilyLoader:
    """Loads the models of one family."""

    family: Family

    def describe(self, config: Mapping[str, Any], *, dtype: DTypeLike | None = None) -> tuple[Backend, Any]:
        """Returns the backend of a configuration and the shapes of its parameters; allocates nothing."""
        decoder = self.family.decoder(config)
        dtype = _dtype(config) if dtype is None else dtype
        return decoder_backend(decoder, dtype), struct(decoder, dtype)

    def __call__(
        self,
        config: Mapping[str, Any],
        *,
        checkpoint: Checkpoint | None = None,
        dtype: DTypeLike | None = None,
        sharding: Placement = None,
        progress: bool | None = None,
    ) -> Model:
        """Returns a model of `config` with the weights of `checkpoint`, or untrained ones if there is none."""
        decoder = self.family.decoder(config)
        dtype = _dtype(config) if dtype is None else dtype
        if checkpoint is None:
            drawn = plain_params(LanguageModel(decoder, rngs=nnx.Rngs(0)))
            params = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), drawn, struct(decoder, dtype))
            backend = decoder_backend(decoder, dtype)
            return Model(name=self.family.name, backend=backend, params=params, layers=DecoderLayers(decoder, dtype))
        tokenizer = checkpoint.tokenizer
        if tokenizer is not None:
            check_vocabulary(tokenizer, decoder.vocab_size)
        decoder = as_filed(decoder, self.family.tensors(decoder), checkpoint.tensors)
        table = self.family.tensors(decoder)
        params = fill(
            decoder,
            table,
            checkpoint.tensors,
            dtype=dtype,
            sharding=sharding,
            unused=(*self.family.unused, *((HEAD,) if decoder.is_tied else ())),
            progress=progress,
        )
        return Model(
            name=self.family.name,
            backend=decoder_backend(decoder, dtype),
            params=params,
            tokenizer=tokenizer,
            stop_tokens=() if tokenizer is None else tokenizer.stop_tokens,
            layers=DecoderLayers(decoder, dtype),
        )


def _dtype(config: Mapping[str, Any]) -> DTypeLike:
    text = config.get("text_config")
    parts = config, text if isinstance(text, Mapping) else {}
    found = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    name = next((value for value in found if value is not None), "float32")
    if not isinstance(name, str) or name not in _DTYPES:
        raise LoadError(
            f"The configuration has dtype {shown(name)}, but known is only {', '.join(map(repr, _DTYPES))}."
        )
    return _DTYPES[name]


class EmbeddedLoader:
    """Loads the embedded model, which has one configuration and is float32."""

    def describe(self, config: Mapping[str, Any], *, dtype: DTypeLike | None = None) -> tuple[Backend, Any]:
        """Returns its backend and the shapes of its parameters; reads no weights."""
        del config
        _check_float32(dtype)
        decoder = tiny_hybrid(TinyHybridConfig())
        return decoder_backend(decoder), struct(decoder, jnp.float32)

    def __call__(
        self, config: Mapping[str, Any], *, dtype: DTypeLike | None = None, progress: bool | None = None
    ) -> Model:
        """Returns the model; there is nothing to wait for."""
        del config, progress
        _check_float32(dtype)
        return load_tiny_hybrid()


def _check_float32(dtype: DTypeLike | None) -> None:
    if dtype is not None and jnp.dtype(dtype) != jnp.float32:
        raise LoadError(f"The embedded model is float32, and not trained to work in {jnp.dtype(dtype)}.")


def default_loaders() -> tuple[tuple[str, Any], ...]:
    """Returns the architectures that come with statecore, and how each is loaded."""
    families = ((name, FamilyLoader(family)) for name, family in FAMILIES.items())
    return (("tiny-hybrid", EmbeddedLoader()), *families)
