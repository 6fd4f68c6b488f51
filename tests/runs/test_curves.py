import threading
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from tinypod.runs import curves as report
from tinypod.runs.curves import plot_curves
from tinypod.runs.metrics import MetricsLog, make_record
from tinypod.tasks.puzzle_scores import HEADLINE
from tinypod.tasks.task import Metric


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures made, to look into."""
    figures = []

    def make(*args: object, **kwargs: object) -> Figure:
        figures.append(Figure(*args, **kwargs))  # type: ignore[arg-type]
        return figures[-1]

    monkeypatch.setattr(report, "Figure", make)
    return figures


def _curves(axes: Axes) -> dict[str, np.ndarray]:
    return {
        str(line.get_label()): np.array(line.get_xydata())
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def _write(run_dir: Path, *records: tuple[int, dict[str, float]]) -> None:
    log = MetricsLog(run_dir)
    for step, values in records:
        log.append(make_record(step, values))


def test_curves_show_what_was_logged(tmp_path: Path, drawn: list[Figure]) -> None:
    _write(
        tmp_path,
        (10, {"train/loss": 2.0, "train/exact_accuracy": 0.1, "train/cell_accuracy": 0.5}),
        (20, {"train/loss": 0.1, "train/exact_accuracy": 0.3, "train/cell_accuracy": 0.6}),
        (20, {"eval/exact_accuracy": 0.25, "eval/cell_accuracy": 0.75}),
    )
    path = plot_curves(tmp_path, HEADLINE)
    assert path == tmp_path / "curves.png"
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["curves.png", "metrics.jsonl"]
    image = imread(path)
    assert min(image.shape[:2]) > 400
    assert image[..., :3].std() > 0.01
    left, right = drawn[0].axes
    assert left.get_yscale() == "log"  # 2.0 is more than ten times 0.1
    np.testing.assert_array_equal(_curves(left)["as logged"], [[10, 2.0], [20, 0.1]])
    curves = _curves(right)
    np.testing.assert_allclose(curves["train, exact"], [[10, 0.1], [20, 0.3]])
    np.testing.assert_allclose(curves["train, cells"], [[10, 0.5], [20, 0.6]])
    np.testing.assert_allclose(curves["eval, exact"], [[20, 0.25]])
    np.testing.assert_allclose(curves["eval, cells"], [[20, 0.75]])


def test_a_metric_that_is_no_share_has_a_plain_axis(tmp_path: Path, drawn: list[Figure]) -> None:
    _write(tmp_path, (1, {"train/loss": 4.0, "eval/perplexity": 54.0}), (2, {"eval/perplexity": 33.0}))
    plot_curves(tmp_path, (Metric("perplexity", "perplexity", "min", ".2f"), Metric("right", "right", "max", ".1%")))
    right = drawn[0].axes[1]
    np.testing.assert_allclose(_curves(right)["eval, perplexity"], [[1, 54], [2, 33]])
    assert right.get_ylim()[1] > 33


def test_loss_within_a_decade_stays_linear_and_broken_values_are_counted(tmp_path: Path, drawn: list[Figure]) -> None:
    _write(tmp_path, (1, {"train/loss": 2.0}), (2, {"train/loss": float("nan")}), (3, {"train/loss": 1.0}))
    plot_curves(tmp_path, HEADLINE)
    left, right = drawn[0].axes
    assert left.get_yscale() == "linear"
    np.testing.assert_array_equal(_curves(left)["as logged"], [[1, 2.0], [3, 1.0]])
    assert "1 not finite, not drawn" in _curves(left)
    assert _curves(right) == {}


@pytest.mark.parametrize("loss", [0.0, -1.0])
def test_a_loss_that_has_no_logarithm_is_drawn(tmp_path: Path, drawn: list[Figure], loss: float) -> None:
    _write(tmp_path, (1, {"train/loss": 100.0}), (2, {"train/loss": loss}))
    plot_curves(tmp_path, HEADLINE)
    assert drawn[0].axes[0].get_yscale() == "linear"


@pytest.mark.parametrize("name", ["train/loss", "eval/exact_accuracy", "perf/examples_per_s"])
def test_any_one_column_is_enough(tmp_path: Path, name: str) -> None:
    _write(tmp_path, (0, {name: 0.5}))
    assert plot_curves(tmp_path, HEADLINE) == tmp_path / "curves.png"


def test_an_empty_log_makes_no_picture(tmp_path: Path) -> None:
    assert plot_curves(tmp_path, HEADLINE) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "ti')
    assert plot_curves(tmp_path, HEADLINE) is None
    assert not (tmp_path / "curves.png").exists()


def test_smoothing_keeps_a_line_and_the_ends_and_removes_noise() -> None:
    line = np.linspace(5.0, 1.0, 400)
    np.testing.assert_allclose(report.smooth(line), line)
    noise = np.random.default_rng(0).normal(size=400)
    smooth = report.smooth(line + noise)
    assert (smooth[0], smooth[-1]) == pytest.approx((line[0] + noise[0], line[-1] + noise[-1]))
    assert (smooth - line)[10:-10].std() < 0.5


def test_pictures_are_drawn_in_threads(tmp_path: Path) -> None:
    runs = [tmp_path / str(number) for number in range(3)]
    for run_dir in runs:
        _write(run_dir, (1, {"train/loss": 1.0}))
    threads = [threading.Thread(target=plot_curves, args=(run_dir, HEADLINE)) for run_dir in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((run_dir / "curves.png").exists() for run_dir in runs)
