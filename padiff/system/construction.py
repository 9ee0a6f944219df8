"""The lines of the user's code that construct layers and optimizers, and make a training's calls, found by reading the
source.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

from padiff.system.frames import Frame, is_users, short_path, statement
from padiff.system.lazily import start_folder

# Limits of what is read: files, bytes of a file, characters of a line.
_MOST_FILES, _LARGEST, _LONGEST = 60, 400_000, 200
_FRAMEWORKS = {"torch", "paddle"}
# Most calls that give a value on as an argument. Chosen.
_DEEPEST = 3
# Called names of each role in a training; the role's line is known if there is one such call.
_ROLES = {
    "@clip": (
        "clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_gradients", "ClipGradByGlobalNorm",
        "ClipGradByNorm", "ClipGradByValue",
    ),
    "@zero_grad": ("zero_grad", "clear_grad", "clear_gradients"),
    "@backward": ("backward",),
    "@loader": ("DataLoader",),
    "@eval": ("eval",),
    "@train": ("train",),
}  # fmt: skip
# Arguments of a trainer that stand for a role.
_ARGUMENTS = {"@clip": {"gradient_clip_val", "max_grad_norm"}, "@loader": {"shuffle"}}
# End of the names of classes that hold all arguments of a trainer, and the roles that such a call has if no other call
# has them.
_TRAINER, _TRAINERS_ROLES = "TrainingArguments", ("optimizer.0", "@scheduler", "@clip")
# Methods and functions that write a weight, those that write an average, and the share of what is averaged.
_SURELY_AVERAGING = ("lerp_", "update_parameters")
_AVERAGING = ("add_", "copy_", "set_value", "assign", *_SURELY_AVERAGING)
_REMAINDER = re.compile(r"\b1(?:\.0)? - ")
# Parameters of a model among the arguments of an optimizer.
_PARAMETERS = re.compile(r"param|group", re.IGNORECASE)
# Classes of the frameworks that make the layers in them.
_MAKING = (
    "TransformerEncoderLayer", "TransformerDecoderLayer", "MultiheadAttention", "MultiHeadAttention", "LSTM", "GRU",
    "RNN", "SimpleRNN",
)  # fmt: skip
# Modules of schedulers.
_SCHEDULERS = ("torch.optim.lr_scheduler.", "paddle.optimizer.lr.")
# Modules of functions that initialize weights, and classes that hold a weight's first value.
_INITIALIZERS = ("torch.nn.init.", "torch.nn.Parameter", "torch.nn.parameter.Parameter", "paddle.nn.initializer.")
# The values of a weight, which a method or an assignment writes: `layer.bias.data.zero_()`, `p.data[2:4] = 1`.
_VALUES, _WRITING = re.compile(r"\.(?:data|weight|bias)(?:\[.*\])?"), re.compile(r"[a-z]\w*_|set_value|assign")
# Functions that compute a loss; classes end with the second name.
_LOSSES, _LOSS = (
    frozenset({
        "cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss",
        "smooth_l1_loss", "huber_loss", "nll_loss", "kl_div", "softmax_with_cross_entropy", "ctc_loss",
        "triplet_margin_loss", "cosine_embedding_loss", "margin_ranking_loss", "hinge_embedding_loss",
    }),
    "Loss",
)  # fmt: skip
# Most values of configs whose lines are given, and an object that has them.
_MOST_VALUES, _ARGS = 200, ast.Name("args")
# Most places of a key by which a table gives a layer's class.
_MOST_CHOICES = 4
_NO_NAMES: Mapping[str, Collection[str]] = {}
# Functions that make a dict or a config of their keyword arguments.
_DICTS = ("dict", "OrderedDict", "Namespace", "SimpleNamespace", "EasyDict", "AttrDict", "DictConfig")
# Functions that give on the numbers of their argument.
_CONVERSIONS = ("tuple", "list", "float", "int")
# Functions that give a field of a dataclass its default.
_FIELDS = ("field", "Field")
# Files of configs that the source or the command line names, and a line of one that defines a plain value or begins a
# section: in YAML, TOML or JSON, one value a line.
_CONFIG, _NAMED = re.compile(r"[^\n]+\.(?:ya?ml|json|toml)"), re.compile(r"""["']([^"']+\.(?:ya?ml|json|toml))["']""")
_QUOTED = re.compile(r"""["']([^"']+)["']""")
_ENTRY = re.compile(
    r"""(\s*)(?:- )?["']?([A-Za-z_]\w*)["']?\s*[:=]\s*"""
    r"""(["']?[A-Za-z_]+["']?|[-+]?[\d.][\w.+-]*|\[[-+\w., ]*\])\s*,?\s*(?:\#.*)?"""
)
_SECTION = re.compile(r"""(\s*)(?:\[(?P<table>[\w.]+)\]|["']?([A-Za-z_]\w*)["']?\s*:\s*\{?)\s*(?:\#.*)?""")
# Methods that add a child layer by name.
_ADDING = ("add_module", "register_module", "add_sublayer", "setattr")


class Built(NamedTuple):
    """A layer whose construction is searched for.

    Attributes:
        path: path of the layer.
        type: name of its class.
        package: package that defines the class, e.g. ``torch``.
        file: file that defines the class; empty if not known.
        bases: names of the class and of its base classes, the class first.
    """

    path: str
    type: str
    package: str
    file: str
    bases: tuple[str, ...]


@dataclass(eq=False)
class Source:
    """A parsed file: its calls by the last part of the called name, its functions and its classes by name. One that has
    not changed is the same object: what was found in it is kept for the next recording.
    """

    file: str
    #: The path that a run has.
    short: str
    lines: list[str]
    digest: str = ""
    tree: ast.AST = field(default_factory=ast.Pass)
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    #: By class and name of the attribute: the expressions that are assigned to ``self.name``.
    assigned: dict[tuple[str, str], list[ast.expr]] = field(default_factory=dict)
    #: By name in the file: the package that the name is imported from, and the whole name of its module or object.
    imports: dict[str, set[str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    #: By name: expressions that define plain values of that name, with the kind of the definition, and
    #: for an argument the called name.
    defined: dict[str, list[tuple[str, str, ast.expr]]] = field(default_factory=dict)
    #: By function (`None` for the module) and name: the expressions that are assigned to a variable, in order.
    variables: dict[tuple[ast.FunctionDef | None, str], list[ast.expr]] = field(default_factory=dict)
    #: The function around each call and each value of an attribute, and the name by which the function is called: of
    #: its class, if it is ``__init__``.
    scopes: dict[ast.expr, ast.FunctionDef] = field(default_factory=dict)
    names: dict[ast.FunctionDef, str] = field(default_factory=dict)
    #: The variable or attribute that a call is assigned to.
    targets: dict[ast.expr, str] = field(default_factory=dict)
    #: By name: the layers that a table or a list of pairs holds under this name.
    named: dict[str, list[ast.expr]] = field(default_factory=dict)
    #: The name or the key that a dict has.
    owners: dict[ast.expr, str] = field(default_factory=dict)
    #: The name or the key that the call has which a plain value is an argument of.
    sections: dict[ast.expr, str] = field(default_factory=dict)
    #: The names of classes and functions that have another one here: ``Norm = nn.LayerNorm``.
    aliases: dict[str, str] = field(default_factory=dict)
    #: Learning rates that code sets itself, in a group of parameters, and what it assigns to values of a weight.
    rates: list[ast.expr] = field(default_factory=list)
    written: list[ast.expr] = field(default_factory=list)

    def may_call(self, call: ast.Call, package: str) -> bool:
        """Return False if a call is known to be of another package."""
        node: ast.expr = call.func
        while isinstance(node, ast.Attribute):
            node = node.value
        packages = self.imports.get(node.id, set()) if isinstance(node, ast.Name) else set()
        return not packages or package in packages or not packages <= _FRAMEWORKS

    def name_of(self, call: ast.AST) -> str:
        """Return the last part of a called name, as it is where the object is defined; empty for no call of a name."""
        name = called_name(call)
        return self.aliases.get(name, name) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else name

    def full_name(self, call: ast.Call) -> str:
        """Return the called name with its modules, as far as imports tell."""
        parts: list[str] = []
        node: ast.expr = call.func
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        head = self.modules.get(node.id, node.id) if isinstance(node, ast.Name) else ""
        return ".".join([head, *reversed(parts)])

    def frame(self, node: ast.expr) -> Frame:
        """Return the line of a plain value; of another expression, with the next lines if it goes on there."""
        if is_plain(node):
            return self.frame_at(node.lineno)
        return Frame(self.short, node.lineno, "", statement(self.lines, node.lineno))

    def frame_at(self, line: int) -> Frame:
        """Return a line by its number."""
        return Frame(self.short, line, "", self.lines[line - 1].strip()[:_LONGEST])


# Code that may run several times.
_REPEATING = (ast.FunctionDef, ast.For, ast.ListComp, ast.DictComp, ast.GeneratorExp)


class _Found(NamedTuple):
    """An expression, and the call that runs the function around, where one of several is meant."""

    source: Source
    node: Any
    caller: _Found | None = None

    def frame(self) -> Frame:
        """Return the line of the call that runs the function around, or of the expression."""
        return self.source.frame(self.node) if self.caller is None else self.caller.frame()

    def is_repeated(self) -> bool:
        """Return True if an expression may run several times: in a function, a loop or a comprehension."""
        around = (node for node in ast.walk(self.source.tree) if isinstance(node, _REPEATING))
        return any(self.node in ast.walk(node) for node in around)

    def is_held(self, names: Collection[str]) -> bool:
        """Return True if a variable, an attribute or an entry of one of some names has the value."""
        assigned = (values for (_, name), values in self.source.variables.items() if name in names)
        return self.source.owners.get(self.node) in names or any(self.node in values for values in assigned)


def construction_lines(
    layers: Sequence[Built], optimizers: Mapping[str, type], names: Mapping[str, Collection[str]] = _NO_NAMES
) -> dict[str, Frame]:
    """Return the line that constructs each layer and optimizer, by path or key, as far as the source tells.

    A line is given only if the source leaves no choice: the assignment to an attribute of the class, the item of a list
    or a `Sequential`, the `return` of a helper function, or the only call of the class.

    Besides, the lines of the only call of a role: ``@clip``, ``@zero_grad``, ``@backward``, ``@step``, ``@scheduler``,
    ``@loader``, ``@eval``, ``@average``, and ``@buffer:name`` where a buffer is registered; ``@unstepped`` is the
    ``@zero_grad`` of an optimizer that never steps, ``@zeroed`` is a ``@zero_grad`` between
    ``@backward`` and ``@step``, ``@total`` is where the loss that is differentiated is assigned, and ``@loss:name``
    where a loss is made or computed. For arguments of these calls, ``file:line#argument#0`` is the line that holds the
    plain value: in the call itself, if it has several lines, or where the value is defined, e.g. in a config or as a
    parameter's default. ``self.name`` is the line of the plain value of an attribute that one class sets, or that one
    config has; ``optimizer.0.group.1.name`` is the line of an entry of a parameter group.

    Args:
        layers: the layers, the model itself first.
        optimizers: the class of each optimizer, by key.
        names: the variables and attributes that hold each optimizer, by key.
    """
    sources = users_sources(layers)
    kinds = tuple((key, kind.__name__, package_of(kind)) for key, kind in optimizers.items())
    held = tuple((key, frozenset(names.get(key, ()))) for key in optimizers)
    return dict(_lines(tuple(layers), (*sources, *_configs(sources)), kinds, held))


@lru_cache(maxsize=_MOST_FILES)
def _lines(
    layers: tuple[Built, ...],
    sources: tuple[Source, ...],
    optimizers: tuple[tuple[str, str, str], ...],
    held: tuple[tuple[str, frozenset[str]], ...],
) -> dict[str, Frame]:
    search, names = _Search(layers, sources), dict(held)
    built: dict[str, _Found] = {}
    for name, package in dict.fromkeys((name, package) for _, name, package in optimizers):
        keys = [key for key, *each in optimizers if each == [name, package]]
        calls = search.calls(name, package) or search.chosen_calls()
        by_name = {
            key: [each for each in calls if each.is_held(names[key])] or search.called_for(calls, names[key])
            for key in keys
        }
        if any(by_name.values()):
            built |= {key: only[0] for key, only in by_name.items() if len(only) == 1}
        elif len(calls) == len(keys) or (len(calls) == 1 and calls[0].is_repeated()):
            built |= dict(zip(keys, calls * len(keys)))
    entries = {f"{key}.group.{name}": value for key in built for name, value in search.groups(built[key])}
    built = search.roles(names, built) | built
    own = list(built)
    for layer in layers:
        found = search.expression(layer.path)
        if found is not None:
            built[layer.path] = found
    lines = {key: found.frame() for key, found in built.items()}
    values: dict[str, dict[Frame, None]] = {}
    # Layers that a loop makes have one call.
    for key, found in {found: (key, found) for key, found in reversed(built.items())}.values():
        frame = found.frame()
        whole = [("@call", found)] if found.caller is not None else []
        whole += search.parameters(found) if key.startswith("@scheduler") else []
        inside = search.definitions(found, deep=key in own)
        for argument, definition in [*whole, *inside, *search.class_arguments(key)]:
            value = definition.source.frame(definition.node)
            if value != frame:
                values.setdefault(f"{frame.file}:{frame.line}#{argument}", {})[value] = None
            for operand in [] if is_plain(definition.node) else search.operands(definition):
                head = f"{value.file}:{value.line}#{key_of(operand.node)}"
                for read in search.read_values(operand):
                    values.setdefault(head, {})[read.source.frame(read.node)] = None
    for key, found in entries.items():
        argument, frame = key.rpartition(".")[2], found.source.frame(found.node)
        for definition in [] if is_plain(found.node) else search.read_values(found):
            values.setdefault(f"{frame.file}:{frame.line}#{argument}", {})[definition.source.frame(definition.node)] = (
                None
            )
    named = {f"{key}#{number}": frame for key, frames in values.items() for number, frame in enumerate(frames)}
    # A run keeps the first lines, and layers are many: they come last.
    own_values = {f"self.{name}": found.source.frame(found.node) for name, found in search.attributes()}
    own_values = {key: found.source.frame(found.node) for key, found in entries.items()} | own_values
    first_frames = [*(lines[key] for key in own), *(each.source.frame(each.node) for each in entries.values())]
    heads = tuple(f"{frame.file}:{frame.line}#" for frame in first_frames)
    first = {key: frame for key, frame in lines.items() if key in own}
    named_first = {key: frame for key, frame in named.items() if key.startswith(heads)}
    named |= search.choices(built)
    return {**first, **named_first, **own_values, **search.returns(), **lines, **named}


def users_sources(layers: Sequence[Built]) -> tuple[Source, ...]:
    """Return the files of the user's code, parsed: at most 60."""
    return tuple(source for source in map(parsed, _files(layers)) if source is not None)


def source_digests(lines: Mapping[str, Frame]) -> dict[str, str]:
    """Return the SHA-256 of each file that lines of code are in, as it was read for them, by its short path."""
    files = {
        file: _read(os.path.join(start_folder(), file))
        for file in dict.fromkeys(frame.file for frame in lines.values())
    }
    return {file: source.digest for file, source in files.items() if source is not None}


def has_changed(file: str, digest: str) -> bool:
    """Return True if a file of a run's code is below the working directory, and is not as it was.

    Args:
        file: the short path that a run has, which is not trusted: nothing but the answer comes out of the file.
        digest: the file's SHA-256 in the run.
    """
    return _digest_here(file) not in ("", digest)


def is_here(file: str, digest: str) -> bool:
    """Return True if a file of a run's code is below the working directory, and is as it was.

    Args:
        file, digest: those of `has_changed`.
    """
    return bool(digest) and _digest_here(file) == digest


def _digest_here(file: str) -> str:
    """Return the SHA-256 of a Python file below the working directory; empty if there is none."""
    path = os.path.normpath(file)
    if os.path.isabs(path) or path.startswith("..") or not path.endswith(".py"):
        return ""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST:
            return ""
        with open(path, "rb") as opened:
            return _digest(opened.read())
    except (OSError, ValueError):
        return ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def loss_key(name: str) -> str:
    """Return the key of the line that makes or computes a loss, for a class or a function of any framework."""
    plain = name.replace("_", "").lower().removesuffix("loss").replace("withlogits", "").removeprefix("softmaxwith")
    return f"@loss:{'bce' if plain == 'binarycrossentropy' else plain}"


def buffer_key(name: str) -> str:
    """Return the key of the line that registers a buffer; the lines that compute the buffer have keys below it."""
    return f"@buffer:{name}"


def package_of(kind: type) -> str:
    """Return the name of the package that defines a class."""
    return kind.__module__.partition(".")[0]


class _Search:
    def __init__(self, layers: Sequence[Built], sources: Sequence[Source]) -> None:
        self._layers = {layer.path: layer for layer in layers}
        self._root = layers[0].path if layers else ""
        self._sources = sources
        self._known: dict[str, _Found | None] = {}
        self._mentions: dict[str, list[_Found]] | None = None
        self._computed: dict[str, list[_Found]] | None = None
        #: Names of the user's own functions and classes.
        self._own = {name for source in sources for name in (*source.functions, *source.classes)}

    def calls(self, name: str, package: str) -> list[_Found]:
        """Return the calls of a class of a package."""
        calls = [_Found(source, call) for source in self._sources for call in source.calls.get(name, ())]
        return [each for each in calls if each.source.may_call(each.node, package)]

    def chosen_calls(self) -> list[_Found]:
        """Return the calls with parameters of what a program chooses by a name: ``TABLE[name](net.parameters())``, or
        with `getattr`.
        """
        places = []
        for source in self._sources:
            for name, calls in source.calls.items():
                for call in calls:
                    scope = source.scopes.get(call)
                    values = source.variables.get((scope, name)) or source.variables.get((None, name), [])
                    called = values[0] if len(values) == 1 and isinstance(call.func, ast.Name) else call.func
                    is_chosen = isinstance(called, ast.Subscript) or called_name(called) in ("getattr", "get")
                    is_chosen |= bool(self._passed(called, _Found(source, call)))
                    if is_chosen and _PARAMETERS.search(ast.unparse(call)):
                        places.append(_Found(source, call))
        return places

    def callers(self, found: _Found) -> list[_Found]:
        """Return the calls of the user's function around an expression, or the one that is meant."""
        scope = found.source.scopes.get(found.node)
        name = "" if scope is None else found.source.names[scope]
        if found.caller is not None:
            return [found.caller]
        return [_Found(source, call) for source in self._sources for call in source.calls.get(name, ())]

    def called_for(self, calls: Sequence[_Found], names: Collection[str]) -> list[_Found]:
        """Return calls in a function, each with the call of that function whose result has one of some names."""
        return [
            each._replace(caller=caller) for each in calls for caller in self.callers(each) if caller.is_held(names)
        ]

    def roles(self, names: Mapping[str, Collection[str]], built: Mapping[str, _Found]) -> dict[str, _Found]:
        """Return the only call of each role, by the role's key, or of each role and optimizer: ``@step:optimizer.1``.

        Args:
            names: the names of variables that hold each optimizer, by key.
            built: the construction of each optimizer, by key.
        """
        optimizers = {name for each in names.values() for name in each}
        found: dict[str, list[_Found]] = {}
        for source in self._sources:
            for name, calls in source.calls.items():
                role = next((role for role, names in _ROLES.items() if name in names), "")
                if name in _LOSSES or (name.endswith(_LOSS) and name != _LOSS):
                    role = loss_key(name)
                for call in calls:
                    if role == "@train" and (isinstance(call.func, ast.Name) or self._is_method(name)):
                        continue  # a function or a trainer of the user's
                    given = set() if name in _DICTS else {keyword.arg for keyword in call.keywords}
                    by_argument = next((each for each, names in _ARGUMENTS.items() if given & names), "")
                    each = (
                        role or by_argument or ("@scheduler" if source.full_name(call).startswith(_SCHEDULERS) else "")
                    )
                    if name == "step" and ("optim" in ast.unparse(call) or self._mentions_any(call, optimizers)):
                        each = "@step"  # of the optimizer, or of a scaler with the optimizer
                    if source.full_name(call).startswith(_INITIALIZERS) or _writes(call):
                        each = each or "@init"
                    if name == "register_buffer" and call.args and isinstance(call.args[0], ast.Constant):
                        each = buffer_key(str(call.args[0].value))
                    if each:
                        found.setdefault(each, []).append(_Found(source, call))
        for source in self._sources:
            found.setdefault("@init", []).extend(_Found(source, value) for value in source.written)
        roles = {role: calls[0] for role, calls in found.items() if len(calls) == 1}
        several = [role for role in ("@init", "@zero_grad") if role == "@init" or role not in roles]
        roles |= {f"{role}:{k}": each for role in several for k, each in enumerate(found.get(role, ()))}
        for role in ("@zero_grad", "@step", "@scheduler"):
            for key, variables in names.items() if len(names) > 1 else ():
                of_key = self._of_optimizer(role, found.get(role, ()), variables, built.get(key))
                if len(of_key) == 1:
                    roles[f"{role}:{key}"] = of_key[0]
        roles |= self._unstepped(found)
        averages = {*self._averages()}
        if len(averages) == 1:
            roles["@average"] = averages.pop()
        rates = [_Found(source, rate) for source in self._sources for rate in source.rates]
        if "@scheduler" not in found and len(rates) == 1:
            roles["@scheduler"] = rates[0]
        schedule = roles.get("@scheduler")
        name = "" if schedule is None else schedule.source.targets.get(schedule.node, "")
        if schedule is not None and name:
            steps = [_Found(source, call) for source in self._sources for call in source.calls.get("step", ())]
            steps = [each for each in steps if self._mentions_any(each.node, {name})]
            if len(steps) == 1:
                roles["@scheduled"] = steps[0]
        intervals = [_Found(each, value) for each in self._sources for _, _, value in each.defined.get("interval", ())]
        if "@scheduled" not in roles and len(intervals) == 1:
            roles["@scheduled"] = intervals[0]  # of Lightning
        trainers = [
            _Found(source, call)
            for source in self._sources
            for name, calls in source.calls.items()
            if name.endswith(_TRAINER)
            for call in calls
        ]
        if len(trainers) == 1:
            roles |= {role: trainers[0] for role in _TRAINERS_ROLES if role not in found}
        total = roles.get("@backward")
        if total is not None and isinstance(total.node.func, ast.Attribute):
            # `loss.backward()`, `scaler.scale(loss).backward()` or `accelerator.backward(loss)`.
            loss = total.node.args[0] if total.node.args else total.node.func.value
            value = _last_value(total.source, loss, total.node)
            if value is not None:
                roles["@total"] = _Found(total.source, value)
        for key in ("", *(f":{name}" for name in names)):
            clearing, step = (roles.get(f"{role}{key}") for role in ("@zero_grad", "@step"))
            if clearing is not None and step is not None and _are_cleared(found.get("@backward", ()), clearing, step):
                roles[f"@zeroed{key}"] = clearing
        return roles

    def _unstepped(self, found: Mapping[str, Sequence[_Found]]) -> dict[str, _Found]:
        """Return where the only optimizer without a call of ``step()`` is cleared, and the backward after that."""
        owners = {
            each: key_of(each.node.func.value)
            for role in ("@zero_grad", "@step")
            for each in found.get(role, ())
            if isinstance(each.node.func, ast.Attribute)
        }
        stepped = {owners[each] for each in found.get("@step", ()) if each in owners}
        stepped |= {key_of(value) for each in found.get("@step", ()) for value in each.node.args}
        cleared = [each for each, owner in owners.items() if owner not in stepped and "opt" in owner.lower()]
        if len(cleared) != 1:
            return {}
        clearing, scope = cleared[0], cleared[0].source.scopes.get(cleared[0].node)
        passes = [each for each in found.get("@backward", ()) if each.source is clearing.source]
        passes = [each for each in passes if each.source.scopes.get(each.node) is scope]
        later = [each for each in passes if _end(each.node) > _end(clearing.node)]
        after = min(later or passes, key=lambda each: _end(each.node), default=clearing)
        return {"@unstepped": clearing, "@unstepped:after": after}

    def _averages(self) -> Iterator[_Found]:
        """Yield the calls by which a loop averages weights: of a function that does, or of the method that writes."""
        for source in self._sources:
            loops = {source.scopes.get(call) for call in source.calls.get("backward", ())}
            for name in _AVERAGING:
                for call in source.calls.get(name, ()):
                    if name in _SURELY_AVERAGING or _REMAINDER.search(ast.unparse(call)):
                        write, scope = _Found(source, call), source.scopes.get(call)
                        yield from [write] if scope is None or scope in loops else self.callers(write)

    def _of_optimizer(
        self, role: str, calls: Sequence[_Found], names: Collection[str], construction: _Found | None
    ) -> list[_Found]:
        """Return the calls of a role that are of one of several optimizers, by its names; a schedule may be made in the
        function that makes the optimizer, or that is given it.
        """
        calls_of_names = [each for each in calls if len(calls) > 1 and self._mentions_any(each.node, names)]
        if calls_of_names or role != "@scheduler":
            return calls_of_names
        maker = None if construction is None else construction.caller
        return [
            each._replace(caller=caller)
            for each in calls
            for caller in self.callers(each)
            if caller == maker or self._mentions_any(caller.node, names)
        ]

    def _mentions_any(self, call: ast.Call, names: Collection[str]) -> bool:
        """Return True if the object whose method a call is, or an argument, has one of some names."""
        owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        return not {*names}.isdisjoint(map(key_of, (*owner, *call.args, *(each.value for each in call.keywords))))

    def _is_method(self, name: str) -> bool:
        functions = [source.functions[name] for source in self._sources if name in source.functions]
        return any(each.args.args and each.args.args[0].arg == "self" for each in functions)

    def groups(self, optimizer: _Found) -> Iterator[tuple[str, _Found]]:
        """Yield the entries of an optimizer's parameter groups, as ``0.weight_decay``, if the source lists them."""
        call = optimizer.node
        named = [each.value for each in call.keywords if each.arg in ("params", "parameters")]
        for source, node, scope in self._lists(optimizer, next(iter([*named, *call.args]), None)):
            for number, group in enumerate(node.elts):
                if not isinstance(group, ast.Dict):
                    return
                for key, entry in zip(group.keys, group.values):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value != "params":
                        if scope is not None:
                            source.scopes[entry] = scope
                        yield f"{number}.{key.value}", _Found(source, entry)

    def _lists(self, found: _Found, value: ast.expr | None) -> list[tuple[Source, ast.List, ast.FunctionDef | None]]:
        """Return the list that an expression is, and the function around: written there, in a variable, or returned by
        a function.
        """
        scope = found.source.scopes.get(found.node)
        if isinstance(value, ast.List):
            return [(found.source, value, scope)]
        if isinstance(value, ast.Name):
            values = found.source.variables.get((scope, value.id)) or found.source.variables.get((None, value.id), [])
            return self._lists(found, values[0]) if len(values) == 1 and not isinstance(values[0], ast.Name) else []
        name = called_name(value) if value is not None else ""
        returned: list[tuple[Source, ast.List, ast.FunctionDef | None]] = [
            (source, node.value, source.functions[name])
            for source in self._sources
            if name in source.functions
            for node in ast.walk(source.functions[name])
            if isinstance(node, ast.Return) and isinstance(node.value, ast.List)
        ]
        return returned if len(returned) == 1 else []

    def attributes(self) -> Iterator[tuple[str, _Found]]:
        """Yield each attribute that one class alone sets to a plain value, and the expression of that value."""
        places: dict[str, list[_Found]] = {}
        for source in self._sources:
            for (_, name), values in source.assigned.items():
                places.setdefault(name, []).extend(_Found(source, value) for value in values)
        for name, (first, *others) in places.items():
            value = first if is_plain(first.node) else self._definition(first.node, first, set())
            if value is None and isinstance(first.node, ast.BinOp):
                value = first
            if value is not None and not others:
                yield name, value
        parameters: dict[str, list[tuple[Source, ast.FunctionDef]]] = {}
        for source in self._sources:
            for function in source.names:
                for each in (*function.args.args, *function.args.kwonlyargs):
                    parameters.setdefault(each.arg, []).append((source, function))
        for name, ((source, function), *rest) in list(parameters.items())[:_MOST_VALUES]:
            if not rest and name not in places:
                read = ast.Name(name)
                source.scopes[read] = function
                value = self._definition(read, _Found(source, read), set())
                if value is not None:
                    places[name] = [value]
                    yield name, value
        defined = dict.fromkeys(name for source in self._sources for name in source.defined if name not in places)
        for name in list(defined)[:_MOST_VALUES]:
            value = self._definition(ast.Attribute(_ARGS, name), _Found(self._sources[0], _ARGS), set())
            if value is not None and isinstance(getattr(value.node, "value", None), (int, float)):
                yield name, value

    def definitions(self, found: _Found, deep: bool) -> Iterator[tuple[str, _Found]]:
        """Yield the names of a call's arguments, with the expression of the plain value.

        Args:
            found: the call.
            deep: True to go on to the arguments of calls and the entries of dicts in its arguments.
        """
        if not isinstance(found.node, ast.Call):
            return
        arguments = [("", value) for value in found.node.args]
        parts = {*ast.walk(found.node)}
        for node in ast.walk(found.node) if deep else [found.node]:
            if isinstance(node, ast.Call):
                arguments += [(each.arg, each.value) for each in node.keywords if each.arg]
                for each in node.keywords:
                    if each.arg is None:
                        yield from self._spread(each.value, found)
            elif isinstance(node, ast.Dict):
                entries = zip(node.keys, node.values)
                arguments += [(str(key.value), value) for key, value in entries if isinstance(key, ast.Constant)]
        for argument, value in arguments:
            if is_plain(value):
                yield from [(argument, _Found(found.source, value))] if argument else []
                continue
            definition = self._definition(value, found, parts) or self._arithmetic(value, found)
            if definition is not None:
                yield argument or key_of(value), definition
                continue
            made = self._made(value, found) if argument and argument not in ("params", "parameters") else None
            if made is not None:
                yield argument, made
                continue
            for element, owner in self._elements(value, found):
                definition = self._definition(element, owner, {*ast.walk(owner.node)})
                if definition is not None:
                    yield key_of(element), definition

    def parameters(self, found: _Found) -> Iterator[tuple[str, _Found]]:
        """Yield the names of the parameters of the function around a call, with the expression of the plain value:
        functions inside may read it.
        """
        scope = found.source.scopes.get(found.node)
        for each in () if scope is None else (*scope.args.args, *scope.args.kwonlyargs):
            value = self._definition(ast.Name(each.arg), found, set())
            if value is not None:
                yield each.arg, value

    def choices(self, built: Mapping[str, _Found]) -> dict[str, Frame]:
        """Return the lines that have the key by which a table of classes gives a layer, as ``@choice:path#0``; the key
        stands in the place of the function's name.
        """
        keys: dict[ast.AST, tuple[ast.Constant, str]] = {}
        texts: dict[str, list[_Found]] = {}
        for source in self._sources:
            nodes = [*ast.walk(source.tree)]
            for table in (node for node in nodes if isinstance(node, ast.Dict)):
                for key, value in zip(table.keys, table.values):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str) and not is_plain(value):
                        keys |= dict.fromkeys(ast.walk(value), (key, key.value))
            nodes += [node for defined in source.defined.values() for kind, _, node in defined if kind == "config"]
            for node in nodes:
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.setdefault(node.value, []).append(_Found(source, node))
        frames = {}
        for path, layer in built.items():
            if path not in self._layers or layer.node not in keys:
                continue
            own, text = keys[layer.node]
            sites = [each for each in texts[text] if each.node is not own]
            for number, each in enumerate(sites[:_MOST_CHOICES]):
                frame = each.source.frame_at(each.node.lineno)
                frames[f"@choice:{path}#{number}"] = frame._replace(function=text)
        return frames

    def returns(self) -> dict[str, Frame]:
        """Return the line that gives the outputs of each of the user's layers, if there is one, by class."""
        frames = {}
        for layer in self._layers.values():
            for source in self._sources:
                of_class = source.classes.get(layer.type) if layer.package not in _FRAMEWORKS else None
                nodes = (
                    []
                    if of_class is None
                    else [each for each in of_class.body if getattr(each, "name", "") == "forward"]
                )
                ends = [node.value for each in nodes for node in ast.walk(each) if isinstance(node, ast.Return)]
                if len(ends) == 1 and ends[0] is not None:
                    frames[f"@return:{layer.type}"] = source.frame(ends[0])
        return frames

    def class_arguments(self, path: str) -> Iterator[tuple[str, _Found]]:
        """Yield the arguments that a layer's class, one of the user's, gives to the class it derives from, by name; and
        the class itself, if the construction has it as a value.
        """
        layer, constructed = self._layers.get(path), self._known.get(path)
        if (
            layer is not None
            and constructed is not None
            and constructed.source.name_of(constructed.node) not in ("", layer.type)
        ):
            yield from ((layer.type, each) for each in self.mentions(layer))
        file = "" if layer is None or path == self._root else os.path.abspath(layer.file)
        for source in self._sources:
            of_class = source.classes.get(layer.type) if layer is not None and source.file == file else None
            for call in [] if of_class is None else ast.walk(of_class):
                if isinstance(call, ast.Call) and called_name(call) == "__init__":
                    for argument, definition in self.definitions(_Found(source, call), deep=False):
                        yield argument, definition
                        yield argument, _Found(source, call)

    def _made(self, value: ast.expr, found: _Found) -> _Found | None:
        """Return the call that makes the object in a variable which a call gives as an argument, if there is one."""
        if not isinstance(value, ast.Name):
            return None
        variables = found.source.variables
        values = variables.get((found.source.scopes.get(found.node), value.id)) or variables.get((None, value.id), [])
        return _Found(found.source, values[0]) if len(values) == 1 and isinstance(values[0], ast.Call) else None

    def _arithmetic(self, value: ast.expr, found: _Found) -> _Found | None:
        """Return the arithmetic that an expression in a call reads the result of, if one definition has its name."""
        if self._computed is None:
            self._computed = {}
            for source in self._sources:
                entries = [(name, node) for node, name in source.owners.items() if node not in source.targets]
                entries += [
                    (name, node) for (scope, name), nodes in source.variables.items() if not scope for node in nodes
                ]
                entries += [(name, node) for (_, name), nodes in source.assigned.items() for node in nodes]
                for name, node in entries:
                    if isinstance(node, ast.BinOp):
                        self._computed.setdefault(name, []).append(_Found(source, node))
        name, variables = key_of(value), found.source.variables
        local = variables.get((found.source.scopes.get(found.node), name), []) if isinstance(value, ast.Name) else []
        values = [_Found(found.source, node) for node in local] or self._computed.get(name, [])
        is_defined = not local and any(name in source.defined for source in self._sources)
        is_single = len(values) == 1 and isinstance(values[0].node, ast.BinOp)
        return values[0] if is_single and not is_defined else None

    def operands(self, computed: _Found) -> Iterator[_Found]:
        """Yield the names, attributes and entries that arithmetic reads."""
        for node in ast.walk(computed.node):
            if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and key_of(node):
                if computed.node in computed.source.scopes:
                    computed.source.scopes[node] = computed.source.scopes[computed.node]
                yield _Found(computed.source, node)

    def read_values(self, found: _Found) -> list[_Found]:
        """Return the plain value that an expression reads, if there is one definition of its name."""
        value = self._definition(found.node, found, set())
        return [] if value is None else [value]

    def _spread(self, value: ast.expr, found: _Found, depth: int = 0) -> Iterator[tuple[str, _Found]]:
        """Yield the plain values of a dict that a call gives as `**value`, by key, as far as the source tells.

        Args:
            value: the expression.
            found: the call.
            depth: the number of names and calls that were followed.
        """
        scope = found.source.scopes.get(found.node)
        if depth > _DEEPEST:
            return
        if isinstance(value, ast.Dict) or called_name(value) in _DICTS:
            for _, name, each in definitions_in(value):
                yield name, _Found(found.source, each)
            for entry, each in zip(value.keys, value.values) if isinstance(value, ast.Dict) else ():
                yield from self._spread(each, found, depth + 1) if entry is None else ()
        elif isinstance(value, ast.Name):
            if scope is not None and scope.args.kwarg is not None and scope.args.kwarg.arg == value.id:
                parameters = {each.arg for each in (*scope.args.args, *scope.args.kwonlyargs)}
                calls = self.callers(found)
                if len(calls) == 1:
                    for key, definition in self.definitions(calls[0], deep=False):
                        if key not in parameters:
                            yield key, definition
                return
            values = found.source.variables.get((scope, value.id)) or found.source.variables.get((None, value.id), [])
            if len(values) == 1:
                yield from self._spread(values[0], found, depth + 1)
        elif key_of(value):
            section = key_of(value)
            for source in self._sources:
                for name, defined in source.defined.items():
                    entries = [node for kind, called, node in defined if called == section and kind in _SECTIONS]
                    if len(entries) == 1:
                        yield name, _Found(source, entries[0])

    def _given(self, function: str, name: str, place: int) -> list[_Found]:
        """Return the calls of a function of the user's that give an argument, by its name or its place."""
        return [
            _Found(source, call)
            for source in self._sources
            for call in source.calls.get(function, ())
            if argument(call, name, place) is not None
        ]

    def _elements(self, value: ast.expr, found: _Found, depth: int = 0) -> list[tuple[ast.expr, _Found]]:
        """Return the elements of a tuple or list that an expression is: written in a call, or given by the only call of
        the function around; each with the call in which the element is written.
        """
        if isinstance(value, (ast.Tuple, ast.List)):
            return [(each, found) for each in value.elts]
        passed = self._passed(value, found) if depth <= _DEEPEST else []
        return self._elements(*passed[0], depth + 1) if len(passed) == 1 else []

    def _passed(self, value: ast.expr, found: _Found) -> list[tuple[ast.expr, _Found]]:
        """Return what calls of the function around give for an expression that is a parameter, each with its call."""
        scope = found.source.scopes.get(found.node)
        names = [] if scope is None else [each.arg for each in (*scope.args.args, *scope.args.kwonlyargs)]
        if scope is None or not isinstance(value, ast.Name) or value.id not in names:
            return []
        is_method = names[0] == "self" or any(key_of(each) == "classmethod" for each in scope.decorator_list)
        place = names.index(value.id) - is_method
        passed = [
            (argument(each.node, value.id, place), each)
            for each in self._given(found.source.names[scope], value.id, place)
            if each.node is not found.node and (found.caller is None or each.node is found.caller.node)
        ]
        return [(value, each) for value, each in passed if value is not None]

    def _definition(self, value: ast.expr, found: _Found, parts: set[ast.AST], depth: int = 0) -> _Found | None:
        """Return the plain value that an expression in a call reads, if there is one definition of its name.

        Args:
            value: the expression.
            found: the call.
            parts: the nodes of the call, which define nothing for it.
            depth: the number of calls that gave the value on as an argument.
        """
        while called_name(value) in _CONVERSIONS and isinstance(value, ast.Call) and len(value.args) == 1:
            value = value.args[0]
        name = key_of(value)
        scope = found.source.scopes.get(found.node)
        parameters = [] if scope is None else [each.arg for each in (*scope.args.args, *scope.args.kwonlyargs)]
        # A parameter of the function around the call has its value from that function's calls, or by default.
        is_name = isinstance(value, ast.Name)
        function = found.source.names[scope] if is_name and scope is not None and name in parameters else ""
        if function:
            passed = self._passed(value, found)
            if passed:
                if depth > _DEEPEST:
                    return None
                read = [
                    _Found(each.source, value) if is_plain(value) else self._definition(value, each, parts, depth + 1)
                    for value, each in passed
                ]
                # Several calls that hand on one value have it.
                return read[0] if len({None if each is None else each.node for each in read}) == 1 else None
            calls = self.callers(found)
            if len(calls) == 1 and calls[0].node is not found.node and depth <= _DEEPEST:
                spread = [keyword.value for keyword in calls[0].node.keywords if keyword.arg is None]
                entries = [entry for each in spread for entry in self._spread(each, calls[0], depth + 1)]
                values = [each for key, each in entries if key == name]
                if values:
                    return values[-1]
        if is_name:
            kinds: tuple[str, ...] = ("default",) if function else ("assignment",)
        else:
            kinds = _OF_ATTRIBUTES if isinstance(value, ast.Attribute) else _OF_ENTRIES
        defined = [
            (kind, called, _Found(source, node))
            for source in self._sources
            for kind, called, node in source.defined.get(name, ())
            if kind in kinds
            and node not in parts
            and (called == function if function else kind != "call" or called in self._own)
        ]
        section = key_of(value.value) if isinstance(value, (ast.Attribute, ast.Subscript)) else ""
        for kind in kinds:
            of_kind = [(called, each) for each_kind, called, each in defined if each_kind == kind]
            if len(of_kind) > 1 and kind in _SECTIONS:
                of_kind = [each for each in of_kind if each[0] == section] or of_kind
            elif len(of_kind) > 1 and kind == "call":
                of_kind = [each for each in of_kind if each[1].source.sections.get(each[1].node) == section]
            if of_kind:
                return of_kind[0][1] if len(of_kind) == 1 else None
        return None

    def expression(self, path: str) -> _Found | None:
        """Return the expression that constructs a layer."""
        if path not in self._known:
            self._known[path] = None  # against a layer that contains itself
            self._known[path] = self._construction(self._layers[path])
        return self._known[path]

    def _construction(self, layer: Built) -> _Found | None:
        found = None if layer.path == self._root else self._written_in_parent(layer.path)
        if found is not None:
            found = self._call_in(found, layer.type) or found
            if found.source.name_of(found.node) == layer.type:
                return found
        parent = self._layers.get(layer.path.rpartition(".")[0])
        if parent is not None and parent.package in _FRAMEWORKS and parent.type in _MAKING:
            return self.expression(parent.path)
        calls = self.calls(layer.type, layer.package)
        if found is not None and not calls:
            # A class that is never called by its name: a `partial` gives the arguments.
            calls = [each for each in self.calls("partial", "functools") if _names(each.node, layer.type)]
        mentions = self.mentions(layer) if found is None and not calls else []
        return calls[0] if len(calls) == 1 else next(iter(mentions), found)

    def mentions(self, layer: Built) -> list[_Found]:
        """Return the place that has a framework's class as a value, if there is one: a table, a default."""
        if self._mentions is None:
            self._mentions = {}
            for source in self._sources:
                called = {id(call.func) for calls in source.calls.values() for call in calls}
                for node in ast.walk(source.tree):
                    if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in called:
                        self._mentions.setdefault(key_of(node), []).append(_Found(source, node))
        sites = self._mentions.get(layer.type, []) if layer.package in _FRAMEWORKS else []
        return sites if len(sites) == 1 else []

    def _written_in_parent(self, path: str) -> _Found | None:
        above, _, name = path.rpartition(".")
        parent = self._layers.get(above or self._root)
        if parent is None:
            return None
        for base in parent.bases:
            for source in self._sources:
                nodes = source.assigned.get((base, name), [])
                if nodes:
                    return _Found(source, nodes[0]) if len(nodes) == 1 else None
                patterns = [
                    _Found(source, node)
                    for (owner, pattern), values in source.assigned.items()
                    if owner == base and "*" in pattern and fnmatchcase(name, pattern)
                    for node in values
                ]
                if patterns:
                    return patterns[0] if len(patterns) == 1 else None
        holder = self.expression(parent.path)
        if holder is not None and name.isdigit():
            item = _item(holder.node, int(name))
            return None if item is None else _Found(holder.source, item)
        named = [_Found(source, node) for source in self._sources for node in source.named.get(name, ())]
        inside = [each for each in named if holder is not None and _is_inside(each, holder)] or named
        return inside[0] if len(inside) == 1 else None

    def _call_in(self, found: _Found, name: str) -> _Found | None:
        """Return the only call of a class in an expression, or in the function that the expression calls."""
        calls = [node for node in ast.walk(found.node) if found.source.name_of(node) == name]
        if calls:
            # The outermost one: arguments come after it.
            return _Found(found.source, calls[0])
        helper = found.source.name_of(found.node)
        for source in self._sources:
            function = source.functions.get(helper)
            if function is not None:
                inside = [node for node in ast.walk(function) if source.name_of(node) == name]
                return _Found(source, inside[0]) if len(inside) == 1 else None
        return None


# Kinds of definitions of a value that is no variable. The first that exists decides: a line of a config file, an
# argument of a call of a function of the user's, an entry of a dict, an assignment, an option of a command line, or the
# default of a parameter.
_OF_ATTRIBUTES = ("config", "call", "assignment", "option", "entry", "default")
_OF_ENTRIES = ("config", "entry", "call", "assignment", "option", "default")
# Kinds of definitions that are in a dict or a section with a name.
_SECTIONS = ("config", "entry")


def key_of(value: ast.expr) -> str:
    """Return the name that an expression reads a value by: ``eps`` for ``eps``, ``cfg.eps``, ``cfg["eps"]``."""
    if isinstance(value, ast.Name):
        return value.id
    if isinstance(value, ast.Attribute):
        return value.attr
    key = value.slice if isinstance(value, ast.Subscript) else None
    if isinstance(value, ast.Call) and called_name(value) in ("get", "pop") and value.args:
        key = value.args[0]
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""


def is_plain(value: ast.expr | None) -> bool:
    """Return True for numbers, texts, and tuples and lists of them."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return all(map(is_plain, value.elts))
    if isinstance(value, ast.BinOp):
        return is_plain(value.left) and is_plain(value.right)
    return isinstance(value.operand if isinstance(value, ast.UnaryOp) else value, ast.Constant)


def definitions_in(node: ast.AST) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield the kind, the name and the value of each plain value that a node of a syntax tree defines."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values):
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and is_plain(value):
                yield "entry", key.value, value
    elif isinstance(node, ast.Assign):
        for target, item in (pair for each in node.targets for pair in unpacked(each, node.value)):
            # Among others, `None` stands for what is assigned later.
            is_later = item is not node.value and isinstance(item, ast.Constant) and item.value is None
            if isinstance(target, (ast.Name, ast.Attribute)) and is_plain(item) and not is_later:
                yield "assignment", target.id if isinstance(target, ast.Name) else target.attr, item
    elif isinstance(node, ast.AnnAssign):
        given: ast.expr | None = node.value
        if isinstance(given, ast.Call) and called_name(given) in _FIELDS:  # of a dataclass
            fields = {keyword.arg: keyword.value for keyword in given.keywords}
            factory = fields.get("default_factory")
            given = fields.get("default", factory.body if isinstance(factory, ast.Lambda) else None)
        if isinstance(node.target, ast.Name) and given is not None and is_plain(given):
            yield "assignment", node.target.id, given
    elif isinstance(node, ast.FunctionDef):
        names = [*node.args.posonlyargs, *node.args.args]
        defaults = [
            *zip(reversed(names), reversed(node.args.defaults)),
            *zip(node.args.kwonlyargs, node.args.kw_defaults),
        ]
        for name, default in defaults:
            if default is not None and is_plain(default):
                yield "default", name.arg, default
    elif isinstance(node, ast.Call):
        option = node.args[0] if node.args else None
        if called_name(node) in ("add_argument", "option") and isinstance(option, ast.Constant):
            for keyword in node.keywords:
                if keyword.arg == "default" and is_plain(keyword.value):
                    yield "option", str(option.value).lstrip("-").replace("-", "_"), keyword.value
        else:
            kind = "entry" if called_name(node) in _DICTS else "call"
            for keyword in node.keywords:
                if keyword.arg and is_plain(keyword.value):
                    yield kind, keyword.arg, keyword.value


def called_name(node: ast.AST | None) -> str:
    """Return the last part of the name that an expression calls; empty if it is no call of a name."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    """Return the expression that a call gives for an argument; `None` if it gives none."""
    named = next((each.value for each in call.keywords if each.arg == name), None)
    positional = call.args[place] if 0 <= place < len(call.args) else None
    return named or (None if isinstance(positional, ast.Starred) else positional)


def _last_value(source: Source, loss: ast.expr, call: ast.Call) -> ast.expr | None:
    """Return what a loss was last assigned before a call, without the scaling of a `GradScaler`; `None` if unknown."""
    if called_name(loss) == "scale" and isinstance(loss, ast.Call) and len(loss.args) == 1:
        loss = loss.args[0]
    values = source.variables.get((source.scopes.get(call), loss.id), []) if isinstance(loss, ast.Name) else []
    before = [value for value in values if value.lineno < call.lineno]
    if not before:
        return None
    scaled = _last_value(source, before[-1], call) if called_name(before[-1]) == "scale" else None
    return scaled or before[-1]


def _is_written(target: ast.expr) -> bool:
    """Return True if code that writes to an expression writes values of a weight."""
    return re.search(rf"{_VALUES.pattern}$", ast.unparse(target)) is not None


def _writes(call: ast.Call) -> bool:
    """Return True if a call is that of a method that writes values of a weight."""
    method = call.func
    return isinstance(method, ast.Attribute) and bool(_WRITING.fullmatch(method.attr)) and _is_written(method.value)


def _are_cleared(passes: Sequence[_Found], clearing: _Found, step: _Found) -> bool:
    """Return True if a loop clears the gradients after its backward and before its step, or its step of next time."""
    scopes = [(each.source.file, each.source.scopes.get(each.node)) for each in (clearing, step, *passes)]
    backwards = [_end(each.node) for each, scope in zip(passes, scopes[2:]) if scope == scopes[1]]
    if scopes[0] != scopes[1] or not backwards:
        return False
    cleared, stepped = _end(clearing.node), _end(step.node)
    last = max((end for end in backwards if end < stepped), default=None)
    if last is None:  # the step takes the gradients of the iteration before
        return cleared < stepped or cleared > max(backwards)
    return last < cleared < stepped


def _end(node: ast.expr) -> tuple[int, int]:
    """Return the line and column at which an expression ends."""
    return node.end_lineno or 0, node.end_col_offset or 0


def _names(call: ast.Call, name: str) -> bool:
    """Return True if the first argument of a call is a class of this name."""
    return bool(call.args) and key_of(call.args[0]) == name


def _is_inside(found: _Found, outer: _Found) -> bool:
    """Return True if an expression is within the lines of another one."""
    first, last = outer.node.lineno, outer.node.end_lineno or outer.node.lineno
    return found.source is outer.source and first <= found.node.lineno <= last


def _pattern(name: ast.expr) -> str:
    """Return the name of a layer that code adds, with ``*`` for the values in an f-string; empty if not known."""
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        return name.value
    parts = name.values if isinstance(name, ast.JoinedStr) else []
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)


def _item(node: ast.expr, number: int) -> ast.expr | None:
    """Return the expression of one item of a list, or of a call that takes the items."""
    if isinstance(node, ast.Call):
        if len(node.args) == 1 and not isinstance(node.args[0], ast.Call):
            return _item(node.args[0], number)
        return _item(ast.List(node.args), number)
    if isinstance(node, ast.Starred):
        return _item(node.value, number)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return node.elt
    if isinstance(node, (ast.List, ast.Tuple)) and number < len(node.elts):
        before = node.elts[: number + 1]
        return None if any(isinstance(each, ast.Starred) for each in before) else before[-1]
    return None


#: The script that runs: once it is over, python has forgotten its file.
_SCRIPT: str | None = getattr(sys.modules.get("__main__"), "__file__", None)


def _files(layers: Iterable[Built]) -> list[str]:
    """Return the files of the user's code: those of the layers' classes, of the call stack, and beside the script."""
    files = dict.fromkeys(layer.file for layer in layers)
    frame = sys._getframe(1)
    while frame is not None:
        files[frame.f_code.co_filename] = None
        frame = frame.f_back  # type: ignore[assignment]
    script = getattr(sys.modules.get("__main__"), "__file__", None) or _SCRIPT
    if script and is_users(os.path.abspath(script)):
        folder = os.path.join(os.path.dirname(os.path.abspath(script)), "")
        files[os.path.abspath(script)] = None
        try:
            beside = {entry.removesuffix(".py") for entry in os.listdir(folder)}
        except OSError:
            beside = set()
        # Of thousands of modules few are beside the script.
        for name in [name for name in list(sys.modules) if name.partition(".")[0] in beside]:
            # A module's own `__getattr__` may import others.
            file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
            if isinstance(file, str) and file.startswith(folder):
                files[file] = None
    paths = (os.path.abspath(file) for file in files if file and file.endswith(".py") and is_users(file))
    return list(dict.fromkeys(paths))[:_MOST_FILES]


def parsed(file: str) -> Source | None:
    """Return a file of Python code; `None` if it cannot be read."""
    try:
        state = os.stat(file)
        return _parse(file, short_path(file), state.st_mtime_ns) if state.st_size <= _LARGEST else None
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


def _configs(sources: Iterable[Source]) -> Iterator[Source]:
    """Yield the files of configs that the sources or the command line name, relative to the working directory or to
    the source.
    """
    here = os.getcwd()
    names = [(here, word.rpartition("=")[2]) for word in sys.argv[1:]]
    for source in sources:
        names += [(folder, text) for text in _named_configs(source) for folder in (here, os.path.dirname(source.file))]
    paths = dict.fromkeys(os.path.abspath(os.path.join(*each)) for each in names if _CONFIG.fullmatch(each[1]))
    for path in list(paths)[:_MOST_FILES]:
        source_of_config = _read(path)
        if source_of_config is not None:
            yield source_of_config


@lru_cache(maxsize=_MOST_FILES)
def _named_configs(source: Source) -> tuple[str, ...]:
    """Return the names of configs in a file; `os.path.join(root, "config", "base.yaml")` names a file in a folder."""
    texts = (text for line in source.lines for text in (*_NAMED.findall(line), "/".join(_QUOTED.findall(line))))
    return tuple(text for text in texts if _CONFIG.fullmatch(text))


def _read(file: str) -> Source | None:
    """Return a file of Python code or of a config; `None` if it cannot be read."""
    if _CONFIG.fullmatch(file) is None:
        return parsed(file)
    try:
        with open(file, "rb") as opened:
            content = opened.read(_LARGEST + 1)
    except OSError:
        return None
    return _config(file, content) if len(content) <= _LARGEST else None


def _config(file: str, content: bytes) -> Source:
    """Return a config as a source: the lines with one plain value each, with the section that holds it."""
    source = Source(file, short_path(file), content.decode("utf-8", "replace").splitlines(), _digest(content))
    sections: list[tuple[int, str]] = []
    for number, line in enumerate(source.lines, 1):
        entry = _ENTRY.fullmatch(line[:_LONGEST])
        section = None if entry else _SECTION.fullmatch(line[:_LONGEST])
        if entry is not None:
            indent = len(entry[1])
            # A table of TOML goes on at its own depth.
            sections = [each for each in sections if each[0] < indent]
            of = sections[-1][1] if sections else ""
            value = ast.Constant(_plain(entry[3]), lineno=number)
            source.defined.setdefault(entry[2], []).append(("config", of, value))
        elif section is not None:
            indent = -1 if section["table"] else len(section[1])
            sections = [each for each in sections if each[0] < indent]
            sections.append((indent, (section["table"] or section[3]).rpartition(".")[2]))
    return source


def _plain(text: str) -> float | bool | str:
    """Return a value of a config: a number, true or false, or a word."""
    try:
        return float(text)
    except ValueError:
        return {"true": True, "false": False}.get(text.lower(), text.strip("\"'"))


@lru_cache(maxsize=_MOST_FILES)
def _parse(file: str, short: str, changed: int) -> Source:
    with open(file, "rb") as opened:
        content = opened.read()
    tree = ast.parse(content)
    source = Source(file, short, content.decode("utf-8", "replace").splitlines(), _digest(content), tree)
    for node, scope, classes in _nodes(tree, source):
        kind = type(node)
        if kind not in _READ:
            continue
        if isinstance(node, ast.Call):
            source.calls.setdefault(called_name(node), []).append(node)
            if scope is not None:
                source.scopes[node] = scope
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                where = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
                name = alias.asname or alias.name.partition(".")[0]
                source.imports.setdefault(name, set()).add(where.partition(".")[0])
                whole = f"{where}.{alias.name}" if isinstance(node, ast.ImportFrom) else where
                source.modules[name] = whole if alias.asname or isinstance(node, ast.ImportFrom) else name
        elif isinstance(node, (ast.Tuple, ast.Dict)):
            pairs = zip(node.keys, node.values) if isinstance(node, ast.Dict) else [node.elts[:2]]
            for key, layer in (pair for pair in pairs if len(pair) == 2):
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(layer, ast.Call):
                    source.named.setdefault(key.value, []).append(layer)
        elif isinstance(node, ast.FunctionDef):
            source.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            source.classes[node.name] = node
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            source.variables.setdefault((scope, node.targets[0].id), []).append(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            for target in node.targets[0].elts:
                if isinstance(target, ast.Name):
                    source.variables.setdefault((scope, target.id), []).append(node.value)
        rates: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            groups = [each for each in node.targets if isinstance(each, ast.Subscript) and key_of(each) == "lr"]
            rates = [node.value for _ in groups]
            source.written += [node.value for each in node.targets if _is_written(each)]
        elif isinstance(node, ast.Call) and called_name(node) == "set_lr":  # of paddle's optimizers
            rates = node.args[:1]
        for rate in rates:
            source.rates.append(rate)
            if scope is not None:
                source.scopes[rate] = scope
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            inner = (each for each in ast.walk(node.value) if isinstance(each, ast.Call))
            source.owners |= dict.fromkeys(inner, key_of(node.target))
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            source.targets[node.value] = source.owners[node.value] = key_of(node.targets[0])
        if classes:
            for name, value in _attributes(node):
                if scope is not None:
                    source.scopes[value] = scope
                for each in classes:
                    source.assigned.setdefault((each, name), []).append(value)
        if isinstance(node, ast.Dict):
            keys = zip(node.keys, node.values)
            source.owners |= {value: str(key.value) for key, value in keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Call):
            source.owners |= {each.value: each.arg for each in node.keywords if each.arg}
        of = source.names.get(node, "") if isinstance(node, ast.FunctionDef) else called_name(node)
        if isinstance(node, ast.Dict) or (isinstance(node, ast.Call) and of in _DICTS):
            of = source.owners.get(node, "")
        for how, defined, value in definitions_in(node):
            source.defined.setdefault(defined, []).append((how, of, value))
            source.sections[value] = source.owners.get(node, "") if isinstance(node, ast.Call) else ""
    for values in source.variables.values():
        values.sort(key=lambda value: value.lineno)
    renamed = {name: whole.rpartition(".")[2] for name, whole in source.modules.items() if "." in whole}
    for (scope, name), values in source.variables.items():
        if len(values) == 1 and isinstance(values[0], (ast.Attribute, ast.Name)):
            whole = source.full_name(ast.Call(values[0], [], []))
            if scope is None or whole.partition(".")[0] in _FRAMEWORKS:
                renamed[name] = key_of(values[0])
    source.aliases = {name: other for name, other in renamed.items() if other != name and name not in source.classes}
    for name, other in source.aliases.items():
        if name in source.calls:
            source.calls.setdefault(other, []).extend(source.calls.pop(name))
    for calls in source.calls.values():
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return source


# Nodes that say something here, and those below which nothing does: they are most of a tree.
_READ = {
    ast.Call, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Dict, ast.Tuple,
}  # fmt: skip
_LEAVES = {
    ast.Name, ast.Constant, ast.alias, ast.arg, ast.Pass, str, int, float, complex, bool, bytes, type(None),
    *(kind for base in (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
      for kind in base.__subclasses__()),
}  # fmt: skip
_Place = tuple[ast.AST, ast.FunctionDef | None, tuple[str, ...]]


def _nodes(tree: ast.AST, source: Source) -> Iterator[_Place]:
    """Yield the nodes of a syntax tree with the innermost function and the classes around each; keep the functions'
    names.
    """
    left: list[tuple[ast.AST, ast.FunctionDef | None, tuple[str, ...], str]] = [(tree, None, (), "")]
    while left:
        node, scope, classes, owner = left.pop()
        name, inside = "", scope
        if isinstance(node, ast.FunctionDef):
            source.names[node] = owner if owner and node.name == "__init__" else node.name
            inside = node
        yield node, scope, classes
        if isinstance(node, ast.ClassDef):
            name = node.name
            classes = (*classes, name)
        for attribute in node._fields:
            value = getattr(node, attribute, None)
            children: list[Any] = value if type(value) is list else [value]
            for child in children:
                if type(child) not in _LEAVES:
                    left.append((child, inside, classes, name))


def _attributes(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the name and the expression of a ``self.name = ...`` or ``self.add_module("name", ...)``."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        given = node.args if isinstance(node, ast.Call) else []
        given = given[called_name(node) == "setattr" :]
        if called_name(node) in _ADDING and len(given) == 2 and (name := _pattern(given[0])):
            yield name, given[1]
        return
    for target in targets:
        for each, item in unpacked(target, value):
            if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                yield each.attr, item


def unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the targets of an assignment, each with its own expression where the value shows it."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        yield target, value
        return
    for number, each in enumerate(target.elts):
        item = None if isinstance(value, ast.Call) else _item(value, number)
        yield from unpacked(each, value if item is None else item)
