"""How long a collective takes between the chips of a slice, and between slices; and between GPUs.

By its kind, by the axes of the topology that its groups span, and by the links that a chip has along these: two where
an axis closes to a ring, one where it ends. All axes work at once, as the compiler's own collectives do. A group that
fills no box of the topology, or is placed where nobody says, gets one link; one with a device of each chip shares the
chip's links with its other devices, and one whose chips are not neighbours with the groups between them. To that comes
a time for each hop that a piece has to make.

What crosses slices the compiler takes apart: a sum is reduced and scattered inside each, a device exchanges its part
with those in its place in the other slices, over the network of the data centre, and the slice gathers it again.

The GPUs of a host form rings over their NVLinks, or over PCIe. Over several hosts, the cards of a host do their part
first, and each then has its share of the result to exchange with the cards in its place on the others, by a port of its
own.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from tinypod.planning.calibration import Calibration
from tinypod.planning.gpus import Cards
from tinypod.planning.hardware import Hardware
from tinypod.planning.hlo.groups import BETWEEN_SLICES, Span
from tinypod.planning.hlo.program import Collective
from tinypod.planning.slices import Slice

NETWORK_SHARE = 0.8  # of a port of GPUs that collectives reach
_NVLINK_S, _NETWORK_S = 2e-6, 10e-6  # to hand a piece on to the next GPU of a ring; not measured


def seconds(one: Collective, target: Hardware, calibration: Calibration) -> float | None:
    """Of one run; None where the speed of a link is not known."""
    if isinstance(target, Cards):
        return 0.0 if one.span.group_size == 1 else _cards_s(one, target)
    link = target.generation.ici_link
    if one.span.group_size == 1:
        return 0.0
    if one.axes == BETWEEN_SLICES:
        return one.wire_bytes / target.dcn_bandwidth
    if link is None:
        return None
    link *= calibration.link_share
    if one.op == "collective-permute":
        return _permute_s(one, target, link, calibration.hop_s)
    sizes = one.span.chips
    if not sizes:
        return _inside_s(one.op, one.payload_bytes, [_Axis(one.span.group_size)], link, calibration.hop_s)
    link *= one.span.group_size / math.prod(sizes) / target.generation.devices_per_chip  # others use the rest meanwhile
    return _inside_s(one.op, one.payload_bytes, list(_axes(one.span, target)), link, calibration.hop_s)


class _Axis(NamedTuple):
    """Of a group of chips."""

    size: int
    ring: bool = False
    stride: int = 1  # as many groups share its links

    @property
    def links(self) -> float:
        return (1 + self.ring) / self.stride

    @property
    def hops(self) -> int:
        return self.stride * (self.size // 2 if self.ring else self.size - 1)


def _axes(span: Span, target: Slice) -> Iterator[_Axis]:
    """Those with more than one chip of a group."""
    strides = span.strides or (1,) * len(span.chips)
    for size, stride, whole, wraps in zip(span.chips, strides, target.topology, target.wraps, strict=True):
        if size > 1:
            yield _Axis(size, wraps and size * stride == whole, stride)


def _inside_s(op: str, payload: float, axes: list[_Axis], link: float, hop_s: float) -> float:
    if not axes:  # devices of one chip
        return 0.0
    chips = math.prod(axis.size for axis in axes)
    waits_s = hop_s * sum(axis.hops for axis in axes)
    if op in ("all-to-all", "ragged-all-to-all"):  # what crosses the middle of the longest axis
        return max(payload * axis.size / 4 / axis.links / link for axis in axes) + waits_s
    once = payload * (chips - 1) / chips / (link * sum(axis.links for axis in axes)) + waits_s
    return 2 * once if op == "all-reduce" else once  # reduced and scattered, then gathered


def _permute_s(one: Collective, target: Slice, link: float, hop_s: float) -> float:
    """As long as the busiest link has to send; to a neighbour, one piece."""
    if not one.span.ways:
        return one.payload_bytes / link + hop_s
    ways = [ring if wraps else line for (line, ring), wraps in zip(one.span.ways, target.wraps, strict=True)]
    return max(way.load for way in ways) * one.payload_bytes / link + hop_s * sum(way.hops for way in ways)


def _cards_s(one: Collective, target: Cards) -> float:
    chip = target.generation.chip
    link, network = chip.link * chip.link_share, (chip.network or chip.link) * NETWORK_SHARE
    if one.op == "collective-permute":
        far = target.hosts > 1 and (not one.span.ways or one.span.ways[1][0].hops > 0)
        return one.payload_bytes / network + _NETWORK_S if far else one.payload_bytes / link + _NVLINK_S
    # A group that fills no box is taken to have all its cards on different hosts.
    cards, hosts = one.span.chips or ((one.span.group_size, 1) if target.hosts == 1 else (1, one.span.group_size))
    inside = one.payload_bytes * (cards - 1) / cards / link + _NVLINK_S * (cards - 1)
    mine = one.payload_bytes / (1 if one.op in ("all-to-all", "ragged-all-to-all") else cards)
    between = mine * (hosts - 1) / hosts / network + _NETWORK_S * (hosts - 1)
    return (2 if one.op == "all-reduce" else 1) * (inside + between)
