"""A tokenizer whose tokens are the bytes of UTF-8."""


class ByteTokenizer:
    """Text as its UTF-8 bytes; 256 tokens, no special ones."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of `text`; bytes that the command line could not decode are kept."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, tokens: list[int]) -> str:
        """Returns the text; bytes that are not UTF-8 show as U+FFFD."""
        return bytes(tokens).decode("utf-8", errors="replace")
