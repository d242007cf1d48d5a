"""What a page is made of: long or damaged files, curves on a grid, and untrusted text in every part."""

from __future__ import annotations

import base64
import io
import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.types import Floats
from retrain.report import parts
from retrain.report.charts import MISSING, Grid, band_of, grid_for, packed
from retrain.report.completions import (
    HEAD_CHARS,
    TAIL_CHARS,
    excerpt,
    first_offset,
    last_step,
    lines_of,
    read_samples,
    shown_steps,
)
from retrain.report.gather import RunLines, read_lines
from retrain.report.shell import sections_page
from retrain.verdicts.stats.paired import t_interval

FIELDS = ("loss", "correct_rate")


def line(step: int, **fields: Any) -> str:
    return json.dumps({"step": step} | fields)


def read(folder: Path, *lines: str, stride: int = 1, end: str = "\n") -> RunLines:
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(lines) + end, encoding="utf-8")
    return read_lines(file, FIELDS, stride=stride)


def test_every_line_and_only_numbers(tmp_path: Path) -> None:
    rows = [line(-1, eval_pass_at_2=0.5, eval_correct_rate=0.4), line(0, loss=None, correct_rate=0.5)]
    rows += [line(1, loss=0.25, correct_rate=True), line(2, loss="a", correct_rate=1e300), '{"step": 3, "loss": NaN}']
    found = read(tmp_path, *rows)
    assert found.steps_R.tolist() == [-1, 0, 1, 2, 3]
    np.testing.assert_array_equal(found.column("loss"), [np.nan, np.nan, 0.25, np.nan, np.nan])
    np.testing.assert_array_equal(found.column("correct_rate"), [np.nan, 0.5, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(found.column("eval_pass_at_2"), [0.5, np.nan, np.nan, np.nan, np.nan])
    assert np.isnan(found.column("never")).all()
    assert (found.mean("loss"), found.mean("never"), found.problem) == (0.25, None, "")


def test_of_long_files_one_step_in_stride_and_all_that_is_rare(tmp_path: Path) -> None:
    rows = [line(step, loss=float(step)) for step in range(100)]
    rows[33] = line(33, loss=33.0, eval_correct_rate=0.5)
    rows[57] = line(57, loss=57.0, health=["truncation"])
    found = read(tmp_path, *rows, stride=10)
    assert found.steps_R.tolist() == sorted([*range(0, 100, 10), 33, 57, 99])
    assert found.column("loss").tolist() == found.steps_R.tolist()


def test_health_episodes_from_their_first_step_to_their_last(tmp_path: Path) -> None:
    health = {3: ["a"], 4: ["a", "b"], 5: ["b"], 8: ["a"], 19: ["c"]}
    rows = [line(step, **({"health": health[step]} if step in health else {})) for step in range(20)]
    for stride in (1, 7):
        found = read(tmp_path, *rows, stride=stride).episodes
        spans = [(each.state, each.first_step, each.last_step) for each in found]
        assert sorted(spans) == [("a", 3, 4), ("a", 8, 8), ("b", 4, 5), ("c", 19, 19)]
    hostile = read(tmp_path, line(0, health=["x" * 5000, 7]), line(1, health="no list")).episodes
    assert sorted((each.state, each.first_step, each.last_step) for each in hostile) == [("7", 0, 0), ("x" * 60, 0, 0)]


def test_a_line_cut_by_a_kill_is_left_out_and_damage_is_named(tmp_path: Path) -> None:
    good = [line(step, loss=1.0) for step in range(4)]
    cut = read(tmp_path, *good, '{"step": 4, "lo', end="")
    assert (cut.steps_R.size, cut.problem) == (4, "")
    damaged = read(tmp_path, *good[:2], "garbage", *good[2:])
    assert damaged.steps_R.tolist() == [0, 1]
    assert "metrics.jsonl:3" in damaged.problem


@pytest.mark.parametrize("bad", ['{"loss": 1}', "[1]", '{"step": "1"}', '{"step": 0}', "\x00" * 40, '{"step": 1e400}'])
def test_whatever_is_no_step_ends_the_reading(tmp_path: Path, bad: str) -> None:
    found = read(tmp_path, line(0, loss=1.0), bad, line(5, loss=2.0))
    assert found.steps_R.tolist() == [0]
    assert found.problem.startswith("metrics.jsonl:2")

    (tmp_path / "metrics.jsonl").unlink()
    absent = read_lines(tmp_path / "metrics.jsonl", FIELDS, stride=1)
    assert (absent.steps_R.size, "metrics.jsonl" in absent.problem) == (0, True)


MOST = 1 << 40
BLOCK_BYTES = 1 << 16


def record(step: int, index: int = 0, **fields: Any) -> dict[str, Any]:
    place = {"step": step, "group": index // 4, "index": index, "completion": f"c{step}-{index}"}
    return place | {"reward": 0.0, "num_tokens": 10, "trained": True} | fields


def write(folder: Path, *records: dict[str, Any] | str) -> Path:
    file = folder / "generations.jsonl"
    lines = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in records]
    file.write_text("".join(f"{each}\n" for each in lines), encoding="utf-8")
    return file


class Counting(io.BytesIO):
    """A file that counts what is read of it."""

    num_bytes = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        found = super().readline(size)
        self.num_bytes += len(found)
        return found


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3 * BLOCK_BYTES // 2)), max_size=12), st.integers(0, 31))
def test_every_line_of_a_step_is_found_and_no_other(shape: list[tuple[int, int]], wanted: int) -> None:
    lines = [
        f'{{"step": {step}, "i": {i}, "x": "{"x" * size}"}}\n'.encode()
        for i, (step, size) in enumerate(sorted(shape, key=lambda each: each[0]))
    ]
    stream = io.BytesIO(b"".join(lines))
    expected = [line for line in lines if line.startswith(b'{"step": %d,' % wanted)]
    found = list(lines_of(stream, wanted, most_bytes=MOST))
    assert [line for _, line in found] == expected
    assert all(stream.getvalue()[offset:].startswith(line) for offset, line in found)


def test_a_large_file_is_read_at_a_few_places() -> None:
    stream = Counting(b"".join(b'{"step": %d, "x": "%s"}\n' % (step, b"y" * 1000) for step in range(20_000)))
    offset = first_offset(stream, 12_345)
    assert stream.getvalue()[offset:].startswith(b'{"step": 12345,')
    assert stream.num_bytes < 30 * BLOCK_BYTES < len(stream.getvalue()) / 10


def test_a_line_cut_by_a_kill_and_a_huge_one_do_no_harm(tmp_path: Path) -> None:
    file = write(tmp_path, record(0), record(1, completion="x" * (17 << 20)), record(1, 1, completion="small"))
    with file.open("ab") as stream:
        stream.write(b'{"step": 1, "completion": "cut')
    with file.open("rb") as stream:
        sizes = [len(each) for _, each in lines_of(stream, 1, most_bytes=MOST)]
        assert (sizes[0], len(sizes)) == (0, 2)
    found = read_samples(file, 1, of_each=1, key="k")
    assert found is not None
    assert (found.num_completions, found.num_passed_over) == (1, 1)


def test_best_worst_and_random_are_different_ones(tmp_path: Path) -> None:
    rewards = [0.0, 0.25, 1.0, 2.0, -1.0, 0.5, 0.75, None]
    file = write(tmp_path, *(record(3, index, reward=reward) for index, reward in enumerate(rewards)))
    found = read_samples(file, 3, of_each=2, key="a")
    assert found is not None
    picked = {(each.kind, each.reward) for each in found.samples}
    assert {("best", 2.0), ("best", 1.0), ("worst", -1.0), ("worst", 0.0)} <= picked
    assert len(found.samples) == len({each.offset for each in found.samples}) == 6
    text = file.read_bytes()
    for each in found.samples:
        assert json.loads(text[each.offset :].split(b"\n")[0])["completion"] == each.completion.head
    assert read_samples(file, 3, of_each=2, key="a") == found
    assert read_samples(file, 4, of_each=2, key="a") is None
    assert read_samples(tmp_path / "absent", 3, of_each=2, key="a") is None


@pytest.mark.parametrize("bad", ['{"step": 0, "completion": ', '{"step": 0, [1]}', '{"step": 0, "reward": "x"}'])
def test_lines_that_hold_no_completion(tmp_path: Path, bad: str) -> None:
    found = read_samples(write(tmp_path, bad, record(0, 1)), 0, of_each=1, key="k")
    assert found is not None
    assert found.num_completions + found.num_passed_over == 2


def test_steps_that_are_shown(tmp_path: Path) -> None:
    file = write(tmp_path, *(record(step) for step in range(100)))
    assert shown_steps(file, [-1, 19, 39, 59, 79, 99]) == [0, 39, 99]
    assert shown_steps(file, []) == [0, 50, 99]
    assert shown_steps(file, [-1, 19, 500]) == [0, 19]
    assert shown_steps(write(tmp_path, record(0)), [-1]) == [0]
    assert shown_steps(tmp_path / "absent", [0]) == []
    assert (last_step(file), last_step(tmp_path / "absent")) == (0, None)


NUMBERS = st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), min_size=1, max_size=50)


def unpacked(content: dict[str, Any]) -> Floats:
    """What the page's script does."""
    codes_P = np.frombuffer(base64.b64decode(content["b"]), "<u2")
    values_P = content["lo"] + (content["hi"] - content["lo"]) / (MISSING - 1) * codes_P
    return np.where(codes_P == MISSING, np.nan, values_P)


@given(NUMBERS)
def test_packing_loses_less_than_a_pixel_and_no_gap(values: list[float]) -> None:
    values_P = np.array(values)
    back_P = unpacked(packed(values_P))
    np.testing.assert_array_equal(np.isnan(back_P), np.isnan(values_P))
    if np.isfinite(values_P).any():
        allowed = np.ptp(values_P[np.isfinite(values_P)]) / 131_000 + 1e-12 * np.nanmax(np.abs(values_P)) + 1e-300
        assert np.nanmax(np.abs(back_P - values_P)) <= allowed


@given(st.integers(1, 20_000), st.integers(2, 300), st.integers(1, 40))
def test_the_grid_covers_all_steps_in_few_points_of_equal_size(steps: int, most: int, stride: int) -> None:
    grid = grid_for(steps, most, stride=stride)
    assert grid.num_points <= most
    assert (grid.num_points - 1) * grid.width < steps <= grid.num_points * grid.width
    assert grid.width % stride == 0
    if steps <= most and stride == 1:
        assert grid.width == 1
        assert grid.x_P.tolist() == list(range(1, steps + 1))


@given(NUMBERS, st.integers(1, 7))
def test_a_point_is_the_mean_of_its_steps(values: list[float], width: int) -> None:
    values_R, steps_R = np.array(values), np.arange(len(values), dtype=np.float64)
    grid = Grid(num_points=-(-len(values) // width), width=width)
    for point, mean in enumerate(grid.binned(steps_R, values_R)):
        inside = values_R[point * width : (point + 1) * width]
        inside = inside[np.isfinite(inside)]
        assert (np.isnan(mean) and not inside.size) or mean == pytest.approx(inside.mean(), rel=1e-9, abs=1e-6)
    # The evaluation before training is no training step.
    found = Grid(num_points=2, width=1).binned(np.array([-1.0, 0.0, 1.0]), np.array([9.0, 1.0, 2.0]))
    assert found.tolist() == [1.0, 2.0]


def test_a_band_is_the_interval_of_the_mean_of_the_seeds_that_are_there() -> None:
    nan = float("nan")
    curves = [np.array([0.2, 0.9, nan]), np.array([0.4, 1.0, 0.5]), np.array([0.6, 0.2, 0.7])]
    band, share = band_of(curves), band_of(curves, is_share=True)
    assert band
    assert share
    expected = t_interval(np.array([0.2, 0.4, 0.6]))
    assert (band.low_P[0], band.high_P[0]) == pytest.approx(expected)
    assert (band.low_P[2], band.high_P[2]) == (0.5, 0.7)  # two seeds
    assert band.high_P[1] > 1.0
    assert (share.low_P[0], share.high_P[1]) == (0.0, 1.0)
    band = band_of([np.array([1.0, 2.0, nan]), np.array([3.0, nan, nan]), np.full(3, nan)])
    assert band
    np.testing.assert_array_equal(band.mean_P, [2.0, 2.0, nan])
    np.testing.assert_array_equal(band.low_P, [1.0, 2.0, nan])
    np.testing.assert_array_equal(band.high_P, [3.0, 2.0, nan])
    assert (band.num_seeds, band_of([np.full(3, nan)]), band_of([])) == (2, None, None)


ANY = st.text(st.characters() | st.characters(categories=("Cs", "Cc", "Cf")) | st.sampled_from("<>&\"'`%{}\\"))
EVIL = "\"'><script>alert(1)</script>\x1b[2J\u202e{{ 7 * 7 }}"
PLOT = parts.Plot(
    EVIL, EVIL, {"kind": "plugin"}, parts.Table(EVIL, (EVIL, EVIL, EVIL), [(EVIL, EVIL, EVIL)]), kind="forest"
)
PARTS: list[parts.Part] = [
    parts.Link(EVIL, "run/%22/"),
    parts.Code([EVIL, EVIL]),
    parts.Words([EVIL, parts.Code([EVIL])]),
    parts.Pill(EVIL, "better", EVIL),
    parts.Paragraph([EVIL, parts.Link(EVIL, "./x")], "note"),
    parts.Heading(EVIL, 4, EVIL),
    parts.Pre(EVIL),
    parts.Items([(EVIL, [EVIL, EVIL])]),
    parts.Facts([(EVIL, EVIL)], wide=frozenset({EVIL})),
    PLOT,
    parts.Box("alert", EVIL, [PLOT]),
    parts.Fold(EVIL, [PLOT], remark=EVIL, level=3),
    parts.Section("name", EVIL, [PLOT]),
]


class Reader(HTMLParser):
    """What a browser would see: names of elements and attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.seen = ""
        self.feed(str(page))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(f"{tag} {attrs}" if tag == "span" else tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.seen += data


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_a_part_escapes_every_text(part: parts.Part) -> None:
    html = part.__html__()
    assert not {"\x1b", "\u202e"} & set(html)
    assert "{{ 7 * 7 }}" in html
    reader = Reader(html)
    assert "script" not in reader.tags
    drawing = {"viewbox", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "points"}
    usual = {"class", "id", "href", "scope", "role", "tabindex", "aria-label", "aria-hidden", "aria-labelledby"}
    assert reader.attributes <= {*usual, *drawing, "data-head"}


def test_a_page_loads_nothing_and_has_a_script_only_for_plots() -> None:
    page = sections_page("retrain", EVIL, [parts.Section("one", EVIL, [parts.Paragraph([EVIL])])])
    assert not {"script", "link", "img", "iframe"} & set(Reader(page).tags)
    drawn = sections_page(
        "retrain", EVIL, [parts.Section("one", "", [PLOT]), parts.Section("two", "", [parts.Fold("", [PLOT])])]
    )
    assert len(re.findall("<script", drawn)) == 3
    assert "unsafe" not in drawn.split("</head>")[0]
    assert len(list(parts.figures_of([parts.Section("one", "", [None, PLOT]), PLOT]))) == 2


def test_links_are_relative_paths_whatever_a_name_looks_like(tmp_path: Path) -> None:
    links = parts.Links(tmp_path)
    assert links.to(tmp_path / "javascript:alert(1)", "x").address == "./javascript%3Aalert%281%29"
    assert links.to(tmp_path.parent / 'a"b', "x").address.startswith("../a%22b")


@given(ANY)
def test_no_text_becomes_markup_or_acts_and_what_is_printable_stays(value: str) -> None:
    reader = Reader(parts.text(value, 10_000))
    assert set(reader.tags) <= {"span [('class', 'ctl')]"}
    acting = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert not [c for c in reader.seen if unicodedata.category(c) in acting and c not in "\n\t\u200c\u200d"]
    reader.seen.encode("utf-8")
    kept = "".join(c for c in value if c.isprintable())
    assert Reader(parts.text(kept, 10_000)).seen == parts.plain(kept, 10_000) == kept


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("\x1b[2J", "[U+001B][2J"),
        ("a\u202eb\u202c", "a[U+202E]b[U+202C]"),
        ("\u2066x\u2069\u200f", "[U+2066]x[U+2069][U+200F]"),
        ("zero\u200bwidth\ufeff", "zero[U+200B]width[U+FEFF]"),
        ("half \ud83d", "half \N{REPLACEMENT CHARACTER}"),
        ("\N{MAN}\u200d\N{PERSONAL COMPUTER}", "\N{MAN}\u200d\N{PERSONAL COMPUTER}"),
        ("line\r\nline\rx", "line\nline[U+000D]x"),
        ("\x00\x7f", "[U+0000][U+007F]"),
    ],
)
def test_what_acts_is_shown(value: str, seen: str) -> None:
    assert Reader(parts.text(value)).seen == seen


def test_long_texts_say_what_is_left_out_and_messages_have_roles() -> None:
    value = "<" * 1_000_000 + "\\boxed{7}"
    shown = excerpt(value)
    assert shown.left_out == len(value) - HEAD_CHARS - TAIL_CHARS
    seen = Reader(parts.long_text(shown)).seen
    assert (seen[:HEAD_CHARS], seen[-9:]) == ("<" * HEAD_CHARS, "\\boxed{7}")
    assert f"[{shown.left_out:,} characters left out]" in seen
    assert Reader(parts.text("x" * 500)).seen == "x" * 400 + "…"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert excerpt(messages).head == "system: s\n\nuser: u"
    assert excerpt(None).head == ""
    assert excerpt({"a": 1}).head == '{"a": 1}'
