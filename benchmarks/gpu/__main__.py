"""Everything that needs a GPU, in at most ten minutes: writes figures to a file, and from it a section of a page.

    python -m benchmarks.gpu --page docs/performance.md      # all parts that are not in gpu.json yet
    python -m benchmarks.gpu mixed graphs --again            # some of them
    python -m benchmarks.gpu --tiny                          # checks that all run, on a CPU, too

Each part is a process with a limit of its own, to which is added what others have not used. Figures of the same card,
versions and commit are kept; a file of others is begun anew. Ratios are medians of paired runs, with random weights.
"""

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.parts import CUDA, PARTS, measure
from benchmarks.performance.benchmark import Target
from mote.files import replaced
from mote.reporting import table

LIBRARIES = ("torch", "transformers", "sentence-transformers")
NEEDING_GPU = ("graphs",)


def main() -> int:
    """Run the chosen parts; return 1 if one failed."""
    words = _arguments()
    file = json.loads(words.out.read_text("utf-8")) if words.out.is_file() else {}
    failed = [] if words.only_page else run(words, file)
    if words.page:
        write_section(words.page, file)
    return int(bool(failed))


def run(words: argparse.Namespace, file: dict[str, Any]) -> list[str]:
    """Run parts one after another, and keep their figures; return those that failed."""
    this = {"card": torch.cuda.get_device_name() if CUDA else "CPU", "CUDA": torch.version.cuda, "tiny": words.tiny}
    this |= {**{name: version(name) for name in LIBRARIES}, "commit": words.commit}
    if {name: file.get(name) for name in this} != this:
        file.clear()
        file.update(this, date=date.today().isoformat(), parts={})
    failed, spare = [], 0.0
    for name in words.parts or PARTS:
        if (known := name in file["parts"] and not words.again) or (name in NEEDING_GPU and not CUDA):
            print(f"{name}: {'already measured' if known else 'skipped, needs a GPU'}", flush=True)
            continue
        started = time.perf_counter()
        with TemporaryDirectory() as folder:
            result = Path(folder, "figures.json")
            process = multiprocessing.get_context("spawn").Process(target=measure, args=(name, words.tiny, result))
            process.start()
            process.join(None if words.tiny else PARTS[name][1] + spare)  # a CPU may be slow
            process.kill()
            process.join()
            seconds = time.perf_counter() - started
            spare += PARTS[name][1] - seconds
            if process.exitcode:
                failed.append(name)
                print(f"{name}: failed after {seconds:.0f} s", file=sys.stderr, flush=True)
                continue
            file["parts"][name] = json.loads(result.read_text("utf-8"))
        file["date"] = date.today().isoformat()
        with replaced(words.out) as part:
            part.write_text(json.dumps(file, indent=1) + "\n", "utf-8")
        print(f"{name}: {seconds:.0f} s\n\n{show(name, file)}\n", flush=True)
    return failed


def show(name: str, file: dict[str, Any]) -> str:
    """Format a part in Markdown: its table, and its bars."""
    figures = file["parts"].get(name)
    if figures is None:
        return f"### {PARTS[name][2]}\n\nNot measured."
    cells = {(each["group"], each["what"]): _cell(each) for each in figures}
    groups, columns = (list(dict.fromkeys(key[at] for key in cells)) for at in (0, 1))
    grid = table(["", *columns], [[group, *(cells.get((group, column), "") for column in columns)] for group in groups])
    limited = [each for each in figures if each["limit"] is not None]
    bars = [Target(f"{f['group']}, {f['what']}", f["ratio"], f["limit"], f["at_least"]) for f in limited]
    missed = "".join(f"\n- {bar}" for bar in bars if not bar.met)
    held = f"{sum(bar.met for bar in bars)} of {len(bars)} bars are held." if bars else ""
    return f"### {PARTS[name][2]}\n\n{grid}\n\n{held}\n{missed}".strip()


def _cell(figure: dict[str, Any]) -> str:
    value, ratio = figure["candidate"], figure["ratio"] ** (-1 if figure["items"] else 1)  # of rates, or of times
    shown = f"{1e3 * value:.2f} ms" if figure["timed"] else f"{value:.4g}"
    shown = f"{figure['items'] / value:,.0f}" if figure["items"] else shown
    return f"{shown} ({ratio:.3f})" if figure["baseline"] else shown


def write_section(page: Path, file: dict[str, Any]) -> None:
    """Replace the section of a page."""
    measured = [f"`python -m benchmarks.gpu` on one {file['card']}", *(f"{name} {file[name]}" for name in LIBRARIES)]
    measured += [f"CUDA {file['CUDA']}", f"{file['date']}, commit {file['commit']}. In brackets: ratios."]
    section = "\n\n".join(["## On a GPU", ", ".join(measured), *(show(name, file) for name in PARTS)])
    old, new = re.compile(r"^## On a GPU\n.*?(?=^## |\Z)", re.M | re.S), f"{section}\n\n"
    text, found = old.subn(lambda _: new, page.read_text("utf-8"))
    if not found:
        raise SystemExit(f"{page} has no section '## On a GPU' to replace")
    page.write_text(text, "utf-8")


def _arguments() -> argparse.Namespace:
    limits = [f"  {name:<11}{seconds:>4} s  {title}" for name, (_, seconds, title) in PARTS.items()]
    limits.append(f"  together   {sum(seconds for _, seconds, _ in PARTS.values()):>4} s")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        epilog="\n".join(["parts, and limits of their time:", *limits]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="default: all")
    add("--out", type=Path, default=Path("gpu.json"), help="file of the figures (default: %(default)s)")
    add("--page", type=Path, help="page whose section 'On a GPU' is replaced")
    add("--only-page", action="store_true", help="measure nothing: the page from the file")
    add("--tiny", action="store_true", help="tiny models, the fewest runs; always without a GPU")
    add("--again", action="store_true", help="measure again what is in the file")
    add("--commit", default=commit or "unknown", help="of the code (default: that of the checkout)")
    words = parser.parse_args()
    words.tiny |= not CUDA
    if unknown := [name for name in words.parts if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; available: {', '.join(PARTS)}")
    return words


if __name__ == "__main__":
    sys.exit(main())
