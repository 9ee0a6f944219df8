"""Sets of changes of which each trial has some: keys of a config, environment variables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from padiff.errors import UsageError
from padiff_cli.bisect.config_files import ConfigPair
from padiff_cli.bisect.search import Values
from padiff_cli.bisect.trials import Setup, short

CONFIG_WORD = "{config}"
_PAIR = re.compile(r"(\w+)=(.*?)\.\.(.*)", re.DOTALL)
_COUNT = re.compile(r"\d{1,4}")
# Variables of the shell and of this program, which are not compared.
_NEVER = re.compile(r"_|PWD|OLDPWD|SHLVL|PADIFF_.*|GIT_.*")


class ConfigKeys:
    """Keys of a config of which each trial has some from the bad one.

    Args:
        pair: the two configs.
        folder: folder for the configs that are tried.
        command: the command, in which ``{config}`` stands for the path.

    Attributes:
        names: the keys that differ.
    """

    def __init__(self, pair: ConfigPair, folder: Path, command: Sequence[str]) -> None:
        self._pair, self._folder, self._command = pair, folder, list(command)
        self.names = pair.keys
        if not any(CONFIG_WORD in word for word in command):
            raise UsageError(f"--config: the command has no {CONFIG_WORD}, which stands for the config that is tried")

    def make(self, keys: frozenset[str]) -> frozenset[str]:
        """Return the state with some keys of the bad config."""
        return keys

    def suspect(self, cause: str) -> str | None:
        """Return the key that a cause names; `None` if there is none."""
        return self._pair.key_named_in(cause)

    def prepare(self, state: frozenset[str]) -> Setup:
        """Write the config with these keys from the bad one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = (self._folder / f"{self.folder_name(state)}{self._pair.suffix}").resolve()
        path.write_text(self._pair.text_with(state), encoding="utf-8")
        words = [word.replace(CONFIG_WORD, str(path)) for word in self._command]
        return Setup(words, Path.cwd(), sys.executable, os.environ)

    def label(self, state: frozenset[str]) -> str:
        """Return which keys a state has from the bad config."""
        return _label(state, self._pair.keys, "config")

    def folder_name(self, state: frozenset[str]) -> str:
        """Return the name of a state's config."""
        return _name(state, self._pair.keys)

    def description(self, key: str) -> str:
        """Return a key's two values."""
        return self._pair.values_text(key)


@dataclass(frozen=True)
class Variable:
    """An environment variable in the good and in the bad environment; `None`: it is not set."""

    name: str
    good: str | None
    bad: str | None

    @property
    def counts(self) -> tuple[str, ...]:
        """Return the numbers from the good to the bad one if the variable counts threads; else the two values."""
        if not self.name.endswith("THREADS") or not all(x and _COUNT.fullmatch(x) for x in (self.good, self.bad)):
            return (self.good or "", self.bad or "")
        first, last = int(self.good or 0), int(self.bad or 0)
        numbers = range(first, last + 1) if first < last else range(first, last - 1, -1)
        return tuple(map(str, numbers))


class Environments:
    """Environment variables of which each trial has some as in the bad environment.

    A state is a set of the variables that differ from the good environment, with their values.

    Attributes:
        variables: the variables, by name.
        names: their names.
    """

    def __init__(self, variables: Sequence[Variable], command: Sequence[str]) -> None:
        self.variables = {variable.name: variable for variable in variables}
        self.names = tuple(self.variables)
        self._command = list(command)

    def make(self, names: frozenset[str]) -> frozenset[tuple[str, str | None]]:
        """Return the state with some variables as in the bad environment."""
        return frozenset((name, self.variables[name].bad) for name in names)

    def line_of(self, name: str, others: frozenset[str]) -> Values | None:
        """Return the states with each number of threads between the good and the bad one; `None` if there is none."""
        counts = self.variables[name].counts
        if len(counts) < 3:
            return None
        fixed = self.make(others - {name})
        return Values((fixed, *(fixed | {(name, count)} for count in counts[1:])))

    def prepare(self, state: frozenset[tuple[str, str | None]]) -> Setup:
        """Return the command with a state's variables."""
        values = {name: variable.good for name, variable in self.variables.items()} | dict(state)
        environment: dict[str, str | None] = {**os.environ, **values}
        present = {name: value for name, value in environment.items() if value is not None}
        return Setup(self._command, Path.cwd(), sys.executable, present)

    def label(self, state: frozenset[tuple[str, str | None]]) -> str:
        """Return which variables a state has as in the bad environment."""
        if len(state) == 1:
            ((name, value),) = state
            return self.setting(name, value)
        return _label(frozenset(name for name, _ in state), tuple(self.variables), "environment")

    def folder_name(self, state: frozenset[tuple[str, str | None]]) -> str:
        """Return the name of a state's folder."""
        return short(sorted(state, key=str))

    def description(self, name: str) -> str:
        """Return a variable's two values."""
        variable = self.variables[name]
        return f"{self.setting(name, variable.good)} against {self.setting(name, variable.bad)}"

    def setting(self, name: str, value: str | None) -> str:
        """Return a variable and its value in words."""
        return f"{name} not set" if value is None else f"{name}={value}"


def read_variables(words: Sequence[str]) -> list[Variable]:
    """Read ``NAME=GOOD..BAD`` of the command line, or two files with lines ``NAME=VALUE``.

    Raises:
        UsageError: a word has another form, nothing differs, or a file can't be read.
    """
    if len(words) == 2 and not any(_PAIR.fullmatch(word) for word in words):
        good, bad = (_read_file(word) for word in words)
        names = [name for name in {**good, **bad} if not _NEVER.fullmatch(name)]
        variables = [Variable(name, good.get(name), bad.get(name)) for name in names]
    else:
        variables = [_variable(word) for word in words]
    differing = [variable for variable in variables if variable.good != variable.bad]
    if not differing:
        raise UsageError("--env: the two environments are the same")
    return differing


def _variable(word: str) -> Variable:
    match = _PAIR.fullmatch(word)
    if match is None:
        raise UsageError(f"--env takes NAME=GOOD..BAD, such as OMP_NUM_THREADS=1..8, or two files; got {word!r}")
    return Variable(match[1], match[2] or None, match[3] or None)


def _read_file(word: str) -> Mapping[str, str]:
    try:
        text = Path(word).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UsageError(f"--env: cannot read {word}: {error.strerror}") from error
    lines = (line.partition("=") for line in text.splitlines() if re.match(r"\w+=", line))
    return {name: value for name, _, value in lines}


def _label(state: frozenset[str], names: Sequence[str], what: str) -> str:
    if not state:
        return f"the good {what}"
    if len(state) == len(names):
        return f"the bad {what}"
    present = [name for name in names if name in state]
    few = present if len(present) <= len(names) / 2 else [name for name in names if name not in state]
    text = ", ".join(few[:4]) + (f" and {len(few) - 4} more" if len(few) > 4 else "")
    return (
        f"the {'good' if few is present else 'bad'} {what} with {text} of the {'bad' if few is present else 'good'} one"
    )


def _name(state: frozenset[str], names: Sequence[str]) -> str:
    return "good" if not state else "bad" if len(state) == len(names) else short(sorted(state))
