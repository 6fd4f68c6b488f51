"""Training of a pack: as `train.py` does one run, for many at once. Each keeps a run folder of its own, the same as if
it had been trained alone: config, metrics, checkpoints. A run that diverges is left out of what follows; the others
go on."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import jax
import numpy as np
from rich.console import Console

from tinypod.cluster.agreement import Cluster
from tinypod.cluster.stop import Stop, answer
from tinypod.errors import DeviceMemoryError
from tinypod.experiment import Experiment
from tinypod.health.memory import is_out_of_memory, step_bytes
from tinypod.health.watch import Health
from tinypod.runs.config_history import write_config
from tinypod.runs.curves import plot_curves
from tinypod.runs.description import write_description
from tinypod.runs.folder import Run, with_absolute_paths
from tinypod.runs.metrics import Stopwatch
from tinypod.runs.rows import QUEUED
from tinypod.runs.run_log import RunLog, read_scores
from tinypod.runs.saver import Saver
from tinypod.runs.terminal import TrainingProgress, duration, say, size, warn
from tinypod.step import TrainState, evaluation_params
from tinypod.study.file import StudyRun
from tinypod.study.folder import Outcome, read_outcome, write_outcome
from tinypod.study.pack import PackEvaluator, Program
from tinypod.training import training_record

QUIET = Console(file=StringIO())
# (step, scores of runs by name) -> why some of them end here, by name
Rule = Callable[[int, dict[str, dict[str, float]]], dict[str, str]]


@dataclass
class Member:
    """One run of the pack."""

    number: int
    described: StudyRun
    experiment: Experiment
    run: Run
    saver: Saver
    log: RunLog
    before: Outcome  # as it stood when this process took it up
    bad_steps: int = 0  # in a row, not finite
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def active(self) -> bool:
        return self.outcome.state == "running"


def train_pack(
    runs: Sequence[StudyRun],
    places: Sequence[Run],
    console: Console,
    health: Health,
    stop: Stop,
    *,
    rule: Rule = lambda step, scores: {},
    devices: Sequence[Any] | None = None,
) -> list[Outcome]:
    """Train the runs, which the caller owns, to their last step, or until a stop; those that have checkpoints resume at
    the last step that all of them have. Once half of the runs have ended early it returns, with the others waiting:
    fewer make a faster program."""
    try:
        with ExitStack() as stack:
            return _Pack(runs, places, console, health, stop, rule, devices).train(stack)
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            raise DeviceMemoryError(
                f"{len(runs)} runs in one program ran out of memory; give --pack a number"
            ) from None
        raise


class _Pack:
    def __init__(
        self,
        runs: Sequence[StudyRun],
        places: Sequence[Run],
        console: Console,
        health: Health,
        stop: Stop,
        rule: Rule,
        devices: Sequence[Any] | None,
    ) -> None:
        self.console, self.health, self.stop, self.rule = console, health, stop, rule
        self.program = Program([with_absolute_paths(run.config) for run in runs], devices)
        self.config, self.task = self.program.experiment.config, self.program.experiment.task
        self.members = [
            self._member(number, run, place) for number, (run, place) in enumerate(zip(runs, places, strict=True))
        ]

    def _member(self, number: int, run: StudyRun, place: Run) -> Member:
        experiment = self.program.experiments[number]
        scores = read_scores(place.folder, experiment)
        saver = Saver(place, experiment, Cluster(), QUIET, scores)
        log = RunLog(place, experiment, scores, primary=True)
        return Member(number, run, experiment, place, saver, log, read_outcome(place))

    def train(self, stack: ExitStack) -> list[Outcome]:
        program, config, health = self.program, self.config, self.health
        progress = self.progress = stack.enter_context(
            TrainingProgress(self.console, config.steps, self.task.headline[0], health.doing)
        )
        with health.phase("restoring"):
            state, step = self._restore()
        health.beat(step)
        self.stop.answer = self._answer
        with health.phase("data"):
            evaluator = PackEvaluator(
                self.task.open_evaluation(None), program, config.eval.batch_size, config.eval.limit
            )
            feed = stack.enter_context(closing(self.task.open_feed(program.mesh)))
        for member in self.members:
            write_config(member.run, member.experiment.config, step, [])
            write_description(member.run, member.experiment)
            member.log.open(step)
            stack.callback(member.log.close)
            member.outcome = member.before._replace(state="running", reason=None, packed=len(self.members))
            write_outcome(member.run, member.outcome)
        with health.phase("compiling"):
            train_step = self._compile(state, feed(step), evaluator)
        settings = program.put_settings()
        stack.enter_context(health.phase("stepping"))
        progress.begin(step)
        pending: list[dict[str, jax.Array]] = []
        watch, began, saved_at = Stopwatch(), time.monotonic(), time.monotonic()
        if step == config.steps:  # a stop came during the last evaluation
            self._evaluate(evaluator, state, step)
        while step < config.steps and not self.stop.requested() and not self._half_have_ended():
            inputs = program.put(np.int32(step)), feed(step)
            with jax.transfer_guard("disallow"):
                state, sums = train_step(state, settings, *inputs)
            pending.append(sums)
            if len(pending) > QUEUED:
                jax.block_until_ready(pending[-1 - QUEUED])
            step += 1
            health.beat(step)
            progress.step(step)
            last = step == config.steps
            evaluating = last or _is_multiple(step, config.eval.every_steps)
            minutes = config.checkpoint.every_minutes
            saving = last or _is_multiple(step, config.checkpoint.every_steps)
            saving |= minutes is not None and time.monotonic() - saved_at >= 60 * minutes
            if evaluating or saving or _is_multiple(step, config.log.every_steps):
                self._log(step, pending, watch)
            with watch.pause():
                if evaluating:
                    self._evaluate(evaluator, state, step)
                if saving or not all(m.active for m in self.members):
                    self._save(state, step, began)
                    saved_at = time.monotonic()
        self._log(step, pending, watch)
        self._save(state, step, began, ending=True)
        for member in self.members:
            member.log.close()
            plot_curves(member.run.folder, self.task.headline)
            member.run.push()
            health.beat()
        return [member.outcome for member in self.members]

    def _answer(self) -> str:
        phase, step = self.health.doing()[0], self.health.step
        saved = min(member.saver.checkpoints.complete(step) for member in self.members)
        return answer("evaluating all" if phase == "evaluating" else phase, step, saved)

    def _restore(self) -> tuple[TrainState, int]:
        """The state of the last step that all runs have a checkpoint of."""
        common = set.intersection(*(set(member.saver.checkpoints.steps()) for member in self.members))
        step = max(common, default=0)
        if not step:
            return self.program.init(), 0
        states = []
        for member in self.members:
            restored = member.saver.restore(step, set_newer_aside=True)
            states.append(restored.state)
            member.bad_steps = restored.bad_steps
        say(self.console, f"resuming {len(states)} runs from step {step:,}")
        return self.program.stack(states), step

    def _compile(self, state: TrainState, fed: Any, evaluator: PackEvaluator) -> Any:
        began = time.perf_counter()
        self.progress.detail("compiling", f"compiling the step of {len(self.members)} runs")
        train_step = self.program.compile(fed)
        needed = step_bytes(train_step)
        memory = "" if needed is None else f"; it needs {size(needed)} per device"
        devices = f"{self.program.mesh.size} × {self.program.mesh.devices.flat[0].device_kind}"
        seconds = duration(time.perf_counter() - began)
        say(self.console, f"compiled the step of {len(self.members)} runs on {devices} in {seconds}{memory}")
        self.progress.detail("compiling", "compiling the evaluation")
        evaluator.compile(evaluation_params(state.params, state.ema, self.config.eval.weights))
        self.program.take(state, 0)
        return train_step

    def _log(self, step: int, pending: list[dict[str, jax.Array]], watch: Stopwatch) -> None:
        if not pending:
            return
        fetched = jax.device_get(pending)
        pending.clear()
        seconds = watch.lap()
        self.health.timed(len(fetched), seconds)
        records = []
        for member in self.members:
            if not member.active:
                continue
            parts = [{name: x[member.number] for name, x in part.items()} for part in fetched]
            records.append(training_record(member.experiment, parts, seconds))  # a step of the pack is one of each run
            member.log.write(step, records[-1])
            for part in parts:
                member.bad_steps = member.bad_steps + 1 if part["skipped"] else 0
            if member.bad_steps >= self.config.nonfinite.rollback_after:
                text = f"loss or gradients were not finite in the last {member.bad_steps} steps"
                self._end(member, "diverged", text, step)
        if records:
            self.progress.trained(step, _median(records))

    def _evaluate(self, evaluator: PackEvaluator, state: TrainState, step: int) -> None:
        rows, total = 0, evaluator.rows

        def scored_more(more: int) -> None:
            nonlocal rows
            rows += more
            self.progress.detail("evaluating", f"evaluating {rows:,}/{total:,}")
            self.health.beat()

        self.progress.detail("evaluating", f"evaluating 0/{total:,}")
        with self.health.phase("evaluating"):
            params = evaluation_params(state.params, state.ema, self.config.eval.weights)
            found = evaluator(params, scored_more)
        scored = {}
        active = [member for member in self.members if member.active]
        for member in active:
            scored[member.described.name] = {f"eval/{name}": x for name, x in found[member.number].items()}
            member.log.write(step, scored[member.described.name])
        last = step == self.config.steps
        why = {} if last else self.rule(step, scored)
        for member in active:
            if last:
                member.outcome = member.outcome._replace(state="done", step=step)
            elif member.described.name in why:
                self._end(member, "stopped_early", why[member.described.name], step)
        if scored:
            self.progress.evaluated(step, _median(list(scored.values())))

    def _half_have_ended(self) -> bool:
        return 2 * sum(member.active for member in self.members) <= len(self.members)

    def _end(self, member: Member, state: Any, reason: str, step: int) -> None:
        member.outcome = member.outcome._replace(state=state, reason=reason, step=step)
        warn(self.console, f"{member.described.name} {state.replace('_', ' ')} at step {step:,}: {reason}")

    def _save(self, state: TrainState, step: int, began: float, *, ending: bool = False) -> None:
        """Of each run that goes on, or has just ended, a checkpoint; then how it stands."""
        self.progress.detail("saving", f"saving step {step:,} of {len(self.members)} runs")
        with self.health.phase("saving"):
            for member in self.members:
                if member.outcome.state != "running" and member.outcome.step != step:
                    continue  # ended before
                one = self.program.take(state, member.number)
                save = member.saver.finish if ending or not member.active else None
                if save is not None:
                    save(one, step, member.bad_steps, member.log.flush, self.health.beat)
                else:
                    member.saver.save(one, step, member.bad_steps, member.log.flush)
                share = (time.monotonic() - began) / len(self.members)
                done = member.outcome._replace(step=step, seconds=member.before.seconds + share)
                member.outcome = done
                write_outcome(member.run, done if done.state != "running" else done._replace(state="waiting"))
                self.health.beat()


def _median(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """For the progress line, of the runs at hand; their speeds add up."""
    names = set.intersection(*(set(record) for record in records))
    found = {}
    for name in names:
        values = [record[name] for record in records if not math.isnan(record[name])]
        middle = np.sum if name == "perf/examples_per_s" else np.median
        found[name] = float(middle(values)) if values else math.nan
    return found


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
