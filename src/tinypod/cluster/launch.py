"""The parent's side of a local cluster: start real processes, show what they print, and end them together.

Nothing here imports JAX: the parent only starts, reads, signals and waits. Children get sessions of their own, so that
Ctrl-C in a terminal reaches the parent alone, which passes it on as SIGTERM, once. They end together: what is left of a
cluster that lost a process can only wait.
"""

import math
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.text import Text

from tinypod.cluster.children import with_parent
from tinypod.cluster.interrupts import unheard
from tinypod.errors import EXPLAINED, FINISHED
from tinypod.runs.terminal import say

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
# A line for every device, from threads in C++ that do not wait for each other's end; the log files keep it.
NOISE = re.compile(rb"^\[Gloo\] Rank \d| is connected to \d+ peer ranks")


@dataclass(eq=False)
class Child:
    """A process, its log file, and the piece of a line that it has not finished yet."""

    index: int
    process: subprocess.Popen[bytes]
    log: BinaryIO
    prefix: str
    errors: dict[bytes, int]  # lines of error messages, and which process was the first to say them
    rest: bytes = b""
    failing: bool = False
    ended_by_us: bool = False

    @property
    def pipe(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """With whatever it has started."""
        if self.alive:
            self.ended_by_us = True
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def has_failed(self, stopping: bool) -> bool:
        """Ended, neither well nor because we asked; before its start-up is over, SIGTERM simply kills it."""
        code = self.process.poll()
        asked = self.ended_by_us or (stopping and code == -signal.SIGTERM)
        return code is not None and code not in FINISHED and not asked

    @property
    def exit_code(self) -> int:
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    @property
    def end(self) -> str:
        code = self.process.wait()
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


@dataclass
class Interrupts:
    """The signals that came to this process and ask it to end."""

    came: list[signal.Signals] = field(default_factory=list)

    @property
    def impatient(self) -> bool:
        """A second Ctrl-C: do not wait for the save. No number of SIGTERMs says so."""
        return self.came.count(signal.SIGINT) > 1

    def note(self, number: int, _: object) -> None:
        self.came.append(signal.Signals(number))

    def sleep(self, seconds: float) -> None:
        """Until then, or until one has come."""
        end = time.monotonic() + seconds
        while not self.came and (left := end - time.monotonic()) > 0:
            time.sleep(min(0.1, left))


_listening: Interrupts | None = None


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Note SIGINT and SIGTERM. Inside another one it is the same one: a supervisor hears what its launch heard."""
    global _listening
    if _listening is not None:
        yield _listening
        return
    _listening = noted = Interrupts()
    previous = {number: signal.signal(number, noted.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with unheard():
            yield noted
    finally:
        _listening = None
        for number, handler in previous.items():
            if number == signal.SIGINT or not noted.came:  # after a SIGTERM it still has to end with its own exit code
                signal.signal(number, handler)


def launch(
    argv: list[str],
    processes: int,
    devices_per_process: int,
    log_folder: Path,
    *,
    output: Console,
    grace_s: float = 5.0,
) -> int:
    """Run `argv` as a local cluster on CPU devices, and return one exit code for all.

    It is that of the process that failed first (128 and the signal for one that was killed), but an abort by JAX or an
    uncaught error gives way to one that says what happened. `grace_s`: how long the others may take to say so.
    """
    address = f"127.0.0.1:{free_port()}"
    environments = [
        cluster_environment(os.environ, address, processes, index, devices_per_process) for index in range(processes)
    ]
    return _run_together(argv, environments, log_folder, output, grace_s)


def run_child(argv: list[str], log_folder: Path, *, output: Console) -> int:
    """Run one process by the same rules, on whatever devices there are."""
    return _run_together(argv, [dict(os.environ)], log_folder, output)


def cluster_environment(
    environ: Mapping[str, str], address: str, processes: int, index: int, devices: int
) -> dict[str, str]:
    """For a child: which process it is, and its share of CPU devices."""
    devices_flag = "--xla_force_host_platform_device_count"
    flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if not flag.startswith(devices_flag)]
    return {
        **environ,
        "TINYPOD_COORDINATOR": address,
        "TINYPOD_NUM_PROCESSES": str(processes),
        "TINYPOD_PROCESS_ID": str(index),
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # a rehearsal is nobody else's business: not on the network
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        # Threads of XLA's pool: collectives block theirs, several at a time, and with one a device all may wait.
        "NPROC": environ.get("NPROC", str(max(16, 4 * devices))),
        "XLA_FLAGS": " ".join(flags),
    }


def free_port() -> int:
    """Outside the range that the kernel gives to outgoing connections, which come between here and its use."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run_together(
    argv: list[str], environments: list[dict[str, str]], log_folder: Path, output: Console, grace_s: float | None = None
) -> int:
    """Without `grace_s` it is one process that is nobody's peer: its lines have no prefix."""
    log_folder.mkdir(parents=True, exist_ok=True)
    with interrupts() as signals, ExitStack() as stack:
        children: list[Child] = []
        errors: dict[bytes, int] = {}
        for index, environment in enumerate(environments):
            log = stack.enter_context(open(log_folder / f"process_{index}.log", "ab", buffering=0))
            process = subprocess.Popen(
                with_parent(argv),
                env={**environment, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.enter_context(process)
            children.append(Child(index, process, log, "" if grace_s is None else f"[{index}] ", errors))
            stack.callback(children[-1].kill)
            _write_log(children[-1], f"--- {datetime.now():%Y-%m-%d %H:%M:%S}, pid {process.pid}\n".encode())
        failures = _watch(children, signals, output, grace_s or 0.0)
    if signals.impatient:
        return 128 + signal.SIGINT
    if failures:
        _report(failures, children, output)
        return _most_telling(failures).exit_code
    return 128 + signals.came[0] if signals.came else max(child.exit_code for child in children)


def _watch(children: list[Child], signals: Interrupts, output: Console, grace_s: float) -> list[Child]:
    """Show and log what they print until all have ended; returns those that failed, in that order."""
    failures: list[Child] = []
    deadline, heard = math.inf, 0

    def note_failures() -> None:
        failures.extend(c for c in children if c not in failures and c.has_failed(stopping=bool(heard)))

    with selectors.DefaultSelector() as selector:
        for child in children:
            os.set_blocking(child.pipe, False)
            selector.register(child.pipe, selectors.EVENT_READ, child)
        while any(child.alive for child in children):
            for key, _ in selector.select(0.1):
                if not _copy(key.data, output):
                    selector.unregister(key.fileobj)
            while heard < len(signals.came):
                heard += 1
                _obey(signals.came[:heard], children, output)
            note_failures()
            if failures:
                deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                _kill_all(children)
    for child in children:
        while _copy(child, output):
            pass
        if child.rest:
            _show(child, child.rest, output)
            _write_log(child, b"\n")
    note_failures()
    return failures


def _obey(came: list[signal.Signals], children: list[Child], output: Console) -> None:
    """The last of the signals that came. It is passed on once: a child that saves needs no second reminder."""
    if len(came) == 1:
        say(output, "stopping: waiting for a last checkpoint")
        for child in children:
            if child.alive:
                child.process.terminate()
    if came[-1] == signal.SIGINT:
        if came.count(signal.SIGINT) == 1:
            say(output, "Ctrl-C once more ends it at once, without one")
        elif came.count(signal.SIGINT) == 2:
            say(output, "ending at once, without saving")
            _kill_all(children)


def _kill_all(children: list[Child]) -> None:
    for child in children:
        child.kill()


def _copy(child: Child, output: Console) -> bool:
    """What is there to read, into the log and, line by line, onto the screen; False if there is nothing."""
    try:
        chunk = os.read(child.pipe, 1 << 16)
    except BlockingIOError:  # it has ended, but something that it started holds the other end
        return False
    _write_log(child, chunk)
    *lines, child.rest = (child.rest + chunk).split(b"\n")
    for line in lines:
        _show(child, line, output)
    return bool(chunk)


def _write_log(child: Child, data: bytes) -> None:
    with suppress(OSError):  # a full disk ends a run, but not the one who has to say so
        child.log.write(data)


def _show(child: Child, line: bytes, output: Console) -> None:
    child.failing |= line.startswith(b"error: ")
    repeated = child.failing and child.errors.setdefault(line, child.index) != child.index
    if not repeated and not NOISE.search(line):  # what is wrong in the same way in all of them is said once
        prefix = Text(child.prefix, style=COLOURS[child.index % len(COLOURS)])
        output.print(prefix + Text(line.decode(errors="replace")), soft_wrap=True)


def _most_telling(failures: list[Child]) -> Child:
    """The first, unless it only suffered from another's end: aborted by JAX, or with an error nobody expected."""
    if failures[0].exit_code not in (1, 128 + signal.SIGABRT):
        return failures[0]
    return next((child for child in failures if child.exit_code in EXPLAINED), failures[0])


def _report(failures: list[Child], children: list[Child], output: Console) -> None:
    first = failures[0]
    if not first.prefix:
        if first.exit_code > 128:  # else it has said itself what was wrong
            say(output, f"the process {first.end}", "bold red")
        return
    where = f"each one's output is in {Path(first.log.name).parent}"
    if len(failures) == len(children) > 1 and len({child.end for child in failures}) == 1:
        say(output, f"all {len(failures)} processes {first.end}; {where}", "bold red")
        return
    after = [f"process {child.index} {child.end}" for child in failures[1:]]
    ended = sum(child.ended_by_us for child in children)
    after += [f"ended the other {ended}"] if ended else []
    parts = "; ".join([f"process {first.index} {first.end}", *after])
    say(output, f"{parts}; {where}", "bold red")
