"""What the tutorial shows is what happens: its scripts are run, and its commands, in their order."""

from __future__ import annotations

import re
import shlex

import pytest
from hard.children import run_child
from kit.forking import python_with_frameworks

from padiff_cli.main import main

from .pages import DOCS, Page

PAGE = Page.of(DOCS / "tutorial.md")
#: Figures differ from machine to machine; and the first weights of the port are drawn anew each time.
_FIGURE = re.compile(r"\d[\d.,e+-]*")
#: The reference's first weights decide which tensor comes closest to its limit. The line stays one, as lines are named.
_SEEDED = ("import torch\n", "import torch; torch.manual_seed(0)\n")


def _commands(text):
    """Each command of a block, with the lines of what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *lines = part.splitlines()
        yield shlex.split(command), lines


def _same_but_for_figures(line, printed):
    known = [_FIGURE.sub("N", one.strip()) for one in printed]
    return _FIGURE.sub("N", line.strip()) in known


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_tutorial_goes_from_two_scripts_to_a_match(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("paddle")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    equal = "import padiff\n\npadiff.start_from"
    verdicts = []
    for kind, text in PAGE.blocks:
        if text.startswith("# train_"):
            (tmp_path / text.split()[1]).write_text(text.replace(*_SEEDED, 1))
        elif text.startswith(equal):
            port = tmp_path / "train_paddle.py"
            port.write_text(port.read_text().replace("optimizer = ", f"{text}optimizer = ", 1))
        elif kind == "console":
            if len(verdicts) == 2:  # the last section: mend it
                port = tmp_path / "train_paddle.py"
                port.write_text(port.read_text().replace("momentum=0.1", "momentum=0.9"))
            for (program, *arguments), lines in _commands(text):
                assert program == "padiff"
                if arguments[0] == "compare":
                    code = main(arguments)
                    printed = capsys.readouterr().out.splitlines()
                    verdicts.append((code, " ".join(" ".join(printed).split())))
                    # Where a line ends depends on its figures.
                    whole = _FIGURE.sub("N", verdicts[-1][1])
                    shown = [line for line in lines if line not in ("...", "") and "environment" not in line]
                    masked = [_FIGURE.sub("N", " ".join(line.split())) for line in shown if "~~" not in line]
                    assert [line for line in masked if line not in whole] == [], printed
                else:
                    python = [*python_with_frameworks(), "-W", "ignore"]
                    done = run_child([*python, "-m", program, *arguments], cwd=tmp_path)
                    printed = (done.stdout + done.stderr).splitlines()
                    assert done.returncode == 0, done.stderr
                    assert all(_same_but_for_figures(line, printed) for line in lines if line != "..."), done.stderr
    codes, sentences = zip(*verdicts)
    assert codes == (1, 1, 0)
    assert "cause the runs start from different weights" in sentences[0] and "proven" in sentences[0]
    assert sentences[1].startswith(
        "DIFFER step 1, weight: 1.running_mean cause the candidate's running statistics take 0.9"
    )
    assert "nn.BatchNorm2D(..., momentum=0.9)" in sentences[1]
    assert sentences[2].startswith("MATCH 1,140 tensors in 30 steps")
