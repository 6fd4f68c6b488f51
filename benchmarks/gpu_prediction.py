"""Hold plans for an H200, made without one, against steps that were measured on one.

    python benchmarks/gpu_prediction.py            # with JAX's CUDA plugin (extra `cuda`): XLA's GPU compiler
    python benchmarks/gpu_prediction.py fused      # those whose overrides or config have this in them

Without the plugin the rows are what the CPU's compiler makes of it, and say so. Rows marked "fitted" are those that
`planning/calibration.yaml` names; nothing was fitted to the others. Measured times are from benchmarks/trm_step.md and
docs/performance.md, which have their dates.
"""

import argparse
import datetime
from importlib.metadata import version
from typing import NamedTuple

from rich.console import Console

from tinypod import config as configs
from tinypod.experiment import ExperimentConfig
from tinypod.planning.compiler import compiler_version
from tinypod.planning.hardware import find_hardware
from tinypod.planning.planner import Planner
from tinypod.planning.prices import read_prices
from tinypod.planning.slices import GIB

MLP, ATTENTION, QAT, LORA = "trm/sudoku_mlp", "trm/sudoku_attention", "distill/qat_v6e4", "distill/lora_v6e1"


class Row(NamedTuple):
    config: str
    overrides: str
    measured_ms: float
    measured_gib: float
    fitted: bool = False


ROWS = (
    Row(MLP, "model.fused=false", 133.6, 29.0, fitted=True),
    Row(MLP, "", 74.7, 12.7, fitted=True),
    Row(MLP, "batch_size=32", 5.36, 0.7, fitted=True),
    Row(QAT, "batch_size=32", 78.3, 5.2, fitted=True),
    Row(MLP, "batch_size=128", 13.07, 2.2),
    Row(MLP, "batch_size=3072", 297.2, 50.5),
    Row(MLP, "batch_size=6144", 599.3, 99.2),
    Row(ATTENTION, "model.fused=false", 142.7, 22.3),
    Row(ATTENTION, "", 81.4, 17.7),
    Row(ATTENTION, "batch_size=128", 15.31, 3.1),
    Row(MLP, "model.fused=false model.remat=true", 157.3, 5.5),
    Row(MLP, "model.fused=false model.unroll=false", 268.7, 62.3),
    Row(MLP, "model.fused=false model.hidden_size=1024 batch_size=384", 162.8, 28.4),
    Row(MLP, "model.fused=false model.dtype=float32 batch_size=192", 71.4, 14.5),
    Row(ATTENTION, "model.fused=false model.unroll=false", 222.2, 38.6),
    Row(QAT, "batch_size=256 accumulation=1 model.unroll=true", 255.2, 54.1),
    Row(LORA, "", 417.0, 6.0),
)


def compare(row: Row) -> str:
    config = configs.load(row.config, ["data.path=nowhere", *row.overrides.split()], ExperimentConfig)
    plan = Planner(config, read_prices(None), Console(stderr=True)).plan(find_hardware("h200"))
    assert plan.prediction is not None
    least, step, most = (1e3 * x for x in (plan.prediction.least_s, plan.prediction.step_s, plan.prediction.most_s))
    times = f"{least:.4g} to {most:.4g} | {step:.4g} | {row.measured_ms:.4g} | {step / row.measured_ms:.2f}"
    by = "the CPU's" if plan.analysis.stand_in else "fitted" if row.fitted else ""
    memory = f"{plan.analysis.memory.needed / GIB:.1f} | {row.measured_gib:.1f}"
    shown = " ".join(f"`{text}`" for text in row.overrides.split()) or "–"
    return f"| {row.config.rpartition('/')[2]} | {shown} | {times} | {memory} | {by} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("having", nargs="?", default="", help="only rows that have this in their config or overrides")
    having = parser.parse_args().having
    print(f"jax {version('jax')}, {compiler_version(find_hardware('h200'))} compiler, {datetime.date.today()}\n")
    print("| config | overrides | from, to ms | predicted ms | measured ms | predicted / measured |", end="")
    print(" planned GiB | measured GiB | |\n|---|---|---|---:|---:|---:|---:|---:|---|")
    for row in ROWS:
        if having in f"{row.config} {row.overrides}":
            print(compare(row), flush=True)


if __name__ == "__main__":
    main()
