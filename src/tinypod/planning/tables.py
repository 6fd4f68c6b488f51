"""What plans look like on a terminal, and as JSON. One row for a slice in each table; below one that does not fit, what
is proposed instead."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tinypod.planning.gpus import CARDS, SHARE_SETTING, memory_share
from tinypod.planning.hlo.kinds import KINDS
from tinypod.planning.hlo.program import Exchange
from tinypod.planning.planner import Plan
from tinypod.planning.prices import Prices
from tinypod.planning.search import Ranking
from tinypod.planning.slices import GIB
from tinypod.runs.terminal import Listing, amount, dollars, duration, size
from tinypod.sharding import describe_mesh

METHOD = (
    "Step times: each kernel between its roofline and the TPU compiler's own estimate, as published measurements of "
    "such kernels say. From: all at the roofline, or the busiest links at full speed; to: all as estimated, and "
    "nothing overlapped (docs/performance.md)."
)
ON_GPUS = (
    "Step times on GPUs: each kernel between its roofline by the card's data sheet, and its products and bytes one "
    "after the other at the speeds that cards reach: fitted to an H200, not tested on others (docs/performance.md)."
)
ROOFLINE = "Step times: kernel after kernel, each at the one of the two probed speeds that limits it."


def tables(asked: Sequence[Plan], prices: Prices | None) -> RenderableType:
    """Without `prices`: plans for the devices at hand."""
    plans = [plan for one in asked for plan in (one, one.proposal) if plan is not None]
    notes = [ROOFLINE] if prices is None else _method([plan.slice for plan in plans], prices)
    notes += [f"{_name(plan)}: {note}" for plan in plans for note in (*_sources(plan), *plan.notes)]
    shown = [_summary(plans, prices is not None), _speed(plans), _shares(plans), _memory(plans), _work(plans)]
    parts = [part for table in shown if table.rows for part in (table, Text())]
    return Group(*parts, Text("\n".join(notes), style="dim"))


def _generations(slices: Iterable[str]) -> list[str]:
    """`v5e` of `v5e-16` and of `2 × v5e-16`."""
    return list(dict.fromkeys(name.rpartition("-")[0].rpartition(" ")[2] for name in slices))


def _method(slices: Sequence[str], prices: Prices) -> list[str]:
    kinds = _generations(slices)
    cards = [name for name in kinds if name in CARDS]
    priced = [name for name in kinds if name in prices.on_demand]
    share = f"Of a card's memory JAX takes {memory_share():.0%}; {SHARE_SETTING} changes that, here and for the run."
    notes = [METHOD] * (len(kinds) > len(cards)) + [ON_GPUS, share] * bool(cards)
    notes += [f"Prices: {prices.describe(priced)}."] * bool(priced)
    unknown = ", ".join(name for name in kinds if name not in priced)
    return notes + [f"No price is known for {unknown}: write yours into a table (--prices FILE)."] * bool(unknown)


def _sources(plan: Plan) -> list[str]:
    """Where the numbers come from; plans for GPUs have it in their notes."""
    if plan.prediction is None or _generations([plan.slice])[0] in CARDS:
        return []
    if plan.probe is None:
        share = plan.prediction.estimated_share
        known = f"for {share:.0%} of the time on the chip there is an estimate of the compiler's; the rest is roofline"
        return [known] if share < 0.995 else []
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
    columns = (
        "slice",
        "mesh",
        "examples/s",
        "MFU",
        "step ms,\nfrom",
        "to",
        "compute\nms",
        "HBM\nms",
        "exchange\nms",
        "of it\nhidden",
    )
    table = Listing("Speed", columns, left=("mesh",), may_go=("compute\nms", "HBM\nms"))
    for plan in plans:
        if (prediction := plan.prediction) is None:
            continue
        sent = prediction.interconnect_s
        table.add_row(
            _name(plan),
            describe_mesh(plan.analysis.mesh) or "one device",
            amount(plan.batch_size / prediction.step_s),
            "–" if plan.utilisation is None else f"{plan.utilisation:.0%}",
            *(amount(1e3 * seconds) for seconds in (prediction.least_s, prediction.most_s)),
            *(amount(1e3 * seconds) for seconds in (prediction.compute_s, prediction.hbm_s)),
            "not known" if sent is None else amount(1e3 * sent),
            amount(1e3 * prediction.hidden_s),
        )
    return table


def _shares(plans: Sequence[Plan]) -> Listing:
    predictions = [(plan, plan.prediction) for plan in plans if plan.prediction is not None]
    names = [name for name in (*KINDS, "interconnect") if any(name in p.shares for _, p in predictions)]
    table = Listing("Of a step", ("slice", *(name.replace("interconnect", "exchange") for name in names)))
    for plan, prediction in predictions:
        table.add_row(_name(plan), *(f"{prediction.shares.get(name, 0.0):.0%}" for name in names))
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


def too_large(plan: Plan, *, searched: bool) -> str:
    """For a plan that does not fit: by how much, and what would, if that was looked for."""
    needed, there, proposal = plan.analysis.memory.needed, plan.usable_bytes, plan.proposal
    what = f"{plan.slice}: needs at least {needed / GIB:.2f} GiB per device"  # the compiler did not say more
    if there is not None and needed > there:
        over = f"{(needed - there) / GIB:.2f} too much"
        what = f"{plan.slice}: needs {needed / GIB:.2f} GiB of {there / GIB:.2f} per device, {over}"
    if plan.analysis.stand_in is not None:
        return f"{what} by the CPU's compiler; what the GPU's needs is not known here, and may be a fraction of it"
    if not searched:
        return what
    if proposal is None or proposal.prediction is None:
        return f"{what}; no cut of the batch, rematerialisation or FSDP that was tried fits: take a larger slice"
    less, step = proposal.analysis.memory.needed / GIB, amount(1e3 * proposal.prediction.step_s)
    return f"{what}; fits with {' '.join(proposal.overrides)}: {less:.2f} GiB, {step} ms per step"


def ranking(ranked: Ranking, prices: Prices) -> RenderableType:
    left_out = ranked.left_out[:8] + [f"and {len(ranked.left_out) - 8} more"] * (len(ranked.left_out) > 8)
    why = [f"Left out: {'; '.join(left_out)}."] if left_out else []
    if ranked.stopped:
        why.insert(0, "Stopped: what was compiled is kept; run the same command again to continue.")
    if not ranked.entries:
        return Text("\n".join(["No slice keeps within this budget.", *why]))
    columns = ("slice", "chips", "time", "on\ndemand", "spot", "scaled\nfrom")
    table = Listing("Slices within the budget, the best first", columns, left=columns[-1:], may_go=("chips",))
    for entry in ranked.entries:
        costs = ("–" if cost is None else dollars(cost) for cost in (entry.dollars, entry.dollars_spot))
        table.add_row(entry.slice, f"{entry.chips:,}", _time(entry.hours), *costs, entry.scaled_from or "")
    why = ["Those that are scaled from another slice were not compiled.", *why]
    why += [f"{entry.slice}: with {' '.join(entry.overrides)}" for entry in ranked.entries if entry.overrides]
    notes = [*_method([entry.slice for entry in ranked.entries], prices), *why, *ranked.notes]
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
        "utilisation": plan.utilisation,
        "predicted_by_measured": plan.ratio,
        "proposal": None if plan.proposal is None else as_json(plan.proposal),
    }
    return tree | derived
