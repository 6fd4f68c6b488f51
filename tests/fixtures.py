"""Small datasets and configs that tests share."""

from pathlib import Path

import numpy as np

from tinypod.config import load
from tinypod.data import puzzles
from tinypod.experiment import Experiment, ExperimentConfig
from tinypod.step import TrainState

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "programs"
CONFIGS = TESTS.parent / "src" / "tinypod" / "configs"
BOX = (2, 2)


def grids_4x4(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Valid 4×4 grids (digits 1..4) by symmetries of one, and questions with some cells blanked."""
    random = np.random.default_rng(seed)
    base = np.array([[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]])
    answers = np.empty((count, 16), np.uint8)
    for i in range(count):
        rows, cols = (np.concatenate([2 * b + random.permutation(2) for b in random.permutation(2)]) for _ in range(2))
        digits = np.concatenate([[0], 1 + random.permutation(4)])
        answers[i] = digits[base[rows][:, cols]].reshape(-1)
    questions = np.where(random.random((count, 16)) < 0.5, answers, 0).astype(np.uint8)
    return questions, answers


def split_4x4(count: int, seed: int = 0, num_sources: int = 1) -> puzzles.Split:
    questions, answers = grids_4x4(count, seed)
    return puzzles.Split(
        inputs=questions + np.uint8(1),
        labels=answers + np.uint8(1),
        identifiers=np.zeros(count, np.int32),
        sources=(np.arange(count) % num_sources).astype(np.uint16),
        ratings=np.zeros(count, np.int32),
    )


def info_4x4(num_sources: int = 1, **changes) -> puzzles.DatasetInfo:
    fields = {
        "kind": "sudoku",
        "seq_len": 16,
        "vocab_size": 6,
        "num_identifiers": 1,
        "box": list(BOX),
        "sources": [f"source{i}" for i in range(num_sources)],
        "origin": "test",
    }
    return puzzles.DatasetInfo(**(fields | changes))


def write_4x4(folder: Path, train: int = 40, test: int = 21, num_sources: int = 1) -> Path:
    splits = {"train": split_4x4(train, 1, num_sources), "test": split_4x4(test, 2, num_sources)}
    puzzles.write_dataset(folder, info_4x4(num_sources), splits)
    return folder


TINY = (
    "steps=10",
    "batch_size=16",
    "model.hidden_size=16",
    "model.mlp_multiple_of=16",
    "model.unroll=false",
    "model.H_cycles=2",
    "model.L_cycles=1",
    "model.dtype=float32",
    "model.puzzle_embedding={kind: table, width: 8, length: 2}",
    "task.halting.max_steps=3",
    "optimizer.learning_rate=1e-3",
    "optimizer.schedule={kind: constant, warmup_steps: 2}",
    "ema_decay=0.9",
    "eval.every_steps=5",
    "eval.batch_size=8",
    "checkpoint.every_steps=5",
    "log.every_steps=2",
    "log.tensorboard=false",
)


class Steps:
    """The step of an experiment as the loop calls it, with its feed and settings: `state, sums = steps(state)`."""

    def __init__(self, built: Experiment) -> None:
        self.built, self.feed, self.settings = built, built.task.open_feed(built.mesh), built.put_settings()

    def __call__(self, state: TrainState, number: int | None = None) -> tuple[TrainState, dict]:
        number = int(state.step) if number is None else number
        return self.built.train_step(state, self.settings, self.built.put(np.int32(number)), self.feed(number))


def read_split(built: Experiment, name: str) -> puzzles.Split:
    folder = Path(built.config.data.path)
    return puzzles.read_split(folder, puzzles.read_info(folder), name)


def tiny_config(data: Path, *overrides: str) -> ExperimentConfig:
    """The paper's recipe on a model small enough to compile in a second or two."""
    config = CONFIGS / "trm" / "sudoku_mlp.yaml"
    return load(config, [*TINY, f"data.path={data}", *overrides], ExperimentConfig)
