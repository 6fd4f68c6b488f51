"""Optimizers, schedules, batch scaling. An Optax chain updates the trained parameters; tables are updated by rows."""

from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from tinypod.config import Config

Beta = Annotated[float, Field(ge=0, lt=1)]


class Constant(Config):
    """From 0 to the full rate over the warm-up, then constant."""

    kind: Literal["constant"] = "constant"
    warmup_steps: NonNegativeInt = 0


class Cosine(Config):
    """From 0 to the full rate over the warm-up, then down a half cosine to `min_ratio` of it at the last step."""

    kind: Literal["cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0


class NoScaling(Config):
    kind: Literal["none"] = "none"


class BatchScaling(Config):
    """Rates are stated for `base_batch` and grow with batch / base_batch, or with its square root."""

    kind: Literal["linear", "sqrt"]
    base_batch: PositiveInt


class TableOptimizer(Config):
    """Sign-SGD for the rows of a table that a batch looked up."""

    learning_rate: NonNegativeFloat = 1e-4
    weight_decay: NonNegativeFloat = 1.0


class _Optimizer(Config):
    learning_rate: NonNegativeFloat
    weight_decay: NonNegativeFloat = 0.0
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    clip_norm: PositiveFloat | None = None
    schedule: Annotated[Constant | Cosine, Field(discriminator="kind")] = Constant()
    batch_scaling: Annotated[NoScaling | BatchScaling, Field(discriminator="kind")] = NoScaling()
    tables: TableOptimizer = TableOptimizer()


class AdamAtan2Config(_Optimizer):
    """Adam with atan2(m, sqrt(v)) in place of m / (sqrt(v) + eps): no eps, steps bounded by the rate."""

    kind: Literal["adam_atan2"] = "adam_atan2"


class AdamWConfig(_Optimizer):
    kind: Literal["adamw"] = "adamw"
    eps: PositiveFloat = 1e-8


OptimizerConfig = Annotated[AdamAtan2Config | AdamWConfig, Field(discriminator="kind")]


class RowGradients(NamedTuple):
    """Gradients of table rows as they were looked up: ids [R], with repeats, and gradients [R, E]."""

    ids: Array
    values: Array


class Optimizer(NamedTuple):
    """The rate is a function of the step; the chain turns gradients into updates; rows are updated on their own."""

    chain: optax.GradientTransformation
    learning_rate: optax.Schedule
    table_learning_rate: optax.Schedule
    table_weight_decay: float


def build_optimizer(config: OptimizerConfig, batch_size: int, total_steps: int) -> Optimizer:
    schedule = make_schedule(config.schedule, total_steps)
    scale = batch_scale(config.batch_scaling, batch_size)

    def learning_rate(step: Any) -> Any:
        return config.learning_rate * scale * schedule(step)

    def table_learning_rate(step: Any) -> Any:
        return config.tables.learning_rate * scale * schedule(step)

    direction = (
        scale_by_adam_atan2(config.beta1, config.beta2)
        if isinstance(config, AdamAtan2Config)
        else optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    )
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    chain = optax.chain(
        clip,
        direction,
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return Optimizer(chain, learning_rate, table_learning_rate, config.tables.weight_decay)


def make_schedule(config: Constant | Cosine, total_steps: int) -> optax.Schedule:
    """Fraction of the full rate at an update, counted from 0; the first update already has a share of the warm-up."""

    def schedule(step: Any) -> Any:
        done = jnp.asarray(step, jnp.float32) + 1
        warm = jnp.minimum(done / max(config.warmup_steps, 1), 1.0)
        if isinstance(config, Constant):
            return warm
        span = max(total_steps - config.warmup_steps, 1)
        progress = jnp.clip((done - config.warmup_steps) / span, 0.0, 1.0)
        return warm * (config.min_ratio + (1 - config.min_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))

    return schedule


def batch_scale(config: NoScaling | BatchScaling, batch_size: int) -> float:
    if isinstance(config, NoScaling):
        return 1.0
    ratio = batch_size / config.base_batch
    return ratio if config.kind == "linear" else ratio**0.5


class AdamAtan2State(NamedTuple):
    updates: Array  # int32: how many were made
    mu: Any
    nu: Any


def scale_by_adam_atan2(beta1: float, beta2: float) -> optax.GradientTransformation:
    def init(params: Any) -> AdamAtan2State:
        return AdamAtan2State(
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(jnp.zeros_like, params),
        )

    def update(grads: Any, state: AdamAtan2State, params: Any = None) -> tuple[Any, AdamAtan2State]:
        del params
        count = state.updates + 1
        mu = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * jnp.square(g), state.nu, grads)
        unbias1, unbias2 = (1 - jnp.float32(beta) ** count.astype(jnp.float32) for beta in (beta1, beta2))
        updates = jax.tree.map(lambda m, v: jnp.arctan2(m / unbias1, jnp.sqrt(v / unbias2)), mu, nu)
        return updates, AdamAtan2State(count, mu, nu)

    return optax.GradientTransformation(init, update)


def update_rows(table: Array, grads: RowGradients, learning_rate: Array, weight_decay: float) -> Array:
    """Sign-SGD on the rows present, the gradients of a row that occurs more than once added first.

    They are added in an array as long as the table or as the batch, whichever is shorter: on several devices that array
    is what they exchange.
    """
    if table.shape[0] <= grads.ids.shape[0]:
        summed = jnp.zeros_like(table).at[grads.ids].add(grads.values)
        present = jnp.zeros(table.shape[0], jnp.int32).at[grads.ids].add(1) > 0
        moved = table * (1 - learning_rate * weight_decay) - learning_rate * jnp.sign(summed)
        return jnp.where(present[:, None], moved, table)
    absent = table.shape[0]  # out of range: dropped by the scatter
    ids, where = jnp.unique(grads.ids, size=grads.ids.shape[0], fill_value=absent, return_inverse=True)
    summed = jax.ops.segment_sum(grads.values, where.reshape(-1), num_segments=ids.shape[0])
    rows = table.at[ids].get(mode="clip") * (1 - learning_rate * weight_decay) - learning_rate * jnp.sign(summed)
    return table.at[ids].set(rows, mode="drop")
