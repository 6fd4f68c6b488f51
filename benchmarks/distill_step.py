"""Time one training step of a language model's config: tokens/s, model FLOP/s, its share of the chip's peak, memory.

    python benchmarks/distill_step.py distill/qat_v6e4:batch_size=32 distill/lora_v6e1 distill/lora_v6e1:accumulation=1

A row is a recipe and its overrides, `RECIPE:a.b=value,c.d=value`. Weights and blocks are random: the arithmetic does
not depend on them. Model FLOPs are matrix products, forward and backward, without what is recomputed and without
forming the effective weights; a frozen weight's gradient is not among them. Each time is the median over rounds of a
few steps.
"""

import argparse
import datetime
import statistics
import time

import jax
import numpy as np

from tinypod import config as configs
from tinypod import sharding
from tinypod.experiment import ExperimentConfig, build
from tinypod.health.memory import step_bytes

STEPS_A_ROUND = 3


def measure(config: ExperimentConfig, rounds: int) -> dict[str, float]:
    experiment = build(config, planned=True)
    random, shapes = np.random.default_rng(0), experiment.abstract_inputs[3]

    def draw(name: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        if np.issubdtype(x.dtype, np.integer):
            values = random.integers(0, 2 if name == "mask" else config.model.vocab_size, x.shape, x.dtype)
        else:  # logits that fall, and a normaliser above them
            values = (-np.arange(x.shape[-1]) if name == "topk_logits" else np.ones(x.shape)).astype(x.dtype)
            values = np.broadcast_to(values, x.shape)
        return sharding.put(values, x.sharding)

    fed = {name: draw(name, x) for name, x in shapes.items()}
    state, settings = experiment.init(), experiment.put_settings()
    began = time.perf_counter()
    step = experiment.compile_step(fed)
    compile_s = time.perf_counter() - began
    times = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        for batch in range(STEPS_A_ROUND):
            state, sums = step(state, settings, experiment.put(np.int32(batch)), fed)
        jax.block_until_ready((state, sums))
        if number:  # the first round warms up
            times.append((time.perf_counter() - began) / STEPS_A_ROUND)
    step_s = statistics.median(times)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    return {
        "ms": 1e3 * step_s,
        "tokens_per_s": config.batch_size * shapes["input_ids"].shape[1] / step_s,
        "tflops": experiment.task.flops(True) * config.batch_size / step_s / 1e12,
        "gib": (step_bytes(step) or 0) / 2**30,
        "peak_gib": peak / 2**30,
        "compile_s": compile_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="RECIPE or RECIPE:a.b=value,...")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="what the chip reaches in bf16")
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {datetime.date.today()}\n")
    print("| recipe | overrides | ms per step | tokens/s | model TFLOP/s | share of peak | needs GiB | compile s |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for row in arguments.rows:
        recipe, _, text = row.partition(":")
        overrides = [part for part in text.split(",") if part]
        found = measure(configs.load(recipe, ["data.path=not_there", *overrides], ExperimentConfig), arguments.rounds)
        print(
            f"| {recipe} | {' '.join(overrides) or '–'} | {found['ms']:.1f} | {found['tokens_per_s']:,.0f} "
            f"| {found['tflops']:.1f} | {found['tflops'] / arguments.peak_tflops:.1%} | {found['gib']:.1f} "
            f"| {found['compile_s']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
