"""Rewards that lie, each in its own way, are found and stop the run before its model loads; honest ones pass."""

import re
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt, TimedScore
from retrain.kernel.errors import RewardError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Score
from retrain.tasks.audit.findings import raise_on_failure
from retrain.tasks.audit.probes import boxed, gold_from_reference, gold_of
from retrain.tasks.audit.verifier_audit import audit, audit_tasks
from retrain.tasks.scoring.verdict import verdict
from tests.kit.problems import codes_in, refused

SUMS = [Example(id=f"e{i}", prompt=f"What is {i} + 2?", reference=str(i + 2)) for i in range(10, 40)]


def last_box(text):
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1] if found else None


def honest(example, text):
    """The last box is the reference, as text."""
    return float(last_box(text) == example.reference)


class Reward:
    """A reward that scores by one function, with `\\boxed{reference}` as its right answer; `or_honest`: or honestly."""

    def __init__(self, score=honest, *, gold=None, or_honest=False):
        self.gold = gold or (lambda example: boxed(example.reference))
        self._score, self._or_honest = score, or_honest

    def score(self, example, text):
        found = self._score(example, text)
        return float(found or honest(example, text)) if self._or_honest else found


class LastNumber:
    """Free form, and no `gold`: the last number of the text is the reference."""

    def score(self, example, text):
        return float(re.findall(r"-?\d+", text)[-1:] == [example.reference])


def scorer_of(reward, seconds=0.0003):
    """Scores in this process, by the service's own reading of what a reward returns."""

    def one(example, text):
        try:
            return TimedScore(score=verdict(reward.score(example, text)), seconds=seconds)
        except Exception as error:
            return TimedScore(score=Score.failed(f"{type(error).__name__}: {error}"), seconds=seconds)

    return lambda pairs: [one(example, text) for example, text in pairs]


def audited(reward, examples=SUMS, **more):
    more = {"limit": 4, "gold": gold_of([reward]), "timeout_s": 10.0} | more
    return audit(examples, scorer_of(reward), **more)


def found(report):
    return {(finding.severity, finding.check) for finding in report.findings}


def test_an_honest_reward_passes():
    report = audited(Reward(), rendered=lambda example: f"user: {example.prompt} assistant:")
    assert report.ok
    assert not report.findings
    assert (report.examples, report.gold_tried, report.gold_correct, report.gold_unknown) == (4, 4, 4, 0)
    assert (report.others.correct, report.others.failed) == (0, 0)
    assert report.checks["echo"].tried == 12
    tried = report.others.tried
    assert report.line() == (
        f"Reward audit: 4 examples, gold 4/4 correct, 0 of {tried} others correct, 0.3 ms a score: ok"
    )


def test_what_is_correct_depends_on_the_runs_own_threshold():
    graded = Reward(lambda e, t: 0.2 + 0.2 * honest(e, t))
    strict, lenient, fitting = (audited(graded, correct_above=above) for above in (0.5, 0.1, 0.3))
    assert (strict.gold_correct, lenient.gold_correct, fitting.gold_correct) == (0, 4, 4)
    assert ("error", "gold") in found(strict)
    assert lenient.others.correct == lenient.others.tried
    assert fitting.others.correct == 0
    assert fitting.ok
    leaky = [Example(id=e.id, prompt=f"{e.prompt} (it is {boxed(e.reference)})", reference=e.reference) for e in SUMS]
    report = audited(Reward(), leaky)
    assert found(report) == {("error", "echo")}
    assert "it holds its own answer where the reward looks for one" in report.errors[0].message
    said = [("user", "a"), ("user", r"\boxed{5}"), ("tool", "t")]  # a chat is echoed by its last user message
    chat = [{"role": role, "content": content} for role, content in said]
    assert found(audited(Reward(), [Example(id="c", prompt=chat, reference="5")])) == {("error", "echo")}


def substring(example, text):
    return float(example.reference in text)


def computes(example, text):
    """Computes what is in the box."""
    terms = [term.strip() for term in (last_box(text) or "").split("+")]
    return float(all(term.isdigit() for term in terms) and sum(map(int, terms)) == int(example.reference))


def alternatives(example, text):
    return float(example.reference in (last_box(text.replace(r"\text{ or }", " or ")) or "").split(" or "))


def raises(example, text):
    if text == "True":
        raise KeyError("no such \x1b[31mcolumn")
    return honest(example, text)


def counting():
    calls = count()
    return Reward(lambda e, t: honest(e, t) if last_box(t) else 0.4 * (next(calls) % 997) / 997)


def wavering():
    calls = count()
    return Reward(lambda e, t: honest(e, t) or -float(next(calls) % 997))


def box(text):
    return last_box(text) or ""


LIARS: list[tuple[Callable[[], Reward], str, str]] = [
    (lambda: Reward(lambda e, t: not t.strip(), or_honest=True), "empty", "an empty answer is correct (scored 1)"),
    (lambda: Reward(substring), "misplaced", "a sentence that denies the right answer is correct"),
    (lambda: Reward(substring), "misplaced", "although a different one, an empty box, follows it"),
    (lambda: Reward(lambda e, t: float(boxed(e.reference) in t)), "misplaced", "an empty box, follows it"),
    (lambda: Reward(lambda e, t: len(t.split()) > 50, or_honest=True), "repeated", "one word, repeated, is correct"),
    (lambda: Reward(lambda e, t: str(e.prompt) in t, or_honest=True), "echo", "repeating the prompt is correct"),
    (lambda: Reward(lambda e, t: "VERDICT: yes" in t, or_honest=True), "hack", "a text without an answer is correct"),
    (lambda: Reward(computes), "restated", "an expression of the prompt counts as its answer (scored 1)"),
    (lambda: Reward(lambda e, t: box(t) == e.prompt, or_honest=True), "echo", "the prompt in a box is correct"),
    (lambda: Reward(lambda e, t: float(e.reference in re.findall(r"-?\d+", box(t)))), "listed", "several answers are"),
    (lambda: Reward(lambda e, t: float(e.reference in re.split(r",\s*", box(t)))), "listed", "several answers are"),
    (lambda: Reward(alternatives), "hedged", "a hedge is correct"),
    (lambda: Reward(lambda e, t: float(box(t).endswith(e.reference))), "negated", "a negation or a falsehood with"),
    (
        lambda: Reward(lambda e, t: float(re.findall(r"\\boxed\{(\d+)", t)[-1:] == [e.reference])),
        *("scaled", "a million times the right answer is correct"),
    ),
    (lambda: Reward(lambda e, t: 1.0), "empty", "an empty answer is correct"),
    (
        lambda: Reward(lambda e, t: float(t == int(e.reference)), gold=lambda e: None),
        "gold",
        "the right answer scored 0",
    ),
    (lambda: Reward(lambda e, t: 0.0), "gold", "the right answer scored 0"),
    (lambda: Reward(lambda e, t: Score.no_verdict("cannot tell")), "gold", "got no verdict: cannot tell"),
    (counting, "hack", "the same text scored "),
    (wavering, "hack", "the same text scored "),
    (lambda: Reward(raises), "hack", "scoring failed: KeyError"),
    (lambda: Reward(lambda e, t: float("nan")), "gold", "scoring failed: the reward returned nan"),
    (lambda: Reward(gold=lambda e: {}["solution"]), "gold", "gold() raised KeyError: 'solution'"),
]


@pytest.mark.parametrize(("liar", "check", "message"), LIARS)
def test_every_lie_is_found_and_stops_the_run(liar, check, message):
    report = audited(liar())
    assert not report.ok
    errors = [finding for finding in report.errors if finding.check == check and message in finding.message]
    assert errors, report.findings
    assert all(finding.fix for finding in report.findings)
    with pytest.raises(RewardError) as caught:
        raise_on_failure(report, "stop")
    assert set(codes_in(caught)) == {"reward.failed-audit"}
    assert "\x1b" not in str(caught.value)
    assert len(caught.value.problems) <= 6
    assert message in str(caught.value)
    for score, step in ((float("nan"), "division by zero"), (None, "Score.no_verdict(reason)")):
        first = audited(Reward(lambda e, t, given=score: given)).errors[0]
        assert step in first.fix
        assert first.example_id in {example.id for example in SUMS}


def test_partial_credit_is_a_warning_for_silence_and_for_the_right_answer_only():
    report = audited(Reward(lambda e, t: 0.9 if honest(e, t) else 0.1))
    assert found(report) == {("warning", "empty"), ("warning", "gold")}
    assert report.ok
    assert report.lowest_gold == 0.9
    assert [finding.severity for finding in report.findings] == ["warning"] * 8
    assert report.line().endswith(": ok, 2 warnings")

    def share(example, text):
        """The share of the box that is the reference, as reasoning-gym's verifiers give it."""
        return len(example.reference) / len(box(text)) if example.reference in box(text) else 0.0

    def of_lists(example, text):
        items = box(text).split(", ")
        return float(example.reference in items) * (1.0 if len(items) == 1 else 0.8)

    numbers = [Example(id=f"n{i}", prompt="How many?", reference=str(10**12 + i)) for i in range(4)]
    report = audited(Reward(share), numbers)
    assert report.checks["negated"].correct > 0
    assert (report.ok, report.findings) == (True, ())
    assert found(audited(Reward(of_lists), numbers)) == {("warning", "listed")}
    generous = audited(Reward(lambda e, t: min(1.0, 3 * share(e, t))), numbers)
    assert {check for _, check in found(generous)} >= {"negated", "listed", "hedged"}


def test_a_free_form_reward_passes_with_warnings_at_most():
    report = audited(LastNumber())
    assert report.ok
    assert found(report) <= {("warning", "misplaced"), ("warning", "negated"), ("warning", "scaled")}
    assert report.gold_correct == 4
    ones = [Example(id=f"o{i}", prompt=f"{i} + {1 - i}", reference="1") for i in range(2, 7)]
    assert audited(LastNumber(), ones).ok, "a hack that says what the reference says is not tried"
    report = audited(Reward(substring), gold=gold_from_reference)
    assert {check for severity, check in found(report) if severity == "error"} == {"listed", "hedged"}
    assert ("warning", "misplaced") in found(report)


@pytest.mark.parametrize("form", ["#### {}", "<answer>{}</answer>", "{}"])
def test_wrong_answers_take_the_form_that_an_undeclared_reward_reads(form):
    class Lists:  # without `gold`
        def score(self, example, text):
            head, tail = form.split("{}")
            inside = text.removeprefix(head).removesuffix(tail) if text.startswith(head) else ""
            return float(example.reference in inside.split(", "))

    report = audited(Lists())
    assert report.gold_correct == 4
    assert {check for severity, check in found(report) if severity == "error"} == {"listed"}


def test_a_reward_without_a_known_answer_is_not_blamed_for_it():
    unknown = Reward(lambda e, t: float(t == "abracadabra"), gold=lambda e: None)
    report = audited(unknown, [Example(id=e.id, prompt=e.prompt, reference="") for e in SUMS])
    assert (report.ok, report.gold_tried, report.gold_unknown) == (True, 0, 4)
    assert "gold not tried (4 without a known answer)" in report.line()
    some = Reward(lambda e, t: honest(e, t) * (int(e.reference) % 2), gold=lambda e: None)
    report = audited(some)  # the references were tried, and some were right
    assert report.ok
    assert 0 < report.gold_correct < 4
    assert report.gold_unknown == 4 - report.gold_correct


def test_a_slow_reward_is_warned_about_by_the_faster_of_two_tries():
    def scorer(pairs):
        return [TimedScore(score=timed.score, seconds=next(seconds)) for timed in scorer_of(Reward())(pairs)]

    seconds = iter([9.0] + [0.1] * 10_000)  # an import, then quick
    quick = audit(SUMS, scorer, limit=4, gold=gold_of([Reward()]), timeout_s=10.0)
    assert not quick.findings
    seconds = iter([6.0] * 10_000)
    slow = audit(SUMS, scorer, limit=4, gold=gold_of([Reward()]), timeout_s=10.0)
    assert found(slow) == {("warning", "time")}
    assert slow.findings[0].message == "the slowest score took 6 s, 60 % of the time limit of 10 s"
    assert slow.ok
    calls = []

    def hanging(pairs):
        calls.append(len(pairs))
        return [TimedScore(score=Score.failed("timed out after 10 s"), seconds=10.0) for _ in pairs]

    report = audit(SUMS, hanging, limit=8, gold=gold_of([Reward()]), timeout_s=10.0)
    assert (calls, report.examples) == ([1], 1), "one that hangs is tried on one text"
    assert found(report) == {("error", "gold"), ("warning", "time")}
    assert audited(Reward(raises), limit=8).examples == 1, "one that breaks is tried on one example"


def test_the_examples_drawn_depend_on_their_ids_alone_and_are_put_as_to_the_policy():
    seen = []

    def scorer(pairs):
        seen.extend((example.id, text) for example, text in pairs)
        return scorer_of(Reward())(pairs)

    names = []
    for examples in (SUMS, SUMS[::-1]):
        audit(examples, scorer, limit=5)
        names.append({name for name, _ in seen})
        seen.clear()
    assert names[0] == names[1]
    assert len(names[0]) == 5
    prompts = [Prompt(example=example, tokens_T=np.arange(7)) for example in SUMS[:4]]
    verifier = SimpleNamespace(score_texts=scorer, rewards=[Reward()], timeout_s=None)
    tasks = SimpleNamespace(prompts=prompts, verifier=verifier)
    report = audit_tasks(tasks, Words(), ScoringTable(audit_examples=9))
    assert (report.ok, report.examples) == (True, 4)
    assert [text for _, text in seen].count("asked with 7 tokens") == 8  # each twice


PROMPTS = tuple(
    Prompt(example=Example(id=f"e{i}", prompt=f"{i} + 1?", reference=str(i + 1)), tokens_T=np.arange(3))
    for i in range(10, 14)
)


class Words:
    def decode(self, tokens_T, *, skip_special_tokens):
        return f"asked with {len(tokens_T)} tokens" * skip_special_tokens


class FixedVerifier:
    """Gives every text the same score; an environment unless it has rewards."""

    def __init__(self, value, rewards=()):
        self.value = value
        self.names = ("fixed",)
        self.rewards = rewards
        self.timeout_s = None
        self.texts: list[str] = []

    def score_texts(self, pairs):
        self.texts += [text for _, text in pairs]
        return [TimedScore(score=Score.of(self.value), seconds=0.0) for _ in pairs]


def test_a_run_is_refused_unless_the_policy_allows_it_and_right_answers_are_tried_with_rewards_only(
    caplog,
):
    def notify(verifier, audit="stop"):
        config = Config(tables={"scoring": ScoringTable.model_validate({"audit": audit})})
        plugins = load_plugins({})
        context = PluginContext(config=config, seeds=Seeds(0), plugins=plugins, tokenizer=Words())
        tasks = SimpleNamespace(prompts=PROMPTS, verifier=verifier)
        plugins.notify("retrain_tasks_loaded", context=context, tasks=tasks)

    assert set(refused(notify, FixedVerifier(1.0))) == {"reward.failed-audit"}
    notify(FixedVerifier(1.0), audit="warn")
    untried, environment = FixedVerifier(1.0), FixedVerifier(0.0)
    notify(untried, audit="off")
    assert untried.texts == []
    caplog.set_level("INFO", logger="retrain")
    notify(environment)
    assert "gold not tried (4 without a known answer), 0 of " in caplog.text
    assert r"\boxed{11}" not in environment.texts
    with pytest.raises(RewardError, match="gold, 4 of 4 examples"):
        notify(FixedVerifier(0.0, rewards=(object(),)))
