"""Where a dataset is; recipes of training extend this."""

from typing import Any, Literal

from pydantic import model_validator

from mote.settings import Settings

# Our names of columns, which are among their usual names.
ColumnName = Literal["anchor", "positive", "negative", "scores", "text", "label", "sentence1", "sentence2", "score"]


class DatasetSource(Settings):
    """Where a dataset is, and what its columns mean.

    Attributes:
        path: A file (`.jsonl`, `.csv` or `.tsv`, also with `.gz`; `.parquet`; or `.txt` with a text per line), a folder
            with files for the split, or a pattern that matches several (`retrieval/*`), all relative to the data
            folder; or `hub:user/name`, on the Hub, or one file of it, `hub:user/name/pairs.jsonl.gz`.
        split: Split to read: `train` reads `train.jsonl.gz` and similar files.
        subset: Configuration of a dataset on the Hub.
        revision: Branch, tag or commit of a dataset on the Hub.
        columns: Our name of a column → its name in the file. Ours are `anchor`, `positive`, `negative` (one name or a
            list) and `scores`, or `text` and `label`, or `sentence1`, `sentence2` and `score`. Default: recognised by
            their usual names.
        exclude: Names of datasets to skip among those that a pattern matches.
    """

    path: str
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    columns: dict[ColumnName, str | list[str]] = {}
    exclude: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, settings: Any) -> Any:
        return {"path": settings} if isinstance(settings, str) else settings
