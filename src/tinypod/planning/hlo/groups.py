"""The groups of devices that communicate, and the axes of the mesh that they span.

Groups are known by the devices in them, in any order: the compiler writes them over meshes of its own.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from tinypod.planning.hlo.text import find, ints

_PARENTHESES = r"\((?:[^()]|\([^()]*\))*\)"
_GROUPS = re.compile(
    rf"\breplica_groups=(mesh\[[^\]]*\](?:, device_ids={_PARENTHESES})? \{{[^}}]*\}}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|\{[\d,{}\s]*\})"
)

_Groups = frozenset[frozenset[int]]
_Span = tuple[tuple[str, ...], int]  # the axes, and how many devices a group has


class Axes:
    """The mesh; its axes must be in the order of its devices."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = mesh
        self.devices = math.prod(mesh.values())
        self.found: dict[str, _Span] = {}

    def spanned(self, op: str, attributes: str) -> _Span:
        """The axes that a collective's groups span, and how many devices a group has."""
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

    def _of_groups(self, groups: list[list[int]]) -> _Span:
        axes = self.by_groups.get(_as_set(groups), ("?",))
        return axes, max((len(group) for group in groups), default=self.devices)

    def _of_pairs(self, pairs: Sequence[tuple[int, int]]) -> _Span:
        """The axes along which a permutation moves anything."""
        if any(max(pair) >= self.devices for pair in pairs):
            return ("?",), len(pairs)
        wide, stride = [], self.devices
        for name, size in self.mesh.items():
            stride //= size
            if any(a // stride % size != b // stride % size for a, b in pairs):
                wide.append(name)
        return tuple(wide), math.prod(self.mesh[name] for name in wide)


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
