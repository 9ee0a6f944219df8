"""The reference has every public name and every option, and links lead to files."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re

import pytest

from padiff_cli.main import COMMANDS

from .pages import DOCS, ROOT, Page

PAGES = [Page.of(path) for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]]


def test_every_public_name_is_on_a_page_of_the_reference():
    stubs = ast.parse((ROOT / "padiff/__init__.pyi").read_text(encoding="utf-8")).body
    public = {f"padiff.{alias.name}" for line in stubs if isinstance(line, ast.ImportFrom) for alias in line.names}
    hosts = {f"{path.name}.callback.PaDiffCallback" for path in (ROOT / "integrations").glob("*/padiff_*")}
    assert public
    assert len(hosts) == 4
    shown = {name for page in PAGES for name in page.shown}
    assert public | hosts <= shown, "add them to docs/reference/write.py, and run it"


def test_every_command_and_option_is_on_the_page_of_commands():
    page = Page.of(DOCS / "reference/commands.md")
    names = re.findall(r"^## padiff (\S+)$", page.text, re.MULTILINE)
    texts = dict(zip(names, page.blocks, strict=True))
    assert set(texts) == set(COMMANDS)
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser()
        module = importlib.import_module(command.module)
        # `run` reads its own arguments by itself: those behind the script are the script's.
        fill = module._fill if name == "run" else module.add_arguments
        fill(parser)
        for option in (option for action in parser._actions for option in action.option_strings):
            assert option in texts[name][1], f"padiff {name} {option}: run python docs/reference/write.py"


@pytest.fixture(scope="module")
def writer():
    spec = importlib.util.spec_from_file_location("write", DOCS / "reference/write.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_of_the_reference_are_what_their_script_writes(writer):
    for language, folder in enumerate(("reference", "zh/reference")):
        for name in writer.PAGES:
            assert (DOCS / folder / f"{name}.md").read_text(encoding="utf-8") == writer.page(name, language)


def test_the_list_for_language_models_is_what_its_script_writes_and_has_every_page(writer):
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert text == writer.llms(), "run python docs/reference/write.py"
    english = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    english = {path for path in english if not path.startswith("zh/")} - {"index.md"}
    linked = set(re.findall(r"\]\((\S+?)\)", text))
    assert english <= linked
    assert all((DOCS / link).exists() for link in linked)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.path.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for link in page.links:
        assert (page.path.parent / link).exists(), link
