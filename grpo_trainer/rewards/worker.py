"""The program of a worker: it calls reward functions where they can do no harm to a run.

A worker is two processes. The keeper loads the functions, forks the runner, and watches it; the runner calls them::

    trainer ──task──> keeper ──task──> runner
            <─reply──        <─JSON───

A runner that hangs, crashes or kills its parent takes a keeper with it at most. The keeper has the functions loaded, so
the next runner is a fork away. Both end when the trainer does, since their pipe to it ends. What comes back is JSON,
which can hold no code.

Run by its path, with a pipe as input and as output; a start message comes first. Knows the standard library only (and
``cloudpickle``, if the functions need it), so that a worker is there within a tenth of a second.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before anything else is imported: modules beside this file have names of the library's
    sys.path.pop(0)

import contextlib
import ctypes
import importlib
import inspect
import json
import numbers
import os
import pickle
import select
import signal
import struct
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ANSWER, TIMEOUT, CRASH = range(3)
"""Kinds of reply: what the function gave; it was ended by the time limit; it ended its process."""

MAX_REPLY = 64 << 20
"""Most bytes of a reply; a longer one counts as a crash."""

MAX_PRINTED = 10_000
"""Most characters that a call's prints are kept of."""

TASK = struct.Struct("!QQdQ")  # length, number, time limit, memory limit; a limit of 0 is none
REPLY = struct.Struct("!QQB")  # length, number, kind
LENGTH = struct.Struct("!Q")
ANSWERED = struct.Struct("!QB")  # of the runner: length, whether it should not be used again

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def main() -> None:
    """Serves one trainer until its pipe ends."""
    commands, replies = os.dup(0), os.dup(1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a function leaves behind comes to the keeper, which ends it
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    length = _read(commands, LENGTH.size)
    if length is None:
        return
    start = pickle.loads(_read(commands, *LENGTH.unpack(length)) or b"")
    sys.path[:] = start["path"]
    if start["once"]:
        _prctl(_PR_SET_DUMPABLE, 0)  # the runner cannot look into the keeper's memory and files
    functions, failed = load(start["functions"], start["imports"])
    with open(os.devnull, "r+b", buffering=0) as nowhere:
        for standard in (0, 1, 2):
            os.dup2(nowhere.fileno(), standard)
    _send(replies, 0, ANSWER, json.dumps({"failed": failed}).encode())
    Keeper(functions, commands, replies, once=start["once"]).serve()


def load(pickled: Sequence[bytes], imports: Sequence[str]) -> tuple[list[Any], dict[int, str]]:
    """The functions, and why some could not be loaded.

    Args:
        pickled: the functions.
        imports: modules that they import when they are called: done now, this is not part of a call's time.

    Returns:
        The functions (None where one cannot be loaded), and index -> what was raised.
    """
    for module in imports:
        with contextlib.suppress(Exception):  # the function itself will raise it again
            importlib.import_module(module)
    functions: list[Any] = []
    failed: dict[int, str] = {}
    for index, each in enumerate(pickled):
        try:
            functions.append(pickle.loads(each))
        except BaseException as error:
            functions.append(None)
            failed[index] = f"{type(error).__name__}: {error}"
    return functions, failed


class Keeper:
    """Forks runners and passes tasks on to them.

    Args:
        functions: the functions.
        commands: file descriptor from which tasks come.
        replies: file descriptor to which replies go.
        once: each runner serves one task only, so that nothing a completion does is still there for the next.
    """

    def __init__(self, functions: Sequence[Any], commands: int, replies: int, *, once: bool) -> None:
        self.functions = functions
        self.commands = commands
        self.replies = replies
        self.once = once
        self._runner: tuple[int, int, int] | None = None  # process, its input, its output
        self._used = False

    def serve(self) -> None:
        """Passes tasks on until there are no more."""
        try:
            while True:
                if self._runner is None:
                    self._runner = self._fork()
                header = _read(self.commands, TASK.size)
                if header is None:
                    return
                length, number, seconds, _ = TASK.unpack(header)
                body = _read(self.commands, length)
                if body is None:
                    return
                used, self._used = self._used, True
                reply = self._ask(header + body, seconds)
                if reply is not None and reply[0] == CRASH and used:  # an earlier call may have broken it
                    self._end_runner()
                    self._runner = self._fork()
                    reply = self._ask(header + body, seconds)
                if reply is None:
                    return
                kind, answer, spoilt = reply
                if spoilt or self.once:
                    self._end_runner()
                _send(self.replies, number, kind, answer)
        finally:
            self._end_runner()

    def _fork(self) -> tuple[int, int, int]:
        self._used = False
        task_out, task_in = os.pipe()
        reply_out, reply_in = os.pipe()
        keeper = os.getpid()
        process = os.fork()
        if process:
            os.close(task_out)
            os.close(reply_in)
            return process, task_in, reply_out
        try:
            for descriptor in (task_in, reply_out, self.commands, self.replies):
                os.close(descriptor)
            os.setpgid(0, 0)  # a group of its own, which can be killed as a whole
            _prctl(_PR_SET_DUMPABLE, 1)
            with contextlib.suppress(ImportError, ValueError, OSError):
                import resource

                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no file
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == keeper:
                run(self.functions, task_out, reply_in, once=self.once)
        finally:
            os._exit(1)

    def _ask(self, task: bytes, seconds: float) -> tuple[int, bytes, bool] | None:
        """The kind of the reply, what it says, and whether the runner is of no use now; None: the trainer is gone."""
        assert self._runner is not None
        _, task_in, reply_out = self._runner
        deadline = time.monotonic() + seconds if seconds else None
        try:
            _write(task_in, task)
        except BrokenPipeError:
            return CRASH, self._how_it_ended().encode(), True
        got = bytearray()
        head = ANSWERED.size
        while len(got) < head or len(got) < head + ANSWERED.unpack_from(got)[0]:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return TIMEOUT, b"", True
            readable, _, _ = select.select([reply_out, self.commands], [], [], left)
            if self.commands in readable:  # nothing is sent while a task runs: the trainer is gone
                return None
            if readable:
                part = os.read(reply_out, 1 << 20)
                got += part
                if not part:
                    return CRASH, self._how_it_ended().encode(), True
                if len(got) >= head and ANSWERED.unpack_from(got)[0] > MAX_REPLY:
                    return CRASH, f"it returned more than {MAX_REPLY >> 20} MiB".encode(), True
        length, spoilt = ANSWERED.unpack_from(got)
        return ANSWER, bytes(got[head : head + length]), bool(spoilt)

    def _how_it_ended(self) -> str:
        """How a runner ended that closed its end of the pipe."""
        assert self._runner is not None
        for _ in range(2000):  # on a busy machine it takes a while from its last breath to its end
            process, status = os.waitpid(self._runner[0], os.WNOHANG)
            if process:
                self._runner = (0, *self._runner[1:])
                return how_it_ended(os.waitstatus_to_exitcode(status))
            time.sleep(0.001)
        return "it cut its connection"

    def _end_runner(self) -> None:
        """Ends the runner and all that it has started."""
        if self._runner is None:
            return
        process, *pipes = self._runner
        self._runner = None
        for descriptor in pipes:
            os.close(descriptor)
        if process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        while _has_children():
            for each in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(each, signal.SIGKILL)
            time.sleep(0.001)


def run(functions: Sequence[Any], commands: int, replies: int, *, once: bool) -> None:
    """The runner: calls functions until there are no more tasks; never returns.

    Args:
        functions: the functions.
        commands: file descriptor from which tasks come.
        replies: file descriptor to which JSON goes.
        once: serve one task only.
    """
    while header := _read(commands, TASK.size):
        length, _, _, memory = TASK.unpack(header)
        body = _read(commands, length)
        if body is None:
            break
        results, spoilt = answer(functions, body, memory)
        try:
            text = json.dumps(results)
        except ValueError as error:  # a whole number of thousands of digits
            text = json.dumps([{"error": f"ValueError: {error}", "trace": ""}] * len(results))
        _write(replies, ANSWERED.pack(len(text), spoilt) + text.encode())
        if once or spoilt:  # the keeper ends it
            time.sleep(60)
            break
    os._exit(0)


def answer(functions: Sequence[Any], task: bytes, memory: int = 0) -> tuple[list[dict[str, Any]], bool]:
    """Makes the calls of a task.

    Args:
        functions: the functions.
        task: a pickle of a function's index, the keyword arguments of each call, the trainer's state as a pickle of its
            own, and the seconds that each call may take if it is a coroutine.
        memory: bytes of address space, 0 for no limit.

    Returns:
        One result per call, and whether the process should not be used again.
    """
    index, calls, state, seconds = pickle.loads(task)
    results: list[dict[str, Any]] = [{"extra": [], "metrics": [], "printed": ""} for _ in calls]
    spoilt = False
    with _memory_limit(memory):
        waiting: list[tuple[Any, dict[str, Any]]] = []
        for keywords, result in zip(calls, results, strict=True):
            keywords["trainer_state"] = State(state) if isinstance(state, bytes) else state
            spoilt |= _attempt(functions[index], keywords, result, waiting)
        if waiting:
            import asyncio

            asyncio.run(_await_all(waiting, seconds))
    return results, spoilt


def _attempt(function: Callable[..., Any], keywords: dict[str, Any], result: dict[str, Any], waiting: list) -> bool:
    """Makes one call; True if the process should not be used again."""
    keywords["log_extra"] = lambda column, values: result["extra"].append([str(column), _plain_list(values)])
    keywords["log_metric"] = lambda name, value: result["metrics"].append([str(name), _plain_number(value)])
    try:
        with _printed(result):
            values = function(**keywords)
            if inspect.isawaitable(values):
                waiting.append((values, result))
            else:
                result["values"] = plain_values(values)
    except BaseException as error:
        _say(error, result)
        return not isinstance(error, Exception) or isinstance(error, (MemoryError, RecursionError))
    return False


async def _await_all(waiting: list[tuple[Any, dict[str, Any]]], seconds: float) -> None:
    import asyncio

    async def one(awaitable: Any, result: dict[str, Any]) -> None:
        async def values() -> Any:
            return await awaitable

        task = asyncio.ensure_future(values())
        done, _ = await asyncio.wait([task], timeout=seconds or None)
        if not done:
            task.cancel()
            result["timeout"] = True
            return
        try:
            result["values"] = plain_values(task.result())
        except BaseException as error:
            _say(error, result)

    await asyncio.gather(*(one(*each) for each in waiting))


def _say(error: BaseException, result: dict[str, Any]) -> None:
    """Puts what was raised into a result."""
    with contextlib.suppress(BaseException):  # a __str__ may do anything
        result["error"] = f"{type(error).__name__}: {error}"[:2000]
        result["trace"] = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-4000:]
    result.setdefault("error", "an exception without a text")


class State(types.SimpleNamespace):
    """The trainer's state as it was when the batch was scored; unpickled when it is first looked at.

    Args:
        pickled: a pickle of its attributes.
    """

    def __init__(self, pickled: bytes) -> None:
        super().__init__()
        self.__dict__["_pickled"] = pickled

    def __getattr__(self, name: str) -> Any:
        pickled = self.__dict__.pop("_pickled", None)
        if pickled is None:
            raise AttributeError(f"the trainer's state has no attribute {name!r}")
        self.__dict__.update(pickle.loads(pickled))
        return getattr(self, name)


def plain_values(values: Any) -> Any:
    """What a function returned, in values that JSON can hold.

    Args:
        values: anything; a list of numbers and None if the function is right.

    Returns:
        A list of numbers, None, and, for what is neither, ``{"illegal": [its class, its text]}``; such a mapping alone
        if it is no list.

    Example:
        >>> plain_values((1, None, "x"))
        [1.0, None, {'illegal': ['str', "'x'"]}]
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        return _illegal(values)
    return [value if value is None else _plain_number(value) for value in values]


def _plain_number(value: Any) -> Any:
    if hasattr(value, "item") and not callable(getattr(value, "size", None)) and getattr(value, "size", 1) == 1:
        value = value.item()  # of numpy
    elif hasattr(value, "item") and hasattr(value, "numel") and value.numel() == 1:
        value = value.item()  # of torch
    if isinstance(value, numbers.Real):
        try:
            return float(value)
        except OverflowError:
            return float("inf")
    return _illegal(value)


def _illegal(value: Any) -> dict[str, list[str]]:
    return {"illegal": [type(value).__name__, repr(value)[:200]]}


def _plain_list(values: Any) -> list[Any]:
    return [plain(value) for value in values]


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON can hold it: numbers, texts, lists and mappings as they are, anything else as its text.

    Args:
        value: anything.
        depth: how deep it lies; beyond 20 it becomes a text.

    Returns:
        The value.
    """
    if value is None or type(value) in (bool, int, str, float):
        return value
    if isinstance(value, (list, tuple)) and depth < 20:
        return [plain(each, depth + 1) for each in value]
    if isinstance(value, Mapping) and depth < 20:
        return {str(key): plain(each, depth + 1) for key, each in value.items()}
    number = _plain_number(value)
    return str(value) if isinstance(number, dict) else number


class _Kept:
    """Text that a call printed, the first part of it."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        if len(self.text) < MAX_PRINTED:
            self.text += str(text)[: MAX_PRINTED - len(self.text)]
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


@contextlib.contextmanager
def _printed(result: dict[str, Any]) -> Iterator[None]:
    kept = _Kept()
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = kept
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        result["printed"] = kept.text if isinstance(kept.text, str) else ""


@contextlib.contextmanager
def _memory_limit(limit: int) -> Iterator[None]:
    if not limit:
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    hard = before[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def how_it_ended(code: int) -> str:
    """How a process ended, in words.

    Args:
        code: its exit code, or a signal's number below 0.

    Returns:
        Words that follow "it".

    Example:
        >>> how_it_ended(-11), how_it_ended(3)
        ('it was killed by SIGSEGV', 'it ended itself with exit code 3')
    """
    if code >= 0:
        return f"it ended itself with exit code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"


def descendants(root: int) -> list[int]:
    """The processes that a process has started, directly or not, or that are in its session; without itself.

    Args:
        root: the process.

    Returns:
        Their ids; none where there is no ``/proc``.
    """
    parents: dict[int, int] = {}
    members = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has just ended
        if fields[0] not in (b"Z", b"X"):
            parents[int(name)] = int(fields[1])
            if int(fields[3]) == root:
                members.add(int(name))
    found = members | {root}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {root})


def _has_children() -> bool:
    """Whether the keeper has processes of its own left; those that have ended are taken off the books."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return True
        except ChildProcessError:
            return False


def _prctl(option: int, value: int) -> None:
    """Sets an attribute of the process, where the system has such."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _read(descriptor: int, count: int) -> bytes | None:
    """Exactly so many bytes; None if the pipe ends."""
    got = bytearray()
    while len(got) < count:
        part = os.read(descriptor, min(count - len(got), 1 << 20))
        if not part:
            return None
        got += part
    return bytes(got)


def _write(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _send(descriptor: int, number: int, kind: int, body: bytes) -> None:
    _write(descriptor, REPLY.pack(len(body), number, kind) + body)


if __name__ == "__main__":
    main()
