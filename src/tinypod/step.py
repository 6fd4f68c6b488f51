"""The training state and the step `(state, settings, number, feed) -> (state, sums)`: pure, compiled by its callers.

All randomness of a step comes from the seed and the number of its batch, which the host gives: a state, a number and
the settings say everything about what follows. The number is the step's, plus the batches left out before it.

`Settings` are what runs of one study may vary without another program: arrays, not constants of the program. With a
leading dimension on state and settings, `vmap` makes the step of many runs.

Each slice of the mesh's `data` axis differentiates its own rows, and gradients are added over the axis once a step, in
float32. The partitioner, left alone, adds them at every use of a weight: in bfloat16, in every cycle.

A step whose loss or gradients are not finite changes nothing but the step's number, and is counted in `sums`.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from tinypod.errors import UserError
from tinypod.optim import Optimizer, RowGradients, update_rows
from tinypod.sharding import is_spec, path_of, stage_specs
from tinypod.tasks.task import Draw, Task, Tree, is_trained, merge, root_key, select


class TrainState(NamedTuple):
    """Everything that a run carries from one step to the next."""

    step: Array  # int32: steps done
    params: dict[str, Tree]
    opt_state: Tree
    ema: dict[str, Tree]  # averages of the trained parameters; empty without EMA
    carry: Tree


class Settings(NamedTuple):
    """Scalars, float32 but for the seed; for runs packed into one program, one of each a run."""

    seed: Array  # uint32
    ema_decay: Array  # 0 where no averages are kept
    optimizer: dict[str, Array]
    task: dict[str, Array]


def make_settings(task: Task, optimizer: Optimizer, seed: int, ema_decay: float | None) -> Settings:
    """On the host."""
    settings = Settings(seed, ema_decay or 0.0, optimizer.settings, dict(task.varied))  # type: ignore[arg-type]
    return jax.tree.map(np.float32, settings)._replace(seed=np.uint32(seed))


def make_init(task: Task, optimizer: Optimizer, ema: bool) -> Callable[[Settings], TrainState]:
    def init(settings: Settings) -> TrainState:
        params = task.init_params(root_key(settings.seed, "weights"))
        trained = select_trained(task, params)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(trained),
            ema=jax.tree.map(jnp.copy, trained) if ema else {},  # a copy: the two are donated apart
            carry=task.init_carry(params),
        )

    return init


def select_trained(task: Task, params: dict[str, Tree]) -> dict[str, Tree]:
    return select(params, lambda path: is_trained(task, path))


def draw_batch(task: Task, settings: Settings, number: Array, feed: Tree) -> Tree:
    """The batch of a number."""
    key = jax.random.fold_in(root_key(settings.seed, "batches"), number)
    return task.draw(feed, Draw(number, key, root_key(settings.seed, "views")), settings.task)


def differentiated(task: Task, params: dict[str, Tree]) -> Callable[[str], bool]:
    """Which leaves of the prepared parameters the loss is differentiated by: trained ones that are still there, and, if
    others of them went into new leaves, those."""

    def paths(tree: Tree) -> set[str]:
        return {path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}

    given, trained = paths(params), paths(select_trained(task, params))
    prepared = paths(jax.eval_shape(task.prepare, params))
    wanted = trained & prepared | (prepared - given if trained - prepared else set())
    return lambda path: path in wanted


def bind_loss(
    task: Task, prepared: dict[str, Tree], wanted: Callable[[str], bool], carry: Tree, batch: Tree, varied: Tree
) -> tuple[Callable[[Tree, Tree], Any], tuple[Tree, Tree], dict[str, Array]]:
    """The loss of a batch as a function of those prepared parameters that it is differentiated by and the table rows it
    looks up, those two, and the rows' ids."""
    carry = task.begin(prepared, carry, batch)
    ids = task.lookup(carry)

    def loss(chosen: Tree, table_rows: Tree) -> Any:
        return task.loss(merge(prepared, chosen), table_rows, carry, batch, varied)

    return loss, (select(prepared, wanted), {name: prepared[name][ids[name]] for name in ids}), ids


def make_train_step(
    task: Task, optimizer: Optimizer, accumulation: int, ema: bool, mesh: Mesh, specs: Tree = None
) -> Callable[[TrainState, Settings, Array, Tree], tuple[TrainState, dict[str, Array]]]:
    """The step: draw, differentiate part by part, update, average. `specs`: of the parameters; on one
    device there are none."""
    # The stages of a pipeline take the parts of a batch themselves, one after the other.
    parts = 1 if mesh.shape["pipeline"] > 1 else accumulation
    differentiate = _over_axes(task, _make_differentiate(task, parts), mesh, specs)

    def update(
        state: TrainState, settings: Settings, share: Array, grads: Tree, row_grads: dict[str, RowGradients]
    ) -> TrainState:
        trained, values = select_trained(task, state.params), settings.optimizer
        updates, opt_state = optimizer.update(grads, state.opt_state, trained, values, share)
        updates = _scale_updates(task, updates, settings.task)
        trained = optax.apply_updates(trained, updates)
        table_rate = values["table_learning_rate"] * share
        tables = {
            name: update_rows(state.params[name], row_grads[name], table_rate, values["table_weight_decay"])
            for name in row_grads
        }
        decay = settings.ema_decay
        averages = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, state.ema, trained) if ema else {}
        return state._replace(params=merge(state.params, trained | tables), opt_state=opt_state, ema=averages)

    def train_step(
        state: TrainState, settings: Settings, number: Array, feed: Tree
    ) -> tuple[TrainState, dict[str, Array]]:
        settings = settings._replace(task=task.at_step(settings.task, state.step))
        batch = draw_batch(task, settings, number, feed)
        grads, sums, carry, row_grads = differentiate(state.params, state.carry, batch, settings.task)
        # The loss is a sum, and its gradients are divided here, in float32: a mean's would underflow in float16.
        weight = jnp.where(sums["weight"] > 0, sums["weight"], 1.0)
        grads = jax.tree.map(lambda g: g / weight, grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(sums["loss"] + norm + sum(jnp.sum(rows.values) for rows in row_grads.values()))

        share = optimizer.share(settings.optimizer, state.step)
        updated = update(state, settings, share, grads, row_grads)._replace(carry=carry)
        # The carry stays too: what made the loss non-finite may be in the new one.
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
        sums = jax.tree.map(lambda x: jnp.where(finite, x, 0), sums | {"grad_norm": norm, "updates": jnp.float32(1)})
        facts = {"skipped": 1 - sums["updates"], "learning_rate": settings.optimizer["learning_rate"] * share}
        return kept._replace(step=state.step + 1), sums | facts

    return train_step


def make_train_steps(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Steps on the batches of several numbers, one after the other, in one program: the host is asked for nothing in
    between. Each of the sums has a leading dimension for the steps. A number below 0 is no step: it is computed and
    dropped, so that any number of steps up to that of the program is this one program, and a GPU need not ask the host
    before each of them whether to go on."""

    def train_steps(state: TrainState, settings: Settings, numbers: Array, feed: Tree) -> tuple[TrainState, Tree]:
        def step(state: TrainState, number: Array) -> tuple[TrainState, dict[str, Array]]:
            stepped, sums = train_step(state, settings, number, feed)
            return jax.tree.map(lambda new, old: jnp.where(number >= 0, new, old), stepped, state), sums

        return jax.lax.scan(step, state, numbers)

    return train_steps


def _scale_updates(task: Task, updates: Tree, varied: dict[str, Array]) -> Tree:
    """What is not to move now has a factor of 0: an argument of the program, so that changing it compiles nothing."""

    def scale(key_path: tuple[Any, ...], update: Array) -> Array:
        path = path_of(key_path)
        for factor in (varied[name] for pattern, name in task.scaled if re.fullmatch(pattern, path)):
            update = update * factor
        return update

    return jax.tree_util.tree_map_with_path(scale, updates)


def _make_differentiate(task: Task, accumulation: int) -> Callable[..., tuple[Tree, ...]]:
    """(params, carry, batch, varied) -> gradients, sums, carry, gradients of table rows; part by part."""

    def differentiate(params: dict[str, Tree], carry: Tree, batch: Tree, varied: Tree) -> tuple[Tree, ...]:
        """The loss is differentiated by prepared and lowered parameters, part by part; gradients are added up in the
        dtype that they had before, float32, and go back through `prepare` once."""
        wanted = differentiated(task, params)

        def prepare(trained: Tree) -> Tree:
            return select(task.prepare(merge(params, trained)), wanted)

        chosen, pull_back = jax.vjp(prepare, select_trained(task, params))
        lowered = task.lower(merge(task.prepare(params), chosen))
        if accumulation == 1:
            grads, *rest = gradients(lowered, wanted, carry, batch, varied)
        else:
            zeros = jax.tree.map(jnp.zeros_like, chosen)
            grads, *rest = accumulate(zeros, lowered, wanted, carry, batch, varied)
        return *pull_back(_like(grads, chosen)), *rest

    def gradients(prepared: dict[str, Tree], wanted: Any, carry: Tree, batch: Tree, varied: Tree) -> Any:
        loss, arguments, ids = bind_loss(task, prepared, wanted, carry, batch, varied)
        (grads, row_grads), (carry, sums) = jax.grad(loss, argnums=(0, 1), has_aux=True)(*arguments)
        return grads, sums, carry, {name: RowGradients(ids[name], row_grads[name]) for name in ids}

    def accumulate(
        zeros: Tree, prepared: dict[str, Tree], wanted: Any, carry: Tree, batch: Tree, varied: Tree
    ) -> tuple[Tree, ...]:
        """The same over parts of the rows, one after the other.

        Part i takes every accumulation-th row from the i-th on: each device of the `fsdp` axis then has its share of
        every part, where parts of neighbouring rows would lie on few devices and be computed by all.
        """
        parts = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, accumulation, *x.shape[1:]), 0, 1), (carry, batch))

        def add(total: Tree, part: Tree) -> tuple[Tree, Tree]:
            grads, *rest = gradients(prepared, wanted, part[0], part[1], varied)
            return jax.tree.map(jnp.add, total, _like(grads, total)), rest

        grads, (sums, carry, row_grads) = jax.lax.scan(add, zeros, parts)
        carry, row_grads = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), (carry, row_grads))
        return grads, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums), carry, row_grads

    return differentiate


def _like(tree: Tree, other: Tree) -> Tree:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)


def _over_axes(task: Task, differentiate: Callable[..., Any], mesh: Mesh, specs: Tree) -> Callable[..., Any]:
    """Each slice of the `data` axis on its own rows, each stage of the `pipeline` axis with its own layers; gradients
    and sums are added up, once. XLA's partitioner does not take an axis of one device, where there is nothing to add.
    """
    axes = [axis for axis in ("data", "pipeline") if mesh.shape[axis] > 1]
    if not axes:
        return differentiate
    split, whole = PartitionSpec("data" if "data" in axes else None), PartitionSpec()
    of_params = stage_specs(specs) if "pipeline" in axes else jax.tree.map(lambda _: whole, specs, is_leaf=is_spec)
    of_grads = select_trained(task, of_params)

    def add(gradient: Array, spec: PartitionSpec) -> Array:
        others = tuple(axis for axis in axes if axis not in spec)
        return jax.lax.psum(gradient, others) if others else gradient

    def one_slice(params: dict[str, Tree], carry: Tree, batch: Tree, varied: Tree) -> tuple[Tree, ...]:
        grads, sums, *of_rows = differentiate(params, carry, batch, varied)
        return jax.tree.map(add, grads, of_grads), jax.lax.psum(sums, tuple(axes)), *of_rows

    return jax.shard_map(
        one_slice,
        mesh=mesh,
        axis_names=set(axes),  # the other axes are left to the partitioner
        in_specs=(of_params, split, split, whole),
        out_specs=(of_grads, whole, split, split),
        check_vma=False,
    )


def evaluation_params(params: dict[str, Tree], ema: dict[str, Tree], weights: str) -> dict[str, Tree]:
    """The parameters that evaluation uses: `live`, or `ema` where averages are kept."""
    if weights == "ema" and not ema:
        raise UserError("this run keeps no averages (ema_decay is null); use the live weights")
    return merge(params, ema) if weights == "ema" else params
