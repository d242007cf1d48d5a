"""The audit of a run's own rewards, on the service or the environment that will score its completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.tasks import Reply
from retrain.kernel.types import Example, StopReason
from retrain.rooms.audit.gold import Gold, GoldOf, gold_of
from retrain.rooms.audit.report import AuditReport
from retrain.rooms.audit.trial import Scorer, TimedScore, audit
from retrain.rooms.tasks.environment_process import HostedEnvironment
from retrain.rooms.tasks.prompts import PromptPool
from retrain.rooms.tasks.scoring.service import ScoringService

MAX_TURNS = 32  # an episode that goes on longer is scored as it stands


def audit_rewards(
    pool: PromptPool, service: ScoringService, tokenizer: Any, settings: ScoringTable | None = None
) -> AuditReport:
    """Try the rewards of the service on `[scoring] audit_examples` of the pool."""
    return audit_pool(
        pool,
        service_scorer(service),
        tokenizer,
        settings=settings or service.settings,
        gold=gold_of([named.reward for named in service.rewards]),
        timeout_s=min(limits.timeout_s for limits in service.limits),
    )


def audit_pool(
    pool: PromptPool,
    scorer: Scorer,
    tokenizer: Any,
    *,
    settings: ScoringTable,
    gold: GoldOf,
    timeout_s: float | None = None,
) -> AuditReport:
    """The same with any scorer, for example one that plays an environment's episodes with the text as every reply."""
    prompts = {prompt.example.id: prompt for prompt in (*pool.train, *pool.held_out)}

    def rendered(example: Example) -> str:
        return str(tokenizer.decode(prompts[example.id].tokens_T, skip_special_tokens=True))

    examples = [prompt.example for prompt in prompts.values()]
    return audit(examples, scorer, limit=settings.audit_examples, gold=gold, rendered=rendered, timeout_s=timeout_s)


def audit_environment(
    pool: PromptPool, environment: HostedEnvironment, tokenizer: Any, settings: ScoringTable
) -> AuditReport:
    """Play episodes of an environment in which the policy says one wrong text whenever it is asked.

    What a right answer looks like, only the environment knows: none is tried.
    """
    return audit_pool(pool, episode_scorer(environment), tokenizer, settings=settings, gold=lambda _: Gold())


def episode_scorer(environment: HostedEnvironment) -> Scorer:
    """Gives an episode the same text as every reply, up to `MAX_TURNS`."""

    def score(pairs: Sequence[tuple[Example, str]]) -> list[TimedScore]:
        started = time.perf_counter()
        environment.begin([example for example, _ in pairs])
        replies: dict[int, Reply] = {}
        for _ in range(MAX_TURNS):
            asks = environment.advance(replies)
            if not asks:
                break
            replies = {number: Reply(text=pairs[number][1], stop_reason=StopReason.EOS) for number in asks}
        endings = environment.finish()
        seconds = (time.perf_counter() - started) / max(len(pairs), 1)
        return [TimedScore(score=ending.score, seconds=seconds) for ending in endings]

    return score


def service_scorer(service: ScoringService, failures: Path | None = None) -> Scorer:
    """Scores on the service, every text anew; what fails is part of the report, and kept in `failures` if given."""

    def score(pairs: Sequence[tuple[Example, str]]) -> list[TimedScore]:
        with service.batch("audit", failures, fresh=True) as batch:
            for example, text in pairs:
                batch.submit(example, text)
            scores = batch.collect(within_budget=False)
            return [TimedScore(score=s, seconds=t) for s, t in zip(scores, batch.seconds, strict=True)]

    return score
