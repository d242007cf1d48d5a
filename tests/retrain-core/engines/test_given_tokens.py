"""A server as a teacher: its numbers are those of its model, and an answer to anything else is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from retrain.api import BackendError, ConfigError, Kind, LogprobRow, PluginContext, load_plugins
from retrain.engines import TEACHERS, vllm
from retrain.engines.client import BadAnswerError
from retrain.engines.given_tokens import GivenToken, ServerTeacher, open_server
from retrain.engines.sglang import SGLang
from retrain.engines.vllm import VLLM
from retrain.kernel.config.plugin_tables import TeacherTable
from tests.kit.inference_server import Fault, InferenceServer, changed, log_softmax, serving, truncated
from tests.kit.toy_policy import ToyModel

Teaching = Callable[..., PluginContext]
TOKENS = [3, 14, 15, 9, 2, 6]


@pytest.fixture
def teaching(make_context: Callable[..., PluginContext]) -> Teaching:
    """A context whose teacher is at a URL, while nothing is at that of `[inference]`."""

    def make(*urls: str, **keys: Any) -> PluginContext:
        context = make_context(["http://127.0.0.1:9"], temperature=1.0, retry_s=2.0)
        table = TeacherTable(engine="vllm", url=",".join(urls), **keys)
        tables = {**context.config.tables, "teacher": table}
        return replace(context, config=replace(context.config, tables=tables))

    return make


@pytest.fixture
def teacher(server: InferenceServer, teaching: Teaching) -> Iterator[ServerTeacher]:
    opened = vllm.open_teacher(teaching(server.url))
    yield opened
    opened.close()


def rows(*lengths: int) -> list[LogprobRow]:
    stream = np.random.default_rng(0)
    return [LogprobRow.of(stream.integers(3, 500, size=4), stream.integers(3, 500, size=n)) for n in lengths]


def test_the_numbers_are_those_of_the_servers_model(teacher: ServerTeacher) -> None:
    asked, table = rows(1, 9, 30), ToyModel().table
    asked[1].action_T[6] = False  # a token of a tool
    for row, found_T in zip(asked, teacher.logprobs(asked, 1.0), strict=True):
        wanted_T = [0.0, *(log_softmax(table[a])[b] for a, b in zip(row.tokens_T, row.tokens_T[1:], strict=False))]
        np.testing.assert_allclose(found_T, np.where(row.action_T, wanted_T, 0.0), atol=1e-12)
    assert (teacher.logprobs([], 1.0), teacher.state()) == ([], {})
    with pytest.raises(BackendError, match=r"no log-probabilities at temperature 0\.7"):
        teacher.logprobs(asked, 0.7)


def test_several_servers_share_the_rows_and_a_name_is_sent_as_it_is(
    server: InferenceServer, teaching: Teaching
) -> None:
    with serving(ToyModel()) as other:
        opened = open_server(VLLM(), teaching(server.url, other.url, model="toy"))
        opened.logprobs(rows(*[5] * 12), 1.0)
        opened.close()
        sent = [[body["model"] for body in each.completions] for each in (server, other)]
    assert min(map(len, sent)) > 1
    assert {name for names in sent for name in names} == {"toy"}


def test_another_tokenizer_or_an_unclear_model_is_refused(server: InferenceServer, teaching: Teaching) -> None:
    context = teaching(server.url)
    probe = context.tokenizer("A small town kept its records", add_special_tokens=False)["input_ids"]
    server.texts = {probe[3]: context.tokenizer.decode([probe[3]])}
    open_server(VLLM(), context).close()
    server.texts = {probe[3]: "another text"}
    with pytest.raises(ConfigError, match=r"has another tokenizer than .*\n.*'another text' there"):
        open_server(VLLM(), context)
    with serving(ToyModel(), model_name="second") as other, pytest.raises(ConfigError, match="'second', 'toy'"):
        open_server(VLLM(), teaching(server.url, other.url))


def saying(value: Any) -> Fault:
    def lying(handler: Any, answer: Any) -> None:
        for entry in answer["choices"][0]["prompt_logprobs"][1:]:
            next(iter(entry.values()))["logprob"] = value
        handler.reply(answer)

    return lying


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        *((fault, "") for fault in (truncated, changed(prompt_logprobs=None), changed(prompt_logprobs=[None]))),
        *(
            (saying(value), "is not a log-probability")
            for value in (0.5, float("nan"), -9999.0, float("-inf"), None, "-1.0", True)
        ),
    ],
)
def test_an_answer_without_the_numbers_is_never_one(
    teacher: ServerTeacher, server: InferenceServer, fault: Any, said: str
) -> None:
    server.always = fault
    with pytest.raises(BackendError, match=said or None) as caught:
        teacher.logprobs(rows(3), 1.0)
    assert "[inference]" not in str(caught.value.problems[0].fix)


def test_sglang_is_asked_in_its_own_way() -> None:
    path, body = SGLang().given_tokens(TOKENS, "any")
    assert (path, body["input_ids"], body["logprob_start_len"]) == ("/generate", TOKENS, 0) if body else False
    triples = [[None, 3, "a"], *([-0.5 * n, token, f"t{token}"] for n, token in enumerate(TOKENS[1:], 1))]
    given = SGLang().parse_given_tokens({"meta_info": {"input_token_logprobs": triples}}, TOKENS)
    assert given[0] == GivenToken(logprob=-0.5, text="t14")
    assert [entry.logprob for entry in given] == [-0.5, -1.0, -1.5, -2.0, -2.5]
    for answer in ({}, {"meta_info": {"input_token_logprobs": triples[1:]}}, {"meta_info": None}, []):
        with pytest.raises(BadAnswerError):
            SGLang().parse_given_tokens(answer, TOKENS)


def test_the_engines_that_teach() -> None:
    engines = load_plugins().registered(Kind.INFERENCE_ENGINE)
    teachers = {entry.spec.name for entry in engines if entry.spec.traits.open_teacher}
    assert teachers == {"pytorch", *TEACHERS} == {"pytorch", "vllm", "sglang"}
