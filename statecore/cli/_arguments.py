"""Arguments that several commands take."""

import argparse

MODEL_HELP = "a Hugging Face folder, a .gguf file, or a model the registry knows (default: %(default)s)"


def whole(text: str) -> int:
    """Returns a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
