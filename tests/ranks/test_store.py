"""Ranks of one host meet in a directory: what one has not finished writing is not there for the others."""

import os
import threading
import time
from datetime import timedelta

import pytest

from autobd.ranks.store import DirectoryStore


def test_a_value_is_whole_or_not_there(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)
    with monkeypatch.context() as killed:  # between writing the value and naming it
        killed.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.set("a/key", b"half")
    assert not store.check(["a/key"])
    store.set("a/key", b"whole")
    assert DirectoryStore(tmp_path).get("a/key") == b"whole"


def test_a_value_is_waited_for_until_the_time_is_over_or_the_directory_is_gone(tmp_path):
    store = DirectoryStore(tmp_path / "own")
    (tmp_path / "own").mkdir()
    threading.Timer(0.1, store.set, ("late", b"1")).start()
    assert store.get("late") == b"1"
    with pytest.raises(RuntimeError, match="nobody has set never"):
        store.wait(["never"], timedelta(seconds=0.1))
    threading.Timer(0.1, os.rename, (tmp_path / "own", tmp_path / "other")).start()
    started = time.monotonic()
    for ask in (lambda: store.wait(["never"]), lambda: store.set("late", b"2")):
        with pytest.raises(RuntimeError, match="is gone"):
            ask()
    assert time.monotonic() - started < 10
