"""A pool of worker processes for reward functions.

Each worker belongs to one thread, which starts it, gives it a task at a time, and replaces it when it is killed::

    score ──submit──> queue ──> thread ──pipe──> worker (rewards/worker.py)

The first worker of each thread starts with the pool, so that it is ready when the first completions are.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_trainer.rewards import worker as program

Wrap = Callable[[list[str]], list[str]]
"""The command of a worker -> the command that runs it in a sandbox."""

LOADING_LIMIT = 300.0
"""Most seconds for a worker to start and to load its functions."""
GRACE = 5.0
"""Seconds beyond the time limit after which a worker that does not enforce it is killed from outside."""
_FOR_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerStartError(RuntimeError):
    """A worker could not be started."""


class PoolClosedError(RuntimeError):
    """The pool was closed before the task was done."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One or more calls of a function, made by one worker.

    Attributes:
        body: what ``worker.answer`` takes.
        calls: how many calls these are.
        time_limit: seconds for all of them; None for no limit.
        memory_limit: bytes of address space; None for no limit.
    """

    body: bytes
    calls: int
    time_limit: float | None = None
    memory_limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What became of a task.

    Attributes:
        results: one per call, see ``worker.answer``; None if the worker gave none.
        timeout: the time limit ended it.
        crash: how the worker ended, in words; empty if it did not.
    """

    results: list[dict[str, Any]] | None = None
    timeout: bool = False
    crash: str = ""


@dataclass(kw_only=True)
class _Shared:
    """What the threads of a pool share; it does not know the pool, which can therefore be collected."""

    start: bytes
    wrap: Wrap | None
    tasks: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.wake_out, self.wake_in = os.pipe()  # readable as soon as its other end is closed: at the end of the pool

    def close(self) -> None:
        if os.getpid() != self.process or self.wake_in < 0:  # a fork of the trainer has a copy of everything
            return
        os.close(self.wake_in)
        self.wake_in = -1
        for _ in self.threads:
            self.tasks.put(None)
        if threading.current_thread() in self.threads:  # a collector of garbage may run in any thread
            return
        for thread in self.threads:
            thread.join()
        os.close(self.wake_out)
        with contextlib.suppress(queue.Empty):
            while True:
                if (item := self.tasks.get_nowait()) is not None:
                    item[0].set_exception(PoolClosedError("the pool of workers was closed"))


class WorkerPool:
    """Worker processes that call functions.

    Args:
        functions: pickles of the functions, see ``carry``.
        size: number of workers.
        once: a fresh process for each task, so that what one leaves behind does not reach the next.
        wrap: makes the command of a worker one that runs it in a sandbox.
        imports: modules that each worker imports when it starts.
    """

    def __init__(
        self,
        functions: Sequence[bytes],
        *,
        size: int,
        once: bool = False,
        wrap: Wrap | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.size = size
        path = [os.path.abspath(entry or os.getcwd()) for entry in sys.path]
        body = pickle.dumps({"functions": list(functions), "imports": list(imports), "once": once, "path": path})
        self._start = program.LENGTH.pack(len(body)) + body
        self._wrap = wrap
        self._shared: _Shared | None = None
        self._closer: Any = None
        self._lock = threading.Lock()
        self.open()

    def open(self) -> None:
        """Starts the workers, unless they are there."""
        with self._lock:
            if self._shared is not None and self._shared.process == os.getpid():
                return
            shared = _Shared(start=self._start, wrap=self._wrap)
            shared.threads = [
                threading.Thread(target=_serve, args=(shared,), name=f"reward-worker-{i}", daemon=True)
                for i in range(self.size)
            ]
            self._shared, self._closer = shared, weakref.finalize(self, shared.close)
            for thread in shared.threads:
                thread.start()

    def submit(self, task: Task) -> Future[Reply]:
        """Hands a task to the first worker that is free.

        Args:
            task: the task.

        Returns:
            Its reply, when it is done; it raises ``WorkerStartError`` if no worker can be started, and
            ``PoolClosedError`` if the pool is closed meanwhile.
        """
        self.open()
        assert self._shared is not None
        future: Future[Reply] = Future()
        self._shared.tasks.put((future, task))
        return future

    def close(self) -> None:
        """Ends all workers, also those at work, and waits until they are gone. The next task starts new ones."""
        with self._lock:
            if self._closer is not None:
                self._closer()
            self._shared = self._closer = None


def _serve(shared: _Shared) -> None:
    """A thread's life: a worker at hand, a task at a time."""
    worker: Worker | None = None
    failure: Exception | None = None
    try:
        while True:
            if worker is None and failure is None:
                try:
                    worker = Worker(shared)
                except Exception as error:
                    failure = error
            item = shared.tasks.get()
            if item is None:
                return
            future, task = item
            if failure is not None:
                future.set_exception(failure)
                failure = None
                continue
            assert worker is not None
            try:
                future.set_result(worker.do(task))
            except Exception as error:
                future.set_exception(error)
                if isinstance(error, PoolClosedError):
                    return
            if not worker.usable:
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()


class Worker:
    """One worker process.

    Args:
        shared: of the pool.

    Raises:
        WorkerStartError: if it does not start.
        PoolClosedError: if the pool is closed meanwhile.
    """

    def __init__(self, shared: _Shared) -> None:
        command = [sys.executable, os.path.abspath(program.__file__)]
        environment = {k: v for k, v in os.environ.items() if k not in _FOR_RANKS}
        environment |= {**dict.fromkeys(_THREADS, "1"), "TOKENIZERS_PARALLELISM": "false"}
        self._wake = shared.wake_out
        self.usable = True
        self._number = 0
        try:
            self._process = subprocess.Popen(
                shared.wrap(command) if shared.wrap else command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is the trainer's, and the group can be killed as a whole
                env=environment,
            )
        except OSError as error:
            raise WorkerStartError(f"a worker for reward functions could not be started: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        try:
            deadline = time.monotonic() + LOADING_LIMIT
            self._write(shared.start, deadline)
            kind, body = self._read(0, deadline)
            if kind != program.ANSWER:
                raise WorkerStartError(f"a worker for reward functions did not start: {self._said(body)}")
            self.failed = {int(index): why for index, why in json.loads(body)["failed"].items()}
            assert self._process.stderr is not None
            self._process.stderr.close()
        except BaseException:
            self.close()
            raise

    def do(self, task: Task) -> Reply:
        """Hands it a task and waits for the reply. After a reply without results it may not be ``usable``.

        Args:
            task: the task.

        Returns:
            The reply.

        Raises:
            PoolClosedError: if the pool is closed meanwhile.
        """
        index = pickle.loads(task.body)[0] if self.failed else -1
        if index in self.failed:
            return Reply(results=[{"unloaded": self.failed[index]}] * task.calls)
        self._number += 1
        seconds = task.time_limit or 0.0
        deadline = time.monotonic() + seconds + GRACE if seconds else None
        header = program.TASK.pack(len(task.body), self._number, seconds, int(task.memory_limit or 0))
        self._write(header + task.body, deadline)
        kind, body = self._read(self._number, deadline)
        if kind == program.ANSWER:
            try:
                results = json.loads(body)
                if isinstance(results, list) and len(results) == task.calls:
                    return Reply(results=results)
            except (ValueError, RecursionError):
                pass
            kind, body = program.CRASH, b"its reply cannot be read"
        if kind == program.TIMEOUT:
            return Reply(timeout=True)
        return Reply(crash=self._said(body))

    def _write(self, content: bytes, deadline: float | None) -> None:
        rest = memoryview(content)
        while rest:
            if not self._ready(self._in, select.POLLOUT, deadline):
                return  # the reply will not come in time
            try:
                rest = rest[os.write(self._in, rest[: 1 << 20]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return  # the reply says why

    def _read(self, number: int, deadline: float | None) -> tuple[int, bytes]:
        """The kind of the reply and what it says."""
        got = bytearray()
        wanted = program.REPLY.size
        while len(got) < wanted:
            if not self._ready(self._out, select.POLLIN, deadline):
                self.usable = False
                return program.TIMEOUT, b""
            part = os.read(self._out, min(wanted - len(got), 1 << 20))
            if not part:
                self.usable = False
                return program.CRASH, b""
            got += part
            if len(got) == program.REPLY.size:
                length, answered, kind = program.REPLY.unpack(got)
                wanted += length
                if length > program.MAX_REPLY or answered != number or kind > program.CRASH:
                    self.usable = False
                    return program.CRASH, b"its reply cannot be read"
        return got[program.REPLY.size - 1], bytes(got[program.REPLY.size :])

    def _ready(self, descriptor: int, event: int, deadline: float | None) -> bool:
        """Waits for one end of a pipe; False if the deadline comes first."""
        poll = select.poll()  # select() knows descriptors below 1024 only, and a trainer may have more
        poll.register(self._wake, select.POLLIN)
        poll.register(descriptor, event)
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000
        ready = dict(poll.poll(left))
        if self._wake in ready:
            raise PoolClosedError("the pool of workers was closed")
        return descriptor in ready

    def _said(self, body: bytes) -> str:
        """How it ended: by its keeper's words, or else by its exit code and what it said last."""
        if body:
            return body.decode(errors="replace")
        code, last = None, b""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=GRACE)
        error = self._process.stderr
        if code is not None and error is not None and not error.closed:
            os.set_blocking(error.fileno(), False)
            last = error.read(4000) or b""
        words = "it does not answer" if code is None else program.how_it_ended(code)
        return f"{words}: {last.decode(errors='replace').strip()}" if last else words

    def close(self) -> None:
        """Ends it and all that it has started."""
        process = self._process
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self.usable:  # its input has ended, upon which it ends by itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE)
        left = program.descendants(process.pid)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for each in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        process.wait()
