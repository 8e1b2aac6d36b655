"""A model's configuration, read key by key: what is not understood is refused, never ignored."""

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from statecore._errors import LoadError

_REQUIRED = object()

# Keys that say nothing about what the model computes when it generates: of training, of
# how a reply is sampled, of the program that wrote the file.
_IRRELEVANT = frozenset(
    """_attn_implementation _commit_hash _name_or_path architecture architectures attention_dropout auto_map
    bos_token_id chunk_size_feed_forward classifier_dropout do_sample dtype embd_pdrop eos_token_id finetuning_task
    gradient_checkpointing hidden_dropout id2label initializer_range is_decoder is_encoder_decoder is_llama_config
    label2id max_length max_position_embeddings min_length model_type name_or_path num_labels output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type resid_pdrop return_dict
    router_aux_loss_coef sep_token_id task_specific_params temperature tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version use_bfloat16
    use_cache z_loss_coefficient""".split()
)

# Beyond these no model is, and a damaged file could ask for more than any memory holds.
MOST, _MOST_LAYERS, _MOST_EXPERTS = 2**31 - 1, 1024, 4096
_LARGEST_FLOAT = 3.4028234e38
_MOST_LISTED = 20


class _Short(reprlib.Repr):
    """Values in messages: a file can hold a list of a million words, or a number of a million digits."""

    maxlist = maxtuple = maxdict = 8
    maxstring = maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        del level
        return repr(x) if x.bit_length() <= 128 else f"a whole number of {x.bit_length()} bits"


shown = _Short().repr


class Options:
    """The keys of one `config.json`, of which each is taken once and checked.

    Args:
      config: the mapping.
      family: for messages.
    """

    def __init__(self, config: Mapping[str, Any], family: str):
        self.family = family
        self._config = dict(config)
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """Returns the value of a key, `default` where it is absent or null.

        Raises:
          LoadError: it is absent and needed.
        """
        self._taken.add(name)
        value = self._config.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.fault(f"has no `{name}`, which a {self.family} model needs")
        return default

    def whole(self, name: str, default: Any = _REQUIRED, *, least: int = 1, most: int = MOST) -> int:
        """Returns a whole number from `least` to `most`."""
        value = self.take(name, default)
        if type(value) is not int or value < least:
            raise self.wrong(name, value, f"a whole number of at least {least}")
        if value > most:
            raise self.wrong(name, value, f"a whole number of at most {most}")
        return value

    def layers(self, default: Any = _REQUIRED) -> int:
        """Returns `num_hidden_layers`."""
        return self.whole("num_hidden_layers", default, most=_MOST_LAYERS)

    def experts(self, name: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """Returns a number of experts."""
        return self.whole(name, default, least=least, most=_MOST_EXPERTS)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Returns a finite number."""
        value = self.take(name, default)
        if not is_number(value):
            raise self.wrong(name, value, "a finite number")
        return float(value)

    def positive(self, name: str, default: Any = _REQUIRED, *, most: float = _LARGEST_FLOAT) -> float:
        """Returns a finite number above 0, and of at most `most`."""
        value = self.number(name, default)
        if value <= 0:
            raise self.wrong(name, value, "a number above 0")
        if value > most:
            raise self.wrong(name, value, f"a number of at most {most:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false."""
        value = self.take(name, default)
        if default and self._config.get(name, default) is None:
            # Null is false to the reference, or refused.
            value = None
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def choice(self, name: str, default: str, *known: str) -> str:
        """Returns one of the words that are implemented: `default` or one of `known`."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in (default, *known):
            words = ", ".join(repr(word) for word in (default, *known))
            raise self.fault(f"has `{name}` = {shown(value)}, but implemented is only {words}")
        return value

    def words(self, name: str, default: Any, num: int, *known: str) -> tuple[str, ...]:
        """Returns a list of `num` words, one a layer, each of `known`."""
        value = self.take(name, default)
        if not isinstance(value, list | tuple) or len(value) != num:
            raise self.fault(f"has `{name}` = {shown(value)}, but {num} words are needed, one for each layer")
        for word in value:
            if word not in known:
                raise self.fault(
                    f"has {shown(word)} in `{name}`, but implemented is only {', '.join(map(repr, known))}"
                )
        return tuple(value)

    def layer_numbers(self, name: str, default: Iterable[int], num: int) -> frozenset[int]:
        """Returns a list of layers, of which there are `num`."""
        value = self.take(name, list(default))
        if not isinstance(value, list | tuple) or any(type(i) is not int or not 0 <= i < num for i in value):
            raise self.wrong(name, value, f"a list of layers from 0 to {num - 1}")
        return frozenset(value)

    def mapping(self, name: str, default: Any = _REQUIRED) -> dict[str, Any]:
        """Returns names and values."""
        value = self.take(name, default)
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object of names and values")
        return value

    def window(self, default: int | None = None) -> int | None:
        """Returns `sliding_window`: `default` where it is absent, and None, which is no window, where it is null."""
        if self.take("sliding_window", None) is None:
            return None if "sliding_window" in self._config else default
        return self.whole("sliding_window")

    def only(self, name: str, value: Any) -> None:
        """Takes a key that must be absent, null or `value`, since nothing else is implemented."""
        found = self.take(name, value)
        if found != value or isinstance(found, bool) != isinstance(value, bool):
            raise self.fault(f"has `{name}` = {shown(found)}, but implemented is only {value!r}")

    def ignore(self, *names: str) -> None:
        """Takes keys that change nothing in this family."""
        self._taken.update(names)

    def done(self) -> None:
        """Checks that nothing is left.

        Raises:
          LoadError: names each key that this family does not know; null ones do not count.
        """
        left = {name: value for name, value in self._config.items() if value is not None}
        unknown = sorted(left.keys() - self._taken - _IRRELEVANT)
        if unknown:
            listed = ", ".join(f"`{name}` = {shown(left[name])}" for name in unknown[:_MOST_LISTED])
            more = f" and {len(unknown) - _MOST_LISTED} more" if len(unknown) > _MOST_LISTED else ""
            raise self.fault(f"has options that are not implemented: {listed}{more}")

    def wrong(self, name: str, value: Any, needed: str) -> LoadError:
        """Returns the error that a key has this value, where something else is needed."""
        return self.fault(f"has `{name}` = {shown(value)}, but {needed} is needed")

    def fault(self, what: str) -> LoadError:
        """Returns the error that says `what` this configuration has."""
        return LoadError(f"The configuration of this {self.family} model {what}.")


def is_number(value: Any) -> bool:
    """Returns whether a value is a number that float32 can hold."""
    # In this order: a whole number can be too large for a float.
    return type(value) in (int, float) and -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT
