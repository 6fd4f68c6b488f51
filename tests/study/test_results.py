import json
from pathlib import Path

import numpy as np
import pytest

from synthetic_study import entry, rising, write_study
from tinypod.errors import UserError
from tinypod.runs.metrics import MetricsLog, make_record
from tinypod.study.results import RunResult, read_study


def _one(folder: Path, **options) -> RunResult:
    write_study(folder, [entry("a", 0)], lambda _: rising(0.8), **options)
    return read_study(folder).runs[0]


def test_a_run_is_read_as_it_was_logged(tmp_path: Path) -> None:
    run = _one(tmp_path, steps=50, every=20)
    np.testing.assert_array_equal(run.metric.steps, [20, 40, 50])
    assert run.final == run.best == pytest.approx(0.8 * (1 - np.exp(-50 / 60)))
    assert run.flops == run.entry.flops_per_step * 50
    train, held_out = run.gap
    assert (train, held_out) == pytest.approx((run.final + 0.02, run.final))  # only step 50 is in the last tenth


def test_best_goes_by_the_direction_and_final_by_the_end(tmp_path: Path) -> None:
    values = {20: 0.3, 40: 0.7, 60: 0.5}
    for direction, best in (("max", 0.7), ("min", 0.3)):
        folder = tmp_path / direction
        curve = lambda steps: np.array(values[int(steps)])  # noqa: E731
        write_study(folder, [entry("a", 0)], lambda _, curve=curve: curve, steps=60, direction=direction)
        run = read_study(folder).runs[0]
        assert (run.final, run.best) == (0.5, best)


def test_time_is_of_steps_and_a_packed_run_has_its_part(tmp_path: Path) -> None:
    alone = _one(tmp_path / "alone", steps=50, every=20)  # 50 ms a step
    packed = _one(tmp_path / "packed", steps=50, every=20, outcomes={"a,seed=0": {"packed": 4}})
    np.testing.assert_allclose(alone.clock.values, [1.0, 2.0, 2.5])
    np.testing.assert_allclose(packed.clock.values, [0.25, 0.5, 0.625])
    assert (alone.seconds_at(10), alone.seconds_at(30)) == pytest.approx((0.5, 1.5))


def test_without_step_times_the_outcome_has_the_time(tmp_path: Path) -> None:
    _one(tmp_path, steps=50, outcomes={"a,seed=0": {"seconds": 8.0, "packed": 2}})
    log = MetricsLog(tmp_path / "runs" / "a,seed=0")
    log.path.unlink()
    log.append(make_record(50, {"eval/exact_accuracy": 0.5}))
    run = read_study(tmp_path).runs[0]
    assert run.seconds == 4.0
    assert run.seconds_at(25) == 2.0


def test_a_target_is_reached_between_two_evaluations(tmp_path: Path) -> None:
    values = {20: 0.2, 40: 0.6, 60: 0.9}
    for direction, target, step in (("max", 0.5, 35.0), ("max", 0.2, 20.0), ("max", 0.95, None), ("min", 0.1, None)):
        folder = tmp_path / f"{direction}{target}"
        curve = lambda steps: np.array(values[int(steps)])  # noqa: E731
        write_study(folder, [entry("a", 0)], lambda _, curve=curve: curve, steps=60, direction=direction)
        assert read_study(folder).runs[0].step_reaching(target) == (step if step is None else pytest.approx(step))


@pytest.mark.parametrize(
    ("state", "counts"),
    [("done", True), ("stopped_early", True), ("diverged", False), ("failed", False), ("running", False)],
)
def test_which_runs_count(tmp_path: Path, state: str, counts: bool) -> None:
    run = _one(tmp_path, outcomes={"a,seed=0": {"state": state, "step": 60}})
    assert run.counts == counts
    assert len(run.metric) > 0


def test_a_run_that_ends_in_nan_or_was_never_scored_does_not_count(tmp_path: Path) -> None:
    _one(tmp_path)
    log = MetricsLog(tmp_path / "runs" / "a,seed=0")
    log.append(make_record(301, {"eval/exact_accuracy": float("nan")}))
    assert not read_study(tmp_path).runs[0].counts
    log.path.unlink()
    assert not read_study(tmp_path).runs[0].counts


def test_a_run_that_has_not_begun_waits(tmp_path: Path) -> None:
    _one(tmp_path)
    run_dir = tmp_path / "runs" / "a,seed=0"
    for path in run_dir.iterdir():
        path.unlink()
    run_dir.rmdir()
    run = read_study(tmp_path).runs[0]
    assert run.outcome.state == "waiting"
    assert (run.ended, run.counts, run.seconds) == (False, False, None)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not the folder of a study: it has no study\.json"):
        read_study(tmp_path)
    _one(tmp_path)
    outcome = tmp_path / "runs" / "a,seed=0" / "outcome.json"
    outcome.write_text('{"state": "exploded"}')
    with pytest.raises(UserError, match=r"outcome\.json: state: Input should be 'done'"):
        read_study(tmp_path)
    outcome.write_text("{")
    with pytest.raises(UserError, match=r"outcome\.json: not JSON"):
        read_study(tmp_path)
    study = json.loads((tmp_path / "study.json").read_text())
    (tmp_path / "study.json").write_text(json.dumps(study | {"runs": []}))
    with pytest.raises(UserError, match="runs is empty"):
        read_study(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps(study | {"runs": [entry("../../up", 0)]}))
    with pytest.raises(UserError, match="leads out of it"):
        read_study(tmp_path)
