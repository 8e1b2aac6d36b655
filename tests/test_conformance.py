"""`conformance.toml` names a test for every id of the checklist, or says why there is none."""

import re
import tomllib
from pathlib import Path

import pytest
from conftest import ranges

ROOT = Path(__file__).parent.parent
ROWS = tomllib.loads((ROOT / "tests" / "conformance.toml").read_text())
NATIVE = {"NA": 29, "NB": 10, "NC": 14, "ND": 6, "NE": 4, "NF": 7}
IDS = [f"S{i:02d}" for i in range(1, 57)] + [f"SB{i:02d}" for i in range(1, 41)]
IDS += [f"{area}{i}" for area, most in NATIVE.items() for i in range(1, most + 1)]
# What still has to be built before these can be shown; nothing else may be open.
OPEN = {"S44", "S52", "SB20", "SB21"}


def test_ids_are_summed_up_in_order():
    """What a run prints at its end."""
    assert ranges({"S01", "S02", "S03", "SB02", "F10", "SB01", "S09"}) == "F10 S01-S03 S09 SB01-SB02"


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
