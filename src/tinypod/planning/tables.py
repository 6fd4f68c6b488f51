"""What plans look like on a terminal, and as JSON. One row for a slice in each table; below one that does not fit, what
is proposed instead."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tinypod.planning.hlo.program import Exchange
from tinypod.planning.planner import Plan
from tinypod.planning.prices import Prices
from tinypod.planning.search import Ranking
from tinypod.planning.slices import GIB
from tinypod.runs.terminal import Listing, amount, dollars, duration, size
from tinypod.sharding import describe_mesh

METHOD = (
    "Step times: the TPU compiler's own estimates of its kernels' cycles, never below their roofline; exchange between "
    "chips is added as if nothing overlapped it. They have not been compared with a TPU yet (docs/performance.md)."
)
ROOFLINE = "Step times: kernel after kernel, each at the one of the two probed speeds that limits it."


def tables(asked: Sequence[Plan], prices: Prices | None) -> RenderableType:
    """Without `prices`: plans for the devices at hand."""
    plans = [plan for one in asked for plan in (one, one.proposal) if plan is not None]
    notes = [ROOFLINE] if prices is None else [METHOD, f"Prices: {prices.describe()}."]
    notes += [f"{_name(plan)}: {note}" for plan in plans for note in (*_sources(plan), *plan.notes)]
    shown = [_summary(plans, prices is not None), _speed(plans), _memory(plans), _work(plans)]
    parts = [part for table in shown if table.rows for part in (table, Text())]
    return Group(*parts, Text("\n".join(notes), style="dim"))


def _sources(plan: Plan) -> list[str]:
    """Where the numbers come from."""
    if plan.prediction is None:
        return []
    if plan.probe is None:
        share = plan.prediction.estimated_share
        return [f"{share:.0%} of the time on the chip is the compiler's estimate, the rest roofline"]
    probe = plan.probe
    notes = [f"probed {amount(probe.flops / 1e12)} TFLOP/s in products, {amount(probe.bandwidth / 1e9)} GB/s"]
    if plan.measured_s is not None:
        speed = f"{amount(1e3 * plan.measured_s)} ms per step, {amount(plan.batch_size / plan.measured_s)} examples/s"
        notes.append(f"measured {speed}; predicted / measured {plan.ratio:.2f}")
    if plan.measured_peak_bytes is not None:
        notes.append(f"measured peak memory {size(plan.measured_peak_bytes)}")
    return notes


def _summary(plans: Sequence[Plan], priced: bool) -> Listing:
    columns = ("slice", "rows per\ndevice", "HBM\nGiB", "step\nms", "time")
    table = Listing("Plan", (*columns, *("on\ndemand", "spot") * priced))
    for plan in plans:
        red, needed = "" if plan.fits else "bold red", f"{plan.analysis.memory.needed / GIB:.2f}"
        there = "" if plan.usable_bytes is None else f" of {plan.usable_bytes / GIB:.2f}"
        times = ("–", "does not fit")
        if plan.fits and plan.prediction is not None and plan.hours is not None:
            times = (amount(1e3 * plan.prediction.step_s), duration(3600 * plan.hours, whole=True))
        cost = (dollars(plan.dollars), dollars(plan.dollars_spot)) if plan.fits else ("–", "–")
        table.add_row(
            _name(plan),
            f"{plan.rows_per_device:,}",
            Text(f"{needed}{there}", style=red),
            times[0],
            Text(times[1], style=red),
            *cost * priced,
        )
    return table


def _speed(plans: Sequence[Plan]) -> Listing:
    columns = ("slice", "mesh", "bound", "examples/s", "compute\nms", "HBM\nms", "interconnect\nms")
    table = Listing("Speed", columns, left=("mesh", "bound"))
    for plan in plans:
        if (prediction := plan.prediction) is None:
            continue
        sent = prediction.interconnect_s
        table.add_row(
            _name(plan),
            describe_mesh(plan.analysis.mesh) or "one device",
            prediction.bound,
            amount(plan.batch_size / prediction.step_s),
            amount(1e3 * prediction.compute_s),
            amount(1e3 * prediction.hbm_s),
            "not known" if sent is None else amount(1e3 * sent),
        )
    return table


def _name(plan: Plan) -> Text:
    return Text(f"↳ {' '.join(plan.overrides)}", style="green") if plan.overrides else Text(plan.slice, style="bold")


def _memory(plans: Sequence[Plan]) -> Listing:
    columns = ("slice", *plans[0].analysis.memory.parts(), "needed", "there")
    table = Listing("Memory of a device, MiB", columns)
    for plan in plans:
        memory = plan.analysis.memory
        sizes = [f"{size / 2**20:,.1f}" for size in memory.parts().values()]
        there = "not known" if plan.usable_bytes is None else f"{plan.usable_bytes / 2**20:,.0f}"
        table.add_row(_name(plan), *sizes, f"{memory.needed / 2**20:,.0f}", there)
    return table


def _work(plans: Sequence[Plan]) -> Listing:
    table = Listing(
        "One step", ("slice", "TFLOP,\nmodel", "as\ncompiled", "kernels", "collectives"), left=("collectives",)
    )
    for plan in plans:
        if (work := plan.analysis.work) is None:
            continue
        table.add_row(
            _name(plan),
            amount(plan.model_flops / 1e12),
            amount(work.flops * plan.devices / 1e12),
            f"{work.kernel_runs:,}",
            "\n".join(map(_exchange, work.exchanges())) or "none",
        )
    return table


def _exchange(one: Exchange) -> str:
    return f"{one.runs:,} {one.op} over {'·'.join(one.axes)}: {size(one.payload_bytes)}"


def too_large(plan: Plan) -> str:
    """For a plan that does not fit: by how much, and what would."""
    needed, there, proposal = plan.analysis.memory.needed, plan.usable_bytes, plan.proposal
    what = f"{plan.slice}: needs at least {needed / GIB:.2f} GiB per device"  # the compiler did not say more
    if there is not None and needed > there:
        over = f"{(needed - there) / GIB:.2f} too much"
        what = f"{plan.slice}: needs {needed / GIB:.2f} GiB of {there / GIB:.2f} per device, {over}"
    if proposal is None or proposal.prediction is None:
        return f"{what}; no cut of the batch, rematerialisation or FSDP that was tried fits: take a larger slice"
    less, step = proposal.analysis.memory.needed / GIB, amount(1e3 * proposal.prediction.step_s)
    return f"{what}; fits with {' '.join(proposal.overrides)}: {less:.2f} GiB, {step} ms per step"


def ranking(ranked: Ranking, prices: Prices) -> RenderableType:
    left_out = ranked.left_out[:8] + [f"and {len(ranked.left_out) - 8} more"] * (len(ranked.left_out) > 8)
    why = [f"Left out: {'; '.join(left_out)}."] if left_out else []
    if not ranked.entries:
        return Text("\n".join(["No slice keeps within this budget.", *why]))
    columns = ("slice", "chips", "time", "on\ndemand", "spot", "scaled\nfrom")
    table = Listing("Slices within the budget, the best first", columns, left=columns[-1:], may_go=("chips",))
    for entry in ranked.entries:
        costs = ("–" if cost is None else dollars(cost) for cost in (entry.dollars, entry.dollars_spot))
        table.add_row(entry.slice, f"{entry.chips:,}", _time(entry.hours), *costs, entry.scaled_from or "")
    why = ["Those that are scaled from another slice were not compiled.", *why]
    why += [f"{entry.slice}: with {' '.join(entry.overrides)}" for entry in ranked.entries if entry.overrides]
    notes = [METHOD, f"Prices: {prices.describe()}.", *why, *ranked.notes]
    return Group(table, Text("\n".join(notes), style="dim"))


def _time(hours: float) -> str:
    return duration(3600 * hours, whole=True)


def as_json(plan: Plan) -> dict[str, Any]:
    """Of kernels and collectives the totals: the lists are for predictions, not for readers."""
    lists = {"work": {"kernels", "collectives"}}
    tree = plan.model_dump(mode="json", exclude={"analysis": lists, "proposal": True})
    work = plan.analysis.work
    if work is not None:
        totals = {"flops": work.flops, "hbm_bytes": work.hbm_bytes, "kernel_runs": work.kernel_runs}
        tree["analysis"]["work"] |= totals | {"collectives": [one._asdict() for one in work.exchanges()]}
    derived = {
        "examples_per_s": None if plan.step_s is None else plan.batch_size / plan.step_s,
        "predicted_by_measured": plan.ratio,
        "proposal": None if plan.proposal is None else as_json(plan.proposal),
    }
    return tree | derived
