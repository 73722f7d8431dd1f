"""Runs of recipes: what goes through the model, and what comes out, also after a kill."""

import json
import resource
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, edit_json, edit_weights, tensors_of
from helpers.datasets import write
from helpers.inference_server import read_as_server
from helpers.paths import SMALL_ENCODER
from helpers.runs import (
    assert_same_weights,
    break_off,
    command,
    environment,
    kill_after,
    overrides,
    read_log,
    train_step,
)
from sentence_transformers import SentenceTransformer, SparseEncoder

from mote import upcycle
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.reading import Checkpoint, open_checkpoint
from mote.cli import main
from mote.remote.configuration_mote import MoTEConfig
from mote.training import teachers
from mote.training.model import build_model
from mote.training.recipe import load_recipe, shipped_recipes
from mote.training.run_folder import START_FOLDER
from mote.training.train import TrainingRun, train

TIER: dict[str, Any] = {"mote": [], "nv-stage2": [pytest.mark.slow]}  # all other recipes: long


def of_encoder(data: Path, out: Path, *more: str) -> list[str]:
    """A small run of the repository's encoder. Its checkpoints are large: there is only the last one."""
    return overrides(SMALL_ENCODER, data, out, "training.save_steps=100", *more)


def distilled(teacher: Path) -> str:
    return (
        "tasks={retrieval: {anchor: search_query, positive: search_document, batches: homogeneous, loss: "
        f"EmbedDistillLoss, teacher: {{source: {teacher}}}, datasets: [retrieval/tldr_pages]}}}}"
    )


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(teachers, "cached_assets_path", lambda *_: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=TIER.get(name, [pytest.mark.long]))
        for name in shipped_recipes()
        if name != "my-tasks"  # test_own_tasks.py
    ],
)
def test_each_shipped_recipe(name: str, tiny: Path, data: Path, tmp_path: Path) -> None:
    more = ("retrieval.sparse_from=embeddings",) if load_recipe(name).retrieval.kind != "dense" else ()
    if load_recipe(name).model.bidirectional:
        tiny = dense_checkpoint(tmp_path / "decoder", "mistral", sentence_transformers={"max_seq_length": 96})
        more = ("model.max_length=96", 'model.end_token="[SEP]"')
    tasks = load_recipe(name).tasks
    if "paper" in name:  # in place of what is on the Hub
        own = {"sts": "{path: sts/*, min_score: 4, max_negative_score: 2.5}"}
        more += tuple(f"tasks.{task}.datasets=[{own.get(task, f'{task}/*')}]" for task in tasks)
    if name in ("nv-stage2", "nv-paper-stage2"):  # the texts for retrieval have no negatives
        more += ("tasks.retrieval.in_batch_negatives=true",)
    if "paraphrases" in tasks:
        data = Path(shutil.copytree(data, tmp_path / "data"))
        shutil.copytree(data / "retrieval", data / "paraphrases")
    more += tuple(f"tasks.{task}.teacher.source={tiny}" for task, settings in tasks.items() if settings.teacher)
    model = train(name, overrides(tiny, data, tmp_path / "run", *more))
    record = train_step(model)
    assert record["steps"] == 2
    assert (model / "curves.png").read_bytes().startswith(b"\x89PNG")
    recipe = load_recipe(model / "recipe.yaml")  # what lies next to the weights is a recipe
    assert (recipe.name, recipe.training.max_steps) == (name, 2)
    encoder = SentenceTransformer if recipe.retrieval.kind == "dense" else SparseEncoder
    trusted = recipe.model.kind != "dense" or recipe.model.instruction_pooling == "excluded"
    loaded = encoder(str(model), trust_remote_code=trusted)
    task = {} if recipe.model.kind == "dense" else {"task": recipe.tasks["retrieval"].anchor}
    chosen = {"prompt_name": "search_query"} if recipe.model.instructions else task
    assert loaded.encode(["a text"], **chosen).shape == (1, loaded.get_embedding_dimension())
    if not trusted:
        assert read_as_server(model)["pooling"] == "mean"
    made = [step["step"] for step in read_steps(model)]
    assert made == (["train"] if recipe.model.kind == "dense" else ["upcycle", "train"])
    assert set(record["validation"]["after"]) >= {"validation_mean", *(f"validation_{task}" for task in recipe.tasks)}
    card = (model / "README.md").read_text()
    assert f"`{name}`" in card
    assert all(f"| {task} | " in card for task in recipe.tasks)
    assert "Not trained yet" not in card
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / START_FOLDER).exists()


class Spy:
    """What a model was given in training: for each forward pass the expert's task and the first text."""

    def __init__(self, model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Any, str]] = []
        self.experts: Counter[str] = Counter()
        inner = model[0].model
        forward = inner.forward

        def spied(*args: Any, **kwargs: Any) -> Any:
            if inner.training:  # not when the library embeds an example for its model card
                self.seen.append((kwargs.get("task"), model.tokenizer.decode(kwargs["input_ids"][0])))
            return forward(*args, **kwargs)

        monkeypatch.setattr(inner, "forward", spied)
        for name, module in inner.named_modules():
            if name.rpartition(".")[0].endswith(".experts"):
                module.register_forward_pre_hook(lambda _, __, name=name: self._count(inner, name.split(".")[-1]))

    def _count(self, inner: torch.nn.Module, expert: str) -> None:
        if inner.training:
            self.experts[expert] += 1


@pytest.mark.long
def test_an_epoch(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is of one task, with its instruction and expert, and every row is seen once."""
    run = TrainingRun("mote", of_encoder(data, tmp_path / "run", "training.max_steps=-1")).prepare()
    with monkeypatch.context() as patched:
        spy = Spy(run.model, patched)
        run.train()
    run.finish({})
    record = train_step(tmp_path / "run" / "model")
    instructions = {
        "search_query": "search _ query : ",
        "search_document": "search _ document : ",
        "classification": "classification : ",
        "clustering": "clustering : ",
    }
    assert {task for task, _ in spy.seen} == instructions.keys()
    for task, text in spy.seen:
        assert text.startswith(f"[CLS] {instructions[task]}"), text
    layers = 3
    assert spy.experts == {task: layers * count for task, count in Counter(task for task, _ in spy.seen).items()}
    used: Counter[str] = Counter()
    for dataset in record["data"]:
        used[dataset["name"] if dataset["task"] == "retrieval" else dataset["task"]] += dataset["used"]
    assert {name: seen["rows"] for name, seen in record["training_sets"].items()} == used
    assert {"retrieval/arxiv", "retrieval/tldr_pages", "classification", "clustering"} == used.keys()


@pytest.mark.long
def test_dense_recipes_have_instructions_or_not(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, begins in (("ic", True), ("em", False)):
        recipe = load_recipe(name, of_encoder(data, tmp_path / name))
        ready = TrainingRun(recipe).prepare()
        spy = Spy(ready.model, monkeypatch)
        ready.train()
        assert len(spy.seen) >= 8
        told = [
            text.split("[CLS] ")[1].startswith(("search _", "classification :", "clustering :")) for _, text in spy.seen
        ]
        assert set(told) == {begins}


@pytest.mark.long
def test_experts_without_data_stay_as_they_were(data: Path, tmp_path: Path) -> None:
    others = ["tasks.classification=null", "tasks.clustering=null"]
    recipe = load_recipe("mote", of_encoder(data, tmp_path / "run", *others))
    start = build_model(recipe, open_checkpoint(recipe.model.source), tmp_path)[0][0].model.state_dict()
    trained = tensors_of(train(recipe))
    moved = {
        key.split(".experts.")[1].split(".")[0]
        for key in trained
        if ".experts." in key and not torch.equal(trained[key], start[key])
    }
    assert moved == {"search_query", "search_document"}


def test_losses_of_two_steps(data: Path, tmp_path: Path) -> None:
    """Against values stored when this was written: what changes them changes what is learned."""
    train("mote", of_encoder(data, tmp_path / "run"))
    losses = [line["loss"] for line in read_log(tmp_path / "run") if "loss" in line]
    assert losses == pytest.approx([1.193058, 0.695891], rel=1e-3)


@pytest.mark.long
def test_the_order_does_not_depend_on_the_number_of_workers(tiny: Path, data: Path, tmp_path: Path) -> None:
    one = train("mote", overrides(tiny, data, tmp_path / "one"))
    workers = train("mote", overrides(tiny, data, tmp_path / "other", "training.dataloader_num_workers=1"))
    assert_same_weights(one, workers)
    seed = train("mote", overrides(tiny, data, tmp_path / "seed", "training.seed=1"))
    with pytest.raises(AssertionError):
        assert_same_weights(one, seed)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "weight", "shown"),
    [
        ("mote", "0.25", "0.25"),
        ("ic", "0.25", "0.25"),
        ("mote", "{shared: 0.25, classification: -0.5}", "0.25 (shared), -0.5 (classification)."),
    ],
)
def test_the_start_has_a_weight_in_the_final_model(
    name: str, weight: str, shown: str, tiny: Path, data: Path, tmp_path: Path
) -> None:
    fast = "training.learning_rate=1e-2"
    trained = tensors_of(train(name, overrides(tiny, data, tmp_path / "trained", fast)))
    model = train(name, overrides(tiny, data, tmp_path / "moved", fast, f"training.start_weight={weight}"))
    moved, start = tensors_of(model), tensors_of(tiny if name == "ic" else upcycle(str(tiny), tmp_path / "upcycled"))
    differing = set()
    for key, one in moved.items():
        expert = key.split(".experts.")[1].split(".")[0] if ".experts." in key else None
        own = {None: 0.25, "classification": -0.5}.get(expert, 0.0) if "shared" in weight else 0.25
        torch.testing.assert_close(one, torch.lerp(trained[key], start.get(key, one), own), atol=1e-6, rtol=0)
        differing |= set() if one.equal(trained[key]) else {expert}
    assert differing >= {None}
    assert differing == {None, "classification"} or "shared" not in weight
    scores = [train_step(one)["validation"]["after"] for one in (tmp_path / "trained" / "model", model)]
    assert scores[0] != scores[1]  # of the weights that are written
    assert f"with a weight of {shown}" in (model / "README.md").read_text()


LONGER = (
    "training.max_steps=-1",
    "training.num_train_epochs=2",
    "training.save_steps=3",
    "training.dataloader_num_workers=0",
)


@pytest.mark.parametrize("step", [3, 18])  # in the first epoch and in the second
def test_a_killed_run_is_resumed_bit_for_bit(step: int, tiny: Path, data: Path, tmp_path: Path) -> None:
    settings = overrides(tiny, data, tmp_path / "killed", *LONGER)
    sealed = tmp_path / "killed" / "checkpoints" / f"checkpoint-{step}" / "checkpoint.json"
    kill_after(sealed, command("mote", *settings), tmp_path)
    assert not (tmp_path / "killed" / "model").exists()
    again = subprocess.run(command("mote", *settings), env=environment(tmp_path), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    subprocess.run(
        command("mote", *overrides(tiny, data, tmp_path / "whole", *LONGER)),
        env=environment(tmp_path),
        check=True,
        capture_output=True,
    )
    assert_same_weights(tmp_path / "killed" / "model", tmp_path / "whole" / "model")
    logs = [read_log(tmp_path / name) for name in ("killed", "whole")]
    timed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    one, other = ([{key: line[key] for key in line if key not in timed} for line in log] for log in logs)
    assert one == other
    assert len(one) >= 2 * step / 3
    records = [train_step(tmp_path / name / "model") for name in ("killed", "whole")]
    assert records[0]["resumed_from_step"] >= step
    assert records[0]["training_sets"] == records[1]["training_sets"]


@pytest.mark.long
@pytest.mark.usefixtures("own_cache")
def test_the_weights_of_a_loss_are_resumed(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = distilled(SMALL_ENCODER)
    for name in ("broken", "whole"):
        settings = overrides(tiny, data, tmp_path / name, task, "training.max_steps=4")
        if name == "broken":
            break_off(settings, monkeypatch, at=3)
        train("mote", settings)
    assert_same_weights(tmp_path / "broken" / "model", tmp_path / "whole" / "model")


def test_the_record_of_a_resumed_run(tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals may be others when it is resumed; time and scores are those of the whole run."""
    settings = overrides(tiny, data, tmp_path / "run", "training.max_steps=6")
    break_off([*settings, "training.logging_steps=1"], monkeypatch, at=3)
    seal = tmp_path / "run" / "checkpoints" / "checkpoint-2" / "checkpoint.json"
    seconds = json.loads(seal.read_text())["seconds"]
    assert seconds > 0
    edit_json(seal, seconds=seconds + 1000)
    record = train_step(train("mote", [*settings, "training.logging_steps=3"]))
    assert [line["step"] for line in read_log(tmp_path / "run") if "loss" in line] == [1, 2, 3, 6]
    whole = train_step(train("mote", overrides(tiny, data, tmp_path / "whole", "training.max_steps=6")))
    assert (record["resumed_from_step"], whole["resumed_from_step"]) == (2, None)
    assert record["seconds"] > 1000 > whole["seconds"]  # of all steps, as `steps` counts them
    assert record["validation"] == whole["validation"]


def test_a_dry_run(tiny: Path, data: Path, tmp_path: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("validation.share=0", "training.eval_steps=1")  # without held-out texts, nothing is validated
    settings = overrides(tiny, data, tmp_path / "run", distilled(SMALL_ENCODER), *more)
    assert main(["train", "mote", *settings, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "2 steps" in text
    assert "| retrieval/tldr_pages " in text
    assert "\n2 steps, batches of " in text
    assert "max_steps: 2" not in text
    assert main(["train", "mote", *settings, "--dry-run", "-v"]) == 0
    assert "max_steps: 2" in capsys.readouterr().out
    assert not own_cache.exists()
    assert not (tmp_path / "run").exists()
    assert main(["train", "mote", *settings, distilled(Path("/nowhere")), "--dry-run"]) == 1
    model = train("mote", settings)
    assert main(["train", "mote", *settings, "--dry-run"]) == 1
    assert main(["train", "mote", *settings, "--dry-run", "--overwrite"]) == 0
    assert model.is_dir()


def test_a_default_prompt_without_a_task_is_not_kept(data: Path, tmp_path: Path) -> None:
    source = shutil.copytree(SMALL_ENCODER, tmp_path / "source")
    settings = {"prompts": {"web_search": "Find: "}, "default_prompt_name": "web_search"}
    edit_json(source / "config_sentence_transformers.json", **settings)
    model = TrainingRun("ic", overrides(source, data, tmp_path / "run")).prepare().model
    assert model.default_prompt_name is None
    model.save_pretrained(str(tmp_path / "saved"))
    assert "web_search" not in SentenceTransformer(str(tmp_path / "saved")).prompts


@pytest.mark.parametrize(
    ("loss", "column", "other"), [("InfoNCE", "positive", "another answer"), ("CoSENTLoss", "score", 0.5)]
)
def test_other_data_are_refused_on_resuming(
    loss: str, column: str, other: Any, tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"query": f"question {i}", "positive": f"answer {i}", "score": i % 2} for i in range(64)]
    write(tmp_path / "data", "retrieval/made", rows)
    task = f"tasks={{retrieval: {{anchor: search_query, batches: homogeneous, loss: {loss}, datasets: [retrieval/*]}}}}"
    settings = overrides(tiny, tmp_path / "data", tmp_path / "run", task, "data.limit=null", "validation.share=0")
    break_off(settings, monkeypatch, at=2)
    rows[7][column] = other
    write(tmp_path / "data", "retrieval/made", rows)
    with pytest.raises(ValueError, match=r"The data differ from those .*: retrieval/made \('\w+' there, '\w+' here\)"):
        train("mote", settings)


def test_another_source_or_teacher_is_refused_on_resuming(
    tiny: Path, data: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, teacher = (Path(shutil.copytree(tiny, tmp_path / name)) for name in ("source", "teacher"))
    name, weight = next(iter(tensors_of(tiny).items()))
    changed = {name: weight + 1}
    task = distilled(teacher)
    settings = overrides(source, data, tmp_path / "run", task)
    break_off(settings, monkeypatch, at=2)
    recipe = load_recipe("mote", settings)
    edit_weights(teacher, **changed)
    cached = sorted(own_cache.rglob("*"))
    with pytest.raises(ValueError, match=rf"The models differ .*: teacher {teacher} \(newest\) \('\w"):
        TrainingRun(recipe).prepare()
    assert sorted(own_cache.rglob("*")) == cached  # it did not embed anything
    shutil.copytree(tiny, teacher, dirs_exist_ok=True)
    (source / "README.md").write_text("A card does not change an embedding.")
    assert TrainingRun(recipe).prepare().checkpoint is not None
    edit_json(source / "1_Pooling/config.json", of_another_model=True)
    with pytest.raises(ValueError, match=rf"The models differ .*: source {source} .* or start over with"):
        TrainingRun(recipe).prepare()


def test_a_source_on_the_hub_is_identified_by_its_commit(tmp_path: Path) -> None:
    run = TrainingRun("mote", [f"output={tmp_path}"])
    run.source = Checkpoint("user/model", tmp_path, "a" * 40, MoTEConfig(), [tmp_path / "not-read"])
    assert run.identify_models() == {"source user/model": "a" * 40}


def test_a_full_disk(tiny: Path, data: Path, tmp_path: Path) -> None:
    """Files may not grow over 60 kB: the first checkpoint cannot be written."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    settings = overrides(tiny, data, tmp_path / "run")
    subprocess.run(command("smoke", *settings, "--dry-run"), env=environment(tmp_path), check=True, capture_output=True)
    done = subprocess.run(
        command("ic", *settings), env=environment(tmp_path), capture_output=True, text=True, preexec_fn=limit
    )
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "The run was stopped. There is no checkpoint yet." in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model").exists()
    assert subprocess.run(command("ic", *settings), env=environment(tmp_path), capture_output=True).returncode == 0
