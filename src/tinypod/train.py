"""The loop: restore, step, log, evaluate, save. Reads top to bottom.

Between logging points nothing is fetched from the device. Whatever a checkpoint holds is in `metrics.jsonl` before it
is saved, so that going on from it leaves no gap and doubles nothing.

Every process of a run goes through the same loop and makes the same decisions, from numbers that all have (the step,
the metrics) or that process 0 tells the others (its clock). Only process 0 prints, and writes what is written once.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from rich.console import Console

from tinypod.cluster.startup import Cluster, Stop, stop_on_signals
from tinypod.data.puzzles import Split
from tinypod.errors import DamagedError, DeadlineError, NonFiniteError, RecompileError, StorageError
from tinypod.evaluate import Evaluator
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.health import goodput
from tinypod.health import nonfinite as rollback
from tinypod.health import watch as health
from tinypod.health.recompiles import CompileGuard
from tinypod.health.replicas import make_replica_check
from tinypod.health.watch import Health
from tinypod.models.trm import count_matmul_flops
from tinypod.runs import compile_cache, profiling
from tinypod.runs import curves as report
from tinypod.runs import folder as runs
from tinypod.runs.checkpoints import SET_ASIDE
from tinypod.runs.metrics import Metrics, MetricsLog, Stopwatch, open_metrics
from tinypod.runs.terminal import TrainingProgress
from tinypod.sharding import describe_mesh
from tinypod.step import TrainState, evaluation_params

SUPERVISED = "TINYPOD_SUPERVISED"  # set by `--supervise`: nobody is there to be asked
QUEUED = 2  # steps that may wait on the device before the host does
RETRY_SAVE_S = 30.0  # after a save that failed
GIVE_UP_SAVING_S = 900.0  # at the end of a run, when there is nothing left to do but save


@dataclass
class Outcome:
    """How a call of `train` ended."""

    step: int
    stopped_by: signal.Signals | None = None
    best: tuple[int, float] | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    trained: bool = True


def train(
    config: ExperimentConfig,
    run: runs.Run,
    console: Console,
    *,
    cluster: Cluster | None = None,
    from_step: int | None = None,
    profile: tuple[int, int] | None = None,
) -> Outcome:
    """Train until `config.steps`, from the latest checkpoint in the run folder if there is one."""
    cluster = cluster or Cluster()
    config = runs.with_absolute_paths(config)
    with ExitStack() as stack:
        if not cluster.is_primary:
            console = Console(file=stack.enter_context(open(os.devnull, "w")))
        compile_cache.enable(config.compile_cache)
        experiment = build(config, console=console)
        experiment.check_batch()
        ledger = None
        if cluster.is_primary:
            stack.enter_context(runs.lock(run))
            run.pull(locked=True)
            ledger = goodput.Ledger(run.folder, cluster.count)
        publish, fetch = (run.publish, run.pull_heartbeats) if run.remote else (None, None)
        watched = stack.enter_context(
            Health(run.folder / health.FOLDER, cluster.index, cluster.count, config.health, ledger, publish, fetch)
        )
        guard = stack.enter_context(
            CompileGuard(lambda: watched.current, config.health.on_recompile, lambda text: _warn(console, text))
        )
        stop = stack.enter_context(stop_on_signals(cluster))
        try:
            loop = Loop(experiment, run, console, cluster, watched, guard, stop, profile)
            outcome = loop.run_through(from_step)
        except jax.errors.JaxRuntimeError as error:
            if cluster.count == 1:
                raise
            raise DeadlineError(watched.lost_contact(error)) from error
        if outcome.stopped_by is not None:
            watched.ends(f"stopped: {outcome.stopped_by.name}")
    if cluster.is_primary:
        run.push()
    return outcome


class Loop:
    """One attempt at a run: what its steps share."""

    def __init__(
        self,
        experiment: Experiment,
        run: runs.Run,
        console: Console,
        cluster: Cluster,
        health: Health,
        guard: CompileGuard,
        stop: Stop,
        profile: tuple[int, int] | None,
    ) -> None:
        self.experiment, self.config, self.run, self.console = experiment, experiment.config, run, console
        self.cluster, self.health, self.guard, self.stop = cluster, health, guard, stop
        self.about = runs.about(experiment)
        self.profiler = profiling.Profiler(run.folder, cluster.index, profile)
        timeout_s = self.config.health.start_timeout_s
        self.rollbacks = rollback.Rollbacks(run.folder, self.config.nonfinite, cluster, timeout_s)
        self.pending: list[dict[str, jax.Array]] = []
        self.failed_save_at: float | None = None
        self.evaluated_at = -1
        self.step_s = 0.0

    def run_through(self, from_step: int | None) -> Outcome:
        with self.health.phase("data"):
            self.split, held_out = (self.experiment.read_split(name) for name in self._split_names())
        with self.health.phase("restoring"):
            self.checkpoints = runs.open_checkpoints(self.run, self.config)
            for incomplete in self.checkpoints.incomplete():
                _warn(self.console, str(incomplete))
            self.state = self._restore_or_init(from_step)
        self.outcome = Outcome(int(self.state.step), best=self._best())
        self.saved, self.saved_at = self.outcome.step, time.monotonic()
        self._describe(len(held_out))
        if self.health.ledger is not None:
            self.health.ledger.begin(self.outcome.step)
        self.health.beat(self.outcome.step)
        self.metrics = self._open_metrics(self.outcome.step)
        try:
            for change in runs.write_config(self.run, self.config) if self.cluster.is_primary else []:
                _warn(self.console, f"config differs from the run's: {change}")
            if self.stop.requested() or self._is_finished():
                self.outcome.trained, self.outcome.stopped_by = False, self.stop.by
            else:
                self._prepare(held_out)
                self._train()
        except BaseException:
            self._close_metrics(failed=True)
            raise
        self._close_metrics()
        self.checkpoints.close()
        if self.cluster.is_primary:
            report.plot_curves(self.run.folder)
        return self.outcome

    def _prepare(self, held_out: Split) -> None:
        """Everything that compiles, before the first step."""
        with self.health.phase("data"):
            self.source = self.experiment.put_source(self.split, self.rollbacks.skipped)
        self.evaluate = Evaluator(self.experiment, held_out, self.config.eval.batch_size, limit=self.config.eval.limit)
        with self.health.phase("compiling"):
            self.train_step = compile_step(self.experiment, self.state, self.source, self.console)
            if self.health.ledger is not None:
                self.health.ledger.compiled(self.train_step.memory_analysis())
            self.check_replicas = make_replica_check(self.experiment.mesh, self.experiment.specs)
            # One that compiles longer is waited for here: Gloo's own patience ends after 30 s.
            self.cluster.barrier("compiled", self.config.health.compile_timeout_s)
            if self.config.health.replica_check_every_steps is not None:
                self.check_replicas(self.state.params)

    def _train(self) -> None:
        with (
            self.health.phase("stepping"),
            TrainingProgress(self.console, self.outcome.step, self.config.steps) as self.progress,
            self.profiler,
        ):
            self.watch = Stopwatch()
            if self.outcome.step == self.config.steps:
                self._evaluate()  # a stop came in the middle of it
            while self.outcome.step < self.config.steps and not self.stop.requested():
                self._step()
                self._follow_up()
            self.outcome.stopped_by = self.stop.by
            self._save_for_good()
            self._check_compiles()

    def _step(self) -> None:
        self.profiler.before(self.outcome.step + 1)
        with jax.transfer_guard("disallow"):
            self.state, sums = self.train_step(self.state, self.source)
        self.pending.append(sums)
        if len(self.pending) > QUEUED:  # else the host is dozens of steps ahead, with signals and deadlines
            jax.block_until_ready(self.pending[-1 - QUEUED])
        self.outcome.step += 1
        self.profiler.after(self.outcome.step, sums)
        self.health.beat(self.outcome.step)
        self.progress.step(self.outcome.step)

    def _follow_up(self) -> None:
        """What is due after a step."""
        step, config = self.outcome.step, self.config
        logging = _due(step, config.log.every_steps)
        evaluating = step == config.steps or _due(step, config.eval.every_steps)
        saving = step == config.steps or _due(step, config.checkpoint.every_steps) or self._minutes_due(logging)
        if (evaluating or saving or logging) and not self._log():
            return
        if _due(step, config.health.replica_check_every_steps):
            self.check_replicas(self.state.params)
        self._check_compiles()
        improved = evaluating and self._evaluate()
        if (saving or improved) and not self.rollbacks.in_a_row:  # a rollback needs the ones from before such steps
            self._save()

    def _log(self) -> bool:
        """The only transfer from the device in the loop; waits for it. False: the run was rolled back."""
        if not self.pending:
            return True
        fetched = jax.device_get(self.pending)
        self.pending.clear()
        seconds, step = self.watch.lap(), self.outcome.step
        self.step_s = seconds / len(fetched)
        self.health.timed(len(fetched), seconds)
        row = training_row(self.experiment, step, fetched, seconds)
        self._write(step, row)
        self.progress.trained(step, row)
        self.guard.warm("stepping")
        bad = self.rollbacks.note(step - len(fetched), [bool(part["skipped"]) for part in fetched])
        if bad is not None:
            self._roll_back(bad)
        return bad is None

    def _evaluate(self) -> bool:
        """Whether the scores are the best so far; not if a stop came meanwhile: what time is left is for saving."""

        class Stopped(Exception):
            pass

        def check(_: int) -> None:
            self.health.beat()
            if self.stop.requested():
                raise Stopped

        with self.watch.pause(), self.health.phase("evaluating"):
            try:
                scores = self.evaluate(evaluation_params(self.state, self.config.eval.weights), check)
            except Stopped:
                return False
            scores = {f"eval/{name}": value for name, value in scores.items()}
            self.outcome.evaluation = scores
            self.evaluated_at = self.outcome.step
            self._write(self.outcome.step, scores)
            self.progress.evaluated(self.outcome.step, scores)
            self.guard.warm("evaluating")
            self.outcome.best, improved = _better(self.config, self.outcome)
            return improved

    def _save(self) -> None:
        """Start saving. A disk that is full now may have room later: training goes on, and tries again."""
        with self.watch.pause(), self.health.phase("saving"):
            try:
                self._start_saving()
                self.guard.warm("saving")
                self.failed_save_at = None
            except StorageError as error:
                if self.cluster.count > 1:  # where one process fails alone, the others wait for it
                    raise
                self.failed_save_at = time.monotonic()
                _warn(self.console, f"{error}. Training goes on; next try in {RETRY_SAVE_S:.0f} s")

    def _start_saving(self) -> None:
        if self.metrics is not None:
            self.metrics.flush()  # rows that a full disk refused must be there before the checkpoint after them
            self.run.push()
        # A store may take longer than Gloo waits.
        self.cluster.barrier("pushed", self.config.health.save_timeout_s)
        scores = self.outcome.evaluation if self.evaluated_at == self.outcome.step else None
        self.checkpoints.save(self.state, self.about, scores)
        self.saved, self.saved_at = self.outcome.step, time.monotonic()

    def _save_for_good(self) -> None:
        """What has been trained must be on disk before this process ends; a full disk is waited for."""
        with self.health.phase("saving"):
            self._log()
            began, pause_s = time.monotonic(), 1.0
            while True:
                try:
                    if self.saved < self.outcome.step or self.failed_save_at is not None:
                        self._start_saving()
                    self.checkpoints.wait()
                    return
                except StorageError as error:
                    left_s = GIVE_UP_SAVING_S - (time.monotonic() - began)
                    if self.cluster.count > 1 or left_s < pause_s:
                        raise
                    self.failed_save_at = time.monotonic()
                    _warn(self.console, f"{error}. Waiting for room; next try in {pause_s:.0f} s")
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_SAVE_S)
                    self.health.beat()

    def _roll_back(self, bad: rollback.BadSteps) -> None:
        """Back to the last checkpoint before those steps; their batches are left out from now on."""
        began = self.outcome.step
        with self.health.phase("saving"):
            self.checkpoints.wait()
        kept = [step for step in self.checkpoints.steps() if step < bad.first]
        target = self._told("rollback", max(kept, default=None))
        if not self.rollbacks.allowed:
            raise NonFiniteError(
                f"loss or gradients were not finite in steps {bad.first} to {bad.last}, after "
                f"{len(self.rollbacks.done)} rollbacks (nonfinite.max_rollbacks); the last checkpoint before them is "
                f"of step {target or 0}. Lower optimizer.learning_rate, set optimizer.clip_norm=1.0, or use "
                "model.dtype=bfloat16 or float32"
            )
        with self.health.phase("restoring"):
            self.checkpoints.set_aside_after(target or 0)  # before the batches are renumbered, should it end in between
            self.rollbacks.add(bad, target or 0)
            if target is None:
                self.state = self.experiment.init()
            else:
                self.state = self.checkpoints.restore(target, self.experiment.abstract_state)
            self.source = self.experiment.put_source(self.split, self.rollbacks.skipped)
        target = target or 0
        self.health.rolled_back(began, target, (began - target) * self.step_s)
        self.outcome.step = self.saved = target
        self.outcome.best = self._best()
        self._close_metrics()
        self.metrics = self._open_metrics(target)
        self.cluster.barrier("rolled back", self.config.health.save_timeout_s)  # mirrors of the metrics may take long
        facts = {"health/rolled_back_from_step": float(began), "health/batches_left_out": float(bad.count)}
        self._write(target, facts)
        _warn(
            self.console,
            f"steps {bad.first} to {bad.last} were not finite: back from step {began} to step {target}, their "
            f"{bad.count} batches are left out (rollback {len(self.rollbacks.done)} of "
            f"{self.config.nonfinite.max_rollbacks})",
        )
        self.watch.lap()

    def _restore_or_init(self, from_step: int | None) -> TrainState:
        """The state to go on from; with `from_step`, newer checkpoints are moved away once that one is known good."""
        step = self._told("latest", self.checkpoints.latest()) if from_step is None else from_step
        if step is None:
            return self.experiment.init()
        try:
            state = self.checkpoints.restore(step, self.experiment.abstract_state)
        except DamagedError as error:
            if not os.environ.get(SUPERVISED):
                raise
            return self._without_damaged(step, error)
        self.console.print(f"going on from the checkpoint of step {step}", highlight=False)
        for moved in self.checkpoints.set_aside_after(step) if from_step is not None else []:
            self.console.print(f"set aside {moved}", highlight=False, soft_wrap=True)
        if self.checkpoints.info(step).get("dataset") != self.about["dataset"]:
            _warn(self.console, f"the dataset at {self.config.data.path} is not the one this run began with")
        return state

    def _without_damaged(self, step: int, error: DamagedError) -> TrainState:
        """Nobody is there to choose: the damaged one is kept aside, the one before it is used, if there is one."""
        if not any(earlier < step for earlier in self.checkpoints.steps()):
            raise error
        self.checkpoints.set_aside_damaged(step)
        text = f"{str(error).splitlines()[0]}\nIt was moved to {SET_ASIDE}/; going on without it"
        if self.cluster.count > 1:  # the others may have read their parts well, and wait
            raise StorageError(text)
        _warn(self.console, text)
        return self._restore_or_init(None)

    def _describe(self, held_out_rows: int) -> None:
        config, mesh = self.config, self.experiment.mesh
        weights = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(self.experiment.abstract_state.params))
        axes = describe_mesh(mesh.shape)
        processes = f" in {self.cluster.count} processes" if self.cluster.count > 1 else ""
        self.console.print(
            f"{self.run}: {weights:,} weights, {config.model.mixing.kind} mixing, {config.model.dtype}; "
            f"{len(self.split):,} training and {held_out_rows:,} held-out puzzles of {self.experiment.info.seq_len} "
            f"cells; batch {config.batch_size} on {mesh.size} × {mesh.devices.flat[0].device_kind}{processes}"
            f"{f' ({axes})' if axes else ''}; steps {self.outcome.step} to {config.steps}",
            highlight=False,
        )

    def _told(self, name: str, value: Any) -> Any:
        """Process 0's value: what each sees for itself may differ."""
        return json.loads(self.cluster.agree(name, json.dumps(value), self.config.health.restore_timeout_s))

    def _best(self) -> tuple[int, float] | None:
        found = self._told("best", self.checkpoints.best())
        return None if found is None else (int(found[0]), float(found[1]))

    def _is_finished(self) -> bool:
        """All steps are done, and the last evaluation too."""
        if self.outcome.step != self.config.steps:
            return self.outcome.step > self.config.steps
        rows = MetricsLog(self.run.folder).read() if self.cluster.is_primary else []
        scored = any(row["step"] == self.outcome.step and "eval/puzzles" in row for row in rows)
        return bool(self._told("evaluated", scored))

    def _check_compiles(self) -> None:
        try:
            self.guard.check()
        except RecompileError:
            if self.cluster.count == 1:  # what was trained is sound
                self._save_for_good()
            raise

    def _split_names(self) -> tuple[str, str]:
        return self.config.data.train_split, self.config.data.eval_split

    def _minutes_due(self, logging: bool) -> bool:
        """By process 0's clock; several processes ask it only when they log, because asking is a wait."""
        minutes = self.config.checkpoint.every_minutes
        now = time.monotonic()
        due = minutes is not None and now - self.saved_at >= 60 * minutes
        due |= self.failed_save_at is not None and now - self.failed_save_at >= RETRY_SAVE_S
        if self.cluster.count == 1:
            return due
        return logging and self.cluster.agree("save", str(int(due)), self.config.health.step_timeout_s) == "1"

    def _open_metrics(self, step: int) -> Metrics | None:
        if not self.cluster.is_primary:
            return None
        log = self.config.log
        return open_metrics(
            self.run.folder,
            tensorboard=log.tensorboard,
            wandb=log.wandb,
            config=self.about["config"],
            resume_step=step,
        )

    def _close_metrics(self, failed: bool = False) -> None:
        if self.metrics is not None:
            self.metrics.close(failed=failed)

    def _write(self, step: int, row: Mapping[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.write(step, row)


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
    """Metrics of the steps since the last row, from their sums; those that were skipped count for nothing."""
    sums = {name: sum(float(part[name]) for part in parts) for name in parts[0]}
    config = experiment.config
    row = {"train/loss": float("nan")}
    if sums["updates"]:
        row = {f"train/{name}": value for name, value in experiment.task.summarise(sums).items()}
        row["train/grad_norm"] = sums["grad_norm"] / sums["updates"]
    if sums["skipped"]:
        row["train/skipped"] = sums["skipped"]
    row["train/learning_rate"] = float(experiment.optimizer.learning_rate(step - 1))
    examples_per_s = len(parts) * config.batch_size / seconds
    row["perf/examples_per_s"] = examples_per_s
    row["perf/step_ms"] = 1000 * seconds / len(parts)
    row["perf/model_tflops"] = examples_per_s * count_matmul_flops(config.model, experiment.shape) / 1e12
    return row


def _warn(console: Console, text: str) -> None:
    console.print("[yellow]warning:[/] ", end="")
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


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
