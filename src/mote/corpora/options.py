"""Options of the commands on corpora, each declared once. Imports neither torch nor transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt

from mote.settings import Settings


class ModelOptions(Settings):
    """What all commands have in common: which model, and which split is read.

    Attributes:
        batch_size: Texts per batch.
        model_dtype: Dtype of the weights, and so of the computation. Default: the stored one.
        revision: Branch, tag or commit of a model on the Hub.
        trust_remote_code: Whether to run the code in the model's repository.
        split: Split of folders and datasets on the Hub.
        subset: Configuration of a dataset on the Hub.
        overwrite: Replace another run in the output folder.
    """

    batch_size: PositiveInt = 32
    model_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    split: str = "train"
    subset: str | None = None
    overwrite: bool = False

    def own(self) -> dict[str, Any]:
        """Return the fields of a verb's own class, which determine its result, beside model and texts."""
        return {name: getattr(self, name) for name in type(self).__annotations__}


class CorpusOptions(ModelOptions):
    """How a model embeds.

    Attributes:
        max_length: Maximum length of a text in tokens. Default: the model's.
        dimensions: Number of dimensions to keep. Default: all.
        device: Device, or several, each with a process of its own. Default: the best available.
        engine: `local` for this machine, or `ray` for a cluster through Ray Data, which chooses the devices.
        workers: Number of Ray workers. Default: one per GPU, or one per node if there are none.
    """

    max_length: PositiveInt | None = None
    dimensions: PositiveInt | None = None
    device: str | list[str] | None = None
    engine: Literal["local", "ray"] = "local"
    workers: PositiveInt | None = None

    def conflicts(self) -> Iterator[str]:
        """Name options of the other engine."""
        if (self.device if self.engine == "ray" else self.workers) is not None:
            yield "device is for the engine local, workers are for the engine ray"


class EmbedOptions(CorpusOptions):
    """Options of `embed_corpus` and `mote embed`.

    Attributes:
        task: Task of all texts: the name of a prompt, or a task of a MoTE; `auto`: that which the MoTE's router
            picks for each text (see `mote route`). Default: the model's default.
        prompt: Text to put in front of every text, in place of a task.
        task_column: Column that holds the task of each row, in place of one task for all.
        text_columns: Columns whose texts are joined by a space. Default: the one with a usual name, with `title` in
            front of `text`.
        id_column: Column of ids, strings or integers. Default: `_id` or `id`, else the number of the row, from 0.
        dtype: Dtype of the stored embeddings.
        shard_size: Texts per file.
    """

    task: str | None = None
    prompt: str | None = None
    task_column: str | None = None
    text_columns: list[str] = []
    id_column: str | None = None
    dtype: Literal["float32", "float16"] = "float32"
    shard_size: PositiveInt = 50_000

    def conflicts(self) -> Iterator[str]:
        """Name ways to choose the task that exclude each other."""
        yield from super().conflicts()
        if [self.task, self.prompt, self.task_column].count(None) < 2:
            yield "task, prompt and task_column exclude each other"


class PairOptions(CorpusOptions):
    """What mining and filtering have in common: datasets of pairs, and the model that ranks documents for queries.

    Attributes:
        query_task: Task of the queries: the name of a prompt, or a task of a MoTE.
        document_task: Task of the documents.
        embeddings: Folder to keep embeddings in, for other runs on the same texts. Default: none.
        data: Data folder.
    """

    query_task: str = "query"
    document_task: str = "document"
    embeddings: Path | None = None
    data: Path = Path()


class MineOptions(PairOptions):
    """Options of `mine_negatives` and `mote mine`.

    Attributes:
        corpus: Files whose texts are candidates in every dataset, beside its own positives.
        negatives: Maximum number of negatives per row.
        skip: Number of top-ranked candidates to skip.
        depth: Rank up to which candidates are considered, known positives not counted.
        relative_margin: Minimum gap between positive and negative, as a fraction of the positive's score; negative: no
            such condition.
        absolute_margin: Minimum gap between the scores of positive and negative. Default: no such condition.
        sampling: Which accepted candidates to take: the best-ranked (`top`), or random ones.
        scores: Cross-encoder that scores the positives and negatives, for losses that learn its scores: a folder, or an
            id on the Hub. Default: no scores are written.
        seed: Random seed; candidates are drawn for each row independently.
    """

    corpus: list[str | Path] = []
    negatives: PositiveInt = 5
    skip: int = Field(default=0, ge=0)
    depth: PositiveInt = 100
    relative_margin: float | None = 0.05
    absolute_margin: float | None = Field(default=None, ge=0)
    sampling: Literal["top", "random"] = "top"
    scores: str | None = None
    seed: int = 42


class FilterOptions(PairOptions):
    """Options of `filter_pairs` and `mote filter`.

    Attributes:
        nearest: Number of nearest documents of a shard that must include the positive.
        shard_size: Pairs per shard, compared with one another.
        against: Data folder with test sets, as `mote evaluate` reads it. Instead of such pairs, rows are dropped that
            have a text of a test set, or one near to it.
        threshold: With `against`, cosine from which two texts are near; of BM25, fraction of a text's score for itself.
    """

    nearest: PositiveInt = 2
    shard_size: PositiveInt = 1_000_000
    against: Path | None = None
    threshold: float = Field(default=0.9, gt=0, le=1)


class GenerateOptions(ModelOptions):
    """Options of `generate_queries` and `mote generate`.

    Attributes:
        queries: Number of queries per document; equal ones count once.
        prompt: What the model reads, with `{document}` for the text. Default: the text alone for a sequence-to-sequence
            model, a request for a query for a causal one.
        max_length: Maximum length of a document in tokens.
        max_new_tokens: Maximum length of a query in tokens.
        top_k: Number of the most likely tokens among which each is drawn; 1 takes the most likely one.
        seed: Random seed.
        device: Device. Default: the best available.
    """

    queries: PositiveInt = 1
    prompt: str | None = None
    max_length: PositiveInt = 512
    max_new_tokens: PositiveInt = 64
    top_k: PositiveInt = 10
    seed: int = 42
    device: str | None = None
