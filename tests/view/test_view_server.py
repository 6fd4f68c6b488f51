"""What the server answers, and what it refuses, without a browser."""

import http.client
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures import tiny_config
from releases import EXAMPLES, empty_shelf, export
from tinypod.data.sudoku import breaks_rules, parse_puzzle
from tinypod.errors import UserError
from tinypod.runs.folder import Run
from tinypod.runs.listing import list_runs
from tinypod.runs.metrics import MetricsLog, make_record
from tinypod.view.runs import open_places
from tinypod.view.server import Server, open_server
from viewed_runs import ESCAPES, MARKUP, make_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("view"))


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Server]:
    with open_server([runs], 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: Server, path: str, body: Any = None, *, method: str | None = None, **headers: str
) -> tuple[int, dict[str, Any] | str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=300)
    content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if content is not None:
        given = {"Content-Type": "application/json"} | given
    connection.request(method or ("GET" if body is None else "POST"), path, content, given)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    found = json.loads(text) if answer.headers.get_content_type() == "application/json" else text
    return answer.status, found, dict(answer.headers)


def good(server: Server, path: str, body: Any = None) -> Any:
    status, found, _ = ask(server, path, body)
    assert status == 200, found
    return found


def ids(server: Server) -> dict[str, str]:
    return {run["name"]: run["id"] for run in good(server, "/api/runs")["runs"]}


def test_runs_are_listed_as_they_stand(server: Server) -> None:
    listed = {run["name"]: run for run in good(server, "/api/runs")["runs"]}
    assert set(listed) == {"first", "second", MARKUP, ESCAPES}
    first = listed["first"]
    assert (first["state"], first["step"], first["steps"]) == ("done", 10, 10)
    assert first["headline"] == "eval/exact_accuracy"
    assert first["puzzle"]
    assert all(run["id"].isalnum() for run in listed.values())


def test_metrics_come_in_parts_while_they_are_written(server: Server, runs: Path) -> None:
    run, log = ids(server)["second"], MetricsLog(runs / "second")
    whole = good(server, f"/api/metrics?run={run}")
    assert [record["step"] for record in whole["records"]] == [record["step"] for record in log.read()]
    since = f"/api/metrics?run={run}&generation={whole['generation']}&since={whole['total']}"
    assert good(server, since)["records"] == []

    log.append(make_record(12, {"train/loss": 0.5, "train/other": 1.0}))
    log.append(make_record(14, {"train/loss": float("nan")}))
    with open(log.path, "ab") as file:
        file.write(b'{"step": 16, "time": 1.0, "train/lo')  # not whole yet
    news = good(server, since)["records"]
    assert [(record["step"], record["train/loss"]) for record in news] == [(12, 0.5), (14, "nan")]
    assert "train/other" not in news[0]

    log.rewind(10)  # as a run that resumes does
    again = good(server, since)
    assert again["generation"] != whole["generation"]
    assert again["records"] == whole["records"]


def test_health_and_differences(server: Server) -> None:
    known = ids(server)
    health = good(server, f"/api/health?run={known['first']}")
    assert health["summary"].startswith("done: step 10 of 10")
    assert [process["verdict"] for process in health["processes"]] == ["ended: done"]
    assert health["goodput"]["seconds"]["stepping"] > 0
    assert health["skipped"] == health["nonfinite"] == 0
    rows = good(server, f"/api/differences?run={known['first']}&run={known['second']}")["rows"]
    assert rows == [{"key": "optimizer.learning_rate", "values": ["0.001", "0.002"]}]


def test_a_puzzle_is_refined_step_by_step(server: Server) -> None:
    run = ids(server)["first"]
    board = good(server, f"/api/board?run={run}")
    assert board == {"rows": 4, "columns": 4, "symbols": ".1234", "box": [2, 2]}
    puzzle = good(server, f"/api/example?run={run}&number=3")["puzzle"]
    given = parse_puzzle(puzzle, (2, 2))
    found = good(server, "/api/solve", {"run": run, "puzzle": puzzle})
    assert found["puzzle"] == puzzle
    assert len(found["steps"]) == 3  # task.halting.max_steps
    for step in found["steps"]:
        grid = parse_puzzle(step["cells"], (2, 2)) if step["solved"] else None
        assert 0 <= step["confidence"] <= 1
        assert step["solved"] == (not step["broken"] and "." not in step["cells"])
        assert grid is None or not breaks_rules(grid, (2, 2)).any()
        assert grid is None or (grid[given > 0] == given[given > 0]).all()
    sure = [number for number, step in enumerate(found["steps"], 1) if step["confidence"] > 0.5]
    assert found["stops_at"] == (sure[0] if sure else None)


@pytest.mark.parametrize(
    ("puzzle", "says"),
    [
        ("1...", "puzzle has 4 characters, expected 16"),
        ("1" * 16, "again in the same row"),
        ("x" + "." * 15, "'x' at row 1, column 1"),
        ("/etc/passwd", "puzzle has 11 characters"),  # no file is read
    ],
)
def test_a_puzzle_that_cannot_be_is_explained(server: Server, puzzle: str, says: str) -> None:
    status, found, _ = ask(server, "/api/solve", {"run": ids(server)["first"], "puzzle": puzzle})
    assert status == 422
    assert says in found["error"]


def test_a_dataset_that_is_gone_is_explained(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "gone", "data.expected=null")
    folder = tmp_path / "runs" / "moved"
    (folder / "checkpoints").mkdir(parents=True)
    Run(folder).publish("config.yaml", json.dumps(config.model_dump(mode="json")).encode())
    with open_server([tmp_path / "runs"], 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            status, found, _ = ask(server, f"/api/board?run={ids(server)['moved']}")
        finally:
            server.shutdown()
            thread.join()
    assert status == 422
    assert str(tmp_path / "gone") in found["error"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8787", "127.0.0.1.evil.example", "", "192.168.0.1"])
def test_another_host_name_is_refused(server: Server, host: str) -> None:
    for path in ("/", "/api/runs"):
        status, found, _ = ask(server, path, Host=host)
        assert status == 403
        assert "runs" not in found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:9999"])  # the last through a forwarded port
def test_this_machine_is_answered(server: Server, host: str) -> None:
    assert ask(server, "/api/runs", Host=host)[0] == 200


def test_only_this_page_can_post(server: Server) -> None:
    body = {"run": ids(server)["first"], "puzzle": "." * 16}
    host = f"127.0.0.1:{server.server_address[1]}"
    assert ask(server, "/api/solve", body, Origin="http://evil.example")[0] == 403
    assert ask(server, "/api/solve", body, Origin="null")[0] == 403
    assert ask(server, "/api/solve", body, Content_Type="text/plain")[0] == 415
    assert ask(server, "/api/solve", body, Host="evil.example", Origin="http://evil.example")[0] == 403
    assert ask(server, "/api/solve", b"x" * 70_000)[0] == 413
    assert ask(server, "/api/solve", b"[1]")[0] == 400
    assert ask(server, "/api/solve", {"run": 1, "puzzle": "."})[0] == 400
    assert ask(server, "/api/solve", body, Origin=f"http://{host}", Host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/page/app.js",
        "//etc/passwd",
        "/api/health?run=..%2f..%2fetc",
        "/api/health?run=first",
        "/api/metrics?run=%2fetc",
        "/api/board?run=",
        "/api/health",
        "/api/differences?run=../first",
    ],
)
def test_no_path_of_a_browser_leads_to_a_file(server: Server, path: str) -> None:
    status, found, _ = ask(server, path)
    assert status == 404
    assert set(found) == {"error"}


def test_every_answer_forbids_what_the_page_does_not_need(server: Server) -> None:
    for path in ("/", "/app.js", "/app.css", "/icon.svg", "/api/runs", "/nothing"):
        _, _, headers = ask(server, path)
        assert headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path, runs: Path) -> None:
    inside = tmp_path / "runs"
    (inside / "made").mkdir(parents=True)
    (inside / "linked").symlink_to(runs / "first")
    (inside / "made" / "config.yaml").symlink_to(runs / "first" / "config.yaml")
    (inside / "made" / "metrics.jsonl").write_text("")
    with open_server([inside], 0) as server:
        assert server.runs.listing() == []


def test_a_run_that_is_being_unpacked_is_none_yet(tmp_path: Path, runs: Path) -> None:
    shutil.copytree(runs / "first", tmp_path / ".first.unpacking")
    with open_server([tmp_path], 0) as server:
        assert server.runs.listing() == []
        (tmp_path / ".first.unpacking").rename(tmp_path / "first")
    with open_server([tmp_path], 0) as server:
        assert [run["name"] for run in server.runs.listing()] == ["first"]


OUTCOMES = {
    "diverged": '{"state": "diverged", "step": 4, "reason": "a loss of inf"}',
    "early": '{"state": "stopped_early", "step": 4}',
    "cut": '{"state": "done", "st',
    "odd": '{"state": ["done"]}',
    "deep": "[" * 100_000,
}


def test_states_are_those_of_the_list(tmp_path: Path, runs: Path) -> None:
    for name, outcome in OUTCOMES.items():
        (tmp_path / name).mkdir()
        shutil.copyfile(runs / "first" / "config.yaml", tmp_path / name / "config.yaml")
        (tmp_path / name / "metrics.jsonl").write_text("")
        (tmp_path / name / "outcome.json").write_text(outcome)
    shutil.copytree(runs / "first", tmp_path / "whole")
    with open_server([tmp_path], 0) as server:
        seen = {row["name"]: row["state"] for row in server.runs.listing()}
    listed = {entry.name: entry.state for entry in list_runs(str(tmp_path), time.time())}
    assert {name: seen[name] for name in ("diverged", "early", "whole")} == {
        "diverged": "diverged", "early": "early", "whole": "done"
    }  # fmt: skip
    for name in ("cut", "odd", "deep"):  # the page shows the rest of such a run
        assert (seen.pop(name), listed.pop(name)) == ("new", "damaged")
    assert seen == listed


def test_the_next_free_port_is_taken(server: Server, runs: Path) -> None:
    port = int(server.server_address[1])
    with open_server([runs], port) as second:
        assert port < second.server_address[1] < port + 20


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_shelf(tmp_path, monkeypatch)


def test_a_release_has_a_board_beside_the_runs(server: Server, runs: Path, shelf: Path) -> None:
    (shelf / "examples.txt").write_text("\n".join(EXAMPLES))
    export(runs / "first", shelf / "small.safetensors", "--dtype", "float32", "--examples", str(shelf / "examples.txt"))
    folders, found = open_places([str(runs)])
    with open_server(folders, 0, found) as both:
        thread = threading.Thread(target=both.serve_forever)
        thread.start()
        try:
            rows = good(both, "/api/runs")["runs"]
            assert [row["name"] for row in rows if row["state"] == "release"] == ["small"]
            row, first = rows[-1], next(row for row in rows if row["name"] == "first")
            assert row["puzzle"]
            assert {key: row[key] for key in ("step", "headline", "value")} == {
                key: first[key] for key in ("step", "headline", "value")
            }
            key = row["id"]
            assert good(both, f"/api/board?run={key}") == good(server, f"/api/board?run={first['id']}")
            shown = [good(both, f"/api/example?run={key}&number={number}")["puzzle"] for number in (0, 1, 2)]
            assert shown == [*EXAMPLES, EXAMPLES[0]]  # numbers go round
            answers = [good(both, "/api/solve", {"run": one, "puzzle": EXAMPLES[0]}) for one in (key, first["id"])]
            assert answers[0] == answers[1]
            for path in ("metrics", "health", "differences"):  # a release has none of them
                assert ask(both, f"/api/{path}?run={key}")[0] == 404
        finally:
            both.shutdown()
            thread.join()


def test_where_runs_and_releases_are_looked_for(runs: Path, shelf: Path) -> None:
    with pytest.raises(UserError, match="runs: no such folder"):
        open_places([])
    export(runs / "first", shelf / "small.safetensors")
    folders, found = open_places([])  # a fresh clone: nothing but what is shipped
    assert (folders, [str(one) for one in found]) == ([], ["small"])
    shutil.copyfile(shelf / "small.safetensors", "mine.safetensors")
    folders, found = open_places([str(runs), "mine.safetensors", "small"])
    assert (folders, [str(one) for one in found]) == ([runs], ["small", "mine.safetensors"])
    Path("studies").mkdir()
    assert open_places([])[0] == [Path("studies")]
    with pytest.raises(UserError, match=r"other: no such folder.*or a release file"):
        open_places(["other"])
    Path("mine.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match=r"mine\.safetensors: not a release, or cut short"):
        open_places(["mine.safetensors"])
