"""What the models are made of. Weights are float32 and cast to the activations' dtype at each use, so that the
gradients of a weight used many times add up in float32.

Shape letters: B batch, T positions, D width, F inner width of an MLP, N heads, H width of a head.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from tinypod.kernels import attention as kernels
from tinypod.kernels import gated_product, residual_norm, short_attention, token_mixing, tpu_layers
from tinypod.sharding import Placement

TRUNCATED_STD = 0.8796256610342398  # std of a unit normal cut at ±2
RMS_EPSILON = 1e-5
Gate = Literal["swiglu", "normalised"]  # of an MLP: kernels are told the epsilon of its norm, None without one


def truncated_normal(key: Array, shape: tuple[int, ...], std: float) -> Array:
    """Normal cut at two sigma, rescaled so that what remains has the std asked for."""
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32) * (std / TRUNCATED_STD)


def linear_init(key: Array, shape: tuple[int, ...]) -> Array:
    """Weights of shape [..., fan_in, fan_out]."""
    return truncated_normal(key, shape, 1.0 / math.sqrt(shape[-2]))


def _split_last(weight: Array, *sizes: int) -> Array:
    return weight.reshape(*weight.shape[:-1], *sizes)


def linear(x: Array, weight: Array) -> Array:
    return x @ weight.astype(x.dtype)


def rms_norm(x: Array, axis: int = -1) -> Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=axis, keepdims=True) + RMS_EPSILON)
    return (x32 * scale).astype(x.dtype)


def add_and_norm(x_BTD: Array, y_BTD: Array, placement: Placement) -> Array:
    fused = residual_norm.fused(x_BTD, y_BTD, RMS_EPSILON, placement)
    return rms_norm(x_BTD + y_BTD) if fused is None else fused


def swiglu_width(width: int, expansion: float, multiple_of: int) -> int:
    return -(-round(expansion * width * 2 / 3) // multiple_of) * multiple_of


def swiglu_init(key: Array, num_layers: int, width: int, inner: int) -> dict[str, Array]:
    """Gate and up projections in one array [layers, width, 2, inner], so that `inner` can be split over devices."""
    up, down = jax.random.split(key)
    return {
        "gate_up": _split_last(linear_init(up, (num_layers, width, 2 * inner)), 2, inner),
        "down": linear_init(down, (num_layers, inner, width)),
    }


def _epsilon(gate: Gate) -> float | None:
    return RMS_EPSILON if gate == "normalised" else None


def swiglu(params: dict[str, Array], x_BTD: Array, placement: Placement, gate: Gate = "swiglu") -> Array:
    fused = gated_product.fused(params["gate_up"], params["down"], x_BTD, placement, _epsilon(gate))
    if fused is None and placement.on_cpu:
        return _swiglu_of_matrices(params, x_BTD, gate)
    return gated_product.plain(params["gate_up"], params["down"], x_BTD, _epsilon(gate)) if fused is None else fused


def _swiglu_of_matrices(params: dict[str, Array], x_BTD: Array, gate: Gate) -> Array:
    """Over the last dim. XLA's CPU compiler copies what enters a product that sums over, or keeps, several dims of one
    side, as gradients do; a product of two matrices it takes as it is."""
    gate_up_D2F, x_ND = params["gate_up"], x_BTD.reshape(-1, x_BTD.shape[-1])
    gate_NF, up_NF = linear(x_ND, gate_up_D2F[:, 0]), linear(x_ND, gate_up_D2F[:, 1])
    inner_NF = gated_product.inner_units(gate_NF, up_NF, _epsilon(gate))
    return linear(inner_NF, params["down"]).reshape(x_BTD.shape)


def token_swiglu(params: dict[str, Array], x_BTD: Array, placement: Placement, gate: Gate = "swiglu") -> Array:
    """SwiGLU over the positions, the same for every channel; but on CPUs without the transposes that its definition
    suggests."""
    if placement.on_cpu:
        return jnp.swapaxes(_swiglu_of_matrices(params, jnp.swapaxes(x_BTD, 1, 2), gate), 1, 2)
    gate_up_B2FD = jnp.einsum("btd,tcf->bcfd", x_BTD, params["gate_up"].astype(x_BTD.dtype))
    inner_BFD = gated_product.inner_units(gate_up_B2FD[:, 0], gate_up_B2FD[:, 1], _epsilon(gate), axis=1)
    return jnp.einsum("bfd,ft->btd", inner_BFD, params["down"].astype(x_BTD.dtype))


def token_block(params: dict[str, Array], x_BTD: Array, placement: Placement, gate: Gate = "swiglu") -> Array:
    """Token mixing, the residual and the norm along the positions."""
    arguments = params["gate_up"], params["down"], x_BTD, RMS_EPSILON, placement
    if placement.kernels == "tpu":
        fused = tpu_layers.token_block(*arguments) if gate == "swiglu" else None
    else:
        fused = token_mixing.fused(*arguments, _epsilon(gate))
    return rms_norm(x_BTD + token_swiglu(params, x_BTD, placement, gate), axis=1) if fused is None else fused


def mlp_block(params: dict[str, Array], x_BTD: Array, placement: Placement, gate: Gate = "swiglu") -> Array:
    """The MLP over the channels, the residual and the norm."""
    fused = None
    if gate == "swiglu":
        fused = tpu_layers.channel_block(params["gate_up"], params["down"], x_BTD, RMS_EPSILON, placement)
    return add_and_norm(x_BTD, swiglu(params, x_BTD, placement, gate), placement) if fused is None else fused


def rope_tables(num_positions: int, head_dim: int, theta: float) -> tuple[Array, Array]:
    """cos and sin of shape [T, 1, H], the two halves of a head sharing their angles."""
    frequency_H2 = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_TH2 = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * frequency_H2[None, :]
    angle_T1H = jnp.concatenate([angle_TH2, angle_TH2], axis=-1)[:, None, :]
    return jnp.cos(angle_T1H), jnp.sin(angle_T1H)


def rotate(x_BTNH: Array, cos_T1H: Array, sin_T1H: Array) -> Array:
    """Rotary positions, in float32."""
    x32 = x_BTNH.astype(jnp.float32)
    first, second = jnp.split(x32, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (x32 * cos_T1H[None] + turned * sin_T1H[None]).astype(x_BTNH.dtype)


def attention_init(key: Array, num_layers: int, width: int, num_heads: int) -> dict[str, Array]:
    """Queries, keys and values in one array [layers, width, 3, heads, head]: heads can be split over devices."""
    qkv, out = jax.random.split(key)
    head = width // num_heads
    return {
        "qkv": _split_last(linear_init(qkv, (num_layers, width, 3 * width)), 3, num_heads, head),
        "out": linear_init(out, (num_layers, width, width)).reshape(num_layers, num_heads, head, width),
    }


def attention(params: dict[str, Array], x_BTD: Array, rope: tuple[Array, Array] | None, placement: Placement) -> Array:
    """Self-attention of every position to every position."""
    qkv_BT3NH = jnp.einsum("btd,dcnh->btcnh", x_BTD, params["qkv"].astype(x_BTD.dtype))
    y_BTNH = short_attention.fused(qkv_BT3NH, rope, placement)
    if y_BTNH is None:
        q_BTNH, k_BTNH, v_BTNH = (qkv_BT3NH[:, :, i] for i in range(3))
        if rope is not None:
            q_BTNH, k_BTNH = rotate(q_BTNH, *rope), rotate(k_BTNH, *rope)
        y_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH)
    return jnp.einsum("btnh,nhd->btd", y_BTNH, params["out"].astype(x_BTD.dtype))


def scaled_rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """With a learned scale for each channel, in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return (x32 * scale * weight.reshape((1,) * (x.ndim - 1) + weight.shape)).astype(x.dtype)


def causal_attention(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, placement: Placement) -> Array:
    """Each position to itself and those before it; groups of query heads share a key head."""
    fused = kernels.causal(q_BTNH, k_BTKH, v_BTKH, placement)
    return jax.nn.dot_product_attention(q_BTNH, k_BTKH, v_BTKH, is_causal=True) if fused is None else fused
