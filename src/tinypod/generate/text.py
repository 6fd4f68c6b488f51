"""Text in, text out: which tokenizer, which prompt, and tokens as text while they come."""

import json
from pathlib import Path
from typing import Any

from tinypod.data import blocks
from tinypod.data.tokens import Tokenizer
from tinypod.errors import DataError, UserError
from tinypod.weights.language_model import LanguageModel

BEGINNING = 32  # tokens of a held-out block that are the prompt, or half of the block if that is less
UNFINISHED = "�"  # what an incomplete character is decoded to


def find_tokenizer(source: str, model: LanguageModel, wanted: str | None) -> Tokenizer:
    """The one asked for; else that of the model's folder, or of the data that a run was trained on."""
    if wanted is not None:
        return Tokenizer(wanted)
    if model.data is None:
        if not (Path(source) / "tokenizer.json").exists():
            raise UserError(f"{source} has no tokenizer.json; name one with --tokenizer (a file, a folder, or `bytes`)")
        return Tokenizer(source)
    try:
        return Tokenizer(blocks.read_manifest(Path(model.data.path)).tokenizer)
    except DataError as error:
        raise UserError(
            f"the tokenizer of {source} is not known: {error}; name one with --tokenizer (a file, a folder, or `bytes`)"
        ) from None


def held_out_prompt(source: str, model: LanguageModel, number: int) -> list[int]:
    """The beginning of a block that a run was not trained on."""
    if model.data is None:
        raise UserError(f"{source} is no run, so that it has no held-out text: give a prompt, or `-` to read it")
    folder = Path(model.data.path)
    held_out = blocks.Blocks(folder, blocks.read_manifest(folder), model.data.eval_split)
    if number >= len(held_out):
        raise UserError(f"--number {number}: there are {len(held_out)} held-out blocks")
    ids = held_out.read([number])["input_ids"][0]
    return ids[: min(BEGINNING, len(ids) // 2)].tolist()


def end_tokens(source: str, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokenizer's end of a document, and what else a model's folder says that it ends with."""
    path = Path(source) / "generation_config.json"
    try:
        listed: Any = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return frozenset({tokenizer.end, *(listed if isinstance(listed, list) else [] if listed is None else [listed])})


class Decoder:
    """Tokens to text, piece by piece; a character of several tokens comes when it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._tokens, self._shown = tokenizer, list[int](), 0

    def add(self, *tokens: int) -> str:
        self._tokens += tokens
        return self._more(self._tokenizer.decode(self._tokens).rstrip(UNFINISHED))

    def finish(self) -> str:
        return self._more(self._tokenizer.decode(self._tokens))

    def _more(self, text: str) -> str:
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece
