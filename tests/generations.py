"""Generations on the toys, for the tests of what a generation does."""

import dataclasses

from helpers import cases

import statecore as sc

CAPACITY = 96
PROMPTS = [[1, 2, 3, 4], [5, 6]]
WARM = sc.Sampler(temperature=0.9, top_k=12, top_p=0.95, min_p=0.01)


class Letters:
    """Sixteen tokens, of which each is a letter; 14 is a full stop and 15 a newline."""

    alphabet = "abcdefghijklmn.\n"

    def encode(self, text: str) -> list[int]:
        return [self.alphabet.index(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.alphabet[token] for token in tokens)


def model(name: str = "decay") -> sc.Model:
    """Returns a new load of a toy, with letters for tokens."""
    case = cases()[name]
    return dataclasses.replace(sc.load((case.backend, case.params)), tokenizer=Letters())


def start(name: str = "decay", *, batch: int = 2, capacity: int = CAPACITY, prompt=None, **options) -> sc.Generation:
    """Returns a generation of `batch` sequences in a runtime of its own."""
    runtime = sc.Runtime(model(name), batch=batch, capacity=capacity)
    return sc.Generation(runtime, PROMPTS[:batch] if prompt is None else prompt, **options)


def alone(row: int, name: str = "decay", **options) -> sc.Generation:
    """Returns sequence `row` of the prompts in a generation of its own."""
    return start(name, batch=1, prompt=PROMPTS[row], **options)
