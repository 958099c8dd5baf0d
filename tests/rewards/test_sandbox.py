"""What a program in the sandbox can and cannot do, and that nothing of it is left. Each is run for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from grpo_trainer.rewards import sandbox
from grpo_trainer.rewards.sandbox import Limits, Program, SandboxError, run_beside, run_sandboxed, sandbox_command

pytestmark = pytest.mark.skipif(
    not sandbox.sandbox_is_available(), reason=f"no sandbox on this machine: {sandbox._trouble()}"
)
PYTHON = ["/usr/bin/python3", "-I", "-S", "-c"] if os.path.exists("/usr/bin/python3") else [sys.executable, "-I", "-c"]
READABLE = [] if PYTHON[0] != sys.executable else [sys.prefix, sys.base_prefix]
QUICK = Limits(seconds=1.0, memory_bytes=256 << 20, processes=8, file_bytes=1 << 20, output_bytes=10_000)
PATIENT = Limits(seconds=30.0)


def run(code: str, limits: Limits = PATIENT, **kwargs) -> sandbox.Result:
    return run_sandboxed([*PYTHON, code], limits=limits, readable=READABLE, **kwargs)


def ours(mark: str) -> list[str]:
    """Commands of the processes of this test's sandboxes, zombies among this process's children too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            name, parent = (
                (folder / "comm").read_text().strip(),
                (folder / "stat").read_text().rpartition(")")[2].split()[1],
            )
        except OSError:
            continue
        if mark.encode() in words or (not words and parent == str(os.getpid())):
            found.append(name)
    return found


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    """No process, descriptor or thread is left, whatever the program did. The value marks this test's processes."""
    mark = uuid.uuid4().hex
    monkeypatch.setitem(sandbox._ENVIRONMENT, "MARK", mark)
    before = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    yield mark
    assert (ours(mark), sorted(os.listdir("/proc/self/fd")), threading.active_count()) == ([], *before)


def test_a_program_reads_and_writes_and_ends_with_its_code():
    result = run("import sys; print(input()[::-1]); print('e', file=sys.stderr); sys.exit(3)", stdin=b"abc\n")
    assert (result.stdout, result.stderr, result.returncode) == (b"cba\n", b"e\n", 3)
    assert not result.ok and not result.timed_out
    assert run("pass").ok


def test_ten_megabytes_go_in_and_out():
    result = run("print(len(input()))", stdin=b"x" * 10_000_000 + b"\n")
    assert result.stdout == b"10000000\n"
    assert run("pass", stdin=b"x" * 10_000_000).ok  # one that reads none of it


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)",
        "import os; os.kill(os.getpid(), 19)",
        "import os, time\nfor p in (1, os.getppid(), -1):\n try: os.kill(p, 9)\n except OSError: pass\ntime.sleep(99)",
        "import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(1000)",
    ],
    ids=["loop", "ignores signals", "stops itself", "kills its parents", "closes its pipes"],
)
def test_time_runs_out(code):
    result = run(code, QUICK)
    assert result.timed_out or result.returncode != 0
    assert result.seconds < 20


def test_what_a_program_leaves_running_ends_with_it():
    code = "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(1000)\nelse: print(1)"
    result = run(code)
    assert (result.returncode, result.stdout) == (0, b"1\n")


def test_a_fork_bomb_stays_small():
    code = (
        "import os, time\nn = 0\ntry:\n while True:\n  os.fork() or time.sleep(99)\n  n += 1\nexcept OSError: print(n)"
    )
    assert int(run(code, Limits(seconds=20, processes=8)).stdout) == 7  # and itself


def test_memory_is_limited_for_one_process_and_for_all():
    assert b"MemoryError" in run("x = bytearray(100 << 30)").stderr
    many = "import os, time\nfor _ in range(5): os.fork() or (bytearray(10), globals().update(x=bytearray(60 << 20)))\n"
    result = run(many + "time.sleep(1000)", Limits(seconds=30, memory_bytes=100 << 20, processes=64))
    assert result.memory_exceeded and not result.ok


def test_output_is_limited():
    result = run("while True: print('x' * 1000)", QUICK)
    assert result.output_exceeded and not result.ok
    assert result.stdout == ((b"x" * 1000 + b"\n") * 10)[:10_000]
    assert run("print('x' * 9_999)", QUICK).ok  # 10,000 bytes with its end of line


def test_files_are_limited_and_gone_afterwards():
    code = """
import os
def fill(folder):
    total = 0
    for n in range(100):
        try:
            with open(f"{folder}/{n}", "wb", buffering=0) as file:
                while (wrote := file.write(b"x" * 65536)): total += wrote
        except OSError: pass
    return total
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
print(fill("/tmp") <= 1 << 20, fill("/dev/shm") <= 1 << 20)
for path in ["/x", "/dev/x", "/usr/x", "/usr/lib/x", "/etc/x", "/root/x", "/home/x", "/proc/x", "/var/tmp/x"]:
    try: open(path, "w"); print(path)
    except OSError: pass
"""
    assert run(code, Limits(seconds=30, file_bytes=1 << 20)).stdout == b"True True\n"
    assert run("import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))").stdout == b"[] []\n"


def test_nothing_of_the_host_is_seen(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    (tmp_path / "reference.txt").write_text("42")
    code = f"""
import glob, os, socket
seen = "".join(open(p, errors="replace").read() for p in glob.glob("/proc/[0-9]*/environ") + ["/proc/self/environ"])
print("hunter2" in seen + repr(dict(os.environ)))
print(sorted(os.listdir("/proc"))[:2], os.path.exists({str(tmp_path)!r}), os.path.exists({os.getcwd()!r}))
print(sorted(p for p in os.listdir("/") if p in ("root", "home", "var", "run", "work")))
print(os.getuid() != 0)
try: socket.create_connection(("127.0.0.1", {{port}}), timeout=5); print("connected")
except OSError as error: print("no")
"""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run(code.replace("{port}", str(server.getsockname()[1])))
    lines = result.stdout.decode().splitlines()
    assert lines == ["False", "['1', '2'] False False", "[]", "True", "no"], result.stderr


def test_no_namespace_can_be_made_inside():
    if not sandbox._fences():
        pytest.skip("bubblewrap before 0.8 cannot forbid it")
    code = "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000 | 0x20000))"  # CLONE_NEWUSER, CLONE_NEWNS
    assert run(code).stdout == b"-1\n"


def test_folders_are_readable_or_hidden_as_asked(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("seen")
    os.chmod(tmp_path / "a", 0o755)
    code = f"print(open({str(tmp_path / 'a' / 'x')!r}).read())"
    readable = [*READABLE, tmp_path / "a", tmp_path / "missing"]
    assert run_sandboxed([*PYTHON, code], limits=PATIENT, readable=readable).stdout == b"seen\n"
    write = f"open({str(tmp_path / 'a' / 'y')!r}, 'w')"
    assert b"Read-only" in run_sandboxed([*PYTHON, write], limits=PATIENT, readable=readable).stderr
    listing = f"import os; print(os.listdir({str(tmp_path / 'a')!r}))"
    hidden = run_sandboxed([*PYTHON, listing], limits=PATIENT, readable=readable, hidden=[tmp_path / "a"])
    assert hidden.stdout == b"[]\n"


def test_files_are_handed_in_from_memory():
    result = run_sandboxed(["@/program"], limits=PATIENT, files={"program": b"#!/bin/sh\necho ran\n"})
    assert result.stdout == b"ran\n"


def test_a_folder_that_only_root_can_enter_can_be_made_readable(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    inner = tmp_path / "closed" / "open"
    inner.mkdir(parents=True)
    (inner / "x").write_text("seen")
    os.chmod(tmp_path / "closed", 0o700)
    result = run_sandboxed(["/bin/cat", str(inner / "x")], limits=PATIENT, readable=[inner])
    assert result.stdout == b"seen"


def test_the_command_alone_ends_with_its_process_group(mark):
    command = sandbox_command(["/bin/sleep", "1000"], limits=PATIENT, readable=[sys.base_prefix])
    process = subprocess.Popen(command, start_new_session=True)
    before = time.monotonic()
    while "sleep" not in ours(mark):
        assert time.monotonic() - before < 60
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while ours(mark):
        assert time.monotonic() - before < 60
        time.sleep(0.01)


def test_two_programs_talk_and_the_other_ends_with_the_first():
    ask = "import os, sys\nr, w = map(int, sys.argv[1:])\nos.write(w, b'ping')\nprint(os.read(r, 99).decode())"
    answer = "import os, sys, time\nr, w = map(int, sys.argv[1:])\nos.write(w, os.read(r, 99)[::-1])\ntime.sleep(1000)"
    first, other = (Program(argv=[*PYTHON, code], limits=PATIENT, readable=READABLE) for code in (ask, answer))
    assert run_beside(first, other).stdout == b"gnip\n"
    assert run_beside(first, other, confined=False).stdout == b"gnip\n"


def test_the_first_program_sees_that_the_other_has_ended():
    ask = "import os, sys\nprint(os.read(int(sys.argv[1]), 99))"
    first, other = (Program(argv=[*PYTHON, code], limits=PATIENT, readable=READABLE) for code in (ask, "1"))
    assert run_beside(first, other).stdout == b"b''\n"


def test_a_sandbox_beside_that_does_not_start_is_an_error_and_no_ended_program():
    first = Program(argv=[*PYTHON, "import os, sys; os.read(int(sys.argv[1]), 1)"], limits=PATIENT, readable=READABLE)
    other = Program(argv=["true"], limits=PATIENT, hidden=["/proc/self/fd"])  # what cannot be mounted over
    with pytest.raises(SandboxError, match="beside it did not start"):
        run_beside(first, other)


def test_without_the_sandbox_the_limits_of_a_process_hold():
    def bare(code: str, limits: Limits = PATIENT) -> sandbox.Result:
        return sandbox.run(Program(argv=[sys.executable, "-I", "-S", "-c", code], limits=limits), confined=False)

    assert bare("import os; print(os.listdir('.'), os.environ.get('USER'))").stdout == b"[] None\n"
    assert b"MemoryError" in bare("x = bytearray(100 << 30)").stderr
    assert bare("while True: pass", Limits(seconds=1)).timed_out
    assert bare("while True: print(1)", QUICK).output_exceeded
    assert not bare("open('x', 'wb').write(b'x' * (1 << 21))", QUICK).ok
    script = Program(argv=["@/program"], limits=PATIENT, files={"program": b"#!/bin/sh\necho ran\n"})
    assert sandbox.run(script, confined=False).stdout == b"ran\n"


def test_what_is_missing_is_said_with_the_remedy(monkeypatch):
    sandbox._trouble.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None if name == "bwrap" else f"/usr/bin/{name}")
    try:
        with pytest.raises(SandboxError, match=r"no bubblewrap \(bwrap\).*apt-get install bubblewrap"):
            sandbox.require_sandbox()
    finally:
        monkeypatch.undo()
        sandbox._trouble.cache_clear()


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"memory_bytes": -1}, {"processes": True}, {"output_bytes": None}])
def test_a_limit_that_is_none_is_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} is .*; use a finite number above 0"):
        Limits(**wrong)
