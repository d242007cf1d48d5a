"""Keys of `[inference]` that only some engines support: refused where they would have no effect."""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection

from retrain.engines.table import DEFAULT_URLS, listed
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import EngineTraits, Kind
from retrain.kernel.errors import Problem
from retrain.kernel.registry import Plugins
from retrain.text.secrets import hide_text

KEYS = ("logprobs", "attention_kernel", "dtype", "kv_cache_dtype")
FLAGS = {
    "attention_kernel": "--attention-backend",
    "dtype": "--dtype or --quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
}
OWN_FLAGS = {"vllm": FLAGS, "sglang": FLAGS, "max": {"dtype": "--quantization-encoding"}}  # the known ones


def unsupported_keys(config: Config, plugins: Plugins, servers: Collection[str]) -> list[Problem]:
    """One problem per key that is not at its default and that the traits of the engine do not list.

    `servers` names the engines that are servers, which have separate options for some of these keys.
    A backend that samples without an engine refuses them itself.
    """
    table, default = config.inference, InferenceTable()
    entries = plugins.find(Kind.INFERENCE_ENGINE, table.engine)
    traits = entries[0].spec.traits if len(entries) == 1 else None
    if not isinstance(traits, EngineTraits):
        return []
    problems = []
    for name in KEYS:
        value = getattr(table, name)
        if value == getattr(default, name) or name in traits.honours:
            continue
        why, fix = f"engine {table.engine!r} does not support it", "remove it"
        if table.engine in servers:
            why = f"the server of engine {table.engine!r} sets it when it starts"
            flag = OWN_FLAGS.get(table.engine, {}).get(name, "its own option for it")
            fix = f"remove it, and start the server with {flag}"
        what = f"{name} = {value!r} would have no effect: {why}"
        problems.append(Problem(where=config.place(f"inference.{name}"), what=what, fix=fix))
    return problems


THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
PORTS = {"http": 80, "https": 443}


def teacher_problems(config: Config) -> list[Problem]:
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
