"""What is tried before a run loads anything: parts of credit on synthetic groups; keys that have no effect."""

import json
import sys

import numpy as np
import pytest

from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.run import check
from retrain.run.configure import load_checked
from retrain.tasks.child.process import in_copy

FIRST = "import os, signal, time\nimport numpy as np\nfrom retrain.advantages import AdvantageSpec\nCALLS = []\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`module("def adv(rewards): ...")` writes `parts_of_mine.py`, forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source):
        (tmp_path / "parts_of_mine.py").write_text(FIRST + source)
        return tmp_path

    yield write
    sys.modules.pop("parts_of_mine", None)


ADVANTAGE, TRANSFORM, UNCERTAINTY = "--advantage-mode", "--transform-mode", "--uncertainty-kind"
BROKEN = [
    (ADVANTAGE, "def part(r):\n    return r.undefined", "raised AttributeError", "(parts_of_mine.py:6)"),
    (ADVANTAGE, "def part(r):\n    return r * np.nan", "is nan at position 0"),
    (ADVANTAGE, "def part(r):\n    raise SystemError('no')", "raised SystemError: no"),
    (TRANSFORM, "def part(ctx):\n    return ctx.advantages", "raised AttributeError", "(parts_of_mine.py:6)"),
    (TRANSFORM, "def part(ctx):\n    return [u / (1 - ctx.sepa_lambda) for u in ctx.uncertainties_G]", "be finite"),
    (ADVANTAGE, "def part(r):\n    return np.linalg.inv(r)", "raised LinAlgError", "(parts_of_mine.py:6)"),
    (UNCERTAINTY, "def part(ctx):\n    return ctx.logprobs_T", "it must not be negative"),
    ("--algorithm-mode", "def part(ctx):\n    return {}['x']", "raised KeyError", "(parts_of_mine.py:6)"),
]


@pytest.mark.parametrize(("flag", "source", "texts"), [(flag, source, texts) for flag, source, *texts in BROKEN])
def test_a_broken_part_of_credit_ends_the_run_before_anything_loads(command, module, flag, source, texts):
    folder = module(source)
    result = command(flag, "parts_of_mine.part", "--group-size", "6", "--model", "nobody/nothing")
    assert (result.code, result.out) == (2, "")  # not even the tokenizer was asked for
    key = flag.removeprefix("--").replace("-", "_")
    assert f"{flag} [algorithm] {key}: probe group 0" in result.err
    assert "parts_of_mine.part'" in result.err
    assert all(text in result.err for text in texts), result.err
    assert result.err.count("fix:") == 1
    assert not (folder / "logs").exists()


ALL_RIGHT = [
    "def part(r):\n    CALLS.append(r)\n    np.random.rand()\n    print('mine')\n    return r - r.mean()",
    "def part(r):\n    assert (r > 0).all()\n    return r",
    "def part(r):\n    assert set(r) <= {-1.0, 1.0}\n    return r",
    "def part(r):\n    return (r - r.mean()) / r.std()",  # NaN for equal rewards, which no step passes to it
    "def part(r):\n    assert len(r) == 5\n    return list(r)",
    "def part(r):\n    breakpoint()\n    return r",
    "def part(r):\n    time.sleep(60)\n    return r",  # slow is not broken
    "def part(r):\n    os.kill(os.getpid(), signal.SIGKILL)",  # nothing is known about it
]


@pytest.mark.parametrize("source", ALL_RIGHT)
def test_a_part_that_could_work_is_not_refused_and_keeps_its_state(module, source, monkeypatch, capfd):
    module(source)
    monkeypatch.setattr(check, "TRIAL_S", 1.0)
    before = np.random.get_state()[1].tolist()
    arguments = [ADVANTAGE, "parts_of_mine.part", "--group-size", "5"]
    checked = load_checked(arguments, load_plugins(), starts_run=True)
    assert checked.flow.advantage.name == "parts_of_mine.part"
    assert sys.modules["parts_of_mine"].CALLS == []
    assert np.random.get_state()[1].tolist() == before
    assert "mine" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[ADVANTAGE, "grpo"], ["--algorithm-mode", "maxrl_gtpo"], [ADVANTAGE, "parts_of_mine.GROUPED"]]
)
def test_a_group_of_one_is_refused_where_the_advantage_needs_a_group(command, module, arguments):
    module("GROUPED = AdvantageSpec(name='grouped', compute=lambda ctx: ctx.rewards_G, needs_group=True)\n")
    result = command(*arguments, "--group-size", "1", "--model", "nobody/nothing")
    assert (result.code, result.out) == (2, "")
    assert "--group-size [training] group_size: advantage '" in result.err
    assert "fix: set group_size to 2 or more" in result.err


@pytest.mark.parametrize("arguments", [[ADVANTAGE, "parts_of_mine.part"], ["--algorithm-mode", "parts_of_mine.whole"]])
def test_a_group_of_one_is_left_to_parts_that_need_no_group(module, arguments):
    module("def part(r):\n    return r\ndef whole(ctx):\n    return [0 * u for u in ctx.uncertainties_G]\n")
    load_checked([*arguments, "--group-size", "1"], load_plugins(), starts_run=True)
    load_checked([ADVANTAGE, "grpo", "--group-size", "1"], load_plugins())  # to look at an old run is no training


def test_a_campaign_is_refused_for_a_broken_part_of_a_condition(command, module):
    folder = module("def part(r):\n    return r.undefined")
    one = "{ advantage_mode = 'parts_of_mine.part', transform_mode = 'none' }"
    (folder / "many.toml").write_text(f"[campaign]\nseeds = [1]\nconditions = [{one}]\n")
    result = command("many.toml")
    assert result.code == 2
    assert "raised AttributeError: 'numpy.ndarray' object has no attribute 'undefined'" in result.err
    assert "(parts_of_mine.py:6)" in result.err


def test_a_copy_of_the_process_answers_fails_and_ends():
    seen = []

    def work():
        seen.append(1)
        return ["x" * 200_000]  # more than a pipe holds

    def fail():
        raise SystemExit(3)

    assert in_copy(work, timeout_s=20.0) == ["x" * 200_000]
    assert seen == []
    assert in_copy(fail, timeout_s=20.0) is None
    with pytest.raises(ConfigError):
        raise ConfigError("this process is still itself")


CLIPPED = 'grpo advantage, importance sampling without clipping; the clipped algorithm is `recipe = "grpo"`'
OWN_PARTS = """
from retrain.advantages import AdvantageSpec

def by_group(rewards):
    return rewards - rewards.mean()

BY_TOKEN = AdvantageSpec(name="by_token", compute_tokens=lambda ctx: ctx.token_rewards_G)

def whole(ctx):
    return [0.0 * u for u in ctx.uncertainties_G]
"""


@pytest.fixture
def explained(command, tmp_path):
    """`explained("--kl-where", "reward")`: the JSON of an explanation; `own_parts.py` is in the folder."""
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)

    def explain(*arguments):
        done = command("explain", "--json", *arguments)
        assert done.code == 0, done.err
        return json.loads(done.out)

    return explain


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--advantage-mode", "grpo"), CLIPPED),
        (("--advantage-mode", "grpo", "--transform-mode", "none"), CLIPPED),
        (("--advantage-mode", "dr_grpo"), CLIPPED.replace("grpo", "dr_grpo")),
        (("--advantage-mode", "grpo", "--loss", "ppo"), None),
        (("--recipe", "grpo"), None),
        (("--advantage-mode", "rloo"), None),  # its recipe does not clip either
        (("--advantage-mode", "maxrl"), None),
        (("--advantage-mode", "own_parts.by_group"), None),
        (("--algorithm-mode", "grpo_none"), None),
    ],
)
def test_a_loss_that_does_not_clip_is_said_where_its_recipe_does(explained, arguments, line):
    assert explained(*arguments).get("clipping") == line


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        *(
            (("--recipe", name), part)
            for name, part in (
                *(("gmpo", "clip"), ("luspo", "clip"), ("sapo", "gate"), ("vespo", "phi"), ("dppo_tv", "mask")),
                *(("dppo_kl", "mask"), ("m2po", "mask"), ("dro", "penalty"), ("grpo", "clip")),
            )
        ),
        (("--recipe", "dro", "--off-policy-mask", "0.1"), "penalty and off_policy_mask"),
        (("--off-policy-mask", "0.1"), "off_policy_mask"),
        (("--recipe", "gmpo", "--epochs", "2"), None),
        (("--loss", "importance_sampling"), None),
    ],
)
def test_what_one_update_per_step_leaves_idle_is_said(explained, arguments, parts):
    found = explained(*arguments).get("idle")
    assert (found and found.partition(":")[0]) == parts
    assert found is None or "no effect with one update per step" in found


def test_a_run_says_it_before_anything_loads(command, toy_arguments):
    done = command(*toy_arguments, "--max-steps", "1", "--kl-where", "reward", "--eval-every", "3")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Loading"))
    assert CLIPPED[1:] in "\n".join(lines[:first])
    assert "[kl] where: no effect with the default [kl] coef" in lines[:first]
    assert "[eval] every: no effect with the default [eval] examples and [eval] sets and [data] tasks" in lines[:first]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--advantage-mode", "own_parts.by_group"), "transform_mode = 'gtpo_sepa' (the default) changes it token by"),
        (("--advantage-mode", "own_parts.BY_TOKEN", "--transform-mode", "gtpo"), "transform_mode = 'gtpo' changes it"),
        (("--advantage-mode", "own_parts.by_group", "--algorithm-mode", "maxrl_none"), "'maxrl_none' replaces it"),
        (("--transform-mode", "none", "--algorithm-mode", "own_parts.whole"), "'own_parts.whole' replaces it"),
        (("--transform-mode", "none", "--sepa-steps", "3"), "[sepa] steps: no effect without controller sepa"),
        (("--transform-mode", "none", "--gtpo-beta", "0.3"), "[gtpo] beta: no effect without stage gtpo"),
        (("--transform-mode", "gtpo", "--strategic-grams", "so"), "[logging] strategic_grams: no effect without"),
        (("--algorithm-mode", "own_parts.whole", "--batch-norm", "true"), "[algorithm] batch_norm: no effect without"),
        (("--algorithm-param", "a=1"), "[algorithm] params: no effect with the default [algorithm] algorithm_mode"),
        (("--base-url", "http://localhost:1"), "[model] base_url: no effect with the default [backend] backend"),
        (("--reward-strict", "false"), "[reward] strict: no effect without reward math"),
        (("--bp-min-batch-size", "2"), "[backpressure] min_batch_size: no effect with the default [backpressure] en"),
        (("--wandb-tags", "a"), "[logging] wandb_tags: no effect without recorder wandb"),
    ],
)
def test_what_has_no_effect_is_said(explained, arguments, fragment):
    assert any(fragment in warning for warning in explained(*arguments)["warnings"]), explained(*arguments)["warnings"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--advantage-mode", "own_parts.by_group", "--transform-mode", "none"),
        ("--algorithm-mode", "maxrl_gtpo_hicra", "--hicra-alpha", "0.3", "--strategic-grams", "so"),
        ("--algorithm-mode", "own_parts.whole", "--algorithm-param", "a=1", "--gtpo-beta", "0.3"),
        ("--sepa-steps", "3", "--gtpo-beta", "0.3", "--strategic-grams", "so"),
        ("--kl-coef", "0.1", "--kl-where", "reward"),
        ("--reward-weights", '{"match": 1.0, "math": 1.0}', "--reward-strict", "false"),
        ("--eval-sets", '{"more": {"source": "arithmetic"}}', "--eval-samples", "2", "--reward-type", "match"),
    ],
)
def test_what_has_an_effect_is_not_spoken_of(explained, arguments):
    assert explained("--seed", "1", *arguments)["warnings"] == []
