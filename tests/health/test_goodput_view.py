"""The picture of where the time went."""

from typing import get_args

import pytest
from rich.console import Console

from tinypod.health import goodput_view
from tinypod.health.goodput import DOWN, LOST, Goodput
from tinypod.health.goodput_view import render
from tinypod.health.watch import Phase


def shown(result: Goodput, width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(render(result))
    return captured.get()


@pytest.mark.parametrize("width", [100, 80, 60])
def test_it_fits_and_its_bar_is_whole(width: int):
    seconds = {"stepping": 113.5, "saving": 1.0, "starting": 0.3, "data": 0.1, LOST: 16.5, DOWN: 7.0}
    text = shown(Goodput(seconds=seconds, attempts=2, lost_steps=5), width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()[1].strip()) == min(width, goodput_view._BAR_WIDTH)
    assert len(text.splitlines()) == 2 + len(seconds) + 1, "no row is wrapped"
    for word in ("goodput 82.0%", "in 2 attempts", "stepping", "lost", "down", "5 steps lost"):
        assert word in text


def test_without_colour_the_bar_can_be_read_by_its_table():
    lines = shown(Goodput(seconds={kind: 10.0 for kind in goodput_view._MEANINGS})).splitlines()
    letters = {line.split()[1]: line[0] for line in lines[2:]}
    assert "".join(dict.fromkeys(lines[1])) == "".join(letters[kind] for kind in goodput_view._MEANINGS)


def test_every_phase_has_a_meaning_a_letter_and_a_colour_of_its_own():
    meanings = goodput_view._MEANINGS
    assert set(meanings) == {*get_args(Phase), LOST, DOWN}
    for column in zip(*meanings.values(), strict=True):
        assert len(set(column)) == len(meanings)


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
