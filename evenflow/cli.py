"""The command line: reads arguments, hands over to the part that does the work, tells of mistakes.

Exit status: 0 done, 1 a checked configuration has problems, 2 the command cannot run as it was given.
Imports a part only when its command runs, so that every command starts fast. Never shows a traceback for a
mistake of the user, never decides anything itself.
"""

import argparse
import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import evenflow

DONE, HAS_PROBLEMS, CANNOT_RUN, INTERRUPTED = 0, 1, 2, 130

# What the system says when the address to listen on is wrong, as against a failure of something else.
_ADDRESS_ERRORS = {
    errno.EADDRINUSE: "another program listens there; stop it, or choose another --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose another --host",
    errno.EACCES: "ports below 1024 need privileges; choose a higher --port",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except SystemExit as leaving:  # argparse leaves this way after --help and after mistakes.
        return leaving.code if isinstance(leaving.code, int) else CANNOT_RUN
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `evenflow config reference | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return DONE if arguments else CANNOT_RUN
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        print(f"evenflow {evenflow.__version__}")
        return DONE
    command = COMMANDS.get(name)
    if command is None:
        return _fail(f"there is no command '{name}'{_nearest(name)}; `evenflow --help` lists them")
    return command.run(rest)


# ----------------------------------------------------------------------------------------------------
# The commands


def serve(arguments: list[str]) -> int:
    """Read the configuration and run the gateway until it is asked to stop."""
    from evenflow.config import ConfigErrors, Settings, load
    from evenflow.config.options import environment_options

    parser = _Parser("serve")
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=os.environ.get("EVENFLOW_CONFIG") or None,
        help="configuration to read (EVENFLOW_CONFIG); without one the defaults hold",
    )
    for option in environment_options():
        if option.flag:
            parser.add_argument(
                option.flag,
                dest=option.key,
                metavar=option.metavar,
                action="append" if option.is_list else "store",
                help=f"{option.field.description} ({option.variables[-1]})".replace("%", "%%"),
            )
    given = vars(parser.parse_args(arguments))
    config = given.pop("config")
    overrides = {key: value for key, value in given.items() if value is not None}

    def read() -> Settings:
        return load(config, environ=os.environ, overrides=overrides)

    try:
        settings = read()
    except ConfigErrors as errors:
        print(errors, file=sys.stderr)
        return CANNOT_RUN
    for warning in settings.warnings:
        print(f"evenflow: warning: {warning}", file=sys.stderr)
    from evenflow import gateway

    try:
        return gateway.serve(settings, read)
    except OSError as error:
        if error.filename is not None:
            return _fail(
                f"cannot use {error.filename}: {error.strerror}; check log.access in the configuration"
            )
        reason = _address_error(error)
        if reason is None:
            raise
        return _fail(f"cannot listen on {settings.listen.host}:{settings.listen.port}: {reason}")


def config(arguments: list[str]) -> int:
    """Check a configuration, or print the page of all options."""
    parser = _Parser("config")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    check = actions.add_parser("check", help="tell every problem of a configuration at once")
    check.add_argument("file", metavar="FILE", help="configuration to check")
    actions.add_parser("reference", help="print every option as a Markdown page")
    given = parser.parse_args(arguments)
    if given.action == "check":
        return _check(given.file)
    from evenflow.config.reference import reference

    print(reference(), end="")
    return DONE


def _check(file: str) -> int:
    from evenflow.config import ConfigErrors, load
    from evenflow.config.reference import summary

    try:
        settings = load(file, environ=os.environ)
    except ConfigErrors as errors:
        print(errors)
        return HAS_PROBLEMS
    for warning in settings.warnings:
        print(f"{file}: warning: {warning}", file=sys.stderr)
    print(f"{file}: ok: {summary(settings)}")
    return DONE


def bench(arguments: list[str]) -> int:
    """Run the benchmarks of a checkout with these arguments."""
    script = Path(evenflow.__file__).resolve().parent.parent / "benchmarks" / "bench.py"
    if not script.is_file():
        return _fail("benchmarks come with the source only; clone the repository and run `make bench` there")
    return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode


def _handed_to(name: str, module: str) -> Callable[[list[str]], int]:
    """A command of another module, which has `add_arguments(parser)` and `main(args) -> int`."""

    def run(arguments: list[str]) -> int:
        part = import_module(module)
        parser = _Parser(name)
        part.add_arguments(parser)
        return int(part.main(parser.parse_args(arguments)))

    return run


@dataclass(frozen=True, slots=True)
class Command:
    """One command: a line for --help, and what runs it."""

    summary: str
    run: Callable[[list[str]], int]


COMMANDS = {
    "serve": Command("run the gateway", serve),
    "demo": Command(
        "run two small engines, a gateway and sample tenants, and print what to try",
        _handed_to("demo", "evenflow.demo"),
    ),
    "engine": Command(
        "run one small engine with real weights",
        _handed_to("engine", "evenflow.fleet.engines.embedded"),
    ),
    "sim": Command(
        "replay traffic against a configuration in simulated time", _handed_to("sim", "evenflow.sim.command")
    ),
    "import": Command(
        "print what a configuration of Alpa or LMDeploy says, as one of Evenflow",
        _handed_to("import", "evenflow.config.importing"),
    ),
    "config": Command("check a configuration; print the page of all options", config),
    "bench": Command("measure the overhead beside other gateways (in a checkout)", bench),
}


# ----------------------------------------------------------------------------------------------------
# Telling


class _Parser(argparse.ArgumentParser):
    """Tells of a mistake in one line that ends in the next step."""

    def __init__(self, prog: str, **options: object) -> None:
        prog = prog if prog.startswith("evenflow") else f"evenflow {prog}"
        about = COMMANDS.get(prog.removeprefix("evenflow "))
        description = f"{about.summary[:1].upper()}{about.summary[1:]}." if about else None
        super().__init__(prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(CANNOT_RUN, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: evenflow COMMAND ...",
            "",
            "A fair, fast gateway in front of engines that speak the OpenAI API.",
            "",
            *lines,
            "",
            "`evenflow COMMAND --help` tells more of one. Start with:",
            "  evenflow serve --worker http://127.0.0.1:9001",
        ]
    )


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f", did you mean '{near[0]}'?" if near else ""


def _address_error(error: OSError) -> str | None:
    if isinstance(error, socket.gaierror):
        return "the host has no such name; choose another --host"
    # asyncio wraps the error of bind() in one that has the number, and only that.
    return _ADDRESS_ERRORS.get(error.errno or 0)


def _fail(message: str) -> int:
    print(f"evenflow: {message}", file=sys.stderr)
    return CANNOT_RUN
