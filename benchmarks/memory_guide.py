"""Which batch fits which chip, for which config: the tables of `docs/memory.md`, found by compiling.

    python benchmarks/memory_guide.py demo trm/sudoku_attention trm/sudoku_mlp --out docs/memory.md

Needs the extra `plan`, no TPU; nothing is run. It takes minutes for each config and generation of chips; what was
compiled is kept, so that it can be stopped and started again.

What a step needs grows in a straight line with the rows per device has. Compiling a batch that is far too large fails
within seconds and says what it would need, which gives the line; the batch at which the line reaches the chip's memory
is then compiled, to be sure. Slices of one generation have the same chip and differ only in what the chips exchange, so
only the smallest of them is compiled.
"""

import argparse
import datetime
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from tinypod import config as configs
from tinypod.experiment import ExperimentConfig
from tinypod.planning import compiler as tpu_compiler
from tinypod.planning import slices
from tinypod.planning.planner import Plan, Planner, changed
from tinypod.planning.prices import Prices, read_prices
from tinypod.planning.slices import GIB
from tinypod.runs.storage import replace_file

DEFAULT_SLICES = ("v4-8", "v4-64", "v5e-8", "v5p-128", "v6e-1", "v6e-4", "v6e-8")
MARK = "<!-- Made by `benchmarks/memory_guide.py`; what stands below is written over. -->"
MOST = 4096  # rows per device that are looked at: more are of no use to anybody
_STEP = 16  # rows per device: the guide's batches are multiples of it
_AIM = 0.97  # of the memory
_TRIES = 4


def largest_batch(
    config: ExperimentConfig, target: slices.Slice, remat: bool, prices: Prices, console: Console
) -> Plan | None:
    """The plan with the most rows per device that fits, to within a few per cent; None if 16 do not."""
    planner = Planner(changed(config, (f"model.remat={str(remat).lower()}",)), prices, console)

    def with_rows(rows: int) -> Plan:
        return planner.plan(target, (f"batch_size={rows * target.devices}", "accumulation=1"))

    rows = MOST
    probe = with_rows(rows)  # for most configs too large, which the compiler says within seconds
    for _ in range(_TRIES):
        if probe.fits:
            return probe
        rows = min(rows - _STEP, _crossing(probe, rows))
        if rows < _STEP:
            return None
        probe = with_rows(rows)
    return probe if probe.fits else None


def _crossing(plan: Plan, rows: int) -> int:
    """Rows a device at which the straight line through this plan meets the memory that there is."""
    memory = plan.analysis.memory
    assert plan.usable_bytes is not None
    fixed = memory.state - memory.carry
    each = max(1.0, (memory.needed - fixed) / rows)
    return int((_AIM * plan.usable_bytes - fixed) / each) // _STEP * _STEP


def make_guide(
    named: Sequence[tuple[str, ExperimentConfig]],
    names: Sequence[str],
    prices: Prices,
    console: Console,
    *,
    remat: bool,
) -> str:
    """The guide, as Markdown; `remat`: with a second half for `model.remat=true`."""
    targets = [slices.find_slice(name) for name in names]
    compiled = {
        generation: min((t for t in targets if t.generation is generation), key=lambda target: target.devices)
        for generation in dict.fromkeys(target.generation for target in targets)
    }
    variants = (False, True) if remat else (False,)
    sections = []
    for name, config in named:
        found = {
            (generation, variant): largest_batch(config, target, variant, prices, console)
            for generation, target in compiled.items()
            for variant in variants
        }
        rows = [_row(target, [found[target.generation, variant] for variant in variants]) for target in targets]
        sections.append("\n".join([f"## {name}", "", *_header(remat), *rows]))
    made = f"jax {version('jax')}, libtpu {tpu_compiler.compiler_version()}, {datetime.date.today()}."
    return "\n\n".join([made, *sections]) + "\n"


def write_guide(path: Path, guide: str) -> None:
    """Into the file, in place of what stands below its mark; what a person wrote above it stays."""
    text = path.read_text() if path.exists() else "# What fits\n\n"
    replace_file(path, f"{text.partition(MARK)[0]}{MARK}\n\n{guide}".encode())


def _header(remat: bool) -> tuple[str, str]:
    columns = ["slice", "devices", "HBM GiB per device", "rows per device", "batch", "needs GiB"]
    columns += ["rows, `model.remat=true`", "batch", "needs GiB"] * remat
    return f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"


def _row(target: slices.Slice, plans: Sequence[Plan | None]) -> str:
    cells = [target.name, str(target.devices), f"{target.generation.usable_bytes / GIB:.2f}"]
    for plan in plans:
        if plan is None:
            cells += ["none", "none", "–"]
            continue
        rows, more = plan.rows_per_device, "≥ " * (plan.rows_per_device == MOST)
        needed = plan.analysis.memory.needed / GIB
        cells += [f"{more}{rows:,}", f"{more}{rows * target.devices:,}", f"{needed:.1f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="recipes, or YAML files")
    parser.add_argument(
        "--out", type=Path, required=True, help="the Markdown file to write the tables into, below its first paragraphs"
    )
    parser.add_argument(
        "--slice", action="append", dest="slices", help=f"may be repeated; default: {', '.join(DEFAULT_SLICES)}"
    )
    parser.add_argument("--remat", action="store_true", help="also with model.remat=true: twice the time")
    arguments = parser.parse_args()
    named = [(Path(name).stem, configs.load(name, [], ExperimentConfig)) for name in arguments.configs]
    names, console = arguments.slices or DEFAULT_SLICES, Console(stderr=True)
    write_guide(arguments.out, make_guide(named, names, read_prices(None), console, remat=arguments.remat))


if __name__ == "__main__":
    main()
