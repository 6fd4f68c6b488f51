"""Work that process 0 does for all processes of the run."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax

from tinypod.cluster.agreement import Cluster
from tinypod.errors import StorageError


@functools.cache
def cluster() -> Cluster:
    return Cluster(jax.process_index(), jax.process_count())


def in_primary(name: str, work: Callable[[], Any], what: object, timeout_s: float) -> Any:
    """What the work returns in process 0, as JSON, in all of them; if it fails there, it fails in all.

    `what` is named in the error of the others.
    """
    value, error = None, None
    if cluster().is_primary:
        try:
            value = work()
        except Exception as caught:
            error = caught
    answer = json.dumps({"value": value, "error": repr(error) if error else ""})
    answer = json.loads(cluster().agree(name, answer, timeout_s))
    if error is not None:
        raise error
    if answer["error"]:
        raise StorageError(f"{what}: process 0 could not do its part: {answer['error']}")
    return answer["value"]
