"""Text as tokens: a tokenizer, documents from files, and their tokens packed into blocks of one length.

`bytes` is a tokenizer that needs no file: UTF-8 bytes, and 256 for the end of a document. Any other is the path of a
`tokenizer.json`, or of the folder that holds it.
"""

import json
from collections.abc import Iterator, Sequence
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
                row = json.loads(line)
                yield _chat(row["messages"]) if "messages" in row else Document(((str(row[field]), True),))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}:{number}: expected a JSON object with `{field}`, or with `messages` of role and content "
                    f"({type(error).__name__}: {error})"
                ) from None


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


def pack(documents: Iterator[Document], tokenizer: Tokenizer, length: int) -> dict[str, np.ndarray]:
    """Documents one after the other, each with its end, cut into blocks; what is left over at the end is dropped."""
    tokens: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for document in documents:
        for text, scored in document.parts:
            ids = np.asarray(tokenizer.encode(text), np.int32)
            tokens.append(ids)
            masks.append(np.full(len(ids), scored, np.uint8))
        tokens.append(np.asarray([tokenizer.end], np.int32))
        masks.append(np.ones(1, np.uint8))
    joined = np.concatenate(tokens or [np.zeros(0, np.int32)])
    mask = np.concatenate(masks or [np.zeros(0, np.uint8)])
    count = len(joined) // length
    if count == 0:
        raise DataError(f"the text has {len(joined)} tokens, not enough for a block of {length}")
    blocks = {"input_ids": joined[: count * length].reshape(count, length)}
    return blocks if mask.all() else blocks | {"mask": mask[: count * length].reshape(count, length)}
