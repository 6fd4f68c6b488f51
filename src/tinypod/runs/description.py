"""What a run says about itself, in `task.json`: its headline metrics, its size, and what it knew of its data. So runs
are listed and compared without their tasks, and a trained model is used without its dataset."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tinypod.errors import UserError
from tinypod.runs.folder import Run
from tinypod.runs.headline import Metric
from tinypod.runs.storage import replace_file

if TYPE_CHECKING:
    from tinypod.experiment import Experiment

FILE = "task.json"


class Description(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer version may say more

    headline: tuple[Metric, ...] = ()  # the first one is what the run is judged by
    unit: str = "rows"
    num_weights: int | None = None
    dataset: dict[str, Any] | None = None  # Task.dataset


def write_description(run: Run, experiment: "Experiment") -> None:
    task = experiment.task
    described = Description(
        headline=task.headline,
        unit=task.unit,
        num_weights=experiment.num_weights,
        dataset=None if task.dataset is None else dict(task.dataset),
    )
    content = described.model_dump_json(indent=1).encode() + b"\n"
    path = run.folder / FILE
    if not path.exists() or path.read_bytes() != content:
        replace_file(path, content)


def read_description(run: Run) -> Description:
    """An empty one where there is none: of a run that an older version trained, or that has not begun."""
    path = run.folder / FILE
    try:
        return Description.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Description()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{path}: not what a run says about itself ({where}: {first['msg']}); remove it, and resuming the run "
            "writes it again"
        ) from None
