from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synthetic_study import entry, grid, rising, write_study
from tinypod.study.answers import Analysis, analyse, is_size
from tinypod.study.findings import sentences
from tinypod.study.results import read_study
from tinypod.study.tables import all_tables


def at_the_end(values: dict[str, list[float]]) -> Any:
    """Curves that end, to the digit, at a value given by variant and seed."""
    return lambda run: lambda steps: np.array(values[run["variant"]][run["seed"]])


def named(folder: Path, values: dict[str, list[float]], **options: Any) -> Analysis:
    entries = [entry(name, seed) for name, found in values.items() for seed in range(len(found))]
    write_study(folder, entries, at_the_end(values), **options)
    return analyse(read_study(folder))


def test_variants_and_differences_by_hand(tmp_path: Path) -> None:
    found = named(tmp_path, {"a": [0.5, 0.6, 0.7], "b": [0.8, 0.9, 1.0], "c": [0.5, 0.7, 0.9]})
    first, second, third = found.variants
    assert (first.final.mean, first.final.sd) == pytest.approx((0.6, 0.1))
    assert (second.final.mean, second.final.sd) == pytest.approx((0.9, 0.1))
    better, unclear = found.comparisons
    # Equal sds of 0.1, n = 3: error 0.1·√(2/3) = 0.08165, df 4, t = 2.77645.
    assert (better.final.low, better.final.high) == pytest.approx((0.3 - 0.226696, 0.3 + 0.226696), abs=1e-5)
    assert better.verdict == "better"
    assert unclear.verdict.startswith("too few seeds to tell: a difference of this size takes about ")
    assert third.final.n == 3
    assert found.top.variant.name == "b"
    assert found.top.first.name == "c"
    assert any("these seeds do not tell the two apart" in sentence for sentence in sentences(found))


def test_lower_may_be_better(tmp_path: Path) -> None:
    values = {"a": [5.0, 5.1, 5.2], "b": [4.0, 4.1, 4.2]}
    found = named(tmp_path, values, direction="min", metric_format=".2f", target=4.5)
    assert found.comparisons[0].verdict == "better"
    assert [variant.name for variant in found.ranked] == ["b", "a"]
    assert [variant.target.num_reached for variant in found.variants] == [0, 3]
    assert found.scaled == "exact"


def test_one_seed_tells_nothing(tmp_path: Path) -> None:
    found = named(tmp_path, {"a": [0.5], "b": [0.9]})
    assert found.comparisons[0].final is None
    wanted = "cannot tell: it takes at least 2 seeds of each, and there are 1 and 1"
    assert found.comparisons[0].verdict == wanted
    said = " ".join(sentences(found))
    assert "Too few seeds: fewer than 2 runs count for every variant" in said
    assert "better" not in said
    row = all_tables(found)["differences"].rows[0]
    assert row == ["b", "+40.00 pp", wanted, "–", "–"]


def test_many_comparisons_are_allowed_for(tmp_path: Path) -> None:
    """By itself the difference is told apart (p = 0.03); as one of five it is not."""
    equal = {f"x{i}": [0.5, 0.6, 0.7] for i in range(4)}
    found = named(tmp_path, {"a": [0.5, 0.6, 0.7], "b": [0.77, 0.87, 0.97], **equal})
    comparison = found.comparisons[0]
    assert comparison.tells_apart
    assert comparison.adjusted_p == pytest.approx(5 * comparison.final.p)
    assert not comparison.holds
    assert comparison.verdict == "better by itself, not once 5 comparisons are allowed for (Holm)"
    said = " ".join(sentences(found))
    assert "not told apart with these seeds (b; x0" in said


def test_equal_results_without_spread(tmp_path: Path) -> None:
    found = named(tmp_path, {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [0.5, 0.5]})
    assert [c.verdict for c in found.comparisons] == ["equal in every seed", "no spread over seeds to judge by"]


def test_how_runs_that_did_not_end_well_enter(tmp_path: Path) -> None:
    values = {"a": [0.5, 0.6, 0.1, 0.9, 0.9], "b": [0.2, 0.2]}
    outcomes = {
        "a,seed=2": {"state": "stopped_early", "reason": "worse than the median at step 100", "step": 100},
        "a,seed=3": {"state": "diverged", "reason": "loss not finite", "step": 60},
        "a,seed=4": {"state": "failed", "reason": "out of memory", "step": 40},
        "b,seed=0": {"state": "running", "step": 40},
        "b,seed=1": {"state": "waiting"},
    }
    found = named(tmp_path, values, outcomes=outcomes, target=0.55)
    first, second = found.variants
    assert first.final.mean == pytest.approx((0.5 + 0.6 + 0.1) / 3)  # stopped early counts; the last two do not
    assert second.final is None
    # Five ended; seeds 1, 3 and 4 got there, two of them before they broke.
    assert (first.target.num_reached, first.target.num_runs) == (3, 5)
    assert (second.target.num_reached, second.target.num_runs) == (0, 0)
    assert found.comparisons[0].verdict == "cannot tell: no run counts"
    rows = {row[0]: row for row in all_tables(found)["ends"].rows}
    assert set(rows) == set(outcomes)
    assert rows["a,seed=2"][3:] == [
        "in the means, with the last evaluation before the stop",
        outcomes["a,seed=2"]["reason"],
    ]
    assert rows["a,seed=3"][1:3] == ["diverged", "60"]
    assert rows["a,seed=3"][3].startswith("left out of the means")
    said = " ".join(sentences(found))
    assert "Ended, but left out of the means: 2 runs (a,seed=3; a,seed=4)." in said
    assert "with the last evaluation before the stop: 1 run." in said
    assert "Not ended yet: 2 runs." in said


def test_time_to_the_target_counts_those_that_never_got_there(tmp_path: Path) -> None:
    values = {"a": [0.5, 0.6, 0.7], "b": [0.5, 0.5, 0.7], "c": [0.5, 0.7]}
    found = named(tmp_path, values, target=0.6)
    assert [(v.target.num_reached, v.target.steps) for v in found.variants] == [(2, 20.0), (1, None), (1, None)]
    assert found.variants[0].target.seconds == pytest.approx(20 * 0.05)
    rows = all_tables(found)["target"].rows
    assert rows[0] == ["a", "20", "1.0 s", "2 of 3"]
    assert rows[1] == ["b", "never", "never", "1 of 3"]
    assert "target" not in all_tables(named(tmp_path / "none", values, target=None))


def test_the_gap_is_training_less_held_out(tmp_path: Path) -> None:
    found = named(tmp_path, {"a": [0.5, 0.7]})
    assert found.variants[0].gap.mean == pytest.approx(0.02)
    assert all_tables(found)["gap"].rows[0] == ["a", "+2.00 ± 0.00 pp", "62.00 ± 14.14%", "60.00 ± 14.14%"]


FACTORS: dict[str, list[Any]] = {"model.hidden_size": [32, 64, 128], "optimizer.learning_rate": [1e-3, 1e-2]}


def test_power_laws_of_a_size_for_each_level_of_the_other_factor(tmp_path: Path) -> None:
    exponents = {1e-3: -0.5, 1e-2: -0.8}

    def curve(run: dict[str, Any]) -> Any:
        levels, noise = run["levels"], 1 + 0.02 * (run["seed"] - 1)
        power = exponents[levels["optimizer.learning_rate"]]
        return lambda steps: np.array(1 - 2.0 * levels["model.hidden_size"] ** power * noise)

    write_study(tmp_path, grid(FACTORS, 3), curve, factors=FACTORS)
    found = analyse(read_study(tmp_path))
    assert [(s.size, s.group) for s in found.scalings] == [
        ("model.hidden_size", "learning_rate=0.001"),
        ("weights", "learning_rate=0.001"),
        ("model.hidden_size", "learning_rate=0.01"),
        ("weights", "learning_rate=0.01"),
    ]
    fits = [scaling.fit.exponent.value for scaling in found.scalings]
    assert fits == pytest.approx([-0.5, -0.25, -0.8, -0.4], abs=1e-3)  # weights go as the square of the width
    assert found.scaled == "1 − exact"
    # The cheapest and the best are on the front; the wide one with the worse rate is not.
    by_weights = next(cost for cost in found.costs if cost.name == "weights")
    on = {v.name for (v, _), yes in zip(by_weights.points, by_weights.on_front, strict=True) if yes}
    assert on == {f"hidden_size={width},learning_rate=0.01" for width in (32, 64, 128)}


def test_a_perfect_run_has_no_logarithm_and_is_counted(tmp_path: Path) -> None:
    factors = {"model.hidden_size": [32, 64, 128, 256]}
    curve = lambda run: rising(1 - 3 / run["levels"]["model.hidden_size"], tau=1.0)  # noqa: E731
    perfect = lambda run: rising(1.0, tau=1.0) if run["levels"]["model.hidden_size"] == 256 else curve(run)  # noqa: E731
    write_study(tmp_path, grid(factors, 2), perfect, factors=factors)
    scaling = analyse(read_study(tmp_path)).scalings[0]
    assert scaling.num_left_out == 2
    assert scaling.fit.exponent.value == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("key", "levels", "expected"),
    [
        ("model.hidden_size", [32, 64, 128], True),
        ("model.hidden_size", [32, 64], False),
        ("data.num_augmentations", [1, 10, 100], True),
        ("steps", [100, 200, 400], True),
        ("optimizer.schedule.warmup_steps", [100, 200, 400], False),
        ("optimizer.learning_rate", [1e-4, 1e-3, 1e-2], False),
        ("task.halting.exploration", [0.0, 0.1, 0.2], False),
        ("task.q_loss_weight", [1, 2, 3], False),
        ("model.unroll", [True, False, True], False),
        ("batch_size", [32, 64, 128], False),
        ("model.mixing.kind", ["mlp", "attention", "none"], False),
    ],
)
def test_what_a_size_is(key: str, levels: list[Any], expected: bool) -> None:
    assert is_size(key, levels) == expected


def batch_study(folder: Path, crit: float = 200.0, target: float | None = 0.5, never: int = 0) -> Analysis:
    """Steps to one half are 40·(1 + crit/batch), up to the evaluations between."""
    factors = {"batch_size": [32, 64, 128, 256, 512]}

    def curve(run: dict[str, Any]) -> Any:
        needed = 40 * (1 + crit / run["levels"]["batch_size"]) * (1 + 0.02 * (run["seed"] - 1))
        return lambda steps: np.array(0.5 * steps / needed if run["levels"]["batch_size"] != never else 0.1)

    write_study(folder, grid(factors, 3), curve, factors=factors, target=target, steps=400)
    return analyse(read_study(folder))


def test_the_critical_batch_size_of_a_study(tmp_path: Path) -> None:
    found = batch_study(tmp_path)
    fit = found.batch_scalings[0].fit
    assert (fit.batch_crit.value, fit.steps_min.value) == pytest.approx((200, 40), rel=0.01)
    assert any(sentence.startswith("Critical batch size: 200 (") for sentence in sentences(found))


def test_batches_that_never_reach_the_target_are_counted(tmp_path: Path) -> None:
    found = batch_study(tmp_path, never=512)
    scaling = found.batch_scalings[0]
    assert (scaling.num_never, len(scaling.steps)) == (3, 12)
    assert all_tables(found)["critical_batch"].rows[0][1] == "12 of 15"
    assert "never reached the target are not in the fit" in " ".join(all_tables(found)["critical_batch"].notes)


def test_without_a_target_there_is_no_critical_batch(tmp_path: Path) -> None:
    found = batch_study(tmp_path, target=None)
    assert found.batch_scalings == []
    assert "critical_batch" not in all_tables(found)


def test_factors_that_go_together_make_one_group(tmp_path: Path) -> None:
    """Zipped: the rate grows with the batch, so no two runs differ in the batch alone."""
    factors = {"batch_size": [32, 64, 128, 256], "optimizer.learning_rate": [1e-3, 2e-3, 4e-3, 8e-3]}
    zipped = [dict(zip(factors, levels, strict=True)) for levels in zip(*factors.values(), strict=True)]
    entries = [entry(f"batch_size={levels['batch_size']}", seed, levels) for levels in zipped for seed in range(2)]

    def curve(run: dict[str, Any]) -> Any:
        needed = 40 * (1 + 100 / run["levels"]["batch_size"]) * (1 + 0.02 * run["seed"])
        return lambda steps: np.array(0.5 * steps / needed)

    write_study(tmp_path, entries, curve, factors=factors)
    found = analyse(read_study(tmp_path))
    assert [scaling.group for scaling in found.batch_scalings] == ["others vary too"]
    assert found.batch_scalings[0].fit.batch_crit.value == pytest.approx(100, rel=0.02)
