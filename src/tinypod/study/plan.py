"""What a study takes on a slice, before it runs: packs, hours, price.

The hosts share its runs as they would (`claims.py`), by the planner's times: each program is planned for one device
with one run, and a device that has several takes so many times as long; whatever packing gains beyond that is not
promised. A run that a host trains alone is planned for all its devices.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rich.console import Console

from tinypod.errors import UserError
from tinypod.planning.planner import Plan, Planner
from tinypod.planning.prices import Prices
from tinypod.planning.slices import Slice
from tinypod.runs.terminal import Listing, amount, dollars, duration
from tinypod.study.claims import Worker
from tinypod.study.file import Study, StudyRun
from tinypod.study.packing import can_pack, most_devices, shape_of
from tinypod.study.run import next_pack, plan_packs

ONE_DEVICE = ("mesh={devices: 1, data: 1}",)


@dataclass
class ShapePlan:
    """Runs of one shape: one program, or as many as there are hosts that train some of them."""

    runs: list[StudyRun]
    plan: Plan  # of one run, on one device; of one that cannot be packed, on all of a host
    fits: int  # runs on one device at a time; 0: a run has all devices of a host
    packs: list[int] = field(default_factory=list)  # how many runs each takes
    a_device: int = 0  # runs that one has, in the largest pack
    hours: float = 0.0  # of all its packs, one after the other
    alone_hours: float | None = None  # of a run that has all devices of a host


class StudyPlan(NamedTuple):
    study: Study
    target: Slice
    shapes: list[ShapePlan]
    hours: float
    alone_hours: float | None  # one run after the other, each over all devices; None: that does not fit, or not divide
    dollars: float | None
    dollars_spot: float | None


def plan_study(study: Study, target: Slice, prices: Prices, console: Console) -> StudyPlan:
    times = _Times(study, target, prices, console)
    worker, free = Worker(count=target.hosts), list(study.runs)
    hosts = [(0.0, number) for number in range(target.hosts)]  # when each is free
    while free:
        start, number = heapq.heappop(hosts)
        packs = plan_packs(free, None, times.devices, worker.most(len(free), times.devices))
        chosen = next_pack(packs, worker, times.cost)
        heapq.heappush(hosts, (start + times.train(chosen), number))
        names = {run.name for run in chosen}
        free = [run for run in free if run.name not in names]
    hours, shapes = max(hosts)[0], list(times.shapes.values())
    name, chip_hours = target.generation.name, hours * target.chips
    on_demand, spot = prices.on_demand.get(name), prices.spot_price(name)
    return StudyPlan(
        study,
        target,
        shapes,
        hours,
        _alone(shapes, target, prices, console),
        None if on_demand is None else chip_hours * on_demand,
        None if spot is None else chip_hours * spot,
    )


class _Times:
    """How long a host takes for some runs; each shape is planned once."""

    def __init__(self, study: Study, target: Slice, prices: Prices, console: Console) -> None:
        self.target, self.prices, self.console = target, prices, console
        self.host = replace(target, name=f"one host of {target.name}", topology=target.host_bounds)
        self.devices = self.host.devices
        self.shapes: dict[str, ShapePlan] = {}
        self.shape = {run.name: shape_of(run.config) for run in study.runs}
        for run in study.runs:
            if self.shape[run.name] not in self.shapes:
                self.shapes[self.shape[run.name]] = self._plan(run)
            self.shapes[self.shape[run.name]].runs.append(run)

    def cost(self, run: StudyRun) -> float:
        return _hours(self.shapes[self.shape[run.name]].plan, run, self.target)

    def train(self, runs: Sequence[StudyRun]) -> float:
        """Hours of a host, with its books kept."""
        shape = self.shapes[self.shape[runs[0].name]]
        if len(runs) == 1:
            hours, a_device = self._alone(runs[0], shape), 0
        else:
            a_device = min(-(-len(runs) // self.devices), shape.fits)
            rounds = -(-len(runs) // (a_device * self.devices))
            hours = rounds * a_device * self.cost(runs[0])
        shape.packs.append(len(runs))
        shape.hours, shape.a_device = shape.hours + hours, max(shape.a_device, a_device)
        return hours

    def _plan(self, run: StudyRun) -> ShapePlan:
        if not can_pack(run.config):
            return ShapePlan([], Planner(run.config, self.prices, self.console).plan(self.host), 0)
        plan = Planner(run.config, self.prices, self.console).plan(self.target, ONE_DEVICE)
        fits = max(int(self.target.generation.usable_bytes // max(plan.analysis.memory.needed, 1)), 1)
        _hours(plan, run, self.target)
        return ShapePlan([], plan, fits)

    def _alone(self, run: StudyRun, shape: ShapePlan) -> float:
        used = most_devices(run.config, self.devices)
        if not shape.fits or used == 1:
            return self.cost(run)
        if shape.alone_hours is None:
            mesh = (f"mesh={{devices: {used}, data: {used}}}",)
            plan = Planner(run.config, self.prices, self.console).plan(self.host, mesh)
            shape.alone_hours = _hours(plan, run, self.target)
        return shape.alone_hours


def _hours(plan: Plan, run: StudyRun, target: Slice) -> float:
    if plan.hours is not None:
        return plan.hours
    if plan.train_hours is None:
        raise UserError(
            f"{run.name} does not fit a device of {target.name}; `tinypod plan` finds what would, for its config"
        )
    return plan.train_hours


def _alone(shapes: Sequence[ShapePlan], target: Slice, prices: Prices, console: Console) -> float | None:
    total = 0.0
    for shape in shapes:
        try:
            run = shape.runs[0]
            total += len(shape.runs) * _hours(Planner(run.config, prices, console).plan(target), run, target)
        except UserError:  # a batch that does not divide over so many devices
            return None
    return total


def table(found: StudyPlan) -> Listing:
    target = found.target
    hosts = f", {target.hosts} hosts" if target.hosts > 1 else ""
    columns = ("like", "runs", "packs of", "per device", "GiB", "ms per step", "time of hosts" if hosts else "time")
    shown = Listing(f"{found.study.name} on {target.name} ({target.devices:,} devices{hosts})", columns)
    for shape in found.shapes:
        step_s, times = shape.plan.step_s, max(shape.a_device, 1)
        shown.add_row(
            shape.runs[0].variant,
            f"{len(shape.runs):,}",
            _counted(shape.packs),
            str(shape.a_device) if shape.a_device else "one on all",
            f"{shape.plan.analysis.memory.needed * times / 2**30:.2f}",
            "–" if step_s is None else amount(1e3 * step_s * times),
            _time(shape.hours),
        )
    return shown


def _counted(packs: Sequence[int]) -> str:
    """`2 × 4, 1`."""
    sizes = sorted(set(packs), reverse=True)
    return ", ".join(f"{packs.count(size)} × {size}" if packs.count(size) > 1 else str(size) for size in sizes)


def summary(found: StudyPlan) -> str:
    text = f"{len(found.study.runs)} runs in {sum(len(shape.packs) for shape in found.shapes)} packs"
    text += f" of {len(found.shapes)} shapes: {_time(found.hours)}"
    if found.dollars is not None:
        text += f", {dollars(found.dollars)} on demand"
    if found.dollars_spot is not None:
        text += f", {dollars(found.dollars_spot)} spot"
    if found.alone_hours is not None:
        text += f"; one run after the other over all devices: {_time(found.alone_hours)}"
    return text


def _time(hours: float) -> str:
    return duration(3600 * hours, whole=True)
