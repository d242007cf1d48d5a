"""Explains the fields that `[kl]`, `[sft]`, `[teacher]` and `[distil]` add to `metrics.jsonl`."""

from __future__ import annotations

from retrain.kernel.declared import MetricSpec

UNMEASURED = "with log = false; where the backend has no reference; without a verdict"
NO_SFT = "on all lines but [sft]'s"
NO_TEACHER = "without [teacher] or [distil]; on a rejected step; if no completion has a teacher"
NO_DISTIL = "without [distil]; on a rejected step"
METRICS = tuple(
    MetricSpec(name=name, meaning=meaning, unit=unit, absent=absent)
    for name, meaning, unit, absent in (
        ("kl_mean", "KL of the sampling policy to its reference: mean of k3 over tokens, >= 0.", "nats", UNMEASURED),
        ("kl_k1_mean", "The same KL as the mean of log p - log p_ref: of either sign.", "nats", UNMEASURED),
        ("kl_coef", "Weight of the KL in this step.", "", "with [kl] coef = 0"),
        ("kl_penalty_mean", "Mean amount that the KL takes off a judged reward.", "", 'unless [kl] where = "reward"'),
        ("phase", "`sft`: a supervised step of [sft]. The fields below belong only to such lines.", "text", NO_SFT),
        ("sft_loss", "Minus the mean log-probability of the answers' tokens; null if rejected.", "nats", NO_SFT),
        ("sft_tokens", "Tokens of the answers, each with its end-of-turn token.", "tokens", NO_SFT),
        ("sft_grad_norm", "L2 norm of the gradient before clipping, where the backend reports it.", "", NO_SFT),
        ("sft_lr", "Learning rate, where the backend reports it.", "", NO_SFT),
        ("sft_left_out", "Examples whose answer is missing or too long: not trained on.", "examples", NO_SFT),
        ("sft_time_s", "Time of the supervised step.", "s", NO_SFT),
        ("teacher_kl_mean", "KL of policy to teacher: mean of k3 over action tokens, >= 0.", "nats", NO_TEACHER),
        ("teacher_kl_k1_mean", "The same KL as the mean of log p - log p_teacher.", "nats", NO_TEACHER),
        ("teacher_rate", "Share of completions whose teacher sees more.", "", NO_DISTIL),
        ("teacher_time_s", "Time of the teacher's log-probabilities, part of step_time_s.", "s", NO_TEACHER),
    )
)
