"""`retrain serve`: a policy for any client of the OpenAI API."""

from __future__ import annotations

import ipaddress
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.run.interrupts import handled_signals
from retrain.run.opened import Opened, opened
from retrain.run.streaming import ServedElsewhere
from retrain.run.subject import Subject, find_subject
from retrain.text.command_options import checkpoint_option, overrides_argument, subject_argument
from retrain.text.terminal_text import printable

BASE = "base"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
EPILOG = """\b
Examples:
  retrain serve logs/train
  retrain serve logs/train --adapter other=logs/other --port 0
  retrain serve logs/train --checkpoint best --token secret
  export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=secret

\b
Exit codes: 0 stopped by Ctrl-C or SIGTERM; 1 failed; 2 usage or configuration error.
"""


@click.command("serve", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@subject_argument()
@overrides_argument()
@checkpoint_option()
@click.option("--name", default="", help="Name of the model in requests; default: the folder's, or the hub id.")
@click.option(
    "--adapter",
    "adapters",
    metavar="NAME=SUBJECT",
    multiple=True,
    help="Serve another adapter of the same base; repeatable.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option(
    "--token", envvar="RETRAIN_SERVE_TOKEN", help="Token that clients must send; default: a random one, printed."
)
@click.option("--no-token", is_flag=True, help="Admit every client that can reach the address.")
@click.pass_obj
def command(
    plugins: Plugins,
    /,
    subject: str,
    overrides: tuple[str, ...],
    checkpoint: str,
    name: str,
    adapters: tuple[str, ...],
    **listening: Any,
) -> None:
    """Serve SUBJECT, a run, an adapter or a model, to clients of the OpenAI API until Ctrl-C.

    Completions and chats, streaming, log-probabilities, several adapters by name. With engine "pytorch" the server is
    this process; with a server engine the adapter is loaded there, and its address and name are printed."""
    policy = find_subject(subject, checkpoint)
    models = _models(policy, name, adapters)
    with _stopped_by_signals() as stop, opened(policy, plugins, overrides) as source:
        addresses = source.backend.addresses() if isinstance(source.backend, ServedElsewhere) else ()
        if addresses:
            if adapters:
                what, fix = "a server engine serves one policy of a run", "load the others on the server itself"
                raise ConfigError(Problem(code="serve.one-policy", where="--adapter", what=what, fix=fix))
            for url, name in addresses:
                click.echo(f"Serving {printable(name)} at {url}")
            click.echo("The token is the server's own. Ctrl-C takes the adapter off it.")
            stop.take_over()
            while not stop.wait(1.0):
                pass
        else:
            _serve(source, models, stop, **listening)


def _serve(
    source: Opened,
    models: dict[str, Path | None],
    stop: _Stop,
    *,
    host: str,
    port: int,
    token: str | None,
    no_token: bool,
) -> None:
    from retrain.use.serving.batcher import Batcher
    from retrain.use.serving.http import ApiServer, with_token
    from retrain.use.serving.service import Service

    _try_all(source, models)
    key = "" if no_token else token or secrets.token_urlsafe(24)
    batcher = Batcher(source.backend, lambda model: source.use(models[model]))
    try:
        server = ApiServer(host, port, with_token(Service(source, models, batcher), key))
    except OSError as error:
        what, fix = f"cannot listen there: {error.strerror or error}", "free the port, or give another: --port 0"
        raise ConfigError(Problem(code="serve.cannot-listen", where=f"{host}:{port}", what=what, fix=fix)) from error
    with server:
        click.echo(f"Serving {', '.join(map(printable, models))} at {server.url}")
        shown = "TOKEN" if key and token else key or "none"
        click.echo(f"  export OPENAI_BASE_URL={server.url} OPENAI_API_KEY={shown}\nCtrl-C stops it.")
        is_loopback = host == "localhost"
        with suppress(ValueError):
            is_loopback = ipaddress.ip_address(host).is_loopback
        if no_token and not is_loopback:
            click.echo("warning: every client that can reach this address may use it", err=True)
        stop.take_over()
        try:
            batcher.run(stop.is_set)
        finally:
            batcher.close()


def _models(policy: Subject, name: str, adapters: Sequence[str]) -> dict[str, Path | None]:
    folder = policy.run or policy.folder or Path(policy.model)
    own_name = folder.resolve().name if folder.is_dir() else policy.named
    known = {name or own_name: policy.folder}
    for each in adapters:
        other_name, _, other = each.partition("=")
        if not other_name or not other or other_name in known:
            what = f"--adapter {printable(each)} must be NAME=SUBJECT, with a new name"
            fix = "for example --adapter best=logs/train"
            raise ConfigError(Problem(code="serve.bad-adapter", where="command line", what=what, fix=fix))
        found = find_subject(other)
        if found.model != policy.model:
            what = f"{printable(other)} was trained on {found.model!r}, and the served policy on another model"
            fix = "serve it in a separate process, on another port"
            where = f"--adapter {printable(other_name)}"
            raise ConfigError(Problem(code="serve.other-base", where=where, what=what, fix=fix))
        known[other_name] = found.folder
    known.setdefault(BASE, None)
    return known


def _try_all(source: Opened, models: dict[str, Path | None]) -> None:
    """Load each once, to refuse one that does not fit now; a missing base is not offered."""
    for name, folder in list(models.items()):
        try:
            source.use(folder)
        except BackendError as error:
            if name == BASE and folder is None and len(models) > 1:
                del models[name]
                continue
            where = f"--adapter {printable(name)}"
            raise ConfigError(*(replace(problem, where=where) for problem in error.problems)) from error


class _Stop(threading.Event):
    """Set by SIGINT and SIGTERM. Until `take_over`, and at the second one, they interrupt at once as Ctrl-C does."""

    _polls = False

    def take_over(self) -> None:
        """Poll `is_set` from now on: an exception could get lost between two lines of a library."""
        self._polls = True

    def handle(self, *_: object) -> None:
        if self.is_set() or not self._polls:
            raise KeyboardInterrupt
        self.set()


@contextmanager
def _stopped_by_signals() -> Iterator[_Stop]:
    stop = _Stop()
    with handled_signals(SIGNALS, stop.handle), suppress(KeyboardInterrupt):
        yield stop
    click.echo("stopped", err=True)
