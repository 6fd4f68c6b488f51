"""Up and down, against a cloud that queues, lacks capacity and preempts."""

import io

import pytest
from rich.console import Console
from specs import make_spec
from stand_in import Cloud

from tinypod.errors import UserError
from tinypod.pod import lifecycle
from tinypod.pod.gcloud import Gcloud, NoCapacity
from tinypod.pod.lifecycle import dead_requests, delete, up
from tinypod.pod.state import judge, read_state


def recording() -> Console:
    return Console(file=io.StringIO(), width=200)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


QUEUED = {"kind": "queued", "spot": True}


def test_a_queued_slice_comes_up_with_progress(cloud: Cloud) -> None:
    cloud.order(grant_after=3)
    gcloud, console = Gcloud(make_spec(request=QUEUED)), recording()
    state = up(gcloud, console)
    assert (state.phase, state.has_node, state.has_request) == ("ready", True, True)
    assert state.created is not None
    assert "asking for v4-16 (8 chips, 2 hosts) in us-central2-b, queued (spot), $7.47 per hour" in text(console)
    assert "waiting (WAITING_FOR_RESOURCES, by SERVICE)" in text(console)
    assert "trainer: ready after" in text(console)
    creations = cloud.commands().count("queued-resources create")
    up(gcloud, console)  # it is there
    assert cloud.commands().count("queued-resources create") == creations == 1


def test_it_says_why_there_is_no_capacity(cloud: Cloud) -> None:
    cloud.order(lacking=1)
    with pytest.raises(NoCapacity, match="no more capacity in the zone"):
        up(Gcloud(make_spec()), recording())
    cloud.order(lacking=1)
    with pytest.raises(NoCapacity, match=r"came to nothing: failed \(FAILED: There is no more capacity in the zone"):
        up(Gcloud(make_spec(request=QUEUED)), recording())


def test_what_is_left_of_a_preempted_slice_is_deleted_first(cloud: Cloud) -> None:
    for spec in (make_spec(request=QUEUED), make_spec(name="second", request={"kind": "spot"})):
        gcloud, console = Gcloud(spec), recording()
        up(gcloud, console)
        cloud.preempt(spec.name)
        assert read_state(gcloud).phase == "lost"
        assert up(gcloud, console).phase == "ready"
        assert "deleting what is left of it" in text(console)


def test_a_slice_that_somebody_stopped_is_not_touched(cloud: Cloud, gcloud: Gcloud) -> None:
    up(gcloud, recording())
    with cloud.state() as state:
        state["nodes"]["trainer"]["state"] = "STOPPED"
    with pytest.raises(UserError, match="gcloud compute tpus tpu-vm start trainer --zone=us-central2-b"):
        up(gcloud, recording())
    assert "tpu-vm delete" not in cloud.commands()


def test_a_long_creation_says_how_long(cloud: Cloud, gcloud: Gcloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "REMIND_S", 0.001)
    console = recording()
    up(gcloud, console)
    assert "trainer: being created for" in text(console)


def test_suspended_requests_are_deleted_and_those_of_others_are_named(cloud: Cloud) -> None:
    gcloud = Gcloud(make_spec(request=QUEUED))
    up(gcloud, recording())
    cloud.preempt("trainer")
    for name, state in (("old", "SUSPENDED"), ("bad", "FAILED"), ("good", "ACTIVE"), ("new", "WAITING_FOR_RESOURCES")):
        with cloud.state() as known:
            known["requests"][name] = {"name": name, "state": state, "looks": -100}
    assert dead_requests(gcloud) == ["bad", "old"]
    delete(gcloud, read_state(gcloud))
    assert read_state(gcloud).phase == "absent"
    delete(gcloud, read_state(gcloud))  # there is nothing, and that is no error
    with cloud.state() as known:
        assert set(known["requests"]) == {"old", "bad", "good", "new"}


@pytest.mark.parametrize(
    ("request_state", "node_state", "phase"),
    [
        (None, None, "absent"),
        ("WAITING_FOR_RESOURCES", None, "waiting"),
        ("PROVISIONING", None, "starting"),
        ("PROVISIONING", "CREATING", "starting"),
        ("ACTIVE", "READY", "ready"),
        ("ACTIVE", None, "lost"),
        ("ACTIVE", "PREEMPTED", "lost"),
        ("SUSPENDING", "READY", "lost"),
        ("SUSPENDED", None, "lost"),
        ("FAILED", None, "failed"),
        (None, "REPAIRING", "lost"),
        (None, "STOPPED", "stopped"),
        (None, "A_NEW_ONE", "starting"),
        ("A_NEW_ONE", None, "waiting"),
    ],
)
def test_one_word_for_two_states(request_state: str | None, node_state: str | None, phase: str) -> None:
    request = None if request_state is None else {"state": {"state": request_state}}
    node = None if node_state is None else {"state": node_state, "createTime": "2026-11-17T06:00:00.123456789Z"}
    found = judge(request, node)
    assert found.phase == phase
    assert (found.has_request, found.has_node) == (request is not None, node is not None)
    if phase == "ready":
        assert found.created == 1794895200.0
