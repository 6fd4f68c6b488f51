"""Runs side by side: what differs, what they reached, their curves; and what cannot be compared."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console
from test_curves import drawn  # noqa: F401 (a fixture)
from test_listing import EXACT, NOW, PERPLEXITY

from tinypod.errors import UserError
from tinypod.runs.compare import Comparison, as_json, compare, render
from tinypod.runs.metrics import MetricsLog
from tinypod.runs.terminal import shorten


def make(folder: Path, config: dict, losses=(), scores=(), metric: dict = EXACT, **more) -> str:
    folder.mkdir(parents=True)
    tree = {"steps": 100, "task": {"kind": "puzzle"}, "optimizer": {"rate": 0.001, "betas": [0.9, 0.95]}} | config
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "task.json").write_text(json.dumps({"headline": [metric], "num_weights": 1_000_000}))
    log = MetricsLog(folder)
    for step, loss in losses:
        log.append({"step": step, "time": NOW, "train/loss": loss, "perf/examples_per_s": 10.0 * step})
    for step, score in scores:
        log.append({"step": step, "time": NOW, f"eval/{metric['name']}": score})
    for name, content in more.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def shown(found: Comparison, width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(render(found, width))
    return captured.get().splitlines()


def cells(rows: list[str], key: str) -> list[str]:
    (row,) = [row for row in rows if row.startswith(f"{key}  ")]
    return row.removeprefix(key).split()


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    spent = {"version": 1, "attempts": [{"started": 0, "written": 90, "seconds": {"stepping": 90.0}, "ended": "done"}]}
    first = {"losses": [(10, 2.0), (20, 1.0)], "scores": [(10, 0.5), (20, 0.25)], "goodput": spent}
    second = {"losses": [(10, 3.0), (30, 0.5)], "scores": [(30, 0.75)]}
    second["outcome"] = {"state": "done", "step": 30, "seconds": 12.5}
    return [
        make(tmp_path / "a", {"seed": 0, "mesh": {"fsdp": 1}}, **first),
        make(tmp_path / "b", {"seed": 1, "optimizer": {"rate": 0.003, "betas": [0.9, 0.95]}}, **second),
    ]


def test_only_keys_that_differ_are_listed_and_an_absent_one_says_so(two: list[str]) -> None:
    found = compare(two, NOW)
    assert found.config == {"optimizer.rate": [0.001, 0.003], "seed": [0, 1], "mesh.fsdp": [1, "–"]}
    rows = shown(found, 80)
    assert cells(rows, "optimizer.rate") == ["0.001", "0.003"]
    assert cells(rows, "mesh.fsdp") == ["1", "–"]
    assert not any("betas" in row for row in rows)


def test_what_they_reached(two: list[str]) -> None:
    rows = shown(compare(two, NOW), 80)
    assert cells(rows, "step") == ["20", "30"]
    assert cells(rows, "held-out exact") == ["25.00%", "75.00%"]
    assert cells(rows, "best exact") == ["50.00%", "75.00%"]
    assert cells(rows, "at step") == ["10", "30"]
    assert cells(rows, "training loss") == ["1", "0.5"]
    assert cells(rows, "time") == ["1", "min", "30", "s", "12.5", "s"]
    assert cells(rows, "examples/s") == ["150", "200"]
    assert cells(rows, "weights") == ["1,000,000", "1,000,000"]


def test_for_programs(two: list[str]) -> None:
    told = json.loads(json.dumps(as_json(compare(two, NOW))))
    assert told["config"]["mesh.fsdp"] == [1, None]
    first, second = told["runs"]
    assert first["scores"] == {"eval/exact_accuracy": {"final": 0.25, "best": 0.5, "best_step": 10}}
    assert (first["seconds"], second["seconds"], second["state"]) == (90.0, 12.5, "done")


def test_curves_of_all_are_in_one_picture(two: list[str], tmp_path: Path, drawn: list[Figure]) -> None:  # noqa: F811
    path = compare(two, NOW).draw(tmp_path / "both.png")
    assert path == tmp_path / "both.png"
    assert min(imread(path).shape[:2]) > 400
    left, right = drawn[0].axes
    lines = [[np.array(line.get_xydata()).tolist() for line in axes.get_lines()] for axes in (left, right)]
    assert lines == [
        [[[10, 2.0], [20, 1.0]], [[10, 3.0], [30, 0.5]]],
        [[[10, 0.5], [20, 0.25]], [[30, 0.75]]],
    ]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [shorten(name, 50) for name in two]
    colors = [[line.get_color() for line in axes.get_lines()] for axes in (left, right)]
    assert colors[0] == colors[1]
    assert len(set(colors[0])) == 2


def test_runs_that_logged_nothing_have_no_picture(tmp_path: Path) -> None:
    found = compare([make(tmp_path / name, {}) for name in "ab"], NOW)
    assert found.draw(tmp_path / "both.png") is None
    assert not (tmp_path / "both.png").exists()
    assert "their configs are the same" in shown(found, 80)[3]


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("count", [2, 3, 12])
def test_it_fits_and_nothing_is_lost(tmp_path: Path, width: int, count: int) -> None:
    """What has no room beside the others is stacked, equal values together; a path is never cut."""
    paths = [f"/a/rather/long/path/to/the/datasets/number_{i}/of/a/user" for i in range(count)]
    targets = [
        make(
            tmp_path / f"run_with_a_name_of_its_own_{i}",
            {"data": {"path": paths[i]}, "seed": i % 2},
            losses=[(65_104, 0.1)],
            scores=[(65_104, 0.98765)],
        )
        for i in range(count)
    ]
    rows = shown(compare(targets, NOW), width)
    assert max(map(len, rows)) <= width
    text = "".join("".join(rows).split())
    for path in paths:
        assert path in text
    assert rows.count("data.path") == 1
    assert "98.77%" in text
    assert [row[:3] for row in rows[: min(count, 3)]] == ["A  ", "B  ", "C  "][: min(count, 3)]


@pytest.mark.parametrize("count", [0, 1])
def test_one_run_cannot_be_compared(two: list[str], count: int) -> None:
    with pytest.raises(UserError, match="compare takes two runs or more"):
        compare(two[:count], NOW)


def test_the_same_run_twice_is_an_error(two: list[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(two[0])
    for other in (two[0], f"{two[0]}/", f"{two[1]}/../a", str(tmp_path / "link")):
        with pytest.raises(UserError, match="is given twice"):
            compare([two[0], other], NOW)


def test_a_folder_that_is_no_run_is_an_error(two: list[str], tmp_path: Path) -> None:
    for other in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"is not a run folder: it has no config\.yaml"):
            compare([two[0], str(other)], NOW)
    assert not (tmp_path / "nowhere").exists()


def test_tasks_of_different_kinds_are_an_error(two: list[str], tmp_path: Path) -> None:
    other = make(tmp_path / "c", {"task": {"kind": "distill"}}, metric=PERPLEXITY)
    with pytest.raises(UserError, match=r"different kinds.*a is of 'puzzle'.*c is of 'distill'"):
        compare([two[0], other], NOW)
