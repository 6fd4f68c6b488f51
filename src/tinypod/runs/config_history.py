"""What a run was trained with.

`config.yaml` is the config that the steps so far were trained with. `config_changes.jsonl` has a line for each change:
the step from which it holds, and the keys with their old and new values. A change is written when training resumes with
it, not before. What would make another model, or other batches, is refused: it is another run.
"""

import json
import re
import time

from tinypod import config as configs
from tinypod.errors import ConfigError
from tinypod.experiment import ExperimentConfig
from tinypod.runs.folder import CONFIG, Run, read_config
from tinypod.runs.storage import replace_file
from tinypod.tasks import KINDS

CHANGES = "config_changes.jsonl"
# Where and how it runs, what it reports and keeps: the steps stay the same.
_BESIDE = r"mesh\..*|compile_cache|health\..*|log\..*|checkpoint\..*|eval\..*|nonfinite\..*|data\.path"
_BESIDE += r"|accumulation|steps_per_dispatch|model\.(remat|unroll|fused)"
# What steps yet to come may be trained with, besides what the task says. Whatever else differs makes another model, or
# other batches.
_FROM_NOW_ON = r"steps|ema_decay|optimizer\.(?!kind|batch_scaling).*"


def check_config(run: Run, config: ExperimentConfig, step: int, finished: bool) -> list[str]:
    """What the config changes in the run's own, each as `key: old -> new`. ConfigError if that cannot be."""
    if not (run.folder / CONFIG).exists():
        return []
    try:
        old = read_config(run).model_dump(mode="json")
    except ConfigError as error:
        raise ConfigError(f"{error}\n{run} was made by another version of tinypod; choose another --run") from None
    changed = configs.differences(old, config.model_dump(mode="json"))
    if finished:
        refused, why = [line for line in changed if not _matches(_BESIDE, line)], f"it is finished, at step {step:,}"
    else:
        allowed = "|".join([_BESIDE, _FROM_NOW_ON, *KINDS[config.task.kind].changeable])
        refused = [line for line in changed if step and not _matches(allowed, line)]
        why = "that would make another model, or train it on other batches"
    if refused:
        shown = "".join(f"\n  {line}" for line in refused)
        raise ConfigError(
            f"{run} was trained with another config, and cannot be changed: {why}{shown}\n"
            f"Leave that out, or train another run: --run {run}_2" + (", or raise steps=" if finished else "")
        )
    return changed


def _matches(pattern: str, line: str) -> bool:
    key, _, values = line.partition(": ")
    return re.fullmatch(pattern, key) is not None and not (key == "ema_decay" and "None" in values)


def write_config(run: Run, config: ExperimentConfig, step: int, changed: list[str]) -> None:
    """Store the config that steps from here on are trained with, and what it changes."""
    if changed and step:
        path = run.folder / CHANGES
        earlier = path.read_text() if path.exists() else ""
        line = json.dumps({"step": step, "time": time.time(), "changes": changed})
        replace_file(path, f"{earlier}{line}\n".encode(), durable=True)
    if changed or not (run.folder / CONFIG).exists():
        replace_file(run.folder / CONFIG, configs.dump(config).encode(), durable=True)
