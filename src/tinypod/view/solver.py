"""The models behind the board: weights of the last two runs asked for. JAX starts at the first puzzle, on the CPU, so
that the page never takes a device away from the run that it shows; JAX_PLATFORMS says otherwise."""

import os
import threading
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

KEPT = 2  # runs whose weights stay in memory


class Solver:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # one puzzle at a time
        self._loaded: OrderedDict[tuple[Path, tuple[int, ...]], Any] = OrderedDict()

    def board(self, folder: Path) -> dict[str, Any]:
        from tinypod.runs.description import read_description
        from tinypod.runs.folder import open_run, read_config
        from tinypod.solve.board import open_board

        run = open_run(folder)
        return asdict(open_board(read_config(run), read_description(run).dataset))

    def example(self, folder: Path, number: int) -> dict[str, Any]:
        from tinypod.runs.folder import open_run, read_config
        from tinypod.solve.board import read_example

        return {"puzzle": read_example(read_config(open_run(folder)), number)}

    def solve(self, folder: Path, puzzle: str) -> dict[str, Any]:
        """The steps of the answer by the best checkpoint so far."""
        with self._lock:
            loaded, answer = self._load(folder)
            return {"checkpoint": loaded.step, **answer(loaded.params, puzzle)}

    def _load(self, folder: Path) -> Any:
        import jax

        from tinypod.runs.folder import CHECKPOINTS, open_run
        from tinypod.runs.load import load_weights
        from tinypod.runs.status import checkpoint_steps
        from tinypod.solve.board import make_answer

        if "JAX_PLATFORMS" not in os.environ:
            jax.config.update("jax_platforms", "cpu")
        key = folder, tuple(checkpoint_steps(folder / CHECKPOINTS))  # a run that trains gets better ones
        if key not in self._loaded:
            loaded = load_weights(open_run(folder), [], "best", needs_data=False)
            self._loaded[key] = loaded, make_answer(loaded.experiment)
            while len(self._loaded) > KEPT:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(key)
        return self._loaded[key]
