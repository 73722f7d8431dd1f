"""The commands `mote upcycle`, `train`, `evaluate`, `analyze`, `memory` and `card`.

Options are named after the settings of the functions they call, so `locals()` passes them on.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

import mote
from mote.cli import options


def upcycle(
    src: Annotated[str, typer.Option(metavar="SRC", help=f"Dense text encoder: {options.SRC}.")],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Output folder. Default: the source's name with -mote.")
    ] = None,
    revision: options.Revision = None,
    experts: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="NAME", help="Expert; repeatable. Default: the paper's four."),
    ] = None,
    layers: Annotated[
        Any,
        typer.Option(
            parser=options.layers_of,
            metavar="LAYERS",
            help="Layers with experts: every (the default), every_other (the 2nd, 4th, …), or indices as in 0,2,5.",
        ),
    ] = None,
    tasks: Annotated[
        list[Any] | None,
        typer.Option(
            "--task", parser=options.pair, metavar="NAME=EXPERT", help="Additional task of an expert; repeatable."
        ),
    ] = None,
    instructions: Annotated[
        list[Any] | None,
        typer.Option(
            "--instruction",
            parser=options.pair,
            metavar="TASK=TEXT",
            help="Instruction in front of a task's texts; repeatable. Default: the source's prompts, then the paper's.",
        ),
    ] = None,
    definitions: Annotated[
        list[Any] | None,
        typer.Option(
            "--definition",
            parser=options.pair,
            metavar="TASK=TEXT",
            help="Definition of a task, which --template turns into an instruction; repeatable.",
        ),
    ] = None,
    template: options.Template = None,
    instruction_pooling: Annotated[
        Literal["included", "excluded", "excluded_by_count"] | None,
        typer.Option(help="Whether to pool the tokens of instructions, too. Default: as in the source, or included."),
    ] = None,
    default_task: Annotated[
        str | None, typer.Option(metavar="TASK", help="Task of texts without one. Default: none (an error).")
    ] = None,
    pooling: Annotated[
        Literal["mean", "cls", "last_token", "latent_attention", "self_attention"] | None,
        typer.Option(help="Pooling; the last two have weights to train. Default: the source's, or mean."),
    ] = None,
    pooling_latents: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of latents (--pooling latent_attention). Default: 512."),
    ] = None,
    pooling_heads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Heads of attention pooling. Default: 8.")
    ] = None,
    pooling_head_dim: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Width of each of these heads. Default: the hidden size.")
    ] = None,
    bidirectional: Annotated[
        bool,
        typer.Option("--bidirectional", help="Let a decoder attend in both directions. Default: as in the source."),
    ] = False,
    layer_path: Annotated[
        str | None, typer.Option(metavar="PATH", help="Path of the layers in an unknown architecture.")
    ] = None,
    shared_modules: Annotated[
        list[str] | None,
        typer.Option("--shared-module", metavar="PATH", help="Path of the attention in such a layer; repeatable."),
    ] = None,
    routing: Annotated[
        Literal["task", "token"] | None, typer.Option(help="What picks the expert. Default: task.")
    ] = None,
    num_experts: Annotated[
        int | None,
        typer.Option(metavar="N", help="Experts per block (--routing token). Default: the number of expert names."),
    ] = None,
    num_experts_per_tok: Annotated[
        int | None, typer.Option(metavar="K", help="Experts per token (--routing token). Default: 2.")
    ] = None,
    norm_topk_prob: Annotated[
        bool, typer.Option(help="Scale the weights of a token's experts to sum to 1 (--routing token).")
    ] = True,
    router_aux_loss_coef: Annotated[
        float | None,
        typer.Option(metavar="F", help="Factor of the load-balancing loss (--routing token). Default: 0.005."),
    ] = None,
    router_aux_loss_type: Annotated[
        Literal["equation_1", "megablocks"] | None,
        typer.Option(help="Formula of the load-balancing loss (--routing token). Default: equation_1."),
    ] = None,
    preset: Annotated[
        Literal["nomic-v2"] | None,
        typer.Option(help="Defaults for settings not given; nomic-v2: 8 experts in every second layer, 2 per token."),
    ] = None,
    with_head: Annotated[
        bool, typer.Option("--with-head", help="Keep the source's head for masked language modelling.")
    ] = False,
    retrieval: Annotated[
        Literal["dense", "sparse", "hybrid"] | None,
        typer.Option(help="Kind of vectors that the result gives. Default: the source's."),
    ] = None,
    sparse_from: Annotated[
        Literal["head", "embeddings"] | None,
        typer.Option(
            help="Sparse weights: logits of the head (which is kept), or hidden states times token embeddings."
        ),
    ] = None,
    max_active_dims: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of weights to keep in a sparse vector. Default: all.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="SRC", help=f"Tokenizer: {options.SRC}. Default: the source's own.")
    ] = None,
    end_token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", help="Token at the end of each text, also of truncated ones; eos: the tokenizer's own."
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], typer.Option(help="Data type of the weights.")
    ] = "auto",
    max_shard_size: options.MaxShardSize = "5GB",
    push: options.Push = False,
    repo_id: options.RepoId = None,
    private: options.Private = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Turn a dense text encoder into a MoTE.

    Every expert starts as a copy of the dense blocks.
    """
    settings = locals()
    for name in ("src", "out", "dry_run"):
        del settings[name]
    settings["tasks"] = options.mapping(tasks, "--task")
    settings["instructions"] = options.mapping(instructions, "--instruction")
    settings["definitions"] = options.mapping(definitions, "--definition")
    settings = {name: value for name, value in settings.items() if value is not None}
    if dry_run:
        typer.echo(mote.plan_upcycling(src, out, **settings))
        typer.echo("Dry run: nothing was written.")
    else:
        mote.upcycle(src, out, **settings)


@options.written
def lengthen(
    src: Annotated[str, typer.Argument(metavar="SRC", help=f"BERT, RoBERTa or XLM-R: {options.SRC}.")],
    length: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum length of a text, in tokens.")],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Output folder. Default: the source's name with the length.")
    ] = None,
    rope_theta: Annotated[
        float, typer.Option(metavar="F", min=1, help="Base period of the rotary embeddings.")
    ] = 10_000.0,
    revision: options.Revision = None,
    *,
    write: "mote.WriteOptions",
) -> None:
    """Replace an encoder's learned positions by rotary ones, for longer texts.

    The result needs pre-training at the new length (mote pretrain).
    """
    mote.lengthen(src, out, length=length, rope_theta=rope_theta, revision=revision, options=write)


def train(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    dry_run: options.PlanOfRun = False,
    overwrite: options.StartAgain = False,
) -> None:
    """Train a model from a recipe.

    The same command resumes an interrupted run.
    """
    with options.extra("train"):
        from mote.training.train import plan
        from mote.training.train import train as start
    _run(plan, start, recipe, overrides, dry_run, overwrite)


def pretrain(
    recipe: options.Recipe,
    overrides: options.Overrides = None,
    dry_run: options.PlanOfRun = False,
    overwrite: options.StartAgain = False,
) -> None:
    """Pre-train a model on plain text.

    The objective is masked language modelling, alone or with a decoder (CoT-MAE). The same command resumes an
    interrupted run.
    """
    with options.extra("train"):
        from mote.training.pretraining import plan_pretraining
        from mote.training.pretraining import pretrain as start
    _run(plan_pretraining, start, recipe, overrides, dry_run, overwrite)


def _run(
    plan: Callable[..., str],
    start: Callable[..., Any],
    recipe: str,
    overrides: list[str] | None,
    dry_run: bool,
    overwrite: bool,
) -> None:
    """Run a recipe, or print its plan."""
    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging

    for library in (logging, datasets_logging):  # one bar is enough
        library.disable_progress_bar()
    if dry_run:
        typer.echo(plan(recipe, overrides or [], overwrite=overwrite))
        typer.echo("Dry run: nothing was trained.")
    else:
        start(recipe, overrides or [], overwrite=overwrite)


def evaluate(
    models: options.Models,
    data: Annotated[str | None, typer.Option(metavar="FOLDER", help="Score on the test sets of a folder.")] = None,
    benchmark: Annotated[
        str | None, typer.Option(metavar="NAME", help='Score on a benchmark of MTEB, as in "MTEB(eng, v1)".')
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="NAME",
            help="Test set of the folder or benchmark, or a pattern such as 'beir/*'; without either, a task of MTEB. "
            "Repeatable.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Cut each test set of the folder down to about N texts.")
    ] = None,
    retrieval: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND", help="Vectors of hybrid models: dense, sparse or hybrid (the default); repeatable."
        ),
    ] = None,
    definitions: Annotated[
        list[Any] | None,
        typer.Option(
            "--definition",
            parser=options.pair,
            metavar="DATASET=TEXT",
            help="Instruction in front of a dataset's queries, or of all its texts if it has no documents; repeatable. "
            "Default: the model's.",
        ),
    ] = None,
    template: options.Template = None,
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Baseline that gains are computed against. Default: the first.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write tables, scores, a chart of gains and mteb's results.")
    ] = None,
    batch_size: options.BatchSize = 32,
    device: options.Device = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="T", help="float32, float16 or bfloat16. Default: as stored.")
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Compute cached scores again.")] = False,
    as_json: options.Json = False,
) -> None:
    """Score models with MTEB.

    The same command resumes an interrupted evaluation.
    """
    settings = {**locals(), "tasks": tasks or (), "retrieval": retrieval or ()}
    settings["definitions"] = options.mapping(definitions, "--definition") or {}
    del settings["as_json"]
    with options.extra("evaluate"):
        run = mote.evaluate
    evaluation = run(**settings)
    typer.echo(evaluation.to_json().rstrip() if as_json else f"\n{evaluation}")
    if out is not None and not as_json:
        typer.echo(f"\nWrote {out}")
    if failed := evaluation.failed():
        raise ValueError(
            f"{len(failed)} of {len(evaluation.scores) * len(evaluation.types)} scores failed: {'; '.join(failed)}"
        )


def analyze(
    models: options.Models,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Write analysis.json, analysis.md and charts.")] = None,
    texts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="One text per line, or .jsonl. Default: 128 texts shipped with MoTE."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Draw texts and pairs from the datasets of a folder.")
    ] = None,
    pairs: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=".jsonl with columns 'query' and 'positive'. Default: those of --data."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="NAME", help="Task to compare; repeatable. Default: the experts' tasks."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model before training. Default: what the model's folder records."),
    ] = None,
    retrieval: Annotated[
        Literal["dense", "sparse", "hybrid"] | None,
        typer.Option(help="Kind of vectors; hybrid models have all. Default: the models' own."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Number of texts, and of pairs.")] = 128,
    batch_size: options.BatchSize = 32,
    device: options.Device = None,
    seed: options.Seed = 0,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Show how far experts have specialised.

    Reports similarity between tasks, divergence between queries and documents, and the weight change of each expert.
    """
    settings = locals()
    del settings["as_json"]
    from transformers.utils import logging

    with options.extra("evaluate"):
        run = mote.analyze
    logging.disable_progress_bar()
    analysis = run(**settings)
    typer.echo(analysis.to_json().rstrip() if as_json else f"\n{analysis}")


def memory(
    src: Annotated[str, typer.Argument(metavar="SRC", help=f"MoTE or dense model: {options.SRC}.")],
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows per step, over all processes.")],
    length: Annotated[int, typer.Option(metavar="L", min=1, help="Tokens per text.")],
    revision: options.Revision = None,
    experts: Annotated[
        list[str] | None,
        typer.Option("--expert", metavar="NAME", help="Expert of the MoTE upcycled from a dense SRC; repeatable."),
    ] = None,
    mini_batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Mini-batch size of a cached loss. Default: not cached."),
    ] = None,
    columns: Annotated[
        int, typer.Option(metavar="N", min=1, max=100, help="Texts per row (3 with a hard negative).")
    ] = 2,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Recompute activations within blocks.")
    ] = False,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="Precision; bf16 is autocast.")] = "fp32",
    processes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of devices.")] = 1,
    sharding: Annotated[
        Literal["ddp", "fsdp2", "deepspeed-stage-1", "deepspeed-stage-2"],
        typer.Option(help="Sharding over several processes."),
    ] = "ddp",
    device: Annotated[Literal["gpu", "cpu"], typer.Option(help="Kind of device.")] = "gpu",
    lora_rank: Annotated[
        int | None, typer.Option(metavar="R", min=1, help="Rank of LoRA adapters. Default: all weights are trained.")
    ] = None,
    lora_targets: Annotated[
        Literal["all-linear", "shared", "experts"] | None,
        typer.Option(help="Layers that get adapters; all-linear if not given."),
    ] = None,
    base_dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Data type of the frozen linear layers under adapters; float32 if not given."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Estimate the memory of training.

    The estimate is for a step of contrastive training with AdamW, on each device. No weights are read.
    """
    settings = locals()
    from mote.training.memory import config_of

    for name in ("src", "revision", "experts", "as_json", "lora_rank", "lora_targets", "base_dtype"):
        del settings[name]
    adapters = {"r": lora_rank, "targets": lora_targets, "base_dtype": base_dtype}
    given = {name: value for name, value in adapters.items() if value is not None}
    if given and lora_rank is None:
        raise ValueError("--lora-targets and --base-dtype are settings of adapters: add --lora-rank")
    settings["peft"] = given or None
    estimate = mote.estimate_memory(config_of(src, revision, experts), **settings)
    typer.echo(json.dumps(estimate.to_dict(), indent=2) if as_json else estimate)


def card(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help=f"MoTE, or dense model made from one: {options.SRC} (with --push).")
    ],
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Base model, an id on the Hub. Default: the card's, or the one in mote.json."),
    ] = None,
    push: Annotated[bool, typer.Option("--push", help="Push the card, and nothing else, to the Hub.")] = False,
    repo_id: Annotated[
        str | None,
        typer.Option(
            metavar="USER/NAME", help="Hub id to load the model by, and to push to. Default: the name of SRC."
        ),
    ] = None,
    revision: options.Revision = None,
) -> None:
    """Rewrite a model's card, after other programs have trained or saved it.

    Sections and metadata written by others are kept: training details, scores, licence.
    """
    mote.write_card(src, base_model=base_model, push=push, repo_id=repo_id, revision=revision)
