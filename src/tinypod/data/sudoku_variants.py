"""More hard puzzles from few: others near them, made by exchanging clues.

Few of the puzzles that one could make up are hard. Of those that have all but one or two clues of a hard one, more
are. Nothing but the puzzle and the rules of Sudoku goes into it.

Importing this module imports numba, which is slow: import it inside functions.
"""

import hashlib
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np

from tinypod.data import sudoku_solver
from tinypod.data.sudoku import Box, Progress, Puzzles, join, signatures
from tinypod.runs.storage import replace_file

ATTEMPTS = 8  # for each variant that is asked for: one that takes two clues of a hard puzzle finds about one


def make_variants(
    puzzles: Puzzles,
    box: Box,
    most: int,
    seed: int,
    avoid: np.ndarray,
    progress: Progress | None = None,
    kept: Path | None = None,
) -> Puzzles:
    """Up to `most` variants of each puzzle, about as hard and with as many clues or more; no two, nor one and a puzzle,
    with the same signature, and none with a signature of `avoid`, uint64 [N].

    A puzzle's own depend on it and the seed, not on the puzzles beside it, but for those that are left out; with a
    larger `most` they begin with the same. `kept`: a folder for those of each puzzle once they are made, so that the
    same call makes no more than those that are not there.
    """
    own = signatures(puzzles.questions, box)
    rules = _rules()

    def make(row: int) -> Puzzles:
        question = puzzles.questions[row]
        digest = hashlib.sha256((seed % 2**64).to_bytes(8, "little") + question.tobytes()).digest()
        walk_seed = int.from_bytes(digest[:8], "little")
        asked = hashlib.sha256(f"{rules} {box} {most}".encode() + digest).hexdigest()
        file = None if kept is None else kept / f"{row}_{asked[:32]}.npz"
        columns = None if file is None else _read(file)
        if columns is None:
            columns = sudoku_solver.wander(question, box, walk_seed, most, ATTEMPTS * most)
            if file is not None:
                _write(file, columns)
        questions, answers, ratings = columns
        return Puzzles(questions, answers, [f"{puzzles.sources[row]}_variant"] * len(questions), ratings)

    made = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compiled, the solver holds no lock
        for variants in pool.map(make, range(len(puzzles.questions))):
            made.append(variants)
            if progress:
                progress(1)
    every = join(*made)
    new = _first_of_each(signatures(every.questions, box), np.concatenate([own, avoid]))
    return Puzzles(every.questions[new], every.answers[new], [every.sources[row] for row in new], every.ratings[new])


def _rules() -> str:
    """What a puzzle's variants depend on besides the puzzle and what is asked for: the code that makes them."""
    source = b"".join(Path(file).read_bytes() for file in (__file__, sudoku_solver.__file__))
    return hashlib.sha256(source).hexdigest()


def _read(file: Path) -> tuple[np.ndarray, ...] | None:
    try:
        with np.load(BytesIO(file.read_bytes())) as columns:
            return tuple(columns[f"arr_{number}"] for number in range(3))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # not there, or cut short: it is made again


def _write(file: Path, columns: tuple[np.ndarray, ...]) -> None:
    buffer = BytesIO()
    np.savez(buffer, *columns)
    replace_file(file, buffer.getvalue())


def _first_of_each(marks: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Rows, in order, whose signature no earlier row has and which is not known."""
    first = np.sort(np.unique(marks, return_index=True)[1])
    return first[~np.isin(marks[first], known)]
