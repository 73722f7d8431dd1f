"""Ways to run a MoTE faster that are off by default."""

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812

from mote.experts.blocks import require_task_experts
from mote.inference.cuda_graphs import CudaGraphs
from mote.inference.loading import first_line
from mote.inference.one_pass import OnePass

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel


def speed_up(model: "MoTEModel", *, one_pass: bool = False, cuda_graphs: bool = False) -> None:
    """Change how a model runs, not what it computes; without arguments, restore the default.

    For inference: the model is put into evaluation mode. Do not call it while other threads call the model, and call it
    again after replacing weights.

    Args:
        model: A MoTE in memory, installed or remote code; changed in place.
        one_pass: Run short texts of several tasks in one pass, not in a pass for each expert: see docs/performance.md.
        cuda_graphs: On a GPU, capture the passes of up to 32 rows of up to 512 tokens once, and replay them.
    """
    require_task_experts(model.config)
    if model.offloading is not None:
        raise ValueError("The experts are offloaded, which is for memory, not speed: call mote.restore(model) first")
    if cuda_graphs and model.device.type != "cuda":
        raise ValueError(f"CUDA graphs need an NVIDIA GPU (device_map='cuda'), but the model is on {model.device}")
    model.one_pass = model.graphs = None
    if not (one_pass or cuda_graphs):
        return
    model.eval()
    tasks = [*model.config.available_tasks][:4]
    ids = torch.arange(3, 11, device=model.device).repeat(len(tasks), 1)
    with torch.no_grad():
        expected: Any = model(input_ids=ids, task=tasks).pooler_output
        model.one_pass = OnePass(model) if one_pass else None
        model.graphs = CudaGraphs(model) if cuda_graphs else None
        try:  # a backbone of another kind, by its layer_path
            same = F.cosine_similarity(model(input_ids=ids, task=tasks).pooler_output, expected).min() > 0.99
            problem = None if same else "the results differ"
        except Exception as error:
            problem = first_line(error)
        if problem is not None:
            model.one_pass = model.graphs = None
            raise ValueError(f"This model does not run with one_pass={one_pass}, cuda_graphs={cuda_graphs}: {problem}")
