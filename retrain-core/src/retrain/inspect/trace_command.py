"""`retrain trace [CONFIG] [overrides] [--json]`: PASS or FAIL before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from retrain.inspect.trace import Trace, trace_flow
from retrain.kernel.errors import EXIT_FAILED
from retrain.kernel.registry import Plugins
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
        click.echo(json.dumps(as_data(trace), indent=2))
    else:
        _show(trace)
    if not trace.ok:
        ctx.exit(EXIT_FAILED)


def as_data(trace: Trace) -> dict[str, Any]:
    """The documented JSON form."""
    return {
        "ok": trace.ok,
        "probe_cases_run": trace.cases_run,
        "probe_cases_passed": trace.cases_passed,
        "issues": [asdict(issue) for issue in trace.issues],
        "flow": {
            "condition_label": trace.condition,
            "backend": trace.backend,
            "backend_capability_source": trace.capability_source,
            "needs": list(trace.needs),
            "needs_planning": trace.needs_planning,
            "uses_sepa_controller": trace.uses_controller,
            "preserves_token_advantages": trace.preserves_token_advantages,
        },
        "example": [asdict(probed) for probed in trace.probed],
    }


def _show(trace: Trace) -> None:
    click.echo(f"Condition : {trace.condition}")
    click.echo(f"Backend   : {trace.backend} (capabilities: {trace.capability_source})")
    click.echo(f"Needs     : {', '.join(trace.needs) or 'nothing could be built'}")
    click.echo(f"Probes    : {trace.cases_passed}/{trace.cases_run} passed")
    if trace.probed:
        click.echo("\nTwo synthetic groups at lambda = 1:")
        click.echo("  group  reward  tokens  planning   credit min     mean      max")
        for row in trace.probed:
            numbers = f"{row.credit_min:9.4f} {row.credit_mean:8.4f} {row.credit_max:8.4f}"
            click.echo(f"  {row.group:>5} {row.reward:>7.2f} {row.tokens:>7} {row.planning_tokens:>9}    {numbers}")
        click.echo()
    for issue in trace.issues:
        colour = "red" if issue.severity == "error" else "yellow"
        label = "ERROR" if issue.severity == "error" else "WARN"
        click.secho(f"[{label}] [{issue.category}] {issue.message}", fg=colour)
    click.secho("PASS" if trace.ok else "FAIL", fg="green" if trace.ok else "red", bold=True)
