"""Which checkpoints stay: the last few, one of each so many hours, and the best."""

import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

ScoreOf = Callable[[int], float | None]


class Saved(Protocol):
    """What Orbax knows of a checkpoint."""

    step: int
    time: datetime.datetime


def best_of(steps: Iterable[int], score_of: ScoreOf | None, mode: Literal["max", "min"]) -> tuple[int, float] | None:
    """The step with the best score, and that score; of equals the latest."""
    if score_of is None:
        return None
    scores = [(step, score) for step in steps if (score := score_of(step)) is not None and not math.isnan(score)]
    sign = 1 if mode == "max" else -1
    return max(scores, key=lambda item: (sign * item[1], item[0]), default=None)


@dataclass(frozen=True)
class Retention:
    """A preservation policy in Orbax's sense.

    Orbax asks it in every process at the same point of a save, lets each forget what is not kept, and process 0 remove
    it. Each sees another clock and only process 0 the scores, so process 0 decides for all, through `in_primary`.
    """

    keep_last: int | None  # None: all
    keep_every_hours: float | None
    score_of: ScoreOf | None
    mode: Literal["max", "min"]
    in_primary: Callable[[str, Callable[[], Any]], Any]

    def should_preserve(self, checkpoints: Sequence[Saved], *, context: Any) -> list[bool]:
        kept = self.in_primary("retention", lambda: sorted(self.kept(checkpoints)))
        return [saved.step in kept for saved in checkpoints]

    def kept(self, checkpoints: Sequence[Saved]) -> set[int]:
        steps = [saved.step for saved in checkpoints]
        kept = set(steps if self.keep_last is None else steps[max(len(steps) - self.keep_last, 0) :])
        if (best := best_of(steps, self.score_of, self.mode)) is not None:
            kept.add(best[0])
        if self.keep_every_hours is not None:
            kept |= _spaced(checkpoints, datetime.timedelta(seconds=round(3600 * self.keep_every_hours)))
        return kept


def _spaced(checkpoints: Sequence[Saved], apart: datetime.timedelta) -> set[int]:
    """The first, and each that is so much later than the one before it that is kept."""
    kept: list[Saved] = []
    for saved in checkpoints:
        if not kept or saved.time - kept[-1].time >= apart:
            kept.append(saved)
    return {saved.step for saved in kept}
