"""The reader of compiled programs, held against counts made by hand.

On fake CPU devices, on excerpts of what the TPU and GPU compilers wrote (tests/hlo: whole computations, from which what
the reader does not read is cut), and on programs that the TPU compiler compiles here.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tinypod.planning.hlo import program as hlo
from tinypod.planning.planner import predict
from tpu import needs_compiler, run

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
EXCERPTS = Path(__file__).parent


def compiled(function: Callable, *shapes: tuple[int, ...], **options: object) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function, **options).lower(*arguments).compile().as_text()


def excerpt(name: str) -> str:
    return (EXCERPTS / name).read_text()


def one_kernel(program: hlo.Program, name: str) -> hlo.Kernel:
    return next(kernel for kernel in program.kernels if kernel.name == name)


def repeat(function: Callable, times: int) -> Callable:
    return lambda x, w: jax.lax.scan(lambda x, _: (function(x, w), None), x, None, length=times)[0]


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


# ---- loops and matrix products


@pytest.mark.parametrize("stated", [True, False])
def test_loops_are_multiplied(stated: bool) -> None:
    """The CPU compiler states trip counts; with that taken away, as on TPU, they are worked out."""
    text = compiled(repeat(repeat(layer, 3), 10), (8, 16), (16, 16))
    assert "known_trip_count" in text
    program = hlo.read(text if stated else re.sub(r'"known_trip_count":\{[^}]*\}', "", text), {"data": 1})
    assert program.unknown_loops == ()
    assert program.flops == 30 * 2 * 8 * 16 * 16
    assert {kernel.runs for kernel in program.kernels if kernel.flops} == {30}


@pytest.mark.parametrize(
    ("first", "last", "step", "turns"), [(0, 10, 1, 10), (3, 10, 2, 4), (10, 0, -3, 4), (5, 5, 1, 0), (7, -7, -7, 2)]
)
def test_a_counter_may_start_and_step_anyhow(first: int, last: int, step: int, turns: int) -> None:
    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        go_on = (lambda state: state[0] < last) if step > 0 else (lambda state: state[0] > last)
        return jax.lax.while_loop(go_on, lambda state: (state[0] + step, layer(state[1], w)), (first, x))[1]

    text = re.sub(r'"known_trip_count":\{[^}]*\}', "", compiled(looped, (8, 16), (16, 16)))
    program = hlo.read(text, {"data": 1})
    assert program.unknown_loops == ()
    assert program.flops == turns * 2 * 8 * 16 * 16


def test_a_loop_that_data_ends_is_named() -> None:
    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.max(x) < 1, lambda x: layer(x, w), x)

    program = hlo.read(compiled(looped, (8, 16), (16, 16)), {"data": 1})
    assert len(program.unknown_loops) == 1
    assert program.flops == 2 * 8 * 16 * 16


def test_gradients_of_a_scan() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return repeat(layer, 6)(x, w).sum()

    program = hlo.read(compiled(jax.grad(loss), (16, 16), (8, 16)), {"data": 1})
    assert program.flops == 3 * 6 * 2 * 8 * 16 * 16


def test_batched_products() -> None:
    program = hlo.read(
        compiled(lambda a, b: jnp.einsum("bhqd,bkhd->bhqk", a, b), (2, 3, 5, 7), (2, 11, 3, 7)), {"data": 1}
    )
    assert program.flops == 2 * 2 * 3 * 5 * 11 * 7


@pytest.mark.parametrize(
    ("left", "right", "options", "products"),
    [
        ((1, 1, 8), (1, 1, 3), {"window_strides": (1,), "padding": [(0, 0)]}, 6 * 3),
        ((1, 1, 8), (1, 1, 3), {"window_strides": (1,), "padding": [(1, 1)]}, 8 * 3 - 2),  # the ends meet padding
        ((1, 1, 8), (1, 1, 3), {"window_strides": (2,), "padding": [(0, 0)]}, 3 * 3),
        ((1, 1, 4), (1, 1, 3), {"window_strides": (1,), "padding": [(0, 0)], "lhs_dilation": (2,)}, 2 + 1 + 2 + 1 + 2),
        ((1, 1, 8), (1, 1, 3), {"window_strides": (1,), "padding": [(0, 0)], "rhs_dilation": (2,)}, 4 * 3),
        ((2, 4, 8), (6, 2, 1), {"window_strides": (1,), "padding": [(0, 0)], "feature_group_count": 2}, 2 * 6 * 2 * 8),
        ((4, 3, 8), (2, 3, 8), {"window_strides": (1,), "padding": [(0, 0)], "batch_group_count": 2}, 2 * 2 * 3 * 8),
    ],
)
def test_convolutions_count_what_they_meet(left: tuple, right: tuple, options: dict, products: int) -> None:
    lowered = jax.jit(partial(jax.lax.conv_general_dilated, **options)).lower(jnp.ones(left), jnp.ones(right))
    # before optimisation: the CPU compiler rewrites small ones
    text = lowered.compiler_ir(dialect="hlo").as_hlo_text()
    program = hlo.read(with_percents(text), {"data": 1})
    assert program.flops == 2 * products
    assert program.flops == lowered.cost_analysis()["flops"]


def with_percents(text: str) -> str:
    """Names as the text of a compiled program has them."""
    text = re.sub(r"^(ENTRY )?([\w.\-]+) \{$", r"\1%\2 () -> () {", text, flags=re.M)
    text = re.sub(r"^  (ROOT )?([\w.\-]+) = ", r"  \1%\2 = ", text, flags=re.M)
    return re.sub(r"(?<=[(, ])([a-zA-Z_][\w\-]*\.\d+)(?=[,)])", r"%\1", text)


def test_the_larger_branch_counts() -> None:
    def branching(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.switch(x[0, 0].astype(jnp.int32), [layer, repeat(layer, 4), lambda x, w: x], x, w)

    assert hlo.read(compiled(branching, (8, 16), (16, 16)), {"data": 1}).flops == 4 * 2 * 8 * 16 * 16


# ---- bytes


def test_elementwise_work_moves_each_buffer_once() -> None:
    (kernel,) = hlo.read(compiled(lambda x, y: jnp.exp(x) * 2 + y, (64, 128), (64, 128)), {"data": 1}).kernels
    assert kernel.hbm_bytes == 3 * 64 * 128 * 4


def test_a_scan_reads_and_writes_slices() -> None:
    """100 rows of 1 MiB in and out: not the stack at each turn, which would be 100 times as much."""

    def scanned(rows: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, row: (carry + 1, row * carry), jnp.float32(0), rows)[1]

    program = hlo.read(compiled(scanned, (100, 2**18)), {"data": 1})
    assert program.hbm_bytes == pytest.approx(3 * 100 * 2**20, rel=1e-3)  # also the zeros to begin with


@pytest.mark.parametrize(
    ("source", "target", "moved"),
    [
        ("0:T(128)", "0:T(128)S(1)", 16),  # HBM to VMEM
        ("0:T(128)S(3)", "0:T(128)S(1)", 0),
        ("0:T(128)", "0:T(128)S(5)", 16),  # to the host
        ("0", "0:S(1)", 32),  # a GPU's memory for collectives is HBM
        ("0", "0:S(5)", 16),
    ],
)
def test_memory_spaces(source: str, target: str, moved: int) -> None:
    copied = f"  %a = f32[4]{{{source}}} parameter(0)\n  ROOT %c = f32[4]{{{target}}} copy(%a)"
    (kernel,) = hlo.read(f"HloModule m\n\nENTRY %main () -> () {{\n{copied}\n}}\n", {"data": 1}).kernels
    assert kernel.hbm_bytes == moved


# ---- collectives


def test_collectives_on_cpu_devices() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(MESH))

    def sums(x: jax.Array) -> tuple[jax.Array, ...]:
        return (
            jax.lax.psum(x, "data"),
            jax.lax.psum(2 * x, ("data", "tensor")),
            jax.lax.psum(3 * x, tuple(MESH)),
            jax.lax.all_gather(x, "fsdp"),
            jax.lax.psum_scatter(x, "tensor", tiled=True),
            jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]),
            jax.lax.scan(lambda y, _: (jax.lax.all_to_all(y, "tensor", 0, 0, tiled=True), None), x, None, length=5)[0],
        )

    sharded = jax.shard_map(sums, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    program = hlo.read(compiled(sharded, (16, 32)), MESH)
    size = 16 * 32 * 4
    assert {(c.op, c.axes, c.runs, c.payload_bytes, c.wire_bytes) for c in program.collectives} == {
        ("all-reduce", ("data",), 1, size, size),
        ("all-reduce", ("data", "tensor"), 1, size, 1.5 * size),
        ("all-reduce", ("data", "fsdp", "tensor"), 1, size, 1.75 * size),
        ("all-gather", ("fsdp",), 1, 2 * size, size),
        ("reduce-scatter", ("tensor",), 1, size, size / 2),
        ("collective-permute", ("fsdp",), 1, size, size),
        ("all-to-all", ("tensor",), 5, size, size / 2),
    }
    gathered = next(c for c in program.collectives if c.op == "all-gather")
    assert gathered.shapes in {("f32[2,16,32]",), ("f32[32,32]",)}


def test_what_the_partitioner_adds() -> None:
    """A weight that is sharded over one axis and needed whole is gathered; partial products over another are summed."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(MESH))

    def arguments(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    product = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, P("data")))
    text = product.lower(arguments((8, 64), P("data", "tensor")), arguments((64, 32), P("tensor", "fsdp"))).compile()
    program = hlo.read(text.as_text(), MESH)
    assert {(c.op, c.axes) for c in program.collectives} == {("all-gather", ("fsdp",)), ("all-reduce", ("tensor",))}
    assert program.flops == 2 * 8 * 64 * 32 / 8


COLLECTIVE = """HloModule m

ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %r = f32[4]{{0}} all-reduce(%p), channel_id=1{groups}, use_global_device_ids=true, to_apply=%add
}}
"""


@pytest.mark.parametrize(
    ("mesh", "groups", "axes", "size"),
    [
        ("2,2,2", "{{0,4},{1,5},{2,6},{3,7}}", "data", 2),
        ("2,2,2", "{{0,2},{4,6},{1,3},{5,7}}", "fsdp", 2),  # in any order
        ("2,2,2", "{{0,1,4,5},{2,3,6,7}}", "data,tensor", 4),
        ("2,2,2", "{{0},{1},{2},{3},{4},{5},{6},{7}}", "", 1),
        ("2,2,2", "{}", "data,fsdp,tensor", 8),
        ("2,2,2", None, "data,fsdp,tensor", 8),
        ("2,2,2", "{{0,3},{1,2},{4,7},{5,6}}", "?", 2),
        ("4,8,1", "[4,8]<=[32]", "fsdp", 8),
        ("8,4,1", "[8,4]<=[32]", "fsdp", 4),
        ("8,4,1", "[4,8]<=[8,4]T(1,0)", "data", 8),
        ("2,2,2", "[4,2]<=[2,2,2]T(2,1,0)", "data", 2),
        ("2,2,2", "[4,2]<=[4,2]T(1,0)", "fsdp", 2),
        ("8,4,1", "mesh['axis_0'=8,'axis_1'=4] {'axis_0'}", "data", 8),
        ("2,4,4", "mesh['axis_0'=8,'axis_1'=4] {'axis_0'}", "data,fsdp", 8),
        ("32,1,1", "mesh['axis_0'=32,'axis_1'=1,'axis_2'=1] {'axis_0','axis_2'}", "data", 32),
        ("2,4,1", "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", "fsdp", 4),
        ("2,4,1", "mesh['axis_0'=4,'axis_1'=2], device_ids=(0,4,1,5,2,6,3,7) {'axis_0'}", "fsdp", 4),
        ("2,2,2", "mesh['axis_0'=8] {'axis_0':(2)2}", "fsdp", 2),
        ("2,2,2", "mesh['axis_0'=8] {'axis_0':(1)4}", "data,fsdp", 4),
        ("4,4,1", "[8,4]<=[32]", "?", 4),  # another mesh than the program's
        ("2,2,2", "V3[8]", "?", 8),  # a syntax of the future
    ],
)
def test_groups_are_told_by_axis(mesh: str, groups: str | None, axes: str, size: int) -> None:
    text = COLLECTIVE.format(groups="" if groups is None else f", replica_groups={groups}")
    sizes = dict(zip(MESH, map(int, mesh.split(",")), strict=True))
    (found,) = hlo.read(text, sizes).collectives
    assert (",".join(found.axes), found.span.group_size) == (axes, size)


def test_tuples_are_summed_up() -> None:
    shapes = "(bf16[1,512]{1,0:T(8,128)(2,1)S(3)}, f32[3]{0}, f32[3]{0}, f32[3]{0}, f32[3]{0}, /*index=5*/s8[7]{0})"
    names = ["a", "b", "c", "d", "e", "f"]
    parameters = [
        f"  %{name} = {shape} parameter({at})"
        for at, (name, shape) in enumerate(
            zip(names, re.findall(r"\w+\[[\d,]*\]\{[^}]*\}", shapes), strict=True),
        )
    ]
    call = f"  ROOT %r = {shapes} all-reduce(%a, %b, %c, %d, %e, /*index=5*/%f), replica_groups={{}}, to_apply=%add"
    text = "\n".join(["HloModule m", "", "ENTRY %main () -> () {", *parameters, call, "}"])
    (found,) = hlo.read(text, {"data": 4}).collectives
    assert found.payload_bytes == 1024 + 4 * 12 + 7
    assert found.shapes == ("bf16[1,512]", "f32[3]", "f32[3]", "f32[3]", "f32[3]", "s8[7]")
    assert found.wire_bytes == 1.5 * found.payload_bytes


# ---- excerpts


def test_a_tpu_loop_with_stacked_weights_on_the_chip() -> None:
    """v4: 4 turns of 3; batched products as dilated convolutions; activations in CMEM, weights sliced from HBM."""
    text = excerpt("v4_nested_scan.txt")
    assert "lhs_dilate=32" in text
    assert "known_trip_count" not in text
    program = hlo.read(text, MESH)
    assert program.unknown_loops == ()
    assert program.flops == 12 * 2 * 32 * 128 * 256 * 256
    product = one_kernel(program, "fusion.13")
    assert (product.runs, product.cycles, product.hbm_bytes) == (12, 16096, 32 * 256 * 256 * 2)
    assert one_kernel(program, "copy.5").hbm_bytes == 0  # from CMEM to CMEM
    assert one_kernel(program, "copy-start").hbm_bytes == 32 * 128 * 256 * 2  # CMEM to HBM
    assert program.cycles == 12 * (16096 + 8346)
    unknown = hlo.read(text.replace('"16096"', '"9223372036854775807"'), MESH)
    assert one_kernel(unknown, "fusion.13").cycles is None
    assert unknown.cycles == 12 * 8346


@pytest.mark.parametrize(
    ("condition", "turns"),
    [
        ("compare(%get-tuple-element.53, %constant.4.clone.1), direction=LT", 3),
        ("compare(%constant.4.clone.1, %get-tuple-element.53), direction=GT", 3),
        ("compare(%get-tuple-element.53, %constant.4.clone.1), direction=LE", 4),
        ("compare(%get-tuple-element.53, %constant.4.clone.1), direction=NE", 3),
        ("compare(%get-tuple-element.53, %carried), direction=LT", 1),  # a bound among the loop's arguments
        ("compare(%get-tuple-element.53, %constant.4.clone.1), direction=EQ", None),
        ("compare(%carried, %constant.4.clone.1), direction=LT", None),  # which never changes
        ("and(%get-tuple-element.53, %constant.4.clone.1)", None),
    ],
)
def test_conditions_of_loops(condition: str, turns: int | None) -> None:
    text = excerpt("v4_nested_scan.txt")
    old = "compare(%get-tuple-element.53, %constant.4.clone.1), direction=LT"
    assert old in text
    carried = "  %carried = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=3\n"
    text = text.replace(old, condition).replace("  ROOT %lt.6", f"{carried}  ROOT %lt.6")
    program = hlo.read(text, MESH)
    assert one_kernel(program, "fusion.13").runs == 4 * (turns or 1)
    assert program.unknown_loops == (() if turns else ("while.24",))


def test_collectives_that_fusions_hide() -> None:
    """v5e: one all-gather in three fusions (start, beside a product, done), a plain one, and a reduce-scatter."""
    program = hlo.read(excerpt("v5e_fused_collectives.txt"), MESH)
    assert [(c.op, c.axes, c.shapes) for c in program.collectives] == [
        ("all-gather", ("fsdp",), ("bf16[1,1024,512]",)),
        ("all-gather", ("fsdp",), ("bf16[1,512,1024]",)),
        ("reduce-scatter", ("fsdp",), ("bf16[512,1024]", "bf16[1024,512]")),
    ]
    assert program.flops == 2 * 256 * 512 * 1024
    assert [kernel.name for kernel in program.kernels] == ["fusion.70"]
    assert [c.during for c in program.collectives] == [(0, 1), None, None]


def test_what_crosses_slices_goes_over_the_hosts() -> None:
    """Two slices of four v5e: one slice's program, in which the sum of gradients over `data` is scattered inside the
    slice, exchanged with the other slice by a send and a recv, and gathered again."""
    text, mesh = excerpt("v5e_two_slices.txt"), {"data": 4, "fsdp": 2}
    program = hlo.read(text, mesh, [(x, y, 0) for _ in range(2) for y in range(2) for x in range(2)], slices=2)
    assert [(c.op, c.axes, c.span.group_size, c.payload_bytes) for c in program.collectives] == [
        ("all-gather", ("fsdp",), 2, 512 * 2048 * 2),
        ("reduce-scatter", ("fsdp",), 2, 512 * 2048 * 2),
        ("reduce-scatter", ("data",), 2, 256 * 2048 * 2),
        ("all-reduce", ("slices",), 2, 128 * 2048 * 2),
        ("all-gather", ("data",), 2, 256 * 2048 * 2),
    ]
    assert [c.span.chips for c in program.collectives] == [(2, 1, 1), (2, 1, 1), (1, 2, 1), (), (1, 2, 1)]
    assert program.unwanted == ()
    assert not any(kernel.name in ("send", "recv") for kernel in program.kernels)
    work = "  %busy = f32[256,2048]{1,0:T(8,128)} copy(%param)\n"
    busy = hlo.read(text.replace("  %send-done", f"{work}  %send-done"), mesh, slices=2)
    (start, end) = busy.collectives[3].during
    assert [kernel.name for kernel in busy.kernels[start:end]] == ["busy"]


def test_collectives_on_the_sparse_core() -> None:
    """tpu7x runs them as calls of their own."""
    program = hlo.read(excerpt("tpu7x_sparsecore.txt"), MESH)
    assert [(c.op, c.axes, c.payload_bytes) for c in program.collectives] == [
        ("all-gather", ("fsdp",), 512 * 1024 * 2),
        ("reduce-scatter", ("tensor",), 256 * 1024 * 2),
        ("collective-permute", ("fsdp",), 256 * 1024 * 2),
    ]
    assert program.kernels == ()
    assert program.opaque_calls == ()


def test_gpu_kernels() -> None:
    """H200: cuBLAS, a Triton product, an asynchronous slice of stacked weights, an update in place."""
    program = hlo.read(excerpt("gpu_kernels.txt"), {"data": 1})
    plain, added = one_kernel(program, "custom-call.7"), one_kernel(program, "cublas-lt-matmul.3")
    assert (plain.flops, added.flops) == (2 * 74496 * 512 * 1536, 2 * 74496 * 512 * 512)
    assert plain.hbm_bytes == 2 * (74496 * 512 + 512 * 1536 + 74496 * 1536)  # and no workspace
    assert added.hbm_bytes == 2 * (3 * 74496 * 512 + 512 * 512)
    attention = one_kernel(program, "gemm_fusion_dot.157")
    assert attention.flops == 2 * 6144 * 97 * 97 * 64
    assert attention.hbm_bytes == 2 * 2 * 6144 * 64 * 97 + 4 * 6144 * 97 * 97
    assert one_kernel(program, "fusion-start.55").hbm_bytes == 2 * (1536 * 512 * 2) + 4
    update = one_kernel(program, "loop_dynamic_update_slice_fusion.25")
    assert update.hbm_bytes == 2 * (768 * 97 * 1536 * 2) + 4  # half of one operand, half of the buffer, an index
    assert len(program.kernels) == 5  # the -done is none
    assert program.aliased == {0, 3}


# ---- what must not be there


def test_donated_arguments() -> None:
    program = hlo.read(compiled(lambda x, y, z: (x + 1, y.sum(), z * 2), (8,), (8,), (4,), donate_argnums=(0, 2)), {})
    assert program.aliased == {0, 2}
    assert hlo.read(compiled(lambda x: x + 1, (8,)), {}).aliased == frozenset()


def test_a_clean_program_is_found_clean() -> None:
    program = hlo.read(compiled(layer, (8, 16), (16, 16)), {"data": 1})
    assert (program.unwanted, program.opaque_calls) == ((), ())


def test_float64_is_found() -> None:
    with jax.enable_x64(True):
        text = jax.jit(lambda x: jnp.sin(x.astype(jnp.float64)).astype(jnp.float32)).lower(
            jax.ShapeDtypeStruct((8,), jnp.float32)
        )
        program = hlo.read(text.compile().as_text(), {"data": 1})
    assert any(re.fullmatch(r"float64: .*: sine", what) for what in program.unwanted)


def test_calls_of_the_host_are_found() -> None:
    def prints(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum())
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((8,), jnp.float32), x)

    found = hlo.read(compiled(prints, (8,)), {"data": 1}).unwanted
    assert [what.partition(":")[0] for what in found] == ["call of the host"] * 2
    # as the TPU compiler has it
    send = "  %s = (bf16[]{:T(256)}, u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true"
    text = COLLECTIVE.format(groups="").replace("  ROOT", f"  %t = token[] after-all()\n{send}\n  ROOT")
    assert hlo.read(text, {"data": 2}).unwanted == ("call of the host: s: send",)
    assert hlo.read(text.replace("=true", "=false", 1), {"data": 2}).unwanted == ()


@pytest.mark.parametrize(
    "line",
    [
        "  %d = f32[<=4]{0} set-dimension-size(%p, %n), dimensions={0}",
        '  %d = (f32[4]{0}, s32[]) custom-call(%p), custom_call_target="PadToStatic"',
        "  %d = f32[<=4,8]{1,0} bitcast(%p)",
    ],
)
def test_dynamic_shapes_are_found(line: str) -> None:
    text = COLLECTIVE.format(groups="").replace("  ROOT", f"  %n = s32[] constant(3)\n{line}\n  ROOT")
    (found,) = hlo.read(text, {"data": 2}).unwanted
    assert found.startswith("dynamic shape: d: ")


def test_calls_that_hide_their_work_are_named() -> None:
    line = '  %c = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call"'
    text = COLLECTIVE.format(groups="").replace("  ROOT", f"{line}\n  ROOT")
    assert hlo.read(text, {"data": 2}).opaque_calls == ("tpu_custom_call",)


@pytest.mark.parametrize(
    "stated",
    [
        'custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"4096","bytes_accessed":"7"}}',
        'custom_call_target="mosaic_gpu_v2", frontend_attributes={kernel_metadata={"flops": "4096"}}',
        'custom_call_target="__gpu$xla.gpu.triton", backend_config={metadata = "{\\22flops\\22: \\224096\\22}"}',
    ],
)
def test_a_kernel_may_state_its_work(stated: str) -> None:
    text = COLLECTIVE.format(groups="").replace("  ROOT", f"  %c = f32[4]{{0}} custom-call(%p), {stated}\n  ROOT")
    program = hlo.read(text, {"data": 2})
    assert (program.flops, program.opaque_calls) == (4096, ())


def test_a_kernel_may_state_its_share_of_the_peak() -> None:
    stated = (
        'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n"share_of_peak":"0.250"\n}}, '
        'backend_config={"cost_estimate":{"flops":"4096"}}'
    )
    text = COLLECTIVE.format(groups="").replace("  ROOT", f"  %c = f32[4]{{0}} custom-call(%p), {stated}\n  ROOT")
    program = hlo.read(text, {"data": 2})
    assert [kernel.share for kernel in program.kernels if kernel.name == "c"] == [0.25]
    found = predict(program, peak=4096.0, bandwidth=1e12, clock=1e9, sent=[0.0])
    assert (found.on_chip_s, found.compute_s) == (pytest.approx(4.0, rel=1e-3), pytest.approx(1.0))
    assert found.estimated_share == pytest.approx(1.0, rel=1e-3)


def test_metadata_of_several_lines_do_not_end_a_computation() -> None:
    line = (
        '  %c = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={'
    )
    line += '\n"block": "512"\n}}, backend_config={"estimated_cycles":"7"}'
    text = COLLECTIVE.format(groups="").replace("  ROOT", f"{line}\n  ROOT")
    found = hlo.read(text, {"data": 2})
    assert found.opaque_calls == ("tpu_custom_call",)
    assert found.collectives == hlo.read(COLLECTIVE.format(groups=""), {"data": 2}).collectives
    assert [kernel.cycles for kernel in found.kernels] == [7]


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.read("module @jit_f attributes {}", {"data": 1})


# ---- what the TPU compiler writes today

COMPILE_FOR_TPU = """
import json, sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
TPUS = {
    "v4": dict(topology_name="v4:2x2x2", chip_config_name="megacore", chips_per_host_bounds=(2, 2, 1)),
    "v5e": dict(topology_name="v5e:2x4", chips_per_host_bounds=(2, 4, 1), num_slices=1),
    "tpu7x": dict(topology_name="tpu7x:2x2x1", chips_per_host_bounds=(2, 2, 1)),
}

def loss(weights, x):
    def body(x, w):
        return jax.lax.with_sharding_constraint(jax.nn.silu(x @ w[0]) @ w[1], rows), None
    return (jax.lax.scan(body, x, weights)[0].astype(jnp.float32) ** 2).mean()

def sums(x):
    return (jax.lax.psum(x, "data"), jax.lax.psum(2 * x, ("data", "tensor")), jax.lax.all_gather(x, "fsdp"),
            jax.lax.psum_scatter(x, "tensor", tiled=True), jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]))

texts = {}
for name, topology in TPUS.items():
    devices = np.array(topologies.get_topology_desc(platform="tpu", **topology).devices)
    mesh = Mesh(devices.reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))
    rows = NamedSharding(mesh, P(("data", "fsdp"), None))
    weights = array((6, 512, 2048), None, "fsdp", "tensor"), array((6, 2048, 512), None, "tensor", "fsdp")
    sharded = jax.tree.map(lambda w: w.sharding, weights)
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=rows)
    step = jax.jit(jax.grad(loss), out_shardings=sharded)
    summed = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    texts[name] = [step.lower(weights, x).compile().as_text(), summed.lower(array((256, 1024))).compile().as_text()]
# A product of which one operand is sharded over 8 devices: a loop of permutes, two steps a turn.
devices = topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:4x4", chips_per_host_bounds=(4, 4, 1), num_slices=1).devices
mesh = Mesh(np.array(devices).reshape(2, 1, 8), ("data", "fsdp", "tensor"))
product = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, P("data", "tensor")))
arguments = array((8192, 8192), "data", "tensor"), array((8192, 8192), None, "tensor")
options = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"}
texts["windowed"] = [product.lower(*arguments).compile(compiler_options=options).as_text()]
print("TEXTS" + json.dumps(texts))
"""


@needs_compiler
def test_programs_of_the_tpu_compiler() -> None:
    texts = json.loads(run(COMPILE_FOR_TPU).split("TEXTS")[1])
    for step, sums in (texts[tpu] for tpu in ("v4", "v5e", "tpu7x")):
        check_fsdp_step(hlo.read(step, MESH))
        size = 256 * 1024 * 2
        assert Counter((c.op, c.axes, c.wire_bytes) for c in hlo.read(sums, MESH).collectives) == {
            ("all-reduce", ("data",), size): 1,
            ("all-reduce", ("data", "tensor"), 1.5 * size): 1,
            ("all-gather", ("fsdp",), size): 1,
            ("reduce-scatter", ("tensor",), size / 2): 1,
            ("collective-permute", ("fsdp",), size): 1,
        }
    windowed = hlo.read(texts["windowed"][0], {"data": 2, "fsdp": 1, "tensor": 8})
    assert windowed.unknown_loops == ()
    assert windowed.flops == 2 * 8192**3 / 16
    assert {(c.op, c.axes) for c in windowed.collectives} == {("collective-permute", ("tensor",))}
    assert any(c.runs > 1 for c in windowed.collectives)


def check_fsdp_step(program: hlo.Program) -> None:
    """6 layers of 512 × 2048 and back, forward and backward, on 256 rows and half of the 2048 a device."""
    assert program.unknown_loops == ()
    assert program.opaque_calls == ()
    assert program.flops == 3 * 6 * 2 * 2 * 256 * 512 * 1024
    assert program.cycles > program.flops / (4 * 2 * 128 * 256**2)  # no TPU does more in a cycle
    assert not any(c.axes == ("?",) for c in program.collectives)
    gathers = Counter((c.axes, c.shapes) for c in program.collectives if c.op == "all-gather" for _ in range(c.runs))
    assert gathers == {(("fsdp",), ("bf16[1,512,1024]",)): 12, (("fsdp",), ("bf16[1,1024,512]",)): 12}
    activations = [c for c in program.collectives if c.axes == ("tensor",)]
    assert sum(c.runs for c in activations) == 12
    assert {c.shapes for c in activations} == {("bf16[256,512]",)}
    gradients = {axis for c in program.collectives if "reduce" in c.op and c.payload_bytes > 2**19 for axis in c.axes}
    assert gradients == {"data", "fsdp"}


OVERLAPPED = """HloModule overlapped, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%fused_rows (p: f32[8,4]) -> f32[8] {
  %p = f32[8,4]{1,0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %reduce = f32[8]{0} reduce(%p, %zero), dimensions={1}, to_apply=%sum
}

%fused_taken (p: f32[8,4], i: s32[2,1]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %i = s32[2,1]{1,0} parameter(1)
  ROOT %gather = f32[2,4]{1,0} gather(%p, %i), offset_dims={1}, slice_sizes={1,4}
}

ENTRY %main (x: f32[8,4], w: f32[4,4], i: s32[2,1]) -> f32[8] {
  %x = f32[8,4]{1,0} parameter(0)
  %w = f32[4,4]{1,0} parameter(1)
  %i = s32[2,1]{1,0} parameter(2)
  %early = f32[8,4]{1,0} negate(%x)
  %start = (f32[8,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %fetch = (f32[4,4]{1,0:S(1)}, f32[4,4]{1,0}, u32[]) copy-start(%w)
  %product = f32[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %rows = f32[8]{0} fusion(%product), kind=kInput, calls=%fused_rows
  %gathered = f32[16,4]{1,0} all-gather-done(%start)
  %fetched = f32[4,4]{1,0:S(1)} copy-done(%fetch)
  %taken = f32[2,4]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused_taken
  %now = f32[8]{0} all-reduce(%rows), replica_groups={{0,1}}, to_apply=%sum
  ROOT %last = f32[8]{0} add(%rows, %now)
}
"""


def test_kernels_have_kinds_and_those_that_hide_a_collective_are_known() -> None:
    program = hlo.read(OVERLAPPED, {"data": 2})
    assert {kernel.name: kernel.kind for kernel in program.kernels} == {
        "early": "element-wise",
        "fetch": "element-wise",
        "product": "products",
        "rows": "reductions",
        "taken": "gathers",
        "last": "element-wise",
    }
    assert [kernel.name for kernel in program.kernels if kernel.ahead] == ["fetch"]
    during = {one.op: one.during for one in program.collectives}
    assert during["all-reduce"] is None
    assert [kernel.name for kernel in program.kernels[slice(*during["all-gather"])]] == ["fetch", "product", "rows"]


REDUCED_ON_GPUS = """HloModule reduced, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8,4], y: f32[2]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[2]{0} parameter(1)
  %one = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%sum
  %two = (f32[8,4]{1,0}, f32[2]{0}) all-reduce-start(%x, %y), replica_groups={{0,1}}, to_apply=%sum
  ROOT %done = f32[8,4]{1,0} all-reduce-done(%one)
}
"""


def test_what_gpus_put_beside_the_result_of_an_all_reduce_is_not_sent() -> None:
    assert [one.payload_bytes for one in hlo.read(REDUCED_ON_GPUS, {"data": 2}).collectives] == [128, 136]
