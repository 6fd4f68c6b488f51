import csv
import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from synthetic_study import entry, grid, rising, write_study
from tinypod.study.answers import analyse
from tinypod.study.figures import QUIET, SERIES, Plot, all_plots, mean_curve
from tinypod.study.results import Curve, read_study


def curve(*points: tuple[float, float]) -> Curve:
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    return Curve(table[:, 0], table[:, 1])


def plots(folder: Path) -> dict[str, Plot]:
    return {plot.name: plot for plot in all_plots(analyse(read_study(folder)))}


def rows(plot: Plot) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(plot.csv())))


def test_a_mean_curve_by_hand() -> None:
    steps, mean, sd, count = mean_curve([curve((10, 1.0), (20, 3.0)), curve((10, 2.0), (20, 5.0))])
    np.testing.assert_array_equal(steps, [10, 20])
    np.testing.assert_allclose(mean, [1.5, 4.0])
    np.testing.assert_allclose(sd, [0.5**0.5, 2**0.5])  # of a sample: over n − 1
    np.testing.assert_array_equal(count, [2, 2])


def test_a_run_that_ends_between_evaluations_bends_no_mean() -> None:
    """At step 15 the other run is on its way from 1 to 3; after it, it is alone."""
    steps, mean, sd, count = mean_curve([curve((10, 1.0), (20, 3.0)), curve((10, 1.0), (15, 2.0)), curve()])
    np.testing.assert_array_equal(steps, [10, 15, 20])
    np.testing.assert_allclose(mean, [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(count, [2, 2, 1])
    np.testing.assert_allclose(sd, [0, 0, 0])


def test_long_curves_keep_their_ends() -> None:
    long = curve(*((step, step) for step in range(1, 5001)))
    steps, mean, _, _ = mean_curve([long, long])
    assert len(steps) <= 300
    assert (steps[0], steps[-1]) == (1, 5000)
    np.testing.assert_allclose(mean, steps)


def test_no_curves_no_points() -> None:
    assert [len(part) for part in mean_curve([])] == [0, 0, 0, 0]


def test_the_csv_has_what_is_drawn(tmp_path: Path) -> None:
    factors = {"model.hidden_size": [32, 64, 128]}
    finals = {32: 0.6, 64: 0.7, 128: 0.8}
    noise = [-0.01, 0.0, 0.01]
    write_study(
        tmp_path,
        grid(factors, 3),
        lambda run: rising(finals[run["levels"]["model.hidden_size"]] + noise[run["seed"]], tau=1.0),
        factors=factors,
    )
    found = plots(tmp_path)
    assert list(found) == [
        *("final", "curves", "train_curves", "loss", "cost_weights", "cost_compute", "scaling_1", "scaling_2"),
    ]
    assert [float(row["final"]) for row in rows(found["final"])] == pytest.approx(
        [finals[width] + extra for width in finals for extra in noise]
    )
    last = [row for row in rows(found["curves"]) if float(row["step"]) == 300]
    assert [float(row["mean"]) for row in last] == pytest.approx(list(finals.values()))
    assert [float(row["sd"]) for row in last] == pytest.approx([0.01] * 3)
    assert {row["runs"] for row in last} == {"3"}
    weights = rows(found["cost_weights"])
    assert [float(row["weights"]) for row in weights] == [12 * width**2 for width in finals]
    assert [row["on_front"] for row in weights] == ["True"] * 3
    assert [float(row["model.hidden_size"]) for row in rows(found["scaling_1"])] == [32.0] * 3 + [64.0] * 3 + [
        128.0
    ] * 3
    drawn = found["scaling_1"].figure.axes[0].get_lines()[0].get_xydata()
    np.testing.assert_allclose(np.array(drawn)[:, 1], [1 - finals[w] - extra for w in finals for extra in noise])


def test_two_factors_have_a_grid_with_holes_where_nothing_ended(tmp_path: Path) -> None:
    factors = {"model.num_layers": [1, 2], "ema_decay": [0.9, None]}
    outcomes = {f"num_layers=2,ema_decay=None,seed={seed}": {"state": "failed", "step": 20} for seed in range(2)}
    write_study(tmp_path, grid(factors, 2), lambda run: rising(0.5), factors=factors, outcomes=outcomes)
    plot = plots(tmp_path)["grid"]
    assert [(row["model.num_layers"], row["ema_decay"]) for row in rows(plot)] == [
        ("1", "0.9"),
        ("1", ""),
        ("2", "0.9"),
    ]
    assert [text.get_text() for text in plot.figure.axes[0].texts] == ["49.66%", "49.66%", "49.66%", "–"]


def test_of_many_variants_the_first_and_the_best_are_in_colour(tmp_path: Path) -> None:
    finals = {f"v{number}": 0.1 + 0.05 * number for number in range(12)}
    entries = [entry(name, seed) for name in finals for seed in range(2)]
    write_study(tmp_path, entries, lambda run: rising(finals[run["variant"]]))
    plot = plots(tmp_path)["curves"]
    lines = plot.figure.axes[0].get_lines()
    assert [line.get_label() for line in lines if line.get_color() != QUIET] == ["v0", *(f"v{n}" for n in range(5, 12))]
    assert sum(line.get_color() == QUIET for line in lines) == 4
    assert "the 4 variants that are neither the first nor among the best" in plot.caption


def test_pictures_are_pictures_and_svgs_stand_in_a_page(tmp_path: Path) -> None:
    factors = {"batch_size": [32, 64, 128, 256]}
    tau = {32: 200.0, 64: 120.0, 128: 80.0, 256: 60.0}
    write_study(tmp_path, grid(factors, 2), lambda run: rising(0.9, tau[run["levels"]["batch_size"]]), factors=factors)
    found = plots(tmp_path)
    assert "critical_batch_1" in found
    ids: list[str] = []
    for plot in found.values():
        image = imread(io.BytesIO(plot.png()))
        assert min(image.shape[:2]) > 300
        assert image[..., :3].std() > 0.01
        svg = plot.svg()
        root = ElementTree.fromstring(svg)  # well-formed
        assert "viewBox" in root.attrib
        assert "width" not in root.attrib  # the page's to choose
        assert "var(--ink)" in svg
        assert not any(color in svg for color in SERIES)
        ids += [element.attrib["id"] for element in root.iter() if "id" in element.attrib]
        for element in root.iter():
            for name, value in element.attrib.items():
                if name.endswith("href"):
                    assert value.startswith(f"#{plot.name}-")
    assert len(ids) == len(set(ids))
    assert any(
        "batch_size=32" in (element.text or "") for element in ElementTree.fromstring(found["curves"].svg()).iter()
    )


def test_zipped_factors_have_no_grid_and_many_variants_no_endless_figure(tmp_path: Path) -> None:
    factors = {
        "model.hidden_size": [8 * n for n in range(1, 51)],
        "optimizer.learning_rate": [1e-4 * n for n in range(1, 51)],
    }
    zipped = [dict(zip(factors, levels, strict=True)) for levels in zip(*factors.values(), strict=True)]
    entries = [entry(f"v{number}", 0, levels) for number, levels in enumerate(zipped)]
    write_study(tmp_path, entries, lambda run: rising(0.01 * int(run["variant"][1:])), factors=factors, every=150)
    found = plots(tmp_path)
    assert "grid" not in found
    ticks = [text.get_text() for text in found["final"].figure.axes[0].get_yticklabels()]
    assert ticks == ["v0", *(f"v{number}" for number in range(11, 50))]
    assert len(rows(found["final"])) == 50
