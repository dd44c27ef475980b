"""Builds Evenflow; compiles the modules of the request path with mypyc where that can be done.

The compiled package is the same code and does the same at about half of the interpreter's cost per request. A plain
`pip install .` (or a wheel) compiles when mypy and a C compiler with Python's headers are there, and says so when it
does not; an editable install never compiles, so that an edit takes effect. `EVENFLOW_PURE=1` asks for pure Python.
"""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

# The request path and what it calls for every request: fully typed, no metaclasses. (wire/openai.py defines msgspec
# structs, which are compiled already in all that matters; wire/faults.py has defaults in its exception classes, which
# mypyc does not set.)
HOT_MODULES = [
    "evenflow/timers.py",
    "evenflow/fleet/registry.py",
    "evenflow/observe/access_log.py",
    "evenflow/observe/metrics.py",
    "evenflow/observe/why.py",
    "evenflow/policy/cost.py",
    "evenflow/policy/fairness.py",
    "evenflow/policy/health.py",
    "evenflow/policy/limits.py",
    "evenflow/policy/patience.py",
    "evenflow/policy/placement/candidate.py",
    "evenflow/policy/placement/least_latency.py",
    "evenflow/policy/placement/least_work.py",
    "evenflow/policy/placement/lottery.py",
    "evenflow/policy/placement/power_of_two.py",
    "evenflow/policy/placement/prefix.py",
    "evenflow/policy/placement/round_robin.py",
    "evenflow/policy/placement/shortest_queue.py",
    "evenflow/policy/placement/shortlist.py",
    "evenflow/policy/placement/sticky.py",
    "evenflow/policy/retry.py",
    "evenflow/policy/sampling.py",
    "evenflow/policy/slots.py",
    "evenflow/request/__init__.py",
    "evenflow/request/accept.py",
    "evenflow/request/authenticate.py",
    "evenflow/request/decode.py",
    "evenflow/request/enqueue.py",
    "evenflow/request/fanout.py",
    "evenflow/request/place.py",
    "evenflow/request/relay.py",
    "evenflow/request/settle.py",
    "evenflow/tenancy/directory.py",
    "evenflow/wire/answer.py",
    "evenflow/wire/heal.py",
    "evenflow/wire/http.py",
    "evenflow/wire/merge.py",
    "evenflow/wire/ratelimit.py",
    "evenflow/wire/sse.py",
]


def why_pure() -> str | None:
    """The reason for not compiling, None to compile."""
    if os.environ.get("EVENFLOW_PURE"):
        return "EVENFLOW_PURE is set"
    if any(word in sys.argv for word in ("editable_wheel", "develop", "egg_info", "dist_info", "sdist", "clean")):
        return ""  # nothing is built, or it is built to be edited
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(os.environ.get("CC", compiler)) is None and shutil.which("cc") is None:
        return "there is no C compiler"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers are missing (on Debian: python3-dev)"
    try:
        import mypyc.build  # noqa: F401
    except ImportError:
        return "mypy is missing"
    return None


def extensions() -> list[object]:
    reason = why_pure()
    if reason is None:
        from mypyc.build import mypycify

        return list(mypycify(HOT_MODULES, opt_level="3"))
    if reason:
        sys.stderr.write(f"evenflow: {reason}; installing pure Python, at about twice the CPU per request\n")
    return []


setup(ext_modules=extensions())
