"""A gateway with a policy that says what it is told to, asked by clients in threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from retrain.api import load_plugins
from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Sample, SampleRequest, SamplingParams, StopReason
from retrain.run.configure import load_file
from retrain.use.agents.episode import Episode, Rules
from retrain.use.agents.player import Gateway
from retrain.use.serving.batcher import Batcher

Say = Callable[[str, int], str]  # (the prompt as text, the seed) -> what the policy writes, up to its end of turn


@dataclass
class Scripted:
    """A policy that writes given texts, and keeps what it was asked and what it wrote."""

    tokenizer: Any
    say: Say
    asked: list[SampleRequest] = field(default_factory=list)
    wrote: list[Sample] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """One text per seed."""
        self.batches.append(len(requests))
        return [[self._one(request, seed) for seed in request.seeds_G] for request in requests]

    def _one(self, request: SampleRequest, seed: int) -> Sample:
        ids = self.tokenizer(self.say(self.tokenizer.decode(request.prompt_T), seed), add_special_tokens=False)
        tokens_T = np.array([*ids["input_ids"], self.tokenizer.eos_token_id], dtype=np.int64)
        logprobs_T = -np.random.default_rng(seed).random(len(tokens_T))
        sample = Sample(tokens_T=tokens_T, logprobs_T=logprobs_T, stop_reason=StopReason.EOS, policy_version=3)
        self.asked.append(request)
        self.wrote.append(sample)
        return sample


@dataclass
class Played:
    """Episodes that are open, and how to ask for them."""

    gateway: Gateway
    batcher: Batcher
    episodes: list[Episode]

    def post(self, number: int = 0, path: str = "/chat/completions", **body: Any) -> httpx.Response:
        """A request of an episode; `headers` are added to its own."""
        token, headers = body.pop("token", self.episodes[number].token), body.pop("headers", {})
        head = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"} | headers
        return httpx.post(self.gateway.url + path, content=json.dumps(body), headers=head, timeout=60)

    def chat(self, *messages: Any, number: int = 0, **body: Any) -> dict[str, Any]:
        """The answer to a chat; texts are messages of the user."""
        said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        response = self.post(number, messages=said, **body)
        assert response.status_code == 200, response.text
        return dict(response.json())


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    local = pytest.importorskip("retrain_local")
    return transformers.AutoTokenizer.from_pretrained(Path(local.__file__).parent / "tiny")


@pytest.fixture(scope="session")
def config() -> Any:
    return load_file(None, ["--data-source=arithmetic", "--data-instruction="], load_plugins()).config


@pytest.fixture
def play(tokenizer: Any, config: Any) -> Iterator[Callable[..., Played]]:
    """`play(backend, episodes=2, most_calls=64, limit=None)`."""
    with ExitStack() as stack:

        def start(
            backend: Any,
            *,
            episodes: int = 1,
            most_calls: int = 64,
            limit: int | None = None,
            infos: Sequence[dict[str, Any]] = (),
        ) -> Played:
            batcher = Batcher(backend, is_run=True)
            streams = Streams(seeds=Seeds(7), purpose="sample")
            params = SamplingParams(max_tokens=128, temperature=0.7)
            rules = Rules(
                params=params, most_calls=most_calls, streams=streams, config=config,
                tokenizer=tokenizer, batcher=batcher, limit=limit, lock=threading.Lock(),
            )  # fmt: skip
            examples = [
                Example(id=f"e{i}" if infos else "e", prompt="What is 2 + 2?", reference="4", info=info)
                for i, info in enumerate(infos or [{"level": 1}] * episodes)
            ]
            prompts = [Prompt(example=example, tokens_T=np.arange(3)) for example in examples]
            opened = [Episode(prompt, i, rules) for i, prompt in enumerate(prompts)]
            gateway = Gateway()
            thread = threading.Thread(target=batcher.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(batcher.close)
            stack.callback(gateway.close)
            stack.enter_context(gateway.admitted(opened))
            return Played(gateway=gateway, batcher=batcher, episodes=opened)

        yield start


@pytest.fixture
def scripted(tokenizer: Any) -> Callable[..., Scripted]:
    """`scripted(say)`: a policy that writes `say(prompt, seed)`."""
    return lambda say: Scripted(tokenizer=tokenizer, say=say)
