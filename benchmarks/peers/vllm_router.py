"""vllm-router: Rust in a Python package."""

import functools

from lab import install, package_version

from peers.peer import Peer, Site, Start


def prepare(site: Site, *, policy: str) -> Start:
    programs = install("vllm-router", ["vllm-router==0.1.17"])
    command = (
        str(programs / "vllm-router"),
        *("--host", "127.0.0.1", "--port", str(site.port)),
        *("--worker-urls", *site.worker_urls),
        *("--policy", policy),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.spare_port)),
        *("--max-concurrent-requests", "100000"),  # also its rate limit: requests per second
        *("--log-level", "warning"),
    )
    return Start(command, package_version(programs, "vllm-router"))


PEERS = (
    Peer("vllm-router", "Rust, round robin", functools.partial(prepare, policy="round_robin")),
    Peer(
        "vllm-router-cache-aware",
        "Rust, its default",
        functools.partial(prepare, policy="cache_aware"),
        by_default=False,
    ),
)
