"""Edits of the JSON and JSONL files of a run, as a hand or another program makes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the object in a JSON file in place."""
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


def edit_lines(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change every object of a JSONL file in place."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        change(line)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def set_if(name: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], object]:
    """A change of a field where a line has it."""
    return lambda line: line.update({name: value(line[name])} if name in line else {})
