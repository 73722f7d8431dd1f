"""InfoNCE against its closed form, and what is excluded from its denominator."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.families import make_different
from helpers.runs import built_loss
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.nn.functional import cosine_similarity

from mote.training import losses
from mote.training.cleaning import INFO_NCE, LABEL_TYPES
from mote.training.losses import InfoNCELoss, check_loss
from mote.training.recipe import TaskSettings

ANCHORS = ["how do whales breathe", "price of gold", "boil an egg", "who wrote Hamlet", "Tokyo weather"]
POSITIVES = ["Whales come up for air.", "Gold rose to a new high.", "Seven minutes.", "Shakespeare did.", "It rains."]
NEGATIVES = ["Fish have gills.", "Silver fell.", "Fry the bacon.", "Goethe wrote Faust.", "Paris is sunny."]


def task_of(**settings: Any) -> TaskSettings:
    return TaskSettings(datasets=["x"], anchor="sts", batches="homogeneous", **{"temperature": 0.1, **settings})


def info_nce(columns: list[torch.Tensor], labels: torch.Tensor | None = None, **task: Any) -> float:
    loss = InfoNCELoss(torch.nn.Identity(), task_of(**task))  # type: ignore[arg-type]
    return loss.calculate_loss([[column] for column in columns], labels).item()


def labels_of(texts: list[list[int]], groups: list[int]) -> torch.Tensor:
    """Identities of each row's texts, and its group."""
    return torch.tensor([[*row, group] for row, group in zip(texts, groups, strict=True)])


def by_hand(anchors: torch.Tensor, documents: list[torch.Tensor], allowed: list[list[tuple[int, int]]]) -> float:
    """Sum -log softmax, candidate by candidate: `allowed[i]` lists (column, row) of anchor i's candidates."""
    total = 0.0
    for i, candidates in enumerate(allowed):
        scores = {
            (column, row): math.exp(cosine_similarity(anchors[i], documents[column][row], dim=0).item() / 0.1)
            for column, row in candidates
        }
        total -= math.log(scores[0, i] / sum(scores.values()))
    return total / len(allowed)


@pytest.fixture
def embeddings() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(5, 8, dtype=torch.float32) for _ in range(3)]


OTHERS = {i: [(column, row) for column in range(2) for row in range(5) if row != i] for i in range(5)}
"""Row → the texts of other rows."""


@pytest.mark.parametrize(
    ("in_batch", "texts", "groups", "left_out", "left_out_backwards"),
    [
        (True, None, None, {}, {}),
        (False, None, None, OTHERS, None),
        (  # Rows 0 and 1 have one positive, that of row 2 is the anchor of row 0, the hard negative of row 3 is the
            # positive of row 4, and rows 3 and 4 have one label.
            True,
            [[0, 10, 20], [1, 10, 21], [2, 0, 22], [3, 13, 14], [4, 14, 24]],
            [100, 101, 102, 103, 103],
            {0: [(0, 1), (0, 2)], 1: [(0, 0)], 3: [(0, 4), (1, 3)], 4: [(0, 3), (1, 3)]},
            None,
        ),
        (  # Rows 0 and 1 have one anchor, rows 1 and 2 one positive: so that of row 2 is right for row 0, too.
            True,
            [[0, 10], [0, 11], [2, 11], [3, 13], [4, 14]],
            [0, 0, 2, 3, 4],
            {0: [(0, 1), (0, 2)], 1: [(0, 0), (0, 2)], 2: [(0, 1)]},
            {0: [(0, 1)], 1: [(0, 0), (0, 2)], 2: [(0, 0), (0, 1)]},
        ),
        (  # Rows 0 and 1 have one positive, rows 3 and 4 one label.
            True,
            [[0, 10], [1, 10], [2, 12], [3, 13], [4, 14]],
            [0, 1, 2, 4, 4],
            {0: [(0, 1)], 1: [(0, 0)], 3: [(0, 4)], 4: [(0, 3)]},
            {0: [(0, 1)], 1: [(0, 0)], 3: [(0, 4)], 4: [(0, 3)]},
        ),
    ],
)
def test_closed_form(
    in_batch: bool, texts: Any, groups: Any, left_out: Any, left_out_backwards: Any, embeddings: list[torch.Tensor]
) -> None:
    columns = embeddings[: 3 if texts is None else len(texts[0])]
    anchors, *documents = columns

    def candidates(columns: int, excluded: dict[int, list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
        everything = [(column, row) for column in range(columns) for row in range(5)]
        return [[one for one in everything if one not in excluded.get(i, [])] for i in range(5)]

    labels = None if texts is None else labels_of(texts, groups)
    forwards = by_hand(anchors, documents, candidates(len(documents), left_out))
    loss = info_nce(columns, labels, in_batch_negatives=in_batch)
    assert loss == pytest.approx(forwards, abs=1e-5)
    if left_out:
        assert loss != pytest.approx(info_nce(columns), abs=1e-3)
    if left_out_backwards is not None:
        backwards = by_hand(documents[0], [anchors], candidates(1, left_out_backwards))
        assert info_nce(columns, labels, symmetric=True) == pytest.approx((forwards + backwards) / 2, abs=1e-5)


def test_scores_are_not_rounded_under_autocast(embeddings: list[torch.Tensor]) -> None:
    exact = info_nce(embeddings)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert info_nce(embeddings) == exact


@pytest.fixture(scope="module")
def model(fresh_folder: Any) -> SentenceTransformer:
    model = SentenceTransformer(str(fresh_folder), trust_remote_code=True)
    make_different(model[0].model)
    return model.eval()  # no dropout, so that two ways of computing can be compared


def features_of(model: SentenceTransformer) -> list[dict[str, Any]]:
    tasks = ("search_query", "search_document", "search_document")
    return [
        model.preprocess(texts, task=task) for texts, task in zip((ANCHORS, POSITIVES, NEGATIVES), tasks, strict=True)
    ]


def gradients(model: SentenceTransformer, loss: torch.nn.Module, labels: torch.Tensor | None) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    value = loss(features_of(model), labels)
    value.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"loss": value.detach()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert len(one) > 10
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_gradient_caching_equals_the_whole_batch(model: SentenceTransformer, size: int) -> None:
    labels = labels_of([[i, 10 + i % 3, 20 + i] for i in range(5)], list(range(5)))
    task = task_of(symmetric=True)
    plain = gradients(model, InfoNCELoss(model, task), labels)
    assert_same(plain, gradients(model, InfoNCELoss(model, task, mini_batch_size=size), labels))
    kept = InfoNCELoss(model, task, mini_batch_size=size, gradient_caching=False)
    assert not kept.uses_gradient_cache
    assert_same(plain, gradients(model, kept, labels))


def test_it_equals_the_librarys_loss_without_false_negatives(model: SentenceTransformer) -> None:
    theirs = gradients(model, MultipleNegativesRankingLoss(model, scale=20), None)
    assert_same(theirs, gradients(model, built_loss(model, temperature=0.05), None))


@pytest.mark.parametrize(("size", "caching"), [(None, True), (2, True), (2, False)])
def test_matryoshka_is_the_sum_over_dimensions(model: SentenceTransformer, size: int | None, caching: bool) -> None:
    training = {"mini_batch_size": size, "gradient_caching": caching, "matryoshka": [256, 64]}
    value = gradients(model, built_loss(model, training, temperature=0.1), None)["loss"].item()
    with torch.no_grad():
        columns = [model(column)["sentence_embedding"] for column in features_of(model)]
    expected = sum(info_nce([column[:, :dim] for column in columns]) for dim in (256, 64))
    assert value == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("width", "halves"), [(16, [16, 8]), (384, [384, 192, 96]), (1024, [1024, 512, 256, 128, 64])])
def test_halves_are_the_models_own(
    width: int, halves: list[int], model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "get_embedding_dimension", lambda: width)
    assert list(built_loss(model, {"matryoshka": "halves"}).matryoshka_dims) == halves


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "processes", lambda: SimpleNamespace(num_processes=2))


@pytest.mark.parametrize(
    ("training", "caches", "size"),
    [({}, False, 0), ({"mini_batch_size": 8}, True, 8), ({"mini_batch_size": 8, "gradient_caching": False}, False, 8)],
)
def test_several_processes_cache_as_one_does(
    training: dict[str, Any], caches: bool, size: int, model: SentenceTransformer, replicas: None
) -> None:
    loss = built_loss(model, {"batch_size": 64, **training})
    assert (loss.uses_gradient_cache, loss.mini_batch_size, loss.gather_across_devices) == (caches, size, True)


@pytest.mark.parametrize("name", [name for name in LABEL_TYPES if name != INFO_NCE])
def test_every_other_loss_of_the_library_can_be_made(model: SentenceTransformer, name: str, replicas: None) -> None:
    """With the settings of the recipe that it takes."""
    task: dict[str, Any] = {"loss": name}
    if LABEL_TYPES[name] == "embeddings":
        task["teacher"] = {"source": "user/teacher"}
        assert built_loss(model, teacher_dimension=384, **task).projection_dim == 384
        assert built_loss(model, teacher_dimension=256, **task).projection is None
    check_loss("a", task_of(**task))
    loss = built_loss(model, {"mini_batch_size": 3}, **task)
    assert type(loss).__name__ == name
    if name.startswith("Cached"):
        assert (loss.mini_batch_size, loss.gather_across_devices) == (3, True)
    if name == "CoSENTLoss":
        assert built_loss(model, **task, loss_arguments={"scale": 7.0}).scale == 7.0


def test_invalid_losses_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loss": "CoSENTLos"}, "unknown loss 'CoSENTLos'. Did you mean 'CoSENTLoss'"),
        ({"loss_arguments": {"scale": 1}}, "InfoNCE takes no loss_arguments"),
        ({"symmetric": True, "in_batch_negatives": False}, "a symmetric loss needs in-batch negatives"),
        ({"loss": "TripletLoss", "in_batch_negatives": False}, "settings of InfoNCE, not of TripletLoss"),
        ({"loss": "MSELoss"}, "MSELoss needs a teacher"),
        ({"teacher": {"source": "none"}}, "InfoNCE takes no teacher"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            check_loss("sts", task_of(**changes))
    with pytest.raises(ValueError, match="unknown loss of sparse vectors 'CoSENTLoss'"):
        check_loss("sts", task_of(loss="CoSENTLoss"), sparse=True)
