"""Which puzzle is shown, and what is said about the model's own stops."""

import numpy as np
import pytest

from refinements import BLANK, CLUE_LOST, GOOD, REPEAT, make_refinement
from tinypod.solve.stops import count_stops, most_telling

AT_ONCE = make_refinement([GOOD] * 4, [0.9] * 4)
REFINED = make_refinement([REPEAT, GOOD, GOOD, GOOD], [0.1, 0.9, 0.9, 0.9])
REFINED_LONGER = make_refinement([REPEAT, CLUE_LOST, GOOD, GOOD], [0.1, 0.2, 0.4, 0.9])
TOO_SOON = make_refinement([REPEAT, BLANK, CLUE_LOST, GOOD], [0.1, 0.9, 0.9, 0.9])  # stops at a wrong grid
NEVER = make_refinement([REPEAT, REPEAT, REPEAT, GOOD], [0.1, 0.2, 0.3, 0.4])
UNSOLVED = make_refinement([REPEAT] * 4, [0.1] * 4)


@pytest.mark.parametrize(
    ("refined", "chosen", "why"),
    [
        ([AT_ONCE, TOO_SOON, NEVER, REFINED], 3, "wrong at first, refined, and rightly stopped at"),
        ([AT_ONCE, REFINED, REFINED_LONGER, REFINED_LONGER], 2, "wrong at first"),
        ([AT_ONCE, NEVER, UNSOLVED], 1, "the slowest to be solved: none was"),
        ([UNSOLVED, UNSOLVED], 0, "none was solved"),
    ],
)
def test_the_puzzle_shown_is_first_wrong_and_then_rightly_stopped_at(refined, chosen, why) -> None:
    number, reason = most_telling(refined)
    assert number == chosen
    assert why in reason


def test_stops_are_counted_by_the_answer_at_the_stop() -> None:
    refined = [AT_ONCE, REFINED, REFINED_LONGER, TOO_SOON, NEVER, UNSOLVED]
    found = count_stops(refined)
    assert (found.puzzles, found.solved, found.stopped, found.right, found.late) == (6, 5, 4, 3, 1)
    assert np.isclose(found.mean_steps, (1 + 2 + 4 + 2) / 4)
    assert found.sentences() == [
        "It solves 5 of 6 held-out puzzles: 83.3%.",
        "It stopped by itself on 4 of 6, after 2.2 steps on average;",
        "3 of these 4 answers are right (75.0%).",
        "On 2 it was never sure enough to stop within 4 steps: 1 ended right.",
    ]


def test_a_model_that_never_stops_is_not_divided_by() -> None:
    assert count_stops([UNSOLVED]).sentences()[1] == "It never stopped by itself within 4 steps."
