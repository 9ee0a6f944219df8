"""Models that a script only holds: they neither run nor train."""

import pytest
import torch

import padiff


class Tagger(torch.nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(12, 8)
        self.inner = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight if tied else torch.nn.Parameter(self.words.weight.detach().clone())

    def forward(self, tokens):
        return self.head(torch.tanh(self.inner(self.words(tokens))))


def _run(folder, tied, models=None):
    net, generator = Tagger(tied), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with padiff.record({"net": net, **models} if models else net, folder, optimizer=optimizer) as rec:
        for _ in range(2):
            tokens = torch.randint(0, 12, (4, 6), generator=generator)
            torch.nn.functional.cross_entropy(net(tokens).transpose(1, 2), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return folder


@pytest.mark.parametrize("swapped", [False, True])
def test_a_model_that_weights_were_copied_from_is_no_partner(tmp_path, swapped):
    reference = _run(tmp_path / "reference", True)
    candidate = _run(tmp_path / "candidate", False, {"source": Tagger()})
    runs = (candidate, reference) if swapped else (reference, candidate)
    report = padiff.compare_runs(*runs)
    pairs = [d.pair.sides.swapped(swapped).candidate for d in report.diffs if d.pair.stage == "update" and d.compared]
    assert "net.words" in {record.layer for record in pairs}
    first = report.first_diff
    assert (first.step, first.stage) == (0, "grad") and first.cause.kind == "tied", first.message
