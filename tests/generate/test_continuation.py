"""`tinypod generate` as a person meets it."""

from io import StringIO
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tinypod import cli
from tinypod.cache import build as caches
from tinypod.data import blocks
from tinypod.data.tokens import Tokenizer
from tinypod.errors import UserError
from tinypod.generate import text
from tinypod.generate.continuation import until_ended
from tinypod.generate.generator import Generator
from tinypod.models import qwen3
from tinypod.models.qwen3 import Qwen3Config
from tinypod.weights import hugging_face, language_model

runner = CliRunner()
QUIET = Console(file=StringIO())
SHAPE = dict(vocab_size=264, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=16)
EXACT = ("--dtype", "float32", "--tokenizer", "bytes", "--tokens", "5")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config.model_validate(SHAPE)
    hugging_face.write_params(folder, config, jax.jit(lambda: qwen3.init(config, jax.random.key(0)))(), "float32")
    return folder


def ok(*arguments: object, stdin: str | None = None) -> str:
    result = runner.invoke(cli.app, ["generate", *map(str, arguments)], input=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(*arguments: object, stdin: str | None = None) -> str:
    result = runner.invoke(cli.app, ["generate", *map(str, arguments)], input=stdin)
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    return str(result.exception)


def test_a_pipe_gets_the_prompt_and_what_follows_and_nothing_else(model: Path) -> None:
    prompt = "a\ttab :smile: [b]x[/b] é"
    text = ok(model, prompt, *EXACT)
    assert text.startswith(prompt)
    assert text.endswith("\n")
    assert text != prompt + "\n"
    assert ok(model, "-", *EXACT, stdin=prompt + "\n") == text
    drawn = ok(model, prompt, *EXACT, "--temperature", 1, "--samples", 2)
    assert drawn.startswith(f"sample 1:\n{prompt}")
    assert f"sample 2:\n{prompt}" in drawn


def test_what_cannot_be_continued_is_said(model: Path, tmp_path: Path) -> None:
    assert "has no tokenizer.json; name one with --tokenizer" in refused(model, "hello")
    assert "the prompt is empty" in refused(model, "", "--tokenizer", "bytes")
    assert "give a prompt" in refused(model, "--tokenizer", "bytes")
    assert "every sample is the same" in refused(model, "a", "--tokenizer", "bytes", "--samples", 2)
    assert "expected a language model" in refused(tmp_path, "hello")
    assert "mesh" in refused(model, "hello", "--tokenizer", "bytes", "--mesh", "{tensor: 3}")
    assert "unknown key" in refused(model, "hello", "--tokenizer", "bytes", "--mesh", "{tnesor: 3}")


@pytest.mark.slow
def test_a_run_continues_its_held_out_text_by_its_own_tokenizer(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("tiny pods make tiny models. " * 60)
    settings = caches.Settings(length=16, held_out=0.2)
    caches.build(tmp_path / "cache", [tmp_path / "text.txt"], "bytes", None, settings, QUIET)
    run, data = tmp_path / "run", f"data.path={tmp_path / 'cache'}"
    shape = [f"model.{name}={value}" for name, value in (SHAPE | {"rope_theta": 1e6}).items()]
    more = [data, "mesh.devices=1", *shape]
    made = runner.invoke(cli.app, ["weights", "import", str(model), "distill/tiny", str(run), *more])
    assert made.exit_code == 0, (made.output, made.exception)
    held_out = blocks.Blocks(tmp_path / "cache", blocks.read_manifest(tmp_path / "cache"), "held_out")
    beginning = bytes(held_out.read([2])["input_ids"][0, :8].tolist()).decode()
    text = ok(run, "--number", 2, "--tokens", 3)
    assert text.startswith(beginning)
    assert "held-out blocks" in refused(run, "--number", len(held_out))
    assert ok(run, beginning, "--tokens", 3) == text
    assert ok(run, beginning, "--tokens", 3, "--mesh", "{devices: 8, data: -1, tensor: 2}") == text


def test_an_end_stops_each_sample() -> None:
    steps = [np.array(x) for x in ([5, 6], [9, 5], [5, 5], [4, 8], [1, 1])]
    assert len(list(until_ended(iter(steps), frozenset({9, 8})))) == 4
    assert len(list(until_ended(iter(steps), frozenset({9})))) == 5
    assert len(list(until_ended((x[:1] for x in steps), frozenset({9})))) == 2


def test_the_end_is_not_shown_and_nothing_comes_after_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer("bytes")
    prompt = tokenizer.encode("abc")
    generator = Generator(language_model.load(str(model), "dtype=float32"), known_tokens=tokenizer.vocab_size)
    found = [int(tokens[0]) for tokens in generator(prompt, 5)]
    assert ok(model, "abc", *EXACT) == tokenizer.decode(prompt + found) + "\n"
    monkeypatch.setattr(text, "end_tokens", lambda *_: frozenset({found[3]}))
    kept = found[: found.index(found[3])]
    assert ok(model, "abc", *EXACT) == tokenizer.decode(prompt + kept) + "\n"


def test_characters_of_several_tokens_come_whole() -> None:
    decoder = text.Decoder(Tokenizer("bytes"))
    pieces = [decoder.add(token) for token in "é–x".encode()]
    assert pieces == ["", "é", "", "", "–", "x"]
    assert decoder.add("–".encode()[0]) + decoder.finish() == text.UNFINISHED
    assert decoder.finish() == ""


def test_a_folder_may_name_more_ends(tmp_path: Path) -> None:
    for written, expected in (
        ('{"eos_token_id": [7, 8]}', {256, 7, 8}),
        ('{"eos_token_id": 9}', {256, 9}),
        ("{}", {256}),
    ):
        (tmp_path / "generation_config.json").write_text(written)
        assert text.end_tokens(str(tmp_path), Tokenizer("bytes")) == expected
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        text.end_tokens(str(tmp_path), Tokenizer("bytes"))
