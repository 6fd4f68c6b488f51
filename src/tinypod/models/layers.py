"""What the models are made of. Weights are float32 and cast to the activations' dtype at each use, so that the
gradients of a weight used many times add up in float32.

Shape letters: B batch, T positions, D width, F inner width of an MLP, N heads, H width of a head.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

TRUNCATED_STD = 0.8796256610342398  # std of a unit normal cut at ±2
RMS_EPSILON = 1e-5


def truncated_normal(key: Array, shape: tuple[int, ...], std: float) -> Array:
    """Normal cut at two sigma, rescaled so that what remains has the std asked for."""
    return jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32) * (std / TRUNCATED_STD)


def linear_init(key: Array, shape: tuple[int, ...]) -> Array:
    """Weights of shape [..., fan_in, fan_out]."""
    return truncated_normal(key, shape, 1.0 / math.sqrt(shape[-2]))


def linear(x: Array, weight: Array) -> Array:
    return x @ weight.astype(x.dtype)


def rms_norm(x: Array, axis: int = -1) -> Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=axis, keepdims=True) + RMS_EPSILON)
    return (x32 * scale).astype(x.dtype)


def swiglu_width(width: int, expansion: float, multiple_of: int) -> int:
    return -(-round(expansion * width * 2 / 3) // multiple_of) * multiple_of


def swiglu_init(key: Array, num_layers: int, width: int, inner: int) -> dict[str, Array]:
    """Gate and up projections side by side in one matrix, the gate first."""
    up, down = jax.random.split(key)
    return {
        "gate_up": linear_init(up, (num_layers, width, 2 * inner)),
        "down": linear_init(down, (num_layers, inner, width)),
    }


def swiglu(params: dict[str, Array], x: Array) -> Array:
    gate, up = jnp.split(linear(x, params["gate_up"]), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, params["down"])


def token_swiglu(params: dict[str, Array], x_BTD: Array) -> Array:
    """SwiGLU over the positions, the same for every channel; without the transposes that its definition suggests."""
    gate_up_BFD = jnp.einsum("btd,tf->bfd", x_BTD, params["gate_up"].astype(x_BTD.dtype))
    gate_BFD, up_BFD = jnp.split(gate_up_BFD, 2, axis=1)
    return jnp.einsum("bfd,ft->btd", jax.nn.silu(gate_BFD) * up_BFD, params["down"].astype(x_BTD.dtype))


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


def attention_init(key: Array, num_layers: int, width: int) -> dict[str, Array]:
    qkv, out = jax.random.split(key)
    return {
        "qkv": linear_init(qkv, (num_layers, width, 3 * width)),
        "out": linear_init(out, (num_layers, width, width)),
    }


def attention(params: dict[str, Array], x_BTD: Array, num_heads: int, rope: tuple[Array, Array] | None) -> Array:
    """Self-attention of every position to every position."""
    B, T, D = x_BTD.shape
    qkv_BTNH = linear(x_BTD, params["qkv"]).reshape(B, T, 3 * num_heads, D // num_heads)
    q_BTNH, k_BTNH, v_BTNH = jnp.split(qkv_BTNH, 3, axis=2)
    if rope is not None:
        q_BTNH, k_BTNH = rotate(q_BTNH, *rope), rotate(k_BTNH, *rope)
    y_BTNH = jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH)
    return linear(y_BTNH.reshape(B, T, D), params["out"])
