"""Going back to the last boundary of a text."""

import numpy as np
import pytest
from helpers import assert_bits, host, refuses
from sequences import attention_backend, begun, opaque_backend, same, start

import statecore as sc
from statecore import ssm

MASK = np.arange(10) == 0  # token 0 ends a sentence


def texted(tokens, *, ring_slots=4, save_at=()):
    seq = start(prompt=[[9]], ring_slots=ring_slots)
    for token in tokens:
        seq, _ = ssm.step(None, seq, [token])
        if len(seq.tokens[0]) - 1 in save_at:
            seq = ssm.save_ring(seq)
    return seq


def decide(seq, mask=MASK, min_drop=1, **options):
    return ssm.plan_boundary_rollback(seq, mask, num_prompt=1, min_drop=min_drop, **options)


def test_s27_s29_the_last_boundary_with_its_state():
    """S27, S29: it was saved after 2 and after 5 tokens; 7 are there; dropping at least one takes 5."""
    seq = texted([1, 0, 2, 3, 0, 4, 4], save_at=(2, 5))
    decision = decide(seq)
    assert (decision.decline, decision.keep, decision.dropped) == (None, 5, 2)
    back = ssm.apply_boundary_rollback(seq, decision)
    same("digit", back, [[9, 1, 0, 2, 3, 0]])
    assert back.ring.slot_at(6) is not None  # the boundary's own save is kept
    assert decide(seq, min_drop=3).keep == 2
    assert decide(seq, min_drop=7).decline is ssm.Decline.NO_BOUNDARY
    assert decide(back, min_drop=1).keep == 2


def test_s28_declining_in_order_and_changing_nothing():
    """S28, SB08, SB09: each reason hides the later ones; the state is untouched."""
    seq = texted([1, 0, 2], ring_slots=0)
    before = host(seq.state)
    order = [
        ({"is_enabled": False, "is_streamed": True}, ssm.Decline.DISABLED),
        ({"is_streamed": True, "num_rollbacks": 2}, ssm.Decline.STREAM_UNSAFE),
        ({"num_rollbacks": 2, "mask": None}, ssm.Decline.CAP_REACHED),
        ({"mask": None}, ssm.Decline.NO_BOUNDARY),
        ({}, ssm.Decline.NO_SNAPSHOT),
    ]
    for options, reason in order:
        decision = decide(seq, **options)
        assert decision.decline is reason
        refuses(sc.RollbackError, lambda decision=decision: ssm.apply_boundary_rollback(seq, decision), seq.state)
    assert decide(texted([1, 0, 2], save_at=(1,))).decline is ssm.Decline.NO_SNAPSHOT
    assert decide(texted([1, 2, 3], save_at=(1,))).decline is ssm.Decline.NO_BOUNDARY
    opaque = begun(opaque_backend())
    assert decide(opaque, num_rollbacks=2).decline is ssm.Decline.NOT_REWINDABLE
    assert_bits(before, seq.state)
    with pytest.raises(sc.UnsupportedError, match="2 sequences"):
        decide(start())


def test_boundaries_without_recurrent_state_need_no_ring():
    """S19, S25: a disabled ring does not send a hybrid down this path."""
    seq = begun(attention_backend(), prompt=[9, 1, 0, 2, 3])
    decision = decide(seq)
    assert (decision.keep, decision.slot) == (2, None)
    assert ssm.apply_boundary_rollback(seq, decision).state["pos"].tolist() == [3]


def test_boundary_mask_of_a_tokenizer(tiny):
    mask = ssm.boundary_mask(tiny.tokenizer, 256)
    assert [chr(token) for token in np.flatnonzero(mask)] == ["\n", "!", ".", "?"]


def test_stale_decisions_are_refused():
    """S28: planned at another length, or its slot was used again."""
    seq = texted([1, 0, 2, 3], ring_slots=1, save_at=(2,))
    decision = decide(seq)
    later, _ = ssm.step(None, seq, [4])
    overwritten = ssm.save_ring(seq)
    for moved in (later, overwritten, ssm.apply_boundary_rollback(seq, decision)):
        refuses(
            sc.RollbackError,
            lambda moved=moved: ssm.apply_boundary_rollback(moved, decision),
            moved.state,
            "Plan again",
        )
    plain = begun(attention_backend(), prompt=[9, 1, 0, 2, 3])
    decision = decide(plain)
    back = ssm.apply_boundary_rollback(plain, decision)
    refuses(sc.RollbackError, lambda: ssm.apply_boundary_rollback(back, decision), back.state, "Plan again")
    for options in ({"num_prompt": -1}, {"min_drop": -1}):
        with pytest.raises(sc.GeometryError):
            ssm.plan_boundary_rollback(seq, MASK, **({"num_prompt": 1, "min_drop": 1} | options))
    with pytest.raises(sc.RollbackError, match="mask has 2"):
        decide(seq, mask=MASK[:2])


def test_an_open_window_refuses_a_boundary_rollback():
    """F26: with attention alone it would leave the window's rows past the new length, and commit them there."""
    seq = begun(attention_backend(), prompt=[9, 1, 0, 2, 3])
    decision = decide(seq)
    opened, _ = ssm.verify(None, seq, [[4, 5]])
    refuses(sc.LifecycleError, lambda: ssm.apply_boundary_rollback(opened, decision), opened.state, "window is open")
    done = ssm.commit_accepted_prefix(opened, 2, 2)
    assert (done.tokens[0].tolist(), done.state["pos"].item()) == ([9, 1, 0, 2, 3, 4, 5], 7)
    ssm.step(None, done, [1], donate=True)
    with pytest.raises(sc.StateConsumedError):
        ssm.apply_boundary_rollback(done, decision)


def test_a_decision_is_of_one_text():
    """S28: another sequence of the same length does not follow it; the same text begun elsewhere does."""
    seq, other, again = (begun(attention_backend(), prompt=[9, 1, 0, *end]) for end in ([2, 3], [0, 3], [2, 3]))
    decision = decide(seq)
    refuses(sc.RollbackError, lambda: ssm.apply_boundary_rollback(other, decision), other.state, "another text")
    assert ssm.apply_boundary_rollback(again, decision).tokens[0].tolist() == [9, 1, 0]


def test_masks_and_decisions_of_another_make_are_refused():
    seq = texted([1, 0, 2], save_at=(2,))
    for mask in (MASK[None], np.arange(10), np.float32(1)):
        refuses(sc.GeometryError, lambda mask=mask: decide(seq, mask=mask), seq.state, "bool[V]")
    refuses(sc.GeometryError, lambda: ssm.apply_boundary_rollback(seq, None), seq.state, "None")


def test_s25_sb08_a_ring_of_none_declines():
    """S25, SB08: recurrent planes and no ring: declined, never undone by the length alone."""
    seq = texted([1, 0, 2, 3], ring_slots=0)
    decision = decide(seq)
    assert decision.decline is ssm.Decline.NO_SNAPSHOT
    refuses(sc.RollbackError, lambda: ssm.apply_boundary_rollback(seq, decision), seq.state, "ring")
