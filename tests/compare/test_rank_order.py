"""The process that differs earliest in a step is where the runs differ first."""

import torch

import padiff
from padiff import report_formats


def recorded(folder, change=0.0):
    """Two recorders stand for two processes; rank 1's batch may be another one. Gradients are reduced to their mean."""
    nets = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)) for _ in range(2)]
    for net in nets:
        net.load_state_dict(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)).state_dict(), strict=True)
        with torch.no_grad():
            for k, parameter in enumerate(net.parameters()):
                parameter.copy_(torch.linspace(-1, 1 + k, parameter.numel()).reshape(parameter.shape))
    optimizers = [torch.optim.SGD(net.parameters(), 0.01) for net in nets]
    recorders = [
        padiff.record(net, folder, optimizer=optimizer, rank=rank, world_size=2)
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers))
    ]
    with recorders[0], recorders[1]:
        for number in range(2):
            for rank, net in enumerate(nets):
                x = torch.linspace(-1, 1 + rank + number, 8).reshape(2, 4)
                net(x + (change if rank and number else 0)).square().mean().backward()
            for pair in zip(*(net.parameters() for net in nets)):
                mean = (pair[0].grad + pair[1].grad) / 2
                for parameter in pair:
                    parameter.grad = mean.clone()
            for optimizer, rec in zip(optimizers, recorders):
                optimizer.step()
                optimizer.zero_grad()
                rec.try_dump()
    return folder


def test_another_batch_on_rank_1_parts_there_and_not_in_rank_0s_gradients(tmp_path):
    clean, wrong = recorded(tmp_path / "clean"), recorded(tmp_path / "wrong", change=0.5)
    report = padiff.compare_runs(clean, wrong)
    first = report.first_diff
    assert (first.step, first.rank, first.stage) == (1, 1, "input"), first.message
    assert "The runs differ first at step 1, rank 1, stage input" in first.message
    assert report_formats.to_json(report)["first_diff"]["rank"] == 1
    assert "In the step compared before it agreed exactly" in first.message
    # Rank 0 parts, too, where the gradients were reduced.
    assert report.failed[0].pair.stage == "grad"


def test_of_one_process_nothing_is_said_of_ranks(tmp_path):
    clean = recorded(tmp_path / "clean")
    assert padiff.compare_runs(clean, recorded(tmp_path / "again")).passed
    for folder, value in (("a", 0.0), ("b", 1.0)):
        net = torch.nn.Linear(4, 1)
        with torch.no_grad():
            net.weight.fill_(1.0), net.bias.fill_(value)
        with padiff.record(net, tmp_path / folder) as rec:
            net(torch.ones(2, 4)).sum().backward()
            rec.try_dump()
    first = padiff.compare_runs(tmp_path / "a", tmp_path / "b").first_diff
    assert first.rank is None and "rank" not in first.message
