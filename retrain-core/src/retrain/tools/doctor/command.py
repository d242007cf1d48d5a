"""`retrain doctor [CONFIG] [overrides] [--json] [--logprobs]`."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

import click

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.kernel.errors import EXIT_FAILED, ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.command_options import config_argument, json_option
from retrain.text.secrets import hide
from retrain.tools.doctor.examine import Examination, examine
from retrain.tools.doctor.show import show

MAX_MEAN_GAP = 0.05  # nats; bf16 stays below half of it, a temperature applied on one side only gives several tenths
EPILOG = """\b
Examples:
  retrain doctor                           this machine, for ./retrain.toml if there is one
  retrain doctor my.toml --backend tinker
  retrain doctor my.toml --logprobs        also loads the model

\b
Exit codes: 0 everything CONFIG needs is there; 1 something is missing; 2 usage or configuration error.
"""


@click.command("doctor", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@click.option("--logprobs", is_flag=True, help="Load the model; compare sampler and trainer on 8 prompts.")
@click.option(
    "--max-gap", type=click.FloatRange(min=0.0), default=MAX_MEAN_GAP, show_default=True, help="Mean gap allowed, nats."
)
@json_option()
@config_argument()
@click.pass_context
def command(ctx: click.Context, logprobs: bool, max_gap: float, as_json: bool, arguments: tuple[str, ...]) -> None:
    """Check whether this machine has what CONFIG needs, and how to get what is missing.

    The exit code is 1 when something that CONFIG needs is missing or broken. CONFIG defaults to ./retrain.toml where
    it exists. Without a configuration everything is shown, and only a plugin that failed to load
    or an installation that is not whole counts.
    """
    plugins: Plugins = ctx.obj
    with redirect_stdout(sys.stderr):  # plugins may print when they are imported
        found = examine(arguments, plugins)
    gap: dict[str, Any] | None = None
    if logprobs and found.config is None:
        fix = "give the file: `retrain doctor retrain.toml --logprobs`"
        raise ConfigError(Problem(where="--logprobs", what="there is no configuration to train with", fix=fix))
    if logprobs and found.config is not None and not found.fatal:
        finding, gap = compare(found.config, plugins, max_gap)
        found = Examination(config=found.config, source=found.source, findings=(*found.findings, finding))
    if as_json:
        click.echo(json.dumps(hide(as_data(found, gap)), indent=2, allow_nan=False))
    else:
        show(found, skipped_logprobs=logprobs and gap is None)
    if found.fatal:
        ctx.exit(EXIT_FAILED)


def as_data(found: Examination, gap: dict[str, Any] | None) -> dict[str, Any]:
    """The documented JSON form: `ok`, `config`, all `checks`, and the gap in `logprobs` where it was measured."""
    return {
        "ok": not found.fatal,
        "config": found.source or None,
        "checks": [asdict(finding) for finding in found.findings],
        "logprobs": gap,
    }


def compare(config: Config, plugins: Plugins, max_gap: float) -> tuple[Diagnosis, dict[str, Any]]:
    """Load the model, measure the gap and compare it with the limit."""
    from retrain.tools.doctor.logprobs import QUESTIONS, logprob_gap  # only this loads a model

    click.echo(f"Loading {config.model.model} to compare log-probabilities ...", err=True)
    with redirect_stdout(sys.stderr):
        gap = logprob_gap(config, plugins)
    measured = f"mean gap {gap.mean:.2g}, max {gap.max:.2g} nats on {gap.num_tokens} tokens of {len(QUESTIONS)} prompts"
    content = {"prompts": len(QUESTIONS), "tokens": gap.num_tokens, "mean": gap.mean, "max": gap.max}
    content["max_mean_gap"] = max_gap
    if gap.mean <= max_gap:
        return Diagnosis(name="log-probabilities", status="ok", detail=measured, needed=True), content
    fix = (
        "sampler and trainer must use the same weights, temperature and dtype; [algorithm] tis_cap softens a small gap"
    )
    detail = f"{measured}; the mean must be at most {max_gap:g}"
    return Diagnosis(name="log-probabilities", status="failed", detail=detail, fix=fix, needed=True), content
