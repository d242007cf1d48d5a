"""Keeps the servers at the published policy: each version is an adapter with a name that was never used before.

A server caches keys and values by the adapter's name, so new weights under an old name would be mixed with what the old
weights computed (0.9 nats off in vLLM, and only for prompts longer than a cache block); and loading an existing name is
refused while the old weights keep serving.
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

from retrain.kernel.errors import BackendError, Problem, RetrainError
from retrain.kernel.types import Floats, Tokens
from retrain.rooms.inference.caller import Caller
from retrain.rooms.inference.client import Call, RefusedError
from retrain.rooms.inference.policy import Policy
from retrain.rooms.inference.pool import Server
from retrain.rooms.inference.probes import PROBE_TOKENS
from retrain.rooms.session.steps.logprob_gap import LogprobGap, LogprobRow

LOG = logging.getLogger("retrain")
NOT_FOUND = 404
REPAIR_EVERY_S = 1.0  # requests that failed before a repair must not trigger another
FLOOR_GAP, NOISE_FACTOR = 1e-3, 30.0  # how much worse than the handshake a probe may be, up to max_gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One version on the servers; `name` is empty, and `folder` unused, where the base model itself is the policy.

    `cache_salt` separates the cached keys and values of different weights under the same name.
    """

    name: str
    version: int
    folder: Path = Path()
    cache_salt: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Adapters:
    """The versions that the servers hold, the newest last.

    After each load a few tokens are sampled from the prompts `probes`, with the same requests that rollouts send, and
    their log-probabilities compared with the trainer's at `probe_temperature`: the temperature of the distribution that
    the server reports.
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
    limit: float = 0.0  # for the mean gap; 0 until calibrated
    last_gap: LogprobGap | None = None
    _token: str = field(default_factory=lambda: secrets.token_hex(4))
    _serial: int = 0
    _reloaded_at: dict[Server, float] = field(default_factory=dict)  # times of the client's loop
    _locks: dict[Server, asyncio.Lock] = field(default_factory=dict)

    @classmethod
    def folder_for(cls, adapter_dir: str) -> Path:
        """A new folder for this engine alone; BackendError when none can be made."""
        try:
            if adapter_dir:
                Path(adapter_dir).expanduser().mkdir(parents=True, exist_ok=True)
            root = str(Path(adapter_dir).expanduser().resolve()) if adapter_dir else None
            folder = Path(tempfile.mkdtemp(prefix="retrain-adapters-", dir=root))
            folder.chmod(0o755)  # a server may run as another user
            return folder
        except OSError as error:
            what = f"no folder for adapters can be made: {error.strerror or error}"
            fix = "set [inference] adapter_dir to a folder that you can write and the servers can read"
            raise BackendError(Problem(where=str(adapter_dir or tempfile.gettempdir()), what=what, fix=fix)) from error

    @property
    def current(self) -> Loaded:
        """The version that `sample` uses."""
        return self.versions[-1]

    def publish(self, *, verified: bool = True) -> None:
        """Bring every server to the policy's version; `verified=False` leaves the probe to the caller."""
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
        if not any(folder.iterdir()):  # the base model is the policy
            folder.rmdir()
            self.versions.append(Loaded(name="", version=version))
        else:
            self.load(Loaded(name=name, version=version, folder=folder))
        if verified:
            self.verify(self.caller.servers)
        self._unload_old()

    def publish_foreign(self, folder: Path, version: int) -> None:
        """As `publish`, for an adapter that another process wrote."""
        self.load(Loaded(name=self._new_name(version), version=version, folder=folder), is_foreign=True)
        self.verify(self.caller.servers)
        self._unload_old()

    def load(self, adapter: Loaded, *, is_foreign: bool = False) -> None:
        """Load an adapter on every server and use it from now on.

        One that another process wrote (`is_foreign`) may not have reached the server's disk yet, so a 404 is retried,
        with and without `/v1`, a prefix that PRIME-RL's server does not use.
        """
        label = f"loading the adapter of version {adapter.version}"
        try:
            calls = [self._load_call(adapter, server, label) for server in self.caller.servers]
            if is_foreign:
                calls = [replace(call, path=call.path.removeprefix("/v1"), fallback_path=call.path) for call in calls]
            self.caller.client.results(calls)
        except RefusedError as error:
            raise self._not_loaded(error, adapter) from error
        self.versions.append(adapter)

    def drop_current(self) -> None:
        """Unload the newest adapter and return to the one before it."""
        self._unload(self.versions.pop())

    async def restore(self, server: Server, status: int) -> bool:
        """Load the current adapter again on a server that lost it in a restart.

        Runs in the client's loop. The server is compared with the trainer before its completions are trained on.
        """
        adapter = self.current
        if status != NOT_FOUND or not adapter.name:
            return False
        async with self._locks.setdefault(server, asyncio.Lock()):  # requests fail together; one repairs
            now = asyncio.get_running_loop().time()
            if now - self._reloaded_at.get(server, -math.inf) > REPAIR_EVERY_S:
                label = f"loading the adapter of version {adapter.version} again"
                await self.caller.client.send(self._load_call(adapter, server, label))
                LOG.warning("%s had lost the adapter of version %d; loaded again.", server.name, adapter.version)
                self._reloaded_at[server] = asyncio.get_running_loop().time()
        return True

    def verify_reloaded(self) -> None:
        """Compare the servers that lost the adapter since the last call."""
        servers = tuple(self._reloaded_at)
        self._reloaded_at.clear()
        if servers:
            self.verify(servers)

    def verify(self, servers: Sequence[Server]) -> None:
        """BackendError unless these servers sample from the published policy, where the trainer is here to compare."""
        gaps = self.measure(servers, self.probes)
        for server, gap in gaps.items():
            limit = self.limit or self.max_gap
            if not gap.mean <= limit:  # NaN too
                raise self._stale(server, gap, limit)
        if gaps:
            self.last_gap = max(gaps.values(), key=lambda gap: gap.mean)

    def measure(self, servers: Sequence[Server], prompts: Sequence[Tokens]) -> dict[Server, LogprobGap]:
        """The gap of each server on completions of these prompts; empty when the trainer is not in this process."""
        pairs = [(server, prompt_T, seed) for server in servers for seed, prompt_T in enumerate(prompts)]
        calls = [
            self.caller.completion(
                prompt_T,
                seed=seed,
                max_tokens=PROBE_TOKENS,
                temperature=self.temperature,
                adapter=self.current.name,
                cache_salt=self.current.cache_salt,
                server=server,
                repair=self.restore,
                label="the probe of the policy",
            )
            for server, prompt_T, seed in pairs
        ]
        completions = self.caller.client.results(calls)
        rows = [LogprobRow.of(pair[1], found.tokens_T) for pair, found in zip(pairs, completions, strict=True)]
        trained = self.policy.logprobs(rows, self.probe_temperature)
        if trained is None:
            return {}
        differences: dict[Server, list[Floats]] = {server: [] for server in servers}
        for (server, *_), found, row, all_T in zip(pairs, completions, rows, trained, strict=True):
            differences[server].append(all_T[row.action_T] - found.logprobs_T)
        return {server: LogprobGap.of(found) for server, found in differences.items()}

    def calibrate(self, gap: LogprobGap) -> None:
        """Take the handshake's gap as the noise of this engine, by which later probes are judged."""
        self.limit = min(self.max_gap, max(FLOOR_GAP, NOISE_FACTOR * gap.mean))

    def close(self) -> None:
        """Unload every adapter, where that is still possible, and remove the files."""
        for adapter in self.versions:
            self._unload(adapter)
        self.versions.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _new_name(self, version: int) -> str:
        self._serial += 1
        return f"retrain-{self._token}-{self._serial}-v{version}"

    def _unload_old(self) -> None:
        while len(self.versions) > self.keep_versions:
            self._unload(self.versions.pop(0))

    def _unload(self, adapter: Loaded) -> None:
        if adapter.name:
            request = self.caller.dialect.unload_adapter(adapter.name)
            for server in self.caller.servers:
                with suppress(RetrainError):  # a restarted server no longer has it
                    call = self.caller.admin_call(request, server, "unloading an adapter")
                    self.caller.client.results([replace(call, once=True)])
        if adapter.folder.parent == self.folder:
            shutil.rmtree(adapter.folder, ignore_errors=True)

    def _load_call(self, adapter: Loaded, server: Server, label: str) -> Call[None]:
        request = self.caller.dialect.load_adapter(adapter.name, adapter.folder)
        # the name is new, so "already loaded" means that an earlier answer to this request was lost
        return replace(self.caller.admin_call(request, server, label), is_done=lambda message: "already" in message)

    def _not_loaded(self, error: RefusedError, adapter: Loaded) -> BackendError:
        problem = error.problems[0]
        exists = adapter.folder.exists()
        why = f"the server must be able to read {adapter.folder}" if exists else f"{adapter.folder} is gone"
        hint = self.caller.dialect.adapter_hint
        fix = f"start the server with {hint}; on another machine, set [inference] adapter_dir"
        return BackendError(Problem(where=problem.where, what=problem.what, why=why, fix=fix))

    def _stale(self, server: Server, gap: LogprobGap, limit: float) -> BackendError:
        what = (
            f"the server does not sample from policy version {self.current.version}: its log-probabilities are "
            f"{gap.mean:.2g} nats from the trainer's (mean of {gap.num_tokens} tokens, max {gap.max:.2g})"
        )
        why = f"at most {limit:.2g} was expected, from the start of the run and [inference] max_gap"
        fix = "restart the server; if its precision is the reason, raise [inference] max_gap"
        return BackendError(Problem(where=server.name, what=what, why=why, fix=fix))
