"""A process of a small cluster: joins as the command line would, then does what its first argument says."""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from tinypod.cluster import startup
from tinypod.cluster.agreement import Cluster, end_now
from tinypod.cluster.stop import stop_on_signals
from tinypod.errors import UserError


def make_sum(cluster: Cluster):
    """A collective over all devices of all processes, compiled once."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    ones = jax.make_array_from_process_local_data(sharding, jnp.full(jax.local_device_count(), cluster.index + 1.0))
    add = jax.jit(jnp.sum, out_shardings=jax.sharding.NamedSharding(mesh, jax.P()))
    return lambda: float(add(ones))


def total(cluster: Cluster) -> None:
    """Start-up, a computation, agreement."""
    print(f"{cluster.index} of {cluster.count}: sum {make_sum(cluster)():g} on {jax.device_count()} devices")
    for turn in range(50):
        print("agreed", cluster.broadcast("choice", f"{turn}/{cluster.index} with = and ✓", 300))
    for _ in range(50):
        cluster.barrier("turn", 300)


def late(cluster: Cluster, folder: Path) -> None:
    """The last process comes to the barrier only after the others gave up."""
    cluster.barrier("start", 300)
    if cluster.index == cluster.count - 1:
        wait_for(lambda: len(list(folder.glob("gave_up_*"))) == cluster.count - 1)
    try:
        cluster.barrier("meeting", 5)
    finally:
        (folder / f"gave_up_{cluster.index}").touch()


def loop(cluster: Cluster, folder: Path) -> int:
    """Turns with a collective each, until all are asked to stop; and with the question that Orbax asks when it saves.

    Its numbers are steps, and those of a run that was resumed are far from what we count.
    """
    add = make_sum(cluster)
    with stop_on_signals(cluster) as stop:
        turn = 0
        while not stop.requested():
            turn += 1
            assert not multihost_utils.reached_preemption_sync_point(100_000 + turn)
            add()
            (folder / f"turns_{cluster.index}").write_text(str(turn))
        for _ in range(3):  # it stays true
            assert stop.requested()
        print(f"stopped by {stop.by.name} after turn {turn}")
        if (folder / "linger").exists():  # as a long save would
            (folder / f"saving_{cluster.index}").touch()
            wait_for(lambda: not (folder / "linger").exists())
    return 128 + stop.by


def ended(cluster: Cluster, folder: Path) -> int:
    """A failure in one process, while the others wait for it."""
    if cluster.index == 1:
        end_now(79)
    wait_for(lambda: False)
    return 0


def wait_for(condition, timeout_s: float = 600) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


def main() -> int:
    action, folder, timeout_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    settings = startup.settings_from(None, None, None, os.environ)
    if (folder / "together").exists():  # what follows takes no time, while imports do
        (folder / f"here_{settings.process_id}").touch()
        wait_for(lambda: (folder / "go").exists())
    try:
        cluster = startup.start(settings, timeout_s, heartbeat_timeout_s=60)
        code = {"total": lambda: total(cluster), "late": lambda: late(cluster, folder)}.get(
            action, lambda: {"loop": loop, "ended": ended}[action](cluster, folder)
        )()
    except UserError as error:
        print(f"error: {error}", flush=True)
        end_now(error.exit_code)
    cluster.shutdown(300)
    return code or 0


if __name__ == "__main__":
    signal.alarm(900)  # whatever goes wrong, nothing stays behind
    sys.exit(main())
