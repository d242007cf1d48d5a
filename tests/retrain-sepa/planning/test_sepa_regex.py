from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.api import Config, ConfigError, PluginContext, Seeds, load_plugins
from retrain_sepa.planning import DEFAULT_PHRASES, PhraseFinder, regex_detector
from retrain_sepa.tables import PlanningPhrases
from tests.kit.problems import codes_in

FINDER = PhraseFinder.of(DEFAULT_PHRASES)
core_plugins = cache(lambda: load_plugins({"RETRAIN_PLUGINS": "retrain-core"}))  # for hundreds of examples


def detector(tokenizer, grams=""):
    config = Config(tables={"logging": PlanningPhrases(strategic_grams=grams)})
    context = PluginContext(config=config, seeds=Seeds(1), plugins=core_plugins(), tokenizer=tokenizer)
    return regex_detector(context)


def encode(tokenizer, text):
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return np.asarray(encoded["input_ids"], dtype=np.int64), encoded["offset_mapping"]


@pytest.mark.parametrize(
    ("text", "phrase", "grams"),
    [
        ("so x = 3. Wait, let me see", "Wait, let me", ""),
        ("and that's not right, as y", "that's not right", ""),
        ("then double-check the sum", "double-check", ""),
        ("so let me verify it", "let me verify", ""),  # the tiny vocabulary splits these words
        ("the sum. The key is x", "The key is", ""),
        ("wait let me then, hold on there", "hold on", '["hold on"]'),
        ("wait let me then, hold on there", "on there", "on there, x y z"),
    ],
)
def test_exactly_the_phrase_is_marked(tokenizer, text, phrase, grams):
    ids, offsets = encode(tokenizer, text)
    (mask,) = detector(tokenizer, grams).masks([ids])
    assert (mask.dtype, mask.shape) == (np.bool_, ids.shape)
    shown = "".join(text[start:end] for (start, end), hit in zip(offsets, mask, strict=True) if hit)
    assert shown.replace(" ", "").strip(",.") == phrase.replace(" ", "")  # a token may end in the comma after it


def test_curly_apostrophe_and_cjk_neighbours(families):
    text = "等That\u2019s not right等"
    ids, offsets = encode(families["byte_level"], text)
    (mask,) = detector(families["byte_level"]).masks([ids])
    assert mask.tolist() == [start >= 1 and end <= len(text) - 1 for start, end in offsets]


def test_empty_completions(tokenizer):
    assert detector(tokenizer).masks([]) == []
    empty, full = detector(tokenizer).masks([np.zeros(0, np.int64), encode(tokenizer, "what if")[0]])
    assert empty.shape == (0,)
    assert full.all()


@pytest.mark.parametrize("grams", ["[]", ",", '["..."]'])
def test_grams_without_words_and_no_tokenizer_are_config_errors(tokenizer, grams):
    with pytest.raises(ConfigError) as caught:
        detector(tokenizer, grams)
    assert codes_in(caught) == ["planning.empty-phrase"]
    assert "strategic_grams" in caught.value.problems[0].where
    with pytest.raises(ConfigError) as caught:
        detector(None)
    assert codes_in(caught) == ["planning.no-tokenizer"]


gaps = st.sampled_from([" ", ", ", "-", ". "])
few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)


@few
@given(st.lists(st.tuples(st.sampled_from([*DEFAULT_PHRASES, "x", "so we", "3", "waits"]), gaps), max_size=12))
def test_marks_are_the_tokens_that_overlap_a_phrase(tokenizer, pairs):
    text = "x " + "".join(words + gap for words, gap in pairs)
    ids, offsets = encode(tokenizer, text)
    spans = FINDER.spans(text)
    (mask,) = detector(tokenizer).masks([ids])
    assert mask.tolist() == [any(start < b and end > a for a, b in spans) for start, end in offsets]


@few
@given(st.lists(st.integers(0, 300), max_size=40))
def test_any_ids_give_a_mask_of_their_length(tokenizer, ids):
    (mask,) = detector(tokenizer).masks([np.asarray(ids, dtype=np.int64)])
    assert mask.shape == (len(ids),)
