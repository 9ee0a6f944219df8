"""What ``auto_diff`` prints."""

from __future__ import annotations

import re

import pytest
from kit.frameworks import TORCH
from kit.nets import both, data, spoiled, tanh_mlp

import padiff

CLOSE = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}


def printed(capsys, pair, spoil=None, **options):
    base, raw = tanh_mlp(pair[0]), tanh_mlp(pair[1])
    padiff.assign_weight(base, raw)
    if spoil is not None:
        spoiled(pair[1], raw, spoil, 1.0)
    capsys.readouterr()
    report = padiff.auto_diff(base, raw, both(pair, data(5, 4)), auto_init=spoil is None, **CLOSE, **options)
    return report, capsys.readouterr().out


def test_a_success_shows_options_stages_and_the_largest_output_diff(pair, capsys):
    _, out = printed(capsys, pair)
    assert "[AutoDiff] Your options:\n{\n  auto_init: `True`\n  atol: `1e-05`" in out
    for line in ("single_step: `False`", "diff_phase: `both`", "use_loss: `False`", "use_opt: `False`", "steps: `1`"):
        assert line in out
    assert "[AutoDiff] Assign weight success !!!" in out
    assert "=Train Step 0=" in out
    assert float(re.search(r"Max elementwise output diff is (\S+)", out)[1]) < 1e-5
    for stage in ("forward", "loss", "backward", "weight grad"):
        assert f"[AutoDiff] {stage} stage compared." in out
    assert out.rstrip().endswith("[AutoDiff] SUCCESS !!!")


def test_a_failure_shows_stage_types_paths_figures_trees_and_stacks(pair, capsys):
    report, out = printed(capsys, pair, spoil=1)
    assert "SUCCESS" not in out
    assert "[AutoDiff] FAILED !!!" in out
    assert "Diff found in `Weight Stage` in step: 0, slot `bias`" in out
    assert re.search(r"Type of layer is: <class '.*Linear'> vs <class '.*Linear'>", out)
    assert "Path of layer is: `fc1` vs `fc1`" in out
    assert report.first_diff.message in out
    assert "max |diff| 1" in report.first_diff.message
    for name, kit in zip(("base", "raw"), pair):
        assert f"{name} model ({kit.name})\n=====" in out
        assert f"{name} stacks ({kit.name}):\n=====" in out
    assert out.count("(fc1) Linear    <---  *** HERE ***") == 2
    assert f"{len(report.failed)} of {len(report.diffs)} pairs differ." in out


def stacks(out):
    return [line for line in out.split("stacks (")[1:] for line in line.splitlines() if "File " in line]


def test_the_stacks_are_cut_to_the_users_own_lines(pair, capsys):
    _, out = printed(capsys, pair, spoil=1)
    files = stacks(out)
    assert files
    assert all("site-packages" not in line for line in files)
    assert not any("/padiff/" in line for line in files)
    assert sum("nets.py" in line and "forward" in line for line in files) == 2
    assert 'x = getattr(self, f"fc{index}")(x)' in out


def test_full_stacks_show_the_rest_too(pair, capsys):
    _, cut = printed(capsys, pair, spoil=1)
    _, full = printed(capsys, pair, spoil=1, full_stacks=True)
    assert len(stacks(full)) > len(stacks(cut))
    assert any("site-packages" in line for line in stacks(full))


def test_the_call_of_a_shared_layer_that_differs_is_the_one_whose_stack_is_shown(pair, capsys):
    def net(kit, factor):
        class Net(kit.Net):
            def build(self):
                self.fc = kit.Linear(4, 4)

            def forward(self, x):
                first = self.fc(x)  # the first call
                return self.fc(first * factor)  # the second call

        return Net()

    report = padiff.auto_diff(
        net(pair[0], 1.0), net(pair[1], 2.0), both(pair, data(5, 4)), diff_phase="forward", **CLOSE
    )
    assert report.first_diff.reference == "fc"
    assert report.failed[0].pair.anchor.call == 1
    out = capsys.readouterr().out.split("base stacks")[1]
    assert out.count("# the second call") == 2
    assert "# the first call" not in out


def test_a_failed_backward_is_reported_with_the_forward_that_passed(pair, capsys):
    def net(kit, factor):
        return kit.net(
            lambda net, x: net.last(kit.scaled_gradient(net.first(x), factor)),
            first=kit.Linear(4, 4),
            last=kit.Linear(4, 2),
        )

    padiff.auto_diff(net(pair[0], 1.0), net(pair[1], 7.0), both(pair, data(5, 4)), **CLOSE)
    out = capsys.readouterr().out
    assert "[AutoDiff] forward stage compared." in out
    assert "[AutoDiff] backward stage compared." not in out
    assert "Diff found in `Backward Stage` in step: 0" in out


def test_layers_that_were_not_compared_are_named(capsys):
    kit = TORCH

    def net(surplus):
        class Net(kit.Net):
            def build(self):
                self.fc = kit.Linear(4, 4)
                if surplus:
                    self.act = kit.ReLU()

            def forward(self, x):
                return self.act(self.fc(x)) if surplus else kit.nn.functional.relu(self.fc(x))

        return Net()

    assert padiff.auto_diff(net(True), net(False), both((kit, kit), data(5, 4)), **CLOSE)
    assert "[AutoDiff] Not compared, no partner: act" in capsys.readouterr().out


@pytest.mark.parametrize("count", [3, 200])
def test_a_large_tree_shows_what_is_around_the_place(capsys, count):
    kit = TORCH

    base, raw = (kit.Sequential(*(kit.Linear(2, 2) for _ in range(count))) for _ in range(2))
    padiff.assign_weight(base, raw)
    middle = raw[count // 2].bias
    kit.set(middle, kit.float64(middle) + 1)
    padiff.auto_diff(base, raw, both((kit, kit), data(2, 2)), auto_init=False, **CLOSE)
    out = capsys.readouterr().out
    assert out.count(f"({count // 2}) Linear    <---  *** HERE ***") == 2
    assert ("layers above" in out) == (count == 200)
    assert len(out.splitlines()) < 350
