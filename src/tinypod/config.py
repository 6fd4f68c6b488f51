"""YAML files and `a.b=value` overrides, merged and validated into a frozen config.

A file may begin with `defaults: [other.yaml, ...]`, paths relative to itself. They are merged left to right, the file
itself last. Mappings merge key by key, with one exception that a reader would not guess: where `kind:` changes, the new
mapping replaces the old one, so that keys of the old kind do not linger in the new.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from tinypod.errors import ConfigError

RECIPES = Path(__file__).parent / "configs"
TOO_DEEP = "nested too deeply to be read; no config needs more than a few levels"
SHORT = {  # names that people bring from elsewhere, of keys and of values
    "lr": "learning_rate",
    "bs": "batch_size",
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "ema": "ema_decay",
    "num_steps": "steps",
    "grad_accumulation": "accumulation",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}


class Config(BaseModel):
    """The base of every section: frozen, no unknown keys, no silent conversions ('3' is not 3)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, tree: Any) -> Any:
        """`1e3` is a float to YAML; where a whole number is expected, it means 1000."""
        if not isinstance(tree, dict):
            return tree
        whole = {name for name, field in cls.model_fields.items() if _is_whole(field.annotation)}
        return {
            key: int(value) if key in whole and isinstance(value, float) and value.is_integer() else value
            for key, value in tree.items()
        }


def _is_whole(annotation: Any) -> bool:
    """int, PositiveInt | None and the like."""
    return annotation is int or any(_is_whole(argument) for argument in get_args(annotation))


C = TypeVar("C", bound=Config)


def load(path: str | Path, overrides: Sequence[str], schema: type[C]) -> C:
    """Read a config file with its defaults, apply the overrides, validate."""
    return complete(read_tree(locate(path)), overrides, schema, str(path))


def complete(tree: dict[str, Any], overrides: Sequence[str], schema: type[C], where: str) -> C:
    """The config of a plain tree and overrides; `where` names the tree in errors."""
    for text in overrides:
        tree = merge(tree, parse_override(text))
    return validate(resolve(tree, where), schema, where)


class Origin(NamedTuple):
    key: str  # dotted
    value: Any
    source: str  # the file, the command line, or the schema's default


@dataclass(frozen=True)
class _Sourced:
    """A value that remembers where it was written; equal to the same value from elsewhere, as `merge` asks of kinds."""

    value: Any
    source: str = field(compare=False)


def origins(path: str | Path, overrides: Sequence[str], schema: type[C]) -> list[Origin]:
    """Every key of the config that `load` makes of this, and where its value comes from."""
    config = load(path, overrides, schema)
    tree = read_tree(locate(path), mark=lambda tree, file: _sourced(tree, _display_name(file)))
    for text in overrides:
        tree = merge(tree, _sourced(parse_override(text), "command line"))
    return list(_origins(config.model_dump(mode="json"), tree, ""))


def _sourced(tree: Any, source: str) -> Any:
    if isinstance(tree, dict):
        return {key: _sourced(value, source) for key, value in tree.items()}
    return _Sourced(tree, source)


def _display_name(file: Path) -> str:
    return file.relative_to(RECIPES).as_posix() if file.is_relative_to(RECIPES) else file.name


def _origins(value: Any, written: Any, key: str) -> Iterator[Origin]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            inside = written.get(name) if isinstance(written, dict) else written
            yield from _origins(below, inside, f"{key}.{name}" if key else str(name))
    else:
        yield Origin(key, value, written.source if isinstance(written, _Sourced) else "default")


def resolve(tree: dict[str, Any], where: str) -> Any:
    """A tree whose `${a.b}` are replaced by what they name."""
    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        raise ConfigError(f"{where}:\n  {key}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: {TOO_DEEP}") from None


def locate(name: str | Path) -> Path:
    """A config file, or one of the package's recipes by its name: `demo`, `trm/sudoku_mlp`."""
    path, recipe = Path(name), RECIPES / f"{name}.yaml"
    if recipe.is_file() and not path.is_file():
        return recipe
    if path.exists() or path.is_absolute():
        return path
    known = recipes()
    # By the whole name, or without its folder: `sudoku_mlp` and `with` mean `trm/sudoku_mlp` and `studies/width`.
    names = {name.rpartition("/")[2]: name for name in reversed(known)} | {name: name for name in known}
    near = difflib.get_close_matches(str(name).removesuffix(".yaml"), names, n=1)
    hint = f"did you mean the recipe `{names[near[0]]}`?" if near else "`tinypod configs` lists the recipes"
    raise ConfigError(f"no config file at {path.absolute()}, and no recipe of that name; {hint}")


def recipes() -> list[str]:
    """The names of all that is shipped, but for the file that the others only build on."""
    names = (found.relative_to(RECIPES).with_suffix("").as_posix() for found in RECIPES.rglob("*.yaml"))
    return sorted(name for name in names if name != "base")


def _as_it_is(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    return tree


def read_tree(
    path: Path, chain: tuple[Path, ...] = (), mark: Callable[[dict[str, Any], Path], dict[str, Any]] = _as_it_is
) -> dict[str, Any]:
    """The plain tree of a file, its `defaults` merged underneath. `mark` changes the tree of each file before that."""
    path = path.resolve()
    if path in chain:
        raise ConfigError(f"{path}: `defaults` goes round in a circle: {' -> '.join(p.name for p in (*chain, path))}")
    tree = _read_yaml(path, chain)
    defaults = tree.pop("defaults", [])
    if not (isinstance(defaults, list) and all(isinstance(name, str) for name in defaults)):
        raise ConfigError(f"{path}: `defaults` must be a list of file names, like `defaults: [../base.yaml]`")
    merged: dict[str, Any] = {}
    for name in defaults:
        merged = merge(merged, read_tree(path.parent / name, (*chain, path), mark))
    return merge(merged, mark(tree, path))


def _read_yaml(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    asked_by = f" (named in `defaults` of {chain[-1]})" if chain else ""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise ConfigError(f"no config file at {path}{asked_by}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, not a config file{asked_by}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {_one_line(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, found a {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}


def parse_override(text: str) -> dict[str, Any]:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*=.*", text, re.DOTALL):
        raise ConfigError(f"override {text!r}: expected a.b=value, like optimizer.learning_rate=1e-4")
    try:
        return dict(OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=False))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override {text!r}: the value is not readable: {_one_line(error)}") from None
    except RecursionError:
        raise ConfigError(f"override {text[:60]!r}...: {TOO_DEEP}") from None


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Deep-merge two plain trees, the second winning; a change of `kind` replaces the whole mapping."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        same_kind = (
            isinstance(old, dict) and isinstance(value, dict) and value.get("kind", old.get("kind")) == old.get("kind")
        )
        merged[key] = merge(old, value) if same_kind else value  # type: ignore[arg-type]
    return merged


def validate(tree: Any, schema: type[C], where: str) -> C:
    """Check a plain tree against the schema; all that is wrong goes into one error, a line each."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        lines = [_describe(item, tree, schema) for item in error.errors()]
        raise ConfigError(f"{where}:\n" + "\n".join(f"  {line}" for line in dict.fromkeys(lines))) from None


def _describe(item: Any, tree: Any, schema: type[Config]) -> str:
    """One pydantic error as `dotted.key: what is wrong`."""
    path, fields = _walk(item["loc"], tree, schema)
    key, kind, context = ".".join(path), item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        value, near = item["input"], similar_keys(key, known_keys(schema, tree))
        if isinstance(value, str | float | int) and not isinstance(value, bool):
            near = [f"{other}={value}" for other in near]
        hint = f"did you mean {_either(near)}?" if near else f"known keys here: {', '.join(sorted(fields))}"
        return f"{key}: unknown key; {hint}"
    if kind == "missing":
        return f"{key}: missing; give it a value in the file or as {key}=..."
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        found = f"no kind {context['tag']!r}" if kind == "union_tag_invalid" else "needs a `kind`"
        return f"{key}: {found}; expected one of {context.get('expected_tags', '')}".rstrip(" ;")
    if kind == "value_error":
        return f"{key}: {context['error']}" if key else str(context["error"])
    if kind in ("model_type", "model_attributes_type"):
        hint = f"; did you mean {key}.kind={item['input']}?" if isinstance(item["input"], str) else ""
        return f"{key}: expected a mapping of keys, got {item['input']!r}{hint}"
    message = str(item["msg"]).removeprefix("Input should be ")
    near = _near_values(item["input"], context.get("expected", "")) if kind == "literal_error" else []
    hint = f"; did you mean {_either(near)}?" if near else ""
    return f"{key}: expected {message}, got {item['input']!r}{hint}"


def _near_values(given: Any, expected: str) -> list[str]:
    """`expected` is pydantic's list of literals, each in quotes."""
    values = re.findall(r"'([^']*)'", expected)
    meant = SHORT.get(str(given), str(given))
    return [meant] if meant in values else difflib.get_close_matches(meant, values, n=1)


def _either(names: Sequence[str]) -> str:
    return " or ".join(f"`{name}`" for name in names)


def namesakes(key: str, known: Sequence[str]) -> list[str]:
    """The known dotted keys of the same name: the one in the same section, else those nearest to the top."""
    section, _, name = key.rpartition(".")
    name = SHORT.get(name, name)
    beside = f"{section}.{name}" if section else name
    same = [other for other in known if other.rpartition(".")[2] == name]
    depth = min((other.count(".") for other in same), default=0)
    return [beside] if beside in same else [other for other in same if other.count(".") == depth][:4]


def similar_keys(key: str, known: Sequence[str]) -> list[str]:
    """The known dotted keys that someone who wrote `key` may have meant."""
    here = [other for other in known if other.rpartition(".")[0] == key.rpartition(".")[0]]
    return (
        namesakes(key, known) or difflib.get_close_matches(key, here, n=1) or difflib.get_close_matches(key, known, n=1)
    )


def known_keys(schema: type[Config], tree: Any = None, prefix: str = "") -> list[str]:
    """Every dotted key; of sections with a `kind`, those of the kind that the tree has, if it says."""
    keys = []
    for name, about in schema.model_fields.items():
        keys.append(prefix + name)
        node = tree.get(name) if isinstance(tree, dict) else None
        kind = node.get("kind") if isinstance(node, dict) else None
        classes = _config_classes(about.annotation)
        for section in [c for c in classes if kind in _kinds(c)] or classes:
            keys += known_keys(section, node, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))


def _kinds(section: type[Config]) -> tuple[Any, ...]:
    about = section.model_fields.get("kind")
    return get_args(about.annotation) if about else ()


def _walk(loc: Sequence[Any], tree: Any, schema: Any) -> tuple[list[str], list[str]]:
    """The keys a user wrote on the way to an error (union tags dropped), and the keys known where it ends."""
    path: list[str] = []
    fields: list[str] = list(schema.model_fields)
    node, classes = tree, [schema]
    for part in loc:
        if path and not isinstance(node, dict):  # a union of plain types names the one that it tried
            break
        if isinstance(node, dict) and part not in node and node.get("kind") == part:
            classes = [c for c in classes if part in get_args(c.model_fields["kind"].annotation)]
            continue
        fields = sorted({name for c in classes for name in c.model_fields})
        path.append(str(part))
        node = node.get(part) if isinstance(node, dict) else None
        annotations = [c.model_fields[part].annotation for c in classes if part in c.model_fields]
        classes = [leaf for a in annotations for leaf in _config_classes(a)]
    return path, fields


def _config_classes(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [c for argument in get_args(annotation) for c in _config_classes(argument)]


def dump(config: Config) -> str:
    """The resolved config as YAML that loads again unchanged."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """`dotted.key: old -> new` for every leaf in which two plain trees differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = dict.fromkeys([*old, *new])
        return [
            line for k in keys for line in differences(old.get(k), new.get(k), f"{prefix}.{k}" if prefix else str(k))
        ]
    return [] if old == new else [f"{prefix}: {old!r} -> {new!r}"]


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()
