"""What a run has cost on slices: how long each was up, in the run's own folder, for any machine to go on counting."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from tinypod.pod.spec import PodSpec
from tinypod.runs import storage
from tinypod.runs.folder import Run
from tinypod.runs.terminal import dollars, duration

FILE = "pod.json"


@dataclass
class Grant:
    """One slice, from when it was created until it was deleted or lost; `until` is where it was last seen."""

    name: str
    since: float
    until: float
    hourly_dollars: float


class Spending:
    """Of all slices that this run had. Prices are the list's: an invoice may differ."""

    def __init__(self, spec: PodSpec, run: Run, clock: Callable[[], float] = time.time) -> None:
        self.spec, self.run, self._clock = spec, run, clock
        self.grants = _read(run)
        self._written = 0.0

    def seen(self, created: float | None) -> None:
        """The slice is up now, and was created then. Written at most once a minute, but at once when it is new."""
        now = self._clock()
        last = self.grants[-1] if self.grants else None
        since = min(created, now) if created is not None else last.until if last is not None else now
        if last is not None and last.name == self.spec.name and since <= last.until:  # still the same
            last.until = max(last.until, now)
            if now - self._written < 60:
                return
        else:
            self.grants.append(Grant(self.spec.name, since, now, self.spec.hourly_dollars or 0.0))
        self.write()

    def write(self) -> None:
        self._written = self._clock()
        content = json.dumps({"grants": [asdict(grant) for grant in self.grants]}, indent=1)
        self.run.publish(FILE, content.encode())

    @property
    def dollars(self) -> float:
        return sum((grant.until - grant.since) / 3600 * grant.hourly_dollars for grant in self.grants)

    @property
    def exhausted(self) -> bool:
        limit = self.spec.spending_limit_dollars
        return limit is not None and self.dollars >= limit

    def describe(self) -> str:
        limit = self.spec.spending_limit_dollars
        of = "" if limit is None else f" of {dollars(limit)}"
        time = duration(sum(grant.until - grant.since for grant in self.grants), whole=True)
        return f"{dollars(self.dollars)}{of} for {time} on {self.spec.slice.name} (list price)"


def _read(run: Run) -> list[Grant]:
    try:
        if run.remote is not None:
            content = storage.read_whole(storage.folder(run.remote) / FILE)
        else:
            content = (run.folder / FILE).read_bytes()
    except FileNotFoundError:
        return []
    return [Grant(**grant) for grant in json.loads(content)["grants"]]
