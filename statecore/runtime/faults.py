"""Faults on purpose, at named stages, to test that a failure there changes nothing.

    with faults.inject("copy", RuntimeError("no memory")):
        runtime.capture()  # raises it before anything is copied

Code that can fail at a stage calls `reach(stage)`, which costs next to nothing while no
fault is set. The stages of `Runtime`, in the order in which it comes to them:

estimate: before a cost is computed.
reserve: before a budget is asked.
settle: before results in flight are awaited.
dispatch: before a transition takes the state.
copy: before a copy is started.
copied: when a copy is complete and is not a slot yet.
exchange: when all is checked and nothing has moved.

Others may have stages of their own: any name that is reached can be injected at.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from statecore._errors import LifecycleError

STAGES = ("estimate", "reserve", "settle", "dispatch", "copy", "copied", "exchange")

Fault = BaseException | type[BaseException] | Callable[[], object]


class _Faults(threading.local):
    """The faults of one thread; `active` is empty almost always."""

    def __init__(self) -> None:
        self.active: list[_Injection] = []


class _Injection:
    def __init__(self, stage: str, fault: Fault, after: int):
        self.stage, self.fault, self.left, self.was_reached = stage, fault, after, False


_faults = _Faults()


def reach(stage: str) -> None:
    """Raises the fault that this thread has set for `stage`, if any."""
    for injection in _faults.active:
        if injection.stage == stage:
            _strike(injection)


def _strike(injection: _Injection) -> None:
    injection.left -= 1
    if injection.left >= 0:
        return
    injection.was_reached = True
    if isinstance(injection.fault, BaseException):
        raise injection.fault
    made = injection.fault()
    if isinstance(made, BaseException):
        raise made


@contextmanager
def inject(stage: str, fault: Fault, *, after: int = 0) -> Iterator[None]:
    """Raises `fault` each time this thread reaches `stage` within the block.

    Args:
      stage: the name that `reach` is called with.
      fault: an error, its type, or a function that is called: it may raise, or do harm and
        return.
      after: times that the stage is passed unharmed first.

    Raises:
      LifecycleError: the block ended well and never came to the fault, so that a test of it
        would have tested nothing.
    """
    injection = _Injection(stage, fault, after)
    _faults.active = [*_faults.active, injection]
    try:
        yield
    finally:
        _faults.active = [other for other in _faults.active if other is not injection]
    if not injection.was_reached:
        raise LifecycleError(f"The fault at stage {stage!r} was never reached, so nothing was tested.")
