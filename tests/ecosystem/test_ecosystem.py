"""The code of docs/ecosystem.md runs, each block as a user's program, and does what its section says.

Each block has a check, registered with `promises`; one without fails. A wrong expert and a missing instruction show:
the fixture holds that their cosines are below 0.95.
"""

import importlib
import itertools
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ecosystem.promises import EXPORTED, MODEL, PROMISES, Reference, installed
from helpers.families import make_different
from helpers.paths import ROOT
from sentence_transformers import SentenceTransformer

import mote

for path in Path(__file__).parent.glob("*_promises.py"):  # they register themselves
    importlib.import_module(f"ecosystem.{path.stem}")

PAGE = (ROOT / "docs" / "ecosystem.md").read_text(encoding="utf-8")
TEXTS = ["Whales breathe air through a blowhole.", "Prices rise and money buys less.", "how to undo a commit"]

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries, not ours


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Find each block of code, named by its heading; the second one of a heading is "heading 2"."""
    for section in re.split(r"^(?=##+ )", PAGE, flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0].lstrip("# ").strip()
        for number, code in enumerate(re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL), 1):
            yield heading if number == 1 else f"{heading} {number}", code


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
        from functools import partial

        options["after"] = partial(mote.inference.runtimes.convert, backend="onnx")
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
    headings = [heading for language in ("python", "js") for heading, _ in blocks(language)]
    assert sorted(headings) == sorted(PROMISES)


@pytest.mark.parametrize(
    ("heading", "code"),
    [
        pytest.param(heading, code, id=heading, marks=[pytest.mark.slow] if PROMISES[heading].slow else [])
        for heading, code in blocks("python")
        if heading in PROMISES  # the test above fails otherwise
    ],
)
def test_python(
    heading: str,
    code: str,
    request: pytest.FixtureRequest,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    promise = PROMISES[heading]
    for module in promise.needs:
        if not installed(module):
            pytest.skip(f"{module} is not installed")
    program = tmp_path / "program.py"
    if EXPORTED in code:
        code = code.replace(EXPORTED, str(request.getfixturevalue("exported")))
    program.write_text(code.replace(MODEL, reference.folder), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # of processes that the program starts
    promise.check(runpy.run_path(str(program), run_name="__main__"), reference)
