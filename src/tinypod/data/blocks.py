"""Blocks of tokens, and what a teacher says of them: a folder with `manifest.json` and shards in safetensors.

A shard holds `input_ids` int32 [n, L]; where not every token is scored, `mask` uint8 [n, L]; and of a teacher
`topk_idx` int32 and `topk_logits` float16 [n, L-1, K], by falling logit, with `logz` float32 [n, L-1, temperatures],
log Σ exp(logit / T) over the whole vocabulary; caches of other programs have none. Logits are less the largest of their
position, where float16 is finest. Position p is about token p + 1. Blocks are read by their number, whichever shard
they are in; the manifest is written last.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from tinypod.config import Config
from tinypod.data.puzzles import Name
from tinypod.errors import DataError
from tinypod.runs.storage import inside, replace_file

MANIFEST = "manifest.json"


class Shard(Config):
    file: Name
    blocks: PositiveInt
    sha256: str


class Teacher(Config):
    name: str  # a run or a folder
    topk: PositiveInt
    temperatures: list[PositiveFloat]  # of the normalisers; none in caches of other programs


class Manifest(Config):
    """What `manifest.json` says."""

    format: Literal["tinypod blocks 1"] = "tinypod blocks 1"
    length: Annotated[int, Field(ge=2)]
    vocab_size: PositiveInt
    tokenizer: str  # `bytes`, or the path of a tokenizer.json
    origin: str
    masked: bool = False
    teacher: Teacher | None = None
    splits: dict[Name, list[Shard]] = Field(default_factory=dict)

    def count(self, split: str) -> int:
        return sum(shard.blocks for shard in self.splits[split])

    def shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Of one block: the shape and dtype of each array."""
        positions = self.length - 1
        found: dict[str, tuple[tuple[int, ...], Any]] = {"input_ids": ((self.length,), np.int32)}
        if self.masked:
            found["mask"] = ((self.length,), np.uint8)
        if self.teacher is not None:
            found["topk_idx"] = ((positions, self.teacher.topk), np.int32)
            found["topk_logits"] = ((positions, self.teacher.topk), np.float16)
            if self.teacher.temperatures:
                found["logz"] = ((positions, len(self.teacher.temperatures)), np.float32)
        return found

    def block_bytes(self) -> int:
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.shapes().values())


class ExpectedBlocks(Config):
    """What a folder of blocks will be, for plans that are made before it is there."""

    length: Annotated[int, Field(ge=2)]
    topk: PositiveInt | None = None  # null: without a teacher
    rows: PositiveInt = 50_000
    held_out_rows: NonNegativeInt = 500

    def manifest(self, train: str, held_out: str, vocab_size: int) -> Manifest:
        teacher = None if self.topk is None else Teacher(name="expected", topk=self.topk, temperatures=[1.0, 2.0])
        splits = {
            name: [Shard(file="expected", blocks=rows, sha256="")]
            for name, rows in ((train, self.rows), (held_out, self.held_out_rows))
            if rows
        }
        origin = "data.expected"
        return Manifest(
            length=self.length, vocab_size=vocab_size, tokenizer="bytes", origin=origin, teacher=teacher, splits=splits
        )


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"data.path: no blocks at {folder.absolute()} (no {MANIFEST}); make some with `tinypod cache build`, or "
            "set data.path=FOLDER"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise DataError(f"{path}: not the manifest of a cache: {error}") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    replace_file(folder / MANIFEST, (manifest.model_dump_json(indent=2) + "\n").encode(), durable=True)


def write_shard(folder: Path, file: str, arrays: Mapping[str, np.ndarray]) -> Shard:
    """Whole, or not at all."""
    from safetensors.numpy import save_file

    path = inside(folder, file)
    partial = path.with_name(f"{file}.{os.getpid()}.partial")
    try:
        save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, partial)
        shard = describe_shard(partial, file, len(arrays["input_ids"]))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return shard


def describe_shard(path: Path, file: str, blocks: int) -> Shard:
    with path.open("rb") as content:
        return Shard(file=file, blocks=blocks, sha256=hashlib.file_digest(content, "sha256").hexdigest())


class Blocks:
    """The blocks of one split, read by their numbers."""

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        if split not in manifest.splits:
            raise DataError(f"{folder} has no split {split!r}; it has {', '.join(manifest.splits)}")
        self.folder, self.manifest = folder, manifest
        self.shards = manifest.splits[split]
        self._ends = np.cumsum([shard.blocks for shard in self.shards])
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, numbers: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        wanted = np.asarray(numbers)
        shapes = self.manifest.shapes()
        found = {name: np.empty((len(wanted), *shape), dtype) for name, (shape, dtype) in shapes.items()}
        for place, number in enumerate(wanted):
            shard = int(np.searchsorted(self._ends, number, side="right"))
            row = int(number - (self._ends[shard] - self.shards[shard].blocks))
            for name, tensor in self._tensors(shard).items():
                found[name][place] = tensor[row : row + 1][0]
        return found

    def _tensors(self, shard: int) -> dict[str, Any]:
        if shard not in self._open:
            self._open[shard] = _open_shard(self.folder, self.shards[shard], self.manifest)
        return self._open[shard]


def _open_shard(folder: Path, shard: Shard, manifest: Manifest) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    path = inside(folder, shard.file)
    try:
        file = safe_open(path, framework="numpy")
        tensors = {name: file.get_slice(name) for name in manifest.shapes()}
        for name, (shape, _) in manifest.shapes().items():
            if tuple(tensors[name].get_shape()) != (shard.blocks, *shape):
                raise DataError(
                    f"{path}: {name} is {tensors[name].get_shape()}, expected {[shard.blocks, *shape]}; build it again"
                )
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path}: cannot be read ({error}); build the cache again") from None
    return tensors


def verify(folder: Path, manifest: Manifest) -> list[str]:
    """Shards whose contents are not those that were written."""
    wrong = []
    for shards in manifest.splits.values():
        for shard in shards:
            path = inside(folder, shard.file)
            if not path.exists() or describe_shard(path, shard.file, shard.blocks).sha256 != shard.sha256:
                wrong.append(shard.file)
    return wrong


def shuffled(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of an epoch: the same on every host."""
    return np.random.default_rng((seed, epoch)).permutation(count)
