"""`retrain audit`: tries the reward before training without a model, or again on the texts on which it failed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Outcome
from retrain.records.record_names import CONFIG_FILE
from retrain.run.configure import load_checked, refuse_defaults
from retrain.run.opened import run_context
from retrain.tasks.audit.findings import report_data, where_found
from retrain.tasks.audit.report import AuditReport
from retrain.tasks.audit.verifier_audit import SHADOW, audit_tasks, shadow_of
from retrain.tasks.loading import load_tasks
from retrain.tasks.scoring.build import build_rewards, data_reward, load_data
from retrain.tasks.scoring.failures import FailureRecord, read_failures
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService
from retrain.text.amounts import duration
from retrain.text.command_options import config_argument, json_option
from retrain.text.secrets import hide_text
from retrain.text.tables import table_lines
from retrain.text.terminal_text import printable

EPILOG = """\b
Examples:
  retrain audit                      the reward of ./retrain.toml
  retrain audit my.toml --examples 50 --reward-type math
  retrain audit --contamination      are evaluated examples in the training data?
  retrain audit --contamination --model-probe
  retrain audit --replay logs/train/failures
  retrain audit mended.toml --replay logs/train/failures --json

\b
Exit codes: 0 fit to train on; 1 not fit, or contaminated, or a replayed text got no verdict; 2 usage or configuration
            error.
"""


@click.command("audit", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    help="Examples to try, in place of [scoring] audit_examples; with --model-probe: of each set at most.",
)
@click.option("--contamination", is_flag=True, help="Compare the evaluated examples with the training data instead.")
@click.option(
    "--words", type=click.IntRange(8, 13), default=8, show_default=True, help="With --contamination: words of a run."
)
@click.option(
    "--allowed",
    type=click.FloatRange(0.0, 1.0),
    default=0.01,
    show_default=True,
    help="With --contamination: share of a set that may be known.",
)
@click.option("--model-probe", is_flag=True, help="With --contamination: let the model complete the prompts, too.")
@click.option(
    "--replay",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Score the texts of PATH again: a file of a run's `failures` folder, or the whole folder.",
)
@json_option()
@config_argument()
@click.pass_context
def command(
    ctx: click.Context,
    examples: int | None,
    as_json: bool,
    arguments: tuple[str, ...],
    contamination: bool,
    model_probe: bool,
    words: int,
    allowed: float,
    replay: Path | None,
) -> None:
    """Score right and wrong texts of a few examples of CONFIG; exit code 1 when the reward is not fit to train on.

    With --contamination look for the held-out examples and the sets of [eval.sets] in the training data instead; exit
    code 1 when more than the allowed share is there. With --replay score again the texts on which a run's
    reward failed, with reward and limits of that run or of CONFIG; exit code 1 unless every text gets a verdict."""
    has_sets = contamination or model_probe
    needed = {"words": (has_sets, "--contamination"), "allowed": (has_sets, "--contamination")}
    needed["examples"] = (model_probe or not has_sets, "--model-probe")
    for name, (is_read, other) in needed.items():
        if not is_read and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            what, fix = f"has no effect without {other}", f"add {other}, or remove it"
            raise ConfigError(Problem(code="audit.option-unread", where=f"--{name}", what=what, fix=fix))
    if replay:
        if has_sets or examples:
            raise click.UsageError("--replay excludes --contamination, --model-probe and --examples")
        results = replay_failures(replay.expanduser(), arguments, ctx.obj)
        lines = [printable(result.line()) for result in results]
        click.echo(json.dumps([asdict(result) for result in results], indent=2) if as_json else "\n".join(lines))
        ctx.exit(EXIT_DONE if all(result.outcome == Outcome.SCORED for result in results) else EXIT_FAILED)
    config = load_checked(arguments, ctx.obj).config
    refuse_defaults(config, arguments)
    if has_sets:
        from retrain.run.backend import build_backend, choose_devices
        from retrain.tasks.audit.contamination import audit_contamination, report_lines

        report = audit_contamination(
            choose_devices(config, ctx.obj).config if model_probe else config,
            ctx.obj,
            words=words,
            allowed=allowed,
            open_backend=build_backend if model_probe else None,
            examples=examples,
            say=lambda text: click.echo(text, err=True),
        )
        if as_json:
            click.echo(json.dumps(report.as_data(), indent=2))
        else:
            click.echo("\n".join(map(printable, report_lines(report))))
            _show_verdict(report.ok)
        if not report.ok:
            ctx.exit(EXIT_FAILED)
        return
    audited = audit_config(config, ctx.obj, examples)
    if as_json:
        data = {"rewards": list(audited.rewards), "notes": list(audited.notes), **report_data(audited.report)}
        data |= {"shadow": {"rewards": [*audited.shadows], **report_data(audited.shadow)}} if audited.shadow else {}
        click.echo(json.dumps(data, indent=2))
    else:
        _show(audited)
    if not audited.ok:
        ctx.exit(EXIT_FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """An audit with the names of the rewards or environment, the notes of the data, and the shadow's audit."""

    report: AuditReport
    rewards: tuple[str, ...]
    notes: tuple[str, ...]
    shadow: AuditReport | None = None
    shadows: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.report.ok and (self.shadow is None or self.shadow.ok)


def audit_config(config: Config, plugins: Plugins, examples: int | None = None) -> Audited:
    """Load tasks and verifier as a run does, and audit them on `examples`, or `[scoring] audit_examples` at most.

    ConfigError when there are fewer than `examples`.
    """
    context = run_context(config, plugins)
    tasks, tokenizer = load_tasks(context), context.tokenizer
    settings = config.scoring.model_copy(update={"audit_examples": examples} if examples else {})
    try:
        if examples and examples > len(tasks.prompts):
            what = f"{examples} examples requested, and the data source has {len(tasks.prompts)}"
            fix = "lower --examples, or leave it out"
            raise ConfigError(Problem(code="audit.too-few-examples", where="--examples", what=what, fix=fix))
        report = audit_tasks(tasks, tokenizer, settings)
        verifier = shadow_of(tasks)
        shadow = audit_tasks(tasks, tokenizer, settings, verifier) if verifier else None
    finally:
        tasks.verifier.close()
    shadows = verifier.names if verifier else ()
    return Audited(report=report, rewards=tasks.verifier.names, notes=tasks.notes, shadow=shadow, shadows=shadows)


def _show(audited: Audited) -> None:
    for note in audited.notes:
        click.echo(printable(note))
    click.echo(f"Reward   : {printable(', '.join(audited.rewards))}")
    _show_report(audited.report)
    if audited.shadow:
        click.echo(f"\nShadow   : {printable(', '.join(audited.shadows))}")
        _show_report(audited.shadow, SHADOW)
    _show_verdict(audited.ok)


def _show_verdict(is_fit: bool) -> None:
    click.secho("PASS" if is_fit else "FAIL", fg="green" if is_fit else "red", bold=True)


def _show_report(report: AuditReport, of: str = "Reward") -> None:
    click.echo(f"Examples : {report.examples}")
    click.echo(f"Time     : {duration(report.seconds_mean)} a score, {duration(report.seconds_max)} at most\n")
    rows = [(name, tally.tried, tally.correct, tally.no_verdict, tally.failed) for name, tally in report.checks.items()]
    heads = ("texts", "tried", "correct", "no verdict", "failed")
    for line in table_lines(heads, [tuple(map(str, row)) for row in rows]):
        click.echo(f"  {line}")
    click.echo()
    for cause in report.causes:
        first = cause.first
        label, colour = ("ERROR", "red") if first.severity == "error" else ("WARN", "yellow")
        where = f"[{first.check}] {where_found(cause, report.examples)}"
        click.secho(f"[{label}] {where}: {first.message}", fg=colour)
        click.echo(f"    text: {first.text!r}\n    fix: {first.fix}")
    click.echo(report.line(of))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of scoring one text again; `then` is the original failure."""

    file: str
    reward: str
    outcome: str
    value: float | None
    seconds: float
    detail: str
    then: str

    def line(self) -> str:
        """`failures/step_3_0.json  scored 1  0.002 s  (failed then: timed out after 10 s)`"""
        value = "" if self.value is None else f" {self.value:g}"
        detail = f"  {self.detail}" if self.detail else ""
        outcome = self.outcome.replace("_", " ")
        return f"{self.file}  {self.reward}: {outcome}{value}  {self.seconds:.3f} s{detail}  (then: {self.then})"


def replay_failures(path: Path, arguments: Sequence[str], plugins: Plugins) -> list[Replayed]:
    """Every record below `path`, scored once by the reward that had failed on it, in a separate process.

    `arguments` are overrides of the run's configuration, or another configuration and its overrides.
    """
    records = read_failures(path)
    if not arguments or arguments[0].startswith("-"):
        files = [folder / CONFIG_FILE for folder in path.resolve().parents if (folder / CONFIG_FILE).is_file()]
        if not files:
            what, fix = f"no {CONFIG_FILE} in a folder above it", "name the run's: audit CONFIG --replay PATH"
            raise ConfigError(Problem(code="replay.no-configuration", where=str(path), what=what, fix=fix))
        arguments = [str(files[0]), *arguments]
    config = load_checked(arguments, plugins).config
    wanted = {record.reward for _, record in records}
    context = run_context(config, plugins)
    rewards = {each.name: each for each in build_rewards(config, context, data_reward(config, context))}
    source = config.data.source
    # A data source with a verifier replaces the reward that the run's config.toml names.
    if source in wanted and source not in rewards:
        own = load_data(config, context).reward
        rewards |= {source: NamedReward(name=source, reward=own)} if own is not None else {}
    missing = sorted(wanted - rewards.keys())
    if missing:
        what = f"these texts were scored by {', '.join(missing)}; the configuration has {', '.join(rewards)}"
        fix = "name the run's configuration: audit CONFIG --replay PATH"
        raise ConfigError(Problem(code="replay.reward-missing", where=str(path), what=what, fix=fix))
    # The run's limits without its retries, so that every failure is shown.
    limits = {name: own.model_copy(update={"retries": None}) for name, own in config.scoring.limits.items()}
    settings = config.scoring.model_copy(update={"retries": 0, "limits": limits})
    results: dict[Path, Replayed] = {}
    for name, reward in rewards.items():
        failed = [(each, record) for each, record in records if record.reward == name]
        results |= _scored(reward, failed, settings) if failed else {}
    return [results[each] for each, _ in records]


def _scored(
    reward: NamedReward, records: Sequence[tuple[Path, FailureRecord]], settings: ScoringTable
) -> Mapping[Path, Replayed]:
    # With its default weight of 1, since a failure was recorded before any weighting.
    unweighted = NamedReward(name=reward.name, reward=reward.reward)
    with ScoringService([unweighted], settings) as service, service.batch(fresh=True) as batch:
        for _, record in records:
            batch.submit(record.example, record.text)
        scores = batch.collect(within_budget=False)
        return {
            file: Replayed(
                file=str(file),
                reward=reward.name,
                outcome=score.outcome.value,
                value=score.value,
                seconds=seconds,
                detail=hide_text(score.detail),
                then=hide_text(record.detail),
            )
            for (file, record), score, seconds in zip(records, scores, batch.seconds, strict=True)
        }
