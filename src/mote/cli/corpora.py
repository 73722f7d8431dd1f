"""The commands `mote embed`, `mine` and `filter`."""

from typing import Annotated, Literal

import typer

import mote
from mote.cli import options

Device = Annotated[
    list[str] | None,
    typer.Option(metavar="D", help="cpu, cuda:0 …; repeatable, one process each. Default: the best available."),
]
Processes = Annotated[int | None, typer.Option(metavar="N", min=1, help="Processes on the CPU; with Ray, workers.")]
Engine = Annotated[Literal["local", "ray"], typer.Option(help="This machine, or a cluster through Ray Data.")]
Address = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Ray cluster to join. Default: start a local one.")
]
Backend = Annotated[Literal["torch", "onnx", "openvino"], typer.Option(help="Runtime of a model from `mote export`.")]
MaxLength = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Maximum length of a text in tokens. Default: the model's.")
]
ModelDtype = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    typer.Option(help="Dtype of the model, and so of the computation. Default: the stored one."),
]
Dimensions = Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of dimensions to keep. Default: all.")]


def embed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Any Sentence-Transformers model: {options.SRC}.")],
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help=".jsonl, .jsonl.gz, .parquet; patterns, folders, hub:user/name."),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Output folder; an unfinished run is resumed.")],
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="Task: the name of a prompt. Default: the model's default.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to put in front of every text.")] = None,
    task_column: Annotated[str | None, typer.Option(metavar="COL", help="Column with the task of each text.")] = None,
    text_columns: Annotated[
        list[str] | None,
        typer.Option(
            "--text-column",
            metavar="COL",
            help="Text column; repeatable, joined by a space. Default: one with a usual name, after `title`.",
        ),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(metavar="COL", help="Column of ids. Default: _id or id, else the row's number.")
    ] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Split of folders and datasets on the Hub.")] = "train",
    subset: Annotated[str | None, typer.Option(metavar="NAME", help="Configuration of a dataset on the Hub.")] = None,
    dtype: Annotated[
        Literal["float32", "float16", "int8"], typer.Option(help="Data type of the embeddings.")
    ] = "float32",
    dimensions: Dimensions = None,
    batch_size: options.BatchSize = 32,
    max_length: MaxLength = None,
    model_dtype: ModelDtype = None,
    shard_size: Annotated[int, typer.Option(metavar="N", min=1, help="Texts per file; bounds the memory.")] = 50_000,
    index: Annotated[
        str | None, typer.Option(metavar="FACTORY", help="Also write a FAISS index: Flat, HNSW32, IVF1024,Flat …")
    ] = None,
    device: Device = None,
    processes: Processes = None,
    engine: Engine = "local",
    address: Address = None,
    backend: Backend = "torch",
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other embeddings in DIR.")] = False,
) -> None:
    """Embed a corpus into sharded parquet files.

    The same command resumes an interrupted run.
    """
    settings = {**locals(), "text_columns": text_columns or []}
    from transformers.utils import logging

    with options.extra("corpora"):
        run = mote.embed_corpus
    logging.disable_progress_bar()
    run(**settings)


Datasets = Annotated[
    list[str], typer.Argument(metavar="DATASET...", help="Paths and patterns in the data folder, or hub:user/name.")
]
Data = Annotated[str, typer.Option(metavar="FOLDER", help="Data folder.")]
Split = Annotated[str, typer.Option(metavar="NAME", help="Split of each dataset.")]
Subset = Annotated[str | None, typer.Option(metavar="NAME", help="Configuration of a dataset on the Hub.")]
OutOfRun = Annotated[str, typer.Option("--out", metavar="DIR", help="Output folder; an unfinished run is resumed.")]
QueryTask = Annotated[str, typer.Option(metavar="NAME", help="Task of the queries: the name of a prompt.")]
DocumentTask = Annotated[str, typer.Option(metavar="NAME", help="Task of the documents: the name of a prompt.")]
Kept = Annotated[
    str | None,
    typer.Option("--embeddings", metavar="DIR", help="Folder to keep embeddings in, for other runs on these texts."),
]
ReplaceRun = Annotated[bool, typer.Option("--overwrite", help="Replace another run in DIR.")]


def mine(
    datasets: Datasets,
    out: OutOfRun,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help=f"Teacher: bm25, or any Sentence-Transformers model: {options.SRC}.")
    ],
    data: Data = ".",
    split: Split = "train",
    subset: Subset = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Candidates in addition to the dataset's own texts; repeatable."),
    ] = None,
    negatives: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of negatives per row.")] = 5,
    skip: Annotated[int, typer.Option(metavar="N", min=0, help="Number of top-ranked candidates to skip.")] = 0,
    depth: Annotated[int, typer.Option(metavar="N", min=1, help="Consider candidates up to this rank.")] = 100,
    relative_margin: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            help="Minimum gap between positive and negative, as a fraction of the positive's score; -1: none.",
        ),
    ] = 0.05,
    absolute_margin: Annotated[
        float | None, typer.Option(metavar="F", help="Minimum gap between the scores of positive and negative.")
    ] = None,
    sampling: Annotated[
        Literal["top", "random"], typer.Option(help="Which of the accepted candidates to take.")
    ] = "top",
    existing_only: Annotated[
        bool, typer.Option("--existing-only", help="Mine nothing; only filter the negatives that rows already have.")
    ] = False,
    query_task: QueryTask = "query",
    document_task: DocumentTask = "document",
    batch_size: options.BatchSize = 32,
    max_length: MaxLength = None,
    model_dtype: ModelDtype = None,
    dimensions: Dimensions = None,
    device: Device = None,
    processes: Processes = None,
    engine: Engine = "local",
    address: Address = None,
    backend: Backend = "torch",
    embeddings: Kept = None,
    seed: options.Seed = 42,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: ReplaceRun = False,
) -> None:
    """Mine hard negatives for datasets of pairs.

    A candidate is taken if it is near the query, but clearly less near than the positive. The same command resumes an
    interrupted run.
    """
    settings = {**locals(), "corpus": corpus or []}
    with options.extra("corpora"):
        mine_negatives = mote.mine_negatives
    mine_negatives(**settings)


def filter_pairs(
    datasets: Datasets,
    out: OutOfRun,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help=f"bm25, or any Sentence-Transformers model: {options.SRC}.")
    ],
    data: Data = ".",
    split: Split = "train",
    subset: Subset = None,
    nearest: Annotated[
        int, typer.Option(metavar="K", min=1, help="Number of nearest documents that must include the positive.")
    ] = 2,
    shard_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Pairs per shard, compared with one another.")
    ] = 1_000_000,
    query_task: QueryTask = "query",
    document_task: DocumentTask = "document",
    batch_size: options.BatchSize = 32,
    max_length: MaxLength = None,
    model_dtype: ModelDtype = None,
    dimensions: Dimensions = None,
    device: Device = None,
    processes: Processes = None,
    engine: Engine = "local",
    address: Address = None,
    backend: Backend = "torch",
    embeddings: Kept = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: ReplaceRun = False,
) -> None:
    """Drop the pairs that a model does not confirm.

    A pair stays if its positive is among the nearest documents of its query. The same command resumes an interrupted
    run.
    """
    settings = locals()
    with options.extra("corpora"):
        run = mote.filter_pairs
    run(**settings)
