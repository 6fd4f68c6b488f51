"""A prompt continued on a console: one sample as it comes, several one after the other."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.console import Console

from tinypod.errors import UserError
from tinypod.generate import text
from tinypod.generate.generator import Generator, check_prompt
from tinypod.generate.sampling import Sampling
from tinypod.runs.terminal import say
from tinypod.weights.language_model import LanguageModel


class Request(NamedTuple):
    prompt: str | None = None  # None: the beginning of a held-out block of a run
    tokens: int = 64
    samples: int = 1
    seed: int = 0
    number: int = 0  # of the held-out block


def show(
    console: Console,
    source: str,
    model: LanguageModel,
    tokenizer_name: str | None,
    sampling: Sampling,
    request: Request,
) -> None:
    tokenizer = text.find_tokenizer(source, model, tokenizer_name)
    if request.prompt is None:
        prompt = text.held_out_prompt(source, model, request.number)
    else:
        prompt = tokenizer.encode(request.prompt)
    check_prompt(prompt, model.config.vocab_size)
    if sampling.temperature == 0 and (request.samples > 1 or sampling.top_k or sampling.top_p):
        raise UserError(
            "at --temperature 0 every sample is the same, the likeliest: set a --temperature to draw with --samples, "
            "--top-k or --top-p"
        )
    ends = text.end_tokens(source, tokenizer)
    steps = Generator(model, sampling, tokenizer.vocab_size)(prompt, request.tokens, request.samples, request.seed)
    if request.samples == 1:
        decoder = text.Decoder(tokenizer)
        _write(console, decoder.add(*prompt), style="dim")
        for tokens in until_ended(steps, ends):
            if int(tokens[0]) not in ends:
                _write(console, decoder.add(int(tokens[0])))
        _write(console, decoder.finish() + "\n")
        return
    for row, found in enumerate(np.stack(list(until_ended(steps, ends)), axis=1)):
        kept = itertools.takewhile(lambda token: int(token) not in ends, found)
        decoder = text.Decoder(tokenizer)
        say(console, f"sample {row + 1}:", style="bold")
        _write(console, decoder.add(*prompt), style="dim")
        _write(console, decoder.add(*map(int, kept)) + decoder.finish() + "\n")


def until_ended(steps: Iterator[np.ndarray], ends: frozenset[int]) -> Iterator[np.ndarray]:
    """Steps until every sample has met an end; the ends are among them."""
    ended: np.ndarray | bool = False
    for tokens in steps:
        yield tokens
        ended = ended | np.isin(tokens, list(ends))
        if np.all(ended):
            return


def _write(console: Console, piece: str, style: str = "") -> None:
    """As it is, and at once: rich would expand tabs and replace `:names:`."""
    if style and console.is_terminal:
        console.out(piece, style=style, end="", highlight=False)
    else:
        console.file.write(piece)
    console.file.flush()
