"""Kernels by what they do: what a chip's figures say of one kind, they do not say of another."""

from typing import Literal

from tinypod.planning.hlo.text import Computation, Instruction, Module, words

Kind = Literal["products", "element-wise", "reductions", "gathers", "calls"]
KINDS: tuple[Kind, ...] = ("products", "element-wise", "reductions", "gathers", "calls")
_GATHERS = words("gather scatter sort select-and-scatter")
_REDUCTIONS = words("reduce reduce-window")


def kind_of(module: Module, instruction: Instruction, flops: float) -> Kind:
    """`element-wise`: copies, slices and transpositions, too. `calls`: kernels that the compiler does not look into."""
    if instruction.kind == "custom-call" and not instruction.target.startswith(("__cublas$", "__onednn$")):
        return "calls"
    if flops:
        return "products"
    opcodes = {instruction.kind}
    if instruction.kind == "fusion":
        opcodes = _opcodes(module, module.called(instruction))
    if opcodes & _GATHERS:
        return "gathers"
    return "reductions" if opcodes & _REDUCTIONS else "element-wise"


def _opcodes(module: Module, computation: Computation) -> set[str]:
    found: set[str] = set()
    for inner in computation.instructions.values():
        found |= _opcodes(module, module.called(inner)) if inner.kind == "fusion" else {inner.kind}
    return found
