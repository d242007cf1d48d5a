"""A conversation on a real terminal: prompts, answers as they come, and keys that stop them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.end_to_end.terminal import converse


@pytest.mark.long
def test_a_person_talks_to_a_model(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "retrain", "chat", "builtin:tiny", "--max-tokens=24", "--data-instruction="]
    exchange = [
        ("lists the commands", ""),
        ("> ", "/help\r"),
        ("/credit ANSWER", "What is 2 + 2?\r"),
        ("\n> ", "/entropy\r"),
        ("unsure", "What is 9 * 8?\r"),
        ("mean log-probability", "/save talk.jsonl\r"),
        ("saved in talk.jsonl", ""),
        ("> ", "\x04"),
    ]
    code, printed = converse(argv, exchange, cwd=tmp_path)
    assert code == 0, printed
    assert "\x1b[48;2;" in printed, "shaded"
    assert (tmp_path / "talk.jsonl").read_text().count('"assistant"') == 2
