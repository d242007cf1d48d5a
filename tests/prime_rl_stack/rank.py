"""One data rank as a process: receives batches, checks them, and lays them into the trainer's inbox.

`python rank.py RANK FOLDER --transport zmq --port 5555 --seq-len 64`. Steps are counted from 1, and a rank waits for
the file of its next one for ever. A rank that is started again goes on with the first step that is not in the inbox.
Whatever breaks the wire ends up in `FOLDER/inbox/FAILED`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import zmq

from tests.prime_rl_stack.wire_check import read

POLL_S = 0.02
FIRST_STEP = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--transport", choices=("filesystem", "zmq"), default="filesystem")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seq-len", type=int, required=True)
    arguments = parser.parse_args()
    inbox = arguments.folder / "inbox"
    inbox.mkdir(parents=True, exist_ok=True)
    try:
        receive = _from_files if arguments.transport == "filesystem" else _from_socket
        receive(arguments, inbox)
    except Exception as error:
        (inbox / "FAILED").write_text(f"rank {arguments.rank}: {type(error).__name__}: {error}", encoding="utf-8")
        raise


def _from_files(arguments: argparse.Namespace, inbox: Path) -> None:
    step = _next_step(inbox, arguments.rank)
    while True:
        file = arguments.folder / "rollouts" / f"step_{step}" / f"rank_{arguments.rank}.bin"
        if not file.exists():
            time.sleep(POLL_S)
            continue
        _accept(file.read_bytes(), arguments, inbox, step)
        step += 1


def _from_socket(arguments: argparse.Namespace, inbox: Path) -> None:
    context = zmq.Context()
    batches, ready = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    batches.setsockopt(zmq.RCVHWM, 10)
    batches.connect(f"tcp://127.0.0.1:{arguments.port}")
    batches.setsockopt(zmq.SUBSCRIBE, b"data_rank|%d|" % arguments.rank)
    ready.connect(f"tcp://127.0.0.1:{arguments.port + 1}")
    ready.send(str(arguments.rank).encode())
    step = _next_step(inbox, arguments.rank)
    while True:
        _, payload = batches.recv_multipart()
        if (arguments.folder / "HANG").exists():  # this rank is about to be killed with the step in its hands
            (inbox / f"hanging_{arguments.rank}").touch()
            time.sleep(600)
        _accept(payload, arguments, inbox, step)
        step += 1


def _accept(payload: bytes, arguments: argparse.Namespace, inbox: Path, step: int) -> None:
    read(payload, seq_len=arguments.seq_len)
    draft = inbox / f".rank_{arguments.rank}.tmp"
    draft.write_bytes(payload)
    os.replace(draft, inbox / f"step_{step}_rank_{arguments.rank}.bin")


def _next_step(inbox: Path, rank: int) -> int:
    return FIRST_STEP + len(list(inbox.glob(f"step_*_rank_{rank}.bin")))


if __name__ == "__main__":
    main()
