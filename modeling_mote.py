"""MoTE: Mixture of Task Experts, for any encoder in transformers.

What is unusual here, compared with the dense model:

- Every block has one expert per task, and one attention for all experts. An expert is the backbone's own layer without
  the attention: its norms, its feed-forward network, and no code of ours.
- The task of a text picks the expert for its whole sequence. The routing is not learned.
- The expert's name is an ordinary argument of the block, never stored as state, so gradient checkpointing recomputes
  with the same expert, and threads that serve different tasks on one model cannot interfere.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on torch,
transformers and their own dependencies. Method: Romero et al., "MoTE: Mixture of Task Experts for Multi-task Embedding
Models", Findings of ACL 2025 (arXiv:2506.17781).
"""

import copy
import inspect
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from packaging.version import Version
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModel, MPNetModel, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import TransformersKwargs, cached_file, can_return_tuple, logging
from transformers.utils.hub import extract_commit_hash

from .configuration_mote import MoTEConfig, as_imported, require_known
from .mixed_batch_mote import groups_of, lengths_of
from .weights_mote import WeightFiles, find_files, find_index, read_index, weight_map

logger: Any = logging.get_logger(__name__)

SEQUENCE_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
BESIDE = (  # the files of tokenizers and of Sentence-Transformers
    *("tokenizer*", "added_tokens.json", "special_tokens_map.json", "vocab.*", "merges.txt", "*.model", "modules.json"),
    *("*sentence_*.json", "[0-9]_*/config.json", "[0-9]_*/*model.*", "*transformer_mote.py", "*instruction_mote.py"),
    "*pooling_mote.py",
)
TOKENIZER_EXTRAS = ("length", "offset_mapping", "special_tokens_mask")  # which no model uses


class SharedModule:
    """Stands in an expert for a submodule of the dense layer that all experts of the block share.

    It looks up the submodule as `container.<name>` at every call, so replacing it there (PEFT, quantisation) affects
    every expert. It is not an `nn.Module` itself, so that the shared weights are registered once, in the block.
    """

    def __init__(self, container: nn.Module, name: str) -> None:
        self.container, self.name = container, name

    @property
    def module(self) -> Any:
        """The shared module."""
        return self.container._modules[self.name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the shared module."""
        return self.container._modules[self.name](*args, **kwargs)  # type: ignore[misc]


class MoTEBlock(nn.Module):
    """One block: a shared attention and one expert per task (Figure 2b of the paper).

    Args:
        layer: The dense layer of the backbone. It becomes the first expert; the others are copies of it.
        experts: Names of the experts.
        shared_modules: Paths of the submodules of `layer` that the experts share.
    """

    def __init__(self, layer: nn.Module, experts: list[str], shared_modules: tuple[str, ...]) -> None:
        super().__init__()
        self.shared = nn.Module()
        shared = {path: self.share(path, layer.get_submodule(path)) for path in shared_modules}
        for path in shared_modules:
            parent, _, name = path.rpartition(".")
            delattr(layer.get_submodule(parent), name)
        copies = [layer, *(copy.deepcopy(layer) for _ in experts[1:])]
        self.experts = nn.ModuleDict(dict(zip(experts, copies, strict=True)))
        for expert in self.experts.values():
            for path, module in shared.items():
                parent, _, name = path.rpartition(".")
                setattr(expert.get_submodule(parent), name, module)
        if hasattr(layer, "attention_type"):  # ModernBERT reads it off its layers
            self.attention_type = layer.attention_type

    def share(self, path: str, module: nn.Module) -> SharedModule:
        """Register a module for all experts, under its path in the dense layer; return its stand-in for the experts."""
        container = self.shared
        *parents, name = path.split(".")
        for parent in parents:
            if not hasattr(container, parent):
                setattr(container, parent, nn.Module())
            container = container.get_submodule(parent)
        setattr(container, name, module)
        return SharedModule(container, name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, expert: Any, **kwargs: Any) -> Any:
        """Run all sequences through one expert.

        Args:
            hidden_states: [B, L, H].
            *args: Arguments of the dense layer.
            expert: The expert's name; with `one_pass`, what makes a layer of several experts.
            **kwargs: Arguments of the dense layer.

        Returns:
            The dense layer's output: [B, L, H], in some architectures inside a tuple.
        """
        layer = self.experts[expert] if isinstance(expert, str) else expert.layer_of(self)
        return layer(hidden_states, *args, **kwargs)


class MoTEModel(PreTrainedModel):
    """A dense encoder in which whole sequences go through the expert of their task.

    Args:
        config: Backbone, experts, tasks.
        backbone: A dense model to take over ("upcycle"): its layers become the experts, each a copy, so that every
            expert gives the dense model's output. It must not be used on its own afterwards. Default: random weights.
    """

    config: MoTEConfig
    config_class = MoTEConfig
    output_class = BaseModelOutputWithPooling
    outputs: tuple[str, ...] = ("last_hidden_state", "hidden_states", "attentions")  # taken from the backbone's output
    model_tags = ["mote", "mixture-of-experts", "custom_code"]  # of its card on the Hub
    weight_files: tuple[str, ...] = ()  # files that the weights were loaded from
    indexes: tuple[Any, ...] = ()  # that the weights were loaded from, and written to
    replaced: Path | None = None  # folder with the index of the model that is about to be replaced, if not the same
    record: str | None = None  # path of the `mote.json` next to the weights, which says how the model was made
    alone = True  # whether it has to save what Sentence-Transformers or a verb would write
    offloading: Any = None  # set by `mote.load(path, offload=…)`: brings an expert to the device for a call
    graphs: Any = None  # set by `mote.load(path, cuda_graphs=True)`: replays calls
    one_pass: Any = None  # set by `mote.load(path, one_pass=True)`: groups the rows of a batch of several tasks
    routing_argument = "expert"  # of the blocks; layers that stay dense (`mote_layers`) do not get it
    own_arguments: tuple[str, ...] = ("task", "task_ids", "pooling_mask")  # of `forward`, beside the backbone's
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoTEBlock"]
    # A backbone that lacks support for one of these raises its own error.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: MoTEConfig, backbone: PreTrainedModel | None = None) -> None:
        if backbone is not None:
            config._attn_implementation = backbone.config._attn_implementation
            config.backbone_config = backbone.config
        super().__init__(config)
        self.backbone = _adapt(AutoModel.from_config(config.backbone_config) if backbone is None else backbone)
        named = inspect.signature(self.backbone.forward).parameters
        self.arguments = {*named, *TransformersKwargs.__annotations__, *TOKENIZER_EXTRAS, *self.own_arguments}
        layers = self.layers
        for index, layer in enumerate(layers):
            if index in config.mote_layer_indices:
                layers[index] = self._make_block(layer)
            else:
                layer.register_forward_pre_hook(self._without_routing, with_kwargs=True)
        if "ForMaskedLM" in str(config.architectures) and self._auto_class == "AutoModel":
            self._keys_to_ignore_on_load_unexpected = {r"^head\."}
        self.register_load_state_dict_post_hook(_require_own_adapter)  # `PeftModel.from_pretrained` calls it
        self.post_init()

    def _shared_modules(self, layer: nn.Module) -> tuple[str, ...]:
        return self.config.architecture.shared_modules

    def _make_block(self, layer: nn.Module) -> nn.Module:
        return MoTEBlock(layer, self.config.available_experts, self._shared_modules(layer))

    @classmethod
    def _without_routing(cls, layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {name: value for name, value in kwargs.items() if name != cls.routing_argument}

    @property
    def layers(self) -> Any:
        """The backbone's list of layers; those that have experts are blocks."""
        return self.backbone.get_submodule(self.config.architecture.layer_path)

    @property
    def blocks(self) -> list[MoTEBlock]:
        """The blocks that have experts, in order."""
        layers = self.layers  # looked up once
        return [layers[index] for index in self.config.mote_layer_indices]

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings, which all experts share."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings."""
        self.backbone.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        task: str | list[str] | None = None,
        task_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Embed a batch, each sequence through the expert of its task.

        Args:
            input_ids: Tokens, [B, L].
            attention_mask: 1 for tokens, 0 for padding, [B, L].
            token_type_ids: Segments, [B, L], if the backbone has them.
            position_ids: Positions, [B, L] or [1, L].
            inputs_embeds: Token embeddings instead of `input_ids`, [B, L, H].
            task: One task for the batch, or a list with the task of each row. Default: the config's `default_task`.
            task_ids: Instead of `task`: [B] indices into `list(config.tasks)`.
            **kwargs: Arguments of the backbone (`output_attentions` …); `pooling_mask`: 1 for tokens to pool, [B, L].

        Returns:
            `last_hidden_state` [B, L, H]; `pooler_output` [B, H], pooled as the config says, without padding;
            `hidden_states` and `attentions` if requested. In a batch of several tasks, positions past the last token
            of a row hold zeros or the output for padding.

        Raises:
            ValueError: If `task` is invalid for this model or batch, or an argument is unknown.
        """
        for name in kwargs:
            if name not in self.arguments:  # such as `taks=`, which the backbone would ignore
                require_known(name, self.own_arguments, "argument")
        inputs = (input_ids, inputs_embeds, attention_mask, token_type_ids, position_ids)
        sequences = {name: value for name, value in zip(SEQUENCE_INPUTS, inputs, strict=True) if value is not None}
        return self._route(task, task_ids, sequences, kwargs)

    def _route(
        self, task: str | list[str] | None, task_ids: torch.Tensor | None, sequences: dict, kwargs: dict
    ) -> BaseModelOutputWithPooling:
        """Run a batch: `sequences` holds those of `SEQUENCE_INPUTS` that are given, the tokens first."""
        if task_ids is None and (task is None or isinstance(task, str)):
            return self._run(sequences, {**kwargs, "expert": self.config.expert_of(task)})
        return self._run_groups(task, task_ids, sequences, kwargs)

    def _run(self, sequences: dict[str, torch.Tensor], kwargs: dict) -> BaseModelOutputWithPooling:
        """Run rows with the same routing: the computation of the dense model, and pooling."""
        to_pool = kwargs.pop("pooling_mask", None)
        for flag in ("output_hidden_states", "output_attentions"):  # which the backbone reads from its own config
            if kwargs.get(flag) is None and getattr(self.config, flag):
                kwargs[flag] = getattr(self.config, flag)
        runner = self.offloading or self.graphs
        out = (partial(runner.run, self.backbone) if runner else self.backbone)(**sequences, **kwargs, return_dict=True)
        length = out.last_hidden_state.shape[1]  # of the longest row of a group
        mask: Any = sequences.get("attention_mask") if to_pool is None else to_pool[:, :length]
        if to_pool is not None:
            require_tokens(mask)
        pooled = pool(out.last_hidden_state, mask, self.config.pooling)
        return self.output_class(pooler_output=pooled, **{name: out.get(name) for name in self.outputs})

    @torch.compiler.disable  # a graph would only fit one combination of tasks and lengths
    def _run_groups(
        self, task: list[str] | None, task_ids: torch.Tensor | None, sequences: dict[str, torch.Tensor], kwargs: dict
    ) -> BaseModelOutputWithPooling:
        """Run the rows of each expert together: see `mixed_batch_mote.py`."""
        tokens = next(iter(sequences.values()))
        batch_size, length = tokens.shape[:2]
        experts = self._experts_of_rows(task, task_ids, batch_size)
        if len(set(experts)) == 1:
            return self._run(sequences, {**kwargs, "expert": experts[0]})
        whole: dict[str, Any] = {}
        lengths = lengths_of(sequences.get("attention_mask"), batch_size, length)
        for group in (self.one_pass or groups_of)(experts, lengths, tokens.device):
            rows = {name: group.select(value, batch_size)[:, : group.length] for name, value in sequences.items()}
            arguments = {name: group.select(value, batch_size) for name, value in kwargs.items()}
            out = self._run(rows, {**arguments, "expert": group.expert})
            for name, part in out.items():
                whole[name] = group.write(part, whole.get(name), batch_size, length)
        return self.output_class(**whole)

    def _experts_of_rows(self, task: Any, task_ids: torch.Tensor | None, rows: int) -> list[str]:
        if task_ids is not None:
            if task is not None:
                raise ValueError("Pass either `task` or `task_ids`, not both")
            names, ids = list(self.config.tasks), torch.as_tensor(task_ids).tolist()
            if wrong := [i for i in ids if type(i) is not int or not 0 <= i < len(names)]:
                raise ValueError(f"task_ids {wrong} are out of range. Tasks: {dict(enumerate(names))}")
            task = [names[i] for i in ids]
        task = task.tolist() if hasattr(task, "tolist") else task  # an array of names
        if not isinstance(task, list | tuple):
            return [self.config.expert_of(task)] * rows
        if not len(task) == rows > 0:
            raise ValueError(f"{len(task)} tasks for {rows} rows: pass one task, or one for each row, at least one")
        return [self.config.expert_of(name) for name in task]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layers in place, not the whole model: all experts of all layers share one graph.

        Takes the arguments of `torch.compile`; `dynamic` is True by default. Call it again after adding an expert.
        """
        for layer in self.layers:
            for module in layer.experts.values() if isinstance(layer, MoTEBlock) else [layer]:
                module.compile(*args, **{"dynamic": True, **kwargs})

    @classmethod
    def get_init_context(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the model without initial values, as loading replaces them."""
        return [*super().get_init_context(*args, **kwargs), _Uninitialized()]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load, and fail if config and weights do not match; the base class only prints a report.

        Takes what `PreTrainedModel.from_pretrained` takes, and `experts=[…]` to load only these experts.

        Raises:
            ValueError: If weights are missing, left over or of another shape, or an expert is unknown.
        """
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")  # None: of a state_dict
        hub = {key: kwargs[key] for key in HUB_ARGUMENTS if kwargs.get(key)}
        folder, index = find_index(name, **hub) if name is not None and not kwargs.get("variant") else (None, None)
        if index is not None:  # the library gets one file from here; the others are found once the model is built
            kwargs["transformers_weights"] = index["shared"][0]
            if commit := extract_commit_hash(f"{folder}/", None):
                kwargs["revision"] = hub["revision"] = commit
        if isinstance(kwargs.get("config"), PreTrainedConfig):
            kwargs["config"] = copy.deepcopy(kwargs["config"])
            if (experts := kwargs.pop("experts", None)) is not None:
                kwargs["config"].load_only(experts)
            if index is not None:
                kwargs["config"].transformers_weights = kwargs.pop("transformers_weights")
        kwargs["ignore_mismatched_sizes"] = True  # reported by the error below, which names them
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        problems = [
            f"{len(info[kind])} {kind.replace('_', ' ')} ({', '.join(map(str, sorted(info[kind], key=str)[:3]))} …)"
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            if info.get(kind)
        ]
        if problems:
            raise ValueError(
                f"The weights of {str(name or 'a state_dict')!r} do not match their config (a "
                f"{model.config.model_type!r} with the experts {model.config.available_experts}): {'; '.join(problems)}"
            )
        as_imported()
        with suppress(OSError):  # there is no such file, or no connection
            model.record = name and cached_file(name, "mote.json", **hub)
        if __package__ == "mote.remote":  # the installed code, which runs in place of the model's own
            _warn_of_newer(model.record)
        return (model, info) if output_loading_info else model

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Find the files of the model's experts, and remember them."""
        if vars(model.config).pop("transformers_weights", None):
            name, folder = str(load_config.pretrained_model_name_or_path), Path(checkpoint_files[0]).parent
            index, hub = read_index(folder), load_config.download_kwargs or {}
            checkpoint_files = find_files(name, folder, index, model.config, hasattr(model, "head"), **hub)
            model.indexes = (index,)
            if "disk" in (load_config.device_map or {}).values():  # accelerate will read these weights from there
                load_config = replace(load_config, sharded_metadata={"weight_map": weight_map(folder)})
        else:  # in the old layout, the experts that are not loaded are in the same files
            others = {*model.config.experts}.difference(model.config.available_experts)
            ignored = model._keys_to_ignore_on_load_unexpected or set()
            model._keys_to_ignore_on_load_unexpected = ignored | {rf"\.experts\.{name}\." for name in others}
        model.weight_files = tuple(checkpoint_files or ())
        arguments = (model, state_dict, checkpoint_files, load_config, *args)
        info, *rest = PreTrainedModel._load_pretrained_model(*arguments, **kwargs)
        _require_own_adapter(model, info)  # `load_adapter` comes here, too
        return info, *rest

    def save_pretrained(  # type: ignore[override]  # the library's other arguments are passed on
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = "50GB",
        **kwargs: Any,
    ) -> None:
        """Save, each expert into a file of its own: see `weights_mote.py`. What did not change is not written again.

        A folder that holds more experts than were loaded keeps them; `ValueError` if other shared weights are there.
        """
        folder, config = Path(save_directory), self.config
        (getattr(config, "auto_map", None) or {}).pop("AutoModelForMaskedLM", None)  # a class with a head adds it
        # Under the names of the modules, not under those of the checkpoint that the backbone came from.
        kwargs = {"is_main_process": is_main_process, "save_original_format": False, **kwargs}
        weights = {**(self.state_dict() if state_dict is None else state_dict)}
        adapted = getattr(self, "_hf_peft_config_loaded", False) or getattr(self, "hf_quantizer", None) is not None
        if adapted or kwargs.get("variant") or any(weight.is_meta for weight in weights.values()):
            kwargs |= {"state_dict": state_dict, "max_shard_size": max_shard_size}
            return super().save_pretrained(folder, push_to_hub=push_to_hub, **kwargs)
        files, loaded = None, config.loaded_experts
        if is_main_process and weights:
            folder.mkdir(parents=True, exist_ok=True)
            weights = remove_tied_weights_from_state_dict(weights, self)
            files = WeightFiles(weights, config, folder, max_shard_size, previous=self.replaced)
            config.loaded_experts = files.loaded_experts
            self.indexes += (files.index,)
        try:
            super().save_pretrained(folder, state_dict={}, **kwargs)
        finally:
            config.loaded_experts = loaded
        if files is not None:
            files.write()
        with suppress(OSError):  # it is already there, or was removed
            shutil.copy(self.record or "", folder)
        if self.alone and is_main_process:
            self._copy_beside(folder)
        if push_to_hub:
            named = inspect.signature(super().push_to_hub).parameters
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **{k: v for k, v in kwargs.items() if k in named})
        return None

    def _copy_beside(self, folder: Path) -> None:
        """Copy what tokenizers and Sentence-Transformers need from where the model was loaded, unless it is there."""
        record = Path(self.record or "")
        with suppress(OSError):  # offline
            if commit := extract_commit_hash(str(record), None):
                place: Any = {"revision": commit, "cache_dir": record.parents[3]}
                snapshot_download(str(self.name_or_path), **place, allow_patterns=[*BESIDE])
        for file in [file for pattern in BESIDE for file in record.parent.glob(pattern) if self.record]:
            copied = folder / file.relative_to(record.parent)
            if not copied.exists():
                copied.parent.mkdir(exist_ok=True)
                shutil.copy(file, copied)
        if not (folder / "modules.json").is_file():
            logger.info(f"{folder} lacks tokenizer and modules: to load it there, save it with Sentence-Transformers")

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Push to the Hub. Experts that the repository has, but that were not loaded, stay there."""
        hub = {key: kwargs[key] for key in ("token", "revision") if kwargs.get(key)}
        with self.replacing(args[0] if args else kwargs["repo_id"], alone=True, **hub):
            return super().push_to_hub(*args, **kwargs)

    @contextmanager
    def replacing(self, repo_id: str | None, alone: bool = False, **hub: Any) -> Iterator[None]:
        """Within the context, save what is to replace the model in a repository: keep experts that were not loaded.

        Raises `ValueError` if it is the model's own repository, and others have changed the weights there.
        """
        own = repo_id == self.name_or_path
        partial = self.config.loaded_experts is not None
        self.replaced, index = find_index(repo_id, **hub) if repo_id and (own or partial) else (None, None)
        try:
            if own and index is not None and index not in self.indexes:
                raise ValueError(f"The weights in {repo_id} have changed since they were loaded: load the model again")
            self.alone = alone
            yield
        finally:
            self.replaced, self.alone = None, True

    def _replicate_for_data_parallel(self) -> Any:  # copies of an expert would use the first GPU's attention
        raise RuntimeError("A MoTE cannot run in nn.DataParallel: start one process per GPU (torchrun), or use one GPU")


def _require_own_adapter(model: MoTEModel, info: Any) -> None:
    if hasattr(model, "peft_config") and (unknown := sorted(info.unexpected_keys)):  # set by PEFT, which is silent
        raise ValueError(
            f"The adapter has weights for modules that this model lacks, such as {unknown[0]}: was it trained on the "
            "dense model? Then merge it into that one (merge_and_unload), and upcycle the result"
        )


def _warn_of_newer(record: str | None) -> None:
    with suppress(OSError, ValueError, LookupError, TypeError, ImportError):  # no record, or no version in it
        made_by = json.loads(Path(record or "").read_text(encoding="utf-8"))["steps"][-1]["versions"]["mote-embeddings"]
        if Version(made_by) > Version(installed := version("mote-embeddings")):
            logger.warning_once(f"{record}: made by mote-embeddings {made_by}, but {installed} is installed: upgrade")


class _Uninitialized(TorchFunctionMode):
    """Skips the initialization of weights on the meta device: a sixth of the time of loading. For this thread only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight = (kwargs or {}).get("tensor")
        if getattr(weight, "is_meta", False) and func.__module__ == "torch.nn.init":
            return weight
        return func(*args, **(kwargs or {}))


def require_tokens(mask: torch.Tensor | None) -> None:
    """Raise `ValueError` if a row of a pooling mask, [B, L], has no token to pool."""
    # Tensors of other classes, from which memory is estimated, have no values; a compiled graph does not look at them.
    if type(mask) is torch.Tensor and not torch.compiler.is_compiling() and (empty := ~mask.any(dim=1)).any():
        raise ValueError(f"No token to pool in the rows {empty.nonzero().flatten().tolist()}")


def pool(hidden: torch.Tensor, attention_mask: torch.Tensor | None, mode: str) -> torch.Tensor:
    """Pool each sequence into one vector.

    Args:
        hidden: Hidden states, [B, L, H].
        attention_mask: 1 for tokens, 0 for padding on either side, [B, L]. None: no padding.
        mode: `"mean"`, `"cls"` (the first token) or `"last_token"`.

    Returns:
        [B, H].
    """
    if attention_mask is None or attention_mask.dim() != 2:
        attention_mask = torch.ones(hidden.shape[:2], device=hidden.device, dtype=torch.long)
    if mode == "mean":
        # Divided before summing, since the sum over a long text may overflow in float16.
        count = attention_mask.sum(dim=1, keepdim=True).clamp_(min=1)
        shares = attention_mask.to(torch.promote_types(hidden.dtype, torch.float32)) / count
        return (shares.to(hidden.dtype).unsqueeze(1) @ hidden).squeeze(1)  # [B, 1, L] @ [B, L, H]
    if mode == "last_token":  # makes the last 1 the largest value; argmax finds the first 1 otherwise
        attention_mask = attention_mask * torch.arange(hidden.shape[1], device=hidden.device)
    token = attention_mask.long().argmax(dim=1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), token]


class MPNetBackbone(MPNetModel):
    """MPNet with a forward that passes keyword arguments on to the encoder; the original drops them."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Embed, mask and encode, as in the base class."""
        others = {name: kwargs.pop(name, None) for name in ("position_ids", "inputs_embeds")}
        embedded = self.embeddings(input_ids=input_ids, **others)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=embedded, attention_mask=attention_mask)
        return self.encoder(embedded, attention_mask=mask, **{**kwargs, "return_dict": True})


def _adapt(backbone: PreTrainedModel) -> PreTrainedModel:
    """Remove modules that an embedding model does not need, and fix what would not work."""
    if type(backbone) is MPNetModel:
        backbone.__class__ = MPNetBackbone
    if getattr(backbone, "pooler", None) is not None:
        backbone.pooler = None  # type: ignore[assignment]  # see `pool`
    if getattr(backbone.config, "use_cache", False):
        backbone.config.use_cache = False  # nothing is generated
    if getattr(backbone.config, "is_causal", True) is False:  # sdpa without a mask asks the module, not the config
        for module in backbone.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False  # type: ignore[assignment]
    return backbone


MoTEModel.register_for_auto_class("AutoModel")
