"""Programs that nobody vouches for, run by bubblewrap: no network, nothing to write to, no other process to see.

::

    env -i  [bwrap, setpriv: only if root runs this, see below]  bwrap: namespaces and files  prlimit  sh  argv

What a program in the sandbox has: ``/usr`` and the folders given as ``readable``, read-only; ``/tmp`` and ``/dev/shm``
of limited size, in memory, gone afterwards; a ``/proc`` with its own processes; no network, not even the host's
loopback; no capability, no new privileges and no namespaces of its own; an environment of five variables.

- ``env -i`` comes first: bwrap's own environment, with the user's keys, is not there to be read in ``/proc``.
- ``prlimit`` comes last since inside a user namespace the number of processes is counted there; outside, it would count
  every process of the user.
- ``sh`` is the first process of the sandbox; with it the kernel ends all others.
- For root the kernel counts no processes at all, so root becomes nobody first. What only root can read (a Python below
  ``/root``) is then brought in by a bwrap around that, which runs as root and only mounts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOBODY = 65534
"""User and group that a program in the sandbox runs as, if root starts it."""

INSTALL = "Install bubblewrap (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)"

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_CONFIGURATION = ("/etc/alternatives", "/etc/ld.so.cache")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # a thread counts as a process
    "OPENBLAS_NUM_THREADS": "1",
}
_INIT = ("sh", "-c", '"$@"; exit $?', "sh")
"""The sandbox's first process, which nothing in it can kill. bwrap's own would be left to the system's init as a
zombie, and in a container that may be a program that reaps none."""
_CHUNK = 1 << 16
_WATCH_SECONDS = 0.05


class SandboxError(OSError):
    """There is no sandbox on this machine, or it did not start."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: wall seconds, which `run_sandboxed` enforces; the processor seconds of each process are limited to the
            same, rounded up, plus one.
        memory_bytes: address space of each process; `run_sandboxed` ends a program whose processes together are
            resident in more.
        address_bytes: address space of each process, if that is to be another number: some runtimes reserve much more
            than they use.
        processes: processes and threads at a time.
        file_bytes: size of a file, and of all files together.
        output_bytes: bytes of standard output, and of standard error, after which `run_sandboxed` ends the program.

    Raises:
        ValueError: if one is not a number above 0.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    processes: int = 8
    file_bytes: int = 16 << 20
    output_bytes: int = 1 << 20
    address_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "address_bytes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}; use a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a program ended.

    Attributes:
        returncode: as the shell has it, 128 + signal for a program that a signal ended; negative if the sandbox itself
            was ended, which is so if a limit ran out.
        stdout: at most ``output_bytes`` of it.
        stderr: at most ``output_bytes`` of it.
        timed_out: the seconds ran out.
        output_exceeded: it wrote more than ``output_bytes``.
        memory_exceeded: its processes together were resident in more than ``memory_bytes``.
        seconds: wall seconds.
    """

    returncode: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    output_exceeded: bool = False
    memory_exceeded: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with 0, within all limits."""
        return self.returncode == 0 and not (self.timed_out or self.output_exceeded or self.memory_exceeded)


def sandbox_command(
    argv: Sequence[str],
    *,
    limits: Limits,
    readable: Sequence[str | os.PathLike[str]] = (),
    hidden: Sequence[str | os.PathLike[str]] = (),
    environment: Mapping[str, str] | None = None,
    files: Mapping[str, int] | None = None,
    status_fd: int | None = None,
) -> list[str]:
    """The command that runs a command in the sandbox.

    Whoever starts it sees to wall time and output. To end it, kill its process group with SIGKILL: then everything in
    the sandbox is killed by the kernel.

    Args:
        argv: the command; its program is looked up in the sandbox.
        limits: what it may use.
        readable: files and folders that it may read besides the system's; those that do not exist are left out.
        hidden: folders that are empty in the sandbox.
        environment: variables besides the five that are set.
        files: path in the sandbox -> descriptor of the file that is copied there, read-only and executable.
        status_fd: descriptor to which bwrap writes ``{"child-pid": N, …}``.

    Returns:
        The command. Nothing is checked here, see `require_sandbox`.
    """
    fences = _fences()
    outer: list[str] = []
    mounts = [word for path in _SYSTEM for word in _system_mount(path)]
    mounts += [word for path in _CONFIGURATION for word in ("--ro-bind-try", path, path)]
    paths = _outermost([os.path.abspath(path) for path in readable if os.path.exists(path)])
    if os.geteuid() == 0:
        carried = [f"/tmp/{index}" for index in range(len(paths))]
        if paths:
            outer = [_tool("bwrap"), "--dev-bind", "/", "/", "--perms", "0755", "--tmpfs", "/tmp"]
            outer += [word for path, place in zip(paths, carried, strict=True) for word in ("--ro-bind", path, place)]
            outer += ["--die-with-parent", "--"]
        drop = [_tool("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--pdeathsig=SIGKILL"]
        outer += drop
    else:
        carried = paths
    inner = [
        _tool("bwrap"),
        "--unshare-all",
        *fences,
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
        *mounts,
    ]
    inner += ["--as-pid-1", "--proc", "/proc", "--dev", "/dev"]
    size = str(int(limits.file_bytes))
    for folder in ("/tmp", "/dev/shm"):
        inner += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    inner += [word for place, path in zip(carried, paths, strict=True) for word in ("--ro-bind", place, path)]
    for secret in hidden:
        if os.path.isdir(secret):
            inner += ["--perms", "0555", "--size", "4096", "--tmpfs", os.path.realpath(secret)]
    for path, descriptor in (files or {}).items():
        inner += ["--perms", "0555", "--ro-bind-data", str(descriptor), path]
    inner += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for key, value in {**_ENVIRONMENT, **(environment or {})}.items():
        inner += ["--setenv", key, value]
    if status_fd is not None:
        inner += ["--json-status-fd", str(status_fd)]
    return [
        _tool("env"),
        "-i",
        f"PATH={_ENVIRONMENT['PATH']}",
        *outer,
        *inner,
        "--",
        *_limited([*_INIT, *argv], limits),
    ]


HERE = "@"
"""In a command, ``@/name`` is the file of that name that the program is given."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command with all that it is given.

    Attributes:
        argv: the command; ``@/name`` in it is a file of ``files``.
        stdin: its standard input.
        limits: what it may use.
        readable: files and folders that it may read besides the system's.
        hidden: folders that are empty for it.
        environment: variables besides the five that are set.
        files: name -> content; read-only and executable.
    """

    argv: Sequence[str]
    stdin: bytes = b""
    limits: Limits = field(default_factory=Limits)
    readable: Sequence[str | os.PathLike[str]] = ()
    hidden: Sequence[str | os.PathLike[str]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


def run_sandboxed(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    limits: Limits | None = None,
    readable: Sequence[str | os.PathLike[str]] = (),
    **given: Any,
) -> Result:
    """Runs a command in the sandbox and waits until it, and everything that it started, is gone.

    No thread is started and no file is written.

    Args:
        argv: the command.
        stdin: its standard input.
        limits: what it may use; None takes the defaults of `Limits`.
        readable: files and folders that it may read besides the system's.
        **given: further fields of `Program`.

    Returns:
        How it ended.

    Raises:
        SandboxError: if the sandbox does not start.
    """
    return run(Program(argv=argv, stdin=stdin, limits=limits or Limits(), readable=readable, **given))


def run(program: Program, *, confined: bool = True) -> Result:
    """Runs a program to its end.

    Args:
        program: what to run.
        confined: in the sandbox. Else it runs as this user, with all that this user may do, in a temporary folder; the
            limits of each process hold, except for the number of processes. What it takes out of its process group
            outlives it.

    Returns:
        How it ended.

    Raises:
        SandboxError: if it cannot be started.
    """
    with _start(program, confined) as running:
        return running.finish()


def run_beside(program: Program, other: Program, *, confined: bool = True) -> Result:
    """Runs a program to its end beside another one, which it talks to by two pipes.

    Each is in a sandbox of its own. Both find the number of the descriptor to read from, and of that to write to, as
    the last two words of their command. The other one has no standard input or output, and is killed when the first
    has ended.

    Args:
        program: what to run.
        other: what runs beside it.
        confined: see `run`.

    Returns:
        How the first one ended.

    Raises:
        SandboxError: if one cannot be started.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as ours:
            ends = [*os.pipe(), *os.pipe()]  # what the other reads, what the first writes, and the other way round
            for end in ends:
                ours.callback(os.close, end)
            beside = stack.enter_context(_start(other, confined, (ends[0], ends[3]), silent=True))
            first = stack.enter_context(_start(program, confined, (ends[2], ends[1])))
        return first.finish(beside)


@contextlib.contextmanager
def _start(
    program: Program, confined: bool, descriptors: tuple[int, ...] = (), *, silent: bool = False
) -> Iterator[_Running]:
    """Starts a program, and ends it."""
    argv = [*program.argv, *map(str, descriptors)]
    status_in: int | None = None
    with contextlib.ExitStack() as stack:
        if confined:
            status_in, status_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, status_in)
            with contextlib.ExitStack() as ours:
                ours.callback(os.close, status_out)
                held = {f"/tmp/{name}": _memory_file(ours, content) for name, content in program.files.items()}
                command = sandbox_command(
                    [_placed(word, "/tmp") for word in argv],
                    limits=program.limits,
                    readable=program.readable,
                    hidden=program.hidden,
                    environment=program.environment,
                    files=held,
                    status_fd=status_out,
                )
                running = _Running(command, program, [*held.values(), status_out, *descriptors], status_in, silent)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            for name, content in program.files.items():
                with open(os.path.join(folder, name), "wb") as file:
                    file.write(content)
                os.chmod(file.name, 0o700)
            command = _unconfined([_placed(word, folder) for word in argv], program, folder)
            running = _Running(command, program, descriptors, None, silent)
        try:
            yield running
        finally:
            running.end()


def _placed(word: str, folder: str) -> str:
    return folder + word[len(HERE) :] if word.startswith(f"{HERE}/") else word


def _unconfined(argv: Sequence[str], program: Program, folder: str) -> list[str]:
    """The command with those limits that a shell can set."""
    limits = program.limits
    words = f"ulimit -c 0; ulimit -t {_cpu(limits)}; ulimit -f {max(1, int(limits.file_bytes) >> 9)}; "
    words += f"ulimit -v {_address_space(limits) >> 10} 2>/dev/null; "  # macOS has none
    words += 'cd "$0" && exec "$@"'
    path = os.environ.get("PATH", _ENVIRONMENT["PATH"])
    environment = {**_ENVIRONMENT, "PATH": path, "HOME": folder, **program.environment}
    return ["env", "-i", *(f"{k}={v}" for k, v in environment.items()), "sh", "-c", words, folder, *argv]


def require_sandbox() -> None:
    """Makes sure that the sandbox works here, once per process.

    Raises:
        SandboxError: if it does not, with what to do.
    """
    if (trouble := _trouble()) is not None:
        raise SandboxError(trouble)


def sandbox_is_available() -> bool:
    """Whether the sandbox works here."""
    return _trouble() is None


@functools.lru_cache(maxsize=1)
def _trouble() -> str | None:
    """What is wrong with the sandbox here; None if nothing is."""
    if sys.platform != "linux":
        return f"bubblewrap, which keeps programs apart, exists on Linux only; this is {sys.platform}"
    if shutil.which("bwrap") is None:
        return f"there is no bubblewrap (bwrap) here, which keeps programs apart. {INSTALL}"
    for tool in ("prlimit", "setpriv"):
        if shutil.which(tool) is None:
            return f"there is no {tool} here, which the sandbox needs. Install util-linux"
    try:
        result = run_sandboxed(["/bin/sh", "-c", "echo works"], limits=Limits(seconds=20))
    except SandboxError as error:
        return str(error)
    if result.stdout.strip() == b"works":
        return None
    said = result.stderr.decode(errors="replace").strip() or f"exit code {result.returncode}"
    return (
        f"bubblewrap is installed but cannot make a sandbox here: {said[:300]}. It needs user namespaces: in a "
        "container, allow them (docker run --security-opt seccomp=unconfined); on a host, see the sysctl "
        "kernel.unprivileged_userns_clone or kernel.apparmor_restrict_unprivileged_userns"
    )


@functools.lru_cache(maxsize=1)
def _fences() -> tuple[str, ...]:
    """What keeps a program from making namespaces of its own, in which it could mount; new in bubblewrap 0.8."""
    try:
        said = subprocess.run([_tool("bwrap"), "--help"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return ("--unshare-user", "--disable-userns") if "--disable-userns" in said.stdout + said.stderr else ()


class _Running:
    """A started command with bounded pipes."""

    def __init__(
        self, command: Sequence[str], program: Program, descriptors: Sequence[int], status: int | None, silent: bool
    ) -> None:
        self.limits, self.stdin, self.status = program.limits, memoryview(program.stdin), status
        self.began = time.monotonic()
        pipe = subprocess.DEVNULL if silent else subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is the trainer's, and the group can be killed as a whole
                pass_fds=tuple(descriptors),
                cwd="/",
            )
        except OSError as error:
            raise SandboxError(f"{command[0]} could not be started: {error}") from error
        self.said = b""
        self.head: int | None = None  # descriptor of the sandbox's first process, with which all others end
        self.head_pid = 0
        self.texts = [bytearray(), bytearray()]
        self.trouble: str | None = None
        self.ended = False
        self.failed = False  # it ended before the program was started

    def finish(self, beside: _Running | None = None) -> Result:
        """Feeds and reads it until it ends or a limit runs out, then ends both."""
        self._converse(beside)
        if beside is not None:
            beside.end()
        self.end()
        if self.failed:
            raise SandboxError(f"the sandbox did not start: {bytes(self.texts[1]).decode(errors='replace')[:300]}")
        if beside is not None and beside.failed:
            raise SandboxError(f"the sandbox beside it did not start, it ended with {beside.process.returncode}")
        return Result(
            returncode=self.process.returncode,
            stdout=bytes(self.texts[0]),
            stderr=bytes(self.texts[1]),
            timed_out=self.trouble == "seconds",
            output_exceeded=self.trouble == "output_bytes",
            memory_exceeded=self.trouble == "memory_bytes",
            seconds=time.monotonic() - self.began,
        )

    def _converse(self, beside: _Running | None) -> None:
        assert self.process.stdin and self.process.stdout and self.process.stderr
        deadline = self.began + self.limits.seconds
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            for index, pipe in enumerate((self.process.stdout, self.process.stderr)):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, index)
            if self.stdin:
                os.set_blocking(self.process.stdin.fileno(), False)
                selector.register(self.process.stdin, selectors.EVENT_WRITE, "stdin")
            else:
                self.process.stdin.close()
            ended = _pidfd(self.process.pid)
            if ended is not None:
                stack.callback(os.close, ended)
                selector.register(ended, selectors.EVENT_READ, "ended")
            while self.process.poll() is None and self.trouble is None:
                if (left := deadline - time.monotonic()) <= 0:
                    self.trouble = "seconds"
                    return
                for key, _ in selector.select(min(left, _WATCH_SECONDS)):
                    if key.data == "stdin":
                        self.stdin = self.stdin[_write(key.fd, self.stdin) :]
                        if not self.stdin:
                            selector.unregister(key.fileobj)
                            self.process.stdin.close()
                    elif isinstance(key.data, int) and self._read(key.fd, key.data) == 0:
                        selector.unregister(key.fileobj)
                self.watch()
                if beside is not None:
                    beside.watch()

    def watch(self) -> None:
        """Ends it if its processes take too much memory together."""
        if self.ended or self.status is None:
            return
        self._meet()
        if self.head_pid and _resident(self.head_pid) > self.limits.memory_bytes:
            self.trouble = "memory_bytes"
            self.end()

    def _meet(self) -> None:
        """Takes hold of the sandbox's first process."""
        if self.status is None or self.head_pid:
            return
        with contextlib.suppress(BlockingIOError):
            self.said += os.read(self.status, _CHUNK)
        if found := re.search(rb'"child-pid": *([0-9]+)\b.', self.said):
            self.head_pid = int(found[1])
            self.head = _pidfd(self.head_pid)

    def _read(self, descriptor: int, index: int) -> int:
        """Reads what is there; returns the number of bytes, 0 at the end, -1 if there is nothing yet."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return -1
        text = self.texts[index]
        room = int(self.limits.output_bytes) - len(text)
        text += chunk[: max(0, room)]
        if len(chunk) > room:
            self.trouble = self.trouble or "output_bytes"
        return len(chunk)

    def end(self) -> None:
        """Kills what is left, waits for it, and reads what it had written."""
        if self.ended:
            return
        self.ended = True
        by_itself = self.process.poll() is not None
        self._meet()  # it ended, or time did, before this was read
        if self.head is not None:
            # the kernel ends all of the sandbox with its first process; the monitors around it then end by themselves
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.head, signal.SIGKILL)
            _wait_for(self.head, 10.0)
            os.close(self.head)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.status is not None and by_itself and self.trouble is None:
            with contextlib.suppress(BlockingIOError):
                while chunk := os.read(self.status, _CHUNK):
                    self.said += chunk
            self.failed = b'"exit-code"' not in self.said  # bwrap writes it of a program only, not of itself
        for index, pipe in enumerate((self.process.stdout, self.process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                while self.trouble is None and self._read(pipe.fileno(), index) > 0:
                    pass
                pipe.close()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


def _limited(argv: Sequence[str], limits: Limits) -> list[str]:
    """``argv`` with limits on each of its processes."""
    amounts = {
        "as": _address_space(limits),
        "nproc": int(limits.processes) + 1,  # the first process of the sandbox
        "cpu": _cpu(limits),
        "fsize": int(limits.file_bytes),
        "core": 0,
        "nofile": 256,
        "memlock": 0,
        "msgqueue": 0,
    }
    return ["prlimit", *(f"--{name}={amount}" for name, amount in amounts.items()), "--", *argv]


def _tool(name: str) -> str:
    """A tool of the host where the user's PATH has it; inside, PATH is another one."""
    return shutil.which(name) or name


def _address_space(limits: Limits) -> int:
    return int(limits.memory_bytes if limits.address_bytes is None else limits.address_bytes)


def _cpu(limits: Limits) -> int:
    return math.ceil(limits.seconds) + 1


def _system_mount(path: str) -> list[str]:
    """``/bin`` is a link to ``usr/bin`` on most systems."""
    if os.path.islink(path):
        return ["--symlink", os.readlink(path), path]
    return ["--ro-bind", path, path] if os.path.isdir(path) else []


def _outermost(paths: Sequence[str]) -> list[str]:
    """Paths without those that lie in another one.

    >>> _outermost(["/a/b", "/c", "/a", "/ab", "/c"])
    ['/a', '/ab', '/c']
    """
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not kept or os.path.commonpath([kept[-1], path]) != kept[-1]:
            kept.append(path)
    return kept


def _memory_file(stack: contextlib.ExitStack, content: bytes) -> int:
    """A file in memory, which nobody has to remove."""
    descriptor = os.memfd_create("program")
    stack.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _pidfd(pid: int) -> int | None:
    """A descriptor of a process, readable once it has ended; None if it is gone or the system has none."""
    opener: Any = getattr(os, "pidfd_open", None)
    if opener is None:
        return None
    try:
        return opener(pid)
    except OSError:
        return None


def _wait_for(pidfd: int, seconds: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        selector.select(seconds)


def _write(descriptor: int, data: memoryview) -> int:
    """How many bytes a pipe took; all of them if nobody reads any more."""
    try:
        return os.write(descriptor, data[:_CHUNK])
    except BlockingIOError:
        return 0
    except BrokenPipeError:
        return len(data)


def _resident(pid: int) -> int:
    """Bytes that a process and its descendants are resident in, without what they share with files."""
    total, waiting, page = 0, [pid], os.sysconf("SC_PAGE_SIZE")
    while waiting:
        folder = f"/proc/{waiting.pop()}"
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"{folder}/statm", encoding="ascii") as file:
                words = file.read().split()
            total += (int(words[1]) - int(words[2])) * page
            for thread in os.listdir(f"{folder}/task"):
                with open(f"{folder}/task/{thread}/children", encoding="ascii") as file:
                    waiting += [int(word) for word in file.read().split()]
    return total
