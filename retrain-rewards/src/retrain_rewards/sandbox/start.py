"""The beginning of a process in the sandbox: its limits, and its part."""

from __future__ import annotations

from retrain_rewards.sandbox import inside


def main(arguments: list[str]) -> None:
    """Play the part that the scoring process gives: `script` and `functions` run a program, `tests` its tests."""
    memory_bytes, cpu_s, file_bytes, link = map(int, arguments)
    channel = inside.begin(memory_bytes, cpu_s, file_bytes)
    part, *program = inside.receive(channel)
    if part == "script":
        inside.serve_script(channel, *program, output_bytes=file_bytes)
    elif part == "functions":
        from retrain_rewards.sandbox import functions

        functions.serve(channel, link, *program)
    else:
        from retrain_rewards.sandbox import checks

        checks.serve(channel, link)
