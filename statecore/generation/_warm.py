"""A generation's use of a prefix cache: start from what is kept, keep what will be wanted again."""

from statecore._errors import GeometryError, IdentityError, StateError
from statecore.generation._run import Run
from statecore.runtime import Runtime
from statecore.store import PrefixCache


class WarmStart:
    """One generation's prefix cache, and what it has done with it.

    Nothing here fails a request: what cannot be kept is not kept, and `note` says why.

    num_reused: tokens of each prompt that were restored instead of read.
    note: why the last state was not kept; None if it was, or if none was offered.
    """

    def __init__(self, cache: PrefixCache, runtime: Runtime):
        model = runtime.model
        if cache.backend is not model.backend or cache.params is not model.params:
            raise IdentityError(
                f"The prefix cache holds states of another model or other weights than this {model.name}. Make it "
                "from `model.backend` and `model.params`."
            )
        if cache.capacity != runtime.geometry.capacity:
            raise GeometryError(
                f"The prefix cache is for states of {cache.capacity} tokens, but the runtime has a capacity of "
                f"{runtime.geometry.capacity}. Give both the same."
            )
        self.cache = cache
        self.num_reused: list[int] = []
        self.note: str | None = None
        self._last: dict[int, int] = {}

    def start(self, runtime: Runtime, rows: list[list[int]]) -> list[int]:
        """Installs what is kept of `rows`; returns how many tokens of each need not be read."""
        hits = [self.cache.lookup(row, max_tokens=len(row)) for row in rows]
        self.num_reused = [hit.num_tokens for hit in hits]
        if not any(self.num_reused):
            return self.num_reused
        backend, geometry = runtime.model.backend, runtime.geometry
        state = backend.init(runtime.model.params, batch=geometry.batch, capacity=geometry.capacity)
        for number, hit in enumerate(hits):
            if hit.num_tokens:
                state = self.cache.restore(state, number, hit, donate=True)
        runtime.replace_state(state, is_patched=False, lengths=self.num_reused)
        return self.num_reused

    def keep_due(self, runtime: Runtime, run: Run) -> None:
        """Keeps the state of each sequence that has come far enough since the last time."""
        for number, length in enumerate(runtime.lengths.tolist()):
            if self.cache.should_checkpoint(length, self._last.get(number)):
                self._keep(runtime, run, number)

    def keep(self, runtime: Runtime, run: Run) -> None:
        """Keeps the state of every sequence."""
        for number in range(len(run.rows)):
            self._keep(runtime, run, number)

    def _keep(self, runtime: Runtime, run: Run, number: int) -> None:
        row, length = run.rows[number], int(runtime.lengths[number])
        text = [*row.prompt, *row.output][:length]
        if runtime.is_patched:
            self.note = "The state was patched, so it is no longer what its tokens made of an empty one."
            return
        try:
            kept = self.cache.insert(runtime.state, text, number)
        except StateError as refusal:
            self.note = str(refusal)
            return
        self.note = None if kept or not text else "The cache is full and all its entries are leased."
        self._last[number] = length // self.cache.block_size
