"""`retrain compare CAMPAIGN | RUN...`: which condition is better, and can the data show it?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from retrain.records.runs.curves import Align, Metric, parse_metric
from retrain.text.command_options import json_option, runs_argument
from retrain.text.tables import table_console
from retrain.text.terminal_text import printable
from retrain.verdicts.ledger.looks import InterimLooks
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import options_of

EPILOG = """\b
Examples:
  retrain compare logs/campaign_20260301_120000
  retrain compare CAMPAIGN --metric eval_correct_rate:final --baseline grpo+none
  retrain compare logs/run_a logs/run_b --align tokens --json
  retrain compare CAMPAIGN --variance
  retrain compare --ledger                       verify the ledger in logs/
  retrain compare --ledger logs --head 3f0c...   and whether it still has a hash that you published
  retrain compare --ledger logs/campaign_20260301_120000 --events

\b
Exit codes: 0 done, or the ledger is intact; 1 its chain is broken, or something does not match the disk; 2 usage error,
            nothing that can be compared, or no ledger there.
"""


@click.command("compare", epilog=EPILOG)
@runs_argument("CAMPAIGN | RUN... | FILE FILE", required=False)
@click.option("--metric", metavar="FIELD[:final|best|auc]", help="The metric that decides; a field of metrics.jsonl.")
@click.option("--baseline", metavar="LABEL", help="Condition that the others are compared with (default: the first).")
@click.option("--all-pairs", is_flag=True, help="Compare every condition with every other.")
@click.option(
    "--align", type=click.Choice([each.value for each in Align]), default="steps", show_default=True, help="Budget."
)
@click.option(
    "--at",
    type=click.FloatRange(min=0, min_open=True),
    help="Budget at which the curves are cut, in units of --align; runs that reached it count, ended or not.",
)
@click.option("--last", type=click.IntRange(min=1), help="Steps that final and best average over (default: a tenth).")
@click.option("--alpha", type=click.FloatRange(0, 0.5, min_open=True, max_open=True), help="Default: 0.05.")
@click.option("--lower", is_flag=True, help="Lower is better.")
@click.option("--sets", is_flag=True, help="All evaluation sets together and each of them, in one family of verdicts.")
@click.option("--variance", is_flag=True, help="Sources of the spread: data order, initialisation, sampling, ...")
@click.option("--ledger", is_flag=True, help="Verify `ledger.jsonl` of one folder (default: logs) instead.")
@click.option(
    "--head", metavar="SHA256", default="", help="With --ledger: a hash of an earlier check, still in the chain."
)
@click.option("--events", is_flag=True, help="With --ledger: print its events instead, a line each.")
@json_option()
@click.option("--markdown", "as_markdown", is_flag=True, help="As Markdown.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    paths: tuple[Path, ...],
    variance: bool,
    ledger: bool,
    head: str,
    events: bool,
    as_json: bool,
    as_markdown: bool,
    **chosen: Any,
) -> None:
    """Compare the conditions of a campaign, or of run folders, over their seeds; two runs over their examples.

    Two files that `retrain eval` wrote, for example of two checkpoints, are compared over their examples as well.

    Each look and its verdicts are recorded in `ledger.jsonl`, in the folder that holds the campaign or the runs. With
    --ledger, verify that file's chain of hashes, and the runs and campaigns next to it.
    """
    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown exclude each other")
    others = {**chosen, "metric": None, "align": chosen["align"] != Align.STEPS, "markdown": as_markdown}
    if ledger:
        if variance or chosen["metric"] or any(others.values()) or len(paths) > 1 or (head and events):
            raise click.UsageError("--ledger goes with one folder, --head or --events, and --json only")
        from retrain.verdicts.ledger.printed import show, verify

        folder = paths[0] if paths else None
        ctx.exit(show(folder, as_json=as_json) if events else verify(folder, head=head, as_json=as_json))
    if head or events:
        raise click.UsageError("--head and --events go with --ledger")
    if not paths:
        raise click.UsageError("name a campaign or runs")
    are_files = len(paths) == 2 and all(path.is_file() for path in paths)
    if variance or are_files:
        if any(others.values()):
            named = "--variance goes" if variance else "two files of `retrain eval` go"
            raise click.UsageError(f"{named} with --metric and --json only")
        metric = parse_metric(chosen["metric"], where="--metric") if chosen["metric"] else None
        data, lines = (_variance if variance else _policies)(paths, metric)
        click.echo(json.dumps(data, indent=2, allow_nan=False) if as_json else "\n".join(map(printable, lines)))
        return
    study = comparison_with_ledger(paths, options_of(**chosen, called=lambda name: f"--{name}"))
    from retrain.verdicts.wording.show import markdown, picture, study_data

    if as_json:
        click.echo(json.dumps(study_data(study), indent=2, allow_nan=False))
    elif as_markdown:
        click.echo(markdown(study))
    else:
        table_console().print(picture(study))


def _variance(paths: Sequence[Path], metric: Metric | None) -> tuple[Any, Iterable[str]]:
    from retrain.verdicts.study.variance import decompose, variance_data, variance_sentences

    found = decompose(paths, metric)
    InterimLooks("compare --variance").at(paths)
    return variance_data(found), variance_sentences(found)


def _policies(files: Sequence[Path], metric: Metric | None) -> tuple[Any, Iterable[str]]:
    from retrain.verdicts.ledger.chain import plain_data
    from retrain.verdicts.study.examples import two_evaluations
    from retrain.verdicts.wording.sentences import policies_sentence

    InterimLooks("compare of evaluations").at(files)
    found = two_evaluations(files, metric)
    return plain_data(found) | {"metric": str(found.metric)}, [f"{policies_sentence(found)}."]
