"""Output errors against what hooks in `transformers` see, and the table that an import prints."""

from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from typer.testing import CliRunner

from tinypod import cli, sharding
from tinypod.cache import build as caches
from tinypod.errors import UserError
from tinypod.models import qwen3
from tinypod.models.qwen3 import LINEARS, Qwen3Config
from tinypod.weights import fidelity, hugging_face
from tinypod.weights.convert import convert, merge
from tinypod.weights.fidelity import Quantised
from tinypod.weights.language_model import LanguageModel
from tinypod.weights.rounding import Rounding

SHAPE = dict(vocab_size=264, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=32)
LOW = {"mlp_bits": 2, "mlp_rank": 2, "attention_bits": 4, "attention_rank": 2, "group_size": 8, "fit_rounds": 0}
IDS = np.random.default_rng(0).integers(0, 264, (3, 11)).astype(np.int32)


def on_mesh(config: Qwen3Config, params: Any, **layout: int) -> LanguageModel:
    mesh = sharding.make_mesh(sharding.MeshConfig(**(layout or {"devices": 1})))
    specs = sharding.param_specs(qwen3.sharding_rules(config), params, mesh)
    return LanguageModel("test", config, jax.device_put(params, sharding.named(mesh, specs)), mesh)


@pytest.fixture(scope="module")
def plain() -> tuple[Qwen3Config, Any]:
    config = Qwen3Config.model_validate(SHAPE | {"dtype": "float32"})
    return config, jax.jit(lambda: qwen3.init(config, jax.random.key(3)))()


@pytest.fixture(scope="module")
def low_bit(plain: tuple[Qwen3Config, Any]) -> tuple[Qwen3Config, Any]:
    config = Qwen3Config.model_validate(SHAPE | {"dtype": "float32", "low_bit": LOW})
    return config, convert(*plain, config).params


def test_nothing_is_lost_by_the_same_weights(plain: tuple[Qwen3Config, Any]) -> None:
    found = fidelity.measure(on_mesh(*plain), on_mesh(*plain), IDS)
    assert set(found.outputs) == set(LINEARS)
    assert set(found.outputs.values()) == {0.0}
    assert found.divergence == pytest.approx(0.0, abs=1e-7)
    assert found.tokens == 33


def test_errors_are_those_that_hooks_see_on_any_mesh(
    plain: tuple[Qwen3Config, Any], low_bit: tuple[Qwen3Config, Any], tmp_path: Path
) -> None:
    models = {}
    for name, model in (("source", plain), ("target", low_bit)):
        hugging_face.write_params(tmp_path / name, *merge(*model), "float32")
        models[name] = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / name).eval()
    inputs: dict[str, torch.Tensor] = {}
    for path, module in models["source"].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, x, __, path=path: inputs.__setitem__(path, x[0]))
    with torch.no_grad():
        log_p, log_q = (torch.log_softmax(m(torch.tensor(IDS)).logits.double(), -1) for m in models.values())
    expected: dict[str, list[float]] = {name: [] for name in LINEARS}
    for path, x in inputs.items():
        name = path.rpartition(".")[2].removesuffix("_proj")
        if name in expected:
            w, other = (models[which].get_submodule(path).weight.detach().double().T for which in ("source", "target"))
            expected[name].append(float((x.double() @ (w - other)).norm() / (x.double() @ w).norm()))
    divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    for layout in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
        found = fidelity.measure(on_mesh(*plain, **layout), on_mesh(*low_bit, **layout), IDS)
        assert found.outputs == pytest.approx({name: np.mean(x) for name, x in expected.items()}, rel=1e-4)
        assert found.divergence == pytest.approx(divergence, rel=1e-3)


@pytest.fixture(scope="module")
def folder(plain: tuple[Qwen3Config, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fidelity")
    hugging_face.write_params(made / "model", *plain, "float32")
    (made / "text.txt").write_text("tiny pods make tiny models. " * 60)
    settings = caches.Settings(length=16, held_out=0.2)
    caches.build(made / "cache", [made / "text.txt"], "bytes", None, settings, Console(file=StringIO()))
    return made


def run_import(folder: Path, run: str, *more: str) -> Any:
    shape = [f"model.{name}={value}" for name, value in (SHAPE | {"rope_theta": 1e6}).items()]
    data = [f"data.path={folder / 'cache'}", "mesh.devices=1"]
    arguments = [str(folder / "model"), "distill/tiny", str(folder / run), *data, *shape, *more]
    return CliRunner().invoke(cli.app, ["weights", "import", *arguments], env={"COLUMNS": "80"})


def test_an_import_says_what_it_cost(folder: Path) -> None:
    made = run_import(folder, "int4", "--round", "int4", "--group-size", "8")
    assert made.exit_code == 0, (made.output, made.exception)
    lines = made.output.splitlines()
    assert max(map(len, lines[1:])) <= 80  # the first has the run's name
    assert [line.split()[0] for line in lines if line.split()[:1] in [[name] for name in LINEARS]] == list(LINEARS)
    assert "output error" in made.output
    assert "6.00 bits per weight" in made.output
    assert "held-out tokens" in " ".join(made.output.split())
    scored = CliRunner().invoke(cli.app, ["eval", str(folder / "int4")], env={"COLUMNS": "80"})
    assert scored.exit_code == 0, (scored.output, scored.exception)
    assert "Qwen3, float32, blocks of 16 tokens" in scored.output
    refused = run_import(folder, "both", "--round", "int4", "model.low_bit=q2a2")
    assert isinstance(refused.exception, UserError)
    assert "set model.low_bit=null" in str(refused.exception)


def test_without_held_out_text_the_rest_is_said(folder: Path) -> None:
    made = run_import(folder, "no_text", "--round", "int2", "--group-size", "8", "data.eval_split=nowhere")
    assert made.exit_code == 0, (made.output, made.exception)
    shown = " ".join(made.output.split())
    assert "output errors were not measured" in shown
    assert "has no split 'nowhere'" in shown
    assert "relative error" in shown


def test_a_table_fits_a_terminal(low_bit: tuple[Qwen3Config, Any]) -> None:
    errors = dict.fromkeys(LINEARS, 0.123456)
    found = fidelity.Fidelity(dict.fromkeys(LINEARS, 0.0321), 0.5, 2048)
    for rounding in (None, Rounding("nf4", 64)):
        console = Console(file=StringIO(), width=80)
        console.print(fidelity.render(Quantised(low_bit[0], rounding, errors, found)))
        text = console.file.getvalue()
        assert max(map(len, text.splitlines())) <= 80
        assert ("4.25 bits per weight" in text) == (rounding is not None)
        assert "…" not in text


def test_rounded_weights_are_what_the_import_stores(plain: tuple[Qwen3Config, Any]) -> None:
    target = Qwen3Config.model_validate(SHAPE | {"dtype": "float32"})
    made = convert(*plain, target, rounding=Rounding("int4", 16))
    weight = made.params["layers"]["mlp"]["up"]["weight"]
    assert len(np.unique(np.asarray(weight[0, :, 0]))) <= 16
    w = plain[1]["layers"]["mlp"]["up"]["weight"]
    expected = [float(jnp.linalg.norm(w[i] - weight[i]) / jnp.linalg.norm(w[i])) for i in range(2)]
    assert made.errors["up"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert set(made.errors) == set(LINEARS)
