"""The benchmark's tools: that they count what happened, and that the table says it."""

import contextlib
import http.client
import importlib
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
LOADLAB = ROOT.parent / "shared" / "loadlab"
PORTS = 2

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="the tools use epoll"),
]


def compile_c(source: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    program = directory / source.stem
    command = ["cc", "-O2", "-o", str(program), str(source), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    return program


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("tools")
    compile_c(BENCHMARKS / "mock_engine.c", directory)
    compile_c(BENCHMARKS / "loadgen.c", directory)
    return directory


def free_ports() -> int:
    for first in range(21000, 31000, 7):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + PORTS):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


@contextlib.contextmanager
def serving(program: pathlib.Path) -> Iterator[int]:
    port = free_ports()
    process = subprocess.Popen([str(program), str(port), str(PORTS)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port + PORTS - 1)):
                break
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def mock(tools: pathlib.Path) -> Iterator[int]:
    with serving(tools / "mock_engine") as port:
        yield port


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read()


def stats(port: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(port, "GET", "/stats")[1])
    return found


def load(tools: pathlib.Path, *options: str) -> dict[str, Any]:
    command = [str(tools / "loadgen"), "--seconds", "0.4", "--warmup", "0.1", *options]
    outcome = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    report: dict[str, Any] = json.loads(outcome.stdout)
    return report


def events(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_mock_answers_whole(mock: int) -> None:
    status, body = ask(mock, "POST", "/v1/chat/completions", {"model": "mock"})
    assert status == 200
    assert json.loads(body)["usage"]["total_tokens"] == 232
    assert ask(mock, "GET", "/nowhere")[0] == 404
    assert json.loads(ask(mock, "GET", "/v1/models")[1])["data"][0]["id"] == "mock"
    assert stats(mock)["requests_by_port"] == [1, 0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_mock_streams_as_many_chunks_as_asked_and_usage_only_on_request(mock: int, path: str) -> None:
    plain = events(ask(mock, "POST", path, {"stream": True, "max_tokens": 5})[1])
    assert len(plain) == 5 + 1
    assert not any("usage" in event for event in plain)
    options = {"include_usage": True}
    counted = events(ask(mock, "POST", path, {"stream": True, "max_tokens": 5, "stream_options": options})[1])
    assert counted[-1]["usage"]["completion_tokens"] == 5
    assert counted[-1]["choices"] == []


def test_mock_reads_chunked_bodies_and_pipelined_requests(mock: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b'8\r\n{"stream\r\n15\r\n":true,"max_tokens":1\r\n1\r\n}\r\n0\r\n\r\n'
    with socket.create_connection(("127.0.0.1", mock), timeout=5) as client:
        client.sendall(head + body[:9])
        time.sleep(0.05)
        client.sendall(body[9:] + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        received = b""
        while b'{"status":"ok"}' not in received:
            data = client.recv(65536)
            assert data, received
            received += data
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.count(b" @") == 1


@pytest.mark.parametrize(("gap_us", "first_us"), [(2_000, 0), (0, 5_000_000)])
def test_mock_notices_at_once_when_a_reader_leaves(mock: int, gap_us: int, first_us: int) -> None:
    ask(mock, "GET", f"/control?gap_us={gap_us}&first_us={first_us}")
    body = b'{"stream":true,"max_tokens":100000}'
    with socket.create_connection(("127.0.0.1", mock), timeout=5) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        time.sleep(0.1)
        assert stats(mock)["busy"] == 1
        closed_ns = time.monotonic_ns()
    time.sleep(0.2)
    found = stats(mock)
    assert (found["busy"], found["left"]) == (0, 1)
    assert 0 <= found["last_left_ns"] - closed_ns < 150_000_000


def test_closed_loop_counts_what_the_mock_counted(tools: pathlib.Path, mock: int) -> None:
    before = time.process_time()
    targets = ("--target", f"one:{mock}", "--target", f"two:{mock + 1}")
    report = load(tools, *targets, "--connections", "4", "--warmup", "0")
    counted = stats(mock)
    for name, requests in zip(("one", "two"), counted["requests_by_port"], strict=True):
        target = report["targets"][name]
        assert 100 < target["answers"] <= requests <= target["answers"] + 8
        assert target["latency_us"]["p50"] <= target["latency_us"]["p99"] <= target["latency_us"]["max"]
        assert (target["refused"], target["broken"], target["connect_errors"]) == (0, 0, 0)
    assert time.process_time() - before < 2


def test_open_loop_keeps_its_rate_whatever_the_answers_do(tools: pathlib.Path, mock: int) -> None:
    ask(mock, "GET", "/control?gap_us=0&first_us=50000")
    report = load(tools, "--target", f"one:{mock}", "--rate", "300", "--connections", "64", "--seconds", "1")
    assert 200 < report["arrivals"] < 400
    assert 200 < report["targets"]["one"]["answers"] < 400
    assert report["targets"]["one"]["latency_us"]["p50"] > 50_000


def test_latency_counts_from_the_time_a_request_was_due(tools: pathlib.Path, mock: int) -> None:
    ask(mock, "GET", "/control?gap_us=0&first_us=50000")
    report = load(tools, "--target", f"one:{mock}", "--rate", "100", "--connections", "1", "--seconds", "1")
    assert report["arrivals_late"] > 30
    assert report["targets"]["one"]["latency_us"]["max"] > 200_000


def test_a_slow_target_does_not_make_another_late(tools: pathlib.Path, mock: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        targets = ("--target", f"mute:{mute.getsockname()[1]}", "--target", f"one:{mock}")
        report = load(tools, *targets, "--rate", "200", "--connections", "4")
    assert report["targets"]["mute"]["answers"] == 0
    assert report["targets"]["one"]["answers"] > 40
    assert report["targets"]["one"]["latency_us"]["p50"] < 50_000


def test_streams_are_counted_chunk_by_chunk(tools: pathlib.Path, mock: int) -> None:
    ask(mock, "GET", "/control?gap_us=5000")
    report = load(tools, "--target", f"one:{mock}", "--chunks", "10", "--connections", "8", "--seconds", "1")
    target = report["targets"]["one"]
    assert report["streams_open"] == 8
    assert target["short_streams"] == 0
    assert 8 * 100 < target["chunks"] <= 8 * 220
    assert target["chunks"] // 10 - 16 <= target["answers"] <= target["chunks"] // 10 + 16
    assert 0 < target["transit_us"]["p50"] < 20_000


def test_cpu_and_memory_of_a_process_are_read(tools: pathlib.Path, mock: int) -> None:
    spin = "import time\nwhile True: time.process_time()"
    with subprocess.Popen([sys.executable, "-c", spin]) as process:
        try:
            time.sleep(0.2)
            report = load(tools, "--target", f"one:{mock}", "--rate", "10", "--cpu-of", str(process.pid))
        finally:
            process.kill()
    assert 0.05 < report["cpu_seconds"] <= 1.02 * report["seconds"]
    assert report["resident_kb"] > 3000


def test_answers_that_are_refused_or_cut_are_no_answers(tools: pathlib.Path, mock: int) -> None:
    refused = load(tools, "--target", f"one:{mock}", "--path", "/v1/nothing", "--connections", "2")
    assert refused["targets"]["one"]["answers"] == 0
    assert refused["targets"]["one"]["refused"] > 10
    port = free_ports()
    absent = load(tools, "--target", f"one:{port}", "--connections", "2")
    assert absent["targets"]["one"]["answers"] == 0
    assert absent["targets"]["one"]["connect_errors"] > 2


@pytest.mark.skipif(not (LOADLAB / "lg.c").exists(), reason="no other tools to compare with")
def test_another_load_generator_finds_the_same(tools: pathlib.Path, mock: int) -> None:
    """Both ask the same mock engine, both are asked for chunks whose send times both understand."""
    other = compile_c(LOADLAB / "lg.c", tools)
    ask(mock, "GET", "/control?gap_us=5000")
    command = [str(other), "-t", f"one:{mock}", "-S", "100000", "-c", "20", "-d", "0.6", "-w", "0.3"]
    theirs = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout)
    ours = load(tools, "--target", f"one:{mock}", "--chunks", "100000", "--connections", "20", "--seconds", "0.6")
    their_rate = theirs["targets"][f"one:{mock}"]["cps"]
    assert ours["targets"]["one"]["chunks_per_second"] == pytest.approx(their_rate, rel=0.15)


@pytest.fixture
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    names = ("lab", "peers", "phases", "budgets", "report", "bench")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield {name: importlib.import_module(name) for name in names}
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {*names, "cross_check"}:
            del sys.modules[name]


def rows(report: ModuleType, peers: ModuleType) -> dict[str, Any]:
    return {peer.name: report.Row(peer) for peer in peers.ALL}


def test_budgets_take_ratios_within_a_round_and_the_median_of_rounds(
    benchmark_modules: dict[str, ModuleType],
) -> None:
    budgets = benchmark_modules["budgets"]
    rounds = {
        "evenflow": [{"cpu_us_per_request": cpu} for cpu in (30.0, 60.0, 31.0)],
        "nginx": [{"cpu_us_per_request": cpu} for cpu in (20.0, 40.0, 10.0)],
        "smg": [{"cpu_us_per_request": 90.0}, {}, {"cpu_us_per_request": 62.0}],
    }
    checks = {check.budget.name: check for check in budgets.check(rounds, "evenflow")}
    assert checks["CPU per request"].value == 31.0
    assert checks["CPU per request"].floor == 20.0
    assert checks["CPU per request"].verdict == "met"
    assert checks["CPU per request, times nginx"].value == 1.5
    assert checks["CPU per request, times cheaper than smg"].value == 2.5
    assert checks["CPU per request, times cheaper than smg"].verdict == "NOT MET"
    assert checks["CPU per request, times cheaper than vllm-router"].verdict == "not measured"


def test_the_table_has_a_row_for_what_could_not_be_measured(
    benchmark_modules: dict[str, ModuleType],
) -> None:
    report, peers = benchmark_modules["report"], benchmark_modules["peers"]
    table = rows(report, peers)
    table["nginx"].behaviour = {"leave_mid_stream_ms": 1000.0, "idle_mb": 14.0, "open_streams_mb": 48.0}
    table["nginx"].rounds = [{"requests_per_second": 40000.0}, {"requests_per_second": 50000.0}, {}]
    table["smg"].remark("installation failed: no network")
    facts = {"date": "today", "command": "make bench", "rounds": 3, "seconds": 4, "machine": report.machine()}
    chosen = [table["nginx"], table["smg"]]
    text = report.to_markdown(chosen, facts)
    assert "| 45,000 (40,000–50,000) |" in text
    assert "14 → 48" in text
    assert "> 1,000" in text
    assert "not measured: installation failed: no network" in text
    assert json.loads(json.dumps(report.to_json(chosen, facts)))["gateways"]["nginx"]["median"] == {
        "idle_mb": 14.0,
        "leave_mid_stream_ms": 1000.0,
        "open_streams_mb": 48.0,
        "requests_per_second": 45000.0,
    }


def test_a_gateway_that_does_not_start_is_a_remark_and_the_run_goes_on(
    benchmark_modules: dict[str, ModuleType], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, lab, peers = (benchmark_modules[name] for name in ("bench", "lab", "peers"))
    start = peers.Start(("sh", "-c", "echo no such option; exit 3"), "1")
    peer = peers.Peer("broken", "a gateway that ends at once", lambda site: start)
    monkeypatch.setattr(bench, "BUILD", tmp_path)
    row = benchmark_modules["report"].Row(peer)
    found = bench.measure(peer, row, bench.COST, None, lab.Mock(1), lab.Cores.of_this_machine())
    assert found is None
    assert row.remarks == ["ended at start with status 3: no such option"]


def test_a_refused_version_is_removed(
    benchmark_modules: dict[str, ModuleType], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = benchmark_modules["lab"]
    monkeypatch.setattr(lab, "ENVIRONMENTS", tmp_path)
    packages = tmp_path / "litellm" / "lib" / "python3.11" / "site-packages"
    (packages / "litellm-1.107.0.dist-info").mkdir(parents=True)
    (tmp_path / "litellm" / "installed.txt").write_text("litellm")
    with pytest.raises(lab.NotMeasured, match=r"litellm 1\.107\.0"):
        lab.install("litellm", ["litellm"], refused={"litellm": ["1.107.0"]})
    assert not (tmp_path / "litellm").exists()
