"""The audit of a run's own verifier, in the processes that will score its rollouts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.contracts.verifier import LoadedTasks, Verifier
from retrain.kernel.types import Example
from retrain.tasks.audit.gold import Gold, GoldOf, gold_of
from retrain.tasks.audit.report import AuditReport, raise_on_failure
from retrain.tasks.audit.trial import Scorer, audit
from retrain.tasks.scoring.build import judges
from retrain.tasks.verifiers import RewardVerifier

LOG = logging.getLogger("retrain")
SHADOW = "Shadow"  # what the lines about its audit begin with


def refuse_unfit_verifier(context: PluginContext, tasks: LoadedTasks) -> None:
    """The audit before training: RewardError when the verifier fails it, unless `[scoring] audit` says otherwise.

    A shadow is warned of only, for nothing is trained on it.
    """
    config = context.config
    if config.scoring.audit == "off" or not judges(tasks.verifier.rewards):
        return
    report = audit_tasks(tasks, context.tokenizer, config.scoring)
    raise_on_failure(report, config.scoring.audit, place=config.place("scoring.audit"))
    LOG.info("%s", report.line())
    if shadow := shadow_of(tasks):
        report = audit_tasks(tasks, context.tokenizer, config.scoring, shadow)
        raise_on_failure(report, "warn", of=SHADOW)
        LOG.info("%s", report.line(SHADOW))


def shadow_of(tasks: LoadedTasks) -> Verifier | None:
    """The run's shadow as a verifier of its own; None without one."""
    verifier = tasks.verifier
    service = verifier.service.shadow if isinstance(verifier, RewardVerifier) else None
    return None if service is None else RewardVerifier(service)


def audit_tasks(
    tasks: LoadedTasks, tokenizer: Any, settings: ScoringTable, verifier: Verifier | None = None
) -> AuditReport:
    """Try the run's verifier, or another one, on `[scoring] audit_examples` of the tasks.

    Right answers are tried with rewards only: what one looks like to an environment, it alone knows.
    """
    verifier = verifier or tasks.verifier
    return audit_prompts(
        tasks.prompts,
        verifier.score_texts,
        tokenizer,
        settings=settings,
        gold=gold_of(verifier.rewards) if verifier.rewards else lambda _: Gold(),
        timeout_s=verifier.timeout_s,
    )


def audit_prompts(
    prompts: Sequence[Prompt],
    scorer: Scorer,
    tokenizer: Any,
    *,
    settings: ScoringTable,
    gold: GoldOf,
    timeout_s: float | None = None,
) -> AuditReport:
    """The same with any scorer; a policy that repeats its prompt writes it as the tokenizer decodes it."""
    tokens_of = {prompt.example.id: prompt.tokens_T for prompt in prompts}

    def rendered(example: Example) -> str:
        return str(tokenizer.decode(tokens_of[example.id], skip_special_tokens=True))

    examples = [prompt.example for prompt in prompts]
    return audit(
        examples,
        scorer,
        limit=settings.audit_examples,
        gold=gold,
        rendered=rendered,
        timeout_s=timeout_s,
        correct_above=settings.correct_above,
    )
