"""Rows of metrics that are written once the next steps are under way."""

import jax.numpy as jnp
import numpy as np

from tinypod.health.nonfinite import BadSteps
from tinypod.runs.rows import QUEUED, Rows


class Written:
    """What was written: the step of each row, and the losses of its steps."""

    def __init__(self, bad_at: int | None = None) -> None:
        self.rows: list[tuple[int, list[float]]] = []
        self.bad_at = bad_at

    def __call__(self, step: int, parts: list[dict[str, float]]) -> BadSteps | None:
        self.rows.append((step, [part["loss"] for part in parts]))
        return BadSteps(step, step) if step == self.bad_at else None


def one(step: int) -> dict:
    return {"loss": jnp.float32(step)}


def test_a_row_is_of_the_steps_up_to_the_one_that_owes_it_whatever_came_after() -> None:
    written = Written()
    rows = Rows(0, written, lambda: None)
    for step in range(1, 8):
        rows.add(1, one(step))
        rows.settle()
        if step % 3 == 0:
            rows.owe(step)
    assert written.rows == [(3, [1, 2, 3]), (6, [4, 5, 6])]
    rows.finish(7)
    assert written.rows[2:] == [(7, [7])]


def test_the_end_writes_what_is_owed_and_what_came_after_apart() -> None:
    written = Written()
    rows = Rows(10, written, lambda: None)
    rows.add(2, {"loss": jnp.array([11.0, 12.0])})
    rows.owe(12)
    rows.add(2, {"loss": jnp.array([13.0, 14.0])})
    rows.finish(14)
    rows.finish(14)  # nothing is left
    assert written.rows == [(12, [11, 12]), (14, [13, 14])]


def test_of_a_dispatch_only_the_steps_that_were_taken_count() -> None:
    written = Written()
    rows = Rows(0, written, lambda: None)
    rows.add(2, {"loss": np.array([1.0, 2.0, 99.0, 99.0], np.float32)})
    rows.finish(2)
    assert written.rows == [(2, [1, 2])]


def test_after_going_back_nothing_of_the_steps_that_were_taken_back_is_left() -> None:
    written = Written(bad_at=2)
    rows = Rows(0, written, lambda: None)
    for step in (1, 2):
        rows.add(1, one(step))
    rows.owe(2)
    rows.add(1, one(3))
    assert rows.settle() == BadSteps(2, 2)
    assert rows.last == 2
    rows.restart(1)
    rows.add(1, one(-2))
    rows.owe(2)
    rows.settle()
    assert written.rows == [(2, [1, 2]), (2, [-2])]


def test_the_end_says_which_steps_ask_for_a_rollback() -> None:
    """Those of the row that was owed, after which nothing is written; and those after it."""
    for bad_at, steps in ((2, [2]), (3, [2, 3])):
        written = Written(bad_at)
        rows = Rows(0, written, lambda: None)
        rows.add(2, {"loss": jnp.array([1.0, 2.0])})
        rows.owe(2)
        rows.add(1, one(3))
        assert rows.finish(3) == BadSteps(bad_at, bad_at)
        assert [step for step, _ in written.rows] == steps


def test_a_long_stretch_without_a_row_is_fetched_as_it_comes() -> None:
    rows = Rows(0, Written(), lambda: None)
    for step in range(1, 20):
        rows.add(1, one(step))
        assert len(rows._waiting) <= QUEUED
