"""The fused kernels beside the plain formulas, on the GPU at hand: how far each is from float32, and its time.

    python benchmarks/kernels.py

Errors are relative, over the output and each gradient together the largest, in bfloat16 against the plain formula in
float32 on the same inputs. Times are medians of rounds of twenty calls, forward alone and with the backward pass.
"""

import datetime
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tinypod import sharding
from tinypod.models import layers
from tinypod.sharding import ANYWHERE, MeshConfig, Placement

CALLS, ROUNDS = 20, 5


class Case(NamedTuple):
    batch: int
    positions: int
    width: int
    inner: int  # of token mixing
    heads: int  # of attention


# The paper's sizes; a batch and a width that fill no block; the demo's; the longest. Of token mixing, the first has
# Mosaic's kernels, and the last all but the gradient of the weights.
CASES = [Case(768, 97, 512, 512, 8), Case(33, 97, 200, 272, 0), Case(7, 81, 384, 256, 6), Case(32, 37, 96, 80, 3)]
CASES += [Case(64, 128, 256, 384, 4), Case(64, 17, 256, 96, 2), Case(264, 100, 256, 320, 0)]


def token_mixing(case: Case, placement: Placement) -> tuple[Any, Callable[..., Array]]:
    weights = layers.swiglu_init(jax.random.key(1), 1, case.positions, case.inner)
    return jax.tree.map(lambda leaf: leaf[0], weights), lambda w, x: layers.token_block(w, x, placement)


def attention(case: Case, placement: Placement) -> tuple[Any, Callable[..., Array]]:
    weights = layers.attention_init(jax.random.key(1), 1, case.width, case.heads)
    rope = layers.rope_tables(case.positions, case.width // case.heads, 10_000.0)
    return jax.tree.map(lambda leaf: 2 * leaf[0], weights), lambda w, x: layers.attention(w, x, rope, placement)


def channel_mlp(case: Case, placement: Placement) -> tuple[Any, Callable[..., Array]]:
    weights = layers.swiglu_init(jax.random.key(1), 1, case.width, 3 * case.width)
    return jax.tree.map(lambda leaf: leaf[0], weights), lambda w, x: layers.mlp_block(w, x, placement)


def with_gradients(function: Callable[..., Array]) -> Callable[..., Any]:
    def run(weights: Any, x: Array, given: Array) -> Any:
        y, pull_back = jax.vjp(function, weights, x)
        return y, pull_back(given)

    return jax.jit(run)


def largest_error(found: Any, expected: Any) -> float:
    def error(a: Array, b: Array) -> float:
        return float(jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel()))

    return max(jax.tree.leaves(jax.tree.map(error, found, expected)))


def median_ms(run: Callable[..., Any], *inputs: Any) -> float:
    jax.block_until_ready(run(*inputs))
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            out = run(*inputs)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / CALLS)
    return 1e3 * statistics.median(times)


def main() -> None:
    here = sharding.place(sharding.make_mesh(MeshConfig(devices=1)), {})
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {datetime.date.today()}; kernels: {here.kernels}\n")
    print(
        "| layer | batch × positions × width | formula | error | ms forward | ms with backward |\n" + "|---" * 6 + "|"
    )
    for name, build in (("token mixing", token_mixing), ("channel MLP", channel_mlp), ("attention", attention)):
        for case in CASES:
            if (name == "attention" and not case.heads) or (name == "channel MLP" and case.width % 256):
                continue
            shape = case.batch, case.positions, case.width
            x, given = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (2, 3))
            weights, plain = build(case, ANYWHERE)
            with jax.default_matmul_precision("highest"):
                truth = with_gradients(plain)(weights, x.astype(jnp.float32), given.astype(jnp.float32))
            for label, placement in (("plain", ANYWHERE), ("fused", here)):
                function = build(case, placement)[1]
                found = with_gradients(function)(weights, x, given)
                forward, both = (
                    median_ms(jax.jit(function), weights, x),
                    median_ms(with_gradients(function), weights, x, given),
                )
                print(
                    f"| {name} | {' × '.join(map(str, shape))} | {label} | {largest_error(found, truth):.1e} "
                    f"| {forward:.3f} | {both:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
