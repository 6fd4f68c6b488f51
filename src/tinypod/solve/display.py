"""A Sudoku while it is refined, as rich renderables: numpy in, something a console can print out.

Every cell is three columns wide, ` 5 `: a `*` before the digit says that it changed, a `!` after it that it
breaks a rule, and a cell can carry both. Colours only repeat the marks, so a file reads like a terminal.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from rich.columns import Columns
from rich.console import Group
from rich.text import Text

from tinypod.data import sudoku

SYMBOLS = "·" + sudoku.SYMBOLS[1:]  # a dot in the middle of its line reads as a hole, not as a full stop
LINE, CLUE, FILLED, CHANGED, BROKEN = "bright_black", "default", "cyan", "yellow", "red reverse"


@dataclass(frozen=True, eq=False)
class Refinement:
    """What a model answered after each step. Steps are counted from 1."""

    question: np.ndarray  # uint8 [S], 0 where blank
    grids: np.ndarray  # uint8 [steps, S], the whole answer, 0 where no digit was predicted
    halt_probabilities: np.ndarray  # float [steps]; the model would stop at the first above one half
    box: sudoku.Box
    cost: int | None = None  # steps of the model that the last answer took, over all views and trajectories

    @cached_property
    def broken(self) -> np.ndarray:
        """bool [steps, S]: the cells that break a rule or overwrite a clue."""
        return broken_cells(self.grids, self.question, self.box)

    @cached_property
    def solved_steps(self) -> np.ndarray:
        """bool [steps]: every cell filled, every rule and clue kept."""
        return ~np.any(self.broken | (self.grids == 0), axis=-1)

    @property
    def answer(self) -> str:
        """The last grid in characters, row by row, `.` where no digit was predicted."""
        return self.answers[-1]

    @property
    def answers(self) -> list[str]:
        """The same after each step."""
        return ["".join(sudoku.SYMBOLS[digit] for digit in grid) for grid in self.grids]

    @property
    def steps(self) -> int:
        return len(self.grids)

    @property
    def confidence(self) -> float:
        """The model's own estimate, after the last step, that it has finished: 0 to 1."""
        return float(self.halt_probabilities[-1])

    def __repr__(self) -> str:
        return f"Refinement({self.answer!r}: {verdict(self)})"

    @property
    def solved_at(self) -> int | None:
        return _first_step(self.solved_steps)

    @property
    def halted_at(self) -> int | None:
        return _first_step(self.halt_probabilities > 0.5)

    @property
    def solved(self) -> bool:
        """Whether the last grid is a solution; an earlier one may have been and got lost."""
        return bool(self.solved_steps[-1])


def _first_step(flags: np.ndarray) -> int | None:
    return int(flags.argmax()) + 1 if flags.any() else None


def broken_cells(grid: np.ndarray, question: np.ndarray, box: sudoku.Box) -> np.ndarray:
    """bool [..., S] for grids [..., S]: repeats in a row, column or box, and overwritten clues."""
    return sudoku.breaks_rules(grid, box) | ((question > 0) & (grid != question))


def verdict(refinement: Refinement) -> str:
    """One line: whether and when it was solved, and whether the model would have known when to stop."""
    solved_at, halted_at = refinement.solved_at, refinement.halted_at
    outcome = f"solved at step {solved_at}" if solved_at else "not solved"
    if not refinement.solved:
        broken, blank = int(refinement.broken[-1].sum()), int((refinement.grids[-1] == 0).sum())
        faults = [(broken, "cell breaks a rule", "cells break a rule"), (blank, "cell is blank", "cells are blank")]
        listed = ", ".join(_count(*fault) for fault in faults if fault[0])
        outcome += f"{' but lost again' if solved_at else ''}: {listed}"
    if halted_at is None:
        return f"{outcome}; the model would not have stopped within {_count(len(refinement.grids), 'step', 'steps')}"
    wrong = "" if refinement.solved_steps[halted_at - 1] else " with a wrong grid"
    return f"{outcome}; the model would have stopped at step {halted_at}{wrong}"


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def render_grid(grid: np.ndarray, question: np.ndarray, box: sudoku.Box, previous: np.ndarray | None = None) -> Text:
    """One grid [S] with its boxes drawn; without a previous grid no cell counts as changed."""
    rows, columns = box
    side = rows * columns
    broken = broken_cells(grid, question, box)
    changed = np.zeros_like(broken) if previous is None else grid != previous
    # A side is rows * columns cells long and a box `columns` wide, so `rows` boxes stand side by side.
    bars = ["───" * columns] * rows
    text = Text().append(f"┌{'┬'.join(bars)}┐\n", LINE)
    for row, cells in enumerate(np.arange(side**2).reshape(side, side)):
        if row and row % rows == 0:
            text.append(f"├{'┼'.join(bars)}┤\n", LINE)
        for column, cell in enumerate(cells):
            text.append("" if column % columns else "│", LINE)
            text.append_text(_cell(grid[cell], question[cell] > 0, changed[cell], broken[cell]))
        text.append("│\n", LINE)
    return _unfolded(text.append(f"└{'┴'.join(bars)}┘", LINE))


def _cell(value: int, clue: bool, changed: bool, broken: bool) -> Text:
    style = BROKEN if broken else CHANGED if changed else CLUE if clue else FILLED if value else LINE
    text = f"{'*' if changed else ' '}{SYMBOLS[value]}{'!' if broken else ' '}"
    return Text(text, f"bold {style}" if clue else style)


def _unfolded(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"  # on too narrow a console a grid is cut, and shows it
    return text


def render_refinement(refinement: Refinement, every: int = 1) -> Group:
    """The puzzle and its steps side by side, as many as the console is wide, then a legend and the verdict.

    A run of equal grids is drawn once. With `every` above 1 only each such step is drawn, besides the first,
    the last, the first solved and the one at which the model would stop; changes count from the grid before.
    """
    question, halted_at = refinement.question, refinement.halted_at
    clues = int((question > 0).sum())
    heading = f"{_count(clues, 'clue', 'clues')}, {len(question) - clues} blank"
    blocks = [[Text("puzzle", "bold"), Text(heading), render_grid(question, question, refinement.box)]]
    previous = None
    for first, last in _runs(refinement, every):
        grid = refinement.grids[first - 1]
        drawn = render_grid(grid, question, refinement.box, previous)
        blocks.append([_title(refinement, first), _summary(refinement, first, previous), drawn])
        if last > first:
            steps = f"step {last}" if last == first + 1 else f"steps {first + 1}–{last}"
            blocks[-1].append(Text(f"{steps}: no change", LINE))
        if halted_at is not None and first < halted_at <= last:
            blocks[-1].append(_title(refinement, halted_at))
        previous = grid
    texts = [_unfolded(Text("\n").join(block)) for block in blocks]
    knows = halted_at is not None and refinement.solved_steps[halted_at - 1]
    style = "bold red" if not refinement.solved else "bold green" if knows else "bold yellow"
    return Group(Columns(texts, padding=(1, 2), equal=True), Text(), _legend(), Text(verdict(refinement), style))


def _runs(refinement: Refinement, every: int) -> list[tuple[int, int]]:
    """The first and last step of each run of equal grids that holds a step to be drawn."""
    steps = len(refinement.grids)
    wanted = {1, steps, refinement.solved_at, refinement.halted_at, *range(every, steps + 1, every)}
    return [(first, last) for first, last in equal_steps(refinement) if not wanted.isdisjoint(range(first, last + 1))]


def equal_steps(refinement: Refinement) -> list[tuple[int, int]]:
    """The first and last step of each run of equal grids."""
    grids = refinement.grids
    starts = [1, *(np.flatnonzero((grids[1:] != grids[:-1]).any(-1)) + 2).tolist(), len(grids) + 1]
    return [(start, end - 1) for start, end in pairwise(starts)]


def confidence(refinement: Refinement, step: int) -> str:
    """The model's own estimate that its answer is right: what it was trained to say, and what it stops by."""
    percent = 100 * refinement.halt_probabilities[step - 1]
    return f"{'<1' if percent < 1 else '>99' if percent > 99 else f'{percent:.0f}'} % sure"


def _title(refinement: Refinement, step: int) -> Text:
    text = f"step {step}: {confidence(refinement, step)}"
    return Text(f"{text}, stops", "bold green") if step == refinement.halted_at else Text(text, "bold")


def _summary(refinement: Refinement, step: int, previous: np.ndarray | None) -> Text:
    grid, broken = refinement.grids[step - 1], int(refinement.broken[step - 1].sum())
    filled = int(((refinement.question == 0) & (grid > 0)).sum())
    text = f"{filled} filled" if previous is None else f"{int((grid != previous).sum())} changed"
    if broken:
        text += f", {broken} {'clashes' if broken == 1 else 'clash'}"
    return Text(f"{text}, solved" if refinement.solved_steps[step - 1] else text)


def _legend() -> Text:
    changed, broken = _cell(5, False, True, False), _cell(5, False, False, True)
    return Text.assemble(changed, "changed   ", broken, " clashes with another digit or a clue   · no digit")
