"""What workers need, and only what has changed of it: each file is known by the hash of its content.

Sent are the package as it is here, the resolved config or study, the modules and configs of `code:` folders, and the
versions of all packages that are installed here. Nothing else: no hidden files, no data, no credentials.
"""

import hashlib
import importlib.metadata
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tinypod
from tinypod.errors import UserError

EXTRAS = ("gcs", "tpu")  # of this package, on a worker
SUFFIXES = (".py", ".yaml", ".yml")
REQUIREMENTS, WORKER, MANIFEST = "requirements.txt", "worker.py", "manifest.json"
# What markers in requirements are asked for: the workers' system, not this one's.
_WORKERS = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}


def files_to_ship(asked_for: Mapping[str, str], code: list[str]) -> dict[str, bytes]:
    """By their names on a worker."""
    package = Path(tinypod.__file__).parent
    files = {f"tinypod/{name}": content for name, content in _read_folder(package).items()}
    for folder in map(Path, code):
        if not folder.is_dir():
            raise UserError(f"code: there is no folder {folder.absolute()}")
        for name, content in _read_folder(folder).items():
            if files.setdefault(name, content) != content:
                raise UserError(f"code: two folders have a {name}, and they differ")
    described = {name: text.encode() for name, text in asked_for.items()}
    return {**files, **described, REQUIREMENTS: locked_requirements().encode()}


def _read_folder(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in name.parts)
        if path.suffix in SUFFIXES and path.is_file() and not hidden:
            found[name.as_posix()] = path.read_bytes()
    return found


def manifest_of(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}


def changed(manifest: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    """What a worker lacks, or has otherwise; its other files are removed there."""
    return [name for name, digest in manifest.items() if there.get(name) != digest]


def archive(files: Mapping[str, bytes], names: list[str]) -> bytes:
    """A .tar.gz with these files, the manifest of all, and the program that runs on the workers."""
    manifest = json.dumps(manifest_of(files)).encode()
    worker = Path(__file__).with_name("worker.py").read_bytes()
    content = {f"code/{name}": files[name] for name in names} | {f"code/{MANIFEST}": manifest, WORKER: worker}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
        for name, data in sorted(content.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def locked_requirements() -> str:
    """Every package that training on a TPU needs, in the version that is installed here.

    One that is not installed (libtpu, on a laptop without the planner) is left to what its parent asks for.
    """
    lines: dict[str, str] = {}
    waiting = [("tinypod", extra) for extra in ("", *EXTRAS)]
    seen = set(waiting)
    while waiting:
        name, extra = waiting.pop()
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is not None and not marker.evaluate({**_WORKERS, "extra": extra}):
                continue
            child = canonicalize_name(requirement.name)
            try:
                version = importlib.metadata.version(child)
            except importlib.metadata.PackageNotFoundError:
                lines.setdefault(child, f"{child}{requirement.specifier}")
                continue
            lines[child] = f"{child}=={version}"
            for more in ("", *sorted(requirement.extras)):
                if (child, more) not in seen:
                    seen.add((child, more))
                    waiting.append((child, more))
    lines.pop("tinypod", None)
    return "\n".join(sorted(lines.values())) + "\n"
