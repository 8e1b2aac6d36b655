"""Peak memory of loading a folder: `python bench/decode_memory.py FOLDER` in a process that does nothing else."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, `bench` is not found otherwise

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def is_known() -> bool:
    """Whether this system tells the peak memory of a process."""
    return _STATUS.is_file() and "VmHWM" in _STATUS.read_text()


def peak_bytes() -> int:
    """Returns the most memory that this process has had resident since it began, or since `reset_peak`."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Makes the memory that is resident now the peak, where the system lets it."""
    try:
        _RESET.write_text("5")
    except OSError:
        pass  # then importing may have had more than it keeps, and the growth comes out too small by that


def measure_load(folder: Path) -> dict[str, int]:
    """Loads `folder` in this process; returns by how much the peak grew and the bytes of the weights."""
    import jax

    import statecore as sc

    # What modules and the start of JAX take is not the loading's.
    importlib.import_module("statecore.models")
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    reset_peak()
    before = peak_bytes()
    model = sc.load(folder, progress=False)
    return {
        "growth": peak_bytes() - before,
        "weights": sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)),
    }


def measure_load_apart(folder: Path) -> dict[str, int]:
    """Returns `measure_load` of a process of its own."""
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(json.dumps(measure_load(Path(sys.argv[1]))))
