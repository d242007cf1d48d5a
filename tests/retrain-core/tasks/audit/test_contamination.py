"""Held-out examples in the training data, and prompts that a model knows by heart."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.contracts.tasks import TimedScore
from retrain.kernel.types import Example, Sample, SamplingParams, Score, StopReason
from retrain.tasks.audit import contamination
from tests.kit.problems import codes_in

STORY = (
    "A farmer has 17 sheep in the north field, and every morning he walks with his old dog along the river "
    "to count them. One day a storm breaks the fence and 9 of them wander off into the hills. How many does he count?"
)
OTHER = "A baker sells 12 loaves to the school on the corner before noon, then 30 more to the hotel. How many in all?"


def examples(*texts):
    return [Example(id=f"e{number}", prompt=text, reference="8") for number, text in enumerate(texts)]


def against(held_out, training, *, words=8):
    index = contamination.HeldOutIndex.of("held_out", examples(*held_out), words=words)
    (found,) = contamination.contamination(
        [index], (Example(id=f"t{e.id}", prompt=e.prompt, reference="") for e in examples(*training))
    )
    return found


@pytest.mark.parametrize(
    ("planted", "match"),
    [
        (STORY, contamination.Match.EXACT),
        (STORY.upper(), contamination.Match.EXACT),
        (STORY.replace(" ", "  \n").replace(",", " ;"), contamination.Match.EXACT),
        (STORY.replace("old dog", "young dog"), contamination.Match.NEAR),
        (f"Read this carefully. {STORY} Think step by step, and explain.", contamination.Match.NEAR),
        (STORY.replace("17", "\uff11\uff17"), contamination.Match.EXACT),  # full-width digits
    ],
)
def test_a_planted_example_is_found(planted, match):
    found = against([OTHER, STORY], [OTHER.replace("loaves", "rolls").replace("12", "4"), planted])
    (overlap,) = found.overlaps
    assert (overlap.example_id, overlap.training_id, overlap.match) == ("e1", "te1", match)
    assert (found.rate, found.training) == (0.5, 2)


def test_other_numbers_are_a_template_and_no_contamination():
    found = against([STORY], [STORY.replace("17", "23"), STORY.replace("9", "6")])
    assert (found.overlaps, found.templates, found.touched) == ((), 1, 1)
    beginning = " ".join(STORY.split()[:17])  # ten runs of eight words, a quarter of them, and both numbers
    found = against([STORY], [f"{beginning} 9"])
    assert (found.overlaps, found.templates, found.touched) == ((), 0, 1)
    asked = [
        f"What is {a} {sign} {b}? Put your final answer in a box, and nothing else."
        for a in range(20, 40)
        for b in range(3, 9)
        for sign in "+-*"
    ]
    found = against(asked[::10], [text for number, text in enumerate(asked) if number % 10])
    assert found.overlaps == ()
    assert against(["3 + 4"], ["3 - 4", "4 + 3", "3 + 45"]).overlaps == ()
    assert [each.match for each in against(["3 + 4 = ?"], [" 3 +  4 ="]).overlaps] == [contamination.Match.EXACT]
    preface = "You are a careful assistant who reads each question twice before writing one short answer below. "
    topics = ["rivers", "poets", "engines", "clouds", "treaties", "stars"]
    found = against([f"{preface}Name {t} of Asia" for t in topics], [f"{preface}Name {t} of Peru" for t in topics])
    assert found.overlaps == (), "words that all prompts share prove nothing"
    found = against(["Who wrote Faust?"], ["who wrote faust", "Who wrote Faust and when did they write it, roughly?"])
    assert [(each.training_id, each.share) for each in found.overlaps] == [("te0", 1.0)], "short texts only as a whole"
    index = contamination.HeldOutIndex.of("s", examples(STORY, OTHER))
    before = len(pickle.dumps(index))
    found = contamination.contamination(
        [index], (Example(id=str(n), prompt=f"{n} {OTHER[n % 9 :]}", reference="") for n in range(999))
    )
    assert len(pickle.dumps(index)) < before + 200
    assert found[0].training == 999
    chat = [{"role": "system", "content": OTHER}, {"role": "user", "content": STORY}]
    (found,) = contamination.contamination(
        [contamination.HeldOutIndex.of("s", [Example(id="a", prompt=chat, reference="")])], examples(OTHER, STORY)
    )
    assert [each.training_id for each in found.overlaps] == ["e1"], "a chat is read by what the user says"


@settings(max_examples=40)
@given(st.text(max_size=80) | st.text(alphabet="ab 1\n", max_size=60))
def test_words_do_not_depend_on_case_and_punctuation(text):
    assert contamination.words_of(f"  {text}\n") == contamination.words_of(text)
    assert contamination.words_of(words := " ".join(contamination.words_of(text))) == contamination.words_of(words)
    if found := contamination.parted(text):
        assert found[0] + found[1] == text
        assert len(found[0].split()) == int(0.6 * len(text.split()))
        assert len(contamination.words_of(found[1])) >= 5


@settings(max_examples=40)
@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_rouge_l_is_that_of_the_longest_common_subsequence(one, other):
    def longest(a, b):
        if not a or not b:
            return 0
        if a[-1] == b[-1]:
            return longest(a[:-1], b[:-1]) + 1
        return max(longest(a[:-1], b), longest(a, b[:-1]))

    assert contamination.rouge_l(one, other) == pytest.approx(2 * longest(one, other) / max(1, len(one) + len(other)))


class Parrot:
    """A backend that has read some texts, and goes on with the one that begins as the prompt does; 0 otherwise."""

    def __init__(self, *known):
        self.known, self.asked = known, list[SamplingParams]()

    def sample(self, requests, params):
        self.asked.append(params)
        return [[self._continued("".join(map(chr, request.prompt_T)))] for request in requests]

    def _continued(self, begun):
        text = next((each.removeprefix(begun) for each in self.known if each.startswith(begun)), " 0")
        ids = np.array([ord(character) for character in text])
        return Sample(tokens_T=ids, logprobs_T=np.zeros(len(ids)), stop_reason=StopReason.EOS, policy_version=0)


class Characters:
    """A tokenizer of characters."""

    def __call__(self, texts, **_):
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


def scored(pairs):
    return [TimedScore(score=Score.of(float(text.strip().endswith(e.reference))), seconds=0.0) for e, text in pairs]


def test_a_model_that_knows_a_prompt_by_heart_is_found():
    backend = Parrot(STORY + " 8")
    found = contamination.probe(
        examples(STORY, OTHER, "Too short?"), backend, Characters(), scored, max_tokens=9, correct_above=0.5
    )
    assert (found.tried, found.too_short) == (2, 1)
    assert (found.exact_rate, found.right_rate) == (0.5, 0.5)
    assert found.exact == ("e0",)
    assert [(each.greedy, each.max_tokens) for each in backend.asked] == [(True, 9)]
    nothing = contamination.probe(
        examples("Too short?"), backend, Characters(), scored, max_tokens=9, correct_above=0.5
    )
    assert (nothing.exact_rate, nothing.rouge_l, nothing.too_short) == (None, None, 1)
    found = against([STORY, OTHER], [STORY])
    report = contamination.ContaminationReport(sets=(found,), probes={}, allowed=0.5)
    assert report.ok
    assert "Contaminated: held_out 50.0%; at most 50.0% of a set is allowed" in [*contamination.report_lines(report)]
    assert not replace(report, allowed=0.49).ok
    backend = Parrot(STORY)
    tried = contamination.probe(examples(STORY), backend, Characters(), scored, max_tokens=9, correct_above=0.5)
    assert not contamination.ContaminationReport(sets=(), probes={"hard": tried}, allowed=0.5).ok
    short = contamination.probe(examples("Short?"), backend, Characters(), scored, max_tokens=9, correct_above=0.5)
    unsure = contamination.ContaminationReport(sets=(), probes={"hard": short}, allowed=0.0)
    assert unsure.ok
    assert "hard known by heart cannot be told" in [*contamination.report_lines(unsure)][-1]


@pytest.fixture
def audit(command, toys, tokenizer_folder, tmp_path):
    """`audit(training, set)`: the contamination of a set of texts by a file of texts."""

    def call(training, held_out, *arguments):
        for name, texts in (("train", training), ("set", held_out)):
            lines = [json.dumps({"prompt": text, "answer": "8"}) + "\n" for text in texts]
            (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        sets = '[eval.sets.hard]\nsource = "files"\npath = "set.jsonl"\n' * bool(held_out)
        data = '[data]\nsource = "files"\npath = "train.jsonl"\n[reward]\ntype = "toy"\n'
        (tmp_path / "c.toml").write_text(f'[model]\nmodel = "{tokenizer_folder}"\n{data}{sets}', encoding="utf-8")
        return command("audit", "c.toml", "--contamination", *arguments)

    return call


def test_the_command_names_what_it_finds_and_fails(audit):
    result = audit([STORY.upper(), OTHER], [STORY, OTHER.replace("30", "31")], "--json")
    found = json.loads(result.out)
    assert result.code == 1
    assert [each["name"] for each in found["sets"]] == ["hard"]
    (overlap,), (hard,) = found["sets"][0]["overlaps"], found["sets"]
    assert (overlap["match"], hard["rate"], hard["templates"]) == ("exact", 0.5, 1)
    result = audit([OTHER], [])
    assert (result.code, codes_in(result.err)) == (2, ["eval.no-examples"])
