"""Commits of a git repository, each in a worktree of the bisection's folder."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

from padiff.dump import open_run
from padiff.errors import UsageError
from padiff_cli.bisect.search import TrialError
from padiff_cli.bisect.trials import Setup

_LENGTH = 12


class Commits:
    """The commits between two others, the older one of which is an ancestor of the newer one.

    Args:
        good, bad: revisions.
        folder: folder for the worktree, which `close` removes.
        command: the command of a trial.
        links: paths below the current folder that are in no commit and that each trial needs.

    Attributes:
        start, end: hashes of the older and of the newer revision.

    Raises:
        UsageError: a revision is not known, there is no git, or neither is an ancestor of the other.
    """

    def __init__(self, good: str, bad: str, folder: Path, command: Sequence[str], links: Sequence[str] = ()) -> None:
        self._root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
        self._below = _git(Path.cwd(), "rev-parse", "--show-prefix")
        self._tree, self._command, self._links = folder, list(command), list(links)
        self.good, self.bad = (self._resolve(revision, option) for revision, option in ((good, "good"), (bad, "bad")))
        if self.good == self.bad:
            raise UsageError(f"--good {good} and --bad {bad} are one commit, {self.good[:_LENGTH]}")
        if self._is_ancestor(self.good, self.bad):
            self.start, self.end = self.good, self.bad
        elif self._is_ancestor(self.bad, self.good):
            self.start, self.end = self.bad, self.good
        else:
            base = _git(self._root, "merge-base", self.good, self.bad, failing=True)
            raise UsageError(
                f"neither of --good {good} and --bad {bad} is an ancestor of the other. "
                f"Give the commit where they parted as --good: {base[:_LENGTH] or 'there is none'}"
            )

    # -- a line of states -----------------------------------------------------------------------------------------

    def middle(self, good: Collection[str], bad: str, skipped: Collection[str]) -> str | None:
        """Return the commit that halves those that are left, as git bisect chooses it."""
        lines = _git(self._root, "rev-list", "--bisect-all", bad, "--not", *good).splitlines()
        hashes = (line.split()[0] for line in lines)
        return next((each for each in hashes if each != bad and each not in skipped), None)

    def suspects(self, good: Collection[str], bad: str) -> list[str]:
        """Return the commits that lead to the bad one and to no good one, the oldest first."""
        return _git(self._root, "rev-list", "--reverse", "--topo-order", bad, "--not", *good).splitlines()

    def before(self, state: str) -> str | None:
        """Return the first parent of a commit, or `None` if the range begins with the commit."""
        parent = _git(self._root, "rev-parse", "--verify", "--quiet", f"{state}^", failing=True)
        return parent if parent and self._is_ancestor(self.start, parent) else None

    # -- running --------------------------------------------------------------------------------------------------

    def prepare(self, state: str) -> Setup:
        """Check a commit out into the worktree."""
        if not (self._tree / ".git").exists():
            _git(self._root, "worktree", "prune")
            _git(self._root, "worktree", "add", "--quiet", "--force", "--detach", str(self._tree), state)
        try:
            _git(self._tree, "checkout", "--quiet", "--force", "--detach", state)
            # Compiled files of another commit as well: they may be of the same second and size.
            _git(self._tree, "clean", "-ffdxq")
        except UsageError as error:
            raise TrialError(str(error)) from error
        folder = self._tree / self._below
        if not folder.is_dir():
            raise TrialError(f"it has no folder {self._below}")
        for link in self._links:
            place = folder / link
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(Path(link).resolve())
        command = [self._moved(word) for word in self._command]
        return Setup(command, folder, sys.executable, self._environment(), self._check_code)

    def label(self, state: str) -> str:
        """Return the abbreviated hash and the subject of a commit."""
        return _git(self._root, "log", "-1", "--format=%h %s", state)

    def folder_name(self, state: str) -> str:
        """Return the abbreviated hash of a commit."""
        return state[:_LENGTH]

    def description(self, state: str) -> str:
        """Return a commit's message and its diff."""
        return _git(self._root, "show", "-m", "--first-parent", "--stat", "--patch", "--no-color", state)

    def reverted_by(self, state: str) -> str:
        """Return the commit that says that it reverts another one; empty if there is none."""
        words = f"--grep=This reverts commit {state}"
        return _git(self._root, "log", "-1", "--format=%h", words, f"{state}..{self.end}")

    def close(self) -> None:
        """Remove the worktree."""
        if self._tree.exists():
            with contextlib.suppress(UsageError):
                _git(self._root, "worktree", "remove", "--force", "--force", str(self._tree))

    def _environment(self) -> dict[str, str]:
        """Return the environment in which modules of the repository are those of the worktree.

        An installation in development mode has the repository itself on ``sys.path``.
        """
        places = [*(Path(path) for path in sys.path if path), *_folders_of_modules()]
        inside = [path for path in places if self._root in (path, *path.parents)]
        moved = [self._tree / path.relative_to(self._root) for path in inside]
        paths = [path for path in (self._tree, self._tree / "src", *moved) if path.is_dir()]
        before = os.environ.get("PYTHONPATH", "")
        joined = os.pathsep.join([*dict.fromkeys(map(str, paths)), *filter(None, [before])])
        return {**os.environ, "PYTHONPATH": joined}

    def _check_code(self, run: Path) -> None:
        """Raise an error if a trial has run files of the user's own checkout in the place of the worktree's.

        Raises:
            TrialError: it has.
        """
        for name in open_run(run).info.files:
            path = Path(name)
            if self._root in path.parents and self._tree not in path.parents:
                below = str(path.relative_to(self._root))
                if _git(self._root, "ls-files", "--", below, failing=True):
                    raise TrialError(
                        f"it ran {below} of your own checkout, not of this commit. Start the script by a relative "
                        "path, or install the package in the command"
                    )

    def _moved(self, word: str) -> str:
        """Return a path of the repository's files as that of the worktree's."""
        path = Path(word)
        if path.is_absolute() and self._root in path.parents:
            moved = self._tree / path.relative_to(self._root)
            return str(moved) if moved.exists() else word
        return word

    def _resolve(self, revision: str, option: str) -> str:
        commit = _git(self._root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", failing=True)
        if not commit:
            raise UsageError(f"--{option} {revision}: {self._root} has no such commit")
        return commit

    def _is_ancestor(self, older: str, newer: str) -> bool:
        return older in _git(self._root, "merge-base", "--all", older, newer, failing=True).splitlines()


def _folders_of_modules() -> Iterator[Path]:
    """Yield the folders that hold packages which are installed in development mode by an import hook."""
    for each in distributions():
        if re.search(r'"editable":\s*true', each.read_text("direct_url.json") or ""):
            for name in (each.read_text("top_level.txt") or "").split():
                with contextlib.suppress(ImportError, ValueError):
                    spec = importlib.util.find_spec(name)
                    places = () if spec is None else spec.submodule_search_locations or (spec.origin,)
                    yield from (Path(place).parent for place in places if place)


def _git(folder: Path, *words: str, failing: bool = False) -> str:
    """Run git and return what it prints.

    Args:
        folder: the folder it runs in.
        words: its arguments.
        failing: return an empty text if it fails.

    Raises:
        UsageError: it is not there, or failed.
    """
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise UsageError("padiff bisect between commits needs git, which is not installed") from None
    if done.returncode and not failing:
        raise UsageError(f"git {words[0]} failed: {done.stderr.strip()}")
    return "" if done.returncode else done.stdout.strip()
