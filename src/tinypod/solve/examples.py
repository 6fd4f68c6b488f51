"""Puzzles to show with a release, which comes without a dataset: its own examples, or else made-up ones."""

from tinypod.data import sudoku
from tinypod.errors import UserError
from tinypod.runs.release import Release
from tinypod.tasks.puzzle import described

HARD = 2  # of the 9×9 Sudokus that are made up with seed 0, this one takes 14 guesses, and most take none or one


def example(release: Release, number: int) -> str:
    """The question of a number from 0, in characters. There is no end of those made up: a given number is always the
    same puzzle."""
    about = release.about
    if about.examples:
        if number >= len(about.examples):
            raise UserError(
                f"--number {number}: {release} has {len(about.examples)} examples, numbered from 0; held-out puzzles "
                "need data.path=FOLDER"
            )
        return about.examples[number]
    info = described(about.dataset)
    if info.kind != "sudoku" or info.box is None:
        raise UserError(f"{release} has no examples, and its puzzles are of kind {info.kind!r}; give a puzzle")
    from tinypod.data.sudoku_generator import make_one

    return sudoku.format_puzzle(make_one((info.box[0], info.box[1]), HARD + number))


def introduce(release: Release, number: int) -> str:
    """What is said before it is shown."""
    if count := len(release.about.examples):
        return f"Example {number} of {release}, of {count} numbered from 0 (--number):"
    return f"{release} has no examples: a Sudoku made up here, number {number} (--number):"
