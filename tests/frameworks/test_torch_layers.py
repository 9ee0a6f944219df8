"""What running a model without a graph leaves as it was."""

from __future__ import annotations

import threading

import pytest
import torch

from padiff.frameworks.torch import layers


@pytest.mark.skipif(not hasattr(torch.backends, "mha"), reason="this torch has no such switch")
def test_models_that_are_run_at_once_leave_the_attentions_switch_as_it_was():
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with layers.evaluating([torch.nn.Linear(2, 2)]):
            entered.set()
            may_leave.wait(10)

    assert torch.backends.mha.get_fastpath_enabled()
    thread = threading.Thread(target=other)
    with layers.evaluating([torch.nn.Linear(2, 2)]):
        thread.start()
        assert entered.wait(10)
    # The first to begin is the first to end.
    assert not torch.backends.mha.get_fastpath_enabled()
    may_leave.set()
    thread.join()
    assert torch.backends.mha.get_fastpath_enabled()
