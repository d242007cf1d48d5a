"""The inside of the sandbox: its limits, the channel to the scoring process, and programs that read standard input.

It runs in a bare interpreter and imports next to nothing: `json` by itself would double the time to start. The reply of
a program's process is never trusted. Once a program runs, it can change all of this, and only answers for itself:
expected outputs never come here, and the code of tests never comes into the program's process.

The scoring process sends `marshal` and gets text, in frames of eight bytes of length and the content.
"""

from __future__ import annotations

import atexit
import builtins
import marshal
import os
import sys

TYPE_CHECKING = False  # importing `typing` would double the time to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

HEADER_BYTES = 8
TEXT_CHARS = 200  # of an exception's text
# As other graders set it: frames of Python code do not use the stack of the process.
RECURSION_LIMIT = 50_000
TASKS = 128  # threads of a process; the process that scores ends one that has more


def begin(memory_bytes: int, cpu_s: int, file_bytes: int) -> int:
    """Set the limits, keep the channel to the scoring process, and report there."""
    sys.argv[:] = ["program.py"]
    channel = os.dup(0)
    _detach()
    import resource

    limits = {"AS": memory_bytes, "CPU": cpu_s, "FSIZE": file_bytes, "NOFILE": 64, "CORE": 0}
    for name, size in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (size, size))
        except (ValueError, OSError):  # macOS knows no limit of the address space; a lower one may hold already
            continue
    send(channel, b"here")
    return channel


def _detach() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if nothing > 2:
        os.close(nothing)


def prepare() -> None:
    from _sitebuiltins import Quitter

    for name in ("exit", "quit"):
        setattr(builtins, name, Quitter(name, "Ctrl-D"))
    sys.setrecursionlimit(RECURSION_LIMIT)
    sys.set_int_max_str_digits(0)
    _count_threads()


STARTED: list[bool] = []  # one entry for each thread that a program has started


def _count_threads() -> None:
    """Refuse a thread too many as the system would. A program can undo this, and is then ended from outside."""
    import _thread

    def counted(start: Callable[..., Any]) -> Callable[..., Any]:
        def start_thread(*arguments: Any, **keywords: Any) -> Any:
            if _thread._count() >= TASKS - 8:
                raise RuntimeError("can't start new thread")
            STARTED.append(True)
            return start(*arguments, **keywords)

        return start_thread

    for name in ("start_new_thread", "start_new", "start_joinable_thread"):  # the last since Python 3.13
        if hasattr(_thread, name):
            setattr(_thread, name, counted(getattr(_thread, name)))


def serve_script(channel: int, source: str, prelude: str = "", *, output_bytes: int) -> None:
    prepare()
    code = compiled(source, "program.py")
    before = compiled(prelude, "imports.py")
    while True:
        stdin = receive(channel)
        output, fault = (b"", code) if isinstance(code, str) else _run_script(before, code, stdin, output_bytes)
        # Pools of threads do not start again once they are ended.
        is_used_up = b"1" if STARTED else b"0"
        failed = fault.encode("utf-8", "replace")
        send(channel, is_used_up + len(failed).to_bytes(HEADER_BYTES, "big") + failed + output)


def _run_script(before: Any, code: CodeType, stdin: str, output_bytes: int) -> tuple[bytes, str]:
    _detach()
    feed, output = _file(stdin.encode("utf-8", "surrogatepass")), _file(b"")
    os.dup2(feed, 0)
    os.dup2(output, 1)
    os.close(feed)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - the program's
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    module = sys.modules["__main__"] = type(sys)("__main__")
    fault = executed(before, code, module)
    try:
        if STARTED and "threading" in sys.modules:
            sys.modules["threading"]._shutdown()  # waits for the threads, as an interpreter does that ends
        # Many write their collected output only then.
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException as error:
        fault = fault or described(error)
    written = bytearray()
    while part := os.pread(output, 1 << 20, len(written)):
        written += part
    os.close(output)
    return bytes(written), fault or ("printed too much" if len(written) >= output_bytes else "")


def _file(content: bytes) -> int:
    name = f"stream-{os.getpid()}"
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    # Unlinked at once: the program sees an open file, and nothing is left behind.
    os.unlink(name)
    os.pwrite(descriptor, content, 0)
    return descriptor


def compiled(source: str, name: str) -> CodeType | str:
    try:
        return compile(source, name, "exec", dont_inherit=True)
    except BaseException as error:
        return described(error)


def executed(before: Any, code: CodeType, module: Any) -> str:
    """Run the code in the module, and return its fault, if any; a program may end with `exit()`."""
    try:
        exec(before, module.__dict__)
        exec(code, module.__dict__)
    except SystemExit as leaving:
        return f"exited with code {leaving.code!r}"[:TEXT_CHARS] if leaving.code else ""
    except BaseException as error:
        return described(error)
    return ""


def described(error: BaseException) -> str:
    """Return a short text of an exception, whatever that exception does."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = "an exception without a text"
    return text[:TEXT_CHARS]


def send(channel: int, content: bytes) -> None:
    content = len(content).to_bytes(HEADER_BYTES, "big") + content
    while content:
        content = content[os.write(channel, content) :]


def receive(channel: int) -> Any:
    return marshal.loads(read_frame(channel, leave))


def read_frame(channel: int, ended: Callable[[], Any]) -> bytes:
    """Return the content of the next frame; `ended` is called when the other side is gone."""
    size = int.from_bytes(_read(channel, HEADER_BYTES, ended), "big")
    return _read(channel, size, ended)


def _read(channel: int, size: int, ended: Callable[[], Any]) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = os.read(channel, min(size - len(content), 1 << 20))
        if not part:
            ended()
        content += part
    return bytes(content)


def leave() -> None:
    os._exit(0)
