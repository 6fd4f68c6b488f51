"""What plans look like on a terminal. One row for a slice in each table; below one that does not
fit, what is proposed instead."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinypod.plan.analysis import Traffic, Work
from tinypod.plan.planner import Plan, Prediction
from tinypod.plan.prices import Prices
from tinypod.plan.search import Ranking
from tinypod.plan.slices import GIB
from tinypod.sharding import describe_mesh

WIDTH = 136  # that the tables need; narrower terminals wrap lines, but lose no digit
METHOD = (
    "Step times: the TPU compiler's own estimates of its kernels' cycles, never below their roofline; exchange between "
    "chips is added as if nothing overlapped it. No TPU was at hand to hold them against (docs/performance.md)."
)


def tables(plans: Sequence[Plan], prices: Prices, *, grant: bool) -> RenderableType:
    notes = [METHOD, _price_note(prices, grant)]
    notes += [f"{_name(plan)}: {note}" for plan in plans for note in plan.notes()]
    return Group(_summary(plans), _memory(plans), _work(plans), Text("\n".join(notes), style="dim"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in ("slice", "mesh", "bound", "collectives") else "right")
    return table


def _summary(plans: Sequence[Plan]) -> Table:
    columns = (
        "slice",
        "mesh",
        "rows a device",
        "HBM GiB",
        "step ms",
        "bound",
        "examples/s",
        "hours",
        "on demand",
        "spot",
    )
    table = _table("Plan", *columns)
    for plan in plans:
        fits = plan.fits
        needed = f"{plan.analysis.memory.needed / GIB:.2f} of {plan.usable_bytes / GIB:.2f}"
        cost = (dollars(plan.dollars), dollars(plan.dollars_spot)) if fits else ("–", "–")
        table.add_row(
            _name(plan),
            describe_mesh(plan.analysis.mesh) or "one device",
            f"{plan.rows_per_device:,}",
            needed if fits else Text(needed, style="bold red"),
            _time(plan.prediction),
            plan.prediction.bound if plan.prediction else Text("does not fit", style="bold red"),
            "–" if plan.examples_per_s is None else f"{plan.examples_per_s:,.0f}",
            "–" if plan.hours is None else hours(plan.hours),
            *cost,
        )
    return table


def _name(plan: Plan) -> Text:
    return Text(f"↳ {' '.join(plan.overrides)}", style="green") if plan.overrides else Text(plan.slice, style="bold")


def _time(prediction: Prediction | None) -> str:
    return "–" if prediction is None else milliseconds(prediction.step_s)


def _memory(plans: Sequence[Plan]) -> Table:
    table = _table("Memory of a device, MiB", "slice", *plans[0].analysis.memory.parts(), "needed", "there")
    for plan in plans:
        memory = plan.analysis.memory
        sizes = [f"{size / 2**20:,.1f}" for size in memory.parts().values()]
        totals = (f"{memory.needed / 2**20:,.0f}", f"{plan.usable_bytes / 2**20:,.0f}")
        table.add_row(_name(plan), *sizes, *totals)
    return table


def _work(plans: Sequence[Plan]) -> RenderableType:
    columns = (
        "slice",
        "TFLOP, model",
        "as compiled",
        "compute ms",
        "HBM ms",
        "interconnect ms",
        "kernels",
        "collectives",
    )
    table = _table("One step", *columns)
    for plan in plans:
        work, prediction = plan.analysis.work, plan.prediction
        if work is None or prediction is None:
            continue
        sent = prediction.interconnect_s
        table.add_row(
            _name(plan),
            f"{plan.model_flops / 1e12:,.2f}",
            f"{work.flops * plan.devices / 1e12:,.2f}",
            milliseconds(prediction.compute_s),
            milliseconds(prediction.hbm_s),
            "not known" if sent is None else milliseconds(sent),
            f"{work.kernel_runs:,}",
            "\n".join(traffic_text(one) for one in work.collectives) or "none",
        )
    return table if table.row_count else Text()


def traffic_text(traffic: Traffic) -> str:
    size = traffic.payload_bytes / 2**20
    return f"{traffic.runs:,} {traffic.op} over {'·'.join(traffic.axes)}: {size:,.1f} MiB"


def too_large(plan: Plan, proposal: Plan | None) -> str:
    """For a plan that does not fit: by how much, and what would."""
    memory, there = plan.analysis.memory, plan.usable_bytes
    over = (memory.needed - there) / GIB
    what = f"{plan.slice}: needs {memory.needed / GIB:.2f} GiB of {there / GIB:.2f} a device, {over:.2f} too much"
    if proposal is None or proposal.prediction is None:
        return f"{what}; no cut of the batch, rematerialisation or FSDP that was tried fits: take a larger slice"
    needed, step = proposal.analysis.memory.needed / GIB, milliseconds(proposal.prediction.step_s)
    return f"{what}; fits with {' '.join(proposal.overrides)}: {needed:.2f} GiB, {step} ms a step"


def ranking(ranked: Ranking, prices: Prices, *, grant: bool) -> RenderableType:
    notes = [METHOD, _price_note(prices, grant)]
    if ranked.left_out:
        shown = ranked.left_out[:8] + [f"and {len(ranked.left_out) - 8} more"] * (len(ranked.left_out) > 8)
        notes.append(f"Left out: {'; '.join(shown)}.")
    if not ranked.entries:
        return Text("\n".join(["No slice keeps within this budget.", *notes[2:]]))
    table = _table("Slices within the budget", "#", "slice", "chips", "hours", "on demand", "spot", "how", "with")
    for number, entry in enumerate(ranked.entries, 1):
        how = "compiled" if entry.scaled_from is None else f"scaled from {entry.scaled_from}"
        table.add_row(
            str(number),
            entry.slice.name,
            str(entry.slice.chips),
            hours(entry.hours),
            dollars(entry.dollars),
            dollars(entry.dollars_spot),
            how,
            " ".join(entry.plan.overrides) if entry.plan else "",
        )
    notes += sorted({note for entry in ranked.entries if entry.plan for note in entry.plan.notes()[1:]})
    return Group(table, Text("\n".join(notes), style="dim"))


def _price_note(prices: Prices, grant: bool) -> str:
    return "Under a grant nothing is charged." if grant else f"Prices: {prices.describe()}."


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def hours(value: float) -> str:
    if value < 0.01:
        return "< 0.01"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def dollars(value: float | None) -> str:
    return "not known" if value is None else f"${value:,.0f}" if value >= 100 else f"${value:,.2f}"


def as_json(plan: Plan, proposal: Plan | None) -> dict[str, Any]:
    def one(plan: Plan) -> dict[str, Any]:
        tree = plan.model_dump(mode="json")
        if plan.analysis.work is not None:
            tree["analysis"]["work"] = work_as_json(plan.analysis.work)
        derived = {"fits": plan.fits, "hours": plan.hours, "examples_per_s": plan.examples_per_s, "notes": plan.notes()}
        return tree | derived

    return one(plan) | {"proposal": None if proposal is None else one(proposal)}


def work_as_json(work: Work) -> dict[str, Any]:
    """Totals for the list of kernels, which is for predictions, not for readers."""
    return work.model_dump(mode="json", exclude={"kernels"}) | {
        "flops_per_device": work.flops,
        "hbm_bytes_per_device": work.hbm_bytes,
        "kernel_runs": work.kernel_runs,
    }
