"""Planning phrases: how they are found in a text, and which tokens of a completion they mark."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.api import Config, ConfigError, PluginContext, Seeds, load_plugins
from retrain_sepa.planning import DEFAULT_PHRASES, PhraseFinder, parse_grams, regex_detector, words
from retrain_sepa.tables import PlanningPhrases
from tests.kit.problems import codes_in, refused

DEFAULT = PhraseFinder.of(DEFAULT_PHRASES)


def found(text, *phrases):
    finder = PhraseFinder.of(phrases) if phrases else DEFAULT
    return [text[start:end] for start, end in finder.spans(text)]


def test_the_default_list():
    assert len(set(DEFAULT_PHRASES)) == 18
    assert all(2 <= len(phrase.split()) <= 3 for phrase in DEFAULT_PHRASES)
    for phrase in DEFAULT_PHRASES:
        assert found(f"So, {phrase.upper()}: 3") == [phrase.upper()]
        assert found(f"x{phrase}") == found(f"{phrase}s") == found(f"9{phrase}") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Wait, let me see", ["Wait, let me"]),
        ("Wait... let\n\n  me see", ["Wait... let\n\n  me"]),
        ("wait — let me", ["wait — let me"]),
        ("_Wait, let me_ and **double-check**", ["Wait, let me", "double-check"]),
        ("double\u2011check", ["double\u2011check"]),
        ("that's not right", ["that's not right"]),
        ("That\u2019s not right", ["That\u2019s not right"]),
        ("that ' s not right", ["that ' s not right"]),
        ("that doesn\u02bct work", ["that doesn\u02bct work"]),
        ("wait, let me think again", ["wait, let me", "let me think"]),
        ("我wait let me看", ["wait let me"]),
        ("그래서 what if는", ["what if"]),
        ("éwait let me", []),
        ("wait let meé", []),
        ("waitlet me", []),
        ("doublecheck", []),
        ("wait \ud83d let me", ["wait \ud83d let me"]),
        ("\u0130\u0130 wait let me", ["wait let me"]),
        ("", []),
    ],
)
def test_how_phrases_are_written(text, expected):
    assert found(text) == expected


def test_longer_phrases_win_and_shorter_ones_still_count():
    phrases = ("let me", "let me check again", "me check")
    assert found("let me check again", *phrases) == ["let me check again", "me check"]
    assert found("let me check once", *phrases) == ["let me", "me check"]


@pytest.mark.parametrize(
    ("phrase", "text"),
    [
        ("等一下", "所以等一下吧"),
        ("等一下", "x等一下y"),
        ("Un moment, s\u2019il vous pla\u00eet", "UN MOMENT S'IL VOUS PLA\u00ceT"),
        ("c++ again", "C++ again"),
        ("'wait' there", "wait there"),
        ("a.b*c", "a.b*c"),
        ("\u0130stanbul", "\u0130STANBUL"),
        ("का फिर", "का फिर"),
    ],
)
def test_phrases_of_ones_own(phrase, text):
    assert len(found(text, phrase)) == 1
    assert found("की फिर", "का फिर") == []  # marks belong to words


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("", DEFAULT_PHRASES),
        ("   ", DEFAULT_PHRASES),
        ("hold on, so then ,,", ("hold on", "so then")),
        ('["hold on, friend", "so"]', ("hold on, friend", "so")),
        ("[]", ()),
        (",", ()),
    ],
)
def test_strategic_grams(text, phrases):
    assert parse_grams(text) == phrases


def test_words_keep_inner_apostrophes_only():
    assert words("That\u2019s 'not' right\u2014students' work") == ["that's", "not", "right", "students", "work"]


@pytest.mark.parametrize(
    "text",
    [
        "wait" + "." * 500_000 + "let" + " " * 500_000 + "mx",
        "wait let " * 100_000,
        "wait, " * 150_000 + "let me",
        "let me let me wait " * 50_000,
        "that'" * 150_000,
        "that " + "' " * 300_000,
        "\u2019" * 500_000,
    ],
)
def test_hostile_text_takes_linear_time(text):
    """A quadratic search would not come back."""
    assert len(found(text)) <= 50_000


def slow_spans(text, phrases):
    """Every window of consecutive words, compared word by word."""
    tokens, start = [], None
    for position, char in enumerate(text + " "):
        if char.isalnum() or (char == "'" and start is not None and text[position + 1 : position + 2].isalnum()):
            start = position if start is None else start
        elif start is not None:
            tokens.append((text[start:position].lower(), start, position))
            start = None
    hits = {}
    for phrase in phrases:
        wanted = phrase.split()
        for n in range(len(tokens) - len(wanted) + 1):
            window = tokens[n : n + len(wanted)]
            said = [word for word, _, _ in window]
            clitic = said[-1].partition("'")[0]  # a phrase may end before one: "notice that's" holds "notice that"
            if said[:-1] == wanted[:-1] and wanted[-1] in (said[-1], clitic):
                hits[window[0][1]] = max(hits.get(window[0][1], 0), window[-1][1] + len(wanted[-1]))
    return sorted(hits.items())


vocabulary = sorted({word for phrase in DEFAULT_PHRASES for word in phrase.split()})
gaps = st.sampled_from([" ", ", ", "\n", "-", " ... ", "_"])
pieces = st.lists(st.tuples(st.sampled_from([*vocabulary, "x", "letme", "Wait", "3"]), gaps), max_size=25)


@settings(max_examples=50)
@given(pieces)
def test_agrees_with_a_word_by_word_search(parts):
    text = "".join(word + gap for word, gap in parts)
    assert DEFAULT.spans(text) == slow_spans(text, DEFAULT_PHRASES)


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
    assert refused(detector, None) == ["planning.no-tokenizer"]


breaks = st.sampled_from([" ", ", ", "-", ". "])
few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)


@few
@given(st.lists(st.tuples(st.sampled_from([*DEFAULT_PHRASES, "x", "so we", "3", "waits"]), breaks), max_size=12))
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
