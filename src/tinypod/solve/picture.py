"""A refinement as an SVG in one row: the puzzle, a few steps, and the one at which the model stops.

It brings its own background and follows the reader's light or dark scheme, so that it can be read on any page; it
fetches nothing, and the same refinement gives the same bytes. What a colour says is also said by a shape.
"""

from xml.sax.saxutils import escape

import numpy as np

from tinypod.solve.display import SYMBOLS, Refinement, broken_cells, confidence, equal_steps, verdict

MOST_STEPS = 4  # besides the puzzle: a fifth would be too small to read in a column of text
CELL, MARGIN, GAP, LABEL = 28, 20, 34, 176  # pixels; the last is the room that the words below a grid need
GRID_TOP, BELOW = 44, 92  # where grids begin; the height of what stands below them

ROOT = "tinypod-solve"
COLORS = {  # on a light page, on a dark one
    ".page": ("fill", "#ffffff", "#0d1117"),
    "text": ("fill", "#1f2328", "#e6edf3"),
    ".quiet": ("fill", "#59636e", "#9198a1"),
    ".own": ("fill", "#0550ae", "#79c0ff"),
    ".right": ("fill", "#116329", "#56d364"),
    ".changed": ("fill", "#ffe9a8", "#5c4400"),
    ".broken": ("stroke", "#cf222e", "#ff7b72"),
    ".thin": ("stroke", "#c8ccd0", "#3d444d"),
    ".thick": ("stroke", "#59636e", "#9198a1"),
}
STYLE = {
    "text": 'font: 15px ui-sans-serif, "DejaVu Sans", Helvetica, Arial, sans-serif; text-anchor: middle',
    ".clue": "font-weight: bold",
    ".title": "font-weight: bold",
    ".sure": "font-size: 14px; font-weight: bold",
    ".note": "font-size: 13px",
    ".left": "text-anchor: start",
    ".broken": "fill: none; stroke-width: 2",
    ".thick": "fill: none; stroke-width: 2",
    ".thin": "fill: none",
}


def draw_svg(refinement: Refinement) -> str:
    side = refinement.box[0] * refinement.box[1]
    panel = max(side * CELL, LABEL)
    question, previous = refinement.question, None
    parts = [_panel(MARGIN, panel, refinement, question, None, "puzzle", [("note", f"{(question > 0).sum()} clues")])]
    for number, (first, last) in enumerate(_shown(refinement), 1):
        grid, left = refinement.grids[last - 1], MARGIN + number * (panel + GAP)
        middle = GRID_TOP + side * CELL / 2 + 5
        parts.append(f'<text class="quiet" x="{left - GAP / 2:g}" y="{middle:g}">→</text>')
        title = f"step {first}" if first == last else f"steps {first}–{last}"
        parts.append(_panel(left, panel, refinement, grid, previous, title, _words(refinement, last)))
        previous = grid
    width = 2 * MARGIN + len(parts) // 2 * (panel + GAP) + panel
    height = GRID_TOP + side * CELL + BELOW
    light, dark = (_css({name: f"{key}: {colors[i]}" for name, (key, *colors) in COLORS.items()}) for i in (0, 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'class="{ROOT}" role="img">\n<title>{escape(verdict(refinement))}</title>\n<style>\n{_css(STYLE)}\n{light}\n'
        f"@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n</style>\n"
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n'
        + "\n".join([*parts, _legend(height - 16)])
        + "\n</svg>\n"
    )


def _css(rules: dict[str, str]) -> str:
    """For this picture alone: in a notebook it is part of a page with others."""
    return "\n".join(f".{ROOT} {name} {{ {rule} }}" for name, rule in rules.items())


def _shown(refinement: Refinement) -> list[tuple[int, int]]:
    """The first and last step of each grid that is drawn, up to the step at which the model stops."""
    end = refinement.halted_at or len(refinement.grids)
    steps = [(first, min(last, end)) for first, last in equal_steps(refinement) if first <= end]
    chosen = np.linspace(0, len(steps) - 1, min(MOST_STEPS, len(steps))).round().astype(int)
    return [steps[i] for i in chosen]


def _words(refinement: Refinement, step: int) -> list[tuple[str, str]]:
    """What stands below the grid of a step, each line with its classes."""
    sure, broken = confidence(refinement, step), int(refinement.broken[step - 1].sum())
    if step == refinement.halted_at:
        sure += ": stops here"
    elif step == len(refinement.grids):
        sure += ": does not stop"
    if refinement.solved_steps[step - 1]:
        return [("sure", sure), ("note right", "✔ solved")]
    state = f"{broken} {'cell breaks' if broken == 1 else 'cells break'} a rule" if broken else "not filled in"
    return [("sure", sure), ("note", state)]


def _panel(
    left: float,
    width: float,
    refinement: Refinement,
    grid: np.ndarray,
    previous: np.ndarray | None,
    title: str,
    words: list[tuple[str, str]],
) -> str:
    rows, columns = refinement.box
    side, question = rows * columns, refinement.question
    center, x0 = left + width / 2, left + (width - side * CELL) / 2
    broken = broken_cells(grid, question, refinement.box)
    parts = [f'<text class="title" x="{center:g}" y="{GRID_TOP - 16}">{title}</text>']
    frames = []
    for cell, value in enumerate(grid):
        x, y = x0 + cell % side * CELL, GRID_TOP + cell // side * CELL
        if previous is not None and value != previous[cell]:
            parts.append(_square("changed", x, y, 0))
        if broken[cell]:
            frames.append(_square("broken", x, y, 4))
        if value:
            style = "clue" if question[cell] else "own"
            parts.append(f'<text class="{style}" x="{x + CELL / 2:g}" y="{y + 19.5:g}">{SYMBOLS[value]}</text>')
    for style, across, down in (("thin", 1, 1), ("thick", columns, rows)):
        lines = [f"M{x0 + i * CELL:g} {GRID_TOP}v{side * CELL}" for i in range(across, side, across)]
        lines += [f"M{x0:g} {GRID_TOP + i * CELL}h{side * CELL}" for i in range(down, side, down)]
        parts.append(f'<path class="{style}" d="{"".join(lines)}"/>')
    parts += frames
    whole = side * CELL
    parts.append(f'<rect class="thick" x="{x0:g}" y="{GRID_TOP}" width="{whole}" height="{whole}" rx="2"/>')
    for number, (style, text) in enumerate(words):
        parts.append(
            f'<text class="{style}" x="{center:g}" y="{GRID_TOP + whole + 22 + 19 * number}">{escape(text)}</text>'
        )
    return "\n".join(parts)


def _square(style: str, x: float, y: float, inset: float) -> str:
    length = CELL - 2 * inset
    return f'<rect class="{style}" x="{x + inset:g}" y="{y + inset:g}" width="{length:g}" height="{length:g}" rx="2"/>'


def _legend(y: float) -> str:
    x, parts = float(MARGIN), []
    for marks, style, text in (
        ([], "clue", "given"),
        ([], "own", "the model's"),
        (["changed"], "own", "changed since the grid before"),
        (["broken"], "own", "breaks a rule"),
    ):
        parts += [_square(mark, x, y - 19, 4) for mark in marks]
        parts.append(f'<text class="{style} note" x="{x + CELL / 2:g}" y="{y}">5</text>')
        parts.append(f'<text class="quiet note left" x="{x + CELL:g}" y="{y}">{text}</text>')
        x += CELL + 7.4 * len(text) + 18
    return "\n".join(parts)
