"""`retrain doctor [CONFIG] [overrides] [--json] [--logprobs]`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from typing import Any

import click

from retrain.credit.logprob_gap import measure_gap
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.kernel.errors import EXIT_FAILED, BackendError, ConfigError, Problem, RetrainError
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Example, Floats, Sample, SamplingParams
from retrain.run.backend import build_backend
from retrain.run.check import selected_parts
from retrain.run.configure import DEFAULT_FILE, claim_of, load_with_problems
from retrain.run.opened import run_context
from retrain.run.tables import registered_tables
from retrain.tasks.prompts import encode_prompts
from retrain.text.amounts import counted
from retrain.text.command_options import config_argument, json_option
from retrain.text.secrets import hide, hide_text
from retrain.text.terminal_text import printable

# Nats. bf16 stays below half of it, and a temperature applied on one side only gives several tenths.
MAX_MEAN_GAP = 0.05
STYLES = {"ok": "green", "warn": "yellow", "missing": "red", "failed": "red"}
STATUS_WIDTH = 8
MAX_TOKENS = 64
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
@json_option()
@config_argument()
@click.pass_context
def command(ctx: click.Context, logprobs: bool, as_json: bool, arguments: tuple[str, ...]) -> None:
    """Check that this machine has everything that CONFIG needs, with a fix for each gap.

    The exit code is 1 when something that CONFIG needs is missing or broken. CONFIG defaults to ./retrain.toml where
    it exists. Without a configuration everything is shown, and only a plugin that failed to load
    or an incomplete installation counts.
    """
    plugins: Plugins = ctx.obj
    with redirect_stdout(sys.stderr):  # plugins may print when they are imported
        config, source, findings = examine(arguments, plugins)
    gap: dict[str, Any] | None = None
    if logprobs and config is None:
        what, fix = "there is no configuration to train with", "give the file: `retrain doctor retrain.toml --logprobs`"
        raise ConfigError(Problem(code="doctor.no-configuration", where="--logprobs", what=what, fix=fix))
    if logprobs and config is not None and not any(finding.is_fatal for finding in findings):
        click.echo(f"Loading {config.model.model} to compare log-probabilities ...", err=True)
        with redirect_stdout(sys.stderr):
            finding, gap = compare(config, plugins)
        findings.append(finding)
    fatal = [finding for finding in findings if finding.is_fatal]
    if as_json:
        checks = [asdict(finding) for finding in findings]
        content = {"ok": not fatal, "config": source or None, "checks": checks, "logprobs": gap}
        click.echo(json.dumps(hide(content), indent=2, allow_nan=False))
    else:
        _show(findings)
        if logprobs and gap is None:
            click.secho("The log-probabilities were not compared: fix the rest first.", fg="yellow")
        colour = "red" if fatal else "green" if source else None
        click.secho(f"\n{_verdict(source, fatal)}", fg=colour, bold=bool(colour))
    if fatal:
        ctx.exit(EXIT_FAILED)


def _show(findings: Sequence[Diagnosis]) -> None:
    width = max(len(finding.name) for finding in findings) + 2
    for finding in findings:
        is_unused = finding.status == "missing" and not finding.needed
        status = click.style(
            f"{'absent' if is_unused else finding.status:<{STATUS_WIDTH}}",
            fg=None if is_unused else STYLES[finding.status],
            dim=is_unused,
        )
        click.echo(status + click.style(_safe(f"{finding.name:<{width}}{finding.detail}"), dim=is_unused))
        if finding.fix:
            fix = " " * (STATUS_WIDTH + width) + f"fix: {_safe(finding.fix)}"
            click.secho(fix, dim=is_unused, bold=not is_unused)


def _verdict(source: str, fatal: Sequence[Diagnosis]) -> str:
    if source:
        missing = f"that {source} needs {'is' if len(fatal) == 1 else 'are'} missing or broken."
        return f"{counted(len(fatal), 'thing')} {missing}" if fatal else f"Everything that {source} needs is here."
    if not fatal:
        return "No configuration was given: `retrain doctor CONFIG` checks whether it can run here."
    broken = sum(finding.name.startswith("plugin ") for finding in fatal)
    return f"{broken} of the installed plugins failed to load." if broken else "The installation is incomplete."


def _safe(text: str) -> str:
    return printable(hide_text(text.replace("\n", " ")))


QUESTIONS = (
    "What is 17 + 25?",
    "What is 9 * 8?",
    "Solve 3x + 4 = 19 for x.",
    "How many primes are below 20?",
    "What is the area of a circle of radius 3?",
    "Simplify (a + b)^2 - (a - b)^2.",
    "A train covers 180 km in 2.5 hours. How fast is it?",
    "Name two numbers whose sum is 10 and whose product is 21.",
)


def compare(config: Config, plugins: Plugins) -> tuple[Diagnosis, dict[str, Any]]:
    """Load the model, sample at most 64 tokens per question, and compare their log-probabilities with the trainer's.

    BackendError when the backend does not report its trainer's log-probabilities, or one of them is not finite.
    """
    context = run_context(config, plugins, max(config.training.seed, 0))
    backend, training = build_backend(context), config.training
    try:
        examples = [Example(id=f"doctor-{i}", prompt=text, reference="") for i, text in enumerate(QUESTIONS)]
        gap = measure_gap(
            backend,
            encode_prompts(examples, context.tokenizer, config),
            SamplingParams(max_tokens=min(MAX_TOKENS, training.max_tokens), temperature=training.temperature),
            seeds=[context.seeds.derive("doctor", i) for i in range(len(QUESTIONS))],
            reported=lambda sample: _sampler_logprobs(sample, config),
        )
    finally:
        backend.close()
    if gap is None:
        what = f"backend {config.backend.backend!r} does not report its trainer's log-probabilities"
        where = config.place("backend.backend")
        fix = "leave --logprobs out; each step of a run logs the gap as logprob_gap_mean"
        raise BackendError(Problem(code="doctor.logprobs-unreported", where=where, what=what, fix=fix))
    if math.isnan(gap.mean):
        what, fix = "some log-probabilities of sampler or trainer are not finite", "try another dtype or model"
        raise BackendError(Problem(code="doctor.logprobs-not-finite", what=what, fix=fix))
    detail = f"mean gap {gap.mean:.2g}, max {gap.max:.2g} nats on {gap.num_tokens} tokens of {len(QUESTIONS)} prompts"
    numbers = {"prompts": len(QUESTIONS), "tokens": gap.num_tokens, "mean": gap.mean, "max": gap.max}
    found = Diagnosis(name="log-probabilities", status="ok", detail=detail, needed=True)
    if gap.mean > MAX_MEAN_GAP:
        fix = "use the same weights, temperature and dtype in both; [algorithm] tis_cap softens a small gap"
        found = replace(found, status="failed", detail=f"{detail}; the mean must be at most {MAX_MEAN_GAP:g}", fix=fix)
    return found, {**numbers, "max_mean_gap": MAX_MEAN_GAP}


def _sampler_logprobs(sample: Sample, config: Config) -> Floats:
    """Return the engine's numbers: recomputed ones come from the trainer and would agree with themselves."""
    if sample.engine_logprobs_T is not None:
        return sample.engine_logprobs_T
    if config.inference.logprobs == "trainer":
        what = "the engine does not report log-probabilities of the distribution that it samples from"
        why = "a run recomputes them with the training model, and each step logs the gap as engine_gap_mean"
        where, fix = config.place("inference.logprobs"), "leave --logprobs out"
        raise BackendError(Problem(code="doctor.engine-logprobs", where=where, what=what, why=why, fix=fix))
    return sample.logprobs_T


def examine(arguments: Sequence[str], plugins: Plugins) -> tuple[Config | None, str, list[Diagnosis]]:
    """Return the configuration of `[CONFIG] [overrides]`, its file, and the findings of all plugins about it.

    Without a file: None, "", and findings about this machine. A file that trains nothing (a standalone `[squeeze]`)
    needs no training parts, so only its problems count. ConfigError when the file cannot be read at all.
    """
    if not arguments and not DEFAULT_FILE.is_file():
        return None, "", _ask(None, plugins)
    config, _, problems = load_with_problems(arguments, plugins)
    claim = claim_of(arguments, plugins)
    if claim is not None:
        try:
            claim.load_explain()(arguments, plugins)
        except RetrainError as error:
            known = set(map(str, problems))
            problems += [problem for problem in error.problems if str(problem) not in known]
    trains = claim is None or any(path.startswith("campaign.") for path in config.origins)
    examined = config if trains else None
    parts = selected_parts(config, plugins, registered_tables(plugins)) if trains else []
    reported = {part.problem.what for part in parts if part.problem}  # each of these has its own finding
    findings = []
    for problem in problems:
        if problem.what not in reported:
            detail, fix = f"{problem.where}: {problem.what}".removeprefix(": "), problem.fix
            findings.append(Diagnosis(name="configuration", status="failed", detail=detail, fix=fix, needed=True))
    return examined, config.source or "(defaults)", [*findings, *_ask(examined, plugins)]


def _ask(config: Config | None, plugins: Plugins) -> list[Diagnosis]:
    found: list[Diagnosis] = []
    given = {"config": config, "plugins": plugins}
    # One by one, as pluggy ends at the first exception: a faulty plugin must not hide the findings of the others.
    for hook in reversed(plugins.pluggy.hook.retrain_diagnose.get_hookimpls()):
        try:
            answer: Sequence[Diagnosis] | None = hook.function(*(given[name] for name in hook.argnames))  # type: ignore[assignment]
            found += answer or ()
        except Exception as error:  # a fault of that plugin
            detail = f"retrain_diagnose raised {type(error).__name__}: {error}"
            fix = "repair that plugin, or leave it out with RETRAIN_BLOCK=distribution"
            found.append(Diagnosis(name=f"plugin {hook.plugin_name}", status="failed", detail=detail, fix=fix))
    return found
