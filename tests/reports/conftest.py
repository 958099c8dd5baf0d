from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest


class Notebook:
    """Plays the kernel of a notebook: what its cells show, and the end of a cell."""

    def __init__(self) -> None:
        self.shown: list[dict] = []  # one bundle per place, as it looks now
        self.drawn = 0
        self.at_end: list = []

    def display(self, bundle, raw=False, display_id=None):
        assert raw and display_id
        place = len(self.shown)
        self.shown.append(bundle)
        self.drawn += 1

        def update(bundle, raw=False):
            assert raw
            self.shown[place] = bundle
            self.drawn += 1

        return SimpleNamespace(update=update)

    def end_cell(self) -> None:
        for function in list(self.at_end):
            function("result")

    def html(self, place: int) -> str:
        return self.shown[place]["text/html"]


@pytest.fixture
def notebook(monkeypatch):
    """Makes this process look like a notebook's, with or without IPython installed."""
    played = Notebook()
    events = SimpleNamespace(
        register=lambda event, function: played.at_end.append(function),
        unregister=lambda event, function: played.at_end.remove(function),
    )
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object(), events=events)
    display.display = played.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return played
