"""Explains every field that a run writes to `metrics.jsonl`; the manual and the reference page are generated from it.

A plugin describes its own fields in the same way, through the hook `retrain_describe_metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator

from retrain.kernel.declared import MetricSpec
from retrain.observe.metrics.fields import PERCENTILES

REJECTED = "on a rejected step"
UNTRAINED = "on a step without an optimizer step"
NO_TOKENS = "when the step has no such token"
NO_EVAL = "except on lines with an evaluation"
NO_ENTROPY = "when the backend reports no entropies; " + NO_TOKENS
NO_PARTS = "with a single reward or an environment that reports no parts"
NO_EPISODES = "without [environment]"
NO_REFILL = f"{REJECTED}; without [training] refill"
NO_CONTROL = f"{REJECTED}; unless `[training] control` replaces the reward"
NO_OVERLONG = REJECTED + '; without overlong = "{}"'
NO_GREEDY = f"{REJECTED}; unless the advantage compares with one"
NO_TASKS = f"{REJECTED}; without [[data.tasks]]"
NO_SOFT = f"{REJECTED}; without [training] soft_overlong"
IN_TURN = "on a rejected step; when the backend samples and trains in turn"
QUANTILE = "Smallest score that at least {}% of the scored completions do not exceed."
CORRECT = "Share of completions above `[scoring] correct_above`; no verdict and failures count as wrong."

HEAD = (
    ("step", "Number of the step, from 0; -1 is the evaluation before training, less a step of [sft].", "", ""),
    ("algorithm_mode", "[algorithm] algorithm_mode.", "text", ""),
    ("advantage_mode", "Name of the advantage in use.", "text", ""),
    ("transform_mode", "Name of the transform in use.", "text", ""),
    ("uncertainty_kind", "Name of the uncertainty in use.", "text", ""),
    ("condition", "Label of the run's algorithm, advantage+transform.", "text", ""),
    ("rejected", "Reason why the step was not trained, or ended before its last update.", "text", "unless rejected"),
    ("batch_size", "Prompts of this step; with [training] refill of each of its rounds.", "prompts", REJECTED),
    ("group_size", "Completions per prompt.", "completions", REJECTED),
    ("backend_reports_sync_loss", "True if `loss` belongs to the same step.", "flag", REJECTED),
    ("backend_preserves_token_advantages", "True if each token is trained with its own credit.", "flag", REJECTED),
)
TRAINED = (
    ("loss", "Loss of the step's updates, a mean over action tokens; null without one.", "", ""),
    ("reported_loss", "The number that the backend reported as its loss; null without one.", "", REJECTED),
    ("loss_is_placeholder", "True if that number is a placeholder for a loss not known in time.", "flag", REJECTED),
    ("trained_tokens", "Action tokens in the denominator of the loss, credit of zero included.", "tokens", REJECTED),
    ("updates", "Optimizer steps on these tokens, [training] minibatches x epochs; 0 without one.", "steps", REJECTED),
    ("lr", "Learning rate of the step.", "", f"{UNTRAINED}; when the backend does not report it"),
    ("num_datums", "Rows passed to the backend.", "rows", REJECTED),
    ("grad_norm", "L2 norm of the gradient before clipping, mean over the updates.", "", UNTRAINED),
    ("ratio_mean", "Mean over action tokens of p now / p when sampled, first update; 1 on policy.", "", UNTRAINED),
    ("ratio_max", "Largest such ratio.", "", UNTRAINED),
    ("logprob_gap_mean", "Mean |log p now - log p when sampled| over action tokens.", "nats", UNTRAINED),
    ("logprob_gap_p99", "99th percentile of that gap.", "nats", UNTRAINED),
    ("logprob_gap_max", "Largest such gap.", "nats", UNTRAINED),
    ("k3", "Mean of r - 1 - log r, r being the ratio: an estimate >= 0 of the KL divergence.", "nats", UNTRAINED),
    ("ess_frac", "Effective sample size of the ratios over their number, in (0, 1].", "", UNTRAINED),
    ("clip_fraction", "Share of action tokens whose ratio was clipped by the loss, over all updates.", "", UNTRAINED),
    ("clip_fraction_updates", "That share in each update.", "list", f"{UNTRAINED}; on a step of one update"),
    ("staleness_mean", "Updates since the policy that sampled, mean over completions; 0 on policy.", "steps", IN_TURN),
    ("staleness_max", "Most such updates.", "steps", IN_TURN),
)
REWARDS = (
    ("mean_reward", "Mean score over all completions that have one, trained or not.", "", "without any verdict"),
    *((f"reward_p{percent}", QUANTILE.format(percent), "", "without any verdict") for percent in PERCENTILES),
    ("correct_rate", CORRECT, "", REJECTED),
    ("running_correct_rate", "`correct_rate` over all completions of the run so far.", "", REJECTED),
    ("no_verdict_count", "Completions whose verifier had no verdict.", "completions", REJECTED),
    ("failed_score_count", "Completions whose verifier failed.", "completions", REJECTED),
    ("timed_out_score_count", "Scores that failed at their time limit.", "scores", f"{REJECTED}; with [environment]"),
    ("score_mean_time_s", "Mean time of a score that was computed.", "s", f"{REJECTED}; with [environment]"),
    ("score_max_time_s", "Longest time of a score.", "s", f"{REJECTED}; with [environment]"),
    ("reward_{name}_mean", "Mean of one of several rewards, unweighted, where it has a verdict.", "", NO_PARTS),
    ("reward_tie_eligible_groups", "Groups with at least two verdicts.", "groups", REJECTED),
    ("reward_tie_groups", "Of these, groups with two equal scores or more.", "groups", REJECTED),
    ("reward_uniform_groups", "Of these, groups whose scores are all equal.", "groups", REJECTED),
    ("reward_tie_group_rate", "`reward_tie_groups` over the eligible ones.", "", REJECTED),
    ("reward_uniform_group_rate", "`reward_uniform_groups` over the eligible ones.", "", REJECTED),
    ("reward_tie_pair_rate", "Share of pairs within eligible groups whose scores are equal.", "", REJECTED),
    ("reward_unique_fraction_mean", "Different scores over all scores, mean over eligible groups.", "", REJECTED),
    ("useful_groups", "Informative groups: their scores are not all equal.", "groups", REJECTED),
    ("all_right_groups", "Uninformative groups in which all completions are correct.", "groups", REJECTED),
    ("all_wrong_groups", "Uninformative groups in which all completions are wrong.", "groups", REJECTED),
    ("surplus_groups", "Informative groups that were not trained: `batch_size` others were.", "groups", NO_REFILL),
    ("verifier_correct_rate", "Share of a control's completions that the true verifier finds correct.", "", NO_CONTROL),
    ("rounds", "Rounds of prompts that the step drew.", "times", NO_REFILL),
    ("drawn_groups", "Groups of all rounds.", "groups", NO_REFILL),
    ("dropped_tokens", "Tokens sampled for groups that were not trained.", "tokens", NO_REFILL),
    ("overlong_masked_count", "Truncated completions left out of the loss.", "completions", NO_OVERLONG.format("mask")),
    (
        "overlong_dropped_count",
        "Truncated completions whose verdict is void.",
        "completions",
        NO_OVERLONG.format("drop"),
    ),
    ("soft_overlong_mean", "Mean punishment of long completions that have a score.", "", NO_SOFT),
    ("soft_overlong_count", "Completions that got some of it.", "completions", NO_SOFT),
    ("tied_groups", "Uninformative groups whose scores are all equal, strictly between 0 and 1.", "groups", REJECTED),
    ("no_verdict_groups", "Uninformative groups with fewer than two verdicts.", "groups", REJECTED),
)
TOKENS = (
    ("mean_tokens", "Mean length of a completion.", "tokens", REJECTED),
    ("max_tokens_seen", "Longest completion.", "tokens", REJECTED),
    ("sampled_tokens", "All tokens sampled.", "tokens", REJECTED),
    ("greedy_tokens", "Part of them in greedy completions; these are not trained.", "tokens", NO_GREEDY),
    ("greedy_reward_mean", "Mean score of greedy completions, of the first round.", "", NO_GREEDY),
    ("greedy_no_verdict_count", "Greedy completions without a score: their groups get no credit.", "", NO_GREEDY),
    ("max_token_hit_rate", "Share of completions truncated by max_tokens or the context limit.", "", REJECTED),
    ("cut_thought_rate", "Share of thoughts closed at max_thinking_tokens.", "", "without such a limit, in episodes"),
    ("sepa_lambda", "Pooling strength of the step's controller; 0 without one.", "", REJECTED),
)
EPISODES = (
    ("turns_mean", "Mean number of turns of an episode.", "turns", NO_EPISODES),
    ("turn_limit_rate", "Share of episodes that ended at max_turns.", "", NO_EPISODES),
    ("rewritten_history_count", "Contexts that began with a rewritten conversation.", "times", NO_EPISODES),
)
SEVERAL = (
    ("macro_correct_rate", "Mean of the tasks' correct rates; `correct_rate` is of all completions.", "", NO_TASKS),
    ("task_{task}_{field}", "`{field}` of the groups of one task.", "", f"{NO_TASKS}; without a group of it"),
    ("task_{task}_share", "Share of the step's groups that are of this task.", "", NO_TASKS),
    ("tasks_out", "Tasks that `[data] dead_task` has paused or ended.", "text", f"{NO_TASKS}; without such a task"),
)
EVALUATION = (
    ("eval_correct_rate", "Correct rate on the held-out examples; no verdict counts as wrong.", "", NO_EVAL),
    ("eval_ci_low", "Lower end of its exact binomial 95 % interval, for another set of such examples.", "", NO_EVAL),
    ("eval_ci_high", "Upper end of that interval.", "", NO_EVAL),
    ("eval_mean_reward", "Mean score over the held-out completions that have one.", "", NO_EVAL),
    *((f"eval_reward_p{n}", f"{QUANTILE.format(n)[:-1]}, held out.", "", NO_EVAL) for n in PERCENTILES),
    ("eval_reward_{name}_mean", "`reward_{name}_mean` on the held-out completions.", "", f"{NO_EVAL}; {NO_PARTS}"),
    ("eval_examples", "Held-out examples.", "examples", NO_EVAL),
    (
        "eval_weighted_{field}",
        "Mean of `eval_{task}_{field}` by weights; `eval_{field}`: mean over tasks.",
        "",
        NO_TASKS,
    ),
    ("eval_samples", "Completions per held-out example.", "completions", NO_EVAL),
    ("eval_pass_at_{k}", "Unbiased pass@k, k = 1, 2, 4, ... up to [eval] samples.", "", NO_EVAL),
    ("eval_time_s", "Time of the evaluation.", "s", NO_EVAL),
)
TIMES = (
    ("step_time_s", "Time of the step without evaluation and checkpoint.", "s", ""),
    ("sample_time_s", "Part of it spent sampling, while scoring runs alongside; see max_staleness.", "s", ""),
    ("score_time_s", "Part of it spent waiting for scores after sampling; see max_staleness.", "s", ""),
    ("train_time_s", "Part of it spent in the optimizer step.", "s", ""),
    ("overlap_time_s", "Part of it in which sampling (for coming steps) and training overlapped.", "s", IN_TURN),
    ("sampler_idle_time_s", "Part of it without sampling.", "s", IN_TURN),
    ("trainer_idle_time_s", "Part of it without training.", "s", IN_TURN),
)
HEALTH = (("health", "States of the health monitors' findings.", "list", "when nothing is wrong"),)
PARTS = (("exec", "execution tokens"), ("plan", "planning tokens"))
STATISTICS = (("mean", "Mean"), ("var", "Variance"))


def described() -> list[MetricSpec]:
    rows = [*HEAD, *TRAINED, *REWARDS, *TOKENS, *_uncertainties(), *EPISODES, *SEVERAL, *EVALUATION, *TIMES, *HEALTH]
    return [MetricSpec(name=name, meaning=meaning, unit=unit, absent=absent) for name, meaning, unit, absent in rows]


def _uncertainties() -> Iterator[tuple[str, str, str, str]]:
    """Mean and variance over execution and planning tokens; without a detector all are execution tokens."""
    for part, tokens in PARTS:
        for statistic, word in STATISTICS:
            surprisal, entropy = f"{part}_surprisal_{statistic}", f"{part}_entropy_{statistic}"
            unit = "nats" if statistic == "mean" else "nats²"
            yield surprisal, f"{word} of -log p of the sampled {tokens}.", unit, NO_TOKENS
            yield entropy, f"{word} of the entropy of the sampling distribution at {tokens}.", unit, NO_ENTROPY
            pooled = f"{word} over {tokens} of the configured uncertainty after pooling"
            yield f"post_{surprisal}", f"{pooled}, when that is surprisal.", unit, f"with another kind; {NO_TOKENS}"
            yield (
                f"post_{part}_uncertainty_{statistic}",
                f"{pooled}, for other kinds.",
                "",
                f"with surprisal; {NO_TOKENS}",
            )
