"""Time a TRM config on one device: a training step, a forward pass alone, and an evaluation with all its steps.

    python benchmarks/trm_step.py trm/sudoku_mlp trm/sudoku_attention --vary model.fused=false
    python benchmarks/trm_step.py trm/sudoku_mlp --batch-size 32 128 768 3072 6144 --work train forward eval
    python benchmarks/trm_step.py trm/sudoku_attention --kernels 15         # and where the time goes

Model FLOPs are the matrix products of the forward pass and of the last cycle's backward pass, whatever the program
recomputes. Two floors stand beside each time: these products at the rate the chip reaches, and the bytes that have to
pass through memory if every half layer reads its input and writes its output once (backward: reads both and the
output's gradient, writes the input's), at the chip's bandwidth. The puzzles are random tokens of the right shape: the
arithmetic does not depend on them. Each time is the median over rounds, in one process, with the rows of one table
measured one after the other. GiB: what the compiled program holds at once, arguments included.
"""

import argparse
import datetime
import glob
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tinypod import config as configs
from tinypod import sharding
from tinypod.data import puzzles
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.health.memory import is_out_of_memory, reuse_freed
from tinypod.models import trm
from tinypod.tasks.puzzle_thinking import ThinkingConfig, make_think

SHAPE = trm.PuzzleShape(seq_len=81, vocab_size=11, num_identifiers=1)
ROUND_S = 0.5  # what a round lasts at least
Run = Callable[[int], None]  # so many times, and waits for the last


def random_dataset(folder: Path, rows: int = 1000) -> Path:
    random = np.random.default_rng(0)
    info = puzzles.DatasetInfo(
        kind="sudoku",
        seq_len=SHAPE.seq_len,
        vocab_size=SHAPE.vocab_size,
        num_identifiers=SHAPE.num_identifiers,
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


def train(experiment: Experiment) -> tuple[Any, Run]:
    feed, settings = experiment.task.open_feed(experiment.mesh), experiment.put_settings()
    step = experiment.train_step.lower(*experiment.abstract_inputs).compile()
    state = experiment.init()

    def run(times: int) -> None:
        nonlocal state
        for number in range(times):  # as the loop does it, the number from the host
            state, sums = step(state, settings, experiment.put(np.int32(number)), feed(number))
        jax.block_until_ready((state, sums))

    return step, run


def forward(experiment: Experiment, steps: int = 1) -> tuple[Any, Run]:
    """`steps` of supervision, from scratch, without gradients."""
    model, batch = experiment.config.model, experiment.config.batch_size
    placement = sharding.place(experiment.mesh, experiment.specs)
    tokens = jax.random.randint(jax.random.key(0), (batch, SHAPE.seq_len), 1, SHAPE.vocab_size)
    arguments = experiment.init().params, tokens, jnp.zeros((batch,), jnp.int32)
    compiled = jax.jit(make_think(model, ThinkingConfig(), None, steps, placement)).lower(*arguments).compile()

    def run(times: int) -> None:
        for _ in range(times):
            answers = compiled(*arguments)
        jax.block_until_ready(answers)

    return compiled, run


def evaluate(experiment: Experiment) -> tuple[Any, Run]:
    return forward(experiment, experiment.config.task.halting.max_steps)


WORK = {"train": train, "forward": forward, "eval": evaluate}


def least(config: ExperimentConfig, work: str) -> tuple[float, float]:
    """Floating-point operations, and bytes through memory."""
    model, training = config.model, work == "train"
    repeats = config.batch_size * (config.task.halting.max_steps if work == "eval" else 1)
    backward = training * (2 if model.one_step_gradient else model.L_cycles + 1)
    halves = 2 * model.num_layers * (2 * model.H_cycles * (model.L_cycles + 1) + 4 * backward)
    z_bytes = (trm.num_puzzle_positions(model) + SHAPE.seq_len) * model.hidden_size * jnp.dtype(model.dtype).itemsize
    flops = trm.count_matmul_flops(model, SHAPE, training=training)
    return float(repeats * flops), float(repeats * halves * z_bytes)


def measure(run: Run, rounds: int) -> tuple[float, float]:
    """Median and spread, in seconds."""
    run(2)  # warms up
    began = time.perf_counter()
    run(2)
    times = max(2, round(2 * ROUND_S / (time.perf_counter() - began)))
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        run(times)
        seconds.append((time.perf_counter() - began) / times)
    return statistics.median(seconds), max(seconds) - min(seconds)


def print_kernels(run: Run, count: int, times: int = 3) -> None:
    """The kernels that take longest, those of one name added up, as the GPU's profiler saw them."""
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(times)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            if plane.name.startswith("/device:GPU"):
                for event in (event for line in plane.lines if line.name.startswith("Stream") for event in line.events):
                    found[re.sub(r"[_.\d]+$", "", event.name)].append(event.duration_ns / 1e6)
    print("\n| kernel | times a step | ms each | ms a step |\n|---|---|---|---|")
    for name, ms in sorted(found.items(), key=lambda item: -sum(item[1]))[:count]:
        print(f"| {name[:60]} | {len(ms) / times:.0f} | {sum(ms) / len(ms):.3f} | {sum(ms) / times:.2f} |")
    every = [ms for kind in found.values() for ms in kind]
    print(f"| all of {len(found)} names | {len(every) / times:.0f} | | {sum(every) / times:.1f} |\n")


def print_row(config: ExperimentConfig, work: str, arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    compiled, run = WORK[work](build(config))
    compile_s = time.perf_counter() - began
    seconds, spread = measure(run, arguments.rounds)
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    flops, moved = least(config, work)
    print(
        f"| {1e3 * seconds:.2f} | {1e3 * spread:.2f} | {flops / arguments.peak_tflops / 1e9:.2f} "
        f"| {moved / arguments.tb_per_s / 1e9:.2f} | {config.batch_size / seconds:,.0f} | {flops / seconds / 1e12:.1f} "
        f"| {flops / seconds / arguments.peak_tflops / 1e12:.1%} "
        f"| {(held + memory.temp_size_in_bytes) / 2**30:.1f} | {compile_s:.0f} |",
        flush=True,
    )
    if arguments.kernels:
        print_kernels(run, arguments.kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument(
        "--vary", action="append", default=[], help="a.b=value[,c.d=value]: one more row for each config"
    )
    parser.add_argument("--batch-size", nargs="+", type=int, default=[768])
    parser.add_argument("--work", nargs="+", choices=WORK, default=["train"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=0, help="how many kernels to list below each row (on a GPU)")
    parser.add_argument("--peak-tflops", type=float, default=790.0, help="what the chip reaches in bf16")
    parser.add_argument("--tb-per-s", type=float, default=4.3, help="what its memory reaches")
    arguments = parser.parse_args()
    reuse_freed()  # as the loop does
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {datetime.date.today()}\n")
    header = (
        "| config | overrides | work | batch | ms | spread | floor: products | floor: bytes | examples/s "
        f"| model TFLOP/s | of {arguments.peak_tflops:.0f} | GiB | compile s |"
    )
    print(header + "\n|" + "---|" * 13)
    with tempfile.TemporaryDirectory() as folder:
        data = random_dataset(Path(folder) / "data")
        for path in arguments.configs:
            for overrides in [[], *(text.split(",") for text in arguments.vary)]:
                for work in arguments.work:
                    for batch in arguments.batch_size:
                        fixed = [f"data.path={data}", f"batch_size={batch}", "mesh.devices=1"]
                        config = configs.load(path, [*fixed, *overrides], ExperimentConfig)
                        print(f"| {path.stem} | {' '.join(overrides) or '–'} | {work} | {batch:,} ", end="", flush=True)
                        try:
                            print_row(config, work, arguments)
                        except jax.errors.JaxRuntimeError as error:
                            if not is_out_of_memory(error):
                                raise
                            print("| does not fit" + " |" * 9, flush=True)


if __name__ == "__main__":
    main()
