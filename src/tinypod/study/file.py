"""A study file, and the runs that it asks for.

    base: demo                             # a recipe or a config file; each run is this, and what differs
    set: {steps: 200}                      # for all of them
    factors: {model.hidden_size: [64, 96]} # a grid: every level of one with every level of the others
    zip: {batch_size: [128, 256], optimizer.learning_rate: [1e-3, 2e-3]}   # levels that go together
    variants: {plain: {}, no EMA: {ema_decay: null, eval.weights: live}}   # named ones
    seeds: 3                               # or a list
    target: 0.5                            # of the metric, for the time to it
    stop: {at_target: true, no_progress: 5, below_median_from: 100}        # runs that end early
    search: {kind: random, trials: 16, space: {optimizer.learning_rate: {low: 1e-4, high: 1e-2, scale: log}}}

All of these multiply. Keys may be dotted; a mapping whose `kind` differs replaces the one that was there.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from tinypod import config as configs
from tinypod.config import Config
from tinypod.errors import ConfigError
from tinypod.experiment import ExperimentConfig
from tinypod.runs import storage

Levels = Annotated[list[Any], Field(min_length=1)]
Changes = Annotated[dict[str, Any], Field(default_factory=dict)]  # by dotted key
MOST_RUNS = 10_000  # more are a slip of the pen


class Stop(Config):
    """Rules by which a run ends before its last step; asked after each evaluation."""

    at_target: bool = False  # the study's target is reached
    no_progress: PositiveInt | None = None  # so many evaluations in a row without a better value
    below_median_from: PositiveInt | None = None  # from this step on: worse than the median of the runs at its step


class Span(Config):
    low: float
    high: float
    scale: Literal["linear", "log"] = "linear"

    @model_validator(mode="after")
    def _is_a_span(self) -> "Span":
        if not self.low < self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low={self.low}: a log scale needs numbers above 0")
        return self

    def draw(self, random: Random) -> float:
        if self.scale == "log":
            drawn = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        else:
            drawn = random.uniform(self.low, self.high)
        return float(f"{drawn:.4g}")  # as it can be written down


class Search(Config):
    """Trials drawn at random from a space; `halving` ends all but a share of them at each rung."""

    kind: Literal["random", "halving"]
    trials: PositiveInt
    space: Annotated[dict[str, Levels | Span], Field(min_length=1)]  # lists: one of these
    seed: NonNegativeInt = 0  # of the draws
    rung_steps: list[PositiveInt] = Field(default_factory=list)
    keep: Annotated[float, Field(gt=0, lt=1)] = 1 / 3  # of the trials at each rung

    @model_validator(mode="after")
    def _has_rungs(self) -> "Search":
        if (self.kind == "halving") != bool(self.rung_steps):
            raise ValueError("rung_steps: the steps at which `kind: halving` chooses, and for that alone")
        return self

    @property
    def rungs(self) -> dict[int, float]:
        return dict.fromkeys(self.rung_steps, self.keep)

    def draw(self) -> list[tuple[str, dict[str, Any]]]:
        random = Random(self.seed)
        digits = len(str(self.trials - 1))
        return [
            (
                f"trial{number:0{digits}}",
                {k: d.draw(random) if isinstance(d, Span) else random.choice(d) for k, d in self.space.items()},
            )
            for number in range(self.trials)
        ]


class StudyFile(Config):
    base: str
    set: Changes
    factors: Annotated[dict[str, Levels], Field(default_factory=dict)]
    zip: Annotated[dict[str, Levels], Field(default_factory=dict)]
    variants: Annotated[dict[str, dict[str, Any]], Field(default_factory=dict)]
    seeds: PositiveInt | Annotated[list[NonNegativeInt], Field(min_length=1)] = 1
    metric: str | None = None  # like eval/exact_accuracy; null: the first that the task reports
    target: float | None = None
    stop: Stop | None = None
    search: Search | None = None

    @field_validator("variants", mode="before")
    @classmethod
    def _empty_is_no_change(cls, value: Any) -> Any:
        return {name: {} if change is None else change for name, change in value.items()} if value else {}

    @model_validator(mode="after")
    def _fits_together(self) -> "StudyFile":
        lengths = {key: len(levels) for key, levels in self.zip.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"zip: these go together and must be equally long, but have {lengths} levels")
        if both := self.factors.keys() & self.zip.keys():
            raise ValueError(f"{', '.join(sorted(both))}: either a factor or zipped, not both")
        if "seed" in {*self.factors, *self.zip, *self.set}:
            raise ValueError("seed: the seeds of a study are its `seeds`")
        if self.stop is not None and self.stop.at_target and self.target is None:
            raise ValueError("stop.at_target needs a target")
        if isinstance(self.seeds, list) and len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has one of them twice")
        return self


class StudyRun(NamedTuple):
    name: str  # of its folder
    variant: str  # what it has in common with the same run under another seed
    levels: dict[str, Any]  # of the factors, by dotted key
    seed: int
    config: ExperimentConfig


class Study(NamedTuple):
    name: str
    file: StudyFile
    runs: list[StudyRun]


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """By its file, or the name of a shipped one, with or without `studies/`. `overrides` go into every run, after the
    file's `set`."""
    found = _locate(path)
    return expand(found.stem, _read(found, str(path)), overrides, str(path))


def _locate(path: str | Path) -> Path:
    for name in (str(path), f"studies/{path}"):
        try:
            found = configs.locate(name)
        except ConfigError:
            continue
        if "base" in configs.read_tree(found):
            return found
    configs.locate(path)  # an error if it is not there at all
    raise ConfigError(
        f"{path} is the config of one run, not a study: `tinypod train {path}` trains it, and a study names it as its "
        f"`base`. A quick study of it: `tinypod train {path} seed=0,1,2`"
    )


def _read(path: Path, where: str) -> StudyFile:
    file = configs.validate(configs.read_tree(path), StudyFile, where)
    beside = path.parent / file.base
    return file.model_copy(update={"base": str(beside)}) if beside.is_file() else file


def is_study(path: str | Path) -> bool:
    """Whether a file, or what is shipped by that name, describes a study; not a config of one run, nor a run."""
    if storage.is_remote(path) or Path(path).is_dir():
        return False
    return "base" in configs.read_tree(configs.locate(path))


def written_out(path: str | Path, overrides: Sequence[str]) -> dict[str, str]:
    """The same study as files by name, for a machine that has none of those it names."""
    found = _locate(path)
    file = _read(found, str(path))
    base = f"{found.stem}_base.yaml"
    tree = file.model_dump(mode="json", exclude_defaults=True) | {"base": base}
    tree.pop("set", None)
    trees = {f"{found.stem}.yaml": tree, base: _base_tree(file, overrides)}
    # As JSON, which is YAML, too: a string that looks like a number stays one.
    return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in trees.items()}


def study_of(base: str, lists: Mapping[str, Sequence[Any]], overrides: Sequence[str]) -> Study:
    """What a command line asks for that gives several values to a key."""
    seeds = lists.get("seed", [0])
    factors = {key: list(levels) for key, levels in lists.items() if key != "seed"}
    file = configs.validate({"base": base, "factors": factors, "seeds": list(seeds)}, StudyFile, "the command line")
    return expand(Path(base).stem, file, overrides, base)


def split_lists(overrides: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """Overrides with several values, `seed=0,1,2`, by key, and the others. A list in brackets is one value."""
    lists: dict[str, list[Any]] = {}
    others = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if equals and "," in value and value.lstrip()[:1] not in ("[", "{", "'", '"'):
            trees = [configs.parse_override(f"{key}={one.strip()}") for one in value.split(",")]
            lists[key] = [_leaf(tree) for tree in trees]
        else:
            others.append(text)
    return lists, others


def _leaf(tree: Any) -> Any:
    while isinstance(tree, dict):
        [tree] = tree.values()
    return tree


def expand(name: str, file: StudyFile, overrides: Sequence[str], where: str) -> Study:
    base = _base_tree(file, overrides)
    seeds = list(range(file.seeds)) if isinstance(file.seeds, int) else file.seeds
    runs = []
    for variant, changes, levels in _variants(file):
        tree = base
        for key, value in changes.items():
            tree = configs.merge(tree, _nested(key, value))
        for seed in seeds:
            run = f"{variant},seed={seed}" if variant else f"seed={seed}"
            at = f"{where}, run {run}"
            config = configs.validate(configs.resolve(tree | {"seed": seed}, at), ExperimentConfig, at)
            _check_rungs(file, config, at)
            runs.append(StudyRun(_as_file_name(run), variant or "all", levels, seed, config))
            if len(runs) > MOST_RUNS:
                raise ConfigError(f"{where}: more than {MOST_RUNS:,} runs")
    if len({run.name.casefold() for run in runs}) < len(runs):
        raise ConfigError(f"{where}: two variants have the same name; give them names that differ")
    return Study(name, file, runs)


def _base_tree(file: StudyFile, overrides: Sequence[str]) -> dict[str, Any]:
    base = configs.read_tree(configs.locate(file.base))
    for key, value in file.set.items():
        base = configs.merge(base, _nested(key, value))
    for text in overrides:
        base = configs.merge(base, configs.parse_override(text))
    return base


def _check_rungs(file: StudyFile, config: ExperimentConfig, where: str) -> None:
    every = config.eval.every_steps
    for rung in file.search.rung_steps if file.search is not None else []:
        if rung >= config.steps or every is None or rung % every:
            raise ConfigError(
                f"{where}: search.rung_steps: at {rung} there is no evaluation before the end "
                f"(eval.every_steps={every}, steps={config.steps})"
            )


def _variants(file: StudyFile) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, changes, levels of the factors) of each."""
    grid = [dict(zip(file.factors, values, strict=True)) for values in itertools.product(*file.factors.values())]
    together = [dict(zip(file.zip, values, strict=True)) for values in zip(*file.zip.values(), strict=True)]
    short = _short_names([*file.factors, *file.zip])
    drawn = file.search.draw() if file.search is not None else [("", {})]
    found = []
    for (named, changes), (trial, values), zipped, point in itertools.product(
        file.variants.items() or [("", {})], drawn, together or [{}], grid
    ):
        levels = zipped | point
        parts = [name for name in (named, trial) if name]
        parts += [f"{short[key]}={_written(value)}" for key, value in levels.items()]
        found.append((",".join(parts), changes | values | levels, values | levels))
    return found


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or as many parts as tell it from the others."""
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = [other for other in keys if other != key]
        names[key] = next((end for end in ends if not any(f".{o}".endswith(f".{end}") for o in others)), key)
    return names


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind", "-".join(f"{key}={_written(inner)}" for key, inner in value.items())))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _as_file_name(text: str) -> str:
    return re.sub(r"[^\w.,=+-]+", "_", text)


def _nested(key: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value as the tree of an override."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)
