"""Instructions that a training step should not have. All branches and fusions are looked through, run or not."""

from tinypod.plan.hlo.opcodes import DYNAMIC
from tinypod.plan.hlo.text import Instruction, Module


def find_hazards(module: Module) -> dict[str, tuple[str, ...]]:
    """Their names and opcodes, or the targets of calls, by field of `Program`."""
    found: dict[str, list[str]] = {"float64": [], "host_calls": [], "dynamic_shapes": []}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            shape, target = instruction.shape, instruction.target if instruction.opcode == "custom-call" else ""
            what = f"{instruction.name}: {target or instruction.opcode}"
            if "f64[" in shape or "c128[" in shape:
                found["float64"].append(what)
            if "<=" in shape or instruction.opcode in DYNAMIC or target in DYNAMIC:
                found["dynamic_shapes"].append(what)
            if _calls_host(instruction, target):
                found["host_calls"].append(what)
    return {field: tuple(names) for field, names in found.items()}


def _calls_host(instruction: Instruction, target: str) -> bool:
    if instruction.opcode in ("infeed", "outfeed"):
        return True
    if instruction.kind in ("send", "recv"):
        return "is_host_transfer=true" in instruction.attributes
    return "callback" in target.lower() or "host_compute" in target.lower() or "HostExecute" in target
