"""Reproduce the differences that padiff found in public libraries, each with padiff's verdict.

    python benchmarks/differences/run.py [--write] [NAME ...]

Without a name all of them are run: some minutes. ``--write`` writes the page, in both languages. What needs a package
that is not installed is left out, and said so: ``benchmarks/library_pairs.py`` says how these are installed.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import Difference, Words, version

WIDTH = 110
ENGLISH = {
    "head": "# Differences it found\n\nReal differences between public libraries, which padiff found between a model "
    "or a training in torch and the same one in paddle. Each of them is run by\n\n"
    "```\npython benchmarks/differences/run.py\n```\n\nwhich writes this page, too (`--write`). The text in a box is "
    "what padiff said when it was written, with Python {python} on a {machine} CPU. What else paddle and torch compute "
    "differently when they are called alike is in [the atlas](atlas.md).\n",
    "here": "Reproduced here with {versions}.",
    "not": "Not reproduced here: {missing} is not installed.",
    "other": "Not reproduced here with {versions}: padiff says something else.",
    "equal": "**To make both equal:** ",
}
CHINESE = {
    "head": "# padiff 发现的差异\n\n这些是公开库之间真实存在的差异：同一个模型或同一次训练，torch 与 paddle 的结果不同。"
    "每一条都由下面的脚本运行得到\n\n```\npython benchmarks/differences/run.py\n```\n\n"
    "本页也由它生成（`--write`）。框中的文字是 padiff 当时的输出，环境为 Python {python}，{machine} CPU。"
    "用同样的写法调用时，paddle 与 torch 还有哪些计算不同，见[差异表](atlas.md)。\n",
    "here": "已在此环境中复现：{versions}。",
    "not": "未在此环境中复现：没有安装 {missing}。",
    "other": "未在此环境中复现（{versions}）：padiff 的结论不同。",
    "equal": "**如何对齐：** ",
}


def section(difference: Difference, words: Words, said: str | None, language: dict[str, str]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in difference.packages)
    lines = [f"## {words.title}", "", words.what, ""]
    if said is None:
        lines += [language["not"].format(missing=", ".join(difference.missing()))]
    else:
        box = "\n".join(line for one in said.splitlines() for line in textwrap.wrap(one, WIDTH, break_on_hyphens=False))
        status = language["here" if difference.reproduced(said) else "other"]
        lines += ["```text", box, "```", "", status.format(versions=versions)]
    return "\n".join([*lines, "", language["equal"] + words.equal, ""])


def found(difference: Difference) -> str | None:
    """What padiff says of it; None where something is not installed."""
    if difference.missing():
        return None
    with tempfile.TemporaryDirectory() as folder:
        return difference.find(Path(folder))


def differences() -> list[Difference]:
    modules = (importlib.import_module(name) for name in ("functions", "models", "trainers"))
    return [one for module in modules for one in module.FOUND]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    every = differences()
    unknown = set(options.names) - {one.name for one in every}
    if unknown or (options.write and options.names):
        parser.error(f"no difference is called {', '.join(unknown)}" if unknown else "a page is written of all of them")
    said = {}
    for one in every:
        if not options.names or one.name in options.names:
            said[one.name] = found(one)
            text = said[one.name]
            status = "" if text is None or one.reproduced(text) else "NOT REPRODUCED: "
            print(f"{one.name}: {status}{text or 'not installed: ' + ', '.join(one.missing())}\n", flush=True)
    if options.write:
        about = {"python": platform.python_version(), "machine": platform.machine()}
        for path, language, words in (("", ENGLISH, "english"), ("zh", CHINESE, "chinese")):
            parts = [section(one, getattr(one, words), said[one.name], language) for one in every]
            page = ROOT / "docs" / path / "differences.md"
            page.write_text("\n".join([language["head"].format(**about), *parts]), encoding="utf-8")


if __name__ == "__main__":
    main()
