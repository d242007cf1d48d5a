"""The factory as the kernel calls it, with a real inference server: each wire over each transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from transformers import AutoTokenizer

from retrain.api import BackendError, ConfigError, PluginContext, Seeds, load_plugins
from retrain.kernel.config.load import load_config
from retrain.run.tables import registered_tables
from retrain_prime_rl.backend import PrimeRlBackend, create_backend
from retrain_prime_rl.options import PrimeRlOptions
from tests.kit.inference_server import serving
from tests.kit.toy_policy import ToyModel

local = pytest.importorskip("retrain_local.plugin", reason="the tiny model comes with retrain-local")
TINY = local.BUILTIN_MODELS["tiny"]


@pytest.fixture
def create(tmp_path: Path) -> Iterator[Callable[..., PrimeRlBackend]]:
    """`create(toml, option=value)`: the backend of a configuration, closed when the test is over."""
    made: list[PrimeRlBackend] = []
    with serving(ToyModel(root=str(TINY))) as server:

        def build(toml: str = "", url: str = server.url, **options: object) -> PrimeRlBackend:
            file = tmp_path / "retrain.toml"
            file.write_text(
                '[model]\nmodel = "builtin:tiny"\n[backend]\nbackend = "prime_rl"\n'
                f'[inference]\nengine = "vllm"\nurl = "{url}"\nretry_s = 5\n{toml}',
                encoding="utf-8",
            )
            plugins = load_plugins(environ={})
            config, problems = load_config(file, tables=registered_tables(plugins))
            assert not problems
            settings = {"output_dir": str(tmp_path / "run_1"), "sync_wait_s": 0, "sync_timeout": "stale"} | options
            if options.get("wire") == "scalar":  # as its own orchestrator leaves it
                (tmp_path / "run_1" / "control").mkdir(parents=True, exist_ok=True)
                (tmp_path / "run_1" / "control" / "orch.toml").touch()
            context = PluginContext(
                config=config,
                seeds=Seeds(1),
                plugins=plugins,
                params=PrimeRlOptions(**settings),
                tokenizer=AutoTokenizer.from_pretrained(TINY),
            )
            made.append(create_backend(context))
            return made[-1]

        yield build
        for backend in made:
            backend.close()


def test_samples_of_the_older_wire_become_one_file(create, make_batch, tmp_path):
    backend = create(wire="scalar")
    assert not backend.capabilities.preserves_token_advantages
    backend.train(make_batch([6, 9, 5], varying=False))
    (file,) = (tmp_path / "run_1" / "rollouts" / "step_0").iterdir()
    assert file.name == "rollouts.bin"
    samples, step = msgspec.msgpack.decode(file.read_bytes())
    assert (len(samples), step) == (3, 0)


def test_samples_of_the_older_wire_are_pushed_under_the_name_of_the_folder(create, make_batch, free_ports):
    with zmq.Context() as context, context.socket(zmq.PULL) as packer:
        packer.bind(f"tcp://127.0.0.1:{free_ports}")
        made = create(wire="scalar", transport="zmq", zmq_host="127.0.0.1", zmq_port=free_ports)
        made.train(make_batch([6], varying=False))
        assert packer.poll(20_000)
        assert packer.recv_multipart()[0] == b"run_1"


def test_each_rank_has_a_file_and_the_next_step_is_found_on_a_resume_and_refused_to_a_new_run(
    create, make_batch, tmp_path
):
    for _ in range(2):
        backend = create("[resume]\nfrom = 'earlier'\n", data_world_size=2)
        assert backend.capabilities.preserves_token_advantages
        backend.train(make_batch([6, 9, 5]))
    files = (tmp_path / "run_1" / "rollouts" / "step_2").iterdir()
    assert sorted(file.name for file in files) == ["rank_0.bin", "rank_1.bin"]
    with pytest.raises(ConfigError, match="its trainer was sent 2 steps"):
        create()


def test_ports_are_free_again_when_the_inference_server_cannot_be_reached(create, free_ports):
    options = {"transport": "zmq", "zmq_port": free_ports}
    with pytest.raises(BackendError, match="the list of models failed"):
        create(url="http://127.0.0.1:1", **options)
    create(**options)
