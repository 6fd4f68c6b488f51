"""Losses of a language model against labels and against a teacher's cached top-K logits.

Only K of the vocabulary's logits are cached, and log Σ exp over all of it. `tail` compares K + 1 outcomes: the K, and
everything else as one. `renormalised` compares the K alone, each side divided by its own sum over them: a student may
then put any mass outside of K and score zero. It is there to compare with programs that do so.

Logits are made for a stretch of positions at a time and again in the backward pass: [B, L, V] never exists in full.
What is read of them is little (`Read`), and its gradient is written down here: it is formed in one pass over the logits
and multiplied in the dtype of the weights. Autodiff would scatter into zeros for each term, and multiply in float32.

Shape letters: B rows, L positions, C positions of a stretch, V vocabulary, K cached logits, D width, J logits read.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

KD = Literal["tail", "renormalised"]
_LEAST = 1e-7  # of the mass outside of K that a float32 sum can tell from none


def log_rest(log_mass: Array) -> Array:
    """log(1 - exp(x)): of what is outside, from the log of what is inside."""
    return jnp.log(-jnp.expm1(jnp.minimum(log_mass, math.log1p(-_LEAST))))


def kd_divergence(
    kind: KD,
    teacher_BCK: Array,
    logz_BC: Array | None,
    student_BCK: Array,
    student_logz_BC: Array,
    temperature: float,
) -> Array:
    """KL(teacher ‖ student) of each position, in nats, times the square of the temperature, as is usual.

    The logits of both at the teacher's top K, not divided by the temperature; each logz is log Σ exp(logit / T), of
    the teacher only for `tail`.
    """
    t = teacher_BCK.astype(jnp.float32) / temperature
    s = student_BCK / temperature
    if kind == "renormalised":
        log_t, log_s = jax.nn.log_softmax(t, axis=-1), jax.nn.log_softmax(s, axis=-1)
        return temperature**2 * jnp.sum(jnp.exp(log_t) * (log_t - log_s), axis=-1)
    assert logz_BC is not None
    log_t, log_s = t - logz_BC[..., None], s - student_logz_BC[..., None]
    tail_t, tail_s = (log_rest(jax.nn.logsumexp(x, axis=-1)) for x in (log_t, log_s))
    inside = jnp.sum(jnp.exp(log_t) * (log_t - log_s), axis=-1)
    return temperature**2 * (inside + jnp.exp(tail_t) * (tail_t - tail_s))


class Read(NamedTuple):
    """All that the losses take from the logits of a position."""

    at_BCJ: Array  # the logits asked for
    largest_BC: Array
    logz_BC: Array  # log Σ exp(logit)
    hot_BC: Array  # log Σ exp(logit / temperature)


def _product(hidden_BCD: Array, weight_DV: Array) -> Array:
    return jnp.matmul(hidden_BCD, weight_DV, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def read_logits(hidden_BCD: Array, weight_DV: Array, ids_BCJ: Array, temperature: float) -> Read:
    """Of the logits hidden · weight, those at `ids`, the largest and the normalisers. The largest has no gradient."""
    logits_BCV = _product(hidden_BCD, weight_DV)
    largest_BC = jnp.max(logits_BCV, axis=-1)
    below_BCV = logits_BCV - largest_BC[..., None]
    logz_BC = jnp.log(jnp.sum(jnp.exp(below_BCV), axis=-1)) + largest_BC
    hot_BC = logz_BC
    if temperature != 1.0:
        hot_BC = jnp.log(jnp.sum(jnp.exp(below_BCV / temperature), axis=-1)) + largest_BC / temperature
    return Read(jnp.take_along_axis(logits_BCV, ids_BCJ, axis=-1), largest_BC, logz_BC, hot_BC)


def _read_forward(hidden: Array, weight: Array, ids: Array, temperature: float) -> tuple[Read, Any]:
    read = read_logits(hidden, weight, ids, temperature)
    return read, (hidden, weight, ids, read)


def _read_backward(temperature: float, kept: Any, by: Read) -> tuple[Array, Array, None]:
    hidden_BCD, weight_DV, ids_BCJ, read = kept

    def through_normalisers(logits: Array) -> Array:
        if temperature == 1.0:
            return (by.logz_BC + by.hot_BC)[..., None] * jnp.exp(logits - read.logz_BC[..., None])
        cold = by.logz_BC[..., None] * jnp.exp(logits - read.logz_BC[..., None])
        return cold + (by.hot_BC / temperature)[..., None] * jnp.exp(logits / temperature - read.hot_BC[..., None])

    # At the logits that were read both parts are added in float32, before the sum is rounded: they nearly cancel. One
    # that was read twice gets the same sum twice.
    same_BCJJ = ids_BCJ[..., :, None] == ids_BCJ[..., None, :]
    at_BCJ = through_normalisers(read.at_BCJ) + jnp.sum(jnp.where(same_BCJJ, by.at_BCJ[..., None, :], 0), axis=-1)
    by_logits_BCV = through_normalisers(_product(hidden_BCD, weight_DV)).astype(weight_DV.dtype)
    put = jax.vmap(jax.vmap(lambda row_V, ids_J, at_J: row_V.at[ids_J].set(at_J)))
    by_logits_BCV = put(by_logits_BCV, ids_BCJ, at_BCJ.astype(weight_DV.dtype))
    by_hidden_BCD = jnp.matmul(by_logits_BCV, weight_DV.T)
    by_weight_DV = jnp.tensordot(hidden_BCD, by_logits_BCV, axes=((0, 1), (0, 1)))
    return by_hidden_BCD.astype(hidden_BCD.dtype), by_weight_DV.astype(weight_DV.dtype), None


read_logits.defvjp(_read_forward, _read_backward)


def position_terms(
    hidden_BCD: Array, weight_DV: Array, known: dict[str, Array], kd: KD, temperature: float
) -> dict[str, Array]:
    """What each position is scored with, [B, C]. `known`: labels, and topk_idx, topk_logits, logz of a teacher."""
    ids_BCJ = known["labels"][..., None]
    if "topk_idx" in known:
        ids_BCJ = jnp.concatenate([ids_BCJ, known["topk_idx"]], axis=-1)
    at_BCJ, largest_BC, logz_BC, hot_BC = read_logits(hidden_BCD, weight_DV, ids_BCJ, temperature)
    is_best_BCJ = (at_BCJ[..., :2] == largest_BC[..., None]).astype(jnp.float32)
    terms = {"label_loss": logz_BC - at_BCJ[..., 0], "label_accuracy": is_best_BCJ[..., 0]}
    if "topk_idx" in known:
        kd_loss = kd_divergence(kd, known["topk_logits"], known.get("logz"), at_BCJ[..., 1:], hot_BC, temperature)
        terms |= {"kd_loss": kd_loss, "top1_loss": logz_BC - at_BCJ[..., 1], "agreement": is_best_BCJ[..., 1]}
    return terms


def cut(x_BL: Array, stretch: int) -> Array:
    """[B, L, ...] as stretches of positions [count, B, C, ...], zeros after the last one."""
    rows, length = x_BL.shape[:2]
    stretch = min(stretch, length)
    count = -(-length // stretch)
    padded = jnp.pad(x_BL, [(0, 0), (0, count * stretch - length)] + [(0, 0)] * (x_BL.ndim - 2))
    return jnp.swapaxes(padded.reshape(rows, count, stretch, *x_BL.shape[2:]), 0, 1)


def join(parts: Array, length: int) -> Array:
    """What `cut` took apart: [B, L, ...]."""
    count, rows, stretch, *rest = parts.shape
    return jnp.swapaxes(parts, 0, 1).reshape(rows, count * stretch, *rest)[:, :length]


def row_sums(
    hidden_BLD: Array,
    weight_DV: Array,
    known: dict[str, Array],
    mask_BL: Array,
    stretch: int,
    kd: KD,
    temperature: float,
) -> dict[str, Array]:
    """Of each row the sums of its terms over the positions that count, [B], and `tokens`, how many those are."""

    def sums_of(hidden: Array, known: dict[str, Array], mask: Array) -> dict[str, Array]:
        terms = position_terms(hidden, weight_DV, known, kd, temperature)
        return {name: jnp.sum(x * mask, axis=-1) for name, x in terms.items()} | {"tokens": jnp.sum(mask, axis=-1)}

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, sums_of(*part)), None

    parts = jax.tree.map(lambda x: cut(x, stretch), (hidden_BLD, known, mask_BL.astype(jnp.float32)))
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums_of, *jax.tree.map(lambda x: x[0], parts))
    )
    return jax.lax.scan(add, zeros, parts)[0]
