"""The pre-flight checks. A check is a function of the probe; what an earlier one built (the experiment, the compiled
step, the state) serves the later ones. It returns what it found, or raises: Failed (or any error that is meant for a
user) for a property that does not hold, Skipped for one that cannot be tried here.
"""

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from tinypod import __version__, sharding, step
from tinypod.cluster.startup import Cluster
from tinypod.data.puzzles import Split
from tinypod.errors import UserError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.health.recompiles import CompileGuard
from tinypod.health.replicas import make_replica_check
from tinypod.optim import Constant, build_optimizer
from tinypod.runs import folder as run
from tinypod.runs import storage
from tinypod.runs.checkpoints import Checkpoints
from tinypod.runs.checksums import checksums, flatten

COMPARED_STEPS = 3  # on one device and on all; more would measure how fast rounding errors grow
MIN_FALL = 0.01  # of the loss on a batch that is repeated, which has no noise but rounding
CHANCE = 1e-6  # parts of a batch that are equal by a smaller chance than this were not drawn apart
VIEWS = 1_000_000  # a puzzle's symmetries, where they are drawn anew each time


@dataclass(frozen=True)
class Found:
    """What a check that passed has to say; `same` must be equal in all processes."""

    text: str
    figures: dict[str, float] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)


class Failed(UserError):
    """The property does not hold."""


class Skipped(Exception):
    """It cannot be tried here."""


@dataclass
class Probe:
    """What the checks share; each fills in what it builds."""

    config: ExperimentConfig | UserError  # the error, if it could not be loaded
    cluster: Cluster = field(default_factory=Cluster)
    steps: int = 20
    scratch: str = ""  # a folder of our own, local or gs://, which exists or can be made
    console: Console = field(default_factory=lambda: Console(quiet=True))
    # Filled in by `check_data` and `check_step`.
    experiment: Experiment = field(init=False)
    split: Split = field(init=False)
    source: Any = field(init=False)
    compiled: Any = field(init=False)
    compile_s: float = field(init=False)
    state: step.TrainState = field(init=False)
    losses: list[float] = field(init=False)
    grad_norms: list[float] = field(init=False)
    step_s: list[float] = field(default_factory=list)

    def needs_devices(self, what: str) -> None:
        if self.experiment.mesh.size == 1:
            raise Skipped(f"one device: {what}")

    def alone(self) -> Experiment:
        """The same experiment on one device of this process."""
        one = sharding.MeshConfig(data=1, fsdp=1, tensor=1)
        return build(self.experiment.config.model_copy(update={"mesh": one}), [jax.local_devices()[0]])

    def gather(self, values: np.ndarray) -> np.ndarray:
        """The same array of every process: [processes, ...]."""
        if self.cluster.count == 1:
            return values[None]
        return np.asarray(multihost_utils.process_allgather(values))


def check_data(probe: Probe) -> Found:
    """Nothing here waits for other processes: one whose data is missing must not leave them waiting."""
    if isinstance(probe.config, UserError):
        raise probe.config
    config = probe.config
    experiment = build(config, console=probe.console)
    experiment.check_batch()
    probe.experiment, probe.split = experiment, experiment.read_split(config.data.train_split)
    held_out = experiment.read_split(config.data.eval_split)
    shards = sharding.num_row_shards(experiment.mesh)
    parts = f" in {config.accumulation} parts" if config.accumulation > 1 else ""
    return Found(
        f"{len(probe.split):,} training and {len(held_out):,} held-out puzzles of {experiment.info.seq_len} cells, "
        f"hashes right; batch {config.batch_size}{parts} over {_mesh_text(experiment)}: "
        f"{config.batch_size // shards} rows a device",
        {
            "train_rows": len(probe.split),
            "held_out_rows": len(held_out),
            "rows_per_device": config.batch_size // shards,
        },
        {
            "the config": _digest(config.model_dump(mode="json", exclude={"data": {"path"}, "compile_cache": True})),
            "the dataset": _digest({name: split.sha256 for name, split in experiment.info.splits.items()}),
            "the version of tinypod": __version__,
            "the version of JAX": jax.__version__,
        },
    )


def check_rows(probe: Probe) -> Found:
    """The batch of one step, its rows spread over the mesh, against the same batch drawn on one device."""
    experiment, rows = probe.experiment, probe.experiment.config.batch_size
    probe.needs_devices("it draws every row")
    spread = _draw(experiment, experiment.put_source(probe.split), sharding.by_rows(experiment.mesh))
    alone = probe.alone()
    whole = jax.device_get(_draw(alone, alone.put_source(probe.split), sharding.by_rows(alone.mesh)))
    held, wrong = _compare_rows(spread, whole, rows)
    times_held = probe.gather(held).sum(axis=0)
    wrong_rows = np.flatnonzero(probe.gather(wrong).any(axis=0))
    if wrong_rows.size:
        raise Failed(f"not as in the batch drawn on one device: {_numbered('row', wrong_rows)} of {rows}")
    if (odd := np.flatnonzero(times_held != 1)).size:
        raise Failed(f"drawn {times_held[odd[0]]} times instead of once: {_numbered('row', odd)} of {rows}")
    by_process = probe.cluster.count > 1
    parts = probe.cluster.count if by_process else sharding.num_row_shards(experiment.mesh)
    _check_parts_differ(probe, whole, parts, "process" if by_process else "device")
    distinct = len(set(_row_contents(whole)))
    groups = "devices" if parts == experiment.mesh.size else "groups of devices"
    holders = f"{parts} {'processes' if by_process else groups}"
    return Found(
        f"{holders} draw different rows, {rows} in all, each once, to the bit those of one device; "
        f"{distinct} of them distinct",
        {"rows": rows, "distinct_rows": distinct},
        {"the global batch": _digest([row.hex() for row in _row_contents(whole)])},
    )


def check_step(probe: Probe) -> Found:
    """Compile the step as `train` does, and take a few."""
    experiment = probe.experiment
    probe.source = experiment.put_source(probe.split)
    state = experiment.init()
    probe.compiled, probe.compile_s = _compile(experiment.train_step, state, probe.source)
    probe.state, sums = _take(probe.compiled, state, probe.source, COMPARED_STEPS)
    probe.losses, probe.grad_norms = _losses(experiment, sums), [float(part["grad_norm"]) for part in sums]
    weights = sum(math.prod(x.shape) for x in jax.tree.leaves(experiment.abstract_state.params))
    return Found(
        f"{weights:,} weights, {experiment.config.model.dtype}; compiled in {probe.compile_s:.1f} s; losses of "
        f"{len(sums)} steps {_listed(probe.losses)}, gradient norm {probe.grad_norms[0]:.4g}, all finite",
        {"weights": weights, "compile_s": probe.compile_s, "first_loss": probe.losses[0]},
    )


def check_replicas(probe: Probe) -> Found:
    """Gradients are not kept, but after one step the first moment is (1 - beta1) times the gradient."""
    experiment = probe.experiment
    probe.needs_devices("it holds the only copy")
    specs = jax.tree.map(lambda x: x.spec, _replicated_parts(experiment.state_shardings))
    copied = sum(_copies(experiment, spec) > 1 for spec in _spec_leaves(specs))
    if not copied:
        raise Skipped("the mesh leaves no array with a copy")
    compare = make_replica_check(experiment.mesh, specs)
    first, _ = _take(probe.compiled, experiment.init(), probe.source, 1)
    compare(_replicated_parts(first))
    compare(_replicated_parts(probe.state))
    return Found(
        f"{copied} arrays with copies on {_mesh_text(experiment)} equal to the bit: the moments after step 1 "
        f"((1 - beta1) × the gradient), and weights, averages and moments after step {COMPARED_STEPS}",
        {"arrays": copied},
    )


def check_one_device(probe: Probe) -> Found:
    """The gradient's norm, too: Adam's updates would hide a gradient that is too large by a factor."""
    probe.needs_devices("nothing to compare it with")
    try:
        alone = probe.alone()
        state, source = alone.init(), alone.put_source(probe.split)
        sums = _take(_compile(alone.train_step, state, source)[0], state, source, COMPARED_STEPS)[1]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise Skipped("the whole batch does not fit one device; try it with a smaller batch_size=") from None
    tolerance = loss_tolerance(probe.experiment.config.model.dtype, jax.default_backend())
    losses = _losses(alone, sums)
    loss = max(_relative(a, b) for a, b in zip(losses, probe.losses, strict=True))
    norm = _relative(float(sums[0]["grad_norm"]), probe.grad_norms[0])
    text = (
        f"losses of {len(losses)} steps differ by {loss:.1g} (allowed: {tolerance:g}, "
        f"{probe.experiment.config.model.dtype}), the first gradient's norm by {norm:.1g} (allowed: {10 * tolerance:g})"
    )
    if not loss <= tolerance:
        raise Failed(
            f"{text}: {_listed(losses)} on one device, {_listed(probe.losses)} on {probe.experiment.mesh.size}"
        )
    if not norm <= 10 * tolerance:
        raise Failed(f"{text}: {float(sums[0]['grad_norm']):.6g} on one device, {probe.grad_norms[0]:.6g} on all")
    return Found(text, {"loss_difference": loss, "grad_norm_difference": norm, "tolerance": tolerance})


def check_checkpoint(probe: Probe) -> Found:
    """Every process saves, restores, and compares its own shards."""
    folder = storage.folder(probe.scratch)
    _check_shared(probe, folder)
    jax.block_until_ready(checksums(flatten(probe.state)))  # compiles what every save needs: not counted
    began = time.perf_counter()
    timeout_s = math.ceil(probe.experiment.config.health.save_timeout_s)
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1, timeout_s=timeout_s)
    try:
        checkpoints.save(probe.state, run.about(probe.experiment))
        checkpoints.wait()
        saved_s = time.perf_counter() - began
        restored = checkpoints.restore(int(probe.state.step), probe.experiment.abstract_state)
    finally:
        checkpoints.close()
    restored_s = time.perf_counter() - began - saved_s
    names = list(flatten(probe.state))
    before, after = (list(flatten(state).values()) for state in (probe.state, restored))
    wrong = np.array([not _same_bits(a, b) for a, b in zip(before, after, strict=True)])
    changed = np.flatnonzero(probe.gather(wrong).any(axis=0))
    if changed.size:
        raise Failed(
            f"not as saved: {', '.join(names[i] for i in changed[:3])} ({changed.size} of {len(names)} arrays)"
        )
    size = sum(x.nbytes for x in before)
    return Found(
        f"{len(names)} arrays, {_size(size)}, restored bit for bit; saved in {saved_s:.1f} s, "
        f"read in {restored_s:.1f} s",
        {"arrays": len(names), "bytes": size, "save_s": saved_s, "restore_s": restored_s},
    )


def check_learning(probe: Probe) -> Found:
    """The loss of one batch, over and over, from the start of its recursion: only the weights can change it."""
    experiment, state = probe.experiment, probe.experiment.init()
    compiled, _ = _compile(_repeating_step(experiment), state, probe.source)
    losses = _losses(experiment, _take(compiled, state, probe.source, probe.steps)[1])
    fall = 1 - losses[-1] / losses[0]
    rate = experiment.config.optimizer.learning_rate
    text = (
        f"loss of one repeated batch {losses[0]:.4f} → {losses[-1]:.4f}, "
        f"{abs(fall):.1%} {'less' if fall >= 0 else 'more'}, in {len(losses)} steps at the full rate (optimizer."
        f"learning_rate={rate:g}, no warm-up)"
    )
    if not fall >= MIN_FALL:
        raise Failed(f"{text}; at least {MIN_FALL:.0%} less was expected. Raise the rate if it is low, or --steps")
    return Found(text, {"first_loss": losses[0], "last_loss": losses[-1], "fall": fall})


def check_one_trace(probe: Probe) -> Found:
    """Steps of the program that `train` runs; also what `check_speed` reports."""
    probe.step_s = []
    with CompileGuard(lambda: "stepping") as guard:
        compare = _loop_replica_check(probe)
        guard.warm("stepping")
        for _ in range(probe.steps):
            began = time.perf_counter()
            try:
                probe.state, sums = probe.compiled(probe.state, probe.source)
            except TypeError as error:
                raise Failed(f"a step changes the types of its state, and must be compiled again: {error}") from error
            jax.block_until_ready(sums)
            probe.step_s.append(time.perf_counter() - began)
        compare(probe.state.params)
        guard.check()
    return Found(f"{probe.steps} more steps, nothing compiled", {"steps": probe.steps})


def check_speed(probe: Probe) -> Found:
    """Figures only."""
    if not probe.step_s:
        raise Skipped("no step was timed")
    seconds, batch = statistics.median(probe.step_s), probe.experiment.config.batch_size
    figures = {"steps_per_s": 1 / seconds, "examples_per_s": batch / seconds, "compile_s": probe.compile_s}
    text = (
        f"{1 / seconds:,.3g} steps/s (median of {len(probe.step_s)}, each waited for), "
        f"{batch / seconds:,.0f} examples/s; compiled in {probe.compile_s:.1f} s"
    )
    if (needed := _step_bytes(probe.compiled)) is not None:
        figures["step_bytes"] = needed
        text += f"; a step needs {_size(needed)} a device"
    memory = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max((stats.get("peak_bytes_in_use", 0) for stats in memory), default=0)
    if peak:
        figures["peak_bytes"] = peak
        limit = memory[0].get("bytes_limit")
        text += f", all checks at most {_size(peak)}" + (f" of {_size(limit)}" if limit else "")
    return Found(text, figures)


def loss_tolerance(dtype: str, backend: str) -> float:
    """Relative; accelerators multiply float32 matrices in fewer bits, so that sums in another order differ more."""
    if dtype == "float32":
        return 1e-4 if backend == "cpu" else 3e-3
    return 3e-2


def _compile(function: Any, state: step.TrainState, source: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    compiled = function.lower(state, source).compile()
    return compiled, time.perf_counter() - began


def _take(compiled: Any, state: step.TrainState, source: Any, steps: int) -> tuple[step.TrainState, list[Any]]:
    sums = []
    for _ in range(steps):
        state, one = compiled(state, source)
        sums.append(one)
    return state, jax.device_get(sums)


def _losses(experiment: Experiment, sums: list[Any]) -> list[float]:
    for number, part in enumerate(sums):
        if part["skipped"]:
            raise Failed(
                f"loss or gradients are not finite at step {number + 1}; lower optimizer.learning_rate, set "
                "optimizer.clip_norm=1.0, or use model.dtype=float32"
            )
    return [experiment.task.summarise({name: float(x) for name, x in part.items()})["loss"] for part in sums]


def _repeating_step(experiment: Experiment) -> Any:
    """The step at the full rate, with the same batch each time and each time from its first recursion."""
    config, task = experiment.config, experiment.task

    def draw(source: Any, key: jax.Array) -> Any:
        return task.draw(source, _batch_key(config.seed))

    optimizer_config = config.optimizer.model_copy(update={"schedule": Constant()})
    optimizer = build_optimizer(optimizer_config, config.batch_size, config.steps)
    train_step = step.make_train_step(
        replace(task, draw=draw),
        optimizer,
        config.seed,
        config.batch_size,
        config.accumulation,
        config.ema_decay,
        experiment.mesh,
    )

    def repeating_step(state: step.TrainState, source: Any) -> tuple[step.TrainState, Any]:
        state, sums = train_step(state, source)
        return state._replace(carry=task.init_carry(state.params)), sums

    shardings, whole = experiment.state_shardings, sharding.replicated(experiment.mesh)
    return jax.jit(repeating_step, donate_argnums=0, in_shardings=(shardings, whole), out_shardings=(shardings, whole))


def _batch_key(seed: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), 1)  # as the first step has it


def _draw(experiment: Experiment, source: Any, rows: Any) -> Any:
    seed = experiment.config.seed
    return jax.jit(lambda source: experiment.task.draw(source, _batch_key(seed)), out_shardings=rows)(source)


def _compare_rows(spread: Any, whole: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each row: how many first copies are on this process's devices; whether any copy here is not as expected."""
    held, wrong = np.zeros(rows, np.int32), np.zeros(rows, bool)
    leaves = list(zip(jax.tree.leaves(spread), jax.tree.leaves(whole), strict=True))
    for number, (array, expected) in enumerate(leaves):
        for shard in array.addressable_shards:
            index = shard.index[0]
            held[index] += number == 0 and shard.replica_id == 0
            differs = np.asarray(shard.data) != expected[index]
            wrong[index] |= differs.reshape(len(differs), -1).any(axis=1)
    return held, wrong


def _row_contents(batch: Any) -> list[bytes]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    return [b"".join(leaf[row].tobytes() for leaf in leaves) for row in range(len(leaves[0]))]


def _check_parts_differ(probe: Probe, whole: Any, parts: int, holder: str) -> None:
    """Processes that all seed their own generator alike make a batch that is the same few rows again and again."""
    contents = _row_contents(whole)
    size = len(contents) // parts
    augmentations = probe.experiment.config.data.augmentations
    variants = len(probe.split) * (VIEWS if augmentations == "endless" else augmentations + 1)
    if parts**2 * float(variants) ** -size > CHANCE:
        return
    seen: dict[tuple[bytes, ...], int] = {}
    for part in range(parts):
        first = seen.setdefault(tuple(contents[part * size : (part + 1) * size]), part)
        if first != part:
            raise Failed(f"{holder} {part} draws the same {size} rows as {holder} {first}")


def _loop_replica_check(probe: Probe) -> Callable[[Any], None]:
    """What the loop calls besides the step, first called with the initial weights as it is there."""
    if probe.experiment.config.health.replica_check_every_steps is None:
        return lambda params: None
    compare = make_replica_check(probe.experiment.mesh, probe.experiment.specs)
    compare(probe.experiment.init().params)
    return compare


def _replicated_parts(state: Any) -> dict[str, Any]:
    return {"params": state.params, "opt_state": state.opt_state, "ema": state.ema}


def _spec_leaves(specs: Any) -> list[Any]:
    return jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))


def _copies(experiment: Experiment, spec: Any) -> int:
    mesh = experiment.mesh
    split = [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]
    return mesh.size // math.prod(mesh.shape[axis] for axis in split)


def _check_shared(probe: Probe, folder: Any) -> None:
    """Before Orbax, which would wait for files that never come."""
    marker = folder / "process_0"
    if probe.cluster.is_primary:
        folder.mkdir(parents=True, exist_ok=True)
        marker.write_text("here")
    probe.cluster.barrier("scratch", probe.experiment.config.health.save_timeout_s)
    blind = np.flatnonzero(~probe.gather(np.array(marker.exists())))
    if blind.size:
        raise Failed(
            f"{_numbered('process', blind)} of {probe.cluster.count} cannot see {folder} of process 0; checkpoints "
            "need a folder that all share: give one with --scratch (a network disk, or gs://BUCKET/FOLDER)"
        )


def _same_bits(a: jax.Array, b: jax.Array) -> bool:
    if a.dtype != b.dtype or a.sharding != b.sharding:
        return False
    pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return all(np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes() for x, y in pairs)


def _step_bytes(compiled: Any) -> int | None:
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    names = ("argument", "output", "temp", "generated_code")
    total = sum(int(getattr(memory, f"{name}_size_in_bytes", 0)) for name in names)
    return total - int(getattr(memory, "alias_size_in_bytes", 0))  # an output in an argument's place


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def _listed(losses: list[float]) -> str:
    return ", ".join(f"{loss:.5g}" for loss in losses)


def _numbered(noun: str, numbers: np.ndarray) -> str:
    more = f" and {len(numbers) - 4} more" if len(numbers) > 4 else ""
    plural = "es" if noun.endswith("s") else "s"
    return f"{noun}{plural if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:4]))}{more}"


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} GiB"


def _mesh_text(experiment: Experiment) -> str:
    axes = sharding.describe_mesh(experiment.mesh.shape)
    return f"{experiment.mesh.size} devices ({axes})" if axes else "1 device"
