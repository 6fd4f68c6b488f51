"""The pictures of a refinement: marks at the right cells, in straight lines, without any colour."""

import io
import re

import numpy as np
import pytest
from rich.console import Console, RenderableType

from refinements import BLANK, CLUE_LOST, GOOD, REPEAT, make_refinement, solution, with_cells
from tinypod.solve.display import render_grid, render_refinement, verdict

BOXES = [(2, 2), (2, 3), (3, 2), (3, 3), (3, 4), (4, 4)]
SYMBOLS = "·123456789ABCDEFG"


def printed(renderable: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, _environ={})
    console.print(renderable)
    return console.file.getvalue()


def cells_of(text: str, side: int) -> tuple[list[int], set[int], set[int]]:
    """Values, changed cells and broken cells, read back from the text of a single grid."""
    rows = [line.strip().replace("│", "") for line in text.splitlines() if line.strip().startswith("│")]
    assert [len(row) for row in rows] == [3 * side] * side
    cells = [row[3 * column : 3 * column + 3] for row in rows for column in range(side)]
    assert all(cell[0] in " *" and cell[2] in " !" for cell in cells), cells
    changed = {index for index, cell in enumerate(cells) if cell[0] == "*"}
    broken = {index for index, cell in enumerate(cells) if cell[2] == "!"}
    return [SYMBOLS.index(cell[1]) for cell in cells], changed, broken


def slow_broken(grid: np.ndarray, question: np.ndarray, box: tuple[int, int]) -> set[int]:
    rows, columns = box
    side = rows * columns
    broken = {cell for cell in range(side**2) if question[cell] and grid[cell] != question[cell]}
    for one in range(side**2):
        for other in range(side**2):
            (row, column), (row2, column2) = divmod(one, side), divmod(other, side)
            same_box = (row // rows, column // columns) == (row2 // rows, column2 // columns)
            if one != other and grid[one] == grid[other] > 0 and (row == row2 or column == column2 or same_box):
                broken.add(one)
    return broken


def test_grid_is_drawn_exactly():
    question = with_cells(np.zeros_like(GOOD), {0: 1, 5: 4, 10: 4})
    assert render_grid(REPEAT, question, (2, 2), previous=with_cells(GOOD, {1: 4})).plain == (
        "┌──────┬──────┐\n"
        "│ 1 *2 │ 3  4 │\n"
        "│ 3  4 │ 1  2 │\n"
        "├──────┼──────┤\n"
        "│ 2  3 │ 4  1!│\n"
        "│ 4  1!│ 2 *1!│\n"
        "└──────┴──────┘"
    )


@pytest.mark.parametrize(
    ("grid", "previous", "changed", "broken"),
    [
        (GOOD, None, set(), set()),
        (GOOD, REPEAT, {15}, set()),
        (REPEAT, GOOD, {15}, {11, 13, 15}),
        (CLUE_LOST, CLUE_LOST, set(), {2, 9, 10, 15}),
        (with_cells(GOOD, {10: 0}), GOOD, {10}, {10}),  # a clue left blank is broken, though nothing repeats
        (BLANK, GOOD, {15}, set()),
    ],
)
def test_marks_stand_at_the_right_cells(grid, previous, changed, broken):
    question = make_refinement([GOOD], [0.0]).question
    shown = cells_of(printed(render_grid(grid, question, (2, 2), previous)), 4)
    assert shown == (grid.tolist(), changed, broken)


@pytest.mark.parametrize("box", BOXES)
def test_any_box_shape_lines_up_and_marks_what_a_slow_search_finds(box):
    side = box[0] * box[1]
    rng = np.random.default_rng(side)
    question = np.where(rng.random(side**2) < 0.3, solution(box), 0).astype(np.uint8)
    noise = rng.integers(0, side + 1, side**2).astype(np.uint8)
    previous, grid = (np.where(rng.random(side**2) < share, noise, solution(box)) for share in (0.1, 0.15))
    text = printed(render_grid(grid, question, box, previous))
    expected = set(np.flatnonzero(grid != previous).tolist()), slow_broken(grid, question, box)
    assert cells_of(text, side) == (grid.tolist(), *expected)
    assert {len(line) for line in text.splitlines()} == {3 * side + box[0] + 1}
    lines = text.splitlines()
    assert len(lines) == side + box[1] + 1
    across = [index for index, char in enumerate(lines[0]) if char in "┌┬┐"]
    assert across == [box_number * (3 * box[1] + 1) for box_number in range(box[0] + 1)]
    for line in lines:  # every vertical stands under the one above it
        assert [index for index, char in enumerate(line) if char in "┌┬┐│├┼┤└┴┘"] == across


def test_colour_sets_clues_changes_and_broken_cells_apart():
    question = make_refinement([GOOD], [0.0]).question
    text = render_grid(REPEAT, question, (2, 2), previous=with_cells(REPEAT, {1: 4}))
    pieces = [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]
    styles = [style for piece, style in pieces if len(piece) == 3]
    assert len(styles) == 16
    assert {cell for cell, style in enumerate(styles) if "bold" in style} == {0, 5, 10}
    assert {cell for cell, style in enumerate(styles) if "yellow" in style} == {1}
    assert {cell for cell, style in enumerate(styles) if "red reverse" in style} == {11, 13, 15}


SOLVED = "solved at step"
STOPS = "; the model would have stopped at step"


@pytest.mark.parametrize(
    ("grids", "halts", "expected"),
    [
        ([REPEAT, GOOD, GOOD], [0.1, 0.2, 0.6], f"{SOLVED} 2{STOPS} 3"),
        ([REPEAT, GOOD, GOOD], [0.1, 0.9, 0.2], f"{SOLVED} 2{STOPS} 2"),
        ([REPEAT, REPEAT, GOOD], [0.1, 0.7, 0.9], f"{SOLVED} 3{STOPS} 2 with a wrong grid"),
        ([REPEAT, GOOD], [0.1, 0.5], f"{SOLVED} 2; the model would not have stopped within 2 steps"),
        ([GOOD], [0.1], f"{SOLVED} 1; the model would not have stopped within 1 step"),
        ([GOOD, REPEAT], [0.0, 0.0], f"{SOLVED} 1 but lost again: 3 cells break a rule; "
         "the model would not have stopped within 2 steps"),
        ([GOOD, REPEAT], [0.8, 0.0], f"{SOLVED} 1 but lost again: 3 cells break a rule{STOPS} 1"),
        ([GOOD, REPEAT], [0.2, 0.8], f"{SOLVED} 1 but lost again: 3 cells break a rule{STOPS} 2 with a wrong grid"),
        ([REPEAT] * 2, [0.1, 0.2],
         "not solved: 3 cells break a rule; the model would not have stopped within 2 steps"),
        ([REPEAT] * 2, [0.1, 0.8], f"not solved: 3 cells break a rule{STOPS} 2 with a wrong grid"),
        ([CLUE_LOST], [0.1], "not solved: 4 cells break a rule; the model would not have stopped within 1 step"),
        ([BLANK], [0.1], "not solved: 1 cell is blank; the model would not have stopped within 1 step"),
    ],
)  # fmt: skip
def test_verdict(grids, halts, expected):
    refinement = make_refinement(grids, halts)
    assert verdict(refinement) == expected
    assert printed(render_refinement(refinement), width=200).splitlines()[-1] == expected


def test_valid_grid_with_other_clues_is_not_a_solution():
    relabelled = (GOOD % 4 + 1).astype(np.uint8)
    refinement = make_refinement([relabelled], [0.9])
    assert refinement.solved_at is None
    assert not refinement.solved
    assert verdict(refinement).startswith("not solved: 3 cells break a rule;")


def test_steps_without_a_change_are_drawn_once():
    grids = [REPEAT, REPEAT, CLUE_LOST, GOOD, GOOD, GOOD, GOOD]
    text = printed(render_refinement(make_refinement(grids, [0.0, 0.1, 0.2, 0.3, 0.37, 0.6, 0.9])), width=31)
    assert text.count("┌") == 4  # the puzzle and three runs
    titles = [line.strip() for line in text.splitlines() if line.startswith("step")]
    assert titles == [
        "step 1: <1 % sure",
        "step 2: no change",
        "step 3: 20 % sure",
        "step 4: 30 % sure",
        "steps 5–7: no change",
        "step 6: 60 % sure, stops",  # within a run the step still shows, below its grid
    ]
    for summary in ["3 clues, 13 blank", "13 filled, 3 clash", "2 changed, 4 clash"]:
        assert f"\n{summary}" in text
    assert "\n1 changed, solved" in text


def test_stopping_step_is_marked_in_its_title_and_nowhere_else():
    text = printed(render_refinement(make_refinement([REPEAT, BLANK, GOOD], [0.2, 0.51, 0.9])))
    assert text.count("stops") == 1
    assert "step 2: 51 % sure, stops" in text
    assert "step 3: 90 % sure" in text


def test_stop_at_the_last_step_of_a_run_is_not_lost():
    text = printed(render_refinement(make_refinement([GOOD, GOOD], [0.2, 0.9])))
    assert "step 2: no change" in text
    assert "step 2: 90 % sure, stops" in text


def test_nothing_is_wholly_sure():
    text = printed(render_refinement(make_refinement([REPEAT, CLUE_LOST, BLANK, GOOD], [0.004, 0.012, 0.99, 0.9999])))
    assert [title.strip() for title in re.findall(r"step \d: (\S+ %) sure", text)] == ["<1 %", "1 %", "99 %", ">99 %"]


def test_single_cell_that_breaks_a_rule_is_counted_as_one():
    text = printed(render_refinement(make_refinement([with_cells(GOOD, {10: 0})], [0.0])))
    assert "13 filled, 1 clashes" in text


def test_every_keeps_the_steps_that_matter_and_counts_changes_from_the_grid_before():
    grids = [with_cells(GOOD, {cell: 0 for cell in range(15 - step, 16)}) for step in range(10, 0, -1)]
    grids += [GOOD, BLANK, REPEAT]
    halts = [0.0] * 7 + [0.9] * 6
    text = printed(render_refinement(make_refinement(grids, halts), every=5), width=31)
    assert re.findall(r"^step (\d+): \S+ % sure", text, re.MULTILINE) == ["1", "5", "8", "10", "11", "13"]
    assert "4 changed" in text.split("step 5")[1].split("step 8")[0]
    assert len(cells_of(text.split("step 5")[1].split("step 8")[0], 4)[1]) == 4


@pytest.mark.parametrize("box", [(2, 2), (2, 3), (3, 3), (4, 4)])
@pytest.mark.parametrize("width", [60, 80, 130])
def test_steps_wrap_to_the_console_without_breaking_a_grid(box, width):
    good = solution(box)
    side = box[0] * box[1]
    grids = [np.where(np.arange(side**2) % 5 >= step, good, 1 + step).astype(np.uint8) for step in (4, 3, 2, 1, 0)]
    refinement = make_refinement(grids, [0.1, 0.2, 0.3, 0.4, 1.0], box=box)
    lines = printed(render_refinement(refinement), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    drawn = [line for line in lines if any(char in line for char in "┌│├└")]
    tops = [line.count("┌") for line in drawn if "┌" in line]
    assert sum(tops) == 6
    assert len(set(tops[:-1])) <= 1  # full rows, then what is left
    grid_width = 3 * side + box[0] + 1
    block = max(grid_width, len("step 5: >99 % sure, stops"))
    assert tops[0] == max(1, (width + 2) // (block + 2))
    assert len(drawn) == len(tops) * (side + box[1] + 1)
    for line in drawn:  # each line holds whole grid lines and nothing else
        pieces = re.findall(rf"[┌├└][─┬┼┴]+[┐┤┘]|│[^─]{{{grid_width - 2}}}│", line)
        assert "".join(pieces).replace(" ", "") == line.replace(" ", "")
        assert {len(piece) for piece in pieces} == {grid_width}


def test_grid_wider_than_the_console_is_cut_where_one_can_see_it():
    refinement = make_refinement([solution((4, 4))], [0.9], box=(4, 4))
    lines = printed(render_refinement(refinement), width=40).splitlines()
    cut = [line for line in lines if line.startswith(("┌", "│", "├", "└"))]
    assert len(cut) == 2 * 21
    assert all(line.endswith("…") and len(line) == 40 for line in cut)
