"""Keeps the servers at the published policy: each version is an adapter under a name that was never used before.

The name matters. A server caches keys and values by the adapter's name, so new weights under an old name would be
mixed with what the old weights computed (0.9 nats off in vLLM, and only for prompts longer than a cache block); loading
a name that exists is refused while the old weights go on serving.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError

from retrain.kernel.contracts.serving import LogprobRow, Policy
from retrain.kernel.errors import BackendError, Problem, RetrainError
from retrain.kernel.types import Tokens
from retrain.rooms.inference.caller import Caller
from retrain.rooms.inference.client import Call, RefusedError
from retrain.rooms.inference.gap import PROBE_TOKENS, Gap
from retrain.rooms.inference.pool import Server

LOG = logging.getLogger("retrain")
NOT_FOUND = 404
REPAIR_EVERY_S = 1.0  # requests that failed before a repair must not start another
FLOOR_GAP, NOISE_FACTOR = 1e-3, 30.0  # a probe may be this much worse than the handshake was, up to max_gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One version on the servers; `name` is empty where the model itself is the policy, and `folder` then unused.

    `cache_salt` keeps the keys and values of weights apart that were given the same name.
    """

    name: str
    version: int
    folder: Path = Path()
    cache_salt: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Adapters:
    """The versions that the servers hold, the newest last.

    `probes` are prompts; after each load a few tokens are sampled from them with the very requests that rollouts
    send, and their log-probabilities compared with the trainer's at `probe_temperature`, that of the distribution
    which the server's numbers belong to.
    """

    caller: Caller
    policy: Policy
    folder: Path
    keep_versions: int
    max_gap: float
    temperature: float
    probe_temperature: float
    probes: Sequence[Tokens]
    versions: list[Loaded] = field(default_factory=list)
    limit: float = 0.0  # of the mean gap; 0 until the first measurement sets it
    last_gap: Gap | None = None
    _token: str = field(default_factory=lambda: secrets.token_hex(4))
    _serial: int = 0
    _reloaded_at: dict[Server, float] = field(default_factory=dict)  # times of the client's loop
    _locks: dict[Server, asyncio.Lock] = field(default_factory=dict)

    @classmethod
    def folder_for(cls, adapter_dir: str) -> Path:
        """A new folder of this engine's own; BackendError when there can be none."""
        try:
            if adapter_dir:
                Path(adapter_dir).expanduser().mkdir(parents=True, exist_ok=True)
            root = str(Path(adapter_dir).expanduser().resolve()) if adapter_dir else None
            folder = Path(tempfile.mkdtemp(prefix="retrain-adapters-", dir=root))
            folder.chmod(0o755)  # a server may run as another user
            return folder
        except OSError as error:
            what = f"no folder for adapters can be made: {error.strerror or error}"
            fix = "set [inference] adapter_dir to a folder that you may write and the servers can read"
            raise BackendError(Problem(where=str(adapter_dir or tempfile.gettempdir()), what=what, fix=fix)) from error

    @property
    def current(self) -> Loaded:
        """What `sample` draws from."""
        return self.versions[-1]

    def publish(self, *, verified: bool = True) -> None:
        """Bring every server to the policy's version and show that it is there, unless the caller will."""
        version = self.policy.version
        name = self._new_name(version)
        folder = self.folder / name
        try:
            folder.mkdir()
            self.policy.save_adapter(folder)
        except (OSError, SafetensorError) as error:
            what = f"the adapter of version {version} cannot be written: {getattr(error, 'strerror', None) or error}"
            fix = "free space there, or set [inference] adapter_dir"
            raise BackendError(Problem(where=str(folder), what=what, fix=fix)) from error
        if not any(folder.iterdir()):  # the backend says that the base model is the policy
            folder.rmdir()
            self.versions.append(Loaded(name="", version=version))
        else:
            self.load(Loaded(name=name, version=version, folder=folder))
        if verified:
            self.verify(self.caller.servers)
        self._forget_old()

    def take(self, folder: Path, version: int) -> None:
        """As `publish`, of an adapter that somebody else has written."""
        self.load(Loaded(name=self._new_name(version), version=version, folder=folder), is_foreign=True)
        self.verify(self.caller.servers)
        self._forget_old()

    def load(self, adapter: Loaded, *, is_foreign: bool = False) -> None:
        """Load an adapter on every server and use it from now on.

        One that a trainer wrote (`is_foreign`) may not have arrived on the server's disk. Then a 404 is tried again,
        with and without `/v1`, which PRIME-RL's own server does without.
        """
        label = f"loading the adapter of version {adapter.version}"
        try:
            orders = [self._load_order(adapter, server, label) for server in self.caller.servers]
            if is_foreign:
                orders = [replace(one, path=one.path.removeprefix("/v1"), or_path=one.path) for one in orders]
            self.caller.client.results(orders)
        except RefusedError as error:
            raise self._not_loaded(error, adapter) from error
        self.versions.append(adapter)

    def drop_current(self) -> None:
        """Unload the newest adapter and go back to the one before."""
        self._unload(self.versions.pop())

    async def restore(self, server: Server, status: int) -> bool:
        """Load the current adapter again on a server that does not know it, because it was started anew.

        Runs in the client's loop. The server is compared with the trainer before anything it drew is trained on.
        """
        adapter = self.current
        if status != NOT_FOUND or not adapter.name:
            return False
        async with self._locks.setdefault(server, asyncio.Lock()):  # all requests there fail together, one repairs
            now = asyncio.get_running_loop().time()
            if now - self._reloaded_at.get(server, -math.inf) > REPAIR_EVERY_S:
                label = f"loading the adapter of version {adapter.version} again"
                await self.caller.client.send(self._load_order(adapter, server, label))
                LOG.warning("%s had lost the adapter of version %d; loaded again.", server.name, adapter.version)
                self._reloaded_at[server] = asyncio.get_running_loop().time()
        return True

    def verify_reloaded(self) -> None:
        """Compare servers that had to be given the adapter again since this was last asked."""
        servers = tuple(self._reloaded_at)
        self._reloaded_at.clear()
        if servers:
            self.verify(servers)

    def verify(self, servers: Sequence[Server]) -> None:
        """BackendError unless these servers sample from the published policy, as far as the trainer can tell."""
        gaps = self.measure(servers, self.probes)
        for server, gap in gaps.items():
            limit = self.limit or self.max_gap
            if gap.mean > limit:
                raise self._stale(server, gap, limit)
        if gaps:
            self.last_gap = max(gaps.values(), key=lambda gap: gap.mean)

    def measure(self, servers: Sequence[Server], prompts: Sequence[Tokens]) -> dict[Server, Gap]:
        """Each server's gap on completions of these prompts; empty when the trainer is not in this process."""
        places = [(server, number) for server in servers for number in range(len(prompts))]
        calls = [
            self.caller.completion(
                prompts[number],
                seed=number,
                max_tokens=PROBE_TOKENS,
                temperature=self.temperature,
                adapter=self.current.name,
                cache_salt=self.current.cache_salt,
                server=server,
                repair=self.restore,
                label="the probe of the policy",
            )
            for server, number in places
        ]
        drawn = self.caller.client.results(calls)
        rows = [LogprobRow.of(prompts[number], one.tokens_T) for (_, number), one in zip(places, drawn, strict=True)]
        ours = self.policy.logprobs(rows, self.probe_temperature)
        if ours is None:
            return {}
        pairs = [(all_T[action_T], one) for all_T, (_, action_T), one in zip(ours, rows, drawn, strict=True)]
        return {
            server: Gap.between(
                [ours_T for (ours_T, _), (at, _) in zip(pairs, places, strict=True) if at is server],
                [one.logprobs_T for (_, one), (at, _) in zip(pairs, places, strict=True) if at is server],
            )
            for server in servers
        }

    def expect(self, gap: Gap) -> None:
        """Take the handshake's gap as the noise of this engine: later probes are judged by it."""
        self.limit = min(self.max_gap, max(FLOOR_GAP, NOISE_FACTOR * gap.mean))

    def close(self) -> None:
        """Unload what was loaded, where that is still possible, and remove the files."""
        for adapter in self.versions:
            self._unload(adapter)
        self.versions.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _new_name(self, version: int) -> str:
        self._serial += 1
        return f"retrain-{self._token}-{self._serial}-v{version}"

    def _forget_old(self) -> None:
        while len(self.versions) > self.keep_versions:
            self._unload(self.versions.pop(0))

    def _unload(self, adapter: Loaded) -> None:
        if adapter.name:
            request = self.caller.dialect.unload_adapter(adapter.name)
            for server in self.caller.servers:
                with suppress(RetrainError):  # a server that was started anew does not know it
                    order = self.caller.order(request, server, "unloading an adapter")
                    self.caller.client.results([replace(order, once=True)])
        if adapter.folder.parent == self.folder:
            shutil.rmtree(adapter.folder, ignore_errors=True)

    def _load_order(self, adapter: Loaded, server: Server, label: str) -> Call[None]:
        request = self.caller.dialect.load_adapter(adapter.name, adapter.folder)
        # the name is ours and new: one that is loaded already was loaded by a request whose answer got lost
        return replace(self.caller.order(request, server, label), is_done=lambda message: "already" in message)

    def _not_loaded(self, error: RefusedError, adapter: Loaded) -> BackendError:
        problem = error.problems[0]
        exists = adapter.folder.exists()
        why = f"the server must be able to read {adapter.folder}" if exists else f"{adapter.folder} is gone"
        hint = self.caller.dialect.adapter_hint
        fix = f"start the server with {hint}; on another machine, set [inference] adapter_dir"
        return BackendError(Problem(where=problem.where, what=problem.what, why=why, fix=fix))

    def _stale(self, server: Server, gap: Gap, limit: float) -> BackendError:
        what = (
            f"the server does not sample from policy version {self.current.version}: its log-probabilities are "
            f"{gap.mean:.2g} nats from the trainer's (mean of {gap.num_tokens} tokens, max {gap.max:.2g})"
        )
        why = f"at most {limit:.2g} was expected, from the start of the run and [inference] max_gap"
        fix = "restart the server; if its precision is the reason, raise [inference] max_gap"
        return BackendError(Problem(where=server.name, what=what, why=why, fix=fix))
