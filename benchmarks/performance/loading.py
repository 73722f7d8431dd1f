"""Loading one expert of a MoTE, or all: time, peak memory, and the bytes of the files that are needed."""

from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedModel

from benchmarks.pairing import medians
from benchmarks.performance.benchmark import SMALL_ENCODER, Benchmark, Options, Target
from benchmarks.performance.models import load_dense, make_mote, seconds
from benchmarks.performance.processes import load_in_turn
from mote import MoTEModel, upcycle

FIRST = "search_query"
LOADS = {
    "dense": "AutoModel.from_pretrained({0!r}, add_pooling_layer=False)",
    "one expert": f"MoTEModel.from_pretrained({{0!r}}, experts=[{FIRST!r}])",
    "by remote code": f"AutoModel.from_pretrained({{0!r}}, experts=[{FIRST!r}], trust_remote_code=True)",
    "offloaded to disk": "mote.load({0!r}, offload='disk')",
    "all experts": "MoTEModel.from_pretrained({0!r})",
}
# Load and folder of the baseline, and of what is compared with it; highest ratios of time and of peak memory (1.02: no
# more, within the noise).
COMPARISONS = {
    "one of 64 experts / one of 1": ("one expert", "mote1", "one expert", "mote64", 1.05, 1.05),
    "one of 4 experts / dense": ("dense", "dense", "one expert", "mote4", 1.05, 1.02),
    "all of 4 experts / in one file": ("all experts", "mote4-in-one", "all experts", "mote4", 1.02, 1.02),
    "all of 64 experts / in one file": ("all experts", "mote64-in-one", "all experts", "mote64", 1.02, 1.02),
    "offloaded to disk / dense": ("dense", "dense", "offloaded to disk", "mote4", None, 1.02),
    "by remote code, one of 4 / dense": ("dense", "dense", "by remote code", "mote4", None, None),
    "dense / dense": ("dense", "dense", "dense", "dense", None, None),
}
NOTES = [
    "Each load is in a fork of a process that has imported the library and used small models, in pairs whose order is "
    "swapped; medians. Installed classes, the files in the page cache. By remote code (`trust_remote_code=True`), "
    "transformers also checks and imports the model's code.",
    "Memory: the peak of loading the model, and of reading every weight once, as loading only maps the files.",
    "In one file: all weights in `model.safetensors`, without an index. Bytes needed: all files of the folder (config, "
    "code, index, weights) but the weights that loading does not open; no tokenizer and no card.",
]


def measure(options: Options) -> Benchmark:
    """Measure on a CPU; without another checkpoint, a model in the shape of all-MiniLM-L6-v2 with random weights."""
    rows, targets = [], []

    def add(what: str, pairs: list[tuple[float, float]], unit: str, limit: float | None) -> None:
        found = medians(pairs)
        rows.append([what, f"{found.baseline:.2f} {unit}", f"{found.candidate:.2f} {unit}", f"{found.ratio:.3f}"])
        targets.extend([Target(what, found.ratio, limit)] if limit else [])

    with TemporaryDirectory() as name:
        folder = Path(name)
        _write(options, folder)
        small = small_models(folder)
        for what, (base_load, base, load, model, time_limit, memory_limit) in COMPARISONS.items():
            loads = [LOADS[base_load].format(str(folder / base)), LOADS[load].format(str(folder / model))]
            runs = load_in_turn(loads, small, 2 if options.quick else 10, seconds(options))
            times, peaks = (zip(*([run[i] for run in one] for one in runs), strict=True) for i in (0, 1))
            add(f"time, {what}", [(1e3 * one, 1e3 * other) for one, other in times], "ms", time_limit)
            add(f"peak memory, {what}", [(one / 1e6, other / 1e6) for one, other in peaks], "MB", memory_limit)
        sizes = (_bytes_needed(folder / "mote1") / 1e6, _bytes_needed(folder / "mote64") / 1e6)
        add("bytes needed, one of 64 experts / one of 1", [sizes], "MB", 1.02)
    title = "Loading one expert or all, on a CPU"
    return Benchmark("loading", title, ["", "baseline", "measured", "ratio"], rows, targets, NOTES)


def small_models(folder: Path) -> list[str]:
    """Write a small MoTE; return expressions that load it and a small dense model."""
    upcycle(str(SMALL_ENCODER), folder / "small")
    moted = [LOADS[kind].format(str(folder / "small")) for kind in ("one expert", "offloaded to disk")]
    return [LOADS["dense"].format(str(SMALL_ENCODER)), *moted]


def _write(options: Options, folder: Path) -> None:
    """Write the dense model, and MoTEs made from it, also with all weights in one file."""
    dense = _dense(options)
    dense.register_module("pooler", None)  # a MoTE has none
    dense.save_pretrained(folder / "dense")
    for count in (1, 4, 64):
        model = make_mote(dense, [FIRST, *(f"expert{i}" for i in range(1, count))])
        model.save_pretrained(folder / f"mote{count}")
        one_file = folder / f"mote{count}-in-one"
        model.save_pretrained(one_file, state_dict={})  # config and code
        save_file(model.state_dict(), one_file / "model.safetensors", metadata={"format": "pt"})


def _dense(options: Options) -> PreTrainedModel:
    if options.quick or options.checkpoint != SMALL_ENCODER:
        return load_dense(options)
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model: nn.Module = BertModel(config)
    return model.eval()  # type: ignore[return-value]


def _bytes_needed(folder: Path) -> int:
    opened = MoTEModel.from_pretrained(folder, experts=[FIRST]).weight_files
    needed = [file for file in folder.iterdir() if file.suffix != ".safetensors" or str(file) in opened]
    return sum(file.stat().st_size for file in needed)
