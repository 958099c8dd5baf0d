"""Groups are scored while others are being drawn, with the numbers of a batch that is scored at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import psutil
import pytest

from grpo_trainer.generation.base import Observer
from grpo_trainer.rewards.base import RewardInputs, RewardSet
from grpo_trainer.rewards.options import RewardOptions
from grpo_trainer.rewards.overlap import ScoredWhileDrawn
from grpo_trainer.types import Prompt

TEXTS = ["a", "bb", "ccc", "a", "bb", "eeeee", "a"]
SIZES = [3, 2, 2]


class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def ids(text):
    return tuple(map(ord, text))


def while_drawn(rewards, conversational=False):
    prompts = [Prompt(ids=(1,), text="p", conversational=conversational)] * len(TEXTS)
    rows = [{"prompt": "p", "answer": i} for i in range(len(TEXTS))]
    return ScoredWhileDrawn(rewards, Tokenizer(), rows, prompts, SIZES, None)


def tell(observer, order):
    """Tells of completions, each by its place in the batch, in some order."""
    firsts = [sum(SIZES[:i]) for i in range(len(SIZES))]
    for row in order:
        prompt = max(i for i, first in enumerate(firsts) if first <= row)
        observer.finished(prompt, row - firsts[prompt], ids(TEXTS[row]), True)


def make():
    def reward(completions, answer, log_extra, log_metric, **kwargs):
        log_extra("with", [len(completions)] * len(completions))
        return [len(c) + 10.0 * a for c, a in zip(completions, answer, strict=True)]

    def of_text(completions, completion_ids, **kwargs):
        return [float(len(i) + len(set(c))) for c, i in zip(completions, completion_ids, strict=True)]

    return [reward, of_text, lambda completions, **kwargs: [float(len(c)) for c in completions]]


def workers() -> list[int]:
    """The worker processes of this process; a library may have processes of its own."""
    running = psutil.Process().children(recursive=True)
    return [process.pid for process in running if any("rewards/worker.py" in word for word in process.cmdline())]


ORDERS = {"in order": range(7), "from the end": range(6, -1, -1), "mixed": [6, 0, 3, 1, 4, 5, 2], "some": [3, 4, 0]}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "options", [{"group": True}, {"rows_per_call": 2}, {"cache": True, "rows_per_call": 1}, {}], ids=str
)
def test_the_numbers_are_those_of_a_batch_that_is_scored_at_once(options, order):
    def built():
        # the second is a function of the text alone, which recurs in other groups
        limits = [RewardOptions(isolation="process", time_limit=60, **each) for each in ({"rows_per_call": 2}, options)]
        return RewardSet(make(), options=[*limits, RewardOptions()])

    rewards = built()
    with while_drawn(rewards) as scored:
        tell(scored.observer(None), ORDERS[order])
    texts, (early, log) = scored.finish([ids(t) for t in TEXTS])
    rewards.close()
    expected, _ = RewardSet(make()).score(
        RewardInputs(
            rows=[{"prompt": "p", "answer": i} for i in range(len(TEXTS))],
            completions=TEXTS,
            completion_ids=[ids(t) for t in TEXTS],
        )
    )
    assert texts == TEXTS
    assert early.tolist() == expected.tolist()
    assert None not in log.extra["with"]


def test_a_group_is_scored_before_the_next_is_drawn(tmp_path):
    def make_waiting(folder):
        def reward(completions, **kwargs):
            open(f"{folder}/{completions[0]}", "w").close()
            return [float(len(completions))] * len(completions)

        return reward

    options = RewardOptions(isolation="process", time_limit=60, group=True)
    rewards = RewardSet([make_waiting(str(tmp_path))], options=[options])
    with while_drawn(rewards) as scored:
        tell(scored.observer(Observer()), [5, 6])
        while not os.path.exists(tmp_path / "eeeee"):  # what is not scored now would never be
            time.sleep(0.01)
        assert sorted(os.listdir(tmp_path)) == ["eeeee"]
    _, (values, _) = scored.finish([ids(t) for t in TEXTS])
    rewards.close()
    assert values[:, 0].tolist() == [3.0] * 3 + [2.0] * 4


def test_an_observer_is_told_all_the_same_and_left_alone_where_nothing_can_begin():
    class Notes(Observer):
        def __init__(self):
            self.said = []

        def tick(self, tokens):
            self.said.append(tokens)

        def finished(self, prompt, completion, ids, ended):
            self.said.append((prompt, completion, ids, ended))

    notes = Notes()
    here = RewardSet(make())
    assert while_drawn(here).observer(notes) is notes and while_drawn(here).observer(None) is None
    rewards = RewardSet(make()[:1], options=[RewardOptions(isolation="process", rows_per_call=1)])
    with while_drawn(rewards) as scored:
        observer = scored.observer(notes)
        observer.tick(3)
        tell(observer, [4])
    rewards.close()
    assert notes.said == [3, (1, 1, ids("bb"), True)]


def test_messages_are_scored_as_messages():
    def seen(completions, **kwargs):
        expected = [[{"role": "assistant", "content": text}] for text in kwargs["texts"]]
        return [float(c == e) for c, e in zip(completions, expected, strict=True)]

    rewards = RewardSet([seen], options=[RewardOptions(isolation="process", group=True)])
    prompts = [Prompt(ids=(1,), text="p", conversational=True)] * 7
    rows = [{"prompt": [], "texts": t} for t in TEXTS]
    with ScoredWhileDrawn(rewards, Tokenizer(), rows, prompts, SIZES, None) as scored:
        tell(scored.observer(None), [3, 4])
    _, (values, _) = scored.finish([ids(t) for t in TEXTS])
    rewards.close()
    assert values[:, 0].tolist() == [1.0] * 7


def test_an_engine_that_returns_another_completion_than_it_told_is_refused():
    rewards = RewardSet(make()[:1], options=[RewardOptions(isolation="process", rows_per_call=1)])
    with while_drawn(rewards) as scored:
        tell(scored.observer(None), range(7))
    with pytest.raises(ValueError, match="returned another completion 2 than it told"):
        scored.finish([ids(t) for t in [*TEXTS[:2], "other", *TEXTS[3:]]])
    rewards.close()


def test_what_ends_the_drawing_ends_the_scoring():
    def make_slow():
        def reward(completions, **kwargs):
            while True:
                pass

        return reward

    rewards = RewardSet([make_slow()], options=[RewardOptions(isolation="process", group=True)])
    with pytest.raises(KeyboardInterrupt), while_drawn(rewards) as scored:
        tell(scored.observer(None), [3, 4])
        raise KeyboardInterrupt
    assert workers() == []


# --- coroutine functions that are called here -------------------------------------------------------------------------


class Judge:
    """Answers when it is allowed to; knows what it is asked, and in which thread."""

    def __init__(self, allowed=True, failing=()):
        self.asked, self.threads, self.failing, self.cancelled = [], set(), failing, []
        self.gate = threading.Event()
        if allowed:
            self.gate.set()

    async def __call__(self, completions, answer, log_extra, log_metric, **kwargs):
        self.asked.append(tuple(answer))
        self.threads.add(threading.current_thread())
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(tuple(answer))
            raise
        if any(a in self.failing for a in answer):
            raise LookupError(f"no judgement of {answer}")
        log_extra("with", [len(completions)] * len(completions))
        log_metric("first", answer[0])
        return [len(c) + 10.0 * a for c, a in zip(completions, answer, strict=True)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{"group": True}, {"rows_per_call": 7}, {"cache": True}], ids=str)
def test_coroutines_begin_early_and_give_what_they_give_at_the_end(options, order):
    def scored_by(judge, told):
        rewards = RewardSet([judge, *make()[2:]], options=[RewardOptions(**options), RewardOptions()])
        with while_drawn(rewards) as scored:
            observer = scored.observer(None)
            tell(observer, told)
            early = len(judge.asked)
        _, (values, log) = scored.finish([ids(t) for t in TEXTS])
        assert threading.current_thread() not in judge.threads or not told
        return values, log, early

    expected, late, _ = scored_by(Judge(), ())
    judge = Judge()
    values, log, _ = scored_by(judge, ORDERS[order])
    assert values.tolist() == expected.tolist()
    assert sorted(a for call in judge.asked for a in call) == list(range(7))  # each once
    assert not any(thread.is_alive() for thread in judge.threads - {threading.current_thread()})
    if "group" in options:
        assert log == late


def test_a_coroutine_runs_while_others_are_drawn_and_its_time_is_told():
    judge = Judge(allowed=False)
    rewards = RewardSet([judge], options=[RewardOptions(group=True)])
    with while_drawn(rewards) as scored:
        tell(scored.observer(None), [3, 4])
        while not judge.asked:  # what does not begin now never would
            time.sleep(0.001)
        started = time.perf_counter()
        while time.perf_counter() < started + 0.05:
            pass
        judge.gate.set()
        while any(not future.done() for future in scored._batch._awaited):
            time.sleep(0.001)
        under_way = scored.hidden
        assert under_way >= 0.05
        time.sleep(0.01)
        assert scored.hidden == under_way  # nothing was under way meanwhile
    scored.finish([ids(t) for t in TEXTS])
    assert judge.asked == [(3, 4), (0, 1, 2), (5, 6)] and scored.hidden == under_way


def test_where_nothing_can_begin_early_no_time_is_told():
    assert while_drawn(RewardSet(make())).hidden is None
    assert while_drawn(RewardSet([Judge()])).hidden is None  # it gets the whole batch
    inline = RewardSet(make()[:1], options=[RewardOptions(group=True)])  # may need the main thread
    assert while_drawn(inline).hidden is None and not inline.starts_early


@pytest.mark.parametrize("order", [(), (5, 6), range(7)], ids=str)
def test_what_a_coroutine_raises_early_comes_at_the_end_as_it_would_have(order):
    judge = Judge(failing=[5])
    rewards = RewardSet([judge], options=[RewardOptions(group=True)])
    with pytest.raises(LookupError, match=r"no judgement of \[5, 6\]") as raised, while_drawn(rewards) as scored:
        tell(scored.observer(None), order)
        drawn = True
        scored.finish([ids(t) for t in TEXTS])
    assert drawn and raised.value.__notes__ == ["raised by reward function 'Judge', while it scored 2 completions"]
    assert not any(thread.name == "rewards" for thread in threading.enumerate())


def test_trouble_that_does_not_end_the_run_is_counted_as_at_the_end():
    def scored_by(told):
        rewards = RewardSet([Judge(failing=[1])], options=[RewardOptions(rows_per_call=2, on_error=-1)])
        with while_drawn(rewards) as scored:
            tell(scored.observer(None), told)
            _, (values, log) = scored.finish([ids(t) for t in TEXTS])
        return values.tolist(), log.troubles, log.extra["Judge_trouble"]

    # a call with several is made again one by one, so 0 has its reward
    assert scored_by(()) == scored_by(range(7))
    values, troubles, _ = scored_by(range(7))
    assert values[:2] == [[1.0], [-1.0]] and troubles["rewards/Judge/errors"] == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_what_ends_the_drawing_cancels_coroutines(interrupt):
    judge = Judge(allowed=False)
    rewards = RewardSet([judge], options=[RewardOptions(group=True)])
    with pytest.raises(interrupt), while_drawn(rewards) as scored:
        tell(scored.observer(None), [3, 4])
        while not judge.asked:
            time.sleep(0.001)
        raise interrupt
    assert judge.cancelled == [(3, 4)]
    assert not any(thread.is_alive() for thread in judge.threads)


def test_an_interrupt_while_the_rest_is_waited_for_cancels_coroutines():
    judge = Judge(allowed=False)
    rewards = RewardSet([judge], options=[RewardOptions(group=True)])

    def interrupt():
        while len(judge.asked) < 3:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt), while_drawn(rewards) as scored:
        tell(scored.observer(None), [3, 4])
        thread.start()
        scored.finish([ids(t) for t in TEXTS])
    thread.join()
    assert len(judge.cancelled) == 3
    assert not any(thread.is_alive() for thread in judge.threads)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_coroutine_that_ends_the_process_ends_it(kind):
    async def leaves(completions, **kwargs):
        raise kind

    rewards = RewardSet([leaves], options=[RewardOptions(group=True)])
    with pytest.raises(kind), while_drawn(rewards) as scored:
        tell(scored.observer(None), [3, 4])
        scored.finish([ids(t) for t in TEXTS])
    assert not any(thread.name == "rewards" for thread in threading.enumerate())
