"""Fused causal attention beside the plain formula, on the device at hand: how far each is from float32, and its time.

    python benchmarks/attention.py

Shapes are Qwen3-0.6B's. Errors are relative, of the output and of the gradients of queries, keys and values; both are
compared with the plain formula in float32. Times are medians of a forward and backward pass.
"""

import datetime
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from tinypod import sharding
from tinypod.kernels import attention
from tinypod.sharding import MeshConfig

HEADS, KV_HEADS, WIDTH = 16, 8, 128
Attention = Callable[[Array, Array, Array], Array]


def both_ways(attend: Attention) -> Callable[..., tuple[Array, ...]]:
    def run(q: Array, k: Array, v: Array, given: Array) -> tuple[Array, ...]:
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(given)

    return jax.jit(run)


def median_ms(run: Callable[..., tuple[Array, ...]], inputs: list[Array]) -> float:
    times = []
    for _ in range(12):
        began = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[2:])


def error(found: Array, expected: Array) -> float:
    return float(jnp.linalg.norm(found.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))


def main() -> None:
    placement = sharding.place(sharding.make_mesh(MeshConfig(devices=1)), {})
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {datetime.date.today()}\n")
    print("| batch × length | attention | error of out, dq, dk, dv | ms |\n|---|---|---|---:|")

    def plain(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def fused(q: Array, k: Array, v: Array) -> Array:
        out = attention.causal(q, k, v, placement)
        assert out is not None, "no fused kernel for this device"
        return out

    kinds: dict[str, Attention] = {"plain": plain}
    if placement.kernels:
        kinds["fused"] = fused
    for batch, length in ((32, 128), (8, 1024), (4, 4096)):
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        exact = [jax.random.normal(key, (batch, length, n, WIDTH)) for key, n in zip(keys, heads, strict=True)]
        half = [x.astype(jnp.bfloat16) for x in exact]
        with jax.default_matmul_precision("highest"):
            expected = both_ways(plain)(*(x.astype(jnp.float32) for x in half))
        for name, attend in kinds.items():
            run = both_ways(attend)
            errors = ", ".join(f"{error(*pair):.4f}" for pair in zip(run(*half), expected, strict=True))
            print(f"| {batch} × {length} | {name} | {errors} | {median_ms(run, half):.2f} |", flush=True)


if __name__ == "__main__":
    main()
