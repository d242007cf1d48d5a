"""Credit as one self-contained HTML page without scripts or external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from retrain.kernel.types import Floats
from retrain.rooms.insight.heat import Scale, ShadedCompletion, ShadedStep

STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --soft: #6b6b6b; --line: #d9d9d9;
  --good: 22, 140, 60; --bad: 205, 50, 45; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --paper: #161616; --soft: #9a9a9a; --line: #3a3a3a;
  --good: 40, 170, 85; --bad: 225, 75, 70; } }
body { margin: 2rem auto; max-width: 96rem; padding: 0 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin-bottom: .2rem; } .soft { color: var(--soft); }
article { border-top: 1px solid var(--line); padding: 1rem 0; }
article h2 { font-size: 1rem; margin: 0 0 .3rem; } .prompt { white-space: pre-wrap; overflow-wrap: anywhere; }
.flows { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1.2rem; }
.flows h3 { font-size: .85rem; margin: .4rem 0; font-weight: 600; }
.text { font: 14px/1.9 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.t { border-radius: 3px; padding: 2px 0; } .p { text-decoration: underline; text-decoration-thickness: 2px;
  text-underline-offset: 4px; }
.t:hover, .t:focus { outline: 2px solid var(--ink); }
.scale { display: flex; align-items: center; gap: .6rem; margin: .8rem 0 1.2rem; }
.bar { width: 16rem; height: .8rem; border-radius: 4px; background: linear-gradient(to right,
  rgba(var(--bad), .75), rgba(var(--bad), 0) 50%, rgba(var(--good), 0) 50%, rgba(var(--good), .75)); }
"""


def render(step: ShadedStep) -> str:
    """The page as text. Completions, prompts and references are untrusted and escaped."""
    scale = step.scale()
    title = f"Credit of {step.run}, step {step.step}"
    articles = "\n".join(_article(completion, step.labels, scale) for completion in step.completions)
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
times the token's share in it. Hover over a token for its numbers.</p>
<div class="scale"><span>less likely</span><div class="bar"></div><span>more likely</span></div>
{articles}
</body>
</html>
"""


def _article(completion: ShadedCompletion, labels: Sequence[str], scale: Scale) -> str:
    columns = "\n".join(
        f'<section><h3>{_text(label)} <span class="soft">sum {credit_T.sum():+.4f}</span></h3>'
        f'<div class="text">{_tokens(completion, credit_T, scale)}</div></section>'
        for label, credit_T in zip(labels, completion.credits, strict=True)
    )
    state = "" if completion.trained else " · not trained"
    head = f"group {completion.group}, completion {completion.index} · reward {completion.reward:g}{state}"
    return f"""<article>
<h2>{_text(head)}</h2>
<p class="prompt soft">{_text(completion.prompt)}<br>reference: {_text(completion.reference)}</p>
<div class="flows">{columns}</div>
</article>"""


def _tokens(completion: ShadedCompletion, credit_T: Floats, scale: Scale) -> str:
    spans = []
    depths_T = scale.depths(credit_T).tolist()
    for position, (token_text, credit, depth) in enumerate(
        zip(completion.token_texts, credit_T, depths_T, strict=True)
    ):
        colour = f"rgba(var(--{'good' if depth > 0 else 'bad'}),{0.75 * abs(depth):.3f})" if depth else "transparent"
        names = "t p" if completion.planning_T[position] else "t"
        facts = [f"token {position}", f"credit {credit:+.6f}", f"log p {completion.logprobs_T[position]:.4f}"]
        if completion.entropies_T is not None:
            facts.append(f"entropy {completion.entropies_T[position]:.4f}")
        if completion.planning_T[position]:
            facts.append("planning")
        title = _text(" | ".join(facts))
        spans.append(f'<span class="{names}" style="background:{colour}" title="{title}">{_text(token_text)}</span>')
    return "".join(spans)


def _text(text: str) -> str:
    """Untrusted text as HTML, with control characters made visible."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return escape(shown, quote=True)
