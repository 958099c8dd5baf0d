"""Whatever a reward function does in a worker: it costs its own completion's reward, and leaves nothing behind.

Right numbers are those of the same function called here, in one call. A completion is the name of what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from grpo_trainer.rewards import workers
from grpo_trainer.rewards.base import RewardError, RewardInputs, RewardSet
from grpo_trainer.rewards.carry import carry
from grpo_trainer.rewards.options import RewardOptions
from grpo_trainer.rewards.pool import GRACE, WorkerPool
from grpo_trainer.rewards.workers import start_pools

ROOT = Path(__file__).parents[2]
NAN = math.nan
LIMIT = 1.0


def batch(completions, state=None, groups=None, **columns) -> RewardInputs:
    return RewardInputs(
        rows=[
            {"prompt": "p", **{name: values[i] for name, values in columns.items()}} for i in range(len(completions))
        ],
        completions=list(completions),
        completion_ids=[[len(c)] for c in completions],
        trainer_state=state,
        group_sizes=groups,
    )


def one(function, inputs, **options):
    """Rewards of one function and its log; nothing may be left when its workers are closed."""
    rewards = RewardSet([function], names=["f"], options=[RewardOptions(**{"isolation": "process", **options})])
    try:
        values, log = rewards.score(inputs)
    finally:
        rewards.close()
    return values[:, 0].tolist(), log


def same(got, expected) -> bool:
    return np.array_equal(np.array(got, dtype=float), np.array(expected, dtype=float), equal_nan=True)


def holdings() -> tuple[set[int], set[str], set[str]]:
    """The processes, threads and open files of this process."""
    me = psutil.Process()
    children = {child.pid for child in me.children(recursive=True)}
    files = {f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if fd_exists(int(fd))}
    return children, {t.name for t in threading.enumerate()}, files


def running() -> list[int]:
    """The worker processes of this process; a library may have processes of its own."""
    children = psutil.Process().children(recursive=True)
    return [process.pid for process in children if any("rewards/worker.py" in word for word in process.cmdline())]


def fd_exists(number: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}") is not None
    except OSError:
        return False


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    before = holdings()
    yield
    gc.collect()
    assert holdings() == before


def harmless(completions, **kwargs):
    return [float(len(c)) for c in completions]


def make_hostile():
    """A function whose completions say what it does; made here, so that it is carried as a whole."""

    def hostile(completions, **kwargs):
        for text in completions:
            if text == "loop":
                while True:
                    pass
            if text == "native loop":  # one call into C, which no exception and no alarm reaches
                re.match(r"(a+)+$", "a" * 60 + "b")
            if text == "native sleep":
                ctypes.CDLL(None).sleep(1000)
            if text == "deaf":
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
                    signal.signal(number, signal.SIG_IGN)
                time.sleep(1000)
            if text == "stops itself":
                os.kill(os.getpid(), signal.SIGSTOP)
            if text == "stops its parent":
                os.kill(os.getppid(), signal.SIGSTOP)
                time.sleep(1000)
            if text == "leaves":
                os._exit(0)
            if text == "exits":
                sys.exit("bye")
            if text == "segfault":
                ctypes.string_at(0)
            if text == "kills itself":
                os.kill(os.getpid(), signal.SIGKILL)
            if text == "kills its parent":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(1000)
            if text == "kills its group":
                os.killpg(0, signal.SIGKILL)
            if text == "hogs":
                bytearray(100 << 30)
            if text == "hogs slowly":
                hoard = []
                while True:
                    hoard.append(bytearray(1 << 20))
            if text == "recurses":
                (lambda f: f(f))(lambda f: f(f))
            if text == "raises":
                raise KeyError("nothing here")
            if text == "raises strangely":
                raise type("Odd", (BaseException,), {"__str__": lambda self: 1 / 0})
            if text == "children":
                for _ in range(3):
                    subprocess.Popen(["sleep", "1000"], start_new_session=True)
                while True:
                    pass
            if text == "closes":
                os.closerange(0, 256)
            if text == "writes":
                for number in range(256):
                    with contextlib.suppress(OSError):
                        os.write(number, b"\xff" * 100)
            if text == "floods":
                os.write(1, b"x" * (1 << 20))
                print("y" * (10 << 20))
            if text == "huge":
                return ["x" * (100 << 20)]
            if text == "deep":
                deep = []
                for _ in range(100_000):
                    deep = [deep]
                return [deep]
            if text == "too many":
                return [1.0] * 1000
            if text == "a text":
                return "1"
            if text == "not a number":
                return [NAN]
            if text == "an object":
                return [object()]
            if text == "digits":
                return [10**5000]
        return [float(len(c)) for c in completions]

    return hostile


TIMEOUTS = ["loop", "native loop", "native sleep", "deaf", "stops itself"]
ERRORS = {
    "leaves": "it ended itself with exit code 0",
    "exits": "SystemExit: bye",
    "segfault": "it was killed by SIGSEGV",
    "kills itself": "it was killed by SIGKILL",
    "kills its parent": "it was killed by SIGKILL",
    "kills its group": "it was killed by SIGKILL",
    "hogs": "MemoryError",
    "hogs slowly": "MemoryError",
    "recurses": "RecursionError",
    "raises": "KeyError: 'nothing here'",
    "raises strangely": "an exception without a text",
    "closes": "it cut its connection|it ended itself",
    "writes": "it returned more than 64 MiB",
    "huge": "which is not a number, for row 1",
    "deep": "RecursionError|which is not a number, for row 1",
    "too many": "returned 1000 values for 1 completions",
    "a text": r"returned 1 \(str\)|must return a list of 1 numbers",
    "not a number": "nan, which is not finite, for row 1: 'not a number'",
    "an object": r"\(object\), which is not a number",
    "digits": "inf, which is not finite",
}


# --- the same numbers -------------------------------------------------------------------------------------------------


def make_objects():
    """Made here, so that they are carried as a whole."""

    class Grader:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, completions, **kwargs):
            return [self.scale * len(c) for c in completions]

        def grade(self, completions, **kwargs):
            return self(completions)

    class AsyncGrader:
        async def __call__(self, completions, **kwargs):
            await asyncio.sleep(0)
            return [float(len(c)) for c in completions]

    return Grader(0.25), Grader(0.25).grade, AsyncGrader()


def closure(scale):
    return lambda completions, **kwargs: [scale * len(c) for c in completions]


@pytest.mark.parametrize("rows_per_call", [None, 1, 3, 100])
@pytest.mark.parametrize(
    "function",
    [
        closure(0.5),
        functools.partial(closure(0.5)),
        *make_objects(),
        lambda completions, **kwargs: np.array([len(c) for c in completions], dtype=np.float32) / 3,
        lambda completions, **kwargs: [None if len(c) % 2 else 0.1 * len(c) for c in completions],
        lambda completions, answer, **kwargs: [float(c == a) for c, a in zip(completions, answer, strict=True)],
        lambda completions, completion_ids, prompts, **kwargs: [float(ids[0]) for ids in completion_ids],
    ],
    ids=["closure", "partial", "object", "method", "async object", "array", "none", "column", "ids"],
)
def test_a_worker_gives_the_numbers_of_a_call_here_in_the_same_order(function, rows_per_call):
    inputs = batch(["x" * (i * 7 % 11) for i in range(10)], answer=["", "x", None, "xxx"] + ["x" * 6] * 6)
    here, _ = RewardSet([function]).score(inputs)
    there, log = one(function, inputs, rows_per_call=rows_per_call)
    assert same(there, here[:, 0].tolist())
    assert log.troubles == {"rewards/f/timeouts": 0, "rewards/f/errors": 0}


MODULE = """
FACTOR = 3.0


def scaled(completions, scale=1.0, **kwargs):
    return [scale * len(c) for c in completions]


async def in_async(completions, **kwargs):
    return scaled(completions)


def with_a_global(completions, **kwargs):
    return [FACTOR * len(c) for c in completions]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's, in a folder of his own."""
    (tmp_path / "users_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("users_rewards")
    del sys.modules["users_rewards"]


def test_a_function_of_a_module_is_imported_there(module):
    inputs = batch(["a", "bbb", ""])
    for function in (module.scaled, functools.partial(module.scaled, scale=2.0), module.in_async, module.with_a_global):
        assert len(carry("f", function)) < 300  # its name, not its code
        assert one(function, inputs)[0] == RewardSet([function]).score(inputs)[0][:, 0].tolist()


def test_a_function_of_a_module_that_is_found_nowhere_is_carried_as_a_whole(module, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[1:])
    inputs = batch(["a", "bbb", ""])
    for function in (module.with_a_global, module.in_async):
        assert one(function, inputs)[0] == RewardSet([function]).score(inputs)[0][:, 0].tolist()


def test_several_functions_keep_their_columns_and_work_at_the_same_time():
    # each waits for the other: one after the other, they would run into their limits
    folder = f"/tmp/{os.getpid()}-meeting"
    os.makedirs(folder)

    def meets(mine, other):
        def reward(completions, **kwargs):
            open(f"{folder}/{mine}", "w").close()
            while not os.path.exists(f"{folder}/{other}"):
                time.sleep(0.01)
            return [float(mine)] * len(completions)

        return reward

    limits = RewardOptions(isolation="process", time_limit=60)
    functions = [meets(1, 2), harmless, meets(2, 1)]
    rewards = RewardSet(functions, options=[limits, RewardOptions(), limits])
    for pool in rewards._pools.values():
        pool.close()
        pool.size = 2  # also on a machine with one core
    try:
        values, _ = rewards.score(batch(["a", "bb"]))
        assert values.tolist() == [[1.0, 1.0, 2.0], [1.0, 2.0, 2.0]]
    finally:
        rewards.close()
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)


def test_the_calls_of_a_coroutine_wait_together_in_a_worker():
    # no call ends before the last has begun
    def make():
        begun = []

        async def reward(completions, **kwargs):
            begun.append(completions)
            while len(begun) < 4:
                await asyncio.sleep(0.001)
            return [float(len(c)) for c in completions]

        return reward

    rewards = RewardSet([make()], options=[RewardOptions(isolation="process", rows_per_call=1, time_limit=60)])
    for pool in rewards._pools.values():
        pool.close()
        pool.size = 1
    assert rewards.score(batch(["a", "bb", "ccc", "dddd"]))[0][:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    rewards.close()


def test_a_coroutine_that_waits_in_vain_costs_its_own_completion_only():
    def make():
        async def reward(completions, **kwargs):
            if "never" in completions:
                await asyncio.Event().wait()
            return [float(len(c)) for c in completions]

        return reward

    inputs = batch(["a", "never", "ccc"])
    values, log = one(make(), inputs, rows_per_call=1, time_limit=LIMIT)
    assert same(values, [1.0, NAN, 3.0])
    assert log.troubles == {"rewards/f/timeouts": 1, "rewards/f/errors": 0}


def test_a_coroutine_that_blocks_its_worker_costs_its_own_completion_only():
    def make():
        async def reward(completions, **kwargs):
            while "loop" in completions:
                pass
            return [float(len(c)) for c in completions]

        return reward

    values, _ = one(make(), batch(["a", "loop", "ccc"]), rows_per_call=1, time_limit=LIMIT)
    assert same(values, [1.0, NAN, 3.0])


def test_what_is_logged_in_workers_comes_in_the_order_of_the_batch():
    def make():
        def reward(completions, log_extra, log_metric, **kwargs):
            time.sleep(0.3 * (completions[0] == "a"))  # the first call ends last
            log_extra("seen", [c.upper() for c in completions])
            log_extra("kind", [{"n": np.int64(len(c)), "where": (Path("x"), None)} for c in completions])
            log_metric("length", np.float32(len(completions[0])))
            return [0.0] * len(completions)

        return reward

    _, log = one(make(), batch(["a", "bb", "ccc"]), rows_per_call=1)
    assert log.extra["seen"] == ["A", "BB", "CCC"]
    assert log.extra["kind"] == [{"n": n, "where": ["x", None]} for n in (1, 2, 3)]
    assert log.metrics == {"length": [1.0, 2.0, 3.0]}
    assert log.extra["f_trouble"] == [None] * 3


@pytest.mark.parametrize("wrong", ["extra", "metric"])
def test_what_is_logged_wrongly_in_a_worker_is_refused_as_here(wrong):
    def make():
        def reward(completions, log_extra, log_metric, **kwargs):
            log_extra("seen", [0]) if wrong == "extra" else log_metric("m", "x")
            return [0.0] * len(completions)

        return reward

    said = (
        r"log_extra\('seen', \.\.\.\) got 1 values for 2" if wrong == "extra" else r"log_metric\('m', \.\.\.\) got 'x'"
    )
    with pytest.raises(RewardError, match=said):
        one(make(), batch(["a", "b"]))


def test_the_trainers_state_comes_as_a_plain_copy():
    from transformers import TrainerState

    def make():
        def reward(completions, trainer_state, **kwargs):
            assert "transformers" not in sys.modules
            step = trainer_state.global_step
            trainer_state.global_step = -1
            assert not hasattr(trainer_state, "no_such_thing")
            return [step + trainer_state.log_history[0]["reward"]]

        return reward

    state = TrainerState(global_step=7, log_history=[{"reward": 0.5}])
    assert one(make(), batch(["a"], state=state))[0] == [7.5]
    assert state.global_step == 7


def test_what_a_function_prints_is_printed_here(capfd):
    def make():
        def reward(completions, **kwargs):
            print("looking at", completions[0])
            return [0.0]

        return reward

    one(make(), batch(["a"]))
    assert capfd.readouterr().out == "looking at a\n"


def test_strange_texts_arrive_as_they_are():
    texts = ["\0", "\ud800", "\u202eabc", "x" * 10_000_000, "", "\x1b[31m", "'); --"]

    def make(texts):
        def reward(completions, log_extra, **kwargs):
            log_extra("same", [c[:10] for c in completions])
            return [float(c == t) for c, t in zip(completions, texts, strict=True)]

        return reward

    values, log = one(make(texts), batch(texts))
    assert values == [1.0] * len(texts)
    assert log.extra["same"] == [t[:10] for t in texts]


# --- hostile ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["process", "once"])
@pytest.mark.parametrize("what", TIMEOUTS)
def test_what_never_ends_costs_its_own_completion_only(what, isolation):
    values, log = hostile(["a", what, "ccc", "dddd", "eeeee"], isolation, rows_per_call=3, time_limit=LIMIT)
    assert same(values, [1.0, NAN, 3.0, 4.0, 5.0])
    assert log.troubles == {"rewards/f/timeouts": 1, "rewards/f/errors": 0}
    assert log.extra["f_trouble"] == [None, "no reward within time_limit=1 s", None, None, None]


@pytest.mark.parametrize("isolation", ["process", "once"])
@pytest.mark.parametrize("what", ERRORS)
def test_what_ends_badly_costs_its_own_completion_only(what, isolation):
    limits = dict(rows_per_call=3, time_limit=20, memory_limit=1 << 30, on_error="none")
    values, log = hostile(["a", what, "ccc", "dddd", "eeeee"], isolation, **limits)
    assert same(values, [1.0, NAN, 3.0, 4.0, 5.0])
    assert log.troubles == {"rewards/f/timeouts": 0, "rewards/f/errors": 1}
    said = log.extra["f_trouble"]
    assert re.search(ERRORS[what], said[1]), said
    assert said[:1] + said[2:] == [None] * 4


def hostile(completions, isolation, **options):
    """Scores with the hostile function; ``once`` is a process of its own for each call, as in a sandbox."""
    rewards = RewardSet([make_hostile()], names=["f"], options=[RewardOptions(isolation="process", **options)])
    if isolation == "once":
        rewards.close()
        rewards._pools["process"] = WorkerPool([carry("f", make_hostile())], size=2, once=True)
    try:
        values, log = rewards.score(batch(completions))
    finally:
        rewards.close()
    return values[:, 0].tolist(), log


@pytest.mark.slow
def test_a_worker_whose_keeper_is_stopped_is_killed_from_outside():
    values, log = hostile(["a", "stops its parent", "ccc"], "process", rows_per_call=1, time_limit=0.1)
    assert same(values, [1.0, NAN, 3.0])
    assert log.troubles == {"rewards/f/timeouts": 1, "rewards/f/errors": 0}
    assert GRACE < 10


def test_processes_that_a_call_leaves_behind_end_with_it():
    before = {p.pid for p in psutil.process_iter()}
    values, _ = hostile(["a", "children"], "once", rows_per_call=1, time_limit=LIMIT)
    assert same(values, [1.0, NAN])
    left = [p for p in psutil.process_iter(["name"]) if p.pid not in before and p.info["name"] == "sleep"]
    assert left == []


def test_output_goes_nowhere(capfd):
    values, _ = hostile(["a", "floods"], "process", rows_per_call=1, time_limit=20)
    assert values == [1.0, 6.0]
    assert len(capfd.readouterr().out) <= 10_000


def test_what_a_completion_changes_is_gone_at_the_next_call_where_each_has_its_own_process():
    def make():
        state = {"times": 0}

        def reward(completions, **kwargs):
            state["times"] += 1
            return [float(state["times"])] * len(completions)

        return reward

    for once, expected in ((True, [1.0, 1.0, 1.0]), (False, [1.0, 2.0, 3.0])):
        rewards = RewardSet([make()], options=[RewardOptions(isolation="process", rows_per_call=1)])
        rewards.close()
        rewards._pools["process"] = WorkerPool([carry("f", make())], size=1, once=once)
        assert rewards.score(batch(["a", "b", "c"]))[0][:, 0].tolist() == expected
        rewards.close()


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_workers_run_in_a_sandbox(monkeypatch, tmp_path):
    """In a container of bubblewrap: no network, a file system that can only be read, no other processes in sight."""
    contained = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    monkeypatch.setattr(workers, "sandbox_wrap", lambda folders, memory: lambda argv: [*contained, *argv])

    def make(path, port, act):
        def reward(completions, log_extra, **kwargs):
            act(completions, **kwargs)
            seen = []
            try:
                open(path, "w").close()
            except OSError:
                seen.append("no file")
            try:
                import socket

                socket.create_connection(("127.0.0.1", port), timeout=1)
            except OSError:
                seen.append("no network")
            if sum(name.isdigit() for name in os.listdir("/proc")) < 8:
                seen.append("alone")
            log_extra("seen", [", ".join(seen)])
            return [float(len(c)) for c in completions]

        return reward

    options = RewardOptions(isolation="sandbox", rows_per_call=1, time_limit=LIMIT, on_error="none")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        function = make(f"{tmp_path}/x", server.getsockname()[1], make_hostile())
        rewards = RewardSet([function], names=["f"], options=[options])
        values, log = rewards.score(
            batch(["a", "loop", "kills its parent", "leaves", "stops itself", "children", "ccc"])
        )
        rewards.close()
    assert same(values[:, 0].tolist(), [1.0, NAN, NAN, NAN, NAN, NAN, 3.0])
    assert log.troubles == {"rewards/f/timeouts": 3, "rewards/f/errors": 2}
    assert {log.extra["seen"][i] for i in (0, -1)} == {"no file, no network, alone"}


def test_a_sandbox_that_is_not_there_is_refused_when_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpo_trainer.rewards.sandbox", None)
    with pytest.raises(ValueError, match=r"isolation='sandbox' is not possible here: .*Set isolation='process' if"):
        RewardSet([harmless], options=[RewardOptions(isolation="sandbox")])


def test_a_sandboxed_function_is_carried_as_a_whole_unless_it_is_installed(module):
    from grpo_trainer.rewards.maths import last_integer

    folders = workers.readable_folders()
    assert len(carry("f", last_integer, folders)) < 200  # its name
    assert len(carry("f", module.scaled)) < 200 < len(carry("f", module.scaled, folders))


def test_without_rows_per_call_the_whole_batch_is_one_call_and_shares_its_fate():
    values, log = hostile(["a", "loop", "ccc"], "process", time_limit=LIMIT)
    assert same(values, [NAN] * 3)
    assert log.troubles["rewards/f/timeouts"] == 3


# --- policies ---------------------------------------------------------------------------------------------------------


def test_trouble_that_ends_the_run_says_whose_it_is_and_what_it_was():
    with pytest.raises(
        RewardError, match=r"'f' raised KeyError: 'nothing here', while it scored 'raises', in a worker"
    ):
        one(make_hostile(), batch(["raises"]))
    with pytest.raises(RewardError, match=r"'f': it was killed by SIGSEGV, while it scored 'segfault'"):
        one(make_hostile(), batch(["a", "segfault"]), rows_per_call=2)
    with pytest.raises(
        RewardError, match=r"'f': no reward within time_limit=1 s, while it scored 2 completions from 'a'"
    ):
        one(make_hostile(), batch(["a", "loop"]), time_limit=LIMIT, on_timeout="raise")


def test_the_traceback_of_a_worker_is_shown():
    with pytest.raises(RewardError, match=r"Traceback(.|\n)*in hostile\n.*KeyError"):
        one(make_hostile(), batch(["raises"]))


def test_a_number_may_stand_for_trouble():
    options = dict(rows_per_call=1, time_limit=LIMIT, on_error=-1, on_timeout=0.0)
    assert one(make_hostile(), batch(["a", "loop", "raises"]), **options)[0] == [1.0, 0.0, -1.0]


def test_a_policy_holds_here_too():
    inputs = batch(["a", "raises", "ccc"])
    values, log = one(make_hostile(), inputs, isolation="inline", rows_per_call=3, on_error="none")
    assert same(values, [1.0, NAN, 3.0])
    assert log.troubles == {"rewards/f/timeouts": 0, "rewards/f/errors": 1}
    assert log.extra["f_trouble"] == [None, "KeyError: 'nothing here'", None]

    async def broken(completions, **kwargs):
        raise KeyError("nothing here")

    assert same(one(broken, inputs, isolation="inline", on_error="none")[0], [NAN] * 3)


def test_a_plain_function_has_no_figures_of_trouble():
    _, log = RewardSet([harmless]).score(batch(["a"]))
    assert (log.troubles, log.extra) == ({}, {})


def test_trouble_is_shown_once_with_the_completion_that_caused_it(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    options = RewardOptions(isolation="process", rows_per_call=4, on_error="none")
    rewards = RewardSet([make_hostile()], names=["f"], options=[options])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rewards.score(batch(["a", "raises", "leaves"]))
    rewards.close()
    (said,) = [r.getMessage() for r in caplog.records]
    assert "'f' on process 3" in said and "rewards/f/errors counts them all" in said
    assert "while it scored 'raises'" in said or "while it scored 'leaves'" in said


# --- groups and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_a_function_may_ask_for_whole_groups(isolation):
    def make():
        def rank(completions, log_extra, **kwargs):
            log_extra("size", [len(completions)] * len(completions))
            return [float(sorted(completions, key=len).index(c)) for c in completions]

        return rank

    inputs = batch(["aaa", "a", "aa", "b", "bbbb", "cc"], groups=[3, 2, 1])
    values, log = one(make(), inputs, isolation=isolation, group=True)
    assert values == [2.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert log.extra["size"] == [3, 3, 3, 2, 2, 1]


def test_groups_that_are_not_told_are_an_error():
    with pytest.raises(ValueError, match="'f' has group=True"):
        one(harmless, batch(["a"]), isolation="inline", group=True)


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_equal_completions_are_scored_once_if_asked(isolation):
    folder_calls = []

    def make():
        def reward(completions, log_extra, answer, **kwargs):
            log_extra("calls", list(completions))
            folder_calls.append(list(completions))
            return [len(c) + a for c, a in zip(completions, answer, strict=True)]

        return reward

    options = RewardOptions(isolation=isolation, cache=True)
    rewards = RewardSet([make()], options=[options])
    first = batch(["a", "bb", "a", "a"], answer=[1, 1, 1, 2])
    again = batch(["bb", "a", "a", "ccc"], answer=[1, 2, 5, 1])
    values, log = rewards.score(first)
    assert values[:, 0].tolist() == [2.0, 3.0, 2.0, 3.0]
    assert log.extra["calls"] == ["a", "bb", "a", "a"]
    values, log = rewards.score(again)
    assert values[:, 0].tolist() == [3.0, 3.0, 6.0, 4.0]
    assert log.extra["calls"] == ["bb", "a", "a", "ccc"]
    rewards.close()
    if isolation == "inline":
        assert folder_calls == [["a", "bb", "a"], ["a", "ccc"]]


def test_trouble_is_not_remembered():
    asked = []

    def reward(completions, **kwargs):
        asked.append(list(completions))
        if len(asked) == 1:
            raise KeyError("at first")
        return [1.0] * len(completions)

    rewards = RewardSet([reward], options=[RewardOptions(cache=True, on_error="none")])
    assert same(rewards.score(batch(["a", "a"]))[0][:, 0].tolist(), [NAN, NAN])
    assert rewards.score(batch(["a", "a"]))[0][:, 0].tolist() == [1.0, 1.0]
    assert asked == [["a"], ["a"]]


def test_whole_groups_are_remembered_as_wholes():
    asked = []

    def reward(completions, **kwargs):
        asked.append(list(completions))
        return [float(len(completions))] * len(completions)

    rewards = RewardSet([reward], options=[RewardOptions(cache=True, group=True)])
    inputs = batch(["a", "b", "a", "b", "b", "a"], groups=[2, 2, 2])
    assert rewards.score(inputs)[0][:, 0].tolist() == [2.0] * 6
    assert asked == [["a", "b"], ["b", "a"]]


# --- a pool's life ----------------------------------------------------------------------------------------------------


def test_a_function_that_cannot_be_carried_is_refused_when_it_is_given():
    lock = threading.Lock()
    with pytest.raises(
        ValueError, match=r"'f' cannot be carried to a worker process: TypeError: .*lock.*isolation='inline'"
    ):
        RewardSet([lambda completions, **kwargs: [lock]], names=["f"], options=[RewardOptions(isolation="process")])


def test_a_function_that_cannot_be_loaded_there_ends_the_run():
    class Unloadable:
        def __call__(self, completions, **kwargs):
            return [0.0]

        def __reduce__(self):
            return (int, ("no number",))

    with pytest.raises(RewardError, match="'f' cannot be loaded in a worker: ValueError: invalid literal"):
        one(Unloadable(), batch(["a"]), on_error="none")


def test_a_worker_that_cannot_be_started_says_why(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(RuntimeError, match=r"could not be started: .*/no/such/python"):
        one(harmless, batch(["a"]))


def test_what_a_worker_says_when_it_does_not_start_is_shown():
    wrap = lambda argv: [sys.executable, "-c", "import sys; sys.exit('no sandbox here')"]  # noqa: E731
    pool = WorkerPool([], size=1, wrap=wrap)
    from grpo_trainer.rewards.pool import Task

    with pytest.raises(RuntimeError, match="did not start: it ended itself with exit code 1: no sandbox here"):
        pool.submit(Task(body=b"", calls=1)).result(timeout=60)
    pool.close()


def test_a_pool_that_was_closed_starts_again():
    rewards = RewardSet([closure(1.0)], options=[RewardOptions(isolation="process")])
    for _ in range(2):
        assert rewards.score(batch(["aa"]))[0].tolist() == [[2.0]]
        rewards.close()
        rewards.close()


def test_workers_end_with_the_set_they_belong_to():
    rewards = RewardSet([closure(1.0)], options=[RewardOptions(isolation="process")])
    rewards.score(batch(["aa"]))
    assert running()
    del rewards
    gc.collect()
    assert not running()


def test_an_interrupt_ends_what_is_running():
    rewards = RewardSet([make_hostile()], options=[RewardOptions(isolation="process")])
    timer = threading.Timer(1.0, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        rewards.score(batch(["loop", "a"]))
    timer.join()
    assert not running()


def test_workers_are_cheap():
    """What a worker loads by itself: no torch, nothing of this package."""

    def make():
        def reward(completions, log_extra, **kwargs):
            heavy = {"torch", "numpy", "transformers", "grpo_trainer"} & set(sys.modules)
            log_extra("modules", [sorted(heavy)])
            return [float(len(heavy))]

        return reward

    values, log = one(make(), batch(["a"]))
    assert values == [0.0], log.extra["modules"]


def test_the_library_is_loaded_without_torch():
    program = "import sys, grpo_trainer.rewards; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


PROGRAM = """
import json, os, signal, sys, time
import torch
from grpo_trainer.rewards.base import RewardInputs, RewardSet
from grpo_trainer.rewards.options import RewardOptions

SCALE = 2.0

class Thing:
    def __init__(self, n): self.n = n

def helper(text):
    return SCALE * Thing(len(text)).n

def reward(completions, **kwargs):
    while "loop" in completions:
        time.sleep(0.01)
    return [helper(c) for c in completions]

rewards = RewardSet([reward], options=[RewardOptions(isolation="process", rows_per_call=1)])
inputs = RewardInputs(rows=[{"prompt": "p"}] * 2, completions=["a", sys.argv[1]], completion_ids=[[1], [1]])
import psutil
print(json.dumps([p.pid for p in psutil.Process().children(recursive=True)]), flush=True)
if sys.argv[1] == "loop":
    print(flush=True)
print(rewards.score(inputs)[0].tolist(), flush=True)
if sys.argv[1] == "leave":
    os._exit(0)
"""


def run_program(tmp_path, word):
    (tmp_path / "script.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "script.py", word], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("word", ["bb", "leave"])
def test_a_script_without_a_guard_scores_and_leaves_no_process(tmp_path, word):
    process = run_program(tmp_path, word)
    workers = json.loads(process.stdout.readline())
    assert process.stdout.read().strip() == str([[2.0], [2.0 * len(word)]])
    assert process.wait(timeout=60) == 0
    gone(workers)


@pytest.mark.slow
def test_workers_at_work_end_when_the_trainer_is_killed(tmp_path):
    process = run_program(tmp_path, "loop")
    workers = json.loads(process.stdout.readline())
    process.stdout.readline()
    time.sleep(1.0)
    process.kill()
    process.wait()
    process.stdout.close()
    gone(workers)


def gone(workers):
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in workers)


def test_a_fork_of_the_trainer_leaves_the_workers_alone():
    rewards = RewardSet([closure(1.0)], options=[RewardOptions(isolation="process")])
    rewards.score(batch(["a"]))
    child = os.fork()
    if not child:
        try:
            rewards.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert rewards.score(batch(["aaa"]))[0].tolist() == [[3.0]]
    rewards.close()


def test_memory_limits_are_refused_where_nothing_enforces_them(monkeypatch):
    from grpo_trainer.rewards.scoring import Reward

    monkeypatch.setattr(sys, "platform", "darwin")
    limits = RewardOptions(isolation="process", memory_limit=1 << 30)
    with pytest.raises(ValueError, match="'f' has memory_limit=1073741824, which only Linux enforces"):
        start_pools([Reward(name="f", function=harmless, options=limits)])


def test_the_callers_tensors_are_what_they_were():
    inputs = batch(["a", "b"], answer=[torch.ones(2), torch.zeros(2)])

    def make():
        def reward(completions, answer, **kwargs):
            total = [float(a.sum()) for a in answer]
            answer[0].zero_()
            return total

        return reward

    assert one(make(), inputs)[0] == [2.0, 0.0]
    assert inputs.rows[0]["answer"].tolist() == [1.0, 1.0]
