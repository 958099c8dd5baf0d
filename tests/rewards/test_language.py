"""Texts in fourteen languages: whole, short, and mixed with code, mathematics and each other."""

from __future__ import annotations

import pytest

pytest.importorskip("py3langid", reason="needs the extra `rewards`")

from grpo_trainer.rewards import REWARDS
from grpo_trainer.rewards.language import language_consistency, prose, readability
from grpo_trainer.rewards.options import options_of

TEXTS = {
    "en": "The answer is seven because three plus four is seven. We add both numbers first.",
    "fr": "La réponse est sept car trois plus quatre font sept. On additionne d'abord les deux nombres.",
    "de": "Die Antwort ist sieben, denn drei plus vier ist sieben. Wir addieren zuerst beide Zahlen.",
    "es": "La respuesta es siete porque tres más cuatro son siete. Primero sumamos los dos números.",
    "it": "La risposta è sette perché tre più quattro fa sette. Prima sommiamo i due numeri.",
    "pt": "A resposta é sete porque três mais quatro são sete. Primeiro somamos os dois números.",
    "nl": "Het antwoord is zeven, want drie plus vier is zeven. We tellen eerst beide getallen op.",
    "pl": "Odpowiedź to siedem, ponieważ trzy plus cztery to siedem. Najpierw dodajemy obie liczby.",
    "zh": "答案是七，因为三加四等于七。我们先把两个数相加。",
    "ja": "答えは七です。三足す四は七だからです。まず二つの数を足します。",
    "ko": "답은 일곱입니다. 셋 더하기 넷은 일곱이기 때문입니다. 먼저 두 수를 더합니다.",
    "ru": "Ответ — семь, потому что три плюс четыре равно семи. Сначала сложим оба числа.",
    "ar": "الجواب هو سبعة لأن ثلاثة زائد أربعة يساوي سبعة. نجمع العددين أولا ثم نكتب الناتج.",
    "hi": "उत्तर सात है क्योंकि तीन और चार सात होते हैं। पहले हम दोनों संख्याओं को जोड़ते हैं।",
}


@pytest.mark.parametrize("asked", TEXTS)
def test_a_text_is_in_its_language_and_in_no_other(asked):
    assert language_consistency(list(TEXTS.values()), language=asked) == [float(own == asked) for own in TEXTS]


SHORT = {
    "en": "Let us check this step again",
    "fr": "Vérifions encore cette étape",
    "de": "Prüfen wir diesen Schritt noch einmal",
    "es": "Revisemos este paso otra vez",
    "it": "Controlliamo di nuovo questo passaggio",
    "nl": "Laten we deze stap nog eens controleren",
    "zh": "让我们再检查一下",
    "ja": "もう一度確認しましょう",
    "ru": "Проверим этот шаг ещё раз",
    "ko": "다시 확인해 봅시다",
}


@pytest.mark.parametrize("asked", SHORT)
def test_a_short_sentence_is_enough(asked):
    assert language_consistency([SHORT[asked]], language=asked) == [1.0]


@pytest.mark.parametrize("text", ["", "5", "$x = 5$", "x", "Yes.", "`bonjour tout le monde, comment ça va`"])
def test_too_little_text_is_not_judged(text):
    assert language_consistency([text]) == [None]


def test_code_and_mathematics_are_left_out():
    code = "```python\nprint('Bonjour tout le monde, comment allez-vous')\n```"
    text = f"We add both numbers first. {code} Then \\(\\text{{somme des deux nombres}} = 7\\) follows from it."
    assert language_consistency([text]) == [1.0]
    assert prose("a <answer>b</answer> `c` https://d.e $f$ \\[g\\]").split() == ["a", "b"]


def test_a_mixed_text_has_its_share():
    # 24 letters of English, 12 of Chinese, which count for two and a half each: 24 / 54
    mixed = "We add both numbers first now 我们先把这两个数字相加吧"
    letters = sum(c.isascii() and c.isalpha() for c in mixed), sum(ord(c) > 0x3000 for c in mixed)
    assert letters == (24, 12)
    assert language_consistency([mixed]) == [pytest.approx(24 / 54)]
    assert language_consistency([mixed], language="zh") == [pytest.approx(30 / 54)]
    # two sentences of one script: 28 letters of French beside 23 of English
    two = "We add both numbers first. On additionne d'abord les deux nombres."
    english = sum(map(str.isalpha, "We add both numbers first"))
    french = sum(map(str.isalpha, "On additionne d'abord les deux nombres"))
    assert language_consistency([two]) == [pytest.approx(english / (english + french))]


def test_messages_are_read_and_a_language_that_is_not_known_is_refused():
    chat = [[{"role": "assistant", "content": TEXTS["de"]}]]
    assert language_consistency(chat, language="de") == [1.0]
    with pytest.raises(ValueError, match=r"'eng' is not known\. Did you mean 'en'"):
        language_consistency(chat, language="eng")


def test_flesch_on_paper():
    # 2 sentences, 9 words, 9 syllables: 206.835 - 1.015 * 4.5 - 84.6 = 117.67, over 100 and cut at 1
    # "Hidden paper is under the yellow table": 7 words, hid-den pa-per is un-der the yel-low ta-ble = 12 syllables
    #   206.835 - 1.015 * 7 - 84.6 * 12 / 7 = 54.70
    easy, middling = "The cat sat on the mat. It was warm.", "Hidden paper is under the yellow table."
    assert readability([easy, middling]) == [1.0, pytest.approx(0.5470, abs=1e-3)]
    # said twice, words per sentence and syllables per word are the same
    assert readability([f"{middling} {middling}"]) == [pytest.approx(0.5470, abs=1e-3)]


@pytest.mark.parametrize("asked", ["en", "fr", "de", "es", "it", "nl", "ru"])
def test_plain_words_read_more_easily_than_long_ones(asked):
    long = {
        "en": "Notwithstanding considerable computational complexity institutional organisations",
        "fr": "Nonobstant la complexité computationnelle considérable les organisations institutionnelles",
        "de": "Unbeschadet beträchtlicher Berechnungskomplexität unterschätzen institutionelle Organisationen",
        "es": "Independientemente considerables complejidades computacionales organizaciones institucionales",
        "it": "Indipendentemente considerevoli complessità computazionali organizzazioni istituzionali sottovalutano",
        "nl": "Niettegenstaande aanzienlijke berekeningscomplexiteit onderschatten institutionele organisaties",
        "ru": "Несмотря на значительную вычислительную сложность институциональные организации недооценивают",
    }
    plain, hard = readability([TEXTS[asked], long[asked]], language=asked)
    assert plain > hard + 0.3


def test_too_few_words_or_a_language_without_a_formula():
    assert readability(["Yes, it is.", "", "$x$"]) == [None, None, None]
    with pytest.raises(ValueError, match="no formula for 'zh'"):
        readability(["x"], language="zh")


def test_a_text_of_millions_of_letters_does_not_hold_up():
    for text in ("word " * 2_000_000, "`" * 3_000_000, "<a" * 1_000_000, "\x00\ud800\u202e" * 100_000):
        (share,) = language_consistency([text])
        assert share is None or 0.0 <= share <= 1.0
    for name in ("language_consistency", "readability"):
        assert options_of(REWARDS[name]).isolation == "process"
