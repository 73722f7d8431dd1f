"""Settings of a MoTE on disk: default task, instructions."""

import shutil
import signal
from pathlib import Path

import pytest
from helpers.checkpoints import contents, dense_checkpoint, read_json, trusted
from helpers.kills import stop_everywhere
from helpers.on_disk import export

import mote
from mote.checkpoints.provenance import read_steps
from mote.cli import main

TEXTS = ["whales breathe air", "bread"]


@pytest.fixture
def place(trained_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained_folder, tmp_path / "own" / "small-mote")


def test_everything_that_names_the_settings_follows(place: Path) -> None:
    instructions = {"clustering": "Topic: ", "sts": ""}
    assert mote.configure(place, default_task="sts", instructions=instructions) == place
    config = read_json(place / "config.json")
    assert (config["default_task"], config["instructions"]["clustering"]) == ("sts", "Topic: ")
    prompts = read_json(place / "config_sentence_transformers.json")["prompts"]
    assert (prompts["clustering"], prompts["Clustering"]) == ("Topic: ", "Topic: ")
    assert (prompts["sts"], prompts["STS"], prompts["summarization"]) == ("", "", "classification: ")
    card = (place / "README.md").read_text()
    assert "| `clustering` | `clustering` | `Topic: ` |" in card
    assert "Texts without a task: the task `sts`." in card
    step = read_steps(place)[-1]
    assert (step["step"], step["settings"]) == ("set", {"default_task": "sts", "instructions": instructions})
    words = "--default-task sts --instruction 'clustering=Topic: ' --instruction sts="
    assert step["command"] == f"mote set small-mote {words} --overwrite"
    model = trusted(place)
    assert (model.encode(["Topic: bread"]) == model.encode(["bread"], prompt_name="clustering")).all()
    mote.configure(place, default_task="none")
    assert read_json(place / "config.json")["default_task"] is None
    assert read_steps(place)[-1]["command"] == "mote set small-mote --default-task none --overwrite"


def test_texts_that_may_not_pick_their_expert(place: Path) -> None:
    assert main(["set", str(place), "--default-task", "sts", "--no-route-by-text"]) == 0
    closed = trusted(place)
    text = "clustering: whales"
    assert (closed.encode(text) == closed.encode(text, task="sts")).all()
    command = "mote set small-mote --default-task sts --no-route-by-text --overwrite"
    assert read_steps(place)[-1]["command"] == command
    by_itself = "A text that already begins with an instruction is routed to the expert of that instruction."
    assert by_itself not in (place / "README.md").read_text()
    mote.configure(place, route_by_text=True)
    assert by_itself in (place / "README.md").read_text()
    assert (trusted(place).encode(text) == closed.encode(text, task="clustering")).all()
    mote.configure(place, instructions=dict.fromkeys(read_json(place / "config.json")["instructions"], ""))
    assert "begins with an instruction" not in (place / "README.md").read_text()


def test_reworded_prompts_stay(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that are saved with the model, unless the instruction itself is set anew."""

    def prompts_in(folder: Path) -> dict[str, str]:
        return read_json(folder / "config_sentence_transformers.json")["prompts"]

    own = prompts_in(place)
    reworded = {"clustering": "Group: ", "Clustering": "Topic: ", "search_document": "Text: "}
    trusted(place, prompts=reworded).save(str(tmp_path / "saved"))
    before = prompts_in(tmp_path / "saved")
    assert before == {**own, **reworded}
    mote.configure(tmp_path / "saved", default_task="sts", instructions={"classification": "C: "})
    assert prompts_in(tmp_path / "saved") == {
        name: "C: " if text == "classification: " else text for name, text in before.items()
    }
    exported = prompts_in(export(tmp_path / "saved", tmp_path / "dense", expert="clustering"))
    assert exported == {"clustering": "Group: ", "Clustering": "Topic: ", "query": "Group: ", "document": "Group: "}
    assert "does not keep" not in caplog.text
    lost = f"The result does not keep 'Group: ', the prompt 'clustering' of {tmp_path / 'saved'}"
    mote.transform(tmp_path / "saved", tmp_path / "added", mote.experts.add, "groups", instruction="Group: ")
    told = prompts_in(tmp_path / "added")  # 'Group: ' would now pick the new expert
    assert (told["clustering"], told["Clustering"], told["groups"]) == ("clustering: ", "Topic: ", "Group: ")
    assert lost in caplog.messages
    caplog.clear()
    mote.configure(tmp_path / "saved", instructions={"clustering": "New: "})
    told = prompts_in(tmp_path / "saved")
    assert (told["clustering"], told["Clustering"], told["search_document"]) == ("New: ", "New: ", "Text: ")
    assert lost in caplog.messages


def test_another_expert_for_a_task(place: Path) -> None:
    before = trusted(place)
    assert main(["set", str(place), "--task", "sts=clustering", "--task", "topics=clustering"]) == 0
    model = trusted(place)
    for task in ("sts", "topics"):
        assert (model.encode(TEXTS, task=task) == before.encode(TEXTS, task="clustering")).all()
    assert (model.encode(TEXTS, prompt_name="sts") == before.encode(TEXTS, prompt_name="clustering")).all()
    assert (model.encode(TEXTS, task="summarization") == before.encode(TEXTS, task="classification")).all()


def test_what_cannot_be_set(upcycled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(upcycled)
    for words, message in (
        (["--task", "sts=clusterin"], "'clusterin'"),
        (["--instruction", "topics=x"], "Unknown task of an instruction: 'topics'. Available: 'classification', "),
    ):
        assert main(["set", str(upcycled), *words]) == 1
        assert message in capsys.readouterr().err
    assert contents(upcycled) == before


def test_of_a_folder_with_one_expert(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trusted(place, model_kwargs={"experts": ["clustering"]}).save_pretrained(str(tmp_path / "one"))
    assert main(["set", str(tmp_path / "one"), "--default-task", "sts"]) == 1
    assert "Task 'sts' needs the expert 'classification', which was not loaded" in capsys.readouterr().err
    assert main(["set", str(tmp_path / "one"), "--default-task", "clustering"]) == 0
    assert 'encode(texts, prompt_name="clustering")' in capsys.readouterr().out


def test_killed_at_any_moment(upcycled: Path, tmp_path: Path) -> None:
    out = tmp_path / "place" / "tiny-mote"
    killed = stop_everywhere(out, "set", out, "--default-task", "sts", old=upcycled)
    assert {result.status for result in killed} == {-signal.SIGKILL}
    assert {result.out for result in killed} == {"old", "absent", "new"}
    between_two_renames = [result.replaced for result in killed if result.out == "absent"]
    assert between_two_renames == [["old"]]


def test_files_that_cannot_grow(upcycled: Path, tmp_path: Path) -> None:
    out = tmp_path / "place" / "tiny-mote"
    for result in stop_everywhere(out, "set", out, "--default-task", "sts", how="file size", old=upcycled):
        assert (result.status, result.out, result.left) == (1, "old", [])


def test_a_token_routed_model_never_asks_the_text(tmp_path: Path) -> None:
    folder = mote.upcycle(str(dense_checkpoint(tmp_path / "dense")), tmp_path / "routed", routing="token")
    for settings in ({"route_by_text": False}, {"tasks": {"sts": "clustering"}}):
        with pytest.raises(ValueError, match=rf"{next(iter(settings))} has no effect here"):
            mote.configure(folder, **settings)
