"""`retrain doctor [CONFIG] [overrides] [--json] [--logprobs]`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from retrain.credit.logprob_gap import LogprobGap, measure_gap
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.kernel.errors import EXIT_FAILED, BackendError, ConfigError, Problem, RetrainError
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Example, Floats, Sample, SamplingParams
from retrain.run.backend import build_backend
from retrain.run.configure import DEFAULT_FILE, claim_of, load_with_problems
from retrain.run.seed_sources import run_seeds
from retrain.run.selected import selected_parts
from retrain.run.tables import registered_tables
from retrain.tasks.prompts import encode_prompts
from retrain.text.command_options import config_argument, json_option
from retrain.text.secrets import hide, hide_text
from retrain.text.terminal_text import printable
from retrain.text.tokenizer import load_tokenizer

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


# Prints the doctor's findings: one line each, with the fix below those that matter.


STYLES = {"ok": "green", "warn": "yellow", "missing": "red", "failed": "red"}
STATUS_WIDTH = 8


def show(found: Examination, *, skipped_logprobs: bool = False) -> None:
    """Print all findings, then the verdict."""
    console = Console(highlight=False)
    width = max(len(finding.name) for finding in found.findings) + 2
    for finding in found.findings:
        _print_finding(console, finding, width)
    if skipped_logprobs:
        _print(console, Text("The log-probabilities were not compared: fix the rest first.", style="yellow"))
    _print(console, Text("\n") + _verdict(found))


def _print_finding(console: Console, finding: Diagnosis, width: int) -> None:
    is_unused = finding.status == "missing" and not finding.needed
    style = "dim" if is_unused else STYLES[finding.status]
    status = "absent" if is_unused else finding.status
    line = Text.assemble((f"{status:<{STATUS_WIDTH}}", style), _safe(f"{finding.name:<{width}}"))
    line.append(_safe(finding.detail), style="dim" if is_unused else "")
    _print(console, line)
    if finding.fix:
        fix = Text(" " * (STATUS_WIDTH + width) + f"fix: {_safe(finding.fix)}", style="dim" if is_unused else "bold")
        _print(console, fix)


def _verdict(found: Examination) -> Text:
    count = len(found.fatal)
    if not found.source:
        if count:
            broken = sum(finding.name.startswith("plugin ") for finding in found.fatal)
            plugins = f"{broken} of the installed plugins failed to load." if broken else ""
            return Text(plugins or "The installation is not whole.", style="bold red")
        return Text("No configuration was given: `retrain doctor CONFIG` checks whether it can run here.")
    if count:
        things = "1 thing" if count == 1 else f"{count} things"
        verb = "is" if count == 1 else "are"
        return Text(f"{things} that {found.source} needs {verb} missing or broken.", style="bold red")
    return Text(f"Everything that {found.source} needs is here.", style="bold green")


def _print(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True)


def _safe(text: str) -> str:
    return printable(hide_text(text.replace("\n", " ")))


# Whether sampler and trainer agree on the log-probabilities of freshly sampled tokens.


MAX_TOKENS = 64
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


def logprob_gap(config: Config, plugins: Plugins) -> LogprobGap:
    """Load the model, sample one completion of at most 64 tokens per question, and compare it with the trainer.

    BackendError when the backend does not report its trainer's log-probabilities, or one of them is not finite.
    """
    seeds = run_seeds(config, max(config.training.seed, 0))
    tokenizer = load_tokenizer(config, plugins)
    context = PluginContext(config=config, seeds=seeds, plugins=plugins, tokenizer=tokenizer)
    backend, training = build_backend(context), config.training
    try:
        examples = [Example(id=f"doctor-{i}", prompt=text, reference="") for i, text in enumerate(QUESTIONS)]
        gap = measure_gap(
            backend,
            encode_prompts(examples, tokenizer, config),
            SamplingParams(max_tokens=min(MAX_TOKENS, training.max_tokens), temperature=training.temperature),
            seeds=[seeds.derive("doctor", i) for i in range(len(QUESTIONS))],
            reported=lambda sample: _sampler_logprobs(sample, config),
        )
    finally:
        backend.close()
    if gap is None:
        what = f"backend {config.backend.backend!r} does not report its trainer's log-probabilities"
        fix = "leave --logprobs out; each step of a run logs the gap as logprob_gap_mean"
        raise BackendError(Problem(where=config.place("backend.backend"), what=what, fix=fix))
    if math.isnan(gap.mean):
        what = "some log-probabilities of sampler or trainer are not finite"
        raise BackendError(Problem(what=what, fix="try another dtype or model"))
    return gap


def _sampler_logprobs(sample: Sample, config: Config) -> Floats:
    """What the engine reported; recomputed log-probabilities come from the trainer and would agree with themselves."""
    if sample.engine_logprobs_T is not None:
        return sample.engine_logprobs_T
    if config.inference.logprobs == "trainer":
        what = "the engine does not report log-probabilities of the distribution that it samples from"
        why = "a run recomputes them with the training model, and each step logs the gap as engine_gap_mean"
        where, fix = config.place("inference.logprobs"), "leave --logprobs out"
        raise BackendError(Problem(where=where, what=what, why=why, fix=fix))
    return sample.logprobs_T


# Collects the findings of every plugin and the problems of the configuration.


HOOK = "retrain_diagnose"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The findings for `config`, or for the machine without one; `source` is the file, empty when there is none."""

    config: Config | None
    source: str
    findings: tuple[Diagnosis, ...]

    @property
    def fatal(self) -> tuple[Diagnosis, ...]:
        """The findings that keep the configuration, or without one the installation, from working."""
        return tuple(finding for finding in self.findings if finding.is_fatal)


def examine(arguments: Sequence[str], plugins: Plugins) -> Examination:
    """The findings of all plugins about `[CONFIG] [overrides]`, or about this machine when there is no file.

    A file that trains nothing (a standalone `[squeeze]`) needs no training parts, so only its own problems count.
    ConfigError when the file cannot be read at all.
    """
    if not arguments and not DEFAULT_FILE.is_file():
        return Examination(config=None, source="", findings=tuple(_ask(None, plugins)))
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
    reported = _part_problems(examined, plugins)
    findings = [_configuration(problem) for problem in problems if problem.what not in reported]
    return Examination(
        config=examined, source=config.source or "(defaults)", findings=(*findings, *_ask(examined, plugins))
    )


def _part_problems(config: Config | None, plugins: Plugins) -> set[str]:
    """The problems of parts, each of which has its own finding."""
    parts = selected_parts(config, plugins, registered_tables(plugins)) if config else []
    return {part.problem.what for part in parts if part.problem}


def _configuration(problem: Problem) -> Diagnosis:
    detail = f"{problem.where}: {problem.what}" if problem.where else problem.what
    return Diagnosis(name="configuration", status="failed", detail=detail, fix=problem.fix, needed=True)


def _ask(config: Config | None, plugins: Plugins) -> list[Diagnosis]:
    """Ask each plugin separately, so that one that fails does not silence the others."""
    found: list[Diagnosis] = []
    given = {"config": config, "plugins": plugins}
    for hook in reversed(plugins.pluggy.hook.retrain_diagnose.get_hookimpls()):
        try:
            answer: Sequence[Diagnosis] | None = hook.function(*(given[name] for name in hook.argnames))  # type: ignore[assignment]
            found += answer or ()
        except Exception as error:  # a fault of that plugin
            detail = f"{HOOK} raised {type(error).__name__}: {error}"
            fix = "repair that plugin, or leave it out with RETRAIN_BLOCK=distribution"
            found.append(Diagnosis(name=f"plugin {hook.plugin_name}", status="failed", detail=detail, fix=fix))
    return found
