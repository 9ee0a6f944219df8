"""The candidate's source files, and edits of them that keep comments and format."""

from __future__ import annotations

import ast
import builtins
import difflib
import io
import json
import re
import symtable
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from padiff.system.construction import definitions_in, is_plain, key_of, unpacked
from padiff.system.frames import Frame
from padiff_cli.fix.vocabulary import kind_of

# Limits of what is read: files, bytes of a file of code, and of a config: larger ones are data.
_MOST_FILES, _LARGEST, _LARGEST_CONFIG = 200, 400_000, 40_000
# Depth to which the name of a value is followed to its definition.
_DEPTH = 4
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)
# Families of the classes that a mapping may name.
_CLASSES = ("layer", "optimizer", "schedule", "loss", "clip")
# Ends of configs whose values are changed where they stand: JSON, and the values of TOML, are read as YAML.
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
# Keys of a mapping that stands for a call: they name what is called by its path, as in Hydra and Lightning, or a class
# of the catalog. Other entries are arguments, except those that begin so; or those of an entry with the last keys are.
_PATHS, _NAMES, _HIDDEN = ("_target_", "class_path"), ("type", "name", "class"), "_"
_GIVEN = ("init_args", "params", "kwargs")
_TABLE, _TOML_ENTRY = re.compile(r"\s*\[+([\w. -]+)\]+"), re.compile(r"""\s*["']?([\w-]+)["']?\s*=\s*""")


@dataclass(frozen=True, order=True)
class Edit:
    """A change of one file: the text between two offsets, counted in characters, is replaced."""

    file: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Proposal:
    """Edits that belong together.

    Attributes:
        edits: the edits.
        words: the change in words.
        weight: smaller for proposals that are tried first.
    """

    edits: tuple[Edit, ...]
    words: str
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class Source:
    """A parsed file: Python, or a config in YAML, JSON or TOML, which is one expression of dictionaries, lists and
    values; a mapping that names what is called with its entries is a call.

    Attributes:
        file: path relative to the working folder.
        text: the text, with its line ends.
        tree: the syntax tree.
    """

    file: str
    text: str
    tree: ast.Module
    _starts: list[int] = field(repr=False)

    @classmethod
    def from_bytes(cls, file: str, content: bytes) -> Source | None:
        """Parse a file; `None` if it is no Python, or no config, in UTF-8."""
        try:
            text = content.decode("utf-8")
            if file.endswith(_CONFIGS):
                tree = _toml_tree(text) if file.endswith(".toml") else _config_tree(file, text)
            else:
                tree = _Mappings().visit(ast.parse(content))
        except (SyntaxError, ValueError, RecursionError, MemoryError, yaml.YAMLError):
            return None
        starts = [0]
        for line in io.StringIO(text, newline=""):
            starts.append(starts[-1] + len(line))
        return cls(file, text, tree, starts)

    @property
    def is_config(self) -> bool:
        """Return True if the file is no Python: only its values can change."""
        return self.file.endswith(_CONFIGS)

    def is_mapping(self, node: ast.AST | None) -> bool:
        """Return True if a call is the mapping that stands for one."""
        if not isinstance(node, ast.Call):
            return False
        return self.is_config or self.text[self.span(node.func)[1] :].startswith(("'", '"'))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Return all nodes in the order of the text."""
        nodes = [node for node in ast.walk(self.tree) if hasattr(node, "lineno")]
        return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))  # type: ignore[attr-defined]

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Return the node around each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def names(self) -> frozenset[str]:
        """Return all names and attributes of the file."""
        found = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        return frozenset(found | {node.attr for node in self.nodes if isinstance(node, ast.Attribute)})

    @cached_property
    def attributes(self) -> frozenset[str]:
        """Return the attributes of `self` in the file, as ``self.name``."""
        return frozenset(
            dotted(node) for node in self.nodes if isinstance(node, ast.Attribute) and dotted(node.value) == "self"
        )

    @cached_property
    def unbound(self) -> frozenset[str]:
        """Return the names that are read where nothing defines them, as far as the file tells; ``self.name``, too."""
        if self.is_config or any(isinstance(each, ast.alias) and each.name == "*" for each in ast.walk(self.tree)):
            return frozenset()
        top = symtable.symtable(self.text.lstrip("\ufeff"), self.file, "exec")
        tables = [top]
        for table in tables:
            tables += table.get_children()
        symbols = [(table is top, symbol) for table in tables for symbol in table.get_symbols()]
        bound = {each.get_name() for is_top, each in symbols
                 if (is_top or each.is_declared_global()) and (each.is_assigned() or each.is_imported())}  # fmt: skip
        read = {each.get_name() for is_top, each in symbols if each.is_referenced() and (is_top or each.is_global())}
        unbound_names = {name for name in read - bound if not hasattr(builtins, name)}
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        methods = {each.name for owner in classes for each in owner.body if isinstance(each, _SCOPES)}
        for owner in classes:
            nodes = [
                each for each in ast.walk(owner) if isinstance(each, ast.Attribute) and dotted(each.value) == "self"
            ]
            stored = {each.attr for each in nodes if isinstance(each.ctx, ast.Store)}
            unbound_names |= {f"{owner.name}: self.{each.attr}" for each in nodes if each.attr not in stored | methods}
        return frozenset(unbound_names)

    @cached_property
    def modules(self) -> dict[str, str]:
        """Return the whole name of what each imported name stands for."""
        names: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    names[name] = alias.name if alias.asname else name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return names

    @cached_property
    def imported(self) -> list[str]:
        """Return the names of the modules that the file imports, and of what may be modules."""
        modules = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                modules += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                head = f"{node.module}." if node.module else ""
                modules += [*([node.module] if node.module else []), *(f"{head}{alias.name}" for alias in node.names)]
        return modules

    def mentions(self, path: str) -> bool:
        """Return True if a text of the file is the name of a config, with or without its end, or a path to it."""
        name = f"/{path}".rpartition("/")[2]
        # A run folder has files of JSON whose names are plain words.
        ends = (f"/{name}", *([] if name.endswith(".json") else [f"/{name.rpartition('.')[0]}"]))
        texts = (node.value for node in self.nodes if isinstance(node, ast.Constant))
        return any(isinstance(text, str) and f"/{text}".endswith(ends) for text in texts)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets of a node."""
        start, end = self._offset(node.lineno, node.col_offset), 0  # type: ignore[attr-defined]
        end = self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return start, end

    def code(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def line(self, number: int) -> str:
        """Return a line without its surrounding whitespace; empty if there is none."""
        if not 1 <= number < len(self._starts):
            return ""
        return self.text[self._starts[number - 1] : self._starts[number]].strip()

    def line_start(self, number: int) -> int:
        """Return the offset at which a line begins; for the line after the last one, that of the end."""
        return self._starts[min(number, len(self._starts)) - 1]

    def statement(self, number: int) -> ast.stmt | None:
        """Return the innermost statement that a line belongs to."""
        found = [
            node
            for node in self.nodes
            if isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or node.lineno)
        ]
        return min(found, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the innermost function around a node."""
        above = self.parents.get(node)
        while above is not None and not isinstance(above, _SCOPES):
            above = self.parents.get(above)
        return above if isinstance(above, _SCOPES) else None

    def class_around(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class around a node."""
        above = self.parents.get(node)
        while above is not None and not isinstance(above, ast.ClassDef):
            above = self.parents.get(above)
        return above

    def statement_around(self, node: ast.AST) -> ast.stmt | None:
        """Return the innermost statement around a node, or the node itself."""
        found: ast.AST | None = node
        while found is not None and not isinstance(found, ast.stmt):
            found = self.parents.get(found)
        return found

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions, methods or classes of these names."""
        return [node for node in self.nodes if isinstance(node, ast.Call) and last_name(node.func) in names]

    def assigned(self, name: str, scope: ast.AST | None = None) -> list[ast.expr]:
        """Return the values that are assigned to a variable or an attribute, in the whole file by default."""
        nodes = self.nodes if scope is None else ast.walk(scope)
        assignments = [node for node in nodes if isinstance(node, ast.Assign)] if name else []
        pairs = [(node, *pair) for node in assignments for each in node.targets for pair in unpacked(each, node.value)]
        # What a call gives is not known part by part.
        return [
            value
            for node, target, value in pairs
            if dotted(target) == name and (value is not node.value or target in node.targets)
        ]

    def functions(self, name: str) -> list[ast.FunctionDef]:
        """Return the functions and methods of a name."""
        return [node for node in self.nodes if isinstance(node, ast.FunctionDef) and node.name == name]

    def full_name(self, node: ast.expr) -> str:
        """Return a dotted name with its modules, as far as imports tell; empty if it is none."""
        chain = dotted(node)
        head, dot, rest = chain.partition(".")
        return f"{self.modules.get(head, head)}{dot}{rest}" if chain else ""

    def spelled(self, name: str) -> str:
        """Return the shortest text by which the file can name a function or class of a module; empty if it needs an
        import.
        """
        spellings = [
            f"{alias}{name[len(module) :]}"
            for alias, module in self.modules.items()
            if name == module or name.startswith(f"{module}.")
        ]
        return min(spellings, key=lambda text: (text.count("."), len(text)), default="")

    def import_edit(self, module: str) -> Edit:
        """Return the edit that adds an import after the file's last import at its top."""
        body = self.tree.body
        place = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
        is_text = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        after = place[-1].end_lineno if place else (body[0].end_lineno if is_text else 0)
        at = self.line_start((after or 0) + 1)
        newline = "" if at == 0 or self.text[at - 1] == "\n" else "\n"
        return Edit(self.file, at, at, f"{newline}import {module}\n")

    def _offset(self, line: int, column: int) -> int:
        start = self._starts[line - 1]
        text = self.text[start : self._starts[line]]
        shift = 1 if line == 1 and text.startswith("\ufeff") else 0
        return start + shift + len(text[shift:].encode()[:column].decode())


class Project:
    """The Python files of a folder."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._sources = {source.file: source for source in sources}

    @classmethod
    def from_folder(cls, folder: Path, files: Iterable[str]) -> Project:
        """Read the Python files and the configs of a folder that have a limited size.

        Args:
            folder: the folder.
            files: paths relative to it.
        """
        names = [name for name in files if name.endswith((".py", *_CONFIGS))][:_MOST_FILES]
        small = (
            name
            for name in names
            if (folder / name).stat().st_size <= (_LARGEST_CONFIG if name.endswith(_CONFIGS) else _LARGEST)
        )
        found = (Source.from_bytes(name, (folder / name).read_bytes()) for name in small)
        return cls(source for source in found if source is not None)

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources.values())

    def reached_from(self, files: Iterable[str]) -> Project:
        """Return the files that some files import, the configs that they name, and those files.

        Args:
            files: paths of the files.
        """
        waiting, found = [file for file in files if file in self._sources], dict[str, Source]()
        while waiting:
            file = waiting.pop()
            if file not in found:
                found[file] = self._sources[file]
                for module in found[file].imported:
                    path = module.replace(".", "/")
                    ends = (f"{path}.py", f"{path}/__init__.py")
                    waiting += [each for each in self._sources if f"/{each}".endswith(tuple(f"/{end}" for end in ends))]
                waiting += [each.file for each in self if each.is_config and found[file].mentions(each.file)]
        return Project(source for name, source in self._sources.items() if name in found)

    def without(self, other: Project) -> Project:
        """Return the files that another project does not have."""
        return Project(source for name, source in self._sources.items() if name not in other._sources)

    def get(self, file: str) -> Source | None:
        """Return a file by its path."""
        return self._sources.get(file)

    def statement_at(self, frame: Frame | None) -> tuple[Source, ast.stmt] | tuple[None, None]:
        """Return the file and the statement of a recorded line; nothing if the project has no such line."""
        source = None if frame is None else self.get(frame.file)
        statement = None if source is None or frame is None else source.statement(frame.line)
        return (None, None) if source is None or statement is None else (source, statement)

    def with_edits(self, edits: Iterable[Edit]) -> Project | None:
        """Return the project with edits made; `None` if a file is no Python then, or edits overlap."""
        changed = dict(self._sources)
        by_file: dict[str, list[Edit]] = {}
        for edit in dict.fromkeys(edits):
            by_file.setdefault(edit.file, []).append(edit)
        for file, group in by_file.items():
            if self._sources[file].is_config:
                group = [replace(edit, text=config_value(edit.text)) for edit in group]
                if file.endswith(".toml") and any(edit.text == "null" for edit in group):
                    return None
            text = edited(self._sources[file].text, group)
            source = None if text is None else Source.from_bytes(file, text.encode())
            if source is None:
                return None
            changed[file] = source
        return Project(changed.values())

    def defines_all(self, other: Project) -> bool:
        """Return False if another state of the same files reads a name that nothing defines there, and this one not."""
        return all(each.unbound <= self._sources[each.file].unbound for each in other)

    def difference(self, other: Project) -> str:
        """Return the unified diff to another state of the same files, for ``patch -p1``."""
        return "".join(unified(source, other._sources[source.file].text) for source in self)

    def changed_files(self, other: Project) -> dict[str, bytes]:
        """Return the files of another state that differ from this one."""
        return {each.file: each.text.encode() for each in other if each.text != self._sources[each.file].text}

    def calls(self, *names: str) -> list[tuple[Source, ast.Call]]:
        """Return the calls of functions, methods or classes of these names in all files."""
        return [(source, call) for source in self for call in source.calls(*names)]

    def catalog_calls(self, *kinds: str) -> list[tuple[Source, ast.Call]]:
        """Return the calls of functions and classes of the catalog, of some families or of all."""
        calls = ((source, node) for source in self for node in source.nodes if isinstance(node, ast.Call))
        return [(source, call) for source, call in calls
                if (kind := kind_of(last_name(call.func))) and (not kinds or kind in kinds)]  # fmt: skip

    def definitions(self, source: Source, value: ast.expr, depth: int = _DEPTH) -> list[tuple[Source, ast.expr]]:
        """Return the plain values that an expression may read: an argument, a default, an entry of a config.

        Args:
            source: the file of the expression.
            value: the expression: a name, an attribute, or an entry.
            depth: number of names to follow.
        """
        if isinstance(value, ast.Call) and dotted(value.func) in ("float", "int") and len(value.args) == 1:
            return self._plain(source, value.args[0], depth)
        if isinstance(value, ast.Subscript) and depth:
            # An item of a tuple or list.
            place = value.slice.value if isinstance(value.slice, ast.Constant) else None
            rows = self.definitions(source, value.value, depth - 1) if isinstance(place, int) else []
            places = [
                (each, row.elts[place])
                for each, row in rows
                if isinstance(row, (ast.Tuple, ast.List)) and isinstance(place, int) and place < len(row.elts)
            ]
            if places:
                return places
        name = key_of(value)
        if not name or depth == 0:
            return []
        if isinstance(value, ast.Name):
            scope = source.function(value)
            while scope is not None:
                arguments = scope.args
                if name in [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]:
                    return self._passed(source, scope, name, depth)
                scope = source.function(scope)
            return self._assigned(source, value, name, depth)
        places = []
        for each in self:
            for node in ast.walk(each.tree):
                places += [(each, plain) for _, key, plain in definitions_in(node) if key == name]
        for each, node in self._attributes(name):
            places += self.definitions(each, node, depth - 1)
        return list(dict.fromkeys(places))

    def entries(self, name: str) -> list[tuple[Source, ast.expr]]:
        """Return the plain values of dictionaries and configs under a key."""
        return [
            (each, value)
            for each in self
            for node in ast.walk(each.tree)
            for kind, key, value in definitions_in(node)
            if kind == "entry" and key == name
        ]

    def tables(self, source: Source, value: ast.expr, depth: int = _DEPTH) -> list[tuple[Source, ast.AST]]:
        """Return the dictionaries that an expression after ``**`` may be, also entries of others.

        Args:
            source: the file of the expression.
            value: the expression.
            depth: number of names to follow.
        """
        inner: list[ast.expr] | None = None
        if isinstance(value, ast.Dict):
            inner = [each for key, each in zip(value.keys, value.values) if key is None]
        elif isinstance(value, ast.Call) and last_name(value.func) == "dict":
            inner = [each.value for each in value.keywords if each.arg is None]
        if inner is not None:
            return [(source, value), *(table for each in inner for table in self.tables(source, each, depth - 1))]
        name = key_of(value)
        if not name or not depth:
            return []
        is_entry = isinstance(value, (ast.Subscript, ast.Call))
        tables: list[tuple[Source, ast.AST]] = []
        for each in self:
            for node in each.nodes:
                values: list[ast.expr] = []
                if is_entry and isinstance(node, ast.Dict):
                    values = [
                        v for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant) and k.value == name
                    ]
                elif isinstance(node, ast.Call) and is_entry:
                    values = [keyword.value for keyword in node.keywords if keyword.arg == name]
                elif isinstance(node, ast.Assign) and name in map(last_name, node.targets):
                    values = [node.value]
                for inner_value in values:
                    tables += self.tables(each, inner_value, depth - 1)
        return tables

    def _attributes(self, name: str) -> Iterator[tuple[Source, ast.expr]]:
        for each in self:
            for node in each.nodes:
                if isinstance(node, ast.Assign) and not is_plain(node.value):
                    for target in node.targets:
                        if isinstance(target, ast.Attribute) and target.attr == name and key_of(node.value):
                            yield each, node.value

    def _assigned(self, source: Source, value: ast.Name, name: str, depth: int) -> list[tuple[Source, ast.expr]]:
        """Return the values that are assigned to a variable of the function or of the module, also by an import."""
        found: list[tuple[Source, ast.expr]] = []
        places = [source]
        if name in source.modules and "." in source.modules[name]:
            module, _, name = source.modules[name].rpartition(".")
            places = [each for each in self if each.file.removesuffix(".py").replace("/", ".").endswith(module)]
        for place in places:
            for node in place.nodes:
                targets = node.targets if isinstance(node, ast.Assign) else []
                if isinstance(node, ast.AnnAssign):
                    targets = [node.target]
                for target in targets if getattr(node, "value", None) is not None else ():
                    for one, expression in unpacked(target, node.value):  # type: ignore[attr-defined]
                        if isinstance(one, ast.Name) and one.id == name:
                            found += self._plain(place, expression, depth)
        return list(dict.fromkeys(found))

    def _passed(self, source: Source, scope: ast.AST, name: str, depth: int) -> list[tuple[Source, ast.expr]]:
        """Return the values that calls pass for a parameter, and its default."""
        assert isinstance(scope, _SCOPES)
        owner = source.parents.get(scope)
        is_method = isinstance(owner, ast.ClassDef)
        called = owner.name if isinstance(owner, ast.ClassDef) and scope.name == "__init__" else scope.name
        parameters = [each.arg for each in (*scope.args.posonlyargs, *scope.args.args)][1 if is_method else 0 :]
        places: list[tuple[Source, ast.expr]] = []
        for each, call in self.calls(called):
            given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
            if given is None and name in parameters and parameters.index(name) < len(call.args):
                given = call.args[parameters.index(name)]
            if given is not None and not isinstance(given, ast.Starred):
                places += self._plain(each, given, depth)
            elif given is None and any(keyword.arg is None for keyword in call.keywords):
                places += self.entries(name)
        defaults = [plain for kind, key, plain in definitions_in(scope) if kind == "default" and key == name]
        return list(dict.fromkeys([*places, *((source, plain) for plain in defaults)]))

    def _plain(self, source: Source, value: ast.expr, depth: int) -> list[tuple[Source, ast.expr]]:
        return [(source, value)] if is_plain(value) else self.definitions(source, value, depth - 1)


def _config_tree(file: str, text: str) -> ast.Module:
    """Return a config in YAML or JSON as one expression, with the places of its values.

    Raises:
        yaml.YAMLError: it is none.
    """
    # JSON is YAML but for tabs between its words.
    value = _yaml_value(text.replace("\t", " ") if file.endswith(".json") else text)
    return ast.Module([] if value is None else [ast.copy_location(ast.Expr(value), value)], [])


def _yaml_value(text: str, line: int = 0, column: int = 0) -> ast.expr | None:
    """Return a text in YAML as an expression; `None` if it is empty.

    Args:
        text: the text.
        line, column: the place at which it begins in its file.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    lines = [*io.StringIO(text, newline="")] or [""]
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    seen: set[int] = set()

    def marked(expression: Any, start: yaml.Mark, end: yaml.Mark) -> Any:
        for mark, names in ((start, ("lineno", "col_offset")), (end, ("end_lineno", "end_col_offset"))):
            number = min(mark.line, len(lines) - 1)
            before = lines[number][: mark.column] if mark.line < len(lines) else lines[-1]
            offset = len(before.encode()) + (column if number == 0 else 0)
            for name, value in zip(names, (number + line + 1, offset)):
                setattr(expression, name, value)
        return expression

    def placed(node: yaml.Node) -> Any:
        expression: ast.expr = ast.Constant(None)
        if id(node) in seen:  # an alias: the value stands elsewhere
            expression = ast.Name("alias")
        elif isinstance(node, yaml.MappingNode):
            seen.add(id(node))
            expression = _mapping([(placed(key), placed(value)) for key, value in node.value])
        elif isinstance(node, yaml.SequenceNode):
            seen.add(id(node))
            expression = ast.List([placed(each) for each in node.value], ast.Load())
        elif isinstance(node, yaml.ScalarNode):
            expression = ast.Constant(_scalar(node))
        return marked(expression, node.start_mark, node.end_mark)

    return None if root is None else placed(root)


def _mapping(pairs: Sequence[tuple[ast.expr, ast.expr]]) -> ast.Dict | ast.Call:
    """Return entries as a dictionary, or as the call that they stand for."""
    values = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
    name = next((key for key in (*_PATHS, *_NAMES) if key in values), None)
    function = _called(values.get(name))
    if function is None or (name in _NAMES and kind_of(last_name(function)) not in _CLASSES):
        return ast.Dict([key for key, _ in pairs], [value for _, value in pairs])
    inner = [value for key, value in values.items() if key in _GIVEN and isinstance(value, ast.Dict)]
    entries = [*zip(inner[0].keys, inner[0].values)] if inner else pairs
    keywords = [
        ast.keyword(key.value, value, lineno=key.lineno, col_offset=key.col_offset, end_lineno=value.end_lineno,
                    end_col_offset=value.end_col_offset)
        for key, value in entries
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
        if key.value not in (name, *_GIVEN) and not key.value.startswith(_HIDDEN)
    ]  # fmt: skip
    return ast.Call(function, [], keywords)


class _Mappings(ast.NodeTransformer):
    """Puts calls in the place of the dictionaries that stand for them."""

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        self.generic_visit(node)
        call = _mapping([(key or ast.Constant(None), value) for key, value in zip(node.keys, node.values)])
        return ast.copy_location(call, node) if isinstance(call, ast.Call) else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if dotted(node.func) != "dict" or node.args:
            return node
        call = _mapping([(ast.copy_location(ast.Constant(each.arg), each), each.value) for each in node.keywords])
        return ast.copy_location(call, node) if isinstance(call, ast.Call) else node


def _called(value: ast.expr | None) -> ast.expr | None:
    """Return the dotted name that a text of a config is, at its place without quotes; `None` if it is none."""
    if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
        return None
    if not all(part.isidentifier() for part in value.value.split(".")):
        return None
    function = ast.parse(value.value, mode="eval").body
    quotes = ((value.end_col_offset or 0) - value.col_offset - len(value.value.encode())) // 2
    for node in (each for each in ast.walk(function) if isinstance(each, ast.expr)):
        ast.copy_location(node, value)
        node.col_offset, node.end_col_offset = value.col_offset + quotes, (value.end_col_offset or 0) - quotes
    return function


def _toml_tree(text: str) -> ast.Module:
    """Return a config in TOML as one expression, with the places of its values: a dictionary of its tables.

    What is no plain table of entries is left out.
    """
    lines = [*io.StringIO(text, newline="")]
    tables: list[tuple[str, list[tuple[ast.expr, ast.expr]]]] = [("", [])]
    number = 0
    while number < len(lines):
        table, entry = _TABLE.match(lines[number]), _TOML_ENTRY.match(lines[number])
        if entry is None and table is not None:
            tables.append((table[1].rpartition(".")[2].strip(), []))
        elif entry is not None:
            # A list may go on in the next lines.
            value, count, first = None, 1, lines[number][entry.end() :]
            while value is None and number + count <= len(lines):
                try:
                    value = _yaml_value(
                        "".join([first, *lines[number + 1 : number + count]]), number, len(entry[0].encode())
                    )
                except yaml.YAMLError:
                    if not first.startswith("["):
                        break
                    count += 1
            if value is not None:
                tables[-1][1].append((ast.copy_location(ast.Constant(entry[1]), value), value))
                number += count - 1
        number += 1
    rows = [(ast.Constant(name, lineno=1, col_offset=0, end_lineno=1, end_col_offset=0), _toml_table(pairs))
            for name, pairs in tables[1:]]  # fmt: skip
    root = _toml_table([*tables[0][1], *rows])
    return ast.Module([ast.copy_location(ast.Expr(root), root)], [])


def _toml_table(pairs: list[tuple[ast.expr, ast.expr]]) -> ast.Dict | ast.Call:
    table = _mapping(pairs)
    table.lineno = table.end_lineno = 1
    table.col_offset = table.end_col_offset = 0
    return table


def _scalar(node: yaml.ScalarNode) -> Any:
    """Return the value of a scalar; a text such as ``1e-3``, which YAML 1.1 does not read as a number, is one."""
    if node.tag.rpartition(":")[2] not in ("int", "float", "bool", "null", "str"):
        return node.value
    value = yaml.SafeLoader("").construct_object(node)
    if isinstance(value, str) and node.style is None:
        try:
            return float(value)
        except ValueError:
            return value
    return value


def config_value(text: str) -> str:
    """Return a value that is written as Python as a value of YAML and of JSON."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    # YAML 1.1 reads a number with an exponent as a text if it has no point.
    shown = json.dumps(value)
    return shown.replace("e", ".0e", 1) if isinstance(value, float) and "e" in shown and "." not in shown else shown


def edited(text: str, edits: Sequence[Edit]) -> str | None:
    """Return a text with edits made; `None` if they overlap."""
    ordered = sorted(edits)
    if any(second.start < first.end for first, second in pairwise(ordered)):
        return None
    for edit in reversed(ordered):
        text = f"{text[: edit.start]}{edit.text}{text[edit.end :]}"
    return text


def unified(source: Source, text: str) -> str:
    """Return the unified diff from a file to its new text; empty if they are equal."""
    before, after = (list(io.StringIO(each, newline="")) for each in (source.text, text))
    lines = difflib.unified_diff(before, after, f"a/{source.file}", f"b/{source.file}")
    parts = []
    for line in lines:
        parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def indent(source: Source, statement: ast.stmt) -> str | None:
    """Return the whitespace before a statement; `None` if another one stands on its line."""
    start = source.line_start(statement.lineno)
    space = source.text[start : source.span(statement)[0]]
    return space if not space.strip() else None


def line_before(source: Source, statement: ast.stmt, code: str) -> Edit:
    """Return the edit that adds a line before a statement."""
    start = source.line_start(statement.lineno)
    return Edit(source.file, start, start, f"{indent(source, statement) or ''}{code}\n")


def line_after(source: Source, statement: ast.stmt, code: str) -> Edit:
    """Return the edit that adds a line after a statement."""
    end = source.line_start((statement.end_lineno or statement.lineno) + 1)
    newline = "" if source.text[:end].endswith("\n") else "\n"
    return Edit(source.file, end, end, f"{newline}{indent(source, statement) or ''}{code}\n")


def line_removed(source: Source, statement: ast.stmt) -> Edit:
    """Return the edit that removes the lines of a statement."""
    start = source.line_start(statement.lineno)
    return Edit(source.file, start, source.line_start((statement.end_lineno or statement.lineno) + 1), "")


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name; empty if it is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """Return a name such as ``torch.nn.Linear``; empty if it is none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
