"""Plans from analyses: what they predict and cost, what they are cached by, what is refused before compiling."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh
from typer.testing import CliRunner

from fake_compiler import install, kernel, work
from fixtures import CONFIGS, write_4x4
from tinypod import cli
from tinypod.config import load
from tinypod.errors import ConfigError, UserError
from tinypod.experiment import ExperimentConfig, describe_task
from tinypod.planning import cache, interconnect, search, slices
from tinypod.planning import compiler as tpu_compiler
from tinypod.planning import planner as plan
from tinypod.planning.calibration import calibration
from tinypod.planning.hlo.groups import Span
from tinypod.planning.hlo.program import Collective
from tinypod.planning.prices import read_prices
from tinypod.sharding import AXES

SUDOKU = CONFIGS / "trm" / "sudoku_mlp.yaml"
V4_8, V4_64 = slices.find_slice("v4-8"), slices.find_slice("v4-64")


def sudoku(*overrides: str) -> ExperimentConfig:
    return load(SUDOKU, ["data.path=nowhere", "batch_size=6144", *overrides], ExperimentConfig)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    return lambda **settings: install(monkeypatch, tmp_path / "cache", **settings)


def planner(config: ExperimentConfig, *, grant: bool = False, **settings) -> plan.Planner:
    from rich.console import Console

    return plan.Planner(config, read_prices(None, grant=grant), Console(quiet=True), **settings)


def fit(made: plan.Planner, target: slices.Slice) -> plan.Plan | None:
    return search.find_fit(made.config, made.plan(target), lambda overrides: made.plan(target, overrides))


def test_a_kernel_takes_more_than_its_roofline_and_less_than_the_compiler_says() -> None:
    chip, between = V4_8.generation, calibration().toward_cycles
    product = kernel(runs=3, flops=1.1e12, cycles=16_800_000, kind="products")  # 4 ms at peak speed, 16 by cycles
    copied = kernel(hbm_bytes=1.2e9, cycles=4_200_000)  # 1 ms at full bandwidth, 4 by cycles
    unknown = kernel(runs=2, hbm_bytes=1.2e9, kind="reductions")
    too_good = kernel(hbm_bytes=2.4e9, cycles=1)
    made = plan.predict_for(work([product, copied, unknown, too_good]), V4_8)
    times = {"products": 3 * 4e-3 * 4 ** between["products"], "reductions": 2e-3}
    times["element-wise"] = 1e-3 * 4 ** between["element-wise"] + 2e-3
    assert made.step_s == made.on_chip_s == pytest.approx(sum(times.values()))
    assert made.shares == pytest.approx({kind: seconds / made.step_s for kind, seconds in times.items()})
    assert made.least_s == pytest.approx(3 * 4e-3 + 1e-3 + 2e-3 + 2e-3)
    assert made.most_s == pytest.approx(3 * 16e-3 + 4e-3 + 2e-3 + 2e-3)
    assert made.compute_s == pytest.approx(3.3e12 / chip.peak_bf16)
    assert made.hbm_s == pytest.approx(6e9 / chip.hbm_bandwidth)
    assert made.estimated_share == pytest.approx(1 - 2e-3 / made.step_s)
    assert made.interconnect_s == 0


def test_what_is_fetched_ahead_costs_nothing_as_long_as_the_kernels_last() -> None:
    kernels = [kernel(flops=2.75e12, kind="products"), kernel(hbm_bytes=6e9, ahead=True)]  # 10 and 5 ms
    assert plan.predict_for(work(kernels), V4_8).step_s == pytest.approx(10e-3)
    kernels += [kernel(runs=2, hbm_bytes=6e9, ahead=True)]
    assert plan.predict_for(work(kernels), V4_8).step_s == pytest.approx(15e-3)


def test_the_exchange_between_chips_is_added_but_for_what_kernels_hide() -> None:
    one = Collective("all-gather", Span(("fsdp",), 4, (4, 1, 1)), 2, payload_bytes=70 * 10**6, shapes=())
    took = interconnect.seconds(one, V4_64, calibration())
    assert took is not None
    kernels = [kernel(runs=2, flops=2.75e11, kind="products") for _ in range(3)]  # 2 ms each
    step = plan.predict_for(work(kernels, (one,)), V4_64)
    assert step.interconnect_s == pytest.approx(2 * took)
    assert (step.step_s, step.hidden_s) == (pytest.approx(6e-3 + 2 * took), 0)
    assert step.shares["interconnect"] == pytest.approx(2 * took / step.step_s)
    assert 2e-3 < 2 * took < 4e-3
    beside_one, beside_two = (replace(one, during=(0, count)) for count in (1, 2))
    assert plan.predict_for(work(kernels, (beside_one,)), V4_64).step_s == pytest.approx(4e-3 + 2 * took)
    hidden = plan.predict_for(work(kernels, (beside_two,)), V4_64)
    assert (hidden.step_s, hidden.hidden_s) == (pytest.approx(6e-3), pytest.approx(2 * took))
    assert hidden.least_s == pytest.approx(6e-3)
    assert hidden.most_s == pytest.approx(6e-3 + 2 * took)
    dark = replace(V4_64, generation=replace(V4_64.generation, ici_link=None))
    assert plan.predict_for(work(kernels, (one,)), dark).interconnect_s is None


def test_collectives_that_share_links_share_the_kernels_that_hide_them() -> None:
    """Three at a time over one axis last as long as they do one after the other; those over another axis, and a
    permutation the other way, have links of their own."""
    one = Collective("all-gather", Span(("fsdp",), 4, (4, 1, 1)), 1, 200 * 10**6, (), during=(0, 1))
    took = interconnect.seconds(one, V4_64, calibration())
    assert took is not None
    kernels = [kernel(flops=1.375e12, kind="products")]  # 5 ms, and an all-gather takes almost as long
    assert 4e-3 < took < 6e-3
    three = plan.predict_for(work(kernels, (one,) * 3), V4_64)
    assert three.hidden_s == pytest.approx(min(3 * took, 5e-3))
    assert three.step_s == pytest.approx(max(5e-3, 3 * took))
    assert three.least_s <= three.step_s <= three.most_s
    other = replace(one, span=Span(("data",), 4, (1, 4, 1)))
    both = plan.predict_for(work(kernels, (one, other)), V4_64)
    assert both.hidden_s == pytest.approx(2 * min(took, 5e-3))
    assert both.least_s <= both.step_s
    there = Collective("collective-permute", Span(("fsdp",), 4), 1, 100 * 10**6, (), during=(0, 1))
    back = replace(there, span=there.span._replace(backward=True))
    apart, same = (plan.predict_for(work(kernels, pair), V4_64) for pair in ((there, back), (there, there)))
    assert apart.step_s == pytest.approx(5e-3)
    assert same.step_s > 6e-3


def test_a_plan_says_hours_and_dollars(compiler) -> None:
    compiler()
    made = planner(sudoku("steps=36000", "eval.limit=null")).plan(V4_64)
    assert made.prediction is not None
    step_s = made.prediction.step_s
    assert made.rows_per_device == 192
    assert made.train_hours == pytest.approx(10 * step_s)
    assert made.eval_hours is None  # how many are held out is not known
    assert any("evaluation is left out" in note for note in made.notes)
    assert made.dollars == pytest.approx(10 * step_s * 32 * 3.22)
    assert made.dollars_spot == pytest.approx(0.29 * made.dollars)
    assert made.hours == made.train_hours
    free = planner(sudoku(), grant=True).plan(V4_64)
    assert free.dollars == free.dollars_spot == 0
    evaluated = planner(sudoku("steps=36000", "eval.limit=6144", "eval.every_steps=3600")).plan(V4_64)
    # 10 times, 16 forward passes over 6 144 puzzles; one is 3 cycles of the 5 that a training step has
    assert evaluated.eval_hours == pytest.approx(10 * 16 * 3 / 5 * step_s / 3600, rel=1e-3)


def test_asking_again_compiles_nothing(compiler) -> None:
    fake = compiler()
    first = planner(sudoku()).plan(V4_64)
    again = planner(sudoku("optimizer.learning_rate=3e-4", "seed=5", "steps=10", "log.every_steps=7")).plan(V4_64)
    assert (first.cached, again.cached) == (False, True)
    assert len(fake.asked) == 1
    assert again.analysis == first.analysis
    for other in (
        "batch_size=3072",
        "model.hidden_size=256",
        "accumulation=2",
        "mesh.fsdp=2",
        "ema_decay=null eval.weights=live",
    ):
        assert not planner(sudoku(*other.split())).plan(V4_64).cached, other
    assert not planner(sudoku("data.expected={kind: sudoku, rows: 2000}")).plan(V4_64).cached
    assert not planner(sudoku()).plan(V4_8).cached
    assert not planner(sudoku(), fresh=True).plan(V4_64).cached
    compiler(row_mib=41.0)  # another version of the compiler
    assert not planner(sudoku()).plan(V4_64).cached


def test_what_is_not_what_was_written_is_not_believed(compiler) -> None:
    compiler()
    planner(sudoku()).plan(V4_64)
    (entry,) = cache.folder().iterdir()
    entry.write_bytes(entry.read_bytes().replace(b'"flops":', b'"flops":1', 1))
    assert not planner(sudoku()).plan(V4_64).cached
    assert planner(sudoku()).plan(V4_64).cached


def test_a_cache_that_cannot_be_written_loses_nothing(compiler, tmp_path: Path, monkeypatch) -> None:
    compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert planner(sudoku()).plan(V4_64).fits


def test_what_the_environment_changes_is_part_of_the_key(compiler, monkeypatch) -> None:
    compiler()
    planner(sudoku()).plan(V4_64)
    monkeypatch.setenv("JAX_LOGGING_LEVEL", "INFO")
    assert planner(sudoku()).plan(V4_64).cached
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    assert not planner(sudoku()).plan(V4_64).cached


def test_a_schedule_without_a_warm_up_has_a_key(compiler, monkeypatch) -> None:
    compiler()
    original = ExperimentConfig.model_dump

    def without_warm_up(self, **settings):
        tree = original(self, **settings)
        del tree["optimizer"]["schedule"]["warmup_steps"]
        return tree

    keys = {cache_key(sudoku(f"optimizer.schedule.warmup_steps={steps}")) for steps in (0, 7)}
    monkeypatch.setattr(ExperimentConfig, "model_dump", without_warm_up)
    assert keys == {cache_key(sudoku())}


def cache_key(config: ExperimentConfig) -> str:
    return cache.cache_key(config, describe_task(config), V4_64)


def test_a_damaged_cache_is_made_again(compiler) -> None:
    fake = compiler()
    planner(sudoku()).plan(V4_64)
    [path] = cache.folder().glob("*.json")
    path.write_bytes(path.read_bytes()[:100])
    assert not planner(sudoku()).plan(V4_64).cached
    assert len(fake.asked) == 2


@pytest.mark.parametrize(
    ("overrides", "target", "message"),
    [
        (["mesh.fsdp=3"], "v4-64", r"v4-64: mesh: .* fsdp=3 .* does not divide the 32 devices there are"),
        (
            ["mesh.data=32"],
            "v4-32",
            r"v4-32: mesh: .* makes 32 devices, .* counts TensorCores; it has 16 chips on 4 hosts",
        ),
        (["batch_size=16"], "v4-64", r"the batch is too small for v4-64: .* = 16 rows .* 32 devices"),
        (["batch_size=6145"], "v4-64", r"on v4-64, .*6145 rows do not divide .* multiple of 32"),
        (["batch_size=64", "accumulation=4"], "v4-64", r"too small for v4-64: batch_size / accumulation = 16 rows"),
    ],
)
def test_what_cannot_be_is_refused_before_compiling(compiler, overrides, target, message) -> None:
    fake = compiler()
    with pytest.raises(ConfigError, match=message):
        planner(sudoku(*overrides)).plan(slices.find_slice(target))
    assert not fake.asked


def test_a_batch_that_is_too_large_is_cut(compiler) -> None:
    """60 GiB of activations on a v4-8: two parts are 30 and leave no room for the state, three do; so does remat, which
    is slower."""
    fake = compiler(split_gib=1.0)
    made = planner(sudoku())
    assert not made.plan(V4_8).fits
    found = fit(made, V4_8)
    assert found is not None
    assert found.fits
    assert found.overrides == ("accumulation=3",)
    assert found.rows_per_device == 512
    assert fake.asked == [("v4-8", 1, 1, False), ("v4-8", 3, 1, False), ("v4-8", 1, 1, True)]
    assert made.plan(V4_8, found.overrides).cached


def test_a_state_that_is_too_large_is_split(compiler) -> None:
    fake = compiler(split_gib=100.0, row_mib=10.0)
    made = planner(sudoku())
    target = slices.find_slice("v4-16")
    found = fit(made, target)
    assert found is not None
    assert "mesh.fsdp=4" in found.overrides
    assert found.analysis.mesh == {"data": 2, "pipeline": 1, "fsdp": 4, "tensor": 1}
    assert all(fsdp in (1, 4) for _, _, fsdp, _ in fake.asked)  # half of 100 GiB cannot fit either: not even tried
    assert fake.asked[0][2] == 1


def test_where_nothing_fits_none_is_proposed(compiler) -> None:
    compiler(split_gib=1000.0)
    made = planner(sudoku())
    assert fit(made, V4_8) is None
    fake = compiler(split_gib=1.0, row_mib=500_000.0)  # one row is too much
    assert fit(made, V4_8) is None
    assert fake.asked
    fake = compiler(split_gib=1.0, fixed_gib=50.0)  # gradients, say: no cut of the batch brings them down
    assert fit(made, V4_8) is None
    assert len(fake.asked) <= 12  # two for each way to split the weights, with and without remat


def test_parts_need_not_be_a_power_of_two(compiler) -> None:
    """25 rows a device divide by 5 only."""
    compiler(split_gib=1.0, row_mib=2000.0)
    made = planner(sudoku("batch_size=100"))
    found = fit(made, V4_8)
    assert found is not None
    assert found.overrides == ("accumulation=5",)


def test_a_refusal_that_does_not_say_how_much_it_needs(compiler, monkeypatch) -> None:
    """Then the parts are doubled until it fits."""
    fake = compiler(split_gib=1.0)

    def silent(*arguments, **settings):
        found = fake(*arguments, **settings)
        least = found.memory.model_copy(update={"needed": 2 * 2**30})
        return found if found.work else found.model_copy(update={"memory": least})

    monkeypatch.setattr(tpu_compiler, "compile_for", silent)
    found = fit(planner(sudoku("model.remat=true", "batch_size=61440")), V4_8)
    assert found is not None
    assert found.overrides == ("accumulation=4",)  # 60 GiB: two parts leave no room for the state
    assert [parts for _, parts, *_ in fake.asked] == [1, 2, 4]


def test_a_model_without_remat_is_cut_only(compiler, monkeypatch) -> None:
    fake = compiler(split_gib=1.0)
    config = sudoku()
    made = planner(config)
    failed = made.plan(V4_8)
    without = config.model_copy(update={"model": SimpleNamespace()})
    found = search.find_fit(without, failed, lambda overrides: made.plan(V4_8, overrides))
    assert found is not None
    assert found.overrides == ("accumulation=3",)
    assert not any(remat for *_, remat in fake.asked)


def test_a_variant_that_cannot_be_compiled_is_left_out(compiler, monkeypatch, caplog) -> None:
    fake = compiler()

    def dying(config, *rest, **settings):
        if config.model.remat:
            raise UserError("the TPU compiler ended with code -6")
        return fake(config, *rest, **settings)

    monkeypatch.setattr(tpu_compiler, "compile_for", dying)
    found = fit(planner(sudoku()), V4_8)
    assert found is not None
    assert found.overrides == ("accumulation=3",)
    assert "model.remat=true was left out: the TPU compiler ended" in caplog.text


def test_the_cheapest_within_a_time_and_the_fastest_for_a_sum(compiler) -> None:
    """With a time that no number of chips takes away, scaling flatters large slices; the first three are sure."""
    fake = compiler(row_mib=1.0, latency_s=0.05)
    made = planner(sudoku("steps=36000"))
    in_time = search.rank(made, None, search.Budget(hours=5.0)).entries
    assert in_time
    assert all(entry.hours <= 5 for entry in in_time)
    costs = [entry.dollars for entry in in_time if entry.dollars is not None]
    assert costs == sorted(costs)
    for_a_sum = search.rank(made, None, search.Budget(dollars=2000.0, spot=True)).entries
    assert all(entry.dollars_spot is not None and entry.dollars_spot <= 2000 for entry in for_a_sum)
    assert [entry.hours for entry in for_a_sum] == sorted(entry.hours for entry in for_a_sum)
    for entries in (in_time, for_a_sum):
        assert all(entry.scaled_from is None for entry in entries[: search.CONFIRMED])
        assert any(entry.scaled_from for entry in entries)
    considered = [target for target in slices.all_slices() if target.devices <= search.MAX_DEVICES]
    assert len({name for name, *_ in fake.asked}) < len(considered)
    nothing = search.rank(made, None, search.Budget(hours=0.001))
    assert nothing.entries == []
    assert any("v4-8: takes" in reason for reason in nothing.left_out)


def test_a_ranking_says_why_a_slice_is_left_out(compiler) -> None:
    compiler(split_gib=70.0)
    made = planner(sudoku())
    targets = [slices.find_slice(name) for name in ("v4-8", "v5e-1", "tpu7x-8", "v5p-8")]
    ranked = search.rank(made, targets, search.Budget(dollars=1e9))
    assert {entry.slice for entry in ranked.entries} == {"v4-8", "v5p-8"}
    assert all(entry.scaled_from is None for entry in ranked.entries)  # slices that were named are compiled
    assert "v5e-1: does not fit, nor does any variant that was tried" in ranked.left_out
    assert "tpu7x-8: its price is not known" in ranked.left_out


def test_a_slice_that_cannot_have_the_mesh_does_not_end_a_ranking(compiler, monkeypatch) -> None:
    fake = compiler(row_mib=1.0)

    def picky(config, target, **settings):
        if target.generation.name == "v5e":
            raise ConfigError("mesh.fsdp=8 does not divide dimension 1")
        return fake(config, target, **settings)

    monkeypatch.setattr(tpu_compiler, "compile_for", picky)
    ranked = search.rank(planner(sudoku()), None, search.Budget(hours=1000.0))
    assert {entry.slice.partition("-")[0] for entry in ranked.entries} == {"v4", "v5p", "v6e", "tpu7x"}
    with pytest.raises(ConfigError, match="does not divide dimension"):
        search.rank(planner(sudoku()), [slices.find_slice("v5e-8")], search.Budget(hours=1.0))


@pytest.mark.parametrize("where", ["while it compiles", "between two slices"])
def test_a_ranking_can_be_stopped_and_continued(compiler, monkeypatch, where: str) -> None:
    fake = compiler(row_mib=1.0)
    told: list[str] = []

    def tell(console, text, *style):
        told.append(text)
        if where == "between two slices" and len(told) == 2:
            raise KeyboardInterrupt

    def interrupted(config, target, **settings):
        if len(fake.asked) == 2:
            raise KeyboardInterrupt
        return fake(config, target, **settings)

    monkeypatch.setattr(search, "say", tell)
    monkeypatch.setattr(tpu_compiler, "compile_for", interrupted)
    stopped = search.rank(planner(sudoku()), None, search.Budget(hours=1000.0))
    assert stopped.stopped
    assert {entry.slice for entry in stopped.entries if entry.scaled_from is None} == {name for name, *_ in fake.asked}
    assert [text.partition(":")[0] for text in told] == [name for name, *_ in fake.asked]
    asked = list(fake.asked)
    monkeypatch.setattr(tpu_compiler, "compile_for", fake)
    whole = search.rank(planner(sudoku()), None, search.Budget(hours=1000.0))
    assert not whole.stopped
    assert not set(fake.asked[len(asked) :]) & set(asked)  # those are not compiled again


@pytest.mark.parametrize("as_json", [True, False])
def test_a_ranking_that_was_stopped_ends_with_130(compiler, monkeypatch, as_json: bool) -> None:
    fake = compiler(row_mib=1.0)

    def interrupted(config, target, **settings):
        if len(fake.asked) == 1:
            raise KeyboardInterrupt
        return fake(config, target, **settings)

    monkeypatch.setattr(tpu_compiler, "compile_for", interrupted)
    ended = run("--budget", "1000h", *["--json"] * as_json)
    assert ended.exit_code == 130
    if as_json:
        assert json.loads(ended.stdout)["stopped"]


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["plan", str(SUDOKU), "data.path=nowhere", *arguments], env={"COLUMNS": "170"})


def test_the_command_prints_a_row_for_each_slice(compiler) -> None:
    compiler()
    done = run("--slice", "v4-64", "--slice", "v4-8", "batch_size=6144")
    assert done.exit_code == 80, done.output  # the second does not fit
    assert run("--slice", "v4-64", "batch_size=6144").exit_code == 0
    assert "30.75" in done.stdout
    narrow = CliRunner().invoke(
        cli.app,
        ["plan", str(SUDOKU), "data.path=nowhere", "batch_size=6144", "--slice", "V4-64"],
        env={"COLUMNS": "80"},
    )
    assert "…" not in narrow.stdout
    assert max(map(len, narrow.stdout.splitlines())) <= 80
    assert "v4-8: needs 61.00 GiB of 30.75 per device, 30.25 too much; fits with accumulation=3" in done.stdout
    assert "does not fit" in done.stdout
    assert "list prices for US regions, 2026-11-16" in done.stdout
    answer = json.loads(run("--slice", "v4-64", "--slice", "v4-8", "batch_size=6144", "--json").stdout)
    large, small = answer["plans"]
    assert (large["fits"], small["fits"], small["proposal"]["fits"]) == (True, False, True)
    assert large["proposal"] is None
    assert small["proposal"]["overrides"] == ["accumulation=3"]
    assert answer["prices"]["date"] == "2026-11-16"
    assert large["dollars"] > 0
    unsearched = run("--slice", "v4-8", "batch_size=6144", "--json", "--no-search")
    assert json.loads(unsearched.stdout)["plans"][0]["proposal"] is None
    assert unsearched.exit_code == 80
    said = run("--slice", "v4-8", "batch_size=6144", "--no-search").stdout
    assert "30.25 too much" in said
    assert "tried" not in said


def test_several_slices_are_planned_as_one(compiler) -> None:
    fake = compiler()
    asked = ("--slice", "v5e-16", "mesh={slices: 2, fsdp: 4}", "batch_size=6144")
    [made] = json.loads(run(*asked, "--json").stdout)["plans"]
    assert fake.asked == [("2 × v5e-16", 1, 4, False)]
    assert (made["slice"], made["chips"], made["hosts"], made["devices"]) == ("2 × v5e-16", 32, 8, 32)
    assert made["analysis"]["mesh"] == {"data": 8, "pipeline": 1, "fsdp": 4, "tensor": 1}
    assert made["dollars"] == pytest.approx(made["hours"] * 32 * 1.20)
    shown = run(*asked).stdout
    assert "2 × v5e-16" in shown
    assert "v5e 29% to 51%" in shown
    ranked = json.loads(run("--budget", "30d", "mesh.slices=2", "batch_size=6144", "--json").stdout)["slices"]
    assert ranked
    assert all(entry["slice"].startswith("2 × ") for entry in ranked)
    with pytest.raises(ConfigError, match=r"mesh\.slices=2 on v4-8: set mesh\.slices=1"):
        planner(sudoku("mesh.slices=2")).plan(V4_8)


def test_a_generation_without_a_price_is_named(compiler) -> None:
    compiler()
    shown = run("--slice", "tpu7x-8", "--slice", "v4-64").stdout
    assert "No price is known for tpu7x: write yours into a table (--prices FILE)." in " ".join(shown.split())


def test_own_prices(compiler, tmp_path: Path) -> None:
    compiler()
    table = tmp_path / "prices.yaml"
    table.write_text("{date: '2030-01-01', source: mine, on_demand: {v4: 1.0}, spot: {v4: 0.25}}")
    [made] = json.loads(run("--slice", "v4-64", "--json", "--prices", str(table)).stdout)["plans"]
    assert made["dollars"] == pytest.approx(32 * made["hours"])
    assert made["dollars_spot"] == pytest.approx(8 * made["hours"])
    [unknown] = json.loads(run("--slice", "v5e-8", "--json", "--prices", str(table)).stdout)["plans"]
    assert unknown["dollars"] is None
    table.write_text("{date: '2030-01-01', source: mine, on_demand: {v44: 1.0}}")
    with pytest.raises(UserError, match="no TPU generation or GPU v44"):
        raise run("--slice", "v4-64", "--prices", str(table)).exception
    table.write_text("{date: '2030-01-01', source: mine, on_demand: {v4: -1.0}}")
    with pytest.raises(UserError, match=r"on_demand\.v4"):
        raise run("--slice", "v4-64", "--prices", str(table)).exception
    with pytest.raises(UserError, match=r"no file .*nowhere"):
        raise run("--slice", "v4-64", "--prices", "nowhere").exception


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the hardware"),
        (["--slice", "v4-33"], "no such TPU slice; v4 comes as"),
        (["--slice", "v4-64", "--measure"], "--measure .* needs --slice local"),
        (["--slice", "local", "--budget", "3h"], "--slice local cannot be combined"),
        (["--budget", "soon"], "--budget soon: expected a time like 24h"),
        (["--budget", "0h"], "--budget 0h"),
        (["--slice", "v4-64", "batch_size=100"], "on v4-64, .*100 rows do not divide"),
        (["--slice", "v4-64", "bach_size=100"], "bach_size"),
        (
            ["--slice", "v4-8", "mesh={slices: 2, fsdp: 8}"],
            r"2 × v4-8: mesh\.slices=2: only `data` .*2 of them have 8 chips",
        ),
        (["--slice", "v4-64", "data.expected=null"], r"no dataset at .*data\.expected="),
    ],
)
def test_errors_of_the_command(compiler, arguments: list[str], message: str) -> None:
    compiler()
    with pytest.raises(UserError, match=message):
        raise run(*arguments).exception


def test_the_ranking_is_printed(compiler) -> None:
    compiler(row_mib=1.0)
    done = run("--budget", "2d", "batch_size=6144")
    assert done.exit_code == 0, done.output
    assert "Slices within the budget" in done.stdout
    assert re.search(r"^v4-16 .* v4-8 *$", done.stdout, re.MULTILINE), "it is scaled from another one"
    answer = json.loads(run("--dollars", "5000", "batch_size=6144", "--json").stdout)
    assert answer["slices"][0]["hours"] <= answer["slices"][-1]["hours"]
    nothing = run("--dollars", "0.01", "batch_size=6144")
    assert "No slice keeps within this budget" in nothing.stdout
    assert ": costs $" in nothing.stdout


def test_without_the_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(tpu_compiler, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"install the extra `plan`, pip install 'tinypod\[plan\]'"):
        raise run("--slice", "v4-64").exception
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "no.so"))
    with pytest.raises(UserError, match=r"no\.so"):
        raise run("--slice", "v4-64").exception


def test_a_dataset_that_is_there_wins_over_the_expected_one(tmp_path: Path) -> None:
    folder = write_4x4(tmp_path / "data")
    assert cells(sudoku(f"data.path={folder}")) == (40, 16)
    assert cells(sudoku()) == (1000, 81)
    assert cells(sudoku("data.expected={kind: sudoku, box: [2, 3], rows: 7}")) == (7, 36)
    plain = "data.expected={kind: plain, seq_len: 900, vocab_size: 12, rows: 5}"
    assert cells(sudoku(plain, "data.augmentations=endless")) == (5, 900)


def cells(config: ExperimentConfig) -> tuple[int, ...]:
    """The shape of the puzzles that a plan takes the data to hold."""
    return describe_task(config).abstract_feed(AbstractMesh((1, 1, 1), AXES))["inputs"].shape
