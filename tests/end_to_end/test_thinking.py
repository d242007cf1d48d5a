"""A run of a model that thinks, with a limit for its thoughts, from the console to the records."""

import json
from pathlib import Path

import numpy as np

from retrain.records.stored_tokens import read_tokens
from tests.end_to_end.running import SMALL, records, retrain, tiny
from tests.kit.thinking_models import OPENED, thinking_model


def test_thoughts_are_limited_and_recorded_apart_and_the_tag_is_not_trained(tmp_path: Path) -> None:
    model = thinking_model(tmp_path / "model", OPENED)
    limits = ("--max-thinking-tokens", "6", "--max-tokens", "24", "--log-dir", "run")
    tiny(*SMALL, "--model", str(model), *limits, cwd=tmp_path)
    lines = records(tmp_path / "run/emergence/generations.jsonl")
    closed = [line for line in lines if "</think>" in line["completion"]]
    assert len(closed) > len(lines) / 2
    for line in lines:
        parts = line["completion"].replace("<think>", "").partition("</think>")
        assert (line["reasoning"], line["answer"]) == (parts[0].strip(), parts[2].strip())
    unclosed = [line for line in lines if line not in closed]
    assert not any(line["reward"] for line in unclosed), "an open thought has no answer"
    assert any(line["reward"] == 1.0 for line in closed)
    tag = next(
        token["id"]
        for token in json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        if token["content"] == "</think>"
    )
    here = [line for line in lines if line["step"] == 0]
    for line, record in zip(here, read_tokens(tmp_path / "run", 0), strict=True):
        assert record.row is not None
        places = np.flatnonzero((record.row.tokens_T == tag) & ~record.row.action_T)
        assert len(places) == (line in closed)
        assert line["num_tokens"] == np.count_nonzero(record.row.action_T) <= 24 - len(places)
    steps = records(tmp_path / "run/metrics.jsonl")
    rates = [line["cut_thought_rate"] for line in steps if "cut_thought_rate" in line]
    assert len(rates) == 3
    assert rates[0] > 0.5
    gaps = [line["logprob_gap_max"] for line in steps if "logprob_gap_max" in line]
    assert gaps
    assert max(gaps) < 1e-3, "tokens after the tag are trained in the context that they were sampled in"


def test_a_model_without_thoughts_has_no_limit_for_them_and_its_records_no_parts(tmp_path: Path) -> None:
    tiny(*SMALL, "--max-steps", "1", "--log-dir", "run", cwd=tmp_path)
    assert not any("answer" in line for line in records(tmp_path / "run/emergence/generations.jsonl"))
    refused = retrain("--max-thinking-tokens", "9", "--log-dir", "other", cwd=tmp_path)
    assert refused.code == 2
    assert "training.no-thinking-tags" in refused.err
    assert "Loading train model" not in refused.err + refused.out
