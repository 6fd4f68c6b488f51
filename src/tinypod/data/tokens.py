"""Text as tokens: a tokenizer, documents from files, and their tokens packed into blocks of one length.

`bytes` is a tokenizer that needs no file: UTF-8 bytes, and 256 for the end of a document. Any other is the path of a
`tokenizer.json`, or of the folder that holds it.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinypod.errors import DataError

BYTES = "bytes"
_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")  # what tokenizers call the end of a document


class Document(NamedTuple):
    """Stretches of text, each scored or not."""

    parts: tuple[tuple[str, bool], ...]


class Tokenizer:
    """Text to numbers and back."""

    def __init__(self, name: str) -> None:
        self.name, self._tokenizer = name, None if name == BYTES else _load(Path(name))
        if self._tokenizer is None:
            self.vocab_size, self.end = 257, 256
        else:
            self.vocab_size, self.end = self._tokenizer.get_vocab_size(with_added_tokens=True), self._find_end()

    def encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return bytes(token for token in tokens if token < 256).decode(errors="replace")
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _find_end(self) -> int:
        assert self._tokenizer is not None
        beside = _file(Path(self.name)).with_name("tokenizer_config.json")
        named: Any = json.loads(beside.read_text()).get("eos_token") if beside.exists() else None
        named = named.get("content") if isinstance(named, dict) else named
        for token in (named, *_ENDS):
            number = self._tokenizer.token_to_id(token) if token else None
            if number is not None:
                return int(number)
        raise DataError(f"{self.name}: no token that ends a document; expected one of {', '.join(_ENDS)}")


def _file(path: Path) -> Path:
    return path / "tokenizer.json" if path.is_dir() else path


def _load(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError("tokenizers other than `bytes` need a package: pip install 'tinypod[lm]'") from None
    try:
        return tokenizers.Tokenizer.from_file(str(_file(path)))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(f"{path}: not a tokenizer ({error}); expected a tokenizer.json, or `bytes`") from None


def read_documents(path: Path, field: str = "text") -> Iterator[Document]:
    """A text file is one document. A `.jsonl` has one a line: a `text`, or `messages` of a chat."""
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error})") from None
    if path.suffix != ".jsonl":
        yield Document(((content, True),))
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                yield to_document(json.loads(line), field)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: expected a JSON object with `{field}`, or with `messages` of role and content "
                    f"({type(error).__name__}: {error})"
                ) from None


def to_document(row: dict[str, Any], field: str) -> Document:
    return _chat(row["messages"]) if "messages" in row else Document(((str(row[field]), True),))


def _chat(messages: Sequence[dict[str, str]]) -> Document:
    """Qwen's form of a chat; what the assistant says is scored, with the mark that ends it."""
    parts: list[tuple[str, bool]] = []
    for message in messages:
        answers = message["role"] == "assistant"
        parts += [
            (f"<|im_start|>{message['role']}\n", False),
            (f"{message['content']}<|im_end|>", answers),
            ("\n", False),
        ]
    return Document(tuple(parts))


class Encoded(NamedTuple):
    """Documents as tokens, one after the other: each document's end, and whether each token is scored."""

    ids: np.ndarray
    scored: np.ndarray
    ends: np.ndarray


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Encoded:
    """Each document as it comes, so that the text itself need not be kept: 5 bytes a token are."""
    ids, scored, ends = array("i"), bytearray(), array("q")
    for document in documents:
        for text, counts in document.parts:
            new = tokenizer.encode(text)
            ids.extend(new)
            scored.extend((b"\1" if counts else b"\0") * len(new))
        ids.append(tokenizer.end)
        scored.append(1)
        ends.append(len(ids))
    return Encoded(np.array(ids, np.int32), np.frombuffer(bytes(scored), np.uint8), np.array(ends, np.int64))


def pack(encoded: Encoded, order: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """Documents one after the other in an order, cut into blocks; what is left over at the end is dropped."""
    count = len(encoded.ids) // length
    if count == 0:
        raise DataError(f"the text has {len(encoded.ids)} tokens, not enough for a block of {length}")
    starts = np.concatenate([[0], encoded.ends[:-1]])

    def cut(x: np.ndarray) -> np.ndarray:
        joined = np.concatenate([x[starts[i] : encoded.ends[i]] for i in order])
        return joined[: count * length].reshape(count, length)

    blocks = {"input_ids": cut(encoded.ids)}
    return blocks if encoded.scored.all() else blocks | {"mask": cut(encoded.scored)}
