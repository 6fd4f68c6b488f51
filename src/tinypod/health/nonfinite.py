"""Steps that were not finite, and the batches that are left out because of them.

`rollbacks.json` in the run folder lists them; it outlives restarts, so that the same batches are left out again and a
run is rolled back no more often than the config allows. Batches have numbers of their own: leaving some out moves the
later ones up, and every step still has exactly one.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinypod.cluster.agreement import Cluster
from tinypod.errors import UserError
from tinypod.experiment import NonFiniteConfig
from tinypod.runs.storage import replace_file

FILE = "rollbacks.json"


@dataclass(frozen=True)
class BadSteps:
    """Steps in a row, counted from 1, that were not finite."""

    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1


class Rollbacks:
    """Those of a run. Process 0 reads and writes the file, and broadcasts it to the others."""

    def __init__(self, folder: Path, config: NonFiniteConfig, cluster: Cluster, timeout_s: float) -> None:
        self.path, self.config, self.cluster = folder / FILE, config, cluster
        text = self.path.read_text() if cluster.is_primary and self.path.exists() else "[]"
        try:
            self.done: list[dict[str, Any]] = json.loads(cluster.broadcast(FILE, text, timeout_s))
            self.skipped = [(int(entry["first_batch"]), int(entry["batches"])) for entry in self.done]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.path}: not a list of rollbacks ({error}); repair it, or remove it to forget them"
            ) from None
        self.in_a_row = 0  # steps that were not finite, up to the last one noted; a resumed run restores it

    @property
    def allowed(self) -> bool:
        return len(self.done) < self.config.max_rollbacks

    def note(self, before: int, skipped: list[bool]) -> BadSteps | None:
        """Whether each step after `before` was skipped; the steps that ask for a rollback, if these do."""
        found = None
        for step, bad in enumerate(skipped, start=before + 1):
            self.in_a_row = self.in_a_row + 1 if bad else 0
            if self.in_a_row >= self.config.rollback_after:
                found = BadSteps(step - self.in_a_row + 1, step)
        return found

    def add(self, bad: BadSteps, target: int) -> None:
        """Leave the batches of those steps out; the run goes back to the step `target`."""
        self.in_a_row = 0
        first = self.number(bad.first - 1)
        self.done.append(
            {"time": time.time(), "steps": [bad.first, bad.last], "back_to": target}
            | {"first_batch": first, "batches": bad.count}
        )
        self.skipped.append((first, bad.count))
        if self.cluster.is_primary:
            replace_file(self.path, (json.dumps(self.done, indent=1) + "\n").encode(), durable=True)

    def number(self, step: int) -> int:
        """Of the batch after `step` steps: as many on as batches are left out before it."""
        number = step
        for first, count in sorted(self.skipped):
            number += count if number >= first else 0
        return number
