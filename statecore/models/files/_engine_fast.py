"""Tokens by the `tokenizers` package."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class FastEngine:
    """Wraps a `tokenizers.Tokenizer`, which stays reachable as `tokenizer`."""

    def __init__(self, tokenizer: "Tokenizer", *, before: Sequence[int] = (), after: Sequence[int] = ()):
        """Wraps it.

        Args:
          tokenizer: adds the special tokens that its own post-processor says.
          before: further special tokens at the start of every text.
          after: further ones at its end.
        """
        # Settings of whoever trained it, which would cut or fill up a prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self._before, self._after = list(before), list(after)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of a text."""
        tokens = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._before, *tokens, *self._after] if add_special_tokens else tokens

    def decode(self, tokens: list[int]) -> str:
        """Returns the text without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def largest(self) -> tuple[int, int]:
        """Returns the largest token, and the largest that is not an added special one."""
        every = self.tokenizer.get_vocab(with_added_tokens=True).values()
        added = self.tokenizer.get_added_tokens_decoder()
        special = {token for token, entry in added.items() if entry.special}
        extra = special - set(self.tokenizer.get_vocab(with_added_tokens=False).values())
        return max(every, default=-1), max((token for token in every if token not in extra), default=-1)
