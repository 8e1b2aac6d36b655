"""The paired-ratio harness measures what it says."""

import json
import time

import pytest
from rich.console import Console

from bench.harness import Case, Fact, compare, measure, print_records, write_json


def sleeping(seconds: float) -> Case:
    return Case(what=f"sleep {seconds}", call=lambda: time.sleep(seconds))


def test_a_ratio_is_of_a_to_b(tmp_path):
    ratio = compare("sleeps", sleeping(0.004), sleeping(0.001))
    assert ratio.num_pairs == 15 and ratio.p10 <= ratio.median <= ratio.p90
    # Sleeping is never shorter than asked for, however busy the machine is.
    assert ratio.seconds_a >= 0.004 and ratio.seconds_b >= 0.001
    timing = measure("sleep", sleeping(0.001))
    fact = Fact(name="bytes", what="copied", value=0)
    write_json(tmp_path / "out.json", [ratio, timing, fact])
    assert "sleeps" in json.dumps(json.loads((tmp_path / "out.json").read_text()))
    print_records(Console(), [ratio, timing, fact])


def test_the_two_run_in_turn_and_setup_is_not_timed():
    turns = []
    a = Case(what="a", call=lambda made: turns.append(made), setup=lambda: "a")
    b = Case(what="b", call=lambda: turns.append("b"))
    compare("turns", a, b)
    assert turns[-4:] == ["a", "b", "a", "b"]


def test_too_few_pairs_are_refused():
    with pytest.raises(ValueError, match="15"):
        compare("few", sleeping(0.0), sleeping(0.0), num_pairs=14)
