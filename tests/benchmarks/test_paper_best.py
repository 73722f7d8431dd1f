"""benchmarks.paper: possible improvements of a variant, and the search for the best."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers.paths import ROOT, SMALL_ENCODER, SMALL_MOTE
from safetensors.torch import load_file

import mote
from benchmarks.paper import best, data, experiments, improvements, reports, runs, unseen
from benchmarks.paper.reports import make
from mote.remote.configuration_mote import PAPER_INSTRUCTIONS
from mote.training.recipe import Recipe
from mote.training.recipe_files import load_recipe
from mote.training.run_folder import fixed_settings


@pytest.mark.long
def test_improvements_of_a_variant(tmp_path: Path) -> None:
    medium = experiments.SCALES["medium"]
    for name in improvements.IMPROVEMENTS:
        variant = improvements.variant_of(f"mote+{name}")
        assert variant != experiments.VARIANTS["mote"]
        experiments.recipe_of(variant, medium, "S", "D", 42)
    bases = ("em", "ic", "mote", "task-lora", improvements.SEPARATE)
    for name, base in ((name, base) for name in improvements.FOR_ALL for base in bases):
        for part in improvements.parts_of(f"{base}+{name}"):
            experiments.recipe_of(improvements.variant_of(part), medium, "S", "D", 42)
    together = improvements.variant_of("mote+five-tasks+search-expert+shared")
    model = experiments.recipe_of(together, medium, "S", "D", 42).model
    assert model.experts == ["classification", "text_matching", "search"]
    assert model.tasks["search_query"] == model.tasks["search_document"] == model.tasks["clustering"] == "search"
    assert model.tasks["sts"] == model.tasks["summarization"] == "text_matching"
    assert model.instruction_texts["search_query"] == "search_query: "
    matching = improvements.variant_of("mote+five-tasks+matching-by-search")
    model = experiments.recipe_of(matching, medium, "S", "D", 42).model
    assert model.experts == ["classification", "clustering", "search"]
    assert {model.tasks[task] for task in ("text_matching", "sts", "search_query")} == {"search"}
    assert model.instruction_texts["sts"] == model.instruction_texts["text_matching"] == "text_matching: "
    model = experiments.recipe_of(improvements.variant_of("mote+matching-by-search"), medium, "S", "D", 42).model
    assert "text_matching" not in model.tasks
    assert model.instruction_texts["sts"] == "search_query: "  # that of classification stands for another expert
    texts = {**PAPER_INSTRUCTIONS, **model.instruction_texts}
    config = {"tasks": model.tasks, "instructions": {task: texts[task] for task in (*PAPER_INSTRUCTIONS, *model.tasks)}}
    mote.upcycle(str(SMALL_ENCODER), tmp_path / "together", experts=model.experts, **config)  # refuses ambiguous ones
    both = improvements.variant_of("mote+five-tasks+homogeneous+unseen-by-mean")
    recipe = experiments.recipe_of(both, medium, "S", "D", 42)
    assert set(recipe.tasks) == {"retrieval", "classification", "clustering", "paraphrases"}
    assert {task.batches for task in recipe.tasks.values()} == {"homogeneous"}
    assert [one.path for one in recipe.tasks["paraphrases"].datasets] == ["paraphrases/*"]
    assert recipe.tasks["paraphrases"].anchor == "text_matching"
    assert both.made_of == "mote+five-tasks+homogeneous"
    with pytest.raises(ValueError, match="shared changes the training, and must precede"):
        improvements.variant_of("mote+to-mean-0.5+shared")


def test_the_recipe_mote_best_is_that_of_the_trials() -> None:
    variant = improvements.variant_of("mote+five-tasks+matching-by-search+homogeneous")
    tried, shipped = (
        fixed_settings(recipe) for recipe in (load_recipe(variant.recipe, variant.changes), load_recipe("mote-best"))
    )
    moves = {"shared": improvements.SHARED_MOVE}
    moves |= {expert: of_start for expert, (_, of_start) in improvements.MOVES_WITH_SHARED.items()}
    assert load_recipe("mote-best").training.start_weight == moves
    differing = {key for key in tried.keys() | shipped.keys() if tried.get(key) != shipped.get(key)}
    assert {key for key in differing if not key.startswith("training.start_weight")} == {
        "name",
        "model.source",
        "training.batch_size",  # a setting of the scale
        "training.learning_rate",  # chosen by the sweep
    }
    best = runs.best_rate({name: {float(rate): one for rate, one in of.items()} for name, of in SWEEP.items()})
    assert shipped["training.learning_rate"] == best
    assert f"training.batch_size={shipped['training.batch_size']}" in experiments.SCALES["medium"].changes


SWEEP = json.loads((ROOT / "docs/results/medium-bf16/sweep.json").read_text(encoding="utf-8"))


class Validated:
    """Runs whose validation scores are given; unknown variants score 50."""

    stored: tuple[str, ...] = ()
    choosing: "Validated"
    trials: "Validated"

    def __init__(self, **scores: float) -> None:
        self.scores = {name.replace("_", "-").replace("--", "+"): score for name, score in scores.items()}
        self.reported: list[str] = []

    def validated(self, name: str, timeout: float = -1) -> dict[str, float]:
        return {"STS": self.scores.get(name, 50.0)}

    def can_validate(self, name: str) -> bool:
        return name in self.stored or "pretrained" not in name

    def report(self, line: str) -> None:
        self.reported.append(line)


def test_an_improvement_is_kept_if_it_gains() -> None:
    given = Validated(ic=60.0, ic__homogeneous=61.0, ic__homogeneous__distilled=60.5, ic__homogeneous__mined=62.0)
    steps = best.improve(given, best.ORDER, ("ic",))  # type: ignore[arg-type]
    assert [(step["name"], step["kept"]) for step in steps] == [
        ("ic", True),
        ("ic+late", False),
        ("ic+homogeneous", True),
        ("ic+homogeneous+distilled", False),
        ("ic+homogeneous+mined", True),
    ]
    assert best.best_of(steps)["score"] == 62.0
    assert given.reported == ["not tried: ic+homogeneous+mined+pretrained"]
    given.stored = (f"{best.best_of(steps)['name']}+pretrained",)
    assert [*steps, best.Step(name=given.stored[0], score=50.0, kept=False)] == best.improve(given, best.ORDER, ("ic",))  # type: ignore[arg-type]


def test_of_alternatives_the_best_is_kept() -> None:
    given = Validated(mote=60.0, mote__unseen_by_mean=61.0, mote__shared=62.0)
    kept = [step["name"] for step in best.improve(given, best.ORDER, ("mote",)) if step["kept"]]  # type: ignore[arg-type]
    assert kept == ["mote", "mote+shared"]


def test_one_kind_of_data_for_all() -> None:
    given = Validated(em=60.0, ic=61.0, mote=59.0, em__five_tasks=63.0, ic__five_tasks=60.0, mote__five_tasks=60.0)
    found = best.scores_of_data(given)  # type: ignore[arg-type]
    assert found[""] == {"em": 60.0, "ic": 61.0, "mote": 59.0}
    assert best.best_data(found) == "+five-tasks"
    steps = best.improve(given, best.ORDER, ("mote+five-tasks",))  # type: ignore[arg-type]
    assert best.best_of(steps)["name"] == "mote+five-tasks"
    in_full = [best.Step(name="mote+five-tasks+to-start-0.5", score=64.0, kept=True)]
    table = best.validation_tables({"data": found, "steps": {"mote": steps}, "in_full": {"mote": in_full}})
    assert "| **five-tasks** | 63.00 | 60.00 | 60.00 | 61.00 |" in table
    assert "| mote+five-tasks+late | 50.00 | no |" in table
    assert "| mote+five-tasks+to-start-0.5 | 64.00 | yes |" in table


def test_changes_of_the_training_come_before_what_is_made_after_it() -> None:
    given = Validated(mote__unseen_by_mean=60.0, mote__expert_rates__unseen_by_mean=61.0)
    order = (("expert-rates",), *best.ORDER_IN_FULL)
    steps = best.improve(given, order, ("mote+unseen-by-mean",))  # type: ignore[arg-type]
    assert [step["name"] for step in steps] == [
        "mote+unseen-by-mean",
        "mote+expert-rates+unseen-by-mean",
        "mote+expert-rates+shared-rate-0.25+unseen-by-mean",
        "mote+expert-rates+labels-twice+unseen-by-mean",
        "mote+expert-rates+labels-four-times+unseen-by-mean",
        "mote+expert-rates+labels-four-times+shared-rate-0.25+unseen-by-mean",
        "mote+expert-rates+rate-0.5+unseen-by-mean",
        "mote+expert-rates+unseen-near-start",
        "mote+expert-rates+unseen-by-mean+search-to-start-0.25",
        "mote+expert-rates+unseen-by-mean+search-to-start-0.5",
        "mote+expert-rates+unseen-by-mean+to-start-0.25",
        "mote+expert-rates+unseen-by-mean+to-start-0.5",
        "mote+expert-rates+two-epochs+unseen-by-mean",
    ]
    assert best.best_of(steps) == steps[1]
    for step in steps:
        assert improvements.variant_of(step["name"]).made_of is not None


def test_rates_of_what_is_shared_and_of_experts() -> None:
    common = 4e-4
    lower = improvements.variant_of("mote+mined+shared-rate-0.25")
    assert (lower.rate_factor, lower.expert_rate_factor) == (0.25, 4.0)
    of_runs = runs.Runs(replace(experiments.SCALES["medium"], sweep=(common,), chosen_by=None), "S", "D", Path("O"))
    vars(of_runs)["sweep"] = {"mote": {common: 50.0}, "ic": {common: 50.0}}
    assert of_runs.settings_of(lower) == [
        "training.learning_rate=0.0001",
        "training.learning_rate_mapping={'\\.experts\\.': 0.0004}",
    ]
    _, mapping = of_runs.settings_of(improvements.variant_of("ic+shared-rate-0.25"))
    (pattern,) = yaml.safe_load(mapping.partition("=")[2])
    of_dense = {name for name in load_file(SMALL_ENCODER / "model.safetensors") if re.search(pattern, f".{name}")}
    in_mote = (
        re.fullmatch(r"backbone\.(.*\.)experts\.search\.(.*(weight|bias))", name)
        for name in load_file(SMALL_MOTE / "model.safetensors")
    )
    assert of_dense == {f"{found[1]}{found[2]}" for found in in_mote if found}
    assert improvements.variant_of("mote+expert-rates+shared-rate-0.25").expert_rate_factor == 12.0
    both = improvements.variant_of("mote+labels-four-times+shared-rate-0.25")
    assert (both.changes[-2:], both.rate_factor) == (
        ("tasks.classification.weight=4", "tasks.clustering.weight=4"),
        0.25,
    )
    assert improvements.variant_of("ic+rate-0.5").rate_factor == 0.5


@pytest.mark.parametrize(("name", "epochs"), [("mote+two-epochs", 2), ("ic+late+two-epochs", 1)])
def test_two_epochs(name: str, epochs: int) -> None:
    recipe = experiments.recipe_of(improvements.variant_of(name), experiments.SCALES["medium"], "S", "D", 42)
    assert recipe.training.num_train_epochs == epochs


def test_an_improvement_is_not_tried_twice_and_one_model_has_one_name() -> None:
    given = Validated(ic=60.0)
    given.scores["ic+shared-rate-0.25"] = 61.0
    steps = best.improve(given, best.ORDER_IN_FULL, ("ic",))  # type: ignore[arg-type]
    assert [step["name"] for step in steps] == [
        "ic",
        "ic+shared-rate-0.25",
        "ic+labels-twice+shared-rate-0.25",
        "ic+labels-four-times+shared-rate-0.25",
        "ic+rate-0.5+shared-rate-0.25",
        "ic+shared-rate-0.25+to-start-0.25",
        "ic+shared-rate-0.25+to-start-0.5",
        "ic+two-epochs+shared-rate-0.25",
    ]
    one, other = map(improvements.variant_of, ("ic+shared-rate-0.25+rate-0.5", "ic+rate-0.5+shared-rate-0.25"))
    assert one == other
    together = "ic+labels-twice+rate-0.5+two-epochs+shared-rate-0.25"
    for order in ("two-epochs+rate-0.5+shared-rate-0.25", "shared-rate-0.25+rate-0.5+two-epochs"):
        assert improvements.improved("ic+labels-twice", order) == together
    assert improvements.improved("+labels-twice+two-epochs", "rate-0.5") == "+labels-twice+rate-0.5+two-epochs"


def test_dense_models_also_try_the_training_of_mote() -> None:
    of_trials = {
        "mote": "mote+five-tasks+matching-by-search+homogeneous+distilled+unseen-by-mean",
        "ic": "ic+five-tasks+distilled",
    }
    tried = best.candidates(of_trials)
    assert tried["mote"] == (of_trials["mote"],)
    assert tried["em"] == ("em+five-tasks+distilled", "em+five-tasks+homogeneous+distilled")
    given = Validated(**{name.replace("-", "_").replace("+", "__"): 60.0 + len(name) for name in tried["em"]})
    steps = best.improve(given, best.ORDER_IN_FULL, tried["em"])  # type: ignore[arg-type]
    assert [(step["name"], step["kept"]) for step in steps] == [
        (tried["em"][0], False),
        (tried["em"][1], True),
        (f"{tried['em'][1]}+shared-rate-0.25", False),
        (f"{tried['em'][1]}+labels-twice", False),
        (f"{tried['em'][1]}+labels-four-times", False),
        (f"{tried['em'][1]}+labels-four-times+shared-rate-0.25", False),
        (f"{tried['em'][1]}+rate-0.5", False),
        (f"{tried['em'][1]}+to-start-0.25", False),
        (f"{tried['em'][1]}+to-start-0.5", False),
        (f"{tried['em'][1]}+two-epochs", False),
    ]


def test_dense_models_trained_as_the_best_mote_may_move_to_the_start() -> None:
    given = Validated(mote=60.0, mote__labels_twice=61.0)
    given.scores["ic+labels-twice+to-start-0.25"] = 51.0
    given.choosing = given.trials = given
    in_full = best.try_improvements(given)["in_full"]  # type: ignore[arg-type]
    assert best.best_of(in_full["ic"])["name"] == "ic"
    assert [(step["name"], step["kept"]) for step in in_full[f"ic{best.TRAINED_AS_MOTE}"]] == [
        ("ic+labels-twice", True),
        ("ic+labels-twice+to-start-0.25", True),
        ("ic+labels-twice+to-start-0.5", False),
    ]


def test_dense_models_are_scored_at_both_rates() -> None:
    given = Validated(mote=60.0, mote__labels_twice=61.0)
    given.scores.update({"ic+labels-twice+rate-0.5": 52.0, "ic+labels-twice+to-start-0.25": 51.0})
    given.choosing = given.trials = given
    kept = {base: best.best_of(steps)["name"] for base, steps in best.try_improvements(given)["in_full"].items()}  # type: ignore[arg-type]
    assert kept[f"ic{best.TRAINED_AS_MOTE}"] == "ic+labels-twice+to-start-0.25"  # scored, although the other is better
    assert kept[f"ic{best.AT_HALF_RATE}"] == "ic+labels-twice+rate-0.5"
    assert best.scored(kept)[0] == kept["mote"]
    assert {*kept.values(), "ic+labels-twice", "ic+labels-four-times"} <= {*best.scored(kept)}
    of_half_rate = best.scored({**kept, "mote": "mote+labels-twice+rate-0.5"})
    assert {"ic+labels-twice", "em+labels-twice", "em+labels-twice+rate-0.5"} <= {*of_half_rate}


def test_what_is_scored_beside_the_best() -> None:
    best_mote = "mote+five-tasks+matching-by-search+mined+labels-four-times+shared-rate-0.25+to-mean-0.5"
    training = "+five-tasks+mined+labels-four-times"
    assert best.scored({"mote": best_mote, "ic": "ic+five-tasks", "em": f"em{training}"}) == (
        best_mote,
        "ic+five-tasks",
        f"em{training}",
        f"ic{training}+shared-rate-0.25",
        f"ic{training}",
        "ic+five-tasks+mined+labels-twice",
        f"em{training}+shared-rate-0.25",
        "em+five-tasks+mined+labels-twice",
        "task-lora+five-tasks+matching-by-search+mined+labels-four-times",
        "sem+five-tasks+matching-by-search+mined+labels-four-times",
    )
    as_mote = {f"ic{best.TRAINED_AS_MOTE}": f"ic{training}+to-start-0.25"}
    assert best.scored({"mote": best_mote, "ic": "ic+five-tasks", **as_mote})[:3] == (
        best_mote,
        "ic+five-tasks",
        f"ic{training}+to-start-0.25",
    )
    without = best.scored({"mote": "mote+mined", "ic": "ic", "em": "em"})
    assert without == ("mote+mined", "ic", "em", "ic+mined", "em+mined", "task-lora+mined", "sem+mined")


@pytest.mark.long
def test_no_dense_model_with_scores_drops_out(tmp_path: Path) -> None:
    """Also if a better choice on validation sets has replaced it."""
    scale = replace(experiments.SCALES["smoke"], seeds=(42, 43))
    given = runs.Runs(scale, "SOURCE", "DATA", tmp_path)
    test = tmp_path / "runs" / "test"
    test.mkdir(parents=True)
    names = (
        "ic+five-tasks+mined",
        "ic",
        "em+five-tasks",
        "task-lora+five-tasks",
        "mote+five-tasks",
        "tlr",
        "ic-high-rate",
    )
    for name in names:
        for seed in scale.seeds if name != "em+five-tasks" else (42,):
            (test / f"{name}-seed{seed}.json").write_text("{}", encoding="utf-8")
    assert {"ic", "ic-high-rate", "mote+five-tasks", "tlr"} <= {*given.stored()}
    assert "em+five-tasks" not in given.stored()  # one seed of two
    assert best.rivals(given.stored(), "+five-tasks") == ("ic+five-tasks+mined", "task-lora+five-tasks")
    assert best.rivals(given.stored(), "") == ("ic",)


def test_separate_models_divide_the_data_as_the_experts_do() -> None:
    def of(name: str) -> tuple[set[str], tuple[str, ...]]:
        variant = improvements.variant_of(name)
        recipe = experiments.recipe_of(variant, experiments.SCALES["medium"], "S", "D", 42)
        return set(recipe.tasks), variant.datasets

    together = "+five-tasks" + improvements.training_of("mote+matching-by-search+to-mean-0.5", ("matching-by-search",))
    retrieval, classification, clustering = improvements.parts_of(f"sem{together}+homogeneous")
    assert of(retrieval) == ({"retrieval", "paraphrases"}, (*experiments.SEARCH, *experiments.MATCHED))
    assert of(classification) == ({"classification"}, ("classification/*",))
    assert of(clustering) == ({"clustering"}, ("clustering/*",))
    served = [pattern for name in (retrieval, classification, clustering) for pattern in of(name)[1]]
    assert sorted(served) == sorted(experiments.ALL_DATASETS)


@pytest.mark.long
def test_what_question_4_requires() -> None:
    datasets = {f"{kind}{number}": kind for kind in ("Retrieval", "STS") for number in range(4)}

    def model(*gains: float) -> dict[str, list[float]]:
        return {name: [50.0 + index % 3 + gain for gain in gains] for index, name in enumerate(datasets)}

    names = ("mote+mined", "ic", "em+mined", "sem+mined")
    every = {"start": model(-9.0), "start+distilled": model(-1.0), "mote+mined": model(2.1, 2.0, 2.2)}
    every |= {"ic": model(0.5, 0.6, 0.7), "em+mined": model(0.8, 0.9, 0.9), "sem+mined": model(2.2, 2.4, 2.2)}
    every["mote+mined"]["STS1"][0] += 0.1  # a paired test needs some spread
    table = best.best_table(names, ("start", "start+distilled"))

    def holds() -> dict[str, str]:
        lines = best.goal_table(table, runs.Scores(every, datasets)).splitlines()[2:]
        return {line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip(" |") for line in lines}

    assert set(holds().values()) == {"yes"}
    assert "over em, the best of the others in one model: at least +1.0" in holds()
    every["sem+mined"] = model(2.4, 2.4, 2.4)
    every["start+distilled"] |= {"Retrieval0": [60.0], "Retrieval1": [60.0]}
    every["ic"] = {name: [score + 0.3 for score in of_name] for name, of_name in every["mote+mined"].items()}
    assert [what.split(":")[0] for what, verdict in holds().items() if verdict == "yes"] == [
        "above start, on all sets and in retrieval"
    ]
    another = "over each of 1 others, with the seeds that they have: at least +1.0"
    every["task-lora+mined"] = model(1.5)
    assert holds()[another] == "no"
    every["task-lora+mined"] = model(1.0)
    assert holds()[another] == "yes"
    separate = "over three separate models, with the seeds that they have: at least -0.2"
    every["sem+mined"] = model(2.2)
    table = best.best_table(names[:-1], ("start",))
    assert holds()[separate] == "yes"
    del every["sem+mined"]
    assert holds()[separate] == ""  # without scores, nothing is known


def test_a_late_mote_is_dense_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Recipe] = []
    monkeypatch.setattr(runs, "trained", lambda recipe, *_: trained.append(recipe) or Path(recipe.output, "model"))
    given = runs.Runs(experiments.SCALES["smoke"], "SOURCE", "DATA", tmp_path)
    given.model("mote+expert-rates+late", 42)
    dense, experts = trained
    assert (dense.model.kind, experts.model.kind) == ("dense", "mote")
    assert (dense.model.source, experts.model.source) == ("SOURCE", f"{dense.output}/model")
    assert dense.training.num_train_epochs == experts.training.num_train_epochs == 0.5
    assert dense.training.seed != experts.training.seed == 42


def test_unseen_tasks_are_served_at_no_cost_to_seen_ones() -> None:
    def scores(seen: float, unseen_ones: float) -> dict[str, float]:
        return {**dict.fromkeys(unseen.SEEN_TYPES, seen), **dict.fromkeys(unseen.UNSEEN_TYPES, unseen_ones)}

    ways = {"mote": scores(60, 50), "dear": scores(59.4, 70), "cheap": scores(59.6, 55)}
    assert unseen.best_way(ways) == "cheap"
    assert "| **cheap** | 55.00 | 55.00 | 55.00 | 55.00 | 59.60 |" in unseen.ways_table(ways)


@pytest.mark.slow
def test_the_best_recipes_are_looked_for_and_scored(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On few texts and in one step: each start, each kind of data, and each way of making a variant."""
    checkpoints = shared / "checkpoints"
    dense, sides = checkpoints / "paraphrase-MiniLM-L3-v2", ["search_query", "search_document"]
    (tmp_path / "cot" / "siamese" / "pretrained").mkdir(parents=True)
    (tmp_path / "cot" / "siamese" / "pretrained" / "model").symlink_to(dense)
    none = dict.fromkeys(sides, "")
    mote.upcycle(str(dense), tmp_path / "cot" / "mote" / "pretrained" / "model", experts=sides, instructions=none)
    monkeypatch.setattr(data, "PAIRS", {task: dict.fromkeys(of_task, 40) for task, of_task in data.PAIRS.items()})
    monkeypatch.setattr(data, "LABELLED", dict.fromkeys(data.LABELLED, 300))
    monkeypatch.setattr(data, "CORPUS", 10)
    monkeypatch.setattr(runs, "VALIDATION_LIMIT", 5)
    monkeypatch.setattr("benchmarks.paper.best.ORDER", (("distilled",), ("mined",), ("unseen-by-mean",)))
    changes = ("training.batch_size=16", "training.max_steps=1", "model.max_length=32", "validation.limit=5")
    limits: dict[tuple[str, ...], int | None] = {("sts/*",): 5, ("reranking/*",): 5}
    medium = experiments.SCALES["medium"]
    scale = replace(
        medium, changes=changes, sweep=(1e-4, 2e-4), chosen_by=None, text_length=16, seeds=(42,), limits=limits
    )
    teacher = str(checkpoints / "all-MiniLM-L6-v2")
    given = runs.Runs(
        scale, str(dense), str(shared / "data"), tmp_path / "out", teacher=teacher, pretrained=tmp_path / "cot"
    )
    assert "One rate for all: " in make("sweep", given)
    shared = runs.best_rate(given.sweep) == runs.best_rate(given.sweep, "ic")
    assert given.model("ic-own-rate", 42).parent.name == ("ic-seed42" if shared else "ic-own-rate-seed42")
    trials = [given.out / f"trials-{rate:g}" / "mote-seed42" for rate in scale.sweep]
    assert all((folder / "model").is_dir() for folder in trials)
    found = make("best", given)
    assert all(re.search(rf"\| {base}(\+five-tasks)?\+distilled \|", found) for base in ("ic", "mote"))
    (header,) = {line for line in found.splitlines() if line.startswith("|  | start |")}
    columns = header.strip("| ").split(" | ")
    bases = ["start", "mote", "ic", "em", "task-lora", "sem"]
    assert [*dict.fromkeys(name.split("+")[0] for name in columns)] == bases
    learned = any("+distilled" in file.stem for file in given.kept_scores.folder.glob("test/[!s]*.json"))
    starts = [name.replace("+five-tasks", "") for name in columns if name.startswith("start")]
    assert starts == ["start", "start+distilled"][: 1 + learned]
    (trials,) = (file for file in given.kept_scores.folder.glob("validation-trials-*/ic*+distilled.json"))
    assert {*json.loads(trials.read_text())["hashes"]} == {"start", "distilled", "teacher"}
    assert make("best", replace(given, source="lost", teacher=Path(teacher).name, only_stored=True)) == found
    stored = replace(given, only_stored=True)
    for file in given.kept_scores.folder.glob("test/em*.json"):
        file.unlink()
    assert "mote over ic" in (without := make("best", stored))
    assert "mote over em" in found
    assert "mote over em" not in without
    next(given.kept_scores.folder.glob("test/mote*.json")).unlink()
    with pytest.raises(ValueError, match="no stored scores of mote: run `best` without --only-stored"):
        make("best", stored)
    assert given.model("task-lora+pretrained", 42).is_dir()
    ways = make("unseen", given)
    assert "mote+unseen-by-mean" in ways
    assert "mote+five-tasks" in ways
    for improved in ("pretrained+shared", "five-tasks+search-expert+pretrained", "late+pretrained"):
        assert given.model(f"mote+{improved}", 42).is_dir()
    assert given.model("task-lora+late", 42).is_dir()


def test_a_scale_that_repeats_takes_the_choices_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = runs.Runs(
        experiments.SCALES["medium-gpu"], "SOURCE", "DATA", tmp_path, only_stored=True, kept=tmp_path / "medium-gpu"
    )
    with pytest.raises(ValueError, match="no stored scores of scale medium-bf16, which chooses: give --kept"):
        make("best", given)
    scored: list[str] = []

    def try_improvements(chooses: runs.Runs) -> best.Validation:
        assert chooses.scale is experiments.SCALES["medium-bf16"]
        assert chooses.only_stored
        assert chooses.kept == tmp_path / "medium-bf16"
        in_full = {
            base: [best.Step(name=f"{base}+five-tasks+labels-twice", score=1.0, kept=True)] for base in best.BASES
        }
        return best.Validation(data={"+five-tasks": {"em": 1.0}}, steps={}, in_full=in_full)

    def scores(names: tuple[str, ...], of: runs.Runs) -> runs.Scores:
        assert of is given
        scored.extend(names)
        types = {"r": "Retrieval", "s": "STS"}
        every = {name: {"r": [50.0 + number] * 3, "s": [40.0] * 3} for number, name in enumerate(names)}
        return runs.Scores(every, types)

    stored = ["mote+five-tasks+labels-twice", "ic+five-tasks+labels-twice", "ic+five-tasks+labels-twice+two-epochs"]
    monkeypatch.setattr(reports, "try_improvements", try_improvements)
    monkeypatch.setattr(reports, "_scores", scores)
    monkeypatch.setattr(runs.Runs, "stored", lambda self: stored)
    monkeypatch.setattr(runs.Runs, "can_score", lambda self, name: name in stored)
    text = make("best", given)
    assert scored == stored  # those that were chosen, and all other dense models
    assert "| mote over ic+two-epochs | all rows |" in text
    assert "validation" not in text
    assert json.loads((tmp_path / "best.json").read_text()).keys() == {"table"}


def test_a_scale_with_candidates_compares_the_best_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = experiments.SCALES["large-gpu"]
    given = runs.Runs(scale, "SOURCE", "DATA", tmp_path)
    best_one = scale.candidates[2]
    assert all(improvements.variant_of(name).made_of for name in scale.candidates)
    stored = ["ic+five-tasks+homogeneous", "em+five-tasks", scale.candidates[0], "ic", "sem-retrieval+five-tasks"]

    def validated(of: runs.Runs, name: str, timeout: float = -1) -> dict[str, float]:
        return {"STS": 60.0, "Retrieval": 61.0 if name == best_one else 60.5}

    def scores(names: tuple[str, ...], of: runs.Runs) -> runs.Scores:
        every = {name: {"r": [50.0 + number] * 3, "s": [40.0] * 3} for number, name in enumerate(names)}
        return runs.Scores(every, {"r": "Retrieval", "s": "STS"})

    monkeypatch.setattr(reports, "_scores", scores)
    monkeypatch.setattr(runs.Runs, "validated", validated)
    monkeypatch.setattr(runs.Runs, "stored", lambda self: stored)
    text = make("best", given)
    shown = [line.split(" | ")[:2] for line in text.splitlines() if "+unseen-near-start" in line][:4]
    others = [[f"| {name}", "60.25"] for name in scale.candidates if name != best_one]
    assert shown == [[f"| {best_one}", "60.50"], *others]
    table = json.loads((tmp_path / "best.json").read_text())["table"]
    starts = ["start", "start+five-tasks+distilled"]
    assert table["variants"] == [*starts, best_one, "ic+five-tasks+homogeneous", "em+five-tasks"]
