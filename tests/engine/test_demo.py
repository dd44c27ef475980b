"""`evenflow demo` as a newcomer meets it: it proves itself, says what to try, and leaves nothing behind."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evenflow import demo
from evenflow.config import load
from evenflow.fleet.engines.embedded import EngineError, find_weights

LAST_LINE = "Ctrl-C ends everything."
START_TIMEOUT_S = 60.0


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "evenflow", "demo", *flags]


@pytest.fixture(autouse=True)
def _skip_without_engine(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("engine"):
        pytest.importorskip("xllamacpp", reason="the package xllamacpp is missing")
        try:
            find_weights()
        except EngineError as error:
            pytest.skip(str(error))


def family(pid: int) -> set[int]:
    """The processes that this one has started and that still run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z" and int(fields[1]) == pid:
            found.add(int(stat.parent.name))
    return found


def still_running(pids: set[int], seconds: float) -> set[int]:
    """Those of the processes that run after so long; returns as soon as none does."""
    deadline_s = time.monotonic() + seconds
    while left := {pid for pid in pids if is_running(pid)}:
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.02)
    return set()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class RunningDemo:
    """A demo in a process of its own, with what it has said so far."""

    def __init__(self, *flags: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command(*flags), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for_page(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while LAST_LINE not in self.lines:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline_s, self.text
            time.sleep(0.05)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(15)
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def running_demo(*flags: str) -> Iterator[RunningDemo]:
    running = RunningDemo(*flags)
    try:
        running.wait_for_page()
        yield running
    finally:
        running.end(signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# The whole thing


@pytest.mark.engine
def test_the_check_answers_a_chat_and_a_stream() -> None:
    result = subprocess.run(
        command("--check", "--port", str(free_port())),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "model: SmolLM2-135M-Instruct" in result.stdout
    assert "engine 2: ready on http://127.0.0.1:" in result.stdout
    assert "chat (OpenAI SDK): " in result.stdout
    assert "streamed completion (OpenAI SDK), " in result.stdout
    assert result.stdout.strip().endswith("check passed")
    assert result.stderr == ""


@pytest.mark.engine
def test_it_says_what_to_try_and_a_flood_shows_the_shares() -> None:
    port = free_port()
    with running_demo("--port", str(port)) as running:
        text = running.text
        for part in (
            "one chat through it",
            f"curl http://127.0.0.1:{port}/v1/chat/completions",
            f'base_url="http://127.0.0.1:{port}/v1"',
            f"demo flood --port {port}",
            "key2 (weight 30 of the keys)",
        ):
            assert part in text
        config = Path(text.split("Configuration: ")[1].splitlines()[0])
        log = Path(text.split("Gateway log:   ")[1].splitlines()[0])
        assert config.is_file()
        assert log.is_file()

        flood = subprocess.run(
            command("flood", "--port", str(port), "--seconds", "12"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert flood.returncode == 0, flood.stdout + flood.stderr
        rows = {line.split()[0]: line.split() for line in flood.stdout.splitlines() if "%" in line}
        shares = {name: float(row[3].rstrip("%")) for name, row in rows.items()}
        assert {row[-1] for row in rows.values()} == {"0"}, flood.stdout
        # Twelve seconds are short: the order is what they show. The ratios have a test of their own.
        assert shares["key2"] > 1.5 * shares["key1"] > 1.5 * shares["anonymous"] > 0, flood.stdout

        children = family(running.process.pid)
        assert len(children) == 3
        began_s = time.monotonic()
        assert running.end(signal.SIGINT) == 0
        assert time.monotonic() - began_s < 6
        assert "nothing is left running" in running.text
        assert still_running(children, 0) == set()
        assert not config.parent.exists()


@pytest.mark.engine
def test_killing_it_leaves_no_orphans() -> None:
    with running_demo("--port", str(free_port())) as running:
        children = family(running.process.pid)
        assert len(children) == 3
        running.process.kill()
        running.process.wait(5)
        assert still_running(children, 3) == set()


@pytest.mark.engine
def test_ending_it_while_it_starts_leaves_no_orphans() -> None:
    running = RunningDemo("--port", str(free_port()))
    while len(family(running.process.pid)) < 2:
        assert running.process.poll() is None, running.text
        time.sleep(0.01)
    children = family(running.process.pid)
    assert running.end(signal.SIGINT) == 0
    assert still_running(children, 0) == set()


@pytest.mark.engine
def test_the_death_of_an_engine_is_told_and_ends_it() -> None:
    with running_demo("--port", str(free_port())) as running:
        children = family(running.process.pid)
        engine = next(pid for pid in children if b"embedded" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(engine, signal.SIGKILL)
        assert running.process.wait(10) == 1
        assert still_running(children, 0) == set()
        running.end()
        assert "ended with exit code -9; start the demo again" in running.text


# Parts


def test_its_configuration_is_one_that_serve_accepts(tmp_path: Path) -> None:
    path = tmp_path / "evenflow.yaml"
    path.write_text(demo.configuration(8123, ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]))
    settings = load(str(path), environ={}, overrides={})
    assert settings.listen.port == 8123
    assert settings.auth.anonymous is True
    assert [(worker.name, worker.slots) for worker in settings.workers] == [("engine-1", 4), ("engine-2", 4)]
    assert {tenant.name: tenant.weight for tenant in settings.tenants} == {"key1": 10, "key2": 30}


def test_a_taken_port_is_told_and_the_next_one_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        monkeypatch.setattr(demo, "PORT_DEFAULT", taken)
        chosen = demo.choose_port(None)
        assert chosen > taken
        assert (
            f"port {taken} is taken by another program; the gateway takes {chosen} instead"
            in capsys.readouterr().out
        )
        with pytest.raises(demo.DemoError, match="choose another --port"):
            demo.choose_port(taken)


def test_the_shares_of_the_sample_tenants_are_those_of_their_weights() -> None:
    shares = {tenant.name: tenant.share for tenant in demo.TENANTS}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["key2"] == pytest.approx(3 * shares["key1"])
    assert shares["key1"] + shares["key2"] == pytest.approx(10 * shares["anonymous"])


def test_the_table_shows_share_against_weight() -> None:
    tallies = {
        "key1": demo.Tally(12, tokens=250, answers=9, first_token_s=[0.5, 1.5, 2.5]),
        "key2": demo.Tally(12, tokens=750),
        "anonymous": demo.Tally(0, failures=2, failure="the gateway answered 401"),
    }
    text = demo.table(tallies, 10.0, threading.Lock())
    assert "1000 tokens, 100 a second" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if "%" in line}
    # Nobody without a key asks, so the keys share everything.
    assert rows["key1"][3:5] == ["25.0%", "25.0%"]
    assert rows["key2"][3:5] == ["75.0%", "75.0%"]
    assert rows["key1"][5] == "1.50"
    assert "anonymous: the gateway answered 401" in text


def test_a_flood_without_a_demo_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    assert demo.main(parser.parse_args(["flood", "--port", str(free_port())])) == 1
    error = capsys.readouterr().err
    assert error.startswith("evenflow demo: error: nothing answers on port ")
    assert error.count("\n") == 1
    assert "start the demo in another terminal" in error


def test_a_flood_of_nobody_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    nobody = [flag for tenant in demo.TENANTS for flag in ("--callers", f"{tenant.name}=0")]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        answering = threading.Thread(target=_answer_once, args=(silent,))
        answering.start()
        port = silent.getsockname()[1]
        assert demo.main(parser.parse_args(["flood", "--port", str(port), *nobody])) == 1
        answering.join(5)
    assert "nobody to flood with" in capsys.readouterr().err


def _answer_once(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


@pytest.mark.parametrize(
    "flags",
    [
        *(["--callers", value] for value in ("key1", "key3=1", "key1=-1", "key1=x", "key1=1000000")),
        *(["--port", value] for value in ("0", "x", "70000")),
        *(["--seconds", value] for value in ("0", "-1", "nan", "inf", "x")),
    ],
)
def test_values_out_of_range_are_refused(flags: list[str]) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["flood", *flags])
