"""The command line: what it prints, where, and its exit status."""

import errno
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

import evenflow
from evenflow import cli

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("EVENFLOW_CONFIG", raising=False)


@pytest.fixture
def served(monkeypatch):
    """Settings that the gateway was started with, in place of a gateway."""
    given = []
    fake = types.ModuleType("evenflow.gateway")
    fake.serve = lambda settings, read: given.append(settings) or 0
    monkeypatch.setitem(sys.modules, "evenflow.gateway", fake)
    monkeypatch.setattr(evenflow, "gateway", fake, raising=False)
    return given


def run(capsys, *arguments):
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_without_a_command_it_lists_them(capsys):
    status, out, _ = run(capsys)
    assert status == 2
    assert all(name in out for name in ("serve", "demo", "engine", "config", "bench"))
    assert run(capsys, "--help")[0] == 0


def test_the_version(capsys):
    assert run(capsys, "--version") == (0, f"evenflow {evenflow.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["srve"], "there is no command 'srve', did you mean 'serve'?"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot"),
        (["serve", "--port"], "--port: expected one argument"),
        (["serve", "--port", "x"], "command line: --port (listen.port): must be a whole number"),
        (["serve", "--worker", "h:1"], "--worker (workers[0].url): must start with http://"),
        (["serve", "--config", "/does/not/exist.yaml"], "/does/not/exist.yaml: there is no such file"),
        (["config"], "ACTION"),
        (["config", "chek"], "invalid choice"),
        (["config", "check"], "FILE"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, served, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1
    assert not served


def test_serve_needs_no_file(capsys, served):
    status, _, err = run(capsys, "serve", "--worker", "http://h:1", "--worker", "http://h:2", "--port", "0")
    assert (status, err) == (0, "")
    (settings,) = served
    assert settings.listen.port == 0
    assert [worker.url for worker in settings.workers] == ["http://h:1", "http://h:2"]


def test_serve_reads_the_file_and_flags_win(capsys, served, tmp_path, monkeypatch):
    path = tmp_path / "e.yaml"
    path.write_text("listen: {host: 127.0.0.2, port: 1}\nworkers: [{url: 'http://h:1'}]\n")
    assert run(capsys, "serve", "--config", str(path), "--port", "2")[0] == 0
    monkeypatch.setenv("EVENFLOW_CONFIG", str(path))
    assert run(capsys, "serve", "--host", "127.0.0.3")[0] == 0
    assert [(settings.listen.host, settings.listen.port) for settings in served] == [
        ("127.0.0.2", 2),
        ("127.0.0.3", 1),
    ]


def test_serve_warns_of_what_is_probably_not_meant(capsys, served):
    status, out, err = run(capsys, "serve")
    assert (status, out) == (0, "")
    assert err.startswith("evenflow: warning: no worker is configured")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.EADDRINUSE, "in use"),
            "cannot listen on 127.0.0.1:8000: another program listens there",
        ),
        (OSError(errno.EADDRNOTAVAIL, "no"), "choose another --host"),
        (PermissionError(errno.EACCES, "denied"), "choose a higher --port"),
        (socket.gaierror(-2, "unknown"), "no such name"),
        (PermissionError(errno.EACCES, "denied", "/var/log/x"), "cannot use /var/log/x: denied"),
    ],
)
def test_an_address_that_cannot_be_used_is_told(capsys, served, monkeypatch, error, words):
    def fail(settings, read):
        raise error

    monkeypatch.setattr(evenflow.gateway, "serve", fail)
    status, _, err = run(capsys, "serve", "--worker", "http://h:1")
    assert status == 2
    assert words in err
    assert err.count("\n") == 1


def test_an_error_of_our_own_is_not_hidden(capsys, served, monkeypatch):
    def fail(settings, read):
        raise OSError(errno.EIO, "disk")

    monkeypatch.setattr(evenflow.gateway, "serve", fail)
    with pytest.raises(OSError, match="disk"):
        run(capsys, "serve", "--worker", "http://h:1")


def test_an_interrupt_ends_without_a_traceback(capsys, served, monkeypatch):
    def interrupt(settings, read):
        raise KeyboardInterrupt

    monkeypatch.setattr(evenflow.gateway, "serve", interrupt)
    assert run(capsys, "serve", "--worker", "http://h:1")[0] == 130


def test_check_prints_every_problem_and_exits_1(capsys, tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text("listen: {prot: 1}\nlimits: {queued: 0}\n")
    status, out, err = run(capsys, "config", "check", str(path))
    assert (status, err) == (1, "")
    assert out == (
        f"{path}:1: listen.prot: unknown option, did you mean 'port'?\n"
        f"{path}:2: limits.queued: must be at least 1, is 0\n"
    )


def test_check_sums_a_good_configuration_up(capsys, tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text("workers: [{url: 'http://h:1'}]\ndatabase: sqlite:///x.db\n")
    status, out, err = run(capsys, "config", "check", str(path))
    assert status == 0
    assert out.startswith(f"{path}: ok: 1 worker, 0 tenants, ")
    assert out.count("\n") == 1
    assert "usage is not stored" in err


def test_reference_prints_the_page(capsys):
    status, out, _ = run(capsys, "config", "reference")
    assert status == 0
    assert out == (ROOT / "docs" / "CONFIGURATION.md").read_text()


def test_other_parts_read_their_own_arguments(capsys, monkeypatch):
    given = []
    part = types.ModuleType("evenflow.demo")
    part.add_arguments = lambda parser: parser.add_argument("--port", type=int, default=8000)
    part.main = lambda args: given.append(args.port) or 3
    monkeypatch.setitem(sys.modules, "evenflow.demo", part)
    assert run(capsys, "demo", "--port", "5")[0] == 3
    assert given == [5]
    status, _, err = run(capsys, "demo", "--nothing")
    assert status == 2
    assert err.endswith("see `evenflow demo --help`\n")


def test_bench_needs_a_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(evenflow, "__file__", str(tmp_path / "evenflow" / "__init__.py"))
    status, _, err = run(capsys, "bench")
    assert status == 2
    assert "clone the repository" in err


def test_bench_passes_arguments_and_status_on(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(evenflow, "__file__", str(tmp_path / "evenflow" / "__init__.py"))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "bench.py").write_text("import sys; sys.exit(len(sys.argv))")
    assert run(capsys, "bench", "--quick", "x")[0] == 3


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m evenflow config reference | head -n 1"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.stdout == "# Configuration\n"
    assert done.stderr == ""


def test_help_loads_nothing_that_it_does_not_need():
    code = "import sys; from evenflow.cli import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    assert not {"pydantic", "yaml", "asyncio", "uvloop", "evenflow.config"} & set(done.stdout.split())
