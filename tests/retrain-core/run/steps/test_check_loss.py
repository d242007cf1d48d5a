"""`[algorithm] loss` and the keys about it, against what the backend can apply, before anything loads."""

import pytest

from retrain.api import Capabilities, Kind, LossTraits, PluginSpec
from retrain.credit.configured_loss import applicable_losses, capability_fields, selected_loss
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Owner
from retrain.run.configure import load_with_problems

pytest.importorskip("retrain_local", reason="its losses are named")
pytest.importorskip("retrain_tinker", reason="its losses are named")


@pytest.fixture(scope="module")
def installed():
    return load_plugins({})


@pytest.fixture
def told(installed, tmp_path):
    """`told(toml)`: every problem with the keys of the loss, one per line."""

    def load(text):
        file = tmp_path / "retrain.toml"
        file.write_text(text, encoding="utf-8")
        problems = load_with_problems([str(file)], installed)[2]
        return "\n".join(str(problem) for problem in problems if "[algorithm]" in problem.where)

    return load


TINKER = '[backend]\nbackend = "tinker"\n'


def test_a_loss_that_the_backend_cannot_apply_is_refused_with_those_that_can(told):
    found = told(TINKER + '[algorithm]\nloss = "gspo"\n')
    assert "retrain.toml:4 [algorithm] loss: backend 'tinker' cannot apply the loss 'gspo'" in found
    assert (
        "it can apply 'cispo', 'dro', 'importance_sampling', 'likelihood', 'ppo'; 'gspo' is for backend 'local'"
        in found
    )
    assert 'fix: use loss = "ppo", or [backend] backend = "local"' in found
    assert told('[algorithm]\nloss = "json.dumps"\nloss_params = { a = 1 }\n') == "", (
        "a file's is for backends that take it"
    )
    assert "backend 'tinker' cannot apply the loss 'json.dumps'" in told(TINKER + '[algorithm]\nloss = "json.dumps"\n')
    assert told(TINKER + '[algorithm]\nloss = "ppo"\n') == told('[algorithm]\nloss = "gspo"\n') == ""


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("", ""),
        (TINKER, ""),
        (TINKER + '[algorithm]\nloss = "ppo"\n', ""),
        ('[algorithm]\nloss = "ppo"\n', "ppo"),
        ('[algorithm]\nloss = "json.dumps"\n', "json.dumps"),
    ],
)
def test_a_loss_that_is_set_is_given_to_the_backend_unless_it_is_built_in(installed, tmp_path, text, loss):
    file = tmp_path / "retrain.toml"
    file.write_text(text, encoding="utf-8")
    assert selected_loss(load_with_problems([str(file)], installed)[0], installed) == loss


@pytest.mark.parametrize("name", ["importance_sampling", "likelihood"])
def test_a_clip_beside_a_loss_that_does_not_clip_is_refused(told, name):
    head = f'[algorithm]\nloss = "{name}"\n'
    assert f"clip_eps: has no effect: the loss '{name}' does not clip" in told(head + "clip_eps = 0.2\n")
    assert "clip_eps_high: has no effect" in told(head + "clip_eps = 0.1\nclip_eps_high = 0.3\n")
    assert told(head + "clip_eps = 0.0\nclip_eps_high = 0.0\n") == "", "as a resolved config.toml has them"
    assert told(head + "clip_eps = 0.2\nclip_eps_high = 0.0\n") == "", "as that of an earlier version"
    assert told('[algorithm]\nloss = "ppo"\nclip_eps = 0.1\nclip_eps_high = 0.3\n') == ""


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('loss = "gspo"\ndual_clip = 3.0\n', "the loss 'gspo' has no second clip"),
        ('loss = "ppo"\ndual_clip = 0.9\n', "must be above 1, usually 3; 0 = off"),
        ('loss = "ppo"\nloss_params = { tau = 1.0 }\n', "the loss 'ppo' takes no parameters"),
        ('is_level = "sequence"\n', "[algorithm] is_level: has no effect without is_bounds"),
        ('is_mode = "mask"\ntis_cap = 2.0\n', "tis_cap is by token and truncates"),
        ("tis_cap = 2.0\nis_bounds = [0.5, 2.0]\n", "tis_cap = 2 is is_bounds = [0.0, 2]"),
        ("is_bounds = [2.0, 0.5]\n", "must be [low, high] with 0 <= low < high"),
        ("is_bounds = [2.0]\n", "must be [low, high] with 0 <= low < high"),
        ('aggregation = "median"\n', "[algorithm] aggregation"),
        ('loss = ""\n', "[algorithm] loss"),
    ],
)
def test_keys_without_effect_and_values_without_meaning_are_refused(toml, words, told):
    assert words in told("[algorithm]\n" + toml)


@pytest.mark.parametrize(
    "toml",
    [
        'loss = "ppo"\ndual_clip = 3.0\naggregation = "constant"\n',
        'is_bounds = [0.5, 2.0]\nis_level = "geometric"\nis_mode = "mask"\n',
        'loss = "gspo"\naggregation = "token_mean"\nclip_eps = 0.001\n',
        'loss = "cispo"\nclip_eps = 0.2\nclip_eps_high = 0.0\n',  # as every earlier run wrote its config.toml
    ],
)
def test_what_has_a_meaning_is_accepted(toml, told):
    assert told("[algorithm]\n" + toml) == ""


def test_keys_that_the_backend_does_not_apply_are_refused_by_name(told):
    assert told(TINKER + '[algorithm]\naggregation = "sequence_mean"\nis_bounds = [0.5, 2.0]\n') == ""
    found = told(TINKER + '[algorithm]\nloss = "ppo"\ndual_clip = 3.0\n')
    assert "[algorithm] dual_clip: dual_clip = 3.0 would have no effect: backend 'tinker' does not apply it" in found
    assert 'or use backend = "local"' in found


FINE = 'transform_mode = "none"\n'


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('loss = "gmpo"\n', "the loss 'gmpo' does not go with credit by token, and 'maxrl+gtpo_sepa' gives it"),
        ('loss = "gmpo"\nalgorithm_mode = "maxrl_gtpo"\n', "and 'maxrl_gtpo' gives it"),
        ('loss = "gmpo"\nsurprisal_mask_rho = 0.2\n' + FINE, 'set transform_mode = "none", without surprisal_mask_rho'),
        *(
            (
                f'loss = "{loss}"\nadvantage_mode = "otb"\n' + FINE,
                f"{loss!r} does not go with credit by token, and advantage 'otb' gives it",
            )
            for loss in ("gspo", "luspo", "gmpo", "vespo")
        ),
        ('loss = "gspo"\nadvantage_mode = "distillation"\n' + FINE, "and advantage 'distillation' gives it"),
    ],
)
def test_credit_finer_than_the_loss_takes_is_refused_before_the_model_loads(toml, words, told):
    assert words in told("[algorithm]\n" + toml)


@pytest.mark.parametrize(
    "toml",
    [
        'loss = "gmpo"\n' + FINE,
        'loss = "gmpo"\nalgorithm_mode = "grpo_none"\n',
        *(f'loss = "{loss}"\n' for loss in ("gspo", "luspo", "vespo", "sapo", "dppo_tv", "dppo_kl", "m2po", "dro")),
        'loss = "dppo_tv"\nadvantage_mode = "otb"\n' + FINE,
        "off_policy_mask = 0.1\n",
        'loss = "vespo"\nloss_params = { k_pos = 1.0 }\noff_policy_mask = 0.5\n',
    ],
)
def test_credit_that_the_loss_takes_is_accepted(toml, told):
    assert told("[algorithm]\n" + toml) == ""


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('loss = "sapo"\nloss_params = { tau = 1.0 }\n', "tau"),
        ('loss = "sapo"\nloss_params = { tau_pos = 0.0 }\n', "tau_pos"),
        ('loss = "m2po"\nloss_params = { tau = -1.0 }\n', "tau"),
        ('loss = "gmpo"\nloss_params = { eps = 0.4 }\n' + FINE, "takes no parameters"),
        ('loss = "sapo"\nclip_eps = 0.2\n', "the loss 'sapo' does not clip"),
        ("off_policy_mask = -1.0\n", "off_policy_mask"),
        ('loss = "dppo_kl"\ndual_clip = 3.0\n', "has no second clip"),
    ],
)
def test_constants_that_a_loss_does_not_have_are_refused(toml, words, told):
    assert words in told("[algorithm]\n" + toml)


@pytest.mark.parametrize("name", ["sapo", "gmpo", "vespo", "luspo", "dppo_tv", "dppo_kl", "m2po"])
def test_a_tinker_service_refuses_them_by_name_and_takes_dro(name, told):
    assert f"backend 'tinker' cannot apply the loss {name!r}" in told(TINKER + f'[algorithm]\nloss = "{name}"\n' + FINE)
    dro = TINKER + '[algorithm]\nloss = "dro"\nloss_params = { beta = 0.05 }\n'
    assert told(dro) == ""
    assert told(TINKER + "[algorithm]\noff_policy_mask = 0.1\n") == ""
    for key in ("is_bounds = [0.5, 2.0]", "tis_cap = 2.0", "off_policy_mask = 0.1", 'aggregation = "sequence_mean"'):
        found = told(f"{dro}{key}\n")
        assert f"[algorithm] {key.split()[0]}" in found
        assert "does not go with the loss 'dro'" in found
    assert told(dro + 'aggregation = "constant"\n') == ""


def test_the_trainer_of_prime_rl_has_a_loss_of_its_own(told):
    pytest.importorskip("retrain_prime_rl")
    prime = '[backend]\nbackend = "prime_rl"\noptions = { output_dir = "x" }\n[training]\nmax_tokens = 1024\n'
    assert told(prime) == ""
    keys = {"aggregation": '"constant"', "dual_clip": "3.0", "is_bounds": "[0.5, 2.0]", "loss": '"ppo"'}
    keys |= {"off_policy_mask": "0.1"}
    found = told(prime + "[algorithm]\n" + "".join(f"{name} = {value}\n" for name, value in keys.items()))
    for name in keys:
        assert f"[algorithm] {name}: {name} = " in found
    assert found.count("would have no effect: the trainer has its own configuration") == len(keys)
    assert found.count("fix: remove it here; ") == len(keys)
    assert found.count('[loss] type = "custom"') == len(keys) - 1
    assert "the trainer divides by the tokens of the step" in found


def test_a_backend_that_declares_nothing_applies_the_default_loss_and_none_of_its_keys(told, installed):
    traits = installed.find(Kind.BACKEND, "local")[0].spec.traits
    assert isinstance(traits, Capabilities)
    plain = {name: getattr(traits, name) for name in Capabilities.__slots__ if name not in ("losses", "loss_keys")}
    spec = PluginSpec(name="plain", summary="Declares no loss.", factory=object, traits=Capabilities(**plain))
    plugins = load_plugins({})
    plugins.registries[Kind.BACKEND].add(spec, Owner(distribution="dist-plain"))
    assert applicable_losses(plugins, "plain") == ["importance_sampling"]
    mine = PluginSpec(name="mine", summary="A", factory=object, traits=LossTraits(backends=frozenset({"plain"})))
    plugins.registries[Kind.LOSS].add(mine, Owner(distribution="dist-loss"))
    assert applicable_losses(plugins, "plain") == ["importance_sampling", "mine"]
    assert capability_fields(spec.traits, "plain", plugins)["losses"] == ["importance_sampling", "mine"]
