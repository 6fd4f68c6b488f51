"""The kernels of token_mixing.py once more, in Mosaic GPU, for the shapes of the recipes. Without the making of the
shifted weights they take 25 to 44 % less time than Triton's on an H200 with 768 examples of 97 positions and width 512
(LOG.md): one warpgroup fetches while the others multiply, and what the next block of channels needs is under way while
one is being written.

A fetch from memory begins at a row that 8 divides; an example of 97 positions does not. So an example is read as a
window of 128 rows that begins up to 7 rows before it, and the weights exist in 8 versions, shifted by as many rows and
0 elsewhere, so that the rows of its neighbours add nothing, as long as they are finite.

Two barriers guard what is fetched: `_full`, where the fetched bytes arrive and the consumers wait, and `_free`, where
the consumers arrive once they have read them and the fetching warpgroup waits before it writes the next ones there.
Both sides count the steps over all blocks, so that a step's slot is its number modulo the slots, and each completed
barrier is awaited, to the last one, before the kernel ends.

The normalised gate adds to them what token_mixing.py says of it.

Shape letters: B batch, T positions, D width, F inner width; of a window R rows, of which the first N hold any shifted
example; of a warpgroup's tile C channels and I inner units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mg

from tinypod.kernels.calling import stating_cost

LOWERS = jax.__version_info__ >= (0, 11)  # before, Mosaic GPU does not load what is tiled and transposed
MULTIPROCESSORS = 132  # of an H100 or H200; where there are fewer, some blocks wait for the others
ROWS = 128
CHANNELS = 64  # of a warpgroup's tile, and as many inner units: a row of 128 bytes, which is the widest swizzle
GROUPS = 2  # of warps, which multiply; one more fetches
FORWARD_SLOTS, DOWN_SLOTS, BACKWARD_SLOTS, WEIGHTS_SLOTS = 3, 2, 2, 4  # as many as shared memory holds
# Of a thread. Three warpgroups start with 168 each, and four with 128; one that asks for more than the others have
# given back waits for ever.
FETCHING_REGISTERS, MULTIPLYING_REGISTERS = 40, 232
GATING_REGISTERS, ADDING_REGISTERS = 144, 184  # in the gradient of the weights

TILED = (mg.TilingTransform((8, CHANNELS)), mg.SwizzleTransform(128))
TILE = mg.ACC((CHANNELS, CHANNELS), jnp.float32)
load: Any = mg.load  # of any type: that of jax 0.10 wants an index
COMPILER = mg.CompilerParams(approx_math=True)  # for tanh, as in token_mixing.py


def suits(down_FT: Array, x_BTD: Array) -> bool:
    """Triton's kernels pad 64 positions or fewer to fewer rows, and have smaller blocks where these are too few to give
    each multiprocessor one."""
    (B, T, D), F = x_BTD.shape, down_FT.shape[0]
    aligned = B * T % 8 == 0 and D % (GROUPS * CHANNELS) == 0 and F % CHANNELS == 0
    enough = F // CHANNELS > FORWARD_SLOTS and _Blocks(B, T, D).total >= MULTIPROCESSORS
    return LOWERS and x_BTD.dtype == jnp.bfloat16 and 64 < T <= ROWS - 7 and aligned and enough


def weight_splits(down_FT: Array, x_BTD: Array) -> int | None:
    """Among how many thread blocks the examples are shared for each tile of inner units: a multiple of 8, so that each
    has examples of one shift. None where these shapes have no such kernel: half of the multiprocessors would be idle,
    or the sums of so many positions do not fit the registers."""
    (B, T, _), tiles = x_BTD.shape, down_FT.shape[0] // CHANNELS
    if not suits(down_FT, x_BTD) or _shifted_rows(T) > 104:
        return None
    most = MULTIPROCESSORS // tiles
    splits = next((splits for splits in range(most - most % 8, 0, -8) if B % splits == 0), 0)
    return splits if 2 * splits * tiles > MULTIPROCESSORS else None


def _shifted_rows(T: int) -> int:
    return -(-(T + 7) // 8) * 8


def _shifted(weights_TF: Array, rows: int) -> Array:
    """[8, rows, F]: version i begins at row i."""
    after = rows - weights_TF.shape[0]
    return jnp.stack([jnp.pad(weights_TF.astype(jnp.bfloat16), ((i, after - i), (0, 0))) for i in range(8)])


def _weights(gate_up_T2F: Array, down_FT: Array, down_rows: int) -> tuple[Array, Array, Array]:
    gate, up = (_shifted(gate_up_T2F[:, i], ROWS) for i in range(2))
    return gate, up, _shifted(down_FT.T, down_rows)


def _div(a: Any, b: int) -> Any:
    return lax.div(a, np.int32(b))  # not //, which also rounds negative numbers down


def _rem(a: Any, b: int) -> Any:
    return lax.rem(a, np.int32(b))


def _sigmoid(x: Array) -> Array:
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


def _gradients(gate: Array, up: Array, d_inner: Array, along: Array | None = None) -> tuple[Array, Array, Array]:
    """Of `inner = silu(gate) * up`: inner, d_gate, d_up."""
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_inner * up * (sigmoid + silu * (1 - sigmoid))
    if along is None:
        return (silu * up).astype(jnp.bfloat16), d_gate.astype(jnp.bfloat16), (d_inner * silu).astype(jnp.bfloat16)
    d_product = along * (gate * up)
    d_gate, d_up = d_gate + d_product * up, d_inner * silu + d_product * gate
    return (silu * up).astype(jnp.bfloat16), d_gate.astype(jnp.bfloat16), d_up.astype(jnp.bfloat16)


def _loaded(ref: Any) -> Array:
    """[rows, C] of shared memory as [C, rows] in registers, as the tensor cores take and give them."""
    return load(ref.transpose((1, 0)), layout=mg.Layout.WGMMA, optimized=False)


def _store(ref: Any, values: Array) -> None:
    """[C, rows] of registers into [rows, C] of shared memory."""
    ref.transpose((1, 0))[...] = values


def _window(example: Any, T: int) -> Any:
    return pl.ds(_div(example * T, 8) * 8, ROWS)


def _shift(example: Any, T: int) -> Any:
    return _rem(example * T, 8)


def _inside(shape: tuple[int, ...], shift: Any, T: int) -> Array:
    """Which columns of [C, rows] are the example's own."""
    row = mg.broadcasted_iota(jnp.int32, shape, 1, layout=mg.Layout.WGMMA)
    return (row >= shift) & (row < shift + T)


def _along(values_C: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(values_C, shape, [0])


@dataclass(frozen=True)
class _Blocks:
    """Of channels of an example; of n thread blocks, each takes every nth."""

    B: int
    T: int
    D: int

    @property
    def across(self) -> int:
        return self.D // (GROUPS * CHANNELS)

    @property
    def total(self) -> int:
        return self.B * self.across

    def count(self) -> Any:
        return _div(self.total - lax.axis_index("block") + MULTIPROCESSORS - 1, MULTIPROCESSORS)

    def at(self, n: Any) -> tuple[Any, Any]:
        """The example and the first channel."""
        block = lax.axis_index("block") + n * MULTIPROCESSORS
        return _div(block, self.across), _rem(block, self.across) * (GROUPS * CHANNELS)

    def fetch(self, n: Any, source: Any, target: Any, full: Any) -> None:
        for group in range(GROUPS):
            mg.copy_gmem_to_smem(self.window(source, n, group), target.at[group], full)

    def window(self, ref: Any, n: Any, group: int) -> Any:
        example, channel = self.at(n)
        return ref.at[_window(example, self.T), pl.ds(channel + group * CHANNELS, CHANNELS)]


def _smem(*shape: int) -> Any:
    return mg.SMEM(shape, jnp.bfloat16, transforms=TILED)


def _write(values_CN: Array, staged: Any, ref: Any, example: Any, channel: Any, T: int) -> None:
    """The rows of the example; staged is not tiled, since they begin at any row."""
    mg.wait_smem_to_gmem(0, wait_read_only=True)
    _store(staged, values_CN)
    mg.commit_smem()
    mg.copy_smem_to_gmem(staged.at[pl.ds(_shift(example, T), T)], ref.at[example, :, pl.ds(channel, CHANNELS)])


def _call(
    kernel: Callable[..., None],
    name: str,
    outs: list[tuple[tuple[int, ...], Any]],
    scratch: dict[str, Any],
    grid: dict[str, int],
    groups: int,
    multiplications: int,
) -> Callable[..., Any]:
    call = mg.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(*out) for out in outs),
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=groups,
        thread_name="group",
        kernel_name=name,
        compiler_params=COMPILER,
    )

    def with_cost(*arrays: Array) -> Any:
        with stating_cost(multiplications):
            return call(*arrays)

    return with_cost


# Compiled once, however often a step calls it: tracing and compiling a kernel takes half a second.
@partial(jax.jit, static_argnames=("epsilon", "gate_epsilon"))
def forward(
    gate_up_T2F: Array, down_FT: Array, x_BTD: Array, epsilon: float, gate_epsilon: float | None = None
) -> tuple[Array, ...]:
    """y, and the scale of its norm [B, D]; with the normalised gate, the scale of what was added to x [B, D], too."""
    (B, T, D), F = x_BTD.shape, down_FT.shape[0]
    N, steps, blocks = _shifted_rows(T), F // CHANNELS, _Blocks(B, T, D)

    def kernel(
        x_ref: Any, gate_ref: Any, up_ref: Any, down_ref: Any, y_ref: Any, scale_ref: Any, *gate_scale_ref: Any,
        x_s: Any, y_s: Any, gate_s: Any, up_s: Any, down_s: Any,
        x_full: Any, x_free: Any, gate_up_full: Any, gate_up_free: Any, down_full: Any, down_free: Any,
    ) -> None:  # fmt: skip
        group, count = lax.axis_index("group"), blocks.count()

        @pl.when(group < GROUPS)
        def multiply() -> None:
            mg.set_max_registers(MULTIPLYING_REGISTERS, action="increase")

            @pl.loop(0, count)
            def _(n: Any) -> None:
                example, channel = blocks.at(n)
                channel += group * CHANNELS
                buffer = _rem(n, 2)
                x_RC = x_s.at[buffer, group]
                mg.barrier_wait(x_full.at[buffer])

                def add_up(sum_CN: Any) -> Any:
                    def add(i: Any, squares_C: Any) -> Any:
                        slot, down_slot = _rem(n * steps + i, FORWARD_SLOTS), _rem(n * steps + i, DOWN_SLOTS)
                        mg.barrier_wait(gate_up_full.at[slot])

                        def widen(gate_CI: Any, up_CI: Any) -> tuple[Array, Array]:
                            mg.wgmma(gate_CI, x_RC.transpose((1, 0)), gate_s.at[slot])
                            mg.wgmma(up_CI, x_RC.transpose((1, 0)), up_s.at[slot])
                            return gate_CI[...], up_CI[...]

                        gate_CI, up_CI = pl.run_scoped(widen, TILE, TILE)
                        mg.barrier_arrive(gate_up_free.at[slot])
                        inner_CI = (gate_CI * _sigmoid(gate_CI) * up_CI).astype(jnp.bfloat16)
                        if gate_epsilon is not None:
                            product_CI = gate_CI * up_CI
                            squares_C += (product_CI * product_CI).sum(axis=1)
                        mg.barrier_wait(down_full.at[down_slot])
                        mg.wgmma(sum_CN, inner_CI, down_s.at[down_slot].transpose((1, 0)))
                        mg.wgmma_wait(0)
                        mg.barrier_arrive(down_free.at[down_slot])
                        return squares_C

                    if gate_epsilon is None:
                        pl.loop(0, steps)(lambda i: add(i, None))
                        return sum_CN[...]
                    zeros_C = mg.layout_cast(jnp.zeros(CHANNELS, jnp.float32), mg.Layout.WGMMA.reduce(1))
                    squares_C = lax.fori_loop(0, steps, add, zeros_C)
                    return sum_CN[...], squares_C

                sum_CN = pl.run_scoped(add_up, mg.ACC((CHANNELS, N), jnp.float32))
                if gate_epsilon is not None:
                    sum_CN, squares_C = sum_CN
                    gate_scale_C = lax.rsqrt(squares_C * (1 / F) + gate_epsilon)
                    sum_CN *= _along(gate_scale_C, sum_CN.shape)
                    gate_scale_ref[0][example, pl.ds(channel, CHANNELS)] = gate_scale_C
                sum_CN += _loaded(x_RC.at[pl.ds(0, N)]).astype(jnp.float32)
                sum_CN = jnp.where(_inside(sum_CN.shape, _shift(example, T), T), sum_CN, 0.0)
                mg.commit_smem()  # before the next x is written over this one
                mg.barrier_arrive(x_free.at[buffer])
                scale_C = lax.rsqrt((sum_CN * sum_CN).sum(axis=1) * (1 / T) + epsilon)
                y_CN = (sum_CN * _along(scale_C, sum_CN.shape)).astype(jnp.bfloat16)
                scale_ref[example, pl.ds(channel, CHANNELS)] = scale_C
                _write(y_CN, y_s.at[group], y_ref, example, channel, T)

            mg.wait_smem_to_gmem(0)

        @pl.when(group == GROUPS)
        def fetch() -> None:
            mg.set_max_registers(FETCHING_REGISTERS, action="decrease")
            blocks.fetch(jnp.int32(0), x_ref, x_s.at[0], x_full.at[0])

            @pl.loop(0, count * steps + FORWARD_SLOTS)
            def _(step: Any) -> None:
                n, i = _div(step, steps), _rem(step, steps)
                slot, down_slot = _rem(step, FORWARD_SLOTS), _rem(step, DOWN_SLOTS)
                shift, inner = _shift(blocks.at(n)[0], T), pl.ds(i * CHANNELS, CHANNELS)

                @pl.when(step >= FORWARD_SLOTS)
                def _() -> None:
                    mg.barrier_wait(gate_up_free.at[slot])

                @pl.when(step < count * steps)
                def _() -> None:
                    mg.copy_gmem_to_smem(gate_ref.at[shift, :, inner], gate_s.at[slot], gate_up_full.at[slot])
                    mg.copy_gmem_to_smem(up_ref.at[shift, :, inner], up_s.at[slot], gate_up_full.at[slot])

                @pl.when((step >= DOWN_SLOTS) & (step < count * steps + DOWN_SLOTS))
                def _() -> None:
                    mg.barrier_wait(down_free.at[down_slot])

                @pl.when(step < count * steps)
                def _() -> None:
                    mg.copy_gmem_to_smem(down_ref.at[shift, :, inner], down_s.at[down_slot], down_full.at[down_slot])

                # A slot of this block's first step is free again: the consumers are done with the block before, so
                # that the wait for its buffer, which the next block takes, is short.
                @pl.when(i == FORWARD_SLOTS)
                def _() -> None:
                    other = _rem(n + 1, 2)

                    @pl.when(n > 0)
                    def _() -> None:
                        mg.barrier_wait(x_free.at[other])

                    @pl.when(n + 1 < count)
                    def _() -> None:
                        blocks.fetch(n + 1, x_ref, x_s.at[other], x_full.at[other])

            mg.barrier_wait(x_free.at[_rem(count - 1, 2)])

    return _call(
        kernel,
        "mosaic_token_mixing",
        [((B, T, D), jnp.bfloat16)] + [((B, D), jnp.float32)] * (1 if gate_epsilon is None else 2),
        {
            "x_s": _smem(2, GROUPS, ROWS, CHANNELS),
            "y_s": mg.SMEM((GROUPS, N, CHANNELS), jnp.bfloat16),
            "gate_s": _smem(FORWARD_SLOTS, ROWS, CHANNELS),
            "up_s": _smem(FORWARD_SLOTS, ROWS, CHANNELS),
            "down_s": _smem(DOWN_SLOTS, N, CHANNELS),
            "x_full": mg.Barrier(num_arrivals=GROUPS, num_barriers=2),
            "x_free": mg.Barrier(num_arrivals=GROUPS, num_barriers=2),
            "gate_up_full": mg.Barrier(num_arrivals=2, num_barriers=FORWARD_SLOTS),
            "gate_up_free": mg.Barrier(num_arrivals=GROUPS, num_barriers=FORWARD_SLOTS),
            "down_full": mg.Barrier(num_barriers=DOWN_SLOTS),
            "down_free": mg.Barrier(num_arrivals=GROUPS, num_barriers=DOWN_SLOTS),
        },
        {"block": MULTIPROCESSORS},
        GROUPS + 1,
        3 * B * T * D * F,
    )(x_BTD.reshape(B * T, D), *_weights(gate_up_T2F, down_FT, N))


@jax.jit
def backward(
    gate_up_T2F: Array,
    down_FT: Array,
    x_BTD: Array,
    y_BTD: Array,
    scale_BD: Array,
    dy_BTD: Array,
    *gate_scale_BD: Array,
) -> tuple[Array, ...]:
    """The gradient of x, and that of the sum before the norm: dr, which takes the place of dy in shared memory. There
    is no room for a second dy: of the next block only x and y are fetched early, and dy as far as the L2 cache. With
    the normalised gate dr is written scaled, and `along` [B, D] follows."""
    (B, T, D), F = x_BTD.shape, down_FT.shape[0]
    N, steps, blocks = _shifted_rows(T), F // CHANNELS, _Blocks(B, T, D)

    def kernel(
        x_ref: Any, y_ref: Any, dy_ref: Any, scale_ref: Any, gate_ref: Any, up_ref: Any, down_ref: Any, *refs: Any,
        x_s: Any, y_s: Any, dy_s: Any, out_s: Any, gate_s: Any, up_s: Any, down_s: Any,
        x_full: Any, x_free: Any, y_full: Any, y_free: Any, dy_full: Any, dy_free: Any,
        weights_full: Any, weights_free: Any, turn: Any,
    ) -> None:  # fmt: skip
        gate_scale_ref, dx_ref, dr_ref, along_ref = refs if gate_scale_BD else (None, *refs, None)
        group, count = lax.axis_index("group"), blocks.count()

        @pl.when(group < GROUPS)
        def multiply() -> None:
            mg.set_max_registers(MULTIPLYING_REGISTERS, action="increase")

            def take_turns() -> None:
                """One group multiplies while the other computes d_gate and d_up: both pass here after either, and
                group 1 once before it begins."""
                mg.barrier_arrive(turn)
                mg.barrier_wait(turn)

            @pl.loop(0, count)
            def _(n: Any) -> None:
                example, channel = blocks.at(n)
                channel += group * CHANNELS
                x_RC, y_RC, dr_RC = x_s.at[group], y_s.at[group], dy_s.at[group]
                here = example, pl.ds(channel, CHANNELS)
                scale_C = load(scale_ref.at[here], layout=mg.Layout.WGMMA.reduce(1), optimized=False)
                if gate_scale_BD:
                    gate_scale_C = load(gate_scale_ref.at[here], layout=mg.Layout.WGMMA.reduce(1), optimized=False)
                mg.barrier_wait(y_full)
                mg.barrier_wait(dy_full)
                y_CR, dy_CR = _loaded(y_RC).astype(jnp.float32), _loaded(dr_RC).astype(jnp.float32)
                inside_CR = _inside(y_CR.shape, _shift(example, T), T)
                dy_CR = jnp.where(inside_CR, dy_CR, 0.0)
                mean_CR = _along((y_CR * dy_CR).sum(axis=1) * (1 / T), y_CR.shape)
                dr_CR = _along(scale_C, y_CR.shape) * (dy_CR - y_CR * mean_CR)
                dr_CR = jnp.where(inside_CR, dr_CR, 0.0).astype(jnp.bfloat16)
                mg.commit_smem()
                mg.barrier_arrive(y_free)
                _store(dr_RC, dr_CR)
                if gate_scale_BD:
                    along_y_C = (dr_CR.astype(jnp.float32) * y_CR).sum(axis=1) / scale_C
                    scaled_CN = dr_CR[:, :N].astype(jnp.float32) * _along(gate_scale_C, (CHANNELS, N))
                    _write(scaled_CN.astype(jnp.bfloat16), out_s.at[group], dr_ref, example, channel, T)
                else:
                    _write(dr_CR[:, :N], out_s.at[group], dr_ref, example, channel, T)
                mg.barrier_wait(x_full)
                x_CR = _loaded(x_RC)
                mg.commit_smem()
                mg.barrier_arrive(x_free)
                if gate_scale_BD:
                    along_x_C = (dr_CR.astype(jnp.float32) * x_CR.astype(jnp.float32)).sum(axis=1)
                    along_C = (along_x_C - along_y_C) * gate_scale_C * gate_scale_C * (1 / F)
                    along_ref[here] = along_C

                def add_up(sum_CN: Any) -> Array:
                    @pl.loop(0, steps)
                    def _(i: Any) -> None:
                        slot = _rem(n * steps + i, BACKWARD_SLOTS)
                        mg.barrier_wait(weights_full.at[slot])

                        def widen(gate_CI: Any, up_CI: Any, d_inner_CI: Any) -> tuple[Array, Array, Array]:
                            mg.wgmma(gate_CI, x_CR, gate_s.at[slot])
                            mg.wgmma(up_CI, x_CR, up_s.at[slot])
                            mg.wgmma(d_inner_CI, dr_RC.transpose((1, 0)), down_s.at[slot])
                            take_turns()
                            return gate_CI[...], up_CI[...], d_inner_CI[...]

                        gate_CI, up_CI, d_inner_CI = pl.run_scoped(widen, TILE, TILE, TILE)
                        along_CI = None
                        if gate_scale_BD:
                            d_inner_CI *= _along(gate_scale_C, d_inner_CI.shape)
                            along_CI = _along(along_C, d_inner_CI.shape)
                        _, *gradients_CI = _gradients(gate_CI, up_CI, d_inner_CI, along_CI)
                        # The barrier keeps the compiler from computing them only after the turn.
                        d_gate_CI, d_up_CI = lax.optimization_barrier(gradients_CI)
                        take_turns()
                        mg.wgmma(sum_CN, d_gate_CI, gate_s.at[slot, pl.ds(0, N)].transpose((1, 0)))
                        mg.wgmma(sum_CN, d_up_CI, up_s.at[slot, pl.ds(0, N)].transpose((1, 0)))
                        mg.wgmma_wait(0)
                        mg.barrier_arrive(weights_free.at[slot])

                    return sum_CN[...]

                # In turns within a block only: the next dy is not fetched before both are done with this one.
                pl.when(group == 1)(take_turns)
                sum_CN = pl.run_scoped(add_up, mg.ACC((CHANNELS, N), jnp.float32))
                pl.when(group == 0)(take_turns)
                dx_CN = (sum_CN + _loaded(dr_RC.at[pl.ds(0, N)]).astype(jnp.float32)).astype(jnp.bfloat16)
                mg.commit_smem()
                mg.barrier_arrive(dy_free)
                _write(dx_CN, out_s.at[group], dx_ref, example, channel, T)

            mg.wait_smem_to_gmem(0)

        @pl.when(group == GROUPS)
        def fetch() -> None:
            mg.set_max_registers(FETCHING_REGISTERS, action="decrease")

            def fetch_into(n: Any, source: Any, target: Any, full: Any, free: Any) -> None:
                @pl.when(n > 0)
                def _() -> None:
                    mg.barrier_wait(free)

                blocks.fetch(n, source, target, full)

            def fetch_x_and_y(n: Any) -> None:
                fetch_into(n, y_ref, y_s, y_full, y_free)
                fetch_into(n, x_ref, x_s, x_full, x_free)

            def fetch_dy(n: Any) -> None:
                fetch_into(n, dy_ref, dy_s, dy_full, dy_free)

            fetch_dy(jnp.int32(0))
            fetch_x_and_y(jnp.int32(0))

            @pl.loop(0, count * steps + BACKWARD_SLOTS)
            def _(step: Any) -> None:
                n, i, slot = _div(step, steps), _rem(step, steps), _rem(step, BACKWARD_SLOTS)
                shift, inner = _shift(blocks.at(n)[0], T), pl.ds(i * CHANNELS, CHANNELS)

                @pl.when(step >= BACKWARD_SLOTS)
                def _() -> None:
                    mg.barrier_wait(weights_free.at[slot])

                @pl.when(step < count * steps)
                def _() -> None:
                    for ref, target in ((gate_ref, gate_s), (up_ref, up_s), (down_ref, down_s)):
                        mg.copy_gmem_to_smem(ref.at[shift, :, inner], target.at[slot], weights_full.at[slot])

                # The slots hold this block's first steps, and the last products of the block before are done.
                @pl.when((i == BACKWARD_SLOTS - 1) & (n > 0) & (n < count))
                def _() -> None:
                    fetch_dy(n)

                @pl.when((i == BACKWARD_SLOTS) & (n + 1 < count))
                def _() -> None:
                    fetch_x_and_y(n + 1)
                    for group in range(GROUPS):
                        mg.async_prefetch(blocks.window(dy_ref, n + 1, group))

            for free in (x_free, y_free, dy_free):
                mg.barrier_wait(free)

    tiles, slots = _smem(GROUPS, ROWS, CHANNELS), _smem(BACKWARD_SLOTS, ROWS, CHANNELS)
    once = mg.Barrier(num_arrivals=GROUPS)
    return _call(
        kernel,
        "mosaic_token_mixing_backward",
        [((B, T, D), jnp.bfloat16)] * 2 + [((B, D), jnp.float32)] * len(gate_scale_BD),
        {
            **{"x_s": tiles, "y_s": tiles, "dy_s": tiles},
            "out_s": mg.SMEM((GROUPS, N, CHANNELS), jnp.bfloat16),
            **{"gate_s": slots, "up_s": slots, "down_s": slots},
            **{f"{name}_{state}": once for name in ("x", "y", "dy") for state in ("full", "free")},
            "weights_full": mg.Barrier(num_arrivals=3, num_barriers=BACKWARD_SLOTS),
            "weights_free": mg.Barrier(num_arrivals=GROUPS, num_barriers=BACKWARD_SLOTS),
            "turn": once,
        },
        {"block": MULTIPROCESSORS},
        GROUPS + 1,
        5 * B * T * D * F,
    )(
        *(a.reshape(B * T, D) for a in (x_BTD, y_BTD, dy_BTD)),
        *(scale_BD, *_weights(gate_up_T2F, down_FT, ROWS), *gate_scale_BD),
    )


@partial(jax.jit, static_argnames="splits")
def weight_gradients(
    gate_up_T2F: Array, down_FT: Array, x_BTD: Array, dr_BTD: Array, *along_BD: Array, splits: int
) -> tuple[Array, Array]:
    """A thread block has one tile of inner units and a share of the examples, those of one shift, so that their sums
    line up. Groups 0 and 1 compute inner, d_gate and d_up of every other tile of channels and leave them in shared
    memory; group 2 multiplies them by x and dr and holds the sums; group 3 fetches."""
    (B, T, D), F = x_BTD.shape, down_FT.shape[0]
    N, across = _shifted_rows(T), D // CHANNELS
    examples, tiles = B // splits, B // splits * across

    def kernel(
        x_ref: Any, dr_ref: Any, gate_ref: Any, up_ref: Any, down_ref: Any, *refs: Any,
        x_s: Any, dr_s: Any, weights_s: Any, products_s: Any,
        tile_full: Any, tile_free: Any, weights_full: Any, products_full: Any, products_free: Any,
    ) -> None:  # fmt: skip
        group, split, sum_refs = lax.axis_index("group"), lax.axis_index("split"), refs[-3:]
        inner = pl.ds(lax.axis_index("inner") * CHANNELS, CHANNELS)

        def at(first: Any, tile: Any) -> tuple[Any, Any]:
            """The example and the first channel; `first` is the split's first example."""
            example = first + 8 * (_div(split, 8) * examples + _div(tile, across))
            return example, _rem(tile, across) * CHANNELS

        @pl.when(group < 2)
        def widen_and_gate() -> None:
            mg.set_max_registers(GATING_REGISTERS, action="increase")
            mg.barrier_wait(weights_full)

            @pl.loop(0, _div(tiles + 1 - group, 2))
            def _(turn: Any) -> None:
                slot, along_IC = _rem(2 * turn + group, WEIGHTS_SLOTS), None
                if along_BD:
                    example, channel = at(_rem(split, 8), 2 * turn + group)
                    along_ref = refs[0].at[example, pl.ds(channel, CHANNELS)]
                    along_C = load(along_ref, layout=mg.Layout.WGMMA.reduce(0), optimized=False)
                    along_IC = lax.broadcast_in_dim(along_C, (CHANNELS, CHANNELS), [1])
                mg.barrier_wait(tile_full.at[slot])

                def widen(gate_IC: Any, up_IC: Any, d_inner_IC: Any) -> tuple[Array, Array, Array]:
                    mg.wgmma(gate_IC, weights_s.at[0].transpose((1, 0)), x_s.at[slot])
                    mg.wgmma(up_IC, weights_s.at[1].transpose((1, 0)), x_s.at[slot])
                    mg.wgmma(d_inner_IC, weights_s.at[2].transpose((1, 0)), dr_s.at[slot])
                    return gate_IC[...], up_IC[...], d_inner_IC[...]

                gate_IC, up_IC, d_inner_IC = pl.run_scoped(widen, TILE, TILE, TILE)
                mg.barrier_arrive(tile_free.at[slot])
                inner_IC, d_gate_IC, d_up_IC = _gradients(gate_IC, up_IC, d_inner_IC, along_IC)

                @pl.when(turn > 0)
                def _() -> None:
                    mg.barrier_wait(products_free.at[group])

                for i, value_IC in enumerate((d_gate_IC, d_up_IC, inner_IC)):
                    products_s[group, i] = value_IC
                mg.commit_smem()
                mg.barrier_arrive(products_full.at[group])

            mg.barrier_wait(products_free.at[group])

        @pl.when(group == 2)
        def add_up() -> None:
            mg.set_max_registers(ADDING_REGISTERS, action="increase")

            def add_tiles(*sums_IN: Any) -> tuple[Array, ...]:
                @pl.loop(0, tiles)
                def _(tile: Any) -> None:
                    slot, source = _rem(tile, WEIGHTS_SLOTS), _rem(tile, 2)
                    mg.barrier_wait(tile_full.at[slot])
                    mg.barrier_wait(products_full.at[source])
                    x_CN, dr_CN = (ref.at[slot, pl.ds(0, N)].transpose((1, 0)) for ref in (x_s, dr_s))
                    for i, right_CN in enumerate((x_CN, x_CN, dr_CN)):
                        mg.wgmma(sums_IN[i], products_s.at[source, i], right_CN)
                    mg.wgmma_wait(0)
                    mg.barrier_arrive(tile_free.at[slot])
                    mg.barrier_arrive(products_free.at[source])

                return tuple(sum_IN[...] for sum_IN in sums_IN)

            sums_IN = pl.run_scoped(add_tiles, *[mg.ACC((CHANNELS, N), jnp.float32)] * 3)
            for ref, sum_IN in zip(sum_refs, sums_IN, strict=True):
                ref[split, inner] = sum_IN

        @pl.when(group == 3)
        def fetch() -> None:
            mg.set_max_registers(FETCHING_REGISTERS, action="decrease")
            first = _rem(split, 8)
            for i, ref in enumerate((gate_ref, up_ref, down_ref)):
                mg.copy_gmem_to_smem(ref.at[_shift(first, T), :, inner], weights_s.at[i], weights_full)

            @pl.loop(0, tiles + WEIGHTS_SLOTS)
            def _(tile: Any) -> None:
                slot = _rem(tile, WEIGHTS_SLOTS)

                @pl.when(tile >= WEIGHTS_SLOTS)
                def _() -> None:
                    mg.barrier_wait(tile_free.at[slot])

                @pl.when(tile < tiles)
                def _() -> None:
                    example, channel = at(first, tile)
                    here = _window(example, T), pl.ds(channel, CHANNELS)
                    mg.copy_gmem_to_smem(x_ref.at[here], x_s.at[slot], tile_full.at[slot])
                    mg.copy_gmem_to_smem(dr_ref.at[here], dr_s.at[slot], tile_full.at[slot])

    slots = _smem(WEIGHTS_SLOTS, ROWS, CHANNELS)
    sums = _call(
        kernel,
        "mosaic_token_mixing_weights",
        [((splits, F, N), jnp.float32)] * 3,
        {
            **{"x_s": slots, "dr_s": slots},
            "weights_s": _smem(3, ROWS, CHANNELS),
            "products_s": _smem(2, 3, CHANNELS, CHANNELS),
            "tile_full": mg.Barrier(num_arrivals=2, num_barriers=WEIGHTS_SLOTS),
            "tile_free": mg.Barrier(num_arrivals=2, num_barriers=WEIGHTS_SLOTS),  # group 0 or 1, and group 2
            "weights_full": mg.Barrier(num_arrivals=3),
            "products_full": mg.Barrier(num_barriers=2),
            "products_free": mg.Barrier(num_barriers=2),
        },
        {"inner": F // CHANNELS, "split": splits},
        4,
        6 * B * T * D * F,
    )(x_BTD.reshape(B * T, D), dr_BTD.reshape(B * T, D), *_weights(gate_up_T2F, down_FT, ROWS), *along_BD)

    def together(sums_SFN: Array) -> Array:
        sums_8FN = sums_SFN.reshape(splits // 8, 8, F, N).sum(axis=0)
        own_FT = [sums_8FN[i, :, i * T % 8 : i * T % 8 + T] for i in range(8)]
        return sum(own_FT[1:], own_FT[0])

    d_gate_FT, d_up_FT, d_down_FT = map(together, sums)
    return jnp.stack([d_gate_FT.T, d_up_FT.T], axis=1), d_down_FT
