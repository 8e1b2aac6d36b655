"""Constraints: choices, masks of windows, grammars, and copies that go on alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import statecore as sc
from statecore.generation._constraint import OneOf, step_masks, window_masks
from statecore.generation._llguidance import Grammars
from statecore.models._tokenizer import ByteTokenizer

V = 8

choices = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5)


def after(constraint, tokens):
    for token in tokens:
        constraint.advance(token)
    return constraint


def allowed(constraint):
    return np.flatnonzero(constraint.mask()).tolist()


@given(rows=choices)
def test_a_choice_allows_what_some_choice_goes_on_with(rows):
    """Against the definition, over every sequence of up to four tokens."""
    end = 7
    for size in range(5):
        for tokens in itertools.product(range(4), repeat=size):
            tokens = list(tokens)
            longer = {row[size] for row in rows if row[:size] == tokens and len(row) > size}
            if size and not any(row[:size] == tokens for row in rows):
                with pytest.raises(sc.UnsupportedError):
                    after(OneOf(rows, vocab_size=V, end_tokens=[end]), tokens)
                continue
            constraint = after(OneOf(rows, vocab_size=V, end_tokens=[end]), tokens)
            ends = tokens in rows and bool(longer)
            assert allowed(constraint) == sorted(longer | ({end} if ends else set()))
            assert constraint.is_complete == (not longer)
            if ends:
                constraint.advance(end)
                assert constraint.is_complete and allowed(constraint) == []


@given(rows=choices, picks=st.lists(st.integers(0, 9), max_size=6), cut=st.integers(0, 6))
def test_a_copy_goes_on_alone(rows, picks, cut):
    one = OneOf(rows, vocab_size=V, end_tokens=[7])
    seen, copy = [], None
    for number, pick in enumerate(picks):
        if number == cut:
            copy, seen = one.copy(), allowed(one)
        if one.is_complete:
            break
        one.advance(allowed(one)[pick % len(allowed(one))])
    assert copy is None or allowed(copy) == seen


def test_choices_that_mean_nothing_are_refused():
    for rows in ([], [[]], [[1], []], [[V]], [[-1]], [[True]]):
        with pytest.raises(sc.GeometryError):
            OneOf(rows, vocab_size=V)
    with pytest.raises(sc.GeometryError):
        OneOf([[1]], vocab_size=V, end_tokens=[V])
    with pytest.raises(sc.UnsupportedError, match="begins another"):
        OneOf([[1], [1, 2]], vocab_size=V)
    constraint = after(OneOf([[1, 2], [1, 3]], vocab_size=V), [1])
    with pytest.raises(sc.UnsupportedError, match=r"\[2, 3\]"):
        constraint.advance(1)
    assert allowed(constraint) == [2, 3]


def test_a_choice_among_texts():
    constraint = OneOf.texts(iter(["yes", "né"]), ByteTokenizer(), vocab_size=256)
    after(constraint, b"n")
    assert allowed(constraint) == ["é".encode()[0]]
    assert after(constraint, "é".encode()).is_complete
    assert constraint.nbytes() == 8
    with pytest.raises(sc.UnsupportedError, match="decode"):
        OneOf.texts(["a\udcff"], ByteTokenizer(), vocab_size=256)


# Masks of batches and windows.


def test_masks_of_a_step():
    constraints = [None, OneOf([[1, 2]], vocab_size=V)]
    assert step_masks([None, None], V) is None
    masks = step_masks(constraints, V)
    assert masks.shape == (2, 1, V) and masks[0].all() and np.flatnonzero(masks[1, 0]).tolist() == [1]
    with pytest.raises(sc.GeometryError, match="another model"):
        step_masks(constraints, V + 1)


@given(rows=choices, drafts=st.lists(st.integers(0, 4), min_size=3, max_size=3), valid=st.integers(0, 4))
def test_masks_of_a_window_are_those_of_its_steps(rows, drafts, valid):
    """NC1: and the constraint itself has not moved."""
    constraint = OneOf(rows, vocab_size=V, end_tokens=[7])
    window = np.array([[0, *drafts], [0, 1, 2, 3]])
    masks, live = window_masks([constraint, None], window, np.array([valid, 2]), V)
    assert live[1].tolist() == [True, True, False, False] and masks[1].all()
    for k in range(4):
        prefix = drafts[:k]
        fits = not prefix or any(row[:k] == prefix and len(row) > k for row in rows)
        assert live[0, k] == (k < valid and fits)
        if live[0, k]:
            assert (masks[0, k] == after(constraint.copy(), prefix).mask()).all()
        else:
            assert masks[0, k].all()
    assert allowed(constraint) == sorted({row[0] for row in rows})


def test_a_complete_constraint_has_no_live_row():
    done = after(OneOf([[1]], vocab_size=V), [1])
    masks, live = window_masks([done], np.array([[1, 2]]), np.array([2]), V)
    assert not live.any() and masks.all()


# Grammars.


@pytest.fixture(scope="module")
def byte_grammars():
    pytest.importorskip("llguidance")
    return Grammars(ByteTokenizer(), vocab_size=256)


def test_a_regex_over_bytes(byte_grammars):
    constraint = byte_grammars.regex("(ab|cé)+x?")
    assert allowed(constraint) == [ord("a"), ord("c")] and not constraint.is_accepting
    after(constraint, b"ab")
    assert allowed(constraint) == [ord("a"), ord("c"), ord("x")]
    assert constraint.is_accepting and not constraint.is_complete
    after(constraint, "cé".encode())
    after(constraint, b"x")
    assert constraint.is_complete and allowed(constraint) == []


def test_a_wrong_token_is_refused_and_changes_nothing(byte_grammars):
    constraint = after(byte_grammars.regex("abc+"), b"ab")
    for token in (ord("a"), 255, 256):
        with pytest.raises(sc.UnsupportedError, match="may not follow"):
            constraint.advance(token)
    with pytest.raises(sc.GeometryError):
        constraint.advance(-1)
    assert allowed(constraint) == [ord("c")]
    assert after(constraint, b"cc").is_accepting


def test_every_character_can_be_told_in_bytes(byte_grammars):
    """Every byte of every valid character, and none that stands in no text."""
    first = byte_grammars.regex(r"(?s:.)")
    assert allowed(first) == [*range(0x80), *range(0xC2, 0xF5)]
    for char in "é€😀\u07ff\uffff\U0010ffff":
        assert after(byte_grammars.regex(r"(?s:.)"), char.encode()).is_complete


JSON = b'{"a": 12, "b": "x\xc3\xa9"}'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@given(cut=st.integers(0, len(JSON)))
def test_nc1_a_copied_grammar_goes_on_as_its_source(byte_grammars, cut):
    """NC1: the copy is part of a snapshot; its cost is known; its source may go on first."""
    constraint = after(byte_grammars.json_schema(SCHEMA), JSON[:cut])
    saved = constraint.copy()
    assert saved.nbytes() == constraint.nbytes() == 8 * cut
    masks = []
    for token in JSON[cut:]:
        masks.append(allowed(constraint))
        constraint.advance(token)
    assert constraint.is_complete
    for _ in range(2):
        again = saved.copy()
        for token, mask in zip(JSON[cut:], masks, strict=True):
            assert allowed(again) == mask
            again.advance(token)
        assert again.is_complete


def test_masks_of_a_window_over_a_grammar(byte_grammars):
    constraint = after(byte_grammars.json_schema(SCHEMA), JSON[:5])
    window = np.array([[*JSON[4:8]], [*JSON[4:6], 255, 255]])
    masks, live = window_masks([constraint, constraint], window, np.array([4, 4]), 256)
    assert live.tolist() == [[True] * 4, [True, True, False, False]]
    for k in range(4):
        assert (masks[0, k] == after(byte_grammars.json_schema(SCHEMA), JSON[: 5 + k]).mask()).all()


def test_grammars_that_are_none_are_refused(byte_grammars):
    for make in (
        lambda: byte_grammars.regex("a(("),
        lambda: byte_grammars.json_schema("{nonsense"),
        lambda: byte_grammars.json_schema({"type": "no such type"}),
        lambda: byte_grammars.lark("start: nothing"),
    ):
        with pytest.raises(sc.UnsupportedError):
            make()
    assert allowed(byte_grammars.lark('start: "a" | "b" start')) == [ord("a"), ord("b")]
    with pytest.raises(sc.GeometryError, match="end_token"):
        Grammars(ByteTokenizer(), vocab_size=256, end_token=256)


class PairTokenizer(ByteTokenizer):
    """Pairs of bytes are tokens too, so that a token may be part of two characters."""

    def decode(self, tokens):
        return super().decode([byte for t in tokens for byte in ([t] if t < 256 else [0x80 + t % 64, 0xC3])])


def test_a_tokenizer_whose_bytes_cannot_be_told_is_refused():
    pytest.importorskip("llguidance")
    with pytest.raises(sc.UnsupportedError, match="cannot be told"):
        Grammars(PairTokenizer(), vocab_size=300)


class EndTokenizer(ByteTokenizer):
    """Bytes, then an end token without text."""

    def decode(self, tokens):
        return super().decode([token for token in tokens if token < 256])


def test_an_end_token_is_allowed_where_the_text_may_end():
    pytest.importorskip("llguidance")
    constraint = Grammars(EndTokenizer(), vocab_size=260, end_token=256).regex("ab+")
    assert allowed(after(constraint, b"ab")) == [ord("b"), 256]
    copy = constraint.copy()
    constraint.advance(256)
    assert constraint.is_complete and allowed(constraint) == []
    assert allowed(copy) == [ord("b"), 256]


@pytest.mark.parametrize("end", [None, 0])
def test_a_tokenizer_of_the_tokenizers_library(end):
    pytest.importorskip("llguidance")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["yes no maybe yes no été"] * 9, trainer)
    size = tokenizer.get_vocab_size() + 3  # a model's logits are often padded
    constraint = Grammars(tokenizer, vocab_size=size, end_token=end).regex("(yes|no)( maybe)?")
    texts = [tokenizer.decode([token]) for token in allowed(constraint)]
    assert texts and all("yes".startswith(text) or "no".startswith(text) for text in texts)
    after(constraint, tokenizer.encode("yes").ids)
    following = allowed(constraint)
    assert (0 in following) == (end == 0) and constraint.is_accepting
    after(constraint, tokenizer.encode(" maybe").ids)
    assert constraint.is_complete or allowed(constraint) == [0]
