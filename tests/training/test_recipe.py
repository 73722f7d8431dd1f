"""Recipes: what is shipped, what extends what, and what is refused."""

from pathlib import Path

import pytest

from mote.checkpoints.reading import open_checkpoint
from mote.data.rows import find_datasets
from mote.training.model import names_of
from mote.training.recipe import load_recipe, shipped_recipes
from mote.training.run_folder import as_yaml, fixed_settings

ALL = shipped_recipes()


def differences(one: str, other: str) -> set[str]:
    """Name the settings in which two recipes differ, apart from what they are called."""
    first, second = (fixed_settings(load_recipe(name)) for name in (one, other))
    return {key for key in {**first, **second} if first.get(key) != second.get(key)} - {"name"}


def test_the_shipped_recipes() -> None:
    assert len(ALL) == 26
    for name in ALL:
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.output == f"runs/{name}"
        assert recipe.description
        text = Path(f"src/mote/recipes/{name}.yaml").read_text(encoding="utf-8")
        assert f"mote train {name}" in text.split("\nname:")[0]


def test_the_papers_settings() -> None:
    recipe = load_recipe("mote")
    tasks = {name: (task.batches, task.temperature) for name, task in recipe.tasks.items()}
    assert tasks == {
        "retrieval": ("homogeneous", 0.03),
        "classification": ("heterogeneous", 0.03),
        "clustering": ("heterogeneous", 0.06),
    }
    assert (recipe.tasks["retrieval"].anchor, recipe.tasks["retrieval"].positive) == ("search_query", "search_document")
    assert (recipe.tasks["clustering"].anchor, recipe.tasks["clustering"].positive) == ("clustering", "clustering")
    training = recipe.training
    found = (training.batch_size, training.learning_rate, training.weight_decay, training.num_train_epochs)
    assert (*found, training.optim) == (6144, 5e-6, 0.1, 1, "adamw_torch")


def test_the_papers_datasets() -> None:
    """All 29, each once, with the paper's settings."""
    recipe = load_recipe("mote-paper")
    found = [(name, len(task.datasets)) for name, task in recipe.tasks.items()]
    assert found == [("retrieval", 8), ("classification", 12), ("clustering", 9)]
    datasets = [one for task in recipe.tasks.values() for one in task.datasets]
    assert {one.path for one in datasets} == {"hub:nomic-ai/nomic-embed-unsupervised-data"}
    assert len({find_datasets(one, Path())[0].name for one in datasets}) == 29
    differ = {key for key in differences("mote", "mote-paper") if ".datasets" not in key}
    assert differ == {"model.source"}


def test_the_datasets_of_nv_embed() -> None:
    """Table 6 of its first version: thousands of samples, in both stages."""
    first, second = (load_recipe(f"nv-paper-stage{stage}").tasks for stage in (1, 2))
    counts = {name: [(one.limit or 0) // 1000 for one in task.datasets] for name, task in second.items()}
    assert counts == {
        "retrieval": [16, 20, 100, 200, 100, 80, 100, 50, 50, 5, 2],
        "classification": [10, 20, 10, 16, 15, 10, 40, 40],
        "clustering": [25, 25, 25, 15, 15, 15, 10],
        "sts": [0],
    }
    assert first["retrieval"].datasets == second["retrieval"].datasets
    assert first["retrieval"].batches == "heterogeneous"
    assert all(one.definition and one.negatives == 7 for task in second.values() for one in task.datasets)


def test_recipes_differ_in_what_the_paper_varies() -> None:
    assert differences("mote", "mote-every-other") == {"model.layers"}
    assert differences("mote", "mote-static") == {"tasks.retrieval.batches", "tasks.clustering.temperature"}
    assert differences("mote", "ic") == {"model.kind"}
    assert differences("ic", "em") == {"model.instructions"}
    routing = {"model.kind", "model.num_experts_per_tok", "model.router_aux_loss_coef"}
    assert differences("mote", "tlr") == routing
    for task in ("retrieval", "classification", "clustering"):
        assert list(load_recipe(f"sem-{task}").tasks) == [task]
        assert {key.split(".")[0] for key in differences("ic", f"sem-{task}")} == {"tasks"}
    assert {key for key in differences("mote", "task-lora") if ".peft" not in key} == {
        "model.shared_modules",
        "training.learning_rate",
        "training.weight_decay",
    }
    assert load_recipe("mote-best").model.source == f"{load_recipe('distill').output}/model"
    assert load_recipe("distill").tasks.keys() == load_recipe("mote-best").tasks.keys()
    assert all(task.teacher for task in load_recipe("distill").tasks.values())
    fifth = load_recipe("mote-objectives")
    assert [dataset.path for dataset in fifth.tasks["text_matching"].datasets] == ["sts/stsbenchmark", "sts/sts12"]
    assert all(dataset.split == "train" for dataset in fifth.tasks["text_matching"].datasets)
    assert fifth.tasks["text_matching"].loss == "CoSENTLoss"


def test_the_models_of_recipes_have_their_tasks() -> None:
    source = open_checkpoint("examples/small-encoder")
    for name in ALL:
        for_encoders = ["model.bidirectional=false"] if name.startswith("nv-") else []
        recipe = load_recipe(name, [f"model.source={source.name}", "model.max_length=null", *for_encoders])
        tasks = {task for settings in recipe.tasks.values() for task in (settings.anchor, settings.positive) if task}
        assert tasks <= names_of(recipe, source).tasks.keys()
    with pytest.raises(ValueError, match=r"Unknown task 'topics'\. Available: "):
        names_of(load_recipe("mote", ["tasks.clustering.anchor=topics"]), source)


def test_overrides() -> None:
    recipe = load_recipe(
        "mote",
        [
            "training.learning_rate=2e-5",
            "training.adam_beta2=0.98",
            "model.instructions=false",
            "tasks.clustering=null",
            "tasks.retrieval.datasets=[retrieval/arxiv, {path: retrieval/debian, limit: 10}]",
            "training.mini_batch_size=null",
            "output=elsewhere",
            "description=Represent ${x}",  # text, not a reference to another setting
        ],
    )
    assert recipe.training.learning_rate == 2e-5
    assert recipe.training.trainer_arguments()["adam_beta2"] == 0.98
    assert "adam_beta2: 0.98" in as_yaml(recipe)
    assert recipe.model.instructions is False
    assert list(recipe.tasks) == ["retrieval", "classification"]
    datasets = [(dataset.path, dataset.limit) for dataset in recipe.tasks["retrieval"].datasets]
    assert datasets == [("retrieval/arxiv", None), ("retrieval/debian", 10)]
    assert recipe.training.mini_batch_size is None
    assert (recipe.output, recipe.description) == ("elsewhere", "Represent ${x}")
    with pytest.raises(ValueError, match="instructions is false"):
        load_recipe("em", ["tasks.retrieval.datasets=[{path: a, instruction: x}]"])


def test_files_extend_others_and_may_have_a_shipped_recipes_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("extends: mote\nname: mine\ntraining: {seed: 7}\n")
    (tmp_path / "longer.yaml").write_text("extends: mine\nname: longer\ntraining: {num_train_epochs: 3}\n")
    recipe = load_recipe(tmp_path / "longer.yaml")
    assert (recipe.name, recipe.training.seed, recipe.training.num_train_epochs) == ("longer", 7, 3)
    assert recipe.training.batch_size == 6144
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mote.yaml").write_text("extends: mote\ntraining: {seed: 7}\n")
    assert [load_recipe(name).training.seed for name in ("mote.yaml", "mote", "em")] == [7, 42, 42]


def test_invalid_settings() -> None:
    for override, message in (
        ("trainng.seed=1", r"unknown key 'trainng'. Did you mean 'training'"),
        ("training.learning_rat=1", r"training: unknown key 'learning_rat'. Did you mean 'learning_rate'"),
        ("tasks.retrieval.temprature=1", r"tasks.retrieval: unknown key 'temprature'. Did you mean 'temperature'"),
        ("tasks.retrieval.datasets=[{path: a, colums: {}}]", r"unknown key 'colums'. Did you mean 'columns'"),
        ("tasks.retrieval.datasets=[{path: a, max_length: {anchor: 9, positive: -3}}]", "positive: .*than 0, got -3"),
        ("tasks.retrieval.datasets=[{path: a, columns: {ancor: q}}]", r"(?s)ancor.*'anchor', 'positive'"),
        (
            "tasks.clustering={loss: MSELoss, batches: heterogeneous, datasets: [{path: a, definition: x}]}",
            "be InfoNCE",
        ),
        (
            "tasks.retrieval.datasets=[{path: a, definition: x, instruction: y}]",
            "an instruction or a definition, not both",
        ),
        ("tasks.retrieval.datasets=[{path: a, max_negative_score: 2}]", "is for pairs made by min_score"),
        ("training={batch_size: 1, weight_decay: x}", r"(?s)training.batch_size.*training.weight_decay"),
        ("model.kind=sparse", r"model.kind: Input should be 'mote', 'token_routed' or 'dense'"),
        ("training.batch_size", r"expected key=value"),
        ("model.source={", r"The override 'model.source={' is invalid: "),
        ("tasks=retrieval", r"tasks: Input should be a valid dictionary"),
        ("tasks.retreival=null", r"'tasks.retreival=null' is invalid: .*Did you mean 'retrieval'"),
        ("training={seed: 7, seed: 8}", r"(?s)The override 'training=.*' is invalid: .*found duplicate key seed"),
    ):
        with pytest.raises(ValueError, match=message):
            load_recipe("mote", [override])


def test_a_recipe_removes_only_tasks_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("extends: mote\ntasks: {retrieval: null}\n")
    (tmp_path / "two.yaml").write_text("extends: one\ntasks: {retrieval: null, clustring: null}\n")
    assert list(load_recipe(tmp_path / "one.yaml", ["tasks.retrieval=null"]).tasks) == ["classification", "clustering"]
    with pytest.raises(ValueError, match=r"Unknown task to remove: 'clustring'. Did you mean 'clustering'\?"):
        load_recipe(tmp_path / "two.yaml")


def test_an_unknown_recipe_lists_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no recipe 'mot'. Did you mean 'mote'.*'smoke'"):
        load_recipe("mot")
    (tmp_path / "circle.yaml").write_text("extends: circle\n")
    with pytest.raises((ValueError, FileNotFoundError), match="circle"):
        load_recipe(tmp_path / "circle.yaml")


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for content, message in (
        (b"- a\n- b", "is invalid: Unsupported value type"),
        (b"a: !!python/object/apply:os.getcwd []", "is invalid: "),
        ("name: größer\n".encode("latin-1"), "is invalid: .*0xf6"),
        (b"extends: mote\ndata: {}\n\nname: x\ndata: {limit: 8}\n", "found duplicate key data.*line 5"),
        (b"tasks:\n  a: {anchor: x}\n  'a': {anchor: y}\n", "found duplicate key a.*line 3"),
    ):
        (tmp_path / "mine.yaml").write_bytes(content)
        with pytest.raises(ValueError, match=f"(?s)The recipe .*mine.yaml .*{message}"):
            load_recipe(tmp_path / "mine.yaml")
