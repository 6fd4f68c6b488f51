"""TPU slices and GPUs as tables, and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tinypod.planning.gpus import Cards
from tinypod.planning.hardware import Hardware
from tinypod.planning.slices import GB, GIB, TERA, Slice
from tinypod.runs.terminal import Listing


def render(shown: Sequence[Hardware]) -> RenderableType:
    slices, cards = [one for one in shown if isinstance(one, Slice)], [one for one in shown if isinstance(one, Cards)]
    parts = [_render_slices(slices)] * bool(slices) + [_render_cards(cards)] * bool(cards)
    return Group(*(part for one in parts for part in (one, Text())[: 1 + (one is not parts[-1])]))


def _render_cards(shown: Sequence[Cards]) -> RenderableType:
    speeds = ("bf16\nTFLOP/s", "TFLOP/s\nreached", "memory\nGB/s", "GB/s\nreached", "GB/s to\na card", "to a\nhost")
    cards = Listing("One card", ("GPU", "memory\nGiB", "usable\nGiB", *speeds))
    for card in dict.fromkeys(one.generation for one in shown):
        chip, network = card.chip, card.chip.network
        memory = (f"{size / GIB:.1f}" for size in (card.memory_bytes, card.usable_bytes))
        products = (f"{speed / TERA:,.0f}" for speed in (chip.peak_bf16, chip.reached_bf16))
        bandwidths = (f"{x / GB:,.0f}" for x in (card.bandwidth, card.reached_bandwidth, chip.link))
        cards.add_row(card.name, *memory, *products, *bandwidths, "–" if network is None else f"{network / GB:.0f}")
    several = Listing("GPUs", ("name", "cards", "hosts", "devices", "memory\nGiB", "bf16\nPFLOP/s"))
    ends = {one.generation: one.name for one in shown}.values()
    for one in shown:
        counts = (f"{count:,}" for count in (one.chips, one.hosts, one.devices))
        memory_and_speed = f"{one.chips * one.generation.memory_bytes / GIB:,.0f}", f"{one.peak_bf16 / 1e15:,.1f}"
        several.add_row(one.name, *counts, *memory_and_speed, end_section=one.name in ends)
    return Group(cards, Text(), several)


def _render_slices(shown: Sequence[Slice]) -> RenderableType:
    of_a_chip = ("TPU", "HBM\nGiB", "usable GiB\nper device", "bf16\nTFLOP/s", "HBM\nGB/s", "ICI GB/s\none way")
    chips = Listing("One chip", (*of_a_chip, "to other\nslices"))
    for chip in dict.fromkeys(one.generation for one in shown):
        links = "not known" if chip.ici_link is None else f"{chip.ici_links} × {chip.ici_link / GB:.0f}"
        memory = f"{chip.hbm_bytes / GIB:.0f}", f"{chip.usable_bytes / GIB:.2f}"
        speeds = f"{chip.peak_bf16 / TERA:,.0f}", f"{chip.hbm_bandwidth / GB:,.0f}", links, f"{chip.dcn / GB:g}"
        chips.add_row(chip.name, *memory, *speeds)
    columns = ("slice", "chips", "hosts", "devices", "topology", "HBM\nGiB", "bf16\nPFLOP/s")
    slices = Listing("Slices", columns, left=("topology",), may_go=columns[-1:])
    ends = {one.generation: one.name for one in shown}.values()  # the last of each generation
    for one in shown:
        counts = (f"{count:,}" for count in (one.chips, one.hosts, one.devices))
        memory_and_speed = f"{one.chips * one.generation.hbm_bytes / GIB:,.0f}", f"{one.peak_bf16 / 1e15:,.1f}"
        slices.add_row(one.name, *counts, one.topology_name, *memory_and_speed, end_section=one.name in ends)
    return Group(chips, Text(), slices)


def as_json(one: Hardware) -> dict[str, Any]:
    if isinstance(one, Cards):
        card = one.generation
        return {
            "slice": one.name,
            "chips": one.chips,
            "hosts": one.hosts,
            "devices": one.devices,
            "device_kind": card.device_kind,
            "memory_bytes_per_card": card.memory_bytes,
            "usable_bytes_per_device": card.usable_bytes,
            "peak_bf16_flops_per_card": card.peak_bf16,
            "reached_bf16_flops_per_card": card.chip.reached_bf16,
            "memory_bytes_per_s": card.bandwidth,
            "reached_memory_bytes_per_s": card.reached_bandwidth,
            "bytes_per_s_to_a_card": card.chip.link,
            "bytes_per_s_to_a_host": card.chip.network,
        }
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
        "dcn_bytes_per_s_per_chip": chip.dcn,
    }
