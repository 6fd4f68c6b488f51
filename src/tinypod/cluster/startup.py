"""What makes several processes one run: start-up, agreement, and stopping at the same step.

JAX's coordination service does the work; three things around it are ours, each for a reason that was observed:

- A roll call before JAX connects. JAX ends a process whose peers do not come with a C++ abort that names nobody.
  Process 0 listens on the coordinator's own port, which JAX takes over afterwards, and tells everybody who is missing.
- `end_now` after a failure. A process of a cluster that simply exits waits at JAX's shutdown barrier for peers that
  cannot come, then aborts all of them; its exit code and their last words are lost.
- The preemption service is ours alone. It knows one number, that of the last call, and Orbax calls it with steps while
  the loop calls it with counts: a notice in such a moment would set a stopping point that nobody ever reaches.
"""

import itertools
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jax
from jax._src import clusters as jax_clusters  # private: the parts of JAX without a public door are all imported here
from jax._src import distributed as jax_distributed
from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

from tinypod.errors import ConfigError, DeadlineError

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "TINYPOD_COORDINATOR", "TINYPOD_NUM_PROCESSES", "TINYPOD_PROCESS_ID"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"  # JAX's own name for where the coordinator listens; default: everywhere


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
        given = (address, count, index)
        names = (
            f"--coordinator or {COORDINATOR}",
            f"--num-processes or {NUM_PROCESSES}",
            f"--process-id or {PROCESS_ID}",
        )
        missing = " and ".join(name for name, value in zip(names, given, strict=True) if value is None)
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


@dataclass(frozen=True)
class Cluster:
    """The processes of this run, seen from one of them. One process alone is a cluster, too."""

    index: int = 0
    count: int = 1
    _calls: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_primary(self) -> bool:
        """The process that prints and writes what is written once."""
        return self.index == 0

    def agree(self, name: str, value: str, timeout_s: float) -> str:
        """Process 0's value, on all; waits for all. Every process must call it equally often with a name."""
        if self.count == 1:
            return value
        key = self._key("agree", name)
        if self.is_primary:
            _client().key_value_set(key, value)
        else:
            try:
                value = _client().blocking_key_value_get(key, _milliseconds(timeout_s))
            except jax.errors.JaxRuntimeError as error:
                raise self._late(name, timeout_s, {0}, error) from None
        self.barrier(name, timeout_s)  # all have read it
        if self.is_primary:
            _client().key_value_delete(key)
        return value

    def barrier(self, name: str, timeout_s: float) -> None:
        """Until all processes are here. Names may be used again."""
        if self.count == 1:
            return
        arrived = self._key("barrier", name)  # JAX names only some of those that are missing, in prose
        _client().key_value_set(f"{arrived}/{self.index}", "here")
        try:
            _client().wait_at_barrier(arrived, _milliseconds(timeout_s))
        except jax.errors.JaxRuntimeError as error:
            present = {int(key.rsplit("/", 1)[1]) for key, _ in _client().key_value_dir_get(arrived)}
            raise self._late(name, timeout_s, set(range(self.count)) - present, error) from None
        if self.is_primary:
            _client().key_value_delete(arrived)

    def shutdown(self, timeout_s: float) -> None:
        """The end of a run that went well, or stopped well: waits for the others. Else: `end_now`."""
        if self.count > 1:
            self.barrier("shutdown", timeout_s)  # JAX's own barrier would abort; this one says who is missing
            jax.distributed.shutdown()

    def _key(self, use: str, name: str) -> str:
        """A key for this call: a name that is used again must not meet what is left of the call before."""
        call = self._calls[use + name] = self._calls.get(use + name, 0) + 1
        return f"tinypod/{use}/{name}/{call}"

    def _late(self, name: str, timeout_s: float, missing: Collection[int], error: Exception) -> DeadlineError:
        if not missing:
            return DeadlineError(
                f"process {self.index} came to `{name}` too late: the others had waited for {timeout_s:g} s and gave up"
            )
        if "DEADLINE_EXCEEDED" not in str(error):
            return DeadlineError(
                f"process {self.index} at `{name}`: the processes no longer reach each other "
                f"({str(error).splitlines()[0]}); not there yet: {listed(missing)}. Look at their logs"
            )
        return DeadlineError(
            f"{self.count - len(missing)} of {self.count} processes came to `{name}` within {timeout_s:g} s; "
            f"missing: {listed(missing)}. Look at its log for what it is doing, then start all of them again"
        )


def listed(processes: Collection[int]) -> str:
    """`process 2, process 5`."""
    return ", ".join(f"process {index}" for index in sorted(processes))


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
    _Preemption.take_over()
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


def end_now(exit_code: int) -> NoReturn:
    """End a process of a cluster after a failure, without JAX's shutdown barrier (see above)."""
    sys.stdout.flush()
    sys.stderr.flush()
    if jax_distributed.global_state.service is not None:
        time.sleep(1)  # without process 0 JAX aborts the others at once: let them say what they saw
    os._exit(exit_code)


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
    host, port = split_address(os.environ.get(BIND_ADDRESS, f"[::]:{split_address(coordinator)[1]}"))
    everywhere = host in ("::", "0.0.0.0")
    both = everywhere and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or (":" in host and not everywhere) else socket.AF_INET
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_server(("" if everywhere else host, port), family=family, dualstack_ipv6=both)
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


# Stopping.


class _Preemption:
    """Stands in JAX's place for its preemption service, so that only `Stop` moves its counter."""

    service: Any = None
    calls = itertools.count(1)  # one for the process: the service must never see the same number twice

    @classmethod
    def take_over(cls) -> None:
        cls.service = jax_distributed.global_state.preemption_sync_manager
        assert cls.service is not None, "jax_enable_preemption_service is off"
        jax_distributed.global_state.preemption_sync_manager = cls()

    @classmethod
    def reached(cls) -> bool:
        return bool(cls.service.reached_sync_point(next(cls.calls)))

    def reached_sync_point(self, step: int) -> bool:
        """What Orbax asks whenever it saves."""
        return False

    def shutdown(self) -> None:
        self.service.shutdown()


@dataclass
class Stop:
    """Whether the run was asked to end: by a signal, or by a notice of preemption to any of its processes."""

    cluster: Cluster = field(default_factory=Cluster)
    by: signal.Signals | None = None

    def requested(self) -> bool:
        """True on all processes at the same call, and from then on. All of them must call it equally often."""
        if self.by is None and self.cluster.count > 1 and _Preemption.reached():
            # What is left is to save. The hosts of a pod are not told at the same moment: another one's first SIGTERM
            # must neither end a process that saves nor wake JAX's notifier, which a shutdown then crashes.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.by = signal.SIGTERM
        return self.by is not None

    def note(self, number: int, _: object) -> None:
        """The handler of a signal, in a process of its own."""
        if self.by is not None:
            self._end(number, _)
        self.by = signal.Signals(number)

    def tell_all(self, number: int, _: object) -> None:
        """The handler of SIGINT in a cluster: the others hear of it as of a SIGTERM."""
        if self.by is not None:
            self._end(number, _)
        os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, number: int, _: object) -> NoReturn:
        os._exit(128 + number)  # an exception raised inside the compiler would crash it


@contextmanager
def stop_on_signals(cluster: Cluster) -> Iterator[Stop]:
    """SIGINT and SIGTERM end the run after the step at hand, with a checkpoint; a second one ends it at once,
    where there is one process.

    In a cluster SIGTERM belongs to JAX: since `start`, a handler of its own in C++ notes it, tells all processes
    within a second, and lets them agree on the call of `requested` at which all stop. A handler of Python's here would
    silence that. Until they have stopped, a second SIGTERM changes nothing there: what does not stop is ended by the
    deadlines, by the launcher, or by SIGKILL. Cloud TPU announces maintenance and preemption by SIGTERM, too (for TPU
    VMs made with autocheckpoint on): SIGTERM is tested with real processes, the notice of a real TPU is not.
    """
    stop = Stop(cluster)
    handlers = {signal.SIGINT: stop.note, signal.SIGTERM: stop.note}
    if cluster.count > 1:
        handlers = {signal.SIGINT: stop.tell_all}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _client() -> Any:
    return jax_distributed.global_state.client


def _milliseconds(seconds: float) -> int:
    return math.ceil(1000 * seconds)


def is_started() -> bool:
    """Whether this process has joined a cluster of several."""
    return _client() is not None
