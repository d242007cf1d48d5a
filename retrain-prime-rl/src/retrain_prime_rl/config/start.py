"""`start.md`: the commands that start trainer, servers and run, on one machine and on several, and after a stop."""

from __future__ import annotations

import shlex
from pathlib import Path

from retrain_prime_rl.config.layout import Layout, Server

TRAINER, INFERENCE = "trainer.toml", "inference.toml"
RENDEZVOUS_PORT = 29500
# as PRIME-RL's own launcher starts it
TORCHRUN = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True uv run torchrun"
MODULE = "-m prime_rl.trainer.rl.train"


def start_md(layout: Layout, folder: Path) -> str:
    """Markdown whose lines are typed as they stand, but for the words in capitals that the text explains."""
    wait = f"`sync_wait_s = {layout.options.sync_wait_s:g}` seconds is what a step of the trainer may take"
    parts = [
        f"# PRIME-RL for `{_run(layout)}`",
        "",
        "`uv run` is typed in a checkout of PRIME-RL, `retrain` in the folder of the run, and last: the server must",
        f"answer by then. {wait}; the",
        "first one includes what is left of its start. The trainer's loss is in its own records,",
        f"`{layout.output_dir / 'metrics.jsonl'}` since v0.8.1.dev30; that of the run is a placeholder.",
        "",
        *_one_machine(layout, folder),
        *_several_machines(layout, folder),
        *_after_a_stop(layout),
    ]
    return "\n".join(parts) + "\n"


def _one_machine(layout: Layout, folder: Path) -> list[str]:
    each, count, train = layout.machines.inference_gpus, len(layout.servers), layout.train_gpus
    needed, title = count * each + train, ["## One machine", ""]
    if needed > layout.machines.gpus_per_node:
        return [*title, f"It takes {needed} GPUs, and a machine has {layout.machines.gpus_per_node}.", ""]
    lines = [
        f"{_visible(number * each, each)} {_serve(layout, server, folder)}"
        for number, server in enumerate(layout.servers)
    ]
    lines.append(f"{_visible(count * each, train)} {TORCHRUN} --nproc-per-node={train} {_train(folder)}")
    elsewhere = [server.host for server in layout.servers if not server.is_local]
    condition = f", with localhost instead of {', '.join(elsewhere)} in `[inference] url`" if elsewhere else ""
    return [*title, f"{needed} GPUs{condition}. A terminal for each line:", "", *_block([*lines, _run(layout)])]


def _several_machines(layout: Layout, folder: Path) -> list[str]:
    nodes, per_node = layout.nodes, min(layout.train_gpus, layout.machines.gpus_per_node)
    text = [f"`{layout.output_dir}` and both files are on a disk that all share."]
    joined = sockets = ""
    if nodes > 1:
        text.append(f"`torchrun` is typed on each of the trainer's {nodes} machines; HEAD is the first of them.")
        joined = f" --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HEAD:{RENDEZVOUS_PORT}"
    if layout.config.inference.admin_url and not layout.backend_port:
        text.append("`[inference] url` is a router of yours before these servers.")
    if layout.options.transport == "zmq" and layout.trainer_host == "localhost":
        text.append('RUN is the machine of the run, with `zmq_host = "0.0.0.0"` in its `[backend.options]`.')
        sockets = " --rollout_transport.host RUN"
    if any(server.is_local for server in layout.servers):
        text.append("`[inference] url` names localhost: put the server's machine there and write the files again.")
    else:
        text.append(
            "A server takes requests and weights from everybody who reaches it: keep its port off open networks."
        )
    lines = [
        *(f"{_serve(layout, server, folder)}  # on {server.host}" for server in layout.servers),
        f"{TORCHRUN}{joined} --nproc-per-node={per_node} {_train(folder)}{sockets}",
        _run(layout),
    ]
    return ["## Several machines", "", *text, "", *_block(lines)]


def _after_a_stop(layout: Layout) -> list[str]:
    resume = f"retrain --resume {shlex.quote(layout.config.logging.log_dir)}"
    text = [
        "## After a stop",
        "",
        "When the run is done, the trainer waits for another step: stop it. Where only the run was stopped, the",
        f"trainer stays as it is, and `{resume}` goes on.",
        "",
    ]
    if not layout.config.training.save_every:
        return [*text, "The trainer saves no checkpoints (`save_every = 0`): where it was stopped, begin anew."]
    if layout.options.transport == "filesystem":
        text += [
            "Where the trainer was stopped, its line with `--resume` at the end goes on from its newest checkpoint",
            "(before v0.8.1.dev26 `--ckpt.resume-step STEP`) and reads the batches since then again. Further back:",
            "",
        ]
    return [
        *text,
        f"STEP is the checkpoint to start from, in `{layout.output_dir / 'checkpoints'}`. Remove later steps from",
        "`rollouts/` and `broadcasts/` beside it, put `--resume.step STEP` behind the trainer's line (before",
        "v0.8.1.dev26 `--ckpt.resume-step STEP`), and tell the run which step is next, NEXT = STEP + 1:",
        "",
        *_block([f"{resume} --set backend.options.first_step=NEXT"]),
    ]


def _serve(layout: Layout, server: Server, folder: Path) -> str:
    port = "" if server.port == layout.servers[0].port else f" --server.port {server.port}"
    return f"uv run inference @ {_file(folder, INFERENCE)}{port}"


def _train(folder: Path) -> str:
    return f"{MODULE} @ {_file(folder, TRAINER)}"


def _run(layout: Layout) -> str:
    return shlex.join(["retrain", *layout.arguments])


def _file(folder: Path, name: str) -> str:
    return shlex.quote(str(folder.resolve() / name))


def _visible(first: int, count: int) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(str(number) for number in range(first, first + count))}"


def _block(lines: list[str]) -> list[str]:
    return ["```bash", *lines, "```", ""]
