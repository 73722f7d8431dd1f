"""Speed and memory of MoTE beside the dense model: every figure of docs/performance.md by one command.

    python -m benchmarks.performance --quick                                       # minutes: does every figure run?
    python -m benchmarks.performance --checkpoint FOLDER --data FOLDER --out DIR   # an hour on a CPU
    python -m benchmarks.performance forward mixed --checkpoint FOLDER             # some of them

Each figure is measured in a process of its own, one after the other, its ratios by paired runs within that process.
A bar that is missed is said so and does not stop the rest; a figure that cannot be measured makes the exit status 1.
With `--out`, each is kept as NAME.json, and `performance.md` is written from all that are there.
"""

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path

import torch

from benchmarks.performance.figures import Bar, Figure, Options, measure

FIGURES = {
    "forward": "forward of one task beside the dense native model",
    "mixed": "a batch of four tasks beside the dense model on the same rows",
    "token_routing": "beside a token-routed mixture of the same size",
    "many_experts": "forward with 1 to 64 experts",
    "loading": "loading one expert",
    "residency": "device memory with one of four experts resident",
    "switching": "switching experts from the CPU and from disk",
    "upcycling": "upcycling beside a copy of the result",
    "exported": "encode of an exported expert by every CPU path",
    "task_lora": "beside one LoRA adapter per task",
    "bulk": "batches of equal tokens for bulk encoding",
    "compiled": "torch.compile",
    "compression": "experts as low-rank differences, or in 8 bits",
    "service": "the HTTP service under load",
}


def main() -> int:
    """Measure what was asked for, and print it."""
    options, out, names = _arguments()
    failures = 0
    for name in names:
        print(f"… {name}: {FIGURES[name]}", file=sys.stderr, flush=True)
        try:  # a fresh process, so that no figure meets the memory, caches or threads of another
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                figure = process.submit(measure, name, options).result()
        except Exception as error:  # whatever stops one figure, the others are still worth having
            failures += 1
            print(f"{name} could not be measured: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        print(f"{figure}\n", flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.json").write_text(json.dumps(asdict(figure), indent=2, ensure_ascii=False) + "\n")
    if out is not None:
        (out / "performance.md").write_text(report([figure for name in FIGURES if (figure := _kept(out, name))]))
    return 1 if failures else 0


def report(figures: list[Figure]) -> str:
    """Lay out the bars of all figures in one table, then each figure."""
    bars = [
        f"| {figure.title} | {bar.what} | {bar.value:.3f} | {'≥' if bar.at_least else '≤'} {bar.limit:g} | "
        f"{'yes' if bar.holds else '**no**'} |"
        for figure in figures
        for bar in figure.bars
    ]
    table = ["| figure | of | measured | bar | holds |", "| --- | --- | --- | --- | --- |", *bars]
    return "\n".join(table) + "\n\n" + "\n\n".join(map(str, figures)) + "\n"


def _arguments() -> tuple[Options, Path | None, list[str]]:
    defaults = Options()
    listing = "\n".join(f"  {name:<14} {what}" for name, what in FIGURES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.performance",
        description=__doc__,
        epilog=f"figures:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="FIGURE", help="which figures (default: all)")
    add("--checkpoint", type=Path, default=defaults.checkpoint, help="dense model (default: the repository's)")
    add("--data", type=Path, default=defaults.data, help="texts (default: the repository's)")
    add("--device", default=defaults.device)
    add("--dtype", default="float32", help="float32 (default) or bfloat16")
    add("--seconds", type=float, default=defaults.seconds, help="for one ratio (default: %(default)s)")
    add("--quick", action="store_true", help="small and few: shows that it runs, its numbers mean little")
    add("--out", type=Path, metavar="DIR", help="keep the figures there")
    words = parser.parse_args()
    unknown = [name for name in words.names if name not in FIGURES]
    if unknown:
        parser.error(f"unknown figure {unknown[0]!r}; there are {', '.join(FIGURES)}")
    if not (words.checkpoint / "config.json").is_file():
        parser.error(f"{words.checkpoint} is no checkpoint: it has no config.json")
    settings = {field.name: getattr(words, field.name) for field in fields(Options)}
    settings["dtype"] = getattr(torch, words.dtype)
    return Options(**settings), words.out, words.names or list(FIGURES)


def _kept(out: Path, name: str) -> Figure | None:
    path = out / f"{name}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    return Figure(**{**content, "bars": [Bar(**bar) for bar in content["bars"]]})


if __name__ == "__main__":
    sys.exit(main())
