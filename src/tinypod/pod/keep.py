"""A run on a slice, watched from here: attach to it, show what it prints, and with `keep` bring it to its end.

The workers train detached: this process may end at any time, and another one goes on watching. It only looks (at the
slice, at the workers, at the heartbeats in the bucket) every `poll_s`, and acts on what it sees:

- the slice was preempted, or is faulty: delete it, ask again with growing pauses, set it up, start; training resumes
  from its last checkpoint;
- training failed and starting again may help (`errors.py`): start again, the second time at one step on another slice;
- it is done, failed in a way that no restart mends, failed three times at one step, or has cost what it may: end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.text import Text

from tinypod.cluster.launch import COLOURS, NOISE
from tinypod.errors import EXIT_CODES, EXPLAINED, FINAL, LATER, CorruptionError, DeadlineError, UserError
from tinypod.health.heartbeat import read_heartbeats
from tinypod.pod import lifecycle, ship
from tinypod.pod.gcloud import Gcloud, GcloudError, GcloudTimeout, NoCapacity
from tinypod.pod.job import Job
from tinypod.pod.spending import Spending
from tinypod.pod.state import PodState, read_state
from tinypod.pod.workers import Report, WorkerError, Workers, read_places, write_places
from tinypod.runs import lease
from tinypod.runs.folder import HEALTH, Run
from tinypod.runs.status import checkpoint_steps
from tinypod.runs.terminal import duration, say
from tinypod.study.folder import steps_done

KEEPER = "keeper.lock"  # who watches, beside who trains
PLACES = "workers.json"  # up to where each worker's log was read: attaching again doubles no line
GIVE_UP_AFTER, LONGEST_PAUSE_S = 3, 1800.0
GRACE_S = 120.0  # for a last checkpoint, and for workers that wait for one that has failed
UNREACHABLE_AFTER = 6  # looks at a ready slice of which a worker does not answer
STORAGE_PATIENCE_S = 3600.0
TROUBLES = 10  # of gcloud, in a row


class SpendingLimit(UserError):
    """The run has cost what it may."""


@dataclass(frozen=True)
class Outcome:
    """How a time of watching ended. `lost`: the slice; `failed`: training, on a slice that is still there."""

    kind: Literal["done", "failed", "lost", "limit"]
    why: str = ""
    code: int = 0


@dataclass
class _Patience:
    """What happened since the run last got further."""

    pause_s: float
    failures: int = 0
    troubles: int = 0  # calls and set-ups in a row that failed
    waited_s: float = 0.0


@dataclass
class PodRun:
    """One run on one slice."""

    gcloud: Gcloud
    run: Run  # or study
    job: Job
    console: Console
    sleep: Callable[[float], None] = time.sleep
    _rests: dict[int, bytes] = field(default_factory=dict)
    _furthest: int = -1
    _has_slice: bool = False  # that we asked for, or found, and did not delete
    _reached: bool = False  # gcloud has worked once
    _still_ours: Callable[[], None] = lambda: None  # an error if another machine keeps the run by now

    def __post_init__(self) -> None:
        self.spec = self.gcloud.spec
        self.logs = self.run.folder / "logs"
        self.workers = Workers(self.gcloud, read_places(self.logs / PLACES))
        self._began = time.time()

    # The two ways to run.

    def once(self) -> int:
        """On a slice that is ready; ends with the training, or leaves it where the slice is lost."""
        if self.gcloud.dry_run:
            self._launch()  # the commands that it takes on a slice that is ready and new
            return 0
        self._check_owner()
        state = read_state(self.gcloud)
        if state.phase != "ready":
            raise UserError(
                f"{self.spec.name}: the slice is {state.describe()}. `tinypod pod up` brings it up; `--keep` does so "
                "by itself, and again when it is lost"
            )
        self.spending = Spending(self.spec, self.run)
        self._launch()
        outcome = self._watch()
        if outcome.kind == "limit":
            self._spend_no_more()
        if outcome.kind == "lost":
            raise UserError(
                f"{self.spec.name}: the slice is gone: {outcome.why}. `tinypod pod run --keep` asks for another and "
                "resumes from the last checkpoint"
            )
        return outcome.code

    def keep(self) -> int:
        """Until the run is done, or cannot be; the exit code."""
        assert self.run.remote is not None
        keeper = lease.Lease(self.run.remote, file=KEEPER)
        with keeper.hold(every_s=lease.LAPSE_S / 5):
            self._check_owner()
            self.spending, self._still_ours = Spending(self.spec, self.run), keeper.check
            now, code = _Patience(self.spec.retry_s), 1
            while True:
                outcome = self._attempt(now)
                if outcome is None:
                    continue
                if outcome.kind == "done" or (outcome.kind == "failed" and outcome.code in FINAL):
                    return outcome.code
                if outcome.kind == "limit":
                    self._spend_no_more()
                code = outcome.code or code
                if self._gives_up(outcome, now):
                    return code
                broken = outcome.code == CorruptionError.exit_code or now.failures > 1
                if outcome.kind == "lost" or broken:
                    self._delete(outcome.why or "it may be faulty")
                if outcome.kind == "failed":
                    self._pause(now, "starting again")

    def _attempt(self, now: _Patience) -> Outcome | None:
        """Bring the slice up, start, watch; None if it did not come to that, after a pause."""
        self._still_ours()
        if self.spending.exhausted:
            return Outcome("limit")
        try:
            if self._has_slice and read_state(self.gcloud).phase == "absent":
                raise self._deleted()
            state = lifecycle.up(self.gcloud, self.console, self.sleep)
            self._has_slice = self._reached = True
            self.spending.seen(state.created)
            self._launch()
            now.troubles = 0
        except NoCapacity as error:
            say(self.console, str(error), "yellow")
            self._delete("it came to nothing")
            self._pause(now, "asking again")
            return None
        except (GcloudTimeout, GcloudError, WorkerError) as error:
            now.troubles += 1
            hopeless = type(error) is GcloudError and not self._reached  # no account, no permission, no such zone
            if hopeless or now.troubles >= (GIVE_UP_AFTER if isinstance(error, WorkerError) else TROUBLES):
                raise
            say(self.console, str(error), "yellow")
            self._pause(now, "trying again")
            return None
        return self._watch()

    def _deleted(self) -> UserError:
        """By `pod down`, or by hand: then nobody wants another one."""
        return UserError(
            f"{self.spec.name}: somebody deleted the slice, so it is not asked for again. Run it again to resume"
        )

    def _gives_up(self, outcome: Outcome, now: _Patience) -> bool:
        """Three failures at one step are enough; a slice that was taken away is not the run's failure."""
        step = self._step()
        if step > self._furthest:
            self._furthest = step
            now.failures, now.pause_s, now.waited_s = 0, self.spec.retry_s, 0.0
        where = "before its first step" if step < 0 else f"at step {step:,}"
        if outcome.kind == "lost":
            faulty = outcome.code != 0
            now.failures += faulty
            say(self.console, f"{self.spec.name}: the slice was lost {where}: {outcome.why}", "yellow")
        else:
            if outcome.code not in LATER or now.waited_s > STORAGE_PATIENCE_S:
                now.failures += 1
            meaning = EXIT_CODES[outcome.code].meaning if outcome.code in EXIT_CODES else "it was killed, or crashed"
            say(self.console, f"training ended {where} with exit code {outcome.code}: {meaning}", "yellow")
        if now.failures < GIVE_UP_AFTER:
            return False
        say(
            self.console,
            f"gave up: the run failed {now.failures} times {where}. What each worker printed is in {self.logs}; "
            "docs/reliability.md explains the exit codes",
            "bold red",
        )
        return True

    def _pause(self, now: _Patience, what: str) -> None:
        say(self.console, f"{what} in {duration(now.pause_s)}; {self.spending.describe()} so far")
        self.sleep(now.pause_s)
        now.waited_s += now.pause_s
        now.pause_s = min(2 * now.pause_s, LONGEST_PAUSE_S)

    def _delete(self, why: str) -> None:
        """If Google cannot be asked now, the next attempt finds what is left, and deletes it first."""
        self._has_slice = False
        try:
            state = read_state(self.gcloud)
            if state.phase != "absent":
                say(self.console, f"{self.spec.name}: deleting the slice: {why}")
                lifecycle.delete(self.gcloud, state)
        except (GcloudError, GcloudTimeout) as error:
            say(self.console, f"the slice could not be deleted: {error}", "yellow")

    def _spend_no_more(self) -> None:
        say(self.console, f"the spending limit is reached ({self.spending.describe()}): saving, and deleting the slice")
        try:
            if read_state(self.gcloud).phase == "ready":
                self.workers.stop(GRACE_S)
                self._show(self.workers.reports())
        except (GcloudError, GcloudTimeout, WorkerError) as error:
            say(self.console, f"a last checkpoint may be missing: {error}", "yellow")
        self.spending.write()
        self._delete("the spending limit is reached")
        raise SpendingLimit(
            f"{self.run}: spent {self.spending.describe()}; the slice is deleted, and the run can be resumed. Raise "
            "spending_limit_dollars to continue"
        )

    # Starting and watching.

    def _check_owner(self) -> None:
        """Before money is spent: is the run being trained elsewhere?"""
        if self.run.remote is None or self.job.apart:  # a study is shared: each of its runs has an owner
            return
        held = lease.Lease(self.run.remote, owner=self.spec.owner)
        holder = held.holder()
        if holder is not None and holder.owner != self.spec.owner:
            raise held.refused(holder)

    def _launch(self) -> None:
        """Attach to the run if it is being trained on the slice; else send what is needed and start it."""
        reports = [] if self.gcloud.dry_run else self.workers.reports(with_logs=False)
        others = {report.run for report in reports if report.state == "running" and report.run != str(self.run)}
        if others:
            raise UserError(
                f"{self.spec.name} trains another run: {', '.join(map(str, others))}. Wait for it, watch it with "
                "`tinypod pod logs`, or take another slice (another `name:`)"
            )
        if reports and all(report.state == "running" for report in reports):
            say(self.console, f"{self.run} is being trained on {self.spec.name}: attaching to it")
            return
        self.workers.send(ship.files_to_ship(self.job.files, self.spec.code), self.console)
        environment = {**self.job.environment(self.spec.slice), **self.spec.environment, lease.OWNER: self.spec.owner}
        self._began = time.time()
        self.workers.start(str(self.run), self.job.command, environment, numbered=self.job.apart)
        if self.gcloud.dry_run:
            return
        say(
            self.console,
            f"started {self.run} on {self.workers.count} workers of {self.spec.name}. It continues without this "
            f"command: Ctrl-C detaches, running it again attaches. Logs: {self.logs}",
        )

    def _watch(self) -> Outcome:
        unreachable, failed_at = 0, None
        while True:
            self._still_ours()
            try:
                state = read_state(self.gcloud)
            except (GcloudError, GcloudTimeout) as error:  # this machine is offline, perhaps: the workers train on
                say(self.console, f"looking again in {duration(self.spec.poll_s)}: {error}", "yellow")
                self.sleep(self.spec.poll_s)
                continue
            if state.phase == "absent":
                raise self._deleted()
            if state.phase == "stopped":
                raise UserError(f"{self.spec.name}: somebody stopped the slice ({state.describe()}); nothing is done")
            if state.phase not in ("ready", "starting"):
                return Outcome("lost", state.describe())
            self.spending.seen(state.created)
            reports = self.workers.reports()
            self._show(reports)
            away = [report.unreachable for report in reports if report.unreachable is not None]
            unreachable = unreachable + 1 if away else 0
            if unreachable >= UNREACHABLE_AFTER:
                return self._faulty(state, away[0])
            ended = [report for report in reports if report.state != "running" and report.unreachable is None]
            if len(ended) == len(reports):
                return self._ended(reports)
            if self.spending.exhausted:
                return Outcome("limit")
            if failed_at is None and not self.job.apart and any(report.code not in (None, 0) for report in ended):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
                self.workers.stop(GRACE_S)  # what is left can only wait
            self.sleep(self.spec.poll_s)

    def _faulty(self, state: PodState, why: str) -> Outcome:
        said = why.splitlines()[-1]
        return Outcome("lost", f"{state.describe()}, but a worker does not answer: {said}", DeadlineError.exit_code)

    def _ended(self, reports: list[Report]) -> Outcome:
        while any(report.log for report in reports):  # the rest of long logs
            reports = self.workers.reports()
            self._show(reports)
        for worker in range(len(reports)):
            self._print(worker, self._rests.pop(worker, b""))
        codes = [report.code if report.code is not None else 137 for report in reports]
        bad = [code for code in codes if code]
        if not bad or (self.job.apart and codes[0] == 0):  # worker 0 of a study ends so when all runs are done
            return Outcome("done")
        # One that waited for the others (76), or was aborted with them, knows less than the one that failed.
        telling = [code for code in bad if code in EXPLAINED and code != DeadlineError.exit_code]
        return Outcome("failed", code=(telling or [code for code in bad if code in EXIT_CODES] or bad)[0])

    def _step(self) -> int:
        """How far the run has come, by what lies in the bucket: heartbeats, which may be half a minute old where a
        machine was lost, and checkpoints; -1 before the first. A study: all its runs together."""
        steps = []
        try:
            if self.job.apart:
                return steps_done(self.run)
            self.run.pull_heartbeats()
            steps = checkpoint_steps(self.run.checkpoints)
        except UserError as error:
            say(self.console, f"how far the run has come cannot be read: {error}", "yellow")
        beats = read_heartbeats(self.run.folder / HEALTH)
        return max([*steps, *(beat.step for beat in beats if beat.time >= self._began)], default=-1)

    # What the workers print.

    def _show(self, reports: list[Report]) -> None:
        """Lines to the terminal with the worker's number, and everything to a file a worker."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for worker, report in enumerate(reports):
            if not report.log:
                continue
            with open(self.logs / f"worker_{worker}.log", "ab") as file:
                file.write(report.log)
            *lines, self._rests[worker] = (self._rests.get(worker, b"") + report.log).split(b"\n")
            for line in lines:
                self._print(worker, line)
        write_places(self.logs / PLACES, self.workers.places)

    def _print(self, worker: int, line: bytes) -> None:
        if line:
            show_line(self.console, worker, line)


def show_line(console: Console, worker: int, line: bytes) -> None:
    if not NOISE.search(line):
        prefix = Text(f"[{worker}] ", style=COLOURS[worker % len(COLOURS)])
        console.print(prefix + Text(line.decode(errors="replace")), soft_wrap=True)
