"""Own tasks, from files to a MoTE: each trains an expert by itself, and nothing else changes."""

import csv
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import e5_checkpoint, read_json, trusted
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import mote
from mote.cli import main
from mote.data.rows import read_files
from mote.training.recipe import load_recipe
from mote.training.train import open_run, train

TEXTS = ["how do I unlock my card", "open a terminal", "a plane is taking off"]
LABELS = ("card", "rate", "transfer")


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]], **dialect: Any) -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, **dialect).writerows([header, *rows])
    return path


def letters(number: int) -> str:
    """The tiny tokenizer knows letters alone."""
    return "".join(chr(ord("a") + 3 * int(digit)) for digit in str(number))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Labels in CSV, search in CSV with semicolons, graded pairs in TSV."""
    folder = tmp_path / "data"
    folder.mkdir()
    labelled = [(f'my {label} {letters(n)}, "quoted"\nand more', label) for n in range(12) for label in LABELS]
    write_csv(folder / "tickets.csv", ("text", "label"), labelled)
    pairs = [(f"{letters(n)}; how do I do that?", f"{letters(n)}, a button") for n in range(24)]
    write_csv(folder / "faq.csv", ("question", "answer"), pairs, delimiter=";")
    graded = [(f"{letters(n)} plane", f"an aeroplane {letters(n)}", n % 6) for n in range(60)]
    write_csv(folder / "alike.tsv", ("sentence1", "sentence2", "score"), graded, delimiter="\t")
    return folder


def words(source: Path, files: Path, out: Path, *tasks: str, **settings: Any) -> list[str]:
    given = {
        "model.source": source,
        "data.folder": files,
        "output": out,
        "training.max_steps": 2,
        "training.batch_size": 8,
        **settings,
    }
    return [*(f"{key}={value}" for key, value in given.items()), *tasks]


def expert_file(model: Path, name: str) -> Path:
    (file,) = model.glob(f"model-expert-{name}-*.safetensors")
    return file


def test_from_files_to_a_model(tiny: Path, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = ("tickets=tickets.csv", "faq=faq.csv", "alike=alike.tsv")
    assert main(["train", "my-tasks", *words(tiny, files, tmp_path / "run", *tasks)]) == 0
    out, err = capsys.readouterr()
    for line in (
        "tickets: 36 labelled texts (text, label); for classification",
        "faq: 24 pairs (anchor, positive); for query, document",
        "alike: 60 scored pairs (sentence1, sentence2, score); for sts, pair_classification",
    ):
        assert line in out
    assert "2 steps at a learning rate of 0.00025 hardly train the model" in err
    model, source = trusted(tmp_path / "run" / "model"), SentenceTransformer(str(tiny))
    assert np.array_equal(model.encode(TEXTS), source.encode(TEXTS))  # the default task is the source itself
    assert "default task" not in capsys.readouterr().err  # so nobody needs a warning
    experts = {task: model.encode(TEXTS, task=task) for task in ("tickets", "faq", "alike")}
    assert not any(np.allclose(one, source.encode(TEXTS), atol=1e-5) for one in experts.values())
    assert np.array_equal(model.encode_query(TEXTS), experts["faq"])
    assert np.array_equal(model.encode_document(TEXTS), experts["faq"])
    assert np.array_equal(model.encode(TEXTS, prompt_name="sts"), experts["alike"])
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert all(f"| {name} | {name} |" in card for name in ("tickets", "faq", "alike"))
    assert "by the recipe `my-tasks`" in card


def test_an_expert_depends_on_its_own_data_alone(tiny: Path, files: Path, tmp_path: Path) -> None:
    alone = train("my-tasks", words(tiny, files, tmp_path / "alone", "faq=faq.csv"))
    both = train("my-tasks", words(tiny, files, tmp_path / "both", "tickets=tickets.csv", "faq=faq.csv"))
    assert expert_file(alone, "faq").read_bytes() == expert_file(both, "faq").read_bytes()
    assert expert_file(alone, "faq").name == expert_file(both, "faq").name
    # The same command with one more file, and one changed file, trains only these.
    trained = {
        name: (tmp_path / "both" / "tasks" / name / "mote-run.json").stat().st_mtime_ns for name in ("faq", "tickets")
    }
    write_csv(
        files / "tickets.csv",
        ("text", "label"),
        [(f"{letters(n)} other {label}", label) for n in range(9) for label in LABELS],
    )
    before = expert_file(both, "tickets").name
    train("my-tasks", words(tiny, files, tmp_path / "both", "tickets=tickets.csv", "faq=faq.csv", "alike=alike.tsv"))
    again = {
        name: (tmp_path / "both" / "tasks" / name / "mote-run.json").stat().st_mtime_ns for name in ("faq", "tickets")
    }
    assert again["faq"] == trained["faq"]
    assert again["tickets"] != trained["tickets"]
    assert expert_file(both, "tickets").name != before
    assert expert_file(both, "faq").read_bytes() == expert_file(alone, "faq").read_bytes()
    assert read_json(both / "config.json")["experts"] == ["general", "tickets", "faq", "alike"]


def test_queries_find_documents_of_the_index_that_is_there(tiny: Path, files: Path, tmp_path: Path) -> None:
    out = words(tiny, files, tmp_path / "run", "tickets=tickets.csv", "faq=faq.csv", queries_only="true")
    model, source = trusted(train("my-tasks", out)), SentenceTransformer(str(tiny))
    assert np.array_equal(model.encode_document(TEXTS), source.encode(TEXTS))
    assert not np.allclose(model.encode_query(TEXTS), source.encode(TEXTS), atol=1e-5)


def test_a_mote_gets_more_experts(tiny: Path, files: Path, tmp_path: Path) -> None:
    first = train("my-tasks", words(tiny, files, tmp_path / "first", "faq=faq.csv"))
    more = train("my-tasks", words(first, files, tmp_path / "more", "tickets=tickets.csv", "faq2=faq.csv"))
    for name in ("general", "faq"):
        assert expert_file(first, name).read_bytes() == expert_file(more, name).read_bytes()
    assert read_json(more / "config.json")["tasks"] == {
        **dict.fromkeys(("query", "document", "faq"), "faq"),
        **{name: name for name in ("general", "tickets", "faq2")},
        **dict.fromkeys(("sts", "pair_classification", "summarization"), "general"),
        "classification": "tickets",
    }
    # It is the expert that it would have been beside the others: it fits on any MoTE of the same source.
    beside = train("my-tasks", words(tiny, files, tmp_path / "beside", "tickets=tickets.csv"))
    assert expert_file(more, "tickets").read_bytes() == expert_file(beside, "tickets").read_bytes()
    mote.transform(first, tmp_path / "added", mote.experts.add, "tickets", mote.experts.open_expert(beside, "tickets"))
    assert np.array_equal(
        trusted(tmp_path / "added").encode(TEXTS, prompt_name="classification"),
        trusted(beside).encode(TEXTS, task="tickets"),
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mote", "dense"])
def test_together(kind: str, tiny: Path, files: Path, tmp_path: Path) -> None:
    tasks = ("tickets=tickets.csv", "faq=faq.csv", "together=true", f"model.kind={kind}")
    model = train("my-tasks", words(tiny, files, tmp_path / "run", *tasks))
    found = SentenceTransformer(str(model), trust_remote_code=True)
    assert not np.allclose(found.encode(TEXTS), SentenceTransformer(str(tiny)).encode(TEXTS), atol=1e-5)


@pytest.mark.processes
def test_on_ray(tiny: Path, files: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    tasks = ("tickets=tickets.csv", "faq=faq.csv")
    local = train("my-tasks", words(tiny, files, tmp_path / "local", *tasks))
    found = train("my-tasks", words(tiny, files, tmp_path / "ray", *tasks, engine="ray"))
    for name in ("tickets", "faq"):
        assert expert_file(found, name).read_bytes() == expert_file(local, name).read_bytes()


def test_what_is_refused(tiny: Path, files: Path, tmp_path: Path) -> None:
    for more, message in (
        (["tickets=missing.csv"], r"There is no dataset .*missing\.csv"),
        (["tickes.csv"], "expected key=value"),
        (["general=faq.csv"], "general"),
        (["faq=faq.csv", "together=true", "queries_only=true"], "queries_only needs together=false"),
        (["faq={anchor: faq, datasets: [faq.csv]}"], "unknown key 'faq'"),
        (["tickets={datasets: [tickets.csv, faq.csv]}"], "unknown key"),
        (["tasks.tickets={datasets: [tickets.csv, faq.csv]}"], "tasks.tickets mixes .*labelled.*pairs"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            open_run("my-tasks", words(tiny, files, tmp_path / "run", *more)).plan()


def test_null_removes_entries() -> None:
    assert load_recipe("mote-best", ["model.tasks=null"]).model.tasks == {}


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufefftext;label\r\n"a; ""b""\nc";x\r\nd\r\ne;y;z\r\n'.encode())
    rows = [*read_files([path])]
    assert rows[0].content == {"text": 'a; "b"\nc', "label": "x"}
    assert [row.where for row in rows] == [f"{path}:{line}" for line in (3, 4, 5)]
    assert [bool(row.fault) for row in rows] == [False, True, True]
    for content in (b'text,label\n"a,b\n', "text,label\ncaf\xe9,b\n".encode("latin-1")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"rows\.csv cannot be read"):
            list(read_files([path]))
    shutil.copy(path, tmp_path / "rows.unknown")


@pytest.mark.parametrize("order", [("tickets=tickets.csv", "faq=faq.csv"), ("faq=faq.csv", "tickets=tickets.csv")])
def test_a_source_with_prompts_keeps_them(order: tuple[str, ...], files: Path, tmp_path: Path) -> None:
    dense = e5_checkpoint(tmp_path / "e5-small")
    model = trusted(train("my-tasks", words(dense, files, tmp_path / "run", *order)))
    source = SentenceTransformer(str(dense))
    assert np.array_equal(model.encode(TEXTS), source.encode(TEXTS))
    queries = [model.prompts["query"] + text for text in TEXTS]
    assert np.array_equal(model.encode_query(TEXTS), model.encode(queries, task="faq"))
    assert np.array_equal(model.encode(TEXTS, prompt_name="tickets"), model.encode(TEXTS, task="tickets"))


def test_a_source_in_half_precision_stays_as_it_is(tiny: Path, files: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(tiny, half)
    AutoModel.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(half)
    model = trusted(train("my-tasks", words(half, files, tmp_path / "run", "faq=faq.csv")))
    assert np.array_equal(model.encode(TEXTS), SentenceTransformer(str(half)).encode(TEXTS))


def test_what_would_be_lost_is_refused(tiny: Path, files: Path, tmp_path: Path) -> None:
    model = train("my-tasks", words(tiny, files, tmp_path / "run", "faq=faq.csv"))
    for source, task, error, message in (
        (tiny, "tickets=tickets.csv", FileExistsError, "for the tasks faq: name them again"),
        (files, "faq=faq.csv", FileExistsError, "was made from"),
        (model, "tickets=tickets.csv", ValueError, "is inside"),
        (tiny, "general=tickets.csv", ValueError, "'general' is the source itself"),
    ):
        out = tmp_path / ("other" if "general" in task else "run")
        with pytest.raises(error, match=message):
            open_run("my-tasks", words(source, files, out, task))
