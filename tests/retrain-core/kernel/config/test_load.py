"""Layers, origins and problems of a configuration, from real files."""

import tomllib
from pathlib import Path

import pytest

from retrain.kernel.config.load import Setting, all_keys, load_config
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.errors import ConfigError
from retrain.run.check import check_names, check_options

BAD, UNKNOWN = "config.bad-value", "config.unknown-key"


def one(problems):
    """The only problem."""
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


def test_origin_of_every_layer_and_the_later_wins(load, tmp_path):
    text = "# a comment\n[training]\nlr = 1e-3\nbatch_size = 2\n\nmax_steps = 3\n"
    environ = {"RETRAIN__TRAINING__BATCH_SIZE": "5", "RETRAIN__TRAINING__MAX_STEPS": "6"}
    config, problems = load(text, "--max-steps", "7", environ=environ)
    assert problems == []
    training = config.training
    assert (training.lr, training.batch_size, training.max_steps, training.group_size) == (1e-3, 5, 7, 16)
    names = ("lr", "batch_size", "max_steps", "group_size")
    file, origins = tmp_path / "retrain.toml", [config.origin(f"training.{name}") for name in names]
    assert [origin.layer for origin in origins] == [Layer.FILE, Layer.ENVIRONMENT, Layer.COMMAND_LINE, Layer.DEFAULT]
    assert list(map(str, origins)) == [f"{file}:3", "RETRAIN__TRAINING__BATCH_SIZE", "--max-steps", "default"]
    assert config.place("training.lr") == f"{file}:3 [training] lr"
    assert config.place("training.group_size") == "[training] group_size (default)"


def test_whole_numbers_are_numbers_and_the_old_name_of_a_key_is_accepted_once(load):
    config, problems = load("[training]\nlr = 1\ntemperature = 1\n")
    assert (problems, config.training.temperature) == ([], 1.0)
    for name in ("surprisal_mask_rho", "entropy_mask_rho"):
        config, problems = load(f"[algorithm]\n{name} = 0.2\n")
        assert (problems, config.algorithm.surprisal_mask_rho) == ([], 0.2)
        assert config.origin("algorithm.surprisal_mask_rho").layer is Layer.FILE
    problem = one(load("[algorithm]\nsurprisal_mask_rho = 0.2\nentropy_mask_rho = 0.3\n")[1])
    assert problem.where.endswith("retrain.toml:3 [algorithm] entropy_mask_rho")
    assert problem.code == "config.key-twice"


@pytest.mark.parametrize(
    ("text", "line", "code", "fix"),
    [
        ("[trainning]\nlr = 1e-4\n", 1, "config.unknown-table", "[training]"),
        ("\n\n[zzz]\n", 3, "config.unknown-table", "use one of: "),
        ("\n[trainning.sub]\nlr = 1e-4\n", 2, "config.unknown-table", "[training]"),
        ("[training]\n\nlearning_rate = 1\nbach_size = 1", 4, UNKNOWN, "'batch_size'"),
        ("[training]\nlora_rank = 8\n", 2, UNKNOWN, "[model]"),
        ("[lora]\nwhatever = 8\n", 2, UNKNOWN, "alpha, dropout"),
        ("[backend]\nprime_rl_colour = 1\n", 2, UNKNOWN, ""),  # begins like a legacy key
        ("lr = 1e-4\n", 1, "config.key-outside-table", "[training]"),
        ("nothing = 1e-4\n", 1, "config.key-outside-table", "put it under a table"),
        ("training = 3\n", 1, "config.not-a-table", "[training]"),
        ("[[training]]\nlr = 1e-4\n", 1, "config.not-a-table", "[training]"),
    ],
)
def test_a_misplaced_or_misspelt_name_is_answered_with_the_right_one(text, line, code, fix, load):
    problem = next(problem for problem in load(text)[1] if f".toml:{line}" in problem.where)
    assert problem.code == code
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("table", "line", "shown", "fix"),
    [
        ("inference", 'prefix_caching = "false"', "text 'false'", "write false, without quotes"),
        ("inference", "prefix_caching = 1", "the integer 1", "Default: true"),
        ("inference", "kv_cache_dtype = 'int4'", "int4", "'int8'"),
        ("inference", "dtype = 'BF16'", "BF16", "'bf16'"),
        ("training", "batch_size = 7.9", "the number 7.9", "Default: 8"),
        ("training", "batch_size = true", "the boolean True", "Default: 8"),
        ("training", 'batch_size = "8"', "text '8'", "write 8, without quotes"),
        ("training", "seed = 2147483648", "less than 2147483648", "Default: -1"),
        *(("training", f"lr = {value}", value, "Default: 4e-05") for value in ("nan", "inf", "-inf", "0.0")),
        ("training", 'lr = "1e-4"', "text '1e-4'", "write 1e-4, without quotes"),
        ("training", "lr = [1e-4]", "the list", "Default: "),
        ("training", "lr = 1979-05-27", "date", "Default: "),
        ("logging", "log_dir = ''", "at least 1 character", "Default: "),
        ("logging", "recorders = 'wandb'", "text 'wandb'", "Default: "),
        ("logging", "recorders = ['a', 3]", "the integer 3", "Default: "),
        ("logging", "strategic_grams = '[\"a\", 3]'", "must be text", "Default: "),
        ("plugins", "search_paths = ['']", "must not be empty", "Default: "),
        *(("scoring", f"correct_above = {value}", value, "Default: 0.5") for value in ("nan", "inf", "'high'")),
        ("algorithm", "params = 3", "the integer 3", "Default: {}"),
        *(("algorithm", f"is_bounds = {each}", "low", "") for each in ("[1.0, 1.0]", "[0.5, 1, 2]", "[-0.1, 1.0]")),
        *(("inference", f"url = 'http://{each}'", each, "") for each in ("host:0", ":8000", "[::1", "host:65536")),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_with_what_it_is(table, line, shown, fix, load):
    config, problems = load(f"[{table}]\n{line}\n")
    problem, name = one(problems), line.split()[0]
    assert problem.code == BAD
    assert shown in problem.what
    assert fix in problem.fix
    assert f"retrain.toml:2 [{table}] {name}" in problem.where
    assert problem.where.endswith("recorders.1" if "3]" in line and name == "recorders" else name)
    assert config.training.batch_size == 8


def test_every_problem_is_reported_at_once_and_the_good_keys_are_kept(load):
    text = '[training]\nlr = "fast"\nbatch_size = 0\nmax_steps = 9\ntop_p = 0.9\nsteps = 1\n[modell]\nmodel = "x"\n'
    text += '[inference]\ndtype = "fp9"\nprefix_caching = "yes"\n'
    config, problems = load(text, "--lora-rank", "many", "--nonsense", environ={"RETRAIN__TRAINING__SEEED": "1"})
    error = str(ConfigError(*problems))
    for line in (2, 3, 5, 6, 7, 10, 11):
        assert f"retrain.toml:{line} " in error, error
    found = {problem.code for problem in problems if "retrain.toml" not in problem.where}
    assert found == {BAD, "config.unknown-flag", "config.unknown-variable"}
    assert len(problems) == error.count("fix: ") == 10
    assert config.training.max_steps == 9


@pytest.mark.parametrize(
    ("text", "arguments", "environ", "where"),
    [
        ("[training]\ntop_p = 0.9\n", (), {}, "retrain.toml:2 [training] top_p"),
        ("[lora]\ndropout = 0.1\n", (), {}, "retrain.toml:2 [lora] dropout"),
        ("[plugins]\nstrict = false\n", (), {}, "retrain.toml:2 [plugins] strict"),
        ("", ("--top-p", "0.5"), {}, "--top-p [training] top_p"),
        ("", (), {"RETRAIN__LORA__DROPOUT": "0.5"}, "RETRAIN__LORA__DROPOUT [lora] dropout"),
    ],
)
def test_a_key_whose_feature_is_missing_is_refused_from_every_layer_but_not_at_its_default(
    text, arguments, environ, where, load
):
    problem = one(load(text, *arguments, environ=environ)[1])
    assert problem.code == "config.not-supported"
    assert problem.where.endswith(where)
    assert load("[training]\ntop_p = 1.0\n[resume]\nfrom = ''\n", "--wandb-project", "")[1] == []


def test_flags_of_campaigns_unregistered_tables_and_byte_order_marks_are_read(load):
    assert one(load("", "--campaign-max-steps", "3")[1]).code == "config.flag-without-table"
    assert load("[campaign]\n", "--campaign-max-steps", "3")[1] == []
    assert load("", environ={"RETRAIN__CAMPAIGN__MAX_STEPS": "3"})[1] == []  # may be meant for other files
    config = Config(tables={})
    assert (config.training.batch_size, config.value("sepa.steps", 7)) == (8, 7)
    assert load()[0].value("sepa.steps", 7) == 500
    problem = one(load("[backpressure]\nmin_batch_size = 9\nmax_batch_size = 8\n")[1])
    assert (problem.code, problem.fix) == (BAD, "correct the table")
    assert problem.where.endswith("[backpressure]")


def test_what_a_condition_sets_wins_over_every_layer(tmp_path, tables):
    file = tmp_path / "c.toml"
    file.write_text("[training]\nlr = 1e-3\n[data.options]\na = 1\nb = 1\n")
    given = {"training.lr": 1e-5, "data.options": {"b": 2}, "training.batch_size": "many"}
    origin = Origin(layer=Layer.FILE, place="c.toml:9 condition 1")
    settings = [Setting(path=path, value=value, origin=origin) for path, value in given.items()]
    config, problems = load_config(file, tables=tables, arguments=["--lr", "1e-4"], settings=settings)
    assert (config.training.lr, config.data.options) == (1e-5, {"a": 1, "b": 2})
    assert one(problems).where == "c.toml:9 condition 1 [training] batch_size"


def test_all_legacy_keys_are_one_problem_with_the_lines_to_write_and_an_option_that_is_set_wins(load):
    text = "[backend]\nprime_rl_zmq_port = 5555\nprime_rl_strict_advantages = true\nprime_rl_sync_poll_s = 0.2\n"
    text += 'prime_rl_transport = "zmq"\n[backend.options]\ntransport = "filesystem"\n'
    problem = one(load(text)[1])
    assert problem.code == "config.legacy-key"
    assert problem.where.endswith("retrain.toml:2 [backend] prime_rl_zmq_port")
    options = {"zmq_port": 5555, "strict_advantages": True, "sync_poll_s": 0.2, "transport": "filesystem"}
    assert tomllib.loads(problem.fix.partition("place\n")[2]) == {"backend": {"options": options}}


@pytest.mark.parametrize("line", ["model = 'm'", "adapter = 'a'", "engine = 'vllm'"])
def test_a_teacher_is_set_by_its_model_adapter_or_engine(line, load):
    assert load(f"[teacher]\n{line}\n")[0].teacher.is_set
    assert not load("[teacher]\n")[0].teacher.is_set


def test_a_byte_order_mark_is_accepted(tmp_path, tables):
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf[training]\r\nlr = 1e-3\r\n")
    config, problems = load_config(tmp_path / "x.toml", tables=tables)
    assert problems == []
    assert config.origin("training.lr").place == f"{tmp_path / 'x.toml'}:2"


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"[training\n", "config.not-toml", ":1"),
        (b"[training]\nlr = 1\nlr = 2\n", "config.not-toml", ":3"),
        (b"[training]\nlr = \xff\n", "config.unreadable", ""),
        (None, "config.not-found", ""),
    ],
)
def test_a_file_that_cannot_be_read_is_a_config_error(content, code, line, tmp_path, tables):
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(file, tables=tables)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == (code, f"{file}{line}")
    assert problem.fix


FULL = Path(__file__).with_name("full_annotated.toml")
CONTAINERS = {  # a JSON schema, as test_names_stay.py reads it, has no defaults for these
    **{f"algorithm.{name}": {} for name in ("params", "advantage_params", "transform_params")},
    "backend.options": {},
    "environment.args": {},
    "plugins.search_paths": ["plugins"],
    "squeeze.target_ranks": [],
    "campaign.seeds": [42, 101, 202, 303, 404, 505, 606, 707],
}
CONDITIONS = ["grpo+none", "maxrl+none", "maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa"]


def test_defaults_are_valid_and_explained_and_the_containers_as_documented(tables):
    config, problems = load_config(None, tables=tables)
    assert problems == []
    found = config.as_dict()
    assert {path: found[path.partition(".")[0]][path.partition(".")[2]] for path in CONTAINERS} == CONTAINERS
    conditions = found["campaign"]["conditions"]
    assert [f"{each['advantage_mode']}+{each['transform_mode']}" for each in conditions] == CONDITIONS
    for name, entry in tables.items():
        defaults = entry.model().model_dump(by_alias=True)
        assert entry.model.model_validate(defaults).model_dump(by_alias=True) == defaults, name
    for key in all_keys(tables):
        assert len(key.description) > 4, key.path
        assert key.description.endswith("."), key.path
    config.backend.options["x"] = 1
    assert load_config(None, tables=tables)[0].backend.options == {}, "configurations share no container"


def test_the_documented_full_file_is_accepted(tables, plugins, command):
    config, problems = load_config(FULL, tables=tables)
    assert problems == []
    assert check_names(config, plugins, tables) + check_options(config, plugins) == []
    assert config.backend.adapter_path == "/tmp/retrain_adapter"
    assert config.origin("training.lr").place == f"{FULL}:42"
    result = command("explain", str(FULL), "--json")
    assert result.code == 0, result.err
    assert '"mode": "single"' in result.out
    assert '"condition": "maxrl+gtpo_sepa"' in result.out


@pytest.mark.parametrize("rank", [1, 8, 128])
def test_auto_does_not_depend_on_the_rank(rank, load):
    text = f'[model]\nlora_rank = {rank}\n[training]\nlr = "auto"\n[lora]\nalpha = "auto"\n'
    config, problems = load(text)
    assert not problems
    assert (config.training.lr, config.lora.alpha) == (4e-5, 32)
    assert str(config.origin("training.lr")).endswith("retrain.toml:4")


def test_auto_of_all_weights_and_from_flags_and_variables(load):
    config, problems = load("", "--lr", "auto", "--lora-alpha", "auto", "--lora-rank", "0")
    assert not problems
    assert (config.training.lr, config.lora.alpha) == (4e-6, 0)
    config, problems = load("", environ={"RETRAIN__TRAINING__LR": "auto"})
    assert (config.training.lr, problems) == (4e-5, [])


def test_auto_is_a_value_of_no_other_key(load):
    for text in (
        '[training]\nbatch_size = "auto"\n',
        '[training]\nlr = "Auto"\n',
        '[training]\nweight_decay = "auto"\n',
    ):
        assert [problem.code for problem in load(text)[1]] == ["config.bad-value"]
