"""A model and data for small runs."""

from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import dense_checkpoint, tiny_tokenizer
from helpers.paths import EXAMPLE_DATA
from helpers.rows import write_rows
from transformers import AutoTokenizer

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
SCORED = [
    ("A plane is taking off.", "An air plane is taking off.", 5.0),
    ("A man is playing a large flute.", "A man is playing a flute.", 3.8),
    ("Three men are playing chess.", "Two men are playing chess.", 2.6),
    ("A man is smoking.", "A man is skating.", 0.5),
    ("A cat sleeps on the sofa.", "The sofa has a sleeping cat.", 4.6),
    ("A girl is styling her hair.", "A girl is brushing her hair.", 2.5),
    ("The stock market fell.", "Boil the pasta for ten minutes.", 0.0),
    ("People are dancing.", "Some people dance in the street.", 4.0),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense checkpoint that draws random numbers while it trains."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    return dense_checkpoint(folder, sentence_transformers={"normalize": True, "max_seq_length": 24}, **DROPOUT)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its head for masked language modelling."""
    return dense_checkpoint(tmp_path_factory.mktemp("source") / "tiny", head="mlm", **DROPOUT)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A token for each letter; texts are cut off after 24."""
    found = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    found.model_max_length = 24
    return found


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's data, and a few scored pairs under the names that the recipe with five experts asks for."""
    folder = tmp_path_factory.mktemp("data")
    for dataset in EXAMPLE_DATA.glob("*/*/"):
        (folder / dataset.parent.name).mkdir(exist_ok=True)  # no link: what is added must not go into the repository
        (folder / dataset.parent.name / dataset.name).symlink_to(dataset)
    for name in ("stsbenchmark", "sts12"):
        rows = [
            {"sentence1": f"{first} {name} {copy}", "sentence2": second, "score": score}
            for first, second, score in SCORED
            for copy in range(4)
        ]
        write_rows(folder / "sts" / name / "train.jsonl.gz", rows)
    return folder
