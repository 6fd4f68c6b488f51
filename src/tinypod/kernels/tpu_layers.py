"""Half a layer as one TPU kernel, with a backward pass: an MLP over positions or channels, the residual, the norm.

The plain formula keeps the MLP's inner activations for the backward pass and reads them several times. Here only the
input x and the sum r before the norm are kept; the backward pass computes the rest again.

A block of whole examples is worked on at a time, their positions padded with zeros to whole registers, and zeros stay
exactly zero: no layer has a bias, and the norm of zero is zero.

Shape letters: B batch, T positions, P padded positions, D width, F inner width, R rows of a block.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tinypod.kernels.calling import by_rows, splits_width, stated_share
from tinypod.sharding import Placement

MIB = 2**20


class Chip(NamedTuple):
    """What a kernel has to know of one, and, for plans, what part of its peak the compiler's schedules leave to the
    products of each part of a layer at the recipes' width of 512 (benchmarks/kernel_cycles.py)."""

    vmem_bytes: int  # of one core
    cores: int
    channel: float
    channel_backward: float
    token: float
    token_backward: float
    attention: float


_V4 = Chip(16 * MIB, 2, channel=0.89, channel_backward=0.81, token=0.67, token_backward=0.68, attention=0.37)
_V5E = Chip(128 * MIB, 1, channel=0.92, channel_backward=0.93, token=0.78, token_backward=0.82, attention=0.44)
_V5P = Chip(64 * MIB, 2, channel=0.91, channel_backward=0.93, token=0.78, token_backward=0.81, attention=0.43)
_V6E = Chip(128 * MIB, 1, channel=0.73, channel_backward=0.75, token=0.33, token_backward=0.34, attention=0.14)
_OTHER = _V6E._replace(vmem_bytes=_V4.vmem_bytes)  # the least of each
# By JAX's names for the device; both of them, where it has had two.
CHIPS = {
    "TPU v4": _V4,
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), _V5E),
    **dict.fromkeys(("TPU v5", "TPU v5p"), _V5P),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), _V6E),
}
LANES = 128  # of a register
INTERMEDIATE_BYTES = 16 * MIB  # more than the compiler takes; it keeps the rest for what is around the kernel
INNER_BYTES = 20  # for each inner value that is there at a time: five arrays in float32
LARGEST_BLOCK = 8  # examples: more of them no longer make the products faster
ROWS = 512  # of a product, about: enough that loading the weights does not cost more than using them
INNER = 512  # of the channel MLP's inner width at a time
CHANNELS = 512  # of the token MLP's at a time
CORES = 2  # that may share a chip: each adds up gradients of weights of its own


class Settings(NamedTuple):
    epsilon: float
    chip: Chip
    interpret: bool


def token_block(gate_up_T2F: Array, down_FT: Array, x_BTD: Array, epsilon: float, placement: Placement) -> Array | None:
    """`rms_norm(x + token_swiglu(x), axis=1)`; None where these devices, or these shapes, have no such kernel."""
    return _fused(mix_tokens, gate_up_T2F, down_FT, x_BTD, epsilon, placement)


def channel_block(
    gate_up_D2F: Array, down_FD: Array, x_BTD: Array, epsilon: float, placement: Placement
) -> Array | None:
    """`rms_norm(x + swiglu(x))`; None where these devices, or these shapes, have no such kernel."""
    return _fused(mix_channels, gate_up_D2F, down_FD, x_BTD, epsilon, placement)


def _fused(
    kernel: Callable[..., Array], gate_up: Array, down: Array, x_BTD: Array, epsilon: float, placement: Placement
) -> Array | None:
    if placement.kernels != "tpu" or splits_width(placement) or x_BTD.dtype not in (jnp.bfloat16, jnp.float32):
        return None
    settings = Settings(epsilon, chip_of(placement), interpret=False)
    if x_BTD.shape[2] % LANES or down.shape[0] % LANES or _backward_bytes(kernel, down, x_BTD) > _most(settings):
        return None
    return by_rows(lambda *arrays: kernel(*arrays, settings), placement, num_weights=2)(gate_up, down, x_BTD)


def _most(settings: Settings) -> int:
    return settings.chip.vmem_bytes * 15 // 16


def _backward_bytes(kernel: Callable[..., Array], down: Array, x_BTD: Array) -> int:
    """Of vector memory for one example in the backward pass, which needs more than the other."""
    (_, T, D), F, dtype = x_BTD.shape, down.shape[0], x_BTD.dtype
    P = padded(T, dtype)
    if kernel is mix_tokens:
        weights, sums, moved, inner = 5 * F * P, 3 * F * P, 4 * P * D, _token_inner(D, F)
    else:
        weights, sums, moved, inner = 3 * D * F, 0, 5 * P * D + 3 * P * F, _channel_inner(P, D, F)
    return (weights + 2 * moved + 3 * P * D) * dtype.itemsize + 4 * 2 * sums + INNER_BYTES * inner


def _token_inner(D: int, F: int) -> int:
    """Inner values that are there at a time."""
    return F * math.gcd(D, CHANNELS)


def _channel_inner(P: int, D: int, F: int) -> int:
    """The same, of an example; the sum over the inner width counts as some of them."""
    return P * (math.gcd(F, INNER) + D // 2)


def chip_of(placement: Placement) -> Chip:
    return _OTHER if placement.mesh is None else CHIPS.get(placement.mesh.devices.flat[0].device_kind, _OTHER)


# The token MLP


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def mix_tokens(gate_up_T2F: Array, down_FT: Array, x_BTD: Array, settings: Settings) -> Array:
    return _tokens_forward(gate_up_T2F, down_FT, x_BTD, settings, keep=False)[0]


def _mix_tokens_forward(gate_up_T2F: Array, down_FT: Array, x_BTD: Array, settings: Settings) -> tuple[Array, Any]:
    y_BTD, r_BTD = _tokens_forward(gate_up_T2F, down_FT, x_BTD, settings, keep=True)
    return y_BTD, (gate_up_T2F, down_FT, x_BTD, r_BTD)


def _token_weights(gate_up_T2F: Array, down_FT: Array, dtype: Any) -> tuple[Array, Array]:
    """[2, F, P] and [P, F]."""
    none, padding = (0, 0), (0, padded(down_FT.shape[1], dtype) - down_FT.shape[1])
    up_2FP = jnp.pad(jnp.transpose(gate_up_T2F, (1, 2, 0)).astype(dtype), (none, none, padding))
    return up_2FP, jnp.pad(down_FT.T.astype(dtype), (padding, none))


def _channel_blocks(D: int) -> list[slice]:
    """Channels do not mix here: those that are worked on together only have to fit."""
    step = math.gcd(D, CHANNELS)
    return [slice(start, start + step) for start in range(0, D, step)]


def _tokens_forward(
    gate_up_T2F: Array, down_FT: Array, x_BTD: Array, settings: Settings, *, keep: bool
) -> Sequence[Array]:
    B, T, D = x_BTD.shape
    dtype, F = x_BTD.dtype, down_FT.shape[0]
    weights = _token_weights(gate_up_T2F, down_FT, dtype)

    def kernel(up_ref: Any, down_ref: Any, x_ref: Any, *refs: Any) -> None:
        *outs, scratch_ref = refs

        @pl.loop(0, x_ref.shape[0])
        def mix(i: Any) -> None:
            for channels in _channel_blocks(D):
                x_PD = pad_rows(scratch_ref.at[0, 0, :, channels], x_ref[i, :, channels])
                gate_FD, up_FD = (dot(up_ref[one], x_PD) for one in (0, 1))
                r_PD = add(x_PD, dot(down_ref[...], gated(gate_FD, up_FD, dtype)))
                outs[0][i, :, channels] = norm(r_PD, 0, T, settings.epsilon)[:T]
                if keep:
                    outs[1][i, :, channels] = r_PD[:T]

    outs = [jax.ShapeDtypeStruct(x_BTD.shape, dtype)] * (1 + keep)
    return _call(
        *("token_mixing", kernel, settings, weights, (x_BTD,), outs),
        multiplications=3 * B * T * D * F,
        exponentials=B * F * D,
        share=settings.chip.token,
        inner=_token_inner(D, F),
    )


def _mix_tokens_backward(settings: Settings, saved: Any, dy_BTD: Array) -> tuple[Array, Array, Array]:
    gate_up_T2F, down_FT, x_BTD, r_BTD = saved
    B, T, D = x_BTD.shape
    dtype, F = x_BTD.dtype, down_FT.shape[0]
    up_2FP, down_PF = _token_weights(gate_up_T2F, down_FT, dtype)
    weights = (up_2FP, jnp.swapaxes(up_2FP, 1, 2), down_PF.T)

    def kernel(up_ref: Any, up_T_ref: Any, down_T_ref: Any, x_ref: Any, r_ref: Any, dy_ref: Any, *refs: Any) -> None:
        dx_ref, d_up_ref, d_down_ref, scratch_ref = refs
        block = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)

        @pl.when(pl.program_id(1) == 0)
        def start() -> None:
            d_up_ref[...] = jnp.zeros(d_up_ref.shape, jnp.float32)
            d_down_ref[...] = jnp.zeros(d_down_ref.shape, jnp.float32)

        def part(i: Any, channels: slice) -> None:
            x_PD, r_PD, dy_PD = (
                pad_rows(scratch_ref.at[at, 0, :, channels], ref[i, :, channels])
                for at, ref in enumerate((x_ref, r_ref, dy_ref))
            )
            dr_PD = norm_gradient(r_PD, dy_PD, 0, T, settings.epsilon).astype(dtype)
            gate_FD, up_FD = (dot(up_ref[half], x_PD) for half in (0, 1))
            inner_FD, d_gate_FD, d_up_FD = gated_gradients(gate_FD, up_FD, dot(down_T_ref[...], dr_PD), dtype)
            dx_PD = dr_PD.astype(jnp.float32) + dot(up_T_ref[0], d_gate_FD) + dot(up_T_ref[1], d_up_FD)
            dx_ref[i, :, channels] = dx_PD.astype(dtype)[:T]
            d_up_ref[0, 0] += dot_last(d_gate_FD, x_PD)
            d_up_ref[0, 1] += dot_last(d_up_FD, x_PD)
            d_down_ref[0] += dot_last(inner_FD, dr_PD)

        @pl.loop(0, x_ref.shape[0])
        def turn(i: Any) -> None:
            @pl.when(block * x_ref.shape[0] + i < B)  # beyond them lies what nobody wrote
            def one() -> None:
                for channels in _channel_blocks(D):
                    part(i, channels)

    P = down_PF.shape[0]
    dx_BTD, d_up_C2FP, d_down_CFP = _call(
        *("token_mixing_backward", kernel, settings, weights, (x_BTD, r_BTD, dy_BTD)),
        outs=[jax.ShapeDtypeStruct(x_BTD.shape, dtype)],
        sums=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, F, P), (F, P))],
        multiplications=8 * B * T * D * F,
        exponentials=B * F * D,
        share=settings.chip.token_backward,
        inner=_token_inner(D, F),
    )
    d_gate_up_T2F = jnp.transpose(d_up_C2FP.sum(axis=0)[:, :, :T], (2, 0, 1))
    return d_gate_up_T2F.astype(gate_up_T2F.dtype), d_down_CFP.sum(axis=0)[:, :T].astype(down_FT.dtype), dx_BTD


mix_tokens.defvjp(_mix_tokens_forward, _mix_tokens_backward)


# The channel MLP


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def mix_channels(gate_up_D2F: Array, down_FD: Array, x_BTD: Array, settings: Settings) -> Array:
    return _channels_forward(gate_up_D2F, down_FD, x_BTD, settings, keep=False)[0]


def _mix_channels_forward(gate_up_D2F: Array, down_FD: Array, x_BTD: Array, settings: Settings) -> tuple[Array, Any]:
    y_BTD, r_BTD = _channels_forward(gate_up_D2F, down_FD, x_BTD, settings, keep=True)
    return y_BTD, (gate_up_D2F, down_FD, x_BTD, r_BTD)


def _channel_weights(gate_up_D2F: Array, down_FD: Array, dtype: Any) -> tuple[Array, Array]:
    return jnp.swapaxes(gate_up_D2F, 0, 1).astype(dtype), down_FD.astype(dtype)


def _channels_forward(
    gate_up_D2F: Array, down_FD: Array, x_BTD: Array, settings: Settings, *, keep: bool
) -> Sequence[Array]:
    B, T, D = x_BTD.shape
    dtype, F = x_BTD.dtype, down_FD.shape[0]

    def kernel(up_ref: Any, down_ref: Any, x_ref: Any, *refs: Any) -> None:
        *outs, scratch_ref = refs
        group, P = scratch_ref.shape[1:3]

        @pl.loop(0, x_ref.shape[0] // group)
        def widen(i: Any) -> None:
            x_RD = pad_group(scratch_ref.at[0], x_ref, i)

            def part(block: Any, y_RD: Array) -> Array:
                gate_RF, up_RF = (dot(x_RD, up_ref[one, :, block]) for one in (0, 1))
                return y_RD + dot(gated(gate_RF, up_RF, dtype), down_ref[block])

            r_RD = add(x_RD, over_inner(F, part, jnp.zeros(x_RD.shape, jnp.float32)))
            for ref, value in zip(outs, (norm(r_RD, 1, D, settings.epsilon), r_RD), strict=False):
                cut_group(ref, i, value.reshape(group, P, D))

    weights = _channel_weights(gate_up_D2F, down_FD, dtype)
    outs = [jax.ShapeDtypeStruct(x_BTD.shape, dtype)] * (1 + keep)
    return _call(
        *("channel_mlp", kernel, settings, weights, (x_BTD,), outs),
        multiplications=3 * B * T * D * F,
        exponentials=B * T * F,
        share=settings.chip.channel,
        inner=_channel_inner(padded(T, dtype), D, F),
        most_rows=ROWS,
    )


def _mix_channels_backward(settings: Settings, saved: Any, dy_BTD: Array) -> tuple[Array, Array, Array]:
    """The kernel also writes the factors of the weights' gradients, which are then two large products."""
    gate_up_D2F, down_FD, x_BTD, r_BTD = saved
    B, T, D = x_BTD.shape
    dtype, F = x_BTD.dtype, down_FD.shape[0]
    P = padded(T, dtype)

    def kernel(up_ref: Any, down_ref: Any, x_ref: Any, r_ref: Any, dy_ref: Any, *refs: Any) -> None:
        dx_ref, dr_ref, d_gate_ref, d_up_ref, inner_ref, scratch_ref = refs
        group = scratch_ref.shape[1]

        @pl.loop(0, x_ref.shape[0] // group)
        def turn(i: Any) -> None:
            examples = pl.ds(i * group, group)
            x_RD, r_RD, dy_RD = (pad_group(scratch_ref.at[at], ref, i) for at, ref in enumerate((x_ref, r_ref, dy_ref)))
            dr_RD = norm_gradient(r_RD, dy_RD, 1, D, settings.epsilon).astype(dtype)
            dr_ref[examples] = dr_RD.reshape(group, P, D)

            def part(block: Any, dx_RD: Array) -> Array:
                gate_RF, up_RF = (dot(x_RD, up_ref[one, :, block]) for one in (0, 1))
                factors = gated_gradients(gate_RF, up_RF, dot_last(dr_RD, down_ref[block]), dtype)
                for ref, factor in zip((inner_ref, d_gate_ref, d_up_ref), factors, strict=True):
                    ref[examples, :, block] = factor.reshape(group, P, -1)
                return dx_RD + sum(dot_last(factors[1 + one], up_ref[one, :, block]) for one in (0, 1))

            dx_RD = over_inner(F, part, dr_RD.astype(jnp.float32))
            cut_group(dx_ref, i, dx_RD.astype(dtype).reshape(group, P, D))

    shapes = [(B, T, D), (B, P, D), (B, P, F), (B, P, F), (B, P, F)]
    dx_BTD, dr_BPD, d_gate_BPF, d_up_BPF, inner_BPF = _call(
        *("channel_mlp_backward", kernel, settings, _channel_weights(gate_up_D2F, down_FD, dtype)),
        given=(x_BTD, r_BTD, dy_BTD),
        outs=[jax.ShapeDtypeStruct(shape, dtype) for shape in shapes],
        multiplications=5 * B * T * D * F,
        exponentials=B * T * F,
        share=settings.chip.channel_backward,
        inner=_channel_inner(P, D, F),
        most_rows=ROWS,
    )
    x_BPD = jnp.pad(x_BTD, ((0, 0), (0, P - T), (0, 0)))

    def product(a_BPM: Array, b_BPN: Array) -> Array:
        return jnp.einsum("bpm,bpn->mn", a_BPM, b_BPN, preferred_element_type=jnp.float32)

    d_gate_up_D2F = jnp.stack([product(x_BPD, d_gate_BPF), product(x_BPD, d_up_BPF)], axis=1)
    d_down_FD = product(inner_BPF, dr_BPD)
    return d_gate_up_D2F.astype(gate_up_D2F.dtype), d_down_FD.astype(down_FD.dtype), dx_BTD


mix_channels.defvjp(_mix_channels_forward, _mix_channels_backward)


# What the kernels are made of


def _call(
    name: str,
    kernel: Callable[..., None],
    settings: Settings,
    weights: Sequence[Array],
    given: Sequence[Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    *,
    multiplications: int,
    exponentials: int,
    share: float,
    inner: int,
    sums: Sequence[jax.ShapeDtypeStruct] = (),
    most_rows: int = 1,
) -> Sequence[Array]:
    """Over blocks of examples, of which the kernel takes groups of about `most_rows` rows. `inner`: values that are
    there for each example of a group. `sums`: over all examples, by the core that added them up. `share`: of the chip's
    peak, with all its cores."""
    B, T, D = given[0].shape
    dtype = given[0].dtype
    P = padded(T, dtype)
    widths = [math.prod(shape[2:]) for shape in (*(array.shape for array in given), *(out.shape for out in outs))]
    moved = P * sum(widths) * dtype.itemsize
    example_bytes = 2 * moved + len(given) * P * D * dtype.itemsize  # what moves has two buffers
    whole_bytes = size(weights) + 2 * size(sums)

    def group_of(block: int) -> int:
        return math.gcd(block, max(1, most_rows // P))

    def needed(block: int) -> int:
        return whole_bytes + block * example_bytes + INNER_BYTES * inner * group_of(block)

    block = choose_block(B, settings.chip, lambda block: needed(block) <= _most(settings))
    blocks, group = pl.cdiv(B, block), group_of(block)
    buffered = whole_bytes + block * example_bytes
    cores = CORES if blocks % CORES == 0 else 1
    if settings.chip.cores > 1 and (blocks == 1 or (sums and cores == 1)):
        share /= settings.chip.cores  # the others have nothing to do

    def by_example(array: Any) -> pl.BlockSpec:
        rest = array.shape[1:]
        return pl.BlockSpec((block, *rest), lambda core, i: (core * (blocks // cores) + i, *[0] * len(rest)))

    def whole(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda core, i: (0,) * array.ndim, pipeline_mode=pl.Buffered(1))

    def by_core(array: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, *array.shape), lambda core, i: (core, *[0] * len(array.shape)))

    found: Sequence[Array] = pl.pallas_call(
        kernel,
        grid=(cores, blocks // cores),
        in_specs=[*map(whole, weights), *map(by_example, given)],
        out_specs=[*map(by_example, outs), *map(by_core, sums)],
        out_shape=[*outs, *(jax.ShapeDtypeStruct((cores, *one.shape), one.dtype) for one in sums)],
        scratch_shapes=[pltpu.VMEM((len(given), group, P, D), dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary" if sums else "parallel"),
            vmem_limit_bytes=min(_most(settings), max(needed(block), buffered + INTERMEDIATE_BYTES)),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * multiplications * P // T,
            transcendentals=exponentials,
            bytes_accessed=size((*weights, *given, *outs, *sums)),
        ),
        interpret=settings.interpret,
        metadata=stated_share(share),
        name=name,
    )(*weights, *given)
    return found


def choose_block(B: int, chip: Chip, fits: Callable[[int], bool]) -> int:
    """Examples at a time: as many as fit, but so that two cores have as much to do, where a smaller block does that."""
    sizes = [size for size in (8, 4, 2, 1) if size <= min(LARGEST_BLOCK, B) and fits(size)] or [1]
    return next((size for size in sizes if pl.cdiv(B, size) % chip.cores == 0), sizes[0])


def pad_rows(ref_PD: Any, x_TD: Array) -> Array:
    ref_PD[...] = jnp.zeros(ref_PD.shape, ref_PD.dtype)
    ref_PD[: x_TD.shape[0]] = x_TD
    return ref_PD[...]


def pad_group(ref_GPD: Any, ref_BTD: Any, i: Any) -> Array:
    """The i-th group of a block, as rows."""
    group, P, D = ref_GPD.shape
    for one in range(group):
        pad_rows(ref_GPD.at[one], ref_BTD[i * group + one])
    return ref_GPD[...].reshape(group * P, D)


def cut_group(ref_BTD: Any, i: Any, value_GPD: Array) -> None:
    group, T = value_GPD.shape[0], ref_BTD.shape[1]
    for one in range(group):
        ref_BTD[i * group + one] = value_GPD[one, :T]


def over_inner(F: int, part: Callable[[Any, Array], Array], start: Array) -> Array:
    """Parts of the inner width one after the other."""
    step = math.gcd(F, INNER)
    return jax.lax.fori_loop(
        0, F // step, lambda j, sum_: part(pl.ds(pl.multiple_of(j * step, step), step), sum_), start
    )


def dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def dot_last(a: Array, b: Array) -> Array:
    """a · bᵀ."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _rounded(x: Array, dtype: Any) -> Array:
    return x.astype(dtype).astype(jnp.float32)


def gated(gate: Array, up: Array, dtype: Any) -> Array:
    """silu(gate) · up, of products rounded as the plain formula rounds them."""
    half = 0.5 * _rounded(gate, dtype)
    # A TPU has tanh; for a sigmoid it divides, and the token MLP waits for that more than for its products.
    return (half * (jnp.tanh(half) + 1) * _rounded(up, dtype)).astype(dtype)


def gated_gradients(gate: Array, up: Array, d_inner: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """silu(gate) · up, and the gradients of gate and up."""
    gate, up = _rounded(gate, dtype), _rounded(up, dtype)
    sigmoid = 0.5 * (jnp.tanh(0.5 * gate) + 1)
    silu = gate * sigmoid
    d_gate = d_inner * up * (sigmoid + silu * (1 - sigmoid))
    return (silu * up).astype(dtype), d_gate.astype(dtype), (d_inner * silu).astype(dtype)


def add(x: Array, y: Array) -> Array:
    """As the plain formula rounds."""
    return (x.astype(jnp.float32) + _rounded(y, x.dtype)).astype(x.dtype)


def norm(r: Array, dim: int, count: int, epsilon: float) -> Array:
    """RMS norm over a dim that has `count` values and zeros."""
    r32 = r.astype(jnp.float32)
    return (r32 * _scale(r32, dim, count, epsilon)).astype(r.dtype)


def norm_gradient(r: Array, dy: Array, dim: int, count: int, epsilon: float) -> Array:
    """Of r, in float32."""
    r32, dy32 = r.astype(jnp.float32), dy.astype(jnp.float32)
    scale = _scale(r32, dim, count, epsilon)
    y32 = r32 * scale
    return scale * (dy32 - y32 * (jnp.sum(y32 * dy32, axis=dim, keepdims=True) / count))


def _scale(r32: Array, dim: int, count: int, epsilon: float) -> Array:
    return jax.lax.rsqrt(jnp.sum(jnp.square(r32), axis=dim, keepdims=True) / count + epsilon)


def padded(T: int, dtype: Any) -> int:
    rows = 32 // jnp.dtype(dtype).itemsize  # of a register: values of two bytes lie in pairs
    return -(-T // rows) * rows


def size(tree: Any) -> int:
    """In bytes."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(tree))
