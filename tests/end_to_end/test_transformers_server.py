"""A real server that answers 200 and silently leaves log-probabilities out is refused before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from retrain.api import ConfigError, PluginContext, Seeds, load_plugins
from retrain.engines.dialect import CompletionRequest, HttpRequest
from retrain.engines.engine import create
from retrain.engines.openai import OpenAI, TextIds
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain_local.plugin import BUILTIN_MODELS
from tests.end_to_end.running import retrain
from tests.kit.toy_policy import ToyPolicy
from tests.kit.transformers_server import transformers_serving

pytestmark = pytest.mark.slow  # starting the server takes as long as twenty other tests

TINY = BUILTIN_MODELS["tiny"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with transformers_serving(TINY, tmp_path_factory.mktemp("hub")) as url:
        yield url


@pytest.mark.long
def test_the_server_answers_without_the_log_probabilities_it_was_asked_for(url: str) -> None:
    asked = {"model": f"retrain/{TINY.name}", "prompt": "1 + 2 =", "max_tokens": 2, "logprobs": 1}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=120.0, trust_env=False)
    assert answer.status_code == 200
    assert "logprobs" not in answer.json()["choices"][0]


@pytest.mark.long
def test_the_command_refuses_it_in_one_clear_error(tmp_path: Path, url: str) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    done = retrain("--inference-engine", "openai", "--inference-url", url, cwd=tmp_path)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.err.count("fix:") == 1
    assert "training needs the exact ids that were sampled, and a log-probability of each" in done.err
    assert "use a server that returns both" in done.err
    assert not (tmp_path / "logs").exists()


class PlainOpenAI(OpenAI):
    """Asks with OpenAI's own fields and a text alone, which this server takes."""

    def completion(self, asked: CompletionRequest) -> HttpRequest:
        path, body = super().completion(asked)
        assert body is not None
        kept = {name: body[name] for name in ("model", "max_tokens", "temperature", "logprobs")}
        return path, kept | {"prompt": "1 + 2 ="}


@pytest.mark.long
def test_even_where_it_answers_200_it_is_refused_for_what_is_missing(url: str) -> None:
    tables: dict[str, Any] = {
        "inference": InferenceTable(engine="openai", url=url),
        "training": schema.TrainingTable(temperature=1.0),
    }
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    context = PluginContext(config=Config(tables=tables), seeds=Seeds(1), plugins=load_plugins(), tokenizer=tokenizer)
    with pytest.raises(ConfigError) as caught:
        create(PlainOpenAI(TextIds(tokenizer)), context, ToyPolicy(model_path=str(TINY)))
    assert "the answer holds neither token ids nor the texts of tokens" in str(caught.value)
    assert "use a server that returns both" in str(caught.value)
