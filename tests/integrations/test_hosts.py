"""The callbacks of Lightning and paddle.Model take the same arguments."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest

import padiff
from padiff.errors import UsageError
from padiff_hapi import PaDiffCallback as HapiCallback
from padiff_lightning import PaDiffCallback as LightningCallback

from .hapi import fit
from .lit import QUIET, Lit, loader


def train(host, folder, **options):
    if host == "lightning":
        trainer = pl.Trainer(max_epochs=1, callbacks=[LightningCallback(folder, **options)], **QUIET)
        trainer.fit(Lit(), loader())
    else:
        fit(folder, options=options)
    return padiff.open_run(folder)


@pytest.fixture(params=["lightning", "hapi"])
def host(request):
    return request.param


def options_of(host, **more):
    last = "net.2/forward" if host == "lightning" else "second/forward"
    return {"detail": {"*": "sketch", "backward": "nothing", last: "full"}, **more}, last


def test_levels(host, tmp_path):
    options, last = options_of(host, full_every_n_steps=4)
    run = train(host, tmp_path / "run", **options)
    assert run.numbers() == list(range(6))
    for number in run.numbers():
        (step,) = run.steps(number)
        kept = {r.site: r.sketch is not None for r in step.records if r.layer != "(loop)"}
        assert not any("/backward/" in site for site in kept)
        assert {"weight", "forward", "grad", "update"} <= {r.stage for r in step.records}
        expected = {site: number % 4 != 0 and not site.startswith(last) for site in kept}
        assert kept == expected
    assert run.info.recording["detail"] == options["detail"]
    assert padiff.compare_runs(run, train(host, tmp_path / "again", **options)).passed


def test_a_limit(host, tmp_path):
    run = train(host, tmp_path / "run", detail="sketch", max_bytes=70_000)
    assert run.numbers()[0] == 0
    assert run.numbers()[-1] == 5
    assert len(run.numbers()) < 6
    assert sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()) <= 70_000


def test_live_comparison_with_sketches(host, tmp_path):
    """Compared while training with a run of full tensors, whose folder is packed."""
    train(host, tmp_path / "reference", pack=True, compression="zlib")
    train(host, tmp_path / "run", detail="sketch", reference=tmp_path / "reference", on_diff="raise")
    report = padiff.compare_runs(tmp_path / "reference", tmp_path / "run")
    assert report.passed
    assert report.coverage.sketched > 50


@pytest.mark.parametrize("make", [LightningCallback, HapiCallback])
def test_wrong_arguments_are_reported_at_once(make, tmp_path):
    with pytest.raises(UsageError, match="level of detail"):
        make(tmp_path, detail="some")
