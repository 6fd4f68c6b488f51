"""Optimizers, schedules, batch scaling. An Optax chain updates the trained parameters; tables are updated by rows.

Which weights are matrices, for Muon, stands beside the model: `(pattern, Matrix)` on parameter names, as sharding rules
do. Whatever matches none is Adam's.

The rate goes by the step's number, here as in the log: a step that is skipped moves the schedule on. What Adam counts
for its bias correction are updates.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from tinypod.config import Config
from tinypod.sharding import constrain, path_of

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


class AdamPart(Config):
    """Of Muon: for embeddings, heads and biases."""

    learning_rate: NonNegativeFloat = 1e-4
    weight_decay: NonNegativeFloat = 0.0


class MuonConfig(_Optimizer):
    """Momentum made orthogonal (kellerjordan.github.io/posts/muon), for the matrices of the hidden layers: the singular
    values of an update are all about sqrt(max(1, outputs / inputs)) times the rate. Adam has the rest, with the betas,
    the same schedule, and a rate and a decay of its own."""

    kind: Literal["muon"] = "muon"
    momentum: Beta = 0.95
    eps: PositiveFloat = 1e-8
    adam: AdamPart = AdamPart()


OptimizerConfig = Annotated[AdamAtan2Config | AdamWConfig | LionConfig | MuonConfig, Field(discriminator="kind")]


class Matrix(NamedTuple):
    """The dims of a weight that are the inputs of a matrix, and those that are its outputs; any others are a stack of
    matrices, each by itself."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


Matrices = Sequence[tuple[str, Matrix]]


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


def build_optimizer(
    config: OptimizerConfig, batch_size: int, total_steps: int, matrices: Matrices = (), mesh: Mesh | None = None
) -> Optimizer:
    """`matrices`: what Muon takes. `mesh`: over which they may be split."""
    scale = batch_scale(config.batch_scaling, batch_size)
    settings = {
        "learning_rate": config.learning_rate * scale,
        "weight_decay": config.weight_decay,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps if isinstance(config, AdamWConfig | MuonConfig) else 0.0,
        "clip_norm": config.clip_norm or 0.0,
        "warmup_steps": float(config.schedule.warmup_steps),
        "total_steps": float(total_steps),
        "min_ratio": config.schedule.min_ratio if isinstance(config.schedule, Cosine) else 1.0,
        "table_learning_rate": config.tables.learning_rate * scale,
        "table_weight_decay": config.tables.weight_decay,
    }

    if isinstance(config, MuonConfig):
        settings |= {
            "momentum": config.momentum,
            "adam_learning_rate": config.adam.learning_rate * scale,
            "adam_weight_decay": config.adam.weight_decay,
        }

    def direction(values: dict[str, Any]) -> optax.GradientTransformation:
        beta1, beta2 = values["beta1"], values["beta2"]
        match config:
            case MuonConfig():
                return scale_by_muon(values["momentum"], matrices, mesh)
            case AdamAtan2Config():
                return scale_by_adam_atan2(beta1, beta2)
            case AdamWConfig():
                return optax.scale_by_adam(beta1, beta2, values["eps"])
            case LionConfig():
                return optax.scale_by_lion(beta1, beta2)

    def chain(values: dict[str, Any], share: Array) -> optax.GradientTransformation:
        clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(values["clip_norm"])
        move = (
            direction(values),
            optax.add_decayed_weights(values["weight_decay"]),
            optax.scale(-values["learning_rate"] * share),
        )
        if not isinstance(config, MuonConfig):
            return optax.chain(clip, *move)
        adam = optax.chain(
            optax.scale_by_adam(values["beta1"], values["beta2"], values["eps"]),
            optax.add_decayed_weights(values["adam_weight_decay"]),
            optax.scale(-values["adam_learning_rate"] * share),
        )
        parts = {"muon": optax.chain(*move), "adam": adam}
        return optax.chain(clip, optax.partition(parts, lambda params: _parts_of(params, matrices)))

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


def _parts_of(params: Tree, matrices: Matrices) -> Tree:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "adam" if find_matrix(matrices, path_of(path)) is None else "muon", params
    )


def find_matrix(matrices: Matrices, path: str) -> Matrix | None:
    return next((matrix for pattern, matrix in matrices if re.fullmatch(pattern, path)), None)


class MuonState(NamedTuple):
    mu: Any


def scale_by_muon(
    momentum: Array | float, matrices: Matrices, mesh: Mesh | None = None
) -> optax.GradientTransformation:
    """Nesterov's momentum, orthogonal matrix by matrix."""

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def direction(path: Any, gradient: Array, mu: Array) -> Array:
        matrix = find_matrix(matrices, path_of(path))
        assert matrix is not None, path
        ahead = momentum * mu + (1 - momentum) * gradient  # its length does not matter: no bias to correct
        return _orthogonal_update(ahead, matrix, mesh)

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        mu = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state.mu, grads)
        return jax.tree_util.tree_map_with_path(direction, grads, mu), MuonState(mu)

    return optax.GradientTransformation(init, update)


def _orthogonal_update(update: Array, matrix: Matrix, mesh: Mesh | None) -> Array:
    if mesh is not None and mesh.shape["fsdp"] * mesh.shape["tensor"] > 1:
        # Made whole once: split, each of the products below would exchange what its other factor lacks.
        update = constrain(update, PartitionSpec(), mesh)
    stack = [dim for dim in range(update.ndim) if dim not in matrix.inputs + matrix.outputs]
    order = [*stack, *matrix.inputs, *matrix.outputs]
    ordered = update.transpose(order)
    num_inputs, num_outputs = (math.prod(update.shape[dim] for dim in dims) for dims in matrix)
    flat = orthogonalise(ordered.reshape(-1, num_inputs, num_outputs)) * max(1.0, num_outputs / num_inputs) ** 0.5
    return flat.reshape(ordered.shape).transpose([order.index(dim) for dim in range(update.ndim)])


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # fast rather than exact: singular values end between about 0.7 and 1.2
NEWTON_SCHULZ_STEPS = 5


def orthogonalise(x_BMN: Array) -> Array:
    """Each matrix with its singular values brought near 1, by products alone; one of zeros stays."""
    a, b, c = NEWTON_SCHULZ
    wide = x_BMN.shape[1] <= x_BMN.shape[2]
    x = x_BMN if wide else jnp.swapaxes(x_BMN, 1, 2)  # the smaller side is squared
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True)) + 1e-12)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ jnp.swapaxes(x, 1, 2)
        x = a * x + (b * square + c * (square @ square)) @ x
    return x if wide else jnp.swapaxes(x, 1, 2)


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
