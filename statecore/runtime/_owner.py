"""What a runtime is made of: one installed state, its mirror, its lock and its fence."""

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import jax
import numpy as np

from statecore._errors import FencedError, LifecycleError, LoadError
from statecore._pytree import any_gone, check_alive
from statecore._typing import PyTree
from statecore.backend import Model, Window
from statecore.native import Estimate
from statecore.runtime import _sharing
from statecore.runtime._installed import Installed, Support, read_only
from statecore.runtime.faults import reach
from statecore.state import Geometry

Params = ParamSpec("Params")
Result = TypeVar("Result")
Self = TypeVar("Self", bound="Owner")


def locked(method: Callable[Concatenate[Self, Params], Result]) -> Callable[Concatenate[Self, Params], Result]:
    """Serialises a public operation: a second thread waits, and finds the state before or after."""

    @functools.wraps(method)
    def run(self: Self, *args: Params.args, **options: Params.kwargs) -> Result:
        with self._lock:
            return method(self, *args, **options)

    return run


def locked_load(method: Callable[Concatenate[Self, Params], Result]) -> Callable[Concatenate[Self, Params], Result]:
    """Serialises an operation on slots between all runtimes of one load, which may be given the same slot."""

    @functools.wraps(method)
    def run(self: Self, *args: Params.args, **options: Params.kwargs) -> Result:
        with self._lock, self._book.lock:
            return method(self, *args, **options)

    return run


class Owner:
    """The installed state and what guards it. Abstract: `Runtime` is what users make."""

    def __init__(self, model: Model, *, batch: int = 1, capacity: int):
        if not isinstance(model, Model):
            raise LoadError(
                f"A runtime needs a loaded model, but was given {type(model).__name__}. Load it: "
                "`sc.load((backend, params))`."
            )
        self.model = model
        self.identity = model.identity
        self.geometry: Geometry = model.geometry(batch=batch, capacity=capacity)
        self.driver: object = None  # the generation that drives this runtime
        self._lock = threading.RLock()
        self._book = _sharing.of(model.identity)
        self._fence: BaseException | None = None
        self._cut_geometries: dict[int, Geometry] = {}
        self._installed = Installed(state=self._empty(), lengths=read_only(np.zeros(batch, np.int64)))
        layout, leaves = self.geometry.layout, jax.tree.leaves(self.state)
        self._flatten: Callable[[PyTree], list[jax.Array]] = layout.treedef.flatten_up_to
        self.vocab_size: int = model.backend.vocab_size(model.params, self.state)
        self.token_capacity: int | None = layout.capacity(leaves)
        self._undo_limit = layout.undo_limit(leaves)
        self._checked_positions: set[str] = set()
        # By version, since a record would keep its state alive.
        self._estimates: tuple[int, dict[str, Estimate | None]] = self._installed.version, {}
        # The arrays of the state that was exchanged in last, to recognise it when it goes.
        self._sealed: tuple[PyTree, list[jax.Array]] = self.state, leaves
        unknown = [f"`{plane.path}` ({plane.describe()})" for plane in self.geometry.planes if plane.nbytes is None]
        self._unsupported = f"the size of {', '.join(unknown)} is not known" if unknown else ""

    def __repr__(self) -> str:
        fence = ", fenced" if self._fence else ""
        return f"Runtime({self.model.name}, lengths {self.lengths.tolist()} of {self.geometry.capacity}{fence})"

    # What is installed.

    @property
    def lengths(self) -> np.ndarray:
        """The length of each sequence, `[B]`, from the host mirror."""
        return self._installed.lengths.copy()

    @property
    def state(self) -> PyTree:
        """The installed state, borrowed: the next transition consumes it. Keep a `capture`."""
        return self._installed.state

    @property
    def version(self) -> int:
        """How often the installed state has changed."""
        return self._installed.version

    @property
    def is_patched(self) -> bool:
        """Whether the installed state was edited since it was last empty, here or where it came from."""
        return self._installed.is_patched

    @property
    def max_window(self) -> int | None:
        """The widest window that the rings can undo; None if there are no rings."""
        return None if self._undo_limit is None else self._undo_limit[0]

    @property
    def is_fenced(self) -> bool:
        """Whether the state was lost in a failed call, so that nothing is possible any more."""
        return self._fence is not None

    def support(self) -> Support:
        """Returns whether this runtime can capture and exchange at all: not once it is fenced.

        Has no effect. An open window is no lack of support; it only has to be committed first.
        """
        if self._fence is not None:
            return Support(is_supported=False, reason=f"fenced: {self._cause()}")
        return Support(is_supported=not self._unsupported, reason=self._unsupported or None)

    @locked
    def settle(self) -> None:
        """Waits until the installed state is complete and known to be good.

        Results of a donating call are in flight until then. Each operation that needs them
        good (capture, copy, validate, exchange, estimate) settles first.

        Raises:
          FencedError: the last call failed on the device, so that its state is lost.
        """
        self._check_healthy()
        self._settle()

    @locked
    def reset(self) -> None:
        """Installs a fresh empty state in place of the installed one."""
        self._check_ready()
        lengths = read_only(np.zeros_like(self.lengths))
        self._install(Installed(self._empty(), lengths, self._installed.version + 1))
        self._book.drop_settled()

    def held_leaves(self) -> list[jax.Array]:
        """Returns the arrays of the installed state, borrowed."""
        return jax.tree.leaves(self._installed.state)

    # Inside.

    def _leaves(self) -> list[jax.Array]:
        """Returns the arrays of the installed state, which an exchange knows without flattening it."""
        state, leaves = self._sealed
        return leaves if state is self._installed.state else jax.tree.leaves(self._installed.state)

    def _empty(self) -> PyTree:
        return self.model.backend.init(self.model.params, batch=self.geometry.batch, capacity=self.geometry.capacity)

    def _install(self, new: Installed) -> None:
        """Replaces what is installed, in one assignment."""
        self._installed = new
        self._sealed = None, []  # or what was installed would live as long as the runtime

    def _following(
        self, state: PyTree, lengths: np.ndarray, *, window: Window | None = None, num_valid: np.ndarray | None = None,
        is_shared: bool = False,
    ) -> Installed:  # fmt: skip
        """Returns what a transition makes of what is installed: its marks stay."""
        before = self._installed
        return Installed(
            state, lengths, before.version + 1, window, num_valid, False, is_shared, before.is_patched,
            before.reservation,
        )  # fmt: skip

    def _cause(self) -> str:
        lines = (str(self._fence).strip() or repr(self._fence)).splitlines()
        # A device that called back to Python reports the whole trace, of which the end says what it was.
        return lines[-1] if "Traceback" in lines[0] else lines[0]

    def _check_healthy(self) -> None:
        if self._fence is not None:
            raise FencedError(
                f"This runtime lost its state in a failed call and is fenced. First cause: {self._cause()}. "
                "Make a new runtime; slots captured before can be installed there."
            ) from self._fence

    def _check_ready(self) -> None:
        self._check_healthy()
        if self._installed.window is not None:
            raise LifecycleError("A window is open: `commit` it first, with 0 rows to keep none of it.")

    def _check_idle(self) -> None:
        installed = self._installed
        if any_gone(self._leaves()):
            self._check_healthy()
            check_alive(self.geometry.layout.named(installed.state), "installed state")
        if self._fence is None and installed.window is None and installed.is_settled:
            return
        self._check_ready()
        self._settle()

    def _settle(self) -> None:
        if self._installed.is_settled:
            return
        reach("settle")
        try:
            jax.block_until_ready(self._installed.state)
        except Exception as cause:  # an interrupt of the wait says nothing about the state
            self._fence = cause
            self._check_healthy()
        self._installed = self._installed._replace(is_settled=True)
