"""What several benchmarks measure: a dense model, the MoTE of its copies, and real texts of four tasks."""

import copy
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from benchmarks.performance.benchmark import Options
from mote import MoTEConfig, MoTEModel
from mote.data.rows import find_datasets, read_rows
from mote.data.settings import DatasetSettings

COLUMNS = {  # task → the training sets of the data folder that have its texts, and their column
    "classification": ("classification", "text"),
    "clustering": ("clustering", "text"),
    "search_query": ("retrieval", "query"),
    "search_document": ("retrieval", "positive"),
}
TASKS = list(COLUMNS)


def load_dense(options: Options) -> PreTrainedModel:
    """Load the dense model, as `AutoModel` gives it; in memory of its own, not mapped from the file."""
    model = AutoModel.from_pretrained(options.checkpoint, dtype=options.dtype).eval()
    return copy.deepcopy(model).to(options.device)


def make_mote(dense: PreTrainedModel, experts: Sequence[str] = TASKS, **settings: object) -> MoTEModel:
    """Make a MoTE of copies of the dense model's layers, and leave that as it is."""
    config = MoTEConfig(backbone_config=dense.config, experts=list(experts), **settings)
    return MoTEModel(config, copy.deepcopy(dense)).to(dense.device).eval()


def made_up(dense: PreTrainedModel, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Draw token ids, without padding: [rows, length]."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, dense.config.vocab_size, (rows, length), generator=generator)
    return {"input_ids": ids.to(dense.device), "attention_mask": torch.ones_like(ids).to(dense.device)}


def real_texts(options: Options, rows: int) -> dict[str, list[str]]:
    """Read as many texts of each task, evenly from its training sets."""
    texts = {}
    for task, (kind, column) in COLUMNS.items():
        found = find_datasets(DatasetSettings(path=kind), options.data)
        share = -(-rows // len(found))
        lines = [line.content.get(column) for location in found for line in islice(read_rows(location), share)]
        texts[task] = [text if isinstance(text, str) else str(text[0]) for text in lines if text][:rows]
    return texts


def tokenize(options: Options, texts: list[str], length: int = 128) -> dict[str, torch.Tensor]:
    """Tokenize texts as one batch, padded to the longest."""
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    return dict(batch.to(options.device))


def waiting(options: Options) -> Callable[[], None]:
    """Return what waits for the device."""
    return torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None


def seconds(options: Options) -> float:
    """How long to measure one ratio: seven pairs, if it is only to be shown to run."""
    return 0.0 if options.quick else options.seconds


def milliseconds(time: float) -> str:
    """A time in a table."""
    return f"{1e3 * time:.2f}"
