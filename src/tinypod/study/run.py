"""Running a study: pack after pack, the cheapest first. Started again it goes on: what has ended is not repeated, what
was running resumes. A run that fails is marked with its reason, and the others go on."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tinypod import sharding
from tinypod import train as training
from tinypod.cluster.agreement import Cluster
from tinypod.cluster.stop import stop_on_signals
from tinypod.errors import DeadlineError, DeviceMemoryError, StorageError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.health.goodput import Ledger
from tinypod.health.watch import Health
from tinypod.runs import compile_cache
from tinypod.runs.folder import CHECKPOINTS, HEALTH, Run, lock
from tinypod.runs.terminal import say, warn
from tinypod.study.file import Study, StudyRun
from tinypod.study.folder import ENDED, Outcome, read_outcome, read_study, run_of, write_outcome, write_study
from tinypod.study.packed import train_pack
from tinypod.study.packing import can_pack, pack, shape_of
from tinypod.study.rules import Rules


class Ended(NamedTuple):
    outcomes: list[Outcome]  # of all runs of the study
    stopped_by: signal.Signals | None


def run_study(
    study: Study, folder: Path, console: Console, *, most: int | None = None, devices: Sequence[Any] | None = None
) -> Ended:
    """Train what has not ended; `most`: runs in one program."""
    devices = list(sharding.all_devices() if devices is None else devices)
    write_study(study, folder)
    with lock(Run(folder)):
        cost = {run["name"]: run["flops_per_step"] for run in read_study(folder)["runs"]}
        rules, stopped_by, told = Rules(study, folder), None, False
        while stopped_by is None:
            left = [run for run in study.runs if read_outcome(run_of(folder, run.name)).state not in ENDED]
            packs = plan_packs(left, folder, len(devices), most)
            if not told:
                say(console, describe(study, left, packs, folder))
                told = True
            if not packs:
                break
            runs = min(packs, key=lambda runs: sum(cost[run.name] * run.config.steps for run in runs))
            try:
                stopped_by = _train(runs, folder, console, devices, rules)
            except DeviceMemoryError as error:
                if len(runs) == 1:
                    _failed(runs, folder, console, error)
                    continue
                most = len(runs) // 2
                warn(console, f"{len(runs)} runs at once do not fit the device; from now on {most}")
            except (StorageError, DeadlineError):  # not of these runs alone
                raise
            except UserError as error:
                _failed(runs, folder, console, error)
    return Ended([read_outcome(run_of(folder, run.name)) for run in study.runs], stopped_by)


def plan_packs(
    runs: Sequence[StudyRun], folder: Path | None, num_devices: int, most: int | None = None
) -> list[list[StudyRun]]:
    """The runs that are trained together. Of those that were interrupted, such as can resume at the same step."""
    saved = [_saved_steps(run_of(folder, run.name)) if folder else set() for run in runs]
    shapes = [shape_of(run.config) if can_pack(run.config) else f"alone {number}" for number, run in enumerate(runs)]
    keys = []
    for shape, steps in zip(shapes, saved, strict=True):
        latest = sorted({max(s, default=0) for other, s in zip(shapes, saved, strict=True) if other == shape})
        keys.append(f"{shape} {next(step for step in latest if step in steps or not steps)}" if steps else shape)
    return [[runs[number] for number in group] for group in pack(keys, num_devices, most)]


def _saved_steps(run: Run) -> set[int]:
    folder = run.folder / CHECKPOINTS
    return {int(path.name) for path in folder.iterdir() if path.name.isdigit()} if folder.is_dir() else set()


def describe(study: Study, left: Sequence[StudyRun], packs: Sequence[Sequence[StudyRun]], folder: Path) -> str:
    variants = len({run.variant for run in study.runs})
    done = len(study.runs) - len(left)
    sizes = ", ".join(str(len(runs)) for runs in packs)
    text = f"{study.name}: {len(study.runs)} runs ({variants} variants) in {folder}"
    text += f"; {done} of them have ended" if done else ""
    return text + (f"; {len(packs)} programs, of {sizes} runs" if packs else "; nothing left to do")


def _train(
    runs: list[StudyRun], folder: Path, console: Console, devices: Sequence[Any], rules: Rules
) -> signal.Signals | None:
    """What stopped it, if something did."""
    places = [run_of(folder, run.name) for run in runs]
    config: ExperimentConfig = runs[0].config
    if len(runs) == 1:
        return _train_alone(runs[0], places[0], console, rules)
    compile_cache.enable(config.compile_cache)
    ledger = Ledger(folder, 1)
    with (
        Health(folder / HEALTH, 0, 1, config.health, ledger) as health,
        stop_on_signals(Cluster(), lambda text: say(console, text)) as stop,
    ):
        health.begin(0)
        train_pack(runs, places, console, health, stop, rule=rules, devices=devices)
        return stop.by


def _train_alone(run: StudyRun, place: Run, console: Console, rules: Rules) -> signal.Signals | None:
    """With all devices, as `tinypod train` would."""
    before, began = read_outcome(place), time.monotonic()
    write_outcome(place, before._replace(state="running"))
    outcome = training.train(
        run.config, place, console, ends=lambda step, scores: rules(step, {run.name: scores}).get(run.name)
    )
    seconds = before.seconds + time.monotonic() - began
    ended = before._replace(step=outcome.step, seconds=seconds, reason=outcome.ended)
    if outcome.stopped_by is not None:
        write_outcome(place, ended._replace(state="waiting"))
    else:
        write_outcome(place, ended._replace(state="done" if outcome.ended is None else "stopped_early"))
    return outcome.stopped_by


def _failed(runs: Sequence[StudyRun], folder: Path, console: Console, error: Exception) -> None:
    for run in runs:
        place = run_of(folder, run.name)
        write_outcome(place, read_outcome(place)._replace(state="failed", reason=str(error).splitlines()[0]))
    names = ", ".join(run.name for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    warn(console, f"{names} failed: {error}")
