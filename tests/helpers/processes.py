"""Programs in processes of their own, also where this project is not installed."""

import os
import subprocess
import sys
from pathlib import Path

# Begins a program for which this project is not installed, only the libraries that it needs.
STRANGER = """
import sys
from importlib.abc import MetaPathFinder

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mote":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
"""


def run_python(
    script: str, *arguments: object, cwd: Path, environment: dict[str, str] | None = None, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with an empty cache of remote code."""
    environment = environment or {**os.environ, "HF_MODULES_CACHE": str(cwd / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr[-3000:]
    return done


def run_as_stranger(script: str, *arguments: object, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    return run_python(STRANGER + script, *arguments, cwd=cwd, status=status)
