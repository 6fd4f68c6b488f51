"""Slices that tests ask for."""

from tinypod.config import validate
from tinypod.pod.spec import PodSpec


def make_spec(**changes) -> PodSpec:
    fields = {"project": "my-project", "zone": "us-central2-b", "name": "trainer", "type": "v4-16", "poll_s": 0.05}
    return validate({**fields, "retry_s": 0.05, **changes}, PodSpec, "spec")
