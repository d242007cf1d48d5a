"""`retrain trace [CONFIG] [overrides] [--json]`: PASS or FAIL before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
import numpy as np

from retrain.credit.flow import CreditFlow, group_problem
from retrain.credit.pipeline import CreditResult, assign_credit
from retrain.credit.trial import LAMBDAS, synthetic_groups
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import EXIT_FAILED, Problem, RetrainError
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Capabilities, Kind
from retrain.run.configure import load_with_problems
from retrain.text.command_options import config_argument, json_option

EPILOG = """\b
Examples:
  retrain trace                                   ./retrain.toml
  retrain trace my.toml --transform-mode mine.shape

\b
Exit codes: 0 it works; 1 it does not; 2 usage or configuration error.
"""


@click.command("trace", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@json_option()
@config_argument()
@click.pass_context
def command(ctx: click.Context, as_json: bool, arguments: tuple[str, ...]) -> None:
    """Try the credit flow of CONFIG on two synthetic groups; exit code 1 if it does not work."""
    plugins: Plugins = ctx.obj
    config, flow, problems = load_with_problems(arguments, plugins)
    trace = trace_flow(config, plugins, flow, problems)
    if as_json:
        click.echo(json.dumps({"ok": trace.ok, **asdict(trace)}, indent=2))
    else:
        _show(trace)
    if not trace.ok:
        ctx.exit(EXIT_FAILED)


def _show(trace: Trace) -> None:
    flow = trace.flow
    click.echo(f"Condition : {flow.condition_label}")
    click.echo(f"Backend   : {flow.backend} (capabilities: {flow.backend_capability_source})")
    click.echo(f"Needs     : {', '.join(flow.needs) or 'nothing could be built'}")
    click.echo(f"Probes    : {trace.probe_cases_passed}/{trace.probe_cases_run} passed")
    if trace.example:
        click.echo("\nTwo synthetic groups at lambda = 1:")
        click.echo("  group  reward  tokens  planning   credit min     mean      max")
        for row in trace.example:
            numbers = f"{row.credit_min:9.4f} {row.credit_mean:8.4f} {row.credit_max:8.4f}"
            click.echo(f"  {row.group:>5} {row.reward:>7.2f} {row.tokens:>7} {row.planning_tokens:>9}    {numbers}")
        click.echo()
    for issue in trace.issues:
        label, colour = ("ERROR", "red") if issue.severity == ERROR else ("WARN", "yellow")
        click.secho(f"[{label}] [{issue.category}] {issue.message}", fg=colour)
    click.secho("PASS" if trace.ok else "FAIL", fg="green" if trace.ok else "red", bold=True)


# Preflight of a credit flow: its needs, whether the backend meets them, and its result on two small groups.


SHOWN_LAMBDA = 1.0
ERROR, WARNING = "error", "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One finding: severity error or warning; category config, compat, dep or probe."""

    severity: str
    category: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Credit of one synthetic completion."""

    group: int
    index: int
    reward: float
    tokens: int
    planning_tokens: int
    credit_min: float
    credit_mean: float
    credit_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The flow that was tried, and its backend."""

    condition_label: str
    backend: str
    backend_capability_source: str
    needs: tuple[str, ...]
    needs_planning: bool
    uses_sepa_controller: bool
    preserves_token_advantages: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The outcome of a preflight, with the names of `--json`; `ok` when no issue is an error."""

    probe_cases_run: int
    probe_cases_passed: int
    issues: tuple[Issue, ...]
    flow: Flow
    example: tuple[Probed, ...]

    @property
    def ok(self) -> bool:
        return not any(issue.severity == ERROR for issue in self.issues)


def trace_flow(config: Config, plugins: Plugins, flow: CreditFlow | None, problems: Sequence[Problem]) -> Trace:
    """Run the flow on two synthetic groups, without and with full pooling, and check its needs against the backend."""
    issues = [Issue(severity=ERROR, category=_category(problem), message=str(problem)) for problem in problems]
    capabilities = declared_capabilities(config, plugins)
    owner = next((entry.owner for entry in plugins.find(Kind.BACKEND, config.backend.backend)), "")
    results: dict[float, CreditResult] = {}
    lambdas = LAMBDAS if flow and not flow.is_custom else ()
    if flow and flow.is_custom:
        message = f"algorithm {flow.name!r} assigns credit itself: its conformance suite tries it, this does not"
        issues.append(Issue(severity=WARNING, category="probe", message=message))
    for sepa_lambda in lambdas:
        try:
            results[sepa_lambda] = assign_credit(synthetic_groups(), flow, sepa_lambda=sepa_lambda)  # type: ignore[arg-type]
        except RetrainError as error:
            issues.append(Issue(severity=ERROR, category="probe", message=f"lambda = {sepa_lambda}: {error}"))
    if flow:
        issues += _compatibility(config, plugins, flow, capabilities, any(_varies(r) for r in results.values()))
    tried = Flow(
        condition_label=flow.condition if flow else "(none)",
        backend=config.backend.backend,
        backend_capability_source=str(owner) if capabilities else "not declared",
        needs=_needs(flow) if flow else (),
        needs_planning=bool(flow and flow.needs_planning),
        uses_sepa_controller=bool(flow and flow.controller),
        preserves_token_advantages=capabilities.preserves_token_advantages if capabilities else None,
    )
    return Trace(
        probe_cases_run=len(lambdas),
        probe_cases_passed=len(results),
        issues=tuple(issues),
        flow=tried,
        example=_probed(results[SHOWN_LAMBDA]) if SHOWN_LAMBDA in results else (),
    )


def _needs(flow: CreditFlow) -> tuple[str, ...]:
    needs = (
        ("log-probabilities of the sampled tokens", True),
        ("entropies of the sampling distribution", flow.needs_entropy),
        ("planning-token masks", flow.needs_planning),
        (f"lambda from controller {flow.controller!r}", bool(flow.controller)),
    )
    return tuple(name for name, is_needed in needs if is_needed)


def _compatibility(
    config: Config, plugins: Plugins, flow: CreditFlow, capabilities: Capabilities | None, varies: bool
) -> list[Issue]:
    issues = []
    if capabilities and varies and not capabilities.preserves_token_advantages:
        message = f"{flow.condition} credits the tokens of one completion differently; this backend would lose that"
        issues.append(Issue(severity=ERROR, category="compat", message=message))
    if capabilities is None:
        message = f"backend {config.backend.backend!r} declares no capabilities; nothing could be checked against it"
        issues.append(Issue(severity=WARNING, category="compat", message=message))
    detector = config.planning.detector
    if flow.needs_planning and "." not in detector and not plugins.find(Kind.PLANNING_DETECTOR, detector):
        message = f"needs planning tokens, but no planning detector {detector!r} is installed"
        issues.append(Issue(severity=ERROR, category="dep", message=message))
    if flow.controller and not plugins.find(Kind.CONTROLLER, flow.controller):
        message = f"needs controller {flow.controller!r}, which is not installed"
        issues.append(Issue(severity=ERROR, category="dep", message=message))
    if problem := group_problem(config, flow):
        issues.append(Issue(severity=ERROR, category="config", message=str(problem)))
    elif config.training.group_size == 1 and not flow.advantage.compute_step:
        message = "group_size = 1: no group can be informative, so nothing would be trained"
        issues.append(Issue(severity=WARNING, category="config", message=message))
    return issues


def _category(problem: Problem) -> str:
    return "dep" if "pip install" in problem.fix or "failed to load" in problem.why else "config"


def _varies(result: CreditResult) -> bool:
    return any(np.ptp(advs_T) > 0.0 for group in result.token_advs for advs_T in group if advs_T.size)


def _probed(result: CreditResult) -> tuple[Probed, ...]:
    groups = synthetic_groups()
    return tuple(
        Probed(
            group=number,
            index=index,
            reward=float(groups[number].rewards_G[index]),
            tokens=len(advs_T),
            planning_tokens=int(groups[number].planning_G[index].sum()),
            credit_min=float(advs_T.min()),
            credit_mean=float(advs_T.mean()),
            credit_max=float(advs_T.max()),
        )
        for number, advs_G in enumerate(result.token_advs)
        for index, advs_T in enumerate(advs_G)
    )
