"""The pre-flight checks, each a function of the probe; what an earlier one built serves the later ones."""

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import numpy as np

from tinypod import __version__, sharding
from tinypod.check.probe import Failed, Found, Probe, Skipped, losses_of, take_steps
from tinypod.errors import UserError
from tinypod.experiment import Experiment, build
from tinypod.health.memory import is_out_of_memory, step_bytes
from tinypod.health.recompiles import CompileGuard
from tinypod.health.replicas import make_replica_check
from tinypod.runs import storage
from tinypod.runs.checkpoints import Checkpoints
from tinypod.runs.checksums import flatten
from tinypod.runs.saver import about
from tinypod.runs.terminal import amount, duration
from tinypod.runs.terminal import size as size_text
from tinypod.step import draw_batch

COMPARED_STEPS = 3  # on one device and on all; more would measure how fast rounding errors grow
MIN_FALL = 0.01  # of the loss on a batch that is repeated, which has no noise but rounding


def check_data(probe: Probe) -> Found:
    """Nothing here waits for other processes: one whose data is missing must not leave them waiting."""
    if isinstance(probe.config, UserError):
        raise probe.config
    config = probe.config
    probe.experiment = experiment = build(config, console=probe.console)
    experiment.check_batch()
    task = experiment.task
    probe.feed = task.open_feed(experiment.mesh)
    held_out = task.open_evaluation(None).rows
    shards = sharding.num_batch_shards(experiment.mesh)
    parts = f" in {config.accumulation} parts" if config.accumulation > 1 else ""
    return Found(
        f"{task.train_rows:,} training and {held_out:,} held-out {task.unit}, hashes right; batch "
        f"{config.batch_size}{parts} over {_mesh_text(experiment)}: {config.batch_size // shards} rows per device",
        {"train_rows": task.train_rows, "held_out_rows": held_out, "rows_per_device": config.batch_size // shards},
        {
            "the config": _digest(config.model_dump(mode="json", exclude={"data": {"path"}, "compile_cache": True})),
            "the dataset": _digest(dict(task.fingerprint)),
            "the version of tinypod": __version__,
            "the version of JAX": jax.__version__,
        },
    )


def check_rows(probe: Probe) -> Found:
    """The batch of one step, its rows spread over the mesh, against the same batch made on one device."""
    experiment, rows = probe.experiment, probe.experiment.config.batch_size
    probe.needs_devices("it draws every row")
    spread = _draw(experiment, probe.feed(0))
    alone = probe.alone()
    with closing(alone.task.open_feed(alone.mesh)) as feed:
        whole = jax.device_get(_draw(alone, feed(0)))
    held, wrong = _compare_rows(spread, whole, rows)
    times_held = probe.gather(held).sum(axis=0)
    wrong_rows = np.flatnonzero(probe.gather(wrong).any(axis=0))
    if wrong_rows.size:
        raise Failed(f"not as in the batch made on one device: {_numbered('row', wrong_rows)} of {rows}")
    if (odd := np.flatnonzero(times_held != 1)).size:
        raise Failed(f"drawn {times_held[odd[0]]} times instead of once: {_numbered('row', odd)} of {rows}")
    content = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(whole)))
    by_process = probe.cluster.count > 1
    parts = probe.cluster.count if by_process else sharding.num_batch_shards(experiment.mesh)
    groups = "devices" if parts == experiment.mesh.size else "groups of devices"
    return Found(
        f"{parts} {'processes' if by_process else groups} hold {rows} rows, each once, "
        "bit-identical to those of one device",
        {"rows": rows},
        {"the global batch": content.hexdigest()},
    )


def check_step(probe: Probe) -> Found:
    """Compile the step as `train` does, and take a few."""
    experiment = probe.experiment
    began = time.perf_counter()
    probe.compiled = experiment.compile_step(probe.feed(0))
    probe.compile_s = time.perf_counter() - began
    probe.state, sums = take_steps(experiment, probe.compiled, experiment.init(), probe.feed, COMPARED_STEPS)
    probe.losses, probe.grad_norms = losses_of(experiment, sums), [float(part["grad_norm"]) for part in sums]
    return Found(
        f"{experiment.num_weights:,} weights, {experiment.config.model.dtype}; compiled in "
        f"{duration(probe.compile_s)}; losses of {len(sums)} steps {_listed(probe.losses)}, gradient norm "
        f"{amount(probe.grad_norms[0])}, all finite",
        {"weights": experiment.num_weights, "compile_s": probe.compile_s, "first_loss": probe.losses[0]},
    )


def check_replicas(probe: Probe) -> Found:
    """Gradients are not kept, but after one step the first moment is (1 - beta1) times the gradient."""
    experiment = probe.experiment
    probe.needs_devices("it holds the only copy")
    shardings = _replicated_parts(experiment.state_shardings)
    copied = sum(_has_copies(sharding) for sharding in jax.tree.leaves(shardings))
    if not copied:
        raise Skipped("the mesh leaves no array with a copy")
    compare = make_replica_check(experiment.mesh, jax.tree.map(lambda x: x.spec, shardings))
    first, _ = take_steps(experiment, probe.compiled, experiment.init(), probe.feed, 1)
    compare(_replicated_parts(first))
    compare(_replicated_parts(probe.state))
    return Found(
        f"{copied} arrays with copies on {_mesh_text(experiment)} bit-identical: the moments after step 1 "
        f"((1 - beta1) × the gradient), and weights, averages and moments after step {COMPARED_STEPS}",
        {"arrays": copied},
    )


def check_one_device(probe: Probe) -> Found:
    """The gradient's norm, too: Adam's updates would hide a gradient that is too large by a factor."""
    probe.needs_devices("nothing to compare it with")
    try:
        alone = probe.alone()
        with closing(alone.task.open_feed(alone.mesh)) as feed:
            sums = take_steps(alone, alone.compile_step(feed(0)), alone.init(), feed, COMPARED_STEPS)[1]
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise Skipped("the whole batch does not fit one device; try it with a smaller batch_size=") from None
    tolerance = loss_tolerance(probe.experiment.config.model.dtype, jax.default_backend())
    losses = losses_of(alone, sums)
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
    timeout_s = math.ceil(probe.experiment.config.health.save_timeout_s)
    checkpoints = Checkpoints(folder / "checkpoints", cluster=probe.cluster, keep_last=1, timeout_s=timeout_s)
    checkpoints.prepare(probe.experiment.abstract_state)  # compiles what every save needs: not counted
    began = time.perf_counter()
    try:
        checkpoints.save(probe.state, about(probe.experiment))
        checkpoints.wait()
        saved_s = time.perf_counter() - began
        restored = checkpoints.restore(int(probe.state.step), probe.experiment.abstract_state)
    finally:
        checkpoints.close()
    restored_s = time.perf_counter() - began - saved_s
    before, after = flatten(probe.state), flatten(restored)
    wrong = np.array([not _same_bits(before[name], after[name]) for name in before])
    changed = [list(before)[i] for i in np.flatnonzero(probe.gather(wrong).any(axis=0))]
    if changed:
        raise Failed(f"not as saved: {', '.join(changed[:3])} ({len(changed)} of {len(before)} arrays)")
    size = sum(x.nbytes for x in before.values())
    return Found(
        f"{len(before)} arrays, {size_text(size)}, restored bit for bit; saved in {duration(saved_s)}, "
        f"read in {duration(restored_s)}",
        {"arrays": len(before), "bytes": size, "save_s": saved_s, "restore_s": restored_s},
    )


def check_learning(probe: Probe) -> Found:
    """The loss of one batch, over and over, each time with a fresh carry: only the weights can change it. It is the
    same program: the batch's number and the rate without warm-up are its arguments."""
    experiment, state = probe.experiment, probe.experiment.init()
    settings, number = experiment.put_settings(warmup_steps=0), experiment.put(np.int32(0))
    fresh = jax.jit(experiment.task.init_carry, out_shardings=experiment.state_shardings.carry)
    sums = []
    for _ in range(probe.steps):
        state, one = probe.compiled(state, settings, number, probe.feed(0))
        state = state._replace(carry=fresh(state.params))
        sums.append(one)
    losses = losses_of(experiment, jax.device_get(sums))
    fall = 1 - losses[-1] / losses[0]
    text = (
        f"loss of one repeated batch {losses[0]:.4f} → {losses[-1]:.4f}, "
        f"{abs(fall):.1%} {'less' if fall >= 0 else 'more'}, in {len(losses)} steps at the full rate (optimizer."
        f"learning_rate={experiment.config.optimizer.learning_rate:g}, no warm-up)"
    )
    if not fall >= MIN_FALL:
        raise Failed(f"{text}; at least {MIN_FALL:.0%} less was expected. Raise the rate if it is low, or --steps")
    return Found(text, {"first_loss": losses[0], "last_loss": losses[-1], "fall": fall})


def check_one_trace(probe: Probe) -> Found:
    """Steps of the program that `train` runs; also what `check_speed` reports."""
    probe.step_s = []
    experiment, settings = probe.experiment, probe.experiment.put_settings()
    with CompileGuard(lambda: "stepping") as guard:
        compare = _loop_replica_check(probe)
        guard.warm()
        for number in range(probe.steps):
            inputs = experiment.put(np.int32(number)), probe.feed(number)
            began = time.perf_counter()
            try:
                probe.state, sums = probe.compiled(probe.state, settings, *inputs)
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
        f"{amount(1 / seconds)} steps/s (median of {len(probe.step_s)}, each waited for), "
        f"{amount(batch / seconds)} examples/s; compiled in {duration(probe.compile_s)}"
    )
    if (needed := step_bytes(probe.compiled)) is not None:
        figures["step_bytes"] = needed
        text += f"; a step needs {size_text(needed)} per device"
    memory = [device.memory_stats() or {} for device in jax.local_devices()]
    if peak := max((stats.get("peak_bytes_in_use", 0) for stats in memory), default=0):
        figures["peak_bytes"] = peak
        limit = memory[0].get("bytes_limit")
        text += f", all checks at most {size_text(peak)}" + (f" of {size_text(limit)}" if limit else "")
    return Found(text, figures)


def loss_tolerance(dtype: str, backend: str) -> float:
    """Relative; accelerators multiply float32 matrices in fewer bits, so that sums in another order differ more."""
    if dtype == "float32":
        return 1e-4 if backend == "cpu" else 3e-3
    return 3e-2


def _draw(experiment: Experiment, feed: Any) -> Any:
    """The first batch, as the step makes it."""
    draw = jax.jit(
        lambda settings, number, feed: draw_batch(experiment.task, settings, number, feed),
        out_shardings=sharding.over_batch(experiment.mesh),
    )
    return draw(experiment.put_settings(), experiment.put(np.int32(0)), feed)


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


def _loop_replica_check(probe: Probe) -> Callable[[Any], None]:
    """What the loop calls besides the step, first called with the initial weights as it is there."""
    if probe.experiment.config.health.replica_check_every_steps is None:
        return lambda params: None
    compare = make_replica_check(probe.experiment.mesh, probe.experiment.specs)
    compare(probe.experiment.init().params)
    return compare


def _replicated_parts(state: Any) -> dict[str, Any]:
    return {"params": state.params, "opt_state": state.opt_state, "ema": state.ema}


def _has_copies(of: jax.sharding.NamedSharding) -> bool:
    return math.prod(of.mesh.shape[axis] for entry in of.spec for axis in sharding.axes_of(entry)) < of.mesh.size


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


def _mesh_text(experiment: Experiment) -> str:
    axes = sharding.describe_mesh(experiment.mesh.shape)
    return f"{experiment.mesh.size} devices ({axes})" if axes else "1 device"
