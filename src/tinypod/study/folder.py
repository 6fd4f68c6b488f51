"""A study is a folder: `study.json` (what its runs are), `runs/<name>/` (run folders like any other, each with an
`outcome.json`), `health/` and `goodput.json` of the process that trains, `report/`."""

import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from tinypod import config as configs
from tinypod.errors import UserError
from tinypod.experiment import ExperimentConfig, describe_task
from tinypod.runs.folder import CONFIG, Run, with_absolute_paths
from tinypod.runs.metrics import FILE as METRICS
from tinypod.runs.metrics import MetricsLog
from tinypod.study.claims import at_once
from tinypod.study.file import Study
from tinypod.tasks.task import Task

STUDY, OUTCOME, RUNS = "study.json", "outcome.json", "runs"
State = Literal["waiting", "running", "done", "stopped_early", "diverged", "failed"]
ENDED: tuple[State, ...] = ("done", "stopped_early", "diverged", "failed")


class Outcome(NamedTuple):
    """How a run of a study stands."""

    state: State = "waiting"
    reason: str | None = None
    step: int = 0
    seconds: float = 0.0  # of this run's share of the machine
    packed: int = 1  # runs that its program trained


def run_of(folder: Path, name: str, remote: str | None = None) -> Run:
    """`remote`: the URL of a study in an object store, whose working folder is `folder`."""
    return Run(folder / RUNS / name, None if remote is None else f"{remote}/{RUNS}/{name}")


def runs_of(study: Run) -> list[Run]:
    return [run_of(study.folder, run["name"], study.remote) for run in read_study(study.folder)["runs"]]


def refresh(study: Run, *, wholly: bool = False) -> None:
    """Bring what other machines wrote into the working folder: what the runs have logged and how they stand, or all."""
    if study.remote is None:
        return
    study.pull() if wholly else study.fetch(STUDY)
    if not (study.folder / STUDY).exists():
        return
    at_once(Run.pull if wholly else _fetch, runs_of(study))


def steps_done(study: Run) -> int:
    """By all runs together, as far as they are saved; -1 before the study has begun."""
    refresh(study)
    if not (study.folder / STUDY).exists():
        return -1
    return sum(max(read_outcome(run).step, last_step(run.folder)) for run in runs_of(study))


def last_step(folder: Path) -> int:
    """That a run has logged."""
    records = MetricsLog(folder).read()
    return int(records[-1]["step"]) if records else 0


def _fetch(run: Run) -> None:
    for name in (CONFIG, OUTCOME, METRICS):
        run.fetch(name)


def read_outcome(run: Run) -> Outcome:
    path = run.folder / OUTCOME
    try:
        return Outcome(**json.loads(path.read_text())) if path.exists() else Outcome()
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path}: not the outcome of a run ({error}); remove it, and the run is trained again"
        ) from None


def write_outcome(run: Run, outcome: Outcome) -> None:
    run.publish(OUTCOME, json.dumps(outcome._asdict()).encode())


def write_study(study: Study, place: Run) -> None:
    """Describe the study in its folder. One that has begun may get more runs; a run that is there keeps its config."""
    folder = place.folder
    known = read_study(folder)["runs"] if (folder / STUDY).exists() else []
    gone = [run["name"] for run in known if run["name"] not in {new.name for new in study.runs}]
    if gone:
        raise UserError(
            f"{place} is another study: it has runs that this one does not ({', '.join(gone[:3])}"
            f"{', …' if len(gone) > 3 else ''}); choose another --folder"
        )
    for run in study.runs:
        path = folder / RUNS / run.name / CONFIG
        if path.exists():
            old = configs.load(path, [], ExperimentConfig).model_dump(mode="json")
            if changed := configs.differences(old, with_absolute_paths(run.config).model_dump(mode="json")):
                shown = "".join(f"\n  {line}" for line in changed)
                raise UserError(f"{path.parent} was trained with another config; choose another --folder{shown}")
    tasks: dict[str, Task] = {}
    weights: dict[str, int] = {}
    described: list[dict[str, Any]] = []
    for run in study.runs:
        if run.variant not in tasks:  # seeds do not change what a run costs
            tasks[run.variant] = describe_task(run.config)
            shapes = jax.eval_shape(tasks[run.variant].init_params, jax.random.key(0))
            weights[run.variant] = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        task = tasks[run.variant]
        described.append(
            {"name": run.name, "variant": run.variant, "levels": run.levels, "seed": run.seed}
            | {"flops_per_step": task.flops(True) * run.config.batch_size, "num_weights": weights[run.variant]}
        )
    headline = {f"eval/{metric.name}": metric for metric in next(iter(tasks.values())).headline}
    name = study.file.metric or next(iter(headline))
    if name not in headline:
        raise UserError(f"metric: {name}: the task reports {', '.join(headline)}")
    tree = {
        "name": study.name,
        "base": study.file.base,
        "metric": name,
        "direction": headline[name].direction,
        "metric_label": headline[name].label,
        "metric_format": headline[name].format,
        "target": study.file.target,
        "factors": study.file.factors | study.file.zip,
        "runs": described,
    }
    content = json.dumps(tree, indent=1).encode()
    if not (folder / STUDY).exists() or (folder / STUDY).read_bytes() != content:
        place.publish(STUDY, content)


def read_study(folder: Path) -> dict[str, Any]:
    if not (folder / STUDY).is_file():
        raise UserError(f"{folder} is not a study: it has no {STUDY}; `tinypod study run FILE` makes one")
    try:
        return dict(json.loads((folder / STUDY).read_text()))
    except ValueError as error:
        raise UserError(f"{folder / STUDY}: not readable ({error})") from None
