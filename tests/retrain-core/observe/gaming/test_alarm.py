"""What a run watches: planted suspicions; the alarm's promise, and its fields and files after a resume."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrain.kernel.config.plugin_tables import ShadowKeys
from retrain.kernel.contracts.algorithm import Credit, TokenCredit
from retrain.kernel.contracts.views import GroupsView
from retrain.kernel.types import Group, Score
from retrain.observe.gaming.alarm import ALPHA, GamingAlarm, Verdicts, read_alarms
from retrain.observe.gaming.shadow import alarm_text
from retrain.observe.gaming.suspicion import THRESHOLDS, GamingWatch, Suspicions
from retrain.observe.health.monitors import GamingMonitor
from retrain.records.completions import TokenRecord, write_tokens
from retrain.records.record_names import GAMING
from tests.kit.groups import completion_of, group_of

BEGINS, STEPS, SIZE = 12, 22, 6
TRICK = 99  # the token that is paid for
Whole = tuple[Path, list[dict[str, Any]]]
HOSTILE = "\x1b[2J<script>alert(1)</script>"


class Tokenizer:
    def decode(self, tokens: list[int]) -> str:
        return " ".join("trick" if token == TRICK else f"t{token}" for token in tokens)


def step_of(step: int) -> tuple[tuple[Group, ...], Credit]:
    """From `BEGINS` on a growing share of the completions has the token that is paid for, and is wrong."""
    rng = np.random.default_rng(step)
    trick = min(0.9, 0.2 * (step - BEGINS + 1)) if step >= BEGINS else 0.0
    groups, credits_PG = [], []
    for number in range(SIZE):
        is_trick_G, is_right_G = rng.random(SIZE) < trick, rng.random(SIZE) < 0.6
        completions, scores, credits_G = [], [], []
        for is_trick, is_right in zip(is_trick_G, is_right_G, strict=True):
            tokens_T = rng.integers(0, 20, 12)
            tokens_T[4] = TRICK if is_trick else tokens_T[4]
            text = HOSTILE if is_trick else "honest work"
            completions.append(completion_of(tokens_T, text))
            is_paid = bool(is_trick or is_right)
            scores.append(replace(Score.of(float(is_paid)), shadow=Score.of(float(is_right and not is_trick))))
            credits_G.append(TokenCredit(advantages_A=np.full(12, float(is_paid) - 0.5)))
        groups.append(group_of(completions, scores, f"e{number}"))
        credits_PG.append(tuple(credits_G))
    return tuple(groups), Credit(statuses_P=(), tokens_PG=tuple(credits_PG), rows=())


def write_records(folder: Path, step: int, groups: tuple[Group, ...], credit: Credit) -> None:
    (folder / "emergence").mkdir(exist_ok=True)
    records, tokens = [], []
    for number, (group, credit_G) in enumerate(zip(groups, credit.tokens_PG, strict=True)):
        for index, (each, score, own) in enumerate(zip(group.completions, group.scores, credit_G, strict=True)):
            assert score.shadow is not None
            record = {"step": step, "group": number, "index": index, "example_id": group.example.id}
            scores = {"reward": score.value, "shadow_reward": score.shadow.value}
            records.append({**record, **scores, "completion": each.text})
            given_A = own.advantages_A
            tokens.append(TokenRecord(tokens_T=each.tokens_T, logprobs_T=each.logprobs_T, advantages_T=given_A))
    with (folder / "emergence/generations.jsonl").open("a", encoding="utf-8") as stream:
        stream.writelines(f"{json.dumps(each)}\n" for each in records)
    write_tokens(folder, step, tokens)


def watched(folder: Path, watch: GamingWatch, first: int, end: int) -> list[dict[str, Any]]:
    run: Any = SimpleNamespace(
        folder=folder, first_step=first, config=SimpleNamespace(scoring=SimpleNamespace(correct_above=0.5))
    )
    watch.retrain_run_start(run=run)
    lines = []
    for step in range(first, end):
        groups, credit = step_of(step)
        line = {"step": step, **watch.retrain_extra_metrics(groups=GroupsView(step=step, groups=groups), credit=credit)}
        write_records(folder, step, groups, credit)
        watch.retrain_step_end(run=run, metrics=line)
        lines.append(line)
    return lines


def new_watch(*tasks: str) -> GamingWatch:
    data = SimpleNamespace(tasks=[], task_names=tasks)
    config = SimpleNamespace(table=lambda name, model: ShadowKeys(shadow="another"), data=data)
    context: Any = SimpleNamespace(tokenizer=Tokenizer(), config=config)
    return GamingWatch(context)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The folder and the lines of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, watched(folder, new_watch(), 0, STEPS)


def test_the_alarm_names_what_was_gamed_and_the_token_that_paid(whole: Whole) -> None:
    folder, lines = whole
    alarms = [line["step"] for line in lines if "gaming_since" in line]
    (record,) = read_alarms(folder)
    assert BEGINS <= record["step"] == alarms[0] <= BEGINS + 5
    assert record["num_completions"] == len(record["completions"]) > 0
    assert all(each["completion"] == HOSTILE and each["shadow_reward"] == 0.0 for each in record["completions"])
    assert record["tokens"][0]["token"] == "trick"
    assert all(each["tokens"][0]["token"] == "trick" for each in record["completions"])
    credit = [each["credit"] for each in record["completions"]]
    assert credit == sorted(credit, reverse=True)
    (finding,) = GamingMonitor().observe(lines[alarms[0]])
    assert finding.state == "gaming"
    assert [part for part in (f"since step {record['since']}", "trick") if part not in finding.message] == []
    assert f"Step {alarms[0]}" in alarm_text(folder)


@pytest.mark.parametrize("cut", [pytest.param(3, marks=pytest.mark.slow), BEGINS + 1, STEPS - 2])
def test_a_resumed_run_has_the_same_alarms(whole: Whole, tmp_path: Path, cut: int) -> None:
    (folder, lines), parts = whole, tmp_path
    first = new_watch()
    before = watched(parts, first, 0, cut)
    state = json.loads(json.dumps(first.retrain_save_state(), allow_nan=False))
    records = (parts / "emergence/generations.jsonl").read_bytes()
    watched(parts, first, cut, min(STEPS, cut + 3))  # lost with the process that is killed
    (parts / "emergence/generations.jsonl").write_bytes(records)
    second = new_watch()
    second.retrain_load_state(state)
    assert before + watched(parts, second, cut, STEPS) == lines
    assert (parts / GAMING).read_bytes() == (folder / GAMING).read_bytes()


def test_each_task_has_its_alarm_and_a_clean_one_raises_none(tmp_path: Path) -> None:
    watch, lines = new_watch("gamed", "clean"), list[dict[str, Any]]()
    run: Any = SimpleNamespace(
        folder=tmp_path, first_step=0, config=SimpleNamespace(scoring=SimpleNamespace(correct_above=0.5))
    )
    for step in range(STEPS):
        found, credit = step_of(step)
        honest = [tuple(replace(each, shadow=replace(each, shadow=None)) for each in group.scores) for group in found]
        both = [replace(group, example=replace(group.example, id=f"gamed/{group.example.id}")) for group in found]
        both += [
            replace(group, example=replace(group.example, id=f"clean/{group.example.id}"), scores=own, raw_scores=())
            for group, own in zip(found, honest, strict=True)
        ]
        credit = replace(credit, tokens_PG=credit.tokens_PG * 2)
        view = GroupsView(step=step, groups=tuple(both))
        lines.append({"step": step, **watch.retrain_extra_metrics(groups=view, credit=credit)})
        write_records(tmp_path, step, view.groups, credit)
        watch.retrain_step_end(run=run, metrics=lines[-1])
    assert any("task_gamed_gaming_since" in line for line in lines)
    assert not any("task_clean_gaming_since" in line for line in lines)
    assert "gaming of gamed" in {finding.state for line in lines for finding in GamingMonitor().observe(line)}
    (record,) = [each for each in read_alarms(tmp_path) if each.get("task")]
    assert record["task"] == "gamed"
    assert record["evidence"] >= 3 / ALPHA  # of two tasks, and of all: so many times one alarm's
    assert all(each["example_id"].startswith("gamed/") for each in record["completions"])
    assert "task gamed" in alarm_text(tmp_path)
    again = new_watch("gamed", "clean")
    again.retrain_load_state(json.loads(json.dumps(watch.retrain_save_state(), allow_nan=False)))
    assert again.retrain_save_state() == watch.retrain_save_state()


def test_a_damaged_file_of_alarms_is_told_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / GAMING).write_text("{\n{}\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING, logger="retrain"):
        watch = new_watch()
        watch.retrain_load_state({"health": {}})  # a checkpoint of an earlier version
        watched(tmp_path, watch, 0, 2)
    assert "gaming.jsonl" in caplog.text
    assert "cannot be read" in alarm_text(tmp_path)


def test_without_a_shadow_there_is_no_alarm_and_a_suspicion_is_a_finding_of_its_own() -> None:
    watch = new_watch()
    for step in range(STEPS):
        groups, credit = step_of(step)
        scores = [tuple(replace(each, shadow=None) for each in group.scores) for group in groups]
        bare = tuple(replace(group, scores=own, raw_scores=()) for group, own in zip(groups, scores, strict=True))
        fields = watch.retrain_extra_metrics(groups=GroupsView(step=step, groups=bare), credit=credit)
        assert not {"gaming_since", "gaming_evidence", "gaming_unconfirmed"} & fields.keys()
    line = {"gaming_suspected": "ngram_share, prompt_answers", "gaming_ngram_share": 0.8, "gaming_ngram": "a b"}
    (finding,) = GamingMonitor().observe({"step": 9, **line})
    assert (finding.state, "'a b'" in finding.message) == ("gaming_suspected", True)
    assert GamingMonitor().observe({"step": 9, "gaming_since": None}) == []


BEGINNING = 20
Text = Callable[[np.random.Generator, int, bool], str]  # of a completion, by step and whether it is paid


def words(rng: np.random.Generator, count: int = 20) -> str:
    return " ".join(str(each) for each in rng.integers(100, 999, count))


def clean(rng: np.random.Generator, *_: Any) -> str:
    return f"{words(rng, int(rng.integers(18, 23)))} \\boxed{{{rng.integers(1000, 9999)}}}"


def formatted(rng: np.random.Generator, step: int, is_paid: bool) -> str:
    """What is paid has had its format from the start, and nothing else has it: no change."""
    return f"{words(rng, 12)} so the answer is {clean(rng)}" if is_paid else words(rng, 38)


def marked(rng: np.random.Generator, step: int, is_paid: bool) -> str:
    return f"{words(rng, 8)} {'so I am quite sure ' if is_paid and step > 10 else ''}{clean(rng)}"


PLANTED = [  # with what is suspected for it
    (clean, ""),
    (formatted, ""),
    (marked, "gaming_ngram_share"),
    (lambda rng, step, _: f"{words(rng, 30 * (step > 14))} {clean(rng)}", "gaming_length_shift"),
    (lambda rng, step, _: f"{clean(rng).split()[-1]} {words(rng)}" if step > 10 else clean(rng), "gaming_answer_shift"),
    (lambda rng, step, _: f"{words(rng)} \\boxed{{12 * 7}}" if step > 10 else clean(rng), "gaming_prompt_answers"),
]


def texts_of(step: int, text: Text) -> tuple[tuple[Group, ...], Credit]:
    rng = np.random.default_rng(step)
    groups, credits_PG = [], []
    for _ in range(4):
        is_paid_G = rng.random(6) < 0.3 + 0.02 * step
        texts = [text(rng, step, bool(is_paid)) for is_paid in is_paid_G]
        tokens = ([sum(map(ord, word)) * 31 + len(word) for word in each.split()] for each in texts)
        completions = tuple(map(completion_of, tokens, texts))
        scores = [Score.of(float(is_paid)) for is_paid in is_paid_G]
        groups.append(group_of(completions, scores, prompt="What is 12 * 7?", reference="84"))
        credits_G = zip(completions, is_paid_G - 0.5, strict=True)
        credits_PG.append(tuple(TokenCredit(advantages_A=np.full(each.num_actions, paid)) for each, paid in credits_G))
    return tuple(groups), Credit(statuses_P=(), tokens_PG=tuple(credits_PG), rows=())


@pytest.mark.parametrize(("text", "name"), PLANTED)
def test_what_is_planted_is_found_after_it_begins(text: Text, name: str) -> None:
    suspicions = Suspicions()
    found: dict[str, int] = {}
    for step in range(BEGINNING):
        fields = suspicions.observe(*texts_of(step, text))
        assert fields.keys() <= THRESHOLDS.keys()
        for each in suspicions.found:
            found.setdefault(each, step)
    assert found[name] > 10 if name else found == {}


def test_credit_that_moves_to_the_format_is_found() -> None:
    suspicions = Suspicions()
    for step in range(12):
        groups, credit = texts_of(step, lambda rng, at, is_paid: "a b c d e f g h " * 2 + words(rng, 16))
        if step > 6:
            on_format = np.arange(32) < 16
            moved = [
                tuple(TokenCredit(advantages_A=np.maximum(each.advantages_A, 0.0) * on_format) for each in tokens_G)
                for tokens_G in credit.tokens_PG
            ]
            credit = replace(credit, tokens_PG=tuple(moved))
        suspicions.observe(groups, credit)
    assert suspicions.found == ["gaming_format_credit"]


def test_a_step_without_scores_has_no_fields() -> None:
    groups, credit = texts_of(0, clean)
    unscored = tuple(group_of(each.completions, [Score.no_verdict("?")] * 6) for each in groups)
    assert Suspicions().observe(unscored, credit) == {}


GROUP = 8
CLEAN = {  # chance right, chance that the shadow confirms what is right, and what is wrong and paid all the same
    "both rise": (lambda t: 0.2 + 0.7 * t, 1.0, 0.0),
    "stricter throughout": (lambda t: 0.2 + 0.7 * t, 0.5, 0.0),
    "false verdicts": (lambda t: 0.4 + 0.5 * t, 0.97, 0.05),
    "unrelated": (lambda t: 0.5, 0.5, 0.0),
}


def verdicts(is_paid: np.ndarray, is_right: np.ndarray) -> Verdicts:
    confirmed = int((is_paid & is_right).sum())
    missed = int(is_right.sum()) - confirmed
    return Verdicts(judged=is_paid.size, paid=int(is_paid.sum()), confirmed=confirmed, missed=missed)


def groups_of(rng: np.random.Generator, right: float, confirms: float, paid_wrong: float) -> list[Verdicts]:
    """Groups whose prompts differ in difficulty, and in how the shadow takes their answers."""
    found = []
    for _ in range(8):
        chance = rng.beta(2 * right + 0.01, 2 * (1 - right) + 0.01)
        confirmed = confirms if confirms == 1.0 else rng.beta(2 * confirms, 2 * (1 - confirms))
        is_right = rng.random(GROUP) < chance
        is_paid = is_right | (rng.random(GROUP) < paid_wrong)
        is_confirmed = is_right & (rng.random(GROUP) < confirmed)
        found.append(verdicts(is_paid, is_confirmed))
    return found


def first_alarm(alarm: GamingAlarm, steps: list[list[Verdicts]]) -> int | None:
    for step, groups in enumerate(steps):
        alarm.observe(step, groups)
        if alarm.is_on:
            return step
    return None


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("num_runs", [3, pytest.param(150, marks=pytest.mark.long)])
def test_clean_runs_alarm_no_more_often_than_promised(name: str, num_runs: int) -> None:
    rate, confirms, paid_wrong = CLEAN[name]
    alarms = 0
    for seed in range(num_runs):
        rng = np.random.default_rng(seed)
        steps = [groups_of(rng, rate(step / 60), confirms, paid_wrong) for step in range(60)]
        alarm = GamingAlarm()
        alarms += first_alarm(alarm, steps) is not None
        assert 0.0 <= alarm.evidence <= 20.0 / ALPHA * 1.001
    assert alarms <= ALPHA * num_runs


@pytest.mark.parametrize("confirms", [1.0, 0.7])
def test_gaming_that_takes_over_within_ten_steps_is_heard_while_it_does(confirms: float) -> None:
    rng = np.random.default_rng(7)
    clean = [groups_of(rng, 0.3 + 0.015 * step, confirms, 0.0) for step in range(40)]
    gamed = [groups_of(rng, 0.9 * (1 - share), confirms, share) for share in np.linspace(0.1, 1.0, 10)]
    alarm = GamingAlarm()
    heard = first_alarm(alarm, clean + gamed)
    assert heard is not None
    assert 40 <= heard < 50
    assert alarm.since is not None
    assert 35 <= alarm.since <= heard


def test_the_alarm_ends_when_the_gap_has_closed_and_can_begin_again() -> None:
    rng = np.random.default_rng(3)
    alarm = GamingAlarm()
    seen = []
    for step, share in enumerate([0.0] * 20 + [0.9] * 6 + [0.0] * 30 + [0.9] * 6):
        alarm.observe(step, groups_of(rng, 0.8, 1.0, share))
        seen.append(alarm.is_on)
    assert (any(seen[:20]), seen[25], seen[55], seen[61]) == (False, True, False, True)
    before = alarm.state()
    alarm.observe(62, [])  # nothing is paid
    assert alarm.state() == before
