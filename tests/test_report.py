"""The demo's page: well-formed, self-contained, and its numbers are those of the JSON report."""

import json
import re

import pytest
from test_display import Reader

from statecore.cli import main
from statecore.cli._emissions import emissions_of

PROMPT = "HAMLET.\n<b>To be & not</b>"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The JSON report and the page of one run."""
    path = tmp_path_factory.mktemp("report") / "demo.html"
    out = _Out()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.stdout", out)
        assert main(["demo", "--json", "--tokens", "24", "--prompt", PROMPT, "--html", str(path)]) == 0
    return json.loads("".join(out.written)), path.read_text(encoding="utf-8")


class _Out:
    def __init__(self):
        self.written = []

    def write(self, text):
        self.written.append(text)

    def flush(self):
        pass


def value_at(report, path):
    for key in path.split("."):
        report = report[int(key)] if isinstance(report, list) else report[key]
    return report


def test_the_page_is_well_formed_and_self_contained(reports):
    page = reports[1]
    found = Reader(page.removeprefix("<!DOCTYPE html>\n"))
    tags = {tag for tag, _ in found.elements}
    assert {"html", "head", "title", "body", "svg", "table", "pre"} <= tags
    assert not tags & {"script", "link", "img", "iframe", "object"}
    attributes = [name for _, given in found.elements for name in given]
    assert not {"src", "href", "srcset", "action"} & set(attributes)
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert "color-scheme: light dark" in page


def test_every_number_is_the_json_reports(reports):
    report, page = reports
    found = re.findall(r'<data class="([^"]+)" value="([^"]+)">([^<]+)</data>', page)
    assert len(found) > 60
    for path, value, text in found:
        assert float(value) == value_at(report, path) == float(text.replace(",", "")), path
    shown = {path for path, _, _ in found}
    leaves = ["costs.state_bytes", "speculation.num_verifies", "speculation.tokens_per_verify", "tree.num_bytes"]
    leaves += [f"geometry.{i}.bytes" for i in range(len(report["geometry"]))]
    leaves += [f"costs.{name}.ratio" for name in ("capture_into_slot", "exchange", "commit")]
    leaves += [f"tree.children.0.{key}" for key in ("tokens", "num_bytes")]
    leaves += [f"speculation.emissions.{i}.num_tokens" for i in range(len(report["speculation"]["emissions"]))]
    assert set(leaves) <= shown


def test_the_page_shows_the_run(reports):
    report, page = reports
    found = Reader(page)
    for text in (*report["checks"], *report["futures"], PROMPT):
        assert text in found.text
    assert "<b>To be" not in page
    emissions = report["speculation"]["emissions"]
    assert "".join(item["text"] for item in emissions) in found.text
    assert len([rect for rect in found.named("rect") if rect.get("fill") == "none"]) == sum(
        item["num_drafted"] - item["num_accepted"] for item in emissions
    )


def test_the_emissions_add_up_to_what_the_generation_counted(reports):
    speculation = reports[0]["speculation"]
    verifies = [item for item in speculation["emissions"] if item["num_drafted"]]
    assert len(verifies) == speculation["num_verifies"]
    for key in ("num_drafted", "num_accepted", "num_tokens"):
        assert sum(item[key] for item in verifies) == speculation[key]
    assert sum(item["num_tokens"] for item in speculation["emissions"]) == speculation["text_tokens"]


def test_the_tree_is_the_run_that_was_made(reports):
    """The running run and the fork that waits, with what each has emitted and what is saved of it."""
    tree = reports[0]["tree"]
    (child,) = tree["children"]
    assert (tree["name"], tree["tokens"], tree["is_running"]) == ("run 0", 24, True)
    assert (child["name"], child["tokens"], child["is_running"]) == ("run 0.0", 12, False)
    nbytes = sum(plane["bytes"] for plane in reports[0]["geometry"])
    assert tree["num_bytes"] >= nbytes and child["num_bytes"] > nbytes and "snapshots at 0" in tree["note"]


def test_emissions_by_hand(tiny):
    tokens = list(b"abcabd.")
    proposals = {10: [97, 98, 120], 12: [99], 14: [98, 100]}  # right but the last; never asked for; both right
    found = emissions_of(proposals, 10, tokens, tiny)
    assert [(item["num_drafted"], item["num_accepted"], item["num_tokens"]) for item in found] == [
        (3, 2, 3), (0, 0, 1), (2, 2, 3),
    ]  # fmt: skip
    assert [item["text"] for item in found] == ["abc", "a", "bd."]


@pytest.mark.slow
def test_a_page_by_default_and_none_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["demo", "--tokens", "8"]) == 0
    (path,) = tmp_path.glob("statecore-demo-*.html")
    assert str(path) in capsys.readouterr().out.replace("\n", "")
    Reader(path.read_text(encoding="utf-8"))
    assert main(["demo", "--tokens", "8", "--no-html"]) == 0
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_a_planted_fault_is_on_the_page(tmp_path, capsys):
    path = tmp_path / "demo.html"
    assert main(["demo", "--json", "--tokens", "8", "--inject", "alias", "--html", str(path)]) == 1
    report = json.loads(capsys.readouterr().out)
    found = Reader(path.read_text(encoding="utf-8"))
    assert "FAILED" in found.text and "alias" in found.text
    for detail in report["details"].values():
        assert detail in found.text


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "nowhere" / "demo.html"):
        assert main(["demo", "--html", str(path)]) == 2
        captured = capsys.readouterr()
        assert str(path) in captured.err and not captured.out
