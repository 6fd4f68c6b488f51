"""What is live at the peak: held against counts made by hand and against the CPU compiler's own buffer assignment."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from tinypod.plan.hlo import Live, live_at_peak

ROWS, DIM = 512, 64
ACTIVATION = ROWS * DIM * 4


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(4):
        x = layer(x, w)
    return x


def chain(length: int) -> Callable:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(length):
            x = layer(x, w)
        return jnp.sum(x)

    return loss


def scan(length: int, body: Callable = layer) -> Callable:
    return lambda x, w: jnp.sum(jax.lax.scan(lambda x, _: (body(x, w), None), x, None, length=length)[0])


def accumulated(x: jax.Array, w: jax.Array) -> jax.Array:
    """A loop over whole steps: forward and backward pass lie in its body."""
    total, _ = jax.lax.scan(lambda g, _: (g + jax.grad(chain(6), 1)(x, w + g), None), jnp.zeros_like(w), length=3)
    return total


def peak(function: Callable) -> tuple[Live, int]:
    """Ours, and the compiler's."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, DIM), (DIM, DIM))]
    compiled = jax.jit(function).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    return live_at_peak(compiled.as_text()), memory.temp_size_in_bytes + memory.output_size_in_bytes


# ---- programs with known residuals


@pytest.mark.parametrize("length", [3, 6])
def test_a_chain_keeps_each_layers_input(length: int) -> None:
    live, compilers = peak(jax.grad(chain(length), 1))
    assert live.forward_bytes == (length - 1) * ACTIVATION  # the first layer's is the argument
    assert live.forward_bytes + live.other_bytes == pytest.approx(compilers, rel=0.05)


def test_a_scan_keeps_its_stacks() -> None:
    """They are filled with zeros before the loop, by what is no part of the forward pass."""
    (short, _), (long, compilers) = peak(jax.grad(scan(5), 1)), peak(jax.grad(scan(10), 1))
    per_turn = (long.forward_bytes - short.forward_bytes) / 5
    assert per_turn == 3 * ACTIVATION  # the layer's input, tanh, and 1 - tanh
    assert long.forward_bytes == pytest.approx(10 * per_turn, rel=0.05)
    assert long.other_bytes == short.other_bytes
    assert long.forward_bytes + long.other_bytes == pytest.approx(compilers, rel=0.05)


def test_what_is_computed_anew_is_not_kept() -> None:
    kept, compilers = peak(jax.grad(scan(5, jax.checkpoint(block)), 1))
    assert kept.forward_bytes == 5 * ACTIVATION  # each block's input
    assert kept.other_bytes >= 4 * ACTIVATION  # one block's layers
    assert kept.forward_bytes + kept.other_bytes == pytest.approx(compilers, rel=0.15)
    assert peak(jax.grad(scan(5, block), 1))[0].forward_bytes > 5 * kept.forward_bytes


@pytest.mark.parametrize("function", [chain(6), scan(6), accumulated])
def test_only_gradients_keep_anything(function: Callable) -> None:
    live, compilers = peak(function)
    assert live.forward_bytes == (5 * ACTIVATION if function is accumulated else 0)
    assert live.forward_bytes + live.other_bytes == pytest.approx(compilers, rel=0.05, abs=100)


# ---- a schedule by hand: sizes in KiB, one f32[256] each


FORWARD, BACKWARD = 'metadata={op_name="jit(f)/jvp()/x"}', 'metadata={op_name="jit(f)/transpose(jvp())/x"}'
ONE = "f32[256]{0}"


def scheduled(*lines: str, computations: str = "", alias: str = "") -> str:
    body = "\n".join(f"  {line}" for line in (f"%p = {ONE} parameter(0)", *lines))
    return (
        f"HloModule f, is_scheduled=true{alias}\n\n{computations}\nENTRY %main (p: f32[256]) -> f32[] {{\n{body}\n}}\n"
    )


def kib(text: str) -> tuple[float, float]:
    live = live_at_peak(text)
    return live.forward_bytes / 1024, live.other_bytes / 1024


def test_a_buffer_lives_to_its_last_use() -> None:
    text = scheduled(
        f"%a = {ONE} negate(%p), {FORWARD}",
        f"%b = {ONE} bitcast(%a)",
        f"%c = {ONE} negate(%p), {FORWARD}",
        f"%d = {ONE} negate(%c), {BACKWARD}",  # a (as b), c and d
        f"%e = {ONE} add(%d, %b), {BACKWARD}",  # a, d and e
        f"%f = {ONE} negate(%e), {BACKWARD}",  # e and f
        f"ROOT %g = {ONE} negate(%f), {BACKWARD}",
    )
    assert kib(text) == (2, 1)
    assert kib(text.replace("add(%d, %b)", "add(%d, %d)")) == (1, 1)


def test_to_select_from_a_tuple_is_not_to_read_it() -> None:
    text = scheduled(
        f"%a = {ONE} negate(%p), {FORWARD}",
        f"%b = {ONE} negate(%p)",
        f"%t = ({ONE}, {ONE}) tuple(%a, %b)",
        f"%c = {ONE} negate(%p)",
        f"%d = {ONE} negate(%c)",
        f"%b2 = {ONE} get-tuple-element(%t), index=1",
        f"ROOT %e = {ONE} add(%d, %b2)",
    )
    assert kib(text) == (0, 3)  # b, c and d, or b, d and e
    assert kib(text.replace("index=1", "index=0")) == (1, 2)


def test_donated_arguments_hold_their_results() -> None:
    two = "f32[512]{0}"
    lines = f"%a = {two} pad(%p)", f"%b = {ONE} negate(%p)", f"ROOT %t = ({two}, {ONE}) tuple(%a, %b)"
    assert kib(scheduled(*lines)) == (0, 3)  # results live to the end
    assert kib(scheduled(*lines, alias=", input_output_alias={ {1}: (0, {}, may-alias) }")) == (0, 2)


def test_a_copy_counts_as_what_it_copies_and_the_chip_is_no_hbm() -> None:
    chip = "f32[256]{0:T(256)S(3)}"
    text = scheduled(
        f"%a = {chip} negate(%p), {FORWARD}",
        f"%s = (f32[256]{{0:T(256)}}, {chip}, u32[]{{:S(2)}}) copy-start(%a)",
        f"%e = {chip} negate(%p)",
        "%d = f32[256]{0:T(256)} copy-done(%s)",
        f"ROOT %b = f32[256]{{0:T(256)}} negate(%d), {BACKWARD}",
    )
    assert kib(text) == (1, 1)
    assert kib(text.replace("S(3)", "")) == (2, 1)  # a is being read until the copy is done, e is made meanwhile


def test_tiles_pad() -> None:
    made = "ROOT %a = f32[3,97,2]{1,2,0:T(8,128)} broadcast(%p)"
    assert kib(scheduled(made)) == (0, 3 * 128 * 8 * 4 / 1024)


@pytest.mark.parametrize("fused", [True, False])
def test_loops_and_updates_are_made_in_place(fused: bool) -> None:
    stack, carry = "f32[4,256]{1,0}", f"(s32[], {ONE}, f32[4,256]{{1,0}})"
    direct, in_fusion = (
        "dynamic-update-slice(%stack, %row, %i, %i)",
        "fusion(%stack, %row, %i), kind=kLoop, calls=%fused",
    )
    computations = f"""%fused (q0: f32[4,256]) -> f32[4,256] {{
  %q0 = {stack} parameter(0)
  %q1 = f32[1,256]{{1,0}} parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %u = {stack} dynamic-update-slice(%q0, %q1, %q2, %q2)
}}

%body (c: (s32[], f32[256], f32[4,256])) -> (s32[], f32[256], f32[4,256]) {{
  %c = {carry} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = {ONE} get-tuple-element(%c), index=1
  %stack = {stack} get-tuple-element(%c), index=2
  %y = f32[512]{{0}} concatenate(%x, %x), dimensions={{0}}, {FORWARD}
  %z = {ONE} slice(%y), slice={{[0:256]}}, {FORWARD}
  %row = f32[1,256]{{1,0}} bitcast(%z)
  %next = {stack} {in_fusion if fused else direct}
  ROOT %r = {carry} tuple(%i, %z, %next)
}}

%condition (k: (s32[], f32[256], f32[4,256])) -> pred[] {{
  %k = {carry} parameter(0)
  ROOT %true = pred[] constant(true)
}}
"""
    text = scheduled(
        "%zero = s32[] constant(0)",
        f"%x0 = {ONE} negate(%p)",
        f"%zeros = {stack} broadcast(%p)",
        f"%t = {carry} tuple(%zero, %x0, %zeros)",
        f"%w = {carry} while(%t), condition=%condition, body=%body, {FORWARD}",
        f"%stack = {stack} get-tuple-element(%w), index=2",
        "%row = f32[1,256]{1,0} bitcast(%p)",
        "%i = s32[] get-tuple-element(%w), index=0",
        f"%kept = {stack} {in_fusion if fused else direct}",
        f"ROOT %g = {ONE} reduce(%kept), {BACKWARD}",
        computations=computations,
    )
    # The carried x and the stack are the loop's: z and the updated stack lie there. Its own is y alone.
    assert kib(text) == (5, 2)
    assert kib(text.replace(f"body=%body, {FORWARD}", f"body=%body, {BACKWARD}")) == (0, 7)
    unnamed = text.replace(f"body=%body, {FORWARD}", "body=%body")
    assert kib(unnamed) == (2, 5)  # of a loop that may hold whole steps, what its body says
