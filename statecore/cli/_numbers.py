"""Text for models that have none: tokens spelled as numbers."""

import dataclasses

from statecore import GeometryError, Model


class NumberTokenizer:
    """Token ids as their decimal numbers with a space after each."""

    def encode(self, text: str) -> list[int]:
        """Returns the numbers of `text`.

        Raises:
          GeometryError: there is something else in it.
        """
        words = text.split()
        if not all(word.isdecimal() for word in words):
            raise GeometryError(f"This model has no tokenizer, so a prompt is token ids such as '1 2 3', not {text!r}.")
        return [int(word) for word in words]

    def decode(self, tokens: list[int]) -> str:
        """Returns the tokens as text."""
        return "".join(f"{token} " for token in tokens)


def with_text(model: Model) -> Model:
    """Returns the model, with numbers for text if it has no tokenizer."""
    return model if model.tokenizer is not None else dataclasses.replace(model, tokenizer=NumberTokenizer())
