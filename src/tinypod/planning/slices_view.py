"""TPU slices as tables, and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tinypod.planning.slices import GB, GIB, TERA, Slice
from tinypod.runs.terminal import Listing


def render(shown: Sequence[Slice]) -> RenderableType:
    of_a_chip = ("TPU", "HBM\nGiB", "usable GiB\nper device", "bf16\nTFLOP/s", "HBM\nGB/s", "ICI GB/s\none way")
    chips = Listing("One chip", of_a_chip)
    for chip in dict.fromkeys(one.generation for one in shown):
        links = "not known" if chip.ici_link is None else f"{chip.ici_links} × {chip.ici_link / GB:.0f}"
        memory = f"{chip.hbm_bytes / GIB:.0f}", f"{chip.usable_bytes / GIB:.2f}"
        chips.add_row(chip.name, *memory, f"{chip.peak_bf16 / TERA:,.0f}", f"{chip.hbm_bandwidth / GB:,.0f}", links)
    columns = ("slice", "chips", "hosts", "devices", "topology", "HBM\nGiB", "bf16\nPFLOP/s")
    slices = Listing("Slices", columns, left=("topology",), may_go=columns[-1:])
    ends = {one.generation: one.name for one in shown}.values()  # the last of each generation
    for one in shown:
        counts = (f"{count:,}" for count in (one.chips, one.hosts, one.devices))
        memory_and_speed = f"{one.chips * one.generation.hbm_bytes / GIB:,.0f}", f"{one.peak_bf16 / 1e15:,.1f}"
        slices.add_row(one.name, *counts, one.topology_name, *memory_and_speed, end_section=one.name in ends)
    return Group(chips, Text(), slices)


def as_json(one: Slice) -> dict[str, Any]:
    chip = one.generation
    return {
        "slice": one.name,
        "chips": one.chips,
        "hosts": one.hosts,
        "devices": one.devices,
        "topology": one.topology_name,
        "hbm_bytes_per_chip": chip.hbm_bytes,
        "usable_bytes_per_device": chip.usable_bytes,
        "peak_bf16_flops_per_chip": chip.peak_bf16,
        "hbm_bytes_per_s": chip.hbm_bandwidth,
        "ici_bytes_per_s_per_link": chip.ici_link,
        "ici_links": chip.ici_links,
    }
