"""The fused kernels beside the plain formulas, on the GPU at hand: how far each is from float32, and its time.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --layers "token mixing, normalised" "channel MLP, normalised"

The rows of the normalised gate (`model.gate=normalised`) follow those of SwiGLU. A formula that fails has the reason in
its row, and the others go on.

Errors are relative, over the output and each gradient together the largest, in bfloat16 against the plain formula in
float32 on the same inputs. Times are medians of rounds of twenty calls, forward alone and with the backward pass.
"""

import argparse
import datetime
import statistics
import time
from collections.abc import Callable
from functools import partial
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


def token_mixing(case: Case, placement: Placement, gate: layers.Gate = "swiglu") -> tuple[Any, Callable[..., Array]]:
    weights = layers.swiglu_init(jax.random.key(1), 1, case.positions, case.inner)
    return jax.tree.map(lambda leaf: leaf[0], weights), lambda w, x: layers.token_block(w, x, placement, gate)


def attention(case: Case, placement: Placement) -> tuple[Any, Callable[..., Array]]:
    weights = layers.attention_init(jax.random.key(1), 1, case.width, case.heads)
    rope = layers.rope_tables(case.positions, case.width // case.heads, 10_000.0)
    return jax.tree.map(lambda leaf: 2 * leaf[0], weights), lambda w, x: layers.attention(w, x, rope, placement)


def channel_mlp(case: Case, placement: Placement, gate: layers.Gate = "swiglu") -> tuple[Any, Callable[..., Array]]:
    weights = layers.swiglu_init(jax.random.key(1), 1, case.width, 3 * case.width)
    return jax.tree.map(lambda leaf: leaf[0], weights), lambda w, x: layers.mlp_block(w, x, placement, gate)


LAYERS: dict[str, Callable[[Case, Placement], tuple[Any, Callable[..., Array]]]] = {
    "token mixing": token_mixing,
    "channel MLP": channel_mlp,
    "attention": attention,
    "token mixing, normalised": partial(token_mixing, gate="normalised"),
    "channel MLP, normalised": partial(channel_mlp, gate="normalised"),
}


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


def measured(function: Callable[..., Array], weights: Any, x: Array, given: Array, truth: Any) -> str:
    found = with_gradients(function)(weights, x, given)
    forward = median_ms(jax.jit(function), weights, x)
    both = median_ms(with_gradients(function), weights, x, given)
    return f"{largest_error(found, truth):.1e} | {forward:.3f} | {both:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    asked = parser.parse_args().layers
    here = sharding.place(sharding.make_mesh(MeshConfig(devices=1)), {})
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {datetime.date.today()}; kernels: {here.kernels}\n")
    print(
        "| layer | batch × positions × width | formula | error | ms forward | ms with backward |\n" + "|---" * 6 + "|"
    )
    for name, build in ((name, LAYERS[name]) for name in asked):
        for case in CASES:
            if (name == "attention" and not case.heads) or (name.startswith("channel MLP") and case.width % 256):
                continue
            shape = case.batch, case.positions, case.width
            x, given = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (2, 3))
            weights, plain = build(case, ANYWHERE)
            with jax.default_matmul_precision("highest"):
                truth = with_gradients(plain)(weights, x.astype(jnp.float32), given.astype(jnp.float32))
            for label, placement in (("plain", ANYWHERE), ("fused", here)):
                print(f"| {name} | {' × '.join(map(str, shape))} | {label} | ", end="", flush=True)
                try:
                    print(measured(build(case, placement)[1], weights, x, given, truth), flush=True)
                except Exception as error:  # what a kernel's compiler raises; the other rows go on
                    print(f"{type(error).__name__}: {str(error).splitlines()[0][:200]} | | |", flush=True)


if __name__ == "__main__":
    main()
