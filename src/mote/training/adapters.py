"""LoRA adapters: weights of PEFT's, trained in place of the model's own, then merged into these or saved separately.

PEFT injects adapters, Sentence-Transformers and Transformers save and load them. Added here is what a MoTE needs:
copies of one expert share their frozen weights, so that several experts take the memory of one dense model.
"""

import copy
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer, SparseEncoder
from torch import nn

from mote.experts.blocks import set_experts
from mote.training.trainer_settings import PeftSettings

ADAPTERS_FILE = "adapters.safetensors"  # in a checkpoint: all trained weights, under the names of the parameters

# Targets that are parts of a block → a pattern that matches the names of all modules outside of them.
OUTSIDE = {"shared": r"(?!(.*\.)?shared\.).*", "experts": r"(?!(.*\.)?experts\.).*"}


def adapt(network: Any, settings: PeftSettings, only_experts: list[str] | None = None) -> None:
    """Freeze a Transformers model, and give it adapters to train: all that the targets name, or `only_experts`.

    A pooling with weights, which may be new, is trained in full, unless only some experts are trained.
    """
    from peft import LoraConfig

    targets, named = settings.targets, settings.arguments.get("modules_to_save") or []
    saved = [named] if isinstance(named, str) else [*named]  # PEFT takes a string for a list of letters
    outside = [OUTSIDE[targets]] if targets in ("shared", "experts") else []
    if only_experts is not None:
        names = "|".join(map(re.escape, only_experts))
        outside.append(rf"(?!(.*\.)?experts\.({names})\.).*")
    elif isinstance(getattr(network, "pooling", None), nn.Module):
        saved.append("pooling")
        outside.append(r"pooling\..*")
    arguments: dict[str, Any] = {
        "r": settings.r,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": "all-linear" if targets in ("shared", "experts") else targets,
        "exclude_modules": "|".join(outside) or None,
        **settings.arguments,
        "modules_to_save": saved or None,
    }
    network.add_adapter(LoraConfig(**arguments))
    base_dtype = getattr(torch, settings.base_dtype)
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    for module in network.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:  # mixed precision only rounds these
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.to(torch.float32 if weight.requires_grad else base_dtype)


def network_of(model: SentenceTransformer | SparseEncoder) -> Any:
    """Return the Transformers model of a Sentence-Transformers one."""
    first: Any = model[0]
    return first.model


def share_weights(model: Any) -> None:
    """Make all experts of a `MoTEModel` from the one that is loaded, as separate modules with the same weights."""
    (loaded,) = model.config.available_experts
    for block in model.blocks:
        expert = block.experts[loaded]
        kept: dict[int, Any] = {id(value): value for value in (*expert.parameters(), *block.shared.modules())}
        copies = {name: expert if name == loaded else copy.deepcopy(expert, {**kept}) for name in model.config.experts}
        set_experts(block, copies)
    model.config.loaded_experts = None


def unshare_weights(model: Any) -> None:
    """Give each expert its own weights if several share them; a head stays tied to the embeddings."""
    known: set[int] = set()
    for module in (module for block in getattr(model, "blocks", ()) for module in block.modules()):
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in known:
                setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad))
            known.add(id(getattr(module, name)))


def merge_adapters(network: Any) -> None:
    """Merge the adapters of a Transformers model into its weights, in float32, and remove them."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    unshare_weights(network)
    network.float()
    for name, module in [*network.named_modules()]:
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            network.set_submodule(name, module.get_base_layer())
        elif isinstance(module, AuxiliaryTrainingWrapper):
            merged = module.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
            network.set_submodule(name, merged)
    del network.peft_config
    network._hf_peft_config_loaded = False
    network.requires_grad_(True)


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained weights, under the names of the parameters."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


class AdapterCheckpoints:
    """A trainer whose checkpoints hold only the trained weights; the base may no longer exist when it resumes."""

    model: Any

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or "")
        folder.mkdir(parents=True, exist_ok=True)
        save_file(trained_weights(self.model), folder / ADAPTERS_FILE)

    def _load_from_checkpoint(self, checkpoint: str, *_: Any) -> None:
        trained = load_file(Path(checkpoint) / ADAPTERS_FILE)
        if trained.keys() != trained_weights(self.model).keys():
            raise ValueError(f"{checkpoint} holds adapters that differ from those of the recipe")
        self.model.load_state_dict(trained, strict=False)
