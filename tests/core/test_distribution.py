"""An older distribution of the same package name is reported."""

from __future__ import annotations

import warnings

import pytest

from padiff.system.terminal import warn_of_older


def test_an_older_padiff_beside_this_one_is_reported_with_the_remedy(tmp_path, monkeypatch):
    installed = tmp_path / "padiff-0.2.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: padiff\nVersion: 0.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(
        RuntimeWarning, match=r"'padiff' 0.2 is installed beside 'padiff-hooks'.*pip uninstall -y padiff"
    ):
        warn_of_older()


def test_alone_it_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_older()
