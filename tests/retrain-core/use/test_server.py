"""The server answers as OpenAI's does, gathers its clients into batches, and outlives those that send nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retrain.kernel.errors import ConfigError
from retrain.kernel.types import LogprobRow, SampleRequest, SamplingParams
from retrain.run.opened import Opened
from retrain.run.seed_sources import sample_seed
from retrain.use.serve_command import _stopped_by_signals, _try_all
from retrain.use.serving.batcher import Batcher, Inbox
from retrain.use.serving.http import ApiServer, with_token
from retrain.use.serving.parse import RequestError, parse
from retrain.use.serving.service import Answer, Service
from retrain.use.serving.text_stream import TextStream
from tests.kit.waiting import wait_until

TOKEN, QUESTION = "secret", "What is 2 + 2?"
Post = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def batcher(tiny: Opened, other: Path) -> Iterator[Batcher]:
    models = {"tiny": None, "other": other}
    running = Batcher(tiny.backend, lambda model: tiny.use(models[model]))
    thread = threading.Thread(target=running.run)
    thread.start()
    yield running
    running.close()
    thread.join()
    tiny.use(None)


@pytest.fixture(scope="module")
def server(tiny: Opened, other: Path, batcher: Batcher) -> Iterator[ApiServer]:
    service = Service(tiny, {"tiny": None, "other": other}, batcher)
    with ApiServer("127.0.0.1", 0, with_token(service, TOKEN)) as running:
        yield running


@pytest.fixture(scope="module")
def post(server: ApiServer) -> Iterator[Post]:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield lambda path, **body: client.post(path, content=json.dumps(body))


def answer(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def idle(batcher: Batcher) -> None:
    wait_until(lambda: not batcher._rows)  # otherwise work goes on that nobody waits for


def test_completions_are_those_of_the_engine(tiny: Opened, batcher: Batcher, post: Post) -> None:
    ids = tiny.tokenizer(QUESTION)["input_ids"]
    body = {"prompt": [QUESTION, QUESTION], "n": 2, "max_tokens": 12, "temperature": 0.7, "seed": 5, "logprobs": 0}
    found = answer(post("/completions", **body))
    idle(batcher)
    tiny.use(None)
    requests = [
        SampleRequest(prompt_T=np.array(ids), seeds_G=tuple(sample_seed(5, number, k) for k in range(2)))
        for number in range(2)
    ]
    groups = tiny.backend.sample(requests, SamplingParams(max_tokens=12, temperature=0.7))
    samples = [sample for group in groups for sample in group]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    for choice, sample in zip(found["choices"], samples, strict=True):
        assert choice["text"] == tiny.tokenizer.decode(sample.tokens_T, skip_special_tokens=True)
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], sample.logprobs_T, atol=1e-4)
        assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
        assert choice["finish_reason"] == {"eos": "stop", "length": "length"}[sample.stop_reason.value]
    sampled = sum(len(sample.tokens_T) for sample in samples)
    assert found["usage"] == {
        "prompt_tokens": 2 * len(ids),
        "completion_tokens": sampled,
        "total_tokens": 2 * len(ids) + sampled,
    }
    without_effect = {"top_p": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "suffix": None}
    by_ids = answer(post("/completions", **(body | {"prompt": [ids, ids], "user": "me"} | without_effect)))
    assert by_ids["choices"] == found["choices"]


@pytest.mark.parametrize(
    "extra", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}, {"stop": [" = ", "72"]}]
)
def test_a_stream_joins_to_the_answer(post: Post, extra: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "What is 9 * 8?"}], "max_tokens": 24, "temperature": 0, "n": 2}
    whole = answer(post("/chat/completions", **body, **extra))
    found = chunks(post("/chat/completions", **body, **extra, stream=True, stream_options={"include_usage": True}))
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    for index, choice in enumerate(whole["choices"]):
        own = [c for chunk in found for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == (choice["logprobs"]["content"] if choice["logprobs"] else [])
        assert len(own) > 3 or "top_logprobs" in extra or "stop" in extra, "it came in pieces"
        if extra.get("logprobs"):
            assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
        if "stop" in extra:
            assert choice["finish_reason"] == "stop"
            assert " = " not in choice["message"]["content"]


def test_an_echo_gives_the_log_probabilities_of_the_prompt(tiny: Opened, batcher: Batcher, post: Post) -> None:
    """As lm-eval asks: the prompt's own tokens, and whether each was the likeliest."""
    body = {"prompt": f"{QUESTION} 4", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    (choice,) = answer(post("/completions", **body))["choices"]
    logprobs, ids = choice["logprobs"], tiny.tokenizer(body["prompt"])["input_ids"]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert "".join(logprobs["tokens"][:-1]) == body["prompt"]
    assert choice["text"].startswith(body["prompt"])
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:n])) for n in range(len(ids) + 1)]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values()), "greedy, to the bit"
    idle(batcher)
    tiny.use(None)
    (wanted,) = tiny.backend.logprobs([LogprobRow.of(np.array(ids[:1]), np.array(ids[1:]))], 1.0)
    np.testing.assert_allclose(logprobs["token_logprobs"][1:-1], wanted[1:], atol=1e-4)
    scored = answer(post("/completions", **(body | {"max_tokens": 0})))
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:-1]
    assert scored["usage"]["completion_tokens"] == 0


def test_clients_share_batches_and_each_gets_its_own_model(
    tiny: Opened, batcher: Batcher, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        {"prompt": f"What is {n} + {n}?", "model": ("tiny", "other")[n % 2], "seed": n, "max_tokens": 24}
        for n in range(8)
    ]
    alone = [answer(post("/completions", **body))["choices"][0]["text"] for body in asked]
    same = [answer(post("/completions", **(body | {"model": "tiny"})))["choices"][0]["text"] for body in asked]
    assert [a == b for a, b in zip(alone, same, strict=True)].count(False) >= 3, "the adapter says other things"
    batches: list[int] = []
    stream, use, deadline = tiny.backend.stream, Opened.use, time.monotonic() + 60  # type: ignore[attr-defined]

    def use_when_all_are_here(source: Opened, folder: Path | None) -> None:
        while batcher._rows < len(asked) and not batches and time.monotonic() < deadline:
            time.sleep(0.01)
        use(source, folder)

    monkeypatch.setattr(Opened, "use", use_when_all_are_here)
    monkeypatch.setattr(tiny.backend, "stream", lambda *given: (batches.append(1), stream(*given))[1])
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: answer(post("/completions", **body)), asked))
    assert [found["choices"][0]["text"] for found in together] == alone
    assert [found["model"] for found in together] == [body["model"] for body in asked]
    assert len(batches) == 2, "those that wait are sampled together, whatever the order in which they came"


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look"}}
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
BAD_COMPLETIONS = {
    "prompt": ["", [], {"a": 1}, [[1, "x"]], [99999], [-1], [True], "a" * 9000, ["a"] * 300, "\ud800"],
    "max_tokens": ["many", 0],
    "temperature": [-1, True],
    "n": [10**6],
    "seed": [0.5],
    "stop": [[""], 3],
    "stream": ["yes"],
    "stream_options": [{}],
    "logprobs": [21],
    "top_p": [0.9],
    "logit_bias": [{"5": 1}],
    "what": [1],
    "messages": [[]],
    "tools": [[TOOL]],
}
BAD_CHATS = {
    "messages": [["hi"], [{"role": "user", "content": None}], IMAGE],
    "prompt": ["a"],
    "top_logprobs": [1],
    "tools": [[{"type": "function"}]],
    "tool_choice": ["required"],
}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *(("/completions", {"prompt": "a", k: each}, k) for k, values in BAD_COMPLETIONS.items() for each in values),
        *(("/chat/completions", {**CHAT, name: each}, name) for name, values in BAD_CHATS.items() for each in values),
        ("/completions", {}, "prompt"),
        ("/completions", {"prompt": "a", "model": "nope"}, "model"),
        ("/chat/completions", {}, "messages"),
        ("/responses", {"input": "a", "top_p": 0.5}, "top_p"),
        ("/responses", {"input": "a", "model": "no"}, "model"),
        ("/elsewhere", {}, None),
    ],
)
def test_a_field_that_is_not_understood_is_refused_by_name(
    post: Post, path: str, body: dict[str, Any], param: str | None
) -> None:
    response = post(path, **body)
    assert response.status_code == (404 if param in ("model", None) else 400), response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"]


def test_tools_are_offered_and_a_call_can_be_required(post: Post) -> None:
    body = {**CHAT, "tools": [TOOL], "max_tokens": 4, "seed": 1}
    plain, forced = (answer(post("/chat/completions", **body, tool_choice=how)) for how in ("auto", "required"))
    assert forced["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"], "it begins with the opening of a call"
    assert forced["choices"][0]["message"]["content"].startswith("<tool_call>")


def test_the_responses_of_openais_client(server: ApiServer) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url, api_key=TOKEN, max_retries=0)
    asked = {"model": "tiny", "input": QUESTION, "max_output_tokens": 3, "temperature": 0}
    whole = client.responses.create(**asked)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 3
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_only_those_with_the_token_may_ask(server: ApiServer) -> None:
    client = httpx.Client()
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret".encode()}):
        for method, path in (("GET", "/models"), ("POST", "/completions")):
            response = client.request(method, server.url + path, headers=headers, json={"prompt": "a"})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert TOKEN not in response.text
    listed = client.get(f"{server.url}/models", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    assert [entry["id"] for entry in listed["data"]] == ["tiny", "other"]


@pytest.mark.parametrize("length", [3 * 2**20, 33 * 2**20])
def test_a_client_that_is_refused_while_it_sends_reads_why(server: ApiServer, length: int) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(head.encode())
        for _ in range(length // 2**20):
            time.sleep(0.02)  # the server has answered long before the end
            connection.sendall(b"x" * 2**20)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    assert received.split()[1] == b"401"


HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
JSON_HEAD = f"{HEAD}Content-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        *(
            (f"{JSON_HEAD}{rest}", status)
            for rest, status in {
                "\r\n": 411,
                "Content-Length: many\r\n\r\n": 400,
                "Content-Length: -5\r\n\r\n": 400,
                "Content-Length: 5\r\nContent-Length: 6\r\n\r\n": 400,
                "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 411,
                "Content-Length: 99999999999\r\n\r\n": 413,
                "Content-Length: 500\r\n\r\nhalf": None,
            }.items()
        ),
        *(
            (f"{JSON_HEAD}Content-Length: {len(body)}\r\n\r\n{body}", 400)
            for body in ("{nope", "NaN", "[]", "[" * 4000, "\xff\xfe\xfd\xfc")
        ),
        ("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n", 401),
        (f"{HEAD}Content-Type: text/plain\r\nContent-Length: 14\r\n\r\n" + '{"prompt":"a"}', 415),
        ("NONSENSE\r\n\r\n", 400),
        ("GET /v1/models HTTP/1.1\r\n\r\n", 400),
        ("DELETE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 501),
        (HEAD + "X: y\r\n" * 20_000, 431),
        ("", None),
    ],
)
def test_a_connection_that_sends_nonsense_gets_an_error_or_nothing(
    server: ApiServer, sent: str, status: int | None
) -> None:
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(sent.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    if status is None:
        assert received == b""
    else:
        head, _, body = received.partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status
        assert json.loads(body)["error"]["message"]
    with socket.create_connection((server.host, server.port), timeout=20) as another:
        another.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in another.recv(65536)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(
    tiny: Opened, batcher: Batcher, server: ApiServer, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = tiny.backend.stream  # type: ignore[attr-defined]

    def slowly(requests: Any, params: Any, feed: Any) -> None:
        class Slow:
            def take(self, request: int, place: int, piece: Any, *, is_done: bool) -> bool:
                time.sleep(0.01)
                taken.append(len(piece.tokens_T))
                return bool(feed.take(request, place, piece, is_done=is_done))

            more = feed.more

        tiny.backend._policies[0].stop_ids, before = frozenset(), tiny.backend._policies[0].stop_ids  # type: ignore[attr-defined]
        try:
            take(requests, params, Slow())
        finally:
            tiny.backend._policies[0].stop_ids = before  # type: ignore[attr-defined]

    monkeypatch.setattr(tiny.backend, "stream", slowly)
    body = json.dumps({"prompt": QUESTION, "max_tokens": 1000, "stream": stream})
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.sendall(f"{JSON_HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        while not taken:
            time.sleep(0.005)
    idle(batcher)
    assert 0 < sum(taken) < 900, "it would have been about 1000"


def test_an_error_of_the_engine_ends_the_request_and_not_the_server(
    tiny: Opened, post: Post, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the secret reason")

    with monkeypatch.context() as patched:
        patched.setattr(tiny.backend, "stream", broken)
        response = post("/completions", prompt=QUESTION)
        assert response.status_code == 500
        assert "secret" not in response.text
        found = chunks(post("/completions", prompt=QUESTION, stream=True))
        assert found[-1]["error"]["type"] == "server_error"
    assert answer(post("/completions", prompt=QUESTION, max_tokens=1))


def test_too_much_work_is_refused_and_what_waits_at_the_end_is_told(
    tiny: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.use.serving.batcher.MOST_ROWS", 4)
    models = {"tiny": None}
    batcher = Batcher(tiny.backend, lambda model: tiny.use(models[model]))
    server = ApiServer("127.0.0.1", 0, with_token(Service(tiny, models, batcher), ""))
    with server, ThreadPoolExecutor(3) as pool, httpx.Client() as client:
        body = {"prompt": QUESTION, "n": 2}
        asked = [pool.submit(client.post, f"{server.url}/completions", json=body) for _ in range(3)]
        while sum(each.done() for each in asked) < 1:
            time.sleep(0.01)
        batcher.close()
        assert sorted(each.result().status_code for each in asked) == [429, 503, 503]


async def _followed(service: Service, answer: Answer) -> None:
    async for _ in service.follow(answer):
        pass


def test_a_signal_ends_serving_quietly(tiny: Opened, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):
        with _stopped_by_signals():
            os.kill(os.getpid(), number)
            pytest.fail("while nobody looks it interrupts at once")
        batcher = Batcher(tiny.backend)
        service = Service(tiny, {"tiny": None}, batcher)
        asked, loop = parse({"prompt": QUESTION, "max_tokens": 900, "n": 64}, is_chat=False), asyncio.new_event_loop()
        answer = service.start(asked, Inbox(loop), is_chat=False)
        with _stopped_by_signals() as stop:
            stop.take_over()
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            batcher.run(stop.is_set)
            assert stop.is_set()
        with pytest.raises(RequestError, match="stopping"):
            loop.run_until_complete(_followed(service, answer))
        loop.close()
        assert sum(len(choice.tokens) for choice in answer.choices) < 64 * 900
    assert signal.getsignal(signal.SIGTERM) == before
    assert capsys.readouterr().err.count("stopped") == 4


def test_a_server_of_two_shapes_says_so(tiny: Opened, other: Path, tmp_path: Path) -> None:
    shutil.copytree(other, tmp_path / "wide")
    weights = load_file(other / "adapter_model.safetensors")
    wide = {name: np.repeat(w, 2, axis=0 if "lora_A" in name else 1) for name, w in weights.items()}
    save_file(wide, tmp_path / "wide" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="--adapter wide"):
        _try_all(tiny, {"tiny": None, "wide": tmp_path / "wide"})
    tiny.use(None)


# ---------------------------------------------------------------- text of a completion that grows


WORDS = st.text(alphabet="ab\n#é等🙂 ", max_size=40)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level BPE with hardly any merge, so that characters span tokens; id 0 is special."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, show_progress=False, special_tokens=["<end>"]
    )
    bpe.train_from_iterator(["the key is the sum"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


@settings(max_examples=40, deadline=None)
@example(text="aba", stops=["b", "aba"], cut=0)
@given(
    text=WORDS, stops=st.lists(st.text(alphabet="ab\n#é", min_size=1, max_size=3), max_size=2), cut=st.integers(0, 3)
)
def test_what_is_shown_joins_to_the_text_before_the_first_stop(
    tokenizer: Any, text: str, stops: list[str], cut: int
) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [*ids[: len(ids) - cut], 0]  # may end in half a character; the special token is no text
    stream = TextStream(tokenizer, stops)
    shown = []
    for token in ids:
        shown.append(stream.add(token))
        assert stream.text.startswith("".join(shown)), "what has been shown stays"
    shown.append(stream.finish())
    # the stop that is complete first ends the text, even where a longer one began before it: `b` in `aba`
    texts = [tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(len(ids) + 1)]
    whole = next((text for text in texts if any(stop in text for stop in stops)), texts[-1])
    places = [whole.find(stop) for stop in stops if stop in whole]
    assert "".join(shown) == stream.text == whole[: min(places, default=len(whole))]
    assert stream.is_stopped == bool(places)


def test_nothing_waits_that_cannot_become_a_stop(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, ["\n\n"])
    pieces = [stream.add(token) for token in tokenizer("ab\na\n\nb", add_special_tokens=False)["input_ids"]]
    assert pieces == ["a", "b", "", "\na", "", "", ""]
    assert stream.is_stopped
