"""Text of the Hugging Face hub, named as `hub:NAME,key=value,…`: `hub:Salesforce/wikitext,config=wikitext-2-raw-v1`.

Keys: `config`, `split` (train), `revision`, `limit` (the first rows only), and `rows=lines` where a row is a line of
one long text and not a document of its own. Rows are streamed: what is not used is not downloaded. The name may be a
folder with files that the `datasets` library reads (Parquet, CSV, JSON), which needs no network.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError

from tinypod.config import Config
from tinypod.data.tokens import Document, to_document
from tinypod.errors import DataError

PREFIX = "hub:"
_EXAMPLE = "hub:Salesforce/wikitext,config=wikitext-2-raw-v1,split=train"


class HubText(Config):
    name: Annotated[str, Field(min_length=1)]
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    limit: PositiveInt | None = None
    rows: Literal["documents", "lines"] = "documents"


def is_hub(text: str) -> bool:
    return text.startswith(PREFIX)


def parse(text: str) -> HubText:
    name, *options = text.removeprefix(PREFIX).split(",")
    try:
        keys: dict[str, Any] = dict(option.split("=", 1) for option in options)
        if "limit" in keys:
            keys["limit"] = int(keys["limit"])
        return HubText.model_validate(keys | {"name": name})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise DataError(f"{text}: {wrong}; expected something like {_EXAMPLE}") from None
    except ValueError:
        raise DataError(f"{text}: expected something like {_EXAMPLE}") from None


def read_documents(text: str, field: str = "text") -> Iterator[Document]:
    """Rows have the text under `field`, or the `messages` of a chat. Empty ones are left out."""
    wanted = parse(text)
    rows = islice(_rows(text, wanted), wanted.limit)
    if wanted.rows == "lines":
        lines = [_line(text, number, row, field) for number, row in enumerate(rows)]
        yield Document((("".join(lines), True),))
        return
    for number, row in enumerate(rows):
        document = _document(text, number, row, field)
        if any(part.strip() for part, _ in document.parts):
            yield document


def _line(text: str, number: int, row: dict[str, Any], field: str) -> str:
    if "messages" in row:
        raise DataError(f"{text}: row {number} is a chat, not a line of a text; leave out rows=lines")
    line = _document(text, number, row, field).parts[0][0]
    return line if line.endswith("\n") else f"{line}\n"


def _document(text: str, number: int, row: dict[str, Any], field: str) -> Document:
    try:
        return to_document(row, field)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{text}: row {number} has {', '.join(row)}; expected `{field}`, or `messages` of role and content "
            f"({type(error).__name__}: {error}); choose the key with --field"
        ) from None


def _rows(text: str, wanted: HubText) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise DataError(f"{text} needs a package: pip install 'tinypod[hub]'") from None
    # A folder must look like one, or the library takes its name for one of the hub.
    name = str(Path(wanted.name).absolute()) if Path(wanted.name).is_dir() else wanted.name
    try:
        yield from datasets.load_dataset(
            name, wanted.config, split=wanted.split, revision=wanted.revision, streaming=True
        )
    except Exception as error:  # the library and those below it share no base class
        raise DataError(
            f"{text}: cannot be read ({type(error).__name__}: {error}). Without a network: download the dataset where "
            f"there is one (`hf download --repo-type dataset {wanted.name} --local-dir FOLDER`), and give "
            "hub:FOLDER, or text and JSONL files"
        ) from None
