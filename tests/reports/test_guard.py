from __future__ import annotations

import pytest

from grpo_trainer.reports.guard import Guard


def test_the_first_failure_is_said_and_none_goes_further(caplog):
    guard = Guard("the completions are not printed")
    for reason in ("one", "two"):
        with guard:
            raise ValueError(reason)
    (record,) = caplog.records
    assert record.getMessage() == "the completions are not printed (ValueError: one); training goes on without"


def test_without_a_failure_nothing_is_said(caplog):
    guard = Guard("anything")
    with guard:
        pass
    assert caplog.records == [] and not guard.failed


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_who_wants_to_end_the_run_can(kind, caplog):
    with pytest.raises(kind), Guard("anything"):
        raise kind
    assert caplog.records == []
