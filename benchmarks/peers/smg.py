"""smg, the Shepherd Model Gateway (before: SGLang's router): Rust in a Python package."""

import functools

from lab import install, package_version

from peers.peer import Peer, Site, Start


def prepare(site: Site, *, policy: str) -> Start:
    programs = install("smg", ["smg==1.13.0"])
    command = (
        str(programs / "smg"),
        "launch",
        *("--host", "127.0.0.1", "--port", str(site.port)),
        *("--worker-urls", *site.worker_urls),
        *("--policy", policy),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.spare_port)),
        *("--max-concurrent-requests", "100000"),
        "--disable-tokenizer-autoload",
        *("--log-level", "warn"),
    )
    return Start(command, package_version(programs, "smg"))


PEERS = (
    Peer("smg", "Rust, round robin", functools.partial(prepare, policy="round_robin")),
    Peer(
        "smg-cache-aware",
        "Rust, cache aware",
        functools.partial(prepare, policy="cache_aware"),
        by_default=False,
    ),
)
