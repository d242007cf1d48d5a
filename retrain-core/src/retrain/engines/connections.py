"""Keep-alive connections to servers, one per request in flight.

The pool inside `httpx` scans all of its connections several times per request, which takes milliseconds once there are
hundreds; here each connection is its own transport, and finding a free one costs nothing.
"""

from __future__ import annotations

import json
import ssl
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx


class Connections:
    """Keep-alive connections by server. Proxies and .netrc of the environment are ignored."""

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str]) -> None:
        self._headers = {"Accept": "application/json", "Content-Type": "application/json", **headers}
        is_encrypted = any(url.startswith("https://") for url in urls)
        # shared: each transport would otherwise make its own, and reading the certificates takes 50 ms
        self._tls = httpx.create_ssl_context() if is_encrypted else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._free: dict[str, list[httpx.AsyncHTTPTransport]] = defaultdict(list)

    async def exchange(self, url: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """GET, or POST of a JSON body; the whole response is read. httpx.HTTPError when the connection fails."""
        request = httpx.Request(
            "GET" if body is None else "POST",
            url + path,
            headers=self._headers,
            content=None if body is None else json.dumps(body).encode(),
        )
        if request.url.userinfo:
            request = next(httpx.BasicAuth(request.url.username, request.url.password).auth_flow(request))
        free = self._free[url]
        transport = free.pop() if free else httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)
        try:
            response = await transport.handle_async_request(request)
            await response.aread()
            await response.aclose()
        except BaseException:  # cancelled or broken: the state of this connection is unknown
            with suppress(Exception):
                await transport.aclose()
            raise
        free.append(transport)
        return response

    async def close(self) -> None:
        """Close all idle connections."""
        for free in self._free.values():
            while free:
                with suppress(httpx.HTTPError):
                    await free.pop().aclose()
