"""The commands and the Python of the documentation run, each page in a folder with the models and data that it names.

Models are tiny and trainings short: the question is whether what a reader types works. The Python of README.md and of
docs/ecosystem.md, and the cards, have tests of what it does: test_readme.py, tests/ecosystem, test_cards.py.
"""

import itertools
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers import pages
from helpers.checkpoints import (
    dense_checkpoint,
    llama_tokenizer,
    published_nomic,
    published_nomic_moe,
    published_nv_embed,
    trusted,
)
from helpers.datasets import write
from helpers.families import make_different
from helpers.paths import ROOT
from helpers.rows import read_rows, write_retrieval_dataset, write_rows
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import mote
from mote.cli import main
from mote.remote.configuration_mote import PAPER_INSTRUCTIONS
from mote.remote.modeling_mote import MoTEModel

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

NOT_HERE = {  # part of a command or line → why it cannot run here
    "…": "a reader fills it in",
    "--benchmark": "reads the Hub",
    "--task NFCorpus": "reads the Hub",
    "mteb.evaluate(": "reads the Hub",
    "--push ": "writes to the Hub",
    "mote push": "writes to the Hub",
    "mote serve": "runs until it is stopped",
    "mote route": "needs experts of these tasks",
    "--task auto": "needs a router",
    "client.embeddings": "needs the service",
    "cuda": "needs a GPU",
    'to="cpu"': "needs a GPU",
    "mote.restore(": "needs a GPU",
    "openvino": "needs an extra",
    "onnx": "needs an extra",
    "compile(": "takes minutes",
    "MOTE --end-token": "needs a decoder",
}
SHORT = ["data.limit=40", "training.batch_size=8", "training.max_steps=1", "training.warmup_steps=0"]
SHORT_TRAINING = [*SHORT, "training.mini_batch_size=8", "validation.limit=8", "model.max_length=128"]
FLOAT32 = ["training.bf16=false", "training.peft.base_dtype=float32"]  # bfloat16 is slow on many processors


def dense(folder: Path, **settings: Any) -> Path:
    return dense_checkpoint(folder, sentence_transformers={"max_seq_length": 64, **settings})


def decoder(folder: Path) -> Path:
    llama_tokenizer(folder)
    return dense_checkpoint(folder, "mistral", tokenizer=False)


def data(folder: Path, negatives: int = 0) -> Path:
    """Small datasets of each kind, of texts that come with MoTE."""
    texts = ROOT / "examples" / "data"
    pairs = read_rows(texts / "retrieval/tldr_pages/train.jsonl.gz")[:40]
    mined = {f"negative_{i + 1}": pairs[i]["positive"] for i in range(negatives)}
    write(folder, "retrieval/faq", [{**row, **mined} for row in pairs])
    corpus, queries = ({str(i): row[column] for i, row in enumerate(pairs)} for column in ("positive", "query"))
    write_retrieval_dataset(folder / "beir/fiqa", corpus, queries, *(f"{i} {i} 1" for i in range(len(pairs))))
    for name in ("classification/banking77", "clustering/arxiv_titles"):
        write(folder, name, read_rows(texts / name / "train.jsonl.gz")[:60])
    scored = read_rows(texts / "sts/sts17_en/test.jsonl.gz")[:40]
    write(folder, "paraphrases/quora", [{"anchor": row["sentence1"], "positive": row["sentence2"]} for row in scored])
    for name in ("sts/stsbenchmark", "sts/sts12"):
        write(folder, name, scored)
        write(folder, name, scored, "test.jsonl")
    return folder


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all models and data that the pages name, and that their commands do not make."""
    folder = tmp_path_factory.mktemp("documented")
    for name in ("MODEL", "DENSE", "examples/small-encoder", "sentence-transformers/all-MiniLM-L6-v2"):
        dense(folder / name)
    dense(folder / "runs/ic/model", prompts=PAPER_INSTRUCTIONS)
    for name in ("google-bert/bert-base-uncased", "runs/mlm-dense/model"):
        dense_checkpoint(folder / name, head="mlm")
    dense_checkpoint(folder / "doc2query/msmarco-t5-base-v1", "llama", head="causal")  # of another kind
    dense_checkpoint(folder / "FacebookAI/xlm-roberta-base", "xlm-roberta", head="mlm")
    for name in ("DECODER", "mistralai/Mistral-7B-v0.1"):
        decoder(folder / name)
    published_nomic(folder / "nomic-ai/nomic-bert-2048", prefix=True)
    published_nomic_moe(folder / "nomic-ai/nomic-embed-text-v2-moe")
    published_nv_embed(folder / "nvidia/NV-Embed-v2")
    model = mote.upcycle(str(folder / "MODEL"), folder / "MOTE")
    make_different(MoTEModel.from_pretrained(model)).save_pretrained(model)
    for name in (
        "MY-MOTE",
        "my-mote",
        "SRC",
        "DIR",
        "A",
        "B",
        "C",
        "SECOND",
        "THIRD",
        "user/name",
        "you/model-mote",
        "runs/mote/model",
    ):
        shutil.copytree(model, folder / name)
    experts = ["search_query", "search_document"]
    mote.upcycle(str(folder / "runs/mlm-dense/model"), folder / "runs/cot-mae/model", experts=experts)
    for name in ("legal", "more"):
        larger = folder / f"with-{name}"
        mote.transform(str(model), larger, mote.experts.add, name, "search_query")
        model = larger
    shutil.copytree(model, folder / "user/model")
    base = AutoModel.from_pretrained(folder / "MODEL", add_pooling_layer=False)
    base.config._name_or_path = base.name_or_path = "MODEL"
    lora = LoraConfig(target_modules=r".*\.layer\.\d+\.(intermediate|output)\.dense", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(folder / "user/lora")
    mote.experts.extract(str(model), "legal", folder / "legal.safetensors")
    data(folder / "DATA")
    data(folder / "TESTS")
    data(folder / "MINED", negatives=10)
    data(folder / "examples/data")
    for file in (ROOT / "examples/own-tasks").glob("*.csv"):
        shutil.copy(file, folder)
        name, _, split = file.name.partition(".")
        for other in {"tickets": ["legal"], "commands": ["faq", "pairs"]}.get(name, []):
            shutil.copy(file, folder / f"{other}.{split}")
    documents = read_rows(ROOT / "examples/data/retrieval/tldr_pages/train.jsonl.gz")[:8]
    write_rows(folder / "pairs.jsonl", documents)
    (folder / "texts").mkdir()
    (folder / "texts" / "pages.txt").write_text("\n".join(" ".join(row["positive"].split()) for row in documents))
    write_rows(folder / "corpus.jsonl.gz", [{"id": str(i), "text": row["positive"]} for i, row in enumerate(documents)])
    return folder


def given(page: str) -> dict[str, Any]:
    """Make the names that a page's Python takes for granted, in place of what its commands left."""
    texts = ["whales breathe air", "a recipe for bread", "bread"]
    encoder = trusted(Path("MOTE"))
    model: Any = encoder[0].model
    if page == "serving":  # both kinds of model have the same name there
        model.encode = encoder.encode
    elif page == "export":
        shutil.rmtree("DIR")
        mote.transform("SRC", "DIR", mote.experts.export, "clustering")
        model = SentenceTransformer("DIR")
    elif page == "upcycling":
        shutil.rmtree("all-MiniLM-L6-v2-mote", ignore_errors=True)
    elif page == "training":
        shutil.rmtree("OUT")
    return {
        **{"mote": mote, "torch": torch, "SentenceTransformer": SentenceTransformer},
        **{"st_model": encoder, "model": model, "tokenizer": encoder.tokenizer},
        **{"texts": texts, "queries": texts, "documents": texts, "instruction": "search_query: "},
        "batch": encoder.tokenizer(texts[: 2 if page == "routing" else 3], padding=True, return_tensors="pt"),
        "dataset": Dataset.from_list([{"text": text, "task": "clustering"} for text in texts]),
    }


def run_command(command: str) -> int:
    """Run a command, a training for one step, in place of what an earlier example wrote where it writes."""
    words = shlex.split(command.replace("\\\n", " "))[1:]
    outputs = [word.removeprefix("output=") for word in words if word.startswith("output=")]
    outputs += [out for option, out in itertools.pairwise(words) if option == "--out"]
    if words[0] in ("train", "pretrain") and not outputs:
        outputs = [f"runs/{words[1]}"]
    elif words[0] == "upcycle" and not outputs:
        outputs = [words[words.index("--src") + 1].split("/")[-1] + "-mote"]
    for output in outputs:
        shutil.rmtree(output, ignore_errors=True)
    match words[0]:
        case "train":
            words += [*SHORT_TRAINING, *(FLOAT32 if words[1].startswith("nv-") else [])]
        case "pretrain":
            words += [*SHORT, *(["spans.length=8"] if "cot-mae-spans" in words else [])]
    if words[1:] and words[1].endswith(".yaml"):
        words.append("data.folder=DATA")  # not the reader's own
    return main(words)


def link_folders(code: str) -> None:
    """Do what `ln -s "$PWD"/FOLDER/{NAME,NAME} PLACE` does."""
    for folder, names, place in re.findall(r'^ln -s "\$PWD"/(\w+)/\{([\w,]+)\} (\w+)', code, re.MULTILINE):
        for name in names.split(","):
            with suppress(FileExistsError):  # of an earlier command of the block
                (Path(place) / name).symlink_to(Path(folder).absolute() / name)


def runs_here(code: str) -> bool:
    return not any(part in code for part in NOT_HERE)


def commands(code: str) -> list[str]:
    """Find the commands that can run here, without options in brackets; also that of a recipe (`# FILE: COMMAND`)."""
    found = pages.commands(re.sub(r"^# \w+\.yaml: ", "", code))
    return [command for command in (re.sub(r"\[--[^…\]]*\]", "", one) for one in found) if runs_here(command)]


def to_run(page: Path) -> Iterator[tuple[str, str]]:
    """Find language and code of the blocks with something to run, and of the recipes with a name."""
    if page.parent not in (ROOT, ROOT / "docs"):
        return
    for language, code in pages.fenced(page.read_text(encoding="utf-8")):
        tested_elsewhere = language == "python" and page.stem in ("README", "ecosystem")
        if (language == "python" and not tested_elsewhere) or re.match(r"# \w+\.yaml", code) or commands(code):
            yield language, code


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem == "training" else [])  # half a minute
        for page in pages.PAGES
        if any(to_run(page))
    ],
)
def test_page(page: Path, everything: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shutil.copytree(everything, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if page.stem == "tutorial":
        Path("small-encoder").symlink_to("examples/small-encoder")
        Path("own-tasks").mkdir()
        shutil.copytree(".", "own-tasks", dirs_exist_ok=True, ignore=shutil.ignore_patterns("own-tasks"))
        monkeypatch.chdir("own-tasks")
    if page.stem == "pretraining":
        shutil.rmtree("MODEL")
        shutil.copytree("google-bert/bert-base-uncased", "MODEL")  # which has a head
    names: dict[str, Any] = {}
    for language, code in to_run(page):
        if file := re.match(r"# (\w+\.yaml)", code):
            Path(file[1]).write_text(code, encoding="utf-8")
        if language == "python":
            names |= given(page.stem)
            exec(compile("\n".join(filter(runs_here, code.splitlines())), page.name, "exec"), names)
            continue
        for command in commands(code):
            if "MINED" in command and "train" in command:
                link_folders(code)
            assert run_command(command) == 0, (command, capsys.readouterr().err[-300:])
