"""The loop: restore, step, log, evaluate, save. Reads top to bottom.

Between logging points nothing is fetched from the device. Whatever a checkpoint holds is in `metrics.jsonl` before it
is saved, so that going on from it leaves no gap and doubles nothing.
"""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from tinypod import report, run
from tinypod.evaluate import Evaluator
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.metrics import Stopwatch, WandbSettings, open_metrics
from tinypod.models.trm import count_matmul_flops
from tinypod.progress import TrainingProgress
from tinypod.step import TrainState, evaluation_params


@dataclass
class Stop:
    """A signal that asks the run to end after the step at hand."""

    by: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        return self.by is not None


@dataclass
class Outcome:
    step: int
    stopped_by: signal.Signals | None = None
    best: tuple[int, float] | None = None
    evaluation: dict[str, float] = field(default_factory=dict)


def train(config: ExperimentConfig, run_dir: Path, console: Console, from_step: int | None = None) -> Outcome:
    """Train until `config.steps`, from the latest checkpoint in the run folder if there is one."""
    experiment = build(config)
    source_split, eval_split = (
        experiment.read_split(name) for name in (config.data.train_split, config.data.eval_split)
    )
    with run.lock(run_dir), stop_on_signals() as stop:
        checkpoints = run.open_checkpoints(run_dir, config)
        for moved in checkpoints.set_aside_after(from_step) if from_step is not None else []:
            console.print(f"set aside {moved}")
        state = restore_or_init(experiment, checkpoints, console)
        start = int(state.step)
        describe(experiment, run_dir, start, len(source_split), len(eval_split), console)
        for change in run.write_config(run_dir, config):
            console.print(f"[yellow]config differs from the run's:[/] {change}", highlight=False)

        source = experiment.put_source(source_split)
        evaluate = Evaluator(experiment, eval_split, config.eval.batch_size, limit=config.eval.limit)
        train_step = compile_step(experiment, state, source, console) if start < config.steps else None
        best = checkpoints.best()
        outcome = Outcome(start, best=best)
        stored_config = config.model_dump(mode="json")
        wandb = WandbSettings(**config.log.wandb.model_dump()) if config.log.wandb else None
        with (
            open_metrics(
                run_dir,
                tensorboard=config.log.tensorboard,
                wandb=wandb,
                config=stored_config,
                resume_step=start,
            ) as metrics,
            TrainingProgress(console, start, config.steps) as progress,
        ):
            watch, pending, saved_at = Stopwatch(), [], time.monotonic()
            for step in range(start + 1, config.steps + 1):
                assert train_step is not None
                with jax.transfer_guard("disallow"):
                    state, sums = train_step(state, source)
                pending.append(sums)
                progress.step(step)
                last = step == config.steps or stop.requested
                evaluating = step == config.steps or _due(step, config.eval.every_steps)
                saving = last or _due(step, config.checkpoint.every_steps) or _minutes_due(config, saved_at)
                if evaluating or saving or _due(step, config.log.every_steps):
                    fetched, pending = (
                        jax.device_get(pending),
                        [],
                    )  # the only transfer in the loop; waits for the device
                    row = training_row(experiment, step, fetched, watch.lap())
                    metrics.write(step, row)
                    progress.trained(step, row)
                with watch.pause():
                    if evaluating:
                        scores = evaluate(evaluation_params(state, config.eval.weights))
                        outcome.evaluation = {f"eval/{name}": value for name, value in scores.items()}
                        metrics.write(step, outcome.evaluation)
                        progress.evaluated(step, outcome.evaluation)
                        outcome.best, improved = _better(config, step, outcome)
                        saving |= improved
                    if saving:
                        checkpoints.save(state, stored_config, outcome.evaluation if evaluating else None)
                        saved_at = time.monotonic()
                outcome.step = step
                if stop.requested:
                    outcome.stopped_by = stop.by
                    break
            checkpoints.wait()
        checkpoints.close()
        report.plot_curves(run_dir)
    return outcome


def restore_or_init(experiment: Experiment, checkpoints: Any, console: Console) -> TrainState:
    latest = checkpoints.latest()
    if latest is None:
        return experiment.init()
    console.print(f"going on from the checkpoint of step {latest}", highlight=False)
    return checkpoints.restore(latest, experiment.abstract_state)


def describe(
    experiment: Experiment, run_dir: Path, start: int, train_rows: int, eval_rows: int, console: Console
) -> None:
    config = experiment.config
    weights = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(experiment.abstract_state.params))
    devices = experiment.mesh.devices.flat
    console.print(
        f"{run_dir}: {weights:,} weights, {config.model.mixing.kind} mixing, {config.model.dtype}; "
        f"{train_rows:,} training and {eval_rows:,} held-out puzzles of {experiment.info.seq_len} cells; "
        f"batch {config.batch_size} on {len(devices)} × {devices[0].device_kind}; steps {start} to {config.steps}",
        highlight=False,
    )


def compile_step(experiment: Experiment, state: TrainState, source: Any, console: Console) -> Any:
    """Compiled ahead of the loop, so that nothing in the loop can trace or compile again."""
    began = time.perf_counter()
    with console.status("compiling the step"):
        compiled = experiment.train_step.lower(state, source).compile()  # type: ignore[attr-defined]
    console.print(f"compiled the step in {time.perf_counter() - began:.1f} s", highlight=False)
    return compiled


def training_row(
    experiment: Experiment, step: int, parts: list[Mapping[str, np.ndarray]], seconds: float
) -> dict[str, float]:
    """Metrics of the steps since the last row, from their sums."""
    sums = {name: sum(float(part[name]) for part in parts) for name in parts[0]}
    config = experiment.config
    row = {f"train/{name}": value for name, value in experiment.task.summarise(sums).items()}
    row["train/grad_norm"] = sums["grad_norm"] / sums["updates"]
    row["train/learning_rate"] = float(experiment.optimizer.learning_rate(step - 1))
    examples_per_s = len(parts) * config.batch_size / seconds
    row["perf/examples_per_s"] = examples_per_s
    row["perf/step_ms"] = 1000 * seconds / len(parts)
    row["perf/model_tflops"] = examples_per_s * count_matmul_flops(config.model, experiment.shape) / 1e12
    return row


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """SIGINT and SIGTERM end the run after the step at hand, with a checkpoint; a second one ends it at once."""
    stop = Stop()

    def request(number: int, _: object) -> None:
        stop.by = signal.Signals(number)
        for handled, handler in previous.items():
            signal.signal(handled, handler)

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _minutes_due(config: ExperimentConfig, saved_at: float) -> bool:
    minutes = config.checkpoint.every_minutes
    return minutes is not None and time.monotonic() - saved_at >= 60 * minutes


def _better(config: ExperimentConfig, step: int, outcome: Outcome) -> tuple[tuple[int, float] | None, bool]:
    """The best so far, and whether this step is it."""
    best = config.checkpoint.best
    if best is None or best.metric not in outcome.evaluation:
        return outcome.best, False
    value = outcome.evaluation[best.metric]
    sign = 1 if best.mode == "max" else -1
    if outcome.best is None or sign * value >= sign * outcome.best[1]:  # of equals the later one, as is kept on disk
        return (step, value), True
    return outcome.best, False
