"""A model's tokenizer: text to tokens and back, where a text ends, and how a chat is written."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from statecore._errors import LoadError, UnsupportedError
from statecore.models.files._chat import ChatTemplate, Message


class Engine(Protocol):
    """What turns text into tokens: of the `tokenizers` package, or made from scores."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of a text that is UTF-8."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Returns the text without special tokens; tokens that are not known are nothing."""
        ...

    def largest(self) -> tuple[int, int]:
        """Returns the largest token, and the largest that is not an added special one; -1 if there is none."""
        ...


class TextTokenizer:
    """The tokenizer of a checkpoint."""

    def __init__(
        self, engine: Engine, *, where: str, stop_tokens: Iterable[int] = (), template: ChatTemplate | None = None
    ):
        """Wraps an engine.

        Args:
          engine: encodes and decodes.
          where: the folder or the file it comes from, for messages.
          stop_tokens: that end a text.
          template: of chats, if the model has one.
        """
        self.engine, self.where = engine, where
        self.stop_tokens = tuple(sorted(set(stop_tokens)))
        self._template = template

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return self.engine.largest()[0] + 1

    @functools.cached_property
    def text_vocab_size(self) -> int:
        """One more than the largest token that is not an added special one."""
        return self.engine.largest()[1] + 1

    @property
    def has_chat(self) -> bool:
        """Whether the model comes with a chat template."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the tokens of `text`.

        Special tokens that stand in the text, such as `<|im_end|>`, are found as such.

        Args:
          text: any text that can be UTF-8.
          add_special_tokens: whether to add those that the model wants around every text,
            such as one at its start. A chat has its own: see `encode_chat`.

        Raises:
          UnsupportedError: the text holds a lone surrogate, such as bytes that are not UTF-8 become.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedError(
                f"The text holds {text[error.start : error.end]!r}, which is no character, so this tokenizer has no "
                "token for it. Was it read from bytes that are not UTF-8?"
            ) from error
        return self.engine.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of `tokens`, special ones left out; bytes that are not UTF-8 show as U+FFFD."""
        return self.engine.decode([int(token) for token in tokens])

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Returns the text of a chat, by the model's own template.

        Args:
          messages: mappings with a `role` and a `content`.
          add_generation_prompt: whether to add what comes before an answer.
          **variables: for the template, such as `tools` (as JSON schemas) or `enable_thinking`.

        Raises:
          UnsupportedError: the model has no template, or it refuses these messages.
          LoadError: the template is broken, or tries to leave its sandbox.
        """
        if self._template is None:
            raise UnsupportedError(f"{self.where} has no chat template. Is it a base model? Give it plain text.")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Returns the tokens of a chat; the template writes all special tokens itself. See `chat`."""
        text = self.chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)


def check_vocabulary(tokenizer: TextTokenizer, vocab_size: int) -> None:
    """Refuses a tokenizer whose tokens the model does not have.

    A model with more logits than tokens is padded, which is common. Added special tokens past
    the model's are common too (Gemma's of images), and no text becomes one unless it spells it.

    Args:
      tokenizer: of the same folder.
      vocab_size: logits that the model gives.

    Raises:
      LoadError: a token of text, or one that starts or ends every text, has no logit.
    """
    needed = max(
        tokenizer.text_vocab_size, *(token + 1 for token in (*tokenizer.encode(""), *tokenizer.stop_tokens)), 0
    )
    if needed > vocab_size:
        raise LoadError(
            f"The tokenizer of {tokenizer.where} has {needed} tokens, but the model gives logits for {vocab_size}. "
            "Is it the tokenizer of another model?"
        )
