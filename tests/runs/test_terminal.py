"""Sizes and durations, as people read them."""

import pytest

from tinypod.runs.terminal import duration, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0.40 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3 * 3600 + 7 * 60, "3 h 07 min"),
        (52 * 3600, "2 d 04 h"),
    ],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**41, "2048.00 GiB")]
)
def test_sizes_read_well(count, text):
    assert size(count) == text
