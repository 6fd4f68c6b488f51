"""The training state and the step `(state, source) -> (state, sums)`; pure functions, compiled by their callers.

All randomness of a step comes from the seed and the number of its batch, so that a state says everything about what
follows. A batch's number is the step's, unless batches are left out: `source[SKIPPED]` names them.

Each slice of the mesh's `data` axis differentiates its own rows, and gradients are added over the axis once a step, in
float32. The partitioner, left alone, adds them at every use of a weight: in bfloat16, in every cycle.

A step whose loss or gradients are not finite changes nothing but the step's number, and is counted in `sums`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from tinypod.errors import UserError
from tinypod.optim import Optimizer, RowGradients, update_rows
from tinypod.tasks.task import Task, Tree

SKIPPED = "skipped_batches"  # int32 [n, 2]: first number and count, by number; rows of zeros leave nothing out


class TrainState(NamedTuple):
    """Everything that a run carries from one step to the next."""

    step: Array  # int32: updates done
    params: dict[str, Tree]
    opt_state: Tree
    ema: dict[str, Tree]  # averages of the trained parameters; empty without EMA
    carry: Tree


def make_init(task: Task, optimizer: Optimizer, seed: int, ema: bool) -> Callable[[], TrainState]:
    def init() -> TrainState:
        params = task.init_params(jax.random.fold_in(jax.random.key(seed), 0))
        trained = select_trained(task, params)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.chain.init(trained),
            ema=jax.tree.map(jnp.copy, trained) if ema else {},  # a copy: the two are donated apart
            carry=task.init_carry(params),
        )

    return init


def select_trained(task: Task, params: dict[str, Tree]) -> dict[str, Tree]:
    return {name: value for name, value in params.items() if name not in (*task.frozen, *task.tables)}


def bind_loss(
    task: Task, params: dict[str, Tree], carry: Tree, batch: Tree
) -> tuple[Callable[[Tree, Tree], Any], tuple[Tree, Tree], dict[str, Array]]:
    """The loss of a batch as a function of the trained parameters and the table rows it looks up, those two, and the
    rows' ids."""
    carry = task.begin(params, carry, batch)
    ids = task.lookup(carry)

    def loss(trained: Tree, rows: Tree) -> Any:
        return task.loss(params | trained, rows, carry, batch)

    return loss, (select_trained(task, params), {name: params[name][ids[name]] for name in ids}), ids


def make_train_step(
    task: Task, optimizer: Optimizer, seed: int, batch_size: int, accumulation: int, ema_decay: float | None, mesh: Mesh
) -> Callable[[TrainState, Tree], tuple[TrainState, dict[str, Array]]]:
    """The step: draw, differentiate part by part, update, average."""

    def gradients(
        params: dict[str, Tree], carry: Tree, batch: Tree
    ) -> tuple[Tree, Tree, Tree, dict[str, RowGradients]]:
        loss, arguments, ids = bind_loss(task, params, carry, batch)
        (_, (carry, sums)), (grads, row_grads) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arguments)
        return grads, sums, carry, {name: RowGradients(ids[name], row_grads[name]) for name in ids}

    def accumulate(
        params: dict[str, Tree], carry: Tree, batch: Tree
    ) -> tuple[Tree, Tree, Tree, dict[str, RowGradients]]:
        """The same over parts of the rows, one after the other.

        Part i takes every accumulation-th row from the i-th on: each device of the `fsdp` axis then has its share of
        every part, where parts of neighbouring rows would lie on few devices and be computed by all.
        """
        parts = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, accumulation, *x.shape[1:]), 0, 1), (carry, batch))
        zeros = jax.tree.map(jnp.zeros_like, select_trained(task, params))

        def add(total: Tree, part: Tree) -> tuple[Tree, Tree]:
            grads, *rest = gradients(params, *part)
            return jax.tree.map(jnp.add, total, grads), rest

        grads, (sums, carry, row_grads) = jax.lax.scan(add, zeros, parts)
        carry, row_grads = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), (carry, row_grads))
        return grads, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums), carry, row_grads

    differentiate = _over_data_axis(gradients if accumulation == 1 else accumulate, mesh)

    def update(state: TrainState, grads: Tree, row_grads: dict[str, RowGradients], carry: Tree) -> TrainState:
        trained = select_trained(task, state.params)
        updates, opt_state = optimizer.chain.update(grads, state.opt_state, trained)
        trained = optax.apply_updates(trained, updates)
        tables = {
            name: update_rows(
                state.params[name],
                row_grads[name],
                optimizer.table_learning_rate(state.step),
                optimizer.table_weight_decay,
            )
            for name in row_grads
        }
        ema = jax.tree.map(lambda e, p: ema_decay * e + (1 - ema_decay) * p, state.ema, trained) if ema_decay else {}
        return TrainState(state.step, state.params | trained | tables, opt_state, ema, carry)

    def train_step(state: TrainState, source: Tree) -> tuple[TrainState, dict[str, Array]]:
        number = batch_number(state.step, source.get(SKIPPED))
        batch = task.draw(source, jax.random.fold_in(jax.random.key(seed), number + 1))  # 0 was for the weights
        grads, sums, carry, row_grads = differentiate(state.params, state.carry, batch)
        # The loss is a sum, and its gradients are divided here, in float32: a mean's would underflow in float16.
        grads = jax.tree.map(lambda g: g / batch_size, grads)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(sums["loss"] + norm + sum(jnp.sum(rows.values) for rows in row_grads.values()))

        updated = update(state, grads, row_grads, carry)
        # The carry stays too: what made the loss non-finite may be in the new one.
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
        sums = jax.tree.map(lambda x: jnp.where(finite, x, 0), sums | {"grad_norm": norm, "updates": jnp.float32(1)})
        return kept._replace(step=state.step + 1), sums | {"skipped": 1 - sums["updates"]}

    return train_step


def _over_data_axis(differentiate: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Each slice of the `data` axis on its own rows; gradients and sums are added up, once. XLA's partitioner does not
    take an axis of one device, where there is nothing to add."""
    if mesh.shape["data"] == 1:
        return differentiate

    def one_slice(params: dict[str, Tree], carry: Tree, batch: Tree) -> tuple[Tree, ...]:
        grads, sums, *rows = differentiate(params, carry, batch)
        return *jax.lax.psum((grads, sums), "data"), *rows

    whole, rows = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(
        one_slice,
        mesh=mesh,
        axis_names={"data"},  # the other axes are left to the partitioner
        in_specs=(whole, rows, rows),
        out_specs=(whole, whole, rows, rows),
        check_vma=False,
    )


def batch_number(step: Array, skipped: Array | None) -> Array:
    """The number of a step's batch: the step's own, and on by as many as are left out before it."""
    number = step
    for first, count in () if skipped is None else skipped:
        number = jnp.where(number >= first, number + count, number)
    return number


def evaluation_params(state: TrainState, weights: str) -> dict[str, Tree]:
    """The parameters that evaluation uses: `live`, or `ema` where averages are kept."""
    if weights == "ema" and not state.ema:
        raise UserError("this run keeps no averages (ema_decay is null); use the live weights")
    return state.params | state.ema if weights == "ema" else state.params
