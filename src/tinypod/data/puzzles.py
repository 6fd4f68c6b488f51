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
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

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
            raise DataError(f"{where}: {field} holds {values.max()}, expected values from 0 to {limit - 1}")


def import_authors_folder(folder: Path) -> tuple[DatasetInfo, dict[str, Split]]:
    """Read a folder that the TRM authors' scripts made: `<split>/dataset.json` and `<split>/all__*.npy`."""
    names = sorted(path.parent.name for path in folder.glob("*/dataset.json"))
    if not names:
        raise DataError(
            f"{folder}: no converted dataset here; expected train/dataset.json, train/all__inputs.npy and so on"
        )
    described = {name: _read_json(folder / name / "dataset.json") for name in names}
    sets = {name: _need(described[name], "sets", folder / name / "dataset.json") for name in names}
    all_sources = sorted({set_name for members in sets.values() for set_name in members})
    splits = {name: _import_split(folder / name, described[name], all_sources) for name in names}
    first = described[names[0]]
    info = DatasetInfo(
        kind="plain",
        seq_len=first["seq_len"],
        vocab_size=max(d["vocab_size"] for d in described.values()),
        num_identifiers=max(d["num_puzzle_identifiers"] for d in described.values()),
        box=None,
        sources=all_sources,
        grouped=True,
        origin=f"imported from {folder.name}",
    )
    return info, splits


def _import_split(folder: Path, described: dict[str, Any], all_sources: list[str]) -> Split:
    parts = [_import_set(folder, name, described, all_sources.index(name)) for name in described["sets"]]
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0] + [len(part) for part in parts[:-1]])
    merged = {field: np.concatenate([getattr(part, field) for part in parts]) for field in FIELDS}
    offsets = [part.group_offsets[:-1] + start for part, start in zip(parts, starts, strict=True)]  # type: ignore[index]
    weights = [part.group_weights for part in parts]
    return Split(
        **merged,
        group_offsets=np.append(np.concatenate(offsets), len(merged["inputs"])),
        group_weights=np.concatenate(weights),  # type: ignore[arg-type]
    )


def _import_set(folder: Path, name: str, described: dict[str, Any], source: int) -> Split:
    arrays = {}
    for field in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices"):
        path = folder / f"{name}__{field}.npy"
        try:
            arrays[field] = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            raise DataError(f"{path}: missing from the converted dataset") from None
        except (ValueError, EOFError, OSError) as error:
            raise DataError(f"{path}: not readable as an array: {error}") from None
    examples, puzzles, groups = (
        arrays["puzzle_indices"],
        arrays["puzzle_identifiers"],
        arrays["group_indices"],
    )
    if examples[-1] != len(arrays["inputs"]) or groups[-1] != len(puzzles) or len(examples) != len(puzzles) + 1:
        raise DataError(
            f"{folder}/{name}__*.npy do not belong together: {len(arrays['inputs'])} inputs and {len(puzzles)} "
            f"identifiers, but puzzle_indices ends at {examples[-1]} and group_indices at {groups[-1]}"
        )
    labels = arrays["labels"]
    ignored = described.get("ignore_label_id")
    if ignored is not None and ignored != 0:
        labels = np.where(labels == ignored, 0, labels)
    for field, values in (("inputs", arrays["inputs"]), ("labels", labels)):
        if values.min() < 0 or values.max() > 255:
            raise DataError(f"{folder}/{name}__{field}.npy: token {values.max()} does not fit in 0..255")
    offsets = examples[groups].astype(np.int64)
    rows = len(labels)
    return Split(
        inputs=arrays["inputs"].astype(np.uint8),
        labels=labels.astype(np.uint8),
        identifiers=np.repeat(puzzles, np.diff(examples)).astype(np.int32),
        sources=np.full(rows, source, np.uint16),
        ratings=np.zeros(rows, np.int32),
        group_offsets=offsets,
        # An epoch shows every example of one puzzle of each group: a group's share is its examples per puzzle.
        group_weights=np.diff(offsets) / np.diff(groups),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path}: {error}") from None
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: expected an object")
    for key in ("seq_len", "vocab_size", "num_puzzle_identifiers"):
        _need(loaded, key, path)
    return loaded


def _need(described: dict[str, Any], key: str, path: Path) -> Any:
    if key not in described:
        raise DataError(f"{path}: no {key!r}; is this the authors' format?")
    return described[key]
