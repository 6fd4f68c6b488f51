"""GPUs: facts about hardware, as data. Nothing here needs a card.

What is sold is from NVIDIA's data sheets (dense products in bfloat16, summed in float32); what XLA's compiler asks of a
card is as CUDA reports it. What is reached was measured on an H200 and nowhere else: a product of 8 192, and one pass
over 1 GiB. An H100 is the same chip; of the other cards it is a share that their users commonly report. Exchange
between cards was never measured.
"""

import os
import re
from dataclasses import dataclass
from typing import Any

from tinypod.errors import UserError

CARDS_PER_HOST = 8
SHARE_SETTING = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_JAX_SHARE = "0.75"  # of a card's memory that JAX takes at the start; more there is not
_SIZES = (1, 2, 4, *range(CARDS_PER_HOST, 8 * CARDS_PER_HOST + 1, CARDS_PER_HOST))


@dataclass(frozen=True)
class Chip:
    """Bandwidths are bytes a second, one way; the lower half is what XLA's compiler asks."""

    peak_bf16: float  # FLOP/s; in float32, which XLA multiplies as TF32, half of it
    reached_bf16: float
    link: float  # of one card to the others of its host: NVLink, or PCIe
    link_share: float  # of it that collectives reach
    network: float | None  # of one card to other hosts; None: not sold for that
    capability: tuple[int, int]
    multiprocessors: int
    float32_units: int  # of a multiprocessor, as the next two
    threads: int
    shared_bytes: int
    cache_bytes: int
    clock: float


@dataclass(frozen=True)
class Card:
    """One kind of card."""

    name: str  # also in the names of several: h100-8
    device_kind: str  # as CUDA and JAX call it
    chip: Chip
    sold_bytes: float
    memory_bytes: int  # as CUDA counts
    bandwidth: float
    reached_bandwidth: float

    @property
    def peak_bf16(self) -> float:
        return self.chip.peak_bf16

    @property
    def usable_bytes(self) -> float:
        return memory_share() * self.memory_bytes

    def target_config(self) -> str:
        """As text of XLA's GpuTargetConfigProto."""
        chip = self.chip
        facts = {
            "core_count": chip.multiprocessors,
            "fpus_per_core": chip.float32_units,
            "clock_rate_ghz": chip.clock / 1e9,
            "threads_per_warp": 32,
            "threads_per_block_limit": 1024,
            "threads_per_core_limit": chip.threads,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "shared_memory_per_block": 48 * 2**10,
            "shared_memory_per_block_optin": chip.shared_bytes - 2**10,  # the rest is the system's
            "shared_memory_per_core": chip.shared_bytes,
            "l2_cache_size": chip.cache_bytes,
            "memory_bandwidth": int(self.bandwidth),
            "device_memory_size": self.memory_bytes,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
        }
        written = " ".join(f"{name}: {value}" for name, value in facts.items())
        major, minor = chip.capability
        return (
            f"gpu_device_info {{ {written} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
            'platform_name: "CUDA" runtime_version { major: 13 } dnn_version_info { major: 9 minor: 10 } '
            f'device_description_str: "{self.device_kind}"'
        )


def memory_share() -> float:
    """Of a card's memory, what a run would get: by JAX's default, or as its setting in the environment says."""
    share = os.environ.get(SHARE_SETTING) or _JAX_SHARE
    if not re.fullmatch(r"0?\.\d+|1|1\.0*", share) or not float(share):
        raise UserError(f"{SHARE_SETTING}={share}: expected the share of a card's memory that JAX may take, like 0.9")
    return float(share)


_HOPPER = Chip(
    989e12, 790e12, 450e9, 0.8, 50e9, (9, 0), 132, 128, 2048, 228 * 2**10, 50 * 2**20, 1.98e9
)  # links: NVLink 4, and one port of 400 Gbit/s for each card
_AMPERE = Chip(
    312e12, 265e12, 300e9, 0.8, 25e9, (8, 0), 108, 64, 2048, 164 * 2**10, 40 * 2**20, 1.41e9
)  # NVLink 3, 200 Gbit/s
_ADA = Chip(
    165e12, 150e12, 32e9, 0.4, None, (8, 9), 128, 128, 1536, 100 * 2**10, 72 * 2**20, 2.52e9
)  # PCIe 4 × 16, through the host's memory: these cards do not write to each other's
CARDS = {
    card.name: card
    for card in (
        Card("h100", "NVIDIA H100 80GB HBM3", _HOPPER, 80e9, 84_942_979_072, 3352e9, 2600e9),
        Card("h200", "NVIDIA H200", _HOPPER, 141e9, 150_110_000_000, 4800e9, 3000e9),
        Card("a100", "NVIDIA A100-SXM4-80GB", _AMPERE, 80e9, 85_100_068_864, 2039e9, 1650e9),
        Card("a100-40g", "NVIDIA A100-SXM4-40GB", _AMPERE, 40e9, 42_298_834_944, 1555e9, 1300e9),
        Card("4090", "NVIDIA GeForce RTX 4090", _ADA, 24e9, 25_386_352_640, 1008e9, 920e9),
    )
}
_ALIASES = {"a100-80g": "a100", "h100-80g": "h100", "rtx4090": "4090", "rtx-4090": "4090"}


@dataclass(frozen=True)
class Cards:
    """So many cards of one kind: some of one host, or whole hosts of eight."""

    generation: Card
    devices: int

    @property
    def name(self) -> str:
        return f"{self.generation.name}-{self.devices}"

    def times(self, slices: int) -> "Cards":
        """GPUs are in no slices: `mesh.slices` takes them for equal parts."""
        return self

    @property
    def chips(self) -> int:
        return self.devices

    @property
    def per_host(self) -> int:
        return min(self.devices, CARDS_PER_HOST)

    @property
    def hosts(self) -> int:
        return self.devices // self.per_host

    @property
    def peak_bf16(self) -> float:
        return self.devices * self.generation.peak_bf16

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of each device: its number in its host, and the host's."""
        return tuple((at % self.per_host, at // self.per_host) for at in range(self.devices))

    def topology_arguments(self) -> dict[str, Any]:
        """For `jax.experimental.topologies.get_topology_desc`."""
        return {
            "platform": "cuda",
            "topology_name": self.name,
            "topology": f"1x{self.hosts}x{self.per_host}",
            "target_config": self.generation.target_config(),
        }

    def describe(self) -> str:
        cards, hosts = (f"{n} {what}{'s' * (n > 1)}" for n, what in ((self.devices, "card"), (self.hosts, "host")))
        return f"it has {cards} on {hosts}, and JAX sees {self.devices} device{'s' * (self.devices > 1)}, one per card"


def sizes(card: Card) -> tuple[int, ...]:
    return tuple(size for size in _SIZES if size <= CARDS_PER_HOST or card.chip.network is not None)


def all_cards() -> list[Cards]:
    return [Cards(card, size) for card in CARDS.values() for size in sizes(card)]


def find_card(name: str) -> Card | None:
    """Of one kind, by its name alone: h100, rtx4090."""
    plain = _plain(name)
    return CARDS.get(_ALIASES.get(plain, plain))


def find_cards(name: str) -> Cards | None:
    """By a name: h100 (one card), h100-8, also 8xh100 and h100x8. None if it names no GPU."""
    plain = _plain(name)
    if (card := find_card(name)) is not None:
        return Cards(card, 1)
    if found := re.fullmatch(r"(?P<size>\d+)x-?(?P<kind>.+)|(?P<kind_>.+?)(?:-|-?x)(?P<size_>\d+)", plain):
        card = find_card(found["kind"] or found["kind_"])
        size = int(found["size"] or found["size_"])
        if card is not None and size in sizes(card):
            return Cards(card, size)
        if card is not None:
            known = ", ".join(f"{card.name}-{size}" for size in sizes(card))
            raise UserError(f"{name}: no such number of GPUs; {card.name} comes as {known}")
    return None


def _plain(name: str) -> str:
    text = re.sub(r"[\s_]+", "-", name.strip().lower())
    return re.sub(r"\b(nvidia|geforce)-", "", text)
