"""Versions of packages, each in a virtual environment of its own, laid over the one that padiff runs in."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import itertools
import os
import re
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from padiff.errors import UsageError
from padiff_cli.bisect.search import TrialError, Values
from padiff_cli.bisect.trials import Setup, short

_SPECIFICATION = re.compile(r"([\w.-]+)==([\w.+!-]+?)\.\.([\w.+!-]+)")
# Rounds in which requirements of requirements are installed.
_ROUNDS = 10
_NOTES = re.compile(r"(changelog|changes|history|news|release[_-]?notes?)(\.(md|rst|txt))?", re.IGNORECASE)
# Lines of a changelog's section, and of the differing code, that a result has.
_NOTE_LINES, _MOST_BYTES = 40, 200_000

State = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Package:
    """A package and its versions, from the good to the bad one."""

    name: str
    versions: tuple[str, ...]

    @classmethod
    def from_text(cls, text: str) -> Package:
        """Read ``NAME==GOOD..BAD`` and ask the index for the versions between.

        Raises:
            UsageError: the text has another form, or the index does not have these versions.
        """
        match = _SPECIFICATION.fullmatch(text.replace(" ", ""))
        if match is None:
            raise UsageError(f"--package takes NAME==GOOD..BAD, such as transformers==4.47..4.48; got {text!r}")
        name, *ends = match.groups()
        from packaging.version import InvalidVersion, Version

        try:
            good, bad = map(Version, ends)
        except InvalidVersion as error:
            raise UsageError(f"--package {text}: {error}") from error
        available = sorted({Version(each): each for each in _available(name)}.items())
        for version, word in zip((good, bad), ends):
            if version not in dict(available):
                nearest = sorted(available, key=lambda pair: abs(_distance(pair[0], available, version)))[:8]
                known = ", ".join(text for _, text in sorted(nearest)) or "none"
                raise UsageError(f"--package {text}: the index has no {name} {word} for this Python; it has {known}")
        if good == bad:
            raise UsageError(f"--package {text}: the good and the bad version are one")
        between = [word for version, word in available if min(good, bad) <= version <= max(good, bad)]
        return cls(name, tuple(between if good < bad else between[::-1]))


class Packages:
    """Versions of packages. A state is the version of each.

    Args:
        packages: the packages.
        folder: folder for the virtual environments, which stay for a bisection that goes on.
        command: the command of a trial.

    Attributes:
        packages: the packages, by name.
        names: their names.
    """

    def __init__(self, packages: Sequence[Package], folder: Path, command: Sequence[str]) -> None:
        self.packages = {package.name: package for package in packages}
        self.names = tuple(self.packages)
        self._folder, self._command = folder.resolve(), list(command)

    def make(self, names: frozenset[str]) -> State:
        """Return the state with some packages in their bad version."""
        return tuple((name, p.versions[-1 if name in names else 0]) for name, p in self.packages.items())

    def line_of(self, name: str, others: frozenset[str]) -> Values:
        """Return the states with each version of a package, and some others in their bad version."""
        fixed = dict(self.make(others))
        return Values(tuple(tuple({**fixed, name: each}.items()) for each in self.packages[name].versions))

    def prepare(self, state: State) -> Setup:
        """Make the virtual environment of a state."""
        folder = self._folder / self.folder_name(state)
        python = folder / "bin/python"
        if not (folder / "complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, symlinks=True)
            packages = _site_folder(folder)
            lines = [f"import site; site.addsitedir({place!r})" for place in _layers()]
            (packages / "padiff_layers.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
            _install(python, [f"{name}=={version}" for name, version in state])
            for _ in range(_ROUNDS):
                missing = sorted(set(_unsatisfied(packages)))
                if not missing:
                    break
                _install(python, missing)
            (folder / "complete").write_text("", encoding="utf-8")
        environment = {**os.environ, "VIRTUAL_ENV": str(folder)}
        environment["PATH"] = os.pathsep.join([str(folder / "bin"), environment.get("PATH", os.defpath)])
        environment.pop("PYTHONHOME", None)
        _check_versions(python, state, environment)
        return Setup(_with_python(self._command, python), Path.cwd(), str(python), environment)

    def label(self, state: State) -> str:
        """Return the versions of a state."""
        return " ".join(f"{name}=={version}" for name, version in state)

    def folder_name(self, state: State) -> str:
        """Return the name of a state's folder."""
        if len(state) == 1:
            return re.sub(r"[^\w.=-]", "_", self.label(state))
        return short(state)

    def changelog(self, state: State, name: str) -> str:
        """Return the lines of a package's changelog about its version in a state; empty if it ships none."""
        folder, version = _site_folder(self._folder / self.folder_name(state)), dict(state)[name]
        for file in _files(folder, name):
            if _NOTES.fullmatch(file.name) and file.is_file() and file.stat().st_size < 20 * _MOST_BYTES:
                section = changelog_section(file.read_text(encoding="utf-8", errors="replace"), version)
                if section:
                    return section
        return ""

    def description(self, before: State, after: State, name: str) -> str:
        """Return the differences of a package's Python files between two states."""
        sides = []
        for state in (before, after):
            folder = _site_folder(self._folder / self.folder_name(state))
            files = [file for file in _files(folder, name) if file.suffix == ".py" and file.is_file()]
            sides.append({str(file.relative_to(folder)): file for file in files})
        lines: list[str] = []
        for path in sorted({*sides[0], *sides[1]}):
            old, new = (_lines_of(side.get(path)) for side in sides)
            lines += difflib.unified_diff(old, new, f"a/{path}", f"b/{path}") if old != new else []
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def changelog_section(text: str, version: str) -> str:
    """Return the section of a changelog about a version: from the heading that names it to the next such heading."""
    lines = text.splitlines()
    named = re.compile(rf"(?<![\w.])v?{re.escape(version)}(?!\w|\.\d)")
    any_version = re.compile(r"(?<![\w.])v?\d+\.\d+(\.\d+)*")

    def is_heading(number: int) -> bool:
        line = lines[number]
        underlined = number + 1 < len(lines) and re.fullmatch(r"[=~^*-]{3,}\s*", lines[number + 1]) is not None
        return bool(any_version.search(line)) and (line.startswith(("#", "[", "v", "V")) or underlined)

    start = next((n for n in range(len(lines)) if is_heading(n) and named.search(lines[n])), None)
    if start is None:
        return ""
    end = next((n for n in range(start + 1, len(lines)) if is_heading(n)), len(lines))
    return "\n".join(lines[start : min(end, start + _NOTE_LINES)]).strip()


def _available(name: str) -> list[str]:
    """Return the versions of a package that the index has for this Python.

    Raises:
        UsageError: it cannot be asked, or has none.
    """
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip"]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "tool", "run", "--python", sys.executable, "pip"]
    else:
        raise UsageError("--package needs pip or uv to list versions: python -m ensurepip brings pip")
    # A pip that uv brings must not find another one on PYTHONPATH.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "index", "versions", name],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
    )
    match = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if done.returncode or match is None:
        text = " ".join(done.stderr.split()) or "it has none"
        raise UsageError(f"--package: the index does not tell the versions of {name}: {text}")
    return [word.strip() for word in match[1].split(",")]


def _distance(version: object, available: Sequence[tuple[object, str]], wanted: object) -> int:
    """Return how many versions lie between two."""
    versions = [each for each, _ in available]
    place = sum(each < wanted for each in versions)  # type: ignore[operator]
    return versions.index(version) - place


def _layers() -> list[str]:
    """Return the folders of packages that this Python has: a trial finds there what it does not bring."""
    places = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [place for place in dict.fromkeys(places) if os.path.isdir(place)]


def _site_folder(folder: Path) -> Path:
    """Return the folder of packages of a virtual environment."""
    return next(folder.glob("lib/python*/site-packages"))


def _install(python: Path, requirements: Sequence[str]) -> None:
    """Install packages without what they require; wheels are cached by pip or uv.

    Raises:
        TrialError: they cannot be installed.
    """
    uv = shutil.which("uv")
    command = (
        [uv, "pip", "install", "--python", str(python), *_settings_for_uv()]
        if uv is not None
        # The environment below is not touched: nothing is uninstalled.
        else [sys.executable, "-m", "pip", "--python", str(python), "install", "--ignore-installed"]
    )
    done = subprocess.run(
        [*command, "--quiet", "--no-deps", *requirements], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise TrialError(f"cannot install {' '.join(requirements)}: {lines[-1] if lines else 'no reason given'}")


def _settings_for_uv() -> Iterator[str]:
    """Yield pip's settings of where packages come from, in the form of uv, which reads none of pip's."""
    options = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
    values = _pip_settings()
    for name, option in options.items():
        for value in values.get(name, "").split():
            yield from (option, value)
    if values.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        yield "--no-index"


def _pip_settings() -> dict[str, str]:
    """Return pip's settings, from its files and from the environment, which wins."""
    lines: list[str] = []
    if importlib.util.find_spec("pip") is not None:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        lines = done.stdout.splitlines()
    values = {}
    for where in ("global.", "install.", ":env:."):
        for line in lines:
            name, _, value = line.partition("=")
            if name.startswith(where):
                values[name.removeprefix(where)] = str(ast.literal_eval(value)).replace("\n", " ")
    own = {"PIP_INDEX_URL": "index-url", "PIP_EXTRA_INDEX_URL": "extra-index-url", "PIP_FIND_LINKS": "find-links"}
    own["PIP_NO_INDEX"] = "no-index"
    return values | {option: os.environ[name] for name, option in own.items() if name in os.environ}


def _unsatisfied(packages: Path) -> Iterator[str]:
    """Yield requirements of the packages in a virtual environment that neither it nor the layers below meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    tried = list(distributions(path=[str(packages)]))
    layers = [path for path in sys.path if path]
    versions: dict[str, str] = {}
    for each in itertools.chain(tried, distributions(path=layers)):
        versions.setdefault(canonicalize_name(each.metadata["Name"]), each.version)
    for text in itertools.chain.from_iterable(each.requires or () for each in tried):
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = versions.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}"


def _check_versions(python: Path, state: State, environment: dict[str, str]) -> None:
    """Check that a trial imports the versions that it is about.

    Raises:
        TrialError: it does not: PYTHONPATH has another one, for example.
    """
    code = "import sys, importlib.metadata as m; print(*(m.version(name) for name in sys.argv[1:]))"
    names = [name for name, _ in state]
    done = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, env=environment)
    from packaging.version import Version

    versions = dict(zip(names, done.stdout.split()))
    for name, wanted in state:
        version = versions.get(name)
        if not version or Version(version) != Version(wanted):
            raise TrialError(f"{name} is {version or 'not found'} in its environment, not {wanted}: see PYTHONPATH")


def _with_python(command: Sequence[str], python: Path) -> list[str]:
    """Return a command that runs in a virtual environment: with its Python in the place of this one."""
    program = shutil.which(command[0]) or command[0]
    own = Path(sys.executable).resolve()
    if Path(program).resolve() == own or re.fullmatch(r"python(3(\.\d+)?)?", Path(command[0]).name):
        return [str(python), *command[1:]]
    try:
        with open(program, "rb") as file:
            first = file.readline(500)
    except OSError:
        return list(command)
    # A script of this environment (torchrun, accelerate) names its Python in its first line.
    if first.startswith(b"#!") and b"python" in first:
        return [str(python), program, *command[1:]]
    return list(command)


def _files(folder: Path, name: str) -> list[Path]:
    """Return the files of a package that is installed in a folder."""
    from packaging.utils import canonicalize_name

    for each in distributions(path=[str(folder)]):
        if canonicalize_name(each.metadata["Name"]) == canonicalize_name(name):
            return [_located(each, str(path)) for path in each.files or ()]
    return []


def _located(distribution: Distribution, path: str) -> Path:
    return Path(str(distribution.locate_file(path)))


def _lines_of(path: Path | None) -> list[str]:
    if path is None or path.stat().st_size > _MOST_BYTES:
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
