"""Forward of one task beside the dense native model, in one process.

    python benchmarks/forward.py [--model FOLDER] [--device cpu|cuda] [--dtype float32|bfloat16]

Both as `AutoModel` gives them: the MoTE's time includes its pooling over the tokens, the dense model's that of the
pooler it has, if any. The last column is the dense model against a copy of itself: how far from 1 noise takes a ratio.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import torch
from pairing import Comparison, compare
from transformers import AutoModel

from mote import MoTEConfig, MoTEModel

SMALL_ENCODER = Path(__file__).parents[1] / "examples" / "small-encoder"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SMALL_ENCODER), help="dense checkpoint (default: the repository's)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each row of the table")
    options = parser.parse_args()
    source = AutoModel.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    # Copies all: weights in memory of their own are not as fast as those mapped from a file, or faster.
    dense, twin = copy.deepcopy(source), copy.deepcopy(source)
    mote = MoTEModel(MoTEConfig(backbone_config=source.config), copy.deepcopy(source)).eval()
    for model in (dense, mote, twin):
        model.to(options.device)
    synchronize = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
    longest = getattr(dense.config, "max_position_embeddings", 512)
    print(f"{Path(options.model).name}, {options.device}, {options.dtype}, {torch.get_num_threads()} threads")
    print("| batch | length | dense, ms | MoTE, ms | MoTE / dense | dense / dense |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rows in (1, 32):
        for length in (16, 128, 512):
            if length > longest:
                continue
            inputs = {"input_ids": torch.randint(5, dense.config.vocab_size, (rows, length), device=options.device)}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            with torch.inference_mode():
                result, noise = measure(dense, mote, twin, inputs, options.seconds, synchronize)
            print(
                f"| {rows} | {length} | {1e3 * result.baseline:.2f} | {1e3 * result.candidate:.2f} | "
                f"{result.ratio:.3f} | {noise.ratio:.3f} |",
                flush=True,
            )


def measure(
    dense: torch.nn.Module,
    mote: torch.nn.Module,
    twin: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    seconds: float,
    synchronize: Callable[[], None],
) -> tuple[Comparison, Comparison]:
    """Compare MoTE with dense, and dense with its twin."""
    expected, found = dense(**inputs), mote(**inputs, task="search_query")
    assert torch.equal(expected.last_hidden_state, found.last_hidden_state), "not the same result"
    arguments = {"seconds": seconds, "synchronize": synchronize}
    return (
        compare(lambda: dense(**inputs), lambda: mote(**inputs, task="search_query"), **arguments),
        compare(lambda: dense(**inputs), lambda: twin(**inputs), **arguments),
    )


if __name__ == "__main__":
    main()
