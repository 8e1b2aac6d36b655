"""`conformance.toml` names a test for every id of the checklist, or says why there is none."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = tomllib.loads((ROOT / "tests" / "conformance.toml").read_text())
IDS = [f"S{i:02d}" for i in range(1, 57)] + [f"SB{i:02d}" for i in range(1, 41)]
# What still has to be built before these can be shown; nothing else may be open.
OPEN = {"S29", "S44", "S51", "S52", "SB19", "SB20", "SB21"}


def test_every_id_has_a_row():
    assert list(ROWS) == IDS


def test_only_what_is_to_come_is_open():
    assert {name for name, row in ROWS.items() if "open" in row} == OPEN


@pytest.mark.parametrize("name", IDS)
def test_every_row_is_shown_or_says_why_not(name):
    row = ROWS[name]
    assert len(row) == 1
    for test in row.get("tests", []):
        path, _, function = test.partition("::")
        assert re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE), test
    for reason in (row.get("open"), row.get("not_applicable")):
        assert reason is None or len(reason) > 20
