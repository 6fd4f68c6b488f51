"""A cache as a person sees it, and how damage is found. How caches are built is in tests/tasks/test_distill.py."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tinypod import cli
from tinypod.cache import build
from tinypod.data import blocks
from tinypod.errors import DataError


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a tiny pod. " * 40)
    (tmp_path / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'
    )
    settings = build.Settings(length=16, held_out=0.1, shard_blocks=8)
    texts = [tmp_path / "text.txt", tmp_path / "chat.jsonl"]
    build.build(tmp_path / "cache", texts, "bytes", None, settings, Console(file=StringIO()))
    return tmp_path / "cache"


def test_what_is_in_it_is_shown(cache: Path) -> None:
    manifest = blocks.read_manifest(cache)
    shown = CliRunner().invoke(cli.app, ["cache", "inspect", str(cache), "--verify"])
    assert shown.exit_code == 0, shown.output
    assert f"{manifest.count('train')} blocks" in shown.output
    assert "none: for training on labels" in shown.output
    assert "every file is as it was written" in shown.output


def test_of_a_chat_only_the_answers_count(cache: Path) -> None:
    manifest = blocks.read_manifest(cache)
    parts = [blocks.Blocks(cache, manifest, split) for split in manifest.splits]
    read = [part.read(range(len(part))) for part in parts]
    tokens, masks = ([x for part in read for x in part[name].reshape(-1)] for name in ("input_ids", "mask"))
    scored = bytes(int(token) for token, mask in zip(tokens, masks, strict=True) if mask and token < 256).decode()
    assert "hello" in scored
    assert "im_start" not in scored
    assert "user" not in scored


def test_a_file_that_was_changed_is_found_and_one_of_another_shape_refused(cache: Path) -> None:
    manifest = blocks.read_manifest(cache)
    shard = cache / manifest.splits["train"][0].file
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    assert blocks.verify(cache, manifest) == [shard.name]
    ended = CliRunner().invoke(cli.app, ["cache", "inspect", str(cache), "--verify"])
    assert isinstance(ended.exception, DataError)
    shard.write_bytes(bytes(content[:100]))
    with pytest.raises(DataError, match="cannot be read"):
        blocks.Blocks(cache, manifest, "train").read([0])
    other = manifest.model_copy(update={"length": 8})
    with pytest.raises(DataError, match="expected"):
        blocks.Blocks(cache, other, "held_out").read([0])
