"""Datasets as the hub has them, read from folders; and what is said without a network."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pytest
from rich.console import Console

from tinypod.cache import build
from tinypod.data import hub_text
from tinypod.data.tokens import Document
from tinypod.errors import DataError

ROWS = [{"text": " = Pods = \n"}, {"text": ""}, {"text": "tiny ones \n"}, {"text": "no newline"}]
CHAT = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}]


def write_dataset(folder: Path, rows: list[dict[str, Any]], split: str = "train") -> str:
    folder.mkdir(exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
    return f"hub:{folder}"


def texts_of(documents: Any) -> list[str]:
    return ["".join(part for part, _ in document.parts) for document in documents]


def test_rows_are_documents_or_lines(tmp_path: Path) -> None:
    name = write_dataset(tmp_path / "data", ROWS)
    write_dataset(tmp_path / "data", [{"text": "for tests"}], "test")
    assert texts_of(hub_text.read_documents(name)) == [" = Pods = \n", "tiny ones \n", "no newline"]
    assert texts_of(hub_text.read_documents(f"{name},rows=lines")) == [" = Pods = \n\ntiny ones \nno newline\n"]
    assert texts_of(hub_text.read_documents(f"{name},limit=1")) == [" = Pods = \n"]
    assert texts_of(hub_text.read_documents(f"{name},split=test")) == ["for tests"]


def test_other_fields_and_chats(tmp_path: Path) -> None:
    stories = write_dataset(tmp_path / "stories", [{"story": "once", "id": 1}])
    assert texts_of(hub_text.read_documents(stories, "story")) == ["once"]
    with pytest.raises(DataError, match=r"row 0 has story, id; expected `text`.*--field"):
        list(hub_text.read_documents(stories))
    chats = write_dataset(tmp_path / "chat", CHAT)
    with pytest.raises(DataError, match="leave out rows=lines"):
        list(hub_text.read_documents(f"{chats},rows=lines"))
    (chat,) = hub_text.read_documents(chats)
    assert isinstance(chat, Document)
    assert [part for part, scored in chat.parts if scored] == ["hello<|im_end|>"]


def test_a_cache_is_the_same_as_from_a_file(tmp_path: Path) -> None:
    rows = [{"text": f"document {number} of a few"} for number in range(20)]
    name = write_dataset(tmp_path / "data", rows)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = build.Settings(length=16, held_out=0.2)
    manifests = [
        build.build(tmp_path / folder, [text], "bytes", None, settings, Console(file=StringIO()))
        for folder, text in (("a", name), ("b", tmp_path / "rows.jsonl"))
    ]
    assert manifests[0].splits == manifests[1].splits
    assert manifests[0].origin.startswith(f"{name}, ")
    assert manifests[1].origin == f"1 file, {np.sum([manifests[1].count(s) for s in manifests[1].splits]) * 16} tokens"


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def endless(name: str, config: str | None, **options: Any) -> Any:
        asked.update(options, name=name, config=config)
        return ({"text": f"row {number}"} for number in iter(int, 1))

    monkeypatch.setattr(datasets, "load_dataset", endless)
    found = list(hub_text.read_documents("hub:org/name,config=c,split=s,revision=r,limit=3"))
    assert len(found) == 3
    assert asked == {"name": "org/name", "config": "c", "split": "s", "revision": "r", "streaming": True}


def test_without_a_network_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"cannot be read .*`hf download --repo-type dataset Salesforce/wikitext"):
        list(hub_text.read_documents("hub:Salesforce/wikitext,config=wikitext-2-raw-v1"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hub:", "name: "),
        ("hub:a/b,splits=train", "splits: "),
        ("hub:a/b,limit=many", "expected something like"),
        ("hub:a/b,limit=0", "limit: "),
        ("hub:a/b,train", "expected something like"),
        ("hub:a/b,rows=words", "rows: "),
    ],
)
def test_names_that_cannot_be_used(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        hub_text.parse(text)
