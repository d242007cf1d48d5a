"""What the real server of MLX-LM does with requests that the engine never sends, and why it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from retrain_local.plugin import BUILTIN_MODELS
from tests.kit.mlx_server import mlx_serving

pytestmark = pytest.mark.long  # about the server, not about us

MODEL = BUILTIN_MODELS["tiny"]
NO_END = {"0": -1e9, "2": -1e9}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlx_serving(MODEL, tmp_path_factory.mktemp("mlx")) as url:
        yield url


def complete(url: str, **body: Any) -> httpx.Response:
    asked = {"model": str(MODEL), "prompt": "1", "max_tokens": 1, "logprobs": True} | body
    return httpx.post(f"{url}/v1/completions", json=asked, timeout=60.0, trust_env=False)


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"prompt": [5, 6, 7]}, 404, "text input must be of type"),
        ({"logprobs": 1}, 400, "logprobs must be of type bool"),
        ({"adapters": "/nowhere"}, 404, "adapter path does not exist"),
    ],
)
def test_what_the_server_does_not_take(url: str, changes: dict[str, Any], status: int, said: str) -> None:
    answer = complete(url, **changes)
    assert answer.status_code == status
    assert said in answer.text


def test_n_is_ignored_so_each_completion_is_a_request(url: str) -> None:
    answer = complete(url, n=4).json()
    assert len(answer["choices"]) == 1


def test_alternatives_hide_the_drawn_tokens(url: str) -> None:
    """With `top_logprobs` the ids are those of likely tokens: whoever trains on them trains on what was never drawn."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # A text that ends amid a character would differ from its tokens by chance.
    bytes_alone = {str(i): -1e9 for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])}

    def agrees(**asked: Any) -> bool:
        bias = NO_END | bytes_alone
        (choice,) = complete(url, temperature=3.0, max_tokens=40, logit_bias=bias, seed=1, **asked).json()["choices"]
        ids = [entry["id"] for entry in choice["logprobs"]["content"]]
        return bool(tokenizer.decode(ids) == choice["text"])

    assert agrees()
    assert not agrees(top_logprobs=5)


def test_models_cannot_be_listed_without_a_hub_cache(url: str) -> None:
    """So the engine asks for its health."""
    answer = httpx.get(f"{url}/v1/models", timeout=60.0, trust_env=False)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("prompt", ["", ["1", "2"]])
def test_prompts_that_end_the_connection(url: str, prompt: Any) -> None:
    with pytest.raises(httpx.TransportError):
        complete(url, prompt=prompt, seed=1)  # with a seed: in a batch it would end the server
