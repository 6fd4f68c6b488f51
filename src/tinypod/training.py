"""The loop: restore, step, log, evaluate, save. `_train` reads top to bottom.

Where steps are short the devices are given many at a time, as many as lie between two points at which the loop does
something else; nothing else depends on how many. The devices wait for the host where it evaluates and saves, not where
it logs (`runs/rows.py`). Whatever a checkpoint holds is in `metrics.jsonl` before it is saved, so that resuming from it
leaves no gap and doubles nothing.

Every process of a run goes through the same loop and makes the same decisions, from numbers that all have (the step,
the metrics) or that process 0 broadcasts (its clock). Only process 0 prints, and writes what is written once.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from tinypod.cluster.agreement import Cluster
from tinypod.cluster.stop import Stop, answer, stop_on_signals
from tinypod.errors import ConfigError, DeadlineError, DeviceMemoryError, NonFiniteError, RecompileError
from tinypod.evaluate import Evaluator
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.health.ledger import Ledger
from tinypod.health.memory import is_out_of_memory, reuse_freed, step_bytes
from tinypod.health.nonfinite import BadSteps, Rollbacks
from tinypod.health.recompiles import CompileGuard
from tinypod.health.replicas import make_replica_check
from tinypod.health.watch import Health
from tinypod.runs import compile_cache
from tinypod.runs.config_history import check_config, write_config
from tinypod.runs.curves import plot_curves
from tinypod.runs.description import write_description
from tinypod.runs.folder import HEALTH, Run, with_absolute_paths
from tinypod.runs.lease import own
from tinypod.runs.metrics import MetricsLog, Stopwatch
from tinypod.runs.profiling import Profiler
from tinypod.runs.rows import Rows
from tinypod.runs.run_log import RunLog, read_scores
from tinypod.runs.saver import Restored, Saver
from tinypod.runs.terminal import TrainingProgress, duration, say, size, warn
from tinypod.sharding import describe_mesh, num_batch_shards
from tinypod.step import TrainState, evaluation_params

Ends = Callable[[int, dict[str, float]], str | None]  # (step, scores) -> why the run ends there, or None


@dataclass
class Outcome:
    """How a call of `train` ended."""

    experiment: Experiment
    step: int
    stopped_by: signal.Signals | None = None
    best: tuple[int, float] | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    trained: bool = True
    ended: str | None = None  # why it ended before its last step, if a rule said so


class Attempt(NamedTuple):
    """What the parts of one attempt at a run share."""

    experiment: Experiment
    run: Run
    console: Console
    cluster: Cluster
    health: Health
    guard: CompileGuard
    stop: Stop
    progress: TrainingProgress


def train(
    config: ExperimentConfig,
    run: Run,
    console: Console,
    *,
    cluster: Cluster | None = None,
    from_step: int | None = None,
    profile: tuple[int, int] | None = None,
    ends: Ends | None = None,
    owned: bool = False,
    devices: Sequence[Any] | None = None,
) -> Outcome:
    """Train until `config.steps`, from the latest checkpoint in the run folder if there is one. `ends` is asked after
    each evaluation, in process 0. `owned`: the caller has the right to train the run already (`lease.own`).
    `devices`: the ones to use, default all."""
    cluster = cluster or Cluster()
    config = with_absolute_paths(config)
    with ExitStack() as owner, ExitStack() as stack:
        if not cluster.is_primary:
            console = Console(file=stack.enter_context(open(os.devnull, "w")))
        compile_cache.enable(config.compile_cache)
        experiment = build(config, devices, console=console)
        experiment.check_batch()
        reuse_freed()
        ledger = None
        if cluster.is_primary:
            if not owned:
                owner.enter_context(own(run))
            run.pull(locked=True)
            ledger = Ledger(run.folder, cluster.count)
        publish, fetch = (run.publish, run.pull_heartbeats) if run.remote else (None, None)
        folder = run.folder / HEALTH
        health = stack.enter_context(
            Health(folder, cluster.index, cluster.count, config.health, ledger, publish, fetch)
        )
        on_recompile = config.health.on_recompile
        guard = stack.enter_context(
            CompileGuard(lambda: health.current, on_recompile, lambda text: warn(console, text))
        )
        stop = stack.enter_context(stop_on_signals(cluster, lambda text: say(console, text)))
        metric = experiment.task.headline[0]
        progress = stack.enter_context(TrainingProgress(console, config.steps, metric, health.doing))
        try:
            attempt = Attempt(experiment, run, console, cluster, health, guard, stop, progress)
            outcome = _train(attempt, from_step, profile, ends)
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                raise _out_of_memory(error, experiment) from None
            if cluster.count == 1:
                raise
            raise DeadlineError(health.lost_contact(error)) from error
        if outcome.stopped_by is not None:
            health.ends(f"stopped: {outcome.stopped_by.name}")
        stack.close()
        if cluster.is_primary:
            run.push()
    return outcome


def _train(attempt: Attempt, from_step: int | None, profile: tuple[int, int] | None, ends: Ends | None) -> Outcome:
    experiment, run, console, cluster, health, guard, stop, progress = attempt
    config, task = experiment.config, experiment.task

    with health.phase("data"):
        held_out = task.open_evaluation(None)
        evaluator = Evaluator(held_out, experiment.mesh, experiment.specs, config.eval.batch_size, config.eval.limit)
    with health.phase("restoring"):
        saver, log, (state, bad_steps) = _restore(attempt, from_step)
        step = int(state.step)
        stop.answer = lambda: answer(health.doing()[0], health.step, saver.checkpoints.complete(health.step))
        rollbacks = Rollbacks(run.folder, config.nonfinite, cluster, config.health.start_timeout_s)
        rollbacks.in_a_row = bad_steps
    outcome = Outcome(experiment, step, best=saver.best())
    finished = _is_finished(attempt, step)
    changed = _check_config(attempt, step, finished)
    if stop.requested() or finished:
        return Outcome(experiment, step, stop.by, outcome.best, trained=False)

    health.begin(step)
    for line in (_describe(attempt, step), *task.notes):
        say(console, line)
    for doubt in (*config.doubts, *(f"from step {step:,} on, {change}" for change in changed)):
        warn(console, doubt)
    with ExitStack() as stack:
        if cluster.is_primary:
            write_config(run, config, step, changed)
            write_description(run, experiment)
        stack.push(lambda kind, *_: _close(attempt, log, saver, failed=kind is not None))
        log.open(step)
        with health.phase("data"):
            feed = stack.enter_context(closing(task.open_feed(experiment.mesh)))
        with health.phase("compiling"):
            train_step, check_replicas = _compile(attempt, state, feed(rollbacks.number(step)), evaluator, saver)
        settings, many = experiment.put_settings(), experiment.steps_per_dispatch
        profiler = stack.enter_context(Profiler(run.folder, cluster.index, profile))
        stack.enter_context(health.phase("stepping"))
        guard.warm()
        watch = Stopwatch()
        rows = Rows(step, lambda at, parts: _log(attempt, at, parts, watch, rollbacks, log), health.beat)
        progress.begin(step)

        if step == config.steps and not stop.requested():  # a stop came during the last evaluation
            _evaluate(attempt, evaluator, state, outcome, log)
        while step < config.steps and not stop.requested() and outcome.ended is None:
            # Whatever is due every so many steps is due after a multiple of `many`: none is passed over.
            count = min(many - step % many, config.steps - step)
            numbers = [rollbacks.number(step + i) for i in range(count)]
            inputs = experiment.put(_numbers_for(many, numbers)), feed(numbers[0])
            profiler.before(step + 1, step + count)
            with jax.transfer_guard("disallow"):
                state, sums = train_step(state, settings, *inputs)
            rows.add(count, sums)
            step += count
            outcome.step = step
            profiler.after(step, sums)
            health.beat(step)
            progress.step(step)

            logging, evaluating, saving = _due(config, step, saver)
            bad = rows.settle()
            if bad is None and (logging or evaluating or saving):
                rows.owe(step)
                bad = rows.settle() if evaluating or saving or stop.requested() else None
            if bad is not None:
                state = _roll_back(attempt, saver, rollbacks, log, bad, step)
                outcome.step = step = int(state.step)
                outcome.best = saver.best()
                rows.restart(step)
                watch.lap()
                continue
            if _is_multiple(step, config.health.replica_check_every_steps):
                check_replicas(state.params)
            _check_compiles(attempt, saver, log, rows, rollbacks, state, step)
            with watch.pause():
                improved = evaluating and _evaluate(attempt, evaluator, state, outcome, log)
                if evaluating and ends is not None and step < config.steps and not stop.requested():
                    why = ends(step, outcome.evaluation) if cluster.is_primary else None
                    outcome.ended = cluster.broadcast("ended", why, config.health.restore_timeout_s)
                # Among steps that were not finite nothing is saved: a rollback needs what came before them.
                if (saving or improved) and not rollbacks.in_a_row:
                    progress.detail("saving", f"saving step {step:,}")
                    with health.phase("saving"):
                        saver.save(state, step, 0, log.flush)

        outcome.stopped_by = stop.by
        progress.detail("saving", f"saving step {step:,}")
        with health.phase("saving"):
            bad = rows.finish(step)
        if bad is not None:
            state = _roll_back(attempt, saver, rollbacks, log, bad, step)
            outcome.step = step = int(state.step)
            outcome.best = saver.best()
            progress.detail("saving", f"saving step {step:,}")
        with health.phase("saving"):
            saver.finish(state, step, rollbacks.in_a_row, log.flush, health.beat)
        guard.check()
    return outcome


def _out_of_memory(error: Exception, experiment: Experiment) -> DeviceMemoryError:
    config, mesh = experiment.config, experiment.mesh
    rows = config.batch_size // config.accumulation // num_batch_shards(mesh)
    first = str(error).strip().splitlines()[0][:300]
    return DeviceMemoryError(
        f"{mesh.devices.flat[0].device_kind} ran out of memory with {rows:,} rows per device "
        f"(batch_size / accumulation over the mesh): {first}. Raise accumulation=, set model.remat=true, "
        "raise mesh.fsdp=, or lower batch_size="
    )


def _restore(attempt: Attempt, from_step: int | None) -> tuple[Saver, RunLog, Restored]:
    """The state to resume from; with `from_step`, newer checkpoints are set aside once that one is known good."""
    experiment, run, console, cluster, *_ = attempt
    scores = read_scores(run.folder, experiment) if cluster.is_primary else {}
    saver = Saver(run, experiment, cluster, console, scores)
    log = RunLog(run, experiment, scores, primary=cluster.is_primary)
    step = saver.latest() if from_step is None else from_step
    doing = "making the first state" if step is None else f"reading the checkpoint of step {step:,}"
    attempt.progress.detail("restoring", doing)
    if step is None:
        return saver, log, saver.begin()
    _check_config(attempt, step, finished=False)  # which keys differ says more than which arrays
    return saver, log, saver.restore(step, set_newer_aside=from_step is not None)


def _check_config(attempt: Attempt, step: int, finished: bool) -> list[str]:
    """What the config changes in the run's, in process 0; what it may not change is an error in all of them."""
    _, run, _, cluster, *_ = attempt
    config, changed, error = attempt.experiment.config, [], ""
    if cluster.is_primary:
        try:
            changed = check_config(run, config, step, finished)
        except ConfigError as refused:
            error = str(refused)
    if error := cluster.broadcast("config", error, config.health.restore_timeout_s):
        raise ConfigError(error)
    return changed


def _describe(attempt: Attempt, step: int) -> str:
    experiment, config, mesh = attempt.experiment, attempt.experiment.config, attempt.experiment.mesh
    task, axes = experiment.task, describe_mesh(mesh.shape)
    processes = f" in {attempt.cluster.count} processes" if attempt.cluster.count > 1 else ""
    return (
        f"{attempt.run}: {experiment.num_weights:,} weights, {task.description}; {task.train_rows:,} training and "
        f"{task.held_out_rows or 0:,} held-out {task.unit}; batch {config.batch_size:,} on {mesh.size} × "
        f"{mesh.devices.flat[0].device_kind}{processes}{f' ({axes})' if axes else ''}; steps {step:,} to "
        f"{config.steps:,}"
    )


def _is_finished(attempt: Attempt, step: int) -> bool:
    """All steps are done, and the last evaluation too."""
    steps, timeout_s = attempt.experiment.config.steps, attempt.experiment.config.health.restore_timeout_s
    if step != steps:
        return step > steps
    records = MetricsLog(attempt.run.folder).read() if attempt.cluster.is_primary else []
    scored = any(record["step"] == step and "eval/count" in record for record in records)
    return bool(attempt.cluster.broadcast("evaluated", scored, timeout_s))


def _compile(attempt: Attempt, state: TrainState, feed: Any, evaluator: Evaluator, saver: Saver) -> tuple[Any, Any]:
    """Everything that the loop runs, ahead of it: the step, the evaluation, the checksums, the comparison of
    replicas. Processes whose compilers differ in speed meet here: Gloo's own patience ends after 30 s."""
    experiment, _, console, cluster, health, *_ = attempt
    began = time.perf_counter()
    attempt.progress.detail("compiling", "compiling the step")
    many = experiment.steps_per_dispatch
    train_step = experiment.compile_step(feed) if many == 1 else experiment.compile_steps(feed, many)
    needed = step_bytes(train_step)
    memory = "" if needed is None else f"; it needs {size(needed)} per device"
    at_a_time = f"; the devices are given {many} steps at a time" if many > 1 else ""
    say(console, f"compiled the step in {duration(time.perf_counter() - began)}{memory}{at_a_time}")
    if not attempt.stop.requested():  # else there is none
        attempt.progress.detail("compiling", "compiling the evaluation")
        evaluator.compile(evaluation_params(state.params, state.ema, experiment.config.eval.weights))
    saver.checkpoints.prepare(experiment.abstract_state)
    check_replicas = make_replica_check(experiment.mesh, experiment.specs)
    if health.ledger is not None:
        health.ledger.compiled(needed)
    with health.phase("waiting"):
        cluster.barrier("compiled", experiment.config.health.compile_timeout_s)
    if experiment.config.health.replica_check_every_steps is not None:
        check_replicas(state.params)
    return train_step, check_replicas


def _numbers_for(many: int, numbers: Sequence[int]) -> np.ndarray | np.int32:
    """Of the batches, as the program of so many steps takes them: -1 where there is none."""
    return np.int32(numbers[0]) if many == 1 else np.array([*numbers, *[-1] * (many - len(numbers))], np.int32)


def _due(config: ExperimentConfig, step: int, saver: Saver) -> tuple[bool, bool, bool]:
    """Whether to log, to evaluate and to save after a step."""
    last = step == config.steps
    logging = _is_multiple(step, config.log.every_steps)
    saving = last or _is_multiple(step, config.checkpoint.every_steps) or saver.minutes_due(ask=logging)
    return logging, last or _is_multiple(step, config.eval.every_steps), saving


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _log(
    attempt: Attempt,
    step: int,
    parts: Sequence[Mapping[str, float]],
    watch: Stopwatch,
    rollbacks: Rollbacks,
    log: RunLog,
) -> BadSteps | None:
    """One row, of the steps since the last one. Returns the steps that ask for a rollback."""
    seconds = watch.lap()
    attempt.health.timed(len(parts), seconds)
    record = training_record(attempt.experiment, parts, seconds)
    log.write(step, record)
    attempt.progress.trained(step, record)
    return rollbacks.note(step - len(parts), [bool(part["skipped"]) for part in parts])


def training_record(experiment: Experiment, parts: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """Metrics of the steps since the last record, from their sums; those that were skipped count for nothing."""
    sums = {name: sum(float(part[name]) for part in parts) for name in parts[0]}
    record = {"train/loss": float("nan")}
    if sums["updates"]:
        record = {f"train/{name}": value for name, value in experiment.task.summarise(sums).items()}
        record["train/grad_norm"] = sums["grad_norm"] / sums["updates"]
    if sums["skipped"]:
        record["train/skipped"] = sums["skipped"]
    record["train/learning_rate"] = float(parts[-1]["learning_rate"])
    examples_per_s = len(parts) * experiment.config.batch_size / seconds
    record["perf/examples_per_s"] = examples_per_s
    record["perf/step_ms"] = 1000 * seconds / len(parts)
    flops = sums.get("flops", len(parts) * experiment.config.batch_size * experiment.task.flops(True))
    record["perf/model_tflops"] = flops / seconds / 1e12
    return record


def _evaluate(
    attempt: Attempt,
    evaluator: Evaluator,
    state: TrainState,
    outcome: Outcome,
    log: RunLog,
) -> bool:
    """Whether the scores are the best so far; not if a stop came meanwhile: what time is left is for saving."""

    class Stopped(Exception):
        pass

    progress, scored = attempt.progress, 0
    progress.detail("evaluating", f"evaluating 0/{evaluator.rows:,}")

    def check(rows: int) -> None:
        nonlocal scored
        scored += rows
        progress.detail("evaluating", f"evaluating {scored:,}/{evaluator.rows:,}")
        attempt.health.beat()
        if attempt.stop.requested():
            raise Stopped

    with attempt.health.phase("evaluating"):
        params = evaluation_params(state.params, state.ema, attempt.experiment.config.eval.weights)
        try:
            scores = {f"eval/{name}": value for name, value in evaluator(params, check).items()}
        except Stopped:
            return False
        outcome.evaluation = scores
        log.write(outcome.step, scores)
        progress.evaluated(outcome.step, scores)
    best = attempt.experiment.best
    if best is None:
        return False
    value, sign = scores[best.name], 1 if best.direction == "max" else -1
    improved = outcome.best is None or sign * value >= sign * outcome.best[1]  # of equals the later one, as is kept
    if improved:
        outcome.best = outcome.step, value
    return improved


def _check_compiles(
    attempt: Attempt, saver: Saver, log: RunLog, rows: Rows, rollbacks: Rollbacks, state: TrainState, step: int
) -> None:
    try:
        attempt.guard.check()
    except RecompileError:
        if attempt.cluster.count == 1:  # what was trained is sound
            with attempt.health.phase("saving"):
                if rows.finish(step) is None:  # else the checkpoint before them is what the next start goes on from
                    saver.finish(state, step, rollbacks.in_a_row, log.flush, attempt.health.beat)
        raise


def _roll_back(
    attempt: Attempt, saver: Saver, rollbacks: Rollbacks, log: RunLog, bad: BadSteps, step: int
) -> TrainState:
    """Back to the last checkpoint before those steps; their batches are left out from now on."""
    experiment, _, console, cluster, health, *_ = attempt
    checkpoints, limit = saver.checkpoints, experiment.config.nonfinite.max_rollbacks
    with health.phase("saving"):
        checkpoints.wait()
    target = saver.latest(before=bad.first)
    if not rollbacks.allowed:
        raise NonFiniteError(
            f"loss or gradients were not finite in steps {bad.first:,} to {bad.last:,}, after {len(rollbacks.done)} "
            f"rollbacks (nonfinite.max_rollbacks); the last checkpoint before them is of step {target or 0:,}. Lower "
            "optimizer.learning_rate, set optimizer.clip_norm=1.0, or use model.dtype=bfloat16 or float32"
        )
    with health.phase("restoring"):
        checkpoints.set_aside_after(target or 0)  # before the batches are renumbered, should it end in between
        rollbacks.add(bad, target or 0)
        state = saver.begin().state if target is None else saver.state_at(target)
        saver.restored(target or 0)
    target = target or 0
    health.rolled_back(step, target)
    log.open(target)
    with health.phase("waiting"):  # mirrors of the metrics may take long
        cluster.barrier("rolled back", experiment.config.health.save_timeout_s)
    log.write(target, {"health/rolled_back_from_step": float(step), "health/batches_left_out": float(bad.count)})
    warn(
        console,
        f"steps {bad.first:,} to {bad.last:,} were not finite: back from step {step:,} to step {target:,}, their "
        f"{bad.count:,} batches are left out (rollback {len(rollbacks.done)} of {limit})",
    )
    return state


def _close(attempt: Attempt, log: RunLog, saver: Saver, *, failed: bool) -> None:
    """Metrics (W&B may upload for minutes), checkpoints, curves; has a deadline of its own."""
    with attempt.health.phase("closing"):
        log.close(failed=failed)
        if failed:
            return
        saver.checkpoints.close()
        if attempt.cluster.is_primary:
            plot_curves(attempt.run.folder, attempt.experiment.task.headline)
