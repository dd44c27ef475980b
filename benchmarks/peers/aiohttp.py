"""A gateway in thirty lines of aiohttp."""

import pathlib

from lab import install, package_version

from peers.peer import Peer, Site, Start

APPLICATION = pathlib.Path(__file__).with_name("apps") / "aiohttp_gateway.py"


def prepare(site: Site) -> Start:
    programs = install("aiohttp", ["aiohttp>=3.11", "uvloop>=0.21"])
    command = (str(programs / "python"), str(APPLICATION), str(site.port), *site.worker_urls)
    return Start(command, package_version(programs, "aiohttp"))


PEERS = (Peer("aiohttp", "30 lines of aiohttp on uvloop", prepare),)
