"""The runs that are broken, and what they share."""

import contextlib
import fcntl
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).parents[2]
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
        shape = ["--processes", str(processes)] if processes > 1 else []
        settings = [*TINY, f"steps={self.steps}", f"data.path={self.data}"]
        return ["train", "trm/sudoku_mlp", *settings, *overrides, "--run", str(folder), *shape]

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
    from tinypod.runs.checksums import flatten
    from tinypod.runs.saver import open_checkpoints
    from tinypod.sharding import MeshConfig

    with _restoring:
        run = runs.open_run(target)
        run.pull()
        experiment = build(runs.read_config(run).model_copy(update={"mesh": MeshConfig()}))
        checkpoints = open_checkpoints(run, experiment, {}, read_only=True)
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
                self.argv,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a process group of its own, as a scheduler's job is
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

    def end(self) -> None:
        """Whatever is left of it."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()  # its children go with it
            self.process.wait()


def poison(victim: Victim, moments: list[int]) -> tuple[tuple[int, int], ...]:
    """Three batches in a row at each moment are NaN, inside the compiled step (tests/poison.py)."""
    numbers = [str(moment + i) for moment in moments for i in range(3)]
    paths = [str(victim.bench.out / "poison"), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
    victim.environment = {"TINYPOD_FAULTS_POISON": ",".join(numbers), "PYTHONPATH": os.pathsep.join(paths)}
    return tuple((moment, 3) for moment in moments)


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


def has_store() -> bool:
    """Whether the emulator, and what speaks to it, are installed."""
    return all(importlib.util.find_spec(name) for name in ("gcp_storage_emulator", "gcsfs"))
