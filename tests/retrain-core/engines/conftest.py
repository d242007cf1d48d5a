"""A toy policy, a server that serves it, and an engine between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from retrain.api import PluginContext, SampleRequest, SamplingParams, Seeds, load_plugins
from retrain.engines.engine import ServerEngine, create
from retrain.engines.vllm import VLLM
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.run.tables import registered_tables
from retrain_local.plugin import BUILTIN_MODELS
from tests.kit.inference_server import InferenceServer, serving
from tests.kit.toy_policy import ToyModel, ToyPolicy

MakeEngine = Callable[..., ServerEngine]
FAST = {"retry_s": 20.0, "timeout_s": 10.0}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level tokenizer of 512 tokens."""
    return AutoTokenizer.from_pretrained(BUILTIN_MODELS["tiny"])


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    """A server that reports log-probabilities after temperature."""
    with serving(ToyModel()) as running:
        yield running


@pytest.fixture
def policy() -> ToyPolicy:
    return ToyPolicy()


@pytest.fixture
def make_context(tokenizer: Any) -> Callable[..., PluginContext]:
    def make(
        urls: Sequence[str],
        *,
        temperature: float = 0.7,
        tis_cap: float = 0.0,
        is_bounds: Sequence[float] = (),
        check_stop: Any = None,
        **inference: Any,
    ) -> PluginContext:
        algorithm = registered_tables(load_plugins())["algorithm"].model
        tables = {
            "inference": InferenceTable(engine="vllm", url=",".join(urls), **(FAST | inference)),
            "training": schema.TrainingTable(temperature=temperature),
            "algorithm": algorithm(tis_cap=tis_cap, is_bounds=list(is_bounds)),
        }
        stops = {"check_stop": check_stop} if check_stop else {}
        return PluginContext(
            config=Config(tables=tables), seeds=Seeds(1), plugins=load_plugins(), tokenizer=tokenizer, **stops
        )

    return make


@pytest.fixture
def make_engine(make_context: Callable[..., PluginContext], policy: ToyPolicy) -> Iterator[MakeEngine]:
    """`make_engine(server, ..., key=value)`; closed when the test is over."""
    with ExitStack() as stack:

        def make(
            *servers: InferenceServer, dialect: Any = None, policy: ToyPolicy = policy, **keys: Any
        ) -> ServerEngine:
            context = make_context([server.url for server in servers], **keys)
            engine = create(dialect or VLLM(), context, policy)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def requests() -> list[SampleRequest]:
    """Four prompts, one longer than three cache blocks, with unequal numbers of completions."""
    stream = np.random.default_rng(0)
    return [
        SampleRequest(
            prompt_T=stream.integers(3, 500, size=length), seeds_G=tuple(stream.integers(0, 2**62, size=count).tolist())
        )
        for length, count in ((7, 4), (420, 3), (12, 1), (33, 5))
    ]


@pytest.fixture
def params() -> SamplingParams:
    return SamplingParams(max_tokens=12, temperature=0.7)
