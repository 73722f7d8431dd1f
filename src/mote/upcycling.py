"""Upcycling: a dense checkpoint becomes a MoTE whose experts are copies of its blocks."""

import inspect
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from configuration_mote import MoTEConfig, alternatives
from modeling_mote import MoTEModel
from mote import hub
from mote.checkpoints import writing as repository
from mote.checkpoints.reading import (
    DenseSource,
    dense_without_weights,
    load_dense,
    load_tokenizer,
    open_source,
    stored_dtype,
)
from mote.checkpoints.staging import Staging, refuse_occupied, refuse_source, require_shard_size, require_space
from mote.checkpoints.streaming import DenseWeights, can_stream, write_weights
from mote.checkpoints.tensors import parameter_counts

Report = Callable[[str], None]


@dataclass
class UpcyclingPlan:
    """What an upcycling will do.

    Attributes:
        source: The dense checkpoint.
        config: Of the MoTE.
        out: Folder of the result.
        counts: As from `parameter_counts`.
        file_sizes: In bytes, of each file with weights.
        notes: What the user should know.
    """

    source: DenseSource
    config: MoTEConfig
    out: Path
    counts: dict[str, Any]
    file_sizes: list[int]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Lay the plan out for people."""
        config, counts = self.config, self.counts
        served = [
            f"{expert} ({', '.join(task for task, to in config.tasks.items() if to == expert)})"
            for expert in config.experts
        ]
        layers = config.mote_layer_indices
        lines = {
            "source": f"{self.source.name} ({config.backbone_config.model_type}, "
            f"{', '.join(path.name for path in self.source.weights)})",
            **({"router": _router(config)} if config.router == "token" else {}),
            "experts (tasks)": "\n                   ".join(served),
            "blocks": f"{len(layers)} of {config.num_hidden_layers} have experts: {', '.join(map(str, layers))}",
            "parameters": f"{repository.millions(counts['active'])} active, {repository.millions(counts['total'])} in "
            f"all: {repository.millions(counts['shared'])} shared, and per expert "
            f"{repository.millions(max(counts['experts'].values()))}",
            "weights": f"{megabytes(sum(self.file_sizes))} ({str(config.dtype).removeprefix('torch.')}), in files of "
            f"{', '.join(map(megabytes, self.file_sizes))}",
            "out": str(self.out),
        }
        return "\n".join([f"{name + ':':<18} {text}" for name, text in lines.items()] + self.notes)


def upcycle(
    src: str,
    out: str | Path | None = None,
    *,
    experts: list[str] | None = None,
    layers: str | list[int] = "every",
    tasks: dict[str, str] | None = None,
    instructions: dict[str, str] | None = None,
    default_task: str | None = None,
    pooling: str | None = None,
    layer_path: str | None = None,
    shared_modules: list[str] | None = None,
    router: str = "task",
    experts_per_token: int = 2,
    normalize_router: bool = True,
    load_balancing: float = 0.01,
    tokenizer: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    push: bool = False,
    repo_id: str | None = None,
    private: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Turn a dense checkpoint into a complete MoTE model repository.

    Args:
        src: A folder or an id on the Hub, safetensors or `.bin`.
        out: Folder to write. Default: the source's name with `-mote`, in the current folder.
        experts: Names of the experts. Default: the paper's four.
        layers: The blocks that get experts: `"every"`, `"every_other"`, or indices from 0.
        tasks: Task → expert, in addition to the defaults of `MoTEConfig`.
        instructions: Task → text, over those of the source, over the paper's.
        default_task: Task of texts for which none is given.
        pooling: `mean`, `cls` or `last_token`. Default: the source's; `mean` if it says nothing.
        layer_path: Of an architecture that is not in MoTE's table: where its list of layers is.
        shared_modules: The same architecture's submodules of a layer that make up its attention.
        router: What picks the expert: the `"task"` of a text, or a learned router for each `"token"`.
        experts_per_token: Of a token router: how many experts each token goes through.
        normalize_router: Of a token router: whether their weights sum to 1, as the dense model's output needs.
        load_balancing: Of a token router: factor of the loss that keeps the experts equally busy in training.
        tokenizer: A folder or id on the Hub. Default: the source's own.
        dtype: Of the weights: `float32`, `float16`, `bfloat16`, or `auto` for what the source's config says.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: Replace `out` where it holds a MoTE already.
        push: Push the result to the Hub.
        repo_id: Where to push to. Default: the name of `out`, under the user of the token.
        private: Make a new repository on the Hub private.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        FileExistsError: If `out` is in use.
        OSError: If its disk is too small.
        ValueError: If the source does not fit, or an argument does not hold.
        PermissionError: If the Hub refuses the push.
    """
    arguments = dict(locals())
    repo_id = hub.check_before_push(repo_id or Path(out or default_out(src)).name) if push else repo_id
    plan = plan_upcycling(
        src,
        out,
        experts=experts,
        layers=layers,
        tasks=tasks,
        instructions=instructions,
        default_task=default_task,
        pooling=pooling,
        layer_path=layer_path,
        shared_modules=shared_modules,
        router=router,
        experts_per_token=experts_per_token,
        normalize_router=normalize_router,
        load_balancing=load_balancing,
        dtype=dtype,
        revision=revision,
        max_shard_size=max_shard_size,
    )
    refuse_occupied(plan.out, overwrite)
    refuse_source(plan.out, plan.source.folder)
    report(str(plan))
    loaded_tokenizer = load_tokenizer(plan.source, tokenizer)
    made_by = _arguments_to_tell(arguments, plan)
    model, left_out, write_weights = _model_and_its_writer(plan, max_shard_size, report)
    require_space(plan.out, sum(plan.file_sizes))
    with ThreadPoolExecutor(1) as thread, Staging(plan.out, overwrite) as folder:
        described = thread.submit(repository.describe_source, plan.source)  # which reads all of it, for its hash
        report(f"Writing {megabytes(sum(plan.file_sizes))} …")
        repository.write_model(model, loaded_tokenizer, plan.source, folder, max_shard_size, write_weights)
        repository.write_sentence_transformer(model, plan.source, folder)
        repository.write_card(model, plan.source, folder, repo_id or plan.out.name, _command(made_by))
        repository.write_record(_record(plan, described.result(), made_by, left_out), folder)
    if left_out:
        report(f"Left out: {len(left_out)} weights of pre-training heads (listed in {repository.RECORD_FILE})")
    report(f"Wrote {plan.out}")
    if push:
        report(f"Pushing to {repo_id} …")
        report(f"Pushed: {hub.push(plan.out, str(repo_id), private=private)}")
    report(how_to_load(str(repo_id) if push else str(plan.out), plan.config))
    return plan.out


def _model_and_its_writer(
    plan: UpcyclingPlan, max_shard_size: str, report: Report
) -> tuple[MoTEModel, list[str], Callable[[Path], None] | None]:
    """Make sure that the source's weights fit, and build the MoTE.

    Returns:
        The model; the keys of heads that are left out; and, where the model has no weights because they can be
        streamed from the source's files, what writes them into a folder.
    """
    report("Reading the dense model …")
    dtype = plan.config.dtype or "auto"
    dense, left_out = dense_without_weights(plan.source, dtype)
    weights = DenseWeights(plan.source, dense)
    model = MoTEModel(plan.config, dense)
    if can_stream(model, weights):
        report(f"Copying its blocks into {len(plan.config.experts)} experts …")
        return model, left_out, lambda folder: write_weights(model, weights, folder, max_shard_size, report)
    dense, left_out = load_dense(plan.source, dtype)
    report(f"Copying its blocks into {len(plan.config.experts)} experts, in memory …")
    return MoTEModel(plan.config, dense), left_out, None


def plan_upcycling(
    src: str,
    out: str | Path | None = None,
    *,
    experts: list[str] | None = None,
    layers: str | list[int] = "every",
    tasks: dict[str, str] | None = None,
    instructions: dict[str, str] | None = None,
    default_task: str | None = None,
    pooling: str | None = None,
    layer_path: str | None = None,
    shared_modules: list[str] | None = None,
    router: str = "task",
    experts_per_token: int = 2,
    normalize_router: bool = True,
    load_balancing: float = 0.01,
    dtype: str = "auto",
    revision: str | None = None,
    max_shard_size: str = "5GB",
) -> UpcyclingPlan:
    """Work out what an upcycling will do, without reading weights or writing anything.

    Takes the arguments of `upcycle` that decide it, and raises what it raises for them.
    """
    require_shard_size(max_shard_size)
    source = open_source(src, revision)
    prompts = repository.source_prompts(source)
    settings: dict[str, Any] = {
        "experts": experts,
        "tasks": tasks,
        "mote_layers": layers,
        "default_task": default_task,
        "layer_path": layer_path,
        "shared_modules": shared_modules,
        "router": router,
        "experts_per_token": experts_per_token,
        "normalize_router": normalize_router,
        "load_balancing": load_balancing,
    }
    pooling = pooling or repository.source_pooling(source) or "mean"
    config = MoTEConfig(backbone_config=source.config, pooling=pooling, **settings)
    config.instructions = {**config.instructions, **instructions_from(prompts, config), **(instructions or {})}
    config.validate_names()
    config.dtype = stored_dtype(source) if dtype == "auto" else _dtype(dtype)
    model = _without_weights(config, source)
    return UpcyclingPlan(
        source=source,
        config=config,
        out=Path(out) if out is not None else default_out(src),
        counts=parameter_counts(model),
        file_sizes=_file_sizes(model.state_dict(), max_shard_size),
        notes=[
            f"note: the source's prompt {name!r} stands for no task; route it with `--task {name}=EXPERT`"
            for name in sorted(prompts.keys() - repository.prompts_of(config).keys())
        ],
    )


def _router(config: MoTEConfig) -> str:
    """Describe a token router for people."""
    weights = "weights that sum to 1" if config.normalize_router else "the router's probabilities as weights"
    learns = config.experts_per_token > 1 or not config.normalize_router
    warning = "" if learns else "; with one expert per token these are all 1, and the router learns to balance alone"
    return (
        f"each token through {config.experts_per_token} of {len(config.experts)} experts, with {weights}{warning}; "
        f"load balancing {config.load_balancing:g}; a task decides on the instruction alone"
    )


def _without_weights(config: MoTEConfig, source: DenseSource) -> MoTEModel:
    """Build the model in name only, for its names and sizes."""
    try:
        with torch.device("meta"):
            return MoTEModel(config).to(dtype=config.dtype)  # type: ignore[call-arg]
    except KeyError as error:
        raise ValueError(f"The config of {source.name} asks for {error}, which transformers does not have") from error


def _file_sizes(weights: dict[str, torch.Tensor], max_shard_size: str) -> list[int]:
    """Count the bytes of each file that the weights will be written to."""
    shards = split_torch_state_dict_into_shards(weights, max_shard_size=max_shard_size).filename_to_tensors
    return [sum(weights[key].numel() * weights[key].element_size() for key in keys) for keys in shards.values()]


def megabytes(size: int) -> str:
    """Write a number of bytes for people: `175.4 MB`."""
    return f"{size / 1e6:,.1f} MB"


def how_to_load(path: str, config: MoTEConfig) -> str:
    """Say in two lines how to use a model."""
    task = "search_query" if "search_query" in config.tasks else config.experts[0]
    argument = "prompt_name" if config.instruction_of(task) else "task"  # a prompt without text tells no task
    routed = "" if config.router == "token" else f', task="{task}"'
    return (
        f'AutoModel.from_pretrained("{path}", trust_remote_code=True)(**batch{routed}).pooler_output\n'
        f'SentenceTransformer("{path}", trust_remote_code=True).encode(texts, {argument}="{task}")'
    )


def default_out(src: str) -> Path:
    """Name the result after its source: `nomic-ai/nomic-bert-2048` → `nomic-bert-2048-mote`."""
    return Path(Path(src).resolve().name + "-mote")


def instructions_from(prompts: dict[str, str], config: MoTEConfig) -> dict[str, str]:
    """Take instructions over from the prompts of a source, which was trained with them.

    A prompt under MTEB's name of a task counts as the task's. A prompt for the role `query` also speaks for the
    expert that serves it, where that has no prompt of its own; an empty one does so only if no other prompt does.
    """
    under_mteb_names = {
        repository.MTEB_PROMPTS[name]: prompts[name] for name in repository.MTEB_PROMPTS if name in prompts
    }
    texts = {task: text for task, text in {**under_mteb_names, **prompts}.items() if task in config.tasks}
    given = {task: text for task, text in texts.items() if text}
    none = {config.tasks[task]: "" for task in texts.keys() - given.keys()}
    return {**none, **{config.tasks[task]: text for task, text in given.items()}, **given}


def _dtype(name: str) -> torch.dtype:
    known = ("float32", "float16", "bfloat16")
    if name not in known:
        raise ValueError(f"Unknown dtype {name!r}." + alternatives(name, ("auto", *known)))
    return getattr(torch, name)


def _record(
    plan: UpcyclingPlan, source: dict[str, Any], arguments: dict[str, Any], left_out: list[str]
) -> dict[str, Any]:
    return {
        **source,
        "left_out": left_out,
        "arguments": arguments,
        "command": _command(arguments),
        "parameters": plan.counts,
        **repository.describe_run(),
    }


def _arguments_to_tell(arguments: dict[str, Any], plan: UpcyclingPlan) -> dict[str, Any]:
    """Keep the arguments that say how a model was made: not the defaults, not the folders of this machine."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(upcycle).parameters.items()}
    told = {name: value for name, value in arguments.items() if name != "report" and value != defaults[name]}
    told["src"] = plan.source.public_name
    if told.get("out") is not None:
        told["out"] = plan.out.name
    if told.get("tokenizer") is not None and Path(told["tokenizer"]).is_dir():
        told["tokenizer"] = Path(told["tokenizer"]).resolve().name
    return told


# Where the command line calls an argument otherwise.
_OPTIONS = {
    "tasks": "task",
    "instructions": "instruction",
    "experts": "expert",
    "shared_modules": "shared-module",
    "router": "routing",
    "experts_per_token": "num-experts-per-tok",
    "normalize_router": "norm-topk-prob",
    "load_balancing": "router-aux-loss-coef",
}


def _command(arguments: dict[str, Any]) -> str:
    """Write the arguments of `upcycle` as a command line."""
    words = ["mote", "upcycle"]
    for name, value in arguments.items():
        option = "--" + _OPTIONS.get(name, name).replace("_", "-")
        if isinstance(value, dict):
            words += [word for key, text in value.items() for word in (option, f"{key}={text}")]
        elif name == "layers" and isinstance(value, list):
            words += [option, ",".join(map(str, value))]
        elif isinstance(value, list):
            words += [word for item in value for word in (option, item)]
        elif value is True:
            words.append(option)
        elif value is False:
            words.append("--no-" + option[2:])
        else:
            words += [option, str(value)]
    return shlex.join(words)
