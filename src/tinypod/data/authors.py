"""Datasets that the TRM authors' scripts made: a folder for each split, an array in each file, puzzles in groups."""

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, PositiveInt, ValidationError

from tinypod.data.puzzles import DatasetInfo, Split, VocabSize
from tinypod.errors import DataError

ARRAYS = {"inputs": 2, "labels": 2, "puzzle_identifiers": 1, "puzzle_indices": 1, "group_indices": 1}  # and their dims


class AuthorsInfo(BaseModel):
    """What we need of a `dataset.json` that the TRM authors' scripts wrote; they write more."""

    seq_len: PositiveInt
    vocab_size: VocabSize
    num_puzzle_identifiers: PositiveInt
    ignore_label_id: int | None = None
    sets: tuple[Literal["all"]]


def import_folder(folder: Path) -> tuple[DatasetInfo, dict[str, Split]]:
    """Read a folder that the TRM authors' scripts made: `<split>/dataset.json` and `<split>/all__*.npy`."""
    described = {path.parent.name: _read_info(path) for path in sorted(folder.glob("*/dataset.json"))}
    if not described:
        raise DataError(
            f"{folder}: no converted dataset here; expected train/dataset.json, train/all__inputs.npy and so on"
        )
    lengths = {info.seq_len for info in described.values()}
    if len(lengths) > 1:
        raise DataError(f"{folder}: its splits have puzzles of different lengths (seq_len)")
    info = DatasetInfo(
        kind="plain",
        seq_len=lengths.pop(),
        vocab_size=max(info.vocab_size for info in described.values()),
        num_identifiers=max(info.num_puzzle_identifiers for info in described.values()),
        sources=["all"],
        grouped=True,
        origin=f"imported from {folder.name}",
    )
    return info, {name: _import_split(folder / name, info.ignore_label_id) for name, info in described.items()}


def _read_info(path: Path) -> AuthorsInfo:
    try:
        return AuthorsInfo.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise DataError(f"{path}: not in the authors' format: {wrong}") from None


def _import_split(folder: Path, ignored_label: int | None) -> Split:
    inputs, labels, puzzles, examples, groups = (
        _read_array(folder / f"all__{field}.npy", ndim) for field, ndim in ARRAYS.items()
    )
    if ignored_label is not None:
        labels = np.where(labels == ignored_label, 0, labels)
    for field, values in (("inputs", inputs), ("labels", labels)):
        if values.min() < 0 or values.max() > 255:
            raise DataError(f"{folder}/all__{field}.npy: tokens from {values.min()} to {values.max()}, not 0 to 255")
    for field, offsets, last in (("puzzle_indices", examples, len(inputs)), ("group_indices", groups, len(puzzles))):
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != last or (np.diff(offsets) <= 0).any():
            raise DataError(f"{folder}/all__{field}.npy: expected offsets that grow from 0 to {last}")
    if len(examples) != len(puzzles) + 1 or len(labels) != len(inputs):
        raise DataError(
            f"{folder}/all__*.npy do not belong together: {len(inputs)} inputs, {len(labels)} labels, "
            f"{len(puzzles)} identifiers, {len(examples)} puzzle_indices (one more than identifiers is right)"
        )
    group_offsets = examples[groups].astype(np.int64)
    return Split(
        inputs=inputs.astype(np.uint8),
        labels=labels.astype(np.uint8),
        identifiers=np.repeat(puzzles, np.diff(examples)).astype(np.int32),
        sources=np.zeros(len(labels), np.uint16),
        ratings=np.zeros(len(labels), np.int32),
        group_offsets=group_offsets,
        # An epoch shows every example of one puzzle of each group: a group's share is its examples per puzzle.
        group_weights=np.diff(group_offsets) / np.diff(groups),
    )


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
