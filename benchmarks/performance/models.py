"""Models and inputs of several benchmarks: a dense model, a MoTE made from it, and real texts of four tasks."""

import copy
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from benchmarks.performance.benchmark import Options
from mote import MoTEConfig, MoTEModel
from mote.data.rows import find_datasets, read_rows
from mote.data.settings import DatasetSource

COLUMNS = {  # task → folder of its datasets below the data folder, and column of its texts
    "classification": ("classification", "text"),
    "clustering": ("clustering", "text"),
    "search_query": ("retrieval", "query"),
    "search_document": ("retrieval", "positive"),
}
TASKS = list(COLUMNS)


def load_dense(options: Options) -> PreTrainedModel:
    """Load the dense model with `AutoModel`, into memory rather than mapped from the file."""
    model = AutoModel.from_pretrained(options.checkpoint, dtype=torch.float32).eval()
    return copy.deepcopy(model)


def make_mote(dense: PreTrainedModel, experts: Sequence[str] = TASKS, **settings: Any) -> MoTEModel:
    """Build a MoTE from copies of the dense model's layers; the dense model is unchanged."""
    config = MoTEConfig(backbone_config=dense.config, experts=list(experts), **settings)
    return MoTEModel(config, copy.deepcopy(dense)).to(dense.device).eval()  # type: ignore[arg-type]


def made_up(dense: PreTrainedModel, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return random token ids without padding, [rows, length]."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, dense.config.vocab_size, (rows, length), generator=generator)
    return {"input_ids": ids.to(dense.device), "attention_mask": torch.ones_like(ids).to(dense.device)}


def real_texts(options: Options, rows: int) -> dict[str, list[str]]:
    """Read `rows` texts per task, evenly from its datasets."""
    texts = {}
    for task, (folder, column) in COLUMNS.items():
        found = find_datasets(DatasetSource(path=f"{folder}/*"), options.data)
        share = -(-rows // len(found))
        lines = [line.content.get(column) for location in found for line in islice(read_rows(location), share)]
        texts[task] = [text if isinstance(text, str) else str(text[0]) for text in lines if text][:rows]
    return texts


def tokenize(options: Options, texts: list[str], length: int = 128) -> dict[str, torch.Tensor]:
    """Tokenize texts as one batch padded to the longest."""
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    return dict(tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt"))


def seconds(options: Options) -> float:
    """Return the measuring time per ratio; 0 if quick, which means seven pairs."""
    return 0.0 if options.quick else options.seconds


def milliseconds(time: float) -> str:
    """Format a time in seconds as milliseconds."""
    return f"{1e3 * time:.2f}"
