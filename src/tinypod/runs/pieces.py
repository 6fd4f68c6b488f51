"""A run in pieces, for a way to another machine that takes small files only: `pack` makes them, `unpack` joins them.

The folder is flat: `step_20.tar.000`, `step_20.tar.001`, ..., and `manifest.json` with the size and the SHA-256 of
each. Joined in the order of their names they are a plain tar of a run folder, with one checkpoint and the small files
that a run reads when it resumes (`Run.small_files`). What is cut are the bytes of the tar, not the arrays: to Orbax the
size of a data file is a target and not a limit, and its files lie several folders deep.

Nothing half written is believed: a piece gets its name when it is whole, the manifest is written last, and an unpacked
run gets its name when everything is in it. Whatever of this is left by a kill, the next `pack` or `unpack` removes.
"""

import functools
import hashlib
import math
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from rich.console import Console

from tinypod import __version__
from tinypod.errors import CheckpointError, DamagedError, StorageError, UserError, first_message
from tinypod.runs import storage
from tinypod.runs.folder import CHECKPOINTS, CONFIG, Run
from tinypod.runs.listing import read as read_run
from tinypod.runs.retention import Retention
from tinypod.runs.status import checkpoint_steps
from tinypod.runs.terminal import counting, say, size

MANIFEST = "manifest.json"
UNPACKING = ".unpacking"  # how the name of a run ends that is no run yet; it begins with a dot, and lists pass over it
PIECE = "16MiB"
SMALLEST_BYTES, LARGEST_BYTES = 1 << 10, 1 << 30  # one piece at a time is held in memory
CHUNK_BYTES = 1 << 20
COPY = ".smaller_checkpoint."  # in the folder of the pieces, while they are written
_BLOCK = tarfile.BLOCKSIZE
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_OF_A_PACK = re.compile(r"step_\d+\.tar\.\d+(\.\d+\.partial)?|manifest\.json\.\d+\.partial")
_SHOWN = 8  # pieces that an error lists


class Piece(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_.]+$")
    size_bytes: NonNegativeInt
    sha256: str


class Manifest(BaseModel):
    """What lies in a folder of pieces."""

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    tinypod: str = __version__
    run: str  # the name of its folder
    step: int
    pieces: tuple[Piece, ...] = Field(min_length=1)

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


class Member(NamedTuple):
    """A file of the run."""

    name: str
    size_bytes: int
    read: Callable[[], Iterator[bytes]]


def parse_size(text: str) -> int:
    """`16MiB`, `500 KB`, `16777216`, in bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise UserError(f"--piece {text}: expected a size such as 16MiB, 500KB or a number of bytes")
    size_bytes = int(float(found[1]) * _UNITS[found[2].upper()])
    if not SMALLEST_BYTES <= size_bytes <= LARGEST_BYTES:
        raise UserError(f"--piece {text}: expected {size(SMALLEST_BYTES)} to {size(LARGEST_BYTES)}")
    return size_bytes


def pack(
    run: Run,
    out: Path,
    console: Console,
    *,
    checkpoint: str = "latest",
    piece: str = PIECE,
    without_carry: bool = False,
) -> Manifest:
    """Write a run with one of its checkpoints (`latest`, `best` or a step) as pieces of at most so many bytes."""
    piece_bytes = parse_size(piece)
    if storage.is_remote(out):
        raise UserError(f"{out}: pieces are written to a local folder; name one")
    run.pull()
    if not (run.folder / CONFIG).is_file():
        raise UserError(f"{run} is not a run folder: it has no {CONFIG}")
    if out.resolve().is_relative_to(run.folder.resolve()):
        raise UserError(f"{out} is inside the run folder, and would be packed with it; choose a folder outside {run}")
    step = _pick_step(run, checkpoint)
    with storage.explained(out):
        _make_ready(out)
    with _checkpoints(run, step, out, without_carry=without_carry) as checkpoints:
        members = [*_checkpoint_files(checkpoints, step), *_small_files(run)]
        return _pack(run, step, members, out, piece_bytes, console)


def _pack(run: Run, step: int, members: Sequence[Member], out: Path, piece_bytes: int, console: Console) -> Manifest:
    total = sum(_tar_bytes(member) for member in members) + 2 * _BLOCK
    count = math.ceil(total / piece_bytes)
    say(console, f"{run}: step {step:,}, {size(total)} in {count:,} pieces of up to {size(piece_bytes)}, to {out}")
    digits = max(3, len(str(count - 1)))
    names = [f"step_{step}.tar.{number:0{digits}d}" for number in range(count)]
    try:
        with storage.explained(out), counting(console, "packing (KiB)", total >> 10) as progress:
            pieces = list(_write_pieces(out, names, _cut(_tar(members), piece_bytes), progress))
            name = Path(run.remote or run.folder.absolute()).name
            manifest = Manifest(run=name, step=step, pieces=tuple(pieces))
            storage.replace_file(out / MANIFEST, manifest.model_dump_json(indent=1).encode() + b"\n", durable=True)
    except BaseException:
        (out / MANIFEST).unlink(missing_ok=True)
        _remove_pieces(out)
        raise
    return manifest


def unpack(pieces: Path, target: Path, console: Console) -> Manifest:
    """Put a packed run together again as a run folder that does not exist yet. Every piece is compared with the
    manifest first; as long as one is missing or damaged nothing is written, and the error says which."""
    if storage.is_remote(target):
        raise UserError(f"{target}: a run is unpacked into a local folder; name one")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise UserError(f"{target} exists already; choose another folder, or move it away first")
    manifest = read_manifest(pieces)
    with counting(console, "checking the pieces (KiB)", manifest.size_bytes >> 10) as progress:
        _check_pieces(pieces, manifest, progress)
    target = target.absolute()
    unfinished = target.with_name(f".{target.name}{UNPACKING}")
    with storage.explained(target):
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            _extract(pieces, manifest, unfinished)
            os.rename(unfinished, target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    return manifest


def read_manifest(pieces: Path) -> Manifest:
    path = pieces / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: not there; give the folder with the pieces. `tinypod runs pack` writes it last: without it "
            "either packing was cut off, or it has not been copied yet"
        ) from None
    except ValidationError as error:
        raise DamagedError(f"{path}: not a manifest of a packed run ({first_message(error)}); copy it again") from None


def _pick_step(run: Run, wanted: str) -> int:
    steps = checkpoint_steps(run.checkpoints)
    if not steps:
        raise CheckpointError(f"{run}: no checkpoint yet; train it first")
    if wanted == "latest":
        return steps[-1]
    if wanted == "best":
        return _best_step(run, steps) or steps[-1]
    if wanted.isdecimal() and int(wanted) in steps:
        return int(wanted)
    raise CheckpointError(f"--checkpoint {wanted}: expected `best`, `latest` or a step, one of {steps}")


def _best_step(run: Run, steps: Sequence[int]) -> int | None:
    """As `Experiment.best` says, by the stored files alone: no JAX is needed to copy a run."""
    found = read_run(run)
    settings = found.config.get("checkpoint", {}).get("best", {})
    if settings is None or found.metric is None:
        return None
    name = settings.get("metric") or f"eval/{found.metric.name}"
    metric = next((metric for metric in found.description.headline if name == f"eval/{metric.name}"), found.metric)
    scores = {int(record["step"]): record[name] for record in found.records if name in record}
    mode = settings.get("mode") or metric.direction
    best = Retention(None, None, scores.get, mode, lambda _, work: work()).best(steps)
    return best[0] if best else None


@contextmanager
def _checkpoints(run: Run, step: int, out: Path, *, without_carry: bool) -> Iterator[Path | str]:
    """The folder to take the checkpoint from: the run's own, or one with a copy that has no carry."""
    if not without_carry:
        yield run.checkpoints
        return
    from tinypod.runs.checkpoints import Checkpoints  # which waits for JAX

    with storage.explained(out):
        smaller = Path(tempfile.mkdtemp(prefix=COPY, dir=out))
    try:
        Checkpoints(run.checkpoints, read_only=True).copy_without_carry(step, smaller)
        yield smaller
    finally:
        shutil.rmtree(smaller, ignore_errors=True)


def _checkpoint_files(checkpoints: Path | str, step: int) -> list[Member]:
    """They never change; but a run that trains may remove them."""
    folder = storage.folder(checkpoints) / str(step)

    def gone(error: Exception) -> Exception:
        if isinstance(error, FileNotFoundError):
            return StorageError(
                f"{folder}: the run removed this checkpoint meanwhile; start again, and a newer one is taken"
            )
        return storage.explain(folder, error)

    def reader(path: Any) -> Callable[[], Iterator[bytes]]:
        def read() -> Iterator[bytes]:
            with storage.translated(gone), path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk

        return read

    with storage.translated(gone):
        if storage.is_remote(folder):
            names = storage.files_under(folder)
        else:
            local = Path(folder)
            names = [path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()]
        if not names:
            raise FileNotFoundError(folder)
        return [
            Member(f"{CHECKPOINTS}/{step}/{name}", int((folder / name).stat().length), reader(folder / name))
            for name in sorted(names)
        ]


def _small_files(run: Run) -> Iterator[Member]:
    """As they are now: a run that trains writes on."""
    for name in run.small_files():
        with suppress(FileNotFoundError):  # removed or replaced since it was listed
            content = (run.folder / name).read_bytes()
            yield Member(name, len(content), functools.partial(iter, [content]))


def _header(member: Member) -> bytes:
    info = tarfile.TarInfo(member.name)
    info.size = member.size_bytes
    return info.tobuf(tarfile.PAX_FORMAT)


def _tar_bytes(member: Member) -> int:
    return len(_header(member)) + -(-member.size_bytes // _BLOCK) * _BLOCK


def _tar(members: Sequence[Member]) -> Iterator[bytes]:
    """Its size is known before anything is read, unlike that of tarfile's own."""
    for member in members:
        yield _header(member)
        length = 0
        for chunk in member.read():
            length += len(chunk)
            yield chunk
        if length != member.size_bytes:
            raise StorageError(
                f"{member.name} changed while it was read, from {member.size_bytes:,} to {length:,} bytes"
            )
        yield bytes(-length % _BLOCK)
    yield bytes(2 * _BLOCK)


def _cut(chunks: Iterator[bytes], piece_bytes: int) -> Iterator[bytes]:
    waiting = bytearray()
    for chunk in chunks:
        waiting += chunk
        while len(waiting) >= piece_bytes:
            yield bytes(waiting[:piece_bytes])
            del waiting[:piece_bytes]
    if waiting:
        yield bytes(waiting)


def _write_pieces(
    out: Path, names: Sequence[str], contents: Iterator[bytes], progress: Callable[[int], None]
) -> Iterator[Piece]:
    for name, content in zip(names, contents, strict=True):
        storage.replace_file(out / name, content, durable=True)
        progress(len(content) >> 10)
        yield Piece(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _make_ready(out: Path) -> None:
    """An empty folder; what a pack that was cut off left there goes."""
    if out.is_file():
        raise UserError(f"{out} is a file; give the folder for the pieces")
    out.mkdir(parents=True, exist_ok=True)
    if (out / MANIFEST).exists():
        raise UserError(f"{out} holds a packed run already; choose another folder, or remove that one")
    if others := sorted(path.name for path in out.iterdir() if not _is_of_a_pack(path)):
        raise UserError(f"{out} is not empty ({others[0]}): choose a new folder, so that only the pieces are in it")
    _remove_pieces(out)


def _is_of_a_pack(path: Path) -> bool:
    return path.name.startswith(COPY) or _OF_A_PACK.fullmatch(path.name) is not None


def _remove_pieces(out: Path) -> None:
    for path in filter(_is_of_a_pack, out.iterdir() if out.is_dir() else ()):
        if path.name.startswith(COPY):
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _check_pieces(folder: Path, manifest: Manifest, progress: Callable[[int], None]) -> None:
    holds = {piece.sha256: piece.name for piece in manifest.pieces}
    wrong, damaged = [], False
    for piece in manifest.pieces:
        path = folder / piece.name
        if not path.is_file():
            wrong.append(f"{piece.name}: missing")
            continue
        with storage.explained(path), path.open("rb") as file:
            length, sha256 = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        progress(length >> 10)
        if sha256 == piece.sha256:
            continue
        damaged = True
        if other := holds.get(sha256):
            wrong.append(f"{piece.name}: it is {other} under another name")
        elif length != piece.size_bytes:
            wrong.append(f"{piece.name}: {length:,} bytes where {piece.size_bytes:,} were written")
        else:
            wrong.append(f"{piece.name}: damaged, its SHA-256 is not that of what was written")
    if wrong:
        shown = "\n  ".join(wrong[:_SHOWN] + ([f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []))
        raise (DamagedError if damaged else CheckpointError)(
            f"{folder}: {len(wrong)} of {len(manifest.pieces)} pieces cannot be used:\n  {shown}\n"
            "Nothing was written. Copy these again, and run the same command"
        )


class _Joined:
    """The pieces as one file to read from, once."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._waiting = list(paths)
        self._file: BinaryIO | None = None

    def read(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count > 0 and (self._file is not None or self._waiting):
            if self._file is None:
                self._file = self._waiting.pop(0).open("rb")
            if part := self._file.read(count):
                parts.append(part)
                count -= len(part)
            else:
                self.close()
        return b"".join(parts)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _extract(folder: Path, manifest: Manifest, target: Path) -> None:
    target.mkdir(parents=True)
    sizes: dict[Path, int] = {}
    joined: Any = _Joined([folder / piece.name for piece in manifest.pieces])
    try:
        with tarfile.open(fileobj=joined, mode="r|") as tar:
            for member in tar:
                source, path = tar.extractfile(member), storage.inside(target, member.name)
                if source is None:
                    raise DamagedError(
                        f"{folder}: {member.name} is not a file; this was not made by `tinypod runs pack`"
                    )
                path.parent.mkdir(parents=True, exist_ok=True)
                with source, path.open("xb") as file:
                    shutil.copyfileobj(source, file, CHUNK_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                sizes[path] = member.size
    except tarfile.TarError as error:
        raise DamagedError(f"{folder}: the pieces are no tar ({error}); pack the run again") from None
    finally:
        joined.close()
    # Of two that unpack into one folder, either may have removed what the other had written.
    if lost := [path for path, length in sizes.items() if not path.is_file() or path.stat().st_size != length]:
        raise StorageError(f"{lost[0]}: gone while the run was unpacked; is another `tinypod runs unpack` under way?")
    if not (target / CONFIG).is_file() or manifest.step not in checkpoint_steps(target / CHECKPOINTS):
        raise DamagedError(f"{folder}: the pieces hold no run with a checkpoint; pack the run again")
