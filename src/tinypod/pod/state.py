"""What Cloud TPU says of a slice, in one word.

A node has a state (READY, PREEMPTED, REPAIRING, ...); one that was asked for in the queue has a request with a state of
its own (WAITING_FOR_RESOURCES, ACTIVE, SUSPENDED, ...), which outlives the node and uses quota until it is deleted.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from tinypod.pod.gcloud import Gcloud

Phase = Literal["absent", "waiting", "starting", "ready", "lost", "failed", "stopped"]

_NODE: dict[str, Phase] = {
    "CREATING": "starting",
    "STARTING": "starting",
    "RESTARTING": "starting",
    "REIMAGING": "starting",
    "READY": "ready",
    "PREEMPTED": "lost",
    "TERMINATED": "lost",
    "REPAIRING": "lost",  # by Google, for as long as it takes; another slice is there sooner
    "UNKNOWN": "lost",
    "DELETING": "lost",
    "HIDING": "lost",
    "HIDDEN": "lost",
    "STOPPED": "stopped",
    "STOPPING": "stopped",
}
_REQUEST: dict[str, Phase] = {
    "CREATING": "waiting",
    "ACCEPTED": "waiting",
    "WAITING_FOR_RESOURCES": "waiting",
    "PROVISIONING": "starting",
    "ACTIVE": "ready",
    "SUSPENDING": "lost",
    "SUSPENDED": "lost",
    "DELETING": "lost",
    "FAILED": "failed",
}
DEAD = frozenset({"SUSPENDED", "FAILED"})  # requests that will never be granted again, and use quota


@dataclass(frozen=True)
class PodState:
    """`said`: Google's own words. `created`: when the node was, Unix seconds; what is paid counts from there."""

    phase: Phase
    said: str
    created: float | None = None
    has_node: bool = False
    has_request: bool = False
    health: str | None = None

    @property
    def useless(self) -> bool:
        """There is something, and it will not train any more."""
        return self.phase in ("lost", "failed")

    def describe(self) -> str:
        health = f", {self.health.lower()}" if self.health not in (None, "HEALTHY", "HEALTH_UNSPECIFIED") else ""
        return f"{self.phase} ({self.said}{health})"


def read_state(gcloud: Gcloud) -> PodState:
    """Two questions at most: of the request, where there may be one, and of the node."""
    request = gcloud.describe_request() if gcloud.spec.is_queued else None
    return judge(request, gcloud.describe_node())


def judge(request: dict[str, Any] | None, node: dict[str, Any] | None) -> PodState:
    """A request that is granted is as good as its node; one that is suspended or failed is worth nothing."""
    has_node, has_request = node is not None, request is not None
    asked = str(request.get("state", {}).get("state", "STATE_UNSPECIFIED")) if request else ""
    if request is not None and (node is None or _REQUEST.get(asked, "waiting") in ("lost", "failed")):
        phase = _REQUEST.get(asked, "waiting")
        if phase == "ready":  # granted, and the node is gone: deleted by hand, or about to be suspended
            phase = "lost"
        return PodState(phase, _reason(request, asked), None, has_node, has_request)
    if node is None:
        return PodState("absent", "there is none")
    state = str(node.get("state", "STATE_UNSPECIFIED"))
    phase = _NODE.get(state, "starting")
    said = f"{state}: {node['healthDescription']}" if node.get("healthDescription") else state
    return PodState(phase, said, _seconds(node.get("createTime")), has_node, has_request, node.get("health"))


def _reason(request: dict[str, Any], state: str) -> str:
    """Google's words on a request that failed lie three levels down, in `failedData.error.message`."""
    found = request.get("state", {})
    for name in ("failedData", "suspendedData", "suspendingData"):
        message = (found.get(name) or {}).get("error", {}).get("message")
        if message:
            return f"{state}: {message}"
    by = found.get("stateInitiator")
    return f"{state}, by {by}" if by else state


def _seconds(text: str | None) -> float | None:
    """`2026-11-17T06:00:00.123456789Z`: nanoseconds are more than Python reads."""
    if not text:
        return None
    head, _, _ = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(head + "+00:00").timestamp()
