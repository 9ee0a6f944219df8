from __future__ import annotations

import inspect

import pytest

from padiff import errors


def test_every_error_is_a_padiff_error():
    own = [e for _, e in inspect.getmembers(errors, inspect.isclass) if e.__module__ == errors.__name__]
    assert len(own) == 11 and all(issubclass(e, errors.PadiffError) for e in own)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (errors.UsageError, ValueError),
        (errors.SelectionError, errors.UsageError),
        (errors.RunFolderError, OSError),
        (errors.TensorFileError, errors.RunFolderError),
    ],
)
def test_an_error_is_also_what_python_code_expects(error, base):
    with pytest.raises(base, match=r"what happened"):
        raise error("what happened")


def test_the_error_of_a_live_comparison_holds_the_report():
    report = object()
    error = errors.RunsDifferError("they part", report)
    assert error.report is report and str(error) == "they part"
