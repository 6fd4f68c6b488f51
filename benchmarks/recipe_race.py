"""Which recipe solves most after so many seconds of one device? Each gets as many, with its schedule cut to fit.

    python benchmarks/recipe_race.py OUT --seconds 60 trm/sudoku_fast trm/sudoku_fast:batch_size=128,model.H_cycles=2

A contestant is a recipe and its overrides, `RECIPE:a.b=value,...` (commas inside brackets are the value's). They are
compiled side by side. Then, one after the other: their pace says how many steps there will be time for, which is the
length of the schedule; each is scored on `--splits` after equal parts of its time, with averaged and with live weights.
Evaluations are not counted as its time. OUT/scores.jsonl gets a row for each. The last one is taken with more thought,
too: `--thought task.halting.max_steps=64 task.thinking.views=8`, each by itself, on the first split.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tinypod import config as configs
from tinypod.evaluate import Evaluator
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.step import evaluation_params

WARM = 10  # dispatches before the pace is taken, and as many from which it is
CHUNKS = 50  # parts of a run at which the pace is taken again


class Contestant(NamedTuple):
    name: str
    experiment: Experiment
    feed: Any
    step: Any
    evaluators: dict[str, Evaluator]


def parse(text: str) -> tuple[str, list[str]]:
    recipe, _, rest = text.partition(":")
    overrides, depth = [""], 0
    for character in rest:
        depth += (character in "{[") - (character in "}]")
        if character == "," and not depth:
            overrides.append("")
        else:
            overrides[-1] += character
    return recipe, [override for override in overrides if override]


def prepare(text: str, splits: list[str], limit: int | None, thought: list[str]) -> Contestant:
    recipe, overrides = parse(text)
    config = configs.load(recipe, [*overrides, "eval.weights=ema"], ExperimentConfig)
    experiment = build(config)
    feed = experiment.task.open_feed(experiment.mesh)(0)
    many = experiment.steps_per_dispatch
    step = experiment.compile_step(feed) if many == 1 else experiment.compile_steps(feed, many)
    evaluators = {}
    for split in splits:
        evaluators[split] = _evaluator(experiment, split, config.eval.batch_size, limit)
    for more in thought:
        thinking = configs.load(recipe, [*overrides, more], ExperimentConfig)
        evaluators[f"{splits[0]} {more}"] = _evaluator(build(thinking), splits[0], config.eval.batch_size, limit)
    return Contestant(text, experiment, feed, step, evaluators)


def _evaluator(experiment: Experiment, split: str, batch_size: int, limit: int | None) -> Evaluator:
    evaluation = experiment.task.open_evaluation(split)
    found = Evaluator(evaluation, experiment.mesh, experiment.specs, batch_size, limit)
    found.compile(experiment.abstract_params)
    return found


def race(contestant: Contestant, seconds: float, parts: int, out: Path) -> None:
    name, experiment, feed, step, evaluators = contestant
    many, batch = experiment.steps_per_dispatch, experiment.config.batch_size

    def run(state: Any, settings: Any, first: int, dispatches: int) -> tuple[Any, Any, float]:
        """And the seconds of a dispatch."""
        began = time.perf_counter()
        for i in range(dispatches):
            number = first + i * many
            numbers = np.int32(number) if many == 1 else np.arange(number, number + many, dtype=np.int32)
            state, sums = step(state, settings, experiment.put(numbers), feed)
            if i % 32 == 31:
                jax.block_until_ready(sums)
        jax.block_until_ready(state)
        return state, sums, (time.perf_counter() - began) / dispatches

    state, sums, _ = run(experiment.init(), experiment.put_settings(), 0, WARM)
    _, _, pace = run(state, experiment.put_settings(), WARM * many, WARM)
    state, done, spent = experiment.init(), 0, 0.0
    for part in range(1, parts + 1):
        # By the pace so far: the machine may be busier at one time than at another.
        while (left := seconds * part / parts - spent) > pace / 2:
            dispatches = max(1, round(min(left, seconds / CHUNKS) / pace))
            total = done + (seconds - spent) / pace * many
            state, sums, pace = run(state, experiment.put_settings(total_steps=total), done, dispatches)
            done, spent = done + dispatches * many, spent + dispatches * pace
        last = jax.tree.map(lambda x: float(np.ravel(x)[-1]), jax.device_get(sums))
        row: dict[str, Any] = {"name": name, "seconds": round(spent, 1), "step": done, "examples": done * batch}
        row["ms"] = round(1e3 * spent / done, 3)
        row["train"] = {key: round(value, 4) for key, value in experiment.task.summarise(last).items()}
        for split, evaluator in evaluators.items():
            if " " in split and part < parts:
                continue
            for weights in ("ema", "live"):
                scores = evaluator(evaluation_params(state.params, state.ema, weights))
                row[f"{split} {weights}"] = {k: round(v, 4) for k, v in scores.items() if k.startswith("exact")}
        with open(out / "scores.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        short = " ".join(f"{k}={v['exact_accuracy']:.3f}" for k, v in row.items() if " " in k)
        solved, steps = row["train"].get("exact_accuracy", 0), row["train"].get("steps", 0)
        at = f"{row['seconds']:.0f} s, step {row['step']:,} ({row['ms']} ms)"
        print(f"{name[-90:]}: {at}, train {solved:.2f} in {steps:.1f}, {short}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("contestants", nargs="+")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--splits", nargs="+", default=["holdout"])
    parser.add_argument("--limit", type=int, help="puzzles of each split")
    parser.add_argument("--thought", nargs="+", default=[], help="overrides for the last score")
    parser.add_argument("--at-once", type=int, default=8, help="contestants that are compiled side by side")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def make(text: str) -> Contestant:
        return prepare(text, options.splits, options.limit, options.thought)

    with ThreadPoolExecutor(options.at_once) as pool:
        contestants = list(pool.map(make, options.contestants))
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for contestant in contestants:
        race(contestant, options.seconds, options.parts, options.out)


if __name__ == "__main__":
    main()
