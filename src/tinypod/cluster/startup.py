"""How a process joins its run: settings, detection, and a roll call before JAX connects.

JAX ends a process whose peers do not come with a C++ abort that names nobody. So process 0 listens on the coordinator's
own port, which JAX takes over afterwards, and answers all of them with who is missing.
"""

import json
import math
import os
import selectors
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import clusters as jax_clusters  # private: detection without connecting has no public door
from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

from tinypod.cluster import stop
from tinypod.cluster.agreement import Cluster, listed
from tinypod.errors import ConfigError, DeadlineError

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "TINYPOD_COORDINATOR", "TINYPOD_NUM_PROCESSES", "TINYPOD_PROCESS_ID"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's own name for where the coordinator listens; default: any address


@dataclass(frozen=True)
class ClusterSettings:
    """Which process this is, and where process 0 listens. One process needs no coordinator."""

    coordinator: str | None
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None  # None: all of the host's


def settings_from(
    coordinator: str | None, num_processes: int | None, process_id: int | None, environ: Mapping[str, str]
) -> ClusterSettings | None:
    """From flags, else from the environment; None if neither says anything. `1` process alone asks for no cluster."""
    address = coordinator or environ.get(COORDINATOR) or None
    count = _number(num_processes, NUM_PROCESSES, environ)
    index = _number(process_id, PROCESS_ID, environ)
    if address is None and count is None and index is None:
        return None
    if count == 1 and address is None and index in (None, 0):
        return ClusterSettings(None, 1, 0)
    if address is None or count is None or index is None:
        given = {
            f"--coordinator or {COORDINATOR}": address,
            f"--num-processes or {NUM_PROCESSES}": count,
            f"--process-id or {PROCESS_ID}": index,
        }
        missing = " and ".join(name for name, value in given.items() if value is None)
        raise ConfigError(f"a cluster needs its coordinator, number of processes and process id; missing: {missing}")
    if count < 1:
        raise ConfigError(f"--num-processes {count}: expected at least 1")
    if not 0 <= index < count:
        raise ConfigError(f"--process-id {index}: expected 0 to {count - 1}, because there are {count} processes")
    split_address(address)
    return ClusterSettings(address, count, index)


def split_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` or `[::1]:PORT`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--coordinator {address}: expected HOST:PORT, the same for all, e.g. 10.0.0.2:8476")
    return host.strip("[]"), int(port)


def _number(flag: int | None, name: str, environ: Mapping[str, str]) -> int | None:
    text = environ.get(name)
    if flag is not None or not text:
        return flag
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: expected a whole number") from None


def start(settings: ClusterSettings | None, timeout_s: float, heartbeat_timeout_s: float) -> Cluster:
    """Join the cluster; before JAX touches a device. Without settings: the one JAX detects, or one process alone.

    A process that stops answering is noticed after `heartbeat_timeout_s`; JAX then aborts all the others (SIGABRT).
    """
    settings = settings or detect(timeout_s)
    if settings is None or settings.num_processes == 1:
        return Cluster()
    assert settings.coordinator is not None
    if settings.process_id == 0:
        _call_the_roll(settings, timeout_s)
    else:
        _answer_the_roll(settings, timeout_s)
    jax.distributed.initialize(
        settings.coordinator,
        settings.num_processes,
        settings.process_id,
        settings.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=math.ceil(timeout_s),
        heartbeat_timeout_seconds=math.ceil(heartbeat_timeout_s),
        shutdown_timeout_seconds=math.ceil(timeout_s),
    )
    stop.Preemption.take_over()
    return Cluster(settings.process_id, settings.num_processes)


def detect(timeout_s: float) -> ClusterSettings | None:
    """The cluster that JAX sees around this process (Cloud TPU, GKE, Slurm, Open MPI, Kubernetes jobs), if any.

    JAX asks the network only where it has seen TPU chips or a cluster's environment variables. Two of its habits are
    avoided: a pod of Kubernetes that is no indexed job is not a cluster, and nothing is waited for before it is known
    that there is more than one process.
    """
    for kind in jax_clusters.ClusterEnv._cluster_types:
        lone_pod = kind is jax_clusters.K8sCluster and "JOB_COMPLETION_INDEX" not in os.environ
        if kind.opt_in_only_method or lone_pod or not kind.is_env_present():
            continue
        try:
            if (count := kind.get_process_count()) == 1:
                return None
            port = os.environ.get("JAX_COORDINATOR_PORT")
            address = kind.get_coordinator_address(math.ceil(timeout_s), port)
            local = None if running_in_cloud_tpu_vm else kind.get_local_process_id()
            return ClusterSettings(address, count, kind.get_process_id(), None if local is None else (local,))
        except Exception as error:  # DNS, the metadata server, the Kubernetes API: each fails in its own way
            raise DeadlineError(
                f"this looks like a cluster ({kind.__name__}), but it could not be read: {error}. Start again, or set "
                f"{COORDINATOR}, {NUM_PROCESSES} and {PROCESS_ID}; {NUM_PROCESSES}=1 alone starts a single process"
            ) from error
    return None


# The roll call: each process sends one line of JSON, and gets one back.


def _call_the_roll(settings: ClusterSettings, timeout_s: float) -> None:
    """Process 0: wait for all the others, and tell them how it went."""
    assert settings.coordinator is not None
    deadline = time.monotonic() + timeout_s
    present: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener = stack.enter_context(_listen(settings.coordinator, min(timeout_s, 10)))
        selector.register(listener, selectors.EVENT_READ)
        while len(present) < settings.num_processes - 1 and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is listener:
                    connection = stack.enter_context(listener.accept()[0])
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ)
                elif (patience_s := _hear(key.fileobj, present, settings)) is None:  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                else:  # all give up together, when the first would
                    deadline = min(deadline, time.monotonic() + patience_s)
        missing = sorted(set(range(1, settings.num_processes)) - set(present))
        for connection in present.values():
            _send(connection, {"missing": missing})
    if missing:
        raise _absent(missing, settings, timeout_s)


def _hear(connection: socket.socket, present: dict[int, socket.socket], settings: ClusterSettings) -> float | None:
    """Note who it is, and how long it would wait; None for one that left, or is not one of ours."""
    hello = _receive(connection)
    if hello is None:
        for gone in [index for index, known in present.items() if known is connection]:
            del present[gone]
        return None
    index, count = hello.get("process"), hello.get("count")
    if count != settings.num_processes:
        refusal = f"process 0 was started with --num-processes {settings.num_processes}, process {index} with {count}"
    elif index in present or not isinstance(index, int) or not 0 < index < count:
        refusal = f"--process-id {index} is taken; every process needs its own, from 0 to {count - 1}"
    else:
        present[index] = connection
        return float(hello.get("patience_s", 0))
    _send(connection, {"refused": refusal})
    return None


def _answer_the_roll(settings: ClusterSettings, timeout_s: float) -> None:
    """The others: report to process 0 until it answers."""
    assert settings.coordinator is not None
    address, deadline = split_address(settings.coordinator), time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                if connection.getsockname() == connection.getpeername():  # TCP, on one host, may meet itself
                    raise ConnectionError
                hello = {"process": settings.process_id, "count": settings.num_processes, "patience_s": left}
                _send(connection, hello)
                connection.settimeout(left + 2)  # process 0 answers when `left` has passed; that takes a moment
                answer = _receive(connection)
        except OSError:  # not there yet
            answer = None
        if answer is None:
            time.sleep(min(0.1, left))
        elif "refused" in answer:
            raise ConfigError(answer["refused"])
        elif answer.get("missing"):
            raise _absent(answer["missing"], settings, timeout_s)
        else:
            return
    raise DeadlineError(
        f"process {settings.process_id}: process 0 did not answer at {settings.coordinator} within {timeout_s:g} s. "
        "Start it with the same command and --process-id 0, on the host of that address; or look at its log"
    )


def _absent(missing: Collection[int], settings: ClusterSettings, timeout_s: float) -> DeadlineError:
    count = settings.num_processes
    return DeadlineError(
        f"{count - len(missing)} of {count} processes came within {timeout_s:g} s; missing: {listed(missing)}. "
        f"Start all {count} with the same command and --coordinator {settings.coordinator}; "
        "if the missing ones were started, their own logs say why they ended"
    )


def _listen(coordinator: str, timeout_s: float) -> socket.socket:
    any_host = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
    host, port = split_address(os.environ.get(BIND_ADDRESS, f"{any_host}:{split_address(coordinator)[1]}"))
    family, both = (socket.AF_INET6, host == "::") if ":" in host else (socket.AF_INET, False)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_server((host, port), family=family, dualstack_ipv6=both)
        except OSError as error:  # perhaps still held by a run that is ending
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"process 0 cannot listen on port {port}, where the other processes would look for it: "
                    f"{error.strerror}. Choose another port in --coordinator, or end what holds it"
                ) from error
            time.sleep(0.1)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # it has gone; whoever reads will notice
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """One short line, which comes in one piece; None at the end, or for something else that found the port."""
    try:
        message = json.loads(connection.recv(4096))
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
