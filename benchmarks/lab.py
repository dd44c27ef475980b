"""The laboratory: the compiled tools, the processes under test, and what the kernel says of them.

Every process is started by a context manager and is gone when its block ends, together with the children it
made. Gateways run on one core, the load generator and the mock engine on others as far as there are any.
Never decides what is measured or reported.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

BENCHMARKS = pathlib.Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
BUILD = BENCHMARKS / "build"
ENVIRONMENTS = ROOT / ".venv-bench"

WORKERS = 4
KEY = "sk-bench"
TOOL_PATIENCE_S = 30.0
STOP_PATIENCE_S = 5.0


class NotMeasured(Exception):
    """A gateway or a figure that cannot be had here; the message is what the table says instead."""


class LabError(Exception):
    """The laboratory itself does not work: no compiler, no ports. Nothing can be measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cores:
    """Which core each part runs on. With two cores the mock engine and the load generator share one."""

    gateway: int
    generator: int
    mock: int

    @classmethod
    def of_this_machine(cls) -> "Cores":
        cores = sorted(os.sched_getaffinity(0))
        return cls(gateway=cores[0], generator=cores[min(1, len(cores) - 1)], mock=cores[min(2, len(cores) - 1)])


def compile_tool(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Compiles one C file into one program, unless that is newer already."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LabError("no C compiler: install gcc or clang (Debian: apt-get install gcc libc6-dev)")
    if target.exists() and target.stat().st_mtime > source.stat().st_mtime:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(target), str(source), "-lm"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        raise LabError(f"{' '.join(command)} failed:\n{outcome.stderr}")
    return target


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports, below those that the kernel gives to clients."""
    for _ in range(200):
        first = random.randrange(12000, 31000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise LabError(f"no {count} consecutive free ports between 12000 and 31000")


@contextlib.contextmanager
def running(
    command: Sequence[str], *, core: int, log: pathlib.Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own on one core, its output in `log`; ended when the block ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    # The group is asked, not the process alone: a master that dies first would leave its workers on our core.
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_PATIENCE_S)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_PATIENCE_S)


def process_tree(root: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(entry.name))
    tree = [root]
    for process in tree:
        tree.extend(children.get(process, ()))
    return tree


def resident_kb(root: int) -> int:
    """Resident memory of the process and all its descendants."""
    pages = 0
    for process in process_tree(root):
        with contextlib.suppress(OSError):
            pages += int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


class Mock:
    """A running mock engine: its ports, its controls and its counters."""

    __slots__ = ("ports",)

    def __init__(self, first_port: int) -> None:
        self.ports = tuple(range(first_port, first_port + WORKERS))

    def control(self, *, gap_us: int, first_us: int = 0) -> None:
        self._get(f"/control?gap_us={gap_us}&first_us={first_us}")

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = json.loads(self._get("/stats"))
        return stats

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[0], timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read()


@contextlib.contextmanager
def mock_engine(cores: Cores) -> Iterator[Mock]:
    program = compile_tool(BENCHMARKS / "mock_engine.c", BUILD / "mock_engine")
    mock = Mock(free_ports(WORKERS))
    log = BUILD / "mock_engine.log"
    with running([str(program), str(mock.ports[0]), str(WORKERS)], core=cores.mock, log=log) as process:
        wait_for_port(mock.ports[-1], process, log, 5.0)
        yield mock


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: pathlib.Path, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        if process.poll() is not None:
            raise LabError(f"{log.stem} ended at once: {last_line(log)}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise LabError(f"{log.stem} does not listen on port {port} after {patience_s:.0f} s")


def last_line(log: pathlib.Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


def generate_load(
    cores: Cores,
    targets: Mapping[str, int],
    *,
    seconds: float,
    connections: int = 64,
    warmup: float = 1.0,
    ramp: float = 0.0,
    rate: float | None = None,
    chunks: int | None = None,
    choices: int = 1,
    gateway_process: int | None = None,
) -> dict[str, Any]:
    """One run of the load generator: its JSON report. The head of loadgen.c explains options and figures."""
    program = compile_tool(BENCHMARKS / "loadgen.c", BUILD / "loadgen")
    command = [
        str(program),
        "--seconds",
        str(seconds),
        "--warmup",
        str(warmup),
        "--ramp",
        str(ramp),
        "--key",
        KEY,
    ]
    command += ["--connections", str(connections)]
    for name, port in targets.items():
        command += ["--target", f"{name}:{port}"]
    if rate is not None:
        command += ["--rate", str(rate)]
    if chunks is not None:
        command += ["--chunks", str(chunks)]
    if choices > 1:
        command += ["--choices", str(choices)]
    if gateway_process is not None:
        command += ["--cpu-of", ",".join(map(str, process_tree(gateway_process)))]
    report: dict[str, Any] = json.loads(
        run_tool(command, core=cores.generator, patience_s=seconds + warmup + ramp + TOOL_PATIENCE_S)
    )
    return report


def run_tool(command: Sequence[str], *, core: int, patience_s: float) -> str:
    """The output of a program that ends by itself."""
    try:
        outcome = subprocess.run(
            ["taskset", "-c", str(core), *command],
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{command[0]} did not end after {patience_s:.0f} s") from None
    if outcome.returncode != 0:
        raise LabError(f"{command[0]} failed: {outcome.stderr.strip()[-300:]}")
    return outcome.stdout


def install(
    name: str, requirements: Sequence[str], *, refused: Mapping[str, Sequence[str]] | None = None
) -> pathlib.Path:
    """Makes a virtual environment with these packages, unless it is there; returns the path of its `bin`.

    One for each peer, since some pin what others cannot live with. `refused` names versions of packages that
    must not be used: an environment that holds one is removed before anything in it has run.
    """
    environment = ENVIRONMENTS / name
    python = environment / "bin" / "python"
    receipt = environment / "installed.txt"
    wanted = "\n".join(requirements)
    if not (receipt.exists() and receipt.read_text() == wanted):
        print(f"  {name}: installing {', '.join(requirements)}", flush=True)
        log = BUILD / f"install-{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(environment, ignore_errors=True)
        _install_step([sys.executable, "-m", "venv", str(environment)], log)
        _install_step(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements],
            log,
        )
        receipt.write_text(wanted)
    for package, versions in (refused or {}).items():
        version = package_version(environment / "bin", package)
        if version in versions:
            shutil.rmtree(environment, ignore_errors=True)
            raise NotMeasured(f"pip chose {package} {version}, which must not be used")
    return environment / "bin"


def _install_step(command: Sequence[str], log: pathlib.Path) -> None:
    with log.open("ab") as output:
        try:
            outcome = subprocess.run(list(command), stdout=output, stderr=subprocess.STDOUT, timeout=600, check=False)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"installation took more than 600 s, see {log.relative_to(ROOT)}") from None
    if outcome.returncode != 0:
        raise NotMeasured(f"installation failed: {last_line(log)}")


def package_version(bin_directory: pathlib.Path, package: str) -> str:
    """The installed version, from the package's metadata: nothing of the package is imported or run."""
    pattern = f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info"
    found = sorted(bin_directory.parent.glob(pattern))
    return found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else "unknown"
