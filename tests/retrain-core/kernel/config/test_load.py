"""Layers, origins and problems of a configuration, from real files."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from retrain.kernel.config.load import Setting, TableEntry, load_config
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.errors import ConfigError, Problem

Load = Callable[..., tuple[Config, list[Problem]]]


def one(problems: list[Problem]) -> Problem:
    """The only problem."""
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def test_origin_of_every_layer_and_the_later_wins(load: Load, tmp_path: Path) -> None:
    text = "# a comment\n[training]\nlr = 1e-3\nbatch_size = 2\n\nmax_steps = 3\n"
    environ = {"RETRAIN__TRAINING__BATCH_SIZE": "5", "RETRAIN__TRAINING__MAX_STEPS": "6"}
    config, problems = load(text, "--max-steps", "7", environ=environ)
    assert problems == []
    training = config.training
    assert (training.lr, training.batch_size, training.max_steps, training.group_size) == (1e-3, 5, 7, 16)
    file = tmp_path / "retrain.toml"
    origins = [config.origin(f"training.{name}") for name in ("lr", "batch_size", "max_steps", "group_size")]
    assert [origin.layer for origin in origins] == [Layer.FILE, Layer.ENVIRONMENT, Layer.COMMAND_LINE, Layer.DEFAULT]
    assert [str(origin) for origin in origins] == [
        f"{file}:3",
        "RETRAIN__TRAINING__BATCH_SIZE",
        "--max-steps",
        "default",
    ]
    assert config.place("training.lr") == f"{file}:3 [training] lr"
    assert config.place("training.group_size") == "[training] group_size (default)"


def test_whole_numbers_are_taken_for_numbers(load: Load) -> None:
    config, problems = load("[training]\nlr = 1\ntemperature = 1\n")
    assert problems == []
    assert config.training.temperature == 1.0


@pytest.mark.parametrize("name", ["surprisal_mask_rho", "entropy_mask_rho"])
def test_the_old_name_of_a_key_is_accepted(name: str, load: Load) -> None:
    config, problems = load(f"[algorithm]\n{name} = 0.2\n")
    assert problems == []
    assert config.algorithm.surprisal_mask_rho == 0.2
    assert config.origin("algorithm.surprisal_mask_rho").layer is Layer.FILE


def test_both_names_of_a_key_at_once_are_refused(load: Load) -> None:
    _, problems = load("[algorithm]\nsurprisal_mask_rho = 0.2\nentropy_mask_rho = 0.3\n")
    problem = one(problems)
    assert problem.where.endswith("retrain.toml:3 [algorithm] entropy_mask_rho")
    assert "second time" in problem.what


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        ("[trainning]\nlr = 1e-4\n", 1, "unknown table", "did you mean [training]?"),
        ("\n\n[zzz]\n", 3, "unknown table", "use one of: "),
        ("\n[trainning.sub]\nlr = 1e-4\n", 2, "unknown table", "did you mean [training]?"),
        ("[training]\n\nlearning_rate = 1\nbach_size = 1", 4, "unknown key", "did you mean 'batch_size'?"),
        ("[training]\nlora_rank = 8\n", 2, "unknown key", "'lora_rank' belongs to [model]"),
        ("[lora]\nwhatever = 8\n", 2, "unknown key", "use one of: alpha, dropout"),
        ("lr = 1e-4\n", 1, "key 'lr' is outside any table", "move it under [training]"),
        ("nothing = 1e-4\n", 1, "key 'nothing' is outside any table", "put it under a table"),
        ("training = 3\n", 1, "[training] must be a table", "write [training]"),
        ("[[training]]\nlr = 1e-4\n", 1, "[training] must be a table", "write [training]"),
    ],
)
def test_a_misplaced_or_misspelt_name_is_answered_with_the_right_one(
    text: str, line: int, what: str, fix: str, load: Load
) -> None:
    _, problems = load(text)
    problem = next(problem for problem in problems if f".toml:{line}" in problem.where)
    assert what in problem.what or what in str(problem)
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ('prefix_caching = "false"', ("boolean", "text 'false'")),
        ("prefix_caching = 1", ("boolean", "the integer 1")),
    ],
)
def test_text_and_numbers_are_no_booleans(line: str, fragments: tuple[str, ...], load: Load) -> None:
    _, problems = load(f"[inference]\n{line}\n")
    assert all(fragment in one(problems).what for fragment in fragments)


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ("batch_size = 7.9", ("integer", "the number 7.9")),
        ("batch_size = 8.0", ("integer", "the number 8.0")),
        ("batch_size = true", ("integer", "the boolean True")),
        ('batch_size = "8"', ("integer", "text '8'")),
        ("batch_size = 0", ("greater than or equal to 1", "the integer 0")),
        ("seed = -2", ("greater than or equal to -1", "-2")),
        ("seed = 2147483648", ("less than 2147483648",)),
        ("lr = nan", ("finite", "nan")),
        ("lr = inf", ("finite", "inf")),
        ("lr = -inf", ("finite", "-inf")),
        ("lr = 0.0", ("greater than 0", "0.0")),
        ('lr = "1e-4"', ("valid number", "text '1e-4'")),
        ("lr = true", ("valid number", "the boolean True")),
        ("lr = [1e-4]", ("valid number", "the list")),
        ("lr = 1979-05-27", ("valid number", "date")),
        ("temperature = 0", ("greater than 0", "0")),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_with_what_it_is(
    line: str, fragments: tuple[str, ...], load: Load
) -> None:
    config, problems = load(f"[training]\n{line}\n")
    problem = one(problems)
    assert all(fragment in problem.what for fragment in fragments), problem.what
    assert f"retrain.toml:2 [training] {line.split()[0]}" in problem.where
    quoted = line.partition('"')[2].rstrip('"')  # a number in quotes: the fix is to leave them out
    assert problem.fix == f"write {quoted}, without quotes" if quoted else "Default: " in problem.fix
    assert config.training.batch_size == 8


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("[logging]\nlog_dir = ['a']\n", "[logging] log_dir", "the list ['a']"),
        ("[logging]\nlog_dir = ''\n", "[logging] log_dir", "at least 1 character"),
        ("[logging]\nrecorders = 'wandb'\n", "[logging] recorders", "text 'wandb'"),
        ("[logging]\nrecorders = ['a', 3]\n", "[logging] recorders.1", "the integer 3"),
        ("[plugins]\nsearch_paths = ['']\n", "[plugins] search_paths", "must not be empty"),
        ("[algorithm]\nparams = 3\n", "[algorithm] params", "the integer 3"),
        ("[algorithm]\nsurprisal_mask_rho = 1.5\n", "[algorithm] surprisal_mask_rho", "less than or equal to 1"),
        ("[backpressure]\nmin_batch_size = 9\nmax_batch_size = 8\n", "[backpressure]", "below min_batch_size"),
        ("[logging]\nstrategic_grams = '[\"a\", 3]'\n", "[logging] strategic_grams", "must be text"),
        ("[logging]\nstrategic_grams = '[oops'\n", "[logging] strategic_grams", "not a JSON array"),
    ],
)
def test_faults_of_lists_tables_and_rules_name_their_place(text: str, where: str, what: str, load: Load) -> None:
    _, problems = load(text)
    problem = next(problem for problem in problems if where in problem.where)
    assert what in problem.what


def test_every_problem_is_reported_at_once_and_the_good_keys_are_kept(load: Load) -> None:
    text = """\
[training]
lr = "fast"
batch_size = 0
max_steps = 9
top_p = 0.9
steps = 1
[modell]
model = "x"
[inference]
dtype = "fp9"
prefix_caching = "yes"
"""
    config, problems = load(text, "--lora-rank", "many", "--nonsense", environ={"RETRAIN__TRAINING__SEEED": "1"})
    error = str(ConfigError(*problems))
    for line in (2, 3, 5, 6, 7, 10, 11):
        assert f"retrain.toml:{line} " in error, error
    assert "--lora-rank" in error
    assert "--nonsense" in error
    assert "RETRAIN__TRAINING__SEEED" in error
    assert len(problems) == 10
    assert error.count("fix: ") == 10
    assert config.training.max_steps == 9


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("kv_cache_dtype = 'int4'", "did you mean 'int8'?"),
        ("dtype = 'BF16'", "did you mean 'bf16'?"),
        ("attention_kernel = 'flash_attn'", "did you mean 'flash'?"),
        ("attention_kernel = 'xformers'", 'Default: "default"'),
        ("attention_kernel = 1", 'Default: "default"'),
    ],
)
def test_an_unknown_choice_is_answered_with_all_and_the_nearest(line: str, fix: str, load: Load) -> None:
    _, problems = load(f"[inference]\n{line}\n")
    problem = one(problems)
    assert problem.what.startswith("Input should be '")
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[training]\ntop_p = 0.9\n", "full distribution"),
        ("[lora]\ndropout = 0.1\n", "sampler and trainer disagree"),
        ("[plugins]\nstrict = false\n", "lenient"),
    ],
)
def test_a_key_whose_feature_is_missing_is_refused_by_name(text: str, reason: str, load: Load) -> None:
    _, problems = load(text)
    problem = one(problems)
    assert "is refused: " in problem.what
    assert reason in problem.what
    assert "keep the default" in problem.fix
    table, line, _ = text.split("\n")
    assert f".toml:2 {table} {line.split()[0]}" in problem.where


def test_a_missing_feature_is_refused_from_every_layer_but_not_at_its_default(load: Load) -> None:
    _, problems = load("", "--top-p", "0.5", environ={"RETRAIN__LORA__DROPOUT": "0.5"})
    assert {problem.where for problem in problems} == {
        "--top-p [training] top_p",
        "RETRAIN__LORA__DROPOUT [lora] dropout",
    }
    _, problems = load("[training]\ntop_p = 1.0\n[resume]\nfrom = ''\n", "--wandb-project", "")
    assert problems == []


def test_a_flag_of_a_campaign_is_refused_where_there_is_none(load: Load) -> None:
    _, problems = load("", "--campaign-max-steps", "3")
    assert one(problems).what == "changes nothing: the file has no [campaign]"
    assert load("[campaign]\n", "--campaign-max-steps", "3")[1] == []
    assert load("", environ={"RETRAIN__CAMPAIGN__MAX_STEPS": "3"})[1] == []  # may be meant for other files


def test_what_a_condition_sets_wins_over_every_layer(tmp_path: Path, tables: Mapping[str, TableEntry]) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[training]\nlr = 1e-3\n[data.options]\na = 1\n")
    origin = Origin(layer=Layer.FILE, place="c.toml:9 condition 1")
    settings = [
        Setting(path="training.lr", value=1e-5, origin=origin),
        Setting(path="data.options", value={"b": 2}, origin=origin),
        Setting(path="training.batch_size", value="many", origin=origin),
    ]
    config, problems = load_config(file, tables=tables, arguments=["--lr", "1e-4"], settings=settings)
    assert (config.training.lr, config.data.options) == (1e-5, {"a": 1, "b": 2})
    assert one(problems).where == "c.toml:9 condition 1 [training] batch_size"


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("transport", '"zmq"', 'transport = "zmq"'),
        ("zmq_port", "5555", "zmq_port = 5555"),
        ("strict_advantages", "true", "strict_advantages = true"),
        ("sync_poll_s", "0.2", "sync_poll_s = 0.2"),
    ],
)
def test_legacy_backend_keys_are_answered_with_the_line_to_write(name: str, value: str, line: str, load: Load) -> None:
    _, problems = load(f"[backend]\nprime_rl_{name} = {value}\n")
    problem = one(problems)
    assert problem.where.endswith(f"retrain.toml:2 [backend] prime_rl_{name}")
    assert problem.what == "legacy key, removed"
    assert problem.fix.endswith(
        f"retrain.toml --write` writes in their place\n        [backend.options]\n        {line}"
    )


def test_all_legacy_keys_are_one_problem_and_an_option_that_is_set_wins(load: Load) -> None:
    text = '[backend]\nprime_rl_zmq_port = 1\nprime_rl_transport = "zmq"\n[backend.options]\ntransport = "filesystem"\n'
    _, problems = load(text)
    problem = one(problems)
    assert problem.what == "legacy keys, removed: prime_rl_zmq_port, prime_rl_transport"
    block = problem.fix.partition("place\n")[2]
    assert tomllib.loads(block) == {"backend": {"options": {"zmq_port": 1, "transport": "filesystem"}}}


def test_other_keys_that_begin_like_legacy_ones_are_unknown(load: Load) -> None:
    _, problems = load("[backend]\nprime_rl_colour = 1\n")
    assert one(problems).what == "unknown key"


def test_an_unknown_table_of_ours_is_answered_with_its_distribution(
    tmp_path: Path, tables: Mapping[str, TableEntry]
) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[sepa]\nsteps = 3\n")
    without = {name: entry for name, entry in tables.items() if name != "sepa"}
    hint = {"sepa": "pip install retrain-sepa"}
    _, problems = load_config(file, tables=without, table_hint=lambda name: hint.get(name, ""))
    assert one(problems).fix == "pip install retrain-sepa"


def test_a_byte_order_mark_is_accepted(tmp_path: Path, tables: Mapping[str, TableEntry]) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\r\nlr = 1e-3\r\n")
    config, problems = load_config(file, tables=tables)
    assert problems == []
    assert config.origin("training.lr").place == f"{file}:2"


@pytest.mark.parametrize(
    ("content", "fragment", "line"),
    [
        (b"[training\n", "not valid TOML", ":1"),
        (b"[training]\nlr = 1\nlr = 2\n", "not valid TOML", ":3"),
        (b"[training]\nlr = \xff\n", "cannot be read", ""),
        (None, "file not found", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_a_config_error(
    content: bytes | None, fragment: str, line: str, tmp_path: Path, tables: Mapping[str, TableEntry]
) -> None:
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=fragment) as caught:
        load_config(file, tables=tables)
    assert caught.value.problems[0].where == f"{file}{line}"
    assert caught.value.problems[0].fix


def test_an_unregistered_table_reads_as_defaults(load: Load) -> None:
    config = Config(tables={})
    assert config.training.batch_size == 8
    assert config.value("sepa.steps", 7) == 7
    assert load()[0].value("sepa.steps", 7) == 500
