"""The network of the recursion as one TPU kernel: what it is applied to is read once and written once.

The plain formula writes every layer's inner activations to memory and reads them again, which takes a TPU longer than
its products. Here a block of examples stays in vector memory (VMEM) with the weights of all layers, or of one layer
where there is no room for more. For passes without gradients only: nothing is kept for a backward pass.

Positions are padded with zeros to whole registers. Rows that are zero stay exactly zero: the padded weights are zero,
no layer has a bias, and both norms of zero are zero. Only the mean over positions has to know the true number.

Shape letters: L layers, B batch, T positions, P padded positions, D width, F inner width of an MLP.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from tinypod.sharding import Placement, free_axes

MIB = 2**20
# Of one core, by JAX's name for the device. The kernel asks for most of it, and the compiler refuses what is too much.
VMEM_BYTES = {"TPU v4": 16 * MIB, "TPU v5 lite": 128 * MIB, "TPU v5": 64 * MIB, "TPU v6 lite": 128 * MIB}
SMALLEST_VMEM_BYTES = 16 * MIB
LARGEST_BLOCK = 8  # examples: more of them no longer make the products faster
ROWS = 512  # of a product, about: enough that loading the weights does not cost more than using them
INNER = 512  # of an MLP's inner width at a time


class Weights(NamedTuple):
    """Of all layers, in the dtype of the activations, as the kernel reads them."""

    token_up_L2FP: Array
    token_down_LPF: Array
    up_L2DF: Array
    down_LFD: Array

    @property
    def num_bytes(self) -> int:
        return sum(weight.size * weight.dtype.itemsize for weight in self)


def pack(stacked: dict[str, Any], dtype: Any) -> Weights:
    """Weights of a net that mixes positions by an MLP; once for many applications."""
    token, mlp = stacked["token_mlp"], stacked["mlp"]
    T = token["down"].shape[-1]
    padding = (0, _padded(T, dtype) - T)
    none = (0, 0)
    token_up_L2FT = jnp.transpose(token["gate_up"], (0, 2, 3, 1)).astype(dtype)
    token_down_LTF = jnp.swapaxes(token["down"], 1, 2).astype(dtype)
    return Weights(
        jnp.pad(token_up_L2FT, (none, none, none, padding)),
        jnp.pad(token_down_LTF, (none, padding, none)),
        jnp.swapaxes(mlp["gate_up"], 1, 2).astype(dtype),
        mlp["down"].astype(dtype),
    )


def apply(
    weights: Weights,
    h_BTD: Array,
    injection_BTD: Array | None,
    placement: Placement,
    *,
    epsilon: float,
    interpret: bool = False,
) -> Array:
    """All layers to `h + injection`. The partitioner does not look into a kernel: examples are taken apart here."""
    given = (h_BTD,) if injection_BTD is None else (h_BTD, injection_BTD)
    run = partial(_apply, vmem_bytes=_vmem_bytes(placement), epsilon=epsilon, interpret=interpret)
    mesh, axes = free_axes(placement.mesh)
    if not axes:
        return run(weights, given)
    rows = PartitionSpec(tuple(axis for axis in ("data", "fsdp") if axis in axes) or None)
    specs = (PartitionSpec(), rows)
    return jax.shard_map(run, mesh=mesh, axis_names=set(axes), in_specs=specs, out_specs=rows, check_vma=False)(
        weights, given
    )


def _vmem_bytes(placement: Placement) -> int:
    if placement.mesh is None:
        return SMALLEST_VMEM_BYTES
    return VMEM_BYTES.get(placement.mesh.devices.flat[0].device_kind, SMALLEST_VMEM_BYTES)


def _apply(weights: Weights, given: tuple[Array, ...], *, vmem_bytes: int, epsilon: float, interpret: bool) -> Array:
    num_layers = weights.down_LFD.shape[0]
    run = partial(_call, vmem_bytes=vmem_bytes, epsilon=epsilon, interpret=interpret)
    if weights.num_bytes < vmem_bytes // 3:
        return run(weights, given)
    for layer in range(num_layers):
        given = (run(jax.tree.map(lambda weight, i=layer: weight[i : i + 1], weights), given),)
    return given[0]


def _call(weights: Weights, given: tuple[Array, ...], *, vmem_bytes: int, epsilon: float, interpret: bool) -> Array:
    B, T, D = given[0].shape
    dtype = given[0].dtype
    num_layers, P, token_F = weights.token_down_LPF.shape
    F = weights.down_LFD.shape[1]
    example_bytes = P * D * dtype.itemsize
    # Every array that moves has two buffers, and one copy is worked on.
    room = (vmem_bytes // 2 - weights.num_bytes) // (example_bytes * (2 * len(given) + 3))
    block = min(LARGEST_BLOCK, B, max(1, room))
    examples = pl.BlockSpec((block, T, D), lambda i: (i, 0, 0))
    whole = [
        pl.BlockSpec(weight.shape, lambda i, ndim=weight.ndim: (0,) * ndim, pipeline_mode=pl.Buffered(1))
        for weight in weights
    ]
    return pl.pallas_call(
        partial(_kernel, epsilon=epsilon),
        grid=(pl.cdiv(B, block),),
        in_specs=[*whole, *[examples] * len(given)],
        out_specs=examples,
        out_shape=jax.ShapeDtypeStruct((B, T, D), dtype),
        scratch_shapes=[pltpu.VMEM((block, P, D), dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem_bytes * 15 // 16),
        cost_estimate=pl.CostEstimate(
            flops=6 * B * T * D * num_layers * (token_F + F),
            transcendentals=B * num_layers * (token_F * D + T * F),
            bytes_accessed=(len(given) + 1) * B * T * D * dtype.itemsize + weights.num_bytes,
        ),
        interpret=interpret,
        name="recursion_net",
    )(*weights, *given)


def _kernel(token_up_ref: Any, token_down_ref: Any, up_ref: Any, down_ref: Any, *refs: Any, epsilon: float) -> None:
    *given_refs, out_ref, x_ref = refs
    block, T, D = out_ref.shape
    P, dtype = x_ref.shape[1], x_ref.dtype

    @pl.loop(0, block)
    def _(i: Any) -> None:
        x_ref[i] = jnp.zeros((P, D), dtype)
        x_ref[i, :T] = sum(ref[i].astype(jnp.float32) for ref in given_refs).astype(dtype)

    @pl.loop(0, down_ref.shape[0])
    def _(layer: Any) -> None:
        @pl.loop(0, block)
        def _(i: Any) -> None:
            x_PD = x_ref[i]
            gate_FD, up_FD = (_dot(token_up_ref[layer, one], x_PD) for one in (0, 1))
            y_PD = _dot(token_down_ref[layer], _gated(gate_FD, up_FD, dtype))
            x_ref[i] = _add_norm(x_PD, y_PD, 0, T, epsilon)

        group = math.gcd(block, max(1, ROWS // P))
        rows, F = group * P, down_ref.shape[1]
        step = math.gcd(F, INNER)

        @pl.loop(0, block // group)
        def _(i: Any) -> None:
            examples = pl.ds(i * group, group)
            x_RD = x_ref[examples].reshape(rows, D)

            def part(j: Any, y_RD: Array) -> Array:
                inner = pl.ds(pl.multiple_of(j * step, step), step)
                gate_RF, up_RF = (_dot(x_RD, up_ref[layer, one, :, inner]) for one in (0, 1))
                return y_RD + _dot(_gated(gate_RF, up_RF, dtype), down_ref[layer, inner])

            y_RD = jax.lax.fori_loop(0, F // step, part, jnp.zeros((rows, D), jnp.float32))
            x_ref[examples] = _add_norm(x_RD, y_RD, 1, D, epsilon).reshape(group, P, D)

    @pl.loop(0, block)
    def _(i: Any) -> None:
        out_ref[i] = x_ref[i, :T]


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _gated(gate: Array, up: Array, dtype: Any) -> Array:
    """silu(gate) · up, of products rounded as the plain formula rounds them."""
    gate, up = (x.astype(dtype).astype(jnp.float32) for x in (gate, up))
    return (gate * jax.nn.sigmoid(gate) * up).astype(dtype)


def _add_norm(x: Array, y: Array, dim: int, count: int, epsilon: float) -> Array:
    """RMS norm of x + y over a dim that has `count` values and zeros."""
    total = (x.astype(jnp.float32) + y.astype(x.dtype).astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(jnp.square(total), axis=dim, keepdims=True) / count + epsilon)
    return (total * scale).astype(x.dtype)


def _padded(T: int, dtype: Any) -> int:
    rows = 32 // jnp.dtype(dtype).itemsize  # of a register: values of two bytes lie in pairs
    return -(-T // rows) * rows
