"""Every call of `gcloud`, each an argument list: no shell of this machine ever sees one.

What has to run in a worker's shell is one argument, `--command=`, quoted by `shlex.join`. Prompts are off (`--quiet`);
nothing is read from the terminal. The flags are those of `gcloud compute tpus tpu-vm` and `queued-resources` of 2026.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinypod.errors import DeadlineError, UserError
from tinypod.pod.spec import PodSpec

DESCRIBE_TIMEOUT_S, DELETE_TIMEOUT_S, CREATE_TIMEOUT_S = 120.0, 1200.0, 2400.0
SSH_TIMEOUT_S, COPY_TIMEOUT_S = 180.0, 900.0
TPU_VM, QUEUED = ("compute", "tpus", "tpu-vm"), ("compute", "tpus", "queued-resources")
_SECRETS = re.compile(r"ya29\.[\w.-]+|(?<=Bearer )\S+|\"private_key\"[^,}]*|-----BEGIN[^-]*-----[^-]*")


class GcloudError(UserError):
    """gcloud said no; its own words are in the message."""


class NotFound(GcloudError):
    """There is no such node or request."""


class NoCapacity(GcloudError):
    """The zone has no such slice to give at this time, or the project's quota is used up: asking again may help."""


class GcloudTimeout(DeadlineError):
    """gcloud did not end in time."""


@dataclass(frozen=True)
class Gcloud:
    """The calls that a slice needs. `dry_run` prints each command instead of running it; what is asked is not known
    then, and comes back as None."""

    spec: PodSpec
    dry_run: bool = False
    show: Callable[[str], None] = print
    executable: str = "gcloud"
    calls: list[list[str]] = field(default_factory=list, compare=False, repr=False)

    # The slice.

    def create_node(self) -> None:
        spec = self.spec
        flags = [f"--version={spec.runtime}", *self._shape(), *(["--spot"] if spec.is_spot else [])]
        self._run([*TPU_VM, "create", spec.name, *flags], CREATE_TIMEOUT_S)

    def create_request(self) -> None:
        """Put a request into the queue, and come back at once."""
        spec = self.spec
        flags = [f"--node-id={spec.name}", f"--runtime-version={spec.runtime}", *self._shape()]
        flags += ["--spot"] if spec.is_spot else []
        if (hours := spec.valid_hours) is not None:
            flags.append(f"--valid-until-duration={round(3600 * hours)}s")
        self._run([*QUEUED, "create", spec.name, *flags, "--async"], DESCRIBE_TIMEOUT_S)

    def describe_node(self) -> dict[str, Any] | None:
        return self._described([*TPU_VM, "describe", self.spec.name])

    def describe_request(self) -> dict[str, Any] | None:
        return self._described([*QUEUED, "describe", self.spec.name])

    def list_requests(self) -> list[dict[str, Any]]:
        """Every request of the project in this zone."""
        answer = self._run([*QUEUED, "list", "--format=json"], DESCRIBE_TIMEOUT_S)
        return [] if answer is None else list(_parsed(answer, "queued-resources list"))

    def delete_node(self) -> None:
        self._run([*TPU_VM, "delete", self.spec.name], DELETE_TIMEOUT_S)

    def delete_request(self, name: str | None = None) -> None:
        """In whatever state it is, with the node that it was granted: `--force`."""
        self._run([*QUEUED, "delete", name or self.spec.name, "--force"], DELETE_TIMEOUT_S)

    # Its workers.

    def ssh(self, worker: int, command: Sequence[str], timeout_s: float = SSH_TIMEOUT_S) -> str | None:
        """What a command printed on a worker. Its words arrive there as they are, whatever they hold."""
        flags = [f"--worker={worker}", f"--command={shlex.join(command)}", *self._inside()]
        return self._run([*TPU_VM, "ssh", self.spec.name, *flags], timeout_s)

    def copy(self, file: Path, name: str, timeout_s: float = COPY_TIMEOUT_S) -> None:
        """A file to all workers, into their home folder."""
        # Absolute: a relative name with a colon would be taken for a machine's.
        target = f"{self.spec.name}:{name}"
        self._run([*TPU_VM, "scp", str(file.absolute()), target, "--worker=all", *self._inside()], timeout_s)

    def _inside(self) -> list[str]:
        return ["--internal-ip"] if self.spec.internal_ip else []

    def _shape(self) -> list[str]:
        spec = self.spec
        flags = [f"--accelerator-type={spec.accelerator_type}"]
        if spec.service_account is not None:
            flags.append(f"--service-account={spec.service_account}")
        if spec.disk is not None:
            source = f"projects/{spec.project}/zones/{spec.zone}/disks/{spec.disk.name}"
            flags.append(f"--data-disk=source={source},mode={spec.disk.mode}")
        if spec.internal_ip:
            flags.append("--internal-ips")
        return flags

    def _described(self, arguments: list[str]) -> dict[str, Any] | None:
        try:
            answer = self._run([*arguments, "--format=json"], DESCRIBE_TIMEOUT_S)
        except NotFound:
            return None
        return None if answer is None else dict(_parsed(answer, " ".join(arguments[2:4])))

    def _run(self, arguments: Sequence[str], timeout_s: float) -> str | None:
        everywhere = [f"--project={self.spec.project}", f"--zone={self.spec.zone}", "--quiet"]
        argv = [self.executable, *arguments, *everywhere]
        self.calls.append(argv)
        if self.dry_run:
            self.show(shlex.join(argv))
            return None
        if shutil.which(self.executable) is None:
            raise UserError(
                f"{self.executable} is not installed, or not on PATH: see https://cloud.google.com/sdk/docs/install, "
                "then `gcloud auth login`. `--dry-run` works without it"
            )
        try:
            ended = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise GcloudTimeout(
                f"{_name(arguments)} did not end within {timeout_s:g} s. Check the network; what it was asked may "
                "still happen: `tinypod pod status` says"
            ) from None
        if ended.returncode:
            raise _explained(_name(arguments), ended.returncode, ended.stderr)
        return ended.stdout


def _parsed(answer: str, what: str) -> Any:
    try:
        return json.loads(answer or "{}")
    except ValueError:
        raise GcloudError(
            f"gcloud {what}: expected JSON, got {answer.strip()[:200]!r}; is this a new gcloud?"
        ) from None


def _name(arguments: Sequence[str]) -> str:
    """`gcloud tpu-vm create my-slice (worker 3)`: without flags, which may be long."""
    worker = next((f" (worker {a.removeprefix('--worker=')})" for a in arguments if a.startswith("--worker=")), "")
    name = arguments[4] if len(arguments) > 4 and not arguments[4].startswith("-") else ""
    return f"gcloud {' '.join(arguments[2:4])} {name}".rstrip() + worker


def redacted(text: str) -> str:
    """gcloud prints no credentials unless asked to (`--log-http` in its settings); then they end here."""
    return _SECRETS.sub("…", text)


def _explained(what: str, code: int, stderr: str) -> GcloudError:
    said = redacted(stderr).strip()
    quoted = f"{what} ended with exit code {code}:\n{said or '(it printed nothing)'}"
    low = said.lower()
    if re.search(r"quota .*(exhausted|exceeded)|exceeded .*quota|quota limit", low):
        return NoCapacity(
            f"{quoted}\nThe project's quota is used up. Suspended and failed requests use quota, too: `tinypod pod "
            "down SPEC --dead` deletes them; else ask for more quota, or for a smaller slice"
        )
    if re.search(r"no more capacity|insufficient .*capacity|stockout|does not have enough resources|code: 8\b", low):
        return NoCapacity(
            f"{quoted}\nThe zone has no such slice to give now. Try another zone or a smaller slice, wait in the queue "
            "(`request: {kind: queued}`), or let `tinypod pod run --keep` ask again"
        )
    if re.search(r"not_found|was not found|\bnot found\b|notfound", low):
        return NotFound(quoted)
    if re.search(r"auth login|reauth|credential|permission_denied|permission denied on|unauthenticated", low):
        return GcloudError(
            f"{quoted}\nSign in with `gcloud auth login`, and see that this account may use Cloud TPU in the project"
        )
    return GcloudError(quoted)
