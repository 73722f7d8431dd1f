"""InfoNCE against its closed form, and what is excluded from its denominator."""

import math
from typing import Any

import pytest
import torch
from helpers.families import make_different
from helpers.paths import SMALL_ENCODER, SMALL_MOTE
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch.nn.functional import cosine_similarity

from mote.training.cleaning import INFO_NCE, LABEL_TYPES, LOSSES
from mote.training.losses import InfoNCELoss, build_loss, check_loss
from mote.training.task_settings import TaskSettings
from mote.training.trainer_settings import TrainingSettings

ANCHORS = ["how do whales breathe", "price of gold", "boil an egg", "who wrote Hamlet", "Tokyo weather"]
POSITIVES = ["Whales come up for air.", "Gold rose to a new high.", "Seven minutes.", "Shakespeare did.", "It rains."]
NEGATIVES = ["Fish have gills.", "Silver fell.", "Fry the bacon.", "Goethe wrote Faust.", "Paris is sunny."]


def columns_of(*columns: torch.Tensor) -> list[list[torch.Tensor]]:
    return [[column] for column in columns]


def info_nce(**settings: Any) -> InfoNCELoss:
    return InfoNCELoss(torch.nn.Identity(), 0.1, **settings)  # type: ignore[arg-type]


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


def test_closed_form(embeddings: list[torch.Tensor]) -> None:
    anchors, *documents = embeddings
    everything = [[(column, row) for column in range(2) for row in range(5)] for _ in range(5)]
    assert info_nce().calculate_loss(columns_of(*embeddings)).item() == pytest.approx(
        by_hand(anchors, documents, everything), abs=1e-5
    )


def test_known_false_negatives_are_excluded(embeddings: list[torch.Tensor]) -> None:
    anchors, *documents = embeddings
    texts = [[i, 10 + i, 20 + i] for i in range(5)]
    groups = [100, 101, 102, 103, 104]
    texts[1][1] = 10  # the positive of row 1 is that of row 0
    texts[2][1] = 0  # the positive of row 2 is the anchor of row 0
    texts[3][2] = 14  # the hard negative of row 3 is the positive of row 4
    groups[4] = 103  # rows 3 and 4 have one label
    allowed = [[(column, row) for column in range(2) for row in range(5)] for _ in range(5)]
    for i, left_out in {0: [(0, 1), (0, 2)], 1: [(0, 0)], 3: [(0, 4), (1, 3)], 4: [(0, 3), (1, 3)]}.items():
        allowed[i] = [candidate for candidate in allowed[i] if candidate not in left_out]
    loss = info_nce().calculate_loss(columns_of(*embeddings), labels_of(texts, groups))
    assert loss.item() == pytest.approx(by_hand(anchors, documents, allowed), abs=1e-5)
    assert loss.item() != pytest.approx(info_nce().calculate_loss(columns_of(*embeddings)).item(), abs=1e-3)


def test_a_positive_of_the_same_anchor_is_a_false_negative_in_every_row(embeddings: list[torch.Tensor]) -> None:
    """Rows 0 and 1 have one anchor, rows 1 and 2 one positive: so that of row 2 is right for row 0 too."""
    anchors, positives, _ = embeddings
    labels = labels_of([[0, 10], [0, 11], [2, 11], [3, 13], [4, 14]], [0, 0, 2, 3, 4])
    allowed = [[(0, row) for row in range(5)] for _ in range(5)]
    for i, left_out in {0: (1, 2), 1: (0, 2), 2: (1,)}.items():
        allowed[i] = [(0, row) for row in range(5) if row not in left_out]
    loss = info_nce().calculate_loss(columns_of(anchors, positives), labels)
    assert loss.item() == pytest.approx(by_hand(anchors, [positives], allowed), abs=1e-5)
    backwards = [[(0, row) for row in range(5)] for _ in range(5)]
    for i, left_out in {0: (1,), 1: (0, 2), 2: (0, 1)}.items():  # the anchor of row 0 has the positive of row 2
        backwards[i] = [(0, row) for row in range(5) if row not in left_out]
    both = (by_hand(anchors, [positives], allowed) + by_hand(positives, [anchors], backwards)) / 2
    symmetric = info_nce(symmetric=True).calculate_loss(columns_of(anchors, positives), labels)
    assert symmetric.item() == pytest.approx(both, abs=1e-5)


def test_scores_are_not_rounded_under_autocast(embeddings: list[torch.Tensor]) -> None:
    exact = info_nce().calculate_loss(columns_of(*embeddings))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert info_nce().calculate_loss(columns_of(*embeddings)).item() == exact.item()


def test_without_in_batch_negatives_only_given_ones_count(embeddings: list[torch.Tensor]) -> None:
    anchors, *documents = embeddings
    own = [[(0, row), (1, row)] for row in range(5)]
    loss = info_nce(in_batch_negatives=False).calculate_loss(columns_of(*embeddings))
    assert loss.item() == pytest.approx(by_hand(anchors, documents, own), abs=1e-5)


def test_symmetric(embeddings: list[torch.Tensor]) -> None:
    anchors, positives, _ = embeddings
    everything = [[(0, row) for row in range(5)] for _ in range(5)]
    expected = (by_hand(anchors, [positives], everything) + by_hand(positives, [anchors], everything)) / 2
    loss = info_nce(symmetric=True).calculate_loss(columns_of(anchors, positives))
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_symmetric_excludes_known_anchors(embeddings: list[torch.Tensor]) -> None:
    anchors, positives, _ = embeddings
    labels = labels_of([[0, 10], [1, 10], [2, 12], [3, 13], [4, 14]], [0, 1, 2, 4, 4])
    allowed = [[(0, row) for row in range(5)] for _ in range(5)]
    allowed[3].remove((0, 4))
    allowed[4].remove((0, 3))
    allowed[0].remove((0, 1))  # rows 0 and 1 have one positive: it is right for both anchors, and they for it
    allowed[1].remove((0, 0))
    expected = (by_hand(anchors, [positives], allowed) + by_hand(positives, [anchors], allowed)) / 2
    loss = info_nce(symmetric=True).calculate_loss(columns_of(anchors, positives), labels)
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_chunks_with_backward_give_the_loss_and_the_gradients_of_the_whole(embeddings: list[torch.Tensor]) -> None:
    labels = labels_of([[i, 10 + i % 3, 20 + i] for i in range(5)], list(range(5)))
    whole = [column.clone().requires_grad_() for column in embeddings]
    loss = info_nce(symmetric=True).calculate_loss(columns_of(*whole), labels)
    loss.backward()
    parts = [column.clone().requires_grad_() for column in embeddings]
    chunked = info_nce(symmetric=True, mini_batch_size=2).calculate_loss(
        [list(column.split(2)) for column in parts], labels, with_backward=True
    )
    assert chunked.item() == pytest.approx(loss.item(), abs=1e-6)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)


# On a real model ---------------------------------------------------------------------------------------------------


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


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    assert len(one) > 10
    for name in one:
        difference = (one[name] - other[name]).abs().max().item()
        assert difference <= within, f"{name}: {difference}"


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_gradient_caching_equals_the_whole_batch(model: SentenceTransformer, size: int) -> None:
    labels = labels_of([[i, 10 + i % 3, 20 + i] for i in range(5)], list(range(5)))
    plain = gradients(model, InfoNCELoss(model, 0.05, symmetric=True), labels)
    cached = gradients(model, InfoNCELoss(model, 0.05, symmetric=True, mini_batch_size=size), labels)
    assert_same(plain, cached)
    kept = InfoNCELoss(model, 0.05, symmetric=True, mini_batch_size=size, gradient_caching=False)
    assert not kept.uses_gradient_cache
    assert_same(plain, gradients(model, kept, labels))


def test_without_gradient_caching_a_text_is_embedded_once(model: SentenceTransformer) -> None:
    rows: list[int] = []
    handle = model.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0]["input_ids"])))
    gradients(model, InfoNCELoss(model, 0.05, mini_batch_size=2), None)
    cached = list(rows)
    rows.clear()
    gradients(model, InfoNCELoss(model, 0.05, mini_batch_size=2, gradient_caching=False), None)
    handle.remove()
    assert rows == [2, 2, 1] * 3
    assert cached == rows * 2


def test_it_equals_the_librarys_loss_without_false_negatives(model: SentenceTransformer) -> None:
    theirs = gradients(model, MultipleNegativesRankingLoss(model, scale=20.0), None)
    ours = gradients(model, InfoNCELoss(model, 0.05), None)
    assert_same(theirs, ours)


@pytest.mark.parametrize(("size", "caching"), [(None, True), (2, True), (2, False)])
def test_matryoshka_is_the_sum_over_dimensions(model: SentenceTransformer, size: int | None, caching: bool) -> None:
    task = TaskSettings(datasets=[{"path": "x"}], anchor="search_query", batches="homogeneous", temperature=0.05)
    training = TrainingSettings(mini_batch_size=size, gradient_caching=caching, matryoshka=[256, 64])
    value = gradients(model, build_loss(model, task, training), None)["loss"].item()
    with torch.no_grad():
        columns = [model(column)["sentence_embedding"] for column in features_of(model)]
    expected = sum(
        InfoNCELoss(model, 0.05).calculate_loss(columns_of(*(column[:, :dim] for column in columns))).item()
        for dim in (256, 64)
    )
    assert value == pytest.approx(expected, abs=1e-4)


# From the recipe ---------------------------------------------------------------------------------------------------


def test_halves_are_the_models_own(model: SentenceTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    for width, expected in ((16, [16, 8]), (384, [384, 192, 96]), (1024, [1024, 512, 256, 128, 64])):
        monkeypatch.setattr(model, "get_embedding_dimension", lambda width=width: width)
        loss: Any = build_loss(model, settings(), TrainingSettings(matryoshka="halves"))
        assert list(loss.matryoshka_dims) == expected


def settings(**changes: Any) -> TaskSettings:
    return TaskSettings.model_validate(
        {"datasets": ["x"], "anchor": "classification", "batches": "heterogeneous", **changes}
    )


def test_temperature_of_the_task_is_used(model: SentenceTransformer) -> None:
    for temperature in (0.03, 0.06):
        loss = build_loss(model, settings(temperature=temperature), TrainingSettings())
        expected = gradients(model, MultipleNegativesRankingLoss(model, scale=1 / temperature), None)["loss"]
        assert gradients(model, loss, None)["loss"].item() == pytest.approx(expected.item(), rel=1e-4)


def test_replicas_always_cache(model: SentenceTransformer) -> None:
    training = TrainingSettings(batch_size=64)
    assert not build_loss(model, settings(), training).uses_gradient_cache
    loss = build_loss(model, settings(), training, processes=2, replicated=True)
    assert loss.uses_gradient_cache
    assert loss.mini_batch_size == 32
    training = TrainingSettings(batch_size=64, mini_batch_size=8, gradient_caching=False)
    assert not build_loss(model, settings(), training).uses_gradient_cache
    loss = build_loss(model, settings(), training, processes=2, replicated=True)
    assert loss.uses_gradient_cache
    assert loss.mini_batch_size == 8


def test_any_loss_of_the_library_by_name(model: SentenceTransformer) -> None:
    loss = build_loss(model, settings(loss="CoSENTLoss", loss_arguments={"scale": 7.0}), TrainingSettings())
    assert type(loss).__name__ == "CoSENTLoss"
    assert loss.scale == 7.0
    cached = build_loss(model, settings(loss="CachedMultipleNegativesRankingLoss"), TrainingSettings(mini_batch_size=3))
    assert cached.mini_batch_size == 3
    symmetric = build_loss(
        model, settings(loss="CachedMultipleNegativesSymmetricRankingLoss"), TrainingSettings(mini_batch_size=3), 2
    )
    assert (symmetric.mini_batch_size, symmetric.gather_across_devices) == (3, True)  # though it is deprecated
    projected = build_loss(model, settings(loss="EmbedDistillLoss"), TrainingSettings(), label_dim=384)
    assert projected.projection_dim == 384
    assert build_loss(model, settings(loss="EmbedDistillLoss"), TrainingSettings(), label_dim=256).projection is None


def test_matryoshka_needs_a_teacher_of_the_models_width(model: SentenceTransformer) -> None:
    for loss in LOSSES["embeddings"]:
        task = settings(loss=loss, teacher={"source": "user/teacher"})
        for width in (128, 512):
            given = settings(loss=loss, teacher=task.teacher, loss_arguments={"projection_dim": width})
            for of_teacher, projecting in ((width, task), (None, given)):
                with pytest.raises(ValueError, match=rf"{loss} projects .* {width} dimensions, but .*matryoshka trunc"):
                    build_loss(model, projecting, TrainingSettings(matryoshka="halves"), label_dim=of_teacher)
        assert isinstance(build_loss(model, task, TrainingSettings(), label_dim=512).projection, torch.nn.Linear)
        truncated = build_loss(model, task, TrainingSettings(matryoshka="halves"), label_dim=256)
        assert gradients(model, truncated, torch.randn(5, 256))["loss"] > 0


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        ("MultipleNegativesRankingLoss", {"hardness_strength": "high"}, "'hardness_strength': 'high'"),
        ("CoSENTLoss", {"scal": 1}, "unexpected keyword argument 'scal'"),
        ("GISTEmbedLoss", {}, "missing 1 required positional argument: 'guide'"),
        ("GISTEmbedLoss", {"guide": str(SMALL_MOTE)}, "has code of its own"),
    ],
)
def test_invalid_arguments_are_named(
    model: SentenceTransformer, loss: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_loss(model, settings(loss=loss, loss_arguments=arguments), TrainingSettings())


@pytest.mark.parametrize("name", [name for name in LABEL_TYPES if name != INFO_NCE and not name.startswith("Sparse")])
def test_every_other_loss_of_the_library_can_be_made(model: SentenceTransformer, name: str) -> None:
    arguments = {"guide": str(SMALL_ENCODER)} if "GIST" in name else {}
    teacher = {"source": "user/teacher"} if name in LOSSES["embeddings"] else None
    task = settings(loss=name, loss_arguments=arguments, teacher=teacher)
    check_loss("a", task)
    assert type(build_loss(model, task, TrainingSettings())).__name__ == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "CoSENTLos"}, "unknown loss 'CoSENTLos'. Did you mean 'CoSENTLoss'"),
        ({"loss": "MarginMSELoss"}, "unknown loss 'MarginMSELoss'"),
        ({"loss_arguments": {"scale": 1}}, "InfoNCE takes no loss_arguments"),
        ({"symmetric": True, "in_batch_negatives": False}, "a symmetric loss needs in-batch negatives"),
        ({"loss": "MSELoss"}, "EmbedDistillLoss and MSELoss need a teacher"),
        ({"teacher": {"source": "none"}}, "has the loss InfoNCE: .* others take none"),
    ],
)
def test_invalid_losses_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_loss("sts", settings(**changes))
