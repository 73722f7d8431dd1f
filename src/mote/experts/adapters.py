"""PEFT adapters as experts: an adapter is merged into its dense model, whose blocks then become an expert's weights."""

from pathlib import Path

import torch

from mote.checkpoints.models import load_dense
from mote.checkpoints.reading import open_dense
from mote.experts.blocks import weights_by_expert
from mote.remote.modeling_mote import MoTEModel


def merged_weights(adapter: Path, base: str, model: MoTEModel) -> dict[str, torch.Tensor]:
    """Merge an adapter into its dense model, by PEFT and in float32, and return the weights of an expert.

    Args:
        adapter: Folder of the adapter.
        base: The dense model that it adapts: a folder or an id on the Hub.
        model: The MoTE that the expert is for; a `ValueError` unless all that its experts share, attention and
            embeddings, is as in the dense model, with and without the adapter.

    Returns:
        Name in the dense model → weight.
    """
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(adapter), inference_mode=True)
    dense, _ = load_dense(open_dense(base, config.revision), torch.float32)
    parts = weights_by_expert(model.config, model.state_dict())
    shared, names = parts.pop(None), next(iter(parts.values()))

    def differing() -> list[str]:
        """Name what the experts share that is not as in the dense model, which lacks a pooling of the MoTE's own."""
        found = dense.state_dict()
        return [key for key, one in shared.items() if key in found and not found[key].to(one).equal(one)]

    problem, remedy = "", ""
    if changed := differing():
        problem = f"the model was not made from {base}, or what its experts share has been trained"
    else:
        adapted = PeftModel(dense, config)
        loaded = adapted.load_adapter(str(adapter), "default", torch_device="cpu")
        if changed := [*loaded.unexpected_keys, *loaded.missing_keys]:
            problem = f"its weights are not those of an adapter of {type(dense).__name__}"
        else:
            dense = adapted.merge_and_unload(safe_merge=True)
            changed, blocks = differing(), f"{model.config.architecture.layer_path}."
            if outside := [key for key in changed if not key.startswith(blocks)]:
                changed, problem = outside, "it changes what is outside of the blocks, such as embeddings"
            elif changed:
                problem = "it changes what the experts of the model share"
                remedy = ". Make a MoTE whose experts share nothing within a block: "
                remedy += f"`mote upcycle --src {base} --shared-module '[]'`"
    if problem:
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise ValueError(f"The adapter {adapter} cannot become an expert: {problem} ({shown}){remedy}")
    return {name: weight for name, weight in dense.state_dict().items() if name in names}
