"""The audit of a run's own verifier: right and wrong texts of a few examples, each scored twice.

It runs in the processes that will score the run's rollouts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nsmallest
from typing import Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedTasks, TimedScore, Verifier
from retrain.kernel.declared import CORRECT_ABOVE
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Outcome
from retrain.tasks.audit.probes import Gold, GoldOf, Probe, gold_from_reference, gold_of, wrong_texts
from retrain.tasks.audit.report import AuditFinding, AuditReport, Tally, Tried
from retrain.tasks.scoring.build import judges
from retrain.tasks.tasks import RewardVerifier

LOG = logging.getLogger("retrain")
SHADOW = "Shadow"  # first word of the lines about its audit
# Above this share of the time limit a harder answer may well exceed it.
SLOW_SHARE = 0.5
# The same examples whatever the run's seed, so that `retrain audit` has the findings that the run had.
DRAW = Seeds(0)

Scorer = Callable[[Sequence[tuple[Example, str]]], Sequence[TimedScore]]


def refuse_unfit_verifier(context: PluginContext, tasks: LoadedTasks) -> None:
    """Audit the verifier: RewardError when it fails, unless `[scoring] audit` says otherwise. A shadow only warns."""
    config = context.config
    if config.scoring.audit == "off" or not judges(tasks.verifier.rewards):
        return
    audited: list[tuple[Verifier, str, str]] = [(tasks.verifier, config.scoring.audit, "Reward")]
    if shadow := shadow_of(tasks):
        audited.append((shadow, "warn", SHADOW))
    for verifier, policy, name in audited:
        report = audit_tasks(tasks, context.tokenizer, config.scoring, verifier)
        if report.findings:
            from retrain.tasks.audit.findings import raise_on_failure

            raise_on_failure(report, policy, place=config.place("scoring.audit"), of=name)
        LOG.info("%s", report.line(name))


def shadow_of(tasks: LoadedTasks) -> Verifier | None:
    verifier = tasks.verifier
    service = verifier.service.shadow if isinstance(verifier, RewardVerifier) else None
    return None if service is None else RewardVerifier(service)


def audit_tasks(
    tasks: LoadedTasks, tokenizer: Any, settings: ScoringTable, verifier: Verifier | None = None
) -> AuditReport:
    """Try the run's verifier, or another one, on `[scoring] audit_examples` of the tasks; right answers for rewards."""
    verifier = verifier or tasks.verifier
    tokens_of = {prompt.example.id: prompt.tokens_T for prompt in tasks.prompts}
    return audit(
        [prompt.example for prompt in tasks.prompts],
        verifier.score_texts,
        limit=settings.audit_examples,
        gold=gold_of(verifier.rewards) if verifier.rewards else lambda _: Gold(),
        rendered=lambda example: str(tokenizer.decode(tokens_of[example.id], skip_special_tokens=True)),
        timeout_s=verifier.timeout_s,
        correct_above=settings.correct_above,
    )


def audit(
    examples: Sequence[Example],
    scorer: Scorer,
    *,
    limit: int,
    gold: GoldOf = gold_from_reference,
    rendered: Callable[[Example], str] | None = None,
    timeout_s: float | None = None,
    correct_above: float = CORRECT_ABOVE,
) -> AuditReport:
    """Try the reward on `limit` of the examples, drawn by their ids.

    `scorer` gets every text twice, and must score it each time (no cache). `gold` gives the right answer, `rendered`
    the whole prompt as a policy would repeat it. `timeout_s` is the limit of one score. A score above `correct_above`
    is correct. When scoring fails, the audit ends with that example, since a reward that hangs would use up its time
    limit on every text.
    """
    drawn = nsmallest(limit, examples, key=lambda example: DRAW.derive("audit", example.id))
    golds = {example.id: gold(example) for example in drawn}
    tried = _try(drawn, golds, rendered, scorer, correct_above)
    chosen = [e for e in drawn if golds[e.id].fault or any(t.probe.example is e for t in tried)]
    right = {e.id: [t for t in tried if t.probe.check == "gold" and t.probe.example is e] for e in chosen}
    known = [e for e in chosen if golds[e.id].fault or _counts(right[e.id], golds[e.id])]
    if not known and not any(t.has(Outcome.FAILED) for t in tried):
        known = [e for e in chosen if right[e.id]]
    best_of = {e.id: max((value for t in right[e.id] for value in t.values), default=0.0) for e in chosen}
    correct = [e for e in known if any(t.is_correct for t in right[e.id])]
    slowest = max(tried, key=lambda t: t.seconds, default=None)
    is_slow = slowest is not None and timeout_s is not None and slowest.seconds > SLOW_SHARE * timeout_s
    findings: tuple[AuditFinding, ...] = ()
    is_certain = len(correct) == len(known) and all(best_of[e.id] >= 1.0 for e in known)
    if is_slow or not is_certain or not all(t.is_sound for t in tried):
        from retrain.tasks.audit.findings import findings_of

        answers = [(e, golds[e.id].fault, right[e.id] if e in known else ()) for e in chosen]
        findings = tuple(findings_of(answers, tried, best_of, slowest if is_slow else None, timeout_s or 0.0))
    return AuditReport(
        examples=len(chosen),
        gold_tried=len(known),
        gold_correct=len(correct),
        gold_unknown=len(chosen) - len(known),
        lowest_gold=min((best_of[e.id] for e in correct), default=None),
        checks=_tallies(tried),
        seconds_mean=sum(t.seconds for t in tried) / max(len(tried), 1),
        seconds_max=slowest.seconds if slowest else 0.0,
        timeout_s=timeout_s,
        findings=findings,
    )


def _try(
    examples: Sequence[Example],
    golds: Mapping[str, Gold],
    rendered: Callable[[Example], str] | None,
    scorer: Scorer,
    above: float,
) -> list[Tried]:
    """Score the very first text by itself, then right and wrong texts example by example; then all once more."""
    done: list[tuple[Probe, TimedScore]] = []
    plausible = list(dict.fromkeys(text for example in examples if (text := example.reference.strip())))

    def scored(probes: Sequence[Probe]) -> Sequence[TimedScore]:
        return scorer([(probe.example, probe.text) for probe in probes]) if probes else ()

    def stages() -> Iterator[list[Probe]]:
        for example in examples:
            gold, start = golds[example.id], len(done)
            yield [Probe(example=example, check="gold", text=text) for text in gold.texts]
            values = {probe.text: timed.score.value for probe, timed in done[start:]}
            correct = [text for text, value in values.items() if value is not None and value > above]
            yield [*_wrong(example, gold.confirmed(correct), rendered, plausible)]

    for stage in stages():
        # The very first text is scored by itself: it pays for imports, and a reward that hangs costs one time limit.
        for part in (stage,) if done else (stage[:1], stage[1:]):
            done += zip(part, scored(part), strict=True)
            if any(first.score.outcome is Outcome.FAILED for _, first in done):
                return [Tried(probe=probe, first=first, second=first, correct_above=above) for probe, first in done]
    again = scored([probe for probe, _ in done])
    pairs = zip(done, again, strict=True)
    return [Tried(probe=p, first=first, second=second, correct_above=above) for (p, first), second in pairs]


def _wrong(
    example: Example, gold: Gold, rendered: Callable[[Example], str] | None, plausible: Sequence[str]
) -> Iterator[Probe]:
    seen: set[str] = set()
    prompt: Any = example.prompt
    if not isinstance(prompt, str):
        said = [message for message in prompt if message["role"] == "user"]
        prompt = str((said or [*prompt])[-1]["content"])
    echoes = [prompt] + ([rendered(example)] if rendered else [])
    for probe in wrong_texts(example, gold, echoes, plausible):
        if probe.text not in seen and (probe.check == "echo" or probe.text not in gold.texts):
            seen.add(probe.text)
            yield probe


def _counts(tried: Sequence[Tried], gold: Gold) -> bool:
    return bool(tried) and (gold.is_required or any(t.is_correct for t in tried))


def _tallies(tried: Sequence[Tried]) -> dict[str, Tally]:
    by_check: dict[str, list[Tried]] = {}
    for each in tried:
        by_check.setdefault(each.probe.check, []).append(each)
    return {
        check: Tally(
            tried=len(those),
            correct=sum(t.is_correct for t in those),
            no_verdict=sum(t.has(Outcome.NO_VERDICT) for t in those),
            failed=sum(t.has(Outcome.FAILED) for t in those),
        )
        for check, those in by_check.items()
    }
