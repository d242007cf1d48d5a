"""Checks that a server samples from a policy version, against the trainer or another server that has it."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from retrain.credit.logprob_gap import LogprobGap
from retrain.engines.client import Call
from retrain.engines.dialect import Caller, Completion
from retrain.engines.handshake import PROBE_TOKENS, TOP
from retrain.engines.policy import Policy
from retrain.engines.pool import Server
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.types import Floats, LogprobRow, Tokens

FLOOR_GAP, NOISE_FACTOR = 1e-3, 30.0  # how much worse than the handshake a probe may be, up to max_gap
TOKEN_ID = re.compile(r"token_id:(\d+)")  # other names are texts
LEAST_LOGPROB = -1000.0  # vLLM writes -9999 for minus infinity
PROBE_S = 60.0  # that a probe may take
Shown = list[Mapping[str, float]]  # per probe, log-probabilities of the likeliest first tokens


class OtherPolicyError(BackendError):
    """A server samples from another policy than the version that it was given."""


@dataclass(slots=True, kw_only=True, eq=False)
class PolicyVersion:
    """One version of the policy, as servers are given it.

    `key` is new each time, and also the name of the adapter. With `is_base` the policy is the base model, without an
    adapter. With `is_whole` the folder holds all weights, to replace the server's. Another process may still be writing
    the folder (`is_foreign`). `cache_salt` separates the cached keys and values of different weights under the same
    name. `shown` are a server's answers to the probes, None until one was compared with the trainer.
    """

    version: int
    key: str = field(default_factory=lambda: f"base-{secrets.token_hex(4)}")
    folder: Path = Path()
    is_base: bool = False
    is_whole: bool = False
    is_foreign: bool = False
    cache_salt: str = ""
    shown: Shown | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Comparison:
    """Samples a few tokens from the prompts `probes`, with the same requests that rollouts send.

    `probe_temperature` is the temperature of the distribution that the servers report. `limit` is for the mean gap.
    """

    caller: Caller
    policy: Policy
    max_gap: float
    temperature: float
    probe_temperature: float
    probes: Sequence[Tokens]
    limit: float = field(init=False)

    def __post_init__(self) -> None:
        self.limit = self.max_gap

    def calibrate(self, gap: LogprobGap) -> None:
        """Take the handshake's gap as the noise of this engine, by which later probes are judged."""
        self.limit = min(self.max_gap, max(FLOOR_GAP, NOISE_FACTOR * gap.mean))

    def with_trainer(
        self, servers: Sequence[Server], version: PolicyVersion, prompts: Sequence[Tokens], *, once: bool = False
    ) -> dict[Server, LogprobGap]:
        """Return the gap of each server on completions of these prompts; empty without a trainer in this process.

        With `once` a failed request is not sent again.
        """
        pairs = [(server, prompt_T, seed) for server in servers for seed, prompt_T in enumerate(prompts)]
        calls = [self._probe(*pair, version, max_tokens=PROBE_TOKENS, once=once) for pair in pairs]
        completions = self.caller.client.results(calls)
        rows = [LogprobRow.of(pair[1], found.tokens_T) for pair, found in zip(pairs, completions, strict=True)]
        trained = self.policy.logprobs(rows, self.probe_temperature)
        if trained is None:
            return {}
        differences: dict[Server, list[Floats]] = {server: [] for server in servers}
        for (server, *_), found, row, all_T in zip(pairs, completions, rows, trained, strict=True):
            differences[server].append(all_T[row.action_T] - found.logprobs_T)
        return {server: LogprobGap.of(found) for server, found in differences.items()}

    def require_trainers(self, server: Server, version: PolicyVersion) -> LogprobGap | None:
        """Return the server's gap to the trainer, None without one here; BackendError when it is too large."""
        gap = self.with_trainer([server], version, self.probes, once=True).get(server)
        if gap is not None and not gap.mean <= self.limit:  # NaN too
            numbers = f"{gap.mean:.2g} nats from the trainer's (mean of {gap.num_tokens} tokens, max {gap.max:.2g})"
            raise self._other_policy(server, version, numbers)
        return gap

    def require_trainers_tops(self, server: Server, version: PolicyVersion, shown: Shown) -> None:
        """Raise BackendError unless trainer and server agree on the likeliest first tokens.

        The sampled tokens are not enough: once a policy is nearly certain, its samples have a log-probability of almost
        0 in every version. Servers that name tokens by their texts cannot be compared this way.
        """
        named = [
            (prompt_T, int(found[1]), logprob)
            for prompt_T, tops in zip(self.probes, shown, strict=True)
            for name, logprob in sorted(tops.items())
            if (found := TOKEN_ID.fullmatch(name)) and logprob > LEAST_LOGPROB
        ]
        rows = [LogprobRow.of(prompt_T, np.array([token])) for prompt_T, token, _ in named]
        trained = self.policy.logprobs(rows, self.probe_temperature) if rows else None
        if trained is None:
            return
        gap = LogprobGap.of([all_T[-1:] - logprob for all_T, (_, _, logprob) in zip(trained, named, strict=True)])
        if not gap.mean <= self.limit:  # NaN too
            numbers = f"{gap.mean:.2g} nats from the trainer's (mean of the {gap.num_tokens} likeliest first tokens)"
            raise self._other_policy(server, version, numbers)

    async def shown(self, server: Server, version: PolicyVersion, *, once: bool = False) -> Shown:
        """Return a server's answers to the probes, in the loop of the client."""
        calls = [self._probe(server, each, 1, version, max_tokens=2, top=TOP, once=once) for each in self.probes]
        return [found.tops for found in await asyncio.gather(*map(self.caller.client.send, calls))]

    async def require_shown(self, server: Server, version: PolicyVersion) -> None:
        """Raise BackendError unless a server answers as one that was shown to have this version."""
        assert version.shown is not None
        found = await self.shown(server, version, once=True)
        differences = [
            np.array([mine[token] - known[token] for token in sorted(mine.keys() & known.keys())])
            for mine, known in zip(found, version.shown, strict=True)
        ]
        if any(len(known) and not len(each) for known, each in zip(version.shown, differences, strict=True)):
            raise self._other_policy(server, version, "of other tokens than those that are likeliest")
        gap = LogprobGap.of(differences)
        if not gap.mean <= self.limit:  # NaN too
            numbers = f"{gap.mean:.2g} nats from those of a server that has it (mean of {gap.num_tokens})"
            raise self._other_policy(server, version, numbers)

    def _probe(
        self,
        server: Server,
        prompt_T: Tokens,
        seed: int,
        version: PolicyVersion,
        *,
        max_tokens: int,
        top: int = 0,
        once: bool = False,
    ) -> Call[Completion]:
        call = self.caller.completion(
            prompt_T,
            seed=seed,
            max_tokens=max_tokens,
            temperature=self.temperature,
            adapter=server.names.get(version.key, version.key),
            cache_salt=version.cache_salt,
            server=server,
            top=top,
            label="the probe of the policy",
        )
        return replace(call, once=True, timeout_s=PROBE_S) if once else call

    def _other_policy(self, server: Server, version: PolicyVersion, numbers: str) -> OtherPolicyError:
        what = f"the server does not sample from policy version {version.version}: its log-probabilities are {numbers}"
        why = f"at most {self.limit:.2g} was expected, from the start of the run and [inference] max_gap"
        fix = "restart the server; if its precision is the reason, raise [inference] max_gap"
        return OtherPolicyError(Problem(where=server.name, what=what, why=why, fix=fix))
