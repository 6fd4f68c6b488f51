"""The dataset folder: `dataset.json` and one `<split>.npz` for each split.

Tokens are uint8: 0 is padding (and, in labels, a cell that is not scored). A row is one example. Rows may be gathered
in groups (the pre-augmented sets of the TRM authors): then a draw takes a group by weight, and one of its rows next.
`dataset.json` holds the SHA-256 of each split file, checked at reading: a file cut short or mixed up is refused.
"""

import hashlib
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveInt, StringConstraints, ValidationError

from tinypod.config import Config
from tinypod.data.sudoku import FIRST_DIGIT
from tinypod.errors import DataError
from tinypod.runs.storage import inside, replace_file

# Of a split or a set: part of a file's name, wherever the description comes from, and so never a path.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9](\.?[A-Za-z0-9_-])*$", max_length=100)]


VocabSize = Annotated[PositiveInt, Field(le=256)]  # tokens are uint8


class SplitInfo(Config):
    rows: int
    sha256: str


class DatasetInfo(Config):
    """What `dataset.json` says."""

    kind: Literal["sudoku", "plain"]  # which symmetries the puzzles have; plain: none that we know
    seq_len: int
    vocab_size: VocabSize
    num_identifiers: int
    box: list[int] | None = None  # rows and columns of a box, for Sudoku
    sources: list[str]  # names for the numbers in each split's `sources`
    grouped: bool = False  # whether rows are drawn by group
    origin: str  # how it was made
    splits: dict[Name, SplitInfo] = Field(default_factory=dict)


def describe_sudoku(box: list[int], **rest: Any) -> DatasetInfo:
    side = box[0] * box[1]
    vocab_size = side + FIRST_DIGIT
    return DatasetInfo(kind="sudoku", seq_len=side**2, vocab_size=vocab_size, num_identifiers=1, box=box, **rest)


class ExpectedSudoku(Config):
    """What a dataset of Sudokus will be, for plans that are made before it is there."""

    kind: Literal["sudoku"] = "sudoku"
    box: Annotated[list[PositiveInt], Field(min_length=2, max_length=2, default=[3, 3])]  # its rows and columns
    rows: PositiveInt = 1000  # training puzzles

    def info(self, split: str) -> DatasetInfo:
        return describe_sudoku(self.box, **_expected(split, self.rows))


class ExpectedPlain(Config):
    """The same for puzzles without symmetries that we know."""

    kind: Literal["plain"] = "plain"
    seq_len: PositiveInt
    vocab_size: VocabSize
    num_identifiers: PositiveInt = 1
    rows: PositiveInt = 1000

    def info(self, split: str) -> DatasetInfo:
        return DatasetInfo(**self.model_dump(exclude={"rows"}), **_expected(split, self.rows))


def _expected(split: str, rows: int) -> dict[str, Any]:
    splits = {split: SplitInfo(rows=rows, sha256="")}
    return {"sources": ["expected"], "origin": "data.expected", "splits": splits}


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


def check_new(folder: Path) -> None:
    if (folder / "dataset.json").exists():
        raise DataError(f"{folder} already holds a dataset; remove it first or choose another folder")


def write_dataset(folder: Path, info: DatasetInfo, splits: dict[str, Split]) -> DatasetInfo:
    """Write a new dataset folder. `dataset.json` comes last: without it there is no dataset."""
    check_new(folder)
    files, described = {}, {}
    for name, split in splits.items():
        check_split(info, split, f"split {name}")
        files[name] = _to_npz(split)
        described[name] = {"rows": len(split), "sha256": hashlib.sha256(files[name]).hexdigest()}
    try:
        info = DatasetInfo.model_validate(info.model_dump() | {"splits": described})
    except ValidationError:
        raise DataError(f"splits {', '.join(splits)}: expected names of letters, digits and . _ -") from None
    for name, content in files.items():
        replace_file(inside(folder, f"{name}.npz"), content)
    replace_file(folder / "dataset.json", (info.model_dump_json(indent=2) + "\n").encode())
    return info


def _to_npz(split: Split) -> bytes:
    buffer = BytesIO()
    np.savez_compressed(buffer, **{field: array for field, array in vars(split).items() if array is not None})
    return buffer.getvalue()


def read_info(folder: Path) -> DatasetInfo:
    path = folder / "dataset.json"
    try:
        return parse_info(path.read_bytes(), path)
    except FileNotFoundError:
        raise DataError(
            f"data.path: no dataset at {folder.absolute()} (no dataset.json); "
            "make one with `tinypod data sudoku` or `tinypod data import`, or set data.path=FOLDER"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def parse_info(content: bytes, where: Path | str) -> DatasetInfo:
    try:
        return DatasetInfo.model_validate_json(content)
    except ValidationError as error:
        raise DataError(f"{where}: not a dataset description: {error}") from None


def split_info(folder: Path, info: DatasetInfo, name: str) -> SplitInfo:
    if name not in info.splits:
        raise DataError(f"{folder} has no split {name!r}; it has {', '.join(info.splits)}")
    return info.splits[name]


def read_split(folder: Path, info: DatasetInfo, name: str) -> Split:
    path, sha256 = folder / f"{name}.npz", split_info(folder, info, name).sha256
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; make the dataset again") from None
    if hashlib.sha256(content).hexdigest() != sha256:
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
    limits = {"identifiers": info.num_identifiers, "sources": len(info.sources), "ratings": None}
    for field in FIELDS:
        values, limit = getattr(split, field), limits.get(field, info.vocab_size)
        shape = (len(split),) if field in limits else (len(split), info.seq_len)
        if values.shape != shape:
            raise DataError(f"{where}: {field} has shape {values.shape}, expected {shape}")
        if limit is not None and (values.min() < 0 or values.max() >= limit):
            wrong = values.min() if values.min() < 0 else values.max()
            raise DataError(f"{where}: {field} holds {wrong}, expected values from 0 to {limit - 1}")
