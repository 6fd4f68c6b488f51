"""Datasets in an object store: fetched once into this user's cache folder, each file checked against its hash."""

import hashlib
import os
from pathlib import Path
from typing import Any

from etils import epath
from filelock import FileLock, Timeout
from rich.console import Console

from tinypod.data import puzzles
from tinypod.errors import DataError, StorageError
from tinypod.runs.storage import cache_folder, explained, folder, inside, is_remote, replace_file, url_of
from tinypod.runs.terminal import counting

LOCK_PATIENCE_S = 1800.0  # while another process fetches the same dataset
CHUNK_BYTES = 1 << 20


def local_dataset(path: str, console: Console | None = None) -> Path:
    """A dataset's folder on this host: itself, or its copy if it lies in an object store."""
    return fetch_dataset(path, console) if is_remote(path) else Path(path)


def fetch_dataset(url: str, console: Console | None = None) -> Path:
    """Copy a dataset to this host, once: a file whose hash is right is not fetched again.

    Of several processes one fetches while the others wait. `dataset.json` comes last, as when a dataset is made.
    """
    url = url_of(url)
    remote, local = folder(url), cache_folder("datasets", url)
    local.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(local / ".lock").acquire(LOCK_PATIENCE_S)
    except Timeout:
        raise StorageError(
            f"{local}: another process of this host has fetched it for {LOCK_PATIENCE_S:.0f} s; does it hang?"
        ) from None
    with lock, explained(url):
        description = _read_description(remote)
        splits = puzzles.parse_info(description, f"{url}/dataset.json").splits
        hashes = {f"{name}.npz": split.sha256 for name, split in splits.items()}
        targets = {name: inside(local, name) for name in hashes}
        missing = [name for name, sha256 in hashes.items() if _sha256(targets[name]) != sha256]
        sizes = {name: _size(remote / name) for name in missing}
        total = sum(sizes.values()) >> 10
        with counting(console or Console(quiet=True), "fetching the dataset (KiB)", total) as progress:
            for name in missing:
                _fetch(remote / name, targets[name], hashes[name], progress)
        replace_file(local / "dataset.json", description)
    return local


def _read_description(remote: epath.Path) -> bytes:
    try:
        return bytes((remote / "dataset.json").read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"data.path: no dataset at {remote} (no dataset.json, or no such bucket); check the name, "
            "or copy one there that `tinypod data` made"
        ) from None


def _size(path: epath.Path) -> int:
    try:
        return int(path.stat().length)
    except FileNotFoundError:
        raise DataError(f"{path}: missing, though dataset.json names it; copy the dataset there again") from None


def _fetch(source: epath.Path, target: Path, sha256: str, progress: Any) -> None:
    partial, digest = target.with_name(target.name + ".partial"), hashlib.sha256()
    try:
        with source.open("rb") as incoming, partial.open("wb") as outgoing:
            while chunk := incoming.read(CHUNK_BYTES):
                digest.update(chunk)
                outgoing.write(chunk)
                progress(len(chunk) >> 10)
        if digest.hexdigest() != sha256:
            raise DataError(
                f"{source}: its contents are not those that dataset.json describes (damaged or replaced); "
                "copy the dataset there again"
            )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _sha256(path: Path) -> str | None:
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
