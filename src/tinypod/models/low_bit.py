"""Weights of few bits: W = levels[index] ⊙ (A diag(g) B), elementwise, with the columns of A and the rows of B
normalised.

A linear leaf is a dict with `index` uint8 [..., *in, *out], `A` [..., *out, r], `B` [..., r, *in] and `g` [..., r];
leading dimensions are layers. Levels are 2^bits numbers from -1 to 1, equally spaced, none of them zero. `index` never
changes in training; A, B and g do. The effective weight is formed once for a batch: rank by rank, as the formula is
written for some chips, costs r times the arithmetic.

Where weights are trained straight through, a leaf has `latent` float32 in place of `index`: the indices are always
those nearest to it under the scales at hand, so that none are stored which could be of another step.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field, PositiveInt

from tinypod.config import Config

EPSILON = 1e-6  # below which a column is not scaled up
Bits = Annotated[int, Field(ge=2, le=8)]
Leaf = dict[str, Array]


class LowBit(Config):
    """Bits of an index, and the rank of the scales, for the two kinds of layers."""

    mlp_bits: Bits = 4
    mlp_rank: PositiveInt = 32
    attention_bits: Bits = 4
    attention_rank: PositiveInt = 32
    group_size: PositiveInt = 32  # inputs that share a scale in the initialisation
    fit_rounds: Annotated[int, Field(ge=0)] = 4  # of the initialisation: scales by least squares, then indices again


PRESETS: dict[str, LowBit] = {
    "q4_r32": LowBit(),
    "q4a4": LowBit(mlp_rank=4, attention_rank=4),
    "q2a4": LowBit(mlp_bits=2, attention_rank=8),
    "q2a2": LowBit(mlp_bits=2, attention_bits=2),
}
Preset = Literal["q4_r32", "q4a4", "q2a4", "q2a2"]


def levels(bits: int) -> Array:
    return jnp.linspace(-1.0, 1.0, 2**bits, dtype=jnp.float32)


def is_low_bit(leaf: Any) -> bool:
    return isinstance(leaf, dict) and ("index" in leaf or "latent" in leaf)


def init(key: Array, layers: int, inputs: Sequence[int], outputs: Sequence[int], bits: int, rank: int) -> Leaf:
    """Random ones with the spread of a usual initialisation: for shapes, plans and timings."""
    index_key, a_key, b_key = jax.random.split(key, 3)
    fan_out = math.prod(outputs)
    spread = jnp.sqrt(jnp.mean(levels(bits) ** 2))
    # Normalised columns and rows have entries of about 1/sqrt(fan_out) and 1/sqrt(fan_in).
    size = math.sqrt(fan_out / rank) / spread
    return {
        "index": jax.random.randint(index_key, (layers, *inputs, *outputs), 0, 2**bits, jnp.uint8),
        "A": jax.random.normal(a_key, (layers, *outputs, rank)),
        "B": jax.random.normal(b_key, (layers, rank, *inputs)),
        "g": jnp.full((layers, rank), size, jnp.float32),
    }


def _normalised(x: Array, dims: tuple[int, ...]) -> Array:
    return x / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(x), axis=dims, keepdims=True)), EPSILON)


def scales(leaf: Leaf) -> Array:
    """S = A diag(g) B of one layer: [*in, *out], float32."""
    a, b = leaf["A"], leaf["B"]
    a = _normalised(a, tuple(range(a.ndim - 1))) * leaf["g"].reshape((1,) * (a.ndim - 1) + (-1,))
    b = _normalised(b, tuple(range(1, b.ndim)))
    return jnp.tensordot(b, a, axes=((0,), (a.ndim - 1,)))


def look_up(index: Array, bits: int) -> Array:
    """The levels of indices, by arithmetic: they are equally spaced."""
    return index.astype(jnp.float32) * (2.0 / (2**bits - 1)) - 1.0


def effective(leaf: Leaf, bits: int) -> Array:
    """The weight of one layer, float32."""
    s = scales(leaf)
    if "latent" not in leaf:
        return look_up(leaf["index"], bits) * s
    latent = leaf["latent"].astype(jnp.float32)
    quantised = look_up(nearest(latent, s, bits), bits) * s
    # In value the quantised weight, to the bit; the gradient reaches the latent one as if it had not been rounded.
    return quantised + (latent - jax.lax.stop_gradient(latent))


def nearest(weight: Array, s: Array, bits: int) -> Array:
    """The indices whose level times scale is nearest to the weight."""
    safe = jnp.where(s == 0, 1.0, s)
    place = (weight / safe + 1.0) * ((2**bits - 1) / 2.0)
    return jnp.clip(jnp.round(place), 0, 2**bits - 1).astype(jnp.uint8)


def tighten(leaf: Leaf, weight: Array, bits: int) -> Leaf:
    """Of one layer: the indices chosen anew for the scales that there are."""
    return {name: leaf[name] for name in ("A", "B", "g")} | {"index": nearest(weight, scales(leaf), bits)}


def straight_through(leaf: Leaf, weight: Array) -> Leaf:
    """The same scales, and a weight that the indices follow."""
    return {name: leaf[name] for name in ("A", "B", "g")} | {"latent": weight.astype(jnp.float32)}


@partial(jax.jit, static_argnames=("inputs", "bits", "rank", "group_size", "rounds"))
def quantise(weight: Array, *, inputs: int, bits: int, rank: int, group_size: int, rounds: int = 0) -> Leaf:
    """A float weight [*in, *out] of one layer; its first `inputs` dimensions are inputs.

    The scales begin as the rank-r approximation of the largest weight of each group of inputs. As they are equal within
    a group, only one column a group goes into the SVD. Each round then fits A and B in turn by least squares for the
    indices at hand, and chooses the indices again.
    """
    in_shape, out_shape = weight.shape[:inputs], weight.shape[inputs:]
    w = weight.reshape(math.prod(in_shape), math.prod(out_shape)).astype(jnp.float32)  # [in, out]
    groups = -(-w.shape[0] // group_size)
    padded = jnp.pad(jnp.abs(w), ((0, groups * group_size - w.shape[0]), (0, 0)))
    largest = jnp.max(padded.reshape(groups, group_size, -1), axis=1)  # [groups, out]
    u, s, vh = jnp.linalg.svd(largest, full_matrices=False)
    kept = min(rank, s.shape[0])
    root = jnp.sqrt(s[None, :kept])
    b = jnp.repeat(u[:, :kept], group_size, axis=0)[: w.shape[0]] * root  # [in, r]
    a = vh[:kept].T * root  # [out, r]
    # Ranks beyond what the groups have: small and unlike each other, so that training can use them.
    extra = 1e-3 * jnp.sqrt(s[0]) / math.sqrt(w.shape[0])
    keys = jax.random.split(jax.random.key(0), 2)
    b = jnp.concatenate([b, extra * jax.random.normal(keys[0], (w.shape[0], rank - kept))], axis=1)
    a = jnp.concatenate([a, extra * jax.random.normal(keys[1], (w.shape[1], rank - kept))], axis=1)

    def one_round(_: int, factors: tuple[Array, Array]) -> tuple[Array, Array]:
        a, b = factors
        a = _fit(w.T, look_up(nearest(w, b @ a.T, bits), bits).T, b, a)
        b = _fit(w, look_up(nearest(w, b @ a.T, bits), bits), a, b)
        return a, b

    a, b = jax.lax.fori_loop(0, rounds, one_round, (a, b))
    g = jnp.linalg.norm(a, axis=0) * jnp.linalg.norm(b, axis=0)
    leaf = {
        "A": _normalised(a, (0,)).reshape(*out_shape, rank),
        "B": _normalised(b, (0,)).T.reshape(rank, *in_shape),
        "g": g,
    }
    return leaf | {"index": nearest(weight.astype(jnp.float32), scales(leaf), bits)}


def _fit(target: Array, quantised: Array, known: Array, old: Array) -> Array:
    """For each row of `target` [n, m] the x [r] that makes quantised ⊙ (known x) nearest to it; `known` [m, r].

    A little of the old solution is held on to, so that ranks that nothing decides stay where they are.
    """

    def one_row(row: tuple[Array, Array, Array]) -> Array:
        t, q, before = row
        design = q[:, None] * known
        normal = design.T @ design
        ridge = 1e-5 * jnp.trace(normal) / normal.shape[0] + 1e-20
        return jnp.linalg.solve(normal + ridge * jnp.eye(normal.shape[0]), (design.T @ t + ridge * before)[:, None])[
            :, 0
        ]

    return jax.lax.map(one_row, (target, quantised, old), batch_size=32)


def relative_error(weight: Array, leaf: Leaf, bits: int) -> Array:
    """‖W - effective‖ / ‖W‖ of one layer."""
    difference = weight.astype(jnp.float32) - effective(leaf, bits)
    return jnp.sqrt(jnp.sum(difference**2) / jnp.sum(weight.astype(jnp.float32) ** 2))


def snap(g: Array) -> Array:
    """Magnitudes as float16 can hold them."""
    return jnp.clip(g, -65504.0, 65504.0).astype(jnp.float16).astype(jnp.float32)


def bits_per_weight(inputs: int, outputs: int, bits: int, rank: int) -> float:
    """With the scales in float16."""
    return bits + 16 * rank * (inputs + outputs + 1) / (inputs * outputs)
