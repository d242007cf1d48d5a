"""The policy versions that the servers are given, each as an adapter with a name that was never used before.

A server caches keys and values by the adapter's name, so new weights under an old name would read keys and values of
the old ones (0.9 nats off in vLLM, and only for prompts longer than a cache block). It also refuses to load an existing
name, and keeps serving the old weights.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from retrain.credit.logprob_gap import LogprobGap
from retrain.engines.client import RefusedError
from retrain.engines.keeper import Keeper
from retrain.engines.policy_check import Comparison, OtherPolicyError, PolicyVersion
from retrain.engines.pool import Server
from retrain.kernel.errors import BackendError, Problem

POLL_S = 0.005  # short against a step, since every publication waits for it
# `publish` waits for the other servers as long as the first one took, and at least this long.
SLOWER_S = 1.0


class Adapters:
    """The versions on the servers, the newest last: `keep_versions` of them, and those in `using`.

    A version is published once one server was compared with the trainer. The others are compared with that server,
    without the trainer, so they may follow while the next completions are sampled and the trainer works.
    """

    def __init__(self, comparison: Comparison, *, folder: Path, keep_versions: int, retry_s: float) -> None:
        self.comparison = comparison
        self.folder = folder
        self.versions: tuple[PolicyVersion, ...] = ()
        self.last_gap: LogprobGap | None = None
        self._keep_versions = keep_versions
        self._retry_s = retry_s
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()  # `using` and `publish` may run in different threads
        # Servers cache by name, and two runs may share a server.
        self._token = secrets.token_hex(4)
        self._serial = 0
        self._is_closed = False
        self.keepers = {
            server: Keeper(server=server, comparison=comparison, wanted=lambda: self.versions)
            for server in comparison.caller.servers
        }

    @classmethod
    def folder_for(cls, adapter_dir: str) -> Path:
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
            where = str(adapter_dir or tempfile.gettempdir())
            raise BackendError(Problem(code="engine.no-adapter-folder", where=where, what=what, fix=fix)) from error

    @property
    def current(self) -> PolicyVersion:
        """The version that `sample` uses: the newest that a server was shown to have."""
        return next(version for version in reversed(self.versions) if version.shown is not None)

    @property
    def num_reloads(self) -> int:
        return sum(keeper.reloads for keeper in self.keepers.values())

    @contextmanager
    def using(self) -> Iterator[PolicyVersion]:
        """Keep the current version on the servers for the duration of the block."""
        with self._lock:
            version = self.current
            self._uses[version.key] += 1
        try:
            yield version
        finally:
            with self._lock:
                self._uses[version.key] -= 1
            self._retire()

    def start(self, measure: Callable[[PolicyVersion], LogprobGap | None]) -> None:
        """Give the policy to the present servers; `measure` compares all of them with the trainer, or raises."""
        version, servers, call = self._written(), self.comparison.caller.present, self.comparison.caller.client.call
        self.versions = (version,)
        call(self._load_on(servers, version))
        gap = measure(version)
        version.shown = call(self.comparison.shown(servers[0], version))
        if gap is not None:
            self.comparison.calibrate(gap)
        call(self._start_keepers(servers, version))

    @contextmanager
    def loaded(self, version: PolicyVersion) -> Iterator[None]:
        """Keep a version on the present servers for the duration of the block, before `start` has ended."""
        servers, call = self.comparison.caller.present, self.comparison.caller.client.call
        try:
            call(self._load_on(servers, version))
            yield
        finally:
            for server in servers:
                call(self.keepers[server].unload(version.key))

    def publish(self) -> None:
        self._introduce(self._written())

    def publish_foreign(self, folder: Path, version: int) -> None:
        """Publish an adapter that another process wrote."""
        self._introduce(PolicyVersion(version=version, key=self._new_key(version), folder=folder, is_foreign=True))

    def publish_weights(self, folder: Path, version: int) -> None:
        """Publish all weights: a server has one version at a time, so nothing may be sampled meanwhile."""
        if any(self._uses.values()):
            what = f"the weights of version {version} cannot replace those that completions are being sampled from"
            fix = "publish after sample has returned"
            raise BackendError(Problem(code="engine.weights-in-use", where="sampling", what=what, fix=fix))
        key, before = self._new_key(version), self.versions
        # the name stays the same, and the server still caches keys and values of the old weights under it
        loaded = PolicyVersion(version=version, key=key, folder=folder, is_whole=True, cache_salt=f"{key}-")
        self.versions = ()
        self._introduce(loaded)
        self._remove(before)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.comparison.caller.client.call(self._stop_keepers())
        self.versions = ()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _written(self) -> PolicyVersion:
        """Write the policy as an adapter into a new folder, unless it equals the base model."""
        version = self.comparison.policy.version
        key = self._new_key(version)
        folder = self.folder / key
        try:
            folder.mkdir()
            self.comparison.policy.save_adapter(folder)
        except (OSError, SafetensorError) as error:
            what = f"the adapter of version {version} cannot be written: {getattr(error, 'strerror', None) or error}"
            fix = "free space there, or set [inference] adapter_dir"
            problem = Problem(code="engine.adapter-not-written", where=str(folder), what=what, fix=fix)
            raise BackendError(problem) from error
        if any(folder.iterdir()):
            return PolicyVersion(version=version, key=key, folder=folder)
        folder.rmdir()
        return PolicyVersion(version=version, key=key, is_base=True)

    def _introduce(self, version: PolicyVersion) -> None:
        """Have the keepers load a version, compare the first server that has it, and wait a little for the others."""
        started = time.monotonic()
        with self._lock:
            self.versions += (version,)
        self._wake()
        try:
            self._await_first(version, started + self._retry_s + SLOWER_S)
        except BaseException:
            with self._lock:
                self.versions = tuple(each for each in self.versions if each is not version)
            raise
        self._retire()
        now = time.monotonic()
        deadline = now + max(SLOWER_S, now - started)
        while time.monotonic() < deadline and any(keeper.may_follow() for keeper in self.keepers.values()):
            time.sleep(POLL_S)

    def _await_first(self, version: PolicyVersion, deadline: float) -> None:
        """Wait until a server matches the trainer; BackendError when all are wrong, or none answers."""
        # Only a server that has changed since its comparison is compared again.
        compared = dict[Server, tuple[int, str]]()
        while True:
            for server, keeper in self.keepers.items():
                name = server.names.get(version.key)
                if name is None or compared.get(server) == (server.losses, name):
                    continue
                compared[server] = (server.losses, name)
                try:
                    if self._is_right(version, keeper):
                        return
                except BackendError:  # it has gone since, or answered nothing that could be compared
                    del compared[server]
            errors = [keeper.error for keeper in self.keepers.values() if keeper.server.is_rejected and keeper.error]
            if len(errors) == len(self.keepers):
                raise BackendError(*(problem for error in errors for problem in error.problems))
            if time.monotonic() >= deadline:
                loaded, pool = "weights" if version.is_whole else "adapter", self.comparison.caller.client.pool
                what = f"no server has taken the {loaded} of version {version.version}, from {version.folder}"
                why = f"[inference] retry_s = {self._retry_s:g} ended the wait; {pool.failures()}"
                fix = "start the servers, or correct [inference] url; then resume the run"
                where = "[inference] url"
                raise BackendError(Problem(code="engine.policy-not-taken", where=where, what=what, why=why, fix=fix))
            time.sleep(POLL_S)

    def _is_right(self, version: PolicyVersion, keeper: Keeper) -> bool:
        """Compare a server with the trainer, and keep its answers; BackendError when that cannot be done."""
        server, client = keeper.server, self.comparison.caller.client
        try:
            self.last_gap = self.comparison.require_trainers(server, version)
            shown = client.call(self.comparison.shown(server, version, once=True))
            self.comparison.require_trainers_tops(server, version, shown)
        except OtherPolicyError as error:
            client.do(keeper.reject, version, error)
            return False
        except RefusedError as error:
            client.do(client.pool.lose, server, error.problems[0].what)
            raise
        version.shown = shown
        client.do(keeper.accept, version)
        return True

    def _retire(self) -> None:
        """Drop the versions that are neither among the newest nor in use; the keepers unload them."""
        with self._lock:
            kept = self.versions[-self._keep_versions :]
            retired = [v for v in self.versions if v not in kept and not self._uses[v.key]]
            self.versions = tuple(version for version in self.versions if version not in retired)
        self._wake()
        self._remove(retired)

    def _remove(self, versions: Sequence[PolicyVersion]) -> None:
        for version in versions:
            if version.folder.parent == self.folder:
                shutil.rmtree(version.folder, ignore_errors=True)

    def _new_key(self, version: int) -> str:
        self._serial += 1
        return f"retrain-{self._token}-{self._serial}-v{version}"

    def _wake(self) -> None:
        def wake() -> None:
            for server in self.keepers:
                server.changed.set()

        self.comparison.caller.client.do(wake)

    async def _load_on(self, servers: Sequence[Server], version: PolicyVersion) -> None:
        await asyncio.gather(*(self.keepers[server].load(version) for server in servers))

    async def _start_keepers(self, servers: Sequence[Server], version: PolicyVersion) -> None:
        self.comparison.caller.client.pool.is_watched = True
        for server in servers:
            self.keepers[server].accept(version)
        for server in self.keepers.keys() - set(servers):
            self.keepers[server].expect()
        await asyncio.gather(*(keeper.start() for keeper in self.keepers.values()))

    async def _stop_keepers(self) -> None:
        async def end(keeper: Keeper) -> None:
            await keeper.stop()
            for key in [] if keeper.server.is_dead else list(keeper.server.names):
                with suppress(BackendError):
                    await keeper.unload(key)

        await asyncio.gather(*map(end, self.keepers.values()))
