"""A real MAX on a CPU: exact where its texts name tokens, refused where they do not. `nox -s server-max` runs this."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import CompletionRequest, checked
from retrain.engines.max import MAX
from retrain.engines.openai import TextIds
from retrain.engines.policy_check import probe_prompts
from retrain_local.plugin import BUILTIN_MODELS
from tests.end_to_end.running import retrain
from tests.kit.server_process import free_port, running

PYTHON = os.environ.get("RETRAIN_MAX_PYTHON", "")
pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="RETRAIN_MAX_PYTHON names no Python with MAX; `nox -s server-max` does"),
]
START_S = 1800.0  # the first start compiles the model
EXACT = 1e-4  # nats, both sides in float32
END = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama, the one architecture that MAX has on a CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "intermediate_size": 384, "vocab_size": 512, "max_position_embeddings": 1024}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, initializer_range=0.1, eos_token_id=END, pad_token_id=0, bos_token_id=None)
        made = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN_MODELS["tiny"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    url, log = f"http://127.0.0.1:{(port := free_port())}", tmp_path_factory.mktemp("max") / "server.log"
    options = ["--devices", "cpu", "--max-length", "1024", "--quantization-encoding", "float32", "--port", str(port)]
    command = [str(Path(PYTHON).with_name("max")), "serve", "--model", str(model), *options]
    environ = {"MAX_SERVE_HOST": "127.0.0.1", "MAX_SERVE_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1"}
    with running(command, f"{url}/v1/models", log, start_s=START_S, environ={**os.environ, **environ}):
        yield url


def reference(model: Path, ids: list[int], count: int) -> np.ndarray:
    """Log-probabilities of the last `count` tokens, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = base(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return np.asarray([float(logprobs[place - 1, ids[place]]) for place in range(len(ids) - count, len(ids))])


def test_what_it_says_is_exact_or_refused(model: Path, url: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    dialect, outcomes = MAX(TextIds(tokenizer)), Counter[str]()
    asked = CompletionRequest(
        prompt_T=[5],
        seed=1,
        max_tokens=3,
        temperature=1.0,
        model=str(model),
        adapter="",
        stop_ids=frozenset({END}),
        vocabulary=512,
    )
    for number, prompt_T in enumerate(probe_prompts(tokenizer, 1024)):
        for seed in (1, 2, 3, 4):
            one = replace(asked, prompt_T=prompt_T.tolist(), seed=10 * number + seed)
            path, body = dialect.completion(one)
            answer = httpx.post(url + path, json=body, timeout=120.0, trust_env=False)
            assert answer.status_code == 200, answer.text
            try:
                drawn = checked(dialect.parse_completion(answer.json(), one), one)
            except BadAnswerError as error:
                outcomes["refused" if "the text" in str(error) else str(error)] += 1
                continue
            ids = [*one.prompt_T, *drawn.tokens_T.tolist()]
            np.testing.assert_allclose(drawn.logprobs_T, reference(model, ids, len(drawn.tokens_T)), atol=EXACT)
            outcomes["exact"] += 1
    assert outcomes.keys() == {"exact", "refused"}
    assert outcomes["exact"] >= 8
    assert outcomes["refused"] >= 1  # tokens that are parts of characters all read alike


def test_fields_that_it_does_not_know_are_refused_and_n_is_ignored(model: Path, url: str) -> None:
    def answer(**fields: Any) -> httpx.Response:
        asked = {"model": str(model), "prompt": [5, 6], "max_tokens": 1, "logprobs": 1} | fields
        return httpx.post(f"{url}/v1/completions", json=asked, timeout=120.0, trust_env=False)

    for field in ("return_token_ids", "no_such_field"):
        assert answer(**{field: True}).status_code == 400
        assert "Extra inputs are not permitted" in answer(**{field: True}).text
    assert len(answer(n=3).json()["choices"]) == 1


def test_training_is_refused_where_adapters_are_not_served(model: Path, url: str, tmp_path: Path) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    through = ("--inference-engine", "max", "--inference-url", url, "--model", str(model))
    done = retrain(*through, "--max-steps", "1", cwd=tmp_path)
    assert done.code == 1
    assert "Traceback" not in done.err
    assert "LoRA functionality is not enabled on this server" in done.err
    assert "--enable-lora" in done.err
