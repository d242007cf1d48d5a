from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.api import Config, ConfigError, PluginContext, Seeds, load_plugins
from retrain_sepa.planning import DEFAULT_PHRASES, PhraseFinder, regex_detector
from retrain_sepa.tables import PlanningPhrases

same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
FINDER = PhraseFinder.of(DEFAULT_PHRASES)
core_plugins = cache(lambda: load_plugins({"RETRAIN_PLUGINS": "retrain-core"}))  # for hundreds of examples


def detector(tokenizer, grams=""):
    config = Config(tables={"logging": PlanningPhrases(strategic_grams=grams)})
    context = PluginContext(config=config, seeds=Seeds(1), plugins=core_plugins(), tokenizer=tokenizer)
    return regex_detector(context)


def encode(tokenizer, text):
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return np.asarray(encoded["input_ids"], dtype=np.int64), encoded["offset_mapping"]


def marked(tokenizer, text, grams=""):
    """Each marked token's own characters, by the offsets that the tokenizer gave when it encoded the text."""
    ids, offsets = encode(tokenizer, text)
    (mask,) = detector(tokenizer, grams).masks([ids])
    assert mask.dtype == np.bool_
    assert mask.shape == ids.shape
    return [text[start:end] for (start, end), hit in zip(offsets, mask, strict=True) if hit]


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("so x = 3. Wait, let me see", "Wait, let me"),
        ("and that's not right, as y", "that's not right"),
        ("then double-check the sum", "double-check"),
        ("and so we notice that x", "notice that"),
        ("the sum. The key is x", "The key is"),
    ],
)
def test_exactly_the_phrase_is_marked(tokenizer, text, phrase):
    shown = "".join(marked(tokenizer, text)).replace(" ", "")
    assert shown.strip(",.") == phrase.replace(" ", "")  # a token may end in the comma after the phrase


def test_words_split_over_tokens(tokenizer):
    text = "so let me verify it"
    ids, _ = encode(tokenizer, text)
    assert len(ids) > len(text.split()), "the tiny vocabulary splits words"
    assert "".join(marked(tokenizer, text)).replace(" ", "") == "letmeverify"


def test_curly_apostrophe_and_cjk_neighbours(families):
    tokenizer = families["byte_level"]
    text = "等That\u2019s not right等"
    ids, offsets = encode(tokenizer, text)
    (mask,) = detector(tokenizer).masks([ids])
    expected = [start >= 1 and end <= len(text) - 1 for start, end in offsets]
    assert mask.tolist() == expected


def test_no_completions(tokenizer):
    assert detector(tokenizer).masks([]) == []


def test_empty_completion(tokenizer):
    masks = detector(tokenizer).masks([np.zeros(0, np.int64), encode(tokenizer, "what if")[0]])
    assert masks[0].shape == (0,)
    assert masks[1].all()


def test_strategic_grams_replace_the_list(tokenizer):
    text = "wait let me then, hold on there"
    assert "".join(marked(tokenizer, text, '["hold on"]')).replace(" ", "") == "holdon"
    assert "".join(marked(tokenizer, text, "on there, x y z")).replace(" ", "") == "onthere"


@pytest.mark.parametrize("grams", ["[]", ",", '["..."]'])
def test_grams_without_words_are_a_config_error(tokenizer, grams):
    with pytest.raises(ConfigError, match="strategic_grams"):
        detector(tokenizer, grams)


def test_no_tokenizer():
    with pytest.raises(ConfigError, match="tokenizer"):
        detector(None)


gaps = st.sampled_from([" ", ", ", "-", ". "])


@same_fixture
@given(st.lists(st.tuples(st.sampled_from([*DEFAULT_PHRASES, "x", "so we", "3", "waits"]), gaps), max_size=12))
def test_marks_are_the_tokens_that_overlap_a_phrase(tokenizer, pairs):
    text = "x " + "".join(words + gap for words, gap in pairs)
    ids, offsets = encode(tokenizer, text)
    spans = FINDER.spans(text)
    (mask,) = detector(tokenizer).masks([ids])
    expected = [any(start < stop and end > begin for begin, stop in spans) for start, end in offsets]
    assert mask.tolist() == expected


@same_fixture
@given(st.lists(st.integers(0, 300), max_size=40))
def test_any_ids_give_a_mask_of_their_length(tokenizer, ids):
    (mask,) = detector(tokenizer).masks([np.asarray(ids, dtype=np.int64)])
    assert mask.shape == (len(ids),)
