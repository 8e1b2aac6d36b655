"""The doors of all operations on a sequence: what is given, and whether a window is open."""

import jax

from statecore._errors import GeometryError, IdentityError, LifecycleError, StateConsumedError, UnsupportedError
from statecore._pytree import check_alive, is_deleted, is_traced, named_leaves
from statecore._typing import PyTree
from statecore.ssm._sequence import OpenWindow, SequenceState


def check_host(*given: object) -> None:
    """Raises UnsupportedError inside a trace, where a sequence could not keep its tokens."""
    if is_traced(given):
        raise UnsupportedError(
            "A sequence keeps its tokens on the host, so its operations cannot run inside a trace. Use `sc.step`, "
            "`sc.verify` and `sc.commit` there."
        )


def check_sequence(seq: SequenceState, *given: object) -> None:
    """Raises GeometryError for what is no sequence, UnsupportedError inside a trace."""
    if not isinstance(seq, SequenceState):
        raise GeometryError(
            f"`statecore.ssm` works on the sequence that `begin` returns, but was given {type(seq).__name__}. Begin a "
            "sequence over the state first."
        )
    check_host(seq.state, given)


def check_closed(seq: SequenceState, *given: object) -> None:
    """The door of everything but resolving a window: none is open, and the state is alive.

    Raises:
      GeometryError: `seq` is no sequence.
      UnsupportedError: called inside a trace.
      LifecycleError: a window is open.
      StateConsumedError: the state was donated.
    """
    check_sequence(seq, *given)
    if seq.opened is not None:
        raise LifecycleError(
            "A window is open: `rollback` or `commit_accepted_prefix` resolves it, and nothing else is possible before."
        )
    check_alive(seq.backend.layout.named(seq.state), "sequence")


def check_open(seq: SequenceState) -> OpenWindow:
    """The door of resolving a window: returns the one that this sequence verified and nobody has resolved.

    Raises:
      LifecycleError: no window is open, or it was resolved before.
      IdentityError: the window, its trace or its parameters are not what this sequence's verify made.
      StateConsumedError: the window's state is gone.
    """
    opened = seq.opened
    if opened is None:
        raise LifecycleError("No window is open: `verify` one first. A window serves once.")
    if opened.ticket.is_served:
        raise LifecycleError(
            "This window was resolved already, through another copy of the sequence. A window serves once; go on with "
            "the sequence that resolving it returned."
        )
    found, verified = parts(seq, opened), opened.ticket.parts
    if len(found) != len(verified) or any(a is not b for a, b in zip(found, verified, strict=True)):
        raise IdentityError(
            "The open window, its trace or the tokens before it are not those of one verify of this sequence, so its "
            "rows would be another text's. Was a part of another sequence put in? Verify the window here."
        )
    check_alive(seq.backend.layout.named(seq.state), "window")
    return opened


def parts(seq: SequenceState, opened: OpenWindow) -> tuple[object, ...]:
    """Returns all that a window depends on, to be compared by identity."""
    leaves = jax.tree.leaves((seq.state, opened.window, opened.params))
    return (seq.backend, *seq.tokens, opened.tokens, opened.num_valid, *leaves)


def check_params(params: PyTree) -> None:
    """Raises StateConsumedError if a parameter is gone that running the model again needs."""
    for path, leaf in named_leaves(params):
        if is_deleted(leaf):
            raise StateConsumedError(
                f"Parameter `{path}` was deleted since the verify, but the strategy `rerun` runs the model again over "
                "the accepted rows. Keep the parameters until the window is resolved."
            )
