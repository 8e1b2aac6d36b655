"""The tree of runs that one generation has grown: who came from whom, and what each holds."""

import dataclasses
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from statecore.generation._lifecycle import Status
from statecore.generation._run import Run, RunId
from statecore.native import SnapshotUsage
from statecore.state import notebook_html

if TYPE_CHECKING:
    from statecore.generation._snapshot import Branch, Snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunNode:
    """One run.

    name: `0` for the root; its forks are `0.0`, `0.1` and so on.
    num_tokens: tokens emitted by its longest sequence.
    status: where it is in its life; None for a run that was dropped and whose forks live.
    is_running: whether its state is the installed one.
    num_bytes: bytes that its saved states hold: its own while it waits, and its snapshots'.
    snapshots: tokens emitted at each of its living snapshots.
    children: forks of it, in order.
    """

    name: str
    num_tokens: int
    status: Status | None
    is_running: bool
    num_bytes: int
    snapshots: tuple[int, ...] = ()
    children: tuple["RunNode", ...] = ()

    def lines(self, indent: str = "") -> list[str]:
        """Returns the node and what is below it as lines of text."""
        status = "dropped" if self.status is None else self.status.value
        mark = " <- runs" if self.is_running else ""
        saved = f", snapshots at {', '.join(map(str, self.snapshots))}" if self.snapshots else ""
        line = f"{indent}{self.name}: {self.num_tokens} tokens, {status}, {self.num_bytes:,} bytes{saved}{mark}"
        return [line, *[below for child in self.children for below in child.lines(indent + "  ")]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """All runs of a generation, from the root.

    root: the run that the generation began with.
    num_runs: runs that live: the running one and its branches.
    num_forks: branches made so far.
    num_exchanges: exchanges so far.
    usage: what living snapshots and branches lease of the budget.
    """

    root: RunNode
    num_runs: int
    num_forks: int
    num_exchanges: int
    usage: SnapshotUsage

    def _repr_html_(self) -> str:
        return notebook_html("show_runs", self)

    def __str__(self) -> str:
        head = f"{self.num_runs} runs, {self.num_forks} forks, {self.num_exchanges} exchanges"
        leased = f"{self.usage.retained_bytes:,} bytes leased, {self.usage.cumulative_copy_bytes:,} copied in all"
        return "\n".join([f"{head}; {leased}", *self.root.lines()])


class Family:
    """The runs of one generation. Holds none of them alive."""

    def __init__(self, root: RunId):
        self.root = root
        self.num_forks = self.num_exchanges = 0
        # A run is known as long as it, a snapshot of it, or one that came from it lives: its id is held by those.
        self._names: WeakKeyDictionary[RunId, str] = WeakKeyDictionary({root: "0"})
        self._parents: WeakKeyDictionary[RunId, RunId] = WeakKeyDictionary()
        self._num_children: WeakKeyDictionary[RunId, int] = WeakKeyDictionary()
        self._lengths: WeakKeyDictionary[RunId, int] = WeakKeyDictionary({root: 0})
        self._branches: WeakSet[Branch] = WeakSet()
        self._snapshots: WeakSet[Snapshot] = WeakSet()

    def add_branch(self, branch: "Branch", parent: RunId) -> None:
        """Counts a new branch as a child of `parent`."""
        run_id = branch.run.run_id
        number = self._num_children.get(parent, 0)
        self._num_children[parent] = number + 1
        self._names[run_id] = f"{self._names[parent]}.{number}"
        self._parents[run_id] = parent
        self._branches.add(branch)
        self._note(branch.run)
        self.num_forks += 1

    def add_snapshot(self, snapshot: "Snapshot") -> None:
        """Counts a new snapshot."""
        self._snapshots.add(snapshot)
        self._note(snapshot.run)

    def count_exchange(self, *runs: Run) -> None:
        """Counts an exchange of these runs."""
        self.num_exchanges += 1
        for run in runs:
            self._note(run)

    def _note(self, run: Run) -> None:
        """Remembers how far a run has come, for when it is dropped."""
        self._lengths[run.run_id] = run.lifecycle.prediction

    def tree(self, running: Run, usage: SnapshotUsage) -> Tree:
        """Returns the tree as it is now."""
        waiting = {branch.run.run_id: branch for branch in self._branches}
        alive = {running.run_id: running, **{run_id: branch.run for run_id, branch in waiting.items()}}
        saved: dict[RunId, list[Snapshot]] = {}
        for snapshot in self._snapshots:
            saved.setdefault(snapshot.run.run_id, []).append(snapshot)
        self._lengths |= {run_id: run.lifecycle.prediction for run_id, run in alive.items()}

        def node(run_id: RunId) -> RunNode | None:
            below = [node(child) for child, parent in self._parents.items() if parent is run_id]
            children = tuple(child for child in below if child is not None)
            run, snapshots = alive.get(run_id), saved.get(run_id, [])
            if run is None and not snapshots and not children and run_id is not self.root:
                return None
            held = waiting[run_id].num_bytes if run_id in waiting else 0
            return RunNode(
                name=self._names[run_id],
                num_tokens=self._lengths.get(run_id, 0),
                status=None if run is None else run.lifecycle.status,
                is_running=run is running,
                num_bytes=held + sum(snapshot.num_bytes for snapshot in snapshots),
                snapshots=tuple(sorted(snapshot.run.lifecycle.prediction for snapshot in snapshots)),
                children=children,
            )

        root = node(self.root)
        assert root is not None
        return Tree(
            root=root,
            num_runs=len(alive),
            num_forks=self.num_forks,
            num_exchanges=self.num_exchanges,
            usage=usage,
        )
