"""Print the size of each room and the share of checks, with their limits: `python .ci/sizes.py`.

A room grows only by what an issue grants; rates hold for good.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Room → patterns of its files, and its budget in lines.
LIBRARY = {
    "root, remote": ((":(glob)*_mote.py", "src/mote/remote/*.py"), 2910),
    "checkpoints": (("src/mote/checkpoints/*.py",), 2930),
    "training": (("src/mote/training/*.py",), 4650),
    "corpora": (("src/mote/corpora/*.py",), 1460),
    "data": (("src/mote/data/*.py",), 1030),
    "evaluation, analysis": (("src/mote/evaluation/*.py", "src/mote/analysis/*.py"), 1830),
    "experts, upcycling, lengthening": (
        ("src/mote/experts/*.py", "src/mote/upcycling/*.py", "src/mote/lengthening.py"),
        1740,
    ),
    "inference": (("src/mote/inference/*.py",), 1545),
    "serving": (("src/mote/serving.py",), 355),
    "cli, integrations, hub, reporting": (
        ("src/mote/cli/*.py", "src/mote/integrations/*.py", "src/mote/hub.py", "src/mote/reporting.py"),
        1030,
    ),
}
REST = 650  # files, options, and what else is in the package
ALL = 19_950
OTHERS = {
    "tests": (("tests/*.py",), 22_230),
    "benchmarks, scripts": (("benchmarks/*.py", "scripts/*.py"), 2880),
    "research": (("research/*.py",), 2880),
    "examples": (("examples/*.py", ":!examples/small-mote"), 1199),  # 2,443 with the copies of remote code in it
}
DOCS = 29_270  # words, beside the results
RAISES = 12  # in 1,000 lines
VALIDATION = 0.07  # of the lines of code


def tracked(patterns: Iterable[str]) -> list[Path]:
    """Return the repository's files that match, without links."""
    names = subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, check=True).stdout.split()
    return sorted({Path(name) for name in names if Path(name).is_file() and not Path(name).is_symlink()})


def lines_of(files: Iterable[Path]) -> int:
    """Count all lines."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def code_lines(tree: ast.Module, text: str) -> int:
    """Count lines that are neither blank, nor a comment, nor of a docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    strings = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)]
    prose = {line for string in strings for line in range(string.lineno, (string.end_lineno or 0) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and at not in prose for at, line in lines)


def refuses(node: ast.AST) -> bool:
    """Whether a statement only raises errors: an assertion, or a condition, loop or handler around them, too."""
    if isinstance(node, ast.If | ast.For | ast.With):
        return all(map(refuses, [*node.body, *getattr(node, "orelse", ())]))
    if isinstance(node, ast.ExceptHandler):
        return all(map(refuses, node.body))
    return isinstance(node, ast.Raise | ast.Assert)


def validation_lines(tree: ast.Module) -> set[int]:
    """Return the lines of statements that only raise errors, and of functions that do little else."""
    found: set[int] = set()
    for node in ast.walk(tree):
        steps: list[Any] = [node] if refuses(node) else []
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            others = [step for step in body if not refuses(step)]
            if len(others) < len(body) / 2 and all(isinstance(step, ast.Assign | ast.Return) for step in others):
                steps = body
                found.add(node.lineno)
        found |= {line for step in steps for line in range(step.lineno, step.end_lineno + 1)}
    return found


def main() -> int:
    """Print the table; return 1 if something is over its limit."""
    files = {room: tracked(patterns) for room, (patterns, _) in LIBRARY.items()}
    library = tracked(["src/mote/*.py", ":(glob)*_mote.py", "upcycle.py"])
    named = {file for room in files.values() for file in room}
    rows = [(room, lines_of(files[room]), budget) for room, (_, budget) in LIBRARY.items()]
    rows += [
        ("the rest of the package", lines_of(set(library) - named), REST),
        ("root and src", lines_of(library), ALL),
    ]
    rows += [(room, lines_of(tracked(patterns)), budget) for room, (patterns, budget) in OTHERS.items()]
    words = sum(len(file.read_text(encoding="utf-8").split()) for file in tracked(["docs/*.md", ":!docs/results.md"]))
    rows.append(("docs, in words", words, DOCS))
    texts = {file: file.read_text(encoding="utf-8") for file in library}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    raises = sum(isinstance(node, ast.Raise) for tree in trees.values() for node in ast.walk(tree))
    rows.append(("raise in 1,000 lines", round(1000 * raises / lines_of(library)), RAISES))
    code = sum(code_lines(tree, texts[file]) for file, tree in trees.items())
    validation = sum(len(validation_lines(tree)) for tree in trees.values())
    rows.append(("validation, % of code", round(100 * validation / code), round(100 * VALIDATION)))
    print(f"{'room':35}{'now':>8}{'at most':>9}")
    over = False
    for room, now, limit in rows:
        over |= now > limit
        print(f"{room:35}{now:>8,}{limit:>9,}{'  over' if now > limit else ''}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
