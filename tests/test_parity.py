"""The parity probe: what verify does differently from decoding, counted."""

import numpy as np
import pytest
from generations import model, start

import statecore as sc
from statecore.speculative import NGramDraft, _parity, probe_parity


@pytest.mark.parametrize("name", ["digit-own", "decay-own"])
def test_the_probe_counts_none_where_there_is_none(name, capsys):
    """`exact` has the bits of decoding, in logits and states; and so it is printed."""
    parity = probe_parity(model(name), batch=2, width=4, num_windows=3)
    exact, fast = parity.modes
    assert (exact.mode, fast.mode) == ("exact", "fast")
    assert (exact.num_rows, exact.num_bits, exact.max_ulp, exact.num_greedy) == (24, 0, 0, 0)
    assert (exact.num_states, exact.num_state_bits) == (3, 0)
    assert "none in 24" in capsys.readouterr().out


def test_a_backend_of_steps_has_one_mode_and_bad_sizes_are_refused(capsys):
    assert [one.mode for one in probe_parity(model("decay"), num_windows=1, show=False).modes] == ["exact"]
    assert capsys.readouterr().out == ""
    for sizes in ({"batch": 0}, {"width": 0}, {"num_windows": 1.5}):
        with pytest.raises(sc.GeometryError):
            probe_parity(model("decay"), **sizes)
    with pytest.raises(sc.RollbackError):
        probe_parity(model("digit"), width=10)


def test_differences_are_counted_by_bits_ulp_and_greedy_token():
    """One unit in the last place, also across zero, and another likeliest token."""
    wanted = np.array([[[1.0, 2.0], [3.0, 1.0], [0.0, -1.0]]], np.float32)
    found = wanted.copy()
    found[0, 0, 1] = np.nextafter(np.float32(2), np.float32(3))
    found[0, 1, 1] = 3.5
    assert _parity._differences(found, wanted)[0::2] == (2, 1)
    least = np.array([1e-45, -1e-45], np.float32)
    assert int(np.abs(_parity._ordered(least[:1]) - _parity._ordered(least[1:]))[0]) == 2


def test_a_result_says_which_mode_made_it():
    draft = NGramDraft(num_draft=3, min_ngram=1)
    gen = start("decay-own", max_tokens=24)
    assert gen.speculation.mode is None
    gen.run(12, speculate=draft)
    found = gen.speculation
    assert found.mode == "fast"
    assert found.drafted_at[0] >= found.drafted_at[-1] > 0 and sum(found.drafted_at) == found.num_drafted
    assert sum(found.accepted_at) == found.num_accepted
    gen.lossless = True
    gen.run(12, speculate=draft)
    assert gen.speculation.mode == "mixed"
