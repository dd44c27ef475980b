"""Reading small pages of workers: whole, bounded, and without being led anywhere.

A worker is not trusted to be well: a page may never end, be huge, point elsewhere or set cookies. None of that reaches
the caller, who gets the bytes of a page or an error.
"""

from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx2

from evenflow.fleet.registry import Worker

# No page that is read of a worker is larger.
PAGE_BYTES_MAX = 4 * 1024 * 1024
# For a whole page, several times what one read may take.
READS_MAX_S = 4.0


def new_client(timeout_s: float) -> httpx2.AsyncClient:
    """A client that follows no redirect, keeps no cookie, and takes no proxy from the environment."""
    nothing = CookieJar(policy=DefaultCookiePolicy(allowed_domains=[]))
    return httpx2.AsyncClient(timeout=timeout_s, trust_env=False, follow_redirects=False, cookies=nothing)


async def read_page(client: httpx2.AsyncClient, worker: Worker, path: str) -> tuple[int, bytes]:
    """Status and body. Raises httpx2.HTTPError, OSError, or ValueError for a page that is too large."""
    root = f"{'https' if worker.tls else 'http'}://{url_host(worker.host)}:{worker.port}{worker.base.decode()}"
    headers = {"authorization": worker.authorization} if worker.authorization else {}
    async with client.stream("GET", root + path, headers=headers) as answer:
        page = bytearray()
        async for piece in answer.aiter_bytes():
            page += piece
            if len(page) > PAGE_BYTES_MAX:
                raise ValueError(f"{path} is larger than {PAGE_BYTES_MAX} bytes")
        return answer.status_code, bytes(page)


def url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
