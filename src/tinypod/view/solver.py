"""The models behind the board: weights of the last two runs or releases asked for. JAX starts at the first puzzle, on
the CPU, so that the page never takes a device away from the run that it shows; JAX_PLATFORMS says otherwise."""

import os
import threading
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

KEPT = 2  # runs whose weights stay in memory
MADE_UP = 1000  # different puzzles, where a release has none


class Solver:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # one puzzle at a time
        self._loaded: OrderedDict[tuple[Path, tuple[int, ...]], Any] = OrderedDict()

    def board(self, source: Path) -> dict[str, Any]:
        from tinypod.runs.description import read_description
        from tinypod.runs.folder import read_config
        from tinypod.runs.release import Release, open_source
        from tinypod.solve.board import open_board

        opened = open_source(source)
        if isinstance(opened, Release):
            return asdict(open_board(opened.read_config(), opened.about.dataset))
        return asdict(open_board(read_config(opened), read_description(opened).dataset))

    def example(self, source: Path, number: int) -> dict[str, Any]:
        """A held-out puzzle, or one that comes with a release; numbers go round."""
        from tinypod.runs.folder import read_config
        from tinypod.runs.release import Release, open_source
        from tinypod.solve.board import read_example
        from tinypod.solve.examples import example

        opened = open_source(source)
        if isinstance(opened, Release):
            return {"puzzle": example(opened, number % (len(opened.about.examples) or MADE_UP))}
        return {"puzzle": read_example(read_config(opened), number)}

    def solve(self, source: Path, puzzle: str) -> dict[str, Any]:
        """The steps of the answer by the best checkpoint so far."""
        with self._lock:
            loaded, answer = self._load(source)
            return {"checkpoint": loaded.step, **answer(loaded.params, puzzle)}

    def _load(self, source: Path) -> Any:
        import jax

        from tinypod.runs.folder import CHECKPOINTS
        from tinypod.runs.load import load_weights
        from tinypod.runs.release import open_source
        from tinypod.runs.status import checkpoint_steps
        from tinypod.solve.board import make_answer

        if "JAX_PLATFORMS" not in os.environ:
            jax.config.update("jax_platforms", "cpu")
        # A run that trains gets better ones.
        key = source, tuple(checkpoint_steps(source / CHECKPOINTS)) if source.is_dir() else ()
        if key not in self._loaded:
            loaded = load_weights(open_source(source), [], "best", needs_data=False)
            self._loaded[key] = loaded, make_answer(loaded.experiment)
            while len(self._loaded) > KEPT:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(key)
        return self._loaded[key]
