"""`rms_norm(x + y)` on GPUs, whose gradient is one pass over memory (a Pallas kernel for Triton).

XLA makes one kernel of the formula where no gradients are wanted. Else it keeps the sum, which is a second result and
so takes a second kernel, and its backward pass reads everything twice. Here x and y are kept, which are in memory
anyway, and the backward kernel computes the sum and its scale again from a row that it holds.

Shape letters: M rows, D width; in a program R rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from tinypod.kernels.calling import by_rows, splits_width, stated_cost
from tinypod.sharding import Placement

ROWS, WARPS = 4, 4
WIDEST = 2048  # more would not fit the registers


def fused(x_BTD: Array, y_BTD: Array, epsilon: float, placement: Placement) -> Array | None:
    """None where these devices, or these shapes, have no such kernel."""
    width = x_BTD.shape[2]
    if placement.kernels not in ("cuda", "hopper") or splits_width(placement) or x_BTD.dtype != y_BTD.dtype:
        return None
    if width > WIDEST or pl.next_power_of_2(width) != width:
        return None
    return by_rows(partial(add_and_norm, epsilon=epsilon), placement, num_weights=0)(x_BTD, y_BTD)


def plain(x: Array, y: Array, epsilon: float) -> Array:
    sum32 = (x + y).astype(jnp.float32)
    return (sum32 * _scale(sum32, epsilon)).astype(x.dtype)


def _scale(sum32: Array, epsilon: float) -> Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(sum32), axis=-1, keepdims=True) + epsilon)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def add_and_norm(x: Array, y: Array, epsilon: float, interpret: bool = False) -> Array:
    return plain(x, y, epsilon)


def _forward(x: Array, y: Array, epsilon: float, interpret: bool) -> tuple[Array, tuple[Array, Array]]:
    return plain(x, y, epsilon), (x, y)


def _backward(epsilon: float, interpret: bool, kept: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    """Both have the gradient of the sum."""
    x, D = kept[0], d_out.shape[-1]
    rows = [array.reshape(-1, D) for array in (*kept, d_out)]
    block = pl.BlockSpec((ROWS, D), lambda m: (m, 0))
    d_sum = pl.pallas_call(
        partial(_kernel, epsilon=epsilon, rows=rows[0].shape[0]),
        grid=(pl.cdiv(rows[0].shape[0], ROWS),),
        in_specs=[block] * 3,
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(rows[0].shape, x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        metadata=stated_cost(0),
        name="residual_norm_backward",
    )(*rows).reshape(x.shape)
    return d_sum, d_sum


add_and_norm.defvjp(_forward, _backward)


def _kernel(x_ref: Any, y_ref: Any, d_out_ref: Any, d_sum_ref: Any, *, epsilon: float, rows: int) -> None:
    first = pl.program_id(0) * ROWS
    inside_RD = first + jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 0) < rows

    def read(ref: Any) -> Array:
        return plgpu.load(ref, mask=inside_RD, other=jnp.zeros((), ref.dtype))

    sum_RD, d_out_RD = (read(x_ref) + read(y_ref)).astype(jnp.float32), read(d_out_ref).astype(jnp.float32)
    scale_R1 = _scale(sum_RD, epsilon)
    out_RD = sum_RD * scale_R1
    d_sum_RD = scale_R1 * (d_out_RD - out_RD * jnp.mean(out_RD * d_out_RD, axis=-1, keepdims=True))
    plgpu.store(d_sum_ref, d_sum_RD.astype(d_sum_ref.dtype), mask=inside_RD)
