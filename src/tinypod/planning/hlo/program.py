"""What one compiled step does, read from its optimised, scheduled HLO text: `compiled.as_text()`, one device's program.

XLA's `cost_analysis` counts the body of a loop once, leaves out cuBLAS, and says nothing of communication. Here every
instruction that the schedule runs counts as often as it runs, on TPU, GPU and CPU; of a conditional, the branch with
more work.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tinypod.planning.hlo.groups import Axes
from tinypod.planning.hlo.hazards import find_unwanted
from tinypod.planning.hlo.loops import Known, trips
from tinypod.planning.hlo.products import flops, stated_share, understood
from tinypod.planning.hlo.text import COLLECTIVES, Computation, Instruction, Module, parse, words
from tinypod.planning.hlo.traffic import traffic

# They name, select or order buffers, or are read where they are used.
_FREE = words(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency domain optimization-barrier"
    " opt-barrier partition-id replica-id get-dimension-size async-update"
)
_FREE_CALLS = words(
    "AllocateBuffer ConcatBitcast AssumeGatherIndicesInBound GatherScatterIndicesBitpacked PrepareAsyncCallStart"
    " PrepareAsyncCallDone AsyncCollectiveStart AsyncCollectiveDone Sharding annotate_device_placement"
)


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
    share: float | None = None  # of the peak, as a kernel of ours states


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


class Exchange(NamedTuple):
    """All collectives of one kind over the same axes, in one step."""

    op: str
    axes: tuple[str, ...]
    group_size: int
    runs: int
    payload_bytes: int
    wire_bytes: float


@dataclass(frozen=True)
class Program:
    """One execution of one device's program."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    aliased: frozenset[int]  # parameters whose memory an output takes over: donated, and used
    unknown_loops: tuple[str, ...]  # counted once
    opaque_calls: tuple[str, ...]  # targets of calls that may multiply matrices out of sight
    unwanted: tuple[str, ...]  # float64, calls of the host, shapes that are known only at run time

    @property
    def flops(self) -> float:
        return sum(k.runs * k.flops for k in self.kernels)

    @property
    def hbm_bytes(self) -> float:
        return sum(k.runs * k.hbm_bytes for k in self.kernels)

    @property
    def cycles(self) -> int:
        return sum(k.runs * (k.cycles or 0) for k in self.kernels)

    @property
    def kernel_runs(self) -> int:
        return sum(k.runs for k in self.kernels)

    def exchanges(self) -> list[Exchange]:
        kinds: dict[tuple[str, tuple[str, ...], int], list[Collective]] = defaultdict(list)
        for one in self.collectives:
            if one.group_size > 1:
                kinds[one.op, one.axes, one.group_size].append(one)
        return [
            Exchange(
                *kind,
                runs=sum(c.runs for c in found),
                payload_bytes=sum(c.runs * c.payload_bytes for c in found),
                wire_bytes=sum(c.runs * c.wire_bytes for c in found),
            )
            for kind, found in kinds.items()
        ]

    def notes(self) -> list[str]:
        """What the numbers leave out, and what should not be in a step."""
        notes = [f"the program has a {what}" for what in self.unwanted[:3]]
        if self.unknown_loops:
            notes.append(f"{len(self.unknown_loops)} loops whose number of turns cannot be read are counted once")
        if self.opaque_calls:
            notes.append(f"the arithmetic inside {', '.join(self.opaque_calls)} is not counted")
        return notes


def read(text: str, mesh: Mapping[str, int]) -> Program:
    """Reads a program. `mesh`: its axes, in order, and their sizes; device ids are positions in `mesh.devices.flat`."""
    module = parse(text)
    walk = _Walk(module, Axes(mesh))
    walk.computation(module.entry, 1, {})
    return Program(
        kernels=tuple(walk.kernels),
        collectives=tuple(walk.collectives),
        aliased=module.aliased,
        unknown_loops=tuple(sorted(set(walk.unknown_loops))),
        opaque_calls=tuple(sorted(set(walk.opaque_calls))),
        unwanted=find_unwanted(module),
    )


class _Walk:
    """Over the schedule, through loops, branches and calls: kernels and collectives as they run."""

    def __init__(self, module: Module, axes: Axes) -> None:
        self.module, self.axes = module, axes
        self.kernels: list[Kernel] = []
        self.collectives: list[Collective] = []
        self.unknown_loops: list[str] = []
        self.opaque_calls: list[str] = []

    def computation(self, computation: Computation, runs: int, known: Known) -> None:
        for instruction in computation.instructions.values():
            self.instruction(computation, instruction, runs, known)

    def instruction(self, computation: Computation, instruction: Instruction, runs: int, known: Known) -> None:
        kind = instruction.kind
        if kind in _FREE or kind.endswith("-done") or (kind == "custom-call" and instruction.target in _FREE_CALLS):
            return
        if kind == "while":
            self.loop(computation, instruction, runs, known)
        elif kind == "conditional":
            self.branches(instruction, runs)
        elif kind in ("call", "async"):
            self.computation(self.module.called(instruction), runs, {})
        elif kind in COLLECTIVES:
            self.collective(computation, instruction, kind, runs)
        else:
            called = self.module.called(instruction) if kind == "fusion" else None
            if called is not None:
                self.fused_collectives(called, runs)
            if called is None or not _only_communicates(called):
                self.kernel(computation, instruction, runs)

    def loop(self, computation: Computation, instruction: Instruction, runs: int, known: Known) -> None:
        turns, unchanged = trips(self.module, computation, instruction, known)
        if turns is None:
            self.unknown_loops.append(instruction.name)
            turns = 1
        self.computation(self.module.called(instruction, "body"), runs * turns, unchanged)

    def branches(self, instruction: Instruction, runs: int) -> None:
        walks = []
        for branch in self.module.branches(instruction):
            walks.append(_Walk(self.module, self.axes))
            walks[-1].computation(branch, runs, {})
        largest = max(walks, key=_Walk.weight)
        self.kernels += largest.kernels
        self.collectives += largest.collectives
        self.unknown_loops += largest.unknown_loops
        self.opaque_calls += largest.opaque_calls

    def weight(self) -> tuple[float, float]:
        moved = sum(k.runs * k.hbm_bytes for k in self.kernels) + sum(c.runs * c.wire_bytes for c in self.collectives)
        return sum(k.runs * k.flops for k in self.kernels), moved

    def kernel(self, computation: Computation, instruction: Instruction, runs: int) -> None:
        if instruction.kind == "custom-call" and not understood(instruction):
            self.opaque_calls.append(instruction.target)
        products = flops(self.module, computation, instruction)
        moved = traffic(self.module, computation, instruction)
        share = stated_share(instruction)
        self.kernels.append(Kernel(instruction.name, runs, products, moved, instruction.cycles, share))

    def fused_collectives(self, called: Computation, runs: int) -> None:
        """The TPU compiler puts collectives into fusions: a reduce-scatter, or one that computation hides.

        The latter is written down in each of the fusions that move it on (`chain_id`), and counts where it starts.
        """
        starts = any('"AsyncCollectiveStart"' in inner.attributes for inner in called.instructions.values())
        for inner in called.instructions.values():
            if inner.kind == "fusion":
                self.fused_collectives(self.module.called(inner), runs)
            elif inner.kind in COLLECTIVES and (starts or "chain_id=" not in inner.attributes):
                scatters = inner.kind == "all-reduce" and _scatters(called)
                self.collective(called, inner, "reduce-scatter" if scatters else inner.kind, runs)

    def collective(self, computation: Computation, instruction: Instruction, op: str, runs: int) -> None:
        sent = [array for operand in computation.operands(instruction) for array in operand.arrays]
        payload = max(sent, list(instruction.results), key=lambda arrays: sum(array.bytes for array in arrays))
        size_bytes, shapes = sum(array.bytes for array in payload), tuple(map(str, payload))
        axes, group_size = self.axes.spanned(op, instruction.attributes)
        self.collectives.append(Collective(op, axes, group_size, runs, size_bytes, shapes))


def _scatters(fused: Computation) -> bool:
    return fused.name.startswith("all-reduce-scatter")


def _only_communicates(fused: Computation) -> bool:
    root = fused.instructions[fused.root]
    return _scatters(fused) or (root.opcode == "custom-call" and root.target in _FREE_CALLS)
