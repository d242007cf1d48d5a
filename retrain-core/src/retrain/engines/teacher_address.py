"""A teacher on the server that samples: there the weights change with every step, and adapters are loaded."""

from __future__ import annotations

import urllib.parse

from retrain.engines.table import DEFAULT_URLS, listed
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem
from retrain.text.secrets import hide_text

THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
PORTS = {"http": 80, "https": 443}


def problems_of(config: Config) -> list[Problem]:
    """One problem when a server of `[teacher]` is one of `[inference]`, however its address is written."""
    sampling = config.inference
    engine, url = config.teacher.engine, config.teacher.url
    if engine not in DEFAULT_URLS or sampling.engine not in DEFAULT_URLS.keys() | {"max"}:
        return []
    sampled = _addresses(sampling.url or DEFAULT_URLS.get(sampling.engine, "")) | _addresses(sampling.admin_url)
    shared = [given for address, given in _addresses(url or DEFAULT_URLS[engine]).items() if address in sampled]
    if not shared:
        return []
    where = config.place("teacher.url" if url else "teacher.engine")
    what = f"the teacher's server {hide_text(shared[0])} is the one that samples"
    why = "the run changes its weights, and a vLLM that takes adapters cannot teach"
    fix = "start a second server for the teacher, and name it in [teacher] url"
    return [Problem(where=where, what=what, why=why, fix=fix)]


def _addresses(urls: str) -> dict[tuple[str, int, str], str]:
    """Servers by host, port and path; the values are the URLs as given."""
    found: dict[tuple[str, int, str], str] = {}
    for url in listed(urls):
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        found["localhost" if host in THIS_MACHINE else host, parts.port or PORTS[parts.scheme], parts.path] = url
    return found
