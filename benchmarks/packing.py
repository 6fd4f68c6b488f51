"""Runs per hour, packed against one after another: the step of N runs in one program beside N steps of one.

    python benchmarks/packing.py demo --runs 1,2,4,8,16,32
    python benchmarks/packing.py demo:model.hidden_size=128,batch_size=768 --runs 8,32

A row is a recipe and its overrides, `RECIPE:a.b=value,...`; its data must be there. Times are medians over rounds of
steps, alternating between the two, after both are compiled; compiling is not in them, and is shown apart. Runs per hour
are for runs of `config.steps` steps without evaluations. One device is used.
"""

import argparse
import datetime
import statistics
import time
from typing import Any

import jax
import numpy as np

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", help="RECIPE or RECIPE:a.b=value,...")
    parser.add_argument("--runs", default="1,2,4,8,16,32", help="sizes of packs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {datetime.date.today()}\n")
    print(
        "| recipe | overrides | runs | alone: ms a step | packed: ms a step | runs an hour, alone | packed | ratio "
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
