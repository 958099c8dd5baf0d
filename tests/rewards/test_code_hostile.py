"""Programs that want the reward without the work, or that want to do harm.

None gets a reward; correct programs beside them in the same batch do; and afterwards no process, file, descriptor or
thread is left, and this process has not grown.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import threading
import uuid
from pathlib import Path

import pytest

from grpo_trainer.rewards import sandbox
from grpo_trainer.rewards.code import code_compiles, code_tests

pytestmark = pytest.mark.skipif(
    not sandbox.sandbox_is_available(), reason=f"no sandbox on this machine: {sandbox._trouble()}"
)

ADD = "def add(a, b):\n    return a + b\n"
TESTS = "assert add(17, 25) == 42\nassert add(-1, -2) == -3\nassert add(10**20, 1) == 100000000000000000001"
CHECK = "def check(candidate):\n" + "".join(f"    {line.replace('add', 'candidate')}\n" for line in TESTS.splitlines())
PAIRS = [{"input": "17 25", "output": "42"}, {"input": "-1 -2", "output": "-3"}]
SUM = "a, b = map(int, input().split())\nprint(a + b)\n"

# name -> a program that is run when it is loaded, before add(), which it defines wrongly
HARM = {
    "endless loop": "while True: pass",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "100 GB": "x = bytearray(100 << 30)",
    "memory bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory of many processes": (
        "import os, time\nfor _ in range(6): os.fork()\nx = bytearray(b'x') * (300 << 20)\ntime.sleep(99)"
    ),
    "filling the disk": (
        "import itertools, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "for n in itertools.count():\n    for folder in ('/tmp', '/dev/shm', '/var/tmp', '.'):\n"
        "        try: open(f'{folder}/{n}', 'wb').write(b'x' * (64 << 20))\n        except OSError: pass"
    ),
    "gigabytes of output": "import sys\nwhile True: sys.stdout.write('x' * 1000000)",
    "gigabytes of output past Python": "import os\nwhile True:\n    for n in range(99):\n"
    "        try: os.write(n, b'x' * 1000000)\n        except OSError: pass",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "os._exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "exit later": "import atexit, os\natexit.register(os._exit, 0)",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "SIGKILL to the parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(1, 9)",
    "SIGKILL to everybody": "import os\nos.kill(-1, 9)",
    "SIGSTOP to itself": "import os\nos.kill(os.getpid(), 19)",
    "SIGSTOP to everybody": "import os\nos.kill(-1, 19)\nos.kill(os.getpid(), 19)",
    "ignoring SIGTERM": (
        "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ntime.sleep(999)"
    ),
    "a daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        for n in range(99):\n            try: os.close(n)\n            except OSError: pass\n"
        "        time.sleep(999)\n    os._exit(0)"
    ),
    "towers of powers": "x = 9**9**9**9",
    "a number of many digits": "x = int('9' * 10**7) if False else 7**30000000",
    "null bytes": "x = 1\x00",
    "lone surrogates": "x = '\ud800' + \udfff",
    "right-to-left marks": "if \u202eTrue\u202c: x = 1",
    "deep nesting": "x = " + "(" * 50_000 + ")" * 50_000,
    "long chain": "x = " + "-" * 300_000 + "1",
    "writing to packages, home and checkout": (
        "import os, site, sys\n"
        "for folder in ['/root', '/home', '/work', '/usr/lib', os.path.expanduser('~root'), CHECKOUT, *sys.path,\n"
        "               sys.prefix, *site.getsitepackages()]:\n"
        "    try: open(os.path.join(folder, 'MARK'), 'w').write('x')\n    except OSError: pass"
    ),
    "network": (
        "import socket\nfor host, port in [('127.0.0.1', PORT), ('1.1.1.1', 53)]:\n"
        "    try:\n        s = socket.create_connection((host, port), timeout=1)\n        s.sendall(b'hello')\n"
        "    except OSError: pass\n"
        "try:\n    s = socket.socket(socket.AF_UNIX)\n    s.connect('\\0MARK')\n    s.sendall(b'hello')\n"
        "except OSError: pass"
    ),
}

# name -> a program that wants add() to count as right without adding
CHEATS = {
    "printing that all is well": "print('all tests passed\\nOK\\n3\\ntrue\\ntrue\\ntrue')\nadd = print",
    "writing verdicts to every descriptor": (
        "import os\ndef add(a, b):\n    for n in range(64):\n"
        "        for text in (b'3\\ntrue\\ntrue\\ntrue\\n', b'{\"value\": true}\\n'):\n"
        "            try: os.write(n, text)\n            except OSError: pass\n    return None"
    ),
    "answering before it is asked": (
        "import os, sys\nfor n in map(int, sys.argv[-1:]):\n"
        '    os.write(n, b\'{"ready": true}\\n{"callable": true}\\n\' + b\'{"value": ["i", "0x2a"]}\\n\' * 9)\n'
        "os.kill(os.getpid(), 19)"
    ),
    "an object that equals everything": (
        "class Same(int):\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    __hash__ = int.__hash__\ndef add(a, b): return Same(0)"
    ),
    "a text that equals everything": (
        "class Same(str):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Same()"
    ),
    "an object whose class lies": (
        "class Same:\n    __class__ = int\n    def __eq__(self, other): return True\n"
        "    def __index__(self): return 0\n    def __int__(self): return 0\ndef add(a, b): return Same()"
    ),
    "patching the builtins": (
        "import builtins\nfor name in ('AssertionError', 'open', 'print', 'exec', 'compile', 'isinstance', 'hex'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\ndef add(a, b): return 0"
    ),
    "patching unittest and the output": (
        "import sys, unittest, io\nunittest.TestCase.assertEqual = lambda *a, **k: None\n"
        "unittest.main = lambda *a, **k: None\nsys.stdout = sys.stderr = io.StringIO()\n"
        "sys.excepthook = lambda *a: None\ndef add(a, b): return 0"
    ),
    "patching the driver": (
        "import sys\nmain = sys.modules['__main__']\n"
        "for name in ('encode', 'decode', '_answer', 'check', '_is_test'):\n"
        "    setattr(main, name, lambda *a, **k: {'value': True, 'passed': [True] * 3})\ndef add(a, b): return 0"
    ),
    "raising what a test may expect": "def add(a, b): raise AssertionError('fine')",
    "leaving when it is asked": "import os\ndef add(a, b): os._exit(0)",
    "leaving by an exception": "def add(a, b): raise SystemExit(0)",
    "reading files": (
        "import os, re\ndef add(a, b):\n    for top in ('/tmp', '/proc', '/dev/shm', '/usr/lib/python3', CHECKOUT):\n"
        "        for folder, _, files in os.walk(top):\n            for name in files[:200]:\n"
        "                try: text = open(os.path.join(folder, name), 'rb').read(100000)\n"
        "                except OSError: continue\n"
        "                found = re.search(rb'add\\(%d, ?%d\\) ?== ?(-?[0-9]+)' % (a, b), text)\n"
        "                if found: return int(found[1])\n    return None"
    ),
    "reading frames and the heap": (
        "import gc, re, sys\ndef add(a, b):\n    frame, seen = sys._getframe(), []\n    while frame:\n"
        "        seen += [repr(v) for v in [*frame.f_locals.values(), *frame.f_globals.values()]]\n"
        "        frame = frame.f_back\n"
        "    seen += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]\n"
        "    found = re.search(r'add\\(%d, ?%d\\) ?== ?(-?[0-9]+)' % (a, b), ' '.join(seen))\n"
        "    return int(found[1]) if found else None"
    ),
    "reading the environment and processes": (
        "import glob, os, re\ndef add(a, b):\n    text = repr(dict(os.environ)).encode()\n"
        "    for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "        try: text += open(path, 'rb').read()\n        except OSError: pass\n"
        "    for path in glob.glob('/proc/[0-9]*/mem'):\n        try:\n"
        "            for line in open(path.replace('mem', 'maps')):\n"
        "                low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "                with open(path, 'rb') as f:\n                    f.seek(low)\n"
        "                    text += f.read(min(high - low, 1 << 20))\n"
        "        except (OSError, ValueError, OverflowError): pass\n"
        "    found = re.search(rb'add\\(%d, ?%d\\) ?== ?(-?[0-9]+)' % (a, b), text)\n"
        "    return int(found[1]) if found else None"
    ),
    "changing what it is given": "def add(a, b):\n    return None",
    "numbers that collide": "def add(a, b): return {k * (2**61 - 1) for k in range(20000)}",
    "a value of 100 MB": "def add(a, b): return 'x' * (100 << 20)",
    "an endless iterator": "def add(a, b):\n    while True: yield 42",
    "deep data": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
}


LONG = {"numbers that collide", "a value of 100 MB"}  # these meet a limit


class Guard:
    """What must be as it was."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.before = self.state()

    def state(self) -> dict[str, object]:
        gc.collect()
        commands = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if self.mark.encode() in words or (not words and parent == str(os.getpid())):
                commands.append(folder.name)
        return {
            "processes": commands,
            "descriptors": sorted(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "temporary files": sorted(os.listdir("/tmp")),
        }


@pytest.fixture
def guard(monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setitem(sandbox._ENVIRONMENT, "MARK", mark)
    guard = Guard(mark)
    size = resident()
    yield guard
    after = guard.state()
    after["temporary files"] = [
        n for n in after["temporary files"] if mark in n or n in guard.before["temporary files"]
    ]
    guard.before["temporary files"] = [n for n in guard.before["temporary files"] if n in after["temporary files"]]
    assert after == guard.before
    assert resident() < size + (64 << 20)  # numbers of this process only, none of the programs'


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def program(text: str, mark: str, port: int = 9) -> str:
    checkout = Path(__file__).resolve().parents[2]
    return text.replace("CHECKOUT", repr(str(checkout))).replace("PORT", str(port)).replace("MARK", mark)


# the hostile ones wait for their limit; the honest ones beside them must not miss theirs, even where others work too
limited = functools.partial(code_tests, seconds=3, total_seconds=4, memory_mb=256, workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["when it is loaded", "when it is called", "as a program"])
def test_harm_earns_nothing_and_reaches_nothing(form, guard, listener):
    """All in one batch, each with a correct program beside it."""
    port = listener.getsockname()[1]
    harm = {name: program(text, guard.mark, port) for name, text in HARM.items()}
    if form == "when it is loaded":
        harm = {name: f"{text}\ndef add(a, b): return 0\n" for name, text in harm.items()}
    elif form == "when it is called":
        harm = {name: f"def add(a, b):\n    {_indented(text)}\n    return 0\n" for name, text in harm.items()}
    right = SUM if form == "as a program" else ADD
    texts = [text for n, name in enumerate(harm) for text in (harm[name], f"{right}x = {n}\n")]
    rewards = limited(texts, [PAIRS if form == "as a program" else TESTS] * len(texts))
    assert dict(zip(harm, rewards[::2], strict=True)) == dict.fromkeys(harm, 0.0)
    assert rewards[1::2] == [1.0] * len(harm)
    for folder in ("/root", "/home", "/usr/lib", Path(__file__).resolve().parents[2], "/tmp", "/var/tmp"):
        assert not (Path(folder) / guard.mark).exists()
    with pytest.raises(BlockingIOError):
        listener.accept()  # nobody came


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


@pytest.mark.parametrize("form", ["asserts", "check"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in CHEATS])
def test_cheating_earns_nothing(name, form, guard):
    programs = [program(CHEATS[name], guard.mark), ADD]
    patient = functools.partial(code_tests, seconds=5, total_seconds=20, workers=2)
    tests, entry = (TESTS, None) if form == "asserts" else (CHECK, ["add"] * 2)
    assert patient(programs, [tests] * 2, entry) == [0.0, 1.0]
    shares = patient(programs, [tests] * 2, entry, credit="share")
    # one that answers 42 whatever it is asked may have one of three right, and is paid for that one
    assert shares[0] in ([0.0, 1 / 3] if name == "answering before it is asked" else [0.0])
    assert shares[1] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "print('42')\nprint('all tests passed')",
        "import os\nos._exit(0)",
        "import os\nprint(open('/proc/self/cmdline').read(), os.environ)",
        "import sys\nsys.stdout = type('S', (str,), {'__eq__': lambda *a: True})()",
    ],
)
def test_output_that_is_not_the_answer_earns_nothing(text, guard):
    assert code_tests([text, SUM], [PAIRS] * 2, seconds=20, total_seconds=60) == [0.0, 1.0]


def test_ten_megabytes_of_text(guard):
    texts = ["x" * 10_000_000, "```python\n" * 1_000_000, "\x00" * 10_000_000, "`" * 10_000_000, " \n" * 5_000_000]
    assert code_tests([*texts, ADD], [TESTS] * 6, seconds=20, total_seconds=60) == [0.0] * 5 + [1.0]
    assert code_compiles([*texts, ADD], seconds=60) == [0.0] * 5 + [1.0]
    nearly = "#" + "x" * 1_000_000 + "\n" + ADD
    assert code_tests([nearly], [TESTS], seconds=20, total_seconds=60) == [1.0]


def test_odd_text_in_an_honest_program(guard):
    odd = ADD + "# \u202e right to left \u2066\nx = '\\x00\\ud800'\n"
    assert code_tests([odd], [TESTS], seconds=20, total_seconds=60) == [1.0]


def test_compiling_what_is_hostile(guard):
    texts = [HARM[name] for name in ("null bytes", "lone surrogates", "right-to-left marks", "deep nesting")]
    assert code_compiles([*texts, ADD, HARM["towers of powers"]], seconds=30) == [0.0] * 4 + [1.0, 1.0]


def test_tests_that_change_by_what_is_given_are_safe(guard):
    """`f(x) == sorted(x)` holds for a program that empties x, where both share it."""
    cheat = "def order(x):\n    x.clear()\n    return []\n"
    tests = ["x = [3, 1, 2]\nassert order(x) == sorted(x)"]
    honest = "def order(x):\n    return sorted(x)\n"
    assert code_tests([cheat, honest], [tests] * 2, seconds=20, total_seconds=60) == [0.0, 1.0]
