"""How often loops run.

The compiler's `known_trip_count` says it, or else it is worked out from the loop's condition, its counter's first value
and the step its body adds: the TPU compiler states nothing.
"""

from dataclasses import dataclass

from tinypod.plan.hlo.text import Computation, Instruction, Module, find, words

_PASSED_ON = words("copy copy-start copy-done bitcast convert reshape optimization-barrier opt-barrier")
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}

Known = dict[int, int]  # a loop's arguments that never change, and their values


@dataclass(frozen=True)
class _Affine:
    """A loop's argument plus a constant, or the constant alone."""

    argument: int | None
    offset: int


_Value = _Affine | None
_Comparison = tuple[str, _Value, _Value]


def trips(module: Module, computation: Computation, loop: Instruction, known: Known) -> tuple[int | None, Known]:
    """How often a loop runs, None if that cannot be read, and its arguments that stay constant.

    `known`: those of the loop whose body the computation is.
    """
    body, condition = module.called(loop, "body"), module.called(loop, "condition")
    first = _Scope(module, computation, known).members(loop.operands[0])
    after = _Scope(module, body, {}).members(body.root)
    unchanged = {
        at: value.offset
        for at, (value, later) in enumerate(zip(first, after, strict=False))
        if value is not None and value.argument is None and later == _Affine(at, 0)
    }
    if stated := find(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(stated), unchanged
    return _count(_Scope(module, condition, unchanged).comparison(condition.root), first, after), unchanged


def _count(comparison: _Comparison | None, first: list[_Value], after: list[_Value]) -> int | None:
    direction, left, right = comparison or ("", None, None)
    if left is not None and left.argument is None:
        direction, left, right = _MIRRORED.get(direction, ""), right, left
    if left is None or left.argument is None or right is None or right.argument is not None:
        return None
    at = left.argument
    start, step = (first[at], after[at]) if at < min(len(first), len(after)) else (None, None)
    if start is None or start.argument is not None or step is None or step.argument != at or step.offset == 0:
        return None
    return _turns(direction, start.offset + left.offset, right.offset, step.offset)


def _turns(direction: str, start: int, bound: int, step: int) -> int | None:
    if direction in ("LE", "GE"):
        bound, direction = (bound + 1, "LT") if direction == "LE" else (bound - 1, "GT")
    distance = bound - start
    if direction == "NE" and distance % step == 0 and distance // step >= 0:
        return distance // step
    if (direction, step > 0) in (("LT", True), ("GT", False)):
        return max(0, -(-distance // step))
    return None


@dataclass(frozen=True)
class _Scope:
    """A computation in which integers are worked out.

    Its parameters are `given` if a call or fusion passes them; else it has one, the tuple of a loop's arguments.
    """

    module: Module
    computation: Computation
    known: Known
    given: list[_Value] | None = None

    def value(self, name: str) -> _Value:
        instruction = self.computation.instructions[name]
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "constant":
            return _Affine(None, int(instruction.arguments)) if instruction.arguments.lstrip("-").isdigit() else None
        if opcode == "parameter":
            return self.given[int(instruction.arguments)] if self.given else None
        if opcode == "get-tuple-element":
            return self.member(instruction)
        if opcode in _PASSED_ON:
            return self.value(operands[0])
        if opcode in ("add", "subtract"):
            return _sum(self.value(operands[0]), self.value(operands[1]), 1 if opcode == "add" else -1)
        if opcode in ("fusion", "call") and not instruction.shape.startswith("("):
            called = self.called(instruction)
            return called.value(called.computation.root)
        return None

    def member(self, element: Instruction) -> _Value:
        at = int(find(r"index=(\d+)", element.attributes))
        source = self.computation.instructions[element.operands[0]]
        if source.opcode == "parameter" and self.given is None:
            return _Affine(None, self.known[at]) if at in self.known else _Affine(at, 0)
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

    def members(self, name: str) -> list[_Value]:
        """What is known of each member of a tuple."""
        instruction = self.computation.instructions[name]
        if instruction.opcode in _PASSED_ON:
            return self.members(instruction.operands[0])
        return [self.scalar(operand) for operand in instruction.operands] if instruction.opcode == "tuple" else []

    def scalar(self, name: str) -> _Value:
        # Only counters and bounds matter; the arrays of a big tuple would be followed for nothing.
        arrays = self.computation.instructions[name].arrays
        return self.value(name) if len(arrays) == 1 and not arrays[0].dims and arrays[0].dtype[0] in "su" else None

    def comparison(self, name: str) -> _Comparison | None:
        """The direction and sides of the comparison that a condition ends in."""
        instruction = self.computation.instructions[name]
        if instruction.opcode in ("fusion", "call"):
            called = self.called(instruction)
            return called.comparison(called.computation.root)
        if instruction.opcode in _PASSED_ON:
            return self.comparison(instruction.operands[0])
        if instruction.opcode != "compare":
            return None
        left, right = (self.value(operand) for operand in instruction.operands)
        return find(r"direction=(\w+)", instruction.attributes), left, right


def _sum(left: _Value, right: _Value, sign: int) -> _Value:
    if left is None or right is None or (right.argument is not None and (sign < 0 or left.argument is not None)):
        return None
    argument = left.argument if right.argument is None else right.argument
    return _Affine(argument, left.offset + sign * right.offset)
