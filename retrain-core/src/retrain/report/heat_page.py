"""Credit as one self-contained HTML page without scripts or external resources.

Filters and jumps are plain form controls and fragment links, so they work from the keyboard, on a phone, and under a
policy that allows no script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from retrain.report.heat import Scale, ShadedCompletion, ShadedStep, group_title

LARGEST = 10  # tokens that the page leads to
Place = tuple[int, int, int, int]  # group, index, flow, token
Places = Mapping[Place, int]  # the rank of those to jump to, from 1

# Text on the deepest shade of either colour keeps a contrast of 4.5 to 1 and more; on any paler one it is higher.
STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --soft: #5f5f5f; --line: #d9d9d9; --link: #0b57b8;
  --good: 96, 205, 130; --bad: 250, 140, 125; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #161616; --soft: #a6a6a6; --line: #3a3a3a;
  --link: #8ab8f5; --good: 24, 104, 56; --bad: 158, 44, 40; } }
* { box-sizing: border-box; }
body { margin: 1rem auto; max-width: 96rem; padding: 0 clamp(.8rem, 3vw, 1.5rem); background: var(--paper);
  color: var(--ink); font: 15px/1.55 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.35rem; margin-bottom: .2rem; } .soft { color: var(--soft); } a { color: var(--link); }
nav { position: sticky; top: 0; z-index: 1; background: var(--paper); border-bottom: 1px solid var(--line);
  padding: .4rem 0; display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; }
nav fieldset, nav div { border: 0; padding: 0; margin: 0; display: flex; flex-wrap: wrap; gap: .2rem .8rem; }
nav a, nav label { padding: .1rem .2rem; white-space: nowrap; }
.group { border-top: 2px solid var(--line); padding: 1rem 0; }
.group h2 { font-size: 1.05rem; margin: 0 0 .3rem; } .prompt { white-space: pre-wrap; margin: .3rem 0; }
article { border-top: 1px solid var(--line); padding: .6rem 0; }
article h3 { font-size: .95rem; margin: 0 0 .3rem; }
.flows { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: .4rem 1.2rem; }
.flows > section { min-width: 0; } .flows h4 { font-size: .85rem; margin: .3rem 0; font-weight: 600; }
.text { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; }
.t { border-radius: 3px; padding: 2px 0; scroll-margin-top: 8rem; } .p { text-decoration: underline;
  text-decoration-thickness: 2px; text-underline-offset: 4px; }
.t:hover, .t:target { outline: 2px solid var(--ink); }
.t:target::after { content: " [" attr(title) "] "; background: var(--paper); font-size: 12px; }
.scale { display: flex; align-items: center; gap: .6rem; margin: .8rem 0; }
.bar { flex: 0 1 10rem; height: .8rem; border-radius: 4px; background: linear-gradient(to right,
  rgb(var(--bad)), rgba(var(--bad), 0) 50%, rgba(var(--good), 0) 50%, rgb(var(--good))); }
body:has(#right:checked) :is(article.wrong, .group:not(:has(article.right))),
body:has(#wrong:checked) :is(article.right, .group:not(:has(article.wrong))),
body:has(#planning:checked) :is(article, .group):not(:has(.p)) { display: none; }
body:has(#planning:checked) .t:not(.p) { background: none !important; }
:is(article, .group):has(:target) { display: block !important; }
"""


def render(step: ShadedStep) -> str:
    """The page as text. Completions, prompts and references are untrusted and escaped."""
    scale, places = step.scale(), largest_credits(step)
    title = f"Credit of {step.run}, step {step.step}"
    groups = "\n".join(_group(group, step.labels, scale, places) for group in step.groups())
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>
<p class="soft">{len(step.completions)} completions; lambda = {step.sepa_lambda:g};
{_text(" beside ".join(step.labels))}.
Green tokens are made more likely, red ones less; underlined tokens plan. Depth of colour is the completion's credit
times the token's share in it. Hover over a token for its numbers, or jump to it.</p>
<div class="scale"><span>less likely</span><div class="bar"></div><span>more likely</span></div>
{_controls(step, places)}
{groups}
</body>
</html>
"""


def largest_credits(step: ShadedStep) -> Places:
    """The completions' tokens with the most credit or blame under any flow, one of each, ranked from 1."""
    found: list[tuple[float, Place]] = []
    for completion in step.completions:
        most = [
            (float(np.abs(credit_T).max()), flow) for flow, credit_T in enumerate(completion.credits) if credit_T.size
        ]
        size, flow = max(most, default=(0.0, 0), key=lambda pair: pair[0])
        if size > 0.0:
            position = int(np.abs(completion.credits[flow]).argmax())
            found.append((-size, (completion.group, completion.index, flow, position)))
    return {place: rank for rank, (_, place) in enumerate(sorted(found)[:LARGEST], start=1)}


def _controls(step: ShadedStep, places: Places) -> str:
    right = sum(completion.is_right for completion in step.completions)
    planning = sum(bool(completion.planning_T.any()) for completion in step.completions)
    choices = (("all", "all"), ("right", f"right ({right})"), ("wrong", f"wrong ({len(step.completions) - right})"))
    radios = "".join(
        f'<label><input type="radio" name="shown" id="{name}"{" checked" if name == "all" else ""}> {label}</label>'
        for name, label in choices
    )
    links = " ".join(f'<a href="#credit-{rank}">{rank}</a>' for rank in places.values())
    links = links.replace("<a ", '<a accesskey="l" ', 1)  # Alt+L leads to the largest of all
    jumps = f"<div><span>largest credit:</span> {links}</div>" if links else ""
    return f"""<nav aria-label="Filters and jumps"><fieldset>{radios}</fieldset>
<label><input type="checkbox" id="planning"> planning tokens alone ({planning})</label>
{jumps}</nav>"""


def _group(group: Sequence[ShadedCompletion], labels: Sequence[str], scale: Scale, places: Places) -> str:
    first, right = group[0], sum(completion.is_right for completion in group)
    head = f"{group_title(first)} | {right} of {len(group)} right"
    articles = "\n".join(_article(completion, labels, scale, places) for completion in group)
    return f"""<section class="group">
<h2>{_text(head)}</h2>
<p class="prompt soft">{_text(first.prompt)}<br>reference: {_text(first.reference)}</p>
{articles}
</section>"""


def _article(completion: ShadedCompletion, labels: Sequence[str], scale: Scale, places: Places) -> str:
    columns = "\n".join(
        f'<section><h4>{_text(label)} <span class="soft">sum {credit_T.sum():+.4f}</span></h4>'
        f'<div class="text">{_tokens(completion, flow, scale, places)}</div></section>'
        for flow, (label, credit_T) in enumerate(zip(labels, completion.credits, strict=True))
    )
    head = f"completion {completion.index} | reward {completion.reward:g}"
    return f"""<article class="{"right" if completion.is_right else "wrong"}">
<h3>{_text(head)}</h3>
<div class="flows">{columns}</div>
</article>"""


def _tokens(completion: ShadedCompletion, flow: int, scale: Scale, places: Places) -> str:
    spans, credit_T = [], completion.credits[flow]
    depths_T = scale.depths(credit_T).tolist()
    for position, (token_text, credit, depth) in enumerate(
        zip(completion.token_texts, credit_T, depths_T, strict=True)
    ):
        colour = f"rgba(var(--{'good' if depth > 0 else 'bad'}),{abs(depth):.3f})" if depth else "transparent"
        names = "t p" if completion.planning_T[position] else "t"
        facts = [f"token {position}", f"credit {credit:+.6f}", f"log p {completion.logprobs_T[position]:.4f}"]
        if completion.entropies_T is not None:
            facts.append(f"entropy {completion.entropies_T[position]:.4f}")
        if completion.planning_T[position]:
            facts.append("planning")
        rank = places.get((completion.group, completion.index, flow, position))
        place = f' id="credit-{rank}"' if rank else ""
        title = _text(" | ".join(facts))
        spans.append(
            f'<span class="{names}"{place} style="background:{colour}" title="{title}">{_text(token_text)}</span>'
        )
    return "".join(spans)


def _text(text: str) -> str:
    """Untrusted text as HTML, with control characters made visible."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return escape(shown, quote=True)
