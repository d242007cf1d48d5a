"""The texts that an audit tries, and what it reports: a line, data, an error, the log; the command."""

import json
import logging
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import RewardError
from retrain.kernel.types import Example
from retrain.tasks.audit import probes
from retrain.tasks.audit.findings import head, raise_on_failure, report_data
from retrain.tasks.audit.report import AuditFinding, AuditReport, Tally
from tests.kit.problems import codes_in

COUNTS = {"gold": {"tried": 8, "correct": 8}, "echo": {"tried": 16}, "hack": {"tried": 24, "correct": 2, "failed": 1}}


def finding(number, check="echo", severity="error"):
    message, cause = f"{check} counts (scored {number})", f"{check} counts"
    told = {"text": f"t{number}", "message": message, "fix": "mend", "cause": cause}
    return AuditFinding(severity=severity, check=check, example_id=f"e{number}", **told)


def report(*findings, gold_tried=8, gold_unknown=0):
    return AuditReport(
        examples=8,
        gold_tried=gold_tried,
        gold_correct=gold_tried,
        gold_unknown=gold_unknown,
        lowest_gold=1.0 if gold_tried else None,
        checks={name: Tally(**counts) for name, counts in COUNTS.items()},
        seconds_mean=0.0003,
        seconds_max=1.25,
        timeout_s=10.0,
        findings=findings,
    )


def test_the_line_and_the_data_report_each_cause_once():
    head_of_all = "Reward audit: 8 examples, gold 8/8 correct, 2 of 40 others correct, 0.3 ms a score: "
    assert report().line() == f"{head_of_all}ok"
    assert report(finding(0, severity="warning")).line() == f"{head_of_all}ok, 1 warning"
    assert report(finding(0), finding(1), finding(2, severity="warning")).line() == f"{head_of_all}1 error, 1 warning"
    assert report(finding(0), finding(1, "hack")).line() == f"{head_of_all}2 errors"
    assert "gold 3/3 correct (5 without a known answer)" in report(gold_tried=3, gold_unknown=5).line()
    assert "gold not tried (8 without a known answer)" in report(gold_tried=0, gold_unknown=8).line()
    found = [finding(0, "time", "warning"), *(finding(n) for n in range(8)), finding(0)]
    content = json.loads(json.dumps(report_data(report(*found)), allow_nan=False))
    assert content["ok"] is False
    assert content["gold"] == {"tried": 8, "correct": 8, "unknown": 0, "lowest": 1.0}
    assert content["others"] == {"tried": 40, "correct": 2, "no_verdict": 0, "failed": 1}
    assert content["checks"]["hack"] == {"tried": 24, "correct": 2, "no_verdict": 0, "failed": 1}
    assert content["findings"] == [asdict(each) for each in found]
    assert content["causes"] == [
        {"severity": "error", "check": "echo", "cause": "echo counts", "fix": "mend", "examples": 8, "findings": 9},
        {"severity": "warning", "check": "time", "cause": "time counts", "fix": "mend", "examples": 1, "findings": 1},
    ]


def test_stop_raises_and_warn_tells_each_cause_once(caplog):
    many = [finding(n) for n in range(8)] + [finding(n, "hack") for n in range(8)] + [finding(4, "gold")]
    with pytest.raises(RewardError) as caught:
        raise_on_failure(report(*many), "stop", place="retrain.toml:7 [scoring] audit")
    assert set(codes_in(caught)) == {"reward.failed-audit"}
    first, *shown = caught.value.problems
    assert first.where == "retrain.toml:7 [scoring] audit"
    assert '[scoring] audit = "warn"' in first.fix
    assert [(problem.where, problem.what) for problem in shown] == [
        ("echo, 8 of 8 examples, first e0", "echo counts (scored 0)"),
        ("hack, 8 of 8 examples, first e0", "hack counts (scored 0)"),
        ("gold, example e4", "gold counts (scored 4)"),
    ]
    with caplog.at_level(logging.WARNING, "retrain"):
        raise_on_failure(report(*many[:16], finding(99, "time", "warning")), "warn")
    assert caplog.messages == [
        "Reward audit, error: 8 of 8 examples, first e0: echo counts (scored 0) ('t0'); fix: mend",
        "Reward audit, error: 8 of 8 examples, first e0: hack counts (scored 0) ('t0'); fix: mend",
        "Reward audit, warning: example e99: time counts (scored 99); fix: mend",
    ]
    assert head("a\x1b[31mb\n") == "a\ufffd[31mb\ufffd"
    assert len(head("x" * 1000)) == 83
    with pytest.raises(RewardError, match="7 errors, 5 of them below") as caught:
        raise_on_failure(report(*(finding(0, f"check{n}") for n in range(7))), "stop")
    assert len(caught.value.problems) == 1 + 5


LIARS = """
import os
from retrain.api import PluginSpec

class Lenient:
    def __init__(self, context=None):
        pass
    def score(self, example, text):
        return float(example.reference in text or not text)
    def gold(self, example):
        return "\\\\boxed{" + example.reference + "}"

class Exits(Lenient):
    def score(self, example, text):
        os._exit(3)

class Strange(Lenient):
    def score(self, example, text):
        raise ValueError("\\x1b[31m" + text)

def score(response, reference):
    return float(response == [reference])
"""


@pytest.fixture
def audit(command, toys, tokenizer_folder, tmp_path):
    """`audit("--json")`: the toy data and the toy reward, unless another is named."""
    (tmp_path / "liars.py").write_text(LIARS, encoding="utf-8")
    base = ["--model", str(tokenizer_folder), "--backend", "toy", "--data-source", "toy", "--set", "scoring.retries=0"]

    def call(*arguments):
        reward = [] if any(word.startswith("--reward") for word in arguments) else ["--reward-type", "toy"]
        return command("audit", *base, *reward, *arguments)

    return call


def test_an_honest_reward_passes_and_one_that_lies_fails_with_every_cause_once(audit):
    result = audit("--set", "scoring.audit_examples=500")
    assert result.code == 0, result.err + result.out
    assert result.out.endswith("ok\nPASS\n")
    assert "Reward audit: 12 examples, gold 12/12 correct, 0 of " in result.out
    content = json.loads(audit("--examples", "3", "--json").out)
    assert (content["ok"], content["examples"], content["rewards"]) == (True, 3, ["toy"])
    assert (content["checks"]["gold"]["correct"], content["timeout_s"]) == (3, 10.0)
    result = audit("--reward-type", "liars.Lenient", "--examples", "2")
    assert result.code == 1
    assert result.out.endswith("FAIL\n")
    assert result.out.count("[ERROR] [empty] 2 of 2 examples, first ") == 1
    content = json.loads(audit("--reward-type", "liars.Lenient", "--json").out)
    assert (content["ok"], content["causes"][0]["examples"]) == (False, 8)
    result = audit("--reward-type", "custom", "--reward-custom-module", "liars", "--reward-custom-function", "score")
    assert (result.code, "gold 0/8 correct" in result.out) == (1, True), "a function without gold is never right"


@pytest.mark.parametrize("name", ["Exits", "Strange"])
def test_a_reward_that_breaks_is_reported_not_raised(audit, name):
    result = audit("--reward-type", f"liars.{name}")
    assert result.code == 1
    assert "scoring failed" in result.out
    assert "\x1b" not in result.out
    assert "Examples : 1" in result.out


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        *(("--reward-type toyy", "toyy"), ("--examples 0", "--examples"), ("--batch-siz 3", "--batch-siz")),
        *(("--examples 13", "--examples"), ("--words 9", "--words"), ("--allowed 0.5", "--allowed")),
        *(("--contamination --examples 3", "--examples"), ("nowhere.toml", "nowhere.toml")),
        ("--data-opt count=0", "data.no-examples"),
    ],
)
def test_nothing_that_is_typed_is_ignored(audit, arguments, place):
    result = audit(*arguments.split())
    assert result.code == 2
    assert place in result.err


FIVE = (r"\boxed{5}", "5", "#### 5", "<answer>5</answer>")


class Says:
    """A reward whose `gold` returns, or raises, one thing."""

    def __init__(self, answer):
        self.answer = answer

    def gold(self, example):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def task(reference, prompt="p"):
    return Example(id="e", prompt=prompt, reference=reference)


@pytest.mark.parametrize(
    ("rewards", "reference", "gold"),
    [
        ([], "5", probes.Gold(texts=FIVE)),
        ([object()], " 5 ", probes.Gold(texts=FIVE)),
        ([object()], "", probes.Gold()),
        ([Says("it is 5")], "5", probes.Gold(texts=("it is 5",), is_declared=True)),
        ([Says("a"), object(), Says("b"), Says("a"), Says(None)], "5", probes.Gold(texts=("a", "b"), is_declared=True)),
        ([Says(None)], "5", probes.Gold(texts=FIVE, is_required=False)),
        ([Says(None)], "", probes.Gold(is_required=False)),
        ([Says(KeyError("x"))], "5", probes.Gold(fault="gold() raised KeyError: 'x'")),
        ([Says(5)], "5", probes.Gold(fault="gold() returned a int, not text or None")),
    ],
)
def test_the_right_answer_is_what_the_rewards_say_or_else_the_reference(rewards, reference, gold):
    assert probes.gold_of(rewards)(task(reference)) == gold


SAME = [("1", "1"), ("1", "1.0"), ("True", "TRUE"), ("True", "yes"), ("VERDICT: yes", "Yes"), ("correct", "Correct.")]
OTHER = [("1", "11"), (r"\boxed{}", "1"), ("True", "no"), ("1", "")]


@settings(max_examples=40)
@given(st.text(max_size=30), st.text(max_size=30))
def test_no_wrong_text_is_the_answer_alone(prompt, reference):
    example = task(reference, prompt)
    for gold in (
        probes.gold_from_reference(example),
        probes.Gold(texts=(rf"\boxed{{{reference}}}",), is_declared=True),
    ):
        made = list(probes.wrong_texts(example, gold, [prompt]))
        texts = [probe.text for probe in made if probe.check in ("repeated", "hack")]
        assert not reference.strip() or reference.strip() not in texts
        assert {probe.check for probe in made} >= {"empty", "repeated", "echo"}
        assert all(probe.message and probe.fix for probe in made)


def texts_of(gold, reference, prompt="p", plausible=()):
    found = {}
    for probe in probes.wrong_texts(task(reference, prompt), gold, [prompt], plausible):
        found.setdefault(probe.check, []).append(probe.text)
    return found


def test_what_is_no_falsehood_or_has_no_form_is_not_tried():
    for gold, severity in (
        (probes.Gold(texts=(r"\boxed{5}",), is_declared=True), "error"),
        (probes.Gold(texts=(r"\boxed{5}", "5")), "warning"),
        (probes.Gold(texts=("so 5",), is_declared=True), "warning"),
    ):
        found = [probe.severity for probe in probes.wrong_texts(task("5"), gold, []) if probe.check == "misplaced"]
        assert found == [severity] * 2
    for gold in (probes.Gold(), probes.Gold(texts=("a program",), is_declared=True)):
        assert not {"restated", "listed", "hedged", "negated", "scaled"} & set(texts_of(gold, "5", "2 + 3"))
    boxed_zero = probes.Gold(texts=(r"\boxed{0}",), is_declared=True)
    assert "scaled" not in texts_of(boxed_zero, "0")  # a million times 0
    assert texts_of(boxed_zero, "0", "0")["echo"] == ["0"]  # a prompt that is the answer


@settings(max_examples=40)
@given(st.text(min_size=1, max_size=20), st.lists(st.text(max_size=9), max_size=5), st.text(max_size=30))
def test_no_wrong_answer_is_the_right_one(reference, plausible, prompt):
    gold = probes.gold_from_reference(task(reference))
    for form in gold.texts:
        found = texts_of(gold.confirmed([form]), reference.strip(), prompt, tuple(plausible))
        for check in ("restated", "listed", "hedged", "negated", "scaled"):
            assert form not in found.get(check, [])


@pytest.mark.parametrize(
    ("prompt", "reference", "found"),
    [
        ("What is 348 + 217?", "565", ["348 + 217"]),
        ("State the final answer to: ((3 - 4) * (2 + 1)) - 5.", "-8", ["((3 - 4) * (2 + 1)) - 5"]),
        ("12,345 + 1,000 = ?", "13345", ["12,345 + 1,000"]),
        ("What is -6 - -3?", "-3", ["-6 - -3"]),
        ("What is 3 x 4?", "12", ["3 x 4"]),
        ("What is 2 ** 10?", "1024", ["2 ** 10"]),
        (r"Evaluate \(\int_0^1 x^2 dx\).", "1/3", [r"\int_0^1 x^2 dx"]),
        (r"Find \[\sum_{k=1}^{100} k\]", "5050", [r"\sum_{k=1}^{100} k"]),
        (r"Find $\gcd(12, 18)$ or $$\binom{5}{2}$$", "6", [r"\gcd(12, 18)", r"\binom{5}{2}"]),
        ("Solve $x^2 - 4 = 0$ for $x > 0$.", "2", ["x^2 - 4 = 0"]),
        ("Factor $x^2-1$.", "x^2 - 1", []),  # the reference itself
        ("Given $a+b = 7$, what is $a+b$?", "7", ["a+b"]),
        ("It costs $5 and $7 in total.", "12", []),
        ("How many days have 3 weeks?", "21", []),
        ("", "5", []),
    ],
)
def test_expressions_of_a_prompt_in_which_something_is_left_to_compute(prompt, reference, found):
    assert probes.expressions(prompt, reference) == found
    for text, meant in SAME + OTHER:
        assert probes.says_the_same(text, meant) == ((text, meant) in SAME)


@settings(max_examples=40)
@given(st.text(alphabet="1 2+-*/()$\\[]{}x^=.,frac", max_size=60), st.text(alphabet="0123456789abcx+ ", max_size=12))
def test_any_prompt_gives_few_and_never_the_reference(prompt, reference):
    found = probes.expressions(prompt, reference)
    assert len(found) <= probes.MOST
    assert "".join(reference.split()) not in ["".join(text.split()) for text in found]
    words = probes.repeated(reference).split()
    assert (len(words), words[0] in reference) == (probes.REPEATS, False)
