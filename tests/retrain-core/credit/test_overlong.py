"""Truncated completions and those near the limit: the soft punishment, the masked rows, the dropped verdicts."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.credit.algorithm import CreditAlgorithm
from retrain.credit.overlong import MaskedOverlong, SoftPunishment, longest_turn, soft_punishment
from retrain.credit.specs import AdvantageSpec
from retrain.kernel.parts import Planned, Sampled
from retrain.kernel.progress import Clock
from retrain.kernel.types import GroupStatus, StopReason, group_status, verdicts
from retrain.records.run import Run
from retrain.run.steps.selection import joined_fields, selection
from tests.kit.credit_parts import make_flow
from tests.kit.overlapped import GENERATIONS, lines, steps

# Writes what each batch is to `batches.jsonl`.
WATCHING = """
import json
from retrain.api import hookimpl

class Odd:
    def __init__(self, context): pass
    def score(self, example, text): return float(sum(map(ord, text)) % 2)

@hookimpl
def retrain_groups_scored(groups):
    if groups.batch is None:
        return
    rows = [[row.group, row.is_truncated, float(row.advantages_T.max())] for row in groups.batch.rows]
    with open("batches.jsonl", "a") as file:
        file.write(json.dumps({"rows": rows, "num_masked": groups.batch.num_masked}) + "\\n")
"""


@pytest.fixture
def truncated(make_completion):
    """`truncated("..x.")`: completions of two tokens, those marked x truncated."""

    def make(marks):
        reasons = {"x": StopReason.LENGTH, "t": StopReason.TURNS, ".": StopReason.EOS}
        return [make_completion([-1.0, -2.0], stop_reason=reasons[mark]) for mark in marks]

    return make


def algorithm():
    return CreditAlgorithm(flow=make_flow())


@settings(max_examples=40)
@given(limit=st.integers(1, 300), data=st.data())
def test_the_soft_punishment_grows_evenly_over_the_zone(limit, data):
    zone = data.draw(st.integers(1, limit))
    amounts = [soft_punishment(length, limit=limit, zone=zone) for length in range(limit + 3)]
    ramp = [-n / zone for n in range(1, zone + 1)]
    assert amounts == pytest.approx([0.0] * (limit - zone + 1) + ramp + [-1.0] * 2)


def test_the_shaper_punishes_the_judged_and_leaves_what_is_raw(make_group, make_completion, command):
    lengths = [80, 85, 90, 100, 100]
    group = make_group(1, 1, 0, None, 0, completions=[make_completion([-1.0] * length) for length in lengths])
    (shaped,), fields = SoftPunishment(limit=100, zone=20).shape(3, (group,))
    assert [score.value for score in shaped.scores] == [1.0, 0.75, -0.5, None, -1.0]
    assert verdicts(shaped) == verdicts(group) == [1.0, 1.0, 0.0, 0.0]
    assert shaped.raw_scores == group.scores
    assert fields == {"soft_overlong_mean": pytest.approx(-1.75 / 4), "soft_overlong_count": 3}
    wrong = make_group(0, 0, 0, completions=[make_completion([-1.0] * length) for length in (10, 95, 100)])
    (shaped,), _ = SoftPunishment(limit=100, zone=20).shape(0, (wrong,))
    assert len({score.value for score in shaped.scores}) == 3
    turns = np.array([0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=bool)
    plain = make_completion([-1.0] * 12)
    episode = replace(plain, action_T=turns)
    rewritten = replace(episode, starts=(0, 8))  # a fresh context in the middle of four sampled tokens
    found = [longest_turn(each) for each in (plain, episode, rewritten, make_completion([]))]
    assert found == [12, 4, 3, 0], "its longest turn counts"
    assert command("explain", "--max-tokens", "16", "--soft-overlong", "16").code == 0
    result = command("explain", "--max-tokens", "16", "--soft-overlong", "17")
    assert (result.code, "soft-overlong" in result.err) == (2, True)
    assert group_status(shaped) is GroupStatus.ALL_WRONG, "lengths do not make a group informative"


def test_a_masked_completion_stays_in_the_baseline_and_leaves_the_loss(make_group, truncated):
    groups = [
        make_group(1, 0, 0, 0, completions=truncated("..xx")),
        make_group(0, 0, completions=truncated("x.")),  # teaches nothing, so nothing of it is masked
        make_group(1, 0, None, completions=truncated(".tx")),
    ]
    kept, masked = algorithm().assign(0, groups), MaskedOverlong(algorithm()).assign(0, groups)
    assert [row.advantages_T.max() for row in masked.rows] == [0.75, 0.0, 0.5, 0.0]
    assert [row.advantages_T.min() for row in masked.rows] == [0.0, -0.25, 0.0, -0.5]  # as with all four: not +-0.5
    assert [row.group for row in masked.rows] == [0, 0, 2, 2]
    assert (kept.num_masked, masked.num_masked) == (0, 2)
    assert len(kept.rows) == len(masked.rows) + masked.num_masked
    assert masked.metrics == {**kept.metrics, "overlong_masked_count": 2}
    assert masked.statuses_P == kept.statuses_P
    marks = [[tokens.is_masked for tokens in tokens_G] for tokens_G in masked.tokens_PG]
    assert marks == [[False, False, True, True], [False, False], [False, False, False]]
    assert not any(tokens.advantages_A.any() for tokens in masked.tokens_PG[0][2:])
    first, second = truncated(".x")
    twice = {name: np.tile(getattr(second, name), 2) for name in ("tokens_T", "action_T", "logprobs_T")}
    groups = [make_group(1, 0, completions=[first, replace(second, starts=(0, 4), **twice)])]
    credit = MaskedOverlong(algorithm()).assign(0, groups)
    assert (len(credit.rows), credit.num_masked) == (1, 2)  # a sequence of the loss is a row
    assert credit.metrics["overlong_masked_count"] == 1


def test_surplus_groups_are_not_trained_even_by_an_advantage_of_steps(make_group, truncated):
    groups = [make_group(1, 0), make_group(1, 1), replace(make_group(1, 0), is_surplus=True)]
    assert group_status(groups[2]) is GroupStatus.SURPLUS
    assert group_status(replace(groups[1], is_surplus=True)) is GroupStatus.ALL_RIGHT

    def over_step(step):
        mean = np.concatenate(step.rewards_PG).mean()
        return [rewards_G - mean for rewards_G in step.rewards_PG]

    of_steps = CreditAlgorithm(flow=make_flow(advantage=AdvantageSpec(name="s", compute_step=over_step)))
    for sees_step, trained in ((False, [0, 0]), (True, [0, 0, 1, 1])):
        credit = (of_steps if sees_step else algorithm()).assign(0, groups)
        assert [row.group for row in credit.rows] == trained
        assert not any(tokens.advantages_A.any() for tokens in credit.tokens_PG[2])
        assert [credit.trains(number) for number in range(3)] == [True, sees_step, False]


def test_what_is_dropped_has_no_verdict_for_credit(make_group, truncated, load):
    groups = (
        make_group(1, 0, 0, 1, completions=truncated("..xx")),
        make_group(1, 0, 0, completions=truncated("x..")),
        make_group(1, 0, completions=truncated(".x")),
    )
    planned = Planned(step=0, cursor=0, batch_size=3)
    config, _ = load('[training]\noverlong = "drop"\n')
    kept, _ = load("")
    for each, statuses in (
        (config, [GroupStatus.INFORMATIVE, GroupStatus.ALL_WRONG, GroupStatus.NO_VERDICT]),
        (kept, [GroupStatus.INFORMATIVE] * 3),
    ):
        sampled = selection(each)(lambda planned, clock: Sampled(prompts=(), groups=groups))(planned, Clock())
        assert [group_status(group) for group in sampled.groups] == statuses
        assert [verdicts(group) for group in sampled.groups] == [verdicts(group) for group in groups]
    dropped = selection(config)(lambda planned, clock: Sampled(prompts=(), groups=groups))(planned, Clock()).groups
    assert [row.advantages_T[-1] for row in algorithm().assign(0, dropped).rows] == [0.5, -0.5]


def test_a_round_counts_only_groups_that_teach_without_what_was_dropped(make_group, truncated, load):
    config, _ = load('[training]\noverlong = "drop"\nrefill = 3\n')
    rounds = []

    def sample(planned, clock):
        rounds.append((planned.cursor, planned.round))
        marks = ".x" if planned.round < 2 else ".."
        groups = tuple(make_group(1, 0, completions=truncated(marks)) for _ in range(2))
        return Sampled(
            prompts=("p", "q"), groups=groups, metrics={"a_count": 1, "b_mean": len(rounds), "c_max": len(rounds)}
        )

    sampled = selection(config)(sample)(Planned(step=0, cursor=7, batch_size=2), Clock())
    assert rounds == [(7, 0), (9, 1), (11, 2)]
    assert len(sampled.prompts) == len(sampled.groups) == 6
    assert sampled.metrics == {"a_count": 3, "b_mean": 1, "c_max": 3}
    first = {"judge_calls": 3, "score_max_time_s": 1.0, "score_mean_time_s": 0.5, "turn_limit_rate": 0.1}
    second = {"judge_calls": 4, "score_max_time_s": 0.7, "score_mean_time_s": 0.9, "turn_limit_rate": 0.3, "new": 1}
    assert joined_fields(first, second) == first | {"judge_calls": 7, "new": 1}
    assert joined_fields({}, second) == second


def test_a_run_counts_and_records_what_it_masks_drops_and_punishes(command, distribution, toy_arguments, tmp_path):
    distribution("retrain-watching", {"watching": WATCHING})
    base = [*toy_arguments, "--reward-type", "watching.Odd", "--scoring-audit", "off", "--max-steps", "1"]
    base += ["--batch-size", "6", "--group-size", "6", "--max-tokens", "12", "--save-every", "0"]
    batches, found = tmp_path / "batches.jsonl", {}
    for mode in ("keep", "mask", "drop"):
        assert command(*base, "--log-dir", mode, "--overlong", mode).code == 0
        (line,), generations = steps(tmp_path / mode), lines(tmp_path / mode, GENERATIONS)
        found[mode] = line, generations, json.loads(batches.read_text())
        batches.unlink()
    line, generations, batch = found["keep"]
    assert {row[1] for row in batch["rows"]} == {True, False}
    for mode in ("mask", "drop"):
        other, records, trained = found[mode]
        assert not any(row[1] for row in trained["rows"])
        assert [each["reward"] for each in records] == [each["reward"] for each in generations]
        for field in ("correct_rate", "mean_reward", "max_token_hit_rate", "no_verdict_count", "sampled_tokens"):
            assert other[field] == line[field], field
        assert not any(each["trained"] for each in records if each["stop_reason"] == "length")
        assert sum(each["trained"] for each in records) == len(trained["rows"]) == other["num_datums"]
    cut = [each for each in generations if each["stop_reason"] == "length"]
    masked, records, trained = found["mask"]
    assert masked["overlong_masked_count"] == trained["num_masked"] == sum(each["trained"] for each in cut) > 0
    assert [row for row in batch["rows"] if not row[1]] == trained["rows"]  # the same baseline
    dropped, records, trained = found["drop"]
    assert dropped["overlong_dropped_count"] == len(cut) > 0
    assert trained["num_masked"] == 0
    assert all(each["shaped_reward"] is None for each in records if each["stop_reason"] == "length")
    assert not any("shaped_reward" in each for each in generations)
    assert not any(name.startswith(("overlong", "soft_overlong")) for name in line)

    assert command(*base, "--log-dir", "soft", "--soft-overlong", "8").code == 0
    (soft,), records = steps(tmp_path / "soft"), lines(tmp_path / "soft", GENERATIONS)
    amounts = [soft_punishment(each["num_tokens"], limit=12, zone=8) for each in records]
    assert soft["soft_overlong_mean"] == pytest.approx(np.mean(amounts))
    assert soft["soft_overlong_count"] == sum(amount < 0 for amount in amounts) > 0
    shaped = [each.get("shaped_reward", each["reward"]) - each["reward"] for each in records]
    assert shaped == pytest.approx(amounts)
    assert soft["mean_reward"] == line["mean_reward"]
    assert soft["useful_groups"] == line["useful_groups"]
    stored = [each.reward for group in Run(tmp_path / "soft").step(None).groups for each in group]
    assert stored == [each.get("shaped_reward", each["reward"]) for each in records]
    unjudged = [each.reward is None for group in Run(tmp_path / "drop").step(None).groups for each in group]
    assert unjudged == [each["stop_reason"] == "length" for each in generations]
