"""Restoring and saving of a run that trains.

A disk that is full now may have room later: a save that fails is tried again while training continues, and at the end
of a run it is waited for. With several processes a save that fails in one ends all: the others wait for it.
"""

import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console

from tinypod.cluster.agreement import Cluster
from tinypod.errors import CheckpointError, ConfigError, DamagedError, StorageError
from tinypod.experiment import Experiment
from tinypod.runs.checkpoints import CARRY, LEFT_OUT, Checkpoints
from tinypod.runs.folder import IMPORTED, Run
from tinypod.runs.set_aside import SET_ASIDE
from tinypod.runs.terminal import say, warn
from tinypod.step import TrainState

SUPERVISED = "TINYPOD_SUPERVISED"  # set by `--supervise`: nobody is there to choose
RETRY_SAVE_S = 30.0  # after a save that failed
GIVE_UP_SAVING_S = 900.0  # at the end of a run, when there is nothing left to do but save


class Restored(NamedTuple):
    state: TrainState
    bad_steps: int  # in a row, not finite, up to this state


def open_checkpoints(
    run: Run,
    experiment: Experiment,
    scores: dict[int, float],
    cluster: Cluster | None = None,
    *,
    read_only: bool = False,
) -> Checkpoints:
    config, best = experiment.config, experiment.best
    return Checkpoints(
        run.checkpoints,
        cluster=cluster,
        keep_last=config.checkpoint.keep_last,
        keep_every_hours=config.checkpoint.keep_every_hours,
        score_of=scores.get,
        best_mode=best.direction if best else "max",
        read_only=read_only,
        timeout_s=math.ceil(config.health.save_timeout_s),
    )


def about(experiment: Experiment) -> dict[str, Any]:
    """What a checkpoint says about where it comes from."""
    return {"config": experiment.config.model_dump(mode="json"), "dataset": dict(experiment.task.fingerprint)}


class Saver:
    """The checkpoints of this attempt. `before` is called before each save, in all processes."""

    def __init__(
        self, run: Run, experiment: Experiment, cluster: Cluster, console: Console, scores: dict[int, float]
    ) -> None:
        self.run, self.experiment, self.cluster, self.console = run, experiment, cluster, console
        self.checkpoints = open_checkpoints(run, experiment, scores, cluster)
        for incomplete in self.checkpoints.incomplete():
            warn(console, str(incomplete))
        self._saved: int | None = None
        self._saved_at = time.monotonic()
        self._failed_at: float | None = None

    def latest(self, before: float = math.inf) -> int | None:
        """The latest checkpoint before a step, as process 0 sees it."""
        return self._broadcast("latest", max((s for s in self.checkpoints.steps() if s < before), default=None))

    def best(self) -> tuple[int, float] | None:
        found = self._broadcast("best", self.checkpoints.best())
        return found and (found[0], found[1])

    def begin(self) -> Restored:
        """The state of step 0, where there is no checkpoint."""
        if self._broadcast("imported", (self.run.folder / IMPORTED).exists()):
            raise CheckpointError(
                f"{self.run} began with imported weights and has no sound checkpoint: import them into another run"
            )
        self.restored(0)
        return Restored(self.experiment.init(), 0)

    def restore(self, step: int, *, set_newer_aside: bool = False) -> Restored:
        """The state of a step; under a supervisor, a damaged one is set aside for the one before it, or step 0."""
        try:
            state = self.state_at(step)
        except DamagedError as error:
            if not os.environ.get(SUPERVISED):
                raise
            return self._restore_without_damaged(step, error)
        info = self.checkpoints.info(step)
        fingerprint = dict(self.experiment.task.fingerprint)
        if step and (began := info.get("dataset", fingerprint)) != fingerprint:  # imported weights saw no data yet
            parts = [name for name in {*began, *fingerprint} if began.get(name) != fingerprint.get(name)]
            raise ConfigError(
                f"data.path={self.experiment.config.data.path}: not the data that this run was trained on "
                f"({', '.join(sorted(parts))} differ); give it the same data, or choose another --run"
            )
        say(self.console, f"resuming from the checkpoint of step {step:,}")
        for moved in self.checkpoints.set_aside_after(step) if set_newer_aside else []:
            say(self.console, f"set aside {moved}")
        self.restored(step)
        return Restored(state, int(info.get("bad_steps", 0)))

    def state_at(self, step: int) -> TrainState:
        """As it was saved; a carry that was left out (`runs pack --without-carry`) begins anew."""
        abstract = self.experiment.abstract_state
        if CARRY not in self.checkpoints.info(step).get(LEFT_OUT, ()):
            return self.checkpoints.restore(step, abstract)
        state: TrainState = self.checkpoints.restore(step, abstract._replace(carry={}))
        say(
            self.console,
            f"the checkpoint of step {step:,} was packed without its carry: every row begins a new example",
        )
        return state._replace(carry=self.experiment.init_carry(state.params))

    def _restore_without_damaged(self, step: int, error: DamagedError) -> Restored:
        self.checkpoints.set_aside_damaged(step)
        text = f"{str(error).splitlines()[0]}\nIt was moved to {SET_ASIDE}/; resuming without it"
        if self.cluster.count > 1:  # the others may have read their parts well, and wait
            raise StorageError(text)
        warn(self.console, text)
        latest = self.latest()
        return self.begin() if latest is None else self.restore(latest)

    def restored(self, step: int) -> None:
        """The state at hand is that of a checkpoint, or of step 0."""
        self._saved, self._saved_at = step, time.monotonic()

    def minutes_due(self, ask: bool) -> bool:
        """By process 0's clock; several processes compare theirs only where `ask` says so, because that is a wait."""
        minutes = self.experiment.config.checkpoint.every_minutes
        now = time.monotonic()
        due = minutes is not None and now - self._saved_at >= 60 * minutes
        due |= self._failed_at is not None and now - self._failed_at >= RETRY_SAVE_S
        if self.cluster.count == 1:
            return due
        return ask and bool(self._broadcast("save", due))

    def save(self, state: TrainState, step: int, bad_steps: int, before: Callable[[], None]) -> None:
        """Start saving; if that fails, training continues and it is tried again."""
        try:
            self._start(state, step, bad_steps, before)
        except StorageError as error:
            if self.cluster.count > 1:
                raise
            self._failed_at = time.monotonic()
            warn(self.console, f"{error}. Training continues; next try in {RETRY_SAVE_S:.0f} s")

    def finish(
        self, state: TrainState, step: int, bad_steps: int, before: Callable[[], None], beat: Callable[[], None]
    ) -> None:
        """What has been trained must be on disk before this process ends; a full disk is waited for."""
        began, pause_s = time.monotonic(), 1.0
        while True:
            try:
                if self._saved != step or self._failed_at is not None:
                    self._start(state, step, bad_steps, before)
                self.checkpoints.wait()
                return
            except StorageError as error:
                left_s = GIVE_UP_SAVING_S - (time.monotonic() - began)
                if self.cluster.count > 1 or left_s < pause_s:
                    raise
                self._failed_at = time.monotonic()
                warn(self.console, f"{error}. Waiting for room; next try in {pause_s:.0f} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_SAVE_S)
                beat()

    def _start(self, state: TrainState, step: int, bad_steps: int, before: Callable[[], None]) -> None:
        before()
        # A store may take longer than Gloo waits.
        self.cluster.barrier("pushed", self.experiment.config.health.save_timeout_s)
        self.checkpoints.save(state, about(self.experiment) | {"bad_steps": bad_steps})
        self._failed_at = None
        self.restored(step)

    def _broadcast(self, name: str, value: Any) -> Any:
        """Process 0's value: what each sees for itself may differ."""
        return self.cluster.broadcast(name, value, self.experiment.config.health.restore_timeout_s)
