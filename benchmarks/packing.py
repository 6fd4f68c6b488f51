"""Runs per hour, packed against one after another: the step of N runs in one program beside N steps of one, or whole
studies of N runs from start to report.

    python benchmarks/packing.py demo --runs 1,2,4,8,16,32
    python benchmarks/packing.py demo:model.hidden_size=128,batch_size=768 --runs 8,32
    python benchmarks/packing.py demo --runs 8,32 --whole --alone 8

A row is a recipe and its overrides, `RECIPE:a.b=value,...`; its data must be there. Times are medians over rounds of
steps, alternating between the two, after both are compiled; compiling is not in them, and is shown apart. Runs per hour
are for runs of `config.steps` steps without evaluations. One device is used.

With `--whole` each figure is the wall time of `tinypod study run`: Python's start, compiling, training, evaluations,
checkpoints, the report. `--pack 1` is the same study one run after another, with `--alone` seeds; a compilation cache
that begins empty serves all of them, so that only the first compiles.
"""

import argparse
import datetime
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from tinypod import config as configs
from tinypod.experiment import ExperimentConfig, build
from tinypod.health.memory import step_bytes
from tinypod.study.pack import Program


class Stepper:
    """A compiled step with all that it is given."""

    def __init__(self, step: Any, state: Any, *rest: Any) -> None:
        self.step, self.state, self.rest = step, state, rest

    def seconds(self, steps: int) -> float:
        """Of one step, over so many."""
        began = time.perf_counter()
        for _ in range(steps):
            self.state, sums = self.step(self.state, *self.rest)
        jax.block_until_ready((self.state, sums))
        return (time.perf_counter() - began) / steps


def whole(recipe: str, overrides: list[str], count: int, pack: int) -> float:
    """Seconds that a study of so many seeds takes, from start to report."""
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / "seeds.yaml"
        study.write_text(yaml.safe_dump({"base": recipe, "seeds": count}))
        command = [sys.executable, "-c", "from tinypod.cli import main; main()", "study", "run", str(study)]
        command += ["--folder", f"{folder}/study", "--pack", str(pack), f"compile_cache={folder}/cache", *overrides]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began


def whole_studies(rows: list[str], counts: list[int], alone: int) -> None:
    print("| recipe | overrides | runs | pack | s | runs an hour | ratio |\n|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        recipe, _, text = row.partition(":")
        overrides = [part for part in text.split(",") if part]
        first = None
        for count, pack in [(alone, 1), *((count, count) for count in counts)]:
            seconds = whole(recipe, overrides, count, pack)
            hourly = 3600 * count / seconds
            first = first or hourly
            print(
                f"| {recipe} | {' '.join(overrides) or '–'} | {count} | {pack} | {seconds:.1f} | {hourly:,.0f} "
                f"| {hourly / first:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="RECIPE or RECIPE:a.b=value,...")
    parser.add_argument("--runs", default="1,2,4,8,16,32", help="sizes of packs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--whole", action="store_true", help="whole studies instead of steps")
    parser.add_argument(
        "--alone", type=int, default=8, help="runs one after another that a whole study is held against"
    )
    arguments = parser.parse_args()
    if arguments.whole:
        whole_studies(arguments.rows, [int(count) for count in arguments.runs.split(",")], arguments.alone)
        return
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {datetime.date.today()}\n")
    print(
        "| recipe | overrides | runs | alone: ms per step | packed: ms per step | runs an hour, alone | packed | ratio "
        "| packed needs GiB | compile s, alone, packed |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in arguments.rows:
        recipe, _, text = row.partition(":")
        overrides = [part for part in text.split(",") if part]
        config = configs.load(recipe, [*overrides, "mesh.devices=1"], ExperimentConfig)
        alone = build(config, jax.devices()[:1])
        feed, began = alone.task.open_feed(alone.mesh)(0), time.perf_counter()
        one_step = alone.compile_step(feed)
        one_compile = time.perf_counter() - began
        one = Stepper(one_step, alone.init(), alone.put_settings(), alone.put(np.int32(0)), feed)
        for count in map(int, arguments.runs.split(",")):
            seeds = [config.model_copy(update={"seed": seed}) for seed in range(count)]
            program = Program(seeds, jax.devices()[:1])
            fed, began = program.experiment.task.open_feed(program.mesh)(0), time.perf_counter()
            many_step = program.compile(fed)
            many_compile = time.perf_counter() - began
            many = Stepper(many_step, program.init(), program.put_settings(), program.put(np.int32(0)), fed)
            times: list[tuple[float, float]] = []
            for number in range(arguments.rounds + 1):
                both = one.seconds(arguments.steps), many.seconds(arguments.steps)
                times += [both] * bool(number)  # the first round warms up
            single, packed = (statistics.median(values) for values in zip(*times, strict=True))
            hourly = 3600 / (single * config.steps), 3600 * count / (packed * config.steps)
            print(
                f"| {recipe} | {' '.join(overrides) or '–'} | {count} | {1e3 * single:.1f} | {1e3 * packed:.1f} "
                f"| {hourly[0]:,.1f} | {hourly[1]:,.1f} | {hourly[1] / hourly[0]:.2f} "
                f"| {(step_bytes(many_step) or 0) / 2**30:.2f} | {one_compile:.0f}, {many_compile:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
