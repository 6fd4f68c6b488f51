"""When runs end early, by numbers written out."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures import write_4x4
from tinypod.runs.folder import Run
from tinypod.runs.metrics import MetricsLog, make_record
from tinypod.study.file import load_study
from tinypod.study.folder import run_of, write_study
from tinypod.study.rules import Rules

METRIC = "eval/exact_accuracy"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_4x4(tmp_path_factory.mktemp("rules") / "data")


def make_rules(folder: Path, data: Path, past: dict[int, list[float]], **tree: Any) -> Rules:
    """Of three runs, with what each of them scored at steps before."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"base": "demo", "set": {"data.path": str(data)}, "seeds": 3} | tree))
    study = load_study(path)
    write_study(study, Run(folder / "s"))
    for number, run in enumerate(study.runs):
        log = MetricsLog(run_of(folder / "s", run.name).folder)
        for step, values in past.items():
            log.append(make_record(step, {METRIC: values[number]}))
    return Rules(study, Run(folder / "s"))


def ended(rules: Rules, step: int, *values: float) -> dict[str, str]:
    return rules(step, {f"seed={number}": {METRIC: value} for number, value in enumerate(values)})


def test_without_rules_nothing_ends(data: Path, tmp_path: Path) -> None:
    assert ended(make_rules(tmp_path, data, {}), 100, 0.0, 0.5, 1.0) == {}


def test_the_target(data: Path, tmp_path: Path) -> None:
    rules = make_rules(tmp_path, data, {}, target=0.5, stop={"at_target": True})
    assert ended(rules, 100, 0.49, 0.5, 0.6) == dict.fromkeys(["seed=1", "seed=2"], "the target of 50.00% was reached")


def test_no_progress(data: Path, tmp_path: Path) -> None:
    """Two evaluations after the best: the first run has them, the second is better now, the third had one."""
    past = {1: [0.5, 0.5, 0.1], 2: [0.4, 0.4, 0.5]}
    rules = make_rules(tmp_path, data, past, stop={"no_progress": 2})
    assert ended(rules, 3, 0.5, 0.6, 0.2) == {"seed=0": "no progress in 2 evaluations"}


def test_the_median_of_the_runs_at_the_same_step(data: Path, tmp_path: Path) -> None:
    """Runs of other packs count too, by what they scored at that step."""
    rules = make_rules(tmp_path, data, {100: [0.2, 0.4, 0.9], 200: [0.2, 0.5, 0.9]}, stop={"below_median_from": 200})
    assert rules(100, {"seed=0": {METRIC: 0.2}}) == {}
    [why] = rules(200, {"seed=0": {METRIC: 0.2}}).values()
    assert "worse than the median of 3 runs at this step, 50.00%" in why
    assert rules(200, {"seed=1": {METRIC: 0.5}}) == {}


def test_a_metric_that_falls(data: Path, tmp_path: Path) -> None:
    rules = make_rules(tmp_path, data, {}, metric="eval/steps", target=2.0, stop={"at_target": True})
    assert rules(5, {"seed=0": {"eval/steps": 1.5}, "seed=1": {"eval/steps": 2.5}}).keys() == {"seed=0"}
