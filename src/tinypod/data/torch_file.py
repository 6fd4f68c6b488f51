"""Files of `torch.save`, read without torch, and without running what a pickle asks for.

Such a file is a zip: `data.pkl` says which tensors there are, and `data/0`, `data/1`, … hold their bytes. The pickle
may name torch's storage types, its function that puts a tensor together, and OrderedDict, for each of which something
of ours stands in; whatever else it names is an error. A tensor's bytes are read only when it is asked for.
"""

import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from tinypod.errors import DataError

_TYPES = {
    "HalfStorage": "float16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
}
_LARGEST_PICKLE = 64 * 2**20  # bytes; it names tensors, and does not hold them


@dataclass(frozen=True)
class _Storage:
    entry: str
    dtype: str


@dataclass(frozen=True)
class Tensor:
    """Where the numbers of a tensor lie."""

    path: Path
    entry: str
    dtype: str
    offset: int  # in numbers, as the strides
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self) -> np.ndarray:
        """As numpy has it; bfloat16 as float32."""
        with _open(self.path) as file:
            content = _entry(file, self.path, self.entry)
        flat = np.frombuffer(content, np.dtype("<u2") if self.dtype == "bfloat16" else np.dtype(self.dtype))
        numbers = self.offset + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + 1
        if 0 not in self.shape and numbers > len(flat):
            raise DataError(f"{self.path}: a tensor of shape {self.shape} has only {len(flat)} numbers; it is cut off")
        strides = [stride * flat.itemsize for stride in self.strides]
        view = np.lib.stride_tricks.as_strided(flat[self.offset :], self.shape, strides, writeable=False)
        return (view.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bfloat16" else view


def read(path: Path) -> Any:
    """What was saved, with a `Tensor` for each tensor in it."""
    with _open(path) as file:
        found = [name for name in file.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1:
            raise DataError(f"{path}: a zip without data.pkl; expected what torch.save writes")
        folder = found[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in file.namelist() and _entry(file, path, f"{folder}byteorder") != b"little":
            raise DataError(f"{path}: written on a big-endian machine, which is not read here")
        if file.getinfo(found[0]).file_size > _LARGEST_PICKLE:
            raise DataError(f"{path}: its data.pkl is too large for tensors alone")
        content = _entry(file, path, found[0])
    try:
        return _Unpickler(content, path, folder).load()
    except DataError:
        raise
    except Exception as error:  # a bad pickle raises anything
        raise DataError(f"{path}: its data.pkl cannot be read ({type(error).__name__}: {error})") from None


def checksum(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and CRC of each part, as the zip's directory has them: nothing else is read."""
    with _open(path) as file:
        return [(part.filename, part.file_size, part.CRC) for part in file.infolist()]


def _open(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError:
        raise DataError(f"no file at {path}") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read ({error}); expected what torch.save writes, whole") from None


def _entry(file: zipfile.ZipFile, path: Path, name: str) -> bytes:
    try:
        if file.getinfo(name).compress_type != zipfile.ZIP_STORED:
            raise DataError(f"{path}: {name} is compressed, which torch.save does not do")
        return file.read(name)
    except (OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: {name} cannot be read ({error}); it is cut off or damaged") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path, folder: str) -> None:
        super().__init__(BytesIO(content))
        self.path, self.folder = path, folder

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._rebuild,
            ("collections", "OrderedDict"): lambda *items: dict(*items),
        }
        if module == "torch" and name in _TYPES:
            return name
        if (module, name) not in known:
            raise DataError(
                f"{self.path}: it asks for {module}.{name}, which no file of plain tensors needs; nothing of it was run"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage_type, key, *_ = pid
        if kind != "storage" or storage_type not in _TYPES or not str(key).isdigit():
            raise DataError(f"{self.path}: {pid!r} is not the storage of a tensor")
        return _Storage(f"{self.folder}data/{key}", _TYPES[storage_type])

    def _rebuild(self, storage: _Storage, offset: int, shape: Any, strides: Any, *_: Any) -> Tensor:
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or len(shape) != len(strides):
            raise DataError(f"{self.path}: not a tensor")
        if not all(isinstance(x, int) and x >= 0 for x in numbers):
            raise DataError(f"{self.path}: a tensor with shape {shape} and strides {strides}")
        return Tensor(self.path, storage.entry, storage.dtype, offset, tuple(shape), tuple(strides))
