"""Settings of every test run: one compile cache, strict promotion, Hypothesis profiles."""

import os
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

import statecore as sc

# Compiled functions are kept between runs: most of a test's time would be compiling.
CACHE = Path(__file__).parent.parent / ".cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

for name, examples in (("dev", 20), ("ci", 100)):
    settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=name == "ci"
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def tiny() -> sc.Model:
    """The embedded model, loaded once: its compiled functions are shared by all tests."""
    return sc.load("tiny-hybrid")
