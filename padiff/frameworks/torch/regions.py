"""Regions of code that `torch.compile` has compiled, run again eagerly on their own inputs.

A region is a graph that dynamo gives to its compiler. The graph is copied as it is compiled, and the compiled function
gets a wrapper that passes its calls on. Dynamo neither traces the wrapper nor guards on it, so graphs, graph breaks and
the number of compilations stay as they are. In a recorded step the wrapper copies a region's inputs and outputs; at the
end of the step the copied graph is run eagerly on these inputs, in its own dtype and in float64. Only if the compiled
code is further from float64 than rounding explains, parts of the graph are compiled by the same compiler, to find the
first operation that differs.
"""

from __future__ import annotations

import re
import sys
import time
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from padiff.frameworks.hooking import Handle
from padiff.frameworks.torch.calls import aside, building, original
from padiff.frameworks.torch.environment import restore, stamp, state
from padiff.frameworks.torch.tensors import transforming
from padiff.records import ROOT
from padiff.records.traces import DRAWS, MOST, Region, RegionOperation, RegionTensor
from padiff.system.frames import Frame, is_users, short_path
from padiff.system.guard import Guard

# Largest size of the copies of a step's inputs and outputs, in bytes. Chosen.
_ROOM = 1 << 30
# Share of a device's free memory that these copies may take there, as a divisor.
_SHARE = 8
# Compiled code may be as many times as far from float64 as eager code: kernels add in another order. Chosen.
_TIMES = 10.0
# Units in the last place that any result may be off: a fused kernel rounds at other places. Chosen.
_UNITS = 8.0
# Seconds of the search for an operation; each trial compiles a part of the graph. Chosen.
_SECONDS = 120.0
_CALLS = ("call_function", "call_method", "call_module")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STACK_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)')
_ROOT = re.compile(r"^L\['\w+'\]\.?")


@dataclass(eq=False)
class _Graph:
    """A graph that was compiled.

    Attributes:
        module: copy of the graph, as it was before the compiler got it.
        compile: the compiler: ``compile(graph_module, inputs)`` returns a function.
        kernels: names of the kernels that the compiler made.
        compiled: the function that the compiler made.
        has_fallback: True if Inductor was told to draw random numbers as eager code does.
    """

    module: torch.fx.GraphModule
    compile: Callable[..., Any]
    kernels: tuple[str, ...]
    compiled: Callable[..., Any]
    has_fallback: bool = False

    @property
    def compiler(self) -> str:
        compiler: Any = self.compile
        for _ in range(4):
            inner = getattr(compiler, "_compiler_fn", None) or getattr(compiler, "compiler_name", None)
            if inner is None or inner is compiler:
                break
            compiler = inner
        return compiler if isinstance(compiler, str) else str(getattr(compiler, "__name__", type(compiler).__name__))


@dataclass(eq=False)
class _Entry:
    """A region's first call in a step, and the number of its calls.

    Attributes:
        inputs: copies of the inputs; values that are no tensors as they are.
        outputs: copies of the outputs.
        gradients: gradients of the outputs, by their numbers.
        autocast: the state of autocast, by device.
        tensors: number of the inputs that are tensors.
        inside: path of the layer whose call was running.
        random: states of the generators before the call.
        drawn: stamp of these states after the call.
        note: why the region can't be run again; else empty.
    """

    graph: _Graph
    number: int
    calls: int = 1
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: dict[int, Any] = field(default_factory=dict)
    autocast: dict[str, tuple[bool, Any]] = field(default_factory=dict)
    tensors: int = 0
    inside: str = ""
    random: Mapping[str, Any] = field(default_factory=dict)
    drawn: Hashable = None
    note: str = ""


#: The recorder of the step that is recorded now.
_recorder: weakref.ref[Regions] | None = None


def on_compilations() -> Handle | None:
    """Copy each graph that is compiled from now on; `None` if nothing was ever compiled in this process."""
    # Not imported here: the import takes seconds, and is needed only if something is compiled.
    output_graph = sys.modules.get("torch._dynamo.output_graph")
    method = None if output_graph is None else vars(output_graph.OutputGraph).get("call_user_compiler")
    if output_graph is None or method is None:
        return None
    if isinstance(method, _Compiling):
        method.users += 1
        return _Users(method)
    compiling = _Compiling(output_graph.OutputGraph, method)
    output_graph.OutputGraph.call_user_compiler = compiling
    return _Users(compiling)


class _Compiling:
    """The method of dynamo that calls the compiler, in the place of the original one.

    Attributes:
        users: number of recorders that need it.
    """

    def __init__(self, owner: type, method: Callable[..., Any]) -> None:
        self._owner, self._method, self.users = owner, method, 1

    def __get__(self, graph: Any, owner: type | None = None) -> Any:
        return self if graph is None else lambda *args, **kwargs: self._compile(graph, *args, **kwargs)

    def _compile(self, output: Any, gm: Any, *args: Any, **kwargs: Any) -> Any:
        copy, before = None, _kernel_modules()
        try:
            copy = _copy_of(gm)
        except Exception:
            copy = None  # the compilation goes on, and the region is not recorded
        compiled = self._method(output, gm, *args, **kwargs)
        # A package of compiled code holds the functions themselves, without a wrapper.
        if copy is None or getattr(output, "package", None) is not None or getattr(output, "export", False):
            return compiled
        return _Wrapped(_Graph(copy, output.compiler_fn, _kernels(before), compiled, _has_fallback())).call

    def remove(self) -> None:
        if vars(self._owner).get("call_user_compiler") is self:
            self._owner.call_user_compiler = self._method  # type: ignore[attr-defined]


class _Users:
    """Handle of one recorder on `_Compiling`."""

    def __init__(self, compiling: _Compiling) -> None:
        self._compiling: _Compiling | None = compiling

    def remove(self) -> None:
        compiling, self._compiling = self._compiling, None
        if compiling is not None:
            compiling.users -= 1
            if not compiling.users:
                compiling.remove()


def _free(device: torch.device) -> int:
    """Return the free memory of a device in bytes; as much as may be needed where it is not known."""
    with suppress(Exception):
        if device.type == "cuda":
            return int(torch.cuda.mem_get_info(device)[0])
    return _ROOM * _SHARE


def _copy_of(gm: Any) -> torch.fx.GraphModule:
    """Return a copy of a graph, as compilers change the graph that they get."""
    graph = torch.fx.Graph()
    output = graph.graph_copy(gm.graph, {})
    graph.output(output)
    return torch.fx.GraphModule(gm, graph)


def _has_fallback() -> bool:
    return bool(getattr(sys.modules.get("torch._inductor.config"), "fallback_random", False))


def _kernel_modules() -> int:
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    return len(getattr(cache, "modules", ()))


def _kernels(before: int) -> tuple[str, ...]:
    """Return the names of the kernels in the modules that Inductor has written since."""
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    names = [
        name
        for module in getattr(cache, "modules", ())[before:]
        for name in vars(module)
        if name.startswith(("cpp_fused", "triton_"))
    ]
    return tuple(dict.fromkeys(names))[:MOST]


class _Wrapped:
    """A compiled function that passes its calls to the recorder of the step, if a step is recorded."""

    __slots__ = ("_graph",)

    def __init__(self, graph: _Graph) -> None:
        self._graph = graph

    def call(self, *args: Any, **kwargs: Any) -> Any:
        recorder = None if _recorder is None else _recorder()
        if recorder is None or kwargs:
            return self._graph.compiled(*args, **kwargs)
        entry = recorder.before(self._graph, args)
        outputs = self._graph.compiled(*args)
        if entry is not None:
            recorder.after(entry, outputs)
        return outputs


class Regions:
    """Recorder of the compiled regions that a step calls.

    Args:
        paths: path of each layer, by the identity of the module.
        inside: returns the path of the layer whose call is running; empty outside of the model.
        guard: stops errors of the recording.
    """

    def __init__(self, paths: Mapping[int, str], inside: Callable[[], str], guard: Guard) -> None:
        self._paths, self._inside, self._guard = paths, inside, guard
        self._entries: dict[_Graph, _Entry] = {}
        self._room = _ROOM
        self.listen()

    def listen(self) -> None:
        """Record the regions that are called from now on."""
        global _recorder
        _recorder = weakref.ref(self)

    def remove(self) -> None:
        """Stop recording."""
        global _recorder
        if _recorder is not None and _recorder() is self:
            _recorder = None

    # -- in the step ----------------------------------------------------------------------------------------

    def before(self, graph: _Graph, args: Sequence[Any]) -> _Entry | None:
        """Copy the inputs of a region's first call; `None` for its further calls."""
        if self._guard.tripped or transforming() or building() or torch._C._current_graph_task_id() != -1:
            return None
        return self._guard.attempt(self._before, graph, args)

    def _before(self, graph: _Graph, args: Sequence[Any]) -> _Entry | None:
        known = self._entries.get(graph)
        if known is not None:
            known.calls += 1
            return None
        entry = self._entries[graph] = _Entry(graph, len(self._entries), inside=self._inside())
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        entry.tensors = len(tensors)
        if any(True for _ in graph.module.parameters()):
            # Older torch: the optimizer changes them before the region is run again.
            entry.note = "its parameters are no inputs of its graph"
        elif any(type(each) not in _PLAIN and type(each).__name__ != "Buffer" for each in tensors):
            entry.note = "its inputs are of a class of their own"
        elif any(each.device.type == "meta" for each in tensors):
            entry.note = "its inputs have no values"
        else:
            size = sum(each.numel() * each.element_size() for each in tensors)
            if size > min([self._room, *(_free(each.device) // _SHARE for each in tensors[:1])]):
                entry.note = f"its inputs take {size / 1e6:,.0f} MB"
            else:
                self._room -= size
                with aside(), torch.no_grad():
                    entry.inputs = [
                        _clone(each).requires_grad_(each.requires_grad) if isinstance(each, torch.Tensor) else each
                        for each in args
                    ]
                for device in {each.device.type for each in tensors} or {"cpu"}:
                    entry.autocast[device] = _autocast(device)
                entry.random = state()
        return entry

    def after(self, entry: _Entry, outputs: Any) -> None:
        """Copy the outputs of a region, and wait for their gradients."""
        self._guard.attempt(self._after, entry, outputs)

    def _after(self, entry: _Entry, outputs: Any) -> None:
        if entry.note:
            return
        entry.drawn = stamp()
        flat = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        with aside(), torch.no_grad():
            entry.outputs = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in flat]
        for number, each in enumerate(flat):
            if isinstance(each, torch.Tensor) and each.requires_grad and not each.is_leaf:
                each.register_hook(_KeepGradient(entry, number))

    # -- at its end -----------------------------------------------------------------------------------------

    def rerun(self) -> tuple[Region, ...]:
        """Run each region again eagerly, and return what was found. The training's state stays as it is."""
        entries, self._entries = [*self._entries.values()], {}
        self.remove()
        regions: list[Region] = []
        for entry in entries:
            results = self._guard.attempt(self._measured, entry)
            if results is not None:
                regions.append(results)
            entry.inputs, entry.outputs, entry.gradients = [], [], {}
        return tuple(regions)

    def _measured(self, entry: _Entry) -> Region:
        nodes = [node for node in entry.graph.module.graph.nodes if node.op in _CALLS]
        layers = dict.fromkeys(path for node in nodes if (path := self._layer(node, entry)) is not None)
        frames = (_frame(node) for node in nodes)
        region = Region(
            entry.number,
            entry.calls,
            entry.graph.compiler,
            tuple(layers)[:MOST],
            tuple(_name(node) for node in nodes)[:MOST],
            entry.graph.kernels,
            next((frame for frame in frames if frame is not None), None),
            entry.tensors,
            note=entry.note,
        )
        if entry.note:
            return region
        try:
            with _unchanged_random_numbers(), aside(), _in_autocast(entry.autocast):
                trial = _Trial(entry)
                if trial.draws_otherwise:
                    return replace(region, note=DRAWS)
                outputs = trial.outputs()
                gradients: tuple[RegionTensor, ...] = ()
                note = ""
                try:
                    gradients = trial.gradients()
                except Exception as error:
                    note = _line(error)
                wrong = None
                if any(not each.passed for each in (*outputs, *gradients)):
                    with suppress(Exception), _fallback(entry.graph):  # a compiler may refuse a part
                        wrong = self._search(entry, trial.drawing, backward=all(each.passed for each in outputs))
            return replace(region, outputs=outputs, gradients=gradients, wrong=wrong, note=note)
        except Exception as error:
            return replace(region, note=_line(error))

    def _search(self, entry: _Entry, drawing: Container[str], backward: bool) -> RegionOperation | None:
        """Return the first operation that the compiler computes otherwise, by compiling parts of the graph.

        Each part begins at the region's inputs. The border is found by halving, among the operations that lead to one
        that differs, until all that lead to it directly agree.

        Raises:
            TimeoutError: it takes too long.
        """
        module = entry.graph.module
        if any(not isinstance(each, torch.Tensor) for each in entry.inputs):
            return None  # sizes that are inputs need symbols that only a whole compilation has
        ends = _tensor_nodes(module, entry.inputs)
        began = time.monotonic()
        errors: dict[torch.fx.Node, tuple[float, float, float]] = {}

        def fails(node: torch.fx.Node) -> bool:
            if node not in errors:
                if time.monotonic() - began > _SECONDS:
                    raise TimeoutError
                errors[node] = _part_error(entry, drawing, node, backward)
            return errors[node][0] > errors[node][2]

        if not ends or not fails(ends[-1]):
            return None
        node: torch.fx.Node | None = ends[-1]
        wrong = ends[-1]
        while node is not None:
            # Of operations that lead to a wrong one; another branch in between may agree.
            wrong, before = node, _ancestors(node)
            line = [each for each in ends if each in before]
            low, high = -1, len(line)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fails(line[middle]) else (middle, high)
            node = (
                line[high]
                if high < len(line)
                else next((n for n in reversed(line) if n in wrong.all_input_nodes and fails(n)), None)
            )
        node = wrong
        return RegionOperation(_name(node), self._layer(node, entry) or "", _frame(node), *errors[node][:2])

    def _layer(self, node: torch.fx.Node, entry: _Entry) -> str | None:
        """Return the path of the layer whose code calls an operation; `None` if no layer's code does."""
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return "" if entry.inside == ROOT else entry.inside or None  # the code of the compiled layer itself
        key, (path, _) = [*stack.items()][-1]
        known = self._paths.get(int(key)) if str(key).isdigit() else None
        return known if known is not None else _ROOT.sub("", str(path))


class _KeepGradient:
    """Hook that keeps the gradient of a region's output."""

    __slots__ = ("_entry", "_number")

    def __init__(self, entry: _Entry, number: int) -> None:
        self._entry, self._number = entry, number

    def __call__(self, gradient: Any) -> None:
        entry = self._entry
        if entry.inputs and self._number not in entry.gradients and type(gradient) in _PLAIN:
            entry.gradients[self._number] = gradient.detach().clone()


class _Trial:
    """A region computed again: eagerly and in float64, for its gradients also by the compiled code.

    Attributes:
        drawing: names of the operations that draw random numbers.
        draws_otherwise: True if the compiled code has drawn other random numbers than eager code.
    """

    def __init__(self, entry: _Entry) -> None:
        self._entry = entry
        restore(entry.random)
        before = stamp()
        self._eager = _run(entry.graph.module, entry.inputs)
        after = stamp()
        graph = entry.graph
        self.draws_otherwise = after != before and (
            after != entry.drawn or (graph.compiler == "inductor" and not graph.has_fallback)
        )
        self.drawing = _drawing(graph.module, entry.inputs) if after != before else frozenset[str]()
        restore(entry.random)
        self._wide = None if self.draws_otherwise else _in_float64(graph.module, entry.inputs, self.drawing)

    def outputs(self) -> tuple[RegionTensor, ...]:
        """Return the measured outputs."""
        return tuple(_measured_tensors("output", self._entry.outputs, self._eager, self._wide))

    def gradients(self) -> tuple[RegionTensor, ...]:
        """Return the measured gradients of the inputs, with the recorded gradients of the outputs."""
        entry = self._entry
        if not entry.gradients:
            return ()
        graph, inputs = entry.graph, entry.inputs
        if "torch._inductor.cudagraph_trees" in sys.modules:
            raise RuntimeError("CUDA graphs may not be run in between")
        names = [node.name for node in graph.module.graph.nodes if node.op == "placeholder"]
        restore(entry.random)
        kept = [(names[k], each) for k, each in enumerate(_backward(graph.compiled, inputs, entry.gradients))]
        restore(entry.random)
        eager = _backward(graph.module, inputs, entry.gradients)
        restore(entry.random)
        wide = _wide_backward(graph.module, inputs, entry.gradients, self.drawing)
        return tuple(_measured_tensors("gradient", [each for _, each in kept], eager, wide, [n for n, _ in kept]))


def _part_error(
    entry: _Entry, drawing: Container[str], end: torch.fx.Node, backward: bool
) -> tuple[float, float, float]:
    """Return the error of the compiled code up to an operation, that of the eager code, and the limit."""
    graph, inputs = entry.graph, entry.inputs
    part = _part(graph.module, end)
    compiled = graph.compile(_copy_of(part), _leaves(inputs))

    def again(run: Callable[..., Any], *args: Any) -> Any:
        restore(entry.random)
        return run(*args)

    eager = again(_run, part, inputs)
    if not backward:
        wide = again(_in_float64, part, inputs, drawing)
        measured = [*_measured_tensors("output", _flat(again(compiled, *_leaves(inputs))), eager, wide)]
    else:
        generator = torch.Generator().manual_seed(0)
        weights = {
            k: torch.randn(each.shape, generator=generator).to(each) for k, each in enumerate(eager) if _is_float(each)
        }
        ours, own = (again(_backward, code, inputs, weights) for code in (compiled, part))
        wide = again(_wide_backward, part, inputs, weights, drawing)
        measured = [*_measured_tensors("gradient", ours, own, wide)]
    worst = max(measured, key=lambda each: each.error / each.limit, default=None)
    return (0.0, 0.0, 1.0) if worst is None else (worst.error, worst.eager, worst.limit)


def _part(module: torch.fx.GraphModule, end: torch.fx.Node) -> torch.fx.GraphModule:
    """Return the graph up to an operation, whose output is the only one."""
    graph, copies = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    for node in module.graph.nodes:
        if node.op == "output":
            break
        copies[node] = graph.node_copy(node, lambda each: copies[each])
        if node is end:
            break
    # All inputs stay, so that they are given as to the whole graph.
    for node in module.graph.nodes:
        if node.op == "placeholder" and node not in copies:
            copies[node] = graph.node_copy(node, lambda each: copies[each])
    graph.output((copies[end],))
    graph.eliminate_dead_code()
    return torch.fx.GraphModule(module, graph)


def _tensor_nodes(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[torch.fx.Node]:
    """Return the operations whose result is a tensor of floating-point numbers, in order."""
    interpreter = _Interpreter(module)
    with torch.no_grad():
        interpreter.run(*_leaves(inputs))
    return interpreter.nodes


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the operations that a result depends on."""
    ancestors, queue = set[torch.fx.Node](), [node]
    while queue:
        for each in queue.pop().all_input_nodes:
            if each not in ancestors:
                ancestors.add(each)
                queue.append(each)
    return ancestors


class _Interpreter(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.nodes: list[torch.fx.Node] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in _CALLS and isinstance(result, torch.Tensor) and result.is_floating_point():
            self.nodes.append(n)
        return result


def _drawing(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> frozenset[str]:
    """Return the names of the operations that draw random numbers."""
    interpreter = _Drawing(module)
    with torch.no_grad():
        interpreter.run(*_leaves(inputs))
    return frozenset(interpreter.names)


class _Drawing(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.names: list[str] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        before = stamp()
        result = super().run_node(n)
        if stamp() != before:
            self.names.append(n.name)
        return result


class _Wide(torch.fx.Interpreter):
    """A graph in float64, but for operations that draw random numbers: these draw as in float32."""

    def __init__(self, module: torch.fx.GraphModule, drawing: Container[str]) -> None:
        super().__init__(module)
        self._drawing = drawing

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.name not in self._drawing:
            return super().run_node(n)
        if str(n.target).endswith("_"):
            raise ValueError(f"{n.target} writes into its input")
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        low = torch.fx.node.map_aggregate((args, kwargs), lambda each: each.float() if _is_float(each) else each)
        result = getattr(self, n.op)(n.target, *low)
        return torch.fx.node.map_aggregate(result, lambda each: each.double() if _is_float(each) else each)


# -- runs ----------------------------------------------------------------------------------------------------


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, as compiled code relies on these."""
    if tensor.is_contiguous() or not tensor.numel() or tensor.layout != torch.strided:
        return tensor.detach().clone()
    extent = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
    flat = tensor.detach().as_strided((extent,), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride()).detach()


def _leaves(inputs: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Return copies of inputs that are leaves of a graph of their own."""

    def leaf(each: Any) -> Any:
        if not isinstance(each, torch.Tensor):
            return each
        copy = _clone(each)
        return (copy.to(dtype) if dtype and _is_float(copy) else copy).requires_grad_(each.requires_grad)

    return [leaf(each) for each in inputs]


def _flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _run(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    with torch.no_grad():
        return _flat(function(*_leaves(inputs)))


def _in_float64(module: torch.fx.GraphModule, inputs: Sequence[Any], drawing: Container[str]) -> list[Any] | None:
    """Return the outputs in float64; `None` if the graph can't compute in it."""
    try:
        with torch.no_grad():
            return _flat(_Wide(_wide_module(module), drawing).run(*_leaves(inputs, torch.float64)))
    except Exception:
        return None


def _wide_module(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a graph whose own tensors and casts are in float64."""
    wide = _copy_of(module)
    low = {torch.float32, torch.float16, torch.bfloat16}
    for node in wide.graph.nodes:
        if node.op in _CALLS:
            node.args = torch.fx.node.map_aggregate(node.args, lambda each: torch.float64 if each in low else each)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, lambda each: torch.float64 if each in low else each)
            if node.op == "call_method" and node.target in ("float", "half", "bfloat16"):
                node.target = "double"
    wide.recompile()
    if any(True for _ in wide.parameters()) or any(True for _ in wide.buffers()):
        wide = deepcopy(wide).double()
    return wide


def _backward(function: Callable[..., Any], inputs: Sequence[Any], gradients: Mapping[int, Any]) -> list[Any]:
    """Return the gradient of each input, `None` where it has none."""
    with torch.enable_grad():
        leaves = _leaves(inputs)
        return _gradients(_flat(function(*leaves)), leaves, gradients)


def _wide_backward(
    module: torch.fx.GraphModule, inputs: Sequence[Any], gradients: Mapping[int, Any], drawing: Container[str]
) -> list[Any] | None:
    try:
        with torch.enable_grad():
            leaves = _leaves(inputs, torch.float64)
            return _gradients(_flat(_Wide(_wide_module(module), drawing).run(*leaves)), leaves, gradients)
    except Exception:
        return None


def _gradients(outputs: list[Any], leaves: list[Any], gradients: Mapping[int, Any]) -> list[Any]:
    wanted = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
    pairs = [
        (outputs[k], gradient.to(outputs[k].dtype)) for k, gradient in gradients.items() if outputs[k].requires_grad
    ]
    if not wanted or not pairs:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return [next(found) if isinstance(each, torch.Tensor) and each.requires_grad else None for each in leaves]


# -- figures -------------------------------------------------------------------------------------------------


def _measured_tensors(
    kind: str,
    compiled: Sequence[Any],
    eager: Sequence[Any],
    wide: Sequence[Any] | None,
    names: Sequence[str] | None = None,
) -> Iterator[RegionTensor]:
    for number, each in enumerate(compiled):
        if not _is_float(each) or not _is_float(eager[number]):
            continue
        ours, own = _array(each), _array(eager[number])
        exact = own if wide is None or wide[number] is None else _array(wide[number])
        norm = float(np.linalg.norm(exact))
        errors = [float(np.linalg.norm(side - exact)) / (norm or 1.0) for side in (ours, own)]
        if np.array_equal(np.isnan(ours), np.isnan(own)) and np.isnan(own).any():
            errors = [0.0, 0.0]  # both sides have the same NaN
        elif not np.isfinite(errors[0]):
            errors[0] = 0.0 if np.array_equal(ours, own) else float("inf")
        unit = torch.finfo(eager[number].dtype).eps
        limit = max(_TIMES * errors[1], _UNITS * unit)
        name = f"{kind}.{number}" if names is None else f"{kind} of {names[number]}"
        kind_of_number = str(each.dtype).removeprefix("torch.")
        yield RegionTensor(name, kind_of_number, tuple(each.shape), norm, errors[0], errors[1], limit)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.detach().to("cpu", torch.float64).numpy()).reshape(-1)


# -- state ---------------------------------------------------------------------------------------------------


@contextmanager
def _unchanged_random_numbers() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def _fallback(graph: _Graph) -> Iterator[None]:
    """Compile as the graph was compiled: Inductor draws as eager code does, if it was told to."""
    config: Any = sys.modules.get("torch._inductor.config")
    with config.patch(fallback_random=graph.has_fallback) if config is not None else nullcontext():
        yield


def _autocast(device: str) -> tuple[bool, Any]:
    try:
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)  # type: ignore[call-arg]
    except (TypeError, AttributeError, RuntimeError):  # torch 2.2, and devices without autocast
        if device == "cpu":
            return torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
        return torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()


@contextmanager
def _in_autocast(states: Mapping[str, tuple[bool, Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for device, (enabled, dtype) in states.items():
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


# -- names ---------------------------------------------------------------------------------------------------


def _name(node: torch.fx.Node) -> str:
    """Return the name of an operation as people call it."""
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target))


def _frame(node: torch.fx.Node) -> Frame | None:
    """Return the user's line that calls an operation; else the innermost line that is not the framework's."""
    lines = [
        Frame(file, int(line), function, code.strip())
        for file, line, function, code in _STACK_LINE.findall(str(node.meta.get("stack_trace") or ""))
    ]
    users = [line for line in lines if is_users(line.file)] or lines[-1:]
    return users[-1]._replace(file=short_path(users[-1].file)) if users else None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def on_regions(layers: Iterable[tuple[str, Any]], inside: Callable[[], str], guard: Guard) -> Regions:
    paths = {id(original(module)): "" if path == ROOT else path for path, module in layers}
    return Regions(paths, inside, guard)
