"""Files of `torch.save`, compared with what torch itself reads, and files that want more than to be read."""

import os
import pickle
import zipfile
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinypod.data import torch_file
from tinypod.errors import DataError

DTYPES = ("float16", "float32", "float64", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64")


def test_tensors_are_those_that_torch_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    grid = torch.randn(6, 8) * 50
    saved = {name: (grid > 0 if name == "bool" else grid.to(getattr(torch, name))) for name in DTYPES}
    saved |= {"transposed": grid.T, "a part": grid[2:5, ::3], "empty": torch.zeros(0, 3), "one": torch.tensor(7)}
    torch.save(OrderedDict(inner=saved, count=3), tmp_path / "x.pt")
    found = torch_file.read(tmp_path / "x.pt")
    assert found["count"] == 3
    for name, expected in saved.items():
        array = found["inner"][name].read()
        np.testing.assert_array_equal(array, (expected.float() if name == "bfloat16" else expected).numpy())
        assert array.dtype == (np.float32 if name == "bfloat16" else expected.numpy().dtype), name


class Payload:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, "touch {trap}"), "system"),
        ((eval, "open('{trap}', 'w')"), "builtin.*eval"),
        ((getattr, OrderedDict, "clear"), "getattr"),
        ((Path.touch, Path("{trap}")), "touch|getattr|pathlib"),
    ],
)
def test_a_file_that_asks_for_more_is_refused_and_nothing_is_run(tmp_path: Path, call: Any, name: str) -> None:
    trap = tmp_path / "trap"
    call = tuple(x.format(trap=trap) if isinstance(x, str) else trap if isinstance(x, Path) else x for x in call)
    torch.save({"ids": torch.zeros(2), "x": Payload(*call)}, tmp_path / "x.pt")
    with pytest.raises(DataError, match=f"it asks for .*({name})"):
        torch_file.read(tmp_path / "x.pt")
    assert not trap.exists()


def with_pickle(path: Path, content: bytes, compress: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compress) as file:
        file.writestr("x/data.pkl", content)
        file.writestr("x/data/0", bytes(16))
    return path


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", 4) if obj is Pickler else None


def with_tensor(path: Path, *numbers: Any) -> Path:
    """A tensor of 4 numbers whose offset, shape and strides torch would not write."""
    out = BytesIO()
    Pickler(out, 2).dump(Payload(torch._utils._rebuild_tensor_v2, Pickler, *numbers, False, OrderedDict()))
    return with_pickle(path, out.getvalue())


def test_a_tensor_never_reaches_beyond_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    assert torch_file.read(with_tensor(path, 0, (2, 2), (2, 1))).read().shape == (2, 2)
    for numbers in ((0, (3, 2), (2, 1)), (1, (2, 2), (2, 1)), (0, (2,), (2**40,)), (0, (2**40,), (1,))):
        with pytest.raises(DataError, match="cut off"):
            torch_file.read(with_tensor(path, *numbers)).read()
    for numbers in ((-1, (2,), (1,)), (0, (2,), (-1,)), (0, (2,), (1, 1)), (0, (2.5,), (1,))):
        with pytest.raises(DataError, match="tensor"):
            torch_file.read(with_tensor(path, *numbers))


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with pytest.raises(DataError, match="no file at"):
        torch_file.read(path)
    torch.save({"a": torch.arange(1000)}, path)
    whole = path.read_bytes()
    for cut in (10, 1000, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"expected what torch\.save writes, whole"):
            torch_file.read(path)
    middle = whole.index(torch.arange(1000).numpy().tobytes()) + 100
    path.write_bytes(whole[:middle] + b"x" + whole[middle + 1 :])
    with pytest.raises(DataError, match="damaged"):
        torch_file.read(path)["a"].read()
    torch.save({"a": torch.arange(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(DataError, match=r"expected what torch\.save writes"):
        torch_file.read(path)
    for content, message in ((b"garbage", "cannot be read"), (pickle.dumps(OrderedDict(a=1))[:-3], "cannot be read")):
        with pytest.raises(DataError, match=message):
            torch_file.read(with_pickle(path, content))
    with pytest.raises(DataError, match="is compressed"):
        torch_file.read(with_pickle(path, pickle.dumps({}), zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("other", b"")
    with pytest.raises(DataError, match=r"without data\.pkl"):
        torch_file.read(path)
