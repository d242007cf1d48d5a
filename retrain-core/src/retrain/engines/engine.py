"""An engine that is one server or several: checked samples of the published policy, over HTTP."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from retrain.credit.logprob_gap import LogprobGap
from retrain.engines import policy_check
from retrain.engines.adapters import Adapters
from retrain.engines.client import Call, Client
from retrain.engines.dialect import Caller, Completion, Dialect, vocabulary_of
from retrain.engines.policy import Policy
from retrain.engines.policy_check import PolicyVersion
from retrain.engines.pool import Server
from retrain.engines.table import Settings
from retrain.kernel.contracts.backend import Deliver
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.kernel.types import Floats, LogprobRow, Sample, SampleRequest, SamplingParams, Tokens

LOG = logging.getLogger("retrain")
COMPARED_ROWS = 8  # of each batch, where the comparison costs an extra forward pass


def create(dialect: Dialect, context: PluginContext, policy: Policy) -> ServerEngine:
    """Check the servers of `[inference] url`, give them the policy, and measure how exactly they sample from it."""
    table, algorithm = context.config.inference, context.config.algorithm
    temperature = context.config.training.temperature
    with ExitStack() as undo:
        client = Client(Settings.of(context.config, dialect.name))
        undo.callback(client.close)
        served = policy_check.find_models(client, dialect, policy)
        limits = [limit for limit in (policy.context_limit, *(m.context_limit for m in served.values())) if limit]
        caller = Caller(
            client=client,
            dialect=dialect,
            served=served,
            stop_ids=policy.stop_ids,
            vocabulary=vocabulary_of(policy, context.tokenizer),
            context_limit=min(limits, default=None),
        )
        probes = policy_check.probe_prompts(context.tokenizer, caller.context_limit)
        after_temperature = policy_check.reports_after_temperature(caller, probes[0])
        weighed_by = "tis_cap" if algorithm.tis_cap > 0.0 else "is_bounds" if algorithm.is_bounds else ""
        policy_check.require_distribution(
            dialect, after_temperature, temperature=temperature, logprobs=table.logprobs, weighed_by=weighed_by
        )
        # While it is undecided (None), a wrong assumption shows as a gap to the trainer.
        is_same = temperature == 1.0 or after_temperature is not False
        comparison = policy_check.Comparison(
            caller=caller,
            policy=policy,
            max_gap=table.max_gap,
            temperature=temperature,
            probe_temperature=temperature if is_same else 1.0,
            probes=(probes[0], probes[-1]),
        )
        folder = Adapters.folder_for(table.adapter_dir)
        adapters = Adapters(comparison, folder=folder, keep_versions=table.keep_versions, retry_s=table.retry_s)
        undo.callback(adapters.close)
        recomputes = table.logprobs == "trainer"
        behaviour = Behaviour(policy=policy, recomputes=recomputes, is_same_distribution=is_same)
        engine = ServerEngine(context, caller, adapters, behaviour)
        engine.start()
        # From here on `close` of the engine frees them.
        undo.pop_all()
        return engine


class ServerEngine:
    """Samples each completion with its own request and seed, and delivers it as soon as it finishes.

    A request goes only to servers that hold the version that is current when `sample` begins; it stays there until
    `sample` ends, and another thread may `publish` the next one meanwhile.
    """

    delivers_early = True

    def __init__(self, context: PluginContext, caller: Caller, adapters: Adapters, behaviour: Behaviour) -> None:
        self._context, self._table = context, context.config.inference
        self._caller, self._adapters, self._behaviour = caller, adapters, behaviour
        self._is_ahead = context.config.training.max_staleness > 0  # samples while another is published
        self._reported = self._counts()

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        self._require_current()
        slots = [(group, index) for group, request in enumerate(requests) for index in range(len(request.seeds_G))]
        samples: dict[tuple[int, int], Sample] = {}
        with self._adapters.using() as current:
            calls = [self._call(requests[group], index, group, params, current) for group, index in slots]
            for batch in self._caller.client.run(calls, self._context.check_stop):
                finished = [slots[number] for number, _ in batch]
                prompts = [np.asarray(requests[group].prompt_T, dtype=np.int64) for group, _ in finished]
                rows = [(prompt_T, found) for prompt_T, (_, found) in zip(prompts, batch, strict=True)]
                made = self._behaviour.samples(rows, params.temperature, current.version)
                for slot, sample in zip(finished, made, strict=True):
                    samples[slot] = sample
                    if deliver is not None:
                        deliver(*slot, sample)
        return [
            [samples[group, index] for index in range(len(request.seeds_G))] for group, request in enumerate(requests)
        ]

    def publish(self) -> None:
        """Bring the servers to the policy's version; BackendError when none can be shown to have it.

        One that is slow or away gets no request for this version until it has it.
        """
        self._adapters.publish()

    def load_adapter(self, folder: Path, version: int) -> None:
        self._adapters.publish_foreign(folder, version)

    def load_weights(self, folder: Path, version: int) -> None:
        self._adapters.publish_weights(folder, version)

    def addresses(self) -> Sequence[tuple[str, str]]:
        key, served = self._require_current().key, self._caller.served
        holders = self._caller.client.pool.serving(key)
        return [(f"{server.url}/v1", server.names[key] or served[server.url].name) for server in holders]

    def metrics(self) -> Mapping[str, float]:
        counts = self._counts()
        fields = {name: float(counts[name] - before) for name, before in self._reported.items()}
        self._reported = counts
        pool, has_policy = self._caller.client.pool, bool(self._adapters.versions)
        serving = len(pool.serving(self._adapters.current.key)) if has_policy else 0
        fields |= {"inference_servers": float(serving), **self._behaviour.metrics()}
        if self._adapters.last_gap is not None:
            fields["probe_gap_mean"] = self._adapters.last_gap.mean
            fields["probe_gap_max"] = self._adapters.last_gap.max
        return fields

    def close(self) -> None:
        self._adapters.close()
        self._caller.client.close()

    def start(self) -> None:
        caller, adapters = self._caller, self._adapters

        def measure(version: PolicyVersion) -> LogprobGap | None:
            probe = adapters.folder / "probe"
            if not version.is_base and policy_check.write_probe_adapter(version.folder, probe):
                self._require_adapters(probe, version.version)
            prompts = policy_check.probe_prompts(self._context.tokenizer, caller.context_limit)
            gaps = adapters.comparison.with_trainer(caller.present, version, prompts)
            for server in caller.present:
                self._require_model(server, gaps.get(server))
                self._report(server, gaps.get(server))
            return max(gaps.values(), key=lambda gap: gap.mean, default=None)

        adapters.start(measure)

    def _require_model(self, server: Server, gap: LogprobGap | None) -> None:
        model, policy = self._caller.served[server.url], self._adapters.comparison.policy
        names = (Path(model.name).name, Path(model.root or "").name)
        # without a trainer to compare with, the name has to do
        if gap is None and Path(policy.model_path).name not in names:
            raise policy_check.other_model(server, [model.name], policy.model_path)
        if gap is not None and not gap.mean <= self._table.max_gap:  # NaN too
            what = f"log-probabilities of {model.name!r} are {gap.mean:.2g} nats from the trainer's (max {gap.max:.2g})"
            why = f"over {gap.num_tokens} tokens sampled from 8 prompts; [inference] max_gap is {self._table.max_gap:g}"
            fix = "serve the model of [model] model, with the same dtype; or raise max_gap and set [algorithm] tis_cap"
            raise ConfigError(Problem(code="engine.logprob-gap", where=server.name, what=what, why=why, fix=fix))

    def _report(self, server: Server, gap: LogprobGap | None) -> None:
        caller, is_same = self._caller, self._behaviour.is_same_distribution
        limit = caller.context_limit or "unknown"
        kind = "after temperature" if is_same else "before temperature, recomputed with the training model"
        compared = "not compared with a trainer"
        if gap is not None:
            compared = f"{gap.mean:.1e} nats from the trainer's (max {gap.max:.1e})"
        what = "%s at %s: %s, context %s, log-probabilities %s, %s"
        LOG.info(what, caller.dialect.name, server.name, caller.served[server.url].name, limit, kind, compared)

    def _require_adapters(self, folder: Path, version: int) -> None:
        """Load an adapter with large weights, and check that it changes the answers."""
        adapters, caller = self._adapters, self._caller
        probe = PolicyVersion(version=version, key=f"retrain-probe-{adapters.folder.name}", folder=folder)
        with adapters.loaded(probe):
            for server in caller.present:
                policy_check.require_adapters(caller, server, adapters.comparison.probes[0], server.names[probe.key])
        shutil.rmtree(folder, ignore_errors=True)

    def _require_current(self) -> PolicyVersion:
        if not self._adapters.versions:
            what, fix = "the engine is closed, or without a policy", "create another one"
            raise BackendError(Problem(code="engine.closed", where="sampling", what=what, fix=fix))
        current, published = self._adapters.current, self._adapters.comparison.policy.version
        if current.version != published and not self._is_ahead:
            what = f"the servers have policy version {current.version}, and version {published} was published"
            fix = "the backend must call publish on its engine"
            raise BackendError(Problem(code="engine.not-published", where="sampling", what=what, fix=fix))
        return current

    def _counts(self) -> dict[str, int]:
        client = self._caller.client
        return {
            "inference_retries": client.retries,
            "inference_moved": client.pool.moved,
            "inference_reloads": self._adapters.num_reloads,
        }

    def _call(
        self, request: SampleRequest, index: int, group: int, params: SamplingParams, current: PolicyVersion
    ) -> Call[Completion]:
        prompt_T, seed = np.asarray(request.prompt_T, dtype=np.int64), request.seeds_G[index]
        limit, vocabulary = self._caller.context_limit, self._caller.vocabulary
        # A server may crash on such a prompt, and take the requests of others with it.
        if not len(prompt_T) or prompt_T.min() < 0 or prompt_T.max() >= vocabulary:
            what = f"prompt {group} is empty, or holds a token id that is not among the model's {vocabulary}"
            fix = "use the tokenizer that belongs to the model"
            raise BackendError(Problem(code="engine.bad-prompt", where="sampling", what=what, fix=fix))
        if limit is not None and len(prompt_T) >= limit:
            what = f"prompt {group} has {len(prompt_T)} tokens, and the context of {limit} leaves no room to answer"
            fix = "use shorter prompts, or start the server with a longer context"
            raise ConfigError(Problem(code="engine.prompt-too-long", where="[data]", what=what, fix=fix))
        return self._caller.completion(
            prompt_T,
            seed=seed,
            max_tokens=params.max_tokens,
            temperature=0.0 if params.greedy else params.temperature,
            key=current.key,
            cache_salt=current.cache_salt + ("" if self._table.prefix_caching else str(seed)),
            label=f"completion {index} of prompt {group}",
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Behaviour:
    """Turns completions into samples.

    With `recomputes` the training model computes the behaviour log-probabilities at the sampling temperature. The
    engine's own are kept as well, for the truncated importance weight, if both describe the same distribution;
    otherwise (a server that reports them before temperature) the two are compared at T = 1 on a few rows.
    """

    policy: Policy
    recomputes: bool
    is_same_distribution: bool
    _differences: list[Floats] = field(default_factory=list)  # log p_trainer - log p_engine

    def samples(
        self, completions: Sequence[tuple[Tokens, Completion]], temperature: float, version: int
    ) -> list[Sample]:
        if not self.recomputes:
            return [_sample(completion, completion.logprobs_T, None, version) for _, completion in completions]
        # The recomputation chooses its own experts, and so must training.
        completions = [(prompt_T, replace(completion, experts_TLK=None)) for prompt_T, completion in completions]
        rows = [LogprobRow.of(prompt_T, completion.tokens_T) for prompt_T, completion in completions]
        trained = self._trainer_logprobs(rows, temperature)
        compared = trained if self.is_same_distribution else self._trainer_logprobs(rows[:COMPARED_ROWS], 1.0)
        self._differences += [
            trained_T - completion.logprobs_T for trained_T, (_, completion) in zip(compared, completions, strict=False)
        ]
        return [
            _sample(completion, trained_T, completion.logprobs_T if self.is_same_distribution else None, version)
            for trained_T, (_, completion) in zip(trained, completions, strict=True)
        ]

    def metrics(self) -> Mapping[str, float]:
        """Return `engine_gap_*`, in nats: |log p_trainer - log p_engine| of tokens recomputed since the last call."""
        if not self._differences:
            return {}
        gap = LogprobGap.of(self._differences)
        self._differences.clear()
        return {"engine_gap_mean": gap.mean, "engine_gap_p99": gap.p99, "engine_gap_max": gap.max}

    def _trainer_logprobs(self, rows: Sequence[LogprobRow], temperature: float) -> list[Floats]:
        found = self.policy.logprobs(rows, temperature)
        if found is None:
            what = "the training model is not in this process, so log-probabilities cannot be recomputed with it"
            where, fix = "[inference] logprobs", 'set logprobs = "engine" for this backend'
            raise BackendError(Problem(code="engine.no-training-model", where=where, what=what, fix=fix))
        return [values_T[action_T] for values_T, (_, action_T) in zip(found, rows, strict=True)]


def _sample(completion: Completion, logprobs_T: Floats, engine_T: Floats | None, version: int) -> Sample:
    experts, context, count = completion.experts_TLK, None, len(completion.tokens_T)
    if experts is not None:
        # The experts of a token are in the pass over the token before it, so the first token lacks them.
        context = np.concatenate([np.full_like(experts[:1], -1), experts[:-count]])
        experts = experts[-count:]
    return Sample(
        tokens_T=completion.tokens_T,
        logprobs_T=logprobs_T,
        stop_reason=completion.stop_reason,
        policy_version=version,
        engine_logprobs_T=engine_T,
        experts_TLK=experts,
        context_experts_TLK=context,
    )
