"""The notebook in examples/, executed top to bottom as a reader would, with fewer steps."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "first_hour.ipynb"


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.outputs or cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):  # as on a reader's machine
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    parameters = next(cell for cell in notebook.cells if "STEPS = 1200" in cell.source)
    parameters.source = parameters.source.replace("STEPS = 1200", "STEPS = 12")
    client = nbclient.NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    shown = [kind for output in outputs if "data" in output for kind in output.data]
    assert shown.count("image/png") == 2
    assert shown.count("image/svg+xml") == 1
    assert "text/html" not in shown  # nothing is shown twice
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert not [output for output in outputs if output.get("name") == "stderr"], printed  # no warnings
    assert "step 12/12" in printed
    assert "step 3/3" in printed
    assert "16 steps: " in printed
    assert "1 × cpu: fits" in code[-1].outputs[-1].data["text/plain"]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"demo", "slower"}
