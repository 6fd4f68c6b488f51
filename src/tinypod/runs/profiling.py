"""`--profile A:B`: a trace of steps A to B on every process, for XProf and TensorBoard.

Each process has a folder of its own, `profile/process_0/`: traces are named by host, and a rehearsal has many processes
on one.
"""

from pathlib import Path
from typing import Any, Self

import jax

from tinypod.errors import UserError


def parse_range(text: str) -> tuple[int, int]:
    """`A:B`, steps counted from 1, B included."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise UserError(f"--profile {text}: expected FIRST:LAST, steps counted from 1, e.g. 20:24")
    return int(first), int(last)


class Profiler:
    """Traces the steps asked for, and those dispatched with them; a run that ends between them keeps what there is."""

    def __init__(self, run_folder: Path, process: int, steps: tuple[int, int] | None) -> None:
        self.folder, self.steps = run_folder / "profile" / f"process_{process}", steps
        self.running = False

    def before(self, first: int, last: int) -> None:
        """These steps come next."""
        if self.steps is not None and not self.running and self.steps[0] <= last and first <= self.steps[1]:
            jax.profiler.start_trace(self.folder)
            self.running = True

    def after(self, step: int, result: Any) -> None:
        if self.running and self.steps is not None and step >= self.steps[1]:
            jax.block_until_ready(result)  # dispatched is not done
            self._stop()

    def _stop(self) -> None:
        if self.running:
            self.running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
