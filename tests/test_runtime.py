from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_trainer import runtime


@pytest.fixture
def machine(monkeypatch):
    """A machine of which a test names the torch threads, the cores and the quota; what is set is read back."""
    state = SimpleNamespace(threads=8, cores=8, quota=None, mallopt=[])
    monkeypatch.setattr(runtime, "_said", set())
    monkeypatch.setattr(runtime, "_keeps_memory", False)
    for name in [n for n in os.environ if n.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    for name in ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "LOCAL_WORLD_SIZE", "GLIBC_TUNABLES", "LD_PRELOAD"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: state.threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: setattr(state, "threads", n))
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda _: set(range(state.cores)), raising=False)
    monkeypatch.setattr(runtime, "_core_of", str)
    monkeypatch.setattr(runtime, "_cgroup_quota", lambda: state.quota)

    def mallopt(key, value):
        state.mallopt.append((key.value, value.value))
        return 1

    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    monkeypatch.setattr(runtime, "_is_glibc", lambda: True)
    return state


@pytest.mark.parametrize(
    ("cores", "quota", "ranks", "expected"),
    [
        (8, None, None, 8),
        (4, None, None, 4),
        (8, 2.0, None, 2),
        (8, 1.9, None, 2),
        (8, 0.2, None, 1),
        (8, 64.0, None, 8),
        (8, None, "2", 4),
        (8, None, "3", 2),  # 8 // 3
        (8, 2.0, "4", 1),
        (16, None, None, 8),  # torch has 8: lowered, never raised
    ],
)
def test_threads_are_the_share_of_this_process(machine, monkeypatch, cores, quota, ranks, expected):
    machine.cores, machine.quota = cores, quota
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    notes = runtime.prepare_cpu()
    assert machine.threads == expected
    assert any(f"{expected} CPU threads instead of 8" in note for note in notes) == (expected != 8)


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_users_thread_count_is_respected(machine, monkeypatch, variable):
    machine.cores = 2
    monkeypatch.setenv(variable, "8")
    notes = runtime.prepare_cpu()
    assert machine.threads == 8
    assert any(variable in note for note in notes)


def test_an_explicit_thread_count_wins(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert any("3 CPU threads" in note for note in runtime.prepare_cpu(3))
    assert machine.threads == 3
    with pytest.raises(ValueError, match=r"cpu_threads is 0; give a number from 1 up"):
        runtime.prepare_cpu(0)


def test_a_sentence_is_said_once(machine):
    machine.cores = 2
    assert len(runtime.prepare_cpu()) == 2
    machine.threads = 8
    assert runtime.prepare_cpu() == []
    assert machine.threads == 2


def test_allocator_is_told_to_keep_memory(machine):
    runtime.prepare_cpu()
    # malloc.h: M_TRIM_THRESHOLD -1, M_TOP_PAD -2, M_MMAP_MAX -4
    assert sorted(machine.mallopt) == [(-4, 0), (-2, 268435456), (-1, -1)]
    assert runtime._keeps_memory


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "100"), ("MALLOC_ARENA_MAX", "1"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")],
)
def test_allocator_settings_of_the_user_are_respected(machine, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    notes = runtime.prepare_cpu()
    assert machine.mallopt == []
    assert not runtime._keeps_memory
    assert any(name in note for note in notes)


@pytest.mark.parametrize("case", ["musl", "jemalloc", "no mallopt"])
def test_other_allocators_are_left_alone(machine, monkeypatch, case):
    if case == "musl":
        monkeypatch.setattr(runtime, "_is_glibc", lambda: False)
    elif case == "jemalloc":
        monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    else:
        monkeypatch.setattr(runtime.ctypes, "CDLL", lambda _: object())
    assert runtime.prepare_cpu() == []
    assert machine.mallopt == []


def test_a_system_without_confstr_is_not_glibc(monkeypatch):
    def unknown(_):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(runtime.os, "confstr", unknown, raising=False)
    assert not runtime._is_glibc()
    monkeypatch.delattr(runtime.os, "confstr")
    assert not runtime._is_glibc()


# Allocates and fills 100 MB four times with malloc itself: torch asks for aligned blocks, which glibc may place anew.
PAGE_FAULTS = """
import ctypes, resource, sys
from grpo_trainer.runtime import prepare_cpu
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "keep":
    prepare_cpu()
faults = []
for _ in range(4):
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(100_000_000)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(block, 1, 100_000_000)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    libc.free(block)
print(min(faults[1:]))
"""


@pytest.mark.skipif(not runtime._is_glibc(), reason="only glibc gives memory back at once")
def test_freed_memory_is_reused_without_page_faults():
    # 100 MB are 24,414 pages of 4 KiB, or 47 huge ones
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    kept, given_back = (
        int(subprocess.check_output([sys.executable, "-c", PAGE_FAULTS, how], env=clean)) for how in ("keep", "default")
    )
    assert kept < 10
    assert given_back > 40


@pytest.fixture
def heap(monkeypatch):
    """A process whose resident memory a test sets; ``trims`` counts how often unused memory was given back."""
    state = SimpleNamespace(rss=0, trims=0)

    def malloc_trim(_):
        state.trims += 1

    monkeypatch.setattr(runtime, "_keeps_memory", True)
    monkeypatch.setattr(runtime, "_rss_bytes", lambda: state.rss)
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=malloc_trim))
    return state


def test_memory_is_given_back_when_half_as_much_again_is_held(heap):
    watch = runtime.HeapWatch(slack=1.5)
    seen = []
    # need 100: 150 is within the slack, 151 is not. The next step then needs 120: 180 is within, 181 is not.
    # A smaller step after that (60) does not lower the need.
    for heap.rss in [100, 150, 151, 120, 180, 181, 60, 180, 181]:
        seen.append(watch.step())
    assert seen == [False, False, True, False, False, True, False, False, True]
    assert heap.trims == 3


def test_memory_is_the_systems_business_where_the_allocator_was_not_set(heap, monkeypatch):
    monkeypatch.setattr(runtime, "_keeps_memory", False)
    watch = runtime.HeapWatch()
    for heap.rss in [100, 1000]:
        assert watch.step() is False
    assert heap.trims == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_resident_memory_is_in_bytes():
    size = 200_000_000
    before = runtime._rss_bytes()
    with mmap.mmap(-1, size) as fresh:  # pages that no earlier test has freed
        fresh.write(b"1" * size)
        # the text itself is as large, and may or may not be given back by now
        assert 0.9 * size < runtime._rss_bytes() - before < 2.2 * size


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "200000 100000"}, 2.0),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_quota_of_a_control_group(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert runtime._limit_of(tmp_path) == expected


@pytest.mark.parametrize(
    ("line", "limits", "expected"),
    [
        ("0::/a/b", {"a": "300000 100000", "a/b": "max 100000"}, 3.0),  # a parent's limit holds for the child
        ("0::/a/b", {"a": "300000 100000", "a/b": "100000 100000"}, 1.0),
        ("0::/host/path/unseen/here", {".": "200000 100000"}, 2.0),
        ("3:cpuset:/a", {"a": "100000 100000"}, None),  # not the group of the processor's time
    ],
)
def test_quota_is_the_least_over_the_levels(tmp_path, monkeypatch, line, limits, expected):
    for folder, text in limits.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "cpu.max").write_text(text)
    read = Path.read_text
    monkeypatch.setattr(runtime, "_CGROUPS", tmp_path)
    monkeypatch.setattr(Path, "read_text", lambda p, *a, **k: line if p == Path("/proc/self/cgroup") else read(p))
    assert runtime._cgroup_quota() == expected


def test_hyperthreads_of_a_core_count_once(tmp_path, monkeypatch):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr(runtime, "_CPU_TOPOLOGY", tmp_path)
    monkeypatch.setattr(runtime, "_cgroup_quota", lambda: None)
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert runtime._usable_cores() == 2
    monkeypatch.setattr(runtime.os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    assert runtime._usable_cores() == 1
    monkeypatch.setattr(runtime, "_CPU_TOPOLOGY", tmp_path / "absent")
    assert runtime._usable_cores() == 2


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": False, "amx_bf16": True}, True),
        ({"avx2": True, "avx512_bf16": False}, False),
        ({"neon": True, "bf16": True}, True),
        ({}, False),
    ],
)
def test_fast_bf16_is_what_the_cpu_has(monkeypatch, found, expected):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert runtime.cpu_has_fast_bf16() is expected


def test_fast_bf16_without_the_functions_that_tell(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert runtime.cpu_has_fast_bf16() is True
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert runtime.cpu_has_fast_bf16() is False
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert runtime.cpu_has_fast_bf16() is False


def test_peak_memory_is_in_bytes():
    before = runtime.peak_rss_bytes()
    held = torch.ones(50_000_000)  # 200 MB
    after = runtime.peak_rss_bytes()
    assert after >= held.nbytes
    assert after < 1000 * 2**30
    assert after >= before


def test_peak_memory_where_there_is_no_proc(monkeypatch):
    import resource

    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=1000))
    monkeypatch.setattr(runtime.sys, "platform", "darwin")
    assert runtime.peak_rss_bytes() == 1000
    monkeypatch.setattr(runtime.sys, "platform", "linux")
    assert runtime.peak_rss_bytes() == 1_024_000
