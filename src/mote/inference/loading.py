"""Loading: MoTEs with some or all experts, and any Sentence-Transformers model with all its weights."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SparseEncoder

    from mote.remote.configuration_mote import MoTEConfig
    from mote.remote.modeling_mote import MoTEModel

AUTO = "auto"  # in place of a task: the router picks one for each text
SYNONYMS = {"query": ("search_query",), "document": ("search_document", "passage", "corpus")}
"""Role → other names that models have for it. Sentence-Transformers gives each model an empty prompt `document`, which
must not hide them."""


def load(
    path: str | os.PathLike,
    *,
    experts: str | Iterable[str] | None = None,
    offload: str | None = None,
    keep: int = 1,
    route: str | None = None,
    one_pass: bool = False,
    cuda_graphs: bool = False,
    **kwargs: Any,
) -> "MoTEModel":
    """Load a MoTE, with the installed code rather than that in its folder.

    Args:
        path: A folder, or an id on the Hub.
        experts: Experts to load; the others are known by name only. Default: all.
        offload: `"disk"` or `"cpu"`: at most `keep` experts are ever in memory, or on the device; see `offload`.
        keep: Number of experts on the device, with `offload`.
        route: `"auto"`: the model's router (`mote route`) picks the task of each row of `input_ids` without one.
        one_pass: See `speed_up`.
        cuda_graphs: See `speed_up`; with `device_map="cuda"`.
        **kwargs: Arguments of `from_pretrained`: `revision`, `dtype`, `device_map`, `attn_implementation` …
    """
    import mote.auto  # noqa: F401  # so the model can be pickled
    from mote.checkpoints.reading import mote_class
    from mote.inference.offloading import check_settings, offload_others
    from mote.remote.configuration_mote import require_known
    from mote.remote.modeling_mote import HUB_ARGUMENTS

    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name)}
    config = _mote_config(path, experts, **hub)
    model_class = mote_class(config.model_type, "model")
    if offload is not None:
        check_settings(config, offload)
        experts = config.available_experts[:keep]
    model = model_class.from_pretrained(path, experts=experts, **kwargs)
    if offload is not None:
        offload_others(model, config.loaded_experts, offload, keep, hub)
    if one_pass or cuda_graphs:
        from mote.inference.speed import speed_up

        speed_up(model, one_pass=one_pass, cuda_graphs=cuda_graphs)
    if route is not None:
        from transformers import AutoTokenizer

        from mote.inference.routing import router_of

        require_known(route, [AUTO], "route")
        router = router_of(
            model, AutoTokenizer.from_pretrained(path, config=config, **hub), os.fspath(path), hub.get("revision")
        )
        model.register_forward_pre_hook(router.add_task, with_kwargs=True)
    return model


def load_encoder(
    path: str | os.PathLike,
    *,
    offload: str | None = None,
    keep: int = 1,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    task: str | None = None,
) -> "SentenceTransformer":
    """Load any Sentence-Transformers model of dense vectors, with all its weights.

    Args:
        path: A folder, or an id on the Hub.
        offload: For a MoTE, `"disk"` or `"cpu"`: at most `keep` experts are ever in memory, or on the device.
        keep: Number of experts on the device, with `offload`.
        revision: Branch, tag or commit on the Hub. Default: the newest.
        device: Device. Default: Sentence-Transformers' choice. With `"meta"`, the model is checked, but its weights are
            not read.
        dtype: Dtype of its weights. Default: the stored one.
        trust_remote_code: Whether to run the code in its repository or folder.
        task: Task of all texts; of a MoTE, only its expert is loaded.
    """
    if is_sparse_encoder(path, revision):
        raise ValueError(f"{path} is a sparse encoder, but dense vectors are needed here")
    settings: Any = {"revision": revision, "device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    if offload is None:
        return _load(path, sparse=False, **settings, task=task)
    from mote.inference.offloading import check_settings, offload_others

    config = _mote_config(path, revision=revision)
    check_settings(config, offload)
    encoder = _load(path, sparse=False, **settings, experts=config.available_experts[:keep])
    offload_others(encoder[0].model, config.loaded_experts, offload, keep, {"revision": revision})
    return encoder


def load_any_encoder(
    path: str | os.PathLike, *, retrieval: str | None = None, revision: str | None = None, **settings: Any
) -> "SentenceTransformer | SparseEncoder":
    """Load any model of dense, sparse or hybrid vectors, as `load_encoder` does.

    `retrieval` asks for a kind of vectors; a hybrid model gives all three.
    """
    from mote.checkpoints.models import quiet_transformers
    from mote.remote.configuration_mote import require_known

    sparse = is_sparse_encoder(path, revision)
    with quiet_transformers():  # bars, and reports of what is an error here
        encoder = _load(path, sparse=sparse, revision=revision, **settings)
    if retrieval is not None and type(encoder[-1]).__name__ == "HybridPooling":
        encoder[-1].retrieval = retrieval
    else:
        own = "sparse" if sparse else "dense"
        require_known(retrieval or own, [own], f"vectors of {path}:")
    return encoder


def _load(
    path: str | os.PathLike,
    *,
    sparse: bool,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    task: str | None = None,
    **model_kwargs: Any,
) -> Any:
    """Load a model of Sentence-Transformers, and check that it has all its weights."""
    from sentence_transformers import SentenceTransformer, SparseEncoder

    import mote.auto  # noqa: F401  # its modules' classes are the installed ones

    if task is not None and (config := task_config(path, revision)) and (expert := config.available_tasks.get(task)):
        model_kwargs["experts"] = [expert]
    if dtype:
        model_kwargs["dtype"] = dtype
    if device == "meta":
        model_kwargs["device_map"], device = "meta", None
    try:
        encoder = (SparseEncoder if sparse else SentenceTransformer)(
            os.fspath(path),
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            model_kwargs=model_kwargs,
        ).eval()
    except Exception as error:  # whatever a library or the model's own code raises
        problem = f"does not load in Sentence-Transformers: {first_line(error)}"
        if not trust_remote_code and "trust_remote_code" in str(error):
            problem = "has code of its own, which runs only with --trust-remote-code (trust_remote_code=True)"
        raise ValueError(f"{path} {problem}") from error
    require_all_weights(encoder, path)
    routed = getattr(getattr(encoder[0], "config", None), "routes_by_task", False)
    if routed and type(encoder[0]).__module__.startswith("sentence_transformers."):
        raise ValueError(f"{path} is a MoTE without modules.json, so tasks would be ignored: `mote set` writes it")
    return encoder


def require_all_weights(encoder: "SentenceTransformer | SparseEncoder", path: str | os.PathLike) -> None:
    """Check that none of a loaded model's weights are random, nor its tokenizer empty, because the files lack them.

    Transformers initialises such weights and only logs it. It marks those that it has loaded.
    """
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mote.checkpoints.models import lacks_vocabulary

    networks: list[Any] = [getattr(module, "model", None) for module in encoder]
    missing = [
        name
        for network in networks
        # The `from_pretrained` of a MoTE is strict itself.
        if isinstance(network, PreTrainedModel) and not network.config.model_type.startswith("mote")
        for name, weight in network.named_parameters()
        if not getattr(weight, "_is_hf_initialized", False) and "pooler." not in name
    ]
    tokenizer = getattr(encoder[0], "tokenizer", None)
    if isinstance(tokenizer, PreTrainedTokenizerBase) and lacks_vocabulary(tokenizer):
        missing = ["the vocabulary of its tokenizer"]
    if missing:
        shown = ", ".join(sorted(missing)[:3]) + (" …" if len(missing) > 3 else "")
        raise ValueError(
            f"{path} lacks weights or a vocabulary, and the library would invent them: {shown}. "
            "Load the files as they were saved together, in a format that the installed transformers reads"
        )


def is_sparse_encoder(path: str | os.PathLike, revision: str | None = None) -> bool:
    """Whether a model's folder or repository says that it is a `SparseEncoder`."""
    from transformers.utils import cached_file

    try:
        file = cached_file(os.fspath(path), "config_sentence_transformers.json", revision=revision)
        return json.loads(Path(str(file)).read_text(encoding="utf-8")).get("model_type") == "SparseEncoder"
    except (OSError, ValueError):  # missing, out of reach or damaged, which loading the model reports
        return False


def _mote_config(path: str | os.PathLike, experts: Any = None, **hub: Any) -> "MoTEConfig":
    """Read the config of a MoTE with the installed class; raise `ValueError` if it is another model."""
    from transformers import PreTrainedConfig

    from mote.checkpoints.reading import MOTE_CLASSES, mote_class, require_mote

    model_type = PreTrainedConfig.get_config_dict(path, **hub)[0].get("model_type", "")
    require_mote(path, model_type, model_type in MOTE_CLASSES)
    return mote_class(model_type, "config").from_pretrained(path, experts=experts, **hub)


def task_config(path: str | os.PathLike, revision: str | None = None) -> "MoTEConfig | None":
    """Return the config of a MoTE with task experts; None for any other model."""
    from transformers import PreTrainedConfig

    from mote.checkpoints.reading import MOTE_CLASSES, mote_class

    try:
        model_type = PreTrainedConfig.get_config_dict(path, revision=revision)[0].get("model_type", "")
    except OSError:  # a model that is not of transformers
        return None
    if model_type not in MOTE_CLASSES or not mote_class(model_type, "config").routes_by_task:
        return None
    return _mote_config(path, revision=revision)


def weight_ids(
    path: str | os.PathLike, revision: str | None = None, tasks: Iterable[str | None] = (None,)
) -> dict[str, Any]:
    """Return what identifies a MoTE's weights: the hash of the `base`, and by name the ids of the `experts` of tasks.

    A task of None is any. An expert's id depends on the base, and has that of a head behind it: equal ids make equal
    vectors. Empty for another model, and for a MoTE that was saved in one file.
    """
    from mote.remote.weights_mote import find_index

    _, index = find_index(os.fspath(path), revision=revision)
    if index is None:
        return {}
    config = task_config(path, revision)
    experts = {task and config and config.available_tasks.get(task) for task in tasks}
    used = {name: [file, *index["head"]] for name, file in index["experts"].items() if experts & {None, name}}
    ids = {name: "-".join(Path(file).stem.rpartition("-")[2] for file in files) for name, files in used.items()}
    return {"base": index["base"], "experts": ids}


def task_arguments(encoder: "SentenceTransformer | SparseEncoder", task: str) -> dict[str, Any]:
    """Return the arguments of `encode` for a task of a MoTE, or the prompt of that name of another model."""
    from mote.remote.configuration_mote import require_known

    config: Any = getattr(encoder[0], "config", None)
    prompts, tasks = encoder.prompts, getattr(config, "tasks", {})
    if task in tasks and getattr(config, "routes_by_task", False):
        return {"task": task, "prompt": prompts.get(task, config.instruction_of(task))}
    others = [name for name in SYNONYMS.get(task, ()) if name in tasks or prompts.get(name)]
    if not prompts.get(task):
        require_known(task, others or prompts, "task")
    return {"prompt_name": task}


def first_line(error: BaseException) -> str:
    """Format an error in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
