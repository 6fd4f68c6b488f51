"""Self-attention over a sequence short enough for one program to hold all of it, on GPUs (a Pallas kernel for Triton).

One program computes one head of one example: it reads queries, keys and values out of the projection's own output,
applies the rotary positions, and writes its result; the backward pass writes the gradient of that output directly. The
softmax is computed again there: the whole row is at hand, so that nothing is kept for it. The two halves of a head stay
apart, because rotary positions pair them and a sum over the width is the sum over both; so that to rotate moves no
values between threads.

Shape letters: B batch, T positions, N heads, H width of a head; in a program P positions padded to a power of two and
D half the width of a head. It rounds where the plain formula does; its gradients use the rounded softmax throughout.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from tinypod.kernels.calling import by_rows, splits_width, stated_cost
from tinypod.sharding import Placement

LONGEST = 128  # positions; the scores of one program, P by P in float32, have to fit its registers
HEADS = (32, 64, 128)  # widths; half of one is a side of a matrix product, which has at least 16
LOG2_E = math.log2(math.e)
FORWARD_WARPS = 8
BACKWARD_WARPS = 4  # it spills some registers then, but two programs share a multiprocessor

Rope = tuple[Array, Array]
Ref = Any


def fused(qkv_BT3NH: Array, rope: Rope | None, placement: Placement) -> Array | None:
    """None where these devices, or these shapes, have no such kernel."""
    _, length, _, _, head = qkv_BT3NH.shape
    half = qkv_BT3NH.dtype in (jnp.bfloat16, jnp.float16)
    if placement.kernels != "hopper" or not half or length > LONGEST or head not in HEADS or splits_width(placement):
        return None
    tables = rope or ()
    attend_rows = by_rows(lambda *given: attend(given[-1], given[:-1] or None), placement, num_weights=len(tables))
    return attend_rows(*tables, qkv_BT3NH)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def attend(qkv_BT3NH: Array, rope: Rope | None, interpret: bool = False) -> Array:
    """Every position to every position. `rope`: cos and sin [T, 1, H] as `layers.rope_tables` gives them, constants."""
    return _forward(qkv_BT3NH, rope, interpret)


def _attend_forward(qkv_BT3NH: Array, rope: Rope | None, interpret: bool) -> tuple[Array, Any]:
    return _forward(qkv_BT3NH, rope, interpret), (qkv_BT3NH, rope)


def _attend_backward(interpret: bool, kept: tuple[Array, Rope | None], dy_BTNH: Array) -> tuple[Array, None]:
    qkv_BT3NH, rope = kept
    return _backward(qkv_BT3NH, rope, dy_BTNH, interpret), None


attend.defvjp(_attend_forward, _attend_backward)


def _forward(qkv_BT3NH: Array, rope: Rope | None, interpret: bool) -> Array:
    batch, length, _, heads, head = qkv_BT3NH.shape
    return _call(
        _forward_kernel, "short_attention", (qkv_BT3NH,), rope, (batch, length, heads, head), interpret, FORWARD_WARPS
    )


def _backward(qkv_BT3NH: Array, rope: Rope | None, dy_BTNH: Array, interpret: bool) -> Array:
    return _call(
        _backward_kernel,
        "short_attention_backward",
        (qkv_BT3NH, dy_BTNH),
        rope,
        qkv_BT3NH.shape,
        interpret,
        BACKWARD_WARPS,
    )


class Sizes(NamedTuple):
    length: int
    heads: int
    head: int


def _call(
    kernel: Any,
    name: str,
    inputs: Sequence[Array],
    rope: Rope | None,
    out_shape: tuple[int, ...],
    interpret: bool,
    num_warps: int,
) -> Array:
    batch, length, _, heads, head = inputs[0].shape
    padded = max(16, pl.next_power_of_2(length))
    tables = [jnp.pad(table_T1H[:, 0, : head // 2], ((0, padded - length), (0, 0))) for table_T1H in rope or ()]
    rows = [x.reshape(batch, length, -1) for x in inputs]
    out = jax.ShapeDtypeStruct((batch, length, math.prod(out_shape[2:])), inputs[0].dtype)
    return pl.pallas_call(
        partial(kernel, sizes=Sizes(length, heads, head)),
        grid=(heads, batch),  # the heads of an example lie side by side, and run side by side
        in_specs=[_one_example(padded, x) for x in rows] + [pl.BlockSpec(x.shape, lambda n, b: (0, 0)) for x in tables],
        out_specs=_one_example(padded, out),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        metadata=stated_cost((3 * len(inputs) - 1) * batch * heads * length * length * head),  # 2 products, or 5
        name=name,
    )(*rows, *tables).reshape(out_shape)


def _one_example(padded: int, x: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    return pl.BlockSpec((None, padded, x.shape[2]), lambda n, b: (b, 0, 0))


def _forward_kernel(qkv_ref: Ref, *refs: Ref, sizes: Sizes) -> None:
    *tables, y_ref = refs
    q, k = ([_read(half, sizes) for half in _halves(qkv_ref, which, sizes)] for which in range(2))
    v_PH = _read(_whole(qkv_ref, 2, sizes), sizes)
    q, k = _add_positions((q, k), tables, sizes)
    weights_PP, total_P = _softmax(q, k, sizes)
    _write(_whole(y_ref, 0, sizes), _dot(weights_PP.astype(v_PH.dtype), v_PH) / total_P[:, None], sizes)


def _backward_kernel(qkv_ref: Ref, dy_ref: Ref, *refs: Ref, sizes: Sizes) -> None:
    """Nothing masks rows: those of `dy` after the last position are zero, and with them all that they would add."""
    *tables, dqkv_ref = refs
    q, k = ([_read(half, sizes) for half in _halves(qkv_ref, which, sizes)] for which in range(2))
    v_PH, dy_PH = _read(_whole(qkv_ref, 2, sizes), sizes), _read(_whole(dy_ref, 0, sizes), sizes)
    q, k = _add_positions((q, k), tables, sizes)
    weights_PP, total_P = _softmax(q, k, sizes)
    p_PP = _pin((weights_PP * (1 / total_P)[:, None]).astype(dy_PH.dtype))
    _write(_whole(dqkv_ref, 2, sizes), _dot(p_PP, dy_PH, contract=(0, 0)), sizes)
    dp_PP = _dot(dy_PH, v_PH, contract=(1, 1))
    p_PP = p_PP.astype(jnp.float32)  # from its rounded form, which takes half the registers meanwhile
    mean_P = jnp.sum(p_PP * dp_PP, axis=1)
    ds_PP = _pin((p_PP * (dp_PP - mean_P[:, None])).astype(dy_PH.dtype))
    dq = [_dot(ds_PP, k_PD) for k_PD in k]
    dk = [_dot(ds_PP, q_PD, contract=(0, 0)) for q_PD in q]
    if tables:
        cos_PD, sin_PD = (table[...] for table in tables)
        dq, dk = _rotate(dq, cos_PD, -sin_PD), _rotate(dk, cos_PD, -sin_PD)
    for which, halves in enumerate((dq, dk)):
        for ref, half_PD in zip(_halves(dqkv_ref, which, sizes), halves, strict=True):
            _write(ref, half_PD * (1 / math.sqrt(sizes.head)), sizes)


def _softmax(q: Sequence[Array], k: Sequence[Array], sizes: Sizes) -> tuple[Array, Array]:
    """Before its division, and what to divide by."""
    scale = LOG2_E / math.sqrt(sizes.head)  # powers of two are what the hardware computes
    scores_PP = scale * (_dot(q[0], k[0], contract=(1, 1)) + _dot(q[1], k[1], contract=(1, 1)))
    columns_PP = jax.lax.broadcasted_iota(jnp.int32, scores_PP.shape, 1)
    scores_PP = jnp.where(columns_PP < sizes.length, scores_PP, -jnp.inf)
    weights_PP = jnp.exp2(scores_PP - jnp.max(scores_PP, axis=1)[:, None])
    return weights_PP, jnp.sum(weights_PP, axis=1)


def _dot(a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def _add_positions(both: Sequence[list[Array]], tables: Sequence[Ref], sizes: Sizes) -> list[list[Array]]:
    if not tables:
        return list(both)
    cos_PD, sin_PD = (table[...] for table in tables)
    rows_PD = _rows(cos_PD.shape, sizes)

    def rotated(halves: list[Array]) -> list[Array]:
        turned = _rotate([x.astype(jnp.float32) for x in halves], cos_PD, sin_PD)
        # Zeros stay zeros without this. But then the compiler rotates an operand only after its way through shared
        # memory, and sends the float32 tables the same way.
        turned = [jnp.where(rows_PD, x, 0.0) for x in turned]
        return [_pin(x.astype(halves[0].dtype)) for x in turned]

    return [rotated(halves) for halves in both]


def _rotate(halves: Sequence[Array], cos_PD: Array, sin_PD: Array) -> list[Array]:
    first, second = halves
    return [first * cos_PD - second * sin_PD, second * cos_PD + first * sin_PD]


def _pin(x: Array) -> Array:
    """The compiler moves a transposition up to what its operand was computed from, and computes that twice; not past
    this, which it then removes."""
    return x.reshape(-1).reshape(x.shape)


def _whole(ref: Ref, which: int, sizes: Sizes) -> Ref:
    """This program's head of the queries (0), keys (1) or values (2)."""
    return ref.at[:, pl.ds(_first_column(which, sizes), sizes.head)]


def _halves(ref: Ref, which: int, sizes: Sizes) -> list[Ref]:
    start, half = _first_column(which, sizes), sizes.head // 2
    return [ref.at[:, pl.ds(start, half)], ref.at[:, pl.ds(start + half, half)]]


def _first_column(which: int, sizes: Sizes) -> Array:
    return (which * sizes.heads + pl.program_id(0)) * sizes.head


def _read(ref: Ref, sizes: Sizes) -> Array:
    """Zeros after the last position."""
    return plgpu.load(ref, mask=_rows(ref.shape, sizes), other=jnp.zeros((), ref.dtype))


def _write(ref: Ref, x: Array, sizes: Sizes) -> None:
    plgpu.store(ref, x.astype(ref.dtype), mask=_rows(x.shape, sizes))


def _rows(shape: tuple[int, ...], sizes: Sizes) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) < sizes.length
