"""Byte-level BPE from a GGUF file's tokens and merges, text split as llama.cpp and the model's own tokenizer do."""

from collections.abc import Sequence
from typing import Any

from statecore._errors import LoadError
from statecore.models.files._engine_fast import FastEngine
from statecore.models.files._engine_scores import CONTROL, USER_DEFINED

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Each pattern splits what those before it left.
_SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
    "llama-bpe": (_WORDS + r"\p{N}{1,3}" + _REST,),
}
# Text is brought to this form first.
_NORMALIZED = ("qwen2",)
# A piece that is a token is that token, whatever the merges make of it.
_IGNORES_MERGES = ("llama-bpe",)
# Every text begins with the start token, unless the file says otherwise.
MARKS_START = ("llama-bpe",)


def bpe_engine(
    where: str,
    tokens: list[str],
    merges: Any,
    kinds: Sequence[int],
    *,
    split: Any,
    before: Sequence[int],
    after: Sequence[int],
) -> FastEngine:
    """Returns the engine.

    Args:
      where: the file, for messages.
      tokens: their texts in the byte alphabet.
      merges: pairs, best first, each with a space between.
      kinds: of each token.
      split: how text is split before merges: `tokenizer.ggml.pre`.
      before: special tokens at the start of every text.
      after: special tokens at its end.

    Raises:
      LoadError: the split is not known, or tokens and merges do not fit.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    if split not in _SPLITS:
        raise LoadError(
            f"{where}: tokenizer.ggml.pre is {split!r}, which is not implemented, and says how text is split into "
            f"words. Known are: {', '.join(_SPLITS)}. Use the model's Hugging Face folder, with its tokenizer.json."
        )
    vocab = {text: token for token, text in enumerate(tokens)}
    if len(vocab) != len(tokens) or not isinstance(merges, list):
        what = "tokens has one text twice" if isinstance(merges, list) else "merges is missing"
        raise LoadError(f"{where}: tokenizer.ggml.{what}, so no tokenizer can be built.")
    try:
        pairs = [_pair(merge) for merge in merges]
        tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=split in _IGNORES_MERGES))
    except Exception as error:  # the package raises nothing narrower
        raise LoadError(f"{where}: tokenizer.ggml.merges do not fit its tokens: {error}.") from error
    if split in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = _splitter(split)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    _add_whole(tokenizer, tokens, kinds)
    return FastEngine(tokenizer, before=before, after=after)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _splitter(split: str):
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[split]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_whole(tokenizer, tokens: list[str], kinds: Sequence[int]) -> None:
    """Makes the tokens whole that stand for themselves wherever their text is found."""
    from tokenizers import AddedToken

    named = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text, kind in named if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, kind in named if kind == USER_DEFINED])
