"""Upcycling beside a plain copy of its result: wall time and peak memory, each in processes of their own.

    python benchmarks/upcycling.py [--model FOLDER] [--repeats N]

The start of Python and its imports (torch, transformers) is measured by `mote upcycle --dry-run` and printed too.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL_ENCODER = ROOT / "examples" / "small-encoder"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SMALL_ENCODER), help="dense checkpoint (default: the repository's)")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    command = [sys.executable, str(ROOT / "upcycle.py"), "--src", options.model, "--out"]
    runs: dict[str, list[tuple[float, float]]] = {"dry run": [], "upcycling": [], "cp -r": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(options.repeats):
            shutil.rmtree(folder / "mote", ignore_errors=True)
            shutil.rmtree(folder / "copy", ignore_errors=True)
            runs["dry run"].append(measure([*command, str(folder / "none"), "--dry-run"]))
            runs["upcycling"].append(measure([*command, str(folder / "mote")]))
            runs["cp -r"].append(measure(["cp", "-r", str(folder / "mote"), str(folder / "copy")]))
        size = sum(path.stat().st_size for path in (folder / "mote").rglob("*") if path.is_file()) / 1e6
    print(f"{Path(options.model).name}: {size:,.1f} MB written; medians of {options.repeats} runs")
    print("| | wall, s | / cp | peak memory, MB |")
    print("| --- | --- | --- | --- |")
    for kind, measured in runs.items():
        ratio = statistics.median(run[0] / copy[0] for run, copy in zip(measured, runs["cp -r"], strict=True))
        wall, peak = (statistics.median(values) for values in zip(*measured, strict=True))
        print(f"| {kind} | {wall:.2f} | {ratio:.1f} | {peak:,.0f} |")


def measure(command: list[str]) -> tuple[float, float]:
    """Run a command.

    Returns:
        Seconds, and the peak resident memory of the process in MB.
    """
    # The peak over all children only grows, so each command gets a parent of its own, which also takes its time.
    code = (
        "import resource, subprocess, sys, time; started = time.perf_counter(); "
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
        "print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], check=True, capture_output=True, text=True)
    seconds, kilobytes = done.stdout.split()
    return float(seconds), int(kilobytes) * 1024 / 1e6


if __name__ == "__main__":
    main()
