"""A release made of a run: what of its config, its dataset and its scores goes into the file (`runs.release`)."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tinypod.data import puzzles, sudoku
from tinypod.errors import DataError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.runs.checksums import flatten
from tinypod.runs.folder import Run
from tinypod.runs.load import Loaded
from tinypod.runs.metrics import MetricsLog
from tinypod.runs.release import MOST_EXAMPLES, SUFFIX, About, Dtype, write_release
from tinypod.runs.storage import is_remote, url_of
from tinypod.runs.terminal import size
from tinypod.tasks.puzzle import PuzzleTaskConfig, described


def release_run(run: Run, loaded: Loaded, out: Path, dtype: Dtype = "bfloat16", examples: Path | None = None) -> str:
    """Returns what there is to say of it."""
    experiment = loaded.experiment
    config, dataset = experiment.config, experiment.task.dataset
    if not isinstance(config.task, PuzzleTaskConfig) or dataset is None:
        raise UserError(
            f"--format release is for models of puzzles; this run's task is of kind {config.task.kind!r}; choose "
            "another format"
        )
    if is_remote(out):
        raise UserError(f"{url_of(out)}: a release is written to a local file; name one, and copy it there")
    if out.suffix != SUFFIX or out.is_dir():
        raise UserError(f"{out}: a release is a file called NAME{SUFFIX}")
    about = About(
        tinypod=version("tinypod"),
        config=public_config(config),
        dataset=dict(dataset),
        headline=experiment.task.headline,
        num_weights=experiment.num_weights,
        step=loaded.step,
        weights="ema" if loaded.weights == "ema" else "live",
        scores=_scores(run, loaded),
        examples=() if examples is None else read_examples(examples, described(dataset)),
    )
    written = write_release(out, about, convert(loaded.params, dtype))
    return f"{size(written)}, {about.num_weights:,} weights in {dtype}"


def convert(params: Any, dtype: Dtype) -> dict[str, np.ndarray]:
    """By path, rounded to nearest."""
    tensors = {}
    for path, leaf in flatten(params).items():
        with np.errstate(over="ignore"):
            tensors[path] = np.asarray(leaf).astype(np.dtype(dtype))
        if not np.isfinite(tensors[path].astype(np.float32)).all():
            raise UserError(
                f"--dtype {dtype}: {path} has values that are not finite, or too large for it; choose float32, and "
                "look at the run if that is refused, too"
            )
    return tensors


def public_config(config: ExperimentConfig) -> dict[str, Any]:
    """Without what belongs to a machine or an account: of the dataset's path, its last name."""
    tree = config.model_dump(mode="json")
    tree["data"]["path"] = Path(config.data.path).name
    tree["compile_cache"] = "auto"
    tree["log"]["wandb"] = None
    return tree


def _scores(run: Run, loaded: Loaded) -> dict[str, float]:
    """Those that training logged at that step, if they are of these weights."""
    if loaded.weights != loaded.experiment.config.eval.weights:
        return {}
    rows = [row for row in MetricsLog(run.folder).read() if row["step"] == loaded.step]
    found = {name: value for row in rows for name, value in row.items() if name.startswith("eval/")}
    return {name: value for name, value in found.items() if np.isfinite(value)}


def read_examples(path: Path, info: puzzles.DatasetInfo) -> tuple[str, ...]:
    """Questions, one a line, as they will be shown."""
    if info.kind != "sudoku" or info.box is None:
        raise UserError(f"--examples {path}: examples are Sudokus; this run's puzzles are of kind {info.kind!r}")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--examples {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not 1 <= len(numbered) <= MOST_EXAMPLES:
        raise UserError(f"--examples {path}: {len(numbered)} puzzles, expected 1 to {MOST_EXAMPLES}, one a line")
    found = []
    for number, line in numbered:
        try:
            found.append(sudoku.format_puzzle(sudoku.parse_puzzle(line, (info.box[0], info.box[1]))))
        except DataError as error:
            raise DataError(f"--examples {path}:{number}: {error}") from None
    return tuple(found)
