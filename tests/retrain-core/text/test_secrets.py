"""Secrets, planted everywhere a user may put one, appear nowhere; ordinary words stay."""

import json

import pytest

from retrain.records.manifest import build_manifest, config_toml
from retrain.text.secrets import HIDDEN, hide, hide_arguments, hide_text, is_secret_name

SECRET = "sk-plantedPLANTED0123"
SECRET_NAMES = [
    *("api_key", "API_KEY", "apikey", "apiKey", "api-key", "api_keys", "openai_api_key", "--wandb-api-key"),
    *("token", "hf_token", "HF_TOKEN", "auth_token", "accessToken", "github_token", "judge.token_secret"),
    *("secret", "client_secret", "secret_key", "aws_secret_access_key", "private_key", "access_key_id"),
    *("password", "db_password", "passwd", "credentials", "backend.options.api_key"),
]
ORDINARY_NAMES = [
    *("max_tokens", "prompt_key", "answer_key", "tokens", "tokenizer", "num_tokens", "key", "keys", "eos_token"),
    *("pad_token_id", "mean_tokens", "secretary", "zmq_hwm", "model", "strategic_grams", "sampled_tokens"),
    *("judge_api_key_env", "--judge-api-key-env", "reward.judge_api_key_env"),
]


def test_values_are_hidden_by_the_names_of_their_keys():
    assert [name for name in SECRET_NAMES if not is_secret_name(name)] == []
    assert hide({"deep": [{name: [SECRET] for name in SECRET_NAMES}]}) == {
        "deep": [{name: [HIDDEN] for name in SECRET_NAMES}]
    }
    assert [name for name in ORDINARY_NAMES if is_secret_name(name)] == []
    assert hide(dict.fromkeys(ORDINARY_NAMES, "plain")) == dict.fromkeys(ORDINARY_NAMES, "plain")


def test_numbers_empty_text_shapes_and_prose_are_kept():
    content = {"max_tokens": 1024, "api_key": "", "x": [1, 2.5, None, True], "deep": {"y": "z"}}
    content["system_prompt"] = "The password: never say it. token = one word."
    assert hide(content) == content


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pw@host/path", "https://host/path"),
        ("https://user:p@ss@host:80/path?x=a@b", "https://host:80/path?x=a@b"),
        ("see http://tok@a and ftp://b:c@d.", "see http://a and ftp://d."),
        ("https://host/?api_key=abc&x=1", f"https://host/?api_key={HIDDEN}&x=1"),
        ("https://host/?x=1&token=abc", f"https://host/?x=1&token={HIDDEN}"),
        ("mail me@host", "mail me@host"),
        ('["http://a","b@c"]', '["http://a","b@c"]'),
        ("max_tokens = 5", "max_tokens = 5"),
    ],
)
def test_urls_lose_their_logins_only(text, shown):
    assert hide_text(text) == shown


def test_messages_lose_what_is_assigned_to_a_secret_name():
    texts = [f"api_key = {SECRET}", f'api_key = "{SECRET}"', f'{{"api_key": "{SECRET}", "x": 1}}', f"password:{SECRET}"]
    texts += [f"{{'hf_token': '{SECRET}'}}", f"write under [backend.options]: api_key = {SECRET}"]
    for text in texts:
        assert SECRET not in hide_text(text)
        assert HIDDEN in hide_text(text)


ARGUMENTS = [
    [flag, f"{key}={SECRET}"] for flag, key in (("--backend-opt", "api_key"), ("--set", "backend.options.api_key"))
]
ARGUMENTS += [[f"{flag}={value}"] for flag, value in ARGUMENTS]
ARGUMENTS += [["--wandb-api-key", SECRET], [f"--wandb-api-key={SECRET}"], [f"--hf_token={SECRET}=="]]
ARGUMENTS += [["--options", f'{{"api_key": "{SECRET}"}}'], ["--base-url", f"https://me:{SECRET}@host/v1"]]
ARGUMENTS += [[f"--base-url=https://host/?token={SECRET}"]]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_command_lines_lose_their_secrets(arguments):
    shown = " ".join(hide_arguments(["my.toml", *arguments, "--max-tokens", "1024"]))
    assert SECRET not in shown
    assert HIDDEN in shown or "https://host/v1" in shown
    assert shown.startswith("my.toml --")
    assert shown.endswith("--max-tokens 1024")


def test_run_json_and_config_toml_contain_no_planted_secret(load, plugins, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f"hf-{SECRET}")
    monkeypatch.setattr("sys.argv", ["retrain", "--backend-opt", f"password={SECRET}", "--lr", "1e-4"])
    text = f"""\
[backend.options]
api_key = "{SECRET}"
nested = {{ client_secret = "{SECRET}", urls = ["https://me:{SECRET}@host/v1"] }}
[training]
max_tokens = 77
[logging]
log_dir = "logs/hf-{SECRET}"
[data]
path = "https://host/?api_key={SECRET}"
"""
    config, problems = load(text, "--backend-opt", f"password={SECRET}", "--data-opt", f"hf_token={SECRET}")
    assert problems == []
    manifest = json.dumps(build_manifest(config, plugins, seed=1, condition="x"))
    resolved = config_toml(config, seed=1)
    for written in (manifest, resolved):
        assert SECRET not in written
        assert HIDDEN in written
        assert "77" in written


def test_explain_and_errors_show_no_planted_secret(command, toys, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_KEY", SECRET)
    for arguments in (
        ("explain", "--json", "--algorithm-param", f"api_key={SECRET}"),
        ("explain", "--log-dir", f"logs/{SECRET}"),
        ("explain", "--set", f"backend.prime_rl_api_key={SECRET}"),
        ("explain", "--reward-type", f"no.{SECRET}"),
        ("explain", "--seed", SECRET),
        ("explain", SECRET),
    ):
        result = command(*arguments)
        assert SECRET not in result.out + result.err, arguments
