"""`retrain trace [CONFIG] [overrides] [--json]`: PASS or FAIL before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

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
SHOWN_LAMBDA = 1.0
ERROR, WARNING = "error", "warning"
# Severity, category (config, compat, dep or probe) and message.
Issue = tuple[str, str, str]


@click.command("trace", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@json_option()
@config_argument()
@click.pass_context
def command(ctx: click.Context, as_json: bool, arguments: tuple[str, ...]) -> None:
    """Try the credit flow of CONFIG on two synthetic groups; exit code 1 if it does not work."""
    plugins: Plugins = ctx.obj
    trace = trace_flow(*load_with_problems(arguments, plugins), plugins)
    if as_json:
        click.echo(json.dumps(trace, indent=2))
    else:
        flow = trace["flow"]
        click.echo(f"Condition : {flow['condition_label']}")
        click.echo(f"Backend   : {flow['backend']} (capabilities: {flow['backend_capability_source']})")
        click.echo(f"Needs     : {', '.join(flow['needs']) or 'nothing could be built'}")
        click.echo(f"Probes    : {trace['probe_cases_passed']}/{trace['probe_cases_run']} passed")
        if trace["example"]:
            click.echo("\nTwo synthetic groups at lambda = 1:")
            click.echo("  group  reward  tokens  planning   credit min     mean      max")
            for row in trace["example"]:
                numbers = "{credit_min:9.4f} {credit_mean:8.4f} {credit_max:8.4f}".format_map(row)
                click.echo("  {group:>5} {reward:>7.2f} {tokens:>7} {planning_tokens:>9}    ".format_map(row) + numbers)
            click.echo()
        for issue in trace["issues"]:
            label, colour = ("ERROR", "red") if issue["severity"] == ERROR else ("WARN", "yellow")
            click.secho(f"[{label}] [{issue['category']}] {issue['message']}", fg=colour)
        click.secho("PASS" if trace["ok"] else "FAIL", fg="green" if trace["ok"] else "red", bold=True)
    if not trace["ok"]:
        ctx.exit(EXIT_FAILED)


def trace_flow(
    config: Config, flow: CreditFlow | None, problems: Sequence[Problem], plugins: Plugins
) -> dict[str, Any]:
    """Run the flow on two synthetic groups, without and with full pooling, and check its needs against the backend.

    Returns the document of `--json`.
    """
    issues: list[Issue] = []
    for problem in problems:
        is_missing = "pip install" in problem.fix or "failed to load" in problem.why
        issues.append((ERROR, "dep" if is_missing else "config", str(problem)))
    capabilities = declared_capabilities(config, plugins)
    owner = next((entry.owner for entry in plugins.find(Kind.BACKEND, config.backend.backend)), "")
    results: dict[float, CreditResult] = {}
    lambdas = LAMBDAS if flow and not flow.is_custom else ()
    if flow and flow.is_custom:
        message = f"algorithm {flow.name!r} assigns credit itself: its conformance suite tries it, this does not"
        issues.append((WARNING, "probe", message))
    for sepa_lambda in lambdas:
        try:
            results[sepa_lambda] = assign_credit(synthetic_groups(), flow, sepa_lambda=sepa_lambda)  # type: ignore[arg-type]
        except RetrainError as error:
            issues.append((ERROR, "probe", f"lambda = {sepa_lambda}: {error}"))
    if flow:
        advantages = [advs_T for result in results.values() for group in result.token_advs for advs_T in group]
        varies = any(np.ptp(advs_T) > 0.0 for advs_T in advantages if advs_T.size)
        issues += _compatibility(config, plugins, flow, capabilities, varies)
    return {
        "ok": not any(severity == ERROR for severity, _, _ in issues),
        "probe_cases_run": len(lambdas),
        "probe_cases_passed": len(results),
        "issues": [dict(zip(("severity", "category", "message"), issue, strict=True)) for issue in issues],
        "flow": {
            "condition_label": flow.condition if flow else "(none)",
            "backend": config.backend.backend,
            "backend_capability_source": str(owner) if capabilities else "not declared",
            "needs": list(_needs(flow)) if flow else [],
            "needs_planning": bool(flow and flow.needs_planning),
            "uses_sepa_controller": bool(flow and flow.controller),
            "preserves_token_advantages": capabilities.preserves_token_advantages if capabilities else None,
        },
        "example": _example(results[SHOWN_LAMBDA]) if SHOWN_LAMBDA in results else [],
    }


def _needs(flow: CreditFlow) -> Iterator[str]:
    yield "log-probabilities of the sampled tokens"
    if flow.needs_entropy:
        yield "entropies of the sampling distribution"
    if flow.needs_squared_probs:
        yield "the trainer's sums of squared probabilities"
    if flow.needs_greedy:
        yield "a greedy completion of each prompt"
    if flow.needs_planning:
        yield "planning-token masks"
    if flow.controller:
        yield f"lambda from controller {flow.controller!r}"


def _compatibility(
    config: Config, plugins: Plugins, flow: CreditFlow, capabilities: Capabilities | None, varies: bool
) -> Iterator[Issue]:
    if capabilities is None:
        message = f"backend {config.backend.backend!r} declares no capabilities; nothing could be checked against it"
        yield WARNING, "compat", message
    elif varies and not capabilities.preserves_token_advantages:
        message = f"{flow.condition} credits the tokens of one completion differently; this backend would lose that"
        yield ERROR, "compat", message
    detector = config.planning.detector
    if flow.needs_planning and "." not in detector and not plugins.find(Kind.PLANNING_DETECTOR, detector):
        yield ERROR, "dep", f"needs planning tokens, but no planning detector {detector!r} is installed"
    if flow.controller and not plugins.find(Kind.CONTROLLER, flow.controller):
        yield ERROR, "dep", f"needs controller {flow.controller!r}: not installed"
    if problem := group_problem(config, flow):
        yield ERROR, "config", str(problem)
    elif config.training.group_size == 1 and not flow.advantage.compute_step:
        message = "group_size = 1: no group can be informative, so nothing would be trained"
        yield WARNING, "config", message


def _example(result: CreditResult) -> list[dict[str, Any]]:
    """Return the credit of each synthetic completion."""
    groups = synthetic_groups()
    return [
        {
            "group": number,
            "index": index,
            "reward": float(groups[number].rewards_G[index]),
            "tokens": len(advs_T),
            "planning_tokens": int(groups[number].planning_G[index].sum()),
            "credit_min": float(advs_T.min()),
            "credit_mean": float(advs_T.mean()),
            "credit_max": float(advs_T.max()),
        }
        for number, advs_G in enumerate(result.token_advs)
        for index, advs_T in enumerate(advs_G)
    ]
