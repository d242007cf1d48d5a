"""Scores in the order of submission, whoever finishes first; limits, budget, retries, weights, cache, hostile texts."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from retrain.kernel.contracts.context import PhaseProgress
from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.errors import PluginError, RewardError
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Outcome, Sample, SamplingParams, Score, StopReason
from retrain.tasks.child.system import descendants
from retrain.tasks.rollout import SingleTurn
from retrain.tasks.scoring.failures import read_failures
from retrain.tasks.scoring.service import VerdictCache, key_of
from tests.kit import user_rewards as rewards
from tests.kit.interrupts import Stop, interrupted_after
from tests.kit.problems import codes_in


def scored(service, example, *texts, **more):
    with service.batch(**more) as batch:
        assert [batch.submit(example, text) for text in texts] == list(range(len(texts)))
        return batch.collect()


@pytest.fixture
def naps(service):
    """Two rewards on three workers, each of which is prepared."""
    return service(nap=rewards.Nap(), length=rewards.Length(), ready=rewards.Prepared(), workers=3, cache=False)


def test_scores_come_in_order_with_several_workers_whoever_finishes_first(naps, service, example):
    delays = ["0.03", "0", "0.001", "0.01"] * 3
    wanted = [{"nap": 1.0, "length": len(delay) / 10, "ready": 1.0} for delay in delays]
    assert [score.parts for score in scored(naps, example, *delays)] == wanted
    one = service(nap=rewards.Nap(), length=rewards.Length(), ready=rewards.Prepared(), cache=False)
    assert scored(one, example, *delays[:4]) == scored(naps, example, *delays[:4])
    assert scored(naps, example) == []


def test_a_launch_starts_processes_before_anybody_waits_for_them(service):
    before = descendants(os.getpid())
    service(ready=rewards.Prepared()).launch()
    assert descendants(os.getpid()) - before


def test_rollouts_count_the_scores_that_they_wait_for(naps, example):
    progress = PhaseProgress()
    seen = []
    add = progress.add

    def watched(done=0, **counts):
        add(done, **counts)
        seen.append((progress.unit, progress.done, progress.total))

    progress.add = watched
    sample = Sample(tokens_T=np.array([1]), logprobs_T=np.array([-1.0]), stop_reason=StopReason.EOS, policy_version=0)
    backend = SimpleNamespace(sample=lambda requests, params: [[sample, sample]])
    params = SamplingParams(max_tokens=4, temperature=1.0)
    tokenizer = SimpleNamespace(decode=lambda tokens_T, **how: "0.02")
    rollouts = SingleTurn(backend=backend, tokenizer=tokenizer, scoring=naps, params=params, progress=progress)
    prompt = Prompt(example=example, tokens_T=np.array([2]))
    with rollouts.batch("step_000000") as batch:
        batch.sample([prompt], 2, Streams(seeds=Seeds(1), purpose="sample"))
        assert seen == [("completions", 1, 2), ("completions", 2, 2)]
        batch.scores()
    assert seen[2:] == [("scores", done, 6) for done in range(1, 7)], "of two completions by three rewards"


@pytest.mark.slow
def test_queueing_is_no_scoring(service, example):
    slow = service(rewards.Nap(), workers=1, timeout_s=2.0, retries=0, cache=False)
    with slow.batch() as batch:
        for _ in range(15):  # more in all than one may take
            batch.submit(example, "0.2")
        assert {score.outcome for score in batch.collect()} == {Outcome.SCORED}
        assert all(seconds >= 0.2 for seconds in batch.seconds)
        assert batch.metrics()["timed_out_score_count"] == 0


def test_scoring_begins_while_others_are_still_sampled(service, example, tmp_path):
    file = tmp_path / "calls"
    with service(rewards.Counting(str(file))).batch() as batch:
        batch.submit(example, "first")
        for _ in range(600):
            if file.exists():
                break
            threading.Event().wait(0.05)
        assert file.read_text() == "x"  # nothing was collected yet
        batch.submit(example, "second")
        assert len(batch.collect()) == 2


def test_a_failed_score_is_tried_again(service, example, tmp_path):
    flaky = rewards.Flaky(str(tmp_path))
    assert [score.value for score in scored(service(flaky, retries=1), example, "a", "b")] == [1.0, 1.0]
    once = service(flaky, retries=0, max_failed_frac=1.0)
    assert scored(once, example, "c") == [Score.failed("the scoring process exited with code 1")]
    file = tmp_path / "calls"
    caching = service(rewards.Counting(str(file)), retries=1, max_failed_frac=1.0)
    for _ in range(2):
        scores = scored(caching, example, "a", "a", "bad", "a")
        assert [score.outcome.value for score in scores] == ["scored", "scored", "failed", "scored"]
    assert len(file.read_text()) == 1 + 2 * 2  # a failure is never remembered, and tried twice each time
    scored(caching, example, "a", "a", fresh=True)
    assert len(file.read_text()) == 7
    scored(service(rewards.Counting(str(file)), cache=False), example, "a", "a")
    assert len(file.read_text()) == 9


def test_a_stopped_process_is_replaced_and_no_text_is_blamed(service, example, monkeypatch):
    monkeypatch.setattr("retrain.tasks.child.process.HANDOVER_S", (0.5, 0.5))
    before = descendants(os.getpid())
    scoring = service(rewards.Hostile(), timeout_s=10.0, retries=0)
    scoring.start()
    (guard,) = (pid for pid in descendants(os.getpid()) - before if descendants(pid))
    for worker in descendants(guard):
        os.kill(worker, signal.SIGSTOP)
    assert [score.value for score in scored(scoring, example, "7 ", "8", "7  ")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("failures", "stops"), [(0, False), (2, False), (3, True), (20, True)])
def test_more_failures_than_the_budget_stop_the_run(failures, stops, service, example, tmp_path):
    counting = service(rewards.Counting(str(tmp_path / "calls")), retries=0)
    folder = tmp_path / "failures"
    texts = ["bad"] * failures + [str(n) for n in range(20 - failures)]
    if not stops:
        scores = scored(counting, example, *texts, label="step_3", failures=folder)
        assert sum(score.outcome is Outcome.FAILED for score in scores) == failures
    else:
        with pytest.raises(RewardError) as caught:
            scored(counting, example, *texts, label="step_3", failures=folder)
        (problem,) = caught.value.problems
        assert problem.code == "reward.too-many-failures"
        assert f"'the_reward' failed on {failures} of 20 completions; first: ValueError: bad" in problem.what
        assert f"retrain audit --replay {folder}" in problem.fix
    if failures:  # equal texts were asked once
        ((file, record),) = read_failures(folder)
        assert (file.name, record.text, record.count, record.attempts) == ("step_3_0.json", "bad", failures, 1)
        assert "in score" in record.report


def test_weights_and_means_of_each(service, example):
    both = service(match=rewards.Match(), length=rewards.Length(), weights={"match": 2.0, "length": -1.0})
    with both.batch() as batch:
        for text in ("7", "12345", "unclear"):
            batch.submit(example, text)
        scores = batch.collect()
        metrics = batch.metrics()
    assert [score.value for score in scores] == [pytest.approx(1.9), pytest.approx(-0.5), None]
    assert scores[2].detail == "length: cannot tell"
    assert metrics["reward_match_mean"] == pytest.approx(1 / 3)
    assert metrics["reward_length_mean"] == pytest.approx(0.3)
    names = {"timed_out_score_count", "score_mean_time_s", "score_max_time_s"}
    assert set(metrics) == names | {"reward_match_mean", "reward_length_mean"}
    assert 0.0 < metrics["score_mean_time_s"] <= metrics["score_max_time_s"]
    with service(rewards.Match()).batch() as batch:
        batch.submit(example, "7")
        assert batch.collect() == [Score.of(1.0)]
        assert set(batch.metrics()) == names, "a single reward has no separate mean"
    scores = scored(service(rewards.Length()), example, *["unclear"] * 8)
    assert {score.outcome for score in scores} == {Outcome.NO_VERDICT}, "they never stop the run"
    own = {"timeout_s": 0.1, "retries": 0, "max_failed_frac": 1.0}
    both = service(nap=rewards.Nap(), length=rewards.Length(), limits={"nap": own}, max_failed_frac=0.0)
    assert [limits.timeout_s for limits in both.limits] == [0.1, 10.0]
    with both.batch() as batch:
        batch.submit(example, "100")
        (score,) = batch.collect()
        assert score == Score(outcome=Outcome.FAILED, detail="nap: timed out after 0.1 s", parts={"length": 0.3})
        metrics = batch.metrics()
    assert (metrics["timed_out_score_count"], metrics["reward_length_mean"]) == (1, 0.3)
    assert "reward_nap_mean" not in metrics
    with pytest.raises(RewardError) as caught:
        scored(service(nap=rewards.Nap(), timeout_s=0.1, retries=0), example, "100")
    assert codes_in(caught) == ["reward.too-many-failures"]
    assert f"on example {example.id}" in str(caught.value)
    assert "[scoring.limits.nap] timeout_s" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "code", "cause"),
    [
        ("Unprepared", "reward.cannot-prepare", "ImportError: no module named sympathy"),
        ("Hungry", "reward.cannot-start", "died with signal 9"),
        ("Locked", "plugin.not-picklable", ""),
    ],
)
def test_a_reward_that_cannot_start_is_refused_at_once(name, code, cause, service):
    with pytest.raises(PluginError, match=cause or None) as caught:
        service(getattr(rewards, name)()).start()
    assert codes_in(caught) == [code]


def test_hostile_texts_arrive_whole_and_an_example_that_cannot_be_sent_is_a_failure(service):
    matching, odd = service(rewards.Match()), Example(id="o", prompt="p", reference="7", info={"a": {1, 2}})
    for text in ("\ud800\0\x1b[2J", "x" * 1_000_000, "", "\\boxed{\\boxed{}}"):
        same = Example(id=text[:9], prompt="p", reference=text)
        assert scored(matching, same, text) == [Score.of(1.0)]
    with matching.batch() as batch:
        batch.submit(odd, "7")
        (score,) = batch.collect(within_budget=False)
    assert "a set cannot be sent to another process" in score.detail


def test_a_signal_ends_the_wait_and_the_next_batch_is_clean(service, example):
    slow = service(nap=rewards.Nap(), acts=rewards.AsyncActs(), timeout_s=600.0)
    with interrupted_after(0.1), pytest.raises(Stop):
        scored(slow, example, *["500"] * 50)
    assert scored(slow, example, "0.01")[0].parts == {"nap": 1.0, "acts": 0.5}
    with slow.batch() as batch:
        for _ in range(5):
            batch.submit(example, "500")
        slow.close()
        slow.close()
    assert scored(slow, example, "0")[0].parts == {"nap": 1.0, "acts": 0.5}  # it can be used again
    with slow.batch() as batch:
        batch.submit(example, "500")  # left without being collected
    assert scored(slow, example, "0")[0].parts == {"nap": 1.0, "acts": 0.5}


def test_failures_are_not_kept_and_the_least_recently_used_verdict_goes_first():
    cache, example = VerdictCache(max_entries=2), Example(id="a", prompt="p", reference="r")
    one, two, three, four = (key_of(0, example, text) for text in "1234")
    cache.put(one, Score.of(1.0))
    cache.put(two, Score.no_verdict("n"))
    cache.put(three, Score.failed("f"))
    assert cache.get(three) is None
    assert cache.get(one) == Score.of(1.0)  # used: now two is the oldest
    cache.put(four, Score.of(0.0))
    assert [cache.get(key) for key in (one, two, four)] == [Score.of(1.0), None, Score.of(0.0)]
    same, other = (Example(id=name, prompt="p", reference="r") for name in "ab")
    assert key_of(0, same, "1") == one
    assert len({one, key_of(1, example, "1"), key_of(0, other, "1"), key_of(0, example, "\ud800")}) == 4


TEXTS = ("9^{9^{9^9}}", "{" * 1000, "\\boxed{\\boxed{}}", "\0\ud800", "x" * 1_000_000, "\\boxed{" * 50_000, "7")
SLOW = ("sleep", "spin", "tower", "stop")  # each takes the time limit: few of them
SLOW_EACH, QUICK_EACH = 2, 4


@pytest.mark.long
def test_a_thousand_hostile_completions(service, example):
    quick = [name for name in rewards.ATTACKS if name not in SLOW]
    texts = [f"{name} {n}" for name in SLOW for n in range(SLOW_EACH)]
    texts += [f"{name} {n}" for name in quick for n in range(QUICK_EACH)]
    texts += [f"{name} {n}" for name in rewards.HARMLESS for n in range(QUICK_EACH)]
    texts += [f"{TEXTS[n % len(TEXTS)]}{'' if n < len(TEXTS) else n}" for n in range(1000 - len(texts))]
    random.Random(0).shuffle(texts)
    hostile = service(rewards.Hostile(), workers=2, timeout_s=1.5, retries=0, max_failed_frac=1.0, memory_gb=2.0)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with hostile.batch() as batch:
        for text in texts:
            batch.submit(example, text)
        scores = batch.collect()
        metrics = batch.metrics()
    assert len(scores) == len(texts) == 1000
    for text, score in zip(texts, scores, strict=True):
        word = text.split(" ")[0]
        wanted = Outcome.FAILED if word in rewards.ATTACKS else Outcome.SCORED
        assert score.outcome is wanted, (text[:50], score)
        assert score.value == (None if word in rewards.ATTACKS else float(word in rewards.HARMLESS or text == "7"))
    assert metrics["timed_out_score_count"] == len(SLOW) * SLOW_EACH
    factor = 1024 if sys.platform == "darwin" else 1
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / factor / 1024
    assert grown_mb < 1500  # the texts of a step and their frames, nothing of what they make the reward do


def test_nothing_is_left_when_the_service_is_closed(service, example):
    before = descendants(os.getpid())
    hostile = service(rewards.Hostile(), workers=2, timeout_s=0.1, retries=0, max_failed_frac=1.0)
    hostile.shadow = service(rewards.Match())
    with hostile.batch() as batch:
        for word in ("leave_process", "fork_and_hang", "fork_and_return", "sleep", "stop"):
            batch.submit(example, word)
        started = descendants(os.getpid()) - before
        batch.collect()
    assert started
    started |= descendants(os.getpid()) - before
    hostile.close()
    listed = subprocess.run(["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    alive = {int(number) for *numbers, state in rows if not state.startswith("Z") for number in numbers}
    assert not alive & started
