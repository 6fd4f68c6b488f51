"""The guide finds the largest batch with few compilations, and writes only its own part of the file."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fake_compiler import install
from fixtures import CONFIGS
from tinypod.config import load
from tinypod.experiment import ExperimentConfig
from tinypod.planning import slices
from tinypod.planning.prices import read_prices
from tinypod.planning.slices import GIB

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import memory_guide

QUIET = Console(file=io.StringIO())


def sudoku() -> ExperimentConfig:
    return load(CONFIGS / "trm" / "sudoku_mlp.yaml", ["data.path=nowhere"], ExperimentConfig)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    return lambda **settings: install(monkeypatch, tmp_path / "cache", **settings)


def test_the_largest_batch_that_fits(compiler) -> None:
    """30.75 GiB less 1 of state, at 40 MiB a row, are 761 rows; aimed at 97 % of the memory, in steps of 16: 736."""
    fake = compiler(split_gib=1.0, row_mib=40.0)
    found = memory_guide.largest_batch(sudoku(), slices.find_slice("v4-8"), False, read_prices(None), QUIET)
    assert found is not None
    assert found.rows_per_device == 736
    assert found.analysis.memory.needed < 30.75 * GIB
    assert len(fake.asked) == 2  # one that is refused, one that fits
    remat = memory_guide.largest_batch(sudoku(), slices.find_slice("v4-8"), True, read_prices(None), QUIET)
    assert remat is not None
    assert remat.rows_per_device == memory_guide.MOST  # a tenth of the activations: more would fit, nobody looks
    compiler(split_gib=40.0)
    assert memory_guide.largest_batch(sudoku(), slices.find_slice("v4-8"), False, read_prices(None), QUIET) is None


def test_the_guide_is_a_table_for_each_config(compiler, tmp_path: Path) -> None:
    fake = compiler()
    names = ("v4-8", "v4-64", "v5e-8")
    guide = memory_guide.make_guide([("sudoku", sudoku())], names, read_prices(None), QUIET, remat=True)
    rows = [line.split(" | ") for line in guide.splitlines() if line.startswith("| v")]
    assert [row[0] for row in rows] == ["| v4-8", "| v4-64", "| v5e-8"]
    assert rows[0][3] == rows[1][3] == "736"
    assert rows[1][4] == f"{736 * 32:,}"
    assert rows[1][6:8] == ["≥ 4,096", f"≥ {4096 * 32:,}"]
    assert {name for name, *_ in fake.asked} == {"v4-8", "v5e-8"}
    plain = memory_guide.make_guide([("sudoku", sudoku())], names, read_prices(None), QUIET, remat=False)
    assert "remat" not in plain
    assert "| v4-8 | 4 | 30.75 | 736 |" in plain
    path = tmp_path / "memory.md"
    path.write_text(f"# Mine\n\nWords.\n\n{memory_guide.MARK}\n\nold")
    memory_guide.write_guide(path, guide)
    written = path.read_text()
    assert written.startswith("# Mine\n\nWords.\n")
    assert "old" not in written
    assert "| v4-64 |" in written
