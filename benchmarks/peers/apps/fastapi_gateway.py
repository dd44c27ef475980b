"""A gateway in forty lines of FastAPI and httpx. Started by peers/fastapi.py."""

import itertools
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

WORKERS = itertools.cycle(os.environ["WORKER_URLS"].split())
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)
application = FastAPI()
client = httpx.AsyncClient(timeout=600, limits=LIMITS)


async def stream(url: str, payload: dict[str, Any]) -> AsyncIterator[bytes]:
    async with client.stream("POST", url, json=payload) as answer:
        async for data in answer.aiter_raw():
            yield data


@application.post("/v1/chat/completions")
@application.post("/v1/completions")
async def relay(request: Request) -> Response:
    payload = json.loads(await request.body())
    url = next(WORKERS) + request.url.path
    if payload.get("stream"):
        return StreamingResponse(stream(url, payload), media_type="text/event-stream")
    answer = await client.post(url, json=payload)
    return JSONResponse(answer.json(), status_code=answer.status_code)
