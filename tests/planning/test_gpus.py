"""Plans for GPUs: their names, what is predicted of them, and programs compiled for cards that are not there."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fake_compiler import install, kernel, work
from fixtures import CONFIGS
from tinypod import cli
from tinypod.config import load
from tinypod.errors import ConfigError, UserError
from tinypod.experiment import ExperimentConfig
from tinypod.planning import compiler, gpus, hardware, planner, search, slices, tables
from tinypod.planning.analysis import Analysis
from tinypod.planning.calibration import calibration
from tinypod.planning.gpus import Cards
from tinypod.planning.hardware import find_hardware
from tinypod.planning.hlo.groups import Axes, Span
from tinypod.planning.hlo.program import Collective
from tinypod.planning.interconnect import seconds
from tinypod.planning.prices import Prices, read_prices

QUIET = Console(quiet=True)
MB = 10**6
needs_plugin = pytest.mark.skipif(compiler.cuda_version() is None, reason="needs JAX's CUDA plugin (extra `cuda`)")


def cards(name: str) -> Cards:
    found = find_hardware(name)
    assert isinstance(found, Cards)
    return found


def sudoku(*overrides: str) -> ExperimentConfig:
    return load(CONFIGS / "trm" / "sudoku_mlp.yaml", ["data.path=nowhere", *overrides], ExperimentConfig)


@pytest.mark.parametrize(
    ("name", "kind", "count", "hosts"),
    [
        ("h100", "h100", 1, 1),
        ("H100-8", "h100", 8, 1),
        ("8xh100", "h100", 8, 1),
        ("h100x8", "h100", 8, 1),
        ("h200-16", "h200", 16, 2),
        ("a100-40g", "a100-40g", 1, 1),
        ("a100-40g-8", "a100-40g", 8, 1),
        ("a100-80g", "a100", 1, 1),
        ("4090", "4090", 1, 1),
        ("4090-2", "4090", 2, 1),
        ("2xrtx4090", "4090", 2, 1),
        ("NVIDIA GeForce RTX 4090", "4090", 1, 1),
    ],
)
def test_gpus_have_the_names_that_people_write(name: str, kind: str, count: int, hosts: int) -> None:
    found = cards(name)
    assert (found.generation.name, found.devices, found.chips, found.hosts) == (kind, count, count, hosts)
    assert cards(found.name) == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100-3", "h100-3: no such number of GPUs; h100 comes as h100-1, h100-2, h100-4, h100-8, h100-16"),
        ("4090-16", "comes as 4090-1, 4090-2, 4090-4, 4090-8$"),
        ("h300", "did you mean h[12]00"),
        ("hopper", "TPUs: v4, .*; GPUs: h100, h200, a100, a100-40g, 4090"),
        ("v4-33", "v4 comes as v4-8"),
    ],
)
def test_hardware_that_does_not_exist(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_hardware(name)


def test_a_pod_of_gpus_is_refused() -> None:
    with pytest.raises(UserError, match="h100-8 is a GPU; pods are TPU slices"):
        slices.find_slice("h100-8")


def test_the_command_shows_gpus_and_corrects_wrong_beliefs() -> None:
    shown = CliRunner().invoke(cli.app, ["slices", "4090"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert all(f"4090-{size}" in shown.stdout for size in (1, 2, 4, 8))
    assert "v4" not in shown.stdout
    everything = json.loads(CliRunner().invoke(cli.app, ["slices", "--json"]).stdout)
    assert {one["slice"] for one in everything} == {one.name for one in hardware.find_all(None)}
    wrong = CliRunner().invoke(cli.app, ["slices", "h100-16", "--hosts", "16"])
    assert "h100-16 does not have 16 hosts: it has 16 cards on 2 hosts" in str(wrong.exception)


def test_a_run_has_the_share_of_a_card_that_jax_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    card = gpus.CARDS["h200"]
    monkeypatch.delenv(gpus.SHARE_SETTING, raising=False)
    assert card.usable_bytes == 0.75 * card.memory_bytes
    monkeypatch.setenv(gpus.SHARE_SETTING, ".9")
    assert card.usable_bytes == 0.9 * card.memory_bytes
    monkeypatch.setenv(gpus.SHARE_SETTING, "90")
    with pytest.raises(UserError, match=r"MEM_FRACTION=90: expected"):
        _ = card.usable_bytes


def test_a_kernel_takes_more_than_is_sold_and_less_than_is_reached_without_overlap() -> None:
    known = calibration().gpus
    card, share = gpus.CARDS["h200"], known.toward_reached["products"]
    product = kernel(runs=10, flops=9.89e12, hbm_bytes=4.8e9, kind="products")  # 10 ms at the peak, and 1 for its bytes
    copied = kernel(runs=2, hbm_bytes=4.8e9)
    made = planner.predict_for(work([product, copied]), cards("h200"))
    apart = 9.89e12 / card.chip.reached_bf16 + 4.8e9 / card.reached_bandwidth + known.launch_s
    passed = 4.8e9 / card.reached_bandwidth + known.launch_s
    assert made.least_s == pytest.approx(10 * 10e-3 + 2e-3)
    assert made.most_s == pytest.approx(10 * apart + 2 * passed)
    expected = 10 * 10e-3 ** (1 - share) * apart**share + 2 * passed
    assert made.step_s == pytest.approx(expected)
    assert made.least_s < made.step_s < made.most_s
    halved = planner.predict_for(work([product]), cards("h200"), "float32")  # as TF32
    assert halved.least_s == pytest.approx(10 * 20e-3)


def test_of_a_program_for_cpus_only_the_products_are_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = install(monkeypatch, tmp_path)
    product = kernel(flops=9.89e11, kind="products")  # 1 ms

    def on_cpu(config, target, **settings) -> Analysis:
        made = fake(config, target, **settings)
        return made.model_copy(update={"stand_in": "no plugin", "work": work([product, kernel(hbm_bytes=30e9)])})

    monkeypatch.setattr(compiler, "compile_for", on_cpu)
    plan = planner.Planner(sudoku(), read_prices(None), QUIET).plan(cards("h200"))
    found = plan.prediction
    assert found is not None
    assert found.least_s == pytest.approx(1e-3)
    assert found.most_s > 10e-3
    assert found.step_s == found.on_chip_s == pytest.approx(math.sqrt(found.least_s * found.most_s))
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert any(note.startswith("compiled for the CPU at hand, not for the GPU. no plugin") for note in plan.notes)
    again = planner.Planner(sudoku(), read_prices(None), QUIET).plan(cards("h200"))
    assert again.cached
    assert again.notes == plan.notes
    too_large = search.plan_slice(planner.Planner(sudoku(), read_prices(None), QUIET), cards("4090"))
    assert not too_large.fits
    assert too_large.proposal is None  # what would fit is not searched for by the CPU's memory
    assert "by the CPU's compiler; what the GPU's needs is not known" in tables.too_large(too_large, searched=True)


def test_prices_of_gpus_are_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path)
    unknown = planner.Planner(sudoku("batch_size=64"), read_prices(None), QUIET)
    assert unknown.plan(cards("h100-8")).dollars is None
    assert not any("h100" in entry.slice for entry in search.rank(unknown, None, search.Budget(hours=1e6)).entries)
    table = Prices(date="2026-11-18", source="mine", on_demand={"h100": 2.0})
    known = planner.Planner(sudoku("batch_size=64"), table, QUIET)
    plan = known.plan(cards("h100-8"))
    assert plan.hours is not None
    assert plan.dollars == pytest.approx(plan.hours * 8 * 2.0)
    ranked = search.rank(known, None, search.Budget(dollars=1e9)).entries
    assert {entry.slice.rpartition("-")[0] for entry in ranked} == {"h100"}
    with pytest.raises(ValueError, match=r"no TPU generation or GPU b900; expected v4, .*, 4090"):
        Prices(date="2026-11-18", source="mine", on_demand={"b900": 2.0})


def test_a_card_whose_name_is_a_number_has_a_price(tmp_path: Path) -> None:
    table = tmp_path / "prices.yaml"
    table.write_text("{date: 2026-11-18, source: mine, on_demand: {h100: 2.5, 4090: 0.4}, spot: {4090: 0.3}}")
    prices = read_prices(table)
    assert prices.on_demand == {"h100": 2.5, "4090": 0.4}
    assert prices.spot_price("4090") == 0.3


def test_the_command_plans_for_gpus_and_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path)
    asked = ["plan", "trm/sudoku_mlp", "data.path=nowhere", "--slice", "8xh100", "--slice", "v4-8"]
    shown = " ".join(CliRunner().invoke(cli.app, asked, env={"COLUMNS": "80"}).stdout.split())
    assert "Step times: each kernel" in shown
    assert "Step times on GPUs" in shown
    assert "No price is known for h100" in shown
    assert "h100-8: compiled by XLA's GPU compiler, without a card" in shown
    assert "v4-8: compiled by" not in shown


def test_a_batch_that_does_not_divide_is_refused_before_compiling() -> None:
    with pytest.raises(ConfigError, match="on h100-16, batch_size / accumulation = 40 rows do not divide over 16"):
        planner.check(sudoku("batch_size=40"), cards("h100-16"))


def took(op: str, name: str, span: Span, payload: int = 360 * MB) -> float:
    found = seconds(Collective(op, span, 1, payload, ()), cards(name), calibration())
    assert found is not None
    return found


def test_the_cards_of_a_host_exchange_over_their_links_and_hosts_over_the_network() -> None:
    link, network = 0.8 * 450e9, 0.8 * 50e9
    hop, far_hop = 2e-6, 10e-6
    inside = 360e6 * 7 / 8 / link + 7 * hop
    assert took("all-gather", "h100-8", Span(("data",), 8, (8, 1))) == pytest.approx(inside)
    assert took("all-reduce", "h100-8", Span(("data",), 8, (8, 1))) == pytest.approx(2 * inside)
    between = 360e6 / 8 / 2 / network + far_hop  # each card has an eighth of the sum
    assert took("all-reduce", "h100-16", Span(("data",), 16, (8, 2))) == pytest.approx(2 * (inside + between))
    everywhere = 15 / 16 * 360e6 / network + 15 * far_hop
    assert took("all-gather", "h100-16", Span(("?",), 16)) == pytest.approx(everywhere)
    assert took("all-to-all", "h100-16", Span(("data",), 2, (1, 2))) == pytest.approx(180e6 / network + far_hop)
    assert took("all-reduce", "4090-2", Span(("data",), 2, (2, 1))) > 20 * took(
        "all-reduce", "h100-2", Span(("data",), 2, (2, 1))
    )
    assert took("all-reduce", "h100", Span((), 1)) == 0


def test_a_permutation_is_as_slow_as_its_furthest_card() -> None:
    target = cards("h100-16")
    axes = Axes({"pipeline": 16}, target.places)

    def along(*pairs: tuple[int, int]) -> Span:
        return axes.spanned(
            "collective-permute", f"source_target_pairs={{{','.join(f'{{{a},{b}}}' for a, b in pairs)}}}"
        )

    assert took("collective-permute", "h100-16", along((0, 1), (1, 2))) == pytest.approx(360e6 / 360e9 + 2e-6)
    assert took("collective-permute", "h100-16", along((0, 1), (7, 8))) == pytest.approx(360e6 / 40e9 + 10e-6)


TINY = (
    *("model.H_cycles=1", "model.L_cycles=1", "model.num_layers=1", "model.unroll=false", "model.hidden_size=64"),
    *("model.puzzle_embedding.width=64", "batch_size=16", "mesh.fsdp=2"),
)


@pytest.fixture
def _as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION", "NPROC"):  # the suite's own settings
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("_as_users_run_it")
@pytest.mark.skipif(compiler.cuda_version() is not None, reason="JAX's CUDA plugin is installed")
def test_without_the_gpus_compiler_the_cpus_stands_in() -> None:
    found = compiler.compile_for(sudoku(*TINY), cards("h100-16"))
    check_program(found)
    assert found.stand_in is not None
    assert "pip install 'tinypod[cuda]'" in found.stand_in


@pytest.mark.usefixtures("_as_users_run_it")
@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize("name", ["h100-16", "a100-16"])
def test_the_gpus_compiler_needs_no_gpu(name: str) -> None:
    found = compiler.compile_for(sudoku(*TINY), cards(name))
    assert found.stand_in is None
    check_program(found)


@pytest.mark.usefixtures("_as_users_run_it")
@needs_plugin
@pytest.mark.slow
def test_kernels_of_ours_are_in_the_program_of_a_hopper_and_say_what_they_multiply() -> None:
    width = ("model.hidden_size=128", "model.puzzle_embedding.width=128", "batch_size=768", "mesh.fsdp=1")
    found = compiler.compile_for(sudoku(*TINY, *width), cards("h200"))
    assert found.stand_in is None
    assert found.work is not None
    assert found.work.opaque_calls == ()
    assert sum(one.flops for one in found.work.kernels if one.kind == "calls") > 0


def check_program(found: Analysis) -> None:
    assert found.work is not None
    assert found.mesh == {"data": 8, "pipeline": 1, "fsdp": 2, "tensor": 1}
    assert found.coordinates[8] == (0, 1)
    assert 0 < found.memory.needed < 2**30
    assert found.work.flops > 0
    over = {one.axes for one in found.work.exchanges()}
    assert over
    assert ("?",) not in over
    assert found.work.unwanted == ()
    across = [one.span.chips for one in found.work.collectives if one.axes == ("data",)]
    assert (4, 2) in across  # every second card of both hosts
