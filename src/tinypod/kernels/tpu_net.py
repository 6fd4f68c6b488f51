"""The network of the recursion as one TPU kernel: what it is applied to is read once and written once.

The plain formula writes every layer's inner activations to memory and reads them again, which takes a TPU longer than
its products. Here a block of examples stays in vector memory (VMEM) with the weights of all layers, or of one layer
where there is no room for more. For passes without gradients only: nothing is kept for a backward pass.

Positions are padded to whole registers. Where an MLP mixes them, rows that are zero stay exactly zero: the padded
weights are zero, no layer has a bias, and both norms of zero are zero; only the mean over positions has to know their
true number. Attention gives padded keys no weight; what their own rows become reaches nobody.

Shape letters: L layers, B batch, T positions, P padded positions, D width, F inner width of an MLP, H width of a head.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tinypod.kernels import tpu_layers
from tinypod.kernels.calling import by_rows, splits_width, stated_share
from tinypod.kernels.tpu_layers import (
    INNER_BYTES,
    INTERMEDIATE_BYTES,
    LANES,
    ROWS,
    add,
    choose_block,
    dot,
    dot_last,
    gated,
    norm,
    over_inner,
    padded,
    size,
)
from tinypod.sharding import Placement


class TokenMlp(NamedTuple):
    """Of all layers, in the dtype of the activations, as the kernel reads them; padded positions have zeros."""

    up_L2FP: Array
    down_LPF: Array


class Attention(NamedTuple):
    qkv_L3DD: Array
    out_LDD: Array


class Mlp(NamedTuple):
    up_L2DF: Array
    down_LFD: Array


class Rotation(NamedTuple):
    """cos and sin of rotary positions, of every channel; float32, the sines of each head's first half negated."""

    cos_PD: Array
    sin_PD: Array


class Net(NamedTuple):
    mixing: TokenMlp | Attention
    mlp: Mlp
    rotation: Rotation | None


class Settings(NamedTuple):
    num_heads: int
    epsilon: float
    chip: tpu_layers.Chip
    interpret: bool


def suits(stacked: dict[str, Any], num_positions: int, dtype: Any, placement: Placement) -> bool:
    """Whether the kernel can take the place of the plain net. Weights may be abstract."""
    if placement.mesh is None or placement.kernels != "tpu" or splits_width(placement):
        return False
    num_layers, F, D = stacked["mlp"]["down"].shape
    inner, head = F, LANES
    if "token_mlp" in stacked:
        inner = math.gcd(F, stacked["token_mlp"]["down"].shape[1])
    else:
        head = stacked["attention"]["out"].shape[2]
    if dtype not in (jnp.bfloat16, jnp.float32) or D % LANES or inner % LANES or head % (LANES // 2):
        return False
    packed = jax.eval_shape(lambda weights: pack(weights, num_positions, dtype), stacked)
    P, vmem_bytes = padded(num_positions, dtype), tpu_layers.chip_of(placement).vmem_bytes
    layer_bytes, example_bytes = size(packed) // num_layers, _example_bytes(2, P, D, dtype)
    needed = layer_bytes + example_bytes + _worked_on(packed, P)
    return layer_bytes <= vmem_bytes // 2 and needed <= vmem_bytes * 15 // 16


def _worked_on(net: Net, P: int) -> int:
    """Bytes that the kernel needs beside the weights and the examples, about."""
    D = net.mlp.down_LFD.shape[2]
    if isinstance(net.mixing, TokenMlp):
        return INNER_BYTES * int(net.mixing.down_LPF.shape[2]) * D
    return 4 * (2 * P * D + 3 * P * P + 2 * P * D)  # the table of rotary positions, scores, and the sum over the heads


def pack(stacked: dict[str, Any], num_positions: int, dtype: Any, rope: tuple[Array, Array] | None = None) -> Net:
    """Stacked weights as the model has them, and its table of rotary positions; once for many applications."""
    none, padding = (0, 0), (0, padded(num_positions, dtype) - num_positions)
    mlp = Mlp(jnp.swapaxes(stacked["mlp"]["gate_up"], 1, 2).astype(dtype), stacked["mlp"]["down"].astype(dtype))
    if "token_mlp" in stacked:
        up_L2FT = jnp.transpose(stacked["token_mlp"]["gate_up"], (0, 2, 3, 1)).astype(dtype)
        down_LTF = jnp.swapaxes(stacked["token_mlp"]["down"], 1, 2).astype(dtype)
        token_mlp = TokenMlp(jnp.pad(up_L2FT, (none, none, none, padding)), jnp.pad(down_LTF, (none, padding, none)))
        return Net(token_mlp, mlp, None)
    num_layers, D, _, heads, H = stacked["attention"]["qkv"].shape
    qkv_L3DD = jnp.swapaxes(stacked["attention"]["qkv"].reshape(num_layers, D, 3, D), 1, 2).astype(dtype)
    attention = Attention(qkv_L3DD, stacked["attention"]["out"].reshape(num_layers, D, D).astype(dtype))
    if rope is None:
        return Net(attention, mlp, None)
    cos_PH, sin_PH = (jnp.pad(table_T1H[:, 0], (padding, none)) for table_T1H in rope)
    signed_PH = jnp.concatenate([-sin_PH[:, : H // 2], sin_PH[:, H // 2 :]], axis=1)
    return Net(attention, mlp, Rotation(jnp.tile(cos_PH, (1, heads)), jnp.tile(signed_PH, (1, heads))))


def apply(
    net: Net,
    h_BTD: Array,
    injection_BTD: Array | None,
    placement: Placement,
    *,
    epsilon: float,
    num_heads: int = 1,
    interpret: bool = False,
) -> Array:
    """All layers to `h + injection`."""
    given = (h_BTD,) if injection_BTD is None else (h_BTD, injection_BTD)
    settings = Settings(num_heads, epsilon, tpu_layers.chip_of(placement), interpret)
    weights, structure = jax.tree.flatten(net)

    def run(*arrays: Array) -> Array:
        return _apply(settings, jax.tree.unflatten(structure, arrays[: len(weights)]), arrays[len(weights) :])

    return by_rows(run, placement, len(weights))(*weights, *given)


def _apply(settings: Settings, net: Net, given: tuple[Array, ...]) -> Array:
    if size(net) < settings.chip.vmem_bytes // 3 and _fits(settings, net, given, 1):
        return _call(settings, net, given)
    for i in range(net.mlp.down_LFD.shape[0]):
        mixing, mlp = jax.tree.map(lambda weight, i=i: weight[i : i + 1], (net.mixing, net.mlp))
        given = (_call(settings, Net(mixing, mlp, net.rotation), given),)
    return given[0]


def _fits(settings: Settings, net: Net, given: tuple[Array, ...], block: int) -> bool:
    _, T, D = given[0].shape
    P, vmem_bytes = padded(T, given[0].dtype), settings.chip.vmem_bytes
    buffered = size(net) + block * _example_bytes(len(given), P, D, given[0].dtype)
    return buffered <= vmem_bytes * 5 // 8 and buffered + _worked_on(net, P) <= vmem_bytes * 15 // 16


def _call(settings: Settings, net: Net, given: tuple[Array, ...]) -> Array:
    B, T, D = given[0].shape
    dtype = given[0].dtype
    P = padded(T, dtype)
    block = choose_block(B, settings.chip, partial(_fits, settings, net, given))
    buffered = size(net) + block * _example_bytes(len(given), P, D, dtype)
    limit = min(settings.chip.vmem_bytes * 15 // 16, buffered + max(_worked_on(net, P), INTERMEDIATE_BYTES))
    cost, share = _cost(settings, net, given)
    if block >= B:
        share /= settings.chip.cores  # one block is one core's
    examples = pl.BlockSpec((block, T, D), lambda i: (i, 0, 0))
    whole = jax.tree.map(
        lambda weight: pl.BlockSpec(weight.shape, lambda i: (0,) * weight.ndim, pipeline_mode=pl.Buffered(1)), net
    )
    return pl.pallas_call(
        partial(_kernel, settings),
        grid=(pl.cdiv(B, block),),
        in_specs=(whole, (examples,) * len(given)),
        out_specs=examples,
        out_shape=jax.ShapeDtypeStruct((B, T, D), dtype),
        scratch_shapes=[pltpu.VMEM((block, P, D), dtype)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=limit),
        input_output_aliases={len(jax.tree.leaves(net)): 0},  # in place: a loop would copy what it carries
        cost_estimate=cost,
        interpret=settings.interpret,
        metadata=stated_share(share),
        name="recursion_net",
    )(net, given)


def _example_bytes(num_given: int, P: int, D: int, dtype: Any) -> int:
    return P * D * jnp.dtype(dtype).itemsize * (2 * num_given + 3)  # what moves has two buffers, and one is worked on


def _cost(settings: Settings, net: Net, given: tuple[Array, ...]) -> tuple[pl.CostEstimate, float]:
    """With padded positions: they take time as others do. Also the share of the chip's peak."""
    (B, T, D), chip = given[0].shape, settings.chip
    P = padded(T, given[0].dtype)
    num_layers, F, _ = net.mlp.down_LFD.shape
    widen, exponentials = 3 * P * D * F, P * F
    if isinstance(net.mixing, TokenMlp):
        token_F = net.mixing.down_LPF.shape[-1]
        mix, mix_share, exponentials = 3 * P * D * token_F, chip.token, exponentials + token_F * D
    else:
        mix, mix_share = 4 * P * D * D + 2 * P * P * D, chip.attention
        exponentials += settings.num_heads * P * P
    cost = pl.CostEstimate(
        flops=2 * B * num_layers * (widen + mix),
        transcendentals=B * num_layers * exponentials,
        bytes_accessed=size((net, given, given[0])),
    )
    return cost, (widen + mix) / (widen / chip.channel + mix / mix_share)


def _kernel(settings: Settings, net: Net, given_refs: tuple[Any, ...], out_ref: Any, x_ref: Any) -> None:
    """`net` holds references, too."""
    epsilon, (block, T, D) = settings.epsilon, out_ref.shape
    P, dtype = x_ref.shape[1], x_ref.dtype
    up_ref, down_ref = net.mlp
    num_layers, F, _ = down_ref.shape

    @pl.loop(0, block)
    def start(i: Any) -> None:
        x_ref[i] = jnp.zeros((P, D), dtype)
        x_ref[i, :T] = sum(ref[i].astype(jnp.float32) for ref in given_refs).astype(dtype)

    @pl.loop(0, num_layers)
    def apply_layer(layer: Any) -> None:
        @pl.loop(0, block)
        def mix(i: Any) -> None:
            if isinstance(net.mixing, TokenMlp):
                x_ref[i] = norm(add(x_ref[i], _token_mlp(net.mixing, layer, x_ref[i])), 0, T, epsilon)
            else:
                y_PD = _attention(net.mixing, net.rotation, layer, x_ref[i], T, settings.num_heads)
                x_ref[i] = norm(add(x_ref[i], y_PD), 1, D, epsilon)

        group = math.gcd(block, max(1, ROWS // P))
        rows = group * P

        @pl.loop(0, block // group)
        def widen(i: Any) -> None:
            examples = pl.ds(i * group, group)
            x_RD = x_ref[examples].reshape(rows, D)

            def part(inner: Any, y_RD: Array) -> Array:
                gate_RF, up_RF = (dot(x_RD, up_ref[layer, one, :, inner]) for one in (0, 1))
                return y_RD + dot(gated(gate_RF, up_RF, dtype), down_ref[layer, inner])

            y_RD = over_inner(F, part, jnp.zeros((rows, D), jnp.float32))
            x_ref[examples] = norm(add(x_RD, y_RD), 1, D, epsilon).reshape(group, P, D)

    @pl.loop(0, block)
    def finish(i: Any) -> None:
        out_ref[i] = x_ref[i, :T]


def _token_mlp(refs: TokenMlp, layer: Any, x_PD: Array) -> Array:
    gate_FD, up_FD = (dot(refs.up_L2FP[layer, one], x_PD) for one in (0, 1))
    return dot(refs.down_LPF[layer], gated(gate_FD, up_FD, x_PD.dtype))


def _attention(
    refs: Attention, rotation: Rotation | None, layer: Any, x_PD: Array, num_positions: int, num_heads: int
) -> Array:
    P, D = x_PD.shape
    H, dtype = D // num_heads, x_PD.dtype
    q_PD, k_PD, v_PD = (dot(x_PD, refs.qkv_L3DD[layer, one]).astype(dtype) for one in range(3))
    if rotation is not None:
        q_PD, k_PD = _rotate(q_PD, rotation, H), _rotate(k_PD, rotation, H)
    is_padding_PP = jax.lax.broadcasted_iota(jnp.int32, (P, P), 1) >= num_positions
    y_PD = jnp.zeros((P, D), jnp.float32)
    for head in range(num_heads):
        channels = slice(head * H, (head + 1) * H)
        scores_PP = dot_last(q_PD[:, channels], k_PD[:, channels])
        scores_PP = jnp.where(is_padding_PP, -jnp.inf, scores_PP * (1 / math.sqrt(H)))
        powers_PP = jnp.exp(scores_PP - jnp.max(scores_PP, axis=1, keepdims=True))
        weights_PP = (powers_PP / jnp.sum(powers_PP, axis=1, keepdims=True)).astype(dtype)
        y_PH = dot(weights_PP, v_PD[:, channels]).astype(dtype)
        y_PD += dot(y_PH, refs.out_LDD[layer, channels])
    return y_PD


def _rotate(x_PD: Array, rotation: Rotation, H: int) -> Array:
    """The other half of each head is H / 2 channels to the right of the first half, and to the left of the second."""
    x32, D = x_PD.astype(jnp.float32), x_PD.shape[1]
    is_first = jax.lax.broadcasted_iota(jnp.int32, x32.shape, 1) % H < H // 2
    other = jnp.where(is_first, pltpu.roll(x32, D - H // 2, 1), pltpu.roll(x32, H // 2, 1))
    return (x32 * rotation.cos_PD[...] + other * rotation.sin_PD[...]).astype(x_PD.dtype)
