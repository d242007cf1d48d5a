"""Runs one command as `retrain` would: click keeps a command's first help option for as long as the process lives."""

from collections.abc import Sequence
from typing import Any

import click
from click.testing import CliRunner, Result

from retrain.cli.command_line import HELP_FLAGS


def invoke(command: click.Command, arguments: Sequence[str] = (), **more: Any) -> Result:
    return CliRunner().invoke(command, list(arguments), help_option_names=list(HELP_FLAGS), **more)
