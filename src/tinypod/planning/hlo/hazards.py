"""Instructions that a training step should not have. All branches and fusions are looked through, run or not."""

from tinypod.planning.hlo.text import Instruction, Module, words

_DYNAMIC = words("set-dimension-size PadToStatic SliceToDynamic")
_HOST_CALLS = ("callback", "host_compute", "hostexecute")  # parts of names, in lower case


def find_unwanted(module: Module) -> tuple[str, ...]:
    """Like `float64: sine.3: sine`: what it is, the instruction's name, its opcode or the target of its call."""
    found = []
    for computation in module.computations.values():
        for one in computation.instructions.values():
            called = one.target if one.opcode == "custom-call" else one.opcode
            found += [f"{hazard}: {one.name}: {called}" for hazard in _hazards(one, called)]
    return tuple(found)


def _hazards(instruction: Instruction, called: str) -> list[str]:
    shape, hazards = instruction.shape, []
    if "f64[" in shape or "c128[" in shape:
        hazards.append("float64")
    if "<=" in shape or called in _DYNAMIC:
        hazards.append("dynamic shape")
    transfers = instruction.kind in ("send", "recv") and "is_host_transfer=true" in instruction.attributes
    if (
        (transfers and not instruction.crosses_slices)
        or called in ("infeed", "outfeed")
        or any(x in called.lower() for x in _HOST_CALLS)
    ):
        hazards.append("call of the host")
    return hazards
