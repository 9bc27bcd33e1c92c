"""Ctrl-C ends a run wherever it falls."""

import os
import signal
import sys

import pytest
import torch
from networks import mlp

import autobd


class Gone:
    """Its destructor gets Ctrl-C, where Python loses it."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


@pytest.fixture
def heard():
    """Where tests run in the background, the signal is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(60)
def test_ctrl_c_in_a_destructor_is_not_lost(heard):
    hook, read = sys.unraisablehook, []

    def batches():
        for step in range(2000):
            if step == 5:
                Gone()
            read.append(step)
            yield torch.randn(4, 6)

    with pytest.raises(KeyboardInterrupt):
        autobd.distill(
            mlp(16), mlp(4, seed=1), batches(), example=torch.randn(4, 6), cuts=[("0", "0")], devices=1, progress=False
        )
    assert 5 < len(read) < 2000  # not at the destructor itself
    assert sys.unraisablehook is hook


def test_other_errors_in_destructors_are_shown_as_ever():
    class Broken:
        def __del__(self):
            raise ValueError("shown")

    shown = []
    before, sys.unraisablehook = sys.unraisablehook, lambda lost: shown.append(lost.exc_value)
    try:
        with autobd.interrupts.interrupts_kept():
            Broken()
    finally:
        sys.unraisablehook = before
    assert [str(e) for e in shown] == ["shown"]
