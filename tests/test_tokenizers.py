"""Tokenizers from both kinds of files, and chats."""

import enum
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from test_files import refusal, write_json
from test_gguf import write_gguf
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

import statecore as sc
from statecore.generation._text import TextStream
from statecore.models.files import _chat_limits, check_vocabulary, open_folder, open_gguf
from statecore.models.files._chat import ChatTemplate
from statecore.models.files._engine_scores import BYTE, CONTROL, NORMAL, USER_DEFINED, ScoreEngine

CHATS = Path(__file__).parent / "fixtures" / "chats"
CORPUS = ["the cat and the hat, then 12345 more\n\n", "naïve 日本語 it's  they'll\tgo"] * 3
TEXTS = [*CORPUS, "", " ", "\n", "e\u0301 🤗 ﷺ", "<eos>x<user>", "In 1969,\n\n12 people", "   lead   "]


def trained():
    """A byte-level tokenizer that splits digits, with a special token and one of the user's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<user>", normalized=False)])
    return tokenizer


def bpe_fields(tokenizer, pre="smollm", **more):
    model = json.loads(tokenizer.to_str())["model"]
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "token_type": [{"<eos>": CONTROL, "<user>": USER_DEFINED}.get(token, NORMAL) for token in tokens],
        "eos_token_id": vocab["<eos>"],
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def gguf_tokenizer(tmp_path, fields):
    write_gguf(tmp_path / "m.gguf", "llama", fields=fields)
    return open_gguf(tmp_path / "m.gguf").tokenizer


def streamed(tokenizer, tokens):
    stream, pieces = TextStream(tokenizer=tokenizer), []
    for token in tokens:
        stream, piece = stream.push(token)
        pieces.append(piece)
    return "".join([*pieces, stream.flush()[1]])


def test_bpe_of_a_gguf_is_the_tokenizer_it_came_from(tmp_path):
    original = trained()
    tokenizer = gguf_tokenizer(tmp_path, bpe_fields(original))
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokens == original.encode(text).ids
        assert tokenizer.decode(tokens) == original.decode(tokens) == text.replace("<eos>", "")
        assert streamed(tokenizer, tokens) == tokenizer.decode(tokens)
    assert tokenizer.vocab_size == original.get_vocab_size() and tokenizer.stop_tokens == (0,)
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == "" and not tokenizer.has_chat


def test_special_tokens_around_a_text(tmp_path):
    fields = bpe_fields(trained(), bos_token_id=290, eot_token_id=7, add_bos_token=True, add_eos_token=True)
    tokenizer = gguf_tokenizer(tmp_path, fields)
    inner = tokenizer.encode("the cat", add_special_tokens=False)
    assert tokenizer.encode("the cat") == [290, *inner, 0] and tokenizer.stop_tokens == (0, 7)


# Pieces that transformers 5.24 makes of this text with the same pattern (integrations/gguf/gguf_tokenizer_mapping.py).
SPLIT = "It's 12345é\n\n  x!?\r\n #1_"
PIECES = {
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", "é", "\n\n", " ", " x", "!?\r\n", " #", "1", "_"],
    "llama-bpe": ["It", "'s", " ", "123", "45", "é", "\n\n", " ", " x", "!?\r\n", " #", "1", "_"],
    "gpt-2": ["It", "'s", " 12345", "é", "\n\n ", " x", "!?", "\r\n", " #", "1", "_"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", "é", "\n\n ", " x", "!?", "\r\n", " #", "1", "_"],
    "default": ["It", "'", "s", " ", "123", "45", "é", "\n\n ", " x", "!?", "\r\n ", "#", "1", "_"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_split_as_the_file_says(tmp_path, pre):
    tokenizer = gguf_tokenizer(tmp_path, bpe_fields(trained(), pre))
    found = tokenizer.engine.tokenizer.pre_tokenizer.pre_tokenize_str(SPLIT)
    assert [SPLIT[start:end] for _, (start, end) in found] == PIECES[pre]


def test_kinds_of_bpe_differ_in_more_than_splits(tmp_path):
    assert gguf_tokenizer(tmp_path, bpe_fields(trained(), "qwen2", bos_token_id=5)).encode("e\u0301") == gguf_tokenizer(
        tmp_path, bpe_fields(trained(), "qwen2")
    ).encode("é")
    llama = gguf_tokenizer(tmp_path, bpe_fields(trained(), "llama-bpe", bos_token_id=5))
    assert llama.encode("a")[0] == 5 and llama.encode("e\u0301") != llama.encode("é")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "klingon"}, ["tokenizer.ggml.pre is 'klingon'", "smollm, qwen2, llama-bpe", "tokenizer.json"]),
        ({"pre": None}, ["tokenizer.ggml.pre is None"]),
        ({"pre": ["smollm"]}, ["tokenizer.ggml.pre is no text"]),
        ({"model": [1, 2]}, ["tokenizer.ggml.model is no text"]),
        ({"add_bos_token": [True, False]}, ["add_bos_token is array", "true or false"]),
        ({"model": "bert"}, ["tokenizer.ggml.model is 'bert'", "gpt2, llama"]),
        ({"merges": None}, ["merges is missing"]),
        ({"merges": ["q zz"]}, ["merges do not fit"]),
        ({"tokens": None}, ["tokens is missing"]),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "eos_token_id": 0}, ["one text twice"]),
        ({"token_type": [1]}, ["token_type does not hold one number for each"]),
        ({"eos_token_id": 9999}, ["eos_token_id is 9999"]),
        ({"model": "llama"}, ["scores does not hold"]),
    ],
)
def test_a_gguf_tokenizer_that_cannot_be_built(tmp_path, change, words):
    fields = bpe_fields(trained(), **{"pre": "smollm", **change})
    refusal(lambda: gguf_tokenizer(tmp_path, fields), *words)


# Scores: as SentencePiece merges them.

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "abc", "\u2581ab", "caa", "aa"]
RUNS = ["\n\n", "  ", "    ", "<user>"]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *RUNS, *WORDS]
KINDS = [2, CONTROL, CONTROL, *[BYTE] * 256, *[USER_DEFINED] * len(RUNS), *[NORMAL] * len(WORDS)]
SCORES = [0.0] * (259 + len(RUNS)) + [-float(i * 7 % 11) for i in range(len(WORDS))]


def score_engine(**changes):
    settings = {"unknown": 0, "before": [1], "after": [], "has_prefix": False, **changes}
    return ScoreEngine(TOKENS, SCORES, KINDS, **settings)


def merged_plainly(text):
    """The definition: merge the best pair of neighbors, the leftmost of equals, until there is none."""
    pieces = list(text)
    vocab = {token: score for token, score, kind in zip(TOKENS, SCORES, KINDS, strict=True) if kind == NORMAL}
    while True:
        pairs = [(-vocab[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in vocab]
        if not pairs:
            return [TOKENS.index(piece) for piece in pieces]
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(st.text("abc\u2581", max_size=30))
def test_scores_merge_by_their_definition(text):
    text = re.sub("\u2581+", "\u2581", text)  # runs are the user's
    assert score_engine().encode(text.replace("\u2581", " "), add_special_tokens=False) == merged_plainly(text)


@given(
    st.text(st.sampled_from("abc \n<>su/é日\u0301🤗\x00") | st.characters(codec="utf-8"), max_size=40), st.booleans()
)
def test_scores_round_trip(text, has_prefix):
    engine = score_engine(has_prefix=has_prefix)
    text = re.sub("</?s>", "", text)
    tokens = engine.encode(text, add_special_tokens=True)
    decoded = engine.decode(tokens)
    if has_prefix:  # whatever follows a token of the user's has one more space
        assert decoded.replace(" ", "") == text.replace(" ", "")
    else:
        assert decoded == text


def test_whole_tokens_of_scores():
    def texts(text):
        return [TOKENS[token] for token in score_engine().encode(text, add_special_tokens=False)]

    assert texts("a     b") == ["a", "    ", "\u2581", "b"]  # the longest run first
    assert texts("\n\n\na") == ["\n\n", "<0x0A>", "a"]
    assert texts("a<user><s>é") == ["a", "<user>", "<s>", "<0xC3>", "<0xA9>"]
    assert score_engine(after=[2]).encode("a", add_special_tokens=True) == [1, TOKENS.index("a"), 2]
    assert score_engine().decode([1, TOKENS.index("<0xC3>"), 10_000]) == "\ufffd"


def test_scores_of_a_gguf(tmp_path):
    fields = {
        "model": "llama",
        "pre": "default",
        "tokens": TOKENS,
        "scores": SCORES,
        "token_type": KINDS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    tokenizer = gguf_tokenizer(tmp_path, {f"tokenizer.ggml.{key}": value for key, value in fields.items()})
    tokens = tokenizer.encode("abc é")
    assert tokens[0] == 1 and tokenizer.decode(tokens) == "abc é" == streamed(tokenizer, tokens)
    assert tokenizer.vocab_size == len(TOKENS) and tokenizer.stop_tokens == (2,)
    fields["tokens"] = ["<0xZZ>" if token == "<0x00>" else token for token in TOKENS]
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    refusal(lambda: gguf_tokenizer(tmp_path, fields), "byte tokens")


# Folders.


@pytest.fixture
def folder(tmp_path):
    original = trained()
    original.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    original.enable_truncation(3)
    original.enable_padding(length=50)
    original.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "config.json", {"eos_token_id": 3})
    return tmp_path


def test_a_tokenizer_of_a_folder(folder):
    tokenizer, original = open_folder(folder).tokenizer, trained()
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokens == [0, *original.encode(text).ids]  # neither cut nor filled up
        assert streamed(tokenizer, tokens) == tokenizer.decode(tokens) == text.replace("<eos>", "")
    with pytest.raises(sc.UnsupportedError, match="UTF-8"):
        tokenizer.encode("\udcff")


def test_where_a_text_ends(folder):
    def stops():
        return open_folder(folder).tokenizer.stop_tokens

    assert stops() == (3,)
    write_json(folder / "generation_config.json", {"eos_token_id": [7, 2, 7]})
    assert stops() == (2, 7)
    write_json(folder / "generation_config.json", {})
    write_json(folder / "config.json", {"text_config": {"eos_token_id": 4}})
    assert stops() == (4,)
    write_json(folder / "config.json", {})
    write_json(folder / "tokenizer_config.json", {"eos_token": {"content": "<eos>"}})
    assert stops() == (0,)
    write_json(folder / "config.json", {"eos_token_id": "x"})
    refusal(stops, "eos_token_id 'x'")


def test_no_tokenizer_and_a_broken_one(folder):
    (folder / "tokenizer.json").write_text('{"model": {"type": "Nothing"}}')
    refusal(lambda: open_folder(folder).tokenizer, "tokenizer.json is no tokenizer")
    (folder / "tokenizer.json").write_text('{"model"')
    refusal(lambda: open_folder(folder).tokenizer, "tokenizer.json is not JSON")
    write_json(folder / "tokenizer.json", [1])
    refusal(lambda: open_folder(folder).tokenizer, "tokenizer.json must hold an object")
    absent = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    absent["single"] = [{"SpecialToken": {"id": "[NOT]", "type_id": 0}}]
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    write_json(folder / "tokenizer.json", {"model": model, "post_processor": absent})
    refusal(lambda: open_folder(folder).tokenizer, "tokenizer.json is no tokenizer")
    (folder / "tokenizer.json").unlink()
    assert open_folder(folder).tokenizer is None


def test_a_tokenizer_of_another_vocabulary(folder):
    tokenizer = open_folder(folder).tokenizer
    size = tokenizer.vocab_size
    check_vocabulary(tokenizer, size)
    check_vocabulary(tokenizer, size + 100)  # padded, for speed
    refusal(lambda: check_vocabulary(tokenizer, size - 1), f"has {size} tokens", f"for {size - 1}", "another model")
    fast = tokenizer.engine.tokenizer
    fast.add_special_tokens(["<image>"])
    fast.save(str(folder / "tokenizer.json"))
    check_vocabulary(open_folder(folder).tokenizer, size)  # no text has it
    write_json(folder / "config.json", {"eos_token_id": size})
    refusal(lambda: check_vocabulary(open_folder(folder).tokenizer, size), f"has {size + 1} tokens")


# Chats.

EXPECTED = json.loads((CHATS / "expected.json").read_text(encoding="utf-8"))
USER = {"role": "user", "content": "Hi"}


def template_of(name):
    return (CHATS / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", EXPECTED["rows"], ids=lambda row: row["template"])
def test_chats_are_rendered_as_the_reference_does(row):
    template = ChatTemplate(template_of(row["template"]), EXPECTED["special_tokens"], "test")
    variables = {"add_generation_prompt": True, **row["variables"]}
    generation = variables.pop("add_generation_prompt")
    before = json.dumps(row["messages"])
    assert template.render(row["messages"], add_generation_prompt=generation, variables=variables) == row["text"]
    assert json.dumps(row["messages"]) == before


def test_where_a_template_comes_from(folder):
    def chat(**variables):
        return open_folder(folder).tokenizer.chat([USER], **variables)

    with pytest.raises(sc.UnsupportedError, match="has no chat template"):
        chat()
    named = [{"name": "default", "template": "D{{ eos_token }}"}, {"name": "tool_use", "template": "T{{ tools }}"}]
    write_json(folder / "tokenizer_config.json", {"eos_token": "<eos>", "chat_template": named})
    assert (chat(), chat(tools=[{"a": 1}])) == ("D<eos>", "T[{'a': 1}]")
    write_json(folder / "chat_template.json", {"chat_template": "J{{ messages[0].content }}"})
    assert chat() == "JHi"
    (folder / "chat_template.jinja").write_text("F{{ add_generation_prompt }}")
    assert (chat(), chat(add_generation_prompt=False)) == ("FTrue", "FFalse")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    assert (chat(tools=[]), chat()) == ("A", "FTrue")
    write_json(folder / "chat_template.json", {"chat_template": 3})
    (folder / "chat_template.jinja").unlink()
    refusal(chat, "no chat template named `default`")


def test_a_chat_has_its_special_tokens_once(folder):
    (folder / "chat_template.jinja").write_text("<eos>{{ messages[0].content }}")
    tokenizer = open_folder(folder).tokenizer
    assert tokenizer.encode_chat([USER]) == tokenizer.encode("Hi") == [0, *trained().encode("Hi").ids]


def test_a_chat_of_a_gguf(tmp_path):
    fields = {**bpe_fields(trained()), "tokenizer.chat_template": "{{ eos_token }}{{ messages[0].content }}"}
    assert gguf_tokenizer(tmp_path, fields).chat([USER]) == "<eos>Hi"


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{% set ns = namespace(__init__=1) %}",
    "{% set ns = namespace() %}{% set ns['_x'] = 1 %}",
    "{{ '{0.__class__}'.format(messages).mro() }}",
    "{{ dict.mro() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_that_leaves_its_sandbox_is_refused(source):
    with pytest.raises(sc.StateError, match="of test") as caught:
        text = ChatTemplate(source, {}, "test").render([USER], add_generation_prompt=True, variables={})
        pytest.fail(text)
    assert isinstance(caught.value, sc.LoadError | sc.UnsupportedError)


LONG = "{% for i in range(99999) %}"
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
GROWS = "{% set all = namespace(text='x') %}{% for i in range(90) %}"


def render(source, messages=(USER,), **variables):
    return ChatTemplate(source, {}, "test").render(messages, add_generation_prompt=True, variables=variables)


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("{% if %}", sc.LoadError, "cannot be parsed, line 1"),
        ("{{ ''.__class__.mro() }}", sc.LoadError, "leave its sandbox"),
        ("{{ raise_exception('no roles') }}", sc.UnsupportedError, "refuses these messages: no roles"),
        ("{{ nothing.at_all }}", sc.UnsupportedError, "refuses these messages: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", sc.UnsupportedError, "division"),
        ("{% for i in range(999999999) %}{% endfor %}", sc.UnsupportedError, "Range too big"),
        (f"{LONG}{LONG}{'{% endfor %}' * 2}", sc.UnsupportedError, "did not end in 0.2 seconds"),
        (f"{TWICE}{{{{ f(60) }}}}", sc.UnsupportedError, "did not end"),
        ("{{ 'x' * 10 ** 11 }}", sc.UnsupportedError, "100000000000 parts"),
        ("{{ [1] * 10 ** 11 }}", sc.UnsupportedError, "100000000000 parts"),
        ("{{ 9 ** 99999999 }}", sc.UnsupportedError, "parts"),
        (f"{GROWS}{{% set all.text = all.text ~ all.text %}}{{% endfor %}}", sc.UnsupportedError, "16777216 parts"),
        (f"{GROWS}{{% set all.text = all.text + all.text %}}{{% endfor %}}", sc.UnsupportedError, "16777216 parts"),
        ("{{ '' | center(10 ** 17) }}", sc.UnsupportedError, "refuses these messages"),
        ("{{ lipsum(9) }}", sc.UnsupportedError, "'lipsum' is undefined"),
    ],
)
def test_a_template_that_fails_says_why(monkeypatch, source, error, words):
    monkeypatch.setattr(_chat_limits, "MAX_SECONDS", 0.2)
    with pytest.raises(error, match=words):
        render(source)


def test_what_a_template_may_see():
    class Role(enum.StrEnum):
        USER = "user"

    source = "{{ messages[0].role }} {{ a | tojson }} {{ messages[0].x is defined }} {{ strftime_now('%%') }}"
    message = {"role": Role.USER, "x": None}
    assert (
        render(source, [message], a=(np.float32(0.5), np.bool_(False), np.int64(3))) == "user [0.5, false, 3] False %"
    )
    for bad in ([], ["Hi"], [{"content": object()}]):
        with pytest.raises(sc.UnsupportedError, match="message"):
            render("", bad)
    with pytest.raises(sc.UnsupportedError, match="plain JSON"):
        render("", tools=[print])
