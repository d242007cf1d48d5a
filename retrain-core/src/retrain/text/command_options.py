"""Options and arguments shared by commands, so that each has one spelling, one meaning and one help text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def json_option(text: str = "As JSON.") -> Decorator:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def html_option(text: str, *others: str) -> Decorator:
    """`--html FILE`, as `html`; `others` are further spellings."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("--html", *others, "html", metavar="FILE", type=kind, help=text)


def set_option(text: str) -> Decorator:
    """`--set TABLE.KEY=VALUE`, repeatable, as `settings`."""
    return click.option("--set", "settings", multiple=True, metavar="TABLE.KEY=VALUE", help=text)


def quiet_option(text: str) -> Decorator:
    """`--quiet`, as `is_quiet`."""
    return click.option("--quiet", "-q", "is_quiet", is_flag=True, help=text)


def checkpoint_option() -> Decorator:
    """`--checkpoint WHICH`, as `checkpoint`: empty for the newest."""
    text = "Of a run: best, final, a number of steps or base (default: the newest)."
    return click.option("--checkpoint", default="", metavar="WHICH", help=text)


def config_argument(metavar: str = "[CONFIG] [--KEY VALUE]...") -> Decorator:
    """A configuration and its overrides, as `arguments`; its command needs `ignore_unknown_options`."""
    return click.argument("arguments", metavar=metavar, nargs=-1, type=click.UNPROCESSED)


def overrides_argument() -> Decorator:
    """Overrides after another argument, as `overrides`; its command needs `ignore_unknown_options`."""
    return click.argument("overrides", metavar="[--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)


def runs_argument(metavar: str = "CAMPAIGN | RUN...", *, required: bool = True) -> Decorator:
    """A campaign or run folders, as `paths`."""
    return click.argument("paths", metavar=metavar, nargs=-1, required=required, type=click.Path(path_type=Path))


def run_argument() -> Decorator:
    """A run folder, as `run`."""
    return click.argument("run", metavar="RUN", type=click.Path(path_type=Path))


def subject_argument() -> Decorator:
    """A run, an adapter or a model, as `subject`."""
    return click.argument("subject", metavar="SUBJECT", type=click.Path())
