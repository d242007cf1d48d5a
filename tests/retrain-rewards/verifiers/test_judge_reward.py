from __future__ import annotations

import asyncio
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from retrain.api import ConfigError, Example, Outcome, Score, install_line
from retrain_rewards.verifiers.judge_reward import JudgeReward
from tests.kit.judge_server import EXAMPLE, KEY, LONG_S, YES, drips, fails, hangs, hangs_up, raw, run, says, serving
from tests.kit.problems import codes_in

Build = Callable[..., JudgeReward]


def test_a_good_judge(build_judge: Build) -> None:
    with serving(YES, says("No.\nVERDICT: no"), says("Half.\nVERDICT: 0.5"), says("What?")) as server:
        reward = build_judge(server, judge_price_in=2.0, judge_price_out=10.0, judge_concurrency=1)
        scores = run(reward, "a", "b", "c", "d")
        assert [score.value for score in scores] == [1.0, 0.0, 0.5, None]
        assert scores[3] == Score.no_verdict("the judge's reply does not end in a verdict: 'What?'")
        first = server.requests[0]
        assert first["path"] == "/v1/chat/completions"
        assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.0, 1024)
        assert first["headers"]["Authorization"] == f"Bearer {KEY}"
        assert "What is 2 + 3?" in server.prompts[0]
        spent = {"judge_calls": 4, "judge_tokens_in": 400, "judge_tokens_out": 80}
        assert reward.metrics() == {**spent, "judge_cost_usd": pytest.approx((400 * 2 + 80 * 10) / 1e6)}
        assert set(reward.metrics().values()) == {0}


def test_a_temperature_that_is_not_sent(build_judge: Build) -> None:
    with serving(YES) as server:
        run(build_judge(server, judge_temperature=-1.0), "a")
        assert "temperature" not in server.requests[0]


@pytest.mark.parametrize("fault", [*(fails(status, Retry_After="0.01") for status in (429, 500, 503)), hangs_up])
def test_a_passing_fault_is_tried_again(build_judge: Build, fault: Any) -> None:
    with serving(fault, YES) as server:
        reward = build_judge(server)
        assert run(reward, "a") == [Score.of(1.0)]
        assert len(server.requests) == reward.metrics()["judge_calls"] == 2


NO_COMPLETIONS = [
    *(
        b'{"choices": [{"mess',
        b"",
        b"null",
        b"[1, 2]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [null]}',
        b"\xff\xfe\x00",
    ),
    *(b'{"choices": {"a": 1}}', b'{"choices": [{"message": null}]}', b"[" * 100_000),
]


@pytest.mark.parametrize(
    ("answer", "requests", "fragment"),
    [
        *((fails(s, f"Incorrect key {KEY}"), 1, f"refuses the key in OPENAI_API_KEY (HTTP {s})") for s in (401, 403)),
        (fails(404), 1, "has no model 'm' (HTTP 404), or judge_base_url is not its API"),
        (fails(400, f"no such option, {KEY}"), 1, "answered HTTP 400: "),
        (fails(429, Retry_After="0.02"), 3, "lower judge_requests_per_minute"),
        (fails(500, Retry_After="0.02"), 3, "answered HTTP 500: "),
        (hangs_up, 2, "cannot be reached: "),
        (raw(b"<html>hello</html>", Content_Type="text/html"), 1, "gave no chat completion: '<html>hello</html>'"),
        *((raw(body), 1, "gave no chat completion") for body in NO_COMPLETIONS),
    ],
)
def test_a_lasting_fault_is_a_failed_score_that_says_what_to_do(
    build_judge: Build, answer: Any, requests: int, fragment: str
) -> None:
    with serving(answer) as server:
        (score,) = run(build_judge(server, judge_retries=1 if answer is hangs_up else 2), "a")
        assert score.outcome is Outcome.FAILED
        assert fragment in score.detail
        assert f"the judge at 127.0.0.1:{server.server_address[1]}" in score.detail
        assert KEY not in score.detail
        assert len(score.detail) < 500
        assert len(server.requests) == requests


@pytest.mark.parametrize("content", [None, 5, ["VERDICT: yes"], {"text": "VERDICT: yes"}, ""])
def test_a_reply_without_text_is_no_verdict(build_judge: Build, content: object) -> None:
    with serving(says(content)) as server:
        assert run(build_judge(server), "a")[0].outcome is Outcome.NO_VERDICT


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": "many", "completion_tokens": -5}, 7, [1]])
def test_tokens_that_the_server_does_not_count_are_not_made_up(build_judge: Build, usage: object) -> None:
    with serving(says("VERDICT: yes", usage=usage)) as server:
        reward = build_judge(server, judge_price_in=1.0)
        assert run(reward, "a") == [Score.of(1.0)]
        spent = {"judge_tokens_in": 0, "judge_tokens_out": 0, "judge_cost_usd": 0.0}
        assert reward.metrics() == {"judge_calls": 1, **spent}


@pytest.mark.parametrize("answer", [hangs, drips])
def test_a_judge_without_end_is_cancelled_and_the_next_call_works(build_judge: Build, answer: Any) -> None:
    with serving(answer, YES) as server:
        reward = build_judge(server)

        async def scored() -> Score:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reward.score(EXAMPLE, "a"), 0.2)
            try:
                return await asyncio.wait_for(reward.score(EXAMPLE, "b"), LONG_S)
            finally:
                await reward.close()

        assert asyncio.run(scored()) == Score.of(1.0)


MODEL, URL, NO_KEY = "reward.no-judge-model", "reward.bad-judge-url", "reward.no-judge-key"


@pytest.mark.parametrize(
    ("keys", "environ", "codes"),
    [
        ({"judge_model": " "}, KEY, [MODEL]),
        *(({}, environ, [NO_KEY]) for environ in (None, "  ")),
        ({"judge_base_url": "https://judge.example/v1"}, None, [NO_KEY]),
        *(({"judge_base_url": url}, KEY, [URL]) for url in ("localhost:8000/v1", "http://", "http://[::1/v1")),
        *(({"judge_base_url": f"http://{url}"}, KEY, [URL]) for url in (f"u:{KEY}@localhost/v1", "localhost:99999/v1")),
        ({"judge_base_url": f"http://localhost/v1?key={KEY}"}, KEY, [URL]),
        ({"judge_model": "", "judge_prompt": "x"}, None, [MODEL, "reward.bad-rubric", NO_KEY]),
    ],
)
def test_faults_are_found_before_training(
    build_judge: Build, keys: dict[str, str], environ: str | None, codes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY") if environ is None else monkeypatch.setenv("OPENAI_API_KEY", environ)
    with pytest.raises(ConfigError) as caught:
        build_judge(**keys)
    assert codes_in(caught) == codes
    assert all(problem.where.startswith("[reward] judge_") for problem in caught.value.problems)
    assert KEY not in str(caught.value)


def test_a_missing_library_is_refused_with_its_install_line(
    build_judge: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=re.escape(install_line("retrain-rewards", "judge"))) as caught:
        build_judge()
    assert codes_in(caught) == ["plugin.library-missing"]


def test_a_judge_on_this_machine_needs_no_key(build_judge: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with serving(YES) as server:
        assert run(build_judge(server), "a") == [Score.of(1.0)]
        assert run(build_judge(server, judge_api_key_env="SOME_OTHER_KEY"), "a") == [Score.of(1.0)]


def test_it_pickles_without_the_key_and_works_in_every_event_loop(build_judge: Build) -> None:
    with serving(YES) as server:
        reward = build_judge(server)
        assert run(reward, "a") == run(reward, "a") == [Score.of(1.0)]
        data = pickle.dumps(reward)
        assert KEY.encode() not in data
        copy: JudgeReward = pickle.loads(data)
        assert copy.settings == reward.settings
        assert run(copy, "a") == [Score.of(1.0)]
        assert KEY not in repr(reward.settings)


def test_openai_is_asked_by_the_name_it_knows(build_judge: Build) -> None:
    assert build_judge().settings.is_openai
    assert build_judge(judge_base_url="https://api.openai.com/v1/").settings.is_openai
    assert not build_judge(judge_base_url="https://judge.example/v1").settings.is_openai


def test_gold_is_the_reference(build_judge: Build) -> None:
    assert build_judge().gold(EXAMPLE) == "The final answer is 5"
    assert build_judge().gold(Example(id="e", prompt="p", reference="")) is None
