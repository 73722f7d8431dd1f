"""Forward pass of one task compared with a token-routed model of the same size, top-1 of four experts."""

import copy
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import Benchmark, Options, Target
from benchmarks.performance.models import TASKS, load_dense, made_up, make_mote, milliseconds, seconds
from mote.remote.token_routing_mote import TokenRoutedConfig, TokenRoutedModel

SHAPES = ((1, 128), (32, 128))


def make_routed(dense: PreTrainedModel, top: int = 1, experts: int = len(TASKS)) -> Any:
    """Build a token-routed model from copies of the dense model's layers."""
    config = TokenRoutedConfig(backbone_config=dense.config, num_experts=experts, num_experts_per_tok=top)
    routed: Any = TokenRoutedModel(config, copy.deepcopy(dense)).to(dense.device, dense.dtype).eval()  # type: ignore[arg-type]
    with torch.no_grad():  # a fresh router hardly distinguishes tokens; this one uses all experts
        for name, parameter in routed.named_parameters():
            if name.endswith("router.weight"):
                parameter.normal_(generator=torch.Generator(dense.device).manual_seed(0))
    return routed


def measure(options: Options) -> Benchmark:
    """Compare MoTE with two implementations of routed experts in transformers."""
    dense = load_dense(options)
    mote = make_mote(dense)
    routed = make_routed(dense)
    rows, targets = [], []
    for implementation in ("eager", "grouped_mm"):
        routed.set_experts_implementation(implementation)
        for batch, length in SHAPES[:1] if options.quick else SHAPES:
            inputs = made_up(dense, batch, length)
            with torch.inference_mode():
                found = compare(
                    partial(mote, **inputs, task="search_query"),
                    partial(routed, **inputs),
                    seconds=seconds(options),
                )
            times = [milliseconds(found.candidate), milliseconds(found.baseline)]
            rows.append([implementation, f"{batch} x {length}", *times, f"{found.ratio:.3f}"])
            targets.append(Target(f"{implementation}, {batch} x {length}", found.ratio, 1.3, True))
    columns = ["implementation", "rows x length", "token routing, ms", "MoTE, ms", "token routing / MoTE"]
    notes = [
        f"Both have {len(TASKS)} experts per block. The router picks one expert per token, so that, apart from the "
        "router, a token passes through as many weights as in MoTE. The router's weights are random; all experts are "
        "used."
    ]
    return Benchmark(
        "token_routing", "Token routing of the same size, top-1 of 4, compared with MoTE", columns, rows, targets, notes
    )
