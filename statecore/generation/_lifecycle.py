"""The life of one run: which steps are allowed from where, and requests from other threads.

| operation | from | to |
|---|---|---|
| begin | prepared, paused | running |
| complete | running | paused, completed or cancelled, by the reason |
| interrupt | running | paused, nothing counted |
| pause | prepared, paused | paused |
| cancel | prepared, paused, running | cancelled, nothing counted |
| fail | any | failed |
| checkpoint | prepared, paused, completed | itself |
| restore | prepared, paused, completed | what was saved, one epoch on |

Cancelled and failed are for good.
"""

import dataclasses
import enum
import threading
from typing import Self

from statecore._errors import LifecycleError


class Status(enum.Enum):
    """Where a run is in its life."""

    PREPARED = "prepared"
    PAUSED = "paused"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


IDLE = (Status.PREPARED, Status.PAUSED)
SAVABLE = (*IDLE, Status.COMPLETED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifecycle:
    """Where a run is. Every operation returns a new one or raises LifecycleError.

    status: where it is.
    prediction: tokens emitted by the sequence that has emitted most.
    epoch: how often this run was restored; never goes back.
    """

    status: Status = Status.PREPARED
    prediction: int = 0
    epoch: int = 0

    def begin(self) -> Self:
        """Starts to emit."""
        return self._moved(Status.RUNNING, IDLE)

    def complete(self, *, num_tokens: int, is_complete: bool) -> Self:
        """Ends with `num_tokens` emitted, the run over or not."""
        after = Status.COMPLETED if is_complete else Status.PAUSED
        return dataclasses.replace(self._moved(after, (Status.RUNNING,)), prediction=self.prediction + num_tokens)

    def interrupt(self) -> Self:
        """Ends with nothing emitted, as if it had not begun."""
        before = Status.PAUSED if self.prediction else Status.PREPARED
        return self._moved(before, (Status.RUNNING,))

    def pause(self) -> Self:
        """Waits; no token, no draw."""
        return self._moved(Status.PAUSED, IDLE)

    def cancel(self) -> Self:
        """Ends for good; what was begun is not counted."""
        return self._moved(Status.CANCELLED, (*IDLE, Status.RUNNING))

    def fail(self) -> Self:
        """Ends for good, whatever it was."""
        return dataclasses.replace(self, status=Status.FAILED)

    def checkpoint(self) -> Self:
        """Returns itself, if it may be saved."""
        return self._moved(self.status, SAVABLE, to="a snapshot")

    def restore(self, saved: "Lifecycle") -> Self:
        """Goes to where `saved` was, one epoch on."""
        self._moved(saved.status, SAVABLE, to=f"{saved.status.value}, restored")
        saved.checkpoint()
        return dataclasses.replace(self, status=saved.status, prediction=saved.prediction, epoch=self.epoch + 1)

    def fork(self) -> "Lifecycle":
        """Returns the life of a child that begins here."""
        self.checkpoint()
        return dataclasses.replace(self, epoch=0)

    def limited(self, *, is_complete: bool) -> "Lifecycle":
        """Returns the life under another limit, which may end it or let a completed one go on."""
        if is_complete:
            return dataclasses.replace(self, status=Status.COMPLETED)
        return dataclasses.replace(self, status=Status.PAUSED) if self.status is Status.COMPLETED else self

    def _moved(self, status: Status, allowed: tuple[Status, ...], to: str | None = None) -> Self:
        if self.status not in allowed:
            raise LifecycleError(
                f"A run that is {self.status.value} cannot become {to or status.value}: that is possible from "
                f"{', '.join(one.value for one in allowed)}."
            )
        return dataclasses.replace(self, status=status)


class Control:
    """Asks a running generation to pause or to stop, from any thread.

    A request is taken up between two tokens: nothing is drawn for it, and no token is lost.
    """

    def __init__(self) -> None:
        self._pause, self._cancel = threading.Event(), threading.Event()

    def pause(self) -> None:
        """Asks to pause. Everything that emits is refused until `acknowledge`."""
        self._pause.set()

    def acknowledge(self) -> None:
        """Lets a paused generation go on."""
        self._pause.clear()

    def cancel(self) -> None:
        """Asks to end the run that is running now, for good."""
        self._cancel.set()

    @property
    def is_pause_requested(self) -> bool:
        """Whether a pause was asked for and not acknowledged."""
        return self._pause.is_set()

    def take_cancel(self) -> bool:
        """Returns whether to cancel, and takes the request: it is the running run's alone."""
        was = self._cancel.is_set()
        if was:
            self._cancel.clear()
        return was

    @property
    def is_cancel_requested(self) -> bool:
        """Whether a cancel was asked for and not yet taken up."""
        return self._cancel.is_set()
