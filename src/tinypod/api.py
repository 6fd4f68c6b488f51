"""The commands as functions, for Python and notebooks: `tinypod.train`, `load`, `plan` and `make_sudoku`.

    import tinypod

    tinypod.make_sudoku("data/demo", box=(2, 3), clues=12, train_size=1000, test_size=500)
    model = tinypod.train("demo", steps=1200)
    model.evaluate()["exact_accuracy"]
    model.solve("1..45..5....")

Each takes a config as its command does (a recipe's name, a file, a run) and keys to change: by keyword (`steps=300`),
or in a dict where a name has dots (`{"optimizer.learning_rate": 1e-3}`). Whatever cannot work is a `tinypod.UserError`.
docs/python.md describes all of it.
"""

import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from rich.console import Console

from tinypod import training
from tinypod.cluster import libtpu
from tinypod.data import build, puzzles
from tinypod.errors import ConfigError, DataError, DeviceMemoryError, UserError
from tinypod.evaluate import Evaluator
from tinypod.experiment import ExperimentConfig
from tinypod.planning import local
from tinypod.planning.hardware import find_hardware
from tinypod.planning.planner import Plan, Planner
from tinypod.planning.prices import read_prices
from tinypod.planning.search import plan_slice
from tinypod.runs import metrics
from tinypod.runs.folder import Run, load_config, read_config, run_to_train
from tinypod.runs.load import Loaded, check_overrides, load_weights, names_data
from tinypod.runs.release import Release, open_source
from tinypod.runs.terminal import counting, say
from tinypod.solve import examples, refine, stops
from tinypod.solve.refine import Answer

libtpu.quieten()  # in a script that has not asked JAX for devices before

LOCAL = "local"  # in place of a slice: the device at hand
Overrides = Mapping[str, Any] | Sequence[str]  # {"a.b": value}, or as on the command line: ["a.b=value"]


class Thinking(TypedDict, total=False):
    """How long and how often the model thinks about a puzzle; what is left out, or None, is as in the config."""

    halt_steps: int | None  # steps to think
    views: int | None  # symmetric views of a puzzle, itself among them
    trajectories: int | None  # of each view: as trained, and with noise
    noise: float | None  # its standard deviation; the state's is 1
    noise_at: Literal["start", "every_step"] | None
    choose: Literal["vote", "confident", "first", "settled", "valid"] | None  # how one answer is made of all


THINKING = {"halt_steps": "task.halting.max_steps"} | {
    name: f"task.thinking.{name}" for name in ("views", "trajectories", "noise", "noise_at", "choose")
}


def make_sudoku(
    folder: str | Path,
    *,
    box: tuple[int, int] = (3, 3),
    clues: int | tuple[int, int] | None = None,
    train_size: int = 1000,
    test_size: int = 1000,
    holdout: int = 0,
    variants: int = 0,
    seed: int = 0,
) -> Path:
    """Make up Sudokus with exactly one solution each, as `tinypod data sudoku --generate` does; the dataset's folder.

    `box` is its rows and columns: (3, 3) is the usual 9×9, (2, 3) a 6×6, (2, 2) a 4×4. `clues`: at least this many,
    or two numbers, between which one is drawn for each puzzle; default: as few as can be. `holdout`: a third split
    of so many. `variants`: up to so many more training puzzles near each, with other clues and answers, about as
    hard. Where the folder holds these very puzzles already, nothing is done.
    """
    sizes = {
        "train_size": (train_size, 1),
        "test_size": (test_size, 1),
        "holdout": (holdout, 0),
        "variants": (variants, 0),
    }
    for name, (value, least) in sizes.items():
        if value < least:
            raise UserError(f"{name}={value}: expected {least} or more")
    out, console = Path(folder), _console()
    asked = clues if clues is None or isinstance(clues, tuple) else (int(clues), int(clues))
    if (out / "dataset.json").exists():
        info = puzzles.read_info(out)
        rows = {name: split.rows for name, split in info.splits.items()}
        more = rows.get("train", 0) - train_size if variants else 0
        wanted = {"train": train_size + more, "test": test_size} | ({"holdout": holdout} if holdout else {})
        origin = build.generated(box, asked, seed, holdout) + (build.varied(more, variants) if variants else "")
        if info.origin == origin and rows == wanted:
            say(console, f"{out}: the puzzles are there already")
            return out
    info = build.build_sudoku(
        out,
        train_csv=None,
        test_csv=None,
        generate=True,
        train_size=train_size,
        test_size=test_size,
        holdout=holdout,
        variants=variants,
        box=box,
        clues=asked,
        seed=seed,
        console=console,
    )
    build.describe(out, info, console)
    return out


def train(
    config: str | Path,
    overrides: Overrides = (),
    *,
    run: str | Path | None = None,
    from_step: int | None = None,
    **keys: Any,
) -> "Model":
    """Train, or resume where the run folder left off, as `tinypod train` does; the trained model.

    `run` is the run folder, local or gs://; default: `runs/` and the config's name. `from_step`: resume from this
    checkpoint; newer ones are set aside. `keys` are the config's: `steps=300`, `eval={"limit": 100}`.

    Interrupting it (Ctrl-C, a notebook's stop button) saves a checkpoint and raises KeyboardInterrupt: call it again to
    resume. Interrupting it twice ends the whole process at once, without a checkpoint.
    """
    loaded, target, console = load_config(config, _texts(overrides, keys)), run_to_train(config, run), _console()
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        outcome = training.train(loaded, target, console, from_step=from_step)
    except DeviceMemoryError as error:
        raise local.with_advice(error, loaded, console) from None
    finally:
        # A command that was stopped is about to end, and keeps its handler; this process lives on.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_term)
    if outcome.stopped_by == signal.SIGINT:
        saved = f"at step {outcome.step:,}, with a checkpoint" if outcome.step else "before its first step"
        raise KeyboardInterrupt(f"{target}: stopped {saved}; call it again to resume")
    if outcome.stopped_by is not None:
        raise SystemExit(128 + outcome.stopped_by)
    if not outcome.trained:
        say(console, f"{target}: nothing left to do at step {outcome.step:,}; to train further, raise steps=")
    return load(str(target))


def load(
    run: str | Path,
    overrides: Overrides = (),
    *,
    checkpoint: str | int = "best",
    weights: Literal["ema", "live"] | None = None,
) -> "Model":
    """The model of a run (its folder, or its gs:// URL), or of a release (its file, or its name if it is shipped).

    `checkpoint` is "best", "latest" or a step; a release has one. `weights`: "ema" (averaged) or "live"; default: the
    config's eval.weights. `overrides` change the config it is used with, such as {"data.path": "data/other"}.
    """
    return Model(run, _texts(overrides, {}), str(checkpoint), weights, _console())


def plan(
    config: str | Path,
    overrides: Overrides = (),
    *,
    slice: str = LOCAL,
    measure: bool = False,
    search: bool = True,
    prices: str | Path | None = None,
    fresh: bool = False,
    **keys: Any,
) -> Plan:
    """Will it fit, how fast will it be, what will it cost? As `tinypod plan` says, for one slice.

    `slice` is a TPU slice, like "v4-64" (needs the extra `plan`), GPUs, like "h100-8" (better with the extra `cuda`),
    or "local": the device at hand. `measure`: run ten
    steps there and compare. `search`: where it does not fit, look for what would (`Plan.proposal`). `prices`: your own
    table of prices. `fresh`: compile again what is in the cache. `keys` are the config's, as for `train`.
    """
    loaded, console, name = load_config(config, _texts(overrides, keys)), _console(), slice.strip().lower()
    if name == LOCAL:
        return local.plan_local(loaded, console, measure=measure, search=search)
    if measure:
        raise UserError(f'measure=True runs steps, so it needs slice="{LOCAL}", not {slice!r}')
    target = find_hardware(name).times(loaded.mesh.slices)
    priced = read_prices(None if prices is None else Path(prices))
    return plan_slice(Planner(loaded, priced, console, fresh=fresh), target, search=search)


class Model:
    """A run and the weights of one of its checkpoints, which are read when they are first needed; or a release.

    `tinypod.load` and `tinypod.train` make it.
    """

    def __init__(
        self,
        run: str | Path,
        overrides: Sequence[str],
        checkpoint: str,
        weights: Literal["ema", "live"] | None,
        console: Console,
    ) -> None:
        check_overrides(list(overrides))
        self._source = open_source(run)
        self._asked = (list(overrides), checkpoint, weights)
        self._console = console
        self._loaded: dict[tuple[tuple[str, ...], bool], Loaded] = {}  # by overrides, and whether it has its data
        self._programs: dict[tuple[str, ...], refine.Program] = {}
        if isinstance(self._source, Release):
            self._stored = self._source.read_config()
        else:
            self._source.pull()
            self._stored = read_config(self._source)  # what is no run folder is an error now

    def __repr__(self) -> str:
        return f"Model({str(self._source)!r}, checkpoint={self._asked[1]!r})"

    @property
    def run(self) -> Run:
        """Where the run is."""
        if isinstance(self._source, Release):
            raise UserError(f"{self._source} is a release, and has no run folder; `model.release` has what it says")
        return self._source

    @property
    def release(self) -> Release | None:
        """The file and what it says about itself (`about`), if this is one."""
        return self._source if isinstance(self._source, Release) else None

    @property
    def config(self) -> ExperimentConfig:
        """What it was trained with, with the overrides given to `load`."""
        overrides = self._asked[0]
        if not overrides:
            return self._stored
        release = self.release
        return release.read_config(overrides) if release else load_config(str(self.run), overrides)

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl as they are now, for `pandas.DataFrame(model.metrics)`.

        Each has `step`, `time` (Unix seconds) and either `train/...` and `perf/...` or `eval/...`. A release has one at
        most, with the scores at its step.
        """
        if (release := self.release) is not None:
            return [{"step": release.about.step, **release.about.scores}] if release.about.scores else []
        self.run.fetch(metrics.FILE)
        return metrics.MetricsLog(self.run.folder).read()

    @property
    def step(self) -> int:
        """The checkpoint's."""
        return self.release.about.step if self.release else self.loaded().step

    @property
    def weights(self) -> str:
        """`ema` or `live`."""
        return self.release.about.weights if self.release else self.loaded().weights

    def loaded(self, *, needs_data: bool = True, **thinking: Unpack[Thinking]) -> Loaded:
        """The experiment and its weights (`params`), for programs that go further. Without `needs_data`, what the run
        remembers of its dataset will do."""
        changes = _changes(thinking)
        if (changes, needs_data) not in self._loaded:
            overrides, checkpoint, weights = self._asked
            found = load_weights(self._source, [*overrides, *changes], checkpoint, weights, needs_data=needs_data)
            self._loaded[changes, needs_data] = self._loaded[changes, False] = found
        return self._loaded[changes, needs_data]

    def evaluate(
        self, split: str | None = None, *, limit: int | None = None, **thinking: Unpack[Thinking]
    ) -> dict[str, float]:
        """Scores on a split, every row exactly once, as `tinypod eval` prints them: {"exact_accuracy": 0.99, ...}.

        `split`: default the config's data.eval_split. `limit`: only the first rows. `thinking`: `halt_steps` to think,
        `views`, `trajectories`, `noise`, `noise_at`, `choose`; default: as in the config. "cost" is the steps of the
        model that a puzzle took, over all of these.
        """
        if limit is not None and limit < 1:
            raise UserError(f"limit={limit}: expected at least 1 row, or None for all of them")
        experiment, params, *_ = self.loaded(**thinking)
        evaluation, rows = experiment.task.open_evaluation(split), experiment.config.eval.batch_size
        evaluator = Evaluator(evaluation, experiment.mesh, experiment.specs, rows, limit)
        with counting(self._console, "evaluating", evaluator.rows) as progress:
            return evaluator(params, progress)

    def solve(self, puzzle: str | None = None, *, number: int | None = None, **thinking: Unpack[Thinking]) -> Answer:
        """The answer to a puzzle in characters (`.` blank), refined step by step; a notebook shows it as a picture.

        Without a puzzle: the held-out one of that number, or one that is wrong at first and refined; of a release
        without a dataset, its example of that number, or the first. `thinking`: as for `evaluate`.
        """
        if puzzle is None and self.release is not None and not names_data(self._asked[0]):
            puzzle = examples.example(self.release, number or 0)
        if puzzle is None and number is None:
            refined = self.solve_held_out(**thinking)
            return refined[stops.most_telling(refined)[0]]
        return self._refine(None if puzzle is None else [puzzle], number, thinking)[0]

    def solve_held_out(self, limit: int | None = refine.HELD_OUT, **thinking: Unpack[Thinking]) -> list[Answer]:
        """The answers to the first so many held-out puzzles; None: to all."""
        return self._refine(None, None, thinking, limit)

    def solve_all(self, puzzles: str | Path | Sequence[str], **thinking: Unpack[Thinking]) -> list[Answer]:
        """The answers to many puzzles, computed together: a list of them, or a file with one a line."""
        return self._refine(str(puzzles) if isinstance(puzzles, Path) else puzzles, None, thinking)

    def _refine(
        self,
        puzzle: str | Sequence[str] | None,
        number: int | None,
        thinking: Thinking,
        limit: int | None = None,
    ) -> list[Answer]:
        try:
            experiment, params, *_ = self.loaded(needs_data=puzzle is None, **thinking)
        except DataError as error:
            if puzzle is not None:
                raise
            hint = f"or give a puzzle, which needs no dataset: `tinypod solve {self._source} PUZZLE`"
            raise DataError(f"{error}; {hint}") from None
        changes = _changes(thinking)
        if changes not in self._programs:
            self._programs[changes] = refine.make_program(experiment)
        program = self._programs[changes]
        return refine.refinements(experiment, params, puzzle, number, limit=limit, program=program)


def _changes(thinking: Thinking) -> tuple[str, ...]:
    """As overrides of the config."""
    unknown = sorted(thinking.keys() - THINKING.keys())
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; expected one of {', '.join(THINKING)}")
    return tuple(f"{THINKING[name]}={value}" for name, value in thinking.items() if value is not None)


def _console() -> Console:
    """In a notebook, lines of plain text: rich's own display there needs ipywidgets, and by FORCE_COLOR, which kernels
    set, rich would take it for a terminal."""
    console = Console()
    return Console(force_jupyter=False, force_terminal=False) if console.is_jupyter else console


def _texts(overrides: Overrides, keys: Mapping[str, Any]) -> list[str]:
    """As on the command line; `keys` win."""
    if not isinstance(overrides, Mapping):
        return [*overrides, *_texts(keys, {})]
    return [f"{key}={_text(key, value)}" for key, value in {**overrides, **keys}.items()]


def _text(key: str, value: Any) -> str:
    def plain(value: Any) -> Any:
        return value.item() if hasattr(value, "item") else os.fspath(value)  # numbers of NumPy, and paths

    try:
        return json.dumps(value, default=plain)
    except (TypeError, ValueError):
        raise ConfigError(f"{key}: {value!r} is not a number, a text, a list or a dict of these") from None
