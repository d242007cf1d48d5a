"""What runs inside the sandbox: the program of one completion, or tests that call it from another sandbox.

It is sent as text to a bare interpreter and imports next to nothing: `json` alone would double the time to start.
Nothing that comes from here is trusted. Once a program runs, it can change all of this, and all it gains is to answer
for itself: expected outputs never come here, and the code of tests never comes into the program's process.

The other side sends `marshal`, and gets JSON, in frames of eight bytes of length and the content.
"""

from __future__ import annotations

import atexit
import builtins
import marshal
import os
import sys
from _json import encode_basestring_ascii as quoted

TYPE_CHECKING = False  # importing `typing` would double the time to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

HEADER_BYTES = 8
TEXT_CHARS = 200  # of an exception's text
ANNOTATIONS = ("Any", "Callable", "Dict", "Iterable", "Iterator", "List", "Optional", "Set", "Tuple", "Union")


def main() -> None:
    """Take the limits from `argv`, keep the channel, say that we are here, and play the part that we are given."""
    memory_bytes, cpu_s, file_bytes = (int(word) for word in sys.argv[1:4])
    channel = os.dup(0)
    _detach()
    _limit(memory_bytes, cpu_s, file_bytes)
    _send(channel, "true")
    part, source = _receive(channel)
    {"script": _serve_script, "functions": _serve_functions, "tests": _serve_tests}[part](channel, source, file_bytes)


def _detach() -> None:
    """Let the three standard streams lead nowhere; a program may have closed them."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if nothing > 2:
        os.close(nothing)


def _limit(memory_bytes: int, cpu_s: int, file_bytes: int) -> None:
    import resource

    limits = {"AS": memory_bytes, "CPU": cpu_s, "FSIZE": file_bytes, "NOFILE": 64, "CORE": 0}
    for name, size in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (size, size))
        except (ValueError, OSError):  # macOS knows no limit of the address space; a lower one may hold already
            continue


def _serve_script(channel: int, source: str, output_bytes: int) -> None:
    """Run the program once per request, from the beginning, with the request as its standard input."""
    code = _compiled(source, "program.py")
    while True:
        stdin = _receive(channel)
        output, fault = ("", code) if isinstance(code, str) else _run_script(code, stdin, output_bytes)
        _send(channel, f"[{quoted(output)},{quoted(fault)}]")


def _run_script(code: CodeType, stdin: str, output_bytes: int) -> tuple[str, str]:
    _detach()
    feed, output = _file(stdin.encode("utf-8", "surrogatepass")), _file(b"")
    os.dup2(feed, 0)
    os.dup2(output, 1)
    os.close(feed)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115 - the program's
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    module = sys.modules["__main__"] = type(sys)("__main__")
    fault = ""
    try:
        exec(code, module.__dict__)
    except SystemExit as leaving:
        fault = f"exited with code {leaving.code!r}"[:TEXT_CHARS] if leaving.code else ""
    except BaseException as error:
        fault = _described(error)
    try:
        atexit._run_exitfuncs()  # many write what they have collected only then
        sys.stdout.flush()
    except BaseException as error:
        fault = fault or _described(error)
    written, start = b"", 0
    while part := os.pread(output, 1 << 20, start):
        written, start = written + part, start + len(part)
    os.close(output)
    return written.decode("utf-8", "replace"), fault or ("printed too much" if start >= output_bytes else "")


def _file(content: bytes) -> int:
    """A file without a name, read from its beginning."""
    name = f"stream-{os.getpid()}"
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.unlink(name)
    os.pwrite(descriptor, content, 0)
    return descriptor


def _serve_functions(channel: int, source: str, _: int) -> None:
    """Load the program as a module, and answer calls of its functions."""
    module = sys.modules["program"] = type(sys)("program")
    code = _compiled(source, "program.py")
    fault = code if isinstance(code, str) else ""
    try:
        if "typing" not in source and any(name in source for name in ANNOTATIONS):
            import typing  # the prompt's own import, which completions often leave out

            module.__dict__.update({name: getattr(typing, name) for name in ANNOTATIONS})
        if not isinstance(code, str):
            exec(code, module.__dict__)
    except BaseException as error:
        fault = _described(error)
    while True:
        name, arguments, keywords = _receive(channel)
        try:
            if fault:
                raise ImportError(fault)
            function = getattr(module, name, None)
            if function is None and hasattr(module, "Solution"):
                function = getattr(module.Solution(), name, None)
            if function is None:
                raise NameError(f"the program defines no {name}")
            answer = f"[{_encoded(function(*arguments, **keywords))}]"
        except BaseException as error:
            answer = f"[{quoted(type(error).__name__)},{quoted(_described(error))}]"
        _send(channel, answer)


def _serve_tests(channel: int, _: str, __: int) -> None:
    """Run code of tests; the names that it takes from the program are functions that ask for their value."""

    def asking(name: str) -> Callable[..., Any]:
        def ask(*arguments: Any, **keywords: Any) -> Any:
            _send(channel, f"[{quoted(name)},{_encoded(arguments)},{_encoded(keywords)}]")
            answer = _receive(channel)
            if len(answer) == 1:
                return answer[0]
            kind = getattr(builtins, answer[0], None)
            raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(answer[1])

        return ask

    while True:
        source, names = _receive(channel)
        namespace: dict[str, Any] = {"__name__": "tests", **{name: asking(name) for name in names}}
        fault = ""
        try:
            exec(compile(source, "tests.py", "exec"), namespace)
        except BaseException as error:
            fault = _described(error)
        _send(channel, quoted(fault))


def _compiled(source: str, name: str) -> CodeType | str:
    """The code, or what is wrong with it."""
    try:
        return compile(source, name, "exec", dont_inherit=True)
    except BaseException as error:
        return _described(error)


def _described(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = "an exception without a text"
    return text[:TEXT_CHARS]


def _encoded(value: Any) -> str:
    """A plain value as JSON: an array is `[tag, ...]`; subclasses as their base. TypeError for any other object."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return str(quoted(str.__str__(value)))
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return text if text[-1].isdigit() else f'["float","{text}"]'
    if isinstance(value, complex):
        return f'["complex",{_encoded(value.real)},{_encoded(value.imag)}]'
    if isinstance(value, bytes | bytearray):
        return f'["bytes",{quoted(value.decode("latin-1"))}]'
    if isinstance(value, dict):
        return ",".join(['["dict"', *(_encoded(each) for pair in value.items() for each in pair)]) + "]"
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return ",".join([f'["{kind.__name__}"', *map(_encoded, value)]) + "]"
    raise TypeError(f"{type(value).__name__} is no plain value")


def _send(channel: int, text: str) -> None:
    content = text.encode("ascii")
    content = len(content).to_bytes(HEADER_BYTES, "big") + content
    while content:
        content = content[os.write(channel, content) :]


def _receive(channel: int) -> Any:
    size = int.from_bytes(_read(channel, HEADER_BYTES), "big")
    return marshal.loads(_read(channel, size))


def _read(channel: int, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = os.read(channel, size - len(content))
        if not part:
            os._exit(0)
        content += part
    return bytes(content)


if __name__ == "__main__":
    main()
