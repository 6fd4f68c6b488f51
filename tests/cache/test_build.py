"""A cache of fewer blocks, and of a teacher without its adapters."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tinypod import cli
from tinypod.cache.build import Settings, build
from tinypod.data import blocks
from tinypod.errors import UserError

QUIET = Console(file=StringIO())


def test_fewer_blocks_to_train_on_leave_those_held_out_as_they_are(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} " for number in range(500)))
    found = {}
    for limit in (None, 7, 10**6):
        settings = Settings(length=16, held_out=0.1, blocks=limit)
        manifest = build(tmp_path / str(limit), [text], "bytes", None, settings, QUIET)
        for split in manifest.splits:
            read = blocks.Blocks(tmp_path / str(limit), manifest, split)
            found[limit, split] = read.read(range(len(read)))["input_ids"]
    assert len(found[7, "train"]) == 7
    np.testing.assert_array_equal(found[7, "train"], found[None, "train"][:7])
    np.testing.assert_array_equal(found[7, "held_out"], found[None, "held_out"])
    np.testing.assert_array_equal(found[10**6, "train"], found[None, "train"])


def test_without_adapters_needs_a_teacher(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    result = CliRunner().invoke(
        cli.app, ["cache", "build", str(tmp_path / "c"), str(tmp_path / "text.txt"), "--without-adapters"]
    )
    assert isinstance(result.exception, UserError)
    with pytest.raises(UserError, match="name the run with --teacher"):
        raise result.exception
