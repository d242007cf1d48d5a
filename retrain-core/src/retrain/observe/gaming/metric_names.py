"""Describes the fields of a shadow and of the watch for gaming."""

from __future__ import annotations

NO_ALARM_YET = "on a rejected step; without [reward] shadow; when no completion has both scores"
NO_ALARM = "unless the alarm is on"
UNPAID = "when the reward calls no completion correct"
EARLY = "on a rejected step; in the first 5 steps"
TREND = "on a rejected step; in the first 12 steps"
LN = "ln of {} of the last three steps over what a line through the logarithms of the ten before leads to."

BOTH = "over the completions that reward and shadow both gave a score"
NO_SHADOW = "without [reward] shadow"
UNPAIRED = f"{NO_SHADOW}; when no completion has both scores"
NOT_EVALUATED = f"except on lines with an evaluation; {UNPAIRED}"
SHADOW = (  # name, meaning, unit, when it is absent
    ("shadow_mean_reward", f"Mean score of the shadow {BOTH}, of the first round.", "", UNPAIRED),
    ("shadow_correct_rate", f"Share that the shadow scores above `[scoring] correct_above`, {BOTH}.", "", UNPAIRED),
    ("shadow_gap", f"Mean of the reward's score minus the shadow's {BOTH}.", "", UNPAIRED),
    ("shadow_judged_count", "Completions of the first round with both scores.", "completions", NO_SHADOW),
    ("shadow_no_verdict_count", "Completions for which the shadow gave no verdict.", "completions", NO_SHADOW),
    ("shadow_failed_count", "Completions on which the shadow failed.", "completions", NO_SHADOW),
    ("shadow_{field}", "What `{field}`, such as `judge_calls`, is to an asynchronous reward.", "", NO_SHADOW),
    ("eval_shadow_rate", "`shadow_correct_rate` on the held-out examples.", "", NOT_EVALUATED),
    ("eval_shadow_reward", "`shadow_mean_reward` on the held-out examples.", "", NOT_EVALUATED),
    ("eval_shadow_gap", "`shadow_gap` on the held-out examples.", "", NOT_EVALUATED),
)
FIELDS = (
    *SHADOW,
    (
        "gaming_unconfirmed",
        "Of the completions that the reward calls correct, the share that the shadow does not.",
        "",
        f"{NO_ALARM_YET}; {UNPAID}",
    ),
    (
        "gaming_evidence",
        "E-value against 'the gap of reward and shadow is as before'; the alarm begins at 20.",
        "",
        NO_ALARM_YET,
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
