"""The process on its machine: memory allocator, threads, and what the CPU is quick at.

Two settings decide how fast a training step on a CPU is, and neither is right by default:

- glibc gives a large tensor's memory back to the kernel as soon as it is freed, and the next tensor pays for every
  page again. Kept in the process, the same memory is reused (``HeapWatch`` bounds how much is kept).
- Threads beyond the processor share that this process really has (cores, affinity, container quota, other ranks)
  wait for each other.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch

# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4

# Large blocks come from the heap (no mmap), a freed heap is never given back, and the heap grows 256 MiB at a time.
_KEEP_MEMORY = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: 256 << 20}

_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CGROUPS = Path("/sys/fs/cgroup")
_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")

_said: set[str] = set()
_keeps_memory = False  # whether this module told glibc so


def prepare_cpu(threads: int | None = None) -> list[str]:
    """Set up allocator and threads of a process that trains on the CPU. Call it before the first large tensor.

    What a user has set is left alone: ``MALLOC_*`` and ``GLIBC_TUNABLES`` for the allocator, ``OMP_NUM_THREADS`` and
    ``MKL_NUM_THREADS`` for the threads. Without them the threads are lowered, never raised, to this process's share
    of the processor; several ranks on one machine (``LOCAL_WORLD_SIZE``) divide it.

    Args:
        threads: exactly this many threads, whatever the machine and the environment say; None decides as above.

    Returns:
        A sentence for each thing done, to be logged; a sentence that was returned before is not returned again.

    Raises:
        ValueError: if ``threads`` is below 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"cpu_threads is {threads}; give a number from 1 up, or None to let the machine decide.")
    notes = [note for note in (_keep_memory(), _set_threads(threads)) if note and note not in _said]
    _said.update(notes)
    return notes


def cpu_has_fast_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices natively (AVX512-BF16 or AMX, bf16 instructions on ARM).

    Returns:
        False also where torch does not tell.

    Example:
        >>> isinstance(cpu_has_fast_bf16(), bool)
        True
    """
    if not torch.backends.mkldnn.is_available():  # the library whose bf16 kernels torch calls
        return False
    try:
        found = torch.cpu.get_capabilities()
        return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    except (AttributeError, RuntimeError):
        pass
    try:  # before get_capabilities there was this, private
        return bool(torch.cpu._is_avx512_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


def processor_share() -> int:
    """The cores of this process.

    Returns:
        Those that it may use, divided by the ranks of this run on the same machine; at least 1.

    Example:
        >>> processor_share() >= 1
        True
    """
    return max(1, _usable_cores() // _local_ranks())


class HeapWatch:
    """Bounds the memory of a process whose freed memory is kept: call ``step`` after each optimizer step.

    Tensors of ever new sizes do not fit the holes that earlier ones left, so a heap that is never given back grows.
    When the process holds more than ``slack`` times what one step needs, everything unused is given back at once; the
    next step pays for its pages again, and what it then holds is the new measure of need.

    Args:
        slack: most resident memory, as a multiple of what a step needs.
    """

    def __init__(self, slack: float = 1.5) -> None:
        self._slack = slack
        self._need = 0
        self._measure_next = True

    def step(self) -> bool:
        """Give unused memory back if too much is held.

        Returns:
            Whether it was given back; never where ``prepare_cpu`` did not set the allocator.
        """
        if not _keeps_memory:
            return False
        held = _rss_bytes()
        if self._measure_next:
            self._need = max(self._need, held)
            self._measure_next = False
        elif held > self._slack * self._need:
            ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
            self._measure_next = True
        return self._measure_next


def _rss_bytes() -> int:
    """Resident memory of this process now; 0 where there is no /proc."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_rss_bytes() -> int:
    """The most memory, in bytes, that this process ever held resident.

    On Linux it is the high-water mark of this program; ``getrusage`` is for the other systems, because on Linux a
    process inherits that figure from the one that started it.

    Returns:
        Bytes; 0 where the system does not tell.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def _keep_memory() -> str:
    """Tell glibc to keep freed memory; the sentence says so, or is empty where there is nothing to tell."""
    global _keeps_memory
    set_already = [name for name in os.environ if name.startswith("MALLOC_")]
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        set_already.append("GLIBC_TUNABLES")
    if set_already:
        return f"memory allocator left as {', '.join(sorted(set_already))} set it"
    if not _is_glibc() or any(name in os.environ.get("LD_PRELOAD", "") for name in _OTHER_ALLOCATORS):
        return ""
    try:
        mallopt = ctypes.CDLL(None).mallopt
        done = [mallopt(ctypes.c_int(key), ctypes.c_int(value)) for key, value in _KEEP_MEMORY.items()]
    except (OSError, AttributeError):
        return ""
    if not all(done):
        return "glibc refused to keep freed memory in the process; a step will spend time in page faults"
    _keeps_memory = True
    return "glibc keeps freed memory in the process, so that large tensors reuse it"


def _is_glibc() -> bool:
    """Whether the C library of this process is glibc: musl, macOS and Windows have other allocators."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        return False


def _set_threads(threads: int | None) -> str:
    """Set torch's threads as ``prepare_cpu`` describes; the sentence says what changed, or is empty."""
    now = torch.get_num_threads()
    if threads is not None:
        if threads == now:
            return ""
        torch.set_num_threads(threads)
        return f"{threads} CPU threads, as cpu_threads asks (torch had {now})"
    chosen = [name for name in _THREAD_VARIABLES if os.environ.get(name)]
    if chosen:
        return f"{now} CPU threads, as {' and '.join(chosen)} asks"
    ranks, share = _local_ranks(), processor_share()
    if now <= share:
        return ""
    torch.set_num_threads(share)
    return (
        f"{share} CPU threads instead of {now}: this process may use {_usable_cores()} cores"
        + (f", shared by {ranks} ranks" if ranks > 1 else "")
        + " (OMP_NUM_THREADS or cpu_threads sets another number)"
    )


def _local_ranks() -> int:
    """How many ranks of this run are on this machine, as the launcher says; 1 without one."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(value)) if value.isdigit() else 1


def _usable_cores() -> int:
    """Physical cores that this process may run on, no more than its container's quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_core_of(cpu) for cpu in allowed}
    quota = _cgroup_quota()
    # a quota of 1.9 is nearer to two threads that are throttled now and then than to one
    return max(1, min(len(cores), round(quota) if quota else len(cores)))


def _core_of(cpu: int) -> str:
    """The physical core of a logical CPU, named by the list of its siblings; its own number where none is known."""
    try:
        return (_CPU_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_quota() -> float | None:
    """CPUs that the control groups of this process grant it, the least over all levels; None without a limit."""
    found = [limit for folder in _cgroup_folders() if (limit := _limit_of(folder)) is not None]
    return min(found, default=None)


def _cgroup_folders() -> list[Path]:
    """The folders of this process's CPU control groups, with all their parents, versions 1 and 2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        parts = Path(path.lstrip("/")).parts
        # inside a container the path may be the host's: the root is then this container's own group
        folders += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def _limit_of(folder: Path) -> float | None:
    """The CPU limit of one control group: quota over period; None without one."""
    try:
        if (folder / "cpu.max").exists():  # version 2: "200000 100000" or "max 100000"
            quota, period = (folder / "cpu.max").read_text().split()
        else:  # version 1: -1 is no limit
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota.isdigit() and int(quota) > 0 and int(period) > 0 else None
