"""Keeps each server at the policy versions in use: finds out that it is gone, back, restarted or wrong, and mends it.

Each server has a separate coroutine, so one that is slow or dead delays no other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from retrain.engines import policy_check
from retrain.engines.client import MAX_BAD_ANSWERS, NOT_FOUND, RefusedError, UnusableAnswerError
from retrain.engines.pool import FIRST_PAUSE_S, LONGEST_PAUSE_S, Server, jittered
from retrain.kernel.errors import BackendError, ConfigError, Problem, RetrainError

LOG = logging.getLogger("retrain")
LOOK_EVERY_S = 2.0  # at a server that has not answered anything for as long


@dataclass(slots=True, kw_only=True, eq=False)
class Keeper:
    """Loads every version of `wanted()` on one server, newest first, and unloads all others.

    A version counts as held once it matches the answers of a server that has it. A load that turned out wrong is
    repeated under another name, because a name keeps its weights, or keys and values of them. `error` is why the server
    is rejected; `reloads` counts how often it got back lost versions.
    """

    server: Server
    comparison: policy_check.Comparison
    wanted: Callable[[], Sequence[policy_check.PolicyVersion]]
    error: RetrainError | None = None
    reloads: int = 0
    _losses: int = 0  # that were made good
    _renamed: int = 0
    _unusable: int = 0  # answers to probes, in a row
    _task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._keep())
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def may_follow(self) -> bool:
        """True if the server still lacks a wanted version, and may have it in the next moments."""
        server, wanted = self.server, {version.key for version in self.wanted()}
        is_up_to_date = server.held == wanted == server.names.keys()
        return not (is_up_to_date or server.is_dead or server.is_rejected or server.failing_since < math.inf)

    def expect(self) -> None:
        """Count the server as lost: it was named, but is not there at the start of the run."""
        self._losses -= 1

    async def load(self, version: policy_check.PolicyVersion) -> None:
        """Load a version without comparing it; BackendError when the server refuses it or is gone."""
        server, losses = self.server, self.server.losses
        label = f"loading {'the weights' if version.is_whole else 'the adapter'} of version {version.version}"
        name = ""
        if version.is_whole:
            await self._replace_weights(version, label)
        elif not version.is_base:
            name = f"{version.key}-{self._renamed}" if self._renamed else version.key
            await self._load_adapter(version, name, label)
        if losses == server.losses:
            server.names[version.key] = name

    def accept(self, version: policy_check.PolicyVersion) -> None:
        server = self.server
        if version.key not in server.names:
            return  # lost while it was compared
        if self._losses != server.losses or server.is_rejected:
            LOG.warning("%s has policy version %d; before: %s.", server.name, version.version, server.failure)
            self.reloads += self._losses != server.losses
        self._losses, self._unusable, self.error = server.losses, 0, None
        server.held.add(version.key)
        server.is_rejected, server.failure = False, ""
        self.comparison.caller.client.pool.notify()

    def reject(self, version: policy_check.PolicyVersion | None, error: RetrainError) -> None:
        """Record that the server answers wrongly, with this version or with any."""
        server, problem = self.server, error.problems[0]
        if not server.is_rejected:
            LOG.warning("%s gets no requests: %s.", server.name, problem.what)
        self.error, server.is_rejected, server.failure = error, True, problem.what
        if version is not None and server.names.pop(version.key, ""):
            server.held.discard(version.key)
            self._renamed += 1
        self.comparison.caller.client.pool.notify()

    async def _keep(self) -> None:
        pauses = 0
        while True:
            self.server.changed.clear()
            try:
                await self._look()
                pauses = 0
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self.server.changed.wait()
            except BackendError as error:  # it is not there, as the pool knows from the failed request
                self.server.failure = error.problems[0].what
                # The exponent is bounded: after days of failures the power would not fit in a float.
                await asyncio.sleep(jittered(min(FIRST_PAUSE_S * 2 ** min(pauses, 16), LONGEST_PAUSE_S)))
                pauses += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Reject the server on a fault of this program, so that it does not pass for a slow one."""
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("The keeper of %s has failed.", self.server.name, exc_info=error)
            what, fix = f"internal error: {type(error).__name__}: {error}", "report the traceback in the log"
            problem = Problem(code="engine.internal-error", where=self.server.name, what=what, fix=fix)
            self.reject(None, BackendError(problem))

    async def _look(self) -> None:
        server, now = self.server, asyncio.get_running_loop().time()
        if server.answered_at < now - LOOK_EVERY_S or server.failing_since < now or not server.names:
            try:
                await self._require_model()
            except (RefusedError, ConfigError) as error:
                self.reject(None, error)
                raise BackendError(*error.problems) from error
        for version in reversed(self.wanted()):
            if version.key not in server.held:
                await self._bring(version)
        wanted = {version.key for version in self.wanted()}
        for key in server.names.keys() - wanted:
            await self.unload(key)

    async def _require_model(self) -> None:
        """Raise ConfigError unless the server has its earlier model, or a suitable one if it was never seen."""
        caller, server = self.comparison.caller, self.server
        models = await caller.client.send(policy_check.models_call(caller.dialect, server))
        known = caller.served.get(server.url)
        model = next((model for model in models if known and model.name == known.name), None)
        if model is None and known is not None:
            raise policy_check.other_model(server, [model.name for model in models], known.name)
        model = model or policy_check.pick_model(server, models, self.comparison.policy)
        if (model.context_limit or math.inf) < (caller.context_limit or 0):
            what = f"the server has a context of {model.context_limit} tokens, the others have {caller.context_limit}"
            fix = "start it with a longer context"
            raise ConfigError(Problem(code="engine.short-context", where=server.name, what=what, fix=fix))
        caller.served[server.url] = model

    async def _bring(self, version: policy_check.PolicyVersion) -> None:
        server = self.server
        try:
            if version.key not in server.names:
                await self.load(version)
            if version.shown is None or version.key not in server.names:
                return  # who publishes it compares the first server that has it, and wakes the others
            await self.comparison.require_shown(server, version)
        except (RefusedError, policy_check.OtherPolicyError, ConfigError) as error:
            if isinstance(error, RefusedError) and error.status == NOT_FOUND and version.key in server.names:
                self.comparison.caller.client.pool.lose(server, "it lost the policy, as after a restart")
            elif version in self.wanted():
                self.reject(version, error)
            raise BackendError(*error.problems) from error
        except UnusableAnswerError as error:
            self._unusable += 1
            if self._unusable >= MAX_BAD_ANSWERS:
                self.reject(version, error)
            raise
        self.accept(version)

    async def _load_adapter(self, version: policy_check.PolicyVersion, name: str, label: str) -> None:
        caller = self.comparison.caller
        path, body = caller.dialect.load_adapter(name, version.folder)
        call = caller.admin_call((path, body), self.server, label)
        # the name is new, so "already loaded" means that an earlier answer to this request was lost
        call = replace(call, is_done=lambda message: "already" in message)
        # Its files may arrive late, and PRIME-RL's own server has the route without /v1.
        if version.is_foreign:
            call = replace(call, path=path.removeprefix("/v1"), fallback_path=path)
        try:
            await caller.client.send(call)
        except RefusedError as error:
            why = f"the server must be able to read {version.folder}"
            fix = f"start it with {caller.dialect.adapter_hint}; on another machine, set [inference] adapter_dir"
            raise RefusedError(replace(error.problems[0], why=why, fix=fix), error.status) from error

    async def _replace_weights(self, version: policy_check.PolicyVersion, label: str) -> None:
        """Give the server other weights under its old name; from then on a blip may be a restart without them."""
        server, caller = self.server, self.comparison.caller
        server.held.clear()
        server.names.clear()
        server.has_weights = True
        *requests, resume = caller.dialect.load_weights(version.folder)
        calls = [caller.admin_call(request, server, label) for request in (*requests, resume)]
        # Files of another process may arrive late: a 404 is then transient.
        *calls, resuming = [replace(call, fallback_path=call.path) for call in calls]
        try:
            for call in calls:
                await caller.client.send(call)
        finally:
            # The server must not stay paused after a failure.
            await caller.client.send(resuming)

    async def unload(self, key: str) -> None:
        server, caller = self.server, self.comparison.caller
        server.held.discard(key)
        if name := server.names.get(key, ""):
            call = caller.admin_call(caller.dialect.unload_adapter(name), server, "unloading an adapter")
            with suppress(RefusedError):  # a restarted server no longer has it
                await caller.client.send(replace(call, once=True))
        server.names.pop(key, None)
