"""The upload of completions, with a mocked hub."""

from __future__ import annotations

from types import SimpleNamespace

import huggingface_hub
import pytest

from grpo_trainer.reports.uploader import CompletionsUploader


class Scheduler:
    """Plays ``huggingface_hub.CommitScheduler``: each upload holds the files that are there."""

    made: list[Scheduler]

    def __init__(self, **kwargs):
        self.kwargs, self.uploads, self.stopped = kwargs, [], False
        type(self).made.append(self)

    def trigger(self):
        self.uploads.append(sorted(path.name for path in self.kwargs["folder_path"].iterdir()))
        return SimpleNamespace(result=lambda: None)

    def stop(self):
        self.stopped = True


@pytest.fixture
def hub(monkeypatch):
    kind = type("Scheduler", (Scheduler,), {"made": []})
    monkeypatch.setattr(huggingface_hub, "CommitScheduler", kind)
    return kind


ARGS = SimpleNamespace(hub_private_repo=True, hub_token="hf_x")
STATE = SimpleNamespace(is_world_process_zero=True)


def test_the_files_go_to_a_dataset_repository_the_last_of_them_too(tmp_path, hub):
    uploader = CompletionsUploader(tmp_path, "me/words")
    uploader.on_train_begin(ARGS, STATE, None)
    (tmp_path / "completions_00001.parquet").write_bytes(b"")
    uploader.on_train_end(ARGS, STATE, None)
    (scheduler,) = hub.made
    assert scheduler.kwargs == {
        "repo_id": "me/words",
        "repo_type": "dataset",
        "folder_path": tmp_path,
        "every": 2,
        "private": True,
        "token": "hf_x",
        "allow_patterns": "completions_*.parquet",
    }
    assert scheduler.uploads == [["completions_00001.parquet"]] and scheduler.stopped


def test_only_the_main_process_uploads(tmp_path, hub):
    uploader = CompletionsUploader(tmp_path, "me/words")
    uploader.on_train_begin(ARGS, SimpleNamespace(is_world_process_zero=False), None)
    uploader.on_train_end(ARGS, SimpleNamespace(is_world_process_zero=False), None)
    assert hub.made == []


def test_a_run_that_was_broken_off_uploads_no_longer_when_the_next_begins(tmp_path, hub):
    uploader = CompletionsUploader(tmp_path, "me/words")
    uploader.on_train_begin(ARGS, STATE, None)
    uploader.on_train_begin(ARGS, STATE, None)
    assert [scheduler.stopped for scheduler in hub.made] == [True, False]


@pytest.mark.parametrize("where", ["__init__", "trigger"])
def test_a_hub_that_cannot_be_reached_is_said_once_with_where_the_files_are(tmp_path, hub, monkeypatch, caplog, where):
    def fail(self, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(hub, where, fail)
    uploader = CompletionsUploader(tmp_path, "me/words")
    for _ in range(2):
        uploader.on_train_begin(ARGS, STATE, None)
        uploader.on_train_end(ARGS, STATE, None)
    (record,) = caplog.records
    said = record.getMessage()
    assert "me/words" in said and str(tmp_path) in said and "no route to host" in said
