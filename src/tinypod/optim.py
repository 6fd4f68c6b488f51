"""Optimizers, schedules, batch scaling. An Optax chain updates the trained parameters; tables are updated by rows.

The rate goes by the step's number, here as in the log: a step that is skipped moves the schedule on. What Adam counts
for its bias correction are updates.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from tinypod.config import Config

Tree = Any  # a nested dict of arrays
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


class LionConfig(_Optimizer):
    """The sign of a blend of momentum and gradient (arXiv 2302.06675): every weight moves by the rate. Its authors take
    a rate 3 to 10 times smaller than AdamW's, and a decay as much larger. It keeps one moment."""

    kind: Literal["lion"] = "lion"
    beta1: Beta = 0.9  # of the blend
    beta2: Beta = 0.99  # of the momentum


OptimizerConfig = Annotated[AdamAtan2Config | AdamWConfig | LionConfig, Field(discriminator="kind")]


class RowGradients(NamedTuple):
    """Gradients of table rows as they were looked up: ids [R], with repeats, and gradients [R, E]."""

    ids: Array
    values: Array


class Optimizer(NamedTuple):
    """What is fixed in the compiled step; rates, decays and betas are its `settings`, given to `update` as arrays."""

    settings: dict[str, float]
    init: Callable[[Tree], Tree]  # trained parameters -> state
    update: Callable[..., tuple[Tree, Tree]]  # (grads, state, trained parameters, settings, share) -> updates, state
    share: Callable[[dict[str, Array], Array], Array]  # (settings, step) -> share of the full rate at that step


def build_optimizer(config: OptimizerConfig, batch_size: int, total_steps: int) -> Optimizer:
    scale = batch_scale(config.batch_scaling, batch_size)
    settings = {
        "learning_rate": config.learning_rate * scale,
        "weight_decay": config.weight_decay,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps if isinstance(config, AdamWConfig) else 0.0,
        "clip_norm": config.clip_norm or 0.0,
        "warmup_steps": float(config.schedule.warmup_steps),
        "total_steps": float(total_steps),
        "min_ratio": config.schedule.min_ratio if isinstance(config.schedule, Cosine) else 1.0,
        "table_learning_rate": config.tables.learning_rate * scale,
        "table_weight_decay": config.tables.weight_decay,
    }

    def direction(values: dict[str, Any]) -> optax.GradientTransformation:
        beta1, beta2 = values["beta1"], values["beta2"]
        match config:
            case AdamAtan2Config():
                return scale_by_adam_atan2(beta1, beta2)
            case AdamWConfig():
                return optax.scale_by_adam(beta1, beta2, values["eps"])
            case LionConfig():
                return optax.scale_by_lion(beta1, beta2)

    def chain(values: dict[str, Any], share: Array) -> optax.GradientTransformation:
        return optax.chain(
            optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(values["clip_norm"]),
            direction(values),
            optax.add_decayed_weights(values["weight_decay"]),
            optax.scale(-values["learning_rate"] * share),
        )

    def update(grads: Tree, state: Tree, params: Tree, values: dict[str, Array], share: Array) -> tuple[Tree, Tree]:
        with jax.numpy_dtype_promotion("standard"):  # Optax raises betas that are arrays to the power of an integer
            updates, state = chain(values, share).update(grads, state, params)
        return updates, state

    return Optimizer(settings, chain(settings, jnp.float32(1)).init, update, make_schedule(config.schedule))


def make_schedule(config: Constant | Cosine) -> Callable[[dict[str, Array], Array], Array]:
    """The share of the full rate at a step, counted from 0; the first step already has a share of the warm-up."""

    def share(settings: dict[str, Array], step: Array) -> Array:
        done, warmup = step.astype(jnp.float32) + 1, settings["warmup_steps"]
        warm = jnp.minimum(done / jnp.maximum(warmup, 1.0), 1.0)
        if isinstance(config, Constant):
            return warm
        progress = jnp.clip((done - warmup) / jnp.maximum(settings["total_steps"] - warmup, 1.0), 0.0, 1.0)
        least = settings["min_ratio"]
        return warm * (least + (1 - least) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))

    return share


def batch_scale(config: NoScaling | BatchScaling, batch_size: int) -> float:
    if isinstance(config, NoScaling):
        return 1.0
    ratio = batch_size / config.base_batch
    return ratio if config.kind == "linear" else ratio**0.5


class AdamAtan2State(NamedTuple):
    updates: Array  # int32: how many were made
    mu: Any
    nu: Any


def scale_by_adam_atan2(beta1: Array | float, beta2: Array | float) -> optax.GradientTransformation:
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
        unbias1, unbias2 = (1 - beta ** count.astype(jnp.float32) for beta in (beta1, beta2))
        updates = jax.tree.map(lambda m, v: jnp.arctan2(m / unbias1, jnp.sqrt(v / unbias2)), mu, nu)
        return updates, AdamAtan2State(count, mu, nu)

    return optax.GradientTransformation(init, update)


def update_rows(table: Array, grads: RowGradients, learning_rate: Array, weight_decay: Array) -> Array:
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
