"""What trainer, inference server and run must agree on, as one record that every written file is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from retrain.api import Config, ConfigError, Plugins, Problem
from retrain_prime_rl import checks
from retrain_prime_rl.options import PrimeRlOptions

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "*", "::"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What the run's TOML cannot say: which weights are trained, and on which GPUs.

    A trainer has `data_world_size` x `context_parallel` GPUs.
    """

    all_weights: bool = False
    inference_gpus: int = 1  # of each server
    context_parallel: int = 1
    gpus_per_node: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An inference server's address as the run reaches it."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach that address."""
        return self.host in LOOPBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A checked run and the machines around it."""

    config: Config
    options: PrimeRlOptions
    machines: Machines
    output_dir: Path
    model: str
    servers: tuple[Server, ...]  # that PRIME-RL's `inference` starts
    backend_port: int = 0  # of the one engine behind the router that it starts too; 0 = no router of its own
    arguments: tuple[str, ...] = ()  # of `retrain`, for this run

    @property
    def train_gpus(self) -> int:
        """GPUs of the trainer, on all machines together."""
        return self.options.data_world_size * self.machines.context_parallel

    @property
    def nodes(self) -> int:
        return -(-self.train_gpus // self.machines.gpus_per_node)

    @property
    def updates(self) -> int:
        """Steps of the trainer per step of the run."""
        training = self.config.training
        return min(training.minibatches, training.batch_size) * training.epochs

    @property
    def trainer_host(self) -> str:
        """Where the trainer connects to the run's sockets, as far as the run's TOML says."""
        return "localhost" if self.options.zmq_host in WILDCARDS | LOOPBACK else self.options.zmq_host


def layout_of(config: Config, plugins: Plugins, machines: Machines, arguments: Sequence[str] = ()) -> Layout:
    """The layout of a configuration that `explain` accepts; ConfigError on what PRIME-RL's files cannot express."""
    if problems := _problems(config, machines):
        raise ConfigError(*problems)
    options = PrimeRlOptions.model_validate(config.backend.options)
    name = config.model.model
    located = plugins.locate_model(name) or name
    servers = _servers(config.inference.url or "http://localhost:8000")  # the default of engine vllm
    engines = _servers(config.inference.admin_url)
    has_its_router = len(engines) == len(servers) == 1
    return Layout(
        config=config,
        options=options,
        machines=machines,
        output_dir=checks.output_dir(config, options),
        model=str(Path(located).resolve()) if Path(located).is_dir() else located,
        servers=servers if has_its_router else engines or servers,
        backend_port=engines[0].port if has_its_router else 0,
        arguments=tuple(arguments),
    )


def _servers(urls: str) -> tuple[Server, ...]:
    parts = [urlsplit(url.strip()) for url in urls.split(",") if url.strip()]
    return tuple(Server(host=part.hostname or "localhost", port=part.port or 80) for part in parts)


def _problems(config: Config, machines: Machines) -> list[Problem]:
    """Faults of the request itself; the configuration has been checked."""
    if config.backend.backend != "prime_rl":
        what = f"backend = {config.backend.backend!r} is not trained by PRIME-RL"
        return [Problem(where=config.place("backend.backend"), what=what, fix='set backend = "prime_rl"')]
    if any(path.startswith("campaign.") and str(found.layer) == "file" for path, found in config.origins.items()):
        what = "a campaign has many runs, and each needs a trainer and an output_dir of its own"
        return [Problem(where=config.source, what=what, fix="give the file of one run")]
    options, found = PrimeRlOptions.model_validate(config.backend.options), []
    if options.wire == "scalar":
        what = 'wire = "scalar" is for trainers whose configuration files are others'
        fix = 'set wire = "per_token", or write the files of that trainer by hand'
        found.append(Problem(where=config.place("backend.options"), what=what, fix=fix))
    if options.pad_to_multiple_of % machines.context_parallel:
        what = f"pad_to_multiple_of does not split into {machines.context_parallel} parts"
        fix = f"set pad_to_multiple_of = {machines.context_parallel} in [backend.options]"
        found.append(Problem(where="--context-parallel", what=what, fix=fix))
    gpus = options.data_world_size * machines.context_parallel
    if gpus > machines.gpus_per_node and gpus % machines.gpus_per_node:
        what = f"{gpus} GPUs of the trainer do not fill machines of {machines.gpus_per_node}"
        fix = "set --gpus-per-node, or [backend.options] data_world_size, so that every machine has as many"
        found.append(Problem(where="--gpus-per-node", what=what, fix=fix))
    return found
