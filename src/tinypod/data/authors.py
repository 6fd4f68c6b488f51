"""Datasets that the TRM authors' scripts made: a folder for each split, an array in each file, puzzles in groups."""

import json
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, PositiveInt, ValidationError

from tinypod.data.puzzles import FIELDS, DatasetInfo, Name, Split
from tinypod.errors import DataError


class AuthorsInfo(BaseModel):
    """What we need of a `dataset.json` that the TRM authors' scripts wrote; they write more."""

    seq_len: PositiveInt
    vocab_size: PositiveInt
    num_puzzle_identifiers: PositiveInt
    ignore_label_id: int | None = None
    sets: Annotated[list[Name], Field(min_length=1)]


def import_folder(folder: Path) -> tuple[DatasetInfo, dict[str, Split]]:
    """Read a folder that the TRM authors' scripts made: `<split>/dataset.json` and `<split>/all__*.npy`."""
    names = sorted(path.parent.name for path in folder.glob("*/dataset.json"))
    if not names:
        raise DataError(
            f"{folder}: no converted dataset here; expected train/dataset.json, train/all__inputs.npy and so on"
        )
    described = {name: _read_authors_info(folder / name / "dataset.json") for name in names}
    sources = sorted({source for info in described.values() for source in info.sets})
    if len({info.seq_len for info in described.values()}) > 1:
        raise DataError(f"{folder}: its splits have puzzles of different lengths (seq_len)")
    splits = {name: _import_split(folder / name, described[name], sources) for name in names}
    info = DatasetInfo(
        kind="plain",
        seq_len=described[names[0]].seq_len,
        vocab_size=max(info.vocab_size for info in described.values()),
        num_identifiers=max(info.num_puzzle_identifiers for info in described.values()),
        box=None,
        sources=sources,
        grouped=True,
        origin=f"imported from {folder.name}",
    )
    return info, splits


def _read_authors_info(path: Path) -> AuthorsInfo:
    try:
        return AuthorsInfo.model_validate(json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path}: {error}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise DataError(f"{path}: not in the authors' format: {wrong}") from None


def _import_split(folder: Path, described: AuthorsInfo, sources: list[str]) -> Split:
    parts = [_import_set(folder, name, described, sources.index(name)) for name in described.sets]
    starts = np.cumsum([0] + [len(part) for part, _, _ in parts])
    return Split(
        **{field: np.concatenate([getattr(part, field) for part, _, _ in parts]) for field in FIELDS},
        group_offsets=np.append(
            np.concatenate([offsets[:-1] + start for (_, offsets, _), start in zip(parts, starts[:-1], strict=True)]),
            starts[-1],
        ),
        group_weights=np.concatenate([weights for _, _, weights in parts]),
    )


def _import_set(folder: Path, name: str, described: AuthorsInfo, source: int) -> tuple[Split, np.ndarray, np.ndarray]:
    """The rows of one set, and where its groups begin and what they weigh."""
    fields = ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
    arrays = {field: _read_array(folder / f"{name}__{field}.npy", 2 if field in FIELDS else 1) for field in fields}
    examples, puzzles, groups = arrays["puzzle_indices"], arrays["puzzle_identifiers"], arrays["group_indices"]
    for field, offsets, last in (
        ("puzzle_indices", examples, len(arrays["inputs"])),
        ("group_indices", groups, len(puzzles)),
    ):
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != last or (np.diff(offsets) <= 0).any():
            raise DataError(f"{folder}/{name}__{field}.npy: expected offsets that grow from 0 to {last}")
    if len(examples) != len(puzzles) + 1 or len(arrays["labels"]) != len(arrays["inputs"]):
        raise DataError(
            f"{folder}/{name}__*.npy do not belong together: {len(arrays['inputs'])} inputs, {len(arrays['labels'])} "
            f"labels, {len(puzzles)} identifiers, {len(examples)} puzzle_indices (one more than identifiers is right)"
        )
    labels = arrays["labels"]
    if described.ignore_label_id not in (None, 0):
        labels = np.where(labels == described.ignore_label_id, 0, labels)
    for field, values in (("inputs", arrays["inputs"]), ("labels", labels)):
        if values.min() < 0 or values.max() > 255:
            raise DataError(f"{folder}/{name}__{field}.npy: tokens from {values.min()} to {values.max()}, not 0 to 255")
    offsets = examples[groups].astype(np.int64)
    split = Split(
        inputs=arrays["inputs"].astype(np.uint8),
        labels=labels.astype(np.uint8),
        identifiers=np.repeat(puzzles, np.diff(examples)).astype(np.int32),
        sources=np.full(len(labels), source, np.uint16),
        ratings=np.zeros(len(labels), np.int32),
    )
    # An epoch shows every example of one puzzle of each group: a group's share is its examples per puzzle.
    return split, offsets, np.diff(offsets) / np.diff(groups)


def _read_array(path: Path, ndim: int) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path}: missing from the converted dataset") from None
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: not readable as an array: {error}") from None
    if array.ndim != ndim or not np.issubdtype(array.dtype, np.integer) or not array.size:
        raise DataError(f"{path}: {array.dtype}{list(array.shape)}, expected integers in {ndim} dimensions")
    return array
