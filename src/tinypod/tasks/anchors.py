"""Anchors: blocks that hold a student near what it was before its adapters were trained.

They are a cache like any other, whose teacher is the student without adapters. One row in `every` of a batch is an
anchor, the last of each so many rows, one anchor after the other and then from the first again: a function of the
step's number and the row's, whatever hosts there are. The other rows are training blocks, none left out. An anchor's
only loss is its divergence from the cached logits, times `weight`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat

from tinypod.config import Config
from tinypod.data import blocks
from tinypod.errors import ConfigError, DataError
from tinypod.tasks.feed import HostRows

SPLIT = "train"
BUILD = "tinypod cache build FOLDER TEXT --teacher RUN --without-adapters --blocks 32 --held-out 0"


class Anchor(Config):
    path: str  # a folder that `tinypod cache build ... --without-adapters` made
    every: Annotated[int, Field(ge=2)] = 4  # one row in so many is an anchor
    weight: NonNegativeFloat = 0.01  # changing it for a later stage compiles nothing


class Anchors:
    """The anchors of a task: what their cache says of itself, and their rows of a batch."""

    def __init__(self, config: Anchor, manifest: blocks.Manifest) -> None:
        self.config, self.folder, self.manifest = config, Path(config.path), manifest

    def shapes(self, data: blocks.Manifest) -> dict[str, tuple[tuple[int, ...], type]]:
        """Of one row of a mixed batch."""
        return data.shapes() | self.manifest.shapes() | {"anchor": ((), np.float32)}

    def rows_to_train(self, batch_size: int) -> int:
        return batch_size - batch_size // self.config.every

    def mix(self, read: HostRows, data: blocks.Manifest, batch_size: int) -> HostRows:
        """Reads batches of `batch_size` rows from a reader of the rows to train on alone."""
        every, shapes = self.config.every, self.shapes(data)
        anchors = blocks.Blocks(self.folder, self.manifest, SPLIT)

        def mixed(number: int, start: int, stop: int) -> Mapping[str, np.ndarray]:
            is_anchor = np.arange(start, stop) % every == every - 1
            trained = read(number, start - start // every, stop - stop // every)
            places = number * (batch_size // every) + np.arange(start // every, stop // every)
            held = anchors.read(places % len(anchors))
            rows: dict[str, np.ndarray] = {}
            for name, (shape, dtype) in shapes.items():
                rows[name] = np.ones((stop - start, *shape), dtype)  # a mask that only one of the caches has
                for which, found in ((~is_anchor, trained), (is_anchor, held)):
                    if name in found:
                        rows[name][which] = found[name]
            return rows | {"anchor": is_anchor.astype(np.float32)}

        return mixed


def open_anchors(config: Anchor | None, data: blocks.Manifest, planned: bool) -> Anchors | None:
    """`planned`: where there are none yet, they will be like the data."""
    if config is None:
        return None
    folder = Path(config.path)
    if planned and not (folder / blocks.MANIFEST).exists():
        return Anchors(config, data)
    try:
        return Anchors(config, blocks.read_manifest(folder))
    except DataError as error:
        about = str(error).removeprefix("data.path: ").partition(";")[0]
        raise DataError(f"task.anchor.path: {about}; build them with `{BUILD}`, or set task.anchor=null") from None


def check_anchors(anchors: Anchors, folder: Path, data: blocks.Manifest, batch_size: int) -> None:
    """One pass serves both kinds of rows: their shapes must be the same."""
    ours, every = anchors.manifest, anchors.config.every
    if ours.teacher is None or data.teacher is None:
        without = anchors.folder if ours.teacher is None else folder
        raise ConfigError(f"task.anchor: {without} has no teacher's logits; build it with --teacher")
    pairs = {
        "--length": (ours.length, data.length),
        "--topk": (ours.teacher.topk, data.teacher.topk),
        "--temperature": (ours.teacher.temperatures, data.teacher.temperatures),
        "vocabulary": (ours.vocab_size, data.vocab_size),
    }
    if different := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
        lines = "".join(f"\n  {name}: {mine} and {theirs}" for name, (mine, theirs) in different.items())
        raise ConfigError(
            f"task.anchor.path={anchors.folder} does not go with data.path={folder}; build the anchors with the same:"
            f"{lines}"
        )
    if SPLIT not in ours.splits:
        raise ConfigError(f"task.anchor.path={anchors.folder} has no split {SPLIT!r}")
    if batch_size < every:
        raise ConfigError(f"task.anchor.every={every}: a batch has only {batch_size} rows, and so no anchor")
