"""What a study is planned to take, by a compiler that answers at once."""

from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import fake_compiler
from tinypod.errors import UserError
from tinypod.planning.prices import read_prices
from tinypod.planning.slices import find_slice
from tinypod.study.file import load_study
from tinypod.study.plan import plan_study, summary, table

V4_8 = find_slice("v4-8")


def write(folder: Path, **tree: object) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"base": "demo", "set": {"data.path": "nowhere"}} | tree))
    return path


def test_packs_hours_and_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten runs of two widths on four devices: two and three to a device, and as many times as long."""
    fake_compiler.install(monkeypatch, tmp_path)
    study = load_study(write(tmp_path, factors={"model.hidden_size": [32, 64]}, seeds=9))
    found = plan_study(study, V4_8, read_prices(None), Console(file=StringIO()))
    assert [(len(shape.runs), shape.a_device, shape.packs) for shape in found.shapes] == [(9, 3, [9]), (9, 3, [9])]
    one = found.shapes[0].plan
    assert one.analysis.mesh["data"] == 1
    assert one.hours is not None
    assert found.shapes[0].hours == pytest.approx(3 * one.hours)
    assert found.hours == pytest.approx(2 * 3 * one.hours)
    price = read_prices(None).on_demand["v4"]
    assert found.dollars == pytest.approx(found.hours * V4_8.chips * price)
    assert found.alone_hours is not None
    console = Console(file=StringIO(), width=80)
    console.print(table(found))
    assert "hidden_size=32" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "18 runs in 2 packs of 2 shapes" in summary(found)


def test_runs_that_do_not_fit_together_take_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = V4_8.generation.usable_bytes / 2**30
    fake_compiler.install(monkeypatch, tmp_path, split_gib=0.4 * gib, row_mib=0)
    study = load_study(write(tmp_path, seeds=20))
    found = plan_study(study, V4_8, read_prices(None), Console(file=StringIO()))
    [shape] = found.shapes
    assert shape.a_device == 2  # five to a device are wanted, two fit: three rounds of two
    assert found.hours == pytest.approx(3 * 2 * shape.plan.hours)


def test_hosts_share_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine shapes of three seeds on eight hosts of four devices: the first train three seeds side by side, the last
    single runs on all their devices, which fill up the time."""
    fake_compiler.install(monkeypatch, tmp_path)
    factors = {"model.hidden_size": [32, 64, 96], "model.num_layers": [1, 2, 3]}
    study, target = load_study(write(tmp_path, factors=factors, seeds=3)), find_slice("v4-64")
    found = plan_study(study, target, read_prices(None), Console(file=StringIO()))
    packs = [size for shape in found.shapes for size in shape.packs]
    assert sum(packs) == 27
    assert (packs.count(3), packs.count(2), packs.count(1)) == (4, 4, 7)
    one = found.shapes[0].plan.hours
    assert one is not None
    assert max(shape.plan.hours or 0 for shape in found.shapes) <= found.hours < 2.5 * one
    assert found.hours < sum(shape.hours for shape in found.shapes)  # side by side


def test_a_run_that_fits_no_device_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler.install(monkeypatch, tmp_path, split_gib=1000)
    study = load_study(write(tmp_path, seeds=2))
    with pytest.raises(UserError, match="does not fit a device of v4-8"):
        plan_study(study, V4_8, read_prices(None), Console(file=StringIO()))
