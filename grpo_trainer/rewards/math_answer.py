r"""Rewards for answers that are mathematical expressions: read by the rules below, compared by math-verify.

What is compared is read from the completion in this order, after the thinking (`outside_thinking`):

1. the content of the last ``<answer>…</answer>``, and in it, or in the whole text if there is none,
2. the last ``\boxed{…}`` or the last line ``#### 72``, whichever stands later,
3. the last number, or the formula (``$…$``, ``\(…\)``, ``\[…\]``) if one ends later than that.

Several boxes, answers, formulas or numbers with nothing but commas, "and" or "or" between them are one list, which
equals a reference only if that is the same list.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from grpo_trainer.rewards.options import reward
from grpo_trainer.rewards.text import outside_thinking, text_of

logger = logging.getLogger(__name__)

LONGEST = 300
"""Characters of an answer that are compared; a longer one is wrong."""
DEEPEST = 20
"""Brackets within brackets; a deeper answer is wrong."""
TAIL = 2000
"""Characters at the end in which the last number is looked for."""
LARGEST_EXPONENT = 1000

UNITS = {
    **dict.fromkeys(["mm", "millimeter", "millimeters", "millimetre", "millimetres"], "mm"),
    **dict.fromkeys(["cm", "centimeter", "centimeters", "centimetre", "centimetres"], "cm"),
    **dict.fromkeys(["m", "meter", "meters", "metre", "metres"], "m"),
    **dict.fromkeys(["km", "kilometer", "kilometers", "kilometre", "kilometres"], "km"),
    **dict.fromkeys(["in", "inch", "inches"], "in"),
    **dict.fromkeys(["ft", "foot", "feet"], "ft"),
    **dict.fromkeys(["yd", "yard", "yards"], "yd"),
    **dict.fromkeys(["mi", "mile", "miles"], "mi"),
    **dict.fromkeys(["mg", "milligram", "milligrams"], "mg"),
    **dict.fromkeys(["g", "gram", "grams"], "g"),
    **dict.fromkeys(["kg", "kilogram", "kilograms"], "kg"),
    **dict.fromkeys(["lb", "lbs", "pound", "pounds"], "lb"),
    **dict.fromkeys(["oz", "ounce", "ounces"], "oz"),
    **dict.fromkeys(["ml", "milliliter", "milliliters"], "ml"),
    **dict.fromkeys(["l", "liter", "liters", "litre", "litres"], "l"),
    **dict.fromkeys(["s", "sec", "second", "seconds"], "s"),
    **dict.fromkeys(["min", "minute", "minutes"], "min"),
    **dict.fromkeys(["h", "hr", "hrs", "hour", "hours"], "h"),
    **dict.fromkeys(["day", "days"], "day"),
    **dict.fromkeys(["week", "weeks"], "week"),
    **dict.fromkeys(["year", "years"], "year"),
    **dict.fromkeys(["$", r"\$", "dollar", "dollars", "usd"], "usd"),
    **dict.fromkeys(["€", "euro", "euros", "eur"], "eur"),
    **dict.fromkeys(["£", "gbp"], "gbp"),
    **dict.fromkeys(["cent", "cents"], "cent"),
}
"""Units that are told apart; all others are dropped. None is converted."""

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"""
    (?P<currency>\\?\$|€|£)?\s?
    (?P<sign>(?<![\w)])[-\u2212+](?:\\?\$|€|£)?)?
    (?:
        (?P<whole>[0-9]+)\ (?P<part>[0-9]+)/(?P<of>[0-9]+)          # 1 1/2
      | (?P<top>{_DIGITS})/(?P<bottom>[0-9]+(?:\.[0-9]+)?)          # 3/4
      | (?P<plain>{_DIGITS})(?:[eE](?P<exponent>[-+]?[0-9]{{1,4}})(?![0-9]))?
    )
    (?P<percent>\s?\\?%)?
    """,
    re.VERBOSE,
)
_UNIT_WORDS = re.compile(r"\s?(?:[^\W\d_]{1,20}|°C?F?)(?:[ /](?:per )?[^\W\d_]{1,20}){0,2}(?:\^?[23])?")
_JOINT = re.compile(r"[\s,;&$]*(?:\b(?:and|or)\b[\s,;&$]*)?")
_FORMULA = re.compile(r"\$\$([^$]+)\$\$|(?<!\\)\$([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")
_COMMAND_WITH_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname|begin|end)\s?\{[^{}]*\}")
_BOLD = re.compile(r"(?<![\w*])\*\*([^*\n]+)\*\*(?![\w*])")
_GSM8K = re.compile(r"^[ \t]*####[ \t]*(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_CHOICES = re.compile(r"\\(?:[dt]?binom|choose)(?=.*\d{4})|\d{4}.*\\choose", re.DOTALL)  # worked out while it is parsed
_UNIT_IN_LATEX = re.compile(
    r"(\\?\$|€|£)|\\(?:text|mathrm|mbox)\s?\{\s*\.?\s*([A-Za-z]+)[^{}]*\}|(?<=[\d}])\s?([A-Za-z]+)$"
)


@reward(isolation="process", time_limit=5.0, rows_per_call=16, memory_limit=4 << 30)
def math_answer(
    completions: Sequence[Any],
    answer: Sequence[Any],
    log_extra: Callable[..., None] | None = None,
    log_metric: Callable[..., None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""1.0 where the final answer of a completion equals the reference as mathematics, 0.0 elsewhere.

    The comparison is math-verify's (``verify(reference, answer)``), which knows fractions, decimals to six places,
    roots, intervals, sets, equations, inequalities, matrices and percentages. On top of it:

    - Where the reference is a rational number, or holds nothing else, the answer must be written as one (integer,
      decimal, fraction, mixed number, percentage, power of ten). A calculation left undone, ``3 + 4``, is no answer:
      the question repeated would be one.
    - A list of candidates is not an answer, unless the reference is that list.
    - Units are dropped, unless both sides have one of `UNITS` and they differ; none is converted.
    - An answer longer than 300 characters, with more than 20 brackets within each other, or with a power, factorial or
      sum that no computer works out, is wrong.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        answer: N references: numbers, or texts that hold a number, LaTeX with or without dollars, a box, or a solution
            that ends in ``#### 72``.
        log_extra: the contract's; gets the column ``math_answer/read``, what was read from each completion.
        log_metric: the contract's; gets ``math_answer/unreadable_references``, the share of them.
        **kwargs: the other columns, unused.

    Returns:
        N rewards; None where the reference is None or cannot be read as mathematics, plain words among them.

    Raises:
        ImportError: if math-verify is not installed.

    Example:
        >>> math_answer(["So it is \\boxed{\\frac{1}{2}}.", "#### 0.5", "1/2 or 1/3"], answer=["0.5"] * 3)
        [1.0, 1.0, 0.0]
    """
    read = [read_answer(text_of(completion)) for completion in completions]
    rewards = [_verdict(right, found) for right, found in zip(answer, read, strict=True)]
    unreadable = [right for right, value in zip(answer, rewards, strict=True) if value is None and right is not None]
    for right in unreadable[:1]:
        _warn_once(
            f"math_answer: the reference {str(right)[:200]!r} is no mathematics that can be read; no reward (None)"
        )
    if log_metric is not None and rewards:
        log_metric("math_answer/unreadable_references", len(unreadable) / len(rewards))
    if log_extra is not None:
        log_extra("math_answer/read", read)
    return rewards


def read_answer(text: str) -> str | None:
    r"""The final answer of a text, as LaTeX.

    Args:
        text: a completion or a reference solution.

    Returns:
        LaTeX without dollars; None if there is none.

    Example:
        >>> read_answer("<think>2</think> <answer>It is 1,234.</answer>"), read_answer("\\boxed{5} or \\boxed{6}")
        ('1234', '5, 6')
    """
    text = outside_thinking(text)
    answers = [
        (m.start(), m.end(), m[1]) for m in re.finditer(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    ]
    if answers:
        return _as_list([_field(inside) for inside in _last_run(text, answers)])
    boxes = _boxes(text)
    marked = [m for m in _GSM8K.finditer(text) if _is_final(m[1])]
    if marked and (not boxes or marked[-1].start() > boxes[-1][1]):
        return _field(marked[-1][1])
    if boxes:
        return _as_list([_latex(inside) for inside in _last_run(text, boxes)])
    return _last_of(text)


def _field(text: str) -> str | None:
    """The answer in a place that holds nothing else, such as ``<answer>``."""
    text = text.strip().strip("*").strip()
    boxes = _boxes(text)
    if boxes:
        return _as_list([_latex(inside) for inside in _last_run(text, boxes)])
    whole = _plain(text)
    if whole is not None:
        return whole
    if _FORMULA.search(text) or _is_prose(text):
        return _last_of(text)
    return _latex(text)


def _latex(text: str) -> str | None:
    """LaTeX without the dollars around it."""
    text = text.strip().rstrip(".").strip()
    formula = _FORMULA.fullmatch(text)
    if formula:
        text = next(group for group in formula.groups() if group is not None).strip()
    return _plain(text) or text or None


def _plain(text: str) -> str | None:
    """A number, with its unit if it has one, that is all of a text."""
    text = text.strip().rstrip(".").strip()
    match = _NUMBER.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    if rest and not _UNIT_WORDS.fullmatch(rest):
        return None
    if rest and "e" not in rest and len(rest.strip()) == 1 and rest == rest.strip() and rest.lower() not in UNITS:
        return None  # 6x is no six
    return _number(match) + (rf"\text{{{rest}}}" if rest.strip().split(" ")[0].lower() in UNITS else "")


def _number(match: re.Match[str]) -> str:
    """A number as LaTeX."""
    sign = "-" if (match["sign"] or "+")[0] in "-\u2212" else ""
    if match["whole"]:
        value = rf"{match['whole']}\frac{{{match['part']}}}{{{match['of']}}}"
    elif match["top"]:
        value = rf"\frac{{{match['top'].replace(',', '')}}}{{{match['bottom']}}}"
    else:
        value = match["plain"].replace(",", "")
        value = f"0{value}" if value.startswith(".") else value
        if match["exponent"]:
            value += rf" \times 10^{{{match['exponent'].lstrip('+')}}}"
    currency = match["currency"] or (match["sign"] or "")[1:]
    return sign + value + (r"\%" if match["percent"] else "") + (rf"\text{{{UNITS[currency]}}}" if currency else "")


def _last_of(text: str) -> str | None:
    """The last number or formula of a text, or the list that it ends."""
    text = _BOLD.sub(r"\1", text[-TAIL:].replace("{,}", ","))
    formulas = [
        (m.start(), m.end(), inside)
        for m in _FORMULA.finditer(text)
        if not _is_prose(inside := next(group for group in m.groups() if group is not None))
    ]
    numbers = [(m.start(), m.end(), m) for m in _NUMBER.finditer(text)]
    if formulas and (not numbers or numbers[-1][1] <= formulas[-1][1]):
        return _as_list([_latex(inside) for inside in _last_run(text, formulas)])
    if not numbers:
        return None
    start, _, _ = numbers[-1]
    before = text[:start].rstrip()
    if before and (before[-1] in "*×·^/+÷" or re.search(r"[\w)]\s*[-\u2212]$", before)):
        return None  # the end of a calculation that is left undone
    run = _last_run(text, numbers)
    if len(run) == 1:
        unit = re.match(r" ?([^\W\d_]+)", text[numbers[-1][1] :])
        known = unit is not None and unit[1].lower() in UNITS
        if unit is not None and not known and unit.start(1) == 0 and len(unit[1]) == 1:
            return None  # 6x is no six
        return _number(run[0]) + (rf"\text{{{unit[1]}}}" if known and unit is not None else "")
    first = next(begin for begin, _, found in numbers if found is run[0])
    opening, closing = text[:first].rstrip()[-1:], text[numbers[-1][1] :].lstrip()[:1]
    inside = ", ".join(map(_number, run))
    if opening in ("(", "[", "{") and closing in (")", "]", "}"):
        brace = {"{": r"\{", "}": r"\}"}
        return f"{brace.get(opening, opening)}{inside}{brace.get(closing, closing)}"
    return inside


def _last_run(text: str, found: Sequence[tuple[int, int, Any]]) -> list[Any]:
    """The last of some places in a text, with those before it that nothing but a comma, "and" or "or" parts from it."""
    run = [found[-1][2]]
    for (_, end, inside), (start, _, _) in zip(found[-2::-1], found[:0:-1], strict=False):
        if start - end > 20 or not _JOINT.fullmatch(text, end, start):
            break
        run.append(inside)
    return run[::-1]


def _as_list(parts: Sequence[str | None]) -> str | None:
    """Several answers as one; those that say the same thing count once."""
    kept = list(dict.fromkeys(part for part in parts if part))
    return ", ".join(kept) if kept else None


def _boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Where ``\boxed{…}`` and ``\fbox{…}`` stand, and what is in them, braces balanced."""
    out: list[tuple[int, int, str]] = []
    for match in re.finditer(r"\\(?:boxed|fbox)\s?\{", text):
        if out and match.start() < out[-1][1]:
            continue  # a box in a box
        depth = 1
        for at in range(match.end(), min(len(text), match.end() + 4 * LONGEST)):
            depth += (text[at] == "{") - (text[at] == "}")
            if not depth:
                out.append((match.start(), at + 1, text[match.end() : at]))
                break
    return out


def _is_final(line: str) -> bool:
    """Whether what follows ``####`` is an answer and not a heading."""
    return _plain(line) is not None or (_FORMULA.fullmatch(line) is not None) or line.startswith("\\")


def _is_prose(text: str) -> bool:
    """Whether a text has words beside mathematics."""
    bare = _COMMAND_WITH_TEXT.sub("", text)
    return any(word not in ("or", "and", "cm", "mm", "km", "kg") for word in _WORD.findall(bare))


def _unit(latex: str) -> str | None:
    """The unit of an answer, if it is one that is told apart."""
    found = _UNIT_IN_LATEX.search(latex)
    word = next((group for group in found.groups() if group), "") if found else ""
    return UNITS.get(word.lower())


def _reference(right: Any) -> str | None:
    """What a reference says, as LaTeX; None if it is no mathematics."""
    if right is None or isinstance(right, (bool, list, tuple, dict)):
        return None
    text = str(right).strip()
    if not text or not re.search(r"[0-9\\∞]|^\W*[A-Za-z]\W*$", text):
        return None
    if "\\boxed" in text or "####" in text or "<answer>" in text:
        return read_answer(text)
    return _field(text)


def _verdict(right: Any, found: str | None) -> float | None:
    """The reward of one completion."""
    reference = _reference(right)
    gold = _parse(reference) if reference else None
    if reference is None or gold is None:
        return None
    if found is None or len(found) > max(LONGEST, len(reference)) or _depth(found) > DEEPEST or _CHOICES.search(found):
        return 0.0
    units = (_unit(reference), _unit(found))
    if None not in units and units[0] != units[1]:
        return 0.0
    said = _parse(found)
    if said is None or _is_false_equation(said) or (_is_written_out(gold) and not _is_written_out(said)):
        return 0.0
    if _is_heavy(said) and not _is_heavy(gold):
        return 0.0
    from math_verify import verify

    try:
        return float(verify(gold, said, timeout_seconds=None))  # the worker has the time limit
    except (ValueError, TypeError, ArithmeticError, RecursionError, AttributeError, NotImplementedError):
        return 0.0


@functools.lru_cache(maxsize=4096)
def _parse(latex: str) -> Any:
    """LaTeX as a sympy expression, None if it is none."""
    _quiet()
    from math_verify import LatexExtractionConfig, parse

    try:
        found = parse(
            f"${latex}$",
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
    except (ValueError, TypeError, ArithmeticError, RecursionError, AttributeError, NotImplementedError):
        return None
    return found[0] if found else None


@functools.lru_cache(maxsize=1)
def _quiet() -> None:
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ImportError("math_answer compares with math-verify: pip install 'grpo-trainer[rewards]'") from error
    for name in ("math_verify.parser", "math_verify.grader"):  # that its own time limit is off, once per call
        logging.getLogger(name).setLevel(logging.CRITICAL)


@functools.lru_cache(maxsize=64)
def _warn_once(message: str) -> None:
    logger.warning(message)


def _depth(text: str) -> int:
    """Brackets within brackets."""
    depth = deepest = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _is_written_out(expression: Any) -> bool:
    """Whether an expression is a rational number as one writes it, or a set, interval or equation of such."""
    import sympy

    if isinstance(expression, sympy.Eq):
        return _is_written_out(expression.rhs)
    if isinstance(expression, sympy.Interval):
        return _is_written_out(expression.start) and _is_written_out(expression.end)
    if isinstance(expression, (sympy.FiniteSet, sympy.Tuple, sympy.Union)) or type(expression).__name__ == "FiniteSet":
        return all(map(_is_written_out, expression.args))
    if isinstance(expression, sympy.Number) or expression is sympy.oo or expression is -sympy.oo:
        return True
    if isinstance(expression, sympy.UnevaluatedExpr):
        return _is_written_out(expression.args[0])
    if isinstance(expression, sympy.Mul):
        factors = [f for f in expression.args if f is not sympy.S.NegativeOne]
        return sum(isinstance(f, sympy.Number) for f in factors) <= 1 and all(map(_is_written_out, factors))
    if isinstance(expression, sympy.Pow):
        base, exponent = expression.args
        of_ten = base == 10 and isinstance(exponent, sympy.Integer) and abs(int(exponent)) <= LARGEST_EXPONENT
        return of_ten or (isinstance(base, sympy.Number) and exponent == -1)
    return False


def _is_false_equation(expression: Any) -> bool:
    """``5 = 6``, of which math-verify would take the last side."""
    import sympy

    return (
        isinstance(expression, sympy.Eq)
        and isinstance(expression.lhs, sympy.Number)
        and isinstance(expression.rhs, sympy.Number)
        and expression.lhs != expression.rhs
    )


def _is_heavy(expression: Any) -> bool:
    """Whether an expression may take for ever to work out."""
    import sympy

    if not hasattr(expression, "has"):
        return False
    if expression.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative):
        return True
    for part in expression.atoms(sympy.Pow):
        exponent = part.exp
        if exponent.has(sympy.Pow) and not exponent.free_symbols and not _is_written_out(exponent):
            return True
        if any(abs(number) > LARGEST_EXPONENT for number in exponent.atoms(sympy.Number) if number.is_finite):
            return True
        if any(number.q > 100 for number in exponent.atoms(sympy.Rational)):
            return True
    counted = expression.atoms(sympy.factorial, sympy.binomial, sympy.factorial2, sympy.subfactorial, sympy.gamma)
    return any(
        abs(number) > LARGEST_EXPONENT or part.args[0].has(sympy.Pow, sympy.factorial)
        for part in counted
        for number in part.atoms(sympy.Number)
        if number.is_finite
    )
