"""The numbered examples run and show what they promise."""

import re
import sys
from pathlib import Path

import pytest
from helpers.examples import example
from helpers.paths import ROOT
from helpers.printed import assert_same_output

EXAMPLES = ROOT / "examples"


def run(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *options])
    module = example(name)
    capsys.readouterr()
    module.main()
    return capsys.readouterr().out


def test_every_example_is_listed() -> None:
    listed = re.findall(r"\((\d\d_\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.long
def test_quickstart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    printed = run("00_quickstart", capsys, monkeypatch, "--out", str(tmp_path / "map.png"))
    in_readme = re.search(r"```\n(Cancel my .*?)```", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert in_readme is not None
    assert_same_output(printed.split("\n\nRequests about", 1)[0] + "\n", in_readme[1], tolerance=0.6)
    shares = re.findall(r"^expert (\w+) +(\d+\.\d) +(\d+\.\d)$", printed, re.MULTILINE)
    (_, topic, intent), (_, *by_topic), (_, *by_intent) = shares
    assert float(by_topic[0]) > float(topic) + 10 > float(by_intent[0]) + 20
    assert float(by_intent[1]) > float(intent) + 40 > float(by_topic[1]) + 40
    assert (tmp_path / "map.png").stat().st_size > 20_000


def test_encode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("01_encode", capsys, monkeypatch)
    assert re.search(r"sts +→ classification +\(''\)", shown)
    assert shown.count("(3, 256)") == 4
    assert "largest difference from the dense model: 0.0e+00" in shown
    assert "a batch of three tasks: [3, 256]" in shown
    assert "all experts: 6.1 M parameters, one: 3.7 M" in shown


@pytest.mark.long
def test_search(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("02_search", capsys, monkeypatch)
    best = shown.split("Invertibility and Largest Eigenvalue of Symmetric Matrix Signings\n", 1)[1].splitlines()[0]
    assert "The spectra of signed matrices" in best
    found = re.search(r"comes first for (\d+) of 40 titles", shown)
    assert found is not None
    assert int(found[1]) >= 35


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")  # of other libraries: pinned memory without a GPU
def test_upcycle_and_train(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    shown = run("03_upcycle_and_train", capsys, monkeypatch, "--steps", "8", "--out", str(tmp_path / "trained"))
    assert re.search(r"search, right command first: +0\.\d+ → 0\.\d+", shown)
    assert re.search(r"clustering +0\.0e\+00$", shown, re.MULTILINE)
    changes = {name: float(change) for name, change in re.findall(r"^  (\w+) +(\d\.\d+e[+-]\d+)$", shown, re.MULTILINE)}
    assert all(change > 0 for name, change in changes.items() if name != "clustering")
    assert len(changes) == 4
    assert (tmp_path / "trained" / "modeling_mote.py").exists()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_add_a_task(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    shown = run("04_add_a_task", capsys, monkeypatch, "--steps", "2", "--out", str(tmp_path))
    assert re.search(r"weights changed: [1-9]\d*, outside the new expert: 0$", shown, re.MULTILINE)
    sizes = re.search(r"the extracted expert: (\d\.\d) MB, the whole model: (\d+\.\d) MB", shown)
    assert sizes is not None
    assert float(sizes[1]) < float(sizes[2]) / 5
    assert "added to the finished model: largest difference 0.0e+00" in shown


@pytest.mark.processes
def test_export_and_serve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for library in ("batched", "fastapi", "uvicorn"):
        pytest.importorskip(library, reason="see examples/service/requirements.txt")
    shown = run("05_export_and_serve", capsys, monkeypatch, "--out", str(tmp_path))
    assert "exported: BertModel (2, 256)" in shown
    assert re.findall(r"largest difference from the MoTE: (\S+)", shown) == ["0.0e+00", "0.0e+00"]


@pytest.mark.filterwarnings("ignore")  # of these libraries
def test_search_libraries(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("langchain_core", "llama_index.core", "chromadb"):
        pytest.importorskip(library, reason="the extras `langchain`, `llamaindex`, `chroma` are not installed")
    shown = run("06_search_libraries", capsys, monkeypatch)
    answers = re.findall(r"^(\w+): +(0\.\d\d)  Inflation means", shown, re.MULTILINE)
    assert [library for library, _ in answers] == ["LangChain", "LlamaIndex", "Chroma"]
    assert len({score for _, score in answers}) == 1  # the same experts
