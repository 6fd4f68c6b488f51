"""What runs on a worker of a slice: settles what was sent, starts training so that it outlives the connection, reports.

This file is sent to the workers and is run there by the image's own Python (3.8 or newer), before any package is
installed: it imports the standard library only. Each call is `python3 tinypod/worker.py ACTION JSON` and prints one
line with the answer as JSON, behind a marker: ssh may print lines of its own.

    tinypod/manifest.json      name -> SHA-256 of every file that was sent; written last
    tinypod/code/              the package, the config, the user's modules
    tinypod/env/               the virtual environment, made from code/requirements.txt
    tinypod/job.json, ended.json, log.txt      what is trained here, how it ended, what it printed
    tinypod/machine            a number of this VM's own
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARK = "tinypod-worker:"
HOME = Path(__file__).resolve().parent
CODE, ENV, LOG = HOME / "code", HOME / "env", HOME / "log.txt"
MANIFEST, JOB, ENDED, MACHINE = HOME / "manifest.json", HOME / "job.json", HOME / "ended.json", HOME / "machine"
KILLED = 137  # as the shell counts SIGKILL


def settle(request: dict[str, Any]) -> dict[str, Any]:
    """Check what was sent against its hashes, remove what is no longer part of it, set up the environment."""
    wanted: dict[str, str] = json.loads((CODE / "manifest.json").read_text())
    wrong = [name for name, digest in wanted.items() if _digest(CODE / name) != digest]
    if wrong:
        MANIFEST.unlink() if MANIFEST.exists() else None
        return {"error": "did not arrive whole: " + ", ".join(sorted(wrong)[:5])}
    for path in sorted(CODE.rglob("*"), reverse=True):
        name = path.relative_to(CODE).as_posix()
        if path.is_file() and name not in wanted and name != "manifest.json":
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    if not MACHINE.exists():
        _write(MACHINE, os.urandom(8).hex())
    if request.get("python") is None:
        error = _set_up(request["version"])
        if error:
            return {"error": error}
    _write(MANIFEST, json.dumps(wanted))
    return {"files": len(wanted)}


def _set_up(version: str) -> str | None:
    """The environment of code/requirements.txt, unless it is there already; why it failed, if it did. The versions were
    locked with a Python of this `version` ("3.12")."""
    requirements, stamp = CODE / "requirements.txt", ENV / "tinypod-requirements"
    digest = _digest(requirements)
    if stamp.exists() and stamp.read_text() == digest:
        return None
    python, uv = str(ENV / "bin" / "python"), [sys.executable, "-m", "uv"]
    make = [[sys.executable, "-m", "venv", "--clear", str(ENV)]]
    install = [[python, "-m", "pip", "install", "--quiet", "--requirement", str(requirements)]]
    # Where the image's Python is another, often too old, or has no ensurepip, as Ubuntu's: uv brings the right one.
    if "{}.{}".format(*sys.version_info) != version or _run(make):
        make = [
            [sys.executable, "-m", "pip", "install", "--quiet", "--user", "uv"],
            [*uv, "venv", "--clear", "--python", version, str(ENV)],
        ]
        install = [[*uv, "pip", "install", "--quiet", "--python", python, "--requirement", str(requirements)]]
        error = _run(make)
        if error:
            return error
    error = _run(install)
    if error:
        return error
    _write(stamp, digest)
    return None


def _run(commands: list[list[str]]) -> str | None:
    """Why the first that failed did."""
    environment = {**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"}  # this VM is ours
    for command in commands:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        if ended.returncode:
            said = ended.stdout.decode(errors="replace").strip()[-1500:]
            return "{} ended with {}:\n{}".format(" ".join(command[1:4]), ended.returncode, said)
    return None


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start `python -m tinypod ARGUMENTS` detached; the same run that is being trained already stays as it is."""
    with open(HOME / "start.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = _read(JOB)
        if job and _is_alive(job):
            if job["run"] != request["run"]:
                return {"error": "another run is being trained here: {}".format(job["run"])}
            return {"started": False}
        python = request.get("python") or str(ENV / "bin" / "python")
        if not os.path.exists(python):
            return {"error": f"there is no Python at {python}: check `python:` in the spec"}
        nurse = {**request, "argv": [python, "-m", "tinypod", *request["arguments"]], "id": os.urandom(8).hex()}
        with open(LOG, "ab") as log:
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "nurse", json.dumps(nurse)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=str(HOME),
                start_new_session=True,  # the connection may end; this does not
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = _read(JOB)
            if found and found["id"] == nurse["id"]:
                return {"started": True}
            time.sleep(0.02)
        return {"error": "the process did not start within 60 s; see tinypod/log.txt on the worker"}


def nurse(request: dict[str, Any]) -> None:
    """The parent of the training process: knows how it ended, also when nobody is connected."""
    environment = {**os.environ, **request["environment"], "PYTHONUNBUFFERED": "1"}
    paths = [str(CODE), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if ENDED.exists():
        ENDED.unlink()
    print(time.strftime("--- %Y-%m-%d %H:%M:%S UTC, starting", time.gmtime()), flush=True)
    process = subprocess.Popen(
        request["argv"], stdin=subprocess.DEVNULL, cwd=str(CODE), env=environment, start_new_session=True
    )
    about = {"id": request["id"], "run": request["run"], "pid": process.pid, "nurse": os.getpid()}
    _write(JOB, json.dumps({**about, "born": _born(os.getpid()), "started": time.time()}))
    code = process.wait()
    _write(ENDED, json.dumps({"id": request["id"], "code": code if code >= 0 else 128 - code, "time": time.time()}))


def report(request: dict[str, Any]) -> dict[str, Any]:
    """What is trained here and how it does, and what it printed from a byte on. `machine` is new on a new VM."""
    machine = MACHINE.read_text() if MACHINE.exists() else ""
    offset = request["offset"] if request.get("machine") == machine else 0
    job, log, size = _read(JOB), b"", LOG.stat().st_size if LOG.exists() else 0
    state: dict[str, Any] = {"state": "none", "code": None, "run": None}
    if job:
        ended = _read(ENDED)
        state["run"] = job["run"]
        if ended and ended["id"] == job["id"]:
            state.update(state="ended", code=ended["code"])
        elif _is_alive(job):
            state["state"] = "running"
        else:  # its nurse is gone, too: the VM was restarted, or somebody killed both
            state.update(state="ended", code=KILLED)
    if request.get("limit") and size > offset:
        with open(LOG, "rb") as file:
            file.seek(offset)
            log = file.read(request["limit"])
    sent = {"offset": offset + len(log), "log": base64.b64encode(log).decode(), "size": size}
    return {**state, **sent, "machine": machine}


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """SIGTERM, so that it saves; after `grace_s` SIGKILL to all that it started."""
    job = _read(JOB)
    if not job or not _is_alive(job):
        return {"stopped": False}
    _signal(job["pid"], signal.SIGTERM)
    deadline = time.monotonic() + request["grace_s"]
    while _is_alive(job) and time.monotonic() < deadline:
        time.sleep(0.05)
    if _is_alive(job):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job["pid"], signal.SIGKILL)
    return {"stopped": True}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_alive(job: dict[str, Any]) -> bool:
    """By its nurse; after a restart of the VM the number may be another process's, born at another time."""
    ended = _read(ENDED)
    if ended and ended["id"] == job["id"]:
        return False
    try:
        os.kill(job["nurse"], 0)
    except ProcessLookupError:
        return False
    return bool(_born(job["nurse"]) == job["born"])


def _born(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write(path: Path, text: str | None) -> None:
    """Whole, or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text or "")
    os.replace(partial, path)


ACTIONS = {"settle": settle, "start": start, "report": report, "stop": stop}

if __name__ == "__main__":
    if sys.argv[1] == "nurse":  # what it prints is the log
        nurse(json.loads(sys.argv[2]))
        sys.exit()
    try:
        answer = ACTIONS[sys.argv[1]](json.loads(sys.argv[2]))
    except OSError as failure:
        answer = {"error": str(failure)}
    print(MARK + json.dumps(answer), flush=True)
