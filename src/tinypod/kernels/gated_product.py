"""`silu(x · gate) · (x · up)` in one pass, on Hopper GPUs.

The library's product writes [M, 2F], which another kernel reads to write [M, F]. Here the gate is applied to the sums
while they are in registers. For passes without gradients: the backward pass wants gate and up, so that a pass that is
differentiated leaves them in memory as the plain formula does.

A persistent kernel of Mosaic GPU. In each block of threads one warpgroup fetches tiles of x and of the weights into a
ring in shared memory, and two multiply: each holds 64 rows of `COLUMNS` gates and as many ups.

Shape letters: M rows, D width, F inner width.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl

from tinypod.kernels.calling import by_rows, splits_width, stating_cost
from tinypod.sharding import Placement

PROCESSORS = 132  # of an H100 or H200; each runs one block of threads
WARPGROUPS, ROWS = 2, 64  # that multiply, and the rows of each
COLUMNS = 128  # of gates, and of ups, at a time
DEPTH = 64  # of the width D at a time
STAGES = 4  # of the ring
SNAKE = 8  # tiles of rows that neighbours take before they go on to the next columns: weights stay in the L2 cache
REGISTERS, FEW_REGISTERS = 232, 40  # of a thread that multiplies, and of one that fetches


def fused(gate_up_D2F: Array, x_BTD: Array, placement: Placement) -> Array | None:
    """None where these devices, or these shapes, have no such kernel."""
    D, _, F = gate_up_D2F.shape
    if placement.kernels != "hopper" or x_BTD.dtype != jnp.bfloat16 or splits_width(placement):
        return None
    if D % DEPTH or F % COLUMNS:
        return None
    return by_rows(gated, placement, num_weights=1)(gate_up_D2F, x_BTD)


def plain(gate_up_D2F: Array, x_BTD: Array) -> Array:
    gate_up_BT2F = jnp.einsum("btd,dcf->btcf", x_BTD, gate_up_D2F.astype(x_BTD.dtype))
    return jax.nn.silu(gate_up_BT2F[:, :, 0]) * gate_up_BT2F[:, :, 1]


@jax.custom_vjp
def gated(gate_up_D2F: Array, x_BTD: Array) -> Array:
    return _on_rows(gate_up_D2F, x_BTD)


gated.defvjp(lambda gate_up, x: jax.vjp(plain, gate_up, x), lambda pullback, d_inner: pullback(d_inner))


@custom_vmap
def _on_rows(gate_up_D2F: Array, x_BTD: Array) -> Array:
    B, T, D = x_BTD.shape
    if B * T % (WARPGROUPS * ROWS):
        return plain(gate_up_D2F, x_BTD)
    return multiply(gate_up_D2F, x_BTD.reshape(B * T, D)).reshape(B, T, -1)


@_on_rows.def_vmap
def _packed(size: int, batched: tuple[bool, bool], gate_up: Array, x: Array) -> tuple[Array, bool]:
    """Packed runs have weights of their own, for which the kernel is not made."""
    return jax.vmap(plain, in_axes=[0 if is_batched else None for is_batched in batched])(gate_up, x), True


def multiply(gate_up_D2F: Array, x_MD: Array, interpret: Any = None) -> Array:
    from jax.experimental.pallas import mosaic_gpu as mosaic  # half a second, of which other devices have nothing

    (M, D), F = x_MD.shape, gate_up_D2F.shape[2]
    # Blocks of gates and of ups in turn, so that one fetch brings both.
    in_turn = gate_up_D2F.astype(x_MD.dtype).reshape(D, 2, F // COLUMNS, COLUMNS).swapaxes(1, 2).reshape(D, 2 * F)
    tiles = M // (WARPGROUPS * ROWS), F // COLUMNS
    steps = D // DEPTH
    tiled = (mosaic.TilingTransform((8, 64)), mosaic.SwizzleTransform(128))

    def kernel(x_ref: Any, weights_ref: Any, out_ref: Any, *shared: Any) -> None:
        x_ring, weights_ring, results, full, used = shared
        group, first = jax.lax.axis_index("group"), jax.lax.axis_index("block")
        my_tiles = jax.lax.div(tiles[0] * tiles[1] - first + PROCESSORS - 1, jnp.int32(PROCESSORS))

        def place(tile: Any) -> tuple[Any, Any]:
            """The first row of a tile, and which block of columns it is of."""
            row, column = mosaic.planar_snake(first + tile * PROCESSORS, tiles, 1, SNAKE)
            return row * (WARPGROUPS * ROWS), column

        def slot(step: Any) -> Any:
            return jax.lax.rem(step, jnp.int32(STAGES))

        @pl.when(group < WARPGROUPS)
        def compute() -> None:
            mosaic.set_max_registers(REGISTERS, action="increase")

            @pl.loop(0, my_tiles)
            def one(tile: Any) -> None:
                row, column = place(tile)

                def products(sums: Any) -> Array:
                    @pl.loop(0, steps)
                    def add(i: Any) -> None:
                        step = tile * steps + i
                        mosaic.barrier_wait(full.at[slot(step)])
                        mine = pl.ds(group * ROWS, ROWS)
                        mosaic.wgmma(sums, x_ring.at[slot(step), mine], weights_ring.at[slot(step)])
                        mosaic.wgmma_wait(1)  # of the step before: what it read may be overwritten

                        @pl.when(i > 0)
                        def free() -> None:
                            mosaic.barrier_arrive(used.at[slot(step - 1)])

                    return sums[...]

                sums = pl.run_scoped(products, mosaic.ACC((ROWS, 2 * COLUMNS), jnp.float32))
                mosaic.barrier_arrive(used.at[slot(tile * steps + steps - 1)])
                mosaic.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's results have left
                for part, start in enumerate(range(0, COLUMNS, 64)):
                    gate, up = sums[:, start : start + 64], sums[:, COLUMNS + start : COLUMNS + start + 64]
                    # The card's tanh is one instruction of its slow unit, where 1 / (1 + exp) takes two.
                    results[group, part] = (gate * (0.5 * jnp.tanh(0.5 * gate) + 0.5) * up).astype(x_MD.dtype)
                    mosaic.commit_smem()
                    rows, columns = pl.ds(row + group * ROWS, ROWS), pl.ds(column * COLUMNS + start, 64)
                    mosaic.copy_smem_to_gmem(results.at[group, part], out_ref.at[rows, columns])

            mosaic.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def fetch() -> None:
            mosaic.set_max_registers(FEW_REGISTERS, action="decrease")
            all_steps = my_tiles * steps

            @pl.loop(0, all_steps + STAGES)  # at the end, until all that was fetched is used
            def bring(step: Any) -> None:
                @pl.when(step >= STAGES)
                def wait() -> None:
                    mosaic.barrier_wait(used.at[slot(step)])

                @pl.when(step < all_steps)
                def copy() -> None:
                    row, column = place(jax.lax.div(step, jnp.int32(steps)))
                    depth = pl.ds(jax.lax.rem(step, jnp.int32(steps)) * DEPTH, DEPTH)
                    rows, columns = pl.ds(row, WARPGROUPS * ROWS), pl.ds(column * 2 * COLUMNS, 2 * COLUMNS)
                    barrier = full.at[slot(step)]
                    mosaic.copy_gmem_to_smem(x_ref.at[rows, depth], x_ring.at[slot(step)], barrier)
                    mosaic.copy_gmem_to_smem(weights_ref.at[depth, columns], weights_ring.at[slot(step)], barrier)

    shared = partial(mosaic.SMEM, dtype=x_MD.dtype, transforms=tiled)
    call = mosaic.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((M, F), x_MD.dtype),
        scratch_types=[
            shared((STAGES, WARPGROUPS * ROWS, DEPTH)),
            shared((STAGES, DEPTH, 2 * COLUMNS)),
            shared((WARPGROUPS, COLUMNS // 64, ROWS, 64)),
            mosaic.Barrier(num_arrivals=2, num_barriers=STAGES),  # both copies
            mosaic.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        ],
        grid=(PROCESSORS,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="group",
        kernel_name="gated_product",
        compiler_params=mosaic.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    with stating_cost(2 * M * D * F):
        out: Array = call(x_MD, in_turn)
    return out
