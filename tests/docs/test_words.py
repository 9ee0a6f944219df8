"""Plain words: docstrings that say what a call does, names that say what a value is, sentences of one breath."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sized

import pytest
from golden.lines import read_expected

from .messages import source_files
from .pages import ROOT

#: A docstring has a verb first ("Return ..."), or a noun for an object.
VAGUE_START = re.compile(r"(What|Whether|Which|Where|When|How|Who|Whose|Those|That|They|It|There|As|Of|In|If|But)\b")
MOST_VAGUE_DOCSTRINGS = 0.015
#: Locals and parameters are nouns of the field.
# fmt: off
VAGUE_NAMES = frozenset({
    "asked", "found", "given", "gone", "held", "kept", "known", "left", "made", "one", "other", "own", "put", "rest",
    "said", "seen", "some", "taken", "there", "those", "told", "wanted", "whole",
})
# fmt: on
MOST_VAGUE_NAMES = 0.02
#: No public method is called so, in any class: neither a search nor an editor can follow such a name.
VAGUE_METHODS = frozenset({"hear", "leave", "let_go", "look", "of", "put", "take", "tell", "wants"})
#: Methods that are still called so. The set only shrinks.
ALLOWED: set[str] = set()
#: Words of the longest sentence, and how many of the golden file's sentences are longer. The number only shrinks.
LONGEST_SENTENCE = 25
MOST_LONG_SENTENCES = 135

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9`(])")
_FIGURE = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each documented object, and its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and (text := ast.get_docstring(node, clean=False)):
            yield getattr(node, "name", "module"), text.strip()


def variables(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name of each function, and the names of its parameters and locals."""
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
            names |= {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]} - {"self", "cls"}
            yield from ((node.name, name) for name in sorted(names))


def methods(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the class and the name of each public method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from ((node.name, x.name) for x in node.body if isinstance(x, _FUNCTIONS) and x.name[0] != "_")


def sentences(lines: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of the golden file's messages; tables and lists are left out."""
    for line in lines:
        kind, _, text = line.partition(" ")
        if kind == "cause" or (kind == "told" and text.endswith(".") and not text.startswith(" ")):
            yield from _END.split(text)


def vague_docstrings(documented: Iterable[tuple[str, str]]) -> list[str]:
    """Return the docstrings that begin with a word that is neither a verb nor a noun."""
    return [f"{name}: {text.splitlines()[0]}" for name, text in documented if VAGUE_START.match(text)]


def vague_names(named: Iterable[tuple[str, str]]) -> list[str]:
    """Return the locals and parameters that say nothing about their value."""
    return [f"{function}: {name}" for function, name in named if name.strip("_") in VAGUE_NAMES]


def vague_methods(tree: ast.Module) -> list[str]:
    """Return the public methods whose name has no one meaning."""
    return [f"{cls}.{name}" for cls, name in methods(tree) if name in VAGUE_METHODS]


def long_sentences(lines: Iterable[str]) -> set[str]:
    """Return the sentences of too many words, with figures left out."""
    return {_FIGURE.sub("N", text) for text in sentences(lines) if len(text.split()) > LONGEST_SENTENCE}


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in source_files()}


def _count(places: Mapping[str, Sized]) -> int:
    return sum(map(len, places.values()))


def _listed(places: dict[str, list[str]]) -> str:
    return "\n".join(f"{path}: {place}" for path, names in places.items() for place in names)


def test_docstrings_begin_with_a_verb_or_a_noun(trees):
    documented = {path: list(docstrings(tree)) for path, tree in trees.items()}
    vague = {path: vague_docstrings(pairs) for path, pairs in documented.items()}
    assert _count(vague) <= MOST_VAGUE_DOCSTRINGS * _count(documented), _listed(vague)


def test_locals_are_named_by_nouns(trees):
    named = {path: list(variables(tree)) for path, tree in trees.items()}
    vague = {path: vague_names(pairs) for path, pairs in named.items()}
    assert _count(vague) <= MOST_VAGUE_NAMES * _count(named), _listed(vague)


def test_public_methods_have_names_of_one_meaning(trees):
    vague = {path: vague_methods(tree) for path, tree in trees.items()}
    unexpected = {path: [name for name in names if name not in ALLOWED] for path, names in vague.items()}
    assert not any(unexpected.values()), _listed(unexpected)
    assert not ALLOWED - {name for names in vague.values() for name in names}  # no exception outlives its method


def test_sentences_of_messages_are_short():
    texts = long_sentences(line for lines in read_expected().values() for line in lines)
    assert len(texts) <= MOST_LONG_SENTENCES, "\n".join(sorted(texts))


@pytest.mark.parametrize("word", ["What", "Whether", "Which", "Where", "How", "Who", "Of", "It", "As"])
def test_a_vague_docstring_is_seen_on_modules_classes_and_functions(word):
    text = f'"""{word} a."""\n\nclass A:\n    """{word} b."""\n\n    async def c(self):\n        """{word} c."""\n'
    names = ["module", "A", "c"]
    assert [line.partition(":")[0] for line in vague_docstrings(docstrings(ast.parse(text)))] == names
    assert not vague_docstrings(docstrings(ast.parse(text.replace(word, "Return"))))
    assert not vague_docstrings(docstrings(ast.parse('"""Item, Offset, Wholesale."""')))


def test_a_vague_local_or_parameter_is_seen():
    tree = ast.parse("def f(given, *, b=1):\n    found = b\n    for one, _kept in found:\n        step = one\n")
    assert vague_names(variables(tree)) == ["f: _kept", "f: found", "f: given", "f: one"]


def test_a_vague_public_method_is_seen_and_a_private_one_is_not():
    tree = ast.parse("class A:\n    def take(self): ...\n    def _put(self): ...\n    def read(self): ...\n")
    assert vague_methods(tree) == ["A.take"]
    assert not vague_methods(ast.parse("def take(): ..."))


def test_a_long_sentence_is_seen_and_two_short_ones_are_not():
    words = " ".join(["word"] * 20)
    assert long_sentences([f"told {words} {words} 3."]) == {f"{words} {words} N."}
    assert not long_sentences(
        [f"told {words}. {words.capitalize()}.", f"told   {words} {words}", f"align {words} {words}"]
    )
