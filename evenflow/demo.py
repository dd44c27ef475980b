"""`evenflow demo`: two embedded engines, a gateway and three sample tenants, from one command.

    evenflow demo            start all, prove it with one chat, print what to try, run until Ctrl-C
    evenflow demo --check    start all, one chat and one streamed completion, print them, end with 0
    evenflow demo flood      flood a running demo from another terminal and watch who gets what

Promises: the port is said plainly when 8000 is taken; every process it started ends with it, whether that is
by Ctrl-C, a signal or force (Linux). The gateway is the ordinary `evenflow serve` with a file that is named.
Never: listens on anything but 127.0.0.1, writes outside its own temporary folder, needs the network.
"""

import argparse
import importlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from types import FrameType
from typing import Any

from evenflow.fleet.engines.embedded import ALIAS_DEFAULT, EngineError, EngineProcess, find_weights

PORT_DEFAULT = 8000
# How many ports above the default are tried before giving up.
PORTS_TRIED_MAX = 50
ENGINES = 2
SLOTS_PER_ENGINE = 4
GATEWAY_READY_TIMEOUT_S = 30.0
# The demo's gateway finishes what runs for this long when it ends.
DRAIN_S = 2.0
CALL_TIMEOUT_S = 120.0
FLOOD_TOKENS = 24

_PR_SET_PDEATHSIG = 1
_CHAT_PROMPT = "Write one sentence about rivers."
_STREAM_PROMPT = "The river carries"


class DemoError(Exception):
    """The demo cannot go on. The message is one line and ends in the next step."""


@dataclass(frozen=True, slots=True)
class SampleTenant:
    """One caller of the demo: how it is named, its key (None: it sends none), and what it is promised."""

    name: str
    key: str | None
    # Of all that is served while all three wait: keys to anonymous 10 : 1, and in keys 30 : 10.
    share: float
    about: str


TENANTS = (
    SampleTenant("key1", "sk-demo-key1", 10 / 11 * 10 / 40, "weight 10 of the keys"),
    SampleTenant("key2", "sk-demo-key2", 10 / 11 * 30 / 40, "weight 30 of the keys"),
    SampleTenant("anonymous", None, 1 / 11, "no key; 1 : 10 to all keys"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `evenflow demo`."""
    add = parser.add_argument
    add(
        "action",
        nargs="?",
        choices=("run", "flood"),
        default="run",
        help="run it, or flood a running one",
    )
    add("--check", action="store_true", help="answer one chat and one stream, print them, and end")
    add(
        "--port", type=_port, default=None, help=f"port of the gateway ({PORT_DEFAULT}, or the next free one)"
    )
    add("--seconds", type=_seconds, default=30.0, help="flood: for how long (30)")
    add(
        "--callers",
        action="append",
        type=_callers,
        default=[],
        metavar="TENANT=N",
        help="flood: callers of a tenant that wait at the same time (12 each); may repeat",
    )


def main(args: argparse.Namespace) -> int:
    """Run what was asked for; 0 unless it could not."""
    try:
        if args.action == "flood":
            return flood(args.port or PORT_DEFAULT, args.seconds, dict(args.callers))
        return run(args.port, check=args.check)
    except (DemoError, EngineError) as error:
        print(f"evenflow demo: error: {error}", file=sys.stderr)
        return 1


# Starting and ending


class _EndedError(Exception):
    """A signal asked us to end."""


def run(port: int | None, *, check: bool) -> int:
    """Start everything, show that it answers, and then either end or stay until a signal."""
    try:
        with _signals_raise(), ExitStack() as stack:
            demo = start(port, stack)
            if check:
                show_check(demo.port)
                return 0
            show_proof(demo.port)
            print(page(demo))
            return watch(demo)
    except _EndedError:
        print("\nevenflow demo: ended; nothing is left running")
        return 0


@dataclass(slots=True)
class Demo:
    """What runs."""

    port: int
    config: Path
    log: Path
    # Every process that must stay alive, by what it is called.
    processes: dict[str, subprocess.Popen[Any]]


def start(port: int | None, stack: ExitStack) -> Demo:
    """Engines, then the gateway, each announced; what was started ends with the stack, last first."""
    say(f"model: {find_weights().name}")
    chosen = choose_port(port)
    engines = [
        EngineProcess("--instances", str(ENGINES), "--slots", str(SLOTS_PER_ENGINE)) for _ in range(ENGINES)
    ]
    for engine in engines:
        stack.callback(engine.stop)
    processes: dict[str, subprocess.Popen[Any]] = {}
    for number, engine in enumerate(engines, 1):
        engine.wait_ready()
        say(f"engine {number}: ready on {engine.url} after {engine.start_s:.1f} s")
        processes[f"engine {number}"] = engine.process
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="evenflow-demo-")))
    config, log = folder / "evenflow.yaml", folder / "gateway.log"
    config.write_text(configuration(chosen, [engine.url for engine in engines]))
    began_s = time.monotonic()
    gateway = start_gateway(config, log)
    stack.callback(end_process, gateway, DRAIN_S + 2.0)
    wait_for_gateway(gateway, chosen, log)
    processes["gateway"] = gateway
    say(f"gateway: ready on http://127.0.0.1:{chosen} after {time.monotonic() - began_s:.1f} s")
    return Demo(chosen, config, log, processes)


def configuration(port: int, engine_urls: Sequence[str]) -> str:
    """The gateway's file, as a user would write it."""
    workers = "".join(
        f'  - {{name: engine-{number}, url: "{url}", slots: {SLOTS_PER_ENGINE}}}\n'
        for number, url in enumerate(engine_urls, 1)
    )
    return f"""\
# The gateway of `evenflow demo`. Run a gateway of your own with: evenflow serve --config FILE
listen: {{host: 127.0.0.1, port: {port}, drain_s: {DRAIN_S}}}
auth:
  anonymous: true       # callers without a key are served too, in the group of that name
workers:
{workers}\
scheduling:
  tiers:
    - name: standard
      groups:
        - {{name: web, weight: 300}}
        - {{name: keys, weight: 10}}
        - {{name: anonymous, weight: 1}}
tenants:
  - {{name: key1, group: keys, weight: 10, keys: [sk-demo-key1]}}
  - {{name: key2, group: keys, weight: 30, keys: [sk-demo-key2]}}
"""


def choose_port(wanted: int | None) -> int:
    """The port that was asked for, or the default one, or the next free one, which is said."""
    if wanted is not None:
        if not _is_free(wanted):
            raise DemoError(f"port {wanted} is taken; choose another --port, or leave it out")
        return wanted
    for port in range(PORT_DEFAULT, PORT_DEFAULT + PORTS_TRIED_MAX):
        if _is_free(port):
            if port != PORT_DEFAULT:
                say(f"port {PORT_DEFAULT} is taken by another program; the gateway takes {port} instead")
            return port
    raise DemoError(f"no free port from {PORT_DEFAULT} on; choose one with --port")


def start_gateway(config: Path, log: Path) -> subprocess.Popen[bytes]:
    """`evenflow serve` in a process of its own that dies with the calling thread."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _SERVE, "serve", "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C goes to the foreground group: we decide when it ends.
            process_group=0,
            # What configures the user's own gateway must not change this one.
            env={name: value for name, value in os.environ.items() if not name.startswith("EVENFLOW_")},
        )


# Runs first in the gateway's process. The signal is a plain end: the demo is gone then, and nobody waits.
_SERVE = f"""
import ctypes, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL)
from evenflow.cli import main
sys.exit(main(sys.argv[1:]))
"""


def wait_for_gateway(gateway: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until a worker is live behind it."""
    deadline_s = time.monotonic() + GATEWAY_READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if gateway.poll() is not None:
            raise DemoError(f"the gateway ended with exit code {gateway.returncode}: {_last_line(log)}")
        try:
            if get(port, "/readiness") == 200:
                return
        except (OSError, HTTPException):
            pass  # not listening yet
        time.sleep(0.05)
    raise DemoError(f"the gateway was not ready within {GATEWAY_READY_TIMEOUT_S:.0f} s: {_last_line(log)}")


def end_process(process: subprocess.Popen[Any], timeout_s: float) -> None:
    """SIGTERM, then SIGKILL after the time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def watch(demo: Demo) -> int:
    """Until a signal comes (raised by its handler) or a process of ours is gone."""
    while True:
        for name, process in demo.processes.items():
            if process.poll() is not None:
                told = f": {_last_line(demo.log)}" if name == "gateway" else ""
                raise DemoError(
                    f"{name} ended with exit code {process.returncode}{told}; start the demo again"
                )
        time.sleep(0.3)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """The ending signals raise _EndedError here, once; further ones are ignored, since ending is bounded."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise _EndedError

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Showing that it answers


def show_proof(port: int) -> None:
    """One chat through the gateway, as key2."""
    began_s = time.monotonic()
    text = chat(port, "sk-demo-key2", _CHAT_PROMPT)
    say(f"one chat through it, after {time.monotonic() - began_s:.1f} s: {_shortened(text)}")


def show_check(port: int) -> None:
    """One chat and one streamed completion, through the OpenAI SDK when it is installed."""
    try:
        importlib.import_module("openai")
    except ImportError:
        client, ask, ask_streamed = "plain HTTP", chat, stream
    else:
        client, ask, ask_streamed = "OpenAI SDK", sdk_chat, sdk_stream
    text = ask(port, "sk-demo-key1", _CHAT_PROMPT)
    say(f"chat ({client}): {_shortened(text)}")
    pieces = ask_streamed(port, "sk-demo-key2", _STREAM_PROMPT)
    say(f"streamed completion ({client}), {len(pieces)} pieces: {_shortened(''.join(pieces))}")
    if not text.strip() or len(pieces) < 2:
        raise DemoError("the answers above are not whole; run `evenflow demo` and read its gateway log")
    say("check passed")


def chat(port: int, key: str | None, prompt: str) -> str:
    """The answer to one message, by plain HTTP."""
    body = {"model": ALIAS_DEFAULT, "messages": [{"role": "user", "content": prompt}], "max_tokens": 48}
    with post(port, "/v1/chat/completions", key, body) as answer:
        return str(json.loads(answer.read())["choices"][0]["message"]["content"])


def stream(port: int, key: str | None, prompt: str) -> list[str]:
    """The pieces of one streamed completion, by plain HTTP."""
    body = {"model": ALIAS_DEFAULT, "prompt": prompt, "max_tokens": 24, "stream": True}
    with post(port, "/v1/completions", key, body) as answer:
        return [choice["text"] for chunk in events(answer) for choice in chunk["choices"] if choice["text"]]


def sdk_chat(port: int, key: str | None, prompt: str) -> str:
    """As `chat`, by the OpenAI SDK."""
    with _sdk(port, key) as client:
        answer = client.chat.completions.create(
            model=ALIAS_DEFAULT, messages=[{"role": "user", "content": prompt}], max_tokens=48
        )
        return str(answer.choices[0].message.content)


def sdk_stream(port: int, key: str | None, prompt: str) -> list[str]:
    """As `stream`, by the OpenAI SDK."""
    with _sdk(port, key) as client:
        chunks = client.completions.create(model=ALIAS_DEFAULT, prompt=prompt, max_tokens=24, stream=True)
        return [choice.text for chunk in chunks for choice in chunk.choices if choice.text]


def _sdk(port: int, key: str | None) -> Any:
    openai = importlib.import_module("openai")
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key=key, timeout=CALL_TIMEOUT_S, max_retries=0
    )


def page(demo: Demo) -> str:
    """What to try next, ready to copy."""
    base = f"http://127.0.0.1:{demo.port}"
    again = _this_command()
    port = "" if demo.port == PORT_DEFAULT else f" --port {demo.port}"
    model = ALIAS_DEFAULT
    return f"""
Things to try
=============
A chat, as the tenant key1:

  curl {base}/v1/chat/completions -H 'Authorization: Bearer sk-demo-key1' \\
    -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 40}}'

A streamed completion, without a key (add -i to see which worker answered and how long it waited):

  curl -N {base}/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 60, "stream": true}}'

The same from Python (pip install openai):

  from openai import OpenAI
  client = OpenAI(base_url="{base}/v1", api_key="sk-demo-key2")
  for chunk in client.chat.completions.create(
          model="{model}", messages=[{{"role": "user", "content": "Hello!"}}], stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

Everybody floods it, and each gets the share of its weight (in another terminal):

  {again} flood{port}

One key floods it, another asks one thing at a time and hardly waits:

  {again} flood{port} --callers key1=24 --callers key2=1 --callers anonymous=0

Who waits and who is served:

  curl -s {base}/metrics | grep -E '^evenflow_(queued|in_flight|tokens_total)'
  curl -s {base}/list_workers
  curl -s {base}/admin/v1/queues

Tenants:       {"   ".join(f"{tenant.name} ({tenant.about})" for tenant in TENANTS)}
Configuration: {demo.config}
Gateway log:   {demo.log}

Ctrl-C ends everything.
"""


# The flood


@dataclass(slots=True)
class Tally:
    """What the callers of one tenant saw. Written by their threads under the lock of the flood."""

    callers: int
    tokens: int = 0
    answers: int = 0
    failures: int = 0
    # Why the last failed one did, for the reader.
    failure: str = ""
    first_token_s: list[float] = field(default_factory=list)


def flood(port: int, seconds: float, callers: dict[str, int]) -> int:
    """Let every tenant's callers ask again and again, and show who gets what."""
    try:
        get(port, "/readiness")
    except (OSError, HTTPException) as error:
        raise DemoError(
            f"nothing answers on port {port}; start the demo in another terminal with: {_this_command()}"
        ) from error
    tallies = {tenant.name: Tally(callers.get(tenant.name, 12)) for tenant in TENANTS}
    until_s = time.monotonic() + seconds
    lock = threading.Lock()
    # By turns, so that no tenant fills the engines before the others have come.
    threads = [
        threading.Thread(
            target=_keep_asking, args=(port, tenant, tallies[tenant.name], lock, until_s), daemon=True
        )
        for number in range(max(tally.callers for tally in tallies.values()))
        for tenant in TENANTS
        if number < tallies[tenant.name].callers
    ]
    if not threads:
        raise DemoError("nobody to flood with; give at least one tenant callers, such as --callers key1=12")
    print(
        f"{len(threads)} callers on http://127.0.0.1:{port} for {seconds:.0f} s; Ctrl-C ends it sooner.\n"
        "by weight: what a tenant gets while every tenant has callers that wait.",
        flush=True,
    )
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    shown = 0
    try:
        while time.monotonic() < until_s:
            time.sleep(min(1.0, max(0.0, until_s - time.monotonic())))
            shown = _show(table(tallies, time.monotonic() - began_s, lock), shown)
    except KeyboardInterrupt:
        print()
    if not sys.stdout.isatty():
        print(table(tallies, time.monotonic() - began_s, lock), flush=True)
    return 0 if any(tally.tokens for tally in tallies.values()) else 1


def _keep_asking(port: int, tenant: SampleTenant, tally: Tally, lock: threading.Lock, until_s: float) -> None:
    """One caller. Failures are counted and shown, and the caller goes on after a pause."""
    while time.monotonic() < until_s:
        try:
            _ask_once(port, tenant, tally, lock, until_s)
        except (OSError, HTTPException, DemoError, ValueError) as error:
            with lock:
                tally.failures += 1
                tally.failure = str(error)
            time.sleep(0.5)


def _ask_once(port: int, tenant: SampleTenant, tally: Tally, lock: threading.Lock, until_s: float) -> None:
    body = {
        "model": ALIAS_DEFAULT,
        "prompt": f"{tenant.name} asks: tell me about rivers.",
        "max_tokens": FLOOD_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    began_s = time.monotonic()
    is_first = True
    with post(port, "/v1/completions", tenant.key, body) as answer:
        for chunk in events(answer):
            now_s = time.monotonic()
            if now_s > until_s:
                return
            if not chunk.get("choices"):
                continue
            with lock:
                tally.tokens += 1
                if is_first:
                    tally.first_token_s.append(now_s - began_s)
            is_first = False
    with lock:
        tally.answers += 1


def table(tallies: dict[str, Tally], seconds: float, lock: threading.Lock) -> str:
    """One line per tenant: what it got, its share, the share its weight promises, and its waits."""
    with lock:
        total = sum(tally.tokens for tally in tallies.values())
        lines = [
            f"after {seconds:4.1f} s: {total} tokens, {total / seconds:.0f} a second",
            "tenant      callers   tokens   share  by weight   first token (median, last)   answers   failed",
        ]
        promised = sum(tenant.share for tenant in TENANTS if tallies[tenant.name].callers)
        for tenant in TENANTS:
            tally = tallies[tenant.name]
            share = tally.tokens / total if total else 0.0
            weight = tenant.share / promised if tally.callers else 0.0
            waits = tally.first_token_s
            median = f"{statistics.median(waits):6.2f} s  {waits[-1]:6.2f} s" if waits else "not yet"
            lines.append(
                f"{tenant.name:<10} {tally.callers:8d} {tally.tokens:8d} {share:7.1%} {weight:10.1%}"
                f"   {median:>26} {tally.answers:9d} {tally.failures:8d}"
            )
        lines += [f"{name}: {tally.failure}" for name, tally in tallies.items() if tally.failure]
    return "\n".join(lines)


def _show(text: str, lines_before: int) -> int:
    """On a terminal, the text in place of the one before; its number of lines."""
    if not sys.stdout.isatty():
        return 0
    up = f"\x1b[{lines_before}A\x1b[J" if lines_before else ""
    print(up + text, flush=True)
    return text.count("\n") + 1


# Small parts


@contextmanager
def post(port: int, path: str, key: str | None, body: dict[str, Any]) -> Iterator[HTTPResponse]:
    """A 200 answer; any other is a DemoError with its message."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    connection = HTTPConnection("127.0.0.1", port, timeout=CALL_TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise DemoError(
                f"the gateway answered {answer.status} on {path}: {_shortened(answer.read().decode())}"
            )
        yield answer
    finally:
        connection.close()


def events(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of events, as they come; an error in it is a DemoError."""
    for line in answer:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise DemoError(f"the stream ended with: {_shortened(str(chunk['error']))}")
        yield chunk


def get(port: int, path: str) -> int:
    """The status of a GET."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def say(text: str) -> None:
    """A line of progress."""
    print(f"evenflow demo: {text}", flush=True)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."


def _this_command() -> str:
    """How the reader can start `evenflow demo` from where they are."""
    program = Path(sys.argv[0])
    if program.name != "evenflow":
        return f"{_shown(Path(sys.executable))} -m evenflow demo"
    on_path = shutil.which("evenflow")
    if on_path is not None and Path(on_path).samefile(program):
        return "evenflow demo"
    return f"{_shown(program)} demo"


def _shown(path: Path) -> str:
    """The path as one would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; choose one of 1 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds, more than 0 and up to 86400")
    return value


def _callers(text: str) -> tuple[str, int]:
    name, separator, number = text.partition("=")
    names = [tenant.name for tenant in TENANTS]
    if (
        not separator
        or name not in names
        or not (number.isascii() and number.isdigit() and int(number) <= 200)
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not TENANT=N with a tenant of {', '.join(names)} and 0 to 200"
        )
    return name, int(number)


def _command(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="evenflow demo", description="Engines, a gateway and sample tenants."
    )
    add_arguments(parser)
    return main(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(_command())
