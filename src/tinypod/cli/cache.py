"""`tinypod cache`."""

from pathlib import Path
from typing import Annotated

import typer

from tinypod.cli.shared import cache_app, console
from tinypod.runs.terminal import say


@cache_app.command("build")
def cache_build(
    out: Annotated[Path, typer.Argument(help="The cache folder to make.")],
    texts: Annotated[
        list[str],
        typer.Argument(
            help="Text files, JSONL with a `text` or `messages` a line, or datasets of the Hugging Face hub: "
            "`hub:Salesforce/wikitext,config=wikitext-2-raw-v1,split=train,rows=lines`."
        ),
    ],
    teacher: Annotated[
        str | None, typer.Option(help="A Hugging Face folder of Qwen3, a packed one, or a run; default: no teacher.")
    ] = None,
    without_adapters: Annotated[
        bool, typer.Option("--without-adapters", help="Leave out the teacher's LoRA: what it was before, for anchors.")
    ] = False,
    tokenizer: Annotated[str, typer.Option(help="A tokenizer.json, its folder, or `bytes`.")] = "bytes",
    length: Annotated[int, typer.Option(min=2, help="Tokens in a block.")] = 1024,
    topk: Annotated[int, typer.Option(min=1, help="Logits kept of each position, the largest.")] = 128,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Temperatures to keep the normaliser of; default: 1 and 2.")
    ] = None,
    held_out: Annotated[float, typer.Option(min=0, max=0.5, help="Share of the blocks that is not trained on.")] = 0.02,
    blocks: Annotated[
        int | None,
        typer.Option(min=1, help="Blocks to train on, the first ones; default: all. The held-out ones stay."),
    ] = None,
    shard_blocks: Annotated[int, typer.Option(min=1, help="Blocks in a file.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks that the teacher sees at a time.")] = 16,
    field: Annotated[str, typer.Option(help="The key of the text in JSONL and in datasets of the hub.")] = "text",
    seed: Annotated[int, typer.Option(min=0, help="Decides the order of the documents.")] = 0,
) -> None:
    """Cut text into blocks, and keep what a teacher says of them: its largest logits, and their normaliser.

    Building again in the same folder continues where it was cut off: no block is repeated or left out.

    Example: `tinypod cache build caches/wiki wiki.train.txt --teacher Qwen3-0.6B --tokenizer Qwen3-0.6B --length 1024`
    """
    from tinypod.cache import build
    from tinypod.errors import UserError
    from tinypod.weights import language_model

    settings = build.Settings(
        length=length,
        topk=topk,
        temperatures=tuple(temperature or (1.0, 2.0)),
        held_out=held_out,
        blocks=blocks,
        shard_blocks=shard_blocks,
        batch_size=batch_size,
        field=field,
        seed=seed,
    )
    if without_adapters and teacher is None:
        raise UserError("--without-adapters is about a teacher: name the run with --teacher")
    model = None if teacher is None else language_model.load(teacher)
    if model is not None and without_adapters:
        model = language_model.without_adapters(model)
    build.build(out, texts, tokenizer, model, settings, console)


@cache_app.command("import")
def cache_import(
    source: Annotated[Path, typer.Argument(help="A folder with shard_00000.pt and so on, written by torch.save.")],
    out: Annotated[Path, typer.Argument(help="The cache folder to make.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json, its folder, or `bytes`; default: the name in meta.json.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the teacher knows; default: as meta.json says.")
    ] = None,
    held_out: Annotated[float, typer.Option(min=0, max=0.5, help="Share of the blocks that is not trained on.")] = 0.02,
) -> None:
    """Make a cache from another program's: a teacher's top-K logits in `.pt` files.

    Neither torch is needed, nor is anything run that the files ask for. Such caches have no normalisers of the logits:
    train with `task.kd=renormalised`. Importing again into the same folder continues where it was cut off.

    Example: `tinypod cache import wikitext103_L1024_K128 caches/wiki --tokenizer Qwen3-0.6B`
    """
    from tinypod.cache.torch_shards import import_cache

    import_cache(source, out, console, tokenizer, vocab_size, held_out)


@cache_app.command("inspect")
def cache_inspect(
    folder: Annotated[Path, typer.Argument(help="A cache folder.")],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every file with its hash.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """What is in a cache: blocks, tokens, teacher, and the beginning of its text."""
    from tinypod.cache.inspect import render
    from tinypod.data import blocks
    from tinypod.errors import DataError

    manifest = blocks.read_manifest(folder)
    if verify and (wrong := blocks.verify(folder, manifest)):
        raise DataError(f"{folder}: not as they were written: {', '.join(wrong)}; build the cache again")
    if as_json:
        print(manifest.model_dump_json())
        return
    console.print(render(folder, manifest))
    if verify:
        say(console, "every file is as it was written")
