"""Hold the planner's predictions for the device at hand against measured steps.

    python benchmarks/prediction.py trm/sudoku_mlp trm/sudoku_attention \
        --vary batch_size=192 --vary model.remat=true --vary 'model.hidden_size=1024 batch_size=384'

Each row is one `tinypod plan CONFIG --slice local --measure`: the step is compiled, the device probed, the prediction
made, and then ten steps are run. The probe is that of the row, so that a machine that is busy is busy for both.
"""

import argparse
import datetime
import shlex
from pathlib import Path

import jax
from rich.console import Console

from tinypod import config as configs
from tinypod.experiment import ExperimentConfig
from tinypod.planning import local as local_device
from tinypod.planning.slices import GIB


def row(path: str, overrides: list[str]) -> tuple[str, float]:
    config = configs.load(path, overrides, ExperimentConfig)
    plan = local_device.plan_here(config, Console(stderr=True), measure=True)
    predicted = plan.prediction
    assert predicted is not None
    assert plan.measured_s is not None
    assert plan.ratio is not None
    peak = "–" if plan.measured_peak_bytes is None else f"{plan.measured_peak_bytes / GIB:.1f}"
    shown = " ".join(f"`{text}`" for text in overrides) or "–"
    seconds = (predicted.compute_s, predicted.hbm_s, predicted.step_s, plan.measured_s)
    times = " | ".join(f"{1e3 * x:.1f}" for x in seconds)
    needed = plan.analysis.memory.needed / GIB
    return f"| {Path(path).stem} | {shown} | {times} | {plan.ratio:.2f} | {needed:.1f} | {peak} |", plan.ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+")
    parser.add_argument("--vary", action="append", default=[], help="overrides of one more row for each config")
    arguments = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{jax.device_count()} × {device}, jax {jax.__version__}, {datetime.date.today()}\n")
    print(
        "| config | overrides | products ms | traffic ms | predicted ms | measured ms | predicted / measured |", end=""
    )
    print(" planned GiB | peak GiB so far |\n|---|---|---|---|---|---|---|---|---|")
    ratios = []
    for path in arguments.configs:
        for overrides in ["", *arguments.vary]:
            line, ratio = row(path, shlex.split(overrides))
            ratios.append(ratio)
            print(line, flush=True)
    worst = max(abs(ratio - 1) for ratio in ratios)
    print(f"\nworst error of {len(ratios)}: {worst:.0%} of the measured time")


if __name__ == "__main__":
    main()
