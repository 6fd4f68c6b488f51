"""`tinypod slices`."""

from typing import Annotated, Any

import typer
from rich.table import Table

from tinypod.cli.shared import app, console


@app.command()
def slices(
    name: Annotated[str | None, typer.Argument(help="One slice, like `v4-64`; default: all.")] = None,
    chips: Annotated[int | None, typer.Option(help="Check a belief: so many chips.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Check a belief: so many hosts (workers, JAX processes).")] = None,
    devices: Annotated[int | None, typer.Option(help="Check a belief: so many JAX devices.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """TPU slices: chips, hosts, what JAX sees, memory and speed.

    Example: `tinypod slices v4-32 --hosts 8` is an error that says what a v4-32 has.
    """
    import json

    from tinypod.plan import slices as table

    shown = table.all_slices() if name is None else [table.find_slice(name)]
    if name is not None:
        shown[0].check_claims(chips=chips, hosts=hosts, devices=devices)
    if as_json:
        print(json.dumps([_facts(found) for found in shown]))
        return
    chips_table = Table(title="One chip", title_justify="left")
    for column in ("TPU", "HBM GiB", "usable GiB a device", "bf16 TFLOP/s", "HBM GB/s", "ICI GB/s one way"):
        chips_table.add_column(column, justify="left" if column == "TPU" else "right")
    for chip in dict.fromkeys(found.generation for found in shown):
        links = "not known" if chip.ici_link is None else f"{chip.ici_links} × {chip.ici_link / table.GB:.0f}"
        memory = f"{chip.hbm_bytes / table.GIB:.0f}", f"{chip.usable_bytes / table.GIB:.2f}"
        speeds = f"{chip.peak_bf16 / table.TERA:,.0f}", f"{chip.hbm_bandwidth / table.GB:,.0f}"
        chips_table.add_row(chip.name, *memory, *speeds, links)
    slices_table = Table(title="Slices", title_justify="left")
    for column in ("slice", "chips", "hosts", "devices", "topology", "HBM GiB", "bf16 PFLOP/s"):
        slices_table.add_column(column, justify="left" if column in ("slice", "topology") else "right")
    ends = {found.generation: found.name for found in shown}.values()  # the last of each generation
    for found in shown:
        counts = (f"{count:,}" for count in (found.chips, found.hosts, found.devices))
        memory_and_speed = (
            f"{found.chips * found.generation.hbm_bytes / table.GIB:,.0f}",
            f"{found.peak_bf16 / 1e15:,.1f}",
        )
        row = (found.name, *counts, found.topology_name, *memory_and_speed)
        slices_table.add_row(*row, end_section=found.name in ends)
    console.print(chips_table, slices_table)


def _facts(found: Any) -> dict[str, Any]:
    chip = found.generation
    return {
        "slice": found.name,
        "chips": found.chips,
        "hosts": found.hosts,
        "devices": found.devices,
        "topology": found.topology_name,
        "hbm_bytes_per_chip": chip.hbm_bytes,
        "usable_bytes_per_device": chip.usable_bytes,
        "peak_bf16_flops_per_chip": chip.peak_bf16,
        "hbm_bytes_per_s": chip.hbm_bandwidth,
        "ici_bytes_per_s_per_link": chip.ici_link,
        "ici_links": chip.ici_links,
    }
