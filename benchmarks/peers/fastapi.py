"""A gateway in forty lines of FastAPI and httpx, as the first control panels of this field were."""

import pathlib

from lab import install, package_version

from peers.peer import Peer, Site, Start

APPLICATION = pathlib.Path(__file__).with_name("apps") / "fastapi_gateway.py"


def prepare(site: Site) -> Start:
    programs = install(
        "fastapi", ["fastapi>=0.115", "uvicorn>=0.34", "httpx>=0.28,<1", "uvloop>=0.21", "httptools>=0.6"]
    )
    command = (
        str(programs / "python"),
        *("-m", "uvicorn", "--app-dir", str(APPLICATION.parent), f"{APPLICATION.stem}:application"),
        *("--host", "127.0.0.1", "--port", str(site.port), "--loop", "uvloop", "--http", "httptools"),
        *("--log-level", "warning", "--no-access-log"),
    )
    environment = {"WORKER_URLS": " ".join(site.worker_urls)}
    version = f"fastapi {package_version(programs, 'fastapi')}, httpx {package_version(programs, 'httpx')}"
    return Start(command, version, environment)


PEERS = (Peer("fastapi", "40 lines of FastAPI + httpx", prepare, open_streams=1000, opening_s=10.0),)
