"""The groups of devices that communicate, and the axes of the mesh that they span.

Groups are known by the devices in them, in any order: the compiler writes them over meshes of its own.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tinypod.planning.hlo.text import find, ints

_PARENTHESES = r"\((?:[^()]|\([^()]*\))*\)"
_GROUPS = re.compile(
    rf"\breplica_groups=(mesh\[[^\]]*\](?:, device_ids={_PARENTHESES})? \{{[^}}]*\}}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|\{[\d,{}\s]*\})"
)

BETWEEN_SLICES = ("slices",)  # a device of each, over the network of the data centre

_Groups = frozenset[frozenset[int]]
Coordinates = Sequence[tuple[int, ...]]  # of the chip that a device is on, for each device of the mesh


class Way(NamedTuple):
    """Of the pieces of a permutation along one axis of the topology, each moved axis by axis."""

    load: int  # pieces that pass the busiest link
    hops: int  # links that the one with the longest way passes


class Span(NamedTuple):
    """Who takes part in a collective."""

    # Of the mesh, of more than one device; or BETWEEN_SLICES; ("?",) if the groups are those of no set of axes.
    axes: tuple[str, ...]
    group_size: int
    # Of a group along each axis of the topology; () if they fill no box, or it is not known
    chips: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()  # of those chips, along each: between them lie chips of other groups
    ways: tuple[tuple[Way, Way], ...] = ()  # of a permutation, along each: where the axis is a line, and where a ring
    backward: bool = False  # a permutation that sends to devices with lower numbers: links have two directions


class Axes:
    """The mesh; its axes must be in the order of its devices. If it spans several slices, by its first axis, a program
    is that of one slice, and knows only the devices there."""

    def __init__(self, mesh: Mapping[str, int], coordinates: Coordinates = (), slices: int = 1) -> None:
        self.mesh = {name: size if at else size // slices for at, (name, size) in enumerate(mesh.items())}
        self.devices = math.prod(self.mesh.values())
        self.coordinates, self.slices = coordinates[: self.devices], slices
        self.found: dict[str, Span] = {}

    def spanned(self, op: str, attributes: str) -> Span:
        if op == "collective-permute":
            return self._of_pairs(_pairs(attributes))
        stated = _GROUPS.search(attributes)
        text = stated[1] if stated else "?" if "replica_groups=" in attributes else ""
        if text not in self.found:
            self.found[text] = self._of_groups(_groups(text, self.devices))
        return self.found[text]

    @cached_property
    def by_groups(self) -> dict[_Groups, tuple[str, ...]]:
        names, sizes = list(self.mesh), list(self.mesh.values())
        wide = [at for at, size in enumerate(sizes) if size > 1]
        subsets = itertools.chain.from_iterable(itertools.combinations(wide, n) for n in range(len(wide) + 1))
        return {_as_set(_spanning(sizes, subset)): tuple(names[at] for at in subset) for subset in subsets}

    def _of_groups(self, groups: list[list[int]]) -> Span:
        axes = self.by_groups.get(_as_set(groups), ("?",))
        return Span(axes, max((len(group) for group in groups), default=self.devices), *self._box(groups))

    def _box(self, groups: list[list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What a group fills, and its strides; where groups differ, of one with the fewest axes."""
        if not self.coordinates or any(max(group) >= self.devices for group in groups):
            return (), ()
        boxes = set()
        for group in groups:
            chips = {self.coordinates[device] for device in group}
            along = [sorted(set(axis)) for axis in zip(*chips, strict=True)]
            strides = tuple(max((b - a for a, b in itertools.pairwise(axis)), default=1) for axis in along)
            box = tuple(map(len, along))
            boxes.add((box, strides) if math.prod(box) == len(chips) else ((), ()))
        return min(boxes, key=lambda one: sum(size > 1 for size in one[0]), default=((), ()))

    def _of_pairs(self, pairs: Sequence[tuple[int, int]]) -> Span:
        """The axes along which a permutation moves anything."""
        if any(max(pair) >= self.devices for pair in pairs):
            return Span(("?",), max(2, len(pairs)))
        wide, stride = [], self.devices
        for name, size in self.mesh.items():
            stride //= size
            if any(a // stride % size != b // stride % size for a, b in pairs):
                wide.append(name)
        size, backward = math.prod(self.mesh[name] for name in wide), sum(b < a for a, b in pairs) > len(pairs) / 2
        return Span(tuple(wide), size, ways=self._ways(pairs), backward=backward)

    def _ways(self, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[Way, Way], ...]:
        if not self.coordinates:
            return ()
        sizes = [len(set(along)) for along in zip(*self.coordinates, strict=True)]
        moves = [(self.coordinates[a], self.coordinates[b]) for a, b in pairs]
        return tuple((_way(moves, at, None), _way(moves, at, size)) for at, size in enumerate(sizes))


def _way(moves: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], axis: int, ring: int | None) -> Way:
    """`ring`: how many chips the axis has, if it is one."""
    links: Counter[tuple[object, ...]] = Counter()
    longest = 0
    for here, there in moves:
        distance = there[axis] - here[axis]
        if ring is not None and 2 * abs(distance) > ring:
            distance -= ring if distance > 0 else -ring
        hops, step = abs(distance), 1 if distance > 0 else -1
        line = (*there[:axis], *here[axis + 1 :])  # the axes before this one are done
        for hop in range(hops):
            at = here[axis] + hop * step
            links[(line, at if ring is None else at % ring, step)] += 1
        longest = max(longest, hops)
    return Way(max(links.values(), default=0), longest)


def _as_set(groups: Iterable[Sequence[int]]) -> _Groups:
    return frozenset(frozenset(group) for group in groups)


def _pairs(attributes: str) -> list[tuple[int, int]]:
    listed = find(r"source_target_pairs=(\{[\d,{}\s]*\})", attributes)
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", listed)]


def _groups(text: str, devices: int) -> list[list[int]]:
    """The groups of device ids in any of XLA's syntaxes; none at all is one group of all devices."""
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        count, size = ints(text.partition("<=")[0])
        ids = _iota(text.partition("<=")[2])
        return [ids[at : at + size] for at in range(0, count * size, size)]
    if text == "?":
        return []
    return [ints(group) for group in re.findall(r"\{([\d,\s]+)\}", text)] or [list(range(devices))]


def _iota(text: str) -> list[int]:
    """`[8,4]T(1,0)`: the ids in order, shaped [8,4], transposed and flattened."""
    dims, _, order = text.partition("T")
    return _ids(ints(dims)).transpose(ints(order) or None).flatten().tolist()


def _ids(dims: Sequence[int]) -> np.ndarray:
    return np.arange(math.prod(dims)).reshape(dims)


def _mesh_groups(text: str) -> list[list[int]]:
    """`mesh['a'=8,'b'=4] {'a'}`, perhaps with `, device_ids=([4,8]T(1,0))`, the devices as they fill that mesh.

    Of an axis perhaps a part: `{'a':(2)4}` is the 4 of 'a' = 2 × 4 × the rest.
    """
    stated, _, spanned = text.removesuffix("}").rpartition(" {")
    parts = {n: (int(p or 1), int(s or 0)) for n, p, s in re.findall(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?", spanned)}
    sizes: list[int] = []
    chosen: list[int] = []
    for name, size in re.findall(r"'?([\w.]+)'?=(\d+)", stated):
        before, part = parts.get(name, (1, 1))
        part = part or int(size)
        chosen += [len(sizes) + 1] if name in parts else []
        sizes += [before, part, int(size) // (before * part)]
    groups = _spanning(sizes, chosen)
    order = find(r"device_ids=\((.*)\)", stated)
    if not order:
        return groups
    ids = _iota(order) if order.startswith("[") else ints(order)
    return [[ids[at] for at in group] for group in groups]


def _spanning(sizes: Sequence[int], spanned: Sequence[int]) -> list[list[int]]:
    """The groups of a mesh of these sizes that differ along the spanned axes only."""
    kept = [at for at in range(len(sizes)) if at not in spanned]
    size = math.prod(sizes[at] for at in spanned)
    return _ids(sizes).transpose([*kept, *spanned]).reshape(-1, size).tolist()
