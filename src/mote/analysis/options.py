"""What `analyze` measures, and on what."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from mote.settings import Settings


class AnalyzeOptions(Settings):
    """Options of `analyze`.

    Attributes:
        texts: File of texts to embed under each task: one per line (`.txt`), or rows with a column `text`. In Python
            also the texts themselves. Default: those of `data`, otherwise the 128 real ones shipped with MoTE.
        data: Folder of datasets to draw texts and pairs from.
        pairs: File of rows with columns `query` and `positive`. Default: the retrieval datasets of `data`; without
            these, the same texts take both roles.
        tasks: Tasks to compare. Default: the first model's experts, or else its prompts, if all models know them. If a
            model distinguishes no tasks (a dense model without prompts), only pairs are compared.
        start: Model that the models were trained from, to measure how their weights changed.
        retrieval: Kind of vectors; a hybrid model gives all of them. Default: the models' own.
        limit: Number of texts, if none are given, and of pairs.
        batch_size: Batch size for embedding.
        device: Device: cpu, cuda, cuda:1, mps … Default: the best available.
        seed: Random seed of samples and t-SNE.
        trust_remote_code: Run code from the models' repositories and folders. A MoTE needs it.
    """

    texts: str | Path | list[str] | None = None
    data: str | Path | None = None
    pairs: str | Path | None = None
    tasks: list[str] | None = None
    start: str | None = None
    retrieval: Literal["dense", "sparse", "hybrid"] | None = None
    limit: int = Field(default=128, ge=2)
    batch_size: int = Field(default=32, ge=1)
    device: str | None = None
    seed: int = Field(default=0, ge=0, lt=2**32)
    trust_remote_code: bool = False
