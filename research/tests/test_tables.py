"""How scores become tables and verdicts."""

import re

import pytest

from research import claims, scores, tables
from research.experiments import VARIANTS
from research.scores import Scores


def scores_of(**every: dict[str, list[float]]) -> Scores:
    kinds = {"r": "Retrieval", "c": "Classification"}
    types = {name: kinds[name[0]] for of in every.values() for name in of}
    return Scores(every, types, {name: tuple(range(len(next(iter(of.values()))))) for name, of in every.items()})


def lines_without_padding(table: str) -> list[str]:
    return re.sub("-+(?=[|:])| +", lambda found: found[0][0], table).splitlines()


def test_every_column_of_a_table_is_a_known_variant() -> None:
    known = {*VARIANTS, "sem"}
    for table in claims.TABLES.values():
        assert known.issuperset(table.variants)
        assert table.reference in table.variants
        for claim in table.claims:
            assert {claim.better, claim.other}.issubset(table.variants)


def test_table_shows_means_spread_gains_and_the_best() -> None:
    scores = scores_of(
        start={"r1": [40.0, 40.0], "r2": [40.0, 40.0], "c1": [40.0, 40.0]},  # one, with the seeds of the others
        em={"r1": [50.0, 50.0], "r2": [60.0, 60.5], "c1": [70.0, 70.0]},
        mote={"r1": [51.0, 53.0, 99.0], "r2": [62.0, 64.0, 99.0], "c1": [69.0, 69.0, 99.0]},
    )
    table = claims.Table("", ("start", "em", "mote"), "em")
    assert lines_without_padding(tables.table_of(table, scores))[2:] == [
        "| Retrieval (2) | 40.00 (-15.12) | 55.12 ± 0.18 | **57.50 ± 1.41** (+2.38) |",
        "| Classification (1) | 40.00 (-30.00) | **70.00** | 69.00 (-1.00) |",
        "| mean over all (3) | 40.00 (-20.08) | 60.08 ± 0.12 | **61.33 ± 0.94** (+1.25) |",
    ]


def test_improved_variants_are_called_by_their_base_unless_it_is_ambiguous() -> None:
    scores = scores_of(**{"ic": {"r1": [50.0]}, "mote+mined+to-mean-0.25": {"r1": [51.0]}})
    names = tuple(scores.every)
    text = tables.report(claims.Table("", names, "ic", claims=(claims.Claim(names[1], "ic"),)), scores)
    assert lines_without_padding(text)[0] == "| | ic | mote |"
    assert "- `mote`: mined, to-mean-0.25" in text
    assert "| mote over ic |" in lines_without_padding(text)[-1]
    assert tables.labels_of(["mote", "mote+mined"]) == {"mote": "mote", "mote+mined": "mote+mined"}
    both = ["ic+mined", "ic+mined+labels-twice"]
    assert tables.labels_of(both) == {both[0]: "ic", both[1]: "ic+labels-twice"}


def test_all_models_seed_by_seed() -> None:
    def both(first: float, second: float) -> dict[str, dict[str, float]]:
        return {"Retrieval": {"r1": first, "r2": first}, "STS": {"s1": second}}

    found = {
        "ic+mined": {42: both(50.0, 80.0)},
        "mote+mined": {42: both(51.0, 78.0), 43: both(53.0, 76.0)},
        "sem-retrieval": {42: {"Retrieval": {"r1": 54.0, "r2": 54.0}}},
    }
    assert lines_without_padding(tables.models_table(found)) == [
        "| mean over the test sets | seed 42 | seed 43 | all seeds | Retrieval | STS |",
        "|-|-:|-:|-:|-:|-:|",
        "| ic | 60.00 | | | 50.00 | 80.00 |",
        "| mote | 60.00 | 60.67 | 60.33 | 52.00 | 77.00 |",
        "| sem-retrieval | | | | 54.00 | |",
        "",
        "- `ic`: mined",
        "- `mote`: mined",
    ]


def test_a_dataset_without_scores_of_a_variant_is_excluded() -> None:
    scores = scores_of(em={"r1": [50.0], "r2": [60.0]}, mote={"r1": [52.0]})
    assert tables.datasets_of(scores, (), ("em", "mote")) == ["r1"]


def test_a_relative_gain_and_its_verdict() -> None:
    base = [40.0, 50.0, 60.0, 70.0]
    names = ["r1", "r2", "r3", "r4"]

    def model(*gains: float) -> dict[str, list[float]]:
        return {name: [score + gain] for name, score, gain in zip(names, base, gains, strict=True)}

    scores = scores_of(em=model(0, 0, 0, 0), ic=model(2, 2.2, 1.8, 2), mote=model(3, 3.3, 2.7, 3))
    table = claims.Table("", ("em", "ic", "mote"), "em")
    claim = claims.Claim("mote", "ic", relative_to="em", relative=0.59)
    found = tables.compared(claim, table, scores)
    assert (found.tests.gain, found.relative) == (pytest.approx(1.0), pytest.approx(0.5))
    assert found.verdict == "same direction, one seed"
    against = tables.compared(claims.Claim("ic", "mote", relative_to="mote", relative=1.0), table, scores)
    assert (against.verdict, against.relative) == ("**disagrees**, one seed", None)
    unsure_base = scores_of(em=model(0, 0, 0, 0), ic=model(5, -4, 3, -3), mote=model(3, 3.3, 2.7, 3))
    assert tables.compared(claim, table, unsure_base).relative is None  # 200 % more than next to nothing
    assert tables.compared(claims.Claim("mote", "ic", "STS"), table, scores).verdict == "not tested"  # no such dataset
    unsure = tables.compared(claims.Claim("a", "b"), table, scores_of(a=model(5, -4, 3, -3), b=model(0, 0, 0, 0)))
    assert unsure.verdict == "same direction, not significant"


def test_a_verdict_needs_each_seed() -> None:
    datasets = {f"r{number}": 40.0 + number for number in range(4)}

    def model(*gains: float) -> dict[str, list[float]]:
        return {name: [score + gain for gain in gains] for name, score in datasets.items()}

    mote = model(3.0, 2.0, 1.0)
    mote["r1"][0] += 0.1  # a paired test needs some spread
    scores = scores_of(
        start=model(0.5, 0.5, 0.5), ic=model(0.0, 0.0, 1.5), em=model(0.0, 0.0, 0.0), two=model(0.0, 0.0), mote=mote
    )
    of = {
        name: tables.compared(claims.Claim("mote", name), claims.Table("", (), "em"), scores) for name in scores.every
    }
    assert of["em"].with_seeds == pytest.approx((3.025, 2.0, 1.0))
    assert of["start"].with_seeds == pytest.approx((2.525, 1.5, 0.5))
    assert of["two"].with_seeds == pytest.approx((3.025, 2.0))
    t = 2.008333 / (1.012526 / 3**0.5)  # with two degrees of freedom, p has this form
    assert of["em"].over_seeds == pytest.approx(0.5 - t / (2 * (2 + t**2) ** 0.5), rel=1e-4)
    assert of["two"].over_seeds is None
    assert of["two"].tests.gain == pytest.approx(2.5125)
    assert of["ic"].with_seeds == pytest.approx((3.025, 2.0, -0.5))
    assert of["ic"].tests.paired_t < 0.05
    assert of["em"].verdict == "same direction"
    assert of["ic"].verdict == "same direction, not significant"


def test_only_the_same_seeds_are_compared() -> None:
    def of(**models: tuple[dict[int, float], str]) -> Scores:
        def scored(score: float, kind: str) -> dict[str, dict[str, float]]:
            return {kind: {f"{kind}{number}": score + number for number in range(3)}}

        of_models = {
            name: {seed: scored(score, kind) for seed, score in seeds.items()} for name, (seeds, kind) in models.items()
        }
        return scores.gathered(of_models)

    found = of(
        start=({42: 10.0, 43: 10.0}, "STS"),
        ic=({43: 50.0, 44: 40.0}, "STS"),
        mote=({42: 90.0, 43: 51.0}, "STS"),
        tlr=({42: 88.0}, "STS"),
    )
    table = claims.Table("", ("start", "ic", "mote"), "ic")
    over = {name: tables.compared(claims.Claim("mote", name), table, found) for name in found.every}
    assert {name: (one.tests.gain, one.with_seeds) for name, one in over.items() if name != "mote"} == {
        "start": (60.5, (80.0, 41.0)),
        "ic": (1.0, ()),
        "tlr": (2.0, ()),
    }
    assert "| STS (3) | 11.00 (-40.00) | 51.00 | **52.00** (+1.00) |" in lines_without_padding(
        tables.table_of(table, found)
    )
    with pytest.raises(ValueError, match=r"no seed that all have: {'ic': \(43, 44\), 'tlr': \(42,\)}"):
        tables.compared(claims.Claim("ic", "tlr"), table, found)
    starts = of(start=({42: 10.0, 43: 10.0, 44: 20.0}, "STS"), mote=({42: 50.0, 43: 50.0, 44: 50.0}, "STS"))
    over_start = tables.compared(claims.Claim("mote", "start"), table, starts)
    assert over_start.with_seeds == (40.0, 40.0, 30.0)
