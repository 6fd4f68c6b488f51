"""Study folders as `tinypod study run` leaves them, with runs whose curves are made up."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinypod.runs.metrics import MetricsLog, make_record

Curve = Callable[[np.ndarray], np.ndarray]  # metric over steps


def rising(final: float, tau: float = 60.0) -> Curve:
    return lambda steps: final * (1 - np.exp(-steps / tau))


def grid(factors: Mapping[str, Sequence[Any]], seeds: int) -> list[dict[str, Any]]:
    """Run entries of every combination, seeds innermost."""
    entries = []
    for levels in itertools.product(*factors.values()):
        named = dict(zip(factors, levels, strict=True))
        variant = ",".join(f"{key.rpartition('.')[2]}={level}" for key, level in named.items())
        entries += [entry(variant, seed, named) for seed in range(seeds)]
    return entries


def entry(variant: str, seed: int, levels: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    width = (levels or {}).get("model.hidden_size", 64)
    sizes = {"num_weights": 12 * width**2, "flops_per_step": 6.0 * 12 * width**2 * 128}
    return (
        {"name": f"{variant},seed={seed}", "variant": variant, "levels": dict(levels or {}), "seed": seed}
        | sizes
        | more
    )


def write_study(
    folder: Path,
    entries: list[dict[str, Any]],
    curves: Callable[[dict[str, Any]], Curve],
    *,
    factors: Mapping[str, Sequence[Any]] | None = None,
    outcomes: Mapping[str, dict[str, Any]] | None = None,
    steps: int = 300,
    every: int = 20,
    step_ms: Callable[[dict[str, Any]], float] = lambda entry: 50.0,
    **changes: Any,
) -> Path:
    """`curves` gives a run's held-out metric over steps; in training it is 2 points higher. `outcomes` by run name."""
    study = {"name": "demo_study", "base": "demo", "metric": "eval/exact_accuracy", "direction": "max"}
    study |= {"metric_label": "exact", "metric_format": ".2%", "target": 0.5, "factors": factors or {}, "runs": entries}
    study |= changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(study))
    for run in entries:
        outcome = {"state": "done", "reason": None, "step": steps, "seconds": 1.0, "packed": 1}
        outcome |= (outcomes or {}).get(run["name"], {})
        write_run(folder, run, study, outcome, curves(run), every, step_ms(run))
    return folder


def write_run(
    folder: Path,
    run: dict[str, Any],
    study: dict[str, Any],
    outcome: dict[str, Any],
    curve: Curve,
    every: int,
    ms: float,
) -> None:
    run_dir = folder / "runs" / run["name"]
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "outcome.json").write_text(json.dumps(outcome))
    (run_dir / "config.yaml").write_text("seed: 0\n")
    if outcome["state"] == "waiting":
        return
    log, random = MetricsLog(run_dir), np.random.default_rng(run["seed"])
    name = study["metric"].removeprefix("eval/")
    for step in [*range(every, outcome["step"], every), outcome["step"]]:
        value = float(curve(np.array(float(step))))
        loss = float((0.05 + 2.0 * np.exp(-step / 80)) * np.exp(0.05 * random.normal()))
        perf = {"perf/step_ms": ms, "perf/examples_per_s": 128_000 / ms}
        log.append(make_record(step, {"train/loss": loss, f"train/{name}": value + 0.02, **perf}))
        log.append(make_record(step, {study["metric"]: value}))
