"""The stored scores: nothing is lost, and they are gathered as the tables need them."""

from pathlib import Path

from research.scores import FILE, ScoredModel, Store, found_scores, read, scores_of, write


def model(variant: str, seed: int = 42, start: str = "a", **types: dict[str, float]) -> ScoredModel:
    return ScoredModel("small", variant, seed, types, hashes={"start": start})


def test_every_score_has_a_source_and_a_command() -> None:
    store = read()
    assert len(store.models) > 380
    for one in store.models:
        assert "@" in one.source, one.key
        assert one.command.startswith("python -m ")
        assert one.settings or one.variant == "start"
        assert all(-100 <= score <= 100 for of_type in one.scores.values() for score in of_type.values())
    assert all("@" in one["source"] for one in store.others)
    assert len({one.key for one in store.models}) == len(store.models)


def test_a_store_is_written_as_it_was_read(tmp_path: Path) -> None:
    store = read()
    write(store, tmp_path / "scores.jsonl.gz")
    assert read(tmp_path / "scores.jsonl.gz") == store
    assert FILE.stat().st_size < 200_000
    changed = model("mote", STS={"s": 1.0})
    assert Store((changed,)).with_models([model("em"), model("mote", STS={"s": 2.0})]).models == (
        model("mote", STS={"s": 2.0}),
        model("em"),
    )


def test_three_separate_models_are_one_variant() -> None:
    parts = [
        model("mote+mined", Retrieval={"r1": 50.0}, Clustering={"k1": 40.0}),
        model("sem-retrieval+mined", Retrieval={"r1": 51.0}),
        model("sem-classification+mined", Classification={"c1": 61.0}),
    ]
    assert found_scores(parts).keys() == {"mote+mined", "sem-retrieval+mined", "sem-classification+mined"}
    parts += [
        model("sem-clustering+mined", Clustering={"k1": 41.0}),
        model("sem-retrieval+mined", 43, Retrieval={"r1": 52.0}),
    ]
    found = found_scores(parts)
    assert found.keys() == {"mote+mined", "sem+mined"}
    assert found["sem+mined"] == {
        42: {"Retrieval": {"r1": 51.0}, "Classification": {"c1": 61.0}, "Clustering": {"k1": 41.0}}
    }


def test_a_start_has_the_seeds_of_the_models_trained_from_it() -> None:
    models = [model("mote", seed, STS={"s": 50.0}) for seed in (42, 43)]
    models += [model("mote", 44, "b", STS={"s": 50.0}), model("start", STS={"s": 10.0})]
    assert scores_of(models).seeds == {"start": (42, 43), "mote": (42, 43, 44)}
    assert found_scores(models)["start"].keys() == {42}
