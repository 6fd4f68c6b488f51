"""What a study takes on a slice, before it runs: packs, hours, price. Each program is planned for one device with one
run; a device that has several takes so many times as long: whatever packing gains beyond that is not promised."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from tinypod.errors import UserError
from tinypod.plan.planner import Plan, Planner
from tinypod.plan.prices import Prices
from tinypod.plan.slices import Slice
from tinypod.study.file import Study, StudyRun
from tinypod.study.packing import can_pack
from tinypod.study.run import plan_packs

ONE_DEVICE = ("mesh={devices: 1, data: 1}",)


class PackPlan(NamedTuple):
    runs: list[StudyRun]
    a_device: int  # runs that one device has at a time; 0: one run has all devices
    rounds: int  # that they take, one after the other
    plan: Plan  # of one run
    hours: float


class StudyPlan(NamedTuple):
    study: Study
    target: Slice
    packs: list[PackPlan]
    hours: float
    alone_hours: float | None  # one run after the other, each over all devices; None: that does not fit, or not divide
    dollars: float | None
    dollars_spot: float | None


def plan_study(study: Study, target: Slice, prices: Prices, console: Console) -> StudyPlan:
    packs = [_plan_pack(runs, target, prices, console) for runs in plan_packs(study.runs, None, target.devices)]
    hours = sum(pack.hours for pack in packs)
    name, chip_hours = target.generation.name, hours * target.chips
    on_demand, spot = prices.on_demand.get(name), prices.spot_price(name)
    return StudyPlan(
        study,
        target,
        packs,
        hours,
        _alone(packs, target, prices, console),
        None if on_demand is None else chip_hours * on_demand,
        None if spot is None else chip_hours * spot,
    )


def _plan_pack(runs: list[StudyRun], target: Slice, prices: Prices, console: Console) -> PackPlan:
    config = runs[0].config
    if not can_pack(config):
        plan = Planner(config, prices, console).plan(target)
        return PackPlan(runs, 0, len(runs), plan, len(runs) * _hours(plan, runs, target))
    plan = Planner(config, prices, console).plan(target, ONE_DEVICE)
    usable, needed = target.generation.usable_bytes, plan.analysis.memory.needed
    wanted = -(-len(runs) // target.devices)
    a_device = min(wanted, int(usable // max(needed, 1)))
    hours = _hours(plan, runs, target)
    rounds = -(-len(runs) // (max(a_device, 1) * target.devices))
    return PackPlan(runs, a_device, rounds, plan, rounds * a_device * hours)


def _hours(plan: Plan, runs: Sequence[StudyRun], target: Slice) -> float:
    if plan.hours is not None:
        return plan.hours
    if plan.train_hours is None:
        raise UserError(
            f"{runs[0].name} does not fit a device of {target.name}; `tinypod plan` finds what would, for its config"
        )
    return plan.train_hours


def _alone(packs: Sequence[PackPlan], target: Slice, prices: Prices, console: Console) -> float | None:
    total = 0.0
    for pack in packs:
        try:
            plan = Planner(pack.runs[0].config, prices, console).plan(target) if pack.a_device else pack.plan
            total += len(pack.runs) * _hours(plan, pack.runs, target)
        except UserError:  # a batch that does not divide over so many devices
            return None
    return total


def table(found: StudyPlan) -> Table:
    target = found.target
    shown = Table(title=f"{found.study.name} on {target.name} ({target.devices} devices)", title_justify="left")
    for column, justify in (("runs", "right"), ("like", "left"), ("a device", "right"), ("GiB", "right")):
        shown.add_column(column, justify=justify)  # type: ignore[arg-type]
    shown.add_column("ms a step", justify="right")
    shown.add_column("hours", justify="right")
    for pack in found.packs:
        step_s, needed = pack.plan.step_s, pack.plan.analysis.memory.needed * max(pack.a_device, 1)
        shown.add_row(
            str(len(pack.runs)),
            pack.runs[0].variant,
            str(pack.a_device) if pack.a_device else "one on all",
            f"{needed / 2**30:.2f}",
            "–" if step_s is None else f"{1e3 * step_s * max(pack.a_device, 1):,.1f}",
            f"{pack.hours:.2f}",
        )
    return shown


def summary(found: StudyPlan) -> str:
    text = f"{len(found.study.runs)} runs in {len(found.packs)} programs: {found.hours:.2f} hours"
    if found.dollars is not None:
        text += f", ${found.dollars:,.2f} on demand"
    if found.dollars_spot is not None:
        text += f", ${found.dollars_spot:,.2f} spot"
    if found.alone_hours is not None:
        text += f"; one run after the other over all devices: {found.alone_hours:.2f} hours"
    return text
