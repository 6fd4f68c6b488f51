"""The facts that are read: a program, its kernels and its collectives."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """One scheduled instruction that works: a fusion, product, copy, reduction or call. The numbers are for one run.

    Collectives are not among them, and neither is what they read and write.
    """

    name: str
    runs: int  # in a step
    flops: float
    hbm_bytes: float
    cycles: int | None  # as the TPU compiler estimates


@dataclass(frozen=True)
class Collective:
    """One collective operation. The numbers are for one run, on one device."""

    op: str
    axes: tuple[str, ...]  # of more than one device, that its groups span; ("?",) if they are those of no set of axes
    group_size: int
    runs: int
    payload_bytes: int  # gathered, unreduced: of input and output the larger
    shapes: tuple[str, ...]  # of the payload, like "bf16[1,1536,512]"

    @property
    def wire_bytes(self) -> float:
        """What a device sends in one run if the group is a ring."""
        if self.op == "collective-permute":
            return float(self.payload_bytes) if self.axes else 0.0
        share = (self.group_size - 1) / self.group_size * self.payload_bytes
        return 2 * share if self.op == "all-reduce" else share


@dataclass(frozen=True)
class Program:
    """One execution of one device's program."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    num_parameters: int
    aliased: frozenset[int]  # parameters whose memory an output takes over: donated, and used
    unknown_loops: tuple[str, ...]  # counted once
    opaque_calls: tuple[str, ...]  # targets of calls that may multiply matrices out of sight
    float64: tuple[str, ...]
    host_calls: tuple[str, ...]
    dynamic_shapes: tuple[str, ...]

    @property
    def flops(self) -> float:
        return sum(k.runs * k.flops for k in self.kernels)

    @property
    def hbm_bytes(self) -> float:
        return sum(k.runs * k.hbm_bytes for k in self.kernels)

    @property
    def cycles(self) -> int:
        return sum(k.runs * (k.cycles or 0) for k in self.kernels)
