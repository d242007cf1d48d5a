"""Templates that think: tags, switches, thoughts apart from answers, and earlier turns that a template rewrites."""

from dataclasses import replace

import numpy as np
import pytest

from retrain.kernel.config.plugin_tables import EnvironmentTable, RewardTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable
from retrain.kernel.types import Example, Sample, StopReason
from retrain.tasks.prompts import build_pool, encode_prompts
from retrain.text.thinking import template_args, thinking_of
from retrain.text.transcript import Transcript
from tests.kit.problems import refused
from tests.kit.thinking_models import CHANNELS, HARMONY, OPENED, QWEN3, THINK, thinking_model

KINDS = {"qwen3": (QWEN3, THINK), "opened": (OPENED, THINK), "harmony": (HARMONY, CHANNELS)}
KIMI = {"◁think▷": True, "◁/think▷": True}
ASKED, AGAIN = {"role": "user", "content": "Guess."}, {"role": "user", "content": "Too low."}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("retrain_local")
    folder = tmp_path_factory.mktemp("thinking")
    plain = "{%- for m in messages %}{{- m.content + '\\n' }}{%- endfor %}"
    kinds = {**KINDS, "kimi": (plain, KIMI), "plain": (plain, {})}
    models = {name: thinking_model(folder / name, *kind) for name, kind in kinds.items()}
    return {name: transformers.AutoTokenizer.from_pretrained(path) for name, path in models.items()}


def config(*, sees="answer", history="sampled", provider="mcp", **data):
    environment = EnvironmentTable(history=history, provider=provider)
    tables = {"reward": RewardTable(sees=sees), "environment": environment}
    return Config(tables={**tables, "data": DataTable(instruction="", **data)})


def ids(tokenizer, text):
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def prompt(tokenizer, **data):
    (tokens_T,) = encode_prompts([Example(id="e", prompt="Guess.", reference="1")], tokenizer, config(**data))
    return tokens_T


def split(tokenizer, text, **keys):
    thinking = thinking_of(config(**keys), tokenizer)
    thought = thinking.split(prompt(tokenizer), ids(tokenizer, text))
    seen = thinking.seen(tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True), thought)
    return (thought and (thought.reasoning, thought.answer)), seen


@pytest.mark.parametrize(
    ("kind", "text", "thought"),
    [
        ("qwen3", "<think>\nlow\n</think>\n\n3<|im_end|>", ("low", "3")),
        ("qwen3", "<think>low", ("low", "")),
        ("qwen3", "3<|im_end|>", None),
        ("qwen3", "<think>a</think>1<think>b</think>2", ("a1b", "2")),
        ("qwen3", "<think>a</think>1<think>b", ("a1b", "")),
        ("opened", "low</think>3<|im_end|>", ("low", "3")),
        ("opened", "3<|im_end|>", ("3", "")),
        (
            "harmony",
            "<|channel|>analysis<|message|>low<|end|><|start|>assistant<|channel|>final<|message|>3<|end|>",
            ("low", "3"),
        ),
        ("harmony", "<|channel|>analysis<|message|>low<|end|>", ("low", "")),
        ("harmony", "<|channel|>final<|message|>3<|end|>", ("", "3")),
        ("kimi", "◁think▷low◁/think▷3", ("low", "3")),
        ("plain", "<think>low</think>3", None),
    ],
)
def test_an_answer_stands_apart_from_its_thought_and_rewards_see_it(tokenizers, kind, text, thought):
    tokenizer = tokenizers[kind]
    whole = tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True)
    assert split(tokenizer, text) == (thought, whole if thought is None else thought[1])
    assert split(tokenizer, text, sees="all") == (thought, whole)


def test_the_switch_is_the_one_that_the_template_reads_and_nothing_by_default(tokenizers):
    with_it, off = prompt(tokenizers["qwen3"], thinking="on"), prompt(tokenizers["qwen3"], thinking="off")
    assert tokenizers["qwen3"].decode(off) == tokenizers["qwen3"].decode(with_it) + "<think>\n\n</think>\n\n"
    assert with_it.tolist() == prompt(tokenizers["qwen3"]).tolist()
    given = {"note": 1}
    assert template_args(config(template_args=given), tokenizers["qwen3"]) == given
    assert template_args(config(template_args=given, thinking="off"), tokenizers["qwen3"]) == {
        "note": 1,
        "enable_thinking": False,
    }


@pytest.mark.parametrize("kind", ["opened", "harmony", "plain"])
@pytest.mark.parametrize("wanted", ["on", "off"])
def test_a_template_without_a_switch_is_refused(tokenizers, kind, wanted):
    assert refused(prompt, tokenizers[kind], thinking=wanted) == ["data.no-thinking-switch"]


@pytest.mark.parametrize(
    ("kind", "history", "data", "told"),
    [
        ("qwen3", "sampled", {}, "drops earlier thoughts"),
        ("qwen3", "rows", {}, None),
        ("qwen3", "sampled", {"provider": "agent"}, "separate rows"),
        ("qwen3", "sampled", {"thinking": "off"}, "changes earlier text"),
        ("harmony", "sampled", {}, "drops earlier thoughts"),
        ("opened", "sampled", {"template_args": {"keep": True}}, None),
        ("plain", "sampled", {}, None),
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_told_before_the_run(tokenizers, plugins, kind, history, data, told):
    from retrain.kernel.contracts.tasks import LoadedData
    from retrain.kernel.seeding import Seeds

    examples = tuple(Example(id=f"e{n}", prompt=f"Guess {n}.", reference="1") for n in range(9))
    given = config(history=history, **data)
    _, notes = build_pool(LoadedData(examples=examples), given, tokenizers[kind], Seeds(0), is_environment=True)
    found = [note for note in notes if "when a turn is added" in note]
    assert [told in note for note in found] == ([] if told is None else [True])


def said(tokenizer, text, version=0):
    tokens_T = ids(tokenizer, text)
    return Sample(
        tokens_T=tokens_T, logprobs_T=-np.ones(len(tokens_T)), stop_reason=StopReason.EOS, policy_version=version
    )


def transcript(tokenizer, history, **data):
    given = config(history=history, **data)
    return Transcript(
        tokenizer=tokenizer,
        template_args=template_args(given, tokenizer),
        thinking=thinking_of(given, tokenizer),
        history=history,
    )


TURNS = {
    "qwen3": ["<think>\nlow\n</think>\n\n3<|im_end|>", "<think>\nhigher\n</think>\n\n7<|im_end|>"],
    "opened": ["low</think>3<|im_end|>", "higher</think>7<|im_end|>"],
    "harmony": [
        f"<|channel|>analysis<|message|>{a}<|end|><|start|>assistant<|channel|>final<|message|>{b}<|return|>"
        for a, b in (("low", "3"), ("higher", "7"))
    ],
}


def played(tokenizer, kind, history):
    """A transcript of two turns, with what the policy saw before the second one."""
    found, (first, second) = transcript(tokenizer, history), [said(tokenizer, text) for text in TURNS[kind]]
    found.observe([ASKED], ())
    assert found.take(first) == "3"
    found.observe([ASKED, {"role": "assistant", "content": "3"}, AGAIN], ())
    context = tokenizer.decode(found.context_T)
    assert found.take(second) == "7"
    row = found.completion(StopReason.EOS)
    assert row.tokens_T[row.action_T].tolist() == [*first.tokens_T, *second.tokens_T]
    assert (row.reasoning, row.answer) == ("low\n\nhigher", "7")
    return row, context


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_tokens_stay_although_the_template_drops_the_thought(tokenizers, kind):
    tokenizer = tokenizers[kind]
    row, context = played(tokenizer, kind, "sampled")
    assert row.starts == (0,)
    assert "low" in context
    fresh = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    assert context.startswith(fresh + TURNS[kind][0]), "the end of the turn stands once"
    again = [ASKED, {"role": "assistant", "content": "3"}, AGAIN]
    after = tokenizer.apply_chat_template(again, tokenize=False, add_generation_prompt=True).rpartition("Too low")[2]
    assert context.endswith("Too low" + after)
    assert "<|im_end|><|im_end|>" not in context
    assert "<|return|><|start|>user" in context or kind != "harmony"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_show_each_turn_the_history_as_the_template_has_it(tokenizers, kind):
    tokenizer = tokenizers[kind]
    row, context = played(tokenizer, kind, "rows")
    assert len(row.starts) == 2
    assert len(row.contexts) == 2
    again = [ASKED, {"role": "assistant", "content": "3"}, AGAIN]
    assert context == tokenizer.apply_chat_template(again, tokenize=False, add_generation_prompt=True)
    assert "low\n" not in context


def test_a_template_that_keeps_thoughts_gets_them_back(tokenizers):
    found = transcript(tokenizers["opened"], "rows", template_args={"keep": True})
    found.observe([ASKED], ())
    found.take(said(tokenizers["opened"], TURNS["opened"][0]))
    found.observe([ASKED, {"role": "assistant", "content": "3"}, AGAIN], ())
    assert "<think>\nlow\n</think>\n3" in tokenizers["opened"].decode(found.context_T)


def test_a_cut_thought_says_nothing_and_an_altered_answer_begins_a_context(tokenizers):
    tokenizer = tokenizers["opened"]
    found = transcript(tokenizer, "sampled")
    found.observe([ASKED], ())
    cut = replace(said(tokenizer, "lo"), stop_reason=StopReason.LENGTH)
    assert found.take(cut) == ""
    found.observe([ASKED, {"role": "assistant", "content": ""}, AGAIN], ())
    assert found.starts == [0]
    assert "lo<|im_end|>" in tokenizer.decode(found.context_T)
    found.take(said(tokenizer, TURNS["opened"][1]))
    found.observe(
        [ASKED, {"role": "assistant", "content": ""}, AGAIN, {"role": "assistant", "content": "8"}, AGAIN], ()
    )
    assert len(found.starts) == 2


def test_a_template_that_refuses_the_marked_answer_begins_a_context(tokenizers, monkeypatch):
    tokenizer = tokenizers["qwen3"]
    strict = "{%- for m in messages if m.content == 'retrain-says' %}{{ raise_exception('no') }}{%- endfor %}" + QWEN3
    monkeypatch.setattr(tokenizer, "chat_template", strict)
    row, _ = played(tokenizer, "qwen3", "sampled")
    assert len(row.starts) == 2
