"""The registry: from the name of an architecture to its loader, backend and geometry, as a value."""

import dataclasses
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from statecore._errors import LoadError, UnsupportedError
from statecore.backend._backend import Backend
from statecore.backend._model import Model
from statecore.state import Geometry

Config = str | Mapping[str, Any]
# `loader(config) -> Model`; one that loads files takes `checkpoint=`, `dtype=`, `sharding=` and
# `progress=` too, and may have `describe(config, dtype=) -> (backend, shapes of the parameters)`.
Loader = Callable[..., Model]

# The group under which a package may add architectures: the name of each is its entry point's.
ENTRY_POINTS = "statecore.families"


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

    def load(self, **options: Any) -> Model:
        """Returns a freshly loaded model; `options` are the loader's own."""
        return self.loader(self.config, **options)

    def describe(self, *, dtype: Any = None) -> tuple[Backend, Any]:
        """Returns the backend, and the shapes of the parameters; loads no weights.

        Raises:
          UnsupportedError: this loader cannot say without loading.
          LoadError: the configuration is not one that the architecture implements.
        """
        describe = getattr(self.loader, "describe", None)
        if describe is None:
            raise UnsupportedError(f"The loader of {self.name} says what it loads only by loading it: use `load`.")
        return describe(self.config, dtype=dtype)

    def geometry(self, *, batch: int = 1, capacity: int, dtype: Any = None) -> Geometry:
        """Returns the geometry of every state of such a model; loads no weights. Raises as `describe`."""
        backend, params = self.describe(dtype=dtype)
        return backend.geometry(params, batch=batch, capacity=capacity)


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
          config: its name, or a mapping with the name under `architecture` or, as in a
            Hugging Face config.json, under `model_type`.

        Raises:
          LoadError: no such architecture; the message lists the known ones.
        """
        table = {"architecture": config} if isinstance(config, str) else dict(config)
        name = table.get("architecture", table.get("model_type"))
        for known, loader in self.loaders:
            if known == name:
                return Entry(known, loader, table)
        known_names = ", ".join(self.names) or "none"
        raise LoadError(f"The registry knows no model {name!r}. It knows: {known_names}.")


@dataclasses.dataclass(frozen=True)
class _Plugin:
    """A loader of another package, imported when it is first used."""

    point: Any

    def __call__(self, config: Mapping[str, Any], **options: Any) -> Model:
        return self._loader()(config, **options)

    def describe(self, config: Mapping[str, Any], *, dtype: Any = None) -> tuple[Backend, Any]:
        return Entry(self.point.name, self._loader(), config).describe(dtype=dtype)

    def _loader(self) -> Loader:
        try:
            return self.point.load()
        except Exception as error:
            raise LoadError(
                f"The loader of {self.point.name}, {self.point.value}, cannot be imported: {error}."
            ) from error


def default_registry() -> Registry:
    """Returns the models that come with statecore, and those that installed packages add.

    A package adds an architecture by an entry point of the group `statecore.families`
    whose name is the architecture's and whose object is a loader; it does not replace ours.
    """
    from statecore.models import default_loaders  # brings flax: only when it is used

    registry = Registry(default_loaders())
    for point in entry_points(group=ENTRY_POINTS):
        if point.name not in registry.names:
            registry = registry.register(point.name, _Plugin(point))
    return registry


def load(
    target: Config | Path | tuple[Backend, Any],
    *,
    registry: Registry | None = None,
    dtype: Any = None,
    sharding: Any = None,
    progress: bool | None = None,
) -> Model:
    """Loads a model, with an identity of its own.

    Args:
      target: the name of a model that the registry knows; a Hugging Face folder
        (config.json, safetensors, tokenizer.json) or a `.gguf` file; a configuration, whose
        weights are then untrained; or a pair `(backend, params)` of your own.
      registry: where architectures are looked up; the default registry if None.
      dtype: of the parameters, and of the state but for what is float32 always; the one
        that the configuration names if None.
      sharding: a `jax.sharding.Sharding` for all parameters, or a function from a
        parameter's dotted path and shape to one.
      progress: whether to show a bar while weights are read; only on a terminal if None.

    Raises:
      LoadError: the name is not known; the folder or the file is missing, damaged, of an
        architecture or with an option that is not implemented; or its tensors or its
        tokenizer do not fit its configuration. Nothing stays half loaded.
    """
    options = {"dtype": dtype, "sharding": sharding, "progress": progress}
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(target, tuple):
        if len(target) != 2 or not isinstance(target[0], Backend):
            raise LoadError(f"A tuple to load must be (backend, params), but is {target!r}.")
        if options:
            raise LoadError(f"A pair (backend, params) is taken as it is, so {', '.join(options)} cannot be chosen.")
        return Model(name=target[0].name, backend=target[0], params=target[1])
    if not isinstance(target, str | Path | Mapping):
        raise LoadError(f"Give the name or the path of a model, a configuration or (backend, params), not {target!r}.")
    registry = default_registry() if registry is None else registry
    entry, checkpoint = find_model(target, registry)
    if checkpoint is not None:
        options["checkpoint"] = checkpoint
    try:
        return entry.load(**options)
    except TypeError as error:
        if options and "unexpected keyword" in str(error):
            raise LoadError(f"The loader of {entry.name} does not take {', '.join(options)}.") from error
        raise


def find_model(target: Config | Path, registry: Registry) -> tuple[Entry, Any]:
    """Returns the entry of a target, and its checkpoint if it is a folder or a file.

    Raises:
      LoadError: there is no such model and no such path, or the files are unsound.
    """
    if isinstance(target, Mapping) or (isinstance(target, str) and target in registry.names):
        return registry.lookup(target), None
    path = Path(target)
    if isinstance(target, str) and not path.exists() and path.suffix != ".gguf" and len(path.parts) == 1:
        known_names = ", ".join(registry.names) or "none"
        raise LoadError(f"There is no model {target!r}, nor a folder or file of that name. Known: {known_names}.")
    from statecore.models.files import open_folder, open_gguf

    checkpoint = open_gguf(path) if path.suffix == ".gguf" else open_folder(path)
    return registry.lookup(checkpoint.config), checkpoint
