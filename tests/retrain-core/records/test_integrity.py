"""Any change to a record from before a checkpoint is noticed and named; token records come back as they went in."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.records.completions import RowRecord, TokenRecord, row_arrays, write_tokens
from retrain.records.folder import RunFolder
from retrain.records.record_names import FILES, token_file
from retrain.records.stored_tokens import read_tokens, rows_of
from retrain.run.resume_plan import check_records
from tests.kit.problems import codes_in

TOKENS = TokenRecord(tokens_T=np.array([3, 4]), logprobs_T=np.array([-0.5, -1]), advantages_T=np.array([1.0, 1.0]))


def write_steps(folder, first, last):
    for step in range(first, last):
        folder.write_completions(step, {"step": step}, [{"step": step, "completion": "x" * 20}], [TOKENS])
        folder.write_evaluation([{"step": step, "set": "held_out", "scores": [1.0, 0.0]}])
        folder.write_metrics({"step": step, "loss": 0.5})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of twelve steps and the state of its checkpoint after ten."""
    run = tmp_path_factory.mktemp("made")
    with RunFolder(run, run / "adapter") as folder:
        write_steps(folder, 0, 10)
        state = folder.sync()
        write_steps(folder, 10, 12)
    return run, state


def changed(file, place, bit):
    """Flip one bit of a file; returns what it was."""
    before = file.read_bytes()
    after = bytearray(before)
    after[place] ^= 1 << bit
    file.write_bytes(after)
    return before


@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_is_noticed(made, name, where, bit):
    run, state = made
    assert check_records(run, state).damaged == ()
    for is_later in (False, True):
        size, whole = state["record_sizes"][name], (run / name).stat().st_size
        place = size + int(where * (whole - size)) if is_later else int(where * size)
        before = changed(run / name, place, bit)
        try:
            found = check_records(run, state)
        finally:
            (run / name).write_bytes(before)
        assert len(found.damaged) == (0 if is_later else 1)
        assert is_later or found.damaged[0].startswith(str(run / name))


def test_a_line_that_cannot_be_read_is_named(made):
    run, state = made
    file = run / "metrics.jsonl"
    before = changed(file, file.read_bytes().index(b'{"step": 4'), 0)
    assert check_records(run, state).damaged[0].startswith(f"{file}:5 is damaged: cannot be read")
    file.write_bytes(before)
    before = changed(file, file.read_bytes().index(b"0.5"), 0)
    told = "its checksum differs, yet every line can be read"
    assert check_records(run, state).damaged == (f"{file} is damaged: {told}",)
    file.write_bytes(before)


def test_token_files_are_named_too(made):
    run, state = made
    files = [token_file(run, step) for step in range(12)]
    before = {file: changed(file, -1, 3) for file in files}
    found = check_records(run, state)
    assert found.damaged == (
        *(f"{file} is damaged: its checksum differs" for file in files[:5]),
        "5 more token files are damaged",
    )
    for file, content in before.items():
        file.write_bytes(content)
    for file in files[3:5]:
        file.unlink()
    found = check_records(run, state)
    assert found.damaged == ()
    assert found.notices[0].startswith(f"2 token files are missing, first {files[3]}: ")
    for file in files[3:5]:
        file.write_bytes(before[file])


def test_checksums_go_on_after_a_rewind(made, tmp_path):
    """A run that was cut back and went on has the checksums of one that was never interrupted."""
    _, state = made
    with RunFolder(tmp_path, tmp_path / "adapter") as folder:
        write_steps(folder, 0, 7)
        at_seven = folder.sync()
        write_steps(folder, 7, 9)
    with RunFolder(tmp_path, tmp_path / "adapter") as folder:
        folder.rewind(at_seven["record_sizes"], 7, check_records(tmp_path, at_seven).digests)
        write_steps(folder, 7, 10)
        assert folder.sync() == state


# one letter per token: prompt or environment, or sampled; the first token of a row is never sampled
SHAPES = st.lists(st.text("ea", max_size=12).map(lambda rest: "e" + rest), min_size=1, max_size=5)
OPTIONAL = ("entropies_T", "engine_logprobs_T", "reference_logprobs_T", "rewards_T")


def row_of(shape, first=7):
    action_T = np.array([letter == "a" for letter in shape])
    starts = (0, *(number for number in range(1, len(shape)) if shape[number - 1 : number + 1] == "ae"))
    return RowRecord(tokens_T=np.arange(first, first + len(shape)), action_T=action_T, starts=starts)


def make(shape, seed, has_extras, has_row):
    """A record of random content that float32 holds exactly, but for its rewards."""
    row, stream = row_of(shape), np.random.default_rng(seed)
    length = int(row.action_T.sum())
    numbers = {
        name: np.round(stream.normal(size=length) * 64) / 64 for name in ("logprobs_T", "advantages_T", *OPTIONAL)
    }
    numbers["rewards_T"] += 1e-12
    kept = numbers if has_extras else {name: numbers[name] for name in ("logprobs_T", "advantages_T")}
    planning_T = stream.integers(0, 2, length).astype(np.bool_) if has_extras else None
    own = row if has_row else None
    kl_coef = 0.25 * seed * has_extras
    return TokenRecord(tokens_T=row.tokens_T[row.action_T], planning_T=planning_T, kl_coef=kl_coef, row=own, **kept)


def assert_same(before, after):
    for field in fields(before):
        was, now = getattr(before, field.name), getattr(after, field.name)
        assert (was is None) == (now is None), field.name
        if isinstance(was, RowRecord):
            assert_same(was, now)
        elif was is not None:
            np.testing.assert_array_equal(was, now)


@settings(max_examples=40)
@given(SHAPES, st.integers(0, 2), st.booleans(), st.booleans())
def test_records_come_back_as_they_went_in(tmp_path_factory, shapes, repeated, has_extras, has_rows):
    folder = tmp_path_factory.mktemp("tokens")
    shapes = shapes + shapes[:1] * repeated
    records = [make(shape, seed, has_extras, has_rows) for seed, shape in enumerate(shapes)]
    write_tokens(folder, 7, records)
    for before, after in zip(records, read_tokens(folder, 7), strict=True):
        assert_same(before, after)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors", b"\xff" * 64])
def test_missing_or_damaged_records_are_a_config_error(content, tmp_path):
    file = token_file(tmp_path, 3)
    if content is not None:
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_tokens(tmp_path, 3)
    assert (codes_in(caught), caught.value.problems[0].where) == (["record.tokens-unreadable"], str(file))


def test_a_prompt_is_stored_once_and_arrays_that_do_not_fit_are_refused():
    arrays = row_arrays([row_of("eeeeaa", 3), row_of("eeeeaaaa", 3), row_of("eeeea", 4)])
    assert len(arrays["prompts"]) == 2 * 4
    assert arrays["prompt_of"].tolist() == [0, 0, 1]
    assert not len(arrays["environment"])
    row = row_of("eeaea", 0)
    arrays = row_arrays([row])
    with pytest.raises(ValueError, match="do not add up"):
        rows_of({**arrays, "prompt_lengths": arrays["prompt_lengths"] + 1}, [row.tokens_T[row.action_T]])
    with pytest.raises(ValueError, match="mask"):
        rows_of(arrays, [row.tokens_T])
