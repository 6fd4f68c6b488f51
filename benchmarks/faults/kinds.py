"""The faults. Each takes a run that is stepping, breaks it, and waits until it steps again."""

import contextlib
import json
import math
import os
import random
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import EVERY, PATIENCE_S, Fault, NeedsAHand, Victim, can_mount, has_store


def kill(victim: Victim) -> None:
    """SIGKILL of all training processes; the supervisor starts them again."""
    pids, fault = victim.pids(), Fault("kill", victim.step())
    victim.kill(pids)
    victim.comes_back(fault, since=pids)


def kill_one(victim: Victim) -> None:
    """SIGKILL of one process of a cluster."""
    pids = victim.pids()
    index = victim.random.randrange(len(pids))
    fault = Fault("kill_one", victim.step(), note=f"process {index}")
    victim.kill([pids[index]])
    victim.comes_back(fault, since=pids)


def kill_everything(victim: Victim) -> None:
    """SIGKILL of the supervisor, and so of all: as if the machine had gone. Somebody starts the command again."""
    pids, fault = victim.pids(), Fault("kill_everything", victim.step())
    assert victim.process is not None
    victim.process.kill()
    victim.comes_back(fault, since=pids, ended=True)


def kill_in_save(victim: Victim) -> None:
    """SIGKILL while a checkpoint is being written."""
    folder, pids = victim.folder / "checkpoints", victim.pids()

    def saving() -> bool:
        return any(".orbax-checkpoint-tmp" in name for name in os.listdir(folder))

    if not victim.until(saving, "a save", interval_s=0.001):
        return
    time.sleep(victim.random.uniform(0, 0.04))
    fault = Fault("kill_in_save", victim.step())
    victim.kill(pids)
    fault.note = "cut off" if saving() else "just done"
    victim.comes_back(fault, since=pids)


def kill_in_restore(victim: Victim) -> None:
    """SIGKILL, and once more while the new process starts and restores."""
    pids, first = victim.pids(), Fault("kill", victim.step())
    victim.kill(pids)
    victim.until(lambda: len(new := victim.pids()) == victim.processes and not set(new) & set(pids), "a new start")
    new = victim.pids()
    if victim.random.random() < 0.7:  # it takes the lock right before it restores
        lock = victim.folder / ".lock"
        victim.until(lambda: lock.read_text() == str(new[0]), "the lock", interval_s=0.001)
        wait_s = victim.random.uniform(0, 0.5)
    else:
        wait_s = victim.random.uniform(0, 6)
    time.sleep(wait_s)
    second = Fault("kill_in_restore", victim.step(), note=f"+{wait_s:.2f} s")
    victim.kill(new)
    victim.comes_back(first, second, since=[*pids, *new])


def sigterm(victim: Victim) -> None:
    """SIGTERM to the command: it saves and ends with 143. Somebody starts it again."""
    pids, fault = victim.pids(), Fault("sigterm", victim.step())
    assert victim.process is not None
    victim.process.terminate()
    victim.process.wait(PATIENCE_S)
    if victim.process.returncode not in (0, 143):
        raise NeedsAHand(f"SIGTERM ended it with exit code {victim.process.returncode}")
    victim.comes_back(fault, since=pids, ended=True)


def sigterm_group(victim: Victim) -> None:
    """SIGTERM to the supervisor and all its processes at once, as schedulers do, in any order. No step may be lost."""
    pids, fault = victim.pids(), Fault("sigterm_group", victim.step())
    assert victim.process is not None
    groups = [victim.process.pid, *pids]  # each leads a session of its own
    victim.random.shuffle(groups)
    fault.note = "supervisor at place " + str(groups.index(victim.process.pid))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGTERM)
        time.sleep(victim.random.uniform(0, 0.001 / len(groups)))
    victim.process.wait(PATIENCE_S)
    if victim.process.returncode not in (0, 143):
        raise NeedsAHand(f"SIGTERM to all ended it with exit code {victim.process.returncode}")
    victim.comes_back(fault, since=pids, ended=True)
    if fault.lost_steps:
        raise NeedsAHand(f"SIGTERM to all ({fault.note}) lost {fault.lost_steps} steps")


def sigterm_one(victim: Victim) -> None:
    """SIGTERM to one training process, as a cloud tells one host: all save and end; the supervisor starts them."""
    pids = victim.pids()
    index = victim.random.randrange(len(pids))
    fault = Fault("sigterm_one", victim.step(), note=f"process {index}")
    victim.kill([pids[index]], signal.SIGTERM)
    victim.comes_back(fault, since=pids)


def sigstop(victim: Victim) -> None:
    """SIGSTOP of one process: the others name it when their deadline has passed."""
    pids = victim.pids()
    index = victim.random.randrange(len(pids))
    fault = Fault("sigstop", victim.step(), note=f"process {index}")
    told = len(victim.output())
    victim.kill([pids[index]], signal.SIGSTOP)
    victim.comes_back(fault, since=pids)
    named = rf"suspect: process {index} \(host .*, pid {pids[index]}\) has been silent"
    if not re.search(named, victim.output()[told:]):
        raise NeedsAHand(f"process {index} was frozen, and nobody named it")
    victim.kill([pids[index]])  # the launcher should have


def truncate(victim: Victim) -> None:
    """SIGKILL, and the newest checkpoint's largest file is cut in half before the next start."""
    pids, fault = victim.pids(), Fault("truncate", victim.step())
    victim.kill(pids)
    steps = [path for path in (victim.folder / "checkpoints").iterdir() if path.name.isdigit()]
    files = [path for path in max(steps, key=lambda path: int(path.name)).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    fault.note = str(largest.relative_to(victim.folder))
    victim.comes_back(fault, since=pids)


def full_disk(victim: Victim) -> None:
    """The disk is full until a save has failed, and for up to two seconds more; one time in three while it starts."""
    pids, fault = victim.pids(), Fault("full_disk", victim.step())
    told = len(NO_SPACE.findall(victim.output()))
    with full(victim.disk):
        if victim.random.random() < 1 / 3:
            fault.note = "killed, too"
            victim.kill(pids)
        failed = victim.until(lambda: len(NO_SPACE.findall(victim.output())) > told, "a failure to write")
        time.sleep(victim.random.uniform(0, 2))
    if failed:
        _lives_on(victim, fault, pids)


NO_SPACE = re.compile("no space left", re.IGNORECASE)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(b"\0" * 4096):
                pass
        try:
            yield
        finally:
            ballast.unlink()


def refuse(victim: Victim) -> None:
    """The object store answers 503 to everything for up to five seconds, or for longer than it is asked again."""
    pids, fault = victim.pids(), Fault("refuse", victim.step())
    seconds = victim.random.uniform(0.5, 5) if victim.random.random() < 0.8 else 14.0
    fault.note = f"{seconds:.1f} s"
    request = urllib.request.Request(f"{victim.bench.store()}/-/fail?seconds={seconds}", method="POST")
    urllib.request.urlopen(request).close()
    time.sleep(seconds)
    _lives_on(victim, fault, pids)


def _lives_on(victim: Victim, fault: Fault, pids: list[int]) -> None:
    """Steps go on in the same processes, or in new ones."""
    began = time.time()

    def stepping() -> bool:
        if victim.pids() == pids:
            fault.step = max(fault.step, victim.step())
        return bool(victim.last_row()["time"] > began)

    if victim.until(stepping, "a step after a fault") and victim.pids() != pids:
        first = next(row for row in victim.rows() if row["time"] > began)
        fault.lost_steps = max(0, fault.step + 1 - first["step"])
        fault.restart_s = first["time"] - began
    victim.result.faults.append(fault)


@dataclass(frozen=True)
class Kind:
    """How runs with one kind of fault are made."""

    inject: Callable[[Victim], None] | None
    share: float  # of all faults
    faults: int = 5  # a run
    processes: int = 1
    overrides: tuple[str, ...] = ()
    remote: bool = False


SECONDS = ("health.step_timeout_s=8",)
KINDS = {
    "kill": Kind(kill, 0.075),
    "kill_everything": Kind(kill_everything, 0.075),
    "kill_in_save": Kind(kill_in_save, 0.1),
    "kill_in_restore": Kind(kill_in_restore, 0.075),
    "sigterm": Kind(sigterm, 0.075),
    "sigterm_group": Kind(sigterm_group, 0.075),
    "truncate": Kind(truncate, 0.075),
    "full_disk": Kind(full_disk, 0.16, faults=4),
    "refuse": Kind(refuse, 0.15, remote=True),
    "nan": Kind(None, 0.09, faults=3, overrides=("nonfinite.rollback_after=3",)),
    "kill_cluster": Kind(kill, 0.025, processes=2),
    "kill_one": Kind(kill_one, 0.025, processes=2),
    "sigterm_cluster": Kind(sigterm, 0.025, processes=2),
    "sigterm_group_cluster": Kind(sigterm_group, 0.025, processes=2),
    "sigterm_one": Kind(sigterm_one, 0.015, faults=3, processes=2),
    "truncate_cluster": Kind(truncate, 0.015, faults=3, processes=2),
    "sigstop": Kind(sigstop, 0.015, faults=3, processes=2, overrides=SECONDS),
}


def of(name: str) -> Kind:
    return KINDS[name.rsplit("-", 2)[0]]


MEANINGS = {
    "kill": "SIGKILL of all processes",
    "kill_one": "SIGKILL of one process",
    "kill_everything": "SIGKILL of all and the supervisor",
    "kill_in_save": "SIGKILL during a save",
    "kill_in_restore": "SIGKILL during start or restore",
    "sigterm": "SIGTERM to the command",
    "sigterm_group": "SIGTERM to the command and its processes at once",
    "sigterm_one": "SIGTERM to one process",
    "sigstop": "SIGSTOP of one process",
    "truncate": "truncated checkpoint file",
    "full_disk": "full disk",
    "refuse": "object store answers 503",
    "nan": "NaN batches (3 in a row)",
}


def left_out(kinds: list[str], out: Path) -> dict[str, str]:
    """Those that cannot be done on this machine, and why."""
    reasons = {}
    for kind in kinds:
        if KINDS[kind].remote and not has_store():
            reasons[kind] = "gcp-storage-emulator and gcsfs are not installed"
        if KINDS[kind].inject is full_disk and not can_mount(out):
            reasons[kind] = "only root can make the small disk that it fills"
    return reasons


def random_moments(draw: random.Random, steps: int, count: int) -> list[int]:
    """A step in each of so many equal parts of the run; each part has room for what a fault takes back."""
    part = (steps - 3 * EVERY) // count
    return [2 * EVERY + number * part + draw.randrange(part // 2) for number in range(count)]


def rollbacks(victim: Victim) -> list[Fault]:
    done = json.loads((victim.folder / "rollbacks.json").read_text())
    return [Fault("nan", entry["steps"][1], entry["steps"][1] - entry["back_to"]) for entry in done]


def planned(kinds: list[str], faults: int, seed: int, a_run: int | None) -> list[str]:
    """Names of runs, the kinds in turn, so that whatever is there when it is stopped is a picture of all."""
    total = sum(KINDS[kind].share for kind in kinds)
    counts = {kind: math.ceil(faults * KINDS[kind].share / total / (a_run or KINDS[kind].faults)) for kind in kinds}
    return [f"{kind}-{seed}-{n}" for n in range(max(counts.values())) for kind in kinds if n < counts[kind]]
