"""Break runs on purpose, at random moments, and judge each by its end.

    python benchmarks/faults.py --faults 190 --jobs 4            # about half an hour on two cores
    python benchmarks/faults.py --kinds kill,sigterm --faults 6  # a minute or two
    python benchmarks/faults.py --table                          # once more from the results that are there

Every run is the real command with `--supervise`, on a tiny model and puzzles made up here. It suffers several faults,
each at a random step (the seed decides which), and must come to its end with nothing but the same command: by itself,
or started again where the fault took the supervisor, too, or ended the run as asked (SIGTERM). Then

- the last checkpoint must equal, to the bit, that of a run which nothing disturbed (same config, same mesh; for NaN
  batches: one that was told from the beginning to leave them out),
- `metrics.jsonl` must have every step once, and only once,
- every checkpoint in the folder must restore, with the right checksums.

A step is lost if it was in `metrics.jsonl` when the fault came and had to be done again. Restart time is from the fault
to the first new step. Each finished run is a line in `OUT/results.jsonl`; the same command goes on after the last one.
"""

import argparse
import collections
import contextlib
import datetime
import fcntl
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REPOSITORY = Path(__file__).parents[1]
EVERY, BUCKET = 20, "faults"
PATIENCE_S = 240.0  # for anything that is waited for, on a busy machine
TINY = (
    "batch_size=16",
    "model.hidden_size=16",
    "model.mlp_multiple_of=16",
    "model.unroll=false",
    "model.H_cycles=2",
    "model.L_cycles=1",
    "model.dtype=float32",
    "model.puzzle_embedding={kind: table, width: 8, length: 2}",
    "task.halting.max_steps=3",
    "optimizer.learning_rate=1e-3",
    "optimizer.schedule={kind: constant, warmup_steps: 2}",
    "ema_decay=0.9",
    "eval.every_steps=null",
    "eval.batch_size=8",
    f"checkpoint.every_steps={EVERY}",
    "log.every_steps=1",
    "log.tensorboard=false",
    "health.heartbeat_s=0.5",
    "health.step_timeout_s=60",
    "health.save_timeout_s=90",
)
POISON = """import os
if numbers := os.environ.get("TINYPOD_FAULTS_POISON"):
    from poison import poison
    poison([int(number) for number in numbers.split(",")])
"""
console = Console()


@dataclass
class Fault:
    kind: str
    step: int  # the last in metrics.jsonl when it came
    lost_steps: int = 0
    restart_s: float | None = None  # None: nothing had to be started again, or another fault came first
    note: str = ""
    at: float = field(default_factory=time.time)


@dataclass
class Result:
    """A finished run."""

    name: str
    processes: int
    faults: list[Fault] = field(default_factory=list)
    right: bool = False  # its last checkpoint is the reference's, to the bit, and no step is missing or doubled
    why: str = ""  # if not
    checkpoints: int = 0  # that were there at the end
    bad_checkpoints: list[str] = field(default_factory=list)
    hand: str = ""  # why somebody would have had to do more than start the same command again
    attempts: int = 0
    goodput: float = 0.0
    seconds: float = 0.0


class NeedsAHand(Exception):
    pass


class Bench:
    """What the runs share: puzzles, compiled functions, an object store, and the ends of undisturbed runs."""

    def __init__(self, out: Path, steps: int, a_run: int | None) -> None:
        self.out, self.data, self.steps, self.a_run = out, out / "data", steps, a_run
        self.lock, self.one_at_a_time, self.stopping = threading.Lock(), threading.Lock(), threading.Event()
        self._references: dict[str, dict[str, np.ndarray]] = {}
        self._store: str | None = None
        out.mkdir(parents=True, exist_ok=True)
        self._locked = open(out / ".lock", "w")  # noqa: SIM115 (as long as this process lives)
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            sys.exit(f"{out}: another one is at work here; choose another --out")
        poison = out / "poison"
        poison.mkdir(exist_ok=True)
        (poison / "sitecustomize.py").write_text(POISON)
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(out / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XDG_CACHE_HOME": str(out / "cache"),
            "TINYPOD_STORAGE_RETRY_S": "8",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiling is most of a short run
        }
        if not (self.data / "dataset.json").exists():
            sizes = ["--clues", "6", "--train-size", "40", "--test-size", "16"]
            self.tinypod(["data", "sudoku", str(self.data), "--generate", "--box", "2x2", *sizes])

    def tinypod(self, arguments: list[str]) -> None:
        done = subprocess.run([*TINYPOD, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"tinypod {arguments[0]} failed:\n{done.stdout}{done.stderr}")

    def train(self, folder: Path | str, processes: int, *overrides: str) -> list[str]:
        config = str(REPOSITORY / "configs" / "trm" / "sudoku_mlp.yaml")
        shape = ["--processes", str(processes)] if processes > 1 else []
        settings = [*TINY, f"steps={self.steps}", f"data.path={self.data}"]
        return ["train", config, *settings, *overrides, "--run", str(folder), *shape]

    def reference(self, processes: int, left_out: tuple[tuple[int, int], ...] = ()) -> dict[str, np.ndarray]:
        """The last state of a run that nothing disturbed."""
        name = f"reference_{processes}" + "".join(f"_{first}+{count}" for first, count in left_out)
        with self.lock:
            if name not in self._references:
                folder = self.out / name
                if not (folder / "checkpoints" / str(self.steps)).exists():
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir()
                    batches = [{"first_batch": first, "batches": count} for first, count in left_out]
                    (folder / "rollbacks.json").write_text(json.dumps(batches))
                    self.tinypod(self.train(folder, processes))
                self._references[name], _, _ = read_checkpoints(folder)
            return self._references[name]

    def store(self) -> str:
        """The URL of an object store on loopback, which from now on is the one that `gs://` means."""
        with self.lock:
            if self._store is None:
                server = [sys.executable, str(REPOSITORY / "tests" / "gcs.py"), "--bucket", BUCKET]
                self._server = subprocess.Popen(server, stdout=subprocess.PIPE, text=True)
                assert self._server.stdout is not None
                lines = [self._server.stdout.readline() for _ in range(4)]
                os.environ |= dict(line.removeprefix("export ").strip().split("=", 1) for line in lines)
                self._store = os.environ["STORAGE_EMULATOR_HOST"]
            return self._store

    def close(self) -> None:
        if self._store is not None:
            self._server.kill()
            self._server.wait()


TINYPOD = [sys.executable, "-m", "tinypod"]
_restoring = threading.Lock()


def read_checkpoints(target: Path | str) -> tuple[dict[str, np.ndarray], list[int], list[str]]:
    """The last state, the steps there are, and what is wrong with those that cannot be restored."""
    from tinypod.experiment import build
    from tinypod.runs import folder as runs
    from tinypod.runs.checkpoints import flatten
    from tinypod.sharding import MeshConfig

    with _restoring:
        run = runs.open_run(target)
        run.pull()
        experiment = build(runs.read_config(run).model_copy(update={"mesh": MeshConfig()}))
        checkpoints = runs.open_checkpoints(run, experiment.config, read_only=True)
        last, bad = {}, []
        for step in checkpoints.steps():
            try:
                state = flatten(checkpoints.restore(step, experiment.abstract_state))
            except Exception as error:
                bad.append(f"{step}: {error}")
            else:
                last = {name: np.asarray(x) for name, x in state.items()}
        return last, checkpoints.steps(), bad


class Victim:
    """A run under way."""

    def __init__(self, bench: Bench, name: str, processes: int, *overrides: str, remote: bool = False) -> None:
        from tinypod.runs import folder as runs

        self.bench, self.result, self.processes = bench, Result(name, processes), processes
        self.random = random.Random(name)
        self.disk = bench.out / "runs" / name
        self.target = f"gs://{BUCKET}/{name}" if remote else str(self.disk / "run")
        self.folder = runs.open_run(self.target).folder
        self.environment: dict[str, str] = {}
        self.argv = [*TINYPOD, *bench.train(self.target, processes, *overrides), "--supervise"]
        self.output_path = bench.out / "output" / f"{name}.txt"
        self.process: subprocess.Popen[bytes] | None = None

    # What it does.

    def start(self) -> None:
        self.output_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.environment}
        with self.output_path.open("ab") as output:
            self.process = subprocess.Popen(
                self.argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment
            )

    @property
    def code(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def output(self) -> str:
        return self.output_path.read_text(errors="replace") if self.output_path.exists() else ""

    def pids(self) -> list[int]:
        """Of the training processes, in order: the children of the command. Files would not do on a full disk."""
        assert self.process is not None
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return [int(number) for number in children.split()]

    def rows(self, tail_bytes: int | None = None) -> list[dict[str, Any]]:
        """Of training, in the order of the file, or those in its last bytes; a line that is being written is not."""
        try:
            with open(self.folder / "metrics.jsonl", "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - (tail_bytes or size)))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        if tail_bytes is not None:
            lines = lines[1:] if size > tail_bytes else lines  # the first may be half a line
        return [row for row in map(json.loads, lines) if "train/loss" in row]

    def last_row(self) -> dict[str, Any]:
        return next(reversed(self.rows(4096)), {"step": 0, "time": 0.0})

    def step(self) -> int:
        return int(self.last_row()["step"])

    # Waiting for it.

    def until(self, condition: Callable[[], Any], what: str, interval_s: float = 0.02) -> bool:
        """False: it finished first. NeedsAHand: it ended otherwise, or never came to it."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            if self.code == 0:
                return False
            if self.code is not None:
                raise NeedsAHand(f"ended with exit code {self.code} while waiting for {what}: {self._last_words()}")
            if time.monotonic() > give_up or self.bench.stopping.is_set():
                raise NeedsAHand(f"no {what} within {PATIENCE_S:g} s: {self._last_words()}")
            time.sleep(interval_s)
        return True

    def comes_to(self, step: int) -> bool:
        """With all its processes there, so that a fault hits something."""
        return self.until(lambda: self.step() >= step and len(self.pids()) == self.processes, f"step {step}")

    def _last_words(self) -> str:
        return " / ".join(line.strip() for line in self.output().splitlines()[-6:] if line.strip())[-700:]

    def comes_back(self, *faults: Fault, ended: bool = False, since: list[int]) -> None:
        """After a fault: wait for the first step of the processes after `since`, and count what was lost.

        With several faults in a row the first one cost the steps, and the last one was waited for. `ended`: the command
        itself was ended; it is started again, as a scheduler would.
        """
        seen_at = 0.0
        if ended:
            assert self.process is not None
            self.process.wait(PATIENCE_S)
            self.start()

        def stepping() -> bool:
            nonlocal seen_at
            pids = self.pids()
            if not seen_at and len(pids) == self.processes and not set(pids) & set(since):
                seen_at = time.time()
            if not seen_at:
                faults[0].step = max(faults[0].step, self.step())
            return bool(seen_at) and self.last_row()["time"] > seen_at

        if self.until(stepping, "the first step after a fault"):
            first = next(row for row in self.rows() if row["time"] > seen_at)
            faults[0].lost_steps = max(0, faults[0].step + 1 - first["step"])
            faults[-1].restart_s = first["time"] - faults[-1].at
        self.result.faults += faults

    def kill(self, pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # Its end.

    def finish(self) -> None:
        self.until(lambda: False, "an end", interval_s=0.1)

    def judge(self, reference: dict[str, np.ndarray]) -> None:
        from tinypod.health import goodput

        result, last = self.result, self.bench.steps
        state, steps, result.bad_checkpoints = read_checkpoints(self.target)
        result.checkpoints = len(steps)
        wrong = [name for name in reference if name not in state or not same_bits(state[name], reference[name])]
        if steps[-1:] != [last]:
            result.why = f"its last checkpoint is not of step {last}: {steps}"
        elif wrong or state.keys() != reference.keys():
            result.why = f"{len(wrong)} arrays differ from the reference's: {', '.join(wrong[:3])}"
        elif [row["step"] for row in self.rows()] != list(range(1, last + 1)):
            counts = collections.Counter(row["step"] for row in self.rows())
            missing = [step for step in range(1, last + 1) if step not in counts]
            doubled = [step for step, count in counts.items() if count > 1]
            result.why = f"metrics.jsonl: missing {missing[:5]}, doubled {doubled[:5]}, or out of order"
        result.right = not result.why
        summary = goodput.summarise(self.folder)
        result.attempts, result.goodput = summary.attempts, summary.goodput

    def end(self) -> None:
        """Whatever is left of it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()  # its children go with it
            self.process.wait()


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# The faults. Each takes a run that is stepping, breaks it, and waits until it steps again.


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
    "truncate": Kind(truncate, 0.075),
    "full_disk": Kind(full_disk, 0.16, faults=4),
    "refuse": Kind(refuse, 0.15, remote=True),
    "nan": Kind(None, 0.09, faults=3, overrides=("nonfinite.rollback_after=3",)),
    "kill_cluster": Kind(kill, 0.025, processes=2),
    "kill_one": Kind(kill_one, 0.025, processes=2),
    "sigterm_cluster": Kind(sigterm, 0.025, processes=2),
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
    "sigterm_one": "SIGTERM to one process",
    "sigstop": "SIGSTOP of one process",
    "truncate": "truncated checkpoint file",
    "full_disk": "full disk",
    "refuse": "object store answers 503",
    "nan": "NaN batches (3 in a row)",
}


def run_through(bench: Bench, name: str) -> Result:
    """One run with its faults, from its start to the judgement."""
    kind, began = of(name), time.monotonic()
    with contextlib.ExitStack() as stack:
        if kind.remote:
            stack.enter_context(bench.one_at_a_time)  # the store refuses everybody
            bench.store()
        victim = Victim(bench, name, kind.processes, *kind.overrides, remote=kind.remote)
        shutil.rmtree(victim.folder, ignore_errors=True)  # of a try that was interrupted
        if kind.inject is full_disk:
            stack.enter_context(small_disk(victim.disk))
        stack.callback(victim.end)
        try:
            suffer(victim, kind)
        except NeedsAHand as why:
            victim.result.hand = str(why)
        except Exception as error:  # of this program itself: it counts against the run until somebody has looked
            victim.result.why = f"{type(error).__name__}: {error}"
        if victim.result.right and not victim.result.bad_checkpoints:
            shutil.rmtree(victim.folder)
        elif kind.inject is full_disk:
            shutil.copytree(victim.folder, bench.out / "failed" / name, dirs_exist_ok=True)
    victim.result.seconds = time.monotonic() - began
    return victim.result


def suffer(victim: Victim, kind: Kind) -> None:
    moments = random_moments(victim.random, victim.bench.steps, victim.bench.a_run or kind.faults)
    left_out = poison(victim, moments) if kind.inject is None else ()
    victim.start()
    for moment in moments if kind.inject is not None else []:
        if not victim.comes_to(moment):
            break
        assert kind.inject is not None
        kind.inject(victim)
    victim.finish()
    if kind.inject is None:
        victim.result.faults = rollbacks(victim)
    victim.judge(victim.bench.reference(kind.processes, left_out))


def random_moments(draw: random.Random, steps: int, count: int) -> list[int]:
    """A step in each of so many equal parts of the run; each part has room for what a fault takes back."""
    part = (steps - 3 * EVERY) // count
    return [2 * EVERY + number * part + draw.randrange(part // 2) for number in range(count)]


def poison(victim: Victim, moments: list[int]) -> tuple[tuple[int, int], ...]:
    """Three batches in a row at each moment are NaN, inside the compiled step (tests/poison.py)."""
    numbers = [str(moment + i) for moment in moments for i in range(3)]
    paths = [str(victim.bench.out / "poison"), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    victim.environment = {"TINYPOD_FAULTS_POISON": ",".join(numbers), "PYTHONPATH": os.pathsep.join(paths)}
    return tuple((moment, 3) for moment in moments)


def rollbacks(victim: Victim) -> list[Fault]:
    done = json.loads((victim.folder / "rollbacks.json").read_text())
    return [Fault("nan", entry["steps"][1], entry["steps"][1] - entry["back_to"]) for entry in done]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own, small enough to be filled; only root can make one."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def can_mount(out: Path) -> bool:
    try:
        with small_disk(out / "disk"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


# The whole of it.


def planned(kinds: list[str], faults: int, seed: int, a_run: int | None) -> list[str]:
    """Names of runs, the kinds in turn, so that whatever is there when it is stopped is a picture of all."""
    total = sum(KINDS[kind].share for kind in kinds)
    counts = {kind: math.ceil(faults * KINDS[kind].share / total / (a_run or KINDS[kind].faults)) for kind in kinds}
    return [f"{kind}-{seed}-{n}" for n in range(max(counts.values())) for kind in kinds if n < counts[kind]]


def read_results(path: Path) -> list[Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    results = []
    for line in lines:
        values = json.loads(line)
        results.append(Result(**(values | {"faults": [Fault(**fault) for fault in values["faults"]]})))
    return results


def run_all(bench: Bench, names: list[str], jobs: int, results_path: Path) -> None:
    done = {result.name for result in read_results(results_path)}
    left = [name for name in names if name not in done]
    mixed = len({of(name).processes > 1 for name in left}) == 2
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, pools(bench, jobs, mixed) as (alone, clusters):
        task = progress.add_task("runs", total=len(names), completed=len(names) - len(left))
        futures = [(clusters if of(name).processes > 1 else alone).submit(run_through, bench, name) for name in left]
        for future in as_completed(futures):
            result = future.result()
            with results_path.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            progress.advance(task)
            lost = sum(fault.lost_steps for fault in result.faults)
            verdict = "[green]right[/]" if result.right else f"[red]wrong[/] {escape(result.hand or result.why)}"
            progress.console.print(
                f"{result.name}: {len(result.faults)} faults, {lost} steps lost, {result.attempts} attempts, "
                f"{result.seconds:.0f} s: {verdict}{escape(' '.join(result.bad_checkpoints))}",
                soft_wrap=True,
            )


@contextlib.contextmanager
def pools(bench: Bench, jobs: int, mixed: bool) -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
    """For runs of one process, and for clusters, of which one at a time is enough for two cores.

    An interrupt ends the runs under way; they are done again next time.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mixed = mixed and jobs > 1
    alone = ThreadPoolExecutor(jobs - mixed)
    clusters = ThreadPoolExecutor(1) if mixed else alone
    try:
        yield alone, clusters
    except BaseException:
        bench.stopping.set()
        raise
    finally:
        for pool in (alone, clusters):
            pool.shutdown(cancel_futures=True)


def table(results: list[Result]) -> str:
    """Markdown; a run counts in the row of each kind of fault that it suffered."""
    columns: tuple[str, ...] = ("fault", "faults", "runs", "right at the end", "bad checkpoints", "by hand")
    columns += ("steps lost, mean", "max", "restart s, median", "max", "goodput")
    lines = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    groups: dict[str, list[tuple[Result, Fault]]] = collections.defaultdict(list)
    for result in results:
        for fault in result.faults:
            where = f" ({result.processes} processes)" if result.processes > 1 else ""
            groups[MEANINGS[fault.kind] + where].append((result, fault))
    everything = [pair for pairs in groups.values() for pair in pairs]
    for name, pairs in [*sorted(groups.items()), ("**all**", everything)]:
        lines.append(f"| {name} | {' | '.join(_figures(pairs))} |")
    return "\n".join(lines)


def _figures(pairs: list[tuple[Result, Fault]]) -> list[str]:
    runs = list({result.name: result for result, _ in pairs}.values())
    lost = [fault.lost_steps for _, fault in pairs]
    restarts = [fault.restart_s for _, fault in pairs if fault.restart_s is not None]
    return [
        str(len(pairs)),
        str(len(runs)),
        str(sum(run.right for run in runs)),
        f"{sum(len(run.bad_checkpoints) for run in runs)} of {sum(run.checkpoints for run in runs)}",
        str(sum(bool(run.hand) for run in runs)),
        f"{statistics.mean(lost):.1f}",
        str(max(lost)),
        f"{statistics.median(restarts):.1f}" if restarts else "–",
        f"{max(restarts):.1f}" if restarts else "–",
        f"{statistics.mean(run.goodput for run in runs):.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--faults", type=int, default=200, help="in all, shared out over the kinds; at least one run of each"
    )
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--a-run", type=int, help="faults in each run; default: three to five, by their kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of them, with commas; default: all")
    parser.add_argument("--seed", type=int, default=0, help="decides the moments")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/faults"), help="for results, runs and what they print")
    parser.add_argument("--table", action="store_true", help="only print the table of the results that are there")
    arguments = parser.parse_args()
    results_path = arguments.out.absolute() / "results.jsonl"
    if not arguments.table:
        kinds = arguments.kinds.split(",")
        bench = Bench(arguments.out.absolute(), arguments.steps, arguments.a_run)
        if "full_disk" in kinds and not can_mount(bench.out):
            console.print("full_disk is left out: only root can make the small disk that it fills")
            kinds.remove("full_disk")
        names = planned(kinds, arguments.faults, arguments.seed, arguments.a_run)
        try:
            run_all(bench, names, arguments.jobs, results_path)
        finally:
            bench.close()
    results = read_results(results_path)
    print(
        f"{datetime.date.today()}, {hardware()}, {sum(result.seconds for result in results) / 60:.0f} minutes of runs\n"
    )
    print(table(results))
    failed = [result for result in results if not result.right or result.bad_checkpoints]
    for result in failed:
        print(f"\n{result.name}: {result.hand or result.why} {' '.join(result.bad_checkpoints)}")
    if failed:
        sys.exit(1)


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


if __name__ == "__main__":
    main()
