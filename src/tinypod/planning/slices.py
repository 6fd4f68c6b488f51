"""TPU slices: facts about hardware, as data. Nothing here needs a TPU or its compiler, with which a test compares it.

A name counts different things: v4-64, v5p-64 and tpu7x-64 have 64 TensorCores, two to a chip; v5e-64 and v6e-64 have 64
chips. JAX sees one device per chip, on tpu7x one per TensorCore.
"""

import difflib
import math
from dataclasses import dataclass, replace
from typing import Any

from tinypod.errors import UserError
from tinypod.planning import gpus

GIB, GB, TERA = 2**30, 1e9, 1e12


@dataclass(frozen=True)
class Generation:
    """One kind of chip. Bandwidths are bytes a second; `ici_link` is one direction of one link, None if not known."""

    name: str  # also in the names of the compiler's topologies
    chip_config: str | None  # which of the compiler's settings a Cloud TPU runs with, where its default is another
    devices_per_chip: int
    names_count_cores: bool
    hbm_bytes: float  # of a chip, as sold
    usable_bytes: float  # of a device, as the compiler allows, but no more than it has
    peak_bf16: float  # FLOP/s of a chip
    hbm_bandwidth: float
    ici_link: float | None
    ici_links: int
    dcn: float  # to other slices, over the network of the data centre; of a chip, in one direction
    clock: float  # Hz, of the cycles that the compiler counts: the peak by the products its matrix units do in a cycle


GENERATIONS = {
    generation.name: generation
    for generation in (
        # To other slices: docs.cloud.google.com/tpu/docs/tpu7x says 50 Gbit/s a chip of v5p, 100 of v6e and tpu7x;
        # tpu/docs/v6e says 6.4 Tbit/s a pod of 256 v5e. Of v4 neither says anything: as v5p, the nearest to it.
        # Cloud TPU v4 runs `megacore`: both cores of a chip are one device. The compiler's default is two.
        Generation(
            "v4", "megacore", 1, True, 32 * GIB, 30.75 * GIB, 275 * TERA, 1200 * GB, 45 * GB, 6, 6.25 * GB, 1.05e9
        ),
        Generation("v5e", None, 1, False, 16 * GIB, 15.75 * GIB, 197 * TERA, 819 * GB, 45 * GB, 4, 3.125 * GB, 1.50e9),
        # The compiler would give a v5p 0.7 GiB more than the chip is sold with.
        Generation("v5p", None, 1, True, 95 * GIB, 95 * GIB, 459 * TERA, 2765 * GB, 90 * GB, 6, 6.25 * GB, 1.75e9),
        Generation("v6e", None, 1, False, 32 * GIB, 31.25 * GIB, 918 * TERA, 1638 * GB, 90 * GB, 4, 12.5 * GB, 1.75e9),
        # docs.cloud.google.com/tpu/docs/tpu7x: 7380 GB/s of HBM; all links in both directions 1200 GB/s, as v5p.
        Generation(
            "tpu7x", None, 2, True, 192 * GIB, 94.75 * GIB, 2307 * TERA, 7380 * GB, 90 * GB, 6, 12.5 * GB, 2.20e9
        ),
    )
}

_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8))
_LARGE_CUBES = ((4, 4, 12), (8, 8, 12), (8, 8, 16), (8, 16, 16))
_PLANES = ((1, 1, 1), (2, 2, 1), (2, 4, 1), (4, 4, 1), (4, 8, 1), (8, 8, 1), (8, 16, 1), (16, 16, 1))
_OFFERED = {
    "v4": _CUBES + _LARGE_CUBES,
    "v5e": _PLANES,
    "v5p": (*_CUBES, *_LARGE_CUBES, (16, 16, 16), (16, 16, 24)),
    "v6e": _PLANES,
    "tpu7x": _CUBES,
}
_TOPOLOGIES = {  # by the number in a slice's name
    kind: {math.prod(chips) * (1 + GENERATIONS[kind].names_count_cores): chips for chips in offered}
    for kind, offered in _OFFERED.items()
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "v7x": "tpu7x", "v7": "tpu7x"}


@dataclass(frozen=True)
class Slice:
    """A slice that Google Cloud offers, or several of a kind, joined by the network of the data centre."""

    name: str
    generation: Generation
    topology: tuple[int, int, int]  # chips along each axis
    host_bounds: tuple[int, int, int]  # chips of one host along each axis
    count: int = 1  # of slices; chips, hosts and devices are those of all

    def times(self, count: int) -> "Slice":
        return self if count == 1 else replace(self, name=f"{count} × {self.name}", count=count)

    @property
    def chips(self) -> int:
        return math.prod(self.topology) * self.count

    @property
    def hosts(self) -> int:
        """Virtual machines, which are JAX's processes."""
        return self.chips // math.prod(self.host_bounds)

    @property
    def devices(self) -> int:
        """What `jax.devices()` has."""
        return self.chips * self.generation.devices_per_chip

    @property
    def peak_bf16(self) -> float:
        return self.chips * self.generation.peak_bf16

    @property
    def wraps(self) -> tuple[bool, bool, bool]:
        """Which axes close to a ring. Cubes of 4 × 4 × 4 and more are tori; planes close only along 16 chips."""
        x, y, z = (size == 16 if self.generation.ici_links == 4 else min(self.topology) >= 4 for size in self.topology)
        return x, y, z

    @property
    def dcn_bandwidth(self) -> float:
        """Bytes a second of a device to other slices."""
        return self.generation.dcn / self.generation.devices_per_chip

    @property
    def topology_name(self) -> str:
        """As people write it: planes without their third axis."""
        sizes = self.topology[:2] if self.generation.ici_links == 4 else self.topology
        return "x".join(map(str, sizes))

    def topology_arguments(self) -> dict[str, Any]:
        """For `jax.experimental.topologies.get_topology_desc`."""
        generation = self.generation
        arguments: dict[str, Any] = {
            "platform": "tpu",
            "topology_name": f"{generation.name}:{'x'.join(map(str, self.topology))}",
            "chips_per_host_bounds": self.host_bounds,
            "num_slices": self.count,
        }
        return arguments | ({"chip_config_name": generation.chip_config} if generation.chip_config else {})

    def describe(self) -> str:
        generation = self.generation
        named = "TensorCores" if generation.names_count_cores else "chips"
        each = "chip" if generation.devices_per_chip == 1 else "TensorCore"
        has = "it has" if self.count == 1 else f"{self.count} of them have"
        return (
            f"the {self.name.rpartition('-')[2]} in its name counts {named}; {has} {self.chips} chips on {self.hosts} "
            f"host{'s' if self.hosts > 1 else ''}, and JAX sees {self.devices} devices, one per {each}"
        )


def all_slices() -> list[Slice]:
    return [_make(generation, size) for generation, sizes in _TOPOLOGIES.items() for size in sorted(sizes)]


def find_slices(name: str | None) -> list[Slice]:
    """All of them, those of a generation (v4), or one (v4-64)."""
    kind = None if name is None else name.strip().lower()
    kind = _ALIASES.get(kind or "", kind)
    if name is not None and kind not in GENERATIONS:
        return [find_slice(name)]
    return [one for one in all_slices() if kind in (None, one.generation.name)]


def names_generation(name: str) -> bool:
    """Whether it is, or begins with, the name of a generation."""
    text = name.strip().lower()
    return any(_ALIASES.get(kind, kind) in GENERATIONS for kind in (text, text.rpartition("-")[0]))


def find_slice(name: str) -> Slice:
    """By its name: v4-64, v5e-8 (also v5litepod-8), v6e-4."""
    kind, _, size = name.strip().lower().rpartition("-")
    kind = _ALIASES.get(kind, kind)
    if gpus.find_cards(name) is not None:
        raise UserError(
            f"{name} is a GPU; pods are TPU slices, like v4-64, and so is what a study is planned for (`tinypod plan` "
            "takes GPUs, too)"
        )
    if kind not in _TOPOLOGIES:
        near = difflib.get_close_matches(f"{kind}-{size}", [known.name for known in all_slices()], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"generations: {', '.join(_TOPOLOGIES)}"
        raise UserError(f"{name}: no such TPU slice; {hint} (`tinypod slices` lists them all)")
    if not size.isdecimal() or int(size) not in _TOPOLOGIES[kind]:
        sizes = ", ".join(f"{kind}-{known}" for known in sorted(_TOPOLOGIES[kind]))
        raise UserError(f"{name}: no such TPU slice; {kind} comes as {sizes}")
    return _make(kind, int(size))


def _make(kind: str, size: int) -> Slice:
    generation, topology = GENERATIONS[kind], _TOPOLOGIES[kind][size]
    bounds = (2, 2, 1)
    if not generation.names_count_cores and size in (1, 8):  # one host with one chip, or with eight
        bounds = topology
    return Slice(f"{kind}-{size}", generation, topology, bounds)
