"""All workers of a slice at once: each is asked in a process of its own, so that whoever fails has a number."""

import base64
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from tinypod.errors import UserError
from tinypod.pod import ship
from tinypod.pod.gcloud import SSH_TIMEOUT_S, Gcloud
from tinypod.pod.worker import MARK
from tinypod.runs.storage import replace_file
from tinypod.runs.terminal import say, size

AT_ONCE = 32  # gcloud processes; each takes a moment of a core
SET_UP_TIMEOUT_S = 1800.0
LOG_LIMIT = 1 << 18  # bytes of a log in one answer
FOLDER, ARCHIVE = "tinypod", "tinypod-sent.tar.gz"  # in the home folder of a worker
T = TypeVar("T")


class WorkerError(UserError):
    """One worker could not do what it was asked; names it."""


@dataclass(frozen=True)
class Report:
    """How one worker does. `unreachable`: why it could not be asked."""

    state: str = "none"  # none, running, ended
    code: int | None = None
    run: str | None = None
    log: bytes = b""
    unreachable: str | None = None


@dataclass
class Place:
    """Up to where a worker's log was read, and on which VM."""

    machine: str = ""
    offset: int = 0


def read_places(path: Path) -> dict[int, Place]:
    try:
        return {int(worker): Place(**place) for worker, place in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError):
        return {}


def write_places(path: Path, places: dict[int, Place]) -> None:
    replace_file(path, json.dumps({worker: asdict(place) for worker, place in places.items()}).encode())


@dataclass
class Workers:
    gcloud: Gcloud
    places: dict[int, Place] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.gcloud.spec.slice.hosts

    def send(self, files: dict[str, bytes], console: Console) -> None:
        """Bring every worker's files to the same state, and set up what they need to run."""
        spec, manifest = self.gcloud.spec, ship.manifest_of(files)
        there = self._all(self._manifest)
        lacking = sorted({name for known in there for name in ship.changed(manifest, known)})
        if lacking or self.gcloud.dry_run:
            with tempfile.TemporaryDirectory(prefix="tinypod-pod-") as folder:
                packed = Path(folder) / ARCHIVE
                packed.write_bytes(ship.archive(files, lacking or list(files)))
                told = f"{len(lacking)} of {len(files)} files ({size(packed.stat().st_size)}) to {self._workers()}"
                self._tell(console, f"sending {told}")
                self.gcloud.copy(packed, ARCHIVE)
            unpack = f"mkdir -p {FOLDER} && tar -xzf {ARCHIVE} -C {FOLDER} && rm -f {ARCHIVE}"
            self._all(lambda worker: self.gcloud.ssh(worker, ["sh", "-c", unpack]))
        else:
            say(console, f"{self._workers()} have the code already")
        removed = any(set(known) - set(manifest) for known in there)
        if lacking or removed or self.gcloud.dry_run:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            self._tell(console, "setting up the workers; the first time this takes minutes")
            request = {"python": spec.python, "version": version}
            self._all(lambda worker: self._ask(worker, "settle", request, SET_UP_TIMEOUT_S))

    def start(self, run: str, arguments: Sequence[str], environment: dict[str, str], *, numbered: bool = False) -> bool:
        """Start training everywhere; False if it was running already on all of them. `numbered`: each is told which of
        how many workers it is."""
        request: dict[str, Any] = {"run": run, "environment": environment, "python": self.gcloud.spec.python}

        def start_one(worker: int) -> dict[str, Any]:
            number = [f"--worker={worker}", f"--workers={self.count}"] if numbered else []
            return self._ask(worker, "start", {**request, "arguments": [*arguments, *number]})

        answers = self._all(start_one)
        return any(answer.get("started", False) for answer in answers)

    def stop(self, grace_s: float) -> None:
        """SIGTERM to all, so that they agree on a last checkpoint; SIGKILL to those that take too long."""
        self._all(lambda worker: self._ask(worker, "stop", {"grace_s": grace_s}, grace_s + SSH_TIMEOUT_S))

    def reports(self, *, with_logs: bool = True) -> list[Report]:
        """Of each worker, with what it printed since the last time. One that is not reached does not hide the rest."""
        return self._all(lambda worker: self._report(worker, with_logs))

    def _report(self, worker: int, with_logs: bool) -> Report:
        place = self.places.setdefault(worker, Place())
        limit = LOG_LIMIT if with_logs else 0
        request = {"machine": place.machine, "offset": place.offset, "limit": limit}
        try:
            answer = self._ask(worker, "report", request)
        except UserError as error:
            return Report(unreachable=str(error))
        if not answer:
            return Report()
        if with_logs:
            place.machine, place.offset = answer["machine"], answer["offset"]
        return Report(answer["state"], answer["code"], answer["run"], base64.b64decode(answer["log"]))

    def _manifest(self, worker: int) -> dict[str, str]:
        """What a worker has; nothing, if it is new."""
        answer = self.gcloud.ssh(worker, ["sh", "-c", f"cat {FOLDER}/manifest.json 2>/dev/null || true"])
        lines = [line for line in (answer or "").splitlines() if line.startswith("{")]
        try:
            return dict(json.loads(lines[-1])) if lines else {}
        except ValueError:
            return {}

    def _ask(
        self, worker: int, action: str, request: dict[str, Any], timeout_s: float = SSH_TIMEOUT_S
    ) -> dict[str, Any]:
        command = ["python3", f"{FOLDER}/worker.py", action, json.dumps(request)]
        if action == "report":  # a worker to which nothing was sent yet has nothing to report
            command = ["sh", "-c", f"test ! -e {FOLDER}/worker.py || exec {shlex.join(command)}"]
        said = self.gcloud.ssh(worker, command, timeout_s)
        if said is None:
            return {}
        found = [line.partition(MARK)[2] for line in said.splitlines() if line.startswith(MARK)]
        if not found and action == "report":
            return {}
        answer = json.loads(found[-1]) if found else {"error": f"no answer, but {said.strip()[-300:]!r}"}
        if "error" in answer:
            raise WorkerError(f"worker {worker} of {self.gcloud.spec.name}: {action}: {answer['error']}")
        return dict(answer)

    def _all(self, ask: Callable[[int], T]) -> list[T]:
        """In the order of the workers; the first error counts, once all have ended."""
        if self.gcloud.dry_run:  # in order, to be read
            return [ask(worker) for worker in range(self.count)]
        with ThreadPoolExecutor(min(self.count, AT_ONCE)) as pool:
            return list(pool.map(ask, range(self.count)))

    def _tell(self, console: Console, what: str) -> None:
        if not self.gcloud.dry_run:
            say(console, what)

    def _workers(self) -> str:
        return f"{self.count} worker{'s' if self.count > 1 else ''}"
