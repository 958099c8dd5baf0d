"""Rewards for the language of a completion: how much of it is in the asked one, and how easily it reads.

DeepSeek-R1 (arXiv:2501.12948, section 2.3.2) adds a language consistency reward, "the proportion of target language
words in the CoT", and asks for readable text without saying how it measures that; here it is Flesch's reading ease.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_trainer.registry import suggest
from grpo_trainer.rewards.options import reward
from grpo_trainer.rewards.text import text_of

LANGUAGES = {
    **dict.fromkeys(["en", "fr", "de", "es", "it", "pt", "nl", "sv", "da", "no", "fi", "pl", "cs", "ro"], "LATIN"),
    **dict.fromkeys(["hu", "tr", "id", "vi"], "LATIN"),
    **dict.fromkeys(["ru", "uk", "bg"], "CYRILLIC"),
    **{"zh": "CJK", "ja": "CJK", "ko": "HANGUL", "ar": "ARABIC", "fa": "ARABIC", "he": "HEBREW"},
    **{"el": "GREEK", "hi": "DEVANAGARI", "th": "THAI"},
}
"""Language -> its script. Text of a script is told apart among the languages of that script."""

ENOUGH = {"LATIN": 20, "CYRILLIC": 20, "ARABIC": 20, "CJK": 4}
"""Letters that it takes to tell the languages of a script apart; fewer are judged with the sentence before them."""
LONGEST = 200_000
"""Characters of a completion that are judged."""

FLESCH = {
    "en": (206.835, 1.015, 84.6),
    "de": (180.0, 1.0, 58.5),
    "es": (206.84, 1.02, 60.0),
    "fr": (207.0, 1.015, 73.6),
    "it": (217.0, 1.3, 60.0),
    "nl": (206.835, 0.93, 77.0),
    "ru": (206.835, 1.3, 60.1),
}
"""Language -> base, weight of words per sentence, weight of syllables per word: Flesch 1948 and, for the other
languages, Amstad 1978, Fernández Huerta 1959, Kandel and Moles 1958, Franchina and Vacca 1986, Douma 1960, Oborneva
2006."""

_LEFT_OUT = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`"  # code
    r"|\$\$.*?\$\$|(?<!\\)\$[^$\n]*(?<!\\)\$|\\\(.*?\\\)|\\\[.*?\\\]|\\[A-Za-z]+(?:\{[^{}\n]*\})*"  # mathematics
    r"|https?://\S+|</?[A-Za-z][^<>\n]{0,100}>",  # addresses, tags
    re.DOTALL,
)
_SENTENCE = re.compile(r"[^.!?。！？؟\n]+")
_WORDS = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


@reward(isolation="process", time_limit=10.0, rows_per_call=32, imports=("py3langid.langid",))
def language_consistency(completions: Sequence[Any], *, language: str = "en", **kwargs: Any) -> list[float | None]:
    """The share of a completion's letters that are in one language, code and mathematics left out.

    Code blocks and inline code, formulas, LaTeX commands, addresses and tags are taken out. The rest is cut into
    sentences, and these where the script changes. A piece in a script that the language is not written in is foreign;
    any other is judged by py3langid among the `LANGUAGES` of that script, at least 20 letters at a time (4 of Chinese
    and Japanese); what is left over counts as right. Pieces count by their letters, a letter of Chinese or Japanese for
    two and a half, about what it says.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        language: two letters, one of `LANGUAGES`.
        **kwargs: the other columns, unused.

    Returns:
        N rewards in [0, 1]; None where there are too few letters to judge.

    Raises:
        ValueError: if the language is not known.
        ImportError: if py3langid is not installed.

    Example:
        >>> language_consistency(["We add both numbers first.", "We add both numbers. 我们先把两个数相加。", "$x = 5$"])
        [1.0, 0.41..., None]
    """
    if language not in LANGUAGES:
        known = ", ".join(sorted(LANGUAGES))
        raise ValueError(
            f"language_consistency: {language!r} is not known.{suggest(language, LANGUAGES)} Known: {known}"
        )
    return [_share(text_of(completion), language) for completion in completions]


@reward(isolation="process", time_limit=10.0, rows_per_call=32, imports=("pyphen",))
def readability(completions: Sequence[Any], *, language: str = "en", **kwargs: Any) -> list[float | None]:
    """Flesch's reading ease over 100, between 0 and 1: short sentences of short words read easily.

    ease = base − a · words per sentence − b · syllables per word, with the `FLESCH` values of the language. Code and
    mathematics are left out as in `language`. Syllables are counted by the places where pyphen would hyphenate, which
    are fewer than the syllables of speech, so that a text reads a little easier than by hand.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        language: two letters, one of `FLESCH`.
        **kwargs: the other columns, unused.

    Returns:
        N rewards in [0, 1]; None where there are fewer than 5 words, which no measure can judge.

    Raises:
        ValueError: if the language has no formula.
        ImportError: if pyphen is not installed.

    Example:
        >>> readability(["The cat sat on the mat. It was warm."])
        [1.0]
    """
    if language not in FLESCH:
        raise ValueError(f"readability: there is no formula for {language!r}. Known: {', '.join(FLESCH)}")
    base, of_sentence, of_word = FLESCH[language]
    rewards: list[float | None] = []
    for completion in completions:
        sentences = [
            words for s in _SENTENCE.findall(prose(text_of(completion)[:LONGEST])) if (words := _WORDS.findall(s))
        ]
        words = [word for sentence in sentences for word in sentence]
        if len(words) < 5:
            rewards.append(None)
            continue
        syllables = sum(_syllables(word.lower(), language) for word in words)
        ease = base - of_sentence * len(words) / len(sentences) - of_word * syllables / len(words)
        rewards.append(min(max(ease / 100, 0.0), 1.0))
    return rewards


def prose(text: str) -> str:
    """A text without code, mathematics, addresses and tags.

    Args:
        text: any text.

    Returns:
        The rest, a space where something was taken out.

    Example:
        >>> prose("So `f(x)` is $x^2$. <answer>Yes</answer>").split()
        ['So', 'is', '.', 'Yes']
    """
    return _LEFT_OUT.sub(" ", text)


def _share(text: str, wanted: str) -> float | None:
    total = right = 0.0
    judged = False
    for script, piece, enough in _pieces(prose(text[:LONGEST])):
        letters = sum(map(str.isalpha, piece)) * (2.5 if script == "CJK" else 1.0)
        own = script == LANGUAGES[wanted]
        total += letters
        right += letters * (own and (not enough or _detected(piece, script) == wanted))
        judged = judged or enough or not own
    return right / total if judged and total else None


def _pieces(text: str) -> Iterator[tuple[str, str, bool]]:
    """Script, piece, and whether it is long enough to tell its language: sentences, short ones with those before."""
    waiting: dict[str, str] = {}
    last: dict[str, str] = {}
    for sentence in _SENTENCE.findall(text):
        for script, run in _runs(sentence):
            piece = f"{waiting.pop(script, '')} {run}".strip()
            if sum(map(str.isalpha, piece)) < ENOUGH.get(script, 1):
                waiting[script] = piece
                continue
            if script in last:
                yield script, last[script], True
            last[script] = piece
    for script in {**last, **waiting}:
        yield script, f"{last.get(script, '')} {waiting.get(script, '')}".strip(), script in last


def _runs(sentence: str) -> Iterator[tuple[str, str]]:
    """The words of a sentence, joined as long as their script stays the same."""
    script, start = "", 0
    for match in re.finditer(r"[^\W\d_]+", sentence):
        if len(match[0]) == 1 and match[0].isascii():
            continue  # x, a name in a formula that has no dollars around it
        for offset, character in enumerate(match[0]):
            now = _script(character)
            if now and now != script:
                if script:
                    yield script, sentence[start : match.start() + offset]
                script, start = now, match.start() + offset
    if script:
        yield script, sentence[start:]


@functools.lru_cache(maxsize=65536)
def _script(character: str) -> str:
    """The script of a letter, empty for what belongs to any."""
    name = unicodedata.name(character, "").partition(" ")[0]
    return "CJK" if name in ("CJK", "HIRAGANA", "KATAKANA") else name if name in LANGUAGES.values() else ""


def _detected(text: str, script: str) -> str:
    """The likeliest language of the script."""
    candidates = [name for name, own in LANGUAGES.items() if own == script]
    if len(candidates) == 1:
        return candidates[0]
    return str(_identifier(script).classify(text.lower())[0])


@functools.lru_cache(maxsize=8)
def _identifier(script: str) -> Any:
    """One detector for each script: it keeps the languages that it decides between."""
    try:
        from py3langid.langid import LanguageIdentifier
    except ImportError as error:
        raise ImportError("language_consistency uses py3langid: pip install 'grpo-trainer[rewards]'") from error
    identifier = LanguageIdentifier.from_model_file(_model_file())
    identifier.set_languages([name for name, own in LANGUAGES.items() if own == script])
    return identifier


def _model_file() -> str:
    from py3langid import langid

    return str(langid.MODEL_FILE)


@functools.lru_cache(maxsize=65536)
def _syllables(word: str, language: str) -> int:
    return len(_hyphens(language).positions(word)) + 1


@functools.lru_cache(maxsize=8)
def _hyphens(language: str) -> Any:
    try:
        import pyphen
    except ImportError as error:
        raise ImportError("readability uses pyphen: pip install 'grpo-trainer[rewards]'") from error
    return pyphen.Pyphen(lang=pyphen.language_fallback(language) or "en_US", left=1, right=1)
