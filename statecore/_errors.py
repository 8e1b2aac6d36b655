"""Every error a user can meet. Each message says what was given, what was needed and why."""


class StateError(Exception):
    """Base of all errors of statecore; the refused operation has changed nothing."""


class GeometryError(StateError):
    """A state, a token batch or a list of rows does not have the shape that is needed."""


class CapacityError(StateError):
    """The tokens would not fit the capacity of the state."""


class RollbackError(StateError):
    """The state cannot be taken back that far, or that many rows were never verified."""


class IdentityError(StateError):
    """A slot or a window belongs to another load, other weights or another backend."""


class StateConsumedError(StateError):
    """The state was donated to a transition, or its slot exchanged, and is gone."""


class AliasError(StateError):
    """Two planes share one buffer, so that donating one would destroy the other."""


class RefusedError(StateError):
    """A transition inside a trace was refused, and this is the first chance to say so."""


class NonFiniteError(StateError):
    """A recurrent plane holds NaN or an infinity, and would poison every later token."""


class FencedError(StateError):
    """The runtime lost its state in a failed donating transition and takes no more work."""


class BudgetError(StateError):
    """A cost is unknown, overflows, or exceeds a limit."""


class LifecycleError(StateError):
    """The operation is not allowed at this point of a generation or while a window is open."""


class UnsupportedError(StateError):
    """The backend or the setting cannot do this exactly, so it is not done."""


class LoadError(StateError):
    """A model could not be found or does not fit its files."""
