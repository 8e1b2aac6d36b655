"""The registry: from the name of an architecture to its loader, as a value."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from statecore._errors import LoadError
from statecore.backend._backend import Backend
from statecore.backend._model import Model

Config = str | Mapping[str, Any]
Loader = Callable[[Mapping[str, Any]], Model]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One architecture of a registry.

    name: the architecture's.
    loader: `loader(config) -> Model`, each time a new load.
    config: the configuration that was looked up.
    """

    name: str
    loader: Loader
    config: Mapping[str, Any]

    def load(self) -> Model:
        """Returns a freshly loaded model."""
        return self.loader(self.config)


@dataclasses.dataclass(frozen=True)
class Registry:
    """An immutable table of loaders. `register` returns a new one."""

    loaders: tuple[tuple[str, Loader], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The architectures known, sorted."""
        return tuple(sorted(name for name, _ in self.loaders))

    def register(self, name: str, loader: Loader) -> "Registry":
        """Returns a registry that also knows `name`; a known name is replaced."""
        others = tuple(pair for pair in self.loaders if pair[0] != name)
        return Registry((*others, (name, loader)))

    def lookup(self, config: Config) -> Entry:
        """Returns the entry of an architecture.

        Args:
          config: its name, or a mapping with the name under `architecture`.

        Raises:
          LoadError: no such architecture; the message lists the known ones.
        """
        table = {"architecture": config} if isinstance(config, str) else dict(config)
        name = table.get("architecture")
        for known, loader in self.loaders:
            if known == name:
                return Entry(known, loader, table)
        known_names = ", ".join(self.names) or "none"
        raise LoadError(f"The registry knows no model {name!r}. It knows: {known_names}.")


def _load_tiny_hybrid(config: Mapping[str, Any]) -> Model:
    from statecore.models import load_tiny_hybrid  # brings flax: only when it is used

    del config
    return load_tiny_hybrid()


def default_registry() -> Registry:
    """Returns the models that come with statecore."""
    return Registry().register("tiny-hybrid", _load_tiny_hybrid)


def load(target: Config | tuple[Backend, Any], *, registry: Registry | None = None) -> Model:
    """Loads a model, with an identity of its own.

    Args:
      target: the name or configuration of a model that the registry knows, or a pair
        `(backend, params)` of your own.
      registry: where names are looked up; the default registry if None.

    Raises:
      LoadError: the name is not known, or the target is neither.
    """
    if isinstance(target, tuple):
        if len(target) != 2 or not isinstance(target[0], Backend):
            raise LoadError(f"A tuple to load must be (backend, params), but is {target!r}.")
        return Model(name=target[0].name, backend=target[0], params=target[1])
    if not isinstance(target, str | Mapping):
        raise LoadError(f"Give the name of a model, a configuration or (backend, params), not {target!r}.")
    return (default_registry() if registry is None else registry).lookup(target).load()
