"""The dataset folder: `dataset.json` and one `<split>.npz` for each split.

Tokens are uint8: 0 is padding (and, in labels, a cell that is not scored). A row is one example. Rows may be gathered
in groups (the pre-augmented sets of the TRM authors): then a draw takes a group by weight, and one of its rows next.
`dataset.json` holds the SHA-256 of each split file, checked at reading: a file cut short or mixed up is refused.
"""

import hashlib
import json
import os
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, Field, PositiveInt, ValidationError

from tinypod.config import Config
from tinypod.errors import DataError


class SplitInfo(Config):
    rows: int
    sha256: str


class DatasetInfo(Config):
    """What `dataset.json` says."""

    kind: Literal["sudoku", "plain"]  # which symmetries the puzzles have; plain: none that we know
    seq_len: int
    vocab_size: int
    num_identifiers: int
    box: list[int] | None  # rows and columns of a box, for Sudoku
    sources: list[str]  # names for the numbers in each split's `sources`
    grouped: bool = False  # whether rows are drawn by group
    origin: str  # how it was made
    splits: dict[str, SplitInfo] = Field(default_factory=dict)


class ExpectedSudoku(Config):
    """What a dataset of Sudokus will be, for plans that are made before it is there."""

    kind: Literal["sudoku"] = "sudoku"
    box: Annotated[list[PositiveInt], Field(min_length=2, max_length=2, default=[3, 3])]  # its rows and columns
    rows: PositiveInt = 1000  # training puzzles

    def info(self, split: str) -> DatasetInfo:
        side = self.box[0] * self.box[1]
        return _expected("sudoku", side * side, side + 2, 1, self.box, split, self.rows)


class ExpectedPlain(Config):
    """The same for puzzles without symmetries that we know."""

    kind: Literal["plain"] = "plain"
    seq_len: PositiveInt
    vocab_size: PositiveInt
    num_identifiers: PositiveInt = 1
    rows: PositiveInt = 1000

    def info(self, split: str) -> DatasetInfo:
        return _expected("plain", self.seq_len, self.vocab_size, self.num_identifiers, None, split, self.rows)


def _expected(
    kind: Literal["sudoku", "plain"],
    seq_len: int,
    vocab_size: int,
    num_identifiers: int,
    box: list[int] | None,
    split: str,
    rows: int,
) -> DatasetInfo:
    return DatasetInfo(
        kind=kind,
        seq_len=seq_len,
        vocab_size=vocab_size,
        num_identifiers=num_identifiers,
        box=box,
        sources=["expected"],
        origin="data.expected",
        splits={split: SplitInfo(rows=rows, sha256="")},
    )


@dataclass(frozen=True)
class Split:
    """The arrays of one split; N rows of S tokens."""

    inputs: np.ndarray  # uint8 [N, S]
    labels: np.ndarray  # uint8 [N, S]
    identifiers: np.ndarray  # int32 [N]
    sources: np.ndarray  # uint16 [N]
    ratings: np.ndarray  # int32 [N]
    group_offsets: np.ndarray | None = None  # int64 [G + 1]
    group_weights: np.ndarray | None = None  # float64 [G]

    def __len__(self) -> int:
        return len(self.inputs)


FIELDS = ("inputs", "labels", "identifiers", "sources", "ratings")
GROUP_FIELDS = ("group_offsets", "group_weights")


def write_dataset(folder: Path, info: DatasetInfo, splits: dict[str, Split]) -> DatasetInfo:
    """Write a new dataset folder. `dataset.json` comes last: without it there is no dataset."""
    if (folder / "dataset.json").exists():
        raise DataError(f"{folder} already holds a dataset; remove it first or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    described = {}
    for name, split in splits.items():
        check_split(info, split, f"split {name}")
        fields = FIELDS + (GROUP_FIELDS if split.group_offsets is not None else ())
        buffer = BytesIO()
        np.savez_compressed(buffer, **{field: getattr(split, field) for field in fields})
        _write_whole(folder / f"{name}.npz", buffer.getvalue())
        described[name] = SplitInfo(rows=len(split), sha256=hashlib.sha256(buffer.getvalue()).hexdigest())
    info = info.model_copy(update={"splits": described})
    _write_whole(folder / "dataset.json", (json.dumps(info.model_dump(), indent=2) + "\n").encode())
    return info


def _write_whole(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def read_info(folder: Path) -> DatasetInfo:
    path = folder / "dataset.json"
    try:
        return DatasetInfo.model_validate(json.loads(path.read_text()))
    except FileNotFoundError:
        raise DataError(
            f"data.path: no dataset at {folder.absolute()} (no dataset.json); "
            "make one with `tinypod data sudoku` or `tinypod data import`, or set data.path=FOLDER"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError, OSError) as error:
        raise DataError(f"{path}: not a dataset description: {error}") from None


def read_split(folder: Path, info: DatasetInfo, name: str) -> Split:
    path = folder / f"{name}.npz"
    if name not in info.splits:
        raise DataError(f"{folder} has no split {name!r}; it has {', '.join(info.splits)}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; make the dataset again") from None
    if hashlib.sha256(content).hexdigest() != info.splits[name].sha256:
        raise DataError(
            f"{path}: its contents are not those that dataset.json describes (damaged or replaced); make it again"
        )
    try:
        with np.load(BytesIO(content), allow_pickle=False) as arrays:
            split = Split(**{field: arrays[field] for field in arrays.files})
    except (ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: {error}") from None
    check_split(info, split, str(path))
    return split


def check_split(info: DatasetInfo, split: Split, where: str) -> None:
    """Shapes, ranges and emptiness: what would otherwise surface as nonsense inside a compiled step."""
    if len(split) == 0:
        raise DataError(f"{where}: no rows")
    expected = {"inputs": (len(split), info.seq_len), "labels": (len(split), info.seq_len)}
    for field in FIELDS:
        shape = getattr(split, field).shape
        if shape != expected.get(field, (len(split),)):
            raise DataError(f"{where}: {field} has shape {shape}, expected {expected.get(field, (len(split),))}")
    limits: dict[str, tuple[np.ndarray, int]] = {
        "inputs": (split.inputs, info.vocab_size),
        "labels": (split.labels, info.vocab_size),
        "identifiers": (split.identifiers, info.num_identifiers),
        "sources": (split.sources, len(info.sources)),
    }
    for field, (values, limit) in limits.items():
        if values.min() < 0 or values.max() >= limit:
            wrong = values.min() if values.min() < 0 else values.max()
            raise DataError(f"{where}: {field} holds {wrong}, expected values from 0 to {limit - 1}")


class AuthorsInfo(BaseModel):
    """What we need of a `dataset.json` that the TRM authors' scripts wrote; they write more."""

    seq_len: PositiveInt
    vocab_size: PositiveInt
    num_puzzle_identifiers: PositiveInt
    ignore_label_id: int | None = None
    sets: Annotated[list[str], Field(min_length=1)]


def import_authors_folder(folder: Path) -> tuple[DatasetInfo, dict[str, Split]]:
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
