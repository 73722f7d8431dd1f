"""`mote evaluate`: scores of real mteb runs, what is kept of them, and what is made of them."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT, SMALL_ENCODER

pytest.importorskip("mteb")

import sentence_transformers
from safetensors.numpy import load_file, save_file
from scipy import stats

import mote
from mote import Evaluation, evaluate
from mote.cli import main
from mote.evaluation.charts import draw_gains
from mote.evaluation.evaluate import write

# Scores ---------------------------------------------------------------------------------------------------------------

TYPES = {"s1": "STS", "s2": "STS", "r1": "Retrieval", "x1": "BitextMining"}


def three_models(**settings: Any) -> Evaluation:
    return Evaluation(
        scores={
            "dense": {"s1": 50.0, "s2": 60.0, "r1": 20.0, "x1": 10.0},
            "mote": {"s1": 51.0, "s2": 64.0, "r1": 20.0, "x1": 9.0},
            "part": {"s1": 40.0, "r1": 30.0, "x1": 10.0},
        },
        types=TYPES,
        metrics=dict.fromkeys(TYPES, "main"),
        failures={"part": {"s2": "ValueError: no"}},
        **settings,
    )


def test_means_are_over_the_datasets_that_all_models_have() -> None:
    evaluation = three_models()
    assert evaluation.datasets == ["r1", "s1", "s2", "x1"]  # the paper's types in the paper's order, then others
    assert evaluation.common == ["r1", "s1", "x1"]
    assert evaluation.means("mote") == {"Retrieval": 20.0, "STS": 51.0, "BitextMining": 9.0}
    assert evaluation.mean("mote") == pytest.approx(80 / 3)
    without = Evaluation({name: evaluation.scores[name] for name in ("dense", "mote")}, TYPES)
    assert without.means("mote")["STS"] == 57.5
    assert without.mean("dense") == 35.0
    assert without.mean_over_types("mote") == pytest.approx((57.5 + 20 + 9) / 3)


def test_a_model_without_any_score_does_not_take_the_others_theirs() -> None:
    evaluation = Evaluation({"a": {"s1": 1.0}, "b": {}}, {"s1": "STS"}, failures={"b": {"s1": "no"}}, reference="a")
    assert evaluation.means("a") == {"STS": 1.0}
    assert evaluation.means("b") == {}
    assert [line.split() for line in evaluation.table().splitlines() if line.startswith("STS")] == [
        ["STS", "(1)", "1.00", "-"]
    ]
    assert "no dataset has a score of both" in evaluation.table()
    assert json.loads(evaluation.to_json())["means"]["b"]["mean over datasets"] is None


def test_gains_are_over_what_both_have() -> None:
    assert three_models().gains("dense") == {
        "mote": {"r1": 0.0, "s1": 1.0, "s2": 4.0, "x1": -1.0},
        "part": {"r1": 10.0, "s1": -10.0, "x1": 0.0},
    }


def test_the_table_in_markdown() -> None:
    evaluation = three_models(reference="dense", settings={"limit": 10, "dtype": "bfloat16", "mteb": ["2.26.1"]})
    table = evaluation.table("markdown")
    assert table.splitlines()[2:9] == [
        "|  | dense | mote | part |",
        "| --- | ---: | ---: | ---: |",
        "| Retrieval (1) | 20.00 | 20.00 (+0.00) | **30.00** (+10.00) |",
        "| STS (1) | 50.00 | **51.00** (+1.00) | 40.00 (-10.00) |",
        "| BitextMining (1) | **10.00** | 9.00 (-1.00) | **10.00** (+0.00) |",
        "| mean over datasets (3) | **26.67** | **26.67** (+0.00) | **26.67** (+0.00) |",
        "| mean over types (3) | **26.67** | **26.67** (+0.00) | **26.67** (+0.00) |",
    ]
    heading = table.splitlines()[0]
    assert all(part in heading for part in ("mteb 2.26.1", "bfloat16", "--limit 10", "gain over dense"))
    assert "- Means are over those 3 of 4 datasets" in table
    assert "- Failed: part on s2: ValueError: no" in table
    assert "| s2 | STS | main | 60.00 | **64.00** (+4.00) | failed |" in evaluation.per_dataset("markdown")


def test_the_table_in_text() -> None:
    evaluation = Evaluation({"a": {"s1": 50.0}, "b": {"s1": 51.0}}, {"s1": "STS"}, reference="a")
    lines = evaluation.table().splitlines()
    assert lines[4] == "STS (1)                 50.00   51.00* (+1.00)"
    assert len({len(line) for line in lines[4:7]}) == 1
    alone = Evaluation({"a": {"s1": 50.0}}, {"s1": "STS"}).table()
    assert "*" not in alone
    assert "gain" not in alone


def test_scores_go_through_json() -> None:
    evaluation = three_models(reference="dense", settings={"limit": None, "seconds": {"dense": {"s1": 0.5}}})
    content = json.loads(evaluation.to_json())
    assert Evaluation.from_json(evaluation.to_json()) == evaluation
    assert content["means"]["mote"]["STS"] == 51.0
    assert [one["model"] for one in content["comparisons"]] == ["mote", "part"]
    with pytest.raises(ValueError, match="no scores of `mote evaluate`: scores, types"):
        Evaluation.from_json("{}")


def test_scores_that_do_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="without a task type: s9"):
        Evaluation({"a": {"s9": 1.0}}, {"s1": "STS"})
    with pytest.raises(ValueError, match="'c' is none of the models: a"):
        Evaluation({"a": {"s1": 1.0}}, {"s1": "STS"}, reference="c")


# Statistics -----------------------------------------------------------------------------------------------------------


def of_scores(ours: list[float], theirs: list[float]) -> Evaluation:
    names = [f"d{index}" for index in range(len(ours))]
    scores = {"ours": dict(zip(names, ours, strict=True)), "theirs": dict(zip(names, theirs, strict=True))}
    return Evaluation(scores, dict.fromkeys(names, "STS"))


def test_p_values_are_scipys() -> None:
    random = np.random.default_rng(0)
    theirs = random.uniform(20, 90, 30)
    ours = theirs + random.normal(0.5, 1, 30)
    compared = of_scores(ours.tolist(), theirs.tolist()).compare("ours", "theirs")
    assert compared.welch == pytest.approx(stats.ttest_ind(ours, theirs, equal_var=False, alternative="greater").pvalue)
    assert compared.paired_t == pytest.approx(stats.ttest_rel(ours, theirs, alternative="greater").pvalue)
    assert compared.wilcoxon == pytest.approx(stats.wilcoxon(ours, theirs, alternative="greater").pvalue)
    assert compared.paired_t < 0.05 < compared.welch  # the spread between datasets hides the gain from Welch


def test_p_values_by_hand() -> None:
    compared = of_scores([1.0, 3.0, 5.0], [0.0, 1.0, 2.0]).compare("ours", "theirs")
    assert (compared.gain, compared.higher, compared.lower, compared.datasets) == (2.0, 3, 0, 3)
    assert compared.wilcoxon == pytest.approx(1 / 8)  # one of the 8 ways to sign three gains
    # t = 2 / (1 / √3) = √12 with two degrees of freedom, for which P(T > t) = 1/2 - t / (2 √(t² + 2))
    assert compared.paired_t == pytest.approx(0.5 - 12**0.5 / (2 * 14**0.5))
    # t = (3 - 1) / √(4/3 + 1/3) with (5/3)² / ((4/3)² / 2 + (1/3)² / 2) = 50/17 degrees of freedom
    assert compared.welch == pytest.approx(stats.t.sf(2 / (5 / 3) ** 0.5, 50 / 17))


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([], [], "no dataset has a score of both"),
        ([2.0], [1.0], "1 dataset: +1.00 on average, higher on 1, lower on 0; a test needs 2 datasets or more"),
        ([2.0, 3.0], [1.0, 2.0], "paired t none (no spread), Wilcoxon 0.250"),
        ([1.0, 2.0], [1.0, 2.0], "Welch 0.500, paired t none (no spread), Wilcoxon none (no spread)"),
        ([1.0, 1.0], [1.0, 1.0], "Welch none (no spread)"),
    ],
)
def test_where_a_test_says_nothing(ours: list[float], theirs: list[float], said: str) -> None:
    assert said in str(of_scores(ours, theirs).compare("ours", "theirs"))


# Charts ---------------------------------------------------------------------------------------------------------------


def test_the_chart_of_gains(tmp_path: Path) -> None:
    from matplotlib.image import imread

    random = np.random.default_rng(0)
    types = {f"dataset-{index:02}": TYPES[["s1", "r1", "x1"][index % 3]] for index in range(60)}
    scores = {name: dict(zip(types, random.uniform(30, 60, 60).tolist(), strict=True)) for name in "abc"}
    draw_gains(Evaluation(scores, types), "a", tmp_path / "gains.png")
    image = imread(tmp_path / "gains.png")
    assert image.shape[0] > 60 * 20  # pixels for each dataset
    colours = {tuple(pixel) for pixel in (255 * image[..., :3]).round().astype(int).reshape(-1, 3).tolist()}
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)} <= colours
    with pytest.raises(ValueError, match="no gains to draw"):
        draw_gains(Evaluation({"a": {}}, types), "a", tmp_path / "none.png")


def test_long_and_strange_names_stay_in_the_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig

    def remember(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", remember)
    names = ["dense", r"cost $\no-formula", *(f"runs/a-long-name-of-a-model-{index}/model" for index in range(5))]
    draw_gains(Evaluation({name: {"s1": 50.0 + len(name)} for name in names}, TYPES), "dense", tmp_path / "gains.png")
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == names[1:]
    box, (width, _) = legend.get_window_extent(), 120 * drawn[0].get_size_inches()
    assert 0 <= box.x0 < box.x1 <= width


# Runs -----------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small real data: a set of STS in three parts, and clusters of questions."""
    folder = tmp_path_factory.mktemp("data")
    questions = read_rows(ROOT / "examples" / "data" / "clustering" / "open_trivia" / "train.jsonl.gz")
    write_rows(
        folder / "clustering" / "trivia" / "test.jsonl.gz",
        [{name: row[name] for name in ("text", "label")} for row in questions[:200]],
    )
    pairs = read_rows(ROOT / "examples" / "data" / "sts" / "sts17_en" / "test.jsonl.gz")
    for part in range(3):
        write_rows(folder / "sts" / f"part{part}" / "test.jsonl.gz", pairs[50 * part : 50 * part + 50])
    return folder


@pytest.fixture
def changed_encoder(tmp_path: Path) -> Path:
    """The small encoder with other weights, under the same name."""
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "other" / "small-encoder")
    change_weights(folder)
    return folder


def change_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "word_embeddings" in name)
    noise = np.random.default_rng(0).normal(0, weights[name].std(), weights[name].shape)
    weights[name] = (weights[name] + noise).astype(weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def results(folder: Path) -> list[Path]:
    return [path for path in (folder / "results").rglob("*.json") if path.name != "model_meta.json"]


def test_scores_are_kept_and_the_second_run_computes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    first = evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path, report=lines.append)
    assert len(results(tmp_path)) == len(first.datasets) == 4
    assert len([line for line in lines if " s" in line and "/4 " in line]) == 4

    def not_again(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded again")

    with monkeypatch.context() as patch:
        patch.setattr(sentence_transformers.SentenceTransformer, "__init__", not_again)
        second = evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path, report=lines.append)
    assert second == first
    assert len([line for line in lines if line.endswith("(kept)")]) == 4
    monkeypatch.setattr(sentence_transformers.SentenceTransformer, "__init__", not_again)
    with pytest.raises(ValueError, match="the model is loaded again"):
        evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path, overwrite=True)


def test_what_a_score_depends_on_is_not_mixed_up(data: Path, changed_encoder: Path, tmp_path: Path) -> None:
    out, own = tmp_path / "out", shutil.copytree(data, tmp_path / "data")
    models = [str(SMALL_ENCODER), str(changed_encoder)]
    both = evaluate(models, data=own, tasks=["part0", "trivia"], out=out)
    assert both.models == ["examples/small-encoder", "other/small-encoder"]  # two folders of one name
    first, second = (both.scores[label] for label in both.models)
    assert all(first[name] != second[name] for name in both.datasets)
    assert len(results(out)) == 4

    one = {"tasks": ["part0", "trivia"], "data": own, "out": out}
    cut = evaluate([models[0]], limit=20, **one)
    bf16 = evaluate([models[0]], dtype="bfloat16", **one)
    assert not cut.failures
    assert not bf16.failures
    assert len(results(out)) == 8
    assert cut.scores["small-encoder"] != bf16.scores["small-encoder"] != first
    assert (cut.settings["limit"], bf16.settings["dtype"]) == (20, "bfloat16")

    # the second model alone scores as it does after another: tasks start from the same random numbers
    alone = evaluate([models[1]], data=own, tasks=["part0", "trivia"], out=tmp_path / "alone")
    assert alone.scores["small-encoder"] == pytest.approx(second)

    path = own / "sts" / "part0" / "test.jsonl.gz"
    write_rows(path, read_rows(path)[:20])  # other data: scored again, though there is a complete result
    again = evaluate([models[0]], **one)
    assert [again.scores["small-encoder"][name] == first[name] for name in again.datasets] == [True, False]

    change_weights(changed_encoder)
    assert evaluate([models[1]], **one).scores["small-encoder"] != second


def test_two_runs_into_one_folder_do_not_share_unfinished_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[list[str]] = []
    move = Path.replace

    def remember(part: Path, target: Path) -> Path:
        parts[-1].append(part.name)
        return move(part, target)

    monkeypatch.setattr(Path, "replace", remember)
    for process in (1, 2):
        parts.append([])
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        write(three_models(reference="dense"), tmp_path)
    assert len(parts[0]) == 4
    assert not set(parts[0]) & set(parts[1])


def test_a_damaged_result_is_computed_again(data: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"data": data, "tasks": ["part0"], "out": tmp_path}
    first = evaluate([str(SMALL_ENCODER)], **arguments)
    (path,) = results(tmp_path)
    for damaged in (path.read_text()[:100], "", "[]", "null", "{}", '{"task_name": "part0"}'):
        path.write_text(damaged)
        assert evaluate([str(SMALL_ENCODER)], **arguments).scores == first.scores


def test_where_results_cannot_be_written_the_run_ends(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Results cannot be written to "):
        evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path / "file")
    (tmp_path / "results").write_text("")
    with pytest.raises(OSError, match="The result of clustering-trivia cannot be written to"):
        evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path)


def test_failures_do_not_stop_the_others(
    data: Path, fresh_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = shutil.copytree(data, tmp_path / "data")
    (own / "sts" / "part1" / "test.jsonl.gz").write_bytes(b"no gzip")
    model = shutil.copytree(fresh_folder, tmp_path / "without-a-prompt")  # its experts cannot be found for one type
    settings = json.loads((model / "config_sentence_transformers.json").read_text())
    settings["prompts"].pop("Clustering")
    settings["prompts"].pop("clustering", None)
    (model / "config_sentence_transformers.json").write_text(json.dumps(settings))
    out = tmp_path / "out"
    status = main(["evaluate", str(SMALL_ENCODER), str(model), "--data", str(own), "--out", str(out)])
    printed = capsys.readouterr()
    assert status == 1
    assert "error: 3 of 8 scores failed: small-encoder on sts-part1: " in printed.err
    assert "without-a-prompt on clustering-trivia: " in printed.err
    evaluation = Evaluation.from_json((out / "scores.json").read_text())
    assert evaluation.common == ["sts-part0", "sts-part2"]
    assert set(evaluation.failures["without-a-prompt"]) == {"sts-part1", "clustering-trivia"}
    assert "clustering-trivia" in evaluation.scores["small-encoder"]
    assert "Means are over those 2 of 4 datasets" in printed.out
    assert (out / "datasets.md").read_text().count("failed") == 3


def test_a_model_that_gives_no_numbers_has_no_score(tmp_path: Path) -> None:
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "without-numbers")
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.LayerNorm.bias"][0] = np.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    data = ROOT / "examples" / "data"  # retrieval would be scored 0
    evaluation = evaluate([str(folder)], data=data, tasks=["beir/arxiv", "sts17_en"], limit=3, out=tmp_path / "out")
    assert set(evaluation.failures["without-numbers"]) == {"beir-arxiv", "STS17", "pair-sts17_en"}
    assert all(
        "embeddings that are not finite" in message for message in evaluation.failures["without-numbers"].values()
    )
    assert not results(tmp_path / "out")


def test_a_model_that_gives_equal_similarities_is_told_so(data: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "constant")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: np.ones_like(weight) if name.endswith("bias") else 0 * weight for name, weight in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    evaluation = evaluate([str(folder)], data=data, tasks=["part0"], out=tmp_path / "out")
    message = "ValueError: the score is nan: all scores of the set, or all that the model gives, are equal"
    assert evaluation.failures["constant"] == {"sts-part0": message}


def test_the_command_writes_tables_scores_and_a_chart(fresh_folder: Path, tmp_path: Path) -> None:
    models, data = [str(SMALL_ENCODER), str(fresh_folder)], str(ROOT / "examples" / "data")
    models[0] = f"dense={models[0]}"
    command = [
        sys.executable,
        "-m",
        "mote",
        "evaluate",
        *models,
        "--data",
        data,
        "--task",
        "sts/*",
        "--task",
        "summarization/*",
    ]
    options = ["--reference", "dense", "--out", str(tmp_path), "--limit", "30"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # libraries are silent
    assert "--limit 30" in done.stdout
    evaluation = Evaluation.from_json((tmp_path / "scores.json").read_text())
    assert evaluation.reference == "dense"
    assert evaluation.table() in done.stdout
    assert evaluation.table("markdown") in (tmp_path / "table.md").read_text()
    assert (tmp_path / "gains.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "gains.png").stat().st_size > 5000
    assert not list(tmp_path.glob(".*"))


def test_a_killed_run_goes_on(data: Path, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "mote", "evaluate", str(SMALL_ENCODER), "--data", str(data), "--out", str(killed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "/4 " in line:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert 1 <= len(results(killed)) < 4
    lines: list[str] = []
    resumed = evaluate([str(SMALL_ENCODER)], data=data, out=killed, report=lines.append)
    assert any(line.endswith("(kept)") for line in lines)
    assert resumed.scores["small-encoder"] == pytest.approx(
        evaluate([str(SMALL_ENCODER)], data=data, out=whole).scores["small-encoder"]
    )


def test_an_interrupted_run_says_how_to_go_on(data: Path, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if "2/4" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"2 of 4 scores are kept in .*; the same command goes on from there"):
        evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path, report=interrupt)
    assert len(results(tmp_path)) == 2


# Bad arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --data FOLDER, --benchmark NAME, or --task"),
        (["--data", "DATA", "--benchmark", "MTEB(eng, v1)"], "--data and --benchmark say two things"),
        (["--benchmark", "MTEB(english, v1)"], "MTEB has no benchmark 'MTEB(english, v1)'; the nearest are "),
        (["--task", "NFCorpuss"], "MTEB has no task 'NFCorpuss'; the nearest are NFCorpus"),
        (["--benchmark", "MTEB(eng, v1)", "--task", "Bank?"], "No task of MTEB(eng, v1) is called 'Bank?'"),
        (["--task", "STS12", "--limit", "5"], "--limit cuts sets of --data alone"),
        (["--data", "DATA", "--task", "sts/part9"], "sts/part9"),
        (["--data", "nowhere"], "nowhere"),
        (["--data", "DATA", "--reference", "gpt"], "The reference gpt is none of the models: small-encoder"),
        (["--data", "DATA", "--device", "cuda:99"], "There is no device 'cuda:99' here, but cpu"),
        (["--data", "DATA", "--dtype", "int3"], "There is no dtype 'int3': expected float32"),
        (["--data", "DATA", "--limit", "0"], "The limit is 0: expected 1 or more"),
        (["--data", "DATA", "--batch-size", "0"], "The batch size is 0"),
    ],
)
def test_bad_arguments(words: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(data) if word == "DATA" else word for word in words]
    assert main(["evaluate", str(SMALL_ENCODER), *words]) == 1
    assert said in capsys.readouterr().err


def test_models_that_are_none(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(SMALL_ENCODER, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"nothing")
    deeper = shutil.copytree(SMALL_ENCODER, tmp_path / "deeper")
    settings = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 4}))
    adapter, adapted = tmp_path / "adapter", shutil.copytree(SMALL_ENCODER, tmp_path / "adapted")
    for folder in (adapter, adapted / "0_Transformer"):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(SMALL_ENCODER)}))
    for path, said in {
        str(tmp_path / "empty"): "has neither config.json nor modules.json",
        str(broken): f"{broken} does not load in Sentence-Transformers",
        str(
            deeper
        ): f"{deeper} lacks weights that its config asks for, and random ones would take their place: encoder",
        str(adapter): f"{adapter} holds an adapter (adapter_config.json), not the model that it adapts: merge",
        str(adapted): f"{adapted} holds an adapter",
        "nobody/nothing": "nobody/nothing is not a folder, and the Hub cannot be reached",
        "no such/folder/here": "is neither a folder nor an id on the Hub",
    }.items():
        out = tmp_path / "out"
        assert main(["evaluate", str(SMALL_ENCODER), path, "--data", str(data), "--out", str(out)]) == 1
        printed = capsys.readouterr()
        assert said in printed.err
        assert "Model 1" not in printed.out  # known before the work begins


def test_without_mteb_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("mote.evaluation.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(mote.evaluation, "evaluate", raising=False)
    monkeypatch.setitem(sys.modules, "mteb", None)
    assert main(["evaluate", str(SMALL_ENCODER), "--data", "x"]) == 1
    assert 'pip install "mote-embeddings[evaluate]"' in capsys.readouterr().err
