"""Code rewards on honest programs: what is read, what is run, what it is worth. Values are worked out by hand."""

from __future__ import annotations

import functools
import json
import shutil
import sysconfig

import pytest

from grpo_trainer.rewards import REWARDS, code, sandbox
from grpo_trainer.rewards.base import RewardSet
from grpo_trainer.rewards.code import (
    LANGUAGES,
    UNCONFINED,
    code_compiles,
    code_tests,
    continue_code,
    extract_code,
    parse_tests,
    same_output,
)
from grpo_trainer.rewards.sandbox import SandboxError

needs_sandbox = pytest.mark.skipif(
    not sandbox.sandbox_is_available(), reason=f"no sandbox on this machine: {sandbox._trouble()}"
)
# a busy machine is slow, and nothing here waits for a limit
scored = functools.partial(code_tests, seconds=30, total_seconds=60)
compiles = functools.partial(code_compiles, seconds=60)

ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = "assert add(1, 2) == 3\nassert add(2, 2) == 4\nassert add(-1, 1) == 0\nassert add('a', 'b') == 'ab'"


# --- reading ---


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```\nc", "x = 2\n"),  # the last
        ("```python\nx = 1\n```\n```output\n1\n```", "x = 1\n"),  # ... that is Python
        ("```python\nx = 1\n```\n```bash\npip install x\n```", "x = 1\n"),
        ("```Python title='a'\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),  # the completion was cut
        ("```python\nx = 1\n```\n```python\nx = ", "x = "),  # so the program is the one that was cut
        ("~~~\nx = '```'\n~~~", "x = '```'\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("no `code` here", "no `code` here"),
        ("```output\n1\n```", ""),  # fences, but none of Python
        ("```python\n\n```", ""),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block_of_its_language(text, program):
    assert extract_code(text) == program


def test_blocks_of_another_language():
    text = "```c\nint x;\n```\n```python\nx = 1\n```"
    assert extract_code(text, "c") == "int x;\n"
    assert extract_code("```JS\n1\n```", "javascript") == "1\n"


@pytest.mark.parametrize(
    ("prefix", "text", "program"),
    [
        ("def f(a):\n    return", " a + 1\nprint(f(1))", "def f(a):\n    return a + 1\n"),
        ("def f(a):\n", "    b = a\n\n    return b\n\n\ndef g(): pass", "def f(a):\n    b = a\n\n    return b\n"),
        ("def f(a):\n    return", " a", "def f(a):\n    return a\n"),
        ("def f(a):\n    return", " (a +\n    1)\n  \n", "def f(a):\n    return (a +\n    1)\n"),
    ],
)
def test_a_given_beginning_is_gone_on_with_as_far_as_it_is_indented(prefix, text, program):
    assert continue_code(prefix, text) == program


@pytest.mark.parametrize(
    ("given", "tests"),
    [
        ("assert f() == 1", ["assert f() == 1"]),
        (["assert f() == 1", "assert g() == 2"], ["assert f() == 1", "assert g() == 2"]),
        ([{"input": "1", "output": "2", "note": "x"}], [("1", "2")]),
        ({"inputs": ["1", "3"], "outputs": ["2", "4"]}, [("1", "2"), ("3", "4")]),
        (json.dumps({"inputs": ["1"], "outputs": ["2"]}), [("1", "2")]),
        (json.dumps(["assert f() == 1"]), ["assert f() == 1"]),
    ],
)
def test_the_forms_of_tests(given, tests):
    assert parse_tests(given) == tests


@pytest.mark.parametrize(
    "given", [[], "[]", {}, [1], 3, "[1, ", {"inputs": ["1"], "outputs": []}, [{"input": "1"}], ["assert f()", {}]]
)
def test_what_is_no_tests_is_refused(given):
    with pytest.raises(ValueError, match=r"give|begins like JSON"):
        parse_tests(given)


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        (b"1 2\n3\n", True),
        (b"1 2\n3", True),
        (b"1 2  \r\n3\n\n\n", True),
        (b"1  2\n3", False),
        (b" 1 2\n3", False),
        (b"\n1 2\n3", False),
        (b"1 2\n\n3", False),
        (b"1 2\n3\nall tests passed", False),
        (b"", False),
        (b"1 2\n3\xff", False),
    ],
)
def test_output_is_compared_but_for_blanks_at_the_ends(printed, same):
    assert same_output(printed, "1 2\n3") is same


# --- what it is worth ---


@needs_sandbox
def test_all_tests_or_the_share_of_them():
    wrong_on_text = "def add(a, b):\n    return int(a) + int(b)\n"  # add('a', 'b') raises
    programs = [ADD, f"Here:\n```python\n{ADD}```", wrong_on_text, "def add(a, b):\n    return 3\n", "add = 3", "x ="]
    rows = [ADD_TESTS] * len(programs)
    assert scored(programs, rows) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert scored(programs, rows, credit="share") == [1.0, 1.0, 0.75, 0.25, 0.0, 0.0]
    assert scored(programs[:1], [None]) == [None]
    assert scored([""], [ADD_TESTS]) == [0.0]
    assert scored([[{"role": "assistant", "content": ADD}], []], [ADD_TESTS] * 2) == [1.0, 0.0]


@needs_sandbox
def test_tests_as_a_list_and_in_humanevals_form():
    assert scored([ADD], [["assert add(1, 1) == 2", "assert add(1, 1) == 3"]], credit="share") == [0.5]
    check = """
import math
METADATA = {'author': 'x'}
def check(candidate):
    assert True, "this says nothing"
    assert candidate(1, 2) == 3
    for i in range(3):
        assert candidate(i, i) == 2 * i
    assert math.isclose(candidate(0.1, 0.2), 0.3)
check(add)
"""
    partly = "def add(a, b):\n    return a + b if a != b else 7\n"
    arguments = {"tests": [check] * 2, "entry_point": ["add"] * 2}
    assert scored([ADD, partly], **arguments) == [1.0, 0.0]
    assert scored([ADD, partly], **arguments, credit="share") == [1.0, pytest.approx(2 / 3)]
    early = "def check(f):\n    if f(1, 1) == 2:\n        return\n    assert f(2, 2) == 4"
    assert scored([ADD, "def add(a, b): return 5"], [early] * 2, ["add"] * 2) == [1.0, 0.0]


@needs_sandbox
def test_what_the_tests_must_trust_does_not_come_from_the_program():
    """HumanEval/32 checks a root with a function of the prompt, which a program could define anew."""
    setup = "def poly(x):\n    return x - 3\n\ndef root():\n    '''Solve it.'''\n"
    tests = "def check(candidate):\n    assert abs(poly(candidate())) < 1e-6"
    cheat = "def poly(x):\n    return 0\ndef root():\n    return 17\n"
    honest = "def root():\n    return 3\n"
    assert scored([cheat, honest], [tests] * 2, ["root"] * 2, [setup] * 2) == [0.0, 1.0]


@needs_sandbox
def test_plain_data_of_every_kind_crosses():
    program = """
import collections, enum
class Colour(enum.IntEnum):
    RED = 1
class Odd: pass
def same(x): return x
def numbers(n):
    for i in range(n): yield i
def forever():
    while True: yield 1
def counted(text): return collections.Counter(text)
def colour(): return Colour.RED
def odd(): return Odd()
def fails(): raise KeyError('x')
LIMIT = [1, 2]
"""
    true = [
        "assert same((1, 2.5, 'a', None, True, b'x', 3+4j)) == (1, 2.5, 'a', None, True, b'x', 3+4j)",
        "assert same({(1, 2): {3, 4}, 'k': [frozenset([1])]}) == {(1, 2): {3, 4}, 'k': [frozenset([1])]}",
        "assert type(same(True)) is bool and type(same(1)) is int and type(same((1,))) is tuple",
        "assert same(10**5000) == 10**5000 and same(-7) == -7",
        "assert same(float('inf')) == float('inf') and same(float('nan')) != same(float('nan'))",
        "assert same('\\ud800\\u202e\\x00') == '\\ud800\\u202e\\x00'",
        "assert list(numbers(3)) == [0, 1, 2]",
        "assert same(range(3)) == range(3)",
        "assert counted('aab') == {'a': 2, 'b': 1}",
        "assert colour() == 1",
        "assert LIMIT == [1, 2]",
        "assert same(x=5) == 5",
        "try:\n    fails()\n    assert False\nexcept KeyError:\n    assert 1 + 1 == 2",
    ]
    assert scored([program] * len(true), [[test] for test in true]) == [1.0] * len(true)
    false = ["assert odd()", "assert not odd()", "assert forever()", "assert missing() == 1", "assert same(1) == 2"]
    assert scored([program] * len(false), [[test] for test in false]) == [0.0] * len(false)


@needs_sandbox
def test_pairs_of_input_and_output():
    echo = "a, b = map(int, input().split())\nprint(a + b)"
    tests = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10\n"}]
    programs = [echo, "print(3)", echo + "\nraise SystemExit(1)", "print('3\\n10')"]
    assert scored(programs, [tests] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert scored(programs, [tests] * 4, credit="share") == [1.0, 0.5, 0.0, 0.0]


PROGRAMS = {
    "c": '#include <stdio.h>\nint main(){int a,b;scanf("%d %d",&a,&b);printf("%d\\n",a+b);return 0;}',
    "javascript": "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number);\nconsole.log(a + b)",
    "bash": "read a b\necho $((a + b))",
    "python": "print(sum(map(int, input().split())))",
}
BROKEN = {"c": "int main( {", "javascript": "var x = ;", "bash": "if true; then", "python": "x ="}
TOOLS = {"c": "gcc", "javascript": "node", "bash": "bash", "python": "env"}


@needs_sandbox
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_compiles_and_runs(language):
    if shutil.which(TOOLS[language], path="/usr/bin:/usr/local/bin:/bin") is None:
        pytest.skip(f"there is no {TOOLS[language]} here")
    tests = [[{"input": "20 22\n", "output": "42"}]] * 2
    wrong = PROGRAMS[language].replace("+", "-").replace("sum", "max")
    assert scored([PROGRAMS[language], wrong], tests, language=language) == [1.0, 0.0]
    texts = [PROGRAMS[language], BROKEN[language], f"```{language}\n{PROGRAMS[language]}\n```", "```other\n1\n```"]
    assert compiles(texts, language=language) == [1.0, 0.0, 1.0, 0.0]


@needs_sandbox
def test_compiling_runs_nothing():
    assert compiles(["raise SystemExit(1)", "import os; os._exit(3)", "while True: pass", "x = 1 +"]) == [1, 1, 1, 0]


@needs_sandbox
def test_a_completion_goes_on_with_a_beginning_or_stands_in_a_block_after_it():
    start = 'import math\ndef f(a):\n    """The root."""\n'
    block = "```python\ndef f(a):\n    return math.sqrt(a)\n```"
    texts = ["    return math.sqrt(a)\nf(", block, "```\n    return 2\n```", ""]
    assert scored(texts, ["assert f(4) == 2 and f(9) == 3"] * 4, code_prefix=[start] * 4) == [1.0, 1.0, 0.0, 0.0]
    assert compiles([*texts, "    return ("], code_prefix=[start] * 5) == [1.0, 1.0, 1.0, 0.0, 0.0]


@needs_sandbox
def test_every_reward_of_the_table_that_runs_code_is_a_plain_function():
    for name in ("code_tests", "code_compiles"):
        assert RewardSet([REWARDS[name]]).names == [name]


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"language": "pyton"}, "language is 'pyton'. Did you mean 'python'"),
        ({"credit": "most"}, "credit is 'most'; use all or share"),
        ({"sandbox": "none"}, "sandbox is 'none'; use 'bubblewrap', or, to run programs without one, 'none, I accept"),
        ({"seconds": 0}, "seconds is 0; use a number above 0"),
        ({"memory_mb": -5}, "memory_mb is -5"),
        ({"workers": True}, "workers is True"),
    ],
)
def test_a_wrong_knob_is_refused_when_the_rewards_are_put_together(knobs, said):
    with pytest.raises(ValueError) as error:
        RewardSet([functools.partial(code_tests, **knobs)])
    assert said in str(error.value)


def test_without_bubblewrap_it_is_refused_when_the_rewards_are_put_together(monkeypatch):
    monkeypatch.setattr(sandbox, "_trouble", lambda: f"there is no bubblewrap. {sandbox.INSTALL}")
    for function in (code_tests, functools.partial(code_tests, credit="share"), code_compiles):
        with pytest.raises(SandboxError) as error:
            RewardSet([function])
        assert "apt-get install bubblewrap" in str(error.value) and repr(UNCONFINED) in str(error.value)
    with pytest.raises(SandboxError):
        code_tests([ADD], [ADD_TESTS])
    RewardSet([functools.partial(code_tests, sandbox=UNCONFINED)])


def test_the_same_numbers_without_a_sandbox_for_who_owns_the_risk():
    programs = [ADD, "def add(a, b):\n    return 3\n"]
    assert scored(programs, [ADD_TESTS] * 2, credit="share", sandbox=UNCONFINED) == [1.0, 0.25]
    assert scored(["print(input())"], [[{"input": "7", "output": "7"}]], sandbox=UNCONFINED) == [1.0]
    assert compiles([ADD, "x ="], sandbox=UNCONFINED) == [1.0, 0.0]


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("assert add(1, 2) ==", "they are not Python"),
        ("add(1, 2)", "there is no assert in them"),
        ("assert True", "there is no assert in them"),
        ("import no_such_module\nassert add(1, 2) == 3", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("assert add(lambda: 1, 2) == 3", "the tests call add with a value of type function"),
        ([], "give asserts, or pairs"),
    ],
)
def test_tests_that_are_at_fault_are_an_error_that_names_the_row(tests, said):
    with pytest.raises(ValueError) as error:
        scored([ADD, ADD], [ADD_TESTS, tests])
    assert "code_tests: the tests of row 1" in str(error.value) and said in str(error.value)


def test_asserts_are_for_python():
    with pytest.raises(ValueError, match=r"row 0.*asserts are for python"):
        code_tests(["x"], [ADD_TESTS], language="c", sandbox=UNCONFINED)


@needs_sandbox
def test_equal_programs_are_run_once(monkeypatch):
    runs = []
    ran = code._How.score
    monkeypatch.setattr(code._How, "score", lambda self, *job: runs.append(job) or ran(self, *job))
    assert scored([ADD] * 8 + ["x = 1"], [ADD_TESTS] * 9) == [1.0] * 8 + [0.0]
    assert len(runs) == 2


@needs_sandbox
def test_installed_packages_cannot_be_read_for_a_data_set_may_lie_there():
    program = f"import glob\nprint(glob.glob({sysconfig.get_path('stdlib')!r} + '/*-packages/*'))"
    program += (
        "\nprint([*glob.glob('/usr/lib/python3*/*-packages/*'), *glob.glob('/usr/l*/lib/python3*/*-packages/*')])"
    )
    assert scored([program], [[{"input": "", "output": "[]\n[]"}]]) == [1.0]


@needs_sandbox
def test_what_a_test_prints_is_no_verdict():
    tests = "print('true')\nprint('true')\nassert add(1, 2) == 4\nassert add(1, 2) == 3"
    assert scored([ADD], [tests], credit="share") == [0.5]


@needs_sandbox
def test_a_check_may_call_the_function_by_its_own_name():
    """HumanEval/33 does; what the prompt says under that name is a stub."""
    setup = "def double(x):\n    pass\n"
    tests = "def check(candidate):\n    assert candidate(2) == double(2) == 4"
    assert scored(["def double(x): return 2 * x"], [tests], ["double"], [setup]) == [1.0]
