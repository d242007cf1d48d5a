"""The spectrum of an adapter, as `retrain squeeze` left it beside the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.rooms.insight.report.gather import Material
from retrain.rooms.insight.report.markup import Links, note, plot, section, table
from retrain.rooms.insight.report.text import plain, text
from retrain.rooms.session.records.reading import number, read_object

FILE = "spectrum.json"
MOST_BYTES = 256 << 20
MOST_LAYERS = 2000
COLUMNS = (
    ("mean of layers", "mean_variance"),
    ("weighted by energy", "energy_variance"),
    ("least", "min_variance"),
    ("largest", "max_variance"),
)


def spectrum_section(material: Material, links: Links, first_number: int) -> tuple[str, list[dict[str, Any]]]:
    """Variance kept by rank, and the rank that each layer needs; nothing when no adapter was analysed."""
    content, file = _found(material)
    if content is None:
        return "", []
    rows = [row for row in _list(content.get("ranks")) if number(row.get("rank")) is not None]
    if not rows:
        return section("squeeze", "Adapter rank", note("The adapter learned no update.")), []
    cells = [(_rank(row), *(_share(row.get(field)) for _, field in COLUMNS)) for row in rows]
    numbers = table("Variance kept at each rank", ("rank", *(name for name, _ in COLUMNS)), cells)
    layers = _list(content.get("layers"))[:MOST_LAYERS]
    figures = [_kept(rows, layers, content)]
    parts = [plot(first_number, "Variance kept at each rank", "thin lines: single layers", numbers, kind="tall")]
    needs = [(plain(each.get("module", ""), 200), number(each.get("rank_needed"))) for each in layers]
    known = [(name, rank) for name, rank in needs if rank is not None]
    if known:
        figures.append({"kind": "needs", "labels": [name for name, _ in known], "values": [rank for _, rank in known]})
        parts.append(
            plot(first_number + 1, "Rank that each layer needs", "from the first to the last", "", kind="tall")
        )
    source = f"<p class=note>From {links.to(file, file.name)}.</p>" if file else ""
    body = f'<div class="plots">{"".join(parts)}</div>'
    return section("squeeze", "Adapter rank", f'<p class="lede">{text(_sentence(content))}</p>', body, source), figures


def _found(material: Material) -> tuple[Mapping[str, Any] | None, Path | None]:
    """The spectrum with its layers, or what the manifest has of it, or nothing."""
    manifest = material.manifest.get("squeeze")
    places = [material.source.campaign / "squeeze" / FILE] if material.source.campaign else []
    if isinstance(manifest, dict) and isinstance(manifest.get("report"), str):
        places.append(Path(manifest["report"]) / FILE)
    if not material.source.campaign and len(material.runs) == 1 and (folder := material.runs[0].candidate.folder):
        places += [folder / "squeeze" / FILE, folder.parent / "squeeze" / FILE]
    for file in places:
        try:
            if file.is_file() and file.stat().st_size <= MOST_BYTES:
                content = read_object(file)
                if _is_ours(content, material):
                    return content, file
        except (ConfigError, OSError):
            continue
    return (manifest if isinstance(manifest, dict) and "ranks" in manifest else None), None


def _is_ours(content: Mapping[str, Any], material: Material) -> bool:
    """A spectrum beside a single run may be that of another one."""
    folder = material.runs[0].candidate.folder if len(material.runs) == 1 else None
    if material.source.campaign or folder is None:
        return True
    adapter = content.get("adapter")
    return isinstance(adapter, str) and Path(adapter).resolve().is_relative_to(folder.resolve())


def _sentence(content: Mapping[str, Any]) -> str:
    rank, source = number(content.get("recommended_rank")), number(content.get("source_rank"))
    kept = number(content.get("min_variance_retention"))
    share = f"{100 * kept:g} % of the variance" if kept is not None else "enough variance"
    if rank is None:
        return f"No tested rank below {source:g} keeps {share}." if source else f"No tested rank keeps {share}."
    of = f" of {source:g}" if source else ""
    return f"Rank {rank:g}{of} keeps {share}, averaged over layers. A spectrum is no measure of quality: evaluate."


def _kept(rows: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]], content: Mapping[str, Any]) -> Any:
    ranks = [int(number(row.get("rank")) or 0) for row in rows]
    lines = [
        {"name": name, "y": [number(row.get(field)) for row in rows]}
        for name, field in COLUMNS[:3]
        if any(number(row.get(field)) is not None for row in rows)
    ]
    singles = [[_at(each.get("variance"), rank) for rank in ranks] for each in layers]
    return {
        "kind": "kept",
        "x": ranks,
        "lines": lines,
        "layers": [y for y in singles if any(value is not None for value in y)],
        "recommended": number(content.get("recommended_rank")),
        "threshold": number(content.get("min_variance_retention")),
    }


def _at(variance: object, rank: int) -> float | None:
    if not isinstance(variance, list) or not variance:
        return None
    value = number(variance[min(rank, len(variance)) - 1])
    return None if value is None else round(value, 4)


def _rank(row: Mapping[str, Any]) -> str:
    mark = " (recommended)" if row.get("recommended") is True else ""
    return f"{number(row.get('rank')):g}{mark}"


def _share(value: object) -> str:
    share = number(value)
    return "—" if share is None else f"{100 * share:.2f}%"


def _list(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
