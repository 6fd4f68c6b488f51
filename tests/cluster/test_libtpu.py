"""What the TPU's library says where there is no TPU: nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinypod.cluster import libtpu


def test_where_there_is_no_tpu_its_library_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "TPU_STDERR_LOG_LEVEL",
        "TPU_MIN_LOG_LEVEL",
        "TPU_SKIP_MDS_QUERY",
        "TPU_ACCELERATOR_TYPE",
        "TPU_WORKER_HOSTNAMES",
    )
    monkeypatch.setattr(libtpu, "DEV", tmp_path)
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "0").touch()
    libtpu.quieten()
    assert not any(name in os.environ for name in names), "what a real TPU says is worth reading"
    (tmp_path / "vfio" / "0").unlink()
    monkeypatch.setenv(names[0], "0")
    libtpu.quieten()
    assert [os.environ[name] for name in names] == ["0", "3", "1", "v5litepod-1", "localhost"], (
        "the user's own setting stays"
    )


@pytest.mark.parametrize(
    "first", ["from tinypod.cluster import libtpu; libtpu.quieten()", "import jax, tinypod; tinypod.load"]
)
def test_a_library_without_a_tpu_says_nothing(first: str) -> None:
    """In a command, and in a script."""
    pytest.importorskip("libtpu")
    code = f"{first}; import jax; print(jax.devices()[0].platform)"
    # Another process may hold the library's lock, and then it is not even tried.
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS" and not name.startswith("TPU_")}
    env |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert told.stdout
    assert "TPU" not in told.stderr
