"""Object stores: `gs://` paths beside local ones, small files in them, and datasets fetched from them.

Array data goes through TensorStore, everything else through gcsfs. Both try again with growing pauses when the store
refuses or cannot be reached, for `TINYPOD_STORAGE_RETRY_S` seconds (60); after that the error is a StorageError with
the path. Listings are never cached: what TensorStore or another process wrote would be missing from them.

An emulator or another endpoint: TENSORSTORE_GCS_HTTP_URL for the one, STORAGE_EMULATOR_HOST for the other.
"""

import asyncio
import errno
import functools
import hashlib
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etils import epath

from tinypod.errors import StorageError, UserError

SCHEME = "gs://"
MARKER = "commit_success.txt"  # in a checkpoint that is complete
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 16.0
REQUEST_TIMEOUT_S = 120.0  # one request for a small file; a store may hang as well as refuse


def retry_s() -> float:
    """How long a store that refuses is asked again."""
    return float(os.environ.get("TINYPOD_STORAGE_RETRY_S", "60"))


def is_remote(target: str | os.PathLike[str]) -> bool:
    return os.fspath(target).startswith((SCHEME, "gs:/"))


def url_of(target: str | os.PathLike[str]) -> str:
    """A remote target as it should be written: pathlib makes `gs:/bucket` of `gs://bucket`."""
    rest = os.fspath(target).removeprefix("gs:").strip("/")
    if not rest:
        raise UserError(f"{os.fspath(target)}: expected gs://BUCKET/FOLDER")
    return SCHEME + rest


def folder(target: str | os.PathLike[str]) -> epath.Path:
    """A local or remote folder behind one interface."""
    if is_remote(target):
        connect()
        return epath.Path(url_of(target))
    return epath.Path(Path(target).absolute())


@contextmanager
def explained(what: object) -> Iterator[None]:
    """Errors of a disk or a store come out as a StorageError that names the path."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise StorageError(f"{what}: {reason(error)}. Nothing is lost; start again once it works") from error


def reason(error: BaseException) -> str:
    """What a library's error comes down to, for a person."""
    text = first_line(error)
    if "No space left" in str(error):
        return "no space left on the device"
    if is_outage(error):
        return f"the object store did not answer as it should for {retry_s():.0f} s ({text})"
    if isinstance(error, FileNotFoundError):
        return f"not found ({text})"
    return text


def first_line(error: BaseException) -> str:
    lines = str(error).split("See full TensorStore details")[0].splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:300]


OUTAGE = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|UNKNOWN)\b|CURL|Connection refused|Cannot connect"
    r"|(HTTP response code: |Service Unavailable|, |code=)(408|429|50[0-4])\b|Service Unavailable"
)


def is_outage(error: BaseException) -> bool:
    """Whether a store that was unreachable or refusing is behind an error."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        of_a_client = type(current).__module__.split(".")[0] in ("gcsfs", "aiohttp", "requests")
        if of_a_client or isinstance(current, TimeoutError) or OUTAGE.search(str(current)):
            return True
        current = current.__cause__ or current.__context__
    return False


def may_pass(error: OSError) -> bool:
    """Whether what ails a file system may be over later: no room, or a network that is away."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)


@functools.cache
def connect() -> None:
    """Make `gs://` work in this process, with our retries."""
    # Bucket layouts are otherwise asked for over gRPC, which neither emulators nor most permissions allow: a minute
    # is lost on each call. What it is for, renaming folders in one step, we do not rely on.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    # A transfer that stands still for a minute is tried again.
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", "20")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    try:
        import fsspec
        from gcsfs.core import GCSFileSystem
        from gcsfs.retry import is_retriable
    except ImportError as error:
        raise UserError(f"{SCHEME} paths need more packages: pip install 'tinypod[gcs]'") from error

    send_once = GCSFileSystem._request.__wrapped__  # its own retries count attempts, ours seconds

    class PatientFileSystem(GCSFileSystem):
        async def _request(self, *args: Any, **options: Any) -> Any:
            give_up, pause = time.monotonic() + retry_s(), FIRST_PAUSE_S
            while True:
                try:
                    return await send_once(self, *args, **options)
                except Exception as error:
                    if not is_retriable(error) or time.monotonic() + pause > give_up:
                        raise
                await asyncio.sleep(pause * (0.5 + random.random()))  # apart from each other: many hosts are refused
                pause = min(2 * pause, LONGEST_PAUSE_S)

    for protocol in ("gcs", "gs"):
        fsspec.register_implementation(protocol, PatientFileSystem, clobber=True)
    settings = fsspec.config.conf.setdefault("gcs", {})
    settings |= {"use_listings_cache": False, "requests_timeout": REQUEST_TIMEOUT_S}
    if os.environ.get("STORAGE_EMULATOR_HOST"):  # as Google's own client does
        settings.setdefault("token", "anon")


def tensorstore_retries() -> dict[str, Any]:
    """The same patience for TensorStore, which counts attempts."""
    attempts, total, pause = 0, 0.0, FIRST_PAUSE_S
    while total + pause <= retry_s():
        attempts, total, pause = attempts + 1, total + pause, min(2 * pause, LONGEST_PAUSE_S)
    delays = {"initial_delay": f"{FIRST_PAUSE_S}s", "max_delay": f"{LONGEST_PAUSE_S}s"}
    return {"max_retries": max(attempts, 1), **delays}


def move(source: epath.Path, target: epath.Path, marker: str) -> None:
    """Move a folder. In an object store its marker of completeness goes first and comes last: a move that is cut off
    leaves two incomplete folders, never a complete one with files missing."""
    if not is_remote(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        return
    complete = (source / marker).read_bytes() if (source / marker).exists() else None
    if complete is not None:
        (source / marker).unlink()
    names = files_under(source)
    _file_system().mv([f"{source}/{name}" for name in names], [f"{target}/{name}" for name in names])
    if complete is not None:
        (target / marker).write_bytes(complete)


def files_under(path: epath.Path) -> list[str]:
    """Names, relative to a remote folder, of all files in it and below."""
    prefix = os.fspath(path).removeprefix(SCHEME) + "/"
    found = _file_system().find(os.fspath(path))
    return [name.removeprefix(prefix) for name in found if name != prefix]  # a console's "folder" is an empty object


def _file_system() -> Any:
    import fsspec

    connect()
    return fsspec.filesystem("gcs")


def cache_root() -> Path:
    """The user's cache folder: what is there can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinypod"


def cache_folder(kind: str, url: str) -> Path:
    """Where this host keeps its copy of something remote; readable, and no two URLs share one."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "_", url.removeprefix(SCHEME))[-80:].strip("_.")
    return cache_root() / kind / f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a small local file whole: a kill leaves the old one or the new; if `durable`, so does a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, path)
