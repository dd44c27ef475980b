"""The gateways that are compared: one module each, one line each in `ALL`."""

from peers import aiohttp, evenflow, fastapi, haproxy, litellm, nginx, smg, vllm_router
from peers.peer import Peer, Site, Start

ALL: tuple[Peer, ...] = (
    *evenflow.PEERS,
    *nginx.PEERS,
    *haproxy.PEERS,
    *vllm_router.PEERS,
    *smg.PEERS,
    *aiohttp.PEERS,
    *fastapi.PEERS,
    *litellm.PEERS,
)

__all__ = ["ALL", "Peer", "Site", "Start"]
