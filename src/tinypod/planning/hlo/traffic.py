"""The bytes that one instruction reads from HBM and writes to it.

A fusion is one kernel: what happens inside it moves no bytes. An operand that it only slices counts as the slices, a
buffer that it updates in place as the update: loops over stacked layers would otherwise move the stack at each turn.
Buffers on the chip (`S(1)`, `S(3)`, … in a TPU layout) are not HBM. Elsewhere only host memory, `S(5)`, is not.
"""

from collections.abc import Sequence

from tinypod.planning.hlo.text import COLLECTIVES, Array, Computation, Instruction, Module, words

# One element of the result needs more, or others, than the same element of the operand.
_MIXES = words("dot convolution sort scatter gather reduce-window custom-call reverse reduce map tuple")
_SLICES = words("slice dynamic-slice gather")


def traffic(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Of one run."""
    kind = instruction.kind
    operands, results = computation.operands(instruction), instruction.results
    if kind == "fusion":
        return _fusion_traffic(module, operands, results, module.called(instruction))
    if kind in _SLICES:
        read = results[0].bytes if module.hbm(operands[0].arrays[0]) else 0
        return read + sum(module.hbm_bytes(index.arrays) for index in operands[1:]) + module.hbm_bytes(results)
    if kind == "dynamic-update-slice":
        return module.hbm_bytes(operands[1].arrays) + (operands[1].arrays[0].bytes if module.hbm(results[0]) else 0)
    if kind == "scatter":
        changed = operands[len(operands) // 2 + 1 :]
        touched = sum(array.bytes for update in changed for array in update.arrays if module.hbm(results[0]))
        return 2 * touched + sum(module.hbm_bytes(o.arrays) for o in operands[len(operands) // 2 :])
    if instruction.target.startswith("__cublas$"):
        results = tuple(array for array in results if array.dtype != "s8") or results  # the rest is workspace
    return sum(module.hbm_bytes(operand.arrays) for operand in operands) + module.hbm_bytes(results)


def _fusion_traffic(
    module: Module, operands: Sequence[Instruction], results: Sequence[Array], called: Computation
) -> float:
    fusion, total = _Fusion(module, called), 0.0
    for at, operand in enumerate(operands):
        if len(operand.arrays) == 1 and module.hbm(operand.arrays[0]):
            total += fusion.needed(called.parameters[at]) * operand.arrays[0].item_bytes
        elif len(operand.arrays) > 1:
            total += module.hbm_bytes(operand.arrays)
    written = fusion.written()
    for at, array in enumerate(results):
        size = written[at] if len(written) == len(results) else array.size
        total += size * array.item_bytes if module.hbm(array) else 0
    return total


class _Fusion:
    """The inside of a fusion. It counts elements."""

    def __init__(self, module: Module, computation: Computation) -> None:
        self.module, self.computation = module, computation
        self.needs: dict[str, float] = {}

    def nested(self, fusion: Instruction) -> "_Fusion":
        return _Fusion(self.module, self.module.called(fusion))

    def needed(self, name: str) -> float:
        """How many elements of a value are asked for."""
        if name not in self.needs:
            size = self.computation.instructions[name].size
            asked = float(size) if name == self.computation.root else 0.0
            for user, position in self.computation.users[name]:
                asked += self.asked(size, user, position)
            self.needs[name] = min(asked, size)
        return self.needs[name]

    def asked(self, size: int, user: Instruction, position: int) -> float:
        """How many elements of an operand of that size one user asks for."""
        kind = user.kind
        if kind in COLLECTIVES:
            return 0
        if kind in _SLICES and position == 0:
            return user.size
        if kind == "dynamic-update-slice" and position == 0:
            return 0 if self.ends_in_place(user.name) else self.needed(user.name)
        if kind == "scatter" and position == 0:
            return self.computation.operands(user)[-1].size
        if kind == "fusion":
            inside = self.nested(user)
            return inside.needed(inside.computation.parameters[position])
        if user.size == size and kind not in _MIXES:
            return self.needed(user.name)
        return size

    def ends_in_place(self, name: str) -> bool:
        """Whether a value goes nowhere but out of the fusion: then an update of it is made where the buffer lies."""
        if name == self.computation.root:
            return True
        users = [user for user, _ in self.computation.users[name]]
        outward = ("bitcast", "tuple", "dynamic-update-slice")
        return bool(users) and all(user.opcode in outward and self.ends_in_place(user.name) for user in users)

    def written(self) -> list[float]:
        """What is written of each result."""
        root = self.computation.instructions[self.computation.root]
        outputs = self.computation.operands(root) if root.opcode == "tuple" else [root]
        if len(outputs) == 1 and len(root.arrays) > 1:
            return self.nested(root).written() if root.opcode == "fusion" else [array.size for array in root.arrays]
        return [self.written_size(output) for output in outputs]

    def written_size(self, output: Instruction) -> float:
        operands = self.computation.operands(output)
        if output.opcode == "bitcast":
            return self.written_size(operands[0])
        if output.opcode == "fusion" and len(output.arrays) == 1:
            return self.nested(output).written()[0]
        if output.opcode == "dynamic-update-slice":
            buffer, update = operands[:2]
            while buffer.opcode == "bitcast":
                buffer = self.computation.operands(buffer)[0]
            if buffer.opcode == "parameter":
                return update.size
            if buffer.opcode == "dynamic-update-slice":
                return update.size + self.written_size(buffer)
        if output.opcode == "scatter":
            return operands[-1].size
        return output.size
