"""Recording leaves no trace in what the user saves, copies, exports or listens to."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from contextlib import ExitStack, nullcontext

import paddle
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import padiff

WAYS = {
    "auto": {},
    "sketch without an optimizer": {"detail": "sketch", "optimizer": None},
    "full with packs": {"detail": "full", "replay_every_n_steps": 1},
    "functions": {"functions": True},
}
STEPS = 2


class Trainer:
    """What people keep a model and an optimizer in."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer


def recording(model, optimizer, way, folder):
    if way is None:
        return nullcontext()
    return padiff.record(model, folder, existing="overwrite", **{"optimizer": optimizer, **WAYS[way]})


def size(value):
    """Pickled bytes; but for addresses, by which torch names storages."""
    try:
        return re.sub(rb"\d{12,}", b"", pickle.dumps(value))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        return type(error)


# -- saved and copied ------------------------------------------------------------------------------------------------


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.drop, self.second = torch.nn.Dropout(0.2), OwnState()
        self.first.register_forward_hook(keep_output)

    def forward(self, x):
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


class OwnState(torch.nn.Linear):
    """Of those that say themselves what is pickled of them."""

    def __init__(self):
        super().__init__(4, 2)

    def __getstate__(self):
        return vars(self).copy()


def keep_output(module, args, output):
    return None


def torch_saved(way, folder):
    torch.manual_seed(0)
    torch.utils.hooks.RemovableHandle.next_id = 0
    model = TorchNet()
    optimizer = torch.optim.Adam(model.parameters())
    seen = []
    with recording(model, optimizer, way, folder) as recorder:
        for _ in range(STEPS):
            optimizer.zero_grad()
            output = model(torch.randn(8, 4))
            torch.nn.functional.mse_loss(output, torch.zeros(8, 2)).backward()
            for value in (
                model,
                model.second,
                model.first.weight,
                model.state_dict(),
                optimizer,
                optimizer.state_dict(),
                {"model": model},
                Trainer(model, optimizer),
                output,
                copy.copy(model),
                copy.deepcopy(model),
                copy.deepcopy(model.first),
                copy.deepcopy(optimizer),
                copy.deepcopy({"model": model, "optimizer": optimizer}),
            ):
                file = io.BytesIO()
                torch.save(value, file)
                seen += [file.getvalue(), size(value)]
            twin = copy.deepcopy(model)
            seen.append([len(m._forward_hooks) + len(m._forward_pre_hooks) for m in twin.modules()])
            seen += [sorted(vars(layer)) for layer in model.modules()]
            seen += [sorted(vars(optimizer)), len(model._forward_hooks.values()), model._forward_hooks.copy()]
            copy.copy(model)(torch.randn(8, 4))  # shares its hooks with the model
            handle = model.first.weight.register_hook(lambda gradient: None)
            seen.append(handle.id)
            handle.remove()
            optimizer.step()
            if recorder is not None:
                recorder.try_dump()
    if way is not None:
        step = padiff.open_run(folder).steps(0)[0]
        assert [r.call for r in step.records if r.stage == "forward" and r.layer == "(root)"] == [0]
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_what_torch_saves_and_copies_is_the_same_to_the_byte(way, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "padiff:")
        assert torch_saved(way, tmp_path / "run") == torch_saved(None, None)


class PaddleNet(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.norm = paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4)
        self.drop, self.second = paddle.nn.Dropout(0.2), paddle.nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.drop(paddle.nn.functional.relu(self.norm(self.first(x)))))


class PaddleOptimizer(paddle.optimizer.AdamW):
    """Of those that can be copied: paddle's own hold what can't."""

    def __deepcopy__(self, memo):
        return sorted(vars(self))


def paddle_saved(way, folder):
    paddle.seed(0)
    paddle.nn.layer.layers.HookRemoveHelper.next_hook_id = 0
    seen = []
    with paddle.utils.unique_name.guard(), ExitStack() as stack:
        model, clip = PaddleNet(), paddle.nn.ClipGradByGlobalNorm(0.1)
        optimizer = PaddleOptimizer(0.01, parameters=model.parameters(), grad_clip=clip)
        recorder = stack.enter_context(recording(model, optimizer, way, folder))
        for _ in range(STEPS):
            paddle.nn.functional.mse_loss(model(paddle.randn([8, 4])), paddle.zeros([8, 2])).backward()
            for value in (model.state_dict(), optimizer.state_dict() or model.state_dict()):
                file = io.BytesIO()
                paddle.save(value, file)
                seen.append(file.getvalue())
            seen += [size(layer) for layer in model.sublayers(include_self=True)]
            seen += [size(optimizer), size(clip), size(copy.deepcopy(clip)), copy.deepcopy(optimizer)]
            twin = copy.deepcopy(model)
            layers = twin.sublayers(include_self=True)
            seen.append([len(layer._forward_pre_hooks) + len(layer._forward_post_hooks) for layer in layers])
            seen += [sorted(vars(layer)) for layer in model.sublayers(include_self=True)]
            handle = model.first.register_forward_post_hook(lambda *_: None)
            seen.append(handle._hook_id)
            handle.remove()
            optimizer.step()
            optimizer.clear_grad()
            if recorder is not None:
                recorder.try_dump()
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_what_paddle_saves_and_copies_is_the_same_to_the_byte(way, tmp_path):
    assert paddle_saved(way, tmp_path / "run") == paddle_saved(None, None)


# -- traced and exported ---------------------------------------------------------------------------------------------


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def exported(way, folder):
    torch.manual_seed(0)
    model, x = Plain(), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with recording(model, optimizer, way, folder) as recorder:
        for number in range(STEPS):
            model(x).sum().backward()
            if number:
                seen.append(str(torch.jit.script(model).graph))
                nodes = torch.jit.trace(model, x, check_trace=False).inlined_graph.nodes()
                seen.append([node.kind() for node in nodes])
                seen.append(torch.fx.symbolic_trace(model).code)
                seen.append(str(torch.export.export(model, (x,)).graph))
                with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    seen.append(tuple(model(mode.from_tensor(x)).shape))
            optimizer.step()
            optimizer.zero_grad()
            if recorder is not None:
                recorder.try_dump()
    if way is not None:
        steps = [padiff.open_run(folder).steps(number)[0] for number in range(STEPS)]
        first, second = ([record.site for record in step.records] for step in steps)
        assert first == second
        assert not any(step.notes for step in steps)
    return seen


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_model_can_be_exported_and_traced_while_it_is_recorded(way, tmp_path):
    assert exported(way, tmp_path / "run") == exported(None, None)


def test_what_a_model_is_compiled_and_reset_for_within_a_step_does_not_end_the_training():
    model, x = Plain(), torch.ones(2, 4)
    with padiff.record(model, functions=True) as recorder:
        model(x).sum().backward()
        torch.export.export(model, (x,), strict=True)
        torch._dynamo.reset()
        recorder.try_dump()
        model(x).sum().backward()
        recorder.try_dump()
    assert recorder.run.numbers() == [0, 1]


# -- listened to -----------------------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    """Notes the functions that are called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__qualname__", str(func)))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Noting(torch.Tensor):
    """Notes what is called with it."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(getattr(func, "__qualname__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def listened(mode, around_all, way, folder):
    """What a mode sees of a training: it is on around all of it, or within its steps."""
    torch.manual_seed(0)
    model = TorchNet()
    if mode is Noting:
        model.first.weight = torch.nn.Parameter(model.first.weight.detach().as_subclass(Noting))
    optimizer = torch.optim.Adam(model.parameters())
    Noting.seen.clear()
    listening = mode() if mode is not Noting else None
    outside, inside = (listening, None) if around_all else (None, listening)
    with outside or nullcontext(), recording(model, optimizer, way, folder) as recorder:
        for number in range(STEPS + 1):
            with inside or nullcontext():
                loss = torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 2))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if recorder is not None:
                if number:
                    recorder.log_loss(loss)
                recorder.try_dump()
    return (listening.seen if listening is not None else list(Noting.seen)), [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around_all", [False, True])
@pytest.mark.parametrize("mode", [Functions, Operators, Noting])
def test_modes_and_subclasses_of_the_users_see_nothing_of_padiffs(mode, around_all, way, tmp_path):
    assert listened(mode, around_all, way, tmp_path / "run") == listened(mode, around_all, None, None)


# -- switched --------------------------------------------------------------------------------------------------------


@pytest.fixture
def strict():
    """Switches of torch under which other code easily fails."""
    dtype = torch.get_default_dtype()
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True, check_nan=True):
        warnings.simplefilter("error")
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("cpu"), torch.autograd.graph.saved_tensors_hooks(pack_as_array, torch.from_numpy):
                yield
        finally:
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(False)


def pack_as_array(tensor):
    return tensor.detach().numpy().copy()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", WAYS)
def test_a_training_under_strict_switches_is_the_same(way, tmp_path, strict):
    def trained(way):
        torch.manual_seed(0)
        model = Plain()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        with recording(model, optimizer, way, tmp_path / "run") as recorder:
            for _ in range(STEPS):
                with torch.inference_mode():
                    model(torch.randn(2, 4))
                loss = model(torch.randn(2, 4)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if recorder is not None:
                    recorder.try_dump()
        return losses, torch.rand(3).tolist(), [p.tolist() for p in model.parameters()]

    assert trained(way) == trained(None)
