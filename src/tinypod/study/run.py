"""Running a study: pack after pack. Started again it goes on: what has ended is not repeated, what was running resumes.
Started by several processes they share its runs (`claims.py`). A run that fails is marked with its reason, and the
others go on."""

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rich.console import Console

from tinypod import sharding, training
from tinypod.cluster.agreement import Cluster
from tinypod.cluster.stop import stop_on_signals
from tinypod.errors import DeadlineError, DeviceMemoryError, StorageError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.health.ledger import Ledger
from tinypod.health.watch import Health
from tinypod.runs import compile_cache
from tinypod.runs.folder import HEALTH, Run
from tinypod.runs.status import checkpoint_steps
from tinypod.runs.terminal import say, warn
from tinypod.study.claims import Worker, at_once, choosing, claim, is_free
from tinypod.study.file import Study, StudyRun
from tinypod.study.folder import (
    ENDED,
    Outcome,
    read_outcome,
    read_study,
    refresh,
    run_of,
    write_outcome,
    write_study,
)
from tinypod.study.packed import train_pack
from tinypod.study.packing import can_pack, most_devices, pack, shape_of
from tinypod.study.rules import Rules

POLL_S, POLL_STORE_S = 2.0, 15.0  # while others train the last runs


class Ended(NamedTuple):
    outcomes: list[Outcome]  # of all runs of the study
    stopped_by: signal.Signals | None


def run_study(
    study: Study,
    place: Run,
    console: Console,
    *,
    most: int | None = None,
    devices: Sequence[Any] | None = None,
    worker: Worker | None = None,
) -> Ended:
    """Train what has not ended and nobody else trains; `most`: runs in one program. Returns when all runs have ended,
    or at a stop."""
    devices = list(sharding.all_devices() if devices is None else devices)
    worker = worker or Worker()
    with choosing(place, worker):
        refresh(place)
        write_study(study, place)
    rules, stopped_by, told = Rules(study, place), None, ""
    while stopped_by is None:
        with ExitStack() as stack:
            choice = _look(study, place, worker)
            if choice.left and choice.busy < len(choice.left):
                with choosing(place, worker):
                    choice = _choose(stack, study, place, worker, len(devices), most)
            if not choice.left:
                say(console, describe(study, choice, place)) if not told else None
                break
            if not choice.runs:
                told = _tell_who_waits(console, choice, told)
                stopped_by = _wait(console, POLL_STORE_S if place.remote else POLL_S)
                continue
            if not told:
                told = describe(study, choice, place)
                say(console, told)
            most, stopped_by = _train(stack, choice, place, console, devices, rules, worker, most)
    refresh(place)
    return Ended([read_outcome(run_of(place.folder, run.name)) for run in study.runs], stopped_by)


@dataclass(frozen=True)
class Choice:
    left: list[StudyRun]  # that have not ended
    free: list[StudyRun]  # of them: nobody trains them
    packs: list[list[StudyRun]] = field(default_factory=list)  # of those
    runs: list[StudyRun] = field(default_factory=list)  # that this process trains now
    places: list[Run] = field(default_factory=list)  # of them

    @property
    def busy(self) -> int:
        return len(self.left) - len(self.free)


def _look(study: Study, place: Run, worker: Worker) -> Choice:
    refresh(place)
    left = [run for run in study.runs if read_outcome(run_of(place.folder, run.name)).state not in ENDED]
    places = [run_of(place.folder, run.name, place.remote) for run in left]
    are_free = at_once(lambda one: is_free(one, worker), places)
    return Choice(left, [run for run, is_so in zip(left, are_free, strict=True) if is_so])


def _choose(stack: ExitStack, study: Study, place: Run, worker: Worker, num_devices: int, most: int | None) -> Choice:
    """The next runs for this process, which owns them until the stack is left."""
    seen = _look(study, place, worker)
    packs = plan_packs(seen.free, place, num_devices, worker.most(len(seen.free), num_devices, most))
    if not packs:
        return seen
    flops = {run["name"]: run["flops_per_step"] for run in read_study(place.folder)["runs"]}
    chosen = next_pack(packs, worker, lambda run: flops[run.name] * run.config.steps)
    places = [run_of(place.folder, run.name, place.remote) for run in chosen]
    found = []
    for run, where, ours in zip(chosen, places, claim(stack, places, worker), strict=True):
        if ours and read_outcome(where).state not in ENDED:  # it may have ended since it was looked at
            found.append((run, where))
    return replace(seen, packs=packs, runs=[run for run, _ in found], places=[where for _, where in found])


def next_pack(packs: Sequence[list[StudyRun]], worker: Worker, cost: Callable[[StudyRun], float]) -> list[StudyRun]:
    """Alone, the cheapest first: something is known soon. Among several the dearest: small ones fill what is left."""
    choose = min if worker.count == 1 else max
    return choose(packs, key=lambda runs: sum(map(cost, runs)))


def _tell_who_waits(console: Console, choice: Choice, told: str) -> str:
    text = f"other processes train the last {choice.busy} runs; waiting, should one of them end before they do"
    if choice.busy and told != text:
        say(console, text)
        return text
    return told or text


def _wait(console: Console, seconds: float) -> signal.Signals | None:
    with stop_on_signals(Cluster(), lambda text: None) as stop:
        until = time.monotonic() + seconds
        while not stop.requested() and time.monotonic() < until:
            time.sleep(0.1)
        return stop.by


def plan_packs(
    runs: Sequence[StudyRun], place: Run | None, num_devices: int, most: int | None = None
) -> list[list[StudyRun]]:
    """The runs that are trained together. Of those that were interrupted, such as can resume at the same step."""
    saved: list[set[int]] = [set() for _ in runs]
    if place is not None:
        saved = at_once(_saved_steps, [run_of(place.folder, run.name, place.remote) for run in runs])
    shapes = [shape_of(run.config) if can_pack(run.config) else f"alone {number}" for number, run in enumerate(runs)]
    keys = []
    for shape, steps in zip(shapes, saved, strict=True):
        latest = sorted({max(s, default=0) for other, s in zip(shapes, saved, strict=True) if other == shape})
        keys.append(f"{shape} {next(step for step in latest if step in steps or not steps)}" if steps else shape)
    return [[runs[number] for number in group] for group in pack(keys, num_devices, most)]


def _saved_steps(run: Run) -> set[int]:
    return set(checkpoint_steps(run.checkpoints)) if read_outcome(run) != Outcome() else set()


def describe(study: Study, choice: Choice, place: Run) -> str:
    variants = len({run.variant for run in study.runs})
    done = len(study.runs) - len(choice.left)
    sizes = ", ".join(str(len(runs)) for runs in choice.packs)
    text = f"{study.name}: {len(study.runs)} runs ({variants} variants) in {place}"
    text += f"; {done} of them have ended" if done else ""
    text += f"; {choice.busy} are trained elsewhere" if choice.busy else ""
    return text + (f"; {len(choice.packs)} programs, of {sizes} runs" if choice.packs else "; nothing left to do")


def _train(
    stack: ExitStack,
    choice: Choice,
    place: Run,
    console: Console,
    devices: Sequence[Any],
    rules: Rules,
    worker: Worker,
    most: int | None,
) -> tuple[int | None, signal.Signals | None]:
    """The most runs that fit a program, as far as is known, and what stopped it, if something did."""
    runs, places = choice.runs, choice.places
    try:
        if len(runs) == 1:
            return most, _train_alone(runs[0], places[0], console, devices, rules)
        return most, _train_pack(runs, places, place, console, devices, rules, worker)
    except DeviceMemoryError as error:
        if len(runs) == 1:
            _failed(runs, places, console, error)
            return most, None
        warn(console, f"{len(runs)} runs at once do not fit the device; from now on {len(runs) // 2}")
        return len(runs) // 2, None
    except (StorageError, DeadlineError):  # not of these runs alone
        raise
    except UserError as error:
        _failed(runs, places, console, error)
        return most, None


def _train_pack(
    runs: list[StudyRun],
    places: list[Run],
    place: Run,
    console: Console,
    devices: Sequence[Any],
    rules: Rules,
    worker: Worker,
) -> signal.Signals | None:
    config: ExperimentConfig = runs[0].config
    compile_cache.enable(config.compile_cache)
    ledger = Ledger(place.folder, worker.count) if worker.number == 0 else None
    publish, fetch = (place.publish, place.pull_heartbeats) if place.remote else (None, None)
    with (
        Health(place.folder / HEALTH, worker.number, worker.count, config.health, ledger, publish, fetch) as health,
        stop_on_signals(Cluster(), lambda text: say(console, text)) as stop,
    ):
        health.begin(0)
        train_pack(runs, places, console, health, stop, rule=rules, devices=devices)
        if stop.by is not None:
            health.ends(f"stopped: {stop.by.name}")
    place.push()
    return stop.by


def _train_alone(
    run: StudyRun, place: Run, console: Console, devices: Sequence[Any], rules: Rules
) -> signal.Signals | None:
    """With all devices, as `tinypod train` would; but if the rows of a batch do not divide over them, with fewer."""
    used = devices[: most_devices(run.config, len(devices))]
    before, began = read_outcome(place), time.monotonic()
    write_outcome(place, before._replace(state="running"))
    outcome = training.train(
        run.config,
        place,
        console,
        ends=lambda step, scores: rules(step, {run.name: scores}).get(run.name),
        owned=True,
        devices=used,
    )
    seconds = before.seconds + time.monotonic() - began
    ended = before._replace(step=outcome.step, seconds=seconds, reason=outcome.ended)
    if outcome.stopped_by is not None:
        write_outcome(place, ended._replace(state="waiting"))
    else:
        write_outcome(place, ended._replace(state="done" if outcome.ended is None else "stopped_early"))
    return outcome.stopped_by


def _failed(runs: Sequence[StudyRun], places: Sequence[Run], console: Console, error: Exception) -> None:
    for place in places:
        write_outcome(place, read_outcome(place)._replace(state="failed", reason=str(error).splitlines()[0]))
    names = ", ".join(run.name for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    warn(console, f"{names} failed: {error}")
