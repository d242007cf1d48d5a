"""The connection between the code of tests and the program, each in a separate process.

Plain values cross as copies. Functions, classes and other objects stay where they are, and the other side has proxies
for them: a call, an attribute or an operator of a proxy is a request. While one side waits for an answer it serves
requests of the other, such as calls of a function that was an argument. Changes of arguments are sent back.
"""

from __future__ import annotations

import sys
from _json import encode_basestring_ascii as quoted
from _thread import RLock

from retrain_rewards.sandbox import inside
from retrain_rewards.sandbox.values import Decoder, Encoder, content, parsed, replace_content

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "divmod")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
ARITHMETIC = frozenset(f"__{prefix}{name}__" for prefix in ("", "r", "i") for name in (*_BINARY, *_BITWISE))
GUARDED = ARITHMETIC | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__"}
HANDLERS: dict[str, Callable[..., Any]] = {"get": getattr, "set": setattr, "del": delattr}
ALWAYS = frozenset(("__str__", "__repr__", "__format__", "__copy__", "__deepcopy__"))
SPECIALS = (
    GUARDED
    | ALWAYS
    | {"__call__", "__iter__", "__next__", "__reversed__", "__len__", "__length_hint__", "__bool__", "__hash__"}
    | {"__getitem__", "__setitem__", "__delitem__", "__enter__", "__exit__", "__index__", "__int__", "__float__"}
    | {"__complex__", "__abs__", "__neg__", "__pos__", "__invert__", "__round__", "__floor__", "__ceil__", "__trunc__"}
    | {"__bytes__"}
)
PREDICATES = frozenset(
    name for kind in (str, set) for name in dir(kind) if name.startswith("is") or name in ("startswith", "endswith")
)
# Lists of the program's objects whose changes by the tests are looked for.
BORROWED = 64
FRAMEWORKS = ("unittest", "pytest", "_pytest")
PROGRAM = ("program", "__main__")  # the modules whose classes stay where they are


class Link:
    """One end. `serve` answers a request of the other side; `trusted` proxies may meet plain values."""

    def __init__(self, descriptor: int, serve: Callable[..., Any], ended: Callable[[], Any], *, guards: bool) -> None:
        self.descriptor = descriptor
        self.guards = guards
        self.trusted: set[int] = set()  # objects that the tests have made of a class which they name
        self.returned: set[int] = set()  # objects that the program gave: no plain value is compared by them
        self.constructors: set[type] = set()  # classes that the tests name as classes are named
        self.asked = 0
        self.pending: list[tuple[Any, list[Any]]] = []  # changes of arguments, until the statement ends
        self.borrowed: list[tuple[Any, list[Any], int]] = []  # copies of lists of the program's objects
        self._serve = serve
        self._ended = ended
        self._lock = RLock()
        self._mine: list[Any] = []
        self._handles: dict[int, int] = {}
        self._described: set[int] = set()
        self._proxies: dict[int, Any] = {}
        self._classes: dict[int, type] = {}
        self._shared: dict[int, type] = {}

    def ask(self, verb: str, *parts: Any, makes: bool = False) -> Any:
        """Return the answer of the other side, or raise its exception."""
        with self._lock:
            self.asked += 1
            encoder = Encoder(self._export)
            self._send(encoder.tagged(verb, parts))
            while (frame := self.receive())[0] not in ("ok", "error", "end"):
                self.answer(frame)
            kind, node, changes, *lent = frame
            known = list(encoder.known)
            for number, *_ in changes:  # the answer shows changed arguments, and they themselves a little later
                known[number] = type(known[number])()
            decoder = LinkDecoder(self, known)
            value = decoder.decode(node)
            for number, *parts in changes:
                replace_content(known[number], [decoder.decode(each) for each in parts])
            own = {id(known[number]): encoder.known[number] for number, *_ in changes}
            changed = [
                (encoder.known[number], [own.get(id(each), each) for each in content(known[number])])
                for number, *_ in changes
            ]
            self._demote(decoder.objects[1 if makes else 0 :])
            parts_lent = zip(decoder.known[len(known) :], *lent, strict=True) if lent else ()
            self.borrowed += [(each, content(each), handle) for each, handle in parts_lent]
        if self.guards and kind == "ok" and value is not None:
            # `f(x) == sorted(x)` is about the x of before the call.
            self.pending += changed
        else:
            self.settle(changed)
        if kind == "ok":
            return value
        if kind == "end":
            raise StopIteration(value)
        if not isinstance(value, BaseException):
            value = RuntimeError("an answer that cannot be read")
        raise RAISED[type(value)](*value.args) if self.guards and type(value) in RAISED else value

    def _demote(self, handles: list[int]) -> None:
        self.returned.update(handles)
        self.trusted.difference_update(handles)

    def settle(self, changes: list[tuple[Any, list[Any]]] | None = None) -> None:
        for value, parts in self.pending if changes is None else changes:
            replace_content(value, parts)
        if changes is not None:
            return
        self.pending, borrowed = [], self.borrowed[-BORROWED:]
        self.borrowed = [(value, content(value), handle) for value, _, handle in borrowed]
        for value, before, handle in borrowed:
            if _differ(before, now := content(value)):
                self.ask("fill", handle, now)

    def answer(self, frame: list[Any]) -> None:
        decoder = LinkDecoder(self)
        verb, *nodes = frame
        parts = [decoder.decode(node) for node in nodes]
        before = [content(value) for value in decoder.known]
        kind = "ok"
        try:
            value = None
            if verb == "fill":
                replace_content(self.mine(parts[0]), parts[1])
            else:
                value = self._serve(verb, *parts)
        except StopIteration as error:
            is_end = verb == "op" and parts[1] == "__next__"
            kind, value = ("end", error.value) if is_end else ("error", error)
        except BaseException as error:
            kind, value = "error", error
        lent = ""
        try:
            encoder = Encoder(self._export, decoder.known)
            # an object that a class of the program, or of the tests, has made stays on its side
            is_made = kind == "ok" and verb == "call" and issubclass(type(parts[0]), type) and handle_of(value) is None
            is_made = is_made and type(value).__module__ in PROGRAM and not hasattr(type(value), "_fields")
            is_made = is_made and not issubclass(type(value), BaseException)
            text = self._object(value) if is_made else encoder.encode(value)
            changes = ",".join(
                ",".join([f"[{number}", *map(encoder.encode, now)]) + "]"
                for number, (old, now) in enumerate(zip(before, map(content, decoder.known), strict=True))
                if _differ(old, now)
            )
            new = encoder.known[len(decoder.known) :]
            if verb == "get" and new:  # lists of an object: the tests may change them
                lent = f",[{','.join(str(self._handle(each)) for each in new)}]"
        except BaseException as error:  # of a value that cannot cross, or whose methods raise
            kind, changes = "error", ""
            text = Encoder(self._export).encode(TypeError(inside.described(error)))
        self._send(f'["{kind}",{text},[{changes}]{lent}]')

    def _send(self, text: str) -> None:
        inside.send(self.descriptor, text.encode("ascii"))

    def receive(self) -> list[Any]:
        """Return the next message of the other side: a request, or the answer to one."""
        frame = parsed(inside.read_frame(self.descriptor, self._ended).decode("ascii"))
        if type(frame) is not list or not frame or type(frame[0]) is not str:
            raise ValueError("no message")
        return frame

    def mine(self, handle: int) -> Any:
        if type(handle) is not int or not 0 <= handle < len(self._mine):
            raise LookupError("no object")
        return self._mine[handle]

    def _handle(self, value: Any) -> int:
        handle = self._handles.setdefault(id(value), len(self._mine))
        if handle == len(self._mine):
            self._mine.append(value)
        return handle

    def _object(self, value: Any) -> str:
        return f'["object",{self._handle(value)},{self._class(type(value))}]'

    def _export(self, value: Any) -> str:
        kind = type(value)
        if issubclass(kind, (list, dict, set)) and id(value) not in self._handles:
            raise TypeError("a copy will do")
        if (handle := handle_of(value)) is not None:
            return f'["yours",{handle}]'
        if isinstance(value, type):
            return self._class(value)
        if value is NotImplemented or value is Ellipsis:
            return f'["constant","{value!r}"]'
        if kind is type(sys):
            raise TypeError("a module is no plain value")
        if not issubclass(kind, BaseException):
            return self._object(value)
        try:
            arguments = Encoder().tagged("tuple", value.args)
        except BaseException:
            arguments = Encoder().tagged("tuple", (inside.described(value),))
        return f'["error",{self._handle(value)},{self._class(kind)},{arguments}]'

    def _class(self, kind: type) -> str:
        if (known := handle_of(kind)) is not None:
            return f'["yours",{known}]'
        handle = self._handle(kind)
        if handle in self._described:
            return f'["class",{handle}]'
        self._described.add(handle)
        lineage = type.__dict__["__mro__"].__get__(kind)[:-1]  # its real classes, without `object`
        if issubclass(kind, BaseException):
            lineage = [each for each in lineage if each.__module__ != "builtins"]
        names = [name for name in SPECIALS if any(vars(each).get(name) is not None for each in lineage)]
        bases = [self._class(base) for base in type.__dict__["__bases__"].__get__(kind) if base is not object]
        given = ",".join(map(quoted, (str(kind.__name__), str(kind.__module__), " ".join(sorted(names)))))
        return f'["class",{handle},{given},[{",".join(bases)}]]'

    def proxy(self, handle: int, kind: type) -> Any:
        if handle not in self._proxies:
            made: Any = object.__new__(kind)
            self._proxies[handle] = made
            object.__setattr__(made, "_retrain_handle", handle)
        return self._proxies[handle]

    def class_of(self, parts: list[Any], decoder: LinkDecoder, *, of_object: bool) -> type:
        """Return a class of the other side: for its objects a proxy, otherwise a library's same class if possible."""
        if len(parts) > 1:
            handle, name, module, specials, base_nodes = parts
            bases = [decoder.decode(node) for node in base_nodes]
            local = getattr(sys.modules.get(module), name, None)
            if isinstance(local, type) and module.partition(".")[0] not in (*PROGRAM, *FRAMEWORKS):
                local = RAISED.get(local, local) if self.guards else local
                ends_things = issubclass(local, BaseException) and not issubclass(local, Exception)
                if not self.guards or not (ends_things or issubclass(local, CONTROL)) or local in HARMLESS:
                    self._shared[handle] = local
            self._classes[handle] = proxy_class(self, handle, name, specials.split(), bases)
        return self._classes[parts[0]] if of_object else self._shared.get(parts[0], self._classes[parts[0]])


def _differ(before: list[Any], now: list[Any]) -> bool:
    return len(before) != len(now) or any(one is not other for one, other in zip(before, now, strict=True))


async def _awaited(link: Link, coroutine: Any) -> Any:
    return link.ask("await", coroutine)


class LinkDecoder(Decoder):
    def __init__(self, link: Link, known: list[Any] | None = None) -> None:
        super().__init__(self._object, known or ())
        self.link = link
        self.objects: list[int] = []  # handles, in their order

    def _object(self, tag: str, parts: list[Any], _: Decoder) -> Any:
        if tag == "object":
            self.objects.append(parts[0])
            made = self.link.proxy(parts[0], self._class(parts[1]))
            return _awaited(self.link, made) if type(made).__name__ == "coroutine" else made
        if tag == "yours":
            return self.link.mine(parts[0])
        if tag == "class":
            return self.link.class_of(parts, self, of_object=False)
        if tag == "constant":
            return {"NotImplemented": NotImplemented, "Ellipsis": Ellipsis}[parts[0]]
        if tag == "error":
            return self._error(parts[0], self.decode(parts[1]), self.decode(parts[2]))
        raise ValueError("no plain value: unknown tag")

    def _class(self, node: Any) -> type:
        if node[0] == "class":
            return self.link.class_of(node[1:], self, of_object=True)
        made: type = self.decode(node)
        return made

    def _error(self, handle: int, kind: type, arguments: tuple[Any, ...]) -> BaseException:
        if not issubclass(kind, BaseException):
            raise ValueError("no exception")
        try:
            made = kind.__new__(kind, *arguments)
        except Exception:  # some builtin ones want arguments of other types
            made = Exception.__new__(Exception)
        made.args = arguments
        if isinstance(made, ProxyError):
            made.__dict__.update(_retrain_handle=handle, _retrain_link=self.link)
        return made


class ProxyClass(type):
    _retrain_link: Link
    _retrain_class: int

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if "_retrain_class" not in vars(cls):  # derived from one, by the code of tests
            return type.__call__(cls, *arguments, **keywords)
        link = cls._retrain_link
        made = link.ask("call", cls, arguments, keywords, makes=True)
        handle = handle_of(made)
        if handle is not None and cls in link.constructors and handle not in link.returned:
            link.trusted.add(handle)
        return made

    def __getattr__(cls, name: str) -> Any:
        if "_retrain_class" not in vars(cls) or name.startswith("_retrain"):
            raise AttributeError(name)
        return cls._retrain_link.ask("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name.startswith("__") or "_retrain_class" not in vars(cls):  # Python's own, and `abc`'s
            return type.__setattr__(cls, name, value)
        return cls._retrain_link.ask("set", cls, name, value)  # type: ignore[no-any-return]

    def __bool__(cls) -> bool:
        return True


def _of_class(special: str) -> Callable[..., Any]:
    return lambda cls, *arguments: cls._retrain_link.ask("op", cls, special, arguments, {})


for _special in ("__iter__", "__len__", "__getitem__", "__contains__"):
    setattr(ProxyClass, _special, _of_class(_special))


class Proxy(metaclass=ProxyClass):
    __slots__ = ("__weakref__", "_retrain_handle")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_retrain"):
            raise AttributeError(name)
        link = type(self)._retrain_link
        if link.guards and name in PREDICATES and self._retrain_handle not in link.trusted:
            raise AttributeError(f"{name} of an object that the program returned")  # it would judge itself
        return link.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        type(self)._retrain_link.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        type(self)._retrain_link.ask("del", self, name)


class ProxyError(BaseException):
    """An exception of a class of the other side; its attributes are there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_retrain") or handle_of(self) is None:
            raise AttributeError(name)
        return self.__dict__["_retrain_link"].ask("get", self, name)


class RaisedError(ProxyError):
    """An exception that would steer the code of tests, under another class that steers nothing."""


CONTROL = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt)
RAISED: dict[type, type[BaseException]] = {
    kind: type(kind.__name__, (RaisedError, *{Exception}.intersection(kind.__mro__)), {"__module__": "program"})
    for kind in CONTROL
}
HARMLESS = (BaseException, *RAISED.values())


def handle_of(value: Any) -> int | None:
    kind = type(value)
    if kind is ProxyClass:
        return type.__dict__["__dict__"].__get__(value).get("_retrain_class")  # type: ignore[no-any-return]
    if issubclass(kind, Proxy):
        return value._retrain_handle  # type: ignore[no-any-return]
    return value.__dict__.get("_retrain_handle") if issubclass(kind, ProxyError) else None


def proxy_class(link: Link, handle: int, name: str, specials: list[str], bases: list[Any]) -> type:
    """Make a class of the same name, with the same proxies as bases, whose operators are requests."""
    errors = [base for base in bases if issubclass(base, BaseException)]
    proxies = [base for base in bases if issubclass(base, Proxy)]
    namespace: dict[str, Any] = {"__module__": "program", "_retrain_link": link, "_retrain_class": handle}
    namespace |= {each: _forwarded(each) for each in SPECIALS.intersection(specials)}
    if not errors:
        namespace["__doc__"] = property(lambda self: link.ask("get", self, "__doc__"))
        namespace |= {"__slots__": (), **{each: _forwarded(each) for each in ALWAYS}}
    own = [] if any(issubclass(base, ProxyError) for base in errors) else [ProxyError]
    parents = (*own, *errors) if errors else tuple(proxies) or (Proxy,)
    try:
        return ProxyClass(str(name), parents, namespace)
    except TypeError:  # bases that do not go together without their real layout
        return ProxyClass(str(name), (ProxyError, Exception) if errors else (Proxy,), namespace)


def _forwarded(special: str) -> Callable[..., Any]:
    def forwarded(self: Any, *arguments: Any, **keywords: Any) -> Any:
        link = type(self)._retrain_link
        handle = handle_of(self)
        is_trusted = not link.guards or handle in link.trusted
        if special in GUARDED and not is_trusted and any(handle_of(each) is None for each in arguments):
            if special == "__contains__":
                return any(each is arguments[0] or each == arguments[0] for each in self)
            if special in ("__eq__", "__ne__"):
                # Only the program would say that its object equals a plain value.
                return special == "__ne__"
            return NotImplemented
        if special == "__exit__":
            arguments = (*arguments[:2], None)  # a traceback does not cross
        given = () if special == "__deepcopy__" else arguments
        made = link.ask("op", self, special, given, keywords, makes=True)
        if special == "__exit__" and link.guards and arguments[0] is not None:
            # A failed test stays a failed test.
            return made and not issubclass(arguments[0], AssertionError)
        is_new = (new := handle_of(made)) is not None and new not in link.returned
        if is_new and is_trusted and special in (*ARITHMETIC, "__copy__", "__deepcopy__"):
            link.trusted.add(new)
        elif new is not None and new != handle:
            link._demote([new])
        return made

    return forwarded


def operate(target: Any, special: str, arguments: Any, keywords: Any) -> Any:
    if special in ("__copy__", "__deepcopy__"):
        return getattr(__import__("copy"), special.strip("_"))(target)
    if special == "__getitem__" and issubclass(type(target), type):
        return target[arguments[0]]
    method = getattr(type(target), special, None)
    if method is None or special not in SPECIALS:
        raise TypeError(f"{type(target).__name__} has no {special}")
    return method(target, *arguments, **keywords)
