"""What `tinypod pod status` shows: the slice, each worker's process and heartbeat, where the time and money went."""

import time
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tinypod.errors import UserError
from tinypod.health import goodput_view
from tinypod.pod.gcloud import Gcloud
from tinypod.pod.spending import Spending
from tinypod.pod.state import PodState, read_state
from tinypod.pod.workers import Report, Workers
from tinypod.runs import status
from tinypod.runs.folder import open_run
from tinypod.runs.terminal import Listing, duration
from tinypod.study.folder import STUDY, refresh
from tinypod.study.status import table as study_table


class PodStatus:
    """Read at once: the slice from gcloud, the workers from ssh, the run from its bucket."""

    def __init__(self, gcloud: Gcloud) -> None:
        self.spec, self.state = gcloud.spec, read_state(gcloud)
        ready = self.state.phase == "ready"
        self.reports: list[Report] = Workers(gcloud).reports(with_logs=False) if ready else []
        self.run_name = next((report.run for report in self.reports if report.run), None)
        self.run: status.RunStatus | None = None
        self.study: RenderableType | None = None
        self.spent: Spending | None = None
        if self.run_name is not None:
            self._read_run(self.run_name)

    def _read_run(self, name: str) -> None:
        run = open_run(name)
        try:
            run.pull()
            run.pull_heartbeats()
            self.spent = Spending(self.spec, run)
            if (run.folder / STUDY).exists():
                refresh(run)
                self.study = study_table(run.folder)
            self.run = status.read_status(run.folder, time.time(), run.checkpoints)
        except UserError:  # it has only just begun, or the bucket is not ours to read
            return

    def as_json(self) -> dict[str, Any]:
        workers = [
            {"worker": number, "state": report.state, "exit_code": report.code, "unreachable": report.unreachable}
            for number, report in enumerate(self.reports)
        ]
        slice_of = {"name": self.spec.name, "type": self.spec.slice.name, "zone": self.spec.zone}
        found = {"slice": slice_of, "phase": self.state.phase, "said": self.state.said, "run": self.run_name}
        run = None if self.run is None else status.as_json(self.run)
        dollars = None if self.spent is None else self.spent.dollars
        return {**found, "workers": workers, "spent_dollars": dollars, "status": run}

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [Text(describe(self.spec.name, self.spec.slice.name, self.state), style="bold")]
        if self.reports:
            parts.append(self._table())
        if self.run is not None:
            parts += [Text(f"{self.run_name}: {status.summary(self.run)}"), goodput_view.render(self.run.goodput)]
        if self.study is not None:
            parts.append(self.study)
        if self.spent is not None and self.spent.grants:
            parts.append(Text(f"spent: {self.spent.describe()}"))
        return Group(*parts)

    def _table(self) -> Listing:
        """A worker is the process of the same number: JAX numbers the hosts of a slice so."""
        columns = ("worker", "process", "step", "lag", "phase", "heartbeat", "verdict")
        table = Listing("", columns, left=("process", "phase", "verdict"), may_go=("lag", "heartbeat"))
        processes = {p.heartbeat.process: p for p in self.run.processes} if self.run is not None else {}
        for number, report in enumerate(self.reports):
            code = "" if report.code is None else f" ({report.code})"
            state = "not reached" if report.unreachable is not None else f"{report.state}{code}"
            known = processes.get(number)
            if known is None:
                table.add_row(str(number), state, "", "", "", "none yet", "")
                continue
            beat = known.heartbeat
            age = f"{duration(beat.age(self.run.time if self.run else time.time()), whole=True)} ago"
            table.add_row(
                str(number),
                state,
                f"{beat.step:,}",
                f"{known.lag:,}" if known.lag else "",
                beat.phase,
                age,
                known.verdict,
            )
        return table


def describe(name: str, kind: str, state: PodState) -> str:
    up = (
        f", up for {duration(max(0.0, time.time() - state.created))}"
        if state.created and state.phase == "ready"
        else ""
    )
    return f"{name} ({kind}): {state.describe()}{up}"
