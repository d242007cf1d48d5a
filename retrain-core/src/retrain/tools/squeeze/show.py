"""The variance table as text."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.text.terminal_text import printable
from retrain.tools.squeeze.analysis import RankRow, SqueezeAnalysis
from retrain.tools.squeeze.compress import CompressedAdapter

FRAME = "=" * 60
COLUMNS = ("Rank", "Mean Var%", "Min Var%", "Max Var%", "Energy Var%")
MARKER = "<--"
NO_PROMISE = "A spectrum does not measure quality: `retrain squeeze ... --eval` measures the smaller adapter."


def analysis_lines(analysis: SqueezeAnalysis, *, framed: bool = False) -> list[str]:
    """Header, table and recommendation; `framed` puts a line of `=` above and below, as campaigns do."""
    lines = [
        f"LoRA-Squeeze: {printable(str(analysis.adapter))}",
        f"Threshold: {_share(analysis.min_variance_retention)} variance retained",
        f"Source rank: {analysis.source_rank}",
        f"Layers analyzed: {len(analysis.layers)}",
        *_idle(analysis),
        "",
        *_table(analysis),
        *_recommendation(analysis),
    ]
    return [FRAME, *lines, FRAME] if framed else lines


def compressed_lines(compressed: CompressedAdapter) -> list[str]:
    """Path and size of the compressed adapter."""
    before, after = compressed.source_bytes / 2**20, compressed.num_bytes / 2**20
    alpha = f"alpha {compressed.alpha:g}"
    sizes = f"{before:.1f} -> {after:.1f} MiB"
    return [f"Compressed to rank {compressed.rank} ({alpha}, {sizes}): {printable(str(compressed.path))}"]


def _idle(analysis: SqueezeAnalysis) -> list[str]:
    count = analysis.num_without_update
    return [f"Layers without an update, left out of every mean: {count}"] if count else []


def _table(analysis: SqueezeAnalysis) -> list[str]:
    if not analysis.rows:
        return []
    head = "  ".join(f"{name:>{_width(name)}}" for name in COLUMNS)
    return [head, "-" * len(head), *(_row(row, row.rank == analysis.recommended_rank) for row in analysis.rows), ""]


def _row(row: RankRow, is_recommended: bool) -> str:
    values = (row.mean_variance, row.min_variance, row.max_variance, row.energy_variance)
    cells = [f"{row.rank:>{_width(COLUMNS[0])}}", *_percent(values)]
    return "  ".join([*cells, MARKER]) if is_recommended else "  ".join(cells)


def _percent(values: Sequence[float]) -> list[str]:
    return [f"{100 * value:>{_width(name)}.2f}" for name, value in zip(COLUMNS[1:], values, strict=True)]


def _recommendation(analysis: SqueezeAnalysis) -> list[str]:
    threshold = f">= {_share(analysis.min_variance_retention)} variance retained"
    if analysis.learned_nothing:
        return ["No update learned: B A is zero in every layer, so no rank can be recommended."]
    if analysis.recommended_rank is None:
        return [
            f"Recommended rank: none of the tested ones ({threshold}); source rank {analysis.source_rank} keeps all"
        ]
    row = next(row for row in analysis.rows if row.rank == analysis.recommended_rank)
    lines = [f"Recommended rank: {row.rank} ({threshold})"]
    if row.min_variance < analysis.min_variance_retention:
        lines.append(f"Least variance is kept in {printable(row.worst_module)}: {100 * row.min_variance:.2f}%")
    return [*lines, NO_PROMISE]


def _share(share: float) -> str:
    return f"{100 * share:.6g}%"


def _width(name: str) -> int:
    return max(len(name), 6)
