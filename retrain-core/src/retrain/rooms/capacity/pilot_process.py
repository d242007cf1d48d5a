"""The process of a pilot: `python -m retrain.rooms.capacity.pilot_process RESULT.json [CONFIG] [overrides]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from retrain.kernel.errors import RetrainError
from retrain.kernel.plugins.manager import load_plugins
from retrain.kernel.plugins.spec import Owner
from retrain.rooms.capacity import plugin
from retrain.rooms.session.configure import load_checked


def main(result: Path, arguments: list[str]) -> int:
    """Train as the arguments say and write what was measured; the exit code of the error otherwise."""
    plugins = load_plugins()
    if not plugins.pluggy.is_registered(plugin):
        plugins.add(plugin, Owner(distribution="retrain-core", source="retrain.rooms.capacity.plugin"))
    try:
        checked = load_checked(arguments, plugins)
        from retrain.rooms.session.session import train

        train(checked.config, plugins, checked.flow, checked.keys)
    except RetrainError as error:
        print(f"{error.label}: {error}", file=sys.stderr)
        return error.exit_code
    ((_, meter),) = plugin.RUNS
    result.write_text(json.dumps(meter.measured()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
