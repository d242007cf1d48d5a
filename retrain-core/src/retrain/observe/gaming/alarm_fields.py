"""Describes the `gaming_*` fields of a step's line."""

from __future__ import annotations

NO_SHADOW = "on a rejected step; without [reward] shadow; when no completion has both scores"
NO_ALARM = "unless the alarm is on"
UNPAID = "when the reward calls no completion correct"
EARLY = "on a rejected step; in the first 5 steps"
TREND = "on a rejected step; in the first 12 steps"
LN = "ln of {} of the last three steps over what a line through the logarithms of the ten before leads to."

FIELDS = (  # name, meaning, unit, when it is absent
    (
        "gaming_unconfirmed",
        "Of the completions that the reward calls correct, the share that the shadow does not.",
        "",
        f"{NO_SHADOW}; {UNPAID}",
    ),
    (
        "gaming_evidence",
        "E-value against 'the gap of reward and shadow is as before'; the alarm begins at 20.",
        "",
        NO_SHADOW,
    ),
    ("gaming_since", "First step after the estimated change.", "", NO_ALARM),
    ("gaming_example", "The most credited unconfirmed completion of the step, shortened.", "text", NO_ALARM),
    (
        "gaming_tokens",
        "Tokens that such completions' credit is on, and that of confirmed ones is not.",
        "text",
        NO_ALARM,
    ),
    ("gaming_length_shift", LN.format("the mean length"), "", TREND),
    ("gaming_entropy_shift", LN.format("the mean entropy"), "", TREND),
    (
        "gaming_ngram_share",
        "Largest share of a 4-gram among rewarded completions, less that among the others or the first steps' own.",
        "",
        f"{EARLY}; {UNPAID}",
    ),
    ("gaming_answer_shift", "How much earlier in their text rewarded answers begin than at the start.", "", EARLY),
    ("gaming_prompt_answers", "Share of rewarded answers that repeat the prompt, less that at the start.", "", EARLY),
    (
        "gaming_format_credit",
        "Share of positive credit on the start's 8 commonest tokens, less that at the start.",
        "",
        f"{EARLY}; without positive credit",
    ),
    ("gaming_suspected", "Which of these were beyond their thresholds for three steps.", "text", "unless one was"),
    ("gaming_ngram", "That 4-gram.", "text", "unless ngram_share is suspected"),
)
