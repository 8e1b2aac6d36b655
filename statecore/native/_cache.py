"""What was computed from an object, remembered for as long as the object lives."""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

# Lengths change with each token, so that old answers are dropped rather than collected.
_MOST = 256


class IdentityCache:
    """Answers by the identity of an owner: hashing a geometry costs more than an estimate.

    Holds no owner alive. Two threads may compute one answer twice, never a wrong one.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref, dict[Hashable, Any]]] = {}

    def get(self, owner: object, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Returns the answer for `owner` and `key`, computed if it is not remembered."""
        entry = self._entries.get(id(owner))
        # The id of an object that is gone may be that of another one.
        if entry is None or entry[0]() is not owner:
            name = id(owner)
            entry = weakref.ref(owner, lambda _: self._entries.pop(name, None)), {}
            self._entries[name] = entry
        answers = entry[1]
        if key not in answers:
            if len(answers) >= _MOST:
                answers.clear()
            answers[key] = compute()
        return answers[key]
