"""The commands, as a user runs them."""

import json

import pytest

from statecore.cli import main


def demo(capsys, *options):
    status = main(["demo", "--json", "--tokens", "24", *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_demo_json(capsys):
    status, found = demo(capsys)
    assert status == 0
    assert set(found) == {"geometry", "text", "futures", "tree", "checks", "speculation", "costs"}
    assert found["checks"] and all(found["checks"].values())
    assert len(found["geometry"]) <= 12
    assert found["speculation"]["same_text"] is True and found["speculation"]["tokens_per_verify"] > 1
    assert {"path", "kind", "shape", "dtype", "bytes", "undone_by"} == set(found["geometry"][0])
    assert {"capture_into_slot", "exchange", "commit"} < set(found["costs"])
    assert found["futures"][0] != found["futures"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("forget-conv", "rows kept are steps taken (fast)"),
        ("off-by-one", "rows kept are steps taken (fast)"),
        ("alias", "a capture is unchanged by what followed"),
    ],
)
def test_demo_finds_planted_faults(capsys, fault, check):
    status, found = demo(capsys, "--inject", fault)
    assert status == 1
    assert found["injected"] == fault
    assert found["checks"][check] is False and check in found["details"]


def test_demo_prints_tables(capsys):
    assert main(["demo", "--tokens", "8", "--prompt", "[bold]O[/bold]"]) == 0
    printed = capsys.readouterr().out
    for words in ("hidden", "recurrent", "tokens a verify", "np.copyto", "future 2", "[bold]O[/bold]"):
        assert words in printed
    assert "FAILED" not in printed


def test_generate(capsys):
    texts = []
    for speculate in ("0", "4"):
        assert main(["generate", "JULIET.", "--tokens", "24", "--temperature", "0", "--speculate", speculate]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("JULIET.")
    assert len(texts[0].encode()) == len("JULIET.") + 24 + 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["O", "--model", "nobody"], "tiny-hybrid"),
        (["O", "--temperature", "-1"], "temperature"),
        (["", "--tokens", "3"], "empty"),
        (["O", "--tokens", "0"], "at least 1"),
        (["O", "--speculate", "40"], "undo"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(capsys, options, words):
    assert main(["generate", *options]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err


@pytest.mark.parametrize("options", [["--help"], ["demo", "--help"], ["generate", "--help"], ["--version"]])
def test_help(capsys, options):
    with pytest.raises(SystemExit) as left:
        main(options)
    assert left.value.code == 0 and capsys.readouterr().out


def test_unknown_commands_are_usage_errors(capsys):
    for options in ([], ["nothing"], ["demo", "--inject", "nothing"]):
        with pytest.raises(SystemExit) as left:
            main(options)
        assert left.value.code == 2
