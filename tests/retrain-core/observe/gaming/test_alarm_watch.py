"""The watch of a run: its fields, `gaming.jsonl` and what a resume makes of both, on planted gaming."""

from __future__ import annotations

import json
import logging
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
from retrain.observe.gaming.alarm import read_alarms
from retrain.observe.gaming.shadow import alarm_text
from retrain.observe.gaming.suspicion import GamingWatch
from retrain.observe.health.monitors import GamingMonitor
from retrain.records.completions import TokenRecord, write_tokens
from retrain.records.record_names import GAMING
from tests.kit.groups import completion_of, group_of

BEGINS, STEPS, SIZE = 12, 22, 6
TRICK = 99  # the token that is paid for
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
        for index, (each, score, given) in enumerate(zip(group.completions, group.scores, credit_G, strict=True)):
            assert score.shadow is not None
            record = {"step": step, "group": number, "index": index, "example_id": group.example.id}
            scores = {"reward": score.value, "shadow_reward": score.shadow.value}
            records.append({**record, **scores, "completion": each.text})
            given_A = given.advantages_A
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


def new_watch() -> GamingWatch:
    config = SimpleNamespace(table=lambda name, model: ShadowKeys(shadow="another"))
    context: Any = SimpleNamespace(tokenizer=Tokenizer(), config=config)
    return GamingWatch(context)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder and the lines of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, watched(folder, new_watch(), 0, STEPS)


def test_the_alarm_names_what_was_gamed_and_the_token_that_was_paid_for(
    whole: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, lines = whole
    alarms = [line["step"] for line in lines if "gaming_since" in line]
    assert alarms
    assert BEGINS <= alarms[0] <= BEGINS + 5
    (record,) = read_alarms(folder)
    assert record["step"] == alarms[0]
    assert record["num_completions"] == len(record["completions"]) > 0
    assert all(each["completion"] == HOSTILE and each["shadow_reward"] == 0.0 for each in record["completions"])
    assert record["tokens"][0]["token"] == "trick"
    assert all(each["tokens"][0]["token"] == "trick" for each in record["completions"])
    credit = [each["credit"] for each in record["completions"]]
    assert credit == sorted(credit, reverse=True)
    (finding,) = GamingMonitor().observe(lines[alarms[0]])
    assert finding.state == "gaming"
    assert f"since step {record['since']}" in finding.message
    assert "trick" in finding.message
    assert f"Step {alarms[0]}" in alarm_text(folder)


@pytest.mark.parametrize("cut", [pytest.param(3, marks=pytest.mark.slow), BEGINS + 1, STEPS - 2])
def test_a_resumed_run_has_the_same_fields_and_alarms(
    whole: tuple[Path, list[dict[str, Any]]], tmp_path: Path, cut: int
) -> None:
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


def test_a_damaged_file_of_alarms_is_told_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / GAMING).write_text("{\n{}\n", encoding="utf-8")
    with caplog.at_level(logging.WARNING, logger="retrain"):
        watch = new_watch()
        watch.retrain_load_state({"health": {}})  # a checkpoint of an earlier version
        watched(tmp_path, watch, 0, 2)
    assert "gaming.jsonl" in caplog.text
    assert "cannot be read" in alarm_text(tmp_path)


def test_without_a_shadow_there_is_no_alarm_and_no_evidence() -> None:
    watch = new_watch()
    for step in range(STEPS):
        groups, credit = step_of(step)
        bare = tuple(
            replace(group, scores=tuple(replace(each, shadow=None) for each in group.scores), raw_scores=())
            for group in groups
        )
        fields = watch.retrain_extra_metrics(groups=GroupsView(step=step, groups=bare), credit=credit)
        assert not {"gaming_since", "gaming_evidence", "gaming_unconfirmed"} & fields.keys()


def test_a_suspicion_is_a_finding_of_its_own() -> None:
    line = {"step": 9, "gaming_suspected": "ngram_share, prompt_answers", "gaming_ngram_share": 0.8}
    line["gaming_ngram"] = "a b"
    (finding,) = GamingMonitor().observe(line)
    assert finding.state == "gaming_suspected"
    assert "'a b'" in finding.message
    assert GamingMonitor().observe({"step": 9, "gaming_since": None}) == []
