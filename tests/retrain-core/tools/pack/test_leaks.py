"""Planted secrets are found with file and line; ordinary code that handles keys is none."""

from __future__ import annotations

import pytest

from retrain.tools.pack.inputs import hidden, leaks_in

OPENAI = "sk-proj-" + "a1B2c3D4" * 5
PLANTED = {
    f'client = OpenAI("{OPENAI}")': "form of a key",
    "token: hf_" + "aB3" * 12: "form of a key",
    "AKIA" + "ABCD1234" * 2: "form of a key",
    "url = 'https://me:pa55w0rd@host/x'": "login",
    'api_key = "k3y-0f-s0me-service"': "written out",
    '{"prompt": "x", "hf_token": "0123456789abcdef"}': "written out",
    "SERVICE_API_KEY=abc123def456": "written out",
    "GET /x?key=abc123def456": "written out",
    "-----BEGIN RSA PRIVATE KEY-----": "form of a key",
}
ORDINARY = (
    'api_key = os.environ["OPENAI_API_KEY_2"]',
    "api_key=settings.keys.openai_1",
    "def score(api_key: str = '') -> float:",
    'stop_token = "<|im_end|>"',
    'prompt_key = "question2answer"',
    "max_tokens = 12345678",
    "see https://host.example/path?a=1",
    "api_key = (hidden)",
    'pad_token = "<pad0>"',
    "password = getpass('Password 1: ')",
)


@pytest.mark.parametrize("line", PLANTED)
def test_a_planted_secret_is_found_and_hidden(line: str) -> None:
    text = f"first\n{line}\nlast\n".encode()
    (leak,) = leaks_in("code/x.py", text)
    assert (leak.file, leak.line) == ("code/x.py", 2)
    assert PLANTED[line] in leak.what
    clean = hidden(text)
    assert not list(leaks_in("code/x.py", clean))
    assert clean.count(b"\n") == 3


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_code_is_no_secret(line: str) -> None:
    assert not list(leaks_in("x.py", line.encode()))
    assert hidden(line.encode()) == line.encode()


def test_the_values_of_this_environment_are_found_even_in_binary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct horse battery")
    assert [leak.line for leak in leaks_in("x", b"\0\1 correct horse battery \0")] == [0]
    assert [leak.line for leak in leaks_in("x", b"a\nb correct horse battery")] == [2]
    assert b"horse" not in hidden(b"correct horse battery")
