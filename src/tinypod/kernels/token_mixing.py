"""Token mixing in one pass: SwiGLU over the positions, the residual and the norm along the positions.

Plain XLA writes the [B, 2F, D] intermediate and reads it back, several times what the layer itself reads and writes.
Here one program holds all positions of a block of channels of one example, and only x and y pass through memory; the
backward pass computes the intermediate again. Block sizes are the fastest of those tried on an H200 with 97 positions
of width 512 (LOG.md). These kernels are Triton's, of any shape; those that hopper_mixing.py has for the shapes of the
recipes are faster.

With the normalised gate (gated_product.py), the MLP adds s · (inner · down) to x, with one s for each example and
channel, which the forward kernels write. In the gradients dr · s takes the place of dr, and that of each gate · up has
one more part, `along` times itself: one number for each example and channel, which the backward kernels write. What was
added to x is y / scale - x, so that nothing has to be computed twice for it.

Shape letters: B batch, T positions, P positions padded to a power of two, D width, F inner width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tinypod.kernels.calling import by_rows, splits_width, stated_cost
from tinypod.sharding import Placement

Kernel = Callable[..., tuple[Array, ...]]

MOST_POSITIONS = 128  # more do not fit a program's registers


@dataclass(frozen=True)
class Blocks:
    """Of one kernel: channels and inner units that a program takes at a time."""

    channels: int
    inner: int
    num_warps: int
    num_stages: int


FORWARD = Blocks(channels=64, inner=64, num_warps=4, num_stages=2)
BACKWARD = Blocks(channels=128, inner=64, num_warps=8, num_stages=2)
WEIGHTS = Blocks(channels=32, inner=64, num_warps=4, num_stages=3)
SPLITS = 33  # programs that share the examples in the gradient of the weights; their sums are added up at the end


def fused(
    gate_up_T2F: Array,
    down_FT: Array,
    x_BTD: Array,
    epsilon: float,
    placement: Placement,
    gate_epsilon: float | None = None,
) -> Array | None:
    """None where these devices, or these shapes, have no such kernel. With a gate's epsilon, the normalised gate."""
    half, (inner, positions) = x_BTD.dtype in (jnp.bfloat16, jnp.float16), down_FT.shape
    if placement.kernels != "hopper" or not half or positions > MOST_POSITIONS or inner % 16 or splits_width(placement):
        return None
    mix_rows = by_rows(lambda *arrays: mix(*arrays, epsilon, False, gate_epsilon), placement, num_weights=2)
    return mix_rows(gate_up_T2F, down_FT, x_BTD)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def mix(
    gate_up_T2F: Array,
    down_FT: Array,
    x_BTD: Array,
    epsilon: float,
    interpret: bool = False,
    gate_epsilon: float | None = None,
) -> Array:
    """`rms_norm(x + token_swiglu(x), axis=1)`."""
    return _forward(gate_up_T2F, down_FT, x_BTD, epsilon, interpret, gate_epsilon)[0]


def _mix_forward(
    gate_up_T2F: Array, down_FT: Array, x_BTD: Array, epsilon: float, interpret: bool, gate_epsilon: float | None
) -> tuple[Array, Any]:
    y_BTD, *scales_BD = _forward(gate_up_T2F, down_FT, x_BTD, epsilon, interpret, gate_epsilon)
    return y_BTD, (gate_up_T2F, down_FT, x_BTD, y_BTD, scales_BD)


def _mix_backward(
    epsilon: float, interpret: bool, gate_epsilon: float | None, saved: Any, dy_BTD: Array
) -> tuple[Array, Array, Array]:
    gate_up_T2F, down_FT, x_BTD, y_BTD, (scale_BD, *gate_scale_BD) = saved
    given = gate_up_T2F, down_FT, x_BTD, y_BTD, scale_BD, dy_BTD
    dx_BTD, *sums = _backward(*given, *gate_scale_BD, interpret=interpret)
    d_gate_up, d_down = _weight_gradients(gate_up_T2F, down_FT, x_BTD, *sums, interpret=interpret)
    return d_gate_up.astype(gate_up_T2F.dtype), d_down.astype(down_FT.dtype), dx_BTD


mix.defvjp(_mix_forward, _mix_backward)


def _forward(
    gate_up_T2F: Array, down_FT: Array, x_BTD: Array, epsilon: float, interpret: bool, gate_epsilon: float | None
) -> tuple[Array, ...]:
    """y, the scale of its norm, and with the normalised gate the scale of what was added to x."""
    settings: Any = {"epsilon": epsilon, "gate_epsilon": gate_epsilon}
    kernel: Kernel = partial(_triton_forward, interpret=interpret, **settings)
    if not interpret:
        from tinypod.kernels import hopper_mixing  # on a Hopper GPU alone: Mosaic GPU takes half a second to import

        if hopper_mixing.suits(down_FT, x_BTD):
            kernel = _unless_packed(partial(hopper_mixing.forward, **settings), kernel)
    return kernel(gate_up_T2F, down_FT, x_BTD)


def _backward(gate_up_T2F: Array, down_FT: Array, x_BTD: Array, *given: Array, interpret: bool) -> tuple[Array, ...]:
    """Of y, scale, dy and the gate's scale if it has one. The gradient of x, and that of the sum before the norm, from
    which the weights' gradients are made; with the normalised gate this is scaled, and `along` [B, D] follows."""
    kernel: Kernel = partial(_triton_backward, interpret=interpret)
    if not interpret:
        from tinypod.kernels import hopper_mixing

        if hopper_mixing.suits(down_FT, x_BTD):
            kernel = _unless_packed(hopper_mixing.backward, kernel)
    return kernel(gate_up_T2F, down_FT, x_BTD, *given)


def _weight_gradients(
    gate_up_T2F: Array, down_FT: Array, x_BTD: Array, *given: Array, interpret: bool
) -> tuple[Array, ...]:
    """Of dr, and `along` if the gate is normalised."""
    kernel: Kernel = partial(_triton_weight_gradients, interpret=interpret)
    if not interpret:
        from tinypod.kernels import hopper_mixing

        if splits := hopper_mixing.weight_splits(down_FT, x_BTD):
            kernel = _unless_packed(partial(hopper_mixing.weight_gradients, splits=splits), kernel)
    return kernel(gate_up_T2F, down_FT, x_BTD, *given)


def _unless_packed(mosaic: Kernel, triton: Kernel) -> Kernel:
    """Under `vmap`, as in a pack of runs, the Triton kernel. Mosaic GPU would batch its kernels too, but those here are
    made for a grid of one thread block for each multiprocessor."""
    kernel = jax.custom_batching.custom_vmap(mosaic)

    @kernel.def_vmap
    def packed(size: int, batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        outs = jax.vmap(triton, in_axes=tuple(0 if each else None for each in batched), axis_size=size)(*arrays)
        return outs, jax.tree.map(lambda _: True, outs)

    return kernel


def _padded(positions: int) -> int:
    return max(16, 1 << (positions - 1).bit_length())


def _weights(gate_up_T2F: Array, down_FT: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """Gate and up [P, F] and down [F, P]: what is beyond the positions is 0, so that it adds nothing."""
    more = _padded(down_FT.shape[1]) - down_FT.shape[1]
    gate_up = jnp.pad(gate_up_T2F.astype(dtype), ((0, more), (0, 0), (0, 0)))
    return gate_up[:, 0], gate_up[:, 1], jnp.pad(down_FT.astype(dtype), ((0, 0), (0, more)))


def _dot(a: Array, b: Array, interpret: bool) -> Array:
    if interpret:  # a CPU does not add up half-precision products in float32
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jax.lax.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _fit(blocks: Blocks, width: int, inner: int) -> tuple[int, int]:
    return min(blocks.channels, max(16, 1 << (width - 1).bit_length())), math.gcd(blocks.inner, inner)


def _window(
    ref: Any, example: Any, channel: Any, T: int, P: int, K: int, D: int, live: Any = True
) -> tuple[Any, Array]:
    """Where one example's block of channels lies in [B * T, D], and which of it is there."""
    rows, columns = jnp.arange(P)[:, None], channel * K + jnp.arange(K)[None, :]
    return ref.at[pl.ds(example * T, P), pl.ds(channel * K, K)], (rows < T) & (columns < D) & live


def _load(ref: Any, mask: Array) -> Array:
    return triton.load(ref, mask=mask, other=0.0)


def _triton_forward(
    gate_up_T2F: Array, down_FT: Array, x_BTD: Array, epsilon: float, interpret: bool, gate_epsilon: float | None = None
) -> tuple[Array, ...]:
    B, T, D = x_BTD.shape
    P, F = _padded(T), down_FT.shape[0]
    K, N = _fit(FORWARD, D, F)
    dot = partial(_dot, interpret=interpret)

    def kernel(x_ref: Any, gate_ref: Any, up_ref: Any, down_ref: Any, y_ref: Any, *scale_refs: Any) -> None:
        example, channel = pl.program_id(0), pl.program_id(1)
        window, mask_PK = _window(x_ref, example, channel, T, P, K, D)
        x_PK = _load(window, mask_PK)
        x_KP = x_PK.T

        def add(i: Any, sum_KP: Array) -> Array:
            block = pl.ds(i * N, N)
            gate_KN, up_KN = dot(x_KP, gate_ref[:, block]), dot(x_KP, up_ref[:, block])
            return sum_KP + dot(
                (gate_KN * _sigmoid(gate_KN, x_PK.dtype, interpret) * up_KN).astype(x_PK.dtype), down_ref[block, :]
            )

        def add_normalised(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            """The squares of gate · up are added up beside."""
            block = pl.ds(i * N, N)
            gate_KN, up_KN = dot(x_KP, gate_ref[:, block]), dot(x_KP, up_ref[:, block])
            product_KN = gate_KN * up_KN
            inner_KN = product_KN * _sigmoid(gate_KN, x_PK.dtype, interpret)
            more_KP = dot(inner_KN.astype(x_PK.dtype), down_ref[block, :])
            return sums[0] + more_KP, sums[1] + jnp.sum(product_KN * product_KN, axis=1)

        scales_K = []
        if gate_epsilon is None:
            sum_KP = jax.lax.fori_loop(0, F // N, add, x_KP.astype(jnp.float32))
        else:
            zeros = jnp.zeros((K, P), jnp.float32), jnp.zeros((K,), jnp.float32)
            sum_KP, squares_K = jax.lax.fori_loop(0, F // N, add_normalised, zeros)
            scales_K.append(jax.lax.rsqrt(squares_K / F + gate_epsilon))
            sum_KP = x_KP.astype(jnp.float32) + sum_KP * scales_K[0][:, None]
        scales_K.insert(0, jax.lax.rsqrt(jnp.sum(sum_KP * sum_KP, axis=1) / T + epsilon))
        y_KP = (sum_KP * scales_K[0][:, None]).astype(x_PK.dtype)
        triton.store(_window(y_ref, example, channel, T, P, K, D)[0], y_KP.T, mask=mask_PK)
        columns = channel * K + jnp.arange(K)
        for ref, scale_K in zip(scale_refs, scales_K, strict=True):
            triton.store(ref.at[example, pl.ds(channel * K, K)], scale_K, mask=columns < D)

    y, *scales_BD = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((B * T, D), x_BTD.dtype),
            *[jax.ShapeDtypeStruct((B, D), jnp.float32)] * (1 if gate_epsilon is None else 2),
        ),
        grid=(B, pl.cdiv(D, K)),
        compiler_params=triton.CompilerParams(num_warps=FORWARD.num_warps, num_stages=FORWARD.num_stages),
        interpret=interpret,
        metadata=stated_cost(3 * B * T * D * F),
        name="token_mixing",
    )(x_BTD.reshape(B * T, D), *_weights(gate_up_T2F, down_FT, x_BTD.dtype))
    return y.reshape(B, T, D), *scales_BD


def _sigmoid(x: Array, dtype: Any, interpret: bool) -> Array:
    """For half precision by the card's own tanh: one instruction of its slow unit, where 1 / (1 + exp) takes two. It
    errs by up to 2.5e-4, an eighth of what bfloat16 rounds off a value near 1."""
    if interpret or dtype == jnp.float32:
        return jax.nn.sigmoid(x)
    return 0.5 * triton.approx_tanh(0.5 * x) + 0.5


def _gradients(
    gate: Array, up: Array, d_inner: Array, sigmoid: Array, along: Array | None = None
) -> tuple[Array, Array, Array]:
    """Of `inner = silu(gate) * up`: inner, d_gate, d_up."""
    silu = gate * sigmoid
    inner, d_gate, d_up = silu * up, d_inner * up * (sigmoid + silu * (1 - sigmoid)), d_inner * silu
    if along is None:
        return inner, d_gate, d_up
    d_product = along * (gate * up)
    return inner, d_gate + d_product * up, d_up + d_product * gate


def _triton_backward(
    gate_up_T2F: Array,
    down_FT: Array,
    x_BTD: Array,
    y_BTD: Array,
    scale_BD: Array,
    dy_BTD: Array,
    *gate_scale_BD: Array,
    interpret: bool,
) -> tuple[Array, ...]:
    B, T, D = x_BTD.shape
    P, F = _padded(T), down_FT.shape[0]
    K, N = _fit(BACKWARD, D, F)
    dot = partial(_dot, interpret=interpret)

    def kernel(
        x_ref: Any, y_ref: Any, scale_ref: Any, dy_ref: Any, gate_ref: Any, up_ref: Any, down_ref: Any, *refs: Any
    ) -> None:
        gate_scale_ref, dx_ref, dr_ref, along_ref = refs if gate_scale_BD else (None, *refs, None)
        example, channel = pl.program_id(0), pl.program_id(1)

        def window(ref: Any) -> Any:
            return _window(ref, example, channel, T, P, K, D)[0]

        mask_PK = _window(x_ref, example, channel, T, P, K, D)[1]
        y_PK = _load(window(y_ref), mask_PK).astype(jnp.float32)
        dy_PK = _load(window(dy_ref), mask_PK).astype(jnp.float32)
        columns = channel * K + jnp.arange(K)
        here, beyond = (example, pl.ds(channel * K, K)), 1.0 if gate_scale_BD else 0.0
        scale_K = triton.load(scale_ref.at[here], mask=columns < D, other=beyond)
        mean_K = jnp.sum(y_PK * dy_PK, axis=0) / T
        dr_PK = (scale_K[None, :] * (dy_PK - y_PK * mean_K[None, :])).astype(x_BTD.dtype)
        if gate_scale_BD:
            x_PK, dr32_PK = _load(window(x_ref), mask_PK), dr_PK.astype(jnp.float32)
            gate_scale_K = triton.load(gate_scale_ref.at[here], mask=columns < D, other=0.0)
            added_PK = y_PK / scale_K[None, :] - x_PK.astype(jnp.float32)
            along_K = jnp.sum(dr32_PK * added_PK, axis=0) * (gate_scale_K * gate_scale_K / -F)
            triton.store(along_ref.at[here], along_K, mask=columns < D)
            scaled_PK = (dr32_PK * gate_scale_K[None, :]).astype(x_BTD.dtype)
            triton.store(window(dr_ref), scaled_PK, mask=mask_PK)
            x_KP, dr_KP, scaled_KP, along_K1 = x_PK.T, dr_PK.T, scaled_PK.T, along_K[:, None]
        else:
            triton.store(window(dr_ref), dr_PK, mask=mask_PK)
            x_KP, dr_KP = _load(window(x_ref), mask_PK).T, dr_PK.T
            scaled_KP, along_K1 = dr_KP, None

        def add(i: Any, sum_KP: Array) -> Array:
            block = pl.ds(i * N, N)
            gate_PN, up_PN = gate_ref[:, block], up_ref[:, block]
            gate_KN, up_KN = dot(x_KP, gate_PN), dot(x_KP, up_PN)
            d_inner_KN = dot(scaled_KP, down_ref[block, :].T)
            sigmoid_KN = _sigmoid(gate_KN, x_KP.dtype, interpret)
            _, d_gate_KN, d_up_KN = _gradients(gate_KN, up_KN, d_inner_KN, sigmoid_KN, along_K1)
            sum_KP += dot(d_gate_KN.astype(x_KP.dtype), gate_PN.T)
            return sum_KP + dot(d_up_KN.astype(x_KP.dtype), up_PN.T)

        dx_KP = jax.lax.fori_loop(0, F // N, add, dr_KP.astype(jnp.float32))
        triton.store(window(dx_ref), dx_KP.T.astype(x_BTD.dtype), mask=mask_PK)

    flat = jax.ShapeDtypeStruct((B * T, D), x_BTD.dtype)
    dx, dr, *along_BD = pl.pallas_call(
        kernel,
        out_shape=(flat, flat, *(jax.ShapeDtypeStruct((B, D), jnp.float32) for _ in gate_scale_BD)),
        grid=(B, pl.cdiv(D, K)),
        compiler_params=triton.CompilerParams(num_warps=BACKWARD.num_warps, num_stages=BACKWARD.num_stages),
        interpret=interpret,
        metadata=stated_cost(5 * B * T * D * F),
        name="token_mixing_backward",
    )(
        *(x_BTD.reshape(B * T, D), y_BTD.reshape(B * T, D), scale_BD, dy_BTD.reshape(B * T, D)),
        *_weights(gate_up_T2F, down_FT, x_BTD.dtype),
        *gate_scale_BD,
    )
    return dx.reshape(B, T, D), dr.reshape(B, T, D), *along_BD


def _triton_weight_gradients(
    gate_up_T2F: Array, down_FT: Array, x_BTD: Array, dr_BTD: Array, *along_BD: Array, interpret: bool
) -> tuple[Array, Array]:
    """A program keeps the gradients of a block of inner units in registers while it goes through its examples."""
    B, T, D = x_BTD.shape
    P, F = _padded(T), down_FT.shape[0]
    K, N = _fit(WEIGHTS, D, F)
    dot = partial(_dot, interpret=interpret)
    across = pl.cdiv(D, K)
    splits = min(SPLITS, B * across)
    turns = pl.cdiv(B * across, splits)

    def kernel(x_ref: Any, dr_ref: Any, gate_ref: Any, up_ref: Any, down_ref: Any, *refs: Any) -> None:
        sums = refs[-3:]
        split, block = pl.program_id(1), pl.ds(pl.program_id(0) * N, N)
        gate_NP, up_NP, down_NP = gate_ref[:, block].T, up_ref[:, block].T, down_ref[block, :]

        def add(i: Any, sums_NP: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            tile = split * turns + i
            where = tile // across, tile % across, T, P, K, D, tile < B * across
            x_PK, dr_PK = (_load(*_window(ref, *where)) for ref in (x_ref, dr_ref))
            gate_NK, up_NK, d_inner_NK = dot(gate_NP, x_PK), dot(up_NP, x_PK), dot(down_NP, dr_PK)
            sigmoid_NK, along_1K = _sigmoid(gate_NK, x_PK.dtype, interpret), None
            if along_BD:
                first = tile % across * K
                inside = (first + jnp.arange(K) < D) & (tile < B * across)
                along_K = triton.load(refs[0].at[tile // across, pl.ds(first, K)], mask=inside, other=0.0)
                along_1K = along_K[None, :]
            inner_NK, d_gate_NK, d_up_NK = _gradients(gate_NK, up_NK, d_inner_NK, sigmoid_NK, along_1K)
            d_gate_NP = sums_NP[0] + dot(d_gate_NK.astype(x_PK.dtype), x_PK.T)
            d_up_NP = sums_NP[1] + dot(d_up_NK.astype(x_PK.dtype), x_PK.T)
            return d_gate_NP, d_up_NP, sums_NP[2] + dot(inner_NK.astype(x_PK.dtype), dr_PK.T)

        zeros = jnp.zeros((N, P), jnp.float32)
        for ref, value in zip(sums, jax.lax.fori_loop(0, turns, add, (zeros, zeros, zeros)), strict=True):
            ref[split, block, :] = value

    sums = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((splits, F, P), jnp.float32)] * 3,
        grid=(F // N, splits),
        compiler_params=triton.CompilerParams(num_warps=WEIGHTS.num_warps, num_stages=WEIGHTS.num_stages),
        interpret=interpret,
        metadata=stated_cost(6 * B * T * D * F),
        name="token_mixing_weights",
    )(x_BTD.reshape(B * T, D), dr_BTD.reshape(B * T, D), *_weights(gate_up_T2F, down_FT, x_BTD.dtype), *along_BD)
    d_gate_FT, d_up_FT, d_down_FT = (sum_.sum(axis=0)[:, :T] for sum_ in sums)
    return jnp.stack([d_gate_FT.T, d_up_FT.T], axis=1), d_down_FT
