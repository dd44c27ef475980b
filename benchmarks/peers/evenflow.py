"""Evenflow with everything on: a tenant's key, limits, time limits, usage, metrics, ids, an access log.

`evenflow` is the package as `pip install` makes it, with the request path compiled (`make bench` installs it into
`.venv-fast`); `evenflow-pure` is the checkout as it lies here, which an editable install runs.
"""

import functools
import subprocess
import sys

from lab import ROOT, NotMeasured

from peers.peer import Peer, Site, Start

CONFIGURATION = """\
listen: {{host: 127.0.0.1, port: {port}}}
auth: {{anonymous: false}}
workers:
{workers}
scheduling: {{cost: tokens, placement: {placement}}}
tenants:
  - {{name: bench, group: keys, weight: 10, keys: ["{key}"], limits: {limits}}}
limits: {{queued: 10000, queue_timeout_s: 60}}
timeouts: {{connect_s: 2, first_byte_s: 300, idle_s: 60, total_s: 600}}
log: {{level: warning, access: "{access_log}"}}
"""
# Slots for every stream of the largest measurement: this is about the way through, not about waiting.
SLOTS = 2000
# Every limit there is; none is reached, though each endless stream reserves ten million tokens.
LIMITS = "{concurrency: 8000, queued: 8000, requests_per_minute: 100000000, tokens_per_minute: 100000000000}"


COMPILED = ROOT / ".venv-fast" / "bin" / "python"


def prepare(site: Site, *, placement: str, pure: bool = False) -> Start:
    python = sys.executable if pure else str(COMPILED)
    if not pure and not COMPILED.exists():
        raise NotMeasured("the compiled package is not installed; run `make bench`, which installs it")
    workers = "\n".join(f'  - {{url: "{url}", models: [mock], slots: {SLOTS}}}' for url in site.worker_urls)
    path = site.directory / "evenflow.yaml"
    path.write_text(
        CONFIGURATION.format(
            port=site.port,
            workers=workers,
            placement=placement,
            key=site.key,
            limits=LIMITS,
            access_log=site.directory / "access.log",
        )
    )
    # -P: the package that is installed, not the one that lies in the current folder.
    return Start((python, "-P", "-m", "evenflow", "serve", "--config", str(path)), _version(python))


def _version(python: str) -> str:
    command = [python, "-P", "-c", "import evenflow; print(evenflow.__version__)"]
    outcome = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if outcome.returncode != 0:
        raise NotMeasured(f"cannot be imported here: {outcome.stderr.strip().splitlines()[-1]}")
    return outcome.stdout.strip()


PEERS = (
    Peer("evenflow", "everything on, least-work placement", functools.partial(prepare, placement="least_work")),
    Peer(
        "evenflow-pure",
        "the same, not compiled",
        functools.partial(prepare, placement="least_work", pure=True),
    ),
    Peer(
        "evenflow-round-robin",
        "everything on, round robin",
        functools.partial(prepare, placement="round_robin"),
    ),
)
