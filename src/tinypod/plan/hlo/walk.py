"""The walk over the schedule, from the entry through loops, branches and calls: kernels and collectives as they run.

Of a conditional, the branch with more work counts.
"""

from tinypod.plan.hlo.groups import Axes
from tinypod.plan.hlo.loops import Known, trips
from tinypod.plan.hlo.opcodes import COLLECTIVES, FREE, FREE_CALLS
from tinypod.plan.hlo.products import flops, understood
from tinypod.plan.hlo.program import Collective, Kernel
from tinypod.plan.hlo.text import Computation, Instruction, Module
from tinypod.plan.hlo.traffic import traffic


class Walk:
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
        if kind in FREE or kind.endswith("-done") or (kind == "custom-call" and instruction.target in FREE_CALLS):
            return
        if kind == "while":
            self.loop(computation, instruction, runs, known)
        elif kind == "conditional":
            self.branches(instruction, runs)
        elif kind in ("call", "async"):
            self.computation(self.module.called(instruction), runs, {})
        elif kind in COLLECTIVES:
            self.collective(computation, instruction, kind, runs)
        elif kind == "fusion":
            self.fusion(computation, instruction, runs)
        else:
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
            walks.append(Walk(self.module, self.axes))
            walks[-1].computation(branch, runs, {})
        self.take(max(walks, key=Walk.weight))

    def weight(self) -> tuple[float, float]:
        moved = sum(k.runs * k.hbm_bytes for k in self.kernels) + sum(c.runs * c.wire_bytes for c in self.collectives)
        return sum(k.runs * k.flops for k in self.kernels), moved

    def take(self, other: "Walk") -> None:
        self.kernels += other.kernels
        self.collectives += other.collectives
        self.unknown_loops += other.unknown_loops
        self.opaque_calls += other.opaque_calls

    def kernel(self, computation: Computation, instruction: Instruction, runs: int) -> None:
        if instruction.kind == "custom-call" and not understood(instruction.target):
            self.opaque_calls.append(instruction.target)
        self.kernels.append(
            Kernel(
                name=instruction.name,
                runs=runs,
                flops=flops(self.module, computation, instruction),
                hbm_bytes=traffic(self.module, computation, instruction),
                cycles=instruction.cycles,
            )
        )

    def fusion(self, computation: Computation, instruction: Instruction, runs: int) -> None:
        called = self.module.called(instruction)
        self.fused_collectives(called, runs)
        if not _only_communicates(called):
            self.kernel(computation, instruction, runs)

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
        axes, size = self.axes.spanned(op, instruction.attributes)
        self.collectives.append(
            Collective(
                op=op,
                axes=axes,
                group_size=size,
                runs=runs,
                payload_bytes=sum(array.bytes for array in payload),
                shapes=tuple(str(array) for array in payload),
            )
        )


def _scatters(fused: Computation) -> bool:
    return fused.name.startswith("all-reduce-scatter")


def _only_communicates(fused: Computation) -> bool:
    root = fused.instructions[fused.root]
    return _scatters(fused) or (root.opcode == "custom-call" and root.target in FREE_CALLS)
