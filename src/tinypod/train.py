"""The loop: restore, step, log, evaluate, save. Reads top to bottom.

Between logging points nothing is fetched from the device. Whatever a checkpoint holds is in `metrics.jsonl` before it
is saved, so that going on from it leaves no gap and doubles nothing.
"""

import math
import os
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
from tinypod.checkpoint import Checkpoints
from tinypod.errors import UserError
from tinypod.evaluate import Evaluator
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.metrics import Stopwatch, open_metrics
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
    """How a call of `train` ended."""

    step: int
    stopped_by: signal.Signals | None = None
    best: tuple[int, float] | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    trained: bool = True


def train(config: ExperimentConfig, run_dir: Path, console: Console, from_step: int | None = None) -> Outcome:
    """Train until `config.steps`, from the latest checkpoint in the run folder if there is one."""
    config = run.with_absolute_paths(config)
    experiment = build(config)
    experiment.check_batch()
    splits = [experiment.read_split(name) for name in (config.data.train_split, config.data.eval_split)]
    with run.lock(run_dir), stop_on_signals() as stop:
        checkpoints = run.open_checkpoints(run_dir, config)
        state = restore_or_init(experiment, checkpoints, from_step, console)
        start = int(state.step)
        describe(experiment, run_dir, start, len(splits[0]), len(splits[1]), console)
        about = run.about(experiment)
        with open_metrics(
            run_dir,
            tensorboard=config.log.tensorboard,
            wandb=config.log.wandb,
            config=about["config"],
            resume_step=start,
        ) as metrics:
            for change in run.write_config(run_dir, config):
                console.print(f"[yellow]config differs from the run's:[/] {change}", highlight=False, soft_wrap=True)
            if start >= config.steps or stop.requested:
                return Outcome(start, stop.by, checkpoints.best(), trained=False)
            source = experiment.put_source(splits[0])
            evaluate = Evaluator(experiment, splits[1], config.eval.batch_size, limit=config.eval.limit)
            train_step = compile_step(experiment, state, source, console)
            outcome = Outcome(start, best=checkpoints.best())
            saved, saved_at = start, time.monotonic()
            pending: list[dict[str, jax.Array]] = []
            with TrainingProgress(console, start, config.steps) as progress:
                watch = Stopwatch()

                def log() -> None:
                    """The only transfer from the device in the loop; waits for it."""
                    fetched = jax.device_get(pending)
                    pending.clear()
                    row = training_row(experiment, outcome.step, fetched, watch.lap())
                    metrics.write(outcome.step, row)
                    progress.trained(outcome.step, row)
                    check_finite(row, outcome.step, checkpoints)

                while outcome.step < config.steps and not stop.requested:
                    with jax.transfer_guard("disallow"):
                        state, sums = train_step(state, source)
                    pending.append(sums)
                    outcome.step += 1
                    progress.step(outcome.step)
                    evaluating = outcome.step == config.steps or _due(outcome.step, config.eval.every_steps)
                    saving = _due(outcome.step, config.checkpoint.every_steps) or _minutes_due(config, saved_at)
                    if evaluating or saving or _due(outcome.step, config.log.every_steps):
                        log()
                    with watch.pause():
                        scores = None
                        if evaluating and (scores := unless_stopped(stop, evaluate, state, config)) is not None:
                            outcome.evaluation = scores
                            metrics.write(outcome.step, scores)
                            progress.evaluated(outcome.step, scores)
                            outcome.best, improved = _better(config, outcome)
                            saving |= improved
                        if saving or outcome.step == config.steps:
                            checkpoints.save(state, about, scores)
                            saved, saved_at = outcome.step, time.monotonic()
                if outcome.step > saved:
                    if pending:
                        log()
                    checkpoints.save(state, about)
                checkpoints.wait()
                outcome.stopped_by = stop.by
        checkpoints.close()
        report.plot_curves(run_dir)
    return outcome


def unless_stopped(
    stop: Stop, evaluate: Evaluator, state: TrainState, config: ExperimentConfig
) -> dict[str, float] | None:
    """The scores; None if a signal came in the meantime: what time is left then is for saving."""

    class Stopped(Exception):
        pass

    def check(_: int) -> None:
        if stop.requested:
            raise Stopped

    try:
        scores = evaluate(evaluation_params(state, config.eval.weights), check)
    except Stopped:
        return None
    return {f"eval/{name}": value for name, value in scores.items()}


def check_finite(row: dict[str, float], step: int, checkpoints: Checkpoints) -> None:
    """Stop before a state of NaNs is saved over good ones."""
    if not math.isfinite(row["train/loss"]):
        raise UserError(
            f"the loss is {row['train/loss']} at step {step}; the last checkpoint is of step {checkpoints.latest()}. "
            "Lower optimizer.learning_rate, set optimizer.clip_norm=1.0, or use model.dtype=bfloat16 or float32"
        )


def restore_or_init(
    experiment: Experiment, checkpoints: Checkpoints, from_step: int | None, console: Console
) -> TrainState:
    """The state to go on from; with `from_step`, newer checkpoints are moved away once that one is known to be good."""
    step = checkpoints.latest() if from_step is None else from_step
    if step is None:
        return experiment.init()
    state = checkpoints.restore(step, experiment.abstract_state)
    console.print(f"going on from the checkpoint of step {step}", highlight=False)
    for moved in checkpoints.set_aside_after(step) if from_step is not None else []:
        console.print(f"set aside {moved}", highlight=False, soft_wrap=True)
    if checkpoints.info(step).get("dataset") != run.about(experiment)["dataset"]:
        path = experiment.config.data.path
        console.print(f"[yellow]the dataset at {path} is not the one this run began with[/]", soft_wrap=True)
    return state


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
        if stop.requested:  # an exception raised inside the compiler would crash it
            os._exit(128 + number)
        stop.by = signal.Signals(number)

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


def _better(config: ExperimentConfig, outcome: Outcome) -> tuple[tuple[int, float] | None, bool]:
    """The best so far, and whether this step is it."""
    best = config.checkpoint.best
    if best is None:
        return None, False
    value = outcome.evaluation[best.metric]
    sign = 1 if best.mode == "max" else -1
    if outcome.best is None or sign * value >= sign * outcome.best[1]:  # of equals the later one, as is kept on disk
        return (outcome.step, value), True
    return outcome.best, False
