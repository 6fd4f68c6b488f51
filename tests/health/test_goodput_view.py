"""The picture of where the time went."""

from typing import get_args

import pytest
from rich.console import Console

from tinypod.health import goodput_view
from tinypod.health.goodput import DOWN, LOST, Goodput
from tinypod.health.goodput_view import render
from tinypod.health.watch import Phase


def shown(result: Goodput) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(render(result))
    return captured.get()


def test_it_fits_and_its_bar_is_whole():
    seconds = {"stepping": 113.5, "saving": 1.0, "starting": 0.3, "data": 0.1, LOST: 16.5, DOWN: 7.0}
    text = shown(Goodput(seconds=seconds, attempts=2, lost_steps=5))
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()[1].strip()) == goodput_view._BAR_WIDTH
    for word in ("goodput 82.0%", "in 2 attempts", "stepping", "lost", "down", "5 steps lost"):
        assert word in text


def test_every_phase_has_a_meaning_and_a_colour_of_its_own():
    meanings = goodput_view._MEANINGS
    assert set(meanings) == {*get_args(Phase), LOST, DOWN}
    assert len({colour for colour, _ in meanings.values()}) == len(meanings)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Goodput(), "nothing recorded"),
        (Goodput(unreadable="goodput.json: cut"), "goodput unknown: goodput.json: cut"),
        (Goodput(seconds={"dreaming": 9.0}), "dreaming"),  # of a newer version
        (Goodput(seconds={"stepping": 1.0}, peak_bytes=5 * 2**30), "memory: the fullest device reached 5.00 GiB"),
        (Goodput(seconds={"stepping": 1.0}, step_bytes=3 * 2**20), "memory: the step needs 3.0 MiB per device"),
        (
            Goodput(seconds={"stepping": 1.0}, compiles=3, cache_hits=2),
            "3 compiles in 0.00 s, 2 of them from the cache",
        ),
    ],
)
def test_what_it_says(result, text):
    assert text in shown(result)
