"""The SVG: one row of closed grids, the model's confidence in words, light and dark."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from refinements import CLUE_LOST, GOOD, REPEAT, make_refinement, solution
from tinypod.solve.picture import draw_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(refinement, path: Path) -> tuple[str, ET.Element]:
    path.write_text(draw_svg(refinement), encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    return text, ET.fromstring(text)


def words(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_it_says_what_the_model_thinks_and_where_it_stops(tmp_path: Path) -> None:
    grids, sure = [REPEAT, REPEAT, CLUE_LOST, GOOD, GOOD], [0.1, 0.001, 0.3, 0.999, 0.999]
    text, root = drawn(make_refinement(grids, sure), tmp_path / "a.svg")
    said = words(root)
    for phrase in ["puzzle", "steps 1–2", "<1 % sure", "3 cells break a rule", "step 3", "30 % sure", "step 4"]:
        assert phrase in said, phrase
    assert ">99 % sure: stops here" in said
    assert "✔ solved" in said
    assert not any("5" in word and "step" in word for word in said)  # nothing after the stop
    panels = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "thick"]
    assert len(panels) == 4
    assert len({panel.get("y") for panel in panels}) == 1  # one row
    # In the legend, too: one changed square, one framed.
    changed = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "changed"]
    broken = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "broken"]
    assert len(changed) == 1 + (REPEAT != CLUE_LOST).sum() + (CLUE_LOST != GOOD).sum()
    assert len(broken) == 1 + 3 + 4
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"@font-face|@import|url\(|href", text)


def test_a_model_that_does_not_stop_is_said_to(tmp_path: Path) -> None:
    said = words(drawn(make_refinement([REPEAT, GOOD], [0.1, 0.4]), tmp_path / "a.svg")[1])
    assert "40 % sure: does not stop" in said


@pytest.mark.parametrize("box", [(2, 2), (2, 3), (3, 2), (3, 3), (4, 4)])
def test_whatever_is_drawn_lies_inside_and_long_refinements_stay_one_row(box: tuple[int, int], tmp_path: Path) -> None:
    good, side = solution(box), box[0] * box[1]
    grids = [np.where(np.arange(side**2) % 9 >= 9 - step, good, 1).astype(np.uint8) for step in range(10)]
    _, root = drawn(make_refinement(grids, [0.1] * 9 + [0.9], box=box), tmp_path / "a.svg")
    titles = [word for word in words(root) if word.startswith("step")]
    assert titles == ["step 1", "step 4", "step 7", "step 10"]
    width, height = (float(root.get(name, "")) for name in ("width", "height"))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + w <= width
        assert y + h <= height
    for text in root.iter(f"{SVG}text"):
        half = 0.3 * 15 * len(text.text or "")
        assert half <= float(text.get("x", "")) + half <= width + half  # its anchor
        assert float(text.get("y", "")) < height
    # Every line of a grid ends on its frame.
    frames = [
        tuple(float(r.get(n, "")) for n in ("x", "y", "width"))
        for r in root.iter(f"{SVG}rect")
        if r.get("class") == "thick"
    ]
    paths = [p for p in root.iter(f"{SVG}path") if p.get("class") == "thick"]
    for (x, y, length), path in zip(frames, paths, strict=True):
        lines = re.findall(r"M([\d.]+) ([\d.]+)([vh])([\d.]+)", path.get("d", ""))
        assert len(lines) == box[0] - 1 + box[1] - 1
        for left, top, way, long in lines:
            assert float(long) == length
            assert (float(top) == y) if way == "v" else (float(left) == x)


def test_it_is_the_same_every_time(tmp_path: Path) -> None:
    refinement = make_refinement([REPEAT, GOOD], [0.2, 0.9])
    assert drawn(refinement, tmp_path / "a.svg")[0] == drawn(refinement, tmp_path / "b.svg")[0]
