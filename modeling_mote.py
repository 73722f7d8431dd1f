"""MoTE: Mixture of Task Experts, for any encoder that transformers has.

What is unusual here, compared with the dense model:

- Every block has one expert per task and one attention for all of them. An expert is the backbone's own layer, with
  the attention taken out: its norms, its feed-forward network, and nothing that we wrote.
- The task of a text picks the expert for its whole sequence. There is no router, unless the config asks for the
  baseline with one (`router="token"`), whose blocks are in `token_routing_mote.py`.
- The expert's name is an ordinary argument of the block. It is never kept on the side, so gradient checkpointing
  recomputes with the same expert, and threads that serve different tasks on one model do not meet.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on torch,
transformers and what that needs itself. Method: Romero et al., "MoTE: Mixture of Task Experts
for Multi-task Embedding Models", Findings of ACL 2025 (arXiv:2506.17781).
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModel, MPNetModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import can_return_tuple

if TYPE_CHECKING or not __package__:  # installed, as a top-level module
    try:  # transformers would take an import outside of `try` for a package that must be installed
        from architectures_mote import Architecture, MPNetBackbone, architecture_of, attend_both_ways
        from configuration_mote import MoTEConfig
        from experts_mote import SingleExperts
        from mixed_batch_mote import groups_of
        from offloading_mote import OffloadedExperts, OffloadSettings
        from stored_experts_mote import weights_without
    finally:
        pass
else:  # remote code
    from .architectures_mote import Architecture, MPNetBackbone, architecture_of, attend_both_ways
    from .configuration_mote import MoTEConfig
    from .experts_mote import SingleExperts
    from .mixed_batch_mote import groups_of
    from .offloading_mote import OffloadedExperts, OffloadSettings
    from .stored_experts_mote import weights_without


class SharedModule:
    """Stands, in an expert, where the dense layer had a module that the experts of the block share.

    The module is looked up by name at every call: what replaces modules (PEFT, quantisation) reaches every expert.
    It is no `nn.Module` itself, so that the shared weights have one place, in the block.
    """

    def __init__(self, container: nn.Module, name: str) -> None:
        """Point to `container.<name>`."""
        self.container = container
        self.name = name

    @property
    def module(self) -> Any:
        """The shared module."""
        return self.container._modules[self.name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the shared module."""
        return self.module(*args, **kwargs)


class MoTEBlock(nn.Module):
    """One block: a shared attention and one expert per task (Figure 2b of the paper).

    Args:
        layer: The dense layer of the backbone. It becomes the first expert; the others are copies of it.
        experts: Names of the experts.
        shared_modules: Paths of the submodules of `layer` that the experts share.
    """

    def __init__(self, layer: nn.Module, experts: list[str], shared_modules: tuple[str, ...]) -> None:
        """Turn a dense layer into a block of experts."""
        super().__init__()
        self.shared = nn.Module()
        for path in shared_modules:
            parent, name = _parent_and_name(layer, path)
            self.share(path, getattr(parent, name))
            delattr(parent, name)
        self.experts = nn.ModuleDict(
            {name: layer if i == 0 else copy.deepcopy(layer) for i, name in enumerate(experts)}
        )
        for path in shared_modules:
            for expert in self.experts.values():
                parent, name = _parent_and_name(expert, path)
                setattr(parent, name, SharedModule(_container(self.shared, path), name))
        if hasattr(layer, "attention_type"):  # ModernBERT reads it off its layers
            self.attention_type = layer.attention_type

    def share(self, path: str, module: nn.Module) -> SharedModule:
        """Keep a module for all experts, at its path in the dense layer; return what stands for it in an expert."""
        container, name = _container(self.shared, path), path.rpartition(".")[2]
        setattr(container, name, module)
        return SharedModule(container, name)

    def compress(self, rank: int | None, bits: int | None) -> None:
        """Compress the experts in place: see `compress_block`."""
        try:
            from .compression_mote import compress_block  # type: ignore[import-not-found]
        except ImportError:
            from compression_mote import compress_block
        compress_block(self, rank)

    def forward(self, hidden_states: torch.Tensor, *args: Any, expert: str | None = None, **kwargs: Any) -> Any:
        """Run all sequences through one expert.

        Args:
            hidden_states: [B, L, H].
            *args: What the dense layer takes.
            expert: The expert's name.
            **kwargs: What the dense layer takes.

        Returns:
            What the dense layer gives: [B, L, H], in some architectures inside a tuple.
        """
        if expert is None:
            raise RuntimeError("The block was not told its expert: the backbone does not hand keyword arguments down")
        return self.experts[expert](hidden_states, *args, **kwargs)


@dataclass
class MoTEOutput(BaseModelOutputWithPooling):
    """What a [`MoTEModel`] gives: see its `forward`."""

    router_logits: tuple[torch.Tensor, ...] | None = None  # goes


class MoTEModel(SingleExperts, OffloadedExperts, PreTrainedModel):
    """A dense encoder in which whole sequences go through the expert of their task.

    Args:
        config: Backbone, experts, tasks.
        backbone: A dense model to take over ("upcycle"): its layers become the experts, each a copy, so that every
            expert gives the dense model's output. It must not be used on its own afterwards. Default: a new one,
            with random weights.
    """

    config: MoTEConfig
    config_class = MoTEConfig
    offloading: Any  # of OffloadedExperts, as the next one
    every_expert: Any
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["MoTEBlock", "TokenRoutedBlock"]
    # What the backbone does not support, it refuses itself, by name.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: MoTEConfig, backbone: PreTrainedModel | None = None) -> None:
        """Build the backbone, then turn its layers into blocks of experts."""
        if backbone is not None:
            config._attn_implementation = backbone.config._attn_implementation
            config.backbone_config = backbone.config
        else:  # `experts_implementation=` has set it here as well, where a dense model refuses it
            config.backbone_config._experts_implementation = None
        super().__init__(config)
        for flag in ("output_hidden_states", "output_attentions"):  # which the backbone reads off its own config
            if getattr(config, flag):
                setattr(config.backbone_config, flag, True)
        architecture = architecture_of(config)
        self.backbone = _adapt(AutoModel.from_config(config.backbone_config) if backbone is None else backbone)
        layers = _list_of_layers(self.backbone, architecture)
        for index, layer in enumerate(layers):
            if index not in config.mote_layer_indices:
                layer.register_forward_pre_hook(_without_routing, with_kwargs=True)
            else:
                layers[index] = self._make_block(layer)
        self.post_init()
        if config.compression is not None and config.model_type == "mote":
            for block in self.blocks:
                block.compress(config.expert_rank, config.expert_bits)
        self._ignore_absent_experts()

    def _make_block(self, layer: nn.Module) -> nn.Module:
        if self.config.router == "token":
            try:
                from .token_routing_mote import TokenRoutedBlock  # type: ignore[import-not-found]
            except ImportError:
                from token_routing_mote import TokenRoutedBlock
            network = self.architecture.feed_forward
            if network is None:
                raise ValueError("A token router does not know the feed-forward network of this architecture")
            config: Any = self.config
            config.num_experts_per_tok, config.norm_topk_prob = config.experts_per_token, config.normalize_router
            return TokenRoutedBlock(layer, network, config)
        return MoTEBlock(layer, self.config.available_experts, self.architecture.shared_modules)

    @property
    def architecture(self) -> Architecture:
        """Where the backbone keeps its layers, and what their experts share."""
        return architecture_of(self.config)

    @property
    def blocks(self) -> list[MoTEBlock]:
        """The blocks that have experts for tasks, in order."""
        return [module for module in self.backbone.modules() if isinstance(module, MoTEBlock)]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Say what the base class would look for in the source of this file: the experts of a token router can."""
        return True

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
        output_router_logits: bool = False,
        balance_share: float | None = None,
        **kwargs: Any,
    ) -> MoTEOutput:
        """Embed a batch, each sequence through the expert of its task, or each token through those of its router.

        Args:
            input_ids: Tokens, [B, L].
            attention_mask: 1 for tokens, 0 for padding, [B, L].
            token_type_ids: Segments, [B, L], where the backbone has them.
            position_ids: Positions, [B, L] or [1, L].
            inputs_embeds: Token embeddings instead of `input_ids`, [B, L, H].
            task: One task for the batch, or a list with the task of each row. A token router needs none.
            task_ids: Instead of `task`: [B] indices into `list(config.tasks)`.
            output_router_logits: Of a token router: return what each block's router said.
            balance_share: Of a token router, in training: the share of one row in a training step, 1 / all its rows,
                so that the load-balancing losses of the step's forward passes add up to one. None: this pass counts
                as a whole step.
            **kwargs: What the backbone takes (`output_hidden_states`, `output_attentions` …).

        Returns:
            `last_hidden_state` [B, L, H]; `pooler_output` [B, H], pooled as the config says, padding left out;
            `hidden_states`, `attentions` and `router_logits` (of each routed block [B, L, E]) where asked for. In a
            batch of several tasks, the positions past the last token of a row hold zeros or what its padding gives.

        Raises:
            ValueError: If the task is unknown, missing, ambiguous, not one per row, or its expert is not loaded; if
                something is asked of a router that is not there.
        """
        sequences = present(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        tokens = sequences["inputs_embeds" if input_ids is None else "input_ids"]
        if self.config.router == "token":
            if task is not None or task_ids is not None:
                self._expert_of_rows(task, task_ids, tokens.shape[0])  # an unknown task is an error all the same
            return self._run_routed(sequences, kwargs, tokens.shape[0], output_router_logits, balance_share)
        if output_router_logits or balance_share is not None:
            raise ValueError("output_router_logits and balance_share are for router='token': this model routes by task")
        if task_ids is None and (task is None or isinstance(task, str)):
            return self._run(sequences, {**kwargs, "expert": self._expert_of(task)})
        return self._run_groups(task, task_ids, tokens, sequences, kwargs)

    def _expert_of(self, task: str | None) -> str:
        task = self.config.default_task if task is None else task
        if task is None:
            raise ValueError(
                "Pass `task=`, one of "
                f"{', '.join(map(repr, self.config.tasks))}: this model has no default_task in its config"
            )
        return self.config.expert_of(task)

    def _expert_of_rows(
        self, task: str | list[str] | None, task_ids: torch.Tensor | None, batch_size: int
    ) -> list[str]:
        if task is not None and task_ids is not None:
            raise ValueError("Pass either `task` or `task_ids`, not both")
        tasks = task if task_ids is None else self._tasks_from_ids(task_ids)
        if tasks is None or isinstance(tasks, str):
            return [self._expert_of(tasks)] * batch_size
        if len(tasks) != batch_size:
            raise ValueError(f"{len(tasks)} tasks for {batch_size} rows: pass one task, or one for each row")
        return [self.config.expert_of(name) for name in tasks]

    def _tasks_from_ids(self, task_ids: torch.Tensor) -> list[str]:
        names = list(self.config.tasks)
        if task_ids.dim() != 1 or task_ids.is_floating_point():
            raise ValueError(
                f"task_ids must be integers of shape [B], not {task_ids.dtype} of shape {list(task_ids.shape)}"
            )
        ids = task_ids.tolist()
        wrong = sorted({i for i in ids if not 0 <= i < len(names)})
        if wrong:
            listing = ", ".join(f"{i}={name}" for i, name in enumerate(names))
            raise ValueError(f"task_ids {wrong} are out of range. Tasks: {listing}.")
        return [names[i] for i in ids]

    def _run(self, sequences: dict[str, torch.Tensor], kwargs: dict) -> MoTEOutput:
        """Run rows that share their routing: the dense model's compute, and the pooling."""
        if self.offloading is None:
            out = self.backbone(**sequences, **kwargs)
        else:
            out = self.offloading.run(self.backbone, **sequences, **kwargs)
        hidden = out.last_hidden_state  # [B, L, H]
        return MoTEOutput(
            last_hidden_state=hidden,
            pooler_output=pool(hidden, sequences.get("attention_mask"), self.config.pooling),
            hidden_states=out.get("hidden_states"),
            attentions=out.get("attentions"),
        )

    def _run_routed(
        self,
        sequences: dict[str, torch.Tensor],
        kwargs: dict,
        rows: int,
        output_router_logits: bool,
        balance_share: float | None,
    ) -> MoTEOutput:
        """Run rows whose tokens find their experts by themselves, whatever the tasks."""
        if "cu_seq_lens_q" in kwargs:  # sequences without padding, laid end to end in one row
            rows = len(kwargs["cu_seq_lens_q"]) - 1
        try:
            from .token_routing_mote import TokenRouting
        except ImportError:
            from token_routing_mote import TokenRouting
        mask = sequences.get("attention_mask")
        logits: list[torch.Tensor] = []
        routing = TokenRouting(
            token_mask=mask.bool() if mask is not None and mask.dim() == 2 else None,
            loss_weight=self.config.load_balancing * (1.0 if balance_share is None else rows * balance_share),
            record=logits.append if output_router_logits else None,
        )
        out = self._run(sequences, {**kwargs, "routing": routing})
        out.router_logits = tuple(logits) if output_router_logits else None
        return out

    @torch.compiler.disable  # a graph would hold for one combination of tasks and lengths alone
    def _run_groups(
        self,
        task: list[str] | None,
        task_ids: torch.Tensor | None,
        tokens: torch.Tensor,
        sequences: dict[str, torch.Tensor],
        kwargs: dict,
    ) -> MoTEOutput:
        """Run the rows of each expert together, if they are of several."""
        batch_size, length = tokens.shape[:2]
        experts = self._expert_of_rows(task, task_ids, batch_size)
        if not experts:
            raise ValueError("The batch has no rows")
        if len(set(experts)) == 1:
            return self._run(sequences, {**kwargs, "expert": experts[0]})
        whole: dict[str, Any] = {}
        for group in groups_of(experts, sequences.get("attention_mask"), length, tokens.device):
            rows = {name: group.select(value, batch_size) for name, value in sequences.items()}
            if group.length < length:
                rows = {name: value[:, : group.length] for name, value in rows.items()}
            arguments = {name: group.select(value, batch_size) for name, value in kwargs.items()}
            out = self._run(rows, {**arguments, "expert": group.expert})
            for name, part in out.items():
                whole[name] = group.write(part, whole.get(name), batch_size, length)
        return MoTEOutput(**whole)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the layers in place, rather than the model: all experts of all layers share one graph.

        It holds for every length and number of rows, mixed batches included. One row alone has a graph of its own, and
        so have batches without padding.
        Experts that are added afterwards are not compiled until this is called again.

        Args:
            *args: What `torch.compile` takes.
            **kwargs: What `torch.compile` takes; `dynamic` is True unless told otherwise.
        """
        layers: Any = self.backbone.get_submodule(self.architecture.layer_path)
        for layer in layers:
            for module in layer.experts.values() if isinstance(layer, MoTEBlock) else [layer]:
                module.compile(*args, **{"dynamic": True, **kwargs})

    def parameter_counts(self) -> dict[str, Any]:
        """Count parameters.

        Returns:
            `total`; `active`, those that a sequence passes through, as many as in the dense model (its pooler left
            out), with a token router those that a token passes through; `shared`, by all experts (the router is);
            `experts`, name → those of that expert alone. Offloaded experts count as if they were on the device.
        """
        with self.every_expert():
            return self._parameter_counts()

    def _parameter_counts(self) -> dict[str, Any]:
        experts = {
            name: sum(p.numel() for block in self.blocks for p in block.experts[name].parameters())
            for name in self.config.available_experts
        }
        active_experts = 1
        if self.config.router == "token":
            routed: Any = [
                module.feed_forward for module in self.modules() if type(module).__name__ == "TokenRoutedBlock"
            ]
            in_all = sum(p.numel() for feed_forward in routed for p in feed_forward.experts.parameters())
            experts = dict.fromkeys(experts, in_all // len(experts))
            active_experts = self.config.experts_per_token
        total = sum(p.numel() for p in self.parameters())
        shared = total - sum(experts.values())
        active = shared + active_experts * max(experts.values())
        return {"total": total, "active": active, "shared": shared, "experts": experts}

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load, and fail where config and weights do not match: the base class only prints a report.

        Takes what `PreTrainedModel.from_pretrained` takes, and `experts=[…]` to load only these experts.
        `offload_experts="disk"`, `"cpu"` or `{"to": "disk", "keep": 2}` begins with experts offloaded, and loads no
        more of them than are kept on the device: see `offload_experts`.

        Raises:
            ValueError: If weights are missing, left over, of another shape, or cannot be read; if experts cannot be
                offloaded.
        """
        offload = kwargs.pop("offload_experts", None)
        if offload:
            settings, config = OffloadSettings.read(offload), cls._config_of(*args, **kwargs)
            settings.validate(config)
            kwargs["experts"] = config.available_experts[: settings.keep]
        if isinstance(kwargs.get("config"), PreTrainedConfig) and "experts" in kwargs:  # else the config takes them
            kwargs["config"] = copy.deepcopy(kwargs["config"])
            kwargs["config"].load_only(kwargs.pop("experts"))
        kwargs["ignore_mismatched_sizes"] = True  # they are an error below, which says which they are
        try:
            loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise ValueError(f"The weights in {args[0]} cannot be read, is a file cut short? {error}") from error
        model, info = loaded
        problems = [
            f"{len(info[kind])} {kind.replace('_', ' ')} ({', '.join(map(str, sorted(info[kind], key=str)[:3]))} …)"
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            if info.get(kind)
        ]
        if problems:
            raise ValueError(
                f"The weights of {model.name_or_path!r} do not match its config, whose router is "
                f"{model.config.router!r} and whose experts are {model.config.available_experts}: "
                f"{'; '.join(problems)}. Load the files as they were saved together."
            )
        if offload:
            model._start_offloaded(settings, config.loaded_experts)
        return (model, info) if output_loading_info else model

    @classmethod
    def _config_of(cls, pretrained_model_name_or_path: Any, *_: Any, config: Any = None, **kwargs: Any) -> MoTEConfig:
        """Read the config that `from_pretrained` would, with these arguments."""
        if not isinstance(config, PreTrainedConfig):
            return cls.config_class.from_pretrained(config or pretrained_model_name_or_path, **kwargs)
        config = copy.deepcopy(config)
        if "experts" in kwargs:
            config.load_only(kwargs["experts"])
        return config

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hand on the weights that are wanted alone, and remember the files: offloaded experts are read from them."""
        model.weight_files = tuple(checkpoint_files or ())
        absent = set(model.config.experts) - set(model.config.available_experts)
        if state_dict is not None or load_config.disable_mmap or not model.weight_files:
            absent = set()
        with weights_without(absent, model.weight_files) as wanted:
            found = state_dict if wanted is None else wanted
            return PreTrainedModel._load_pretrained_model(model, found, checkpoint_files, load_config, *args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save under the names of the modules, not under those of the hub file the backbone came from."""
        kwargs.setdefault("save_original_format", False)
        if self.offloading is not None:
            self.offloading.before_saving(args[0] if args else kwargs["save_directory"])
        with self.every_expert():
            super().save_pretrained(*args, **kwargs)


def present(**inputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Leave out the inputs that are None; raise `ValueError` where there is nothing to embed."""
    if inputs["input_ids"] is None and inputs["inputs_embeds"] is None:
        raise ValueError("Pass input_ids or inputs_embeds")
    return {name: value for name, value in inputs.items() if value is not None}


def pool(hidden: torch.Tensor, attention_mask: torch.Tensor | None, mode: str) -> torch.Tensor:
    """Make one vector of each sequence.

    Args:
        hidden: [B, L, H].
        attention_mask: 1 for tokens, 0 for padding on either side, [B, L]; none: no padding.
        mode: `"mean"`, `"cls"` (the first token) or `"last_token"`.

    Returns:
        [B, H].
    """
    if attention_mask is None or attention_mask.dim() != 2:
        attention_mask = torch.ones(hidden.shape[:2], device=hidden.device, dtype=torch.long)
    if mode == "mean":
        # Divided before it is summed, because the sum over a long text may be too large for float16.
        count = attention_mask.sum(dim=1, keepdim=True).clamp_(min=1)
        shares = attention_mask.to(torch.promote_types(hidden.dtype, torch.float32)) / count
        return (shares.to(hidden.dtype).unsqueeze(1) @ hidden).squeeze(1)  # [B, 1, L] @ [B, L, H]
    if mode == "last_token":  # the last 1 becomes the largest value; the first one is that already
        attention_mask = attention_mask * torch.arange(hidden.shape[1], device=hidden.device)
    token = attention_mask.long().argmax(dim=1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), token]


def _adapt(backbone: PreTrainedModel) -> PreTrainedModel:
    """Take off what an embedding model of experts does not need, and mend what would be in its way."""
    if type(backbone) is MPNetModel:
        backbone.__class__ = MPNetBackbone
    if getattr(backbone, "pooler", None) is not None:
        backbone.pooler = None  # type: ignore[assignment]  # pooling is ours; an unused module would cost memory
    if getattr(backbone.config, "use_cache", False):
        backbone.config.use_cache = False  # nothing is generated: keys and values need not be kept
    attend_both_ways(backbone)
    return backbone


def _list_of_layers(backbone: nn.Module, architecture: Architecture) -> nn.ModuleList:
    try:
        layers: Any = backbone.get_submodule(architecture.layer_path)
        for path in architecture.shared_modules:
            layers[0].get_submodule(path)
    except (AttributeError, IndexError) as error:  # no such path, or no layers
        raise ValueError(
            f"{type(backbone).__name__} is not built as described: layers at {architecture.layer_path!r}, shared "
            f"modules {list(architecture.shared_modules)!r} ({error})"
        ) from error
    return layers


def _parent_and_name(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Find the module that holds the submodule at `path`, and the name under which it does."""
    parent, _, name = path.rpartition(".")
    return layer.get_submodule(parent), name


def _container(shared: nn.Module, path: str) -> nn.Module:
    """Find, or make, the place for the module at `path` among the shared ones."""
    for name in path.split(".")[:-1]:
        if not hasattr(shared, name):
            setattr(shared, name, nn.Module())
        shared = getattr(shared, name)
    return shared


def _without_routing(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Keep the expert's name, or the routing of tokens, from a layer that is dense (`mote_layers`)."""
    return args, {name: value for name, value in kwargs.items() if name not in ("expert", "routing")}


MoTEModel.register_for_auto_class("AutoModel")
