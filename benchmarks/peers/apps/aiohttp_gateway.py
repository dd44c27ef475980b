"""A gateway in thirty lines of aiohttp: `aiohttp_gateway.py PORT WORKER_URL...`, run by peers/aiohttp.py."""

import itertools
import sys
from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

PORT, WORKERS = int(sys.argv[1]), itertools.cycle(sys.argv[2:])
TIMEOUT = aiohttp.ClientTimeout(total=600)


async def relay(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    url, headers = next(WORKERS) + request.path_qs, {"content-type": "application/json"}
    async with request.app[SESSION].post(url, data=body, headers=headers) as answer:
        if not answer.content_type.startswith("text/event-stream"):
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        relayed = web.StreamResponse(status=answer.status, headers={"content-type": "text/event-stream"})
        await relayed.prepare(request)
        async for data in answer.content.iter_any():
            await relayed.write(data)
        return relayed


async def session(application: web.Application) -> AsyncIterator[None]:
    application[SESSION] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=TIMEOUT)
    yield
    await application[SESSION].close()


SESSION: web.AppKey[aiohttp.ClientSession] = web.AppKey("session", aiohttp.ClientSession)
uvloop.install()
application = web.Application(client_max_size=32 << 20)
application.cleanup_ctx.append(session)
application.router.add_post("/{path:.*}", relay)
web.run_app(application, host="127.0.0.1", port=PORT, access_log=None, print=None, backlog=4096)
