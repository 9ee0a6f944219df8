"""``create_model`` and the object it makes."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from kit.frameworks import hook_count
from kit.nets import data, forward_of_tanh_mlp, tanh_mlp

import padiff
from padiff import create_model

from .proxies import sites, train

UsageError = padiff.PadiffError


# -- a model like the wrapped one -------------------------------------------------------------------------------------


def test_a_proxy_computes_what_the_model_computes(kit):
    model = tanh_mlp(kit)
    x = data(5, 4)
    proxy = create_model(model, name="Simple")
    np.testing.assert_allclose(kit.float64(proxy(kit.tensor(x))), forward_of_tanh_mlp(kit, model, x), atol=1e-5)
    np.testing.assert_array_equal(kit.float64(proxy(x=kit.tensor(x))), kit.float64(model(kit.tensor(x))))
    assert proxy.model is model
    assert proxy.name == "Simple"
    assert hook_count(kit, model) == 0


def test_attributes_and_methods_are_the_wrapped_models(kit):
    model = tanh_mlp(kit)
    proxy = create_model(model)
    assert proxy.fc0 is model.fc0
    assert proxy.count == 3
    proxy.eval()
    assert not model.training
    proxy.train()
    assert model.training
    assert [id(p) for p in proxy.parameters()] == [id(p) for p in model.parameters()]
    assert set(proxy.state_dict()) == set(model.state_dict())
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = proxy.no_such_thing


def test_a_proxy_of_a_proxy_is_itself(kit):
    proxy = create_model(tanh_mlp(kit))
    assert create_model(proxy) is proxy


def test_the_name_is_optional_and_two_living_models_do_not_share_one(kit):
    first, second, third = create_model(tanh_mlp(kit)), create_model(tanh_mlp(kit)), create_model(tanh_mlp(kit), "Net")
    assert (first.name, second.name, third.name) == ("Net", "Net_1", "Net_2")
    assert len({first.dump_path, second.dump_path, third.dump_path}) == 3
    del first
    gc.collect()
    assert create_model(tanh_mlp(kit)).name == "Net"


def test_two_models_of_one_class_do_not_write_into_one_folder(kit):
    proxies = [create_model(tanh_mlp(kit)) for _ in range(2)]
    for proxy in proxies:
        train(kit, proxy, data(5, 4))
        assert proxy.try_dump()
    folders = [Path(proxy.dump_path) / "step_0" / "rank_0" for proxy in proxies]
    assert not padiff.check_weights(*folders)
    assert padiff.check_report(folders[0], folders[0])


def test_backward_fills_the_gradients_and_the_optimizer_is_the_users_own(kit):
    model = tanh_mlp(kit)
    proxy = create_model(model)
    optimizer = kit.sgd(model.parameters(), 0.5)
    before = kit.weight(model.fc2)
    train(kit, proxy, data(5, 4), optimizer)
    gradient = kit.grad(model.fc2.weight)
    gradient = gradient.T if kit.name == "paddle" else gradient
    np.testing.assert_allclose(kit.weight(model.fc2), before - 0.5 * gradient, atol=1e-6)


def test_hooks_are_off_again_after_an_error_in_forward(kit):
    model = tanh_mlp(kit)
    proxy = create_model(model)
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        proxy(kit.tensor(data(5, 3)))
    assert hook_count(kit, model) == 0
    train(kit, proxy, data(5, 4))
    proxy.dump_report("dump")


# -- dumps -------------------------------------------------------------------------------------------------------------


def test_each_dump_writes_its_own_kind(kit):
    proxy = create_model(tanh_mlp(kit))
    train(kit, proxy, data(5, 4))
    proxy.dump_report("a")
    assert sorted(p.name for p in Path("a").iterdir()) == ["report.json", "tensors"]
    assert {"input", "forward", "backward"} <= set(sites("a"))
    proxy.dump_params("b")
    assert set(sites("b", "params.json")) == {"weight", "grad"}
    proxy.dump_weights("c")
    assert set(sites("c", "weights.json")) == {"weight"}
    proxy.dump_grads("d")
    assert set(sites("d", "grads.json")) == {"grad"}


def test_what_is_dumped_is_what_the_model_computed(kit):
    model = tanh_mlp(kit)
    proxy = create_model(model)
    x = data(5, 4)
    train(kit, proxy, x)
    proxy.dump_report("a")
    found = [np.load(p) for p in Path("a/tensors").glob("*forward-fc2-output.0*.npy")]
    assert len(found) == 1
    np.testing.assert_allclose(found[0], forward_of_tanh_mlp(kit, model, x), atol=1e-5)


def test_the_report_goes_on_until_it_is_cleared(kit):
    proxy = create_model(tanh_mlp(kit))
    counts = []
    for _ in range(3):
        train(kit, proxy, data(5, 4))
        proxy.dump_report("a")
        counts.append(len(sites("a")["forward"]))
    proxy.clear_report()
    train(kit, proxy, data(5, 4))
    proxy.dump_report("a")
    counts.append(len(sites("a")["forward"]))
    assert counts == [6, 12, 18, 6]


def test_a_dump_of_nothing_is_an_empty_dump_not_a_crash(kit):
    proxy = create_model(tanh_mlp(kit))
    proxy.dump_report("a")
    assert sites("a") == {}
    with pytest.raises(padiff.PadiffError, match="no quantity in common"):
        padiff.check_report("a", "a")


@pytest.mark.parametrize("per_step", [1, 2, 3])
def test_try_dump_dumps_once_it_was_called_per_step_times(kit, per_step):
    proxy = create_model(tanh_mlp(kit))
    done = []
    for _ in range(6):
        train(kit, proxy, data(5, 4))
        done.append(proxy.try_dump(per_step, "out"))
    assert done == [(k + 1) % per_step == 0 for k in range(6)]
    # The report is cleared each time: the dump is of one step.
    assert len(sites("out")["forward"]) == 6
    assert Path("out/params.json").exists()


def test_try_dump_takes_a_path_alone_and_by_name(kit):
    proxy = create_model(tanh_mlp(kit))
    train(kit, proxy, data(5, 4))
    assert proxy.try_dump("first")
    train(kit, proxy, data(5, 4))
    assert proxy.try_dump(per_step=1, dir_path=Path("second"))
    assert Path("first/report.json").exists()
    assert Path("second/params.json").exists()


def test_the_default_folders_have_step_and_rank(kit, tmp_path):
    proxy = create_model(tanh_mlp(kit), name="Simple")
    for _ in range(3):
        train(kit, proxy, data(5, 4))
        proxy.try_dump()
    root = tmp_path / "dumps" / "Simple"
    assert Path(proxy.dump_path) == root
    assert sorted(p.relative_to(root).as_posix() for p in root.glob("*/*")) == [f"step_{k}/rank_0" for k in range(3)]


def test_dump_freq_says_every_how_many_steps(kit):
    proxy = create_model(tanh_mlp(kit), dump_freq=3)
    done = []
    for _ in range(7):
        train(kit, proxy, data(5, 4))
        done.append(proxy.try_dump())
    assert done == [True, False, False, True, False, False, True]
    assert sorted(p.name for p in Path(proxy.dump_path).iterdir()) == ["step_0", "step_3", "step_6"]


def test_dump_path_may_be_set(kit, tmp_path):
    proxy = create_model(tanh_mlp(kit))
    proxy.dump_path = str(tmp_path / "elsewhere")
    train(kit, proxy, data(5, 4))
    proxy.try_dump()
    assert (tmp_path / "elsewhere" / "step_0" / "rank_0" / "report.json").exists()


def test_the_root_of_the_dumps_may_be_set(kit, tmp_path):
    padiff.set_dump_root_path(tmp_path / "root")
    assert padiff.get_dump_root_path() == str(tmp_path / "root")
    assert create_model(tanh_mlp(kit), "Simple").dump_path == str(tmp_path / "root" / "Simple")


def test_a_foreign_file_in_the_folder_survives_and_dumping_twice_replaces(kit):
    proxy = create_model(tanh_mlp(kit))
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    for scale in (1, 2):
        train(kit, proxy, data(5, 4) * scale)
        proxy.dump_report("out")
        proxy.dump_params("out")
        proxy.clear_report()
    assert Path("out/notes.txt").read_text() == "mine"
    files = list(Path("out/tensors").glob("*input*x*.npy"))
    assert len(files) == 1
    np.testing.assert_array_equal(np.load(files[0]), data(5, 4) * 2)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_wrong_number_of_steps_is_reported(kit, value):
    proxy = create_model(tanh_mlp(kit))
    with pytest.raises(UsageError, match="per_step has to be a whole number of at least 1"):
        proxy.try_dump(value)
    with pytest.raises(UsageError, match="dump_freq has to be a whole number of at least 1"):
        create_model(tanh_mlp(kit), dump_freq=value)
