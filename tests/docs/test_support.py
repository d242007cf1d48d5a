"""The annotated file, and the keys that each backend supports."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.support import TRIED, Asked, annotated, ask, questions, support
from retrain.credit.configured_loss import applicable_losses
from retrain.kernel.config.load import all_keys, load_config
from retrain.kernel.declared import Capabilities, Kind
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.run.tables import registered_tables


def test_it_is_the_defaults_and_names_every_key_of_a_run(plugins: Plugins, tmp_path: Path) -> None:
    text = annotated(plugins).removeprefix("```toml\n").removesuffix("```")
    tables = registered_tables(plugins)
    file, empty = tmp_path / "annotated.toml", tmp_path / "empty.toml"
    file.write_text(text, encoding="utf-8")
    empty.touch()
    config, problems = load_config(file, tables=tables)
    assert not problems
    assert config.as_dict() == load_config(empty, tables=tables)[0].as_dict()
    for key in all_keys(tables):
        if not tables[key.table].traits.starts_runs:
            section = text.partition(f"[{key.table}]\n")[2].partition("\n\n")[0]
            assert f"{key.name} = " in section, key.path
            assert key.description in section, key.path


BACKENDS = ("local", "tinker", "prime_rl")
REGULARISERS = {"kl.coef": "kl_{where}", "entropy.coef": "entropy", "entropy.kl_cov": "kl_cov"}
REGULARISERS |= {"entropy.clip_cov": "clip_cov"}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins({})


@pytest.fixture(scope="module")
def asked_of_all(plugins: Plugins) -> list[Asked]:
    return list(ask(plugins, BACKENDS))


@pytest.fixture
def answers(asked_of_all: list[Asked]) -> dict[tuple[str, str], str]:
    """`answers[what, backend]`: empty for yes, or why not."""
    return {(each.text, name): answer for each in asked_of_all for name, answer in each.answers.items()}


@pytest.mark.long
def test_losses_and_regularisers_are_answered_as_they_are_declared(plugins: Plugins, asked_of_all: list[Asked]) -> None:
    seen = 0
    for asked in asked_of_all:
        *_, path = asked.values
        for backend in BACKENDS:
            declared = plugins.find(Kind.BACKEND, backend)[0].spec.traits
            assert isinstance(declared, Capabilities)
            works = asked.answers[backend] == ""
            if list(asked.values) == ["algorithm.loss"]:
                losses = applicable_losses(plugins, backend) or ["importance_sampling"]  # told elsewhere: the default
                assert works == (asked.values[path] in losses), asked.text
            elif path in REGULARISERS:
                name = REGULARISERS[path].format(where=asked.values.get("kl.where"))
                assert works == (name in declared.regularisers), (asked.text, backend)
            else:
                continue
            seen += 1
    assert seen >= 3 * 9


def test_the_local_backend_takes_everything(answers: dict[tuple[str, str], str]) -> None:
    assert {what: answer for (what, backend), answer in answers.items() if backend == "local" and answer} == {}


IGNORED = {
    "tinker": (
        *("[algorithm] dual_clip = 3.0", '[algorithm] recipe = "gspo"', "[model] lora_rank = 0"),
        '[kl] where = "loss", coef = 0.1',
    ),
    "prime_rl": (
        *('[algorithm] aggregation = "constant"', "[algorithm] is_bounds = [0.5, 2.0]", "[algorithm] dual_clip = 3.0"),
        *('[optimizer] schedule = "cosine"', "[model] lora_rank = 0", "[sft] steps = 20"),
    ),
}
DONE_BEFORE_THE_BACKEND = {
    "tinker": (
        *('[training] overlong = "mask"', '[algorithm] aggregation = "sequence_mean"', '[algorithm] recipe = "dapo"'),
        *("[algorithm] is_bounds = [0.5, 2.0]", '[optimizer] schedule = "cosine"', "[sft] steps = 20"),
        *('[teacher] model = "some-teacher"', '[algorithm] loss = "likelihood"', '[kl] where = "reward", coef = 0.1'),
    ),
    "prime_rl": (*("[training] minibatches = 2", "[algorithm] batch_norm = true", '[teacher] model = "some-teacher"'),),
}


@pytest.mark.parametrize(("cases", "works"), [(IGNORED, False), (DONE_BEFORE_THE_BACKEND, True)])
def test_a_setting_that_would_be_ignored_is_refused_and_one_that_needs_no_backend_works(
    cases: dict[str, tuple[str, ...]], works: bool, answers: dict[tuple[str, str], str]
) -> None:
    asked = [(what, backend) for backend, settings in cases.items() for what in settings]
    assert [pair for pair in asked if (answers[pair] == "") != works] == []


@pytest.mark.long
def test_every_question_is_asked_and_every_recipe_is_a_row(plugins: Plugins) -> None:
    asked = list(questions(plugins, registered_tables(plugins)))
    assert all(values in asked for values in TRIED)  # a renamed key would drop out of the table
    text = support(plugins)
    for entry in plugins.registered(Kind.RECIPE):
        assert f'recipe = "{entry.spec.name}"' in text
    assert text.startswith("|  | `local` | `tinker` | `prime_rl` |")
