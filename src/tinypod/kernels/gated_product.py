"""The channel MLP, `(silu(x · gate) · (x · up)) · down`, on Hopper GPUs: what stands between its products is computed
while their sums are in registers.

The library's first product writes [M, 2F], which another kernel reads to write [M, F]. Here the product writes [M, F];
where a backward pass will want them, gates and ups as well. In that pass the gradient of the inner units is never
written: those of gates and ups are made of the product's sums at once. The products with nothing after them are the
library's.

With the normalised gate, `sigmoid(g) · rms(g · v)` is `s · silu(g) · v`, where s is one number for a row. The same
kernels serve: the first also writes what a row's s is made of, one sum of (g · v)² for each tile of columns; the rows
are scaled after the last product; and in the backward pass what a row's gradient owes to s is one number for each row.

Persistent kernels of Mosaic GPU. In each block of threads one warpgroup fetches tiles of both factors into a ring in
shared memory, and two multiply, 64 rows each.

Shape letters: M rows, D width, F inner width.
"""

from collections.abc import Callable
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
COLUMNS = 128  # of inner units at a time
CHUNK = 64  # of them in a row of shared memory: 128 bytes, the widest swizzle
DEPTH = 64  # of the sum at a time
SNAKE = 8  # tiles of columns that neighbours take before they go on to the next rows, which they so fetch together
REGISTERS, FEW_REGISTERS = 232, 40  # of a thread that multiplies, and of one that fetches


def fused(
    gate_up_D2F: Array, down_FD: Array, x_BTD: Array, placement: Placement, gate_epsilon: float | None = None
) -> Array | None:
    """None where these devices, or these shapes, have no such kernel. With an epsilon, the normalised gate."""
    D, _, F = gate_up_D2F.shape
    if placement.kernels != "hopper" or x_BTD.dtype != jnp.bfloat16 or splits_width(placement):
        return None
    if D % DEPTH or F % COLUMNS:
        return None
    product = swiglu if gate_epsilon is None else partial(normalised, gate_epsilon=gate_epsilon)
    return by_rows(product, placement, num_weights=2)(gate_up_D2F, down_FD, x_BTD)


def plain(gate_up_D2F: Array, down_FD: Array, x_BTD: Array, gate_epsilon: float | None = None) -> Array:
    gate_up_BT2F = jnp.einsum("btd,dcf->btcf", x_BTD, gate_up_D2F.astype(x_BTD.dtype))
    inner_BTF = inner_units(gate_up_BT2F[:, :, 0], gate_up_BT2F[:, :, 1], gate_epsilon)
    return inner_BTF @ down_FD.astype(x_BTD.dtype)


def inner_units(gate: Array, up: Array, gate_epsilon: float | None, axis: int = -1) -> Array:
    """What stands between the products of an MLP: `silu(gate) · up`; with an epsilon the normalised gate (arXiv
    2601.19085), `sigmoid(gate) · rms_norm(gate · up)` along the inner units."""
    if gate_epsilon is None:
        return jax.nn.silu(gate) * up
    product = (gate * up).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(product), axis=axis, keepdims=True) + gate_epsilon)
    return jax.nn.sigmoid(gate) * (product * scale).astype(gate.dtype)


@jax.custom_vjp
def swiglu(gate_up_D2F: Array, down_FD: Array, x_BTD: Array) -> Array:
    inner_MF = _unless_odd(gated, lambda *given: _gated(*given)[0])(gate_up_D2F, _flat(x_BTD))
    return (inner_MF @ down_FD.astype(x_BTD.dtype)).reshape(x_BTD.shape)


def _forward(gate_up_D2F: Array, down_FD: Array, x_BTD: Array) -> tuple[Array, tuple[Array, ...]]:
    inner_MF, gate_up_M2F = _unless_odd(partial(gated, keep=True), _gated)(gate_up_D2F, _flat(x_BTD))
    y_BTD = (inner_MF @ down_FD.astype(x_BTD.dtype)).reshape(x_BTD.shape)
    return y_BTD, (gate_up_D2F, down_FD, x_BTD, inner_MF, gate_up_M2F)


def _backward(kept: tuple[Array, ...], dy_BTD: Array) -> tuple[Array, Array, Array]:
    gate_up_D2F, down_FD, x_BTD, inner_MF, gate_up_M2F = kept
    dy_MD = _flat(dy_BTD)
    d_gate_up_M2F = _unless_odd(gated_gradient, _gated_gradient)(down_FD, dy_MD, gate_up_M2F)
    return _through_products(gate_up_D2F, down_FD, x_BTD, inner_MF, d_gate_up_M2F, dy_MD)


def _through_products(
    gate_up_D2F: Array, down_FD: Array, x_BTD: Array, inner_MF: Array, d_gate_up_M2F: Array, dy_MD: Array
) -> tuple[Array, Array, Array]:
    """The gradients of both weights and of x."""
    x_MD = _flat(x_BTD)
    d_gate_up_MN = d_gate_up_M2F.reshape(x_MD.shape[0], -1)
    dx_MD = d_gate_up_MN @ gate_up_D2F.reshape(x_MD.shape[1], -1).T.astype(x_MD.dtype)
    # In float32, as those of the weights' many uses are added up.
    summed = partial(jnp.einsum, "ma,mb->ab", preferred_element_type=jnp.float32)
    d_gate_up_DN, d_down_FD = summed(x_MD, d_gate_up_MN), summed(inner_MF, dy_MD)
    d_gate_up_D2F = d_gate_up_DN.reshape(gate_up_D2F.shape).astype(gate_up_D2F.dtype)
    return d_gate_up_D2F, d_down_FD.astype(down_FD.dtype), dx_MD.reshape(x_BTD.shape)


swiglu.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def normalised(gate_up_D2F: Array, down_FD: Array, x_BTD: Array, gate_epsilon: float) -> Array:
    kernel, formula = partial(gated, squares=True), lambda *given: _gated_and_squares(*given)[:2]
    inner_MF, squares_NM = _unless_odd(kernel, formula)(gate_up_D2F, _flat(x_BTD))
    return _scaled_product(down_FD, x_BTD, inner_MF, squares_NM, gate_epsilon)[0]


def _normalised_forward(
    gate_up_D2F: Array, down_FD: Array, x_BTD: Array, gate_epsilon: float
) -> tuple[Array, tuple[Array, ...]]:
    kernel = partial(gated, keep=True, squares=True)
    inner_MF, squares_NM, gate_up_M2F = _unless_odd(kernel, _gated_and_squares)(gate_up_D2F, _flat(x_BTD))
    y_BTD, scale_M = _scaled_product(down_FD, x_BTD, inner_MF, squares_NM, gate_epsilon)
    return y_BTD, (gate_up_D2F, down_FD, x_BTD, inner_MF, gate_up_M2F, scale_M, y_BTD)


def _scaled_product(
    down_FD: Array, x_BTD: Array, inner_MF: Array, squares_NM: Array, gate_epsilon: float
) -> tuple[Array, Array]:
    """y, and the scale of each row."""
    scale_M = jax.lax.rsqrt(squares_NM.sum(axis=0) / down_FD.shape[0] + gate_epsilon)
    y_MD = (inner_MF @ down_FD.astype(x_BTD.dtype)).astype(jnp.float32) * scale_M[:, None]
    return y_MD.astype(x_BTD.dtype).reshape(x_BTD.shape), scale_M


def _normalised_backward(gate_epsilon: float, kept: tuple[Array, ...], dy_BTD: Array) -> tuple[Array, Array, Array]:
    """y is s · (inner · down), and s is (mean((gate · up)²) + epsilon)^-½: the gradient of s, `along` y over s, goes
    to each gate · up by -s³ / F times itself."""
    gate_up_D2F, down_FD, x_BTD, inner_MF, gate_up_M2F, scale_M, y_BTD = kept
    dy_MD, y_MD = _flat(dy_BTD).astype(jnp.float32), _flat(y_BTD).astype(jnp.float32)
    along_M = jnp.sum(dy_MD * y_MD, axis=1) * jnp.square(scale_M) / -down_FD.shape[0]
    scaled_MD = (dy_MD * scale_M[:, None]).astype(dy_BTD.dtype)
    d_gate_up_M2F = _unless_odd(gated_gradient, _gated_gradient)(down_FD, scaled_MD, gate_up_M2F, along_M)
    return _through_products(gate_up_D2F, down_FD, x_BTD, inner_MF, d_gate_up_M2F, scaled_MD)


normalised.defvjp(_normalised_forward, _normalised_backward)


def _flat(x_BTD: Array) -> Array:
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def _unless_odd(kernel: Callable[..., Any], formula: Callable[..., Any]) -> Callable[..., Any]:
    """Of weights and rows: the formula for rows that do not fill the kernel's tiles; and for packed runs, whose weights
    are their own, for which it is not made."""
    either = custom_vmap(lambda *given: (formula if given[1].shape[0] % (WARPGROUPS * ROWS) else kernel)(*given))

    @either.def_vmap
    def packed(size: int, batched: list[bool], *given: Array) -> tuple[Any, Any]:
        results = jax.vmap(formula, in_axes=[0 if is_batched else None for is_batched in batched])(*given)
        return results, jax.tree.map(lambda _: True, results)

    return either


def _gated(gate_up_D2F: Array, x_MD: Array) -> tuple[Array, Array]:
    gate_up_M2F = jnp.einsum("md,dcf->mcf", x_MD, gate_up_D2F.astype(x_MD.dtype))
    return jax.nn.silu(gate_up_M2F[:, 0]) * gate_up_M2F[:, 1], gate_up_M2F


def _gated_and_squares(gate_up_D2F: Array, x_MD: Array) -> tuple[Array, Array, Array]:
    """The sums of squares are in one part here, [1, M]."""
    inner_MF, gate_up_M2F = _gated(gate_up_D2F, x_MD)
    product_MF = gate_up_M2F[:, 0].astype(jnp.float32) * gate_up_M2F[:, 1].astype(jnp.float32)
    return inner_MF, jnp.sum(jnp.square(product_MF), axis=1)[None], gate_up_M2F


def _gated_gradient(down_FD: Array, dy_MD: Array, gate_up_M2F: Array, along_M: Array | None = None) -> Array:
    d_inner_MF = dy_MD @ down_FD.T.astype(dy_MD.dtype)
    along_M1 = None if along_M is None else along_M[:, None]
    return jnp.stack(_through_gate(gate_up_M2F[:, 0], gate_up_M2F[:, 1], d_inner_MF, along_M1), axis=1)


def _sigmoid(x: Array) -> Array:
    """The card's tanh is one instruction of its slow unit, where 1 / (1 + exp) takes two."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


def _through_gate(gate: Array, up: Array, d_inner: Array, along: Array | None = None) -> tuple[Array, Array]:
    """The gradients of gate and up; with the normalised gate, that of gate · up by way of its row's scale is `along`
    times itself."""
    gate32, up32, d32 = gate.astype(jnp.float32), up.astype(jnp.float32), d_inner.astype(jnp.float32)
    sigmoid = _sigmoid(gate32)
    silu = gate32 * sigmoid
    d_gate = d32 * up32 * (sigmoid + silu * (1 - sigmoid))
    if along is None:
        return d_gate.astype(gate.dtype), (d32 * silu).astype(up.dtype)
    d_product = along * (gate32 * up32)
    return (d_gate + d_product * up32).astype(gate.dtype), (d32 * silu + d_product * gate32).astype(up.dtype)


@partial(jax.jit, static_argnames=("keep", "squares", "interpret"))  # once, however often a step calls it
def gated(gate_up_D2F: Array, x_MD: Array, keep: bool = False, squares: bool = False, interpret: Any = None) -> Any:
    """The inner units [M, F]; with `squares`, each row's sums of (gate · up)² over each tile's columns, float32 [tiles,
    M], too; to keep for the backward pass, gates and ups [M, 2, F], too."""
    from jax.experimental.pallas import mosaic_gpu as mosaic  # half a second, of which other devices have nothing

    (M, D), F, dtype = x_MD.shape, gate_up_D2F.shape[2], x_MD.dtype
    # Blocks of gates and of ups in turn, so that one fetch brings both.
    in_turn = gate_up_D2F.astype(dtype).reshape(D, 2, F // COLUMNS, COLUMNS).swapaxes(1, 2).reshape(D, 2 * F)
    slots, chunks = 2, COLUMNS // CHUNK

    def finish(sums: Array, tile: Any, rows: Any, column: Any, *outs: Any, results: Any) -> None:
        group = jax.lax.axis_index("group")
        written = tile * ((3 if keep else 1) * chunks)

        def write(values: Array, out: Any, start: Any) -> None:
            nonlocal written
            slot = results.at[group, jax.lax.rem(written, jnp.int32(slots))]
            mosaic.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # what was in this slot has left
            slot[...] = values.astype(dtype)
            mosaic.commit_smem()
            mosaic.copy_smem_to_gmem(slot, out.at[rows, pl.ds(start, CHUNK)])
            written += 1

        if squares:
            product = sums[:, :COLUMNS] * sums[:, COLUMNS:]
            outs[1][jax.lax.div(column, jnp.int32(COLUMNS)), rows] = (product * product).sum(axis=1)
        for start in range(0, COLUMNS, CHUNK):
            gate, up = sums[:, start : start + CHUNK], sums[:, COLUMNS + start : COLUMNS + start + CHUNK]
            if keep:
                write(gate, outs[-1], column + start)
                write(up, outs[-1], F + column + start)
            write(gate * _sigmoid(gate) * up, outs[0], column + start)

    found = _product(
        "gated_product",
        [x_MD, in_turn],
        [((M, F), dtype)] + [((F // COLUMNS, M), jnp.float32)] * squares + [((M, 2 * F), dtype)] * keep,
        columns=2 * COLUMNS,
        stages=4,
        finish=finish,
        scratch={"results": _shared(WARPGROUPS, slots, ROWS, CHUNK)},
        interpret=interpret,
    )
    if keep:
        found[-1] = found[-1].reshape(M, 2, F)
    return tuple(found) if keep or squares else found[0]


@partial(jax.jit, static_argnames="interpret")
def gated_gradient(
    down_FD: Array, dy_MD: Array, gate_up_M2F: Array, along_M: Array | None = None, interpret: Any = None
) -> Array:
    """Of gates and ups [M, 2, F]; with the normalised gate, `along` of each row. A tile of both becomes its gradients
    where it is in shared memory. There is no second place for the next one: a longer ring brings more (0.35 ms where
    two places took 0.49)."""
    from jax.experimental.pallas import mosaic_gpu as mosaic

    M, _, F = gate_up_M2F.shape
    pieces = [(part, chunk) for part in range(2) for chunk in range(COLUMNS // CHUNK)]

    def place(part: int, chunk: int, rows: Any, column: Any) -> tuple[Any, Any]:
        return rows, pl.ds(part * F + column + chunk * CHUNK, CHUNK)

    def fetch(rows: Any, column: Any, gate_up_ref: Any, *_: Any, kept: Any, kept_full: Any) -> None:
        group = jax.lax.axis_index("group")
        mosaic.wait_smem_to_gmem(0, wait_read_only=True)  # the gradients that were there have left
        for part, chunk in pieces:
            source = gate_up_ref.at[place(part, chunk, rows, column)]
            mosaic.copy_gmem_to_smem(source, kept.at[group, part, chunk], kept_full.at[group])

    def finish(sums: Array, tile: Any, rows: Any, column: Any, *refs: Any, kept: Any, kept_full: Any) -> None:
        group, along, out_ref = jax.lax.axis_index("group"), None, refs[-1]
        if along_M is not None:
            along = jax.lax.broadcast_in_dim(_load_rows(refs[1].at[rows], interpret), (ROWS, CHUNK), [0])
        mosaic.barrier_wait(kept_full.at[group])
        for chunk in range(COLUMNS // CHUNK):
            gate, up = (kept.at[group, part, chunk] for part in range(2))
            d_inner = sums[:, chunk * CHUNK : (chunk + 1) * CHUNK]
            gate[...], up[...] = _through_gate(gate[...], up[...], d_inner, along)
        mosaic.commit_smem()
        for part, chunk in pieces:
            target = out_ref.at[place(part, chunk, rows, column)]
            mosaic.copy_smem_to_gmem(kept.at[group, part, chunk], target)

    (found,) = _product(
        "gated_product_gradient",
        [dy_MD, down_FD.T.astype(dy_MD.dtype), gate_up_M2F.reshape(M, 2 * F), *([] if along_M is None else [along_M])],
        [((M, 2 * F), dy_MD.dtype)],
        columns=COLUMNS,
        stages=5,
        prepare=fetch,
        finish=finish,
        scratch={
            "kept": _shared(WARPGROUPS, 2, COLUMNS // CHUNK, ROWS, CHUNK),
            "kept_full": mosaic.Barrier(num_arrivals=len(pieces), num_barriers=WARPGROUPS),
        },
        interpret=interpret,
    )
    return found.reshape(M, 2, F)


def _load_rows(ref: Any, interpret: Any) -> Array:
    """One number for each row of a warpgroup's sums, from memory to where those sums are."""
    from jax.experimental.pallas import mosaic_gpu as mosaic

    if interpret:  # which has no such load
        return ref[...]
    load: Any = mosaic.load if jax.__version_info__ >= (0, 11) else partial(mosaic.load, idx=())
    return load(ref, layout=mosaic.Layout.WGMMA.reduce(1), optimized=False)


def _shared(*shape: int) -> Any:
    from jax.experimental.pallas import mosaic_gpu as mosaic

    tiled = (mosaic.TilingTransform((8, CHUNK)), mosaic.SwizzleTransform(2 * CHUNK))
    return mosaic.SMEM(shape, dtype=jnp.bfloat16, transforms=tiled)


def _product(
    name: str,
    arrays: list[Array],
    outs: list[tuple[tuple[int, int], Any]],
    *,
    columns: int,
    stages: int,
    finish: Callable[..., None],
    prepare: Callable[..., None] | None = None,
    scratch: dict[str, Any],
    interpret: Any,
) -> list[Array]:
    """Of the first two arrays, with so many columns of the second in a tile. The ring has as many stages as shared
    memory holds. `finish` takes a warpgroup's sums; `prepare` fetches what it needs for that while it multiplies."""
    from jax.experimental.pallas import mosaic_gpu as mosaic

    (M, D), N = arrays[0].shape, arrays[1].shape[1]
    tiles, steps = (M // (WARPGROUPS * ROWS), N // columns), D // DEPTH

    def kernel(
        x_ref: Any, weights_ref: Any, *refs: Any, x_ring: Any, weights_ring: Any, full: Any, used: Any, **own: Any
    ) -> None:
        group, first = jax.lax.axis_index("group"), jax.lax.axis_index("block")
        my_tiles = jax.lax.div(tiles[0] * tiles[1] - first + PROCESSORS - 1, jnp.int32(PROCESSORS))

        def place(tile: Any) -> tuple[Any, Any]:
            """The first row of a tile, and which of the columns' blocks it is in."""
            row, column = mosaic.planar_snake(first + tile * PROCESSORS, tiles, 1, SNAKE)
            return row * (WARPGROUPS * ROWS), column

        def mine(tile: Any) -> tuple[Any, Any]:
            """This warpgroup's rows, and the first inner unit."""
            row, column = place(tile)
            return pl.ds(row + group * ROWS, ROWS), column * COLUMNS

        def slot(step: Any) -> Any:
            return jax.lax.rem(step, jnp.int32(stages))

        @pl.when(group < WARPGROUPS)
        def compute() -> None:
            mosaic.set_max_registers(REGISTERS, action="increase")

            @pl.loop(0, my_tiles)
            def one(tile: Any) -> None:
                def products(sums: Any) -> Array:
                    @pl.loop(0, steps)
                    def add(i: Any) -> None:
                        step = tile * steps + i
                        mosaic.barrier_wait(full.at[slot(step)])
                        rows = pl.ds(group * ROWS, ROWS)
                        mosaic.wgmma(sums, x_ring.at[slot(step), rows], weights_ring.at[slot(step)])
                        if prepare:

                            @pl.when(i == min(2, steps - 1))  # by when the tile before has been written
                            def ahead() -> None:
                                prepare(*mine(tile), *refs, **own)

                        mosaic.wgmma_wait(1)  # of the step before: what it read may be overwritten

                        @pl.when(i > 0)
                        def free() -> None:
                            mosaic.barrier_arrive(used.at[slot(step - 1)])

                    return sums[...]

                sums = pl.run_scoped(products, mosaic.ACC((ROWS, columns), jnp.float32))
                mosaic.barrier_arrive(used.at[slot(tile * steps + steps - 1)])
                finish(sums, tile, *mine(tile), *refs, **own)

            mosaic.wait_smem_to_gmem(0)

        @pl.when(group == WARPGROUPS)
        def fetch() -> None:
            mosaic.set_max_registers(FEW_REGISTERS, action="decrease")
            all_steps = my_tiles * steps

            @pl.loop(0, all_steps + stages)  # at the end, until all that was fetched is used
            def bring(step: Any) -> None:
                @pl.when(step >= stages)
                def wait() -> None:
                    mosaic.barrier_wait(used.at[slot(step)])

                @pl.when(step < all_steps)
                def copy() -> None:
                    row, column = place(jax.lax.div(step, jnp.int32(steps)))
                    depth = pl.ds(jax.lax.rem(step, jnp.int32(steps)) * DEPTH, DEPTH)
                    x, weights = x_ref.at[pl.ds(row, WARPGROUPS * ROWS), depth], weights_ref.at[depth]
                    barrier = full.at[slot(step)]
                    mosaic.copy_gmem_to_smem(x, x_ring.at[slot(step)], barrier)
                    part = weights.at[:, pl.ds(column * columns, columns)]
                    mosaic.copy_gmem_to_smem(part, weights_ring.at[slot(step)], barrier)

    call = mosaic.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(*out) for out in outs),
        scratch_types={
            "x_ring": _shared(stages, WARPGROUPS * ROWS, DEPTH),
            "weights_ring": _shared(stages, DEPTH, columns),
            "full": mosaic.Barrier(num_arrivals=2, num_barriers=stages),  # both copies
            "used": mosaic.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            **scratch,
        },
        grid=(PROCESSORS,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="group",
        kernel_name=name,
        compiler_params=mosaic.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    with stating_cost(M * D * N):
        found: list[Array] = list(call(*arrays))
    return found
