"""A stand-in for `gcloud`: keeps nodes and requests in a folder, and runs `ssh` commands here, in a folder a worker.

    python stand_in.py FOLDER compute tpus tpu-vm create NAME --zone=...

It takes the commands and flags that gcloud's reference lists, and refuses others as gcloud does. `Cloud` is the other
side: tests tell it to preempt a slice, to lack capacity, to fail a worker, to hang. Standard library only.
"""

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EVERYWHERE = {"--project", "--zone", "--quiet", "--format"}
SHAPE = {"--accelerator-type", "--service-account", "--data-disk", "--internal-ips", "--spot"}
FLAGS = {
    ("tpu-vm", "create"): {"--version", *SHAPE},
    ("tpu-vm", "describe"): set(),
    ("tpu-vm", "delete"): set(),
    ("tpu-vm", "ssh"): {"--worker", "--command", "--internal-ip"},
    ("tpu-vm", "scp"): {"--worker", "--internal-ip"},
    ("queued-resources", "create"): {"--node-id", "--runtime-version", "--valid-until-duration", "--async", *SHAPE},
    ("queued-resources", "describe"): set(),
    ("queued-resources", "list"): set(),
    ("queued-resources", "delete"): {"--force"},
}
NO_CAPACITY = 'There is no more capacity in the zone "us-central2-b"; you can try in another zone (code: 8)'


class Refused(Exception):
    """What gcloud prints on stderr before it ends with 1."""


class Cloud:
    """The state behind the stand-in, and what tests may do to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def state(self) -> Iterator[dict[str, Any]]:
        with open(self.folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self.folder / "state.json"
            state = json.loads(path.read_text()) if path.exists() else {}
            for name in ("nodes", "requests", "orders"):
                state.setdefault(name, {})
            try:
                yield state
            finally:  # also what a refusal has changed
                path.write_text(json.dumps(state))

    def order(self, **orders: Any) -> None:
        """`lacking=2`: the next two are not to be had. `grant_after=3`: a request is granted when it was looked at 3
        times. `bad_worker=1`: ssh to it fails. `hang="describe"`: this command never ends. `fail="..."`: any does."""
        with self.state() as state:
            state["orders"].update(orders)

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def commands(self) -> list[str]:
        """`tpu-vm create`, in the order of the calls."""
        return [" ".join(call[2:4]) for call in self.calls()]

    def home(self, name: str, worker: int) -> Path:
        return self.folder / "workers" / name / str(worker)

    def preempt(self, name: str) -> None:
        """The machines are gone, with what ran on them and lay there."""
        with self.state() as state:
            state["nodes"][name]["state"] = "PREEMPTED"
            if name in state["requests"]:
                state["requests"][name]["state"] = "SUSPENDED"
        self.destroy(name)

    def destroy(self, name: str) -> None:
        for home in sorted((self.folder / "workers" / name).glob("*")):
            with contextlib.suppress(OSError, ValueError):
                job = json.loads((home / "tinypod" / "job.json").read_text())
                for kill, pid in ((os.kill, job["nurse"]), (os.killpg, job["pid"])):
                    with contextlib.suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
            for _ in range(100):  # a process that dies may still write
                shutil.rmtree(home, ignore_errors=True)
                if not home.exists():
                    break
                time.sleep(0.05)


def hosts_of(accelerator_type: str) -> int:
    kind, _, size = accelerator_type.rpartition("-")
    return max(1, int(size) // 8) if kind in ("v4", "v5p") else max(1, int(size) // 4)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.123456789Z", time.gmtime())


def free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run(cloud: Cloud, argv: list[str]) -> int:
    with open(cloud.folder / "calls.jsonl", "a") as file:
        file.write(json.dumps(argv) + "\n")
    if argv[:2] != ["compute", "tpus"]:
        raise Refused(f"Invalid choice: {argv[0]!r}")
    group, action = argv[2:4]
    flags, names = {}, []
    for word in argv[4:]:
        if word.startswith("-"):
            name, _, value = word.partition("=")
            if name not in FLAGS[group, action] | EVERYWHERE:
                raise Refused(f"unrecognized arguments: {word}")
            flags[name] = value
        else:
            names.append(word)
    for needed in ("--project", "--zone", "--quiet"):
        if needed not in flags:
            raise Refused(f"argument {needed}: Must be specified.")
    with cloud.state() as state:
        orders = dict(state["orders"])
    if orders.get("hang") == action:
        time.sleep(600)
    if orders.get("fail"):
        raise Refused(orders["fail"])
    if action in ("ssh", "scp"):
        return {"ssh": ssh, "scp": scp}[action](cloud, names, flags, orders)
    with cloud.state() as state:
        print(json.dumps(change(state, group, action, names, flags, cloud)))
    return 0


def change(
    state: dict[str, Any], group: str, action: str, names: list[str], flags: dict[str, str], cloud: Cloud
) -> Any:
    nodes, requests, orders = state["nodes"], state["requests"], state["orders"]
    name = names[0] if names else ""
    if action == "list":
        return [shown(request) for request in requests.values()]
    known = nodes if group == "tpu-vm" else requests
    if action == "create":
        if name in known:
            raise Refused(f"ALREADY_EXISTS: {name}")
        if orders.get("lacking", 0) > 0 and group == "tpu-vm":
            orders["lacking"] -= 1
            raise Refused(NO_CAPACITY)
        if group == "tpu-vm":
            nodes[name] = made(name, flags["--accelerator-type"])
        else:
            requests[name] = {"name": name, "state": "WAITING_FOR_RESOURCES", "looks": 0, "flags": flags}
        return {}
    if name not in known:
        raise Refused(f"NOT_FOUND: Resource '{name}' was not found")
    if action == "delete":
        if group == "queued-resources" and requests[name]["state"] == "ACTIVE" and "--force" not in flags:
            raise Refused("FAILED_PRECONDITION: the request is ACTIVE; use --force")
        known.pop(name)
        nodes.pop(name, None)
        cloud.destroy(name)
        return {}
    if group == "tpu-vm":
        return nodes[name]
    request = requests[name]
    if request["state"] == "WAITING_FOR_RESOURCES":
        request["looks"] += 1
        if orders.get("lacking", 0) > 0:
            orders["lacking"] -= 1
            request["state"], request["why"] = "FAILED", NO_CAPACITY
        elif request["looks"] > orders.get("grant_after", 0):
            request["state"] = "ACTIVE"
            nodes[name] = made(name, request["flags"]["--accelerator-type"])
    return shown(request)


def shown(request: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"state": request["state"], "stateInitiator": "SERVICE"}
    if "why" in request:
        state["failedData"] = {"error": {"code": 8, "message": request["why"]}}
    return {"name": f"projects/p/locations/z/queuedResources/{request['name']}", "state": state}


def made(name: str, kind: str) -> dict[str, Any]:
    hosts = hosts_of(kind)
    return {
        "name": name,
        "state": "READY",
        "health": "HEALTHY",
        "createTime": now(),
        "hosts": hosts,
        "port": free_port(),
    }


def node_of(cloud: Cloud, name: str) -> dict[str, Any]:
    with cloud.state() as state:
        node = state["nodes"].get(name)
    if node is None or node["state"] != "READY":
        raise Refused(f"NOT_FOUND: TPU {name} was not found, or has no machines")
    return dict(node)


def ssh(cloud: Cloud, names: list[str], flags: dict[str, str], orders: dict[str, Any]) -> int:
    node, worker = node_of(cloud, names[0]), int(flags["--worker"])
    if orders.get("bad_worker") == worker:
        raise Refused(f"ssh: connect to host 10.0.0.{worker} port 22: Connection timed out")
    home = cloud.home(names[0], worker)
    home.mkdir(parents=True, exist_ok=True)
    print("Using ssh batch size of 1. Attempting to SSH into 1 nodes with a total of 1 workers.", file=sys.stderr)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TINYPOD_OWNER", "XDG_"))}
    # What a TPU VM's metadata server tells JAX, an environment variable tells it here.
    environment |= {"HOME": str(home), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NPROC": "16"}
    environment["XLA_FLAGS"] = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )
    if node["hosts"] > 1:
        address = f"127.0.0.1:{node['port']}"
        environment |= {"TINYPOD_COORDINATOR": address, "JAX_COORDINATOR_BIND_ADDRESS": address}
        environment |= {"TINYPOD_NUM_PROCESSES": str(node["hosts"]), "TINYPOD_PROCESS_ID": str(worker)}
    return subprocess.run(["bash", "-c", flags["--command"]], cwd=home, env=environment, check=False).returncode


def scp(cloud: Cloud, names: list[str], flags: dict[str, str], orders: dict[str, Any]) -> int:
    source, target = names
    name, _, file = target.partition(":")
    node = node_of(cloud, name)
    assert flags["--worker"] == "all"
    for worker in range(node["hosts"]):
        if orders.get("bad_worker") == worker:
            raise Refused(f"scp: worker {worker}: Connection timed out")
        home = cloud.home(name, worker)
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, home / file)
    return 0


def install(cloud: Cloud, folder: Path) -> str:
    """A folder for PATH with a `gcloud` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "gcloud"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{Path(__file__).resolve()}" "{cloud.folder}" "$@"\n')
    program.chmod(0o755)
    return str(folder)


if __name__ == "__main__":
    try:
        sys.exit(run(Cloud(Path(sys.argv[1])), sys.argv[2:]))
    except Refused as refusal:
        print(f"ERROR: (gcloud.{'.'.join(sys.argv[2:6])}) {refusal}", file=sys.stderr)
        sys.exit(1)
