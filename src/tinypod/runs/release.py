"""A release: the evaluation weights of a run in one safetensors file, with all that using them needs.

The tensors are the model's parameters by their paths (`layers.mlp.down`), in bfloat16, float32 or float16. The metadata
have one key, `tinypod_release`: JSON with the resolved config, what the run knew of its dataset, the step, the scores
there, and a SHA-256 of the tensors, so that a damaged file is not used. One key, because safetensors writes several in
any order, and the same run gives the same file. Nothing of the machine is in it: no paths, no names of W&B or a cache.

`releases/` of the package has those that come with tinypod, each known by its name. Looking at one starts no JAX.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from tinypod import config as configs
from tinypod.errors import UserError, first_message
from tinypod.runs import storage
from tinypod.runs.folder import CONFIG, Run, open_run
from tinypod.runs.headline import Metric

if TYPE_CHECKING:
    from tinypod.experiment import ExperimentConfig

RELEASES = Path(__file__).parents[1] / "releases"
SUFFIX, KEY, VERSION = ".safetensors", "tinypod_release", 1
MOST_EXAMPLES = 8
Dtype = Literal["bfloat16", "float32", "float16"]
DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}  # by safetensors' names
EXPORT = "`tinypod weights export RUN FILE --format release` writes one"


class About(BaseModel):
    """What the metadata say."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer version may say more

    version: int = VERSION
    tinypod: str  # the version that wrote it
    config: dict[str, Any]  # resolved
    dataset: dict[str, Any]  # Task.dataset
    headline: tuple[Metric, ...] = ()
    num_weights: int
    step: int
    weights: Literal["ema", "live"]
    scores: dict[str, float] = {}  # eval/... at that step, of these weights as they were trained
    examples: tuple[str, ...] = ()  # questions to show, in characters
    sha256: str = ""


@dataclass(frozen=True)
class Release:
    path: Path
    about: About

    def __str__(self) -> str:
        """As a user writes it."""
        return self.path.stem if shipped().get(self.path.stem) == self.path else str(self.path)

    def read_config(self, overrides: Sequence[str] = ()) -> "ExperimentConfig":
        from tinypod.experiment import ExperimentConfig

        where = f"{self.path}, made by tinypod {self.about.tinypod}"
        return configs.complete(self.about.config, overrides, ExperimentConfig, where)


Source = Run | Release


def shipped() -> dict[str, Path]:
    """The releases that come with tinypod, by name."""
    return {path.stem: path for path in sorted(RELEASES.glob(f"*{SUFFIX}"))}


def open_source(target: str | Path) -> Source:
    """What has trained weights: a run's folder or URL, a release's file, or the name of one that is shipped."""
    path, known = Path(target), shipped()
    if storage.is_remote(target):
        if str(target).endswith(SUFFIX):
            raise UserError(f"{storage.url_of(target)}: a release is read from a local file; copy it here first")
        return open_run(target)
    if path.is_file():
        return open_release(path)
    if (path / CONFIG).is_file() or (path.is_dir() and str(target) not in known):
        return open_run(path)  # a folder that is no run is an error there, unless a release has its name
    if str(target) in known:
        return open_release(known[str(target)])
    if path.suffix == SUFFIX:
        raise UserError(f"{target}: no such file; {EXPORT}")
    listed = f"shipped are {', '.join(known)}" if known else "none is shipped with this version"
    raise UserError(
        f"{target} is not a run folder (nothing is there), and no release of that name ({listed}); expected a run "
        f"folder, its gs:// URL, or a release file"
    )


def open_release(path: Path) -> Release:
    """Reads the metadata alone."""
    if path.suffix != SUFFIX:
        raise UserError(f"{path} is a file, and a run is a folder; a release is a file called NAME{SUFFIX}")
    with _opened(path) as file:
        text = (file.metadata() or {}).get(KEY)
    if text is None:
        raise UserError(
            f"{path}: safetensors, but not a release: its metadata have no {KEY!r}. {EXPORT}; weights of other "
            "programs are read by `tinypod weights import`"
        )
    try:
        tree = json.loads(text)
        found = tree["version"]
        if found == VERSION:
            return Release(path, About.model_validate(tree))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: its metadata are not those of a release ({_line(error)}); {_again()}") from None
    raise UserError(f"{path}: a release of version {found!r}, and this tinypod reads version {VERSION}; update tinypod")


def read_tensors(release: Release) -> dict[str, np.ndarray]:
    """By the parameter's path, as they were written."""
    with _opened(release.path) as file:
        names = sorted(file.keys())
        strange = [f"{name} is {kind}" for name in names if (kind := file.get_slice(name).get_dtype()) not in DTYPES]
        if strange:
            raise UserError(f"{release.path}: {strange[0]}, expected one of {', '.join(DTYPES)}; {_again()}")
        tensors = {name: np.asarray(file.get_tensor(name)) for name in names}
    if digest(tensors) != release.about.sha256:
        raise UserError(f"{release.path}: its weights are not as they were written (damaged or changed); {_again()}")
    return tensors


def write_release(path: Path, about: About, tensors: Mapping[str, np.ndarray]) -> int:
    """Whole or not at all; its size in bytes."""
    from safetensors.numpy import save

    about = about.model_copy(update={"sha256": digest(tensors)})
    metadata = json.dumps(about.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))
    content = save(dict(tensors), {KEY: metadata})
    storage.replace_file(path, content, durable=True)
    return len(content)


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Of names, dtypes, shapes and values, in any order."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name])
        found.update(f"{name} {value.dtype} {value.shape}\n".encode())
        found.update(value.tobytes())
    return found.hexdigest()


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a release, or cut short ({_line(error)}); {_again()}") from None


def _again() -> str:
    return f"copy or export it again ({EXPORT})"


def _line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return first_message(error)
    return str(error).splitlines()[0] if str(error) else type(error).__name__
