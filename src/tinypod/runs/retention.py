"""Which checkpoints stay: the last few, one of each so many hours, and the best."""

import datetime
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ScoreOf = Callable[[int], float | None]


@dataclass(frozen=True)
class Retention:
    """A preservation policy in Orbax's sense.

    Orbax asks it in every process at the same point of a save, lets each forget what is not kept, and process 0 remove
    it. Each sees another clock and only process 0 the scores, so process 0 decides for all, through `in_primary`.
    """

    keep_last: int | None  # None: all
    keep_every_hours: float | None
    score_of: ScoreOf
    mode: Literal["max", "min"]
    in_primary: Callable[[str, Callable[[], Any]], Any]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Of what Orbax knows of each checkpoint: `step` and `time`, in order."""
        kept = self.in_primary("retention", lambda: sorted(self._kept(checkpoints)))
        return [saved.step in kept for saved in checkpoints]

    def best(self, steps: Iterable[int]) -> tuple[int, float] | None:
        """The step with the best score, and that score; of equals the latest."""
        scores = [
            (step, score) for step in steps if (score := self.score_of(step)) is not None and not math.isnan(score)
        ]
        sign = 1 if self.mode == "max" else -1
        return max(scores, key=lambda item: (sign * item[1], item[0]), default=None)

    def _kept(self, checkpoints: Sequence[Any]) -> set[int]:
        steps = [saved.step for saved in checkpoints]
        kept = set(steps if self.keep_last is None else steps[-self.keep_last :])
        if (best := self.best(steps)) is not None:
            kept.add(best[0])
        if self.keep_every_hours is not None:
            apart, last = datetime.timedelta(hours=self.keep_every_hours), None
            for saved in checkpoints:
                if last is None or saved.time - last >= apart:
                    kept.add(saved.step)
                    last = saved.time
        return kept
