"""The package: what importing it brings, what is public, what is documented."""

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import statecore as sc
from statecore import planes, testing

ROOT = Path(__file__).parent.parent
HEAVY = ["flax", "hypothesis", "matplotlib", "safetensors", "tokenizers", "gguf", "optax", "rich", "pytest"]


@pytest.mark.parametrize("module", ["statecore", "statecore.testing"])
def test_importing_brings_nothing_heavy(module):
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_public_name_is_documented():
    for module in (sc, testing, planes):
        for name in module.__all__:
            thing = getattr(module, name)
            assert thing.__doc__, f"{module.__name__}.{name}"
            if inspect.isclass(thing):
                for member, value in vars(thing).items():
                    if not member.startswith("_") and callable(value):
                        assert value.__doc__, f"{module.__name__}.{name}.{member}"


def test_every_error_is_a_state_error():
    errors = [thing for thing in vars(sc).values() if inspect.isclass(thing) and issubclass(thing, Exception)]
    assert len(errors) >= 11 and all(issubclass(error, sc.StateError) for error in errors)


def test_the_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == sc.__version__


def test_small_files():
    long = [path for path in (ROOT / "statecore").rglob("*.py") if len(path.read_text().splitlines()) > 500]
    assert not long
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60


def test_the_weights_are_small_and_their_card_states_the_loss():
    folder = ROOT / "statecore" / "models" / "weights"
    assert (folder / "tiny_hybrid.safetensors").stat().st_size <= 7_000_000
    assert "nats per byte" in (folder / "MODEL_CARD.md").read_text()
