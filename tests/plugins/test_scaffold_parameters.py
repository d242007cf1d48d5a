"""Every scaffold with a parameter: a value in the TOML reaches the part that a run builds, and changes what it does."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import (
    Example,
    GroupOutcome,
    Kind,
    LossClip,
    LossContext,
    PluginContext,
    PromptRequest,
    Sample,
    SampleRequest,
    SamplingParams,
    Seeds,
    StopReason,
)
from retrain.campaign.load import load_campaign
from retrain.campaign.session import _launcher
from retrain.cli.command_line import run
from retrain.cli.scaffold.render import KINDS, kind_of, slug, template
from retrain.credit.algorithm import build_detector
from retrain.credit.configured_loss import find_loss
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.resolve import build_part
from retrain.run.configure import load_checked
from retrain.tasks.scoring.build import build_rewards, load_data
from retrain_local.devices.torch_devices import Devices
from retrain_local.sampling.split import create_engine, find_engine
from tests.kit.problems import codes_in

BASE = {"model": 'model = "builtin:tiny"', "backend": 'devices = "cpu"', "data": 'source = "arithmetic"'}
FILE = "own.toml"
ECHO = """
class Echo:
    sizes = []
    def sample(self, requests, params):
        self.sizes.append(sum(len(request.seeds_G) for request in requests))
        return [[sample for _ in request.seeds_G] for request in requests]
    def close(self): ...
sample = None
def create(context, policy):
    return Echo()
"""


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 128

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(map(chr, tokens))


def context_of() -> tuple[PluginContext, Any]:
    """What parts get in a run of `own.toml`, and its checked configuration."""
    plugins = load_plugins({})
    checked = load_checked([FILE], plugins)
    return PluginContext(config=checked.config, seeds=Seeds(1), plugins=plugins, tokenizer=Letters()), checked


def built(kind: Kind, key: str, options: str, *given: object) -> Any:
    """The part as a run builds it."""
    context, _ = context_of()
    return build_part(
        kind, context.config.value(key, ""), key, context, context.config.value(options, {}), options, given
    )


def credit_of_confident_tokens() -> object:
    assert run(["trace", FILE, "--json"]) == 0
    return None  # the output is what is compared


def loss_terms() -> list[float]:
    context, checked = context_of()
    spec, params = find_loss(checked.config, context.plugins)
    ratio_M = torch.tensor([1.5])
    found = spec.compute(
        LossContext(
            new_M=ratio_M.log(),
            old_M=torch.zeros(1),
            ratios_M=ratio_M,
            advantages_M=torch.ones(1),
            sequences_M=torch.zeros(1, dtype=torch.int64),
            num_sequences=1,
            clip=LossClip(),
            params=params,
        )
    )
    return [float(term) for term in found.terms_M]


def score_of_a_near_miss() -> float:
    context, checked = context_of()
    (named,) = build_rewards(checked.config, context, None)
    score = named.reward.score(Example(id="1", prompt="?", reference="100"), r"\boxed{104}")
    return float(score.value)


def sizes_of_portions() -> list[int]:
    import echo
    from plugins import my_inference_engine  # type: ignore[import-not-found]

    my_inference_engine.INNER_ENGINE = "echo.create"
    echo.Echo.sizes.clear()
    token_T = np.array([1], dtype=np.int64)
    echo.sample = Sample(tokens_T=token_T, logprobs_T=np.zeros(1), stop_reason=StopReason.EOS, policy_version=0)
    context, _ = context_of()
    cpu = torch.device("cpu")
    devices = Devices(samplers=(cpu,), trainer=cpu)
    engine = create_engine(context, find_engine(context, devices), [None], 1)  # type: ignore[list-item]
    request = SampleRequest(prompt_T=token_T, seeds_G=tuple(range(5)))
    engine.sample([request], SamplingParams(max_tokens=1, temperature=1.0))
    return list(echo.Echo.sizes)


def marked_text() -> str:
    context, checked = context_of()
    detector = build_detector(checked.flow, context)
    text = "Hence it is 4. Wait, no."
    assert detector is not None
    (mask_T,) = detector.masks([np.array([ord(character) for character in text], dtype=np.int64)])
    return "".join(character for character, is_marked in zip(text, mask_T, strict=True) if is_marked)


def number_of_examples() -> int:
    context, checked = context_of()
    return len(load_data(checked.config, context).examples)


def share_of_solved_prompts() -> float:
    examples = [Example(id=each, prompt="?", reference="1") for each in ("solved", "hard")]
    sampler = built(Kind.SAMPLER, "data.sampler", "data.sampler_params", examples)
    sampler.observe(0, [GroupOutcome(example_id="solved", correct=4, judged=4, is_informative=False)])
    requests = [PromptRequest(step=step, cursor=step, count=1) for step in range(400)]
    drawn = Counter(sampler.choose(request)[0].example_id for request in requests)
    return round(drawn["solved"] / 400, 1)


def step_size() -> float:
    return float(built(Kind.BACKEND, "backend.backend", "backend.options")._step_size)


def number_of_tasks() -> int:
    return len(built(Kind.ENVIRONMENT, "environment.provider", "").load().examples)


def niceness() -> int:
    plugins = load_plugins({})
    launcher: Any = _launcher(load_campaign([FILE], plugins), plugins)
    return int(launcher.nice)


@dataclass(frozen=True)
class Case:
    """A parameter of a scaffold: where the TOML has it, two values, and the effect of each.

    `expected` is None where only the output differs. `before` are lines of the same table.
    """

    table: str
    key: str
    options: str
    name: str
    values: tuple[str, str]
    observe: Callable[[], object]
    expected: tuple[object, object] | None
    before: str = ""
    part: str = "PLUGIN"

    def lines(self, kind: str, name: str, value: str) -> str:
        part = f"my_{kind.replace('-', '_')}.{self.part}"
        return f'{self.before}{self.key} = "{part}"\n{self.options} = {{ {name} = {value} }}'


CAMPAIGN = 'seeds = [1]\nmax_steps = 1\nconditions = [{ advantage_mode = "grpo", transform_mode = "none" }]\n'
ARITHMETIC = 'source = "arithmetic"\n'
LOSSES = ([pytest.approx(2.4898, abs=1e-4)], [pytest.approx(0.8808, abs=1e-4)])
CASES = {
    "transform": Case(
        *("algorithm", "transform_mode", "transform_params", "floor", ("0.0", "1.0"), credit_of_confident_tokens, None)
    ),
    "loss": Case("algorithm", "loss", "loss_params", "tau_good", ("1.0", "4.0"), loss_terms, LOSSES),
    "reward": Case("reward", "type", "params", "tolerance", ("0.01", "0.05"), score_of_a_near_miss, (0.0, 1.0)),
    "inference-engine": Case(
        *("inference", "engine", "options", "max_completions", ("64", "2"), sizes_of_portions, ([5], [2, 2, 1]))
    ),
    "planning-detector": Case(
        *("planning", "detector", "params", "openings", ('["wait"]', '["hence"]'), marked_text),
        (" Wait, no.", "Hence it is 4."),
    ),
    "data-source": Case("data", "source", "options", "size", ("7", "9"), number_of_examples, (7, 9)),
    "sampler": Case(
        *("data", "sampler", "sampler_params", "floor", ("0.01", "1.0"), share_of_solved_prompts, (0.0, 0.5)),
        before=ARITHMETIC,
    ),
    "backend": Case("backend", "backend", "options", "step_size", ("0.1", "0.3"), step_size, (0.1, 0.3)),
    "environment": Case(
        *("environment", "provider", "args", "tasks", ("2", "5"), number_of_tasks, (2, 5)), part="create"
    ),
    "launcher": Case(
        *("campaign", "launcher", "launcher_options", "nice", ("1", "3"), niceness, (1, 3)), before=CAMPAIGN
    ),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one-file form of every kind with a parameter, and an engine that only counts."""
    folder = tmp_path_factory.mktemp("parameters")
    (folder / "echo.py").write_text(ECHO, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in CASES:
            assert run(["init-plugin", "--kind", kind, "--name", f"my-{kind}"]) == 0
    return folder


@pytest.fixture(autouse=True)
def _folder(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lab)
    monkeypatch.syspath_prepend(str(lab))


def configured(kind: str, value: str, *, name: str = "") -> None:
    """Write `own.toml` with the parameter, or with another `name` in its place."""
    case = CASES[kind]
    tables = BASE | {case.table: case.lines(kind, name or case.name, value)}
    if kind == "planning-detector":
        tables["algorithm"] = 'transform_mode = "gtpo_hicra"'
    written(tables)


def written(tables: Mapping[str, str], more: str = "") -> None:
    text = "".join(f"[{name}]\n{lines}\n" for name, lines in tables.items())
    Path(FILE).write_text(f"{text}{more}\n", encoding="utf-8")


@pytest.mark.parametrize("kind", CASES)
def test_a_value_in_the_toml_changes_what_the_part_does(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    case, seen = CASES[kind], []
    for value in case.values:
        configured(kind, value)
        found = case.observe()
        seen.append(found if case.expected else json.loads(capsys.readouterr().out)["example"])
    assert seen[0] != seen[1]
    assert case.expected is None or seen == list(case.expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((kind, "") for kind in ("reward", "inference-engine", "planning-detector", "transform", "data-source")),
        *(("transform", "2"), ("backend", "-1.0")),  # out of range
    ],
)
def test_a_wrong_parameter_is_refused_with_its_key(kind: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[kind]
    configured(kind, value or case.values[0], name="" if value else f"{case.name}s")
    assert run([FILE, "--max-steps", "1"]) == 2
    told = capsys.readouterr().err
    if kind != "inference-engine":  # whose backend checks them
        assert codes_in(told) == ["plugin.bad-option" if value else "plugin.unknown-option"]
    assert re.search(rf"{FILE}:\d+ \[{case.table}\] .*\b{case.name}", told)


def test_every_scaffold_with_parameters_is_tried() -> None:
    for kind in map(slug, KINDS):
        variables = json.loads((template(kind) / "cookiecutter.json").read_text(encoding="utf-8"))
        assert bool(variables["params"] or kind_of(kind) is Kind.ENVIRONMENT) == (kind in CASES), kind


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('[reward]\ntype = "match"\nparams = { tolerance = 0.1 }', "reward 'match' takes no parameters"),
        ("[reward]\nparams = { tolerance = 0.1 }", "reward 'match' takes no parameters"),
        ("[reward.weights]\nmatch = 1.0\n[reward.params.math]\nx = 1", "params.math"),
        ("[reward.weights]\nmatch = 1.0\n[reward.params]\nmatch = 1", "params.match"),
        ("[inference]\noptions = { max_completions = 2 }", "inference engine 'pytorch' takes no parameters"),
        (
            '[algorithm]\ntransform_mode = "gtpo_hicra"\n[planning]\nparams = { openings = ["a"] }',
            "planning detector 'regex' takes no parameters",
        ),
    ],
)
def test_parameters_that_no_part_reads_are_refused(lines: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    written(BASE, lines)
    assert run(["explain", FILE]) == 2
    assert told in capsys.readouterr().err


def test_with_several_rewards_each_has_its_own_parameters() -> None:
    rewards = '[reward.weights]\nmatch = 1.0\n"my_reward.PLUGIN" = 1.0\n'
    written(BASE, rewards + '[reward.params."my_reward.PLUGIN"]\ntolerance = 0.05')
    context, checked = context_of()
    _, own = build_rewards(checked.config, context, None)
    assert own.reward.score(Example(id="1", prompt="?", reference="100"), r"\boxed{104}").value == 1.0
