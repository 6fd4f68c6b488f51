"""What lies in HBM, besides the arguments, where a step needs most of it: activations kept, and everything else.

The walk follows the schedule as the compiler's buffer assignment does: a loop runs in its operand's buffers, an update
in place in the buffer it updates, a donated argument holds its output. What the compiler lays out on the chip
(`S(1)`, `S(3)`, … in a TPU layout) takes no HBM.

JAX names what the forward pass of a gradient computes `jvp(…)`; its backward pass, with what that computes anew,
`transpose(jvp(…))`. A copy that the compiler added has no name: it counts as what it copies. What a scan stacks for the
backward pass is allocated before, often under no such name; the loop that fills it has it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tinypod.plan.hlo.text import Computation, Instruction, Module, find, parse

_PASSED_ON = ("bitcast", "optimization-barrier", "opt-barrier", "async-update", "add-dependency", "domain")
_IN_PLACE = ("dynamic-update-slice", "scatter")


@dataclass(frozen=True)
class Live:
    forward_bytes: int  # made by the forward pass, kept for the backward pass
    other_bytes: int  # everything else that is no parameter


def live_at_peak(text: str) -> Live:
    """The split, in one device's HBM, at that point of the schedule where most of it is taken."""
    module = parse(text)
    return _peak(module, module.entry, module.donated)


@dataclass(slots=True, eq=False)
class _Buffer:
    bytes: int
    forward: bool
    made: int
    used: int  # last


_Buffers = list[_Buffer]  # one for each array of a value, tuples flattened


def _peak(module: Module, computation: Computation, given: Iterable[int] | None = None) -> Live:
    """The most that a computation's own buffers take. `given`: which of its results the caller holds; None: all."""
    values: dict[str, _Buffers] = {}
    buffers: dict[int, _Buffer] = {}
    inside: dict[int, Live] = {}
    for at, instruction in enumerate(computation.instructions.values()):
        operands = [values[name] for name in instruction.operands]
        for name in _read(computation, instruction):
            for buffer in values[name]:
                buffer.used = at
        values[instruction.name] = _value(module, instruction, operands, at)
        buffers |= {id(buffer): buffer for buffer in values[instruction.name]}
        inside[at] = _inside(module, instruction)
    for number, buffer in enumerate(values[computation.root]):
        buffer.used = len(inside)
        if given is None or number in given:
            buffer.bytes = 0
    return _largest(buffers.values(), inside)


def _read(computation: Computation, instruction: Instruction) -> tuple[str, ...]:
    """The values that must still be there when an instruction runs: to name or to select one is not to read it."""
    if instruction.opcode in (*_PASSED_ON, "tuple", "get-tuple-element"):
        return ()
    if instruction.opcode.endswith("-done"):  # until here what its -start reads is being read
        return computation.operands(instruction)[0].operands
    return instruction.operands


def _largest(buffers: Iterable[_Buffer], inside: dict[int, Live]) -> Live:
    changes = {at: [0, 0] for at in range(len(inside) + 2)}
    for buffer in buffers:
        changes[buffer.made][buffer.forward] += buffer.bytes
        changes[buffer.used + 1][buffer.forward] -= buffer.bytes
    other = forward = 0
    most = Live(0, 0)
    for at, called in inside.items():
        other, forward = other + changes[at][False], forward + changes[at][True]
        now = Live(forward + called.forward_bytes, other + called.other_bytes)
        most = max(most, now, key=_total)
    return most


def _value(module: Module, instruction: Instruction, operands: list[_Buffers], at: int) -> _Buffers:
    """The buffers that an instruction's arrays lie in: its operands', or new ones."""
    opcode = instruction.opcode
    if opcode == "while":
        for buffer in operands[0]:
            buffer.forward |= _is_forward(instruction)
    if opcode in _PASSED_ON or opcode == "while" or opcode.endswith("-done"):
        return operands[0]
    if opcode == "tuple":
        return [buffer for operand in operands for buffer in operand]
    if opcode == "get-tuple-element":
        start = int(find(r"index=(\d+)", instruction.attributes))
        return operands[0][start : start + 1]
    held = opcode in ("parameter", "constant")
    sizes = [array.padded_bytes if module.hbm(array) and not held else 0 for array in instruction.results]
    copied = not instruction.op_name and any(buffer.forward for operand in operands for buffer in operand)
    value = [_Buffer(size, copied or _is_forward(instruction), at, at) for size in sizes]
    for number, operand in enumerate(_updated(module, instruction)):
        if operand is not None and len(operands[operand]) == 1:
            value[number] = operands[operand][0]
    return value


def _is_forward(instruction: Instruction) -> bool:
    return "jvp(" in instruction.op_name and "transpose(" not in instruction.op_name


def _updated(module: Module, instruction: Instruction) -> list[int | None]:
    """For each result, the operand that it is an update of, made in place."""
    if instruction.opcode in _IN_PLACE:
        return list(range(len(instruction.arrays)))
    if instruction.opcode not in ("fusion", "call"):
        return []
    called = module.called(instruction)
    root = called.instructions[called.root]
    outputs = called.operands(root) if root.opcode == "tuple" else [root]
    return [_origin(module, called, output) for output in outputs] if len(outputs) == len(instruction.arrays) else []


def _origin(module: Module, computation: Computation, output: Instruction) -> int | None:
    if output.opcode == "parameter":
        return int(output.arguments)
    if output.opcode == "bitcast":
        source: int | None = 0
    else:
        updated = _updated(module, output)
        source = updated[0] if len(updated) == 1 else None
    return None if source is None else _origin(module, computation, computation.operands(output)[source])


def _inside(module: Module, instruction: Instruction) -> Live:
    """What the computations that an instruction runs need of their own."""
    if instruction.opcode == "while":
        called = [module.called(instruction, "body")]
    elif instruction.opcode == "conditional":
        called = module.branches(instruction)
    else:
        called = [module.called(instruction)] if instruction.opcode == "call" else []
    live = max((_peak(module, computation) for computation in called), key=_total, default=Live(0, 0))
    # Within one pass nothing is kept for the other; a loop over whole steps holds both.
    return Live(0, _total(live)) if "jvp(" in instruction.op_name else live


def _total(live: Live) -> int:
    return live.forward_bytes + live.other_bytes
