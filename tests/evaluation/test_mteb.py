"""MTEB finds the right expert for each task type, and scores what it scores on the source."""

from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer

mteb = pytest.importorskip("mteb")

from mteb.models import SentenceTransformerEncoderWrapper  # noqa: E402
from mteb.types import PromptType  # noqa: E402

from mote import upcycle  # noqa: E402
from mote.evaluation.tasks import load_tasks  # noqa: E402

TASKS = {  # one dataset of each of the seven types, and the roles in which its texts come
    "Banking77Classification": {None: "classification"},
    "TwentyNewsgroupsClustering.v2": {None: "clustering"},
    "SprintDuplicateQuestions": {None: "classification"},
    "STSBenchmark": {None: "classification"},
    "SummEval": {None: "classification"},
    "NFCorpus": {PromptType.query: "search_query", PromptType.document: "search_document"},
    "AskUbuntuDupQuestions": {PromptType.query: "search_query", PromptType.document: "search_document"},
}


@pytest.mark.filterwarnings("ignore:Task name")  # mteb, about prompts that are not task types of its own
@pytest.mark.filterwarnings("ignore:Some prompts")
@pytest.mark.parametrize("name", TASKS)
def test_each_task_type_and_role_reaches_its_expert(name: str, trained_folder: Path) -> None:
    from datasets import Dataset
    from torch.utils.data import DataLoader

    model = SentenceTransformer(str(trained_folder), trust_remote_code=True)
    wrapper = SentenceTransformerEncoderWrapper(model)
    used: list[tuple[str, str]] = []
    block = model[0].model.backbone.encoder.layer[0]
    for expert, layer in block.experts.items():
        layer.register_forward_hook(lambda *_, expert=expert: used.append((expert, tokens_in_front())))

    features: dict[str, Any] = {}
    model[0].register_forward_pre_hook(lambda _, args: features.update(args[0]))

    def tokens_in_front() -> str:
        return model.tokenizer.decode(features["input_ids"][0], skip_special_tokens=True)

    task = mteb.get_task(name)
    for role, expert in TASKS[name].items():
        used.clear()
        texts = DataLoader(Dataset.from_dict({"text": ["how do whales breathe"]}))
        arguments = {"task_metadata": task.metadata, "hf_split": "test", "hf_subset": "default", "prompt_type": role}
        wrapper.encode(texts, **arguments, show_progress_bar=False)
        assert [expert_used for expert_used, _ in used] == [expert]
        instruction = model[0].config.instruction_of(expert)
        assert used[0][1].replace(" ", "").startswith(instruction.replace(" ", ""))


def scores(path: Path, data: Path, sets: list[str]) -> dict[str, float]:
    """Score a model on sets of the shared data, in percent with two decimals as published."""
    model = SentenceTransformer(str(path), trust_remote_code=True)
    results = mteb.evaluate(model, load_tasks(data, sets), cache=None, show_progress_bar=False)
    return {result.task_name: round(100 * result.get_score(), 2) for result in results.task_results}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # mteb's own: its result format
def test_two_fast_official_sets_score_what_is_published(shared: Path) -> None:
    source = shared / "checkpoints" / "all-MiniLM-L6-v2"
    published = {"STS12": 72.37, "STS17": 87.59}
    assert scores(source, shared / "data", ["STS12", "STS17"]) == pytest.approx(published, abs=0.011)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # mteb's own: its result format
def test_without_instructions_the_scores_are_the_published_ones_of_the_source(shared: Path, tmp_path: Path) -> None:
    source = shared / "checkpoints" / "all-MiniLM-L6-v2"
    experts = ["classification", "clustering", "search_query", "search_document"]
    folder = upcycle(
        str(source), tmp_path / "mote", instructions=dict.fromkeys(experts, ""), default_task="classification"
    )
    published = {"NFCorpus": 31.59, "STSBenchmark": 82.03}
    for path in (source, folder):
        assert scores(path, shared / "data", list(published)) == pytest.approx(published, abs=0.011)
