"""From a dense checkpoint to a complete MoTE repository, through the library and through the command."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import (
    TASK_MOTE,
    contents,
    dense_checkpoint,
    e5_checkpoint,
    files_in,
    published_nomic,
    read_json,
    tensors_of,
    tiny_tokenizer,
    trusted,
)
from helpers.families import batch
from helpers.paths import REMOTE, ROOT
from helpers.processes import run_as_stranger
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import mote
from mote import experts, plan_upcycling, transform, upcycle
from mote.checkpoints.reading import open_mote
from mote.cli import main
from mote.experts import parameter_counts
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.modeling_mote import MoTEModel
from mote.upcycling.configs import instructions_from

EXPERTS = ["classification", "clustering", "search_query", "search_document"]
FILES = {
    *TASK_MOTE,
    "1_Pooling/config.json",
    "README.md",
    "config.json",
    "config_sentence_transformers.json",
    "model-base.safetensors",
    *(f"model-expert-{name}.safetensors" for name in EXPERTS),
    "model.safetensors.index.json",
    "modules.json",
    "sentence_bert_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "mote.json",
}
TEXTS = ["whales breathe air", "a recipe for bread", "bread"]


def test_the_folder_is_complete(upcycled: Path) -> None:
    assert files_in(upcycled) == FILES
    config = read_json(upcycled / "config.json")
    assert config["auto_map"] == {"AutoConfig": "configuration_mote.MoTEConfig", "AutoModel": "modeling_mote.MoTEModel"}
    assert (config["model_type"], config["architectures"]) == ("mote", ["MoTEModel"])
    for name in TASK_MOTE:
        assert (upcycled / name).read_bytes() == (REMOTE / name).read_bytes()
    modules = [module["type"].rpartition(".")[2] for module in read_json(upcycled / "modules.json")]
    assert modules == ["MoTETransformer", "Pooling"]
    assert read_json(upcycled / "sentence_bert_config.json")["max_seq_length"] == 512
    settings = read_json(upcycled / "config_sentence_transformers.json")
    assert set(settings["__version__"]) == {"sentence_transformers", "transformers", "pytorch"}
    prompts = settings["prompts"]
    assert prompts["search_query"] == prompts["query"] == prompts["Retrieval-query"] == "search_query: "
    assert prompts["sts"] == prompts["STS"] == "classification: "
    assert len(AutoTokenizer.from_pretrained(upcycled)) == 60


def test_no_file_names_a_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = dense_checkpoint(tmp_path / "here" / "tiny", tokenizer=False)
    tokenizer = tiny_tokenizer(tmp_path / "there" / "tokenizer")
    out = upcycle(str(source), tmp_path / "elsewhere" / "out", tokenizer=str(tokenizer), overwrite=True)
    again = upcycle("here/tiny", "elsewhere/out", tokenizer="there/tokenizer", overwrite=True)
    for folder in (out, again):
        for name, content in contents(folder).items():
            for path in (tmp_path, ROOT, Path.home(), "here/", "elsewhere", "there/"):
                assert name in TASK_MOTE or str(path).encode() not in content, name
        (step,) = read_json(folder / "mote.json")["steps"]
        assert (step["sources"][0]["name"], step["settings"]["tokenizer"]) == ("tiny", "tokenizer")
        assert step["command"] == "mote upcycle --src tiny --out out --overwrite --tokenizer tokenizer"


# Reads through safetensors are recorded by standing in for `safe_open` where transformers calls it.
FRESH_PROCESS = """
import json

import safetensors
import torch
import transformers.modeling_utils
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModel, AutoTokenizer

read = set()


class Recorded:  # a file, or a slice of one
    def __init__(self, inner, key=None):
        self.inner, self.key = inner, key

    def __enter__(self):
        return Recorded(self.inner.__enter__())

    def __exit__(self, *error):
        return self.inner.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def get_tensor(self, key):
        read.add(key)
        return self.inner.get_tensor(key)

    def get_slice(self, key):
        return Recorded(self.inner.get_slice(key), key)

    def __getitem__(self, index):
        read.add(self.key)
        return self.inner[index]


# The model's code asks the latter.
transformers.modeling_utils.safe_open = safetensors.safe_open = lambda *args, **kw: Recorded(safe_open(*args, **kw))
folder, inputs, results, texts = sys.argv[1:]
inputs = load_file(inputs)
outputs = {}


def run(label, model, tasks):
    with torch.no_grad():
        for task in tasks:
            outputs[f"{label} {task}"] = model(**inputs, task=task).last_hidden_state
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__


assert AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type in ("mote", "mote_hierarchical")
model = AutoModel.from_pretrained(folder, trust_remote_code=True)
run("all", model, model.config.experts)
read_of = {"all": sorted(read)}
read.clear()
one = AutoModel.from_pretrained(folder, trust_remote_code=True, experts=["clustering"])
run("one", one, ["clustering"])
read_of["one"] = sorted(read)
parameters = {"all": sorted(dict(model.named_parameters())), "one": sorted(dict(one.named_parameters()))}
model = SentenceTransformer(folder, trust_remote_code=True)
for name in ("clustering", "search_query"):
    outputs[f"encoded {name}"] = model.encode(json.loads(texts), prompt_name=name, convert_to_tensor=True)
save_file(outputs, results)
print(json.dumps({"read": read_of, "parameters": parameters}))
"""


@pytest.mark.parametrize("kind", ["trained", "hierarchical"])
def test_it_loads_without_the_project_and_reads_only_the_experts_asked_for(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trained, inputs = request.getfixturevalue(kind), batch()
    save_file(inputs, tmp_path / "inputs.safetensors")
    results = tmp_path / "results.safetensors"
    arguments = (trained, tmp_path / "inputs.safetensors", results, json.dumps(TEXTS))
    told = json.loads(run_as_stranger(FRESH_PROCESS, *arguments, cwd=tmp_path).stdout)
    found = load_file(results)
    here = mote.load(trained)
    with torch.no_grad():
        expected = {f"all {task}": here(**inputs, task=task).last_hidden_state for task in EXPERTS}
    expected["one clustering"] = expected["all clustering"]
    encoder = trusted(trained)
    for name in ("clustering", "search_query"):
        expected[f"encoded {name}"] = encoder.encode(TEXTS, prompt_name=name, convert_to_tensor=True)
    assert found.keys() == expected.keys()
    for key, value in expected.items():  # another process may compute with another number of threads
        assert (found[key] - value).abs().max() <= 1e-6, key
    assert not found["encoded clustering"].allclose(found["encoded search_query"], atol=1e-2)
    everything = sorted(tensors_of(trained))
    assert told["read"]["all"] == told["parameters"]["all"] == everything
    others = [f".experts.{expert}." for expert in EXPERTS if expert != "clustering"]
    without_others = [key for key in everything if not any(other in key for other in others)]
    assert told["read"]["one"] == told["parameters"]["one"] == without_others
    assert len(without_others) < len(everything)


@pytest.mark.parametrize(
    ("dtype", "layers"), [("auto", "every"), ("auto", [1]), ("bfloat16", "every"), ("bfloat16", [1]), ("float16", [1])]
)
def test_the_plan_agrees_with_reality(dtype: str, layers: str | list[int], dense: Path, tmp_path: Path) -> None:
    plan = plan_upcycling(str(dense), tmp_path / "out", dtype=dtype, layers=layers)
    assert not any(tmp_path.iterdir())
    out = upcycle(str(dense), tmp_path / "out", dtype=dtype, layers=layers)
    tensors = tensors_of(out)
    assert plan.size == sum(tensor.nbytes for tensor in tensors.values())
    assert plan.counts["total"] == sum(tensor.numel() for tensor in tensors.values())
    loaded = MoTEModel.from_pretrained(out)
    assert plan.counts == parameter_counts(loaded) == read_json(out / "mote.json")["steps"][0]["parameters"]
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert {plan.config.dtype, loaded.dtype, *(tensor.dtype for tensor in tensors.values())} == {expected}
    assert read_json(out / "config.json")["dtype"] == str(expected).removeprefix("torch.")
    assert loaded(**batch(), task="clustering").pooler_output.dtype == expected


def test_weights_in_several_files(dense: Path, upcycled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["upcycle", "--src", str(dense), "--out", str(out), "--max-shard-size", "40KB"]) == 0
    shards = sorted(out.glob("model-*.safetensors"))
    sizes = {path.name: sum(tensor.nbytes for tensor in load_file(path).values()) for path in shards}
    assert sorted(name[:11] for name in sizes) == ["model-base-"] * 2 + ["model-exper"] * 4
    assert max(size for name, size in sizes.items() if "base" in name) <= 40_000
    assert set(read_json(out / "model.safetensors.index.json")["weight_map"].values()) == {path.name for path in shards}
    one, several = tensors_of(upcycled), tensors_of(out)
    assert one.keys() == several.keys()
    assert all(one[key].equal(value) for key, value in several.items())
    some = MoTEModel.from_pretrained(out, experts=["clustering"])
    expected = MoTEModel.from_pretrained(upcycled)(**batch(), task="clustering").pooler_output
    assert some(**batch(), task="clustering").pooler_output.equal(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_shard_size": "5"}, r"(?s)max_shard_size.*String should match pattern.*KMGT"),
        ({"retrieval": "sparse", "instruction_pooling": "excluded"}, "of dense vectors, got sparse ones"),
        ({"num_experts": 3}, "num_experts cannot be chosen, it is for token routing: add `--routing token`"),
        ({"pooling": "latent_attention", "routing": "token"}, "needs task experts and dense vectors"),
        ({"pooling": "self_attention", "retrieval": "hybrid"}, "needs task experts and dense vectors"),
        ({"pooling": "latent_attention", "with_head": True}, "cannot have a head for masked language modelling"),
        ({"pooling_heads": 4}, "pooling_heads cannot .* for pooling by attention: add `--pooling latent_attention`"),
    ],
)
def test_invalid_settings(settings: dict[str, Any], message: str, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        upcycle(str(dense), tmp_path / "out", **settings)
    assert not any(tmp_path.iterdir())


def test_a_dry_run_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    e5 = e5_checkpoint(tmp_path / "sources" / "e5")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = files_in(tmp_path)
    assert main(["upcycle", "--src", str(e5), "--dry-run", "--layers", "every_other", "--dtype", "float16"]) == 0
    printed = capsys.readouterr().out
    assert not any((tmp_path / "here").iterdir())
    assert files_in(tmp_path) == before
    plan = plan_upcycling(str(e5), layers="every_other", dtype="float16")
    assert printed == f"{plan}\nDry run: nothing was written.\n"
    for line in (
        f"source: +{re.escape(str(e5))} \\(bert, model.safetensors\\)",
        "search_query \\(search_query, query\\)",
        "blocks: +1 of 2 have experts: 1",
        "out: +e5-mote",
        "note: +prompts of the source that belong to no task .*: 'passage'",
    ):
        assert re.search(line, printed), line


@pytest.mark.parametrize(
    ("argument", "layers", "with_experts"), [("every_other", "every_other", {1, 3}), ("3,0", [3, 0], {0, 3})]
)
def test_layers(argument: str, layers: str | list[int], with_experts: set[int], tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "dense", num_hidden_layers=4)
    out = tmp_path / "out"
    assert main(["upcycle", "--src", str(source), "--out", str(out), "--layers", argument]) == 0
    assert read_json(out / "config.json")["mote_layers"] == layers
    found = {int(match[1]) for key in tensors_of(out) if (match := re.search(r"layer\.(\d+)\.experts\.", key))}
    assert found == with_experts
    assert MoTEModel.from_pretrained(out)(**batch(), task="clustering").pooler_output.isfinite().all()


def test_the_prompts_of_a_source_are_those_of_its_tasks() -> None:
    for prompts, instructions in (
        ({"STS": "sts: "}, {"sts": "sts: "}),  # not that of the expert
        ({"STS": "sts: ", "Classification": ""}, {"sts": "sts: ", "classification": ""}),
        (
            {"query": "Q: ", "document": ""},
            {"query": "Q: ", "document": "", "search_query": "Q: ", "search_document": ""},
        ),
        (
            {"query": "Q: ", "search_query": ""},
            {"query": "Q: ", "document": "", "search_query": "", "search_document": ""},
        ),
    ):
        assert instructions_from(prompts, MoTEConfig()) == instructions


def test_tasks_instructions_and_a_default(dense: Path, tmp_path: Path) -> None:
    options = ["--expert", "find", "--expert", "sort", "--default-task", "topics", "--pooling", "last_token"]
    options += ["--task", "topics=sort", "--task", "mail=sort", "--instruction", "find=Find = it: "]
    options += ["--instruction", "topics=Topic: ", "--instruction", "sort="]
    assert main(["upcycle", "--src", str(dense), "--out", str(tmp_path / "out"), *options]) == 0
    config = MoTEModel.from_pretrained(tmp_path / "out").config
    assert config.experts == ["find", "sort"]
    assert config.tasks == {"find": "find", "sort": "sort", "mail": "sort", "topics": "sort"}
    instructions = {task: config.instruction_of(task) for task in config.tasks}
    assert instructions == {"find": "Find = it: ", "sort": "", "mail": "", "topics": "Topic: "}
    assert (config.default_task, config.pooling) == ("topics", "last_token")
    prompts = read_json(tmp_path / "out" / "config_sentence_transformers.json")["prompts"]
    assert prompts == instructions
    model = trusted(tmp_path / "out")
    assert np.array_equal(model.encode(TEXTS), model.encode(TEXTS, task="topics"))
    assert np.array_equal(model.encode(TEXTS, prompt_name="find"), model.encode([f"Find = it: {t}" for t in TEXTS]))


def test_a_model_named_after_its_source(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert files_in(upcycle(str(dense) + "/")) == files_in(upcycle(str(dense), "new/folders/out")) == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "tiny-mote"]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_published_nomic_becomes_a_complete_folder(
    prefix: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mote")
    out = upcycle(str(published_nomic(tmp_path / "nomic", prefix)), tmp_path / "out")
    assert files_in(out) == FILES
    assert read_json(out / "sentence_bert_config.json")["max_seq_length"] == 64
    left_out = ["cls.predictions.decoder.weight", "cls.predictions.transform.dense.weight"] if prefix else []
    assert read_json(out / "mote.json")["steps"][0]["dropped"] == left_out
    told = "Dropping 2 weights of pre-training heads (listed in mote.json)"
    assert (told in caplog.messages) == prefix


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \t\n ",
        "x" * 100_000,
        "a b " * 25_000,
        "🐋🏴‍☠️👩‍👩‍👧",
        "שלום עולם مرحبا",
        "a\x00b\x07\x1b[0m\u202e\ufeff",
        "日本語",
    ],
    ids=["empty", "white space", "one long word", "long", "emoji", "right to left", "control", "chinese"],
)
def test_any_text(text: str, trained: Path) -> None:
    mote = trusted(trained)
    alone = mote.encode([text], task="clustering")[0]
    assert np.isfinite(alone).all()
    assert np.abs(mote.encode([*TEXTS, text], task="clustering")[3] - alone).max() <= 1e-6
    assert np.isfinite(mote.encode([text], prompt_name="search_query")).all()
    assert np.isfinite(mote.encode([f"search_query: {text}", f"clustering: {text}"])).all()


def test_a_token_routed_model_begins_as_the_dense_model(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source")
    routing = {"routing": "token", "layers": "every_other", "num_experts": 8, "router_aux_loss_type": "megablocks"}
    out = upcycle(str(source), tmp_path / "out", **routing, router_aux_loss_coef=0.5)
    config: Any = open_mote(str(out)).config
    assert (config.mote_layer_indices, config.num_experts, config.num_experts_per_tok) == ([1], 8, 2)
    assert (config.router_aux_loss_type, config.router_aux_loss_coef) == ("megablocks", 0.5)
    inputs = batch()
    with torch.no_grad():
        expected = AutoModel.from_pretrained(source)(**inputs).last_hidden_state
        model = AutoModel.from_pretrained(out, trust_remote_code=True)
        assert (model(**inputs).last_hidden_state - expected).abs().max() <= 2e-6
    assert model.blocks[0].feed_forward.experts.down_proj.shape[0] == 8


def test_an_exported_expert_can_be_upcycled_again(trained_folder: Path, tmp_path: Path) -> None:
    """It has one instruction for everything, which cannot pick an expert."""
    expert = transform(trained_folder, tmp_path / "expert", experts.export, "clustering")
    with pytest.raises(ValueError, match=r"already stands for .* different instructions"):
        plan_upcycling(expert)
    assert plan_upcycling(expert, experts=["clustering", "topics"]).config.experts == ["clustering", "topics"]
    others = {f"{prefix}{role}": f"{role}: " for role in ("query", "document") for prefix in ("", "search_")}
    assert plan_upcycling(expert, instructions=others).config.instruction_of("clustering") == "clustering: "


def test_task_experts_of_a_token_routed_model_begin_as_it(token_routed: Path, hierarchical: Path) -> None:
    assert files_in(hierarchical) == FILES | {"hierarchical_mote.py", "token_routing_mote.py"}
    source, encoder = trusted(token_routed), trusted(hierarchical)
    model, routed, inputs = encoder[0].model, source[0].model, batch()
    assert type(model).__module__.startswith("transformers_modules.")
    with torch.no_grad():
        expected = routed(**inputs).last_hidden_state
        for task in model.config.tasks:
            assert model(**inputs, task=task).last_hidden_state.equal(expected)
    for name in ("clustering", "sts"):
        assert np.array_equal(encoder.encode(TEXTS, prompt_name=name), source.encode(TEXTS, prompt_name=name))
    assert np.array_equal(encoder.encode_query(TEXTS), source.encode_query(TEXTS))
    mixed = [f"{task}: {text}" for task, text in zip(EXPERTS, TEXTS, strict=False)]
    assert np.abs(encoder.encode(mixed) - source.encode(mixed)).max() <= 1e-6
    assert np.array_equal(encoder.encode(["bread"]), source.encode(["bread"]))


def test_the_folder_of_task_experts_that_are_token_routed(
    token_routed: Path, hierarchical: Path, tmp_path: Path
) -> None:
    plan = plan_upcycling(str(token_routed))
    of_source = parameter_counts(mote.load(token_routed))
    assert plan.counts["active"] == of_source["active"] < of_source["total"]
    assert plan.counts == parameter_counts(mote.load(hierarchical))
    for line in (
        "router: +each token through 2 of 4 experts; load balancing 0.005",
        "blocks: +2 of 2 have experts: 0, 1; token-routed: 1",
    ):
        assert re.search(line, str(plan)), line
    card = " ".join((hierarchical / "README.md").read_text().split())
    assert "In 1 of the blocks, experts also route tokens: each expert's own router sends each token through" in card
    assert "gets the same embedding, the one that the source model gives it" in card
    assert [step["command"] for step in read_json(hierarchical / "mote.json")["steps"]] == [
        "mote upcycle --src tiny --out tiny-token --layers 1 --routing token",
        "mote upcycle --src tiny-token --out tiny-hierarchical",
    ]
    mote.load(hierarchical).save_pretrained(tmp_path)
    written = contents(hierarchical)
    assert {name: data for name, data in contents(tmp_path).items() if "safetensors" in name}.items() <= written.items()


def test_names_and_settings_of_a_token_routed_source(dense: Path, token_routed: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {"experts": ["find", "sort"], "tasks": {"mail": "sort"}, "instructions": {"mail": "Mail: "}}
    source = upcycle(str(dense), tmp_path / "routed", routing="token", num_experts=3, pooling="cls", **names)
    config = plan_upcycling(str(source), tasks={"query": "find"}).config
    assert config.tasks == {"find": "find", "sort": "sort", "mail": "sort", "query": "find"}
    assert (config.instruction_of("mail"), config.pooling) == ("Mail: ", "cls")
    assert plan_upcycling(str(source), experts=["one"], layers=[1]).config.tasks == {"one": "one"}
    for option in ({"routing": "token"}, {"num_experts": 4}, {"layer_path": "layers"}):
        with pytest.raises(ValueError, match=r"cannot be chosen, .* is already token-routed: upcycle to task experts"):
            plan_upcycling(str(token_routed), **option)


def test_a_head_of_a_token_routed_source_is_left_out(token_routed: Path, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", head="mlm")
    routed = upcycle(str(source), tmp_path / "routed", routing="token", with_head=True)
    out = upcycle(str(routed), tmp_path / "out")
    dropped = read_json(out / "mote.json")["steps"][-1]["dropped"]
    assert dropped == sorted(key for key in tensors_of(routed) if key.startswith("head."))
    assert dropped
    assert "masked_lm_mote.py" not in files_in(out)
    with torch.no_grad():
        expected = mote.load(routed)(**batch()).last_hidden_state
        assert mote.load(out)(**batch(), task="sts").last_hidden_state.equal(expected)
    with pytest.raises(ValueError, match="'mote_hierarchical' cannot have a head for masked language modelling"):
        plan_upcycling(str(token_routed), with_head=True)
