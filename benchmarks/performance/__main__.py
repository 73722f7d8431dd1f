"""Speed and memory of MoTE compared with the dense model on a CPU: most of docs/performance.md.

    python -m benchmarks.performance --quick                                       # minutes: only checks that all run
    python -m benchmarks.performance --checkpoint FOLDER --data FOLDER > new.md    # an hour on a CPU
    python -m benchmarks.performance forward mixed --checkpoint FOLDER             # some of them

Benchmarks run one after another, each in its own process; ratios come from paired runs within that process. A missed
target is reported and does not stop the other benchmarks; the exit status is 1 if a benchmark fails to run.
"""

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path

from benchmarks.performance.benchmark import Options, measure

BENCHMARKS = {
    "forward": "forward pass of one task compared with the native dense model",
    "mixed": "a batch of four tasks compared with the dense model on the same rows",
    "token_routing": "compared with a token-routed model of the same size",
    "many_experts": "forward pass with 1 to 64 experts",
    "loading": "loading one expert",
    "upcycling": "upcycling compared with copying the result",
    "exported": "encode with an exported expert, all CPU runtimes",
}


def main() -> int:
    """Run the chosen benchmarks and print their results."""
    options, names = _arguments()
    failures = 0
    for name in names:
        print(f"… {name}: {BENCHMARKS[name]}", file=sys.stderr, flush=True)
        try:  # in a fresh process: memory, caches and threads of one benchmark do not affect the next
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                benchmark = process.submit(measure, name, options).result()
        except Exception as error:  # the others still run
            failures += 1
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        print(f"{benchmark}\n", flush=True)
    return 1 if failures else 0


def _arguments() -> tuple[Options, list[str]]:
    defaults = Options()
    listing = "\n".join(f"  {name:<14} {what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.performance",
        description=__doc__,
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="BENCHMARK", help="which benchmarks (default: all)")
    add("--checkpoint", type=Path, default=defaults.checkpoint, help="dense model (default: the repository's)")
    add("--data", type=Path, default=defaults.data, help="texts (default: the repository's)")
    add("--seconds", type=float, default=defaults.seconds, help="measuring time per ratio (default: %(default)s)")
    add("--quick", action="store_true", help="few repeats and small inputs, to check that it runs")
    words = parser.parse_args()
    unknown = [name for name in words.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {unknown[0]!r}; available: {', '.join(BENCHMARKS)}")
    if not (words.checkpoint / "config.json").is_file():
        parser.error(f"{words.checkpoint} has no config.json: expected a dense checkpoint")
    settings = {field.name: getattr(words, field.name) for field in fields(Options)}
    return Options(**settings), words.names or list(BENCHMARKS)


if __name__ == "__main__":
    sys.exit(main())
