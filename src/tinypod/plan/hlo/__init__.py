"""What one compiled step does, read from its optimised, scheduled HLO text: `compiled.as_text()`, one device's program.

XLA's `cost_analysis` counts the body of a loop once, leaves out cuBLAS, and says nothing of communication. Here every
instruction that the schedule runs counts as often as it runs, on TPU, GPU and CPU.
"""

from collections.abc import Mapping

from tinypod.plan.hlo.groups import Axes
from tinypod.plan.hlo.hazards import find_hazards
from tinypod.plan.hlo.program import Collective, Kernel, Program
from tinypod.plan.hlo.text import parse
from tinypod.plan.hlo.walk import Walk

__all__ = ["Collective", "Kernel", "Program", "read"]


def read(text: str, mesh: Mapping[str, int]) -> Program:
    """Reads a program. `mesh`: its axes, in order, and their sizes; device ids are positions in `mesh.devices.flat`."""
    module = parse(text)
    walk = Walk(module, Axes(mesh))
    walk.computation(module.entry, 1, {})
    return Program(
        kernels=tuple(walk.kernels),
        collectives=tuple(walk.collectives),
        num_parameters=len(module.entry.parameters),
        aliased=module.aliased,
        unknown_loops=tuple(sorted(set(walk.unknown_loops))),
        opaque_calls=tuple(sorted(set(walk.opaque_calls))),
        **find_hazards(module),
    )
