"""Object stores: `gs://` paths beside local ones, and small files written whole.

Array data goes through TensorStore, everything else through gcsfs. Both try again with growing pauses when the store
refuses or cannot be reached, for `TINYPOD_STORAGE_RETRY_S` seconds (60); after that the error is a StorageError with
the path. Listings are never cached: what TensorStore or another process wrote would be missing from them.

An emulator or another endpoint: TENSORSTORE_GCS_HTTP_URL for the one, STORAGE_EMULATOR_HOST for the other.
"""

import asyncio
import errno
import functools
import hashlib
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from etils import epath

from tinypod.errors import StorageError, UserError

SCHEME = "gs://"
MARKER = "commit_success.txt"  # in a checkpoint that is complete
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 16.0
REQUEST_TIMEOUT_S = 120.0  # one request for a small file; a store may hang as well as refuse
CONNECT_TIMEOUT_S, SILENCE_TIMEOUT_S = 20, 60  # a connection that does not come up, or stands still, is tried again
PASSING = frozenset({408, 429, 500, 502, 503, 504})  # HTTP statuses that may be over the next time
# TensorStore's words, as HTTP has them.
WORDS = {"NOT_FOUND": 404, "PERMISSION_DENIED": 403, "UNAUTHENTICATED": 401}
WORDS |= {"ABORTED": 503, "DEADLINE_EXCEEDED": 504, "UNAVAILABLE": 503}


class Unavailable(Exception):
    """A store that refused or could not be reached for as long as we ask. gcsfs does not try this one again."""


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
def translated(translate: Callable[[Exception], Exception]) -> Iterator[None]:
    """Errors that are not ours (libraries raise bare Exceptions, too) come out as what `translate` makes of them."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (ours := translate(error)) is error:
            raise
        raise ours from error


def explained(target: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Errors of a disk or a store come out as an error of ours that names the path."""
    return translated(lambda error: explain(target, error))


def explain(target: str | os.PathLike[str], error: BaseException) -> UserError:
    """What is missing or forbidden in a store is the user's to mend; anything else may work when started again."""
    if is_remote(target) and (status := status_of(error)) in (401, 403, 404):
        url = url_of(target)
        bucket = url.removeprefix(SCHEME).split("/")[0]
        if status == 404:
            return UserError(f"{url}: not found; is there a bucket {bucket}, and is the rest of the name right?")
        return UserError(
            f"{url}: the store does not allow it ({first_line(error)}). Check the name of the bucket ({bucket}), "
            "sign in with `gcloud auth application-default login`, and see that this account may read and write there"
        )
    return StorageError(f"{os.fspath(target)}: {reason(target, error)}. Nothing is lost; start again once it works")


def reason(target: str | os.PathLike[str], error: BaseException) -> str:
    """What a library's error comes down to, for a person."""
    if "No space left" in str(error):  # TensorStore and Orbax keep the words, not the number
        return "no space left on the device"
    if is_remote(target) and is_outage(error):
        return f"the object store did not answer as it should for {retry_s():.0f} s ({first_line(error)})"
    return f"not found ({first_line(error)})" if isinstance(error, FileNotFoundError) else first_line(error)


def first_line(error: BaseException) -> str:
    lines = re.split(r"See full TensorStore details| \[http_response_| \[curl_code", str(error))[0].splitlines()
    return (lines[0].strip() if lines else type(error).__name__)[:300]


def is_outage(error: BaseException) -> bool:
    """Whether a store that was unreachable or refusing is behind an error. Never so for what a local disk says."""
    for link in chain(error):
        status = _status(link)
        if status is not None:
            return status in PASSING
        of_a_client = type(link).__module__.startswith(("gcsfs.", "aiohttp.", "requests.", "google.auth."))
        too_late = isinstance(link, TimeoutError) and link.errno is None  # a file system's own has a number
        if isinstance(link, Unavailable) or of_a_client or too_late:
            return True
    return False


def status_of(error: BaseException) -> int | None:
    """The HTTP status with which a store answered, where that is behind an error."""
    return next((status for link in chain(error) if (status := _status(link)) is not None), None)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those behind it, each once: they may point at each other."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Each client has its own way to tell it."""
    module = type(error).__module__
    if module.startswith(("gcsfs.", "google.api_core.")):
        code = getattr(error, "code", None)
        return int(code) if code else None
    if module.startswith("google.auth."):  # no credentials, or expired ones, unless it could not ask
        return None if getattr(error, "retryable", False) or type(error).__name__ == "TransportError" else 401
    if isinstance(error, OSError) and error.errno is None:  # gcsfs; what comes from a disk has a number
        if isinstance(error, FileNotFoundError):
            return 404
        return 403 if str(error).startswith("Forbidden: ") else None
    if found := re.search(r"(?:\[http_response_code='|HTTP response code: )(\d{3})\b", str(error)):  # TensorStore
        return int(found[1])
    word = re.match(r"([A-Z_]+): ", str(error))  # what TensorStore says of a file has the system's number in it
    return WORDS.get(word[1]) if word and module == "builtins" and "[os_error_code=" not in str(error) else None


def may_pass(error: OSError) -> bool:
    """Whether what ails a file system may be over later: no room, or a network that is away."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT)


@functools.cache
def connect() -> None:
    """Make `gs://` work in this process, with our retries."""
    # Bucket layouts are otherwise asked for over gRPC, which neither emulators nor most permissions allow: a minute
    # is lost on each call. What it is for, renaming folders in one step, we do not rely on.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", str(CONNECT_TIMEOUT_S))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", str(SILENCE_TIMEOUT_S))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it writes a traceback of each error that it raises
    try:
        import aiohttp
        import fsspec
        import gcsfs  # noqa: F401  (what fsspec finds behind gs://)
    except ImportError as error:
        raise UserError(f"{SCHEME} paths need more packages: pip install 'tinypod[gcs]'") from error

    async def patiently(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        give_up, pause = time.monotonic() + retry_s(), FIRST_PAUSE_S
        while True:
            try:
                response = await send(request)
                if response.status not in PASSING:
                    return response
                why = f"{response.status} {response.reason}"
                response.release()
            except aiohttp.ClientError as error:
                why = first_line(error)
            if time.monotonic() + pause > give_up:
                raise Unavailable(why)
            await asyncio.sleep(pause * (0.5 + random.random()))  # apart from each other: many hosts are refused
            pause = min(2 * pause, LONGEST_PAUSE_S)

    total_s = retry_s() + REQUEST_TIMEOUT_S
    timeout = aiohttp.ClientTimeout(total_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
    settings = fsspec.config.conf.setdefault("gcs", {})
    settings |= {"use_listings_cache": False, "requests_timeout": timeout}
    settings["session_kwargs"] = {"middlewares": (patiently,)}
    if os.environ.get("STORAGE_EMULATOR_HOST"):  # as Google's own client does
        settings.setdefault("token", "anon")


def tensorstore_retries() -> dict[str, Any]:
    """The same patience for TensorStore, which counts attempts."""
    attempts, total, pause = 0, 0.0, FIRST_PAUSE_S
    while total + pause <= retry_s():
        attempts, total, pause = attempts + 1, total + pause, min(2 * pause, LONGEST_PAUSE_S)
    delays = {"initial_delay": f"{FIRST_PAUSE_S}s", "max_delay": f"{LONGEST_PAUSE_S}s"}
    return {"max_retries": max(attempts, 1), **delays}


def move(source: epath.Path, target: epath.Path) -> None:
    """Move a checkpoint. In an object store its marker goes first and comes last: a move that is cut off leaves two
    incomplete folders, never a complete one with files missing."""
    if not is_remote(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        return
    names = files_under(source)
    if is_complete := MARKER in names:
        names.remove(MARKER)
        (source / MARKER).unlink()
    _file_system().mv([f"{source}/{name}" for name in names], [f"{target}/{name}" for name in names])
    if is_complete:
        (target / MARKER).write_bytes(b"")


def files_under(path: epath.Path) -> list[str]:
    """Names, relative to a remote folder, of all files in it and below."""
    prefix = os.fspath(path).removeprefix(SCHEME) + "/"
    found = _file_system().find(os.fspath(path))
    return [name.removeprefix(prefix) for name in found if not name.endswith("/")]  # a console's "folder" ends so


def read_whole(path: epath.Path) -> bytes:
    """A small file in one request. Opened and read, it is asked for its size first, and what another host replaces in
    between comes back cut to the old size."""
    return bytes(_file_system().cat_file(os.fspath(path)))


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


def inside(folder: Path, name: str) -> Path:
    """Where a file goes whose name comes from outside (a bucket, a description): always below the folder."""
    try:
        below = folder.resolve() in (folder / name).resolve().parents  # where links lead, too
    except (OSError, RuntimeError, ValueError):  # links in a circle, a NUL
        below = False
    if not below or name.startswith("/") or ".." in name.split("/"):
        raise UserError(f"{name!r} cannot be the name of a file in {folder}: it leads out of it. Nothing was written")
    return folder / name


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
