"""A slice comes up and goes down."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning

from rich.console import Console

from tinypod.errors import UserError
from tinypod.pod.gcloud import Gcloud, NoCapacity, NotFound
from tinypod.pod.state import DEAD, PodState, read_state
from tinypod.runs.terminal import dollars, duration, say

REMIND_S = 60.0  # between two lines that say that nothing has changed


def up(gcloud: Gcloud, console: Console, sleep: Callable[[float], None] = time.sleep) -> PodState:
    """Wait until the slice is ready, saying what it waits for. Ctrl-C leaves a request in the queue.

    What is left of a slice that was preempted, or of a request that failed, holds nothing: it is deleted first.
    """
    spec = gcloud.spec
    if gcloud.dry_run:
        gcloud.create_request() if spec.is_queued else gcloud.create_node()
        read_state(gcloud)
        return PodState("absent", "nothing was run")
    state = read_state(gcloud)
    if state.phase == "stopped":
        raise UserError(
            f"{spec.name}: the slice is {state.describe()}. Start it with `gcloud compute tpus tpu-vm start "
            f"{spec.name} --zone={spec.zone} --project={spec.project}`, or delete it with `tinypod pod down`"
        )
    if state.useless:
        say(console, f"{spec.name}: {state.describe()}; deleting what is left of it")
        delete(gcloud, state)
        state = PodState("absent", "deleted")
    if state.phase == "absent":
        say(console, f"{spec.name}: asking for {_wanted(gcloud)}")
        if not spec.is_queued:
            _create(gcloud, console)
        else:
            gcloud.create_request()
        state = read_state(gcloud)
    return _wait(gcloud, state, console, sleep)


def _wanted(gcloud: Gcloud) -> str:
    spec = gcloud.spec
    price = "" if spec.hourly_dollars is None else f", {dollars(spec.hourly_dollars)} per hour while it is up"
    how = f"{spec.request.kind.replace('_', ' ')}{' (spot)' if spec.is_queued and spec.is_spot else ''}"
    hosts = f"{spec.slice.hosts} host{'s' if spec.slice.hosts > 1 else ''}"
    return f"{spec.slice.name} ({spec.slice.chips} chips, {hosts}) in {spec.zone}, {how}{price}"


def _create(gcloud: Gcloud, console: Console) -> None:
    """gcloud waits for the node itself, and only so says why there is none; meanwhile we say how long it takes."""
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        creation = pool.submit(gcloud.create_node)
        while True:
            try:
                return creation.result(REMIND_S)
            except StillRunning:
                if creation.done():
                    raise
                say(console, f"{gcloud.spec.name}: being created for {duration(time.monotonic() - began)}")


def _wait(gcloud: Gcloud, state: PodState, console: Console, sleep: Callable[[float], None]) -> PodState:
    spec, began = gcloud.spec, time.monotonic()
    said, said_at = "", 0.0
    while state.phase != "ready":
        if state.useless:
            raise NoCapacity(
                f"{spec.name}: the request came to nothing: {state.describe()}. `tinypod pod down` deletes it (it uses "
                "quota); try another zone, a smaller slice, or `tinypod pod run --keep`, which asks again"
            )
        if state.phase == "absent":
            raise UserError(f"{spec.name}: the slice is gone before it was ready; somebody else deleted it")
        if state.describe() != said or time.monotonic() - said_at >= REMIND_S:
            said, said_at = state.describe(), time.monotonic()
            say(console, f"{spec.name}: {said}, for {duration(time.monotonic() - began)}")
        sleep(spec.poll_s)
        state = read_state(gcloud)
    say(console, f"{spec.name}: ready after {duration(time.monotonic() - began)}")
    return state


def delete(gcloud: Gcloud, state: PodState) -> None:
    """The request with its node, or the node; one that has gone meanwhile is no error."""
    try:
        if state.has_request:
            gcloud.delete_request()
        elif state.has_node:
            gcloud.delete_node()
    except NotFound:
        return


def dead_requests(gcloud: Gcloud) -> list[str]:
    """Other requests of this zone that will never be granted again, and use up quota."""
    found = []
    for request in gcloud.list_requests():
        name = str(request.get("name", "")).rpartition("/")[2]
        if request.get("state", {}).get("state") in DEAD and name and name != gcloud.spec.name:
            found.append(name)
    return sorted(found)
