"""A model's own decision to stop: how often it was right over many puzzles, and the puzzle that shows it best."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tinypod.solve.display import Refinement

ENOUGH = 4  # different grids up to the stop; more would not tell more


class Stops(NamedTuple):
    puzzles: int
    solved: int  # by the last answer, whether the model stopped before or not: what `tinypod eval` counts
    stopped: int  # by itself, within the steps
    right: int  # of these, with a solution
    late: int  # of those that did not stop, solved at the end
    mean_steps: float  # to the stop, of those that stopped
    most_steps: int

    def sentences(self) -> list[str]:
        """Of at most 80 columns each."""
        lines = [f"It solves {self.solved} of {self.puzzles} held-out puzzles: {self.solved / self.puzzles:.1%}."]
        if not self.stopped:
            return [*lines, f"It never stopped by itself within {self.most_steps} steps."]
        mean = f"after {self.mean_steps:.1f} steps on average"
        lines.append(f"It stopped by itself on {self.stopped} of {self.puzzles}, {mean};")
        lines.append(f"{self.right} of these {self.stopped} answers are right ({self.right / self.stopped:.1%}).")
        if left := self.puzzles - self.stopped:
            ended = f"{self.late} ended right" if left > 1 else "right" if self.late else "wrong"
            lines.append(f"On {left} it was never sure enough to stop within {self.most_steps} steps: {ended}.")
        return lines


def count_stops(refined: Sequence[Refinement]) -> Stops:
    stopped = [r for r in refined if r.halted_at is not None]
    return Stops(
        puzzles=len(refined),
        solved=sum(r.solved for r in refined),
        stopped=len(stopped),
        right=sum(_stops_rightly(r) for r in stopped),
        late=sum(r.solved for r in refined if r.halted_at is None),
        mean_steps=float(np.mean([r.halted_at for r in stopped])) if stopped else 0.0,
        most_steps=len(refined[0].grids),
    )


def most_telling(refined: Sequence[Refinement]) -> tuple[int, str]:
    """The number of the puzzle to show, and a sentence that says why this one: wrong at first, refined over several
    steps, rightly stopped at; or, where there is none, the next best."""
    numbers = range(len(refined))
    if found := [n for n in numbers if not refined[n].solved_steps[0] and _stops_rightly(refined[n])]:
        return max(
            found, key=lambda n: min(_grids(refined[n]), ENOUGH)
        ), "wrong at first, refined, and rightly stopped at"
    if found := [n for n in numbers if refined[n].solved]:
        slowest = max(found, key=lambda n: refined[n].solved_at or 0)
        return slowest, "the slowest to be solved: none was wrong at first and then rightly stopped at"
    return 0, "the first one: none was solved"


def _stops_rightly(refinement: Refinement) -> bool:
    return refinement.halted_at is not None and bool(refinement.solved_steps[refinement.halted_at - 1])


def _grids(refinement: Refinement) -> int:
    """Different answers one after the other, up to the stop."""
    grids = refinement.grids[: refinement.halted_at]
    return 1 + int((grids[1:] != grids[:-1]).any(axis=-1).sum())
