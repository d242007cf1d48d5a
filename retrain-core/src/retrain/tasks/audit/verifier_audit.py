"""The audit of a run's own verifier: right and wrong texts of a few examples, each scored twice.

It happens in the processes that will score the run's rollouts, and every wrong score is reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedTasks, TimedScore, Verifier
from retrain.kernel.declared import CORRECT_ABOVE
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.audit.probes import Gold, GoldOf, Probe, Severity, gold_from_reference, gold_of, wrong_texts
from retrain.tasks.audit.report import AuditFinding, AuditReport, Tally, head, raise_on_failure
from retrain.tasks.scoring.build import judges
from retrain.tasks.scoring.verdict import next_step
from retrain.tasks.tasks import RewardVerifier
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
SHADOW = "Shadow"  # what the lines about its audit begin with
SLOW_SHARE = 0.5  # of the time limit: above this, a harder answer may well exceed it
NEARLY = 0.9  # of the right answer's score: a wrong text that gets so much is accepted
DETAIL_CHARS = 300
DRAW = Seeds(0)  # the same examples whatever the run's seed, so that `retrain audit` finds what the run would

Scorer = Callable[[Sequence[tuple[Example, str]]], Sequence[TimedScore]]


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

    Right answers are tried with rewards only: what one looks like to an environment, it alone knows. A policy that
    repeats its prompt writes it as the tokenizer decodes it.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    probe: Probe
    first: TimedScore
    second: TimedScore
    correct_above: float

    @property
    def values(self) -> list[float]:
        return [t.score.value for t in (self.first, self.second) if t.score.value is not None]

    @property
    def is_correct(self) -> bool:
        return any(value > self.correct_above for value in self.values)

    @property
    def seconds(self) -> float:
        """Those of the faster try: the first may include imports."""
        return min(self.first.seconds, self.second.seconds)

    def has(self, outcome: Outcome) -> bool:
        return outcome in (self.first.score.outcome, self.second.score.outcome)


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

    `scorer` gets every text twice, and must score it anew each time (no cache). `gold` gives the right answer,
    `rendered` the whole prompt as a policy would repeat it. `timeout_s` is the limit of one score. A score above
    `correct_above` is correct. When scoring fails, the audit ends with that example, since a reward that hangs would
    use up its time limit on every text.
    """
    drawn = nsmallest(limit, examples, key=lambda example: DRAW.derive("audit", example.id))
    golds = {example.id: gold(example) for example in drawn}
    tried = _try(drawn, golds, rendered, scorer, correct_above)
    chosen = [e for e in drawn if golds[e.id].fault or any(t.probe.example is e for t in tried)]
    right = {e.id: [t for t in tried if t.probe.check == "gold" and t.probe.example is e] for e in chosen}
    known = [e for e in chosen if golds[e.id].fault or _counts(right[e.id], golds[e.id])]
    findings = [finding for e in chosen for finding in _gold_findings(e, golds[e.id], right[e.id])]
    best_of = {e.id: max((value for t in right[e.id] for value in t.values), default=0.0) for e in chosen}
    findings += [finding for t in tried for finding in _text_findings(t, best_of[t.probe.example.id])]
    if not known and not any(t.has(Outcome.FAILED) for t in tried):
        known = [e for e in chosen if right[e.id]]
        findings += [_never_right(e, right[e.id]) for e in known]
    slowest = max(tried, key=lambda t: t.seconds, default=None)
    if slowest is not None and timeout_s is not None and slowest.seconds > SLOW_SHARE * timeout_s:
        findings.append(_slow(slowest, timeout_s))
    best = [best_of[e.id] for e in known if _is_right(right[e.id])]
    return AuditReport(
        examples=len(chosen),
        gold_tried=len(known),
        gold_correct=len(best),
        gold_unknown=len(chosen) - len(known),
        lowest_gold=min(best, default=None),
        checks=_tallies(tried),
        seconds_mean=sum(t.seconds for t in tried) / max(len(tried), 1),
        seconds_max=slowest.seconds if slowest else 0.0,
        timeout_s=timeout_s,
        findings=tuple(findings),
    )


def _try(
    examples: Sequence[Example],
    golds: Mapping[str, Gold],
    rendered: Callable[[Example], str] | None,
    scorer: Scorer,
    above: float,
) -> list[_Tried]:
    """Score the examples one after the other, the very first text alone; then all texts once more.

    The right answers of an example come first, so that its wrong texts take a form that the reward reads.
    """
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
        for part in (stage,) if done else (stage[:1], stage[1:]):
            done += zip(part, scored(part), strict=True)
            if any(first.score.outcome is Outcome.FAILED for _, first in done):
                return [_Tried(probe=probe, first=first, second=first, correct_above=above) for probe, first in done]
    again = scored([probe for probe, _ in done])
    pairs = zip(done, again, strict=True)
    return [_Tried(probe=p, first=first, second=second, correct_above=above) for (p, first), second in pairs]


def _wrong(
    example: Example, gold: Gold, rendered: Callable[[Example], str] | None, plausible: Sequence[str]
) -> Iterator[Probe]:
    """Every wrong text, each once; a prompt that is also the right answer is tried as a prompt too."""
    seen: set[str] = set()
    echoes = [_user_text(example)] + ([rendered(example)] if rendered else [])
    for probe in wrong_texts(example, gold, echoes, plausible):
        if probe.text not in seen and (probe.check == "echo" or probe.text not in gold.texts):
            seen.add(probe.text)
            yield probe


def _user_text(example: Example) -> str:
    if isinstance(example.prompt, str):
        return example.prompt
    asked = [message for message in example.prompt if message["role"] == "user"]
    return str((asked or [*example.prompt])[-1]["content"])


def _is_right(tried: Sequence[_Tried]) -> bool:
    return any(t.is_correct for t in tried)


def _counts(tried: Sequence[_Tried], gold: Gold) -> bool:
    """Whether the example counts as having a right answer: one must be correct, or one is."""
    return bool(tried) and (gold.is_required or _is_right(tried))


def _gold_findings(example: Example, gold: Gold, tried: Sequence[_Tried]) -> Iterator[AuditFinding]:
    if gold.fault:
        yield _finding("error", "gold", example, "", _safe(gold.fault), "repair the reward's gold method")
    if not _counts(tried, gold):
        return
    best = max((value for t in tried for value in t.values), default=0.0)
    if not _is_right(tried):
        yield _never_right(example, tried)
    elif best < 1.0:
        shown, message = " or ".join(t.probe.text for t in tried), f"the right answer scored {best:g}, not 1"
        cause, fix = "the right answer does not score 1", "let a fully right answer score 1"
        yield _finding("warning", "gold", example, shown, message, fix, cause)


def _never_right(example: Example, tried: Sequence[_Tried]) -> AuditFinding:
    values = [value for t in tried for value in t.values]
    reason = next((t.first.score.detail for t in tried if t.first.score.detail), "")
    fix = "choose another [reward], repair the data, or let the reward's gold(example) return an answer that scores 1"
    if values:
        message = f"the right answer scored {max(values):g}"
    else:
        message, fix = (
            "the right answer got no verdict" + (f": {_safe(reason)}" if reason else ""),
            next_step(reason) or fix,
        )
    shown = " or ".join(t.probe.text for t in tried)
    return _finding("error", "gold", example, shown, message, fix, "the right answer is not correct")


def _text_findings(tried: _Tried, best: float) -> Iterator[AuditFinding]:
    """What one text shows; `best` is the highest score of the example's right answers."""
    probe, scores = tried.probe, (tried.first.score, tried.second.score)
    if tried.has(Outcome.FAILED):
        detail = next(score.detail for score in scores if score.outcome is Outcome.FAILED)
        message = f"scoring failed: {_safe(detail)}"
        fix, cause = next_step(detail) or "let no text break the reward", "scoring failed"
        yield _finding("error", probe.check, probe.example, probe.text, message, fix, cause)
    elif (scores[0].outcome, scores[0].value) != (scores[1].outcome, scores[1].value):
        message = f"the same text scored {_shown(scores[0])}, then {_shown(scores[1])}"
        fix, cause = "take randomness and memory out of the reward", "the same text scored differently"
        yield _finding("error", probe.check, probe.example, probe.text, message, fix, cause)
    if probe.check == "gold":
        return
    severity = probe.severity if max(tried.values, default=0.0) >= NEARLY * best else probe.partial
    if tried.is_correct and severity:
        message = f"{probe.message} (scored {max(tried.values):g})"
        yield _finding(severity, probe.check, probe.example, probe.text, message, probe.fix, probe.message)
    elif probe.check == "empty" and any(value > 0 for value in tried.values):
        message, cause = f"an empty answer scores {max(tried.values):g}", "an empty answer scores above 0"
        yield _finding("warning", "empty", probe.example, probe.text, message, probe.fix, cause)


def _slow(slowest: _Tried, timeout_s: float) -> AuditFinding:
    share = 100 * slowest.seconds / timeout_s
    message = f"the slowest score took {slowest.seconds:.2g} s, {share:.0f} % of the time limit of {timeout_s:g} s"
    fix = "raise [scoring] timeout_s, or make the reward faster"
    return _finding("warning", "time", slowest.probe.example, slowest.probe.text, message, fix)


def _tallies(tried: Sequence[_Tried]) -> dict[str, Tally]:
    by_check: dict[str, list[_Tried]] = {}
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


def _safe(detail: str) -> str:
    """A reason as it may be shown: without secrets, printable, short."""
    return printable(hide_text(detail))[:DETAIL_CHARS]


def _finding(
    severity: Severity, check: str, example: Example, text: str, message: str, fix: str, cause: str = ""
) -> AuditFinding:
    return AuditFinding(
        severity=severity,
        check=check,
        example_id=example.id,
        text=head(text),
        message=message,
        fix=fix,
        cause=cause or message,
    )


def _shown(score: Score) -> str:
    return f"{score.value:g}" if score.value is not None else score.outcome.value.replace("_", " ")
