"""The code of docs/ecosystem.md runs, each block as a user's program, and does what its section says.

Each block has a check, registered with `promises`; one without fails. A wrong expert and a missing instruction show:
the fixture holds that their cosines are below 0.95.
"""

import importlib
import itertools
import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ecosystem.promises import EXPORTED, MODEL, PROMISES, Reference, installed
from ecosystem.row_promises import QUERY, ROWS, TEXTS
from helpers.families import make_different
from helpers.paths import ROOT
from sentence_transformers import SentenceTransformer

import mote
from mote.inference.runtimes import convert

for path in Path(__file__).parent.glob("*_promises.py"):  # they register themselves
    importlib.import_module(f"ecosystem.{path.stem}")

PAGE = (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, not ours


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Find each block of code, named by its heading; the second one of a heading is "heading 2"."""
    for section in re.split(r"^(?=##+ )", PAGE, flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0].lstrip("# ").strip()
        for number, code in enumerate(re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL), 1):
            yield heading if number == 1 else f"{heading} {number}", code


def tier(heading: str) -> list[pytest.MarkDecorator]:
    name = PROMISES[heading].tier
    return [getattr(pytest.mark, name)] if name else []


FIRST = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]  # which all others continue
CELLS = dict(re.findall(r"^\| (\S[^|]*) \| (.*) \|$", PAGE, re.MULTILINE))  # library → the rest of its row


@pytest.fixture(scope="session")
def folder(fresh_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MoTE of the small encoder whose experts differ, and which still finds what is searched for."""
    folder = tmp_path_factory.mktemp("ecosystem") / "model-mote"
    model = SentenceTransformer(str(fresh_folder), trust_remote_code=True)
    make_different(model[0].model, noise=0.025)
    model.save(str(folder))
    return folder


@pytest.fixture(scope="session")
def exported(folder: Path) -> Path:
    """The clustering expert of it, as a dense model with its ONNX file where that can be made."""
    options: dict[str, Any] = {}
    if installed("onnx") and installed("onnxscript") and installed("onnxruntime"):
        options["after"] = partial(convert, backend="onnx", texts=TEXTS)
    out = folder.with_name("model-clustering")
    mote.transform(str(folder), out, mote.experts.export, "clustering", **options)
    return out


@pytest.fixture(scope="session")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_a_wrong_expert_shows(reference: Reference) -> None:
    for one, other in itertools.combinations(reference.model.config.experts, 2):
        assert (reference.embed(TEXTS, one) * reference.embed(TEXTS, other)).sum(-1).max() < 0.95
        for of_other in (True, False):  # the same text by two experts; one expert with and without the instruction
            start = reference.model.config.instruction_of(one)
            texts = [start + text for text in TEXTS] if of_other else TEXTS
            wrong = reference.embed(texts, other if of_other else one, instruction=False)
            assert (reference.embed(TEXTS, one) * wrong).sum(-1).max() < 0.95


def test_every_block_has_a_check() -> None:
    headings = [
        heading for language in ("python", "js") for heading, _ in blocks(language) if heading != "Other libraries"
    ]
    assert sorted(headings) == sorted(PROMISES)


@pytest.fixture
def program(
    request: pytest.FixtureRequest, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Write a block's code into a folder of its own, with the models that its test has; skip it without its library."""

    def write(heading: str, code: str, file: str) -> Path:
        promise = PROMISES[heading]
        if file.endswith(".py"):
            code = FIRST + code
        for module in promise.needs:
            if not installed(module):
                pytest.skip(f"{module} is not installed")
        if EXPORTED in code:
            code = code.replace(EXPORTED, str(request.getfixturevalue("exported")))
        (tmp_path / file).write_text(code.replace(MODEL, reference.folder), encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # of processes that the program starts
        if promise.prepare:
            promise.prepare(monkeypatch)
        return tmp_path / file

    return write


@pytest.mark.parametrize(
    ("heading", "code"),
    [
        pytest.param(heading, code, id=heading, marks=tier(heading))
        for heading, code in blocks("python")
        if heading in PROMISES  # the test above fails otherwise
    ],
)
def test_python(heading: str, code: str, reference: Reference, program: Callable) -> None:
    names = runpy.run_path(str(program(heading, code, "program.py")), run_name="__main__")
    PROMISES[heading].check(names, reference)


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("library", ROWS)
def test_row(library: str, best: bool, reference: Reference) -> None:
    """The program of a row, alone or with what its last cell adds to it or to the loading of the model."""
    row, (program, _, addition) = ROWS[library], CELLS[library].split(" | ")
    found = re.match(r"(load with )?`(\w+=.*?)`", addition)
    if best and found is None:
        pytest.skip("nothing to add")
    pytest.importorskip(row.imports.split()[1])
    load, argument = found.groups() if best else (None, "")
    names: dict[str, Any] = {}
    exec(f"{row.imports}\n{FIRST.replace(MODEL, reference.folder)}", names)
    if load:
        names["model"] = eval(f"SentenceTransformer(M, trust_remote_code=True, {argument})", names)
        argument = ""
    made = eval(f"{program.strip('`')[:-1]}, {argument})", names)
    default = "clustering" if "default_task" in argument else reference.model.config.default_task
    for vectors, texts, task in zip(row.embed(made), ([QUERY], TEXTS), row.best if best else row.plain, strict=True):
        if vectors is not None:
            reference.is_by(vectors, texts, task or default, instruction=bool(task))


@pytest.mark.slow  # installs packages of npm
@pytest.mark.parametrize("expert", [None, "clustering"])  # the only one of the page's model, one of all
def test_transformers_js(expert: str | None, reference: Reference, program: Callable, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    ((heading, code),) = blocks("js")
    if expert:
        pytest.importorskip("onnxscript")
        folder = str(tmp_path / "all")
        export = ["export", reference.folder, "--backend", "onnx", "--out", folder]
        subprocess.run([sys.executable, "-m", "mote", *export], check=True)
        code = code.replace('dtype: "fp32"', f'dtype: "fp32", model_file_name: "{expert}"').replace(EXPORTED, folder)
    file = program(heading, code, "program.mjs")
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    installed = subprocess.run(["npm", "install", *options, "@huggingface/transformers@4"], cwd=file.parent)
    if installed.returncode:
        pytest.skip("@huggingface/transformers could not be installed")
    shown = subprocess.run(["node", file.name], cwd=file.parent, check=True, capture_output=True, text=True).stdout
    PROMISES[heading].check({"vectors": json.loads(shown)}, reference)
