"""The dataset folder: `dataset.json` and one `<split>.npz` for each split.

Tokens are uint8: 0 is padding (and, in labels, a cell that is not scored). A row is one example. Rows may be gathered
in groups (the pre-augmented sets of the TRM authors): then a draw takes a group by weight, and one of its rows next.
`dataset.json` holds the SHA-256 of each split file, checked at reading: a file cut short or mixed up is refused.
"""

import hashlib
import json
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt, StringConstraints, ValidationError

from tinypod.config import Config
from tinypod.errors import DataError
from tinypod.runs.storage import inside, replace_file

# Of a split or a set: part of a file's name, wherever the description comes from, and so never a path.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9](\.?[A-Za-z0-9_-])*$", max_length=100)]


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
    splits: dict[Name, SplitInfo] = Field(default_factory=dict)


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
    for name, split in splits.items():
        check_split(info, split, f"split {name}")
    files = {name: _to_npz(split) for name, split in splits.items()}
    described = {
        name: {"rows": len(splits[name]), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    try:
        info = DatasetInfo.model_validate(info.model_dump() | {"splits": described})
    except ValidationError:
        raise DataError(f"splits {', '.join(splits)}: expected names of letters, digits and . _ -") from None
    for name, content in files.items():
        replace_file(inside(folder, f"{name}.npz"), content)
    replace_file(folder / "dataset.json", (json.dumps(info.model_dump(), indent=2) + "\n").encode())
    return info


def _to_npz(split: Split) -> bytes:
    fields = FIELDS + (GROUP_FIELDS if split.group_offsets is not None else ())
    buffer = BytesIO()
    np.savez_compressed(buffer, **{field: getattr(split, field) for field in fields})
    return buffer.getvalue()


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
    if name not in info.splits:
        raise DataError(f"{folder} has no split {name!r}; it has {', '.join(info.splits)}")
    path = folder / f"{name}.npz"
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
