"""What `tinypod train` makes of the step: its steps per second beside those of the bare step, with one and with several
steps in a dispatch, and the time from the start of the process to the end of the first step.

    python benchmarks/loop.py trm/sudoku_mlp:steps=250 demo:model.dtype=bfloat16,steps=6000
    python benchmarks/loop.py demo:steps=200 --per-dispatch 1 20

A row is a recipe of puzzles and its overrides, `RECIPE:a.b=value,...`, with each number of steps in a dispatch
(`steps_per_dispatch`; by default 1 and the recipe's own). The puzzles are random tokens of the shape that the recipe
expects. Bare: the compiled program in a plain loop, with its data on the device; median over rounds. `tinypod train`: a
process of its own with logging as shipped; all steps but those of the first row of metrics, over the seconds that the
run counts as training, without evaluations and checkpoints. Start: from the start of that process until the first row
of metrics, less the steps in it but one; cold with an empty compile cache, warm with what the cold start left there.
All compiles that a run needs are in it: that of the evaluation, too. Everything is one process after another, on one
device.
"""

import argparse
import datetime
import functools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tinypod import config as configs
from tinypod.data import puzzles
from tinypod.experiment import ExperimentConfig, build

ROUND_S = 1.0  # what a round of the bare step lasts at least
HEADER = (
    "| recipe | overrides | steps in a dispatch | bare: ms per step | steps/s | `train`: ms per step | steps/s "
    "| train / bare | train / bare, one by one | start to first step, cold s | warm s |"
)


class Row(NamedTuple):
    recipe: str
    overrides: list[str]


def write_random(folder: Path, config: ExperimentConfig) -> None:
    """Puzzles of the shape that the config expects; the arithmetic does not depend on what they say."""
    info, random = config.data.expected.info(config.data.train_split), np.random.default_rng(0)
    cells = info.splits[config.data.train_split].rows, info.seq_len
    split = puzzles.Split(
        inputs=random.integers(1, info.vocab_size, cells, np.uint8),
        labels=random.integers(2, info.vocab_size, cells, np.uint8),
        identifiers=np.zeros(cells[0], np.int32),
        sources=np.zeros(cells[0], np.uint16),
        ratings=np.zeros(cells[0], np.int32),
    )
    puzzles.write_dataset(folder, info, {config.data.train_split: split, config.data.eval_split: split})


def measure_bare(row: Row, rounds: int) -> dict[str, Any]:
    """In this process. Without rounds, nothing is compiled."""
    experiment = build(configs.load(row.recipe, row.overrides, ExperimentConfig))
    many, device = experiment.steps_per_dispatch, experiment.mesh.devices.flat[0]
    facts = {"many": many, "device": device.device_kind, "jax": jax.__version__}
    if not rounds:
        return facts
    feed, settings, state = experiment.task.open_feed(experiment.mesh)(0), experiment.put_settings(), experiment.init()
    step = experiment.compile_step(feed) if many == 1 else experiment.compile_steps(feed, many)
    numbers = experiment.put(np.int32(0) if many == 1 else np.arange(many, dtype=np.int32))

    def seconds(times: int) -> float:
        nonlocal state
        began = time.perf_counter()
        for _ in range(times):
            state, sums = step(state, settings, numbers, feed)
        jax.block_until_ready((state, sums))
        return (time.perf_counter() - began) / times

    seconds(2)  # warms up
    times = max(2, round(ROUND_S / seconds(2)))
    return facts | {"ms": 1e3 * statistics.median(seconds(times) for _ in range(rounds)) / many}


def in_a_process(row: Row, rounds: int) -> dict[str, Any]:
    """`measure_bare` in one of its own: two processes do not share a GPU's memory."""
    command = [sys.executable, __file__, row.recipe, "--bare", json.dumps(row.overrides), "--rounds", str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def train(row: Row, run: Path, *overrides: str) -> tuple[float, float]:
    """Seconds from the start to the end of the first step, and milliseconds of a step."""
    began = time.time()
    command = [sys.executable, "-m", "tinypod", "train", row.recipe, *row.overrides, *overrides, "--run", str(run)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, *rest = (record for record in records if "perf/step_ms" in record)
    before, steps, ms = first["step"], 0, 0.0
    for record in rest:
        count, before = record["step"] - before, record["step"]
        steps, ms = steps + count, ms + count * record["perf/step_ms"]
    return first["time"] - began - (first["step"] - 1) * ms / steps / 1e3, ms / steps


@functools.cache  # once
def print_header(device: str, version: str) -> None:
    print(f"{device}, jax {version}, {datetime.date.today()}, `python {shlex.join(sys.argv)}`:\n")
    print(f"{HEADER}\n|---|---|" + "---:|" * 9, flush=True)


def measure(row: Row, per_dispatch: list[str], rounds: int, folder: Path) -> None:
    data = folder / "data"
    row = Row(row.recipe, ["mesh.devices=1", *row.overrides, f"data.path={data}"])
    shown = " ".join(row.overrides[1:-1]) or "–"
    config = configs.load(row.recipe, row.overrides, ExperimentConfig)
    write_random(data, config)
    known: dict[int, float] = {}
    for setting in per_dispatch:
        chosen = Row(row.recipe, [*row.overrides, f"steps_per_dispatch={setting}", f"compile_cache={folder / setting}"])
        many, device, version = in_a_process(chosen, 0).values()
        print_header(device, version)
        if many in known:
            continue
        cold, _ = train(chosen, folder / f"cold_{many}", f"steps={3 * config.log.every_steps}")
        warm, trained = train(chosen, folder / f"warm_{many}", f"steps={max(config.steps, 3 * config.log.every_steps)}")
        bare = known[many] = in_a_process(chosen, rounds)["ms"]
        one = f"{known[1] / trained:.1%}" if 1 in known else "–"
        print(
            f"| {row.recipe} | {shown} | {many}{' (auto)' if setting == 'auto' else ''} | {bare:.3f} "
            f"| {1e3 / bare:,.1f} | {trained:.3f} | {1e3 / trained:,.1f} | {bare / trained:.1%} | {one} | {cold:.1f} "
            f"| {warm:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="RECIPE or RECIPE:a.b=value,...")
    parser.add_argument("--per-dispatch", nargs="+", default=["1", "auto"], help="steps_per_dispatch: numbers, or auto")
    parser.add_argument("--rounds", type=int, default=5, help="of the bare step")
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare is not None:
        print(json.dumps(measure_bare(Row(arguments.rows[0], json.loads(arguments.bare)), arguments.rounds)))
        return
    for text in arguments.rows:
        recipe, _, overrides = text.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            row = Row(recipe, [part for part in overrides.split(",") if part])
            measure(row, arguments.per_dispatch, arguments.rounds, Path(folder))


if __name__ == "__main__":
    main()
