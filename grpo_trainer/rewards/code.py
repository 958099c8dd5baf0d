"""Rewards for programs: do they compile, do they pass tests.

Programs run in the sandbox of `grpo_trainer.rewards.sandbox`, and what decides about them never lies where they run:
expected output is compared here, and asserts run in a process of their own, which calls the program's functions through
a pipe (`grpo_trainer.rewards.exchange`). A program can therefore read no test, and nothing that it prints, patches or
ends with is a verdict.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import marshal
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_trainer.registry import suggest
from grpo_trainer.rewards import exchange
from grpo_trainer.rewards.options import requires
from grpo_trainer.rewards.sandbox import Limits, Program, SandboxError, require_sandbox, run, run_beside
from grpo_trainer.rewards.text import text_of

CONFINED = "bubblewrap"
UNCONFINED = "none, I accept that model-written code runs on this machine"
"""What `sandbox` has to be for programs to run without one."""

Credit = Literal["all", "share"]
"""1.0 if every test is passed, else 0.0; or the share of the tests that are passed."""

_MEBIBYTE = 1 << 20
_LONGEST = 1 << 20
"""Most characters of a program; a longer one is not run."""


@dataclass(frozen=True, kw_only=True)
class Language:
    """How programs of a language are checked and run.

    Attributes:
        tags: names after the fence of a code block, in lower case.
        file: name of the file that holds the program.
        check: command that ends with 0 if the program compiles, without running it.
        build: command that writes an executable to its standard output; None where there is nothing to build.
        run: command that runs the program, or what was built from it.
        processes: processes and threads that the tools take.
        address_bytes: address space that the tools reserve; None for the limit of memory.
    """

    tags: tuple[str, ...]
    file: str
    check: tuple[str, ...]
    run: tuple[str, ...]
    build: tuple[str, ...] | None = None
    processes: int = 8
    address_bytes: int | None = None


_PYTHON = (os.path.realpath(getattr(sys, "_base_executable", sys.executable)), "-I", "-S", "-B", "-X", "utf8")
_COMPILES = "import sys; compile(open(sys.argv[1], 'rb').read(), 'program', 'exec')"

LANGUAGES: dict[str, Language] = {
    "python": Language(
        tags=("python", "py", "python3"),
        file="program.py",
        check=(*_PYTHON, "-W", "ignore", "-c", _COMPILES, "@/program.py"),
        run=(*_PYTHON, "@/program.py"),
    ),
    "c": Language(
        tags=("c",),
        file="program.c",
        check=("gcc", "-fsyntax-only", "-w", "@/program.c"),
        build=("sh", "-c", 'gcc -O1 -w -o out "$1" -lm && cat out', "sh", "@/program.c"),
        run=("@/program",),
    ),
    "javascript": Language(
        tags=("javascript", "js", "node"),
        file="program.js",
        check=("node", "--check", "@/program.js"),
        run=("node", "@/program.js"),
        processes=32,
        address_bytes=64 << 30,
    ),
    "bash": Language(
        tags=("bash", "sh", "shell"),
        file="program.sh",
        check=("bash", "-n", "@/program.sh"),
        run=("bash", "@/program.sh"),
    ),
}
"""Every language by name. A new one is a line here; its tools must lie in a folder that all users can read."""


def _refuse(
    *, language: str = "python", sandbox: str = CONFINED, credit: str = "all", seconds: float = 2.0, **rest: Any
) -> None:
    """Refuses a knob that is wrong, and a machine without a sandbox.

    Args:
        language: a key of `LANGUAGES`.
        sandbox: where programs run.
        credit: ``all`` or ``share``.
        seconds: of a program.
        **rest: other knobs of the rewards.

    Raises:
        ValueError: naming the knob, what it is and what it may be.
        SandboxError: if there is no sandbox here.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language is {language!r}.{suggest(language, LANGUAGES)} Known: {', '.join(LANGUAGES)}")
    if credit not in ("all", "share"):
        raise ValueError(f"credit is {credit!r}; use all or share")
    if sandbox not in (CONFINED, UNCONFINED):
        raise ValueError(f"sandbox is {sandbox!r}; use {CONFINED!r}, or, to run programs without one, {UNCONFINED!r}")
    for name, value in {
        "seconds": seconds,
        **{k: v for k, v in rest.items() if k in _AMOUNTS and v is not None},
    }.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"{name} is {value!r}; use a number above 0")
    if sandbox == CONFINED:
        try:
            require_sandbox()
        except SandboxError as error:
            raise SandboxError(
                f"a reward that runs programs needs a sandbox: {error}. To run what a model writes as yourself, with "
                f"all that you may read and delete, say so: sandbox: {UNCONFINED!r}"
            ) from error


_AMOUNTS = ("total_seconds", "memory_mb", "workers")


@requires(_refuse)
def code_compiles(
    completions: Sequence[Any],
    code_prefix: Sequence[str | None] | None = None,
    *,
    language: str = "python",
    sandbox: str = CONFINED,
    seconds: float = 5.0,
    memory_mb: float = 512,
    workers: int | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 where the completion holds a program that compiles, 0.0 elsewhere.

    It is compiled, not run. An empty program scores 0.0, see `extract_code`.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        code_prefix: N beginnings of the program. A completion goes on with it, see `continue_code`; a fenced block in
            it comes on a line after it.
        language: a key of `LANGUAGES`.
        sandbox: ``bubblewrap``, or the sentence of `UNCONFINED`.
        seconds: time limit of one compilation.
        memory_mb: memory limit in MiB.
        workers: compilations at a time; None for one per core, and at least two.
        **kwargs: the other columns, unused.

    Returns:
        N rewards.

    Raises:
        ValueError: if a knob is wrong.
        SandboxError: if there is no sandbox.
    """
    _refuse(language=language, sandbox=sandbox, seconds=seconds, memory_mb=memory_mb, workers=workers)
    how = _How(language, sandbox == CONFINED, seconds, seconds, memory_mb)
    sources = _sources(completions, code_prefix, language)
    return _each([(source,) if source else None for source in sources], how.compiles, workers)


@requires(_refuse)
def code_tests(
    completions: Sequence[Any],
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    test_setup: Sequence[str | None] | None = None,
    code_prefix: Sequence[str | None] | None = None,
    *,
    language: str = "python",
    credit: Credit = "all",
    sandbox: str = CONFINED,
    seconds: float = 2.0,
    total_seconds: float = 10.0,
    memory_mb: float = 512,
    workers: int | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 where the program in the completion passes its tests, 0.0 elsewhere; or the share of them that it passes.

    The tests of a row are one of

    - pairs of input and output: ``[{"input": "2 3", "output": "5"}, …]`` or ``{"inputs": […], "outputs": […]}``. The
      program is run once for each, and has to end with 0 and to print the output. Blanks at the end of a line and empty
      lines at the end do not count;
    - asserts about the program's functions (Python only), as a text or a list of texts. Each statement that holds an
      assert is one test;
    - HumanEval's form (Python only): a text that defines ``check(candidate)``, with the name of the function in
      ``entry_point``. Each statement of ``check`` that holds an assert is one test.

    Arguments and values are plain data (numbers, texts, lists, dicts …) and cross by value, so a test of what a
    function does to its argument cannot be passed.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        tests: N times tests, also as JSON; None where there are none.
        entry_point: N names of the function that ``check`` is given.
        test_setup: N texts that run before the tests, apart from the program: what the tests use and must be able to
            trust. A name that neither they nor this define is the program's.
        code_prefix: N beginnings of the program. A completion goes on with it, see `continue_code`; a fenced block in
            it comes on a line after it.
        language: a key of `LANGUAGES`.
        credit: ``all`` or ``share``.
        sandbox: ``bubblewrap``, or the sentence of `UNCONFINED`.
        seconds: time limit of one test.
        total_seconds: time limit of all tests of a completion together.
        memory_mb: memory limit in MiB.
        workers: completions at a time; None for one per core, and at least two.
        **kwargs: the other columns, unused.

    Returns:
        N rewards; None where there are no tests, or the time ran out before they began.

    Raises:
        ValueError: if a knob is wrong, or the tests of a row are, naming the row.
        SandboxError: if there is no sandbox.
    """
    _refuse(
        language=language,
        credit=credit,
        sandbox=sandbox,
        seconds=seconds,
        total_seconds=total_seconds,
        memory_mb=memory_mb,
        workers=workers,
    )
    how = _How(language, sandbox == CONFINED, seconds, total_seconds, memory_mb)
    jobs: list[tuple[Any, ...] | None] = []
    count = len(completions)
    columns = [column or [None] * count for column in (entry_point, test_setup)]
    sources = _sources(completions, code_prefix, language)
    for row, (source, given, entry, setup) in enumerate(zip(sources, tests, *columns, strict=True)):
        try:
            parsed = None if given is None else parse_tests(given)
            if parsed and isinstance(parsed[0], str) and language != "python":
                raise ValueError(f"asserts are for python; give pairs of input and output for language={language!r}")
        except ValueError as error:
            raise ValueError(f"code_tests: the tests of row {row}: {error}") from error
        jobs.append(None if parsed is None else (source, tuple(parsed), entry, setup, credit))
    scores = _each([job if job and job[0] else None for job in jobs], how.score, workers)
    return [None if job is None else score for job, score in zip(jobs, scores, strict=True)]


# --- reading -------------------------------------------------------------------------------------------------------

_FENCE = re.compile(r"^[ \t]{0,3}(```+|~~~+)[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)


def extract_code(text: str, language: str = "python") -> str:
    r"""The program in a text: the last fenced block that is of the language, or says none; without fences, all of it.

    A block ends at a fence of its kind, or with the text. Blocks in other languages, such as the output that a model
    makes up after its program, are passed over.

    Args:
        text: a completion.
        language: a key of `LANGUAGES`.

    Returns:
        The program, empty if there is none.

    Example:
        >>> extract_code("So:\n```python\nx = 1\n```\nIt prints\n```output\n1\n```")
        'x = 1\n'
    """
    found, start, fence, tag = None, 0, "", ""
    for match in _FENCE.finditer(text):
        if not fence:
            fence, tag, start = match[1], match[2].lower(), match.end() + 1
        elif match[1].startswith(fence) and not match[2]:
            found = text[start : match.start()] if _is_of(tag, language) else found
            fence = ""
    if fence and _is_of(tag, language):
        found = text[start:]
    if found is None and not fence and not _FENCE.search(text):
        found = text
    return found if found is not None and found.strip() else ""


def _is_of(tag: str, language: str) -> bool:
    return not tag or tag in LANGUAGES[language].tags


def continue_code(prefix: str, text: str) -> str:
    r"""A program whose beginning is given: the completion goes on with it as far as it is indented.

    A function's body ends before the first line that begins at the margin; what a model writes after that is left out.

    Args:
        prefix: the beginning of the program.
        text: the completion.

    Returns:
        The program.

    Example:
        >>> continue_code("def f(a):\n    return", " a + 1\n\nprint(f(2))")
        'def f(a):\n    return a + 1\n'
    """
    first, _, rest = text.partition("\n")
    end = re.search(r"^\S", rest, re.MULTILINE)
    return f"{prefix}{first}\n{rest[: end.start()] if end else rest}".rstrip() + "\n"


def _sources(completions: Sequence[Any], prefixes: Sequence[str | None] | None, language: str) -> list[str]:
    """The program of each completion; empty where there is none."""
    sources = []
    for completion, prefix in zip(completions, prefixes or [None] * len(completions), strict=True):
        text = text_of(completion)
        if len(text) > _LONGEST:
            sources.append("")
        elif prefix is None:
            sources.append(extract_code(text, language))
        elif not _FENCE.search(text):
            sources.append(continue_code(prefix, text) if text.strip() else "")
        else:
            block = extract_code(text, language)
            sources.append(f"{prefix}\n{block}" if block else "")
    return sources


def parse_tests(given: Any) -> list[str] | list[tuple[str, str]]:
    """The tests of a row in one form.

    Args:
        given: see `code_tests`.

    Returns:
        Texts with asserts, or pairs of input and output; at least one.

    Raises:
        ValueError: if it is neither.

    Example:
        >>> parse_tests('{"inputs": ["1 2"], "outputs": ["3"]}')
        [('1 2', '3')]
    """
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"{_short(given)} begins like JSON and is none: {error}") from error
    if isinstance(given, Mapping):
        if set(given) != {"inputs", "outputs"} or len(given["inputs"]) != len(given["outputs"]):
            raise ValueError(f"{_short(given)}: give inputs and outputs, as many of one as of the other")
        given = [{"input": i, "output": o} for i, o in zip(given["inputs"], given["outputs"], strict=True)]
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Sequence) or not given:
        raise ValueError(f"{_short(given)}: give asserts, or pairs of input and output")
    if all(isinstance(item, str) for item in given):
        return list(given)
    if all(isinstance(i, Mapping) and all(isinstance(i.get(key), str) for key in ("input", "output")) for i in given):
        return [(item["input"], item["output"]) for item in given]
    raise ValueError(f"{_short(given)}: give either texts with asserts, or pairs {{'input': text, 'output': text}}")


def same_output(printed: bytes, expected: str) -> bool:
    r"""Whether a program printed what it should, but for blanks at the end of lines and empty lines at the end.

    Args:
        printed: its standard output.
        expected: the text.

    Returns:
        True or False.

    Example:
        >>> same_output(b"1 2 \r\n3\n\n", "1 2\n3"), same_output(b"1  2\n3", "1 2\n3")
        (True, False)
    """
    return _lines(printed) == _lines(expected.encode("utf-8", "surrogatepass"))


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip() for line in text.rstrip().split(b"\n")]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


# --- running -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _How:
    """How programs are run."""

    language: str
    confined: bool
    seconds: float
    total_seconds: float
    memory_mb: float

    @property
    def table(self) -> Language:
        return LANGUAGES[self.language]

    def program(self, argv: Sequence[str], seconds: float, files: Mapping[str, bytes], **given: Any) -> Program:
        limits = Limits(
            seconds=seconds,
            memory_bytes=int(self.memory_mb * _MEBIBYTE),
            processes=self.table.processes,
            file_bytes=16 * _MEBIBYTE,
            output_bytes=given.pop("output_bytes", _MEBIBYTE),
            address_bytes=self.table.address_bytes,
        )
        readable, hidden = _python_folders() if self.language == "python" else ((), _packages())
        return Program(argv=argv, limits=limits, files=files, readable=readable, hidden=hidden, **given)

    def compiles(self, source: str) -> float:
        """Whether it compiles: the exit code of the compiler, which does not run the program."""
        files = {self.table.file: _bytes(source)}
        return float(run(self.program(self.table.check, self.seconds, files), confined=self.confined).ok)

    def score(
        self, source: str, tests: Sequence[Any], entry: str | None, setup: str | None, credit: Credit
    ) -> float | None:
        """Its reward."""
        counts = self.asserts(source, tests, entry, setup) if isinstance(tests[0], str) else self.pairs(source, tests)
        if counts is None:
            return None
        passed, count = counts
        return passed / count if credit == "share" else float(passed == count)

    def pairs(self, source: str, tests: Sequence[tuple[str, str]]) -> tuple[int, int]:
        """Runs it on each input; passed, all."""
        files, left = {self.table.file: _bytes(source)}, self.total_seconds
        if self.table.build is not None:
            built = run(
                self.program(self.table.build, left, files, output_bytes=16 * _MEBIBYTE), confined=self.confined
            )
            left -= built.seconds
            if not built.ok:
                return 0, len(tests)
            files = {"program": built.stdout}
        passed = 0
        for text, expected in tests:
            if left <= 0:
                break
            program = self.program(
                self.table.run, min(self.seconds, left), files, stdin=text.encode("utf-8", "surrogatepass")
            )
            result = run(program, confined=self.confined)
            left -= result.seconds
            passed += result.ok and same_output(result.stdout, expected)
        return passed, len(tests)

    def asserts(
        self, source: str, tests: Sequence[str], entry: str | None, setup: str | None
    ) -> tuple[int, int] | None:
        """Runs the tests in one process and the program in another; passed, all. None if the tests did not begin."""
        job = {
            "tests": tests,
            "setup": setup,
            "entry_point": entry,
            "seconds": self.seconds,
            "start_seconds": self.total_seconds,
        }
        sides = _exchange()
        checker = self.program(
            (*_PYTHON, "-W", "ignore", "@/exchange.pyc", "checker"),
            self.total_seconds,
            {"exchange.pyc": sides},
            stdin=json.dumps(job).encode(),
        )
        candidate = self.program(
            (*_PYTHON, "-W", "ignore", "@/exchange.pyc", "candidate", "@/program.py"),
            self.total_seconds,
            {"exchange.pyc": sides, "program.py": _bytes(source)},
        )
        result = run_beside(checker, candidate, confined=self.confined)
        said = [
            json.loads(line) for line in result.stdout.splitlines() if line.endswith((b"e", b"}")) or line.isdigit()
        ]
        if said and isinstance(said[-1], dict):
            raise ValueError(said[-1]["fault"])
        if not said:  # the program is not asked before the tests have said how many they are
            if not result.timed_out:
                why = result.stderr.decode(errors="replace").strip()[-300:]
                raise RuntimeError(f"the process that runs the tests ended with {result.returncode}: {why}")
            return None
        return sum(verdict is True for verdict in said[1:]), said[0]


def _each(
    jobs: Sequence[tuple[Any, ...] | None], work: Callable[..., float | None], workers: int | None
) -> list[float | None]:
    """``work(*job)`` for each job, several at a time, each different one once; 0.0 where there is nothing to do."""
    from grpo_trainer.runtime import processor_share  # with torch, which a worker need not load

    different = list(dict.fromkeys(job for job in jobs if job is not None))
    workers = min(len(different), workers or max(2, processor_share()))
    if not different:
        return [0.0] * len(jobs)
    with ThreadPoolExecutor(workers, thread_name_prefix="code-reward") as pool:
        futures = {job: pool.submit(work, *job) for job in different}
        try:
            return [0.0 if job is None else _of_row(row, futures[job].result) for row, job in enumerate(jobs)]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _of_row(row: int, result: Callable[[], float | None]) -> float | None:
    try:
        return result()
    except ValueError as error:
        raise ValueError(f"code_tests: the tests of row {row}: {error}") from error


def _bytes(source: str) -> bytes:
    return source.encode("utf-8", "surrogatepass")


@functools.lru_cache(maxsize=1)
def _exchange() -> bytes:
    """The program of both sides, compiled once rather than twice per completion (a .pyc file, PEP 552)."""
    source = Path(exchange.__file__)
    code = compile(source.read_bytes(), source.name, "exec", dont_inherit=True)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


@functools.lru_cache(maxsize=1)
def _python_folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What Python programs may read: the interpreter and its standard library, but no package."""
    prefix = os.path.realpath(sys.base_prefix)
    readable = () if prefix == "/usr" else (prefix,)
    return readable, _packages()


@functools.lru_cache(maxsize=1)
def _packages() -> tuple[str, ...]:
    """Folders of installed packages in what the sandbox can read: a data set may lie there, with its solutions."""
    own = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    folders = [own / "site-packages", own / "dist-packages"]
    for root in ("/usr/lib", "/usr/local/lib"):
        folders += [path for path in Path(root).glob("python3*/*-packages")]
    return tuple(str(path) for path in folders if path.is_dir())
