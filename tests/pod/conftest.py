"""A cloud that keeps its state in a folder, with its `gcloud` on PATH."""

import os
from pathlib import Path

import pytest
from specs import make_spec
from stand_in import Cloud, install

from tinypod.pod.gcloud import Gcloud


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = Cloud(tmp_path / "cloud")
    monkeypatch.setenv("PATH", install(made, tmp_path / "bin") + os.pathsep + os.environ["PATH"])
    yield made
    for name in (made.folder / "workers").glob("*"):
        made.destroy(name.name)


@pytest.fixture
def gcloud(cloud: Cloud) -> Gcloud:
    return Gcloud(make_spec())
