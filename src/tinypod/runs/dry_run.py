"""What `tinypod train` would do, without doing it: no file is written, and no step is compiled."""

import jax

from tinypod import config as configs
from tinypod.errors import CheckpointError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.runs import metrics, storage
from tinypod.runs.config_history import check_config
from tinypod.runs.folder import CHECKPOINTS, CONFIG, HEALTH, Run, with_absolute_paths
from tinypod.runs.saver import open_checkpoints
from tinypod.sharding import describe_mesh, num_batch_shards


def rehearsed_devices(count: int) -> None:
    """So many CPU devices in this process, in place of `--processes`; before JAX has looked for devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def describe(config: ExperimentConfig, run: Run, from_step: int | None = None) -> str:
    """The resolved config as YAML, and what it comes to here as comments. All that stops a run at its start is an
    error here, too."""
    config = with_absolute_paths(config)
    run.pull()
    experiment = build(config)
    experiment.check_batch()
    step, changes = _begins(experiment, run, from_step)
    mesh, task = experiment.mesh, experiment.task
    rows = config.batch_size // config.accumulation // num_batch_shards(mesh)
    lines = {
        "model": f"{experiment.num_weights:,} weights, {task.description}",
        "data": f"{task.train_rows:,} training and {task.held_out_rows or 0:,} held-out {task.unit}",
        "mesh": f"{mesh.size} × {mesh.devices.flat[0].device_kind} ({describe_mesh(mesh.shape) or 'one device'}), "
        f"{rows:,} rows per device",
        "steps": "nothing left to do" if step >= config.steps else f"{step:,} to {config.steps:,}",
        "writes": f"{run}/ ({f'resumed from step {step:,}' if step else 'a new run'})",
    }
    notes = [f"{name + ':':<8}{text}" for name, text in lines.items()] + _written(config)
    notes += [f"change: {change}" for change in changes] + [f"warning: {doubt}" for doubt in config.doubts]
    return configs.dump(config) + "\n" + "\n".join(f"# {note}" for note in notes) + "\n# dry run: nothing was written"


def _begins(experiment: Experiment, run: Run, from_step: int | None) -> tuple[int, list[str]]:
    """The step that the run would begin at, and what would be changed in its config."""
    there = storage.folder(run.checkpoints).exists()
    checkpoints = open_checkpoints(run, experiment, {}, read_only=True) if there else None
    steps = checkpoints.steps() if checkpoints else []
    if from_step is not None and from_step not in steps:
        raise CheckpointError(
            f"{run}: no checkpoint of step {from_step}; there are: {', '.join(map(str, steps)) or 'none'}"
        )
    step = max(steps, default=0) if from_step is None else from_step
    return step, check_config(run, experiment.config, step, finished=step >= experiment.config.steps)


def _written(config: ExperimentConfig) -> list[str]:
    checkpoint, log = config.checkpoint, config.log
    every = [f"{checkpoint.every_steps:,} steps"] if checkpoint.every_steps else []
    every += [f"{checkpoint.every_minutes:g} minutes"] if checkpoint.every_minutes else []
    when = f"every {' or '.join(every)}, and at the end" if every else "at the end"
    kept = f"the last {checkpoint.keep_last}" + (" and the best" if checkpoint.best else "")
    mirrors = ["tensorboard/"] * log.tensorboard + ["wandb/"] * (log.wandb is not None)
    return [
        f"  {', '.join([CONFIG, metrics.FILE, 'curves.png', *mirrors, f'{HEALTH}/', 'goodput.json'])}",
        f"  {CHECKPOINTS}/: {when}; keeps {kept}",
    ]
