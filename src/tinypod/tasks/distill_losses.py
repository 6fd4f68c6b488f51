"""Losses of a language model against labels and against a teacher's cached top-K logits.

Only K of the vocabulary's logits are cached, and log Σ exp over all of it. `tail` compares K + 1 outcomes: the K, and
everything else as one. `renormalised` compares the K alone, each side divided by its own sum over them: a student may
then put any mass outside of K and score zero. It is there to compare with programs that do so.

Logits are made for a stretch of positions at a time and again in the backward pass: [B, L, V] never exists in full.
Shape letters: B rows, L positions, C positions of a stretch, V vocabulary, K cached logits, D width.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

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


def position_terms(logits_BCV: Array, known: dict[str, Array], kd: KD, temperature: float) -> dict[str, Array]:
    """What each position is scored with, [B, C]. `known`: labels, and topk_idx, topk_logits, logz of a teacher."""

    def at(ids: Array) -> Array:
        return jnp.take_along_axis(logits_BCV, ids, axis=-1)

    logz = jax.nn.logsumexp(logits_BCV, axis=-1)
    best = jnp.argmax(logits_BCV, axis=-1)
    terms = {
        "label_loss": logz - at(known["labels"][..., None])[..., 0],
        "label_accuracy": (best == known["labels"]).astype(jnp.float32),
    }
    if "topk_idx" in known:
        top = known["topk_idx"]
        hot = logz if temperature == 1.0 else jax.nn.logsumexp(logits_BCV / temperature, axis=-1)
        terms |= {
            "kd_loss": kd_divergence(kd, known["topk_logits"], known.get("logz"), at(top), hot, temperature),
            "top1_loss": logz - at(top[..., :1])[..., 0],
            "agreement": (best == top[..., 0]).astype(jnp.float32),
        }
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
    head: Callable[[Array], Array],
    known: dict[str, Array],
    mask_BL: Array,
    stretch: int,
    kd: KD,
    temperature: float,
) -> dict[str, Array]:
    """Of each row the sums of its terms over the positions that count, [B], and `tokens`, how many those are."""

    @jax.checkpoint
    def sums_of(hidden: Array, known: dict[str, Array], mask: Array) -> dict[str, Array]:
        terms = position_terms(head(hidden), known, kd, temperature)
        return {name: jnp.sum(x * mask, axis=-1) for name, x in terms.items()} | {"tokens": jnp.sum(mask, axis=-1)}

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, sums_of(*part)), None

    parts = jax.tree.map(lambda x: cut(x, stretch), (hidden_BLD, known, mask_BL.astype(jnp.float32)))
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(sums_of, *jax.tree.map(lambda x: x[0], parts))
    )
    return jax.lax.scan(add, zeros, parts)[0]
