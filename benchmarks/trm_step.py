"""Time one training step of a config: milliseconds, examples/s, model FLOP/s and its share of the chip's peak.

    python benchmarks/trm_step.py trm/sudoku_mlp trm/sudoku_attention
    python benchmarks/trm_step.py trm/sudoku_mlp --vary model.unroll=true --vary model.remat=true

Model FLOPs are the matrix products of the forward pass and of the last cycle's backward pass, whatever the program
recomputes. The puzzles are random tokens of the right shape: the arithmetic does not depend on them. Each time is the
median over rounds of ten steps, in one process, with the rows of one table measured one after the other.
"""

import argparse
import datetime
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from tinypod import config as configs
from tinypod.data import puzzles
from tinypod.experiment import ExperimentConfig, build

STEPS_A_ROUND = 10


def random_dataset(folder: Path, rows: int = 1000) -> Path:
    random = np.random.default_rng(0)
    info = puzzles.DatasetInfo(
        kind="sudoku",
        seq_len=81,
        vocab_size=11,
        num_identifiers=1,
        box=[3, 3],
        sources=["random"],
        origin="random tokens",
    )
    split = puzzles.Split(
        inputs=random.integers(1, 11, (rows, 81), np.uint8),
        labels=random.integers(2, 11, (rows, 81), np.uint8),
        identifiers=np.zeros(rows, np.int32),
        sources=np.zeros(rows, np.uint16),
        ratings=np.zeros(rows, np.int32),
    )
    puzzles.write_dataset(folder, info, {"train": split, "test": split})
    return folder


def measure(config: ExperimentConfig, rounds: int) -> dict[str, float]:
    experiment = build(config)
    feed, settings = experiment.task.open_feed(experiment.mesh), experiment.put_settings()
    state = experiment.init()
    began = time.perf_counter()
    step = experiment.train_step.lower(*experiment.abstract_inputs).compile()
    compile_s = time.perf_counter() - began
    memory = step.memory_analysis()
    times = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        for batch in range(STEPS_A_ROUND):  # as the loop does it, the number from the host
            state, sums = step(state, settings, experiment.put(np.int32(batch)), feed(batch))
        jax.block_until_ready((state, sums))
        if number:  # the first round warms up
            times.append((time.perf_counter() - began) / STEPS_A_ROUND)
    step_s = statistics.median(times)
    flops = experiment.task.flops(True) * config.batch_size
    return {
        "ms": 1e3 * step_s,
        "spread": 1e3 * (max(times) - min(times)),
        "examples_per_s": config.batch_size / step_s,
        "tflops": flops / step_s / 1e12,
        "compile_s": compile_s,
        "temp_gib": memory.temp_size_in_bytes / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument(
        "--vary", action="append", default=[], help="a.b=value[,c.d=value]: one more row for each config"
    )
    parser.add_argument("--batch-size", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="what the chip reaches in bf16")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {datetime.date.today()}, batch {arguments.batch_size}\n")
    print(
        "| config | overrides | ms per step | spread | examples/s | model TFLOP/s | share of peak "
        "| compile s | temporaries GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        data = random_dataset(Path(folder) / "data")
        for path in arguments.configs:
            for overrides in [[], *(text.split(",") for text in arguments.vary)]:
                fixed = [f"data.path={data}", f"batch_size={arguments.batch_size}"]
                row = measure(configs.load(path, [*fixed, *overrides], ExperimentConfig), arguments.rounds)
                print(
                    f"| {path.stem} | {' '.join(overrides) or '–'} | {row['ms']:.1f} | {row['spread']:.1f} "
                    f"| {row['examples_per_s']:,.0f} | {row['tflops']:.1f} "
                    f"| {row['tflops'] / arguments.peak_tflops:.1%} "
                    f"| {row['compile_s']:.0f} | {row['temp_gib']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
