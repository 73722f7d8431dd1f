"""What `evaluate` scores, and how."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from mote.settings import Settings


class EvaluateOptions(Settings):
    """Options of `evaluate`.

    Attributes:
        data: Score on the datasets of a folder.
        benchmark: Score on a benchmark of MTEB, as in "MTEB(eng, v1)", BEIR, or on a set for retrieval, as in MIRACL.
        tasks: Datasets of the folder or the benchmark, or patterns such as `beir/*`; without either, tasks of MTEB.
            Default: all.
        limit: Approximate number of texts that each dataset of the folder is cut to.
        retrieval: Kind of vectors to score; a hybrid model gives all of them. Default: the models' own.
        dimensions: Numbers of dimensions that vectors are cut to, each with scores of its own. Default: all dimensions.
        precisions: Precisions that dense vectors are quantised to, each with scores of its own: to `int8` between the
            extremes of each dimension, or to `binary`, whether a number is positive. Default: float32.
        max_length: Maximum length of a text in tokens. Default: the models'.
        definitions: Dataset, or pattern of datasets → definition of its task, which becomes an instruction in front of
            its queries, or of all its texts if it has no documents. It replaces the instructions of all models.
        template: Instruction around `{definition}`. Default: `Instruct: {definition}`, and `Query: ` on a second line.
        experts: Dataset → task of a MoTE, whose expert embeds its texts. Default: the task of the same name, else the
            one that serves its type.
        reference: Label of the baseline that gains are computed against. Default: the first of several models.
        batch_size: Batch size for embedding.
        device: Device: cpu, cuda, cuda:1, mps … Default: the best available.
        dtype: Dtype of the models' weights. Default: the stored one.
        trust_remote_code: Run code from the models' repositories and folders. A MoTE needs it.
    """

    data: str | Path | None = None
    benchmark: str | None = None
    tasks: list[str] = []
    limit: int | None = Field(default=None, ge=1)
    retrieval: Literal["dense", "sparse", "hybrid"] | None = None
    dimensions: list[int] = []
    precisions: list[Literal["float32", "int8", "binary"]] = []
    max_length: int | None = Field(default=None, ge=4)
    definitions: dict[str, str] = {}
    template: str | None = None
    experts: dict[str, str] = {}
    reference: str | None = None
    batch_size: int = Field(default=32, ge=1)
    device: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    trust_remote_code: bool = False
