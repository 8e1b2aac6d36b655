"""The paired-ratio harness measures what it says."""

import json
import time

import pytest
from rich.console import Console

import statecore as sc
from bench import ssm
from bench.harness import Case, Fact, compare, measure, print_records, write_json
from statecore import testing


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


@pytest.mark.slow
def test_both_forms_of_the_recurrence_are_steps():
    """What `bench/ssm.py` times gives the right state: masked and closed."""
    shape = ssm.Shape(num_layers=2, num_heads=3, head_size=4, state_size=8)
    params = ssm.make_params(shape)
    for replay in (ssm.replay_masked, ssm.replay_closed):
        backend = ssm.make_backend(shape, replay)
        state = backend.init(params, batch=2, capacity=16)
        state, _ = sc.extend(backend, params, state, [[1, 2, 3], [3, 2, 1]])
        for counts in ([3, 1], [0, 4]):
            window = [[4, 5, 6, 7], [0, 1, 2, 3]]
            testing.check_commit(backend, params, state, window, counts, tolerance=1e-5)
