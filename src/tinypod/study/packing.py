"""Which runs of a study make one program: those whose configs differ only in what is an argument of the step."""

import json
import re
from collections.abc import Sequence
from typing import Any

from tinypod.experiment import ExperimentConfig
from tinypod.tasks import KINDS

# Null says that there is none, and makes another program.
_SETTINGS = r"seed|ema_decay|optimizer\.(learning_rate|weight_decay|beta1|beta2|eps|momentum|clip_norm)"
_SETTINGS += r"|optimizer\.(schedule\.(warmup_steps|min_ratio)|(tables|adam)\..*|batch_scaling\..*)"
MOST_LANES = 64  # runs of a pack on one device


def shape_of(config: ExperimentConfig) -> str:
    """Equal for runs that one program can train."""
    pattern = "|".join([_SETTINGS, *KINDS[config.task.kind].varied])

    def without_settings(tree: Any, path: str) -> Any:
        if tree is not None and re.fullmatch(pattern, path):
            return "a setting"
        if isinstance(tree, dict):
            return {key: without_settings(value, f"{path}.{key}" if path else key) for key, value in tree.items()}
        return tree

    tree = without_settings(config.model_dump(mode="json"), "")
    tree["optimizer"].pop("batch_scaling")  # a factor of the rates
    return json.dumps(tree, sort_keys=True)


def can_pack(config: ExperimentConfig) -> bool:
    """Runs whose batches lie on the devices, and that ask for no devices of their own."""
    mesh = config.mesh
    return KINDS[config.task.kind].resident and mesh.slices == mesh.pipeline == mesh.fsdp == mesh.tensor == 1


def most_devices(config: ExperimentConfig, available: int) -> int:
    """Of those, the most over which the rows of a batch divide; all of them, where the config says how to use them."""
    if not can_pack(config) or config.mesh.devices is not None:
        return available
    if config.mesh.data != -1:
        return min(config.mesh.data, available)
    rows = config.batch_size // config.accumulation
    return max(count for count in range(1, available + 1) if rows % count == 0)


def pack(shapes: Sequence[str], num_devices: int, most: int | None = None) -> list[list[int]]:
    """Runs by number, in packs of equal shape; those of a shape are dealt out evenly over as few packs as they need."""
    limit = min(most or MOST_LANES * num_devices, MOST_LANES * num_devices)
    groups: dict[str, list[int]] = {}
    for number, shape in enumerate(shapes):
        groups.setdefault(shape, []).append(number)
    packs = []
    for group in groups.values():
        count = -(-len(group) // limit)
        each = -(-len(group) // count)
        packs += [group[start : start + each] for start in range(0, len(group), each)]
    return packs
