"""The parts: what each compares, in how much time, and its bars."""

import copy
import gc
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cosine_similarity
from transformers import CONFIG_MAPPING, AutoModel, BertConfig, NomicBertConfig, Qwen3Config

import mote
from benchmarks.pairing import Comparison, compare
from benchmarks.performance.benchmark import ROOT, SMALL_ENCODER, Options
from benchmarks.performance.models import TASKS, made_up, make_mote
from benchmarks.performance.token_routing import make_routed
from benchmarks.training import prepare
from mote.corpora.encoder import Encoder
from mote.data.texts import find_texts
from mote.inference.loading import load_encoder
from mote.remote.configuration_mote import ARCHITECTURES
from mote.remote.modeling_mote import MoTEModel, pool

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "minilm": (BertConfig, {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}),
    "nomic": (NomicBertConfig, {}),
    "bert": (BertConfig, {}),
    "qwen3": (Qwen3Config, {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}),
}
CONFIGS["qwen3"][1].update(num_key_value_heads=8, head_dim=128, intermediate_size=3072, use_cache=False)
TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TINY |= {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0}
SHAPES = ((1, 16), (1, 128), (32, 128), (256, 128), (64, 512))  # rows, length
BATCHES = ((32, 128, 128), (256, 128, 128), (256, 4, 256), (1024, 4, 256))  # rows, shortest, longest
WAYS: dict[str, dict[str, bool]] = {"a pass for each expert": {}, "one pass": {"one_pass": True}}
WAYS |= {"one pass, CUDA graphs": {"one_pass": True, "cuda_graphs": True}} if CUDA else {}
LORA: dict[str, Any] = {"r": 8, "target_modules": "all-linear", "init_lora_weights": False}
NEEDS_GPU = "needs a GPU"  # the reason why tests are skipped


class Row(NamedTuple):
    """Two functions to time, or two numbers (a baseline of 0: none); the ratio is the candidate's to the baseline's.

    A table has a line for each `group`, a column for each `what`, and rates in place of times of so many `items`.
    """

    group: str
    what: str
    baseline: Any
    candidate: Any
    limit: float | None = None  # the bar: the highest ratio, or the lowest
    at_least: bool = False
    items: int = 0
    pairs: int = 7


Rows = Callable[[bool], Iterator[Row]]  # of a part; the argument: whether models are tiny
PARTS: dict[str, tuple[Rows, int, str]] = {}  # by name; each runs in a process, for at most so many seconds; title


def part(seconds: int) -> Callable[[Rows], Any]:
    """Register a part by its function, whose docstring is the title."""
    return lambda rows: PARTS.setdefault(rows.__name__, (rows, seconds, str(rows.__doc__).rstrip(".")))[0]


def measure(name: str, tiny: bool, file: Path) -> None:
    """Measure a part, and write its figures."""
    torch.manual_seed(0)
    wait, train, figures = torch.cuda.synchronize if CUDA else lambda: None, name == "training", []
    with torch.set_grad_enabled(train):
        for row in PARTS[name][0](tiny):
            if timed := callable(row.candidate):
                seconds, pairs = (0.0, 1) if tiny else (0.5, row.pairs)
                with torch.inference_mode(not train):
                    found = compare(row.baseline, row.candidate, seconds=seconds, least=pairs, synchronize=wait)
            else:
                found = Comparison(row.baseline, row.candidate, row.candidate / (row.baseline or 1))
            figures.append({**row._asdict(), "timed": timed, **found._asdict()})
    file.write_text(json.dumps(figures), "utf-8")


def dense_model(name: str, tiny: bool) -> Any:
    """Build a dense model with random weights and, as a MoTE, without a pooler."""
    gc.collect()
    torch.cuda.empty_cache()
    kind, settings = CONFIGS[name]
    with torch.device(DEVICE):
        dense = AutoModel.from_config(kind(**{**settings, **(TINY if tiny else {})}), dtype=DTYPE).eval()
    dense.pooler = None
    return dense


def models(name: str, tiny: bool) -> tuple[Any, MoTEModel]:
    """Build a dense model and a MoTE of it."""
    dense = dense_model(name, tiny)
    return dense, make_mote(dense)


def make_different(model: MoTEModel) -> None:
    """Change each expert, so that another one in its place would show."""
    for weight in (weight for block in model.blocks for weight in block.experts.parameters()):
        weight.add_(torch.randn_like(weight) * 0.02)


def pooled(model: Any, inputs: dict[str, torch.Tensor], **how: Any) -> torch.Tensor:
    """Run a model that does not pool, and pool."""
    return pool(model(**inputs, **how).last_hidden_state, inputs["attention_mask"], "mean")


def ragged(dense: Any, tiny: bool, rows: int, shortest: int, longest: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return a padded batch in which most rows are short, and the rows' tasks."""
    rows, shortest, longest = (8, min(shortest, 16), 16) if tiny else (rows, shortest, longest)
    inputs, shares = made_up(dense, rows, longest), torch.rand(rows, 1, device=DEVICE) ** 3
    shares[0] = 1
    lengths = shortest + shares * (longest - shortest)
    inputs["attention_mask"] = (torch.arange(longest, device=DEVICE) < lengths).long()
    return inputs, random.Random(1).choices(TASKS, k=rows)


@part(40)
def parity(tiny: bool) -> Iterator[Row]:
    """Largest differences of all families."""
    for dtype, precision in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        largest: dict[str, float] = {}
        for family in [name for name in ARCHITECTURES if name in CONFIG_MAPPING][:: 6 if tiny else 1]:
            config = CONFIG_MAPPING[family](**{**TINY, "vocab_size": 100})
            for what, difference in _differences(AutoModel.from_config(config, dtype=dtype).eval().to(DEVICE)):
                largest[what] = max(largest.get(what, 0.0), difference)
        noise = largest["dense, rows alone"]
        for what, difference in largest.items():
            exact = precision == "fp32" or not what.startswith("mixed")
            limit = None if what.startswith("dense") else 0 if what == "one task" else 2e-6 if exact else 1
            yield Row(what, precision, 0 if exact else noise, difference, limit)


def _differences(dense: Any) -> Iterator[tuple[str, float]]:
    inputs, tasks = made_up(dense, 8, 16), TASKS * 2
    inputs["attention_mask"] = (torch.arange(16) < torch.arange(16, 0, -2)[:, None]).long().to(DEVICE)
    real = inputs["attention_mask"].bool()

    def whole(model: Any, **task: Any) -> torch.Tensor:
        return model(**inputs, **task).last_hidden_state[real]

    def alone(model: Any, of_rows: Sequence[dict[str, str]]) -> torch.Tensor:
        rows = [{key: of[row : row + 1, : 16 - 2 * row] for key, of in inputs.items()} for row in range(8)]
        pairs = zip(rows, of_rows, strict=True)
        return torch.cat([model(**row, **task).last_hidden_state[0] for row, task in pairs])

    model = make_mote(dense)
    yield "one task", (whole(model, task=TASKS[1]) - whole(dense)).abs().max().item()
    yield "dense, rows alone", (whole(dense) - alone(dense, [{}] * 8)).abs().max().item()
    make_different(model)
    expected = alone(model, [{"task": task} for task in tasks])
    for way, settings in WAYS.items():
        mote.speed_up(model, **settings)
        yield f"mixed, {way}", (whole(model, task=tasks) - expected).abs().max().item()


@part(55)
def tests(_: bool) -> Iterator[Row]:
    """Tests that need a GPU."""
    outcomes: dict[str, str] = {}

    class OnlyMarked:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            reasons = {item: [mark.kwargs.get("reason") for mark in item.iter_markers("skipif")] for item in items}
            items[:] = [item for item in items if NEEDS_GPU in reasons[item]]

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                outcomes[report.nodeid] = report.outcome

    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if NEEDS_GPU in file.read_text("utf-8")]
    with torch.enable_grad():
        ignored = "ignore::pytest.PytestAssertRewriteWarning"  # some of its plugins are imported already
        status = pytest.main(["-q", "-m", "", "-W", ignored, "-p", "no:cacheprovider", *files], [OnlyMarked()])
    if status > pytest.ExitCode.TESTS_FAILED:
        raise RuntimeError("the tests cannot be collected")
    for kind in ("passed", "failed", "skipped"):
        yield Row("all", kind, 0, [*outcomes.values()].count(kind), 0 if kind == "failed" else None)
    yield from (Row(name, "failed", 0, 1) for name, outcome in outcomes.items() if outcome == "failed")


@part(60)
def forward(tiny: bool) -> Iterator[Row]:
    """One task / dense."""
    for name in CONFIGS:
        dense, model = models(name, tiny)
        for rows, length in SHAPES[:1] if tiny else SHAPES:
            inputs = made_up(dense, rows, length)
            run = partial(model, **inputs, task=TASKS[0])
            yield Row(name, f"{rows} x {length}", partial(pooled, dense, inputs), run, 1.02)


@part(75)
def mixed(tiny: bool) -> Iterator[Row]:
    """Four tasks in a batch / dense."""
    for name in ("minilm", "nomic"):
        dense, model = models(name, tiny)
        for rows, shortest, longest in BATCHES:
            inputs, tasks = ragged(dense, tiny, rows, shortest, longest)
            large = rows * (longest if shortest == longest else longest / 4) >= 256 * 128
            limits = [None, *((1.1, 1.1) if large else (2, 1.5))]
            group = f"{name}, {rows} x {longest}" if shortest == longest else f"{name}, {rows} x {shortest}-{longest}"
            for (way, settings), limit in zip(WAYS.items(), limits[: len(WAYS)], strict=True):
                mote.speed_up(model, **settings)
                run = partial(model, **inputs, task=tasks)
                yield Row(group, way, partial(pooled, dense, inputs), run, limit)


@part(60)
def graphs(tiny: bool) -> Iterator[Row]:
    """CUDA graphs."""
    for name in ("minilm", "nomic"):
        dense, eager = models(name, tiny)
        make_different(eager)
        fast = copy.deepcopy(eager)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        mote.speed_up(fast, one_pass=True, cuda_graphs=True)
        for rows, length in SHAPES[:3]:
            inputs, task = made_up(dense, rows, length), TASKS[0] if rows == 1 else TASKS * (rows // len(TASKS))
            run, slow = (partial(model, **inputs, task=task) for model in (fast, eager))
            group, different = f"{name}, {rows} x {length}", (run().pooler_output - slow().pooler_output).abs().max()
            yield Row(group, "difference from eager", 0, different.item(), 0)
            yield Row(group, "graphs / dense", partial(pooled, dense, inputs), run, 0.6 if rows > 1 else None)
            yield Row(group, "eager / graphs", run, slow, None if rows > 1 else 4, at_least=True)
        if name == "minilm":
            yield Row(name, "wrong of 1,000 calls", 0, _wrong_in_threads(eager, fast, 20 if tiny else 1000), 0)
        torch.cuda.empty_cache()
        yield Row(name, "GB of graphs", 0, (torch.cuda.memory_reserved() - before) / 1e9)


def _wrong_in_threads(eager: Any, fast: Any, count: int) -> int:
    draw, calls = random.Random(0), []
    for _ in range(count):
        inputs = made_up(eager, draw.randint(1, 8), draw.randint(2, 128))
        inputs["input_ids"].random_(5, eager.config.vocab_size)
        task: Any = draw.choice([draw.choice(TASKS), draw.choices(TASKS, k=len(inputs["input_ids"]))])
        calls.append((partial(fast, **inputs, task=task), eager(**inputs, task=task).pooler_output.float()))

    def is_wrong(call: tuple[Callable[[], Any], torch.Tensor]) -> bool:
        with torch.inference_mode():  # each thread has a mode of its own
            return cosine_similarity(call[0]().pooler_output.float(), call[1]).min().item() < 0.999

    with ThreadPoolExecutor(8) as threads:
        return sum(threads.map(is_wrong, calls))


@part(45)
def compiled(tiny: bool) -> Iterator[Row]:
    """torch.compile, of the layers."""
    (dense, fast), backend = models("nomic", tiny), {"backend": "eager"} if tiny else {}
    eager = make_mote(dense)
    fast.compile(**backend)
    for layer in dense.get_submodule(ARCHITECTURES["nomic_bert"].layer_path):
        layer.compile(dynamic=True, **backend)
    for rows, length in SHAPES[:1] if tiny else (SHAPES[0], *SHAPES[2:4]):
        inputs = made_up(dense, rows, length)
        run, slow = (partial(model, **inputs, task=TASKS[0]) for model in (fast, eager))
        yield Row(f"{rows} x {length}", "MoTE / dense, compiled", partial(pooled, dense, inputs), run)
        yield Row(f"{rows} x {length}", "eager / compiled", run, slow)


@part(35)
def routing(tiny: bool) -> Iterator[Row]:
    """Token routing / MoTE."""
    dense, model = models("nomic", tiny)
    for top, count in ((1, 4), (2, 8)):
        routed = make_routed(dense, top, count)
        for implementation in ("eager", "grouped_mm"):
            routed.set_experts_implementation(implementation)
            for rows, length in SHAPES[:1] if tiny else SHAPES[1:4]:
                inputs, group = made_up(dense, rows, length), f"top-{top} of {count}, {implementation}"
                run = partial(model, **inputs, task=TASKS[0])
                yield Row(group, f"{rows} x {length}", run, partial(routed, **inputs), 1.3, at_least=True)


@part(25)
def lora(tiny: bool) -> Iterator[Row]:
    """Task LoRAs (rank 8, all linear layers) / MoTE."""
    dense, model = models("nomic", tiny)
    adapted: Any = get_peft_model(copy.deepcopy(dense), LoraConfig(**LORA), adapter_name=TASKS[0])
    for name in TASKS[1:]:
        adapted.add_adapter(name, LoraConfig(**LORA))
    adapted.to(DEVICE, DTYPE).eval()
    for rows in (64, 256):
        inputs, tasks = ragged(dense, tiny, rows, 4, 256)
        one, four = (partial(model, **inputs, task=task) for task in (TASKS[0], tasks))
        yield Row(f"{rows} x 4-256", "one task", one, partial(pooled, adapted, inputs))
        yield Row(f"{rows} x 4-256", "four tasks", four, partial(pooled, adapted, inputs, adapter_names=tasks))


@part(20)
def experts(tiny: bool) -> Iterator[Row]:
    """64 experts / one."""
    dense = dense_model("minilm", tiny)
    one, many = make_mote(dense, ["t0"]), make_mote(dense, [f"t{number}" for number in range(64)])
    for rows, length in SHAPES[:1] if tiny else SHAPES[1:4]:
        inputs = made_up(dense, rows, length)
        few = partial(one, **inputs, task="t0")
        yield Row("minilm", f"{rows} x {length}", few, partial(many, **inputs, task="t63"), 1.02)


@part(30)
def offloading(tiny: bool) -> Iterator[Row]:
    """Offloading: megabytes on the device / dense (and an expert), without cuBLAS's work spaces; a switch."""

    def megabytes(*models: Any) -> float:
        if not CUDA:
            return sum(tensor.nbytes for model in models for tensor in chain(model.parameters(), model.buffers())) / 1e6
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated() / 1e6

    before = megabytes()
    dense = dense_model("nomic", tiny)
    alone, model = megabytes(dense) - before, make_mote(dense)
    del dense
    gc.collect()  # not afterwards: what is offloaded has to leave at once
    expert = sum(weight.nbytes for block in model.blocks for weight in block.experts[TASKS[0]].parameters()) / 1e6
    yield Row("all experts", "at once", alone, megabytes(model) - before)
    for keep in (2, 1):
        mote.offload(model, "cpu", keep=keep)
        for when, tasks in (("at once", []), ("after calls", TASKS), ("after a mixed batch", [TASKS])):
            for task in tasks:
                model(**made_up(model, len(TASKS), 16), task=task)
            yield Row(f"keep={keep}", when, alone + (keep - 1) * expert, megabytes(model) - before, 1.02)
    (dense, whole), names = models("nomic", tiny), cycle(TASKS)
    inputs = made_up(dense, *((2, 8) if tiny else (64, 256)))
    stay = partial(whole, **inputs, task=TASKS[0])
    yield Row("a call of 64 x 256", "switching / not offloaded", stay, lambda: model(**inputs, task=next(names)))


@part(25)
def loading(tiny: bool) -> Iterator[Row]:
    """Loading to the device: MoTE / dense."""
    with TemporaryDirectory() as folder:
        dense, model = models("nomic", tiny)
        dense.save_pretrained(f"{folder}/dense")
        model.save_pretrained(f"{folder}/mote")
        load = partial(AutoModel.from_pretrained, f"{folder}/dense", device_map=DEVICE)
        for what, names, limit in (("one of 4 experts", TASKS[:1], 1.05), ("all 4 experts", None, None)):
            run = partial(mote.load, f"{folder}/mote", experts=names, device_map=DEVICE)
            yield Row("nomic", what, load, run, limit)


@contextmanager
def checkpoint(tiny: bool) -> Iterator[Path]:
    """Write a dense model as a Sentence-Transformers model with the small encoder's tokenizer."""
    with TemporaryDirectory() as folder:
        source, dense = Path(folder, "dense"), dense_model("nomic", tiny)
        shutil.copytree(SMALL_ENCODER, source, ignore=shutil.ignore_patterns("model.safetensors"))
        dense.save_pretrained(source)
        settings = {"embedding_dimension": dense.config.hidden_size, "pooling_mode": "mean"}
        (source / "1_Pooling" / "config.json").write_text(json.dumps(settings))
        yield source


@part(60)
def encode(tiny: bool) -> Iterator[Row]:
    """Sentence-Transformers' encode and mote embed, texts per second; a query."""
    count, batch_size = (16, 8) if tiny else (2048, 128)
    texts = list(islice(cycle(find_texts(folder=Options.data, limit=count).texts), count))
    with checkpoint(tiny) as source:
        folder, corpus = source.parent, source.parent / "corpus.txt"
        corpus.write_text("\n".join(" ".join(text.split()) for text in texts), "utf-8")
        mote.upcycle(source, folder / "mote")
        load = partial(load_encoder, device=DEVICE, dtype=str(DTYPE)[6:], trust_remote_code=True)
        loaded: dict[str, Any] = {"dense": load(source), "task LoRAs": load(source), "mote": load(folder / "mote")}
        adapted = loaded["task LoRAs"][0].model
        for task in TASKS:
            adapted.add_adapter(LoraConfig(**LORA), task)
        adapted.to(DTYPE).set_adapter(TASKS[0])
        # A corpus is larger: what a run costs beside its texts does not count.
        Encoder.model = property(lambda self: loaded[Path(self.source).name])  # type: ignore[assignment]
        Encoder.identity = property(lambda self: {"revision": self.source})  # type: ignore[assignment]

        def run(name: str, texts: Any = texts) -> Any:
            return loaded[name].encode(texts, batch_size=batch_size)

        def embed(name: str) -> None:
            mote.embed_corpus(folder / name, corpus, folder / "out", batch_size=batch_size, overwrite=True)

        (folder / "task LoRAs").symlink_to(source)
        for name in ("dense", "task LoRAs"):
            for what, act in (("encode", run), ("mote embed", embed)):
                both, group = (partial(act, name), partial(act, "mote")), f"MoTE / {name}"
                yield Row(group, f"{what}, texts/s", both[0], both[1], items=count, pairs=3)
        dense, moted = (partial(run, name, "how do whales breathe?") for name in ("dense", "mote"))
        yield Row("MoTE / dense", "one query", dense, moted)
        if CUDA:
            mote.speed_up(loaded["mote"][0].model, cuda_graphs=True)
            yield Row("MoTE / dense", "one query, CUDA graphs", dense, moted)


@part(70)
def training(tiny: bool) -> Iterator[Row]:
    """Training with gradient caching; mote memory."""
    size, mini, length = (64, 16, 16) if tiny else (6144, 256, 32)
    trainers: list[Any] = []
    peaks: list[float] = []
    with checkpoint(tiny) as source:
        for recipe in ("ic", "mote"):
            before, precision = torch.cuda.memory_allocated(), "bf16" if CUDA else "fp32"
            others = (source.parent / recipe, size, mini, f"training.bf16={str(CUDA).lower()}")
            trainers.append(prepare(recipe, str(source), *others, length=length).trainer)
            torch.cuda.reset_peak_memory_stats() if CUDA else None
            trainers[-1].train()
            peaks.append((torch.cuda.max_memory_allocated() - before) / 2**30)
            sizes: Any = {"batch_size": size, "mini_batch_size": mini, "length": length, "precision": precision}
            estimate = mote.estimate_memory(trainers[-1].model[0].model.config, **sizes).to_dict()["total"]
            yield Row("mote memory / peak, GiB", recipe, peaks[-1], estimate / 2**30)
        yield Row("MoTE / dense", "peak, GiB", peaks[0], peaks[1])
        what = f"batches of {size}, pairs/s"
        yield Row("MoTE / dense", what, trainers[0].train, trainers[1].train, items=size, pairs=3)
