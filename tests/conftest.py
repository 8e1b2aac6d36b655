"""Settings of every test run: one compile cache, strict promotion, Hypothesis profiles, ids shown at the end."""

import os
import re
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

for name, examples in (("dev", 20), ("ci", 50)):
    settings.register_profile(
        name, max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=name == "ci"
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


# Ids of the checklists, as docstrings of tests name them.
ID = re.compile(r"\b(?:SB|N[A-F]|S|F)\d{1,3}\b")


MAX_MAPS = 20_000
BY_MODEL = ("test_cli_models.py", "test_family_drafts.py", "test_family_laws.py", "test_fidelity.py")
LONG = re.compile("machine|test_family|test_real")


# Before the hook of xdist, which puts the group in a test's name.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # Groups go to processes whole and in this order: the longest first, or one is left alone with it.
    items.sort(key=lambda item: not LONG.search(item.nodeid))
    for item in items:
        # A file is a group, and so is each model of a file that goes through all of them: they share what is compiled.
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        group = f"{item.path.name} {name}" if item.path.name in BY_MODEL else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))
        item.group = group
        # An id stands in the docstring or in the name of a test.
        name = item.name.partition("[")[0].upper().replace("_", " ")
        ids = ID.findall(f"{name} {getattr(getattr(item, 'function', None), '__doc__', None) or ''}")
        item.user_properties.append(("ids", " ".join(ids)))


def pytest_runtest_teardown(item, nextitem):
    """Drops compiled functions before there are too many: each is mapped into memory, of which Linux allows 65,530."""
    maps = Path("/proc/self/maps")
    is_last = nextitem is None or nextitem.group != item.group
    if is_last and maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()


def pytest_terminal_summary(terminalreporter):
    """Prints the ids that passed tests show, and those of which a test failed."""
    for outcome in ("passed", "failed"):
        reports = [report for report in terminalreporter.getreports(outcome) if report.when == "call"]
        found = [ids for report in reports for key, ids in report.user_properties if key == "ids"]
        if shown := set(" ".join(found).split()):
            terminalreporter.write_line(f"ids {outcome}: {ranges(shown)}")


def ranges(ids):
    """Returns ids in order, neighbours as a range: `F01-F03 F10`."""
    split = [re.fullmatch(r"([A-Z]+)(\d+)", name).groups() for name in ids]
    split.sort(key=lambda name: (name[0], int(name[1])))
    runs = []
    for letters, digits in split:
        if runs and runs[-1][0] == letters and int(runs[-1][-1]) + 1 == int(digits):
            runs[-1][-1] = digits
        else:
            runs.append([letters, digits, digits])
    return " ".join(letters + first + (f"-{letters}{last}" if last != first else "") for letters, first, last in runs)


@pytest.fixture(scope="session")
def tiny() -> sc.Model:
    """The embedded model, loaded once: its compiled functions are shared by all tests."""
    return sc.load("tiny-hybrid")
