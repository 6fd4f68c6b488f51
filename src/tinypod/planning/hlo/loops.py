"""How often loops run.

The compiler's `known_trip_count` says it, or else the integers that the loop carries are worked out turn by turn, until
its condition fails: the TPU compiler states nothing.
"""

import operator
from dataclasses import dataclass

from tinypod.planning.hlo.text import Computation, Instruction, Module, find, words

_MOST_TURNS = 2**16  # that are worked out
_PASSED_ON = words("copy copy-start copy-done bitcast convert reshape optimization-barrier opt-barrier")
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub}
_COMPARISONS = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "NE": operator.ne}

Known = dict[int, int]  # of a loop's arguments, those whose values are known


def trips(module: Module, computation: Computation, loop: Instruction, known: Known) -> tuple[int | None, Known]:
    """How often a loop runs, None if that cannot be read, and its arguments that stay constant.

    `known`: those of the loop whose body the computation is.
    """
    body, condition = module.called(loop, "body"), module.called(loop, "condition")
    first = _Scope(module, computation, known).members(loop.operands[0])
    unchanged = {at: value for at, value in first.items() if _is_passed_on(body, at)}
    if stated := find(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(stated), unchanged
    return _count(module, condition, body, first), unchanged


def _is_passed_on(body: Computation, at: int) -> bool:
    """Whether an argument leaves a turn as it came."""
    result = _origin(body, body.root)
    member = _origin(body, result.operands[at]) if result.opcode == "tuple" else result
    source = body.instructions[member.operands[0]] if member.opcode == "get-tuple-element" else member
    return source.opcode == "parameter" and _index(member) == at


def _origin(computation: Computation, name: str) -> Instruction:
    instruction = computation.instructions[name]
    return _origin(computation, instruction.operands[0]) if instruction.opcode in _PASSED_ON else instruction


def _index(member: Instruction) -> int:
    return int(find(r"index=(\d+)", member.attributes) or -1)


def _count(module: Module, condition: Computation, body: Computation, arguments: Known) -> int | None:
    asked = _read_members(condition, condition.root)
    for turns in range(_MOST_TURNS):
        holds = _Scope(module, condition, arguments).value(condition.root)
        if not holds:
            return None if holds is None else turns
        later = _Scope(module, body, arguments).members(body.root)
        if all(later.get(at) == arguments.get(at) for at in asked):
            return None  # it would never end
        arguments = later
    return None


def _read_members(computation: Computation, name: str) -> set[int]:
    """Of the loop's arguments, those that a value depends on."""
    one = computation.instructions[name]
    if one.opcode == "get-tuple-element":
        return {_index(one)}
    return set().union(*(_read_members(computation, operand) for operand in one.operands))


@dataclass(frozen=True)
class _Scope:
    """A computation in which integers are worked out; None stands for what is not known.

    Its parameters are `given` if a call or fusion passes them; else it has one, the tuple of a loop's arguments.
    """

    module: Module
    computation: Computation
    arguments: Known
    given: list[int | None] | None = None

    def value(self, name: str) -> int | None:
        instruction = _origin(self.computation, name)
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "constant":
            return int(instruction.arguments) if instruction.arguments.lstrip("-").isdigit() else None
        if opcode == "parameter":
            return self.given[int(instruction.arguments)] if self.given else None
        if opcode == "get-tuple-element":
            return self.member(instruction)
        if opcode in ("fusion", "call") and not instruction.shape.startswith("("):
            called = self.called(instruction)
            return called.value(called.computation.root)
        apply = _COMPARISONS.get(find(r"direction=(\w+)", instruction.attributes)) or _ARITHMETIC.get(opcode)
        if apply is None:
            return None
        left, right = (self.value(operand) for operand in operands)
        return None if left is None or right is None else int(apply(left, right))

    def member(self, element: Instruction) -> int | None:
        at, source = _index(element), self.computation.instructions[element.operands[0]]
        if source.opcode == "parameter" and self.given is None:
            return self.arguments.get(at)
        if source.opcode == "tuple":
            return self.value(source.operands[at])
        if source.opcode in ("fusion", "call"):
            called = self.called(source)
            root = called.computation.instructions[called.computation.root]
            return called.value(root.operands[at]) if root.opcode == "tuple" else None
        return None

    def called(self, instruction: Instruction) -> "_Scope":
        passed = [self.value(operand) for operand in instruction.operands]
        return _Scope(self.module, self.module.called(instruction), {}, passed)

    def members(self, name: str) -> Known:
        """The integers among the members of a tuple, those that are known."""
        made = _origin(self.computation, name)
        operands = self.computation.operands(made) if made.opcode == "tuple" else []
        values = {at: self.value(one.name) for at, one in enumerate(operands) if _is_integer(one)}
        return {at: value for at, value in values.items() if value is not None}


def _is_integer(instruction: Instruction) -> bool:
    """Only counters and bounds matter; the arrays of a big tuple would be followed for nothing."""
    arrays = instruction.arrays
    return len(arrays) == 1 and not arrays[0].dims and arrays[0].dtype[0] in "su"
