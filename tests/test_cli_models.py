"""The command line on models from files: inspect, generate, demo."""

import json

import pytest
from families import FOLDER, NAMES, ONE_OF_EACH, fixture

import statecore as sc
from statecore.cli import main


@pytest.mark.parametrize("name", NAMES)
def test_inspect_says_what_the_loaded_model_has(name, capsys):
    """Without its weights; a growth in bytes is that of the geometry."""
    assert main(["inspect", str(FOLDER / name), "--batch", "2", "--capacity", "40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    geometry = fixture(name).model.geometry(batch=2, capacity=40)
    assert [plane["path"] for plane in found["planes"]] == [plane.path for plane in geometry.planes]
    assert [plane["bytes"] for plane in found["planes"]] == [plane.nbytes for plane in geometry.planes]
    assert found["bytes_of_state"] == sc.estimate(geometry).retained_bytes
    growth = sc.estimate_growth(geometry, [3, 3], 1)
    assert found["bytes_per_token"] * 2 == growth


def test_inspect_prints_a_table(capsys):
    assert main(["inspect", str(FOLDER / "mistral-window" / "config.json")]) == 0
    shown = capsys.readouterr().out
    for words in ("ring_key", "sliding", "bytes per token", "windows of up to 33 tokens"):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", "no-such-model"], "no model 'no-such-model'"),
        (["inspect", "tiny-hybrid", "--dtype", "bfloat16"], "float32"),
        (["generate", "--model", str(FOLDER / "llama-gqa"), "hello"], "a prompt is token ids"),
        (["generate", "--model", str(FOLDER / "llama-gqa"), "999"], "999"),
        (["generate", "--model", str(FOLDER), "1 2"], "no config.json"),
        (["generate", "--chat", "hello"], "no chat template"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_generate_spells_numbers_without_a_tokenizer(capsys):
    assert main(["generate", "--model", str(FOLDER / "llama-gqa"), "1 2 3", "--tokens", "5", "--temperature", "0"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:3] == ["1", "2", "3"] and len(words) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_demo_runs_on_every_family(name, capsys):
    assert main(["demo", "--model", str(FOLDER / name), "--tokens", "12", "--json", "--prompt", "1 2 3 4 5 6 7 8"]) == 0
    assert all(json.loads(capsys.readouterr().out)["checks"].values())
