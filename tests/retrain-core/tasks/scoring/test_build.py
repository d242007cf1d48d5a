"""Which rewards a configuration means, their trial, the event loop; outcomes that are never merged; kept failures."""

import json
import os
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable, ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import ConfigError, PluginError, RewardError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.child.system import descendants
from retrain.tasks.scoring import event_loop, failures, trial
from retrain.tasks.scoring.build import build_rewards, comparing_rewards, has_verifier, judges
from retrain.tasks.scoring.event_loop import AsyncRewards, AsyncScorers
from retrain.tasks.scoring.failures import FailureRecord, next_step, read_failures, write_failures
from retrain.tasks.scoring.pool import NamedReward, Task
from retrain.tasks.scoring.verdict import UNIQUE_SCORES, combined, part_fields, part_means, verdict
from retrain.tasks.tasks import RewardVerifier
from tests.kit import user_rewards
from tests.kit import user_rewards as rewards
from tests.kit.problems import codes_in, refused
from tests.kit.waiting import wait_until


class Verifier:
    """The data source's own."""

    def score(self, example, text):
        return 1.0


@pytest.fixture
def built(load, toys):
    """`built(text, own)`: class and weight of every reward by name."""

    def build(text, own=None):
        config, problems = load(f'[data]\nsource = "toy"\n{text}')
        assert not problems
        context = PluginContext(config=config, seeds=Seeds(0), plugins=load_plugins({}))
        rewards = build_rewards(config, context, own)
        return {each.name: (type(each.reward).__name__, each.weight) for each in rewards}

    return build


def test_the_type_or_the_verifier_of_the_source_and_weights_in_place_of_both(built):
    assert built("") == {"match": ("MatchReward", 1.0)}
    assert built("", Verifier()) == {"toy": ("Verifier", 1.0)}
    assert built('[reward]\ntype = "toy"', Verifier()) == {"toy": ("ToyReward", 1.0)}
    text = "[reward.weights]\nmatch = 1.0\ntoy = -0.5"
    wanted = {"match": ("MatchReward", 1.0), "toy": ("ToyReward", -0.5)}
    assert built(text) == built(text, Verifier()) == wanted
    assert list(built(text)) == ["match", "toy"]
    with pytest.raises(PluginError, match=r"\[reward\] weights(.|\n)*no reward named 'mtach'"):
        built("[reward.weights]\nmtach = 1.0")

    class Comparing(Verifier):
        needs_reference = True

    named = [NamedReward(name="mine", reward=Comparing()), NamedReward(name="other", reward=Verifier())]
    assert comparing_rewards(named) == {"mine"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ('[reward]\ntype = "none"', False),
        ("[reward.weights]\nmatch = 1.0\ntoy = 1.0", True),
        ("[reward.weights]\nmatch = 1.0\nnone = 1.0", False),  # a sum without one of its parts is no verdict
    ],
)
def test_whether_anything_is_judged_is_one_answer_by_name_and_by_object(text, expected, load, toys):
    config, problems = load(f'[data]\nsource = "toy"\n{text}')
    assert not [problem for problem in problems if "none" not in str(problem)]
    context = PluginContext(config=config, seeds=Seeds(0), plugins=load_plugins({}))
    rewards = [each.reward for each in build_rewards(config, context, None)]
    assert (has_verifier(config), judges(rewards)) == (expected, expected)


@pytest.fixture
def try_out(service):
    """`try_out("Sound", audit="warn")`: the trial of one of `user_rewards`; returns reward and service."""

    def run(kind, shadow=None, **settings):
        reward = getattr(user_rewards, kind)()
        at_work = service(reward, timeout_s=3.0, **settings)
        at_work.shadow = service(getattr(user_rewards, shadow)()) if shadow else None
        config = Config(tables={"scoring": ScoringTable(**settings), "data": DataTable(source="some")})
        examples = [Example(id=str(n), prompt="p", reference=str(n)) for n in range(5)]
        prompts = [Prompt(example=example, tokens_T=np.array([1])) for example in examples]
        trial.refuse_broken_rewards(RewardVerifier(at_work), prompts, config)
        return reward, at_work

    return run


@pytest.mark.parametrize(("kind", "fault"), [("Raising", "first: KeyError: 'no such key'"), ("NotANumber", "nan")])
def test_a_reward_that_fails_on_every_text_is_refused(try_out, kind, fault):
    with pytest.raises(RewardError) as refused:
        try_out(kind, audit="warn")
    (problem,) = refused.value.problems
    assert (problem.code, problem.where.startswith("[reward] type")) == ("reward.always-fails", True)
    assert "all 9 texts" in problem.what
    assert fault in problem.what


def test_a_shadow_that_fails_on_every_text_is_refused(try_out):
    with pytest.raises(RewardError) as refused:
        try_out("Sound", shadow="Raising")
    (problem,) = refused.value.problems
    assert (problem.code, problem.where.startswith("[reward] shadow")) == ("reward.always-fails", True)


KINDS = ("Sound", "OnlyEmpty", "ReadsOneFormat", "Slow", "Heavy", "Remote")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, {}) for kind in KINDS), ("Raising", {"audit": "off"}), ("Raising", {"max_failed_frac": 1.0})],
)
def test_any_other_reward_is_left_to_the_run_as_it_was(try_out, kind, settings, monkeypatch):
    monkeypatch.setattr(trial, "TRIAL_S", 0.3)
    before = descendants(os.getpid())
    reward, _ = try_out(kind, **settings)
    assert reward.calls == 0
    assert descendants(os.getpid()) <= before, "no scoring process was started"


def test_a_reward_that_works_in_its_scoring_process_is_not_refused(try_out):
    before = descendants(os.getpid())
    try_out("OnlyInItsProcess")
    assert descendants(os.getpid()) - before


def test_whatever_goes_wrong_is_a_failed_score(service, example, monkeypatch):
    monkeypatch.setattr("retrain.tasks.scoring.event_loop.JOIN_S", 0.2)  # one call ignores its cancellation
    wanted = {
        "busy": "RuntimeError: 429: too many requests",
        "hang": "timed out after 1 s",
        "ignore": "timed out after 1 s",
        "exit": "SystemExit: 1",
        "nan": "the reward returned nan, not a finite number",
    }
    acts = service(rewards.AsyncActs(), timeout_s=1.0, retries=1, max_failed_frac=1.0)
    with acts.batch() as batch:
        for text in (*wanted, "fine"):
            batch.submit(example, text)
        scores = batch.collect()
        assert [score.detail.partition(" (")[0] for score in scores] == [*wanted.values(), ""]
        assert "user_rewards.py:" in scores[0].detail
        assert scores[-1] == Score.of(0.5)
        assert batch.metrics()["timed_out_score_count"] == 2
    with service(rewards.AsyncActs(), retries=0, max_failed_frac=1.0, timeout_s=1.0).batch() as batch:
        batch.submit(example, "hang")
        batch.submit(example, "cancel")  # a reward that cancels everything hangs nothing
        assert {score.outcome for score in batch.collect(within_budget=False)} == {Outcome.FAILED}


@pytest.mark.slow
def test_waiting_for_a_place_is_no_scoring(service, example):
    acts = service(rewards.AsyncActs(), timeout_s=1.0, retries=0, cache=False, max_failed_frac=0.5)
    with acts.batch() as batch:
        for _ in range(8):  # twice all places
            batch.submit(example, "hang")
        for _ in range(8):
            batch.submit(example, "fine")
        scores = batch.collect()
    assert [score.outcome for score in scores] == [Outcome.FAILED] * 8 + [Outcome.SCORED] * 8


@pytest.mark.slow
def test_a_reward_that_does_not_await_is_found_out(service, example):
    acts = service(acts=rewards.AsyncActs(), match=rewards.Match(), timeout_s=2.0, retries=0, max_failed_frac=1.0)
    with acts.batch() as batch:
        batch.submit(example, "block")
        with pytest.raises(RewardError) as caught:
            batch.collect()
    assert codes_in(caught) == ["reward.blocks-loop"]
    assert "user_rewards.py:" in str(caught.value)
    with acts.batch() as batch:
        batch.submit(example, "7")
        assert batch.collect()[0].parts == {"acts": 0.5, "match": 1.0}


def test_the_place_of_a_blocked_loop_is_known_and_the_next_score_opens_another(example, monkeypatch):
    monkeypatch.setattr(event_loop, "STANDSTILL_MARGIN_S", 0.2)
    limits, finished = ScoringTable(timeout_s=0.2, retries=0), SimpleQueue()
    acts = AsyncRewards({1: rewards.AsyncActs()}, ["match", "acts"], [ScoringTable(), limits])
    blocking, fine = (
        Task(reward=1, example=example, text=text, limits=limits, finished=finished) for text in ("block", "fine")
    )
    of_another = Task(reward=0, example=example, text="7", limits=limits, finished=finished)
    assert acts.blocked_at() == ""
    acts.submit(blocking)
    wait_until(acts.blocked_at)
    outstanding = {blocking, of_another}
    assert acts.give_up(outstanding, where := acts.blocked_at()).code == "reward.blocks-loop"
    assert "user_rewards.py:" in where
    assert (outstanding, blocking.is_cancelled, blocking.last.is_timeout) == ({of_another}, True, True)
    acts.submit(fine)
    assert finished.get(timeout=60.0) is fine
    assert fine.attempts == 1
    acts.close()


def test_the_heart_of_a_loop_without_calls_beats():
    loop = AsyncScorers({0: rewards.AsyncActs()})
    first = loop.beat
    wait_until(lambda: loop.beat > first + event_loop.BEAT_S)
    loop.close()


def test_scores_that_nobody_collects_are_cancelled(service, example):
    acts = rewards.AsyncActs()
    with service(acts, timeout_s=60.0).batch() as batch:
        batch.submit(example, "hang")
        wait_until(lambda: acts.now == 1)
    wait_until(lambda: acts.now == 0)


def test_figures_that_are_none_are_passed_over(service, example, caplog):
    acts = rewards.AsyncActs()
    acts.metrics = lambda: {"cost": float("nan")}
    with service(acts).batch() as batch:
        batch.submit(example, "fine")
        batch.collect()
        assert "cost" not in batch.metrics()
    assert "metrics() of reward 'the_reward' raised ValueError: cost = nan" in caplog.text
    acts = rewards.AsyncActs()
    with service(acts, cache=False).batch() as batch:
        for n in range(40):
            batch.submit(example, str(n))
        assert {score.value for score in batch.collect()} == {0.5}
        assert batch.metrics()["acts_calls"] == 40
    assert acts.most == 4, "no more than the concurrency at a time"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("concurrency", 0, "reward.bad-concurrency"), ("prepare", lambda: 1 / 0, "reward.cannot-prepare")],
)
def test_what_cannot_work_is_refused_at_the_start(name, value, code, service):
    acts = rewards.AsyncActs()
    setattr(acts, name, value)
    assert refused(service(acts).start) == [code]


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        *((float("nan"), "finite number"), (float("-inf"), "finite number"), (np.float32("nan"), "finite number")),
        *((None, "returned None, not a number"), ("1.0", "returned str '1.0', not a number")),
        *((b"1", "returned bytes"), (1j, "returned complex"), ([1.0, 0.0], "returned list")),
        *((np.ones(1), "returned ndarray"), (10**400, "OverflowError"), (np.str_("1"), "returned str_")),
        (Score(outcome=Outcome.SCORED), "Score without a value"),
        (Score(outcome=Outcome.SCORED, value=float("nan")), "finite number"),
        (Score(outcome=Outcome.SCORED, value="1"), "returned str '1'"),
        (Score(outcome=Outcome.SCORED, value=1.0, parts={"a": float("nan")}), "parts that are not finite"),
        (Score(outcome=Outcome.SCORED, value=1.0, parts={"a": 0.5, "b": float("inf")}), "parts that are not finite"),
        (Score(outcome=Outcome.SCORED, value=1.0, parts={"a": "b"}), "ValueError"),
        (Score(outcome="perfect", value=1.0), "ValueError"),
    ],
)
def test_anything_else_is_a_failure(answer, detail):
    score = verdict(answer)
    assert (score.outcome, score.value) == (Outcome.FAILED, None)
    assert detail in score.detail


@pytest.mark.parametrize(
    ("detail", "step"),
    [
        (verdict(None).detail, "Score.no_verdict(reason)"),
        (verdict(float("nan")).detail, "division by zero"),
        (verdict(float("-inf")).detail, "division by zero"),
        (verdict("1").detail, "return a number"),
        ("timed out after 0.3 s", "[scoring.limits.mine] timeout_s"),
        ("comparing took longer than 8 s", "[scoring.limits.mine] timeout_s"),
        ("RewardError: example e has an empty reference: nothing can equal it", "give that example a reference"),
        ("the reference '1/0' has no value, and its text differs", "rewrite the reference"),
        ("KeyError: 'x'", ""),
    ],
)
def test_each_cause_has_its_next_step(detail, step):
    found = next_step(detail, "mine")
    assert step in found
    assert bool(found) == bool(step)


def test_one_reward_keeps_its_score_and_several_are_a_weighted_sum():
    own = Score(outcome=Outcome.SCORED, value=0.5, detail="d", parts={"a": 1.0})
    assert combined([own], ["math"], [1.0]) is own
    assert combined([own], ["math"], [2.0]) == Score(outcome=Outcome.SCORED, value=1.0, detail="d", parts={"a": 1.0})
    assert combined([Score.failed("f")], ["math"], [2.0]) == Score.failed("f")
    assert verdict(Score.no_verdict("x" * 10**6)) == Score.no_verdict("x" * 1000), "a long detail is cut"
    assert verdict(replace(own, value=np.float32(0.5), parts={"a": 1})) == own
    scores = [Score.of(1.0), Score(outcome=Outcome.SCORED, value=0.5, detail="so so")]
    whole = combined(scores, ["math", "style"], [1.0, -0.5])
    assert (whole.value, whole.detail, whole.parts) == (0.75, "style: so so", {"math": 1.0, "style": 0.5})
    names, weights = ["a", "b", "c"], [1.0, 1.0, 1.0]
    whole = combined([Score.no_verdict("n"), Score.failed("f"), Score.of(1.0)], names, weights)
    assert (whole.outcome, whole.detail, whole.parts) == (Outcome.FAILED, "b: f", {"c": 1.0})
    whole = combined([Score.no_verdict("n"), Score.of(0.0), Score.of(1.0)], names, weights)
    assert (whole.outcome, whole.detail, whole.parts) == (Outcome.NO_VERDICT, "a: n", {"b": 0.0, "c": 1.0})
    assert combined([Score.of(1e308)], ["a"], [100.0]).outcome is Outcome.FAILED, "the sum overflows"
    assert combined([Score.of(1e308)] * 2, ["a", "b"], [1.0, 1.0]).outcome is Outcome.FAILED
    of_numpy = (np.float32(1.0), np.int64(1), np.bool_(True), np.array(1.0))
    for answer in (1, 1.0, True, *of_numpy, Fraction(1), Decimal(1)):
        score = verdict(answer)
        assert (score.outcome, score.value, type(score.value)) == (Outcome.SCORED, 1.0, float)


def test_parts_have_means_and_their_fields_are_found_again():
    parts = ({"b": 1.0, "a": 2.0}, {"a": 5.0}, {})
    means = part_means(Score(outcome=Outcome.SCORED, value=0.0, parts=each) for each in parts)
    assert means == {"reward_b_mean": 1.0, "reward_a_mean": 3.5}
    fields = [*means, "reward_std", "loss_mean", UNIQUE_SCORES, "eval_reward_c_mean"]
    assert list(part_fields(fields).items()) == [("a", "reward_a_mean"), ("b", "reward_b_mean")]
    assert part_fields(fields, "eval_") == {"c": "eval_reward_c_mean"}


SCORES = st.one_of(
    st.floats(-1e6, 1e6).map(Score.of), st.just(Score.failed("broken")), st.just(Score.no_verdict("cannot tell"))
)


@settings(max_examples=40)
@given(st.lists(st.tuples(SCORES, st.floats(-10, 10)), min_size=1, max_size=5))
def test_the_whole_has_exactly_one_outcome(parts):
    scores, weights = zip(*parts, strict=True)
    whole = combined(scores, [f"r{n}" for n in range(len(scores))], weights)
    outcomes = {score.outcome for score in scores}
    worst = next(o for o in (Outcome.FAILED, Outcome.NO_VERDICT, Outcome.SCORED) if o in outcomes)
    assert whole.outcome is worst
    total = sum(weight * (score.value or 0.0) for score, weight in parts)
    assert whole.value == (pytest.approx(total) if worst is Outcome.SCORED else None)


def record(text="x", **more):
    example = Example(id="e", prompt=[{"role": "user", "content": "p"}], reference="7", **more)
    return FailureRecord(
        reward="math", weight=1.0, example=example, text=text, detail="d", attempts=2, seconds=0.1, report="r"
    )


@pytest.mark.parametrize("text", ["", "\ud800\0\x1b[2J", "x" * 1_000_000, "漢字"])
def test_a_record_comes_back_as_it_was(text, tmp_path):
    own = record(text, task="t", info={"a": [1, (2,)], "b": {3: float("inf")}})
    assert write_failures(tmp_path / "failures", "step_1", [own])
    (file, back) = read_failures(tmp_path / "failures" / "step_1_0.json")[0]
    assert json.loads(file.read_bytes())["reward"] == "math"
    assert (back.text, back.example.info, back.example.prompt) == (text, own.example.info, own.example.prompt)
    assert (back.reward, back.detail, back.attempts, back.report) == ("math", "d", 2, "r")
    write_failures(tmp_path, "s", [record(info={"a": {1}, "b": 2})])
    assert read_failures(tmp_path)[0][1].example.info == {"a": "{1}", "b": 2}, "what cannot be sent is kept as text"


def test_a_full_folder_takes_no_more(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(failures, "MAX_FILES", 3)
    assert write_failures(tmp_path, "a", [record()] * 2)
    assert not write_failures(tmp_path, "b", [record()] * 2)
    assert not write_failures(tmp_path, "c", [record()])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a_0.json", "a_1.json", "b_0.json"]
    folder = tmp_path / "failures"
    write_failures(folder, "s", [])
    assert not folder.exists()
    write_failures(folder, "../../x", [record()])
    assert [file.name for file in folder.iterdir()] == [".._.._x_0.json"], "a label is only a name"
    assert write_failures(folder / ".._.._x_0.json", "s", [record()]), "a disk that refuses stops nothing"
    assert "cannot be kept" in caplog.text
    monkeypatch.setattr(failures, "MAX_FILES", 9)
    folder = tmp_path / "steps"
    for step, texts in (("step_1", "abc"), ("step_10", "d"), ("step_1", "e")):
        write_failures(folder, step, [record(text) for text in texts])
    kept = [(file.name, each.text) for file, each in read_failures(folder)]
    assert kept == [("step_1_0.json", "e"), ("step_10_0.json", "d")], "a step that is tried again replaces its own"
    write_failures(folder, "step_1", [])
    assert [file.name for file, _ in read_failures(folder)] == ["step_10_0.json"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"reward": "r"}', "\x00", '{"example": 3}', "[" * 100_000])
def test_what_is_no_record_is_named(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "empty").mkdir()
    places = {"": "replay.unreadable", "empty": "replay.empty-folder", "nowhere": "replay.missing"}
    for place, code in places.items():
        with pytest.raises(ConfigError) as caught:
            read_failures(tmp_path / place)
        assert codes_in(caught) == [code]
        assert (place or "a.json") in caught.value.problems[0].where
