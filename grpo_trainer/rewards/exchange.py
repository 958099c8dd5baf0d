"""Tests on one side, the program under test on the other: two processes, each in a sandbox of its own.

::

    checker (tests, expected values, verdict)          candidate (the model's program)
        call f(3, [1, 2])        -- one line of JSON -->   f(3, [1, 2])
        == 6 ?                   <-- one line of JSON --   ["i", "0x6"]

Only plain data crosses: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range, and
iterators as what they yield. It is built anew on the checker's side, so that whatever the program does to its own
process (a patched ``assert``, ``__eq__``, ``print``; frames, the garbage collector, ``os._exit``), the checker sees
values and compares them itself. Arguments cross by value: a function that changes them in place changes its own copy.

This file is run as a program, by an interpreter without packages, so it imports the standard library only::

    python exchange.py candidate PROGRAM IN OUT
    python exchange.py checker IN OUT <job >verdict
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import itertools
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MAX_MESSAGE = 4 << 20
"""Most bytes of one value; a longer one fails the test that asked for it."""
MAX_YIELDED = 10_000
"""Most values that an iterator may yield."""


class CandidateError(BaseException):
    """The program under test gave no usable answer: it ended, took too long, or returned what is not plain data.

    Like `TestsError` it is no ``Exception``: tests that expect one must not take it for theirs.
    """


class TestsError(BaseException):
    """The tests themselves are at fault."""

    __test__ = False


# --- values --------------------------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """Plain data as JSON that keeps its types.

    Args:
        value: plain data; a value of a subclass crosses as one of the plain class.

    Returns:
        What ``json.dumps`` takes.

    Raises:
        TypeError: if it is not plain data.
        OverflowError: if an iterator in it yields too much.

    Example:
        >>> encode([1, (2.5, "a")])
        ['l', [['i', '0x1'], ['t', [['f', '0x1.4000000000000p+1'], 'a']]]]
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["i", hex(int(value))]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, (bytes, bytearray)):
        return ["b" if isinstance(value, bytes) else "B", bytes(value).decode("latin-1")]
    if isinstance(value, range):
        return ["r", *(hex(part) for part in (value.start, value.stop, value.step))]
    if isinstance(value, (list, tuple, set, frozenset)):
        tag = next(tag for tag, kind in _COLLECTIONS.items() if isinstance(value, kind))
        return [tag, [encode(item) for item in value]]
    if isinstance(value, dict):
        return ["d", [[encode(key), encode(item)] for key, item in value.items()]]
    if isinstance(value, (Iterator, type({}.keys()), type({}.values()), type({}.items()))):
        items = list(itertools.islice(value, MAX_YIELDED + 1))
        if len(items) > MAX_YIELDED:
            raise OverflowError(f"an iterator that yields more than {MAX_YIELDED} values")
        return ["y", [encode(item) for item in items]]
    raise TypeError(f"a value of type {type(value).__name__}, which is not plain data")


def decode(data: Any) -> Any:
    """What `encode` made, as new objects of exactly the plain types.

    Args:
        data: from ``json.loads``; whoever wrote it need not have used `encode`.

    Returns:
        Plain data.

    Raises:
        ValueError: if it is not what `encode` makes.

    Example:
        >>> decode(encode({(1, 2): {3}}))
        {(1, 2): {3}}
    """
    if data is None or isinstance(data, (bool, str)):
        return data
    if not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise ValueError("not an encoded value")
    try:
        return _DECODERS[data[0]](*data[1:])
    except (KeyError, TypeError, AttributeError, UnicodeError, OverflowError) as error:
        raise ValueError(f"not an encoded value: {error}") from None


_COLLECTIONS: dict[str, type] = {"l": list, "t": tuple, "s": set, "S": frozenset}
_DECODERS: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "f": lambda text: float.fromhex(text),
    "c": lambda real, imaginary: complex(float.fromhex(real), float.fromhex(imaginary)),
    "b": lambda text: text.encode("latin-1"),
    "B": lambda text: bytearray(text.encode("latin-1")),
    "r": lambda *parts: range(*(int(part, 16) for part in parts)),
    "l": lambda items: [decode(item) for item in items],
    "t": lambda items: tuple(decode(item) for item in items),
    "s": lambda items: {decode(item) for item in items},
    "S": lambda items: frozenset(decode(item) for item in items),
    "d": lambda pairs: {decode(key): decode(value) for key, value in pairs},
    "y": lambda items: iter([decode(item) for item in items]),
}


# --- the side of the program ---------------------------------------------------------------------------------------


def candidate(path: str, incoming: int, outgoing: int) -> None:
    """Runs a program and then calls its functions as asked, until nobody asks any more.

    Nothing that happens here decides anything: the program shares this process and may do with it what it likes.

    Args:
        path: of the program.
        incoming: descriptor of the questions.
        outgoing: descriptor of the answers.
    """
    sys.stdin = io.StringIO()
    with open(path, "rb") as file:
        source = file.read()
    namespace: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    try:
        exec(compile(source, "program", "exec"), namespace)
        answer: dict[str, Any] = {"ready": True}
    except BaseException as error:  # sys.exit too
        answer = {"raised": type(error).__name__}
    with open(incoming, "rb", buffering=0) as questions:
        reader = io.BufferedReader(questions)
        while True:
            data = json.dumps(answer).encode() + b"\n"
            while data:
                data = data[os.write(outgoing, data) :]
            if not (line := reader.readline()):
                return
            answer = _answer(json.loads(line), namespace)


def _answer(question: dict[str, Any], namespace: dict[str, Any]) -> dict[str, Any]:
    """Calls a function, or says what a name stands for."""
    try:
        found = namespace[question["name"]]
        if "arguments" not in question:
            return {"callable": True} if callable(found) else {"value": encode(found)}
        arguments, keywords = decode(question["arguments"]), decode(question["keywords"])
        return {"value": encode(found(*arguments, **keywords))}
    except BaseException as error:
        return {"raised": type(error).__name__}


# --- the side of the tests -----------------------------------------------------------------------------------------


class Channel:
    """Asks the program under test.

    Args:
        incoming: descriptor of the answers.
        outgoing: descriptor of the questions.
        seconds: how long the answers to one test may take together.
    """

    def __init__(self, incoming: int, outgoing: int, seconds: float) -> None:
        self.incoming, self.outgoing, self.seconds = incoming, outgoing, seconds
        self.rest = b""
        self.usable = True
        self.start_test()

    def start_test(self) -> None:
        """The time limit begins anew."""
        self.deadline = time.monotonic() + self.seconds

    def ask(self, question: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer to a question; to none, the next one that comes.

        Args:
            question: what ``json.dumps`` takes.

        Returns:
            The answer.

        Raises:
            CandidateError: if there is none in time, or never will be.
        """
        if not self.usable:
            raise CandidateError("the program has ended or hangs")
        self.usable = False  # unless this comes to its end: an answer that comes too late answers nothing else
        if question is not None:
            data = json.dumps(question).encode() + b"\n"
            while data:
                self._wait([], [self.outgoing])
                try:
                    data = data[os.write(self.outgoing, data[:4096]) :]
                except OSError as error:
                    raise CandidateError("the program has ended") from error
        while b"\n" not in self.rest:
            self._wait([self.incoming], [])
            chunk = os.read(self.incoming, 1 << 16)
            if not chunk:
                raise CandidateError("the program has ended")
            self.rest += chunk
            if len(self.rest) > MAX_MESSAGE:
                raise CandidateError(f"an answer of more than {MAX_MESSAGE} bytes")
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CandidateError("an answer that cannot be read") from error
        self.usable = True
        if not isinstance(answer, dict):
            raise CandidateError("an answer that cannot be read")
        return answer

    def _wait(self, readable: list[int], writable: list[int]) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0 or not any(select.select(readable, writable, [], left)):
            raise CandidateError("the time limit of the test ran out")


class Remote:
    """A function of the program under test.

    Args:
        channel: to the program.
        name: of the function.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self._ask, self.__name__ = channel.ask, name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Its value.

        Args:
            *arguments: plain data.
            **keywords: plain data.

        Returns:
            Plain data.

        Raises:
            TestsError: if an argument is not plain data.
            CandidateError: if the program does not answer with plain data in time.
            Exception: as the function raised it, if it is one of Python's own.
        """
        try:
            sent = {"arguments": encode(arguments), "keywords": encode(keywords)}
        except TypeError as error:
            raise TestsError(f"the tests call {self.__name__} with {error}") from error
        except (RecursionError, OverflowError) as error:
            raise CandidateError("data nested too deeply, or too much of it") from error
        answer = self._ask({"name": self.__name__, **sent})
        if "value" not in answer:
            raise _as_raised(answer.get("raised"))
        try:
            return decode(answer["value"])
        except (ValueError, RecursionError) as error:
            raise CandidateError(str(error)) from error


def check(job: Mapping[str, Any], incoming: int, outgoing: int) -> Iterator[Any]:
    """Runs tests.

    Args:
        job: ``tests``, a text or several; ``setup``, a text that runs before them; ``entry_point``, the function that
            ``check`` is given, or None; ``seconds`` per test, and ``start_seconds`` until the program is there.
        incoming: descriptor of the program's answers.
        outgoing: descriptor of the questions to it.

    Yields:
        The number of tests, then for each whether it passed.

    Raises:
        TestsError: if the tests themselves cannot be run.
    """
    setup, tests, names = plan(job)
    count = sum(test.counts for test in tests)
    namespace: dict[str, Any] = {"__name__": "tests"}
    for node in setup:  # before the program has a say, so that what goes wrong here is not its doing
        _execute(node, namespace)
    for test in tests:
        if isinstance(test.node, (ast.Import, ast.ImportFrom)):
            _execute(test.node, namespace)
    yield count
    channel = Channel(incoming, outgoing, job["start_seconds"])
    try:
        channel.ask(None)
        for bound, name in names.items():
            with contextlib.suppress(LookupError):
                namespace[bound] = _find(channel, name)
    except CandidateError:
        return
    channel.seconds = job["seconds"]
    for test in tests:
        channel.start_test()
        try:
            exec(compile(ast.Module([test.node], []), "tests", "exec"), namespace)
            passed = True
        except TestsError:
            raise
        except BaseException:  # also where the tests' own code meets a value that it did not expect
            passed = False
        if test.counts:
            yield passed


class Statement(NamedTuple):
    """A statement of the tests, and whether it is a test."""

    node: ast.stmt
    counts: bool


def plan(job: Mapping[str, Any]) -> tuple[list[ast.stmt], list[Statement], dict[str, str]]:
    """What there is to do.

    Args:
        job: see `check`.

    Returns:
        The statements before the tests; the tests; and names in the tests, each with what the program calls it.

    Raises:
        TestsError: if the tests are no Python, or hold no assert.
    """
    given = job["tests"]
    try:
        setup: list[ast.stmt] = list(ast.parse(job["setup"] or "").body)
        body = [node for text in ([given] if isinstance(given, str) else given) for node in ast.parse(text).body]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestsError(f"they are not Python: {error}") from error
    entry = job["entry_point"]
    check_form = next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == "check"), None)
    if check_form is not None and entry:
        if len(check_form.args.args) != 1:
            raise TestsError("check takes other than one argument")
        bound = check_form.args.args[0].arg
        setup += [n for n in body if n is not check_form and not _calls(n, "check")]
        whole = any(isinstance(n, (ast.Return, ast.Global, ast.Nonlocal, ast.Yield)) for n in ast.walk(check_form))
        tests = [Statement(n, _is_test(n)) for n in check_form.body]
        if whole:  # it cannot be taken apart
            setup.append(check_form)
            tests = [Statement(ast.parse(f"check({bound})").body[0], _is_test(check_form))]
    else:
        bound = entry
        definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        setup += [n for n in body if isinstance(n, definitions)]
        tests = [Statement(n, _is_test(n)) for n in body if not isinstance(n, definitions)]
    if not any(test.counts for test in tests):
        raise TestsError("there is no assert in them")
    wanted = dict.fromkeys(_free_names([*setup, *(test.node for test in tests)]) - {bound, entry})
    names = {name: name for name in wanted}
    # by its own name too: the check of HumanEval/33 calls it so
    return setup, tests, {**names, entry: entry, bound: entry} if entry else names


def _is_test(node: ast.stmt) -> bool:
    """Whether it holds an assert that says something; HumanEval has ``assert True``."""
    return any(isinstance(n, ast.Assert) and not isinstance(n.test, ast.Constant) for n in ast.walk(node))


def _calls(node: ast.stmt, name: str) -> bool:
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name for n in ast.walk(node))


def _free_names(nodes: Sequence[ast.stmt]) -> set[str]:
    """Names that are read and never bound, here or by Python: they are the program's."""
    read: set[str] = set()
    bound = set(dir(builtins))
    for n in (inner for node in nodes for inner in ast.walk(node)):
        if isinstance(n, ast.Name):
            (read if isinstance(n.ctx, ast.Load) else bound).add(n.id)
        elif isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(n.name)
        elif isinstance(n, ast.arg):
            bound.add(n.arg)
        elif isinstance(n, ast.alias):
            bound.add((n.asname or n.name).split(".")[0])
        elif isinstance(n, ast.ExceptHandler) and n.name:
            bound.add(n.name)
    return read - bound


def _find(channel: Channel, name: str) -> Any:
    """What the program calls so: a function to be called there, or plain data."""
    answer = channel.ask({"name": name})
    if answer.get("callable") is True:
        return Remote(channel, name)
    if "value" not in answer:
        raise LookupError(name)
    try:
        return decode(answer["value"])
    except (ValueError, RecursionError) as error:
        raise LookupError(name) from error


def _execute(node: ast.stmt, namespace: dict[str, Any]) -> None:
    try:
        exec(compile(ast.Module([node], []), "tests", "exec"), namespace)
    except BaseException as error:
        raise TestsError(f"they fail before the program is asked, {type(error).__name__}: {error}") from error


def _as_raised(name: Any) -> BaseException:
    """The exception that a function of the program raised, as its class of Python's own, or else as a plain one."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, BaseException):
        if not issubclass(kind, Exception):
            return CandidateError(name)
        with contextlib.suppress(TypeError):  # a class that wants arguments
            return kind("raised by the program")
    return Exception(str(name)[:100])


def main(words: Sequence[str]) -> None:
    """Runs one side.

    Args:
        words: see above.
    """
    if words[0] == "candidate":
        candidate(words[1], int(words[2]), int(words[3]))
        return
    job = json.loads(sys.stdin.buffer.read())
    said = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the tests print is no verdict
    try:
        for verdict in check(job, int(words[1]), int(words[2])):
            os.write(said, json.dumps(verdict).encode() + b"\n")
    except TestsError as error:
        os.write(said, json.dumps({"fault": str(error)[:500]}).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
