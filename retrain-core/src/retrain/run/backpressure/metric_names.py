"""Explains the `bp_*` fields of the pacer `usl`."""

from __future__ import annotations

from retrain.kernel.declared import MetricSpec

OFF = "without [backpressure] enabled"
NO_FIT = "before the first fit"
UNBOUNDED = "while throughput has not been seen to fall"
METRICS = tuple(
    MetricSpec(name=name, meaning=meaning, unit=unit, absent=absent)
    for name, meaning, unit, absent in (
        ("bp_warmup", "The sweep of batch sizes is under way.", "flag", OFF),
        ("bp_action", "hold, throttle or increase: how the batch size changes.", "text", OFF),
        ("bp_regime", "Limit of the step: warmup, optimal, retrograde, compute_bound or memory_bound.", "text", OFF),
        ("bp_throughput", "Moving average of generated tokens per second.", "tokens/s", f"{OFF}, before a measurement"),
        ("bp_sigma", "Contention of the fitted universal scalability law.", "", NO_FIT),
        ("bp_kappa", "Coherency cost of that law.", "", NO_FIT),
        ("bp_p_star", "Concurrent completions of highest throughput.", "completions", f"{NO_FIT}; {UNBOUNDED}"),
        ("bp_utilization", "Completions of the step over `bp_p_star`.", "", f"{NO_FIT}; {UNBOUNDED}"),
        ("bp_ceiling", "Largest batch size since memory ran out.", "prompts", "unless memory ran out"),
    )
)
