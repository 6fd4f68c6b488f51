"""What one compiled step does, read from its optimised, scheduled HLO text: `compiled.as_text()`, one device's program.

XLA's `cost_analysis` counts the body of a loop once, leaves out cuBLAS, and says nothing of communication. Here every
instruction that the schedule runs counts as often as it runs, on TPU, GPU and CPU; of a conditional, the branch with
more work.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tinypod.planning.hlo.groups import BETWEEN_SLICES, Axes, Coordinates, Span
from tinypod.planning.hlo.hazards import find_unwanted
from tinypod.planning.hlo.kinds import Kind, kind_of
from tinypod.planning.hlo.loops import Known, trips
from tinypod.planning.hlo.products import flops, stated_share, understood
from tinypod.planning.hlo.text import COLLECTIVES, Array, Computation, Instruction, Module, find, parse, words
from tinypod.planning.hlo.traffic import traffic

# They name, select or order buffers, or are read where they are used.
_FREE = words(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency domain optimization-barrier"
    " opt-barrier partition-id replica-id get-dimension-size"
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
    kind: Kind = "element-wise"
    ahead: bool = False  # started early, while others run: a prefetch


@dataclass(frozen=True)
class Collective:
    """One collective operation. The numbers are for one run, on one device."""

    op: str
    span: Span
    runs: int
    payload_bytes: int  # gathered, unreduced: of input and output the larger
    shapes: tuple[str, ...]  # of the payload, like "bf16[1,1536,512]"
    during: tuple[int, int] | None = None  # which of the program's kernels run between its start and its end

    @property
    def axes(self) -> tuple[str, ...]:
        return self.span.axes

    @property
    def wire_bytes(self) -> float:
        """What a device sends in one run if the group is a ring."""
        if self.op == "collective-permute":
            return float(self.payload_bytes) if self.axes else 0.0
        share = (self.span.group_size - 1) / self.span.group_size * self.payload_bytes
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
            if one.span.group_size > 1:
                kinds[one.op, one.axes, one.span.group_size].append(one)
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


def read(text: str, mesh: Mapping[str, int], coordinates: Coordinates = (), slices: int = 1) -> Program:
    """Reads a program. `mesh`: its axes, in order, and their sizes; device ids are positions in `mesh.devices.flat`, of
    which `coordinates` says where they are. `slices`: how many of them the first axis crosses."""
    module = parse(text)
    walk = _Walk(module, Axes(mesh, coordinates, slices))
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
        self.under_way: dict[str, list[int]] = {}  # collectives that have started, by what will end them

    def computation(self, computation: Computation, runs: int, known: Known) -> None:
        for instruction in computation.instructions.values():
            self.instruction(computation, instruction, runs, known)

    def instruction(self, computation: Computation, instruction: Instruction, runs: int, known: Known) -> None:
        kind = instruction.kind
        if kind.endswith("-done"):
            for operand in instruction.operands:
                self.end(operand)
            return
        if kind.endswith("-update"):
            self.hand_on(instruction)
            return
        if kind in _FREE or (kind == "custom-call" and instruction.target in _FREE_CALLS):
            return
        if kind == "while":
            self.loop(computation, instruction, runs, known)
        elif kind == "conditional":
            self.branches(instruction, runs)
        elif (beside := self.module.beside(instruction)) is not None:
            self.start(instruction, beside, runs)
        elif kind in ("call", "async"):
            self.computation(self.module.called(instruction), runs, {})
        elif kind in COLLECTIVES:
            self.collective(computation, instruction, kind, runs)
        elif instruction.crosses_slices:
            self.between_slices(computation, instruction, runs)
        else:
            called = self.module.called(instruction) if kind == "fusion" else None
            if called is not None:
                self.fused_collectives(called, runs)
            if called is None or not _only_communicates(called):
                self.kernel(computation, instruction, runs)

    def start(self, instruction: Instruction, called: Computation, runs: int) -> None:
        """What the chip's sparse cores do, while its other kernels run."""
        walk, first = _Walk(self.module, self.axes), len(self.collectives)
        walk.computation(called, runs, {})
        self.kernels += [replace(kernel, ahead=True) for kernel in walk.kernels]
        now = len(self.kernels)
        self.collectives += [replace(one, during=(now, now)) for one in walk.collectives]
        self.unknown_loops += walk.unknown_loops
        self.opaque_calls += walk.opaque_calls
        self.under_way[instruction.name] = list(range(first, len(self.collectives)))

    def hand_on(self, instruction: Instruction) -> None:
        """What was started is given its operands only here."""
        waiting, now = self.under_way.pop(instruction.operands[0], []), len(self.kernels)
        for at in waiting:
            self.collectives[at] = replace(self.collectives[at], during=(now, now))
        self.under_way[instruction.name] = waiting

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
        first = len(self.kernels)
        self.kernels += largest.kernels
        self.collectives += [_moved(one, first) for one in largest.collectives]
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
        share, kind = stated_share(instruction), kind_of(self.module, instruction, products)
        ahead = instruction.opcode.endswith("-start")
        self.kernels.append(Kernel(instruction.name, runs, products, moved, instruction.cycles, share, kind, ahead))

    def fused_collectives(self, called: Computation, runs: int) -> None:
        """The TPU compiler puts collectives into fusions: a reduce-scatter, or one that computation hides.

        The latter is written down in each of the fusions that move it on (`chain_id`), and counts where it starts.
        """
        attributes = [inner.attributes for inner in called.instructions.values()]
        starts, ends = (any(f'"AsyncCollective{what}"' in text for text in attributes) for what in ("Start", "Done"))
        for inner in called.instructions.values():
            chain = find(r'chain_id="?(\w+)', inner.attributes)
            if inner.kind == "fusion":
                self.fused_collectives(self.module.called(inner), runs)
            elif inner.kind in COLLECTIVES and (starts or not chain):
                scatters = inner.kind == "all-reduce" and _scatters(called)
                op = "reduce-scatter" if scatters else inner.kind
                self.collective(called, inner, op, runs, until=f"chain {chain}" if chain else None)
            elif inner.kind in COLLECTIVES and ends:
                self.end(f"chain {chain}")

    def collective(
        self, computation: Computation, instruction: Instruction, op: str, runs: int, until: str | None = None
    ) -> None:
        """`until`: what will end it, if it does not end at once."""
        sent = [array for operand in computation.operands(instruction) for array in operand.arrays]
        span = self.axes.spanned(op, instruction.attributes)
        until = instruction.name if instruction.opcode.endswith("-start") else until
        self.exchange(op, span, max(sent, list(instruction.results), key=_size), runs, until)

    def between_slices(self, computation: Computation, instruction: Instruction, runs: int) -> None:
        """Of what is sent and what is received under one name the larger; it ends when it is received."""
        if instruction.opcode == "send":
            return
        halves = [
            one for one in computation.instructions.values() if one.crosses_slices and _name(one) == _name(instruction)
        ]
        transfer = find(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        op = "collective-permute" if transfer == "ONE_TO_ONE" else transfer.lower().replace("_", "-")
        payload = max((one.results for one in halves), key=_size)
        self.exchange(op, Span(BETWEEN_SLICES, self.axes.slices), payload, runs, instruction.name)

    def exchange(self, op: str, span: Span, payload: Sequence[Array], runs: int, until: str | None) -> None:
        during = None
        if until is not None:
            self.under_way[until] = [len(self.collectives)]
            during = len(self.kernels), len(self.kernels)
        self.collectives.append(Collective(op, span, runs, _size(payload), tuple(map(str, payload)), during))

    def end(self, started: str) -> None:
        """The kernels since a collective was started ran meanwhile."""
        for at in self.under_way.pop(started, []):
            one = self.collectives[at]
            assert one.during
            self.collectives[at] = replace(one, during=(one.during[0], len(self.kernels)))


def _size(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays)


def _name(transfer: Instruction) -> str:
    return find(r'_xla_host_transfer_rendezvous="([^"]*)"', transfer.attributes)


def _moved(one: Collective, by: int) -> Collective:
    return one if one.during is None else replace(one, during=(one.during[0] + by, one.during[1] + by))


def _scatters(fused: Computation) -> bool:
    return fused.name.startswith("all-reduce-scatter")


def _only_communicates(fused: Computation) -> bool:
    root = fused.instructions[fused.root]
    return _scatters(fused) or (root.opcode == "custom-call" and root.target in _FREE_CALLS)
