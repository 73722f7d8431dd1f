"""Experts that are not in use leave the device, and come when they are called."""

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import to_bin, trusted
from helpers.families import all_families, batch, fresh_mote, trained_mote
from helpers.offloading import FOUR, assert_same, experts_in, offloaded, outputs, saved
from helpers.on_disk import VERBS
from helpers.paths import SMALL_ENCODER
from transformers import AutoModel

import mote
from mote import upcycle
from mote.inference.stores import CpuStore, DiskStore
from mote.remote.modeling_mote import MoTEModel
from mote.remote.token_routing_mote import TokenRoutedConfig, TokenRoutedModel


@all_families
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_equal_to_the_model_in_memory(name: str, to: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name, shards=to == "disk", mote_layers="every_other")
    tasks = [*random.Random(0).choices(FOUR, k=12), ["a", "c", "c", "b"]]
    found = offloaded(tmp_path, to, attn_implementation=model.config._attn_implementation)
    assert_same(outputs(found, tasks), outputs(model, tasks))
    assert experts_in(found) == 1
    assert mote.experts.parameter_counts(found) == mote.experts.parameter_counts(model)


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_experts_that_are_token_routed(to: str, trained_hierarchical: Path) -> None:
    model = mote.load(trained_hierarchical)
    found = offloaded(trained_hierarchical, to)
    tasks = ["clustering", "query", "sts", ["clustering", "sts", "query", "clustering"]]
    for one in (model, found):  # torch's grouped products depend on how weights are aligned, here as in mapped files
        for weight in one.parameters():
            weight.data = weight.data.clone()
    assert_same(outputs(found, tasks), outputs(model, tasks))
    assert found.offloading.on_device == ["search_query"]  # the last group of a batch
    mote.restore(found)
    found.set_experts_implementation("eager")
    assert (outputs(found, ["query"])[0] - outputs(model, ["query"])[0]).abs().max() <= 1e-5


def test_memory_is_free_at_once(tmp_path: Path) -> None:
    """The other experts' weights are held by nothing, not even by a cycle that waits for a collection."""
    model = saved(tmp_path)
    gc.collect()
    others = [weakref.ref(weight) for name in FOUR[1:] for weight in model.blocks[0].experts[name].parameters()]
    gc.disable()
    try:
        mote.offload(model, "cpu")
        assert not any(weight() is not None for weight in others)
    finally:
        gc.enable()


def test_the_least_recently_used_leaves(tmp_path: Path) -> None:
    saved(tmp_path)
    model = offloaded(tmp_path, keep=2)
    resident = []
    for task in "abacbd":
        outputs(model, [task])
        resident.append("".join(model.offloading.on_device))
        assert set(model.blocks[0].experts) == set(model.offloading.on_device)
        assert experts_in(model) == 2
    assert resident == ["ba", "ab", "ba", "ac", "cb", "bd"]


@pytest.mark.long
def test_compiled(tmp_path: Path) -> None:
    expected = outputs(saved(tmp_path), [*FOUR, *FOUR])
    model: Any = torch.compile(offloaded(tmp_path), dynamic=True, backend="eager")  # type: ignore[call-overload]
    for found, other in zip(outputs(model, [*FOUR, *FOUR]), expected, strict=True):
        torch.testing.assert_close(found, other, atol=1e-6, rtol=0)


def test_an_error_within_a_call_lets_go_of_the_expert(tmp_path: Path) -> None:
    expected = outputs(saved(tmp_path), FOUR)
    model = offloaded(tmp_path)
    with torch.inference_mode():
        assert_same(outputs(model, FOUR), expected)
    for task in FOUR:
        with pytest.raises(IndexError), torch.no_grad():
            model(input_ids=torch.tensor([[10**6]]), task=task)
    assert_same(outputs(model, FOUR), expected)


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_restored_is_as_before(to: str, tmp_path: Path) -> None:
    expected = saved(tmp_path)
    model = offloaded(tmp_path, to)
    outputs(model, ["c"])
    mote.restore(model)
    assert model.offloading is None
    assert list(model.state_dict()) == list(expected.state_dict())
    assert all(torch.equal(t, expected.state_dict()[key]) for key, t in model.state_dict().items())
    assert_same(outputs(model, FOUR), outputs(expected, FOUR))
    mote.restore(model)  # once more changes nothing
    mote.offload(model, to, keep=4)
    assert model.offloading.on_device == FOUR
    mote.offload(model, to)  # with other settings
    assert_same(outputs(model, FOUR), outputs(expected, FOUR))
    assert experts_in(model) == 1


def test_gradients_are_refused_and_restored_experts_train_unless_frozen(tmp_path: Path) -> None:
    model = saved(tmp_path)
    for block in model.blocks:
        block.experts["c"].requires_grad_(False)
    before = {key: weight.requires_grad for key, weight in model.named_parameters()}
    model.weight_files = tuple(map(str, tmp_path.glob("model-*.safetensors")))
    mote.offload(model, "disk")
    outputs(model, ["c"])
    with pytest.raises(ValueError, match=r"torch\.no_grad\(\).*mote\.restore\(model\)"):
        model(**batch(), task="a")
    mote.restore(model)
    assert {key: weight.requires_grad for key, weight in model.named_parameters()} == before
    model(**batch(), task="b").pooler_output.sum().backward()


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_saved_again_it_is_the_same_file_by_file(to: str, shards: bool, tmp_path: Path) -> None:
    saved(tmp_path / "one", shards=shards)
    model = offloaded(tmp_path / "one", to)
    outputs(model, ["d"])
    model.save_pretrained(tmp_path / "two", max_shard_size="5KB" if shards else "5GB")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        if name != "config.json":  # a model that was never loaded leaves out the type
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    one, two = (MoTEModel.from_pretrained(tmp_path / name).config.to_diff_dict() for name in ("one", "two"))
    assert one | {"_name_or_path": None} == two | {"_name_or_path": None}
    assert model.offloading.on_device == ["d"]


def test_to_another_type(tmp_path: Path) -> None:
    expected = outputs(saved(tmp_path).to(torch.bfloat16), FOUR)
    for to in ("cpu", "disk"):
        assert_same(outputs(offloaded(tmp_path, to).to(torch.bfloat16), FOUR), expected)
        model = offloaded(tmp_path, to, dtype=torch.bfloat16)
        assert_same(outputs(model, FOUR), expected)
        model.save_pretrained(tmp_path / to)
        assert_same(outputs(MoTEModel.from_pretrained(tmp_path / to), FOUR), expected)
        mote.restore(model)
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_copied_out_of_stores(dtype: torch.dtype, tmp_path: Path) -> None:
    model = trained_mote("bert")
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    weights, key = model.state_dict(), "backbone.encoder.layer.0.experts.alpha.output.dense.weight"
    for store in (CpuStore(weights), DiskStore(tmp_path.glob("*.safetensors"))):
        store.check(weights)
        found = {name: torch.empty_like(weight).to(dtype) for name, weight in weights.items()}
        found[key] = torch.empty(weights[key].shape[::-1], dtype=dtype).T  # not contiguous
        store.copy_into(found)
        assert all(torch.equal(found[name], weight.to(dtype)) for name, weight in weights.items())


def test_chosen_experts_alone(tmp_path: Path) -> None:
    expected = outputs(saved(tmp_path), ["b", "d"])
    model = mote.load(tmp_path, experts=["d", "b"], offload="disk")
    assert_same(outputs(model, ["b", "d"]), expected)
    with pytest.raises(ValueError, match="was not loaded"):
        outputs(model, ["a"])
    assert mote.load(tmp_path, experts=["d", "b"], offload="disk", keep=3).offloading.on_device == ["b", "d"]


def test_verbs_that_read_see_all_experts(tmp_path: Path) -> None:
    expected, model = saved(tmp_path), offloaded(tmp_path)
    for read in (lambda model: model, mote.experts.average, lambda model: mote.experts.export(model, "c")):
        found, other = read(model).state_dict(), read(expected).state_dict()
        assert list(found) == list(other)
        assert all(torch.equal(found[key], weight) for key, weight in other.items())
    assert model.offloading.on_device == ["a"]
    assert experts_in(model) == 1


def test_compressed_experts(tmp_path: Path) -> None:
    for name, settings in {"rank": {"rank": 4}, "bits": {"bits": 8}}.items():
        model = mote.experts.compress(trained_mote("bert", experts=FOUR), **settings)
        model.save_pretrained(tmp_path / name)
        assert_same(outputs(offloaded(tmp_path / name), FOUR), outputs(model, FOUR))
        restored = offloaded(tmp_path / name)
        mote.restore(restored)
        assert_same(outputs(restored, FOUR), outputs(model, FOUR))


def test_remote_code(tmp_path: Path) -> None:
    expected = outputs(saved(tmp_path), FOUR)
    model = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(model) is not MoTEModel
    mote.offload(model, "disk")
    assert_same(outputs(model, ["b", "c"]), expected[1:3])
    assert len(model.offloading.on_device) == 1
    mote.restore(model)
    assert_same(outputs(model, FOUR), expected)


def test_sentence_transformers(tmp_path: Path) -> None:
    upcycle(str(SMALL_ENCODER), tmp_path / "mote")
    expected = trusted(tmp_path / "mote")
    model: Any = mote.load_encoder(tmp_path / "mote", offload="disk", trust_remote_code=True)
    for task in ("search_query", "clustering", "search_document"):
        assert (model.encode(["one", "two"], task=task) == expected.encode(["one", "two"], task=task)).all()
    assert model[0].model.offloading.on_device == ["search_document"]
    model.save(str(tmp_path / "again"))
    first, second = ({path.name for path in (tmp_path / name).glob("model-*")} for name in ("mote", "again"))
    assert first == second
    model.half().encode(["one"], task="clustering")


def test_in_memory_to_disk_only_as_in_the_file(tmp_path: Path) -> None:
    expected = outputs(saved(tmp_path), FOUR)
    model = MoTEModel.from_pretrained(tmp_path)
    mote.offload(model, "disk", keep=2)
    assert_same(outputs(model, FOUR), expected)
    mote.restore(model)
    with torch.no_grad():
        next(model.blocks[1].experts["c"].parameters()).add_(1)
    before = outputs(model, FOUR)
    with pytest.raises(ValueError, match=r"experts\.c\..*save_pretrained"):
        mote.offload(model, "disk")
    assert_same(outputs(model, FOUR), before)
    with pytest.raises(ValueError, match="save_pretrained"):
        mote.offload(fresh_mote("bert"), "disk")
    to_bin(tmp_path)
    for load in (lambda: mote.load(tmp_path, offload="disk"), lambda: mote.offload(mote.load(tmp_path), "disk")):
        with pytest.raises(ValueError, match=r"differs from the safetensors files .*, or is not in them"):
            load()


def test_weights_changed_meanwhile_are_not_lost(tmp_path: Path) -> None:
    saved(tmp_path)
    model = offloaded(tmp_path)
    with torch.no_grad():
        next(model.blocks[0].experts["a"].parameters()).add_(1)
    changed = outputs(model, ["a"])
    with pytest.raises(ValueError, match=r"mote\.restore"):
        outputs(model, ["b"])
    assert_same(outputs(model, ["a"]), changed)
    mote.restore(model)
    assert_same(outputs(model, ["a"]), changed)


def test_modules_replaced_meanwhile_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    saved(tmp_path)
    model = offloaded(tmp_path)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["output.dense"]))
    with pytest.raises(ValueError, match="was changed while experts are offloaded"), torch.no_grad():
        adapted(**batch(), task="b")
    adapted = peft.get_peft_model(MoTEModel.from_pretrained(tmp_path), peft.LoraConfig(target_modules=["output.dense"]))
    with pytest.raises(ValueError, match="adapters"):
        mote.offload(adapted.base_model.model, "disk")


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_changes_under_a_running_model(gone: bool, tmp_path: Path) -> None:
    expected = outputs(saved(tmp_path), FOUR)
    model = offloaded(tmp_path)
    error, message = (FileNotFoundError, "model-expert-b-.*safetensors") if gone else (ValueError, "has changed since")
    file = next(tmp_path.glob("model-expert-b-*"))
    file.unlink() if gone else file.write_bytes(file.read_bytes())
    for _ in range(2):
        with pytest.raises(error, match=message):
            outputs(model, ["b"])
    assert_same(outputs(model, ["a"]), expected[:1])  # the one in memory is still there
    with pytest.raises(error, match=message):
        mote.restore(model)
    assert model.offloading.on_device == ["a"]


def test_what_is_refused(tmp_path: Path) -> None:
    whole = trained_mote("bert")
    whole.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Did you mean 'disk'"):
        mote.offload(whole, "disc")
    with pytest.raises(ValueError, match="token-routed"):
        mote.offload(TokenRoutedModel(TokenRoutedConfig(backbone_config=whole.config.backbone_config)), "disk")
    model = offloaded(tmp_path)
    for name in ("add", "merge", "remove", "rename", "weights"):
        with pytest.raises(ValueError, match=r"mote\.restore"):
            VERBS[name](model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_copies_are_pinned_and_leave_the_device(tmp_path: Path) -> None:
    model = saved(tmp_path).cuda()
    before = torch.cuda.memory_allocated()
    size = sum(t.nbytes for block in model.blocks for t in block.experts["a"].parameters())
    mote.offload(model, "cpu")
    assert before - torch.cuda.memory_allocated() >= 3 * size
    assert all(weight.is_pinned() for weight in model.offloading.store.weights.values())
    kept = torch.cuda.memory_allocated()
    inputs = {name: value.cuda() for name, value in batch().items()}
    with torch.no_grad():
        for task in FOUR:
            model(**inputs, task=task)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - kept < size
    model.half().float().cpu()  # moves what is there, and continues
    with torch.no_grad():
        model(**batch(), task="a")
