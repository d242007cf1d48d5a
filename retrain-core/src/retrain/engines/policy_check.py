"""Checks that a server samples from the policy: before a run, and every version of the policy during it."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from retrain.credit.logprob_gap import LogprobGap
from retrain.engines.client import Call, Client, RefusedError, UnusableAnswerError
from retrain.engines.dialect import Caller, Completion, Dialect, ServedModel
from retrain.engines.policy import Policy
from retrain.engines.pool import Server
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.kernel.seeding import generator
from retrain.kernel.types import Floats, LogprobRow, Tokens

LOG = logging.getLogger("retrain")
# Makes differences between tokens 1.4 times as large, well above SAME.
PROBE_TEMPERATURE = 0.7
SAME = 2e-3  # nats between two answers of one server about one distribution
OTHER = 1e-2  # nats; tolerance of that scaling, for close log-probabilities
BAD_REQUEST, UNPROCESSABLE = 400, 422  # from a server that does not know the fields of the request
PROBE_TEXT = (
    "A small town kept its records in a long, cold hall. Every spring the clerk counted 17 boxes, opened 4 of them, "
    "and wrote down what was inside: letters, maps, a broken clock, 250 coins. Then he asked himself: how many are "
    "left, and who will read them? If 3 people read 12 pages a day, the answer is 36; but nobody had ever tried. "
)
# The longest exceeds the blocks in which servers cache keys and values.
NUM_PROBES, SHORTEST, LONGEST = 8, 8, 420
PROBE_TOKENS = 16
TOP = 5  # number of likeliest tokens that are compared
WEIGHTS = "adapter_model.safetensors"
PROBE_STD = 0.3  # standard deviation of the probe adapter's weights
# A probe may be this much worse than the handshake, up to max_gap.
FLOOR_GAP, NOISE_FACTOR = 1e-3, 30.0
TOKEN_ID = re.compile(r"token_id:(\d+)")  # other names are texts
LEAST_LOGPROB = -1000.0  # vLLM writes -9999 for minus infinity
PROBE_S = 60.0  # that a probe may take
Shown = list[Mapping[str, float]]  # per probe, log-probabilities of the likeliest first tokens


def find_models(client: Client, dialect: Dialect, policy: Policy) -> dict[str, ServedModel]:
    """Return the base model of every server that answers, by URL; ConfigError if it is not the policy's.

    BackendError when no server answers; a silent one is used once it does.
    """
    servers = client.pool.servers
    outcomes = client.outcomes([models_call(dialect, server) for server in servers])
    found = {server: models for server, models in zip(servers, outcomes, strict=True) if isinstance(models, list)}
    failed = {server: error for server, error in zip(servers, outcomes, strict=True) if isinstance(error, BackendError)}
    for error in failed.values():
        if isinstance(error, RefusedError) or not found:
            raise error
    for server, error in failed.items():
        LOG.warning("%s is used once it answers: %s.", server.name, error.problems[0].what)
    return {server.url: pick_model(server, models, policy) for server, models in found.items()}


def models_call(dialect: Dialect, server: Server) -> Call[list[ServedModel]]:
    path, body = dialect.models()
    return Call(path=path, body=body, read=dialect.parse_models, server=server, label="the list of models", once=True)


def pick_model(server: Server, models: list[ServedModel], policy: Policy) -> ServedModel:
    expected = policy.model_path
    named = [model for model in models if expected in (model.name, model.root)]
    similar = [model for model in models if Path(model.root or model.name).name == Path(expected).name]
    if named or len(similar) == 1 or len(models) == 1:
        return (named or similar or models)[0]
    raise other_model(server, [model.name for model in models], expected)


def other_model(server: Server, found: Sequence[str], expected: str) -> ConfigError:
    what = f"the server has {', '.join(map(repr, found)) or 'no model'}, not {expected!r}"
    fix = f"start it with {expected}"
    return ConfigError(Problem(code="engine.other-model", where=server.name, what=what, fix=fix))


def reports_after_temperature(caller: Caller, prompt_T: Tokens) -> bool | None:
    """True if the servers report log-probabilities after temperature; None when they return too few to decide.

    Samples a few tokens from each at two temperatures. ConfigError when an answer lacks data that training needs, or
    the servers disagree.
    """
    answers: list[bool | None] = []
    for server in caller.present:
        raw, warm = (_sample(caller, server, prompt_T, temperature) for temperature in (1.0, PROBE_TEMPERATURE))
        answers.append(_after_temperature(raw.tops, warm.tops))
    if len(set(answers)) > 1:
        what = "some servers report log-probabilities after temperature and others before it"
        fix = f"start all of them with {caller.dialect.start_hint}"
        raise ConfigError(Problem(code="engine.mixed-logprobs", where="[inference] url", what=what, fix=fix))
    return answers[0]


def _sample(caller: Caller, server: Server, prompt_T: Tokens, temperature: float, adapter: str = "") -> Completion:
    call = caller.completion(
        prompt_T,
        seed=1,
        max_tokens=2,
        temperature=temperature,
        adapter=adapter,
        server=server,
        top=TOP,
        label="the first probe",
    )
    try:
        return caller.client.results([call])[0]
    except BackendError as error:
        is_unknown_field = isinstance(error, RefusedError) and error.status in (BAD_REQUEST, UNPROCESSABLE)
        if not isinstance(error, UnusableAnswerError) and not is_unknown_field:
            raise
        what = f"the server does not report the tokens that it sampled: {error.problems[0].what}"
        why = "training needs the exact ids that were sampled, and a log-probability of each"
        fix = f"use a server that returns both; of {caller.dialect.name}, a recent version"
        problem = Problem(code="engine.no-exact-tokens", where=server.name, what=what, why=why, fix=fix)
        raise ConfigError(problem) from error


def _after_temperature(raw: Mapping[str, float], warm: Mapping[str, float]) -> bool | None:
    """Compare log p at T = 1 with log p at T = 0.7 over the tokens in both lists.

    Before temperature the two are equal. After it, differences between tokens are 1 / 0.7 times as large.
    """
    common = sorted(raw.keys() & warm.keys())
    if len(common) < 2:
        return None
    raw_N, warm_N = np.asarray([raw[key] for key in common]), np.asarray([warm[key] for key in common])
    if not (np.isfinite(raw_N).all() and np.isfinite(warm_N).all()):
        return None
    if np.abs(raw_N - warm_N).max() < SAME:
        return None if np.ptp(raw_N) < SAME else False
    # Centred, since temperature also shifts the normalising constant.
    expected_N, seen_N = (raw_N - raw_N.mean()) / PROBE_TEMPERATURE, warm_N - warm_N.mean()
    # The tolerance is relative where the tokens are far apart.
    return True if np.abs(expected_N - seen_N).max() < max(OTHER, 0.02 * float(np.ptp(raw_N))) else None


def require_adapters(caller: Caller, server: Server, prompt_T: Tokens, adapter: str) -> None:
    """Raise ConfigError when an adapter with large random weights does not change the server's answer."""
    plain, adapted = (_sample(caller, server, prompt_T, 1.0, name).tops for name in ("", adapter))
    common = sorted(plain.keys() & adapted.keys())
    if common and max(abs(plain[key] - adapted[key]) for key in common) < SAME:
        what = "the server ignores the adapter and answers with the base model"
        fix = f"start {caller.dialect.name} with {caller.dialect.adapter_hint}"
        raise ConfigError(Problem(code="engine.adapter-ignored", where=server.name, what=what, fix=fix))


def require_distribution(
    dialect: Dialect, after_temperature: bool | None, *, temperature: float, logprobs: str, weighed_by: str
) -> None:
    """Raise ConfigError when the reported log-probabilities cannot be used with this configuration.

    `weighed_by` is the key of `[algorithm]` that sets an importance weight, empty without one.
    """
    if temperature == 1.0 or after_temperature:
        return
    if after_temperature is None:
        LOG.warning("%s returned too few log-probabilities: perhaps they are before temperature.", dialect.name)
        return
    what = f"{dialect.name} reports log-probabilities before temperature, and [training] temperature = {temperature:g}"
    if logprobs == "engine" or weighed_by:
        where = "[inference] logprobs" if logprobs == "engine" else f"[algorithm] {weighed_by}"
        why = "behaviour log-probabilities and importance weights must describe the sampled distribution"
        fix = f"start it with {dialect.start_hint}, or set temperature = 1.0"
        fix += ', or logprobs = "trainer" without importance weights'
        raise ConfigError(Problem(code="engine.logprobs-before-temperature", where=where, what=what, why=why, fix=fix))


def probe_prompts(tokenizer: Any, context_limit: int | None) -> list[Tokens]:
    """Return eight prompts of 8 to 420 tokens, shorter where the context is; each leaves room for a few tokens."""
    longest = LONGEST if context_limit is None else max(1, min(LONGEST, context_limit - PROBE_TOKENS))
    ids: list[int] = list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    ids *= 1 + longest // len(ids)
    lengths = np.geomspace(min(SHORTEST, longest), longest, NUM_PROBES).astype(int)
    texts = [tokenizer.decode(ids[start : start + length][:longest]) for start, length in enumerate(lengths)]
    # encoded again, with any token that the tokenizer prepends: some servers take text and encode it themselves
    return [np.asarray(tokenizer(text)["input_ids"], dtype=np.int64) for text in texts]


def write_probe_adapter(source: Path, folder: Path) -> bool:
    """Copy an adapter with large random weights; False when its weights have a type that numpy lacks."""
    try:
        tensors = load_file(source / WEIGHTS)
    except (OSError, TypeError, KeyError, AttributeError):  # bfloat16
        return False
    stream = generator(0)
    noise = {name: (PROBE_STD * stream.standard_normal(t.shape)).astype(t.dtype) for name, t in sorted(tensors.items())}
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.name != WEIGHTS:
            shutil.copyfile(file, folder / file.name)
    save_file({name: np.ascontiguousarray(t) for name, t in noise.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    return True


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
        if gap is not None:
            self._require_small(gap, server, version, "the trainer's")
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
        self._require_small(gap, server, version, "the trainer's for the likeliest first tokens")

    async def shown(self, server: Server, version: PolicyVersion, *, once: bool = False) -> Shown:
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
        self._require_small(LogprobGap.of(differences), server, version, "a server that has it")

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

    def _require_small(self, gap: LogprobGap, server: Server, version: PolicyVersion, other: str) -> None:
        if not gap.mean <= self.limit:  # NaN too
            numbers = f"{gap.mean:.2g} nats from {other} (mean of {gap.num_tokens} tokens, max {gap.max:.2g})"
            raise self._other_policy(server, version, numbers)

    def _other_policy(self, server: Server, version: PolicyVersion, numbers: str) -> OtherPolicyError:
        what = f"the server does not sample from policy version {version.version}: its log-probabilities are {numbers}"
        why = f"at most {self.limit:.2g} was expected, from the start of the run and [inference] max_gap"
        fix = "restart the server; if its precision is the reason, raise [inference] max_gap"
        return OtherPolicyError(Problem(code="engine.other-policy", where=server.name, what=what, why=why, fix=fix))
