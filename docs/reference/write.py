"""Write the pages of this folder, in both languages: ``python docs/reference/write.py``.

Which names a page has stands here, once for both languages; `tests/docs` sees to it that every public name is on one.
``commands.md`` holds what ``padiff COMMAND --help`` prints. ``docs/llms.txt`` lists all pages for language models, as
https://llmstxt.org describes it: the titles are those of the menu, and behind each stand the headings of the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
#: Of a page: its title and a sentence, in English and Chinese; its names, each with the members to show (None: all).
PAGES: dict[str, tuple[tuple[str, str], tuple[str, str], dict[str, list[str] | None]]] = {
    "recording": (
        ("Recording", "录制"),
        (
            "`padiff.record` records a training loop. [Record a loop of your own](../recording.md) shows how.",
            "`padiff.record` 录制一个训练循环。用法见[录制自己的训练循环](../recording.md)。",
        ),
        {
            "padiff.record": None,
            "padiff.recorder.options.RecordOptions": None,
            "padiff.recorder.options.RunOptions": None,
            "padiff.Recorder": ["try_dump", "log_loss", "log_batch", "declare", "due", "run", "info", "active"],
            "padiff.Schedule": [],
            "padiff.Detail": [],
        },
    ),
    "callbacks": (
        ("Callbacks", "回调"),
        (
            "One `PaDiffCallback` for each trainer. All take the options of `TrainingOptions` and of "
            "[`RunOptions`](recording.md).",
            "每种 Trainer 有一个 `PaDiffCallback`。它们都接受 `TrainingOptions` 和 [`RunOptions`](recording.md) 中的选项。",
        ),
        {
            "padiff_lightning.callback.PaDiffCallback": [],
            "padiff_hapi.callback.PaDiffCallback": [],
            "padiff_transformers.callback.PaDiffCallback": [],
            "padiff_paddleformers.callback.PaDiffCallback": [],
            "padiff_hooks.trainers.TrainerEvents": [],
            "padiff_hooks.options.TrainingOptions": None,
            "padiff_hooks.results.TrainingResults": ["first_report", "first_diff", "report"],
        },
    ),
    "comparing": (
        ("Comparing", "比较"),
        (
            "`padiff.compare_runs` compares two runs and gives a `Report`. [Compare two runs](../comparing.md) shows how.",
            "`padiff.compare_runs` 比较两次 run，返回 `Report`。用法见[比较两次 run](../comparing.md)。",
        ),
        {
            "padiff.compare_runs": None,
            "padiff.open_run": None,
            "padiff.Report": ["text", "brief", "to_pandas", "to_arrow"],
            "padiff.records.report_data.ReportData": ["passed", "outcome", "failed", "worst", "standing"],
            "padiff.records.FirstDiff": ["max_abs", "max_rel", "message"],
            "padiff.records.Cause": [],
            "padiff.records.Diff": ["compared", "counts", "excess", "floors", "grade"],
            "padiff.records.Pair": [],
            "padiff.records.Coverage": ["unrecorded", "share", "complete"],
            "padiff.records.Standing": [],
            "padiff.NoisePolicy": [],
            "padiff.Tolerance": [],
            "padiff.Alignment": [],
            "padiff.check_report": None,
            "padiff.check_params": None,
            "padiff.check_weights": None,
            "padiff.check_grads": None,
        },
    ),
    "replaying": (
        ("Equal starts and replay", "相同起点与重放"),
        (
            "What carries weights, optimizer state and batches from one run to the other model. "
            "[Start both equal](../start-equal.md) and [Replay steps](../replay.md) show how.",
            "把一次 run 的权重、优化器状态和 batch 带给另一个模型。用法见[让两侧从同一起点开始](../start-equal.md)"
            "和[重放 step](../replay.md)。",
        ),
        {
            "padiff.start_from": None,
            "padiff.assign_weight": None,
            "padiff.add_special_init": None,
            "padiff.LayerMap": ["map", "auto", "ignore", "ignore_recursivly", "ignore_class"],
            "padiff.batches": None,
            "padiff.replaying.feeding.RunBatch": ["inputs", "kwargs", "named", "labels"],
            "padiff.replay": None,
            "padiff.Replay": ["report", "isolate", "loss_scale"],
            "padiff.calibrate": None,
            "padiff.resync": None,
            "padiff.replaying.resync_experiments.Resync": ["helping", "sentence", "plain"],
        },
    ),
    "models": (
        ("Two models at once", "直接比较两个模型"),
        (
            "PaDiff's calls. [Come from PaDiff](../migrating.md) says what each of its generations means.",
            "PaDiff 的接口。各代接口的含义见[从 PaDiff 迁移](../migrating.md)。",
        ),
        {
            "padiff.auto_diff": None,
            "padiff.create_model": None,
            "padiff.ProxyModel": None,
            "padiff.check_dataloader": None,
            "padiff.get_dump_root_path": None,
            "padiff.set_dump_root_path": None,
        },
    ),
    "testing": (
        ("The pytest fixture", "pytest fixture"),
        (
            "The fixture `padiff` has these methods. [Test a port](../ci.md) shows how to use them.",
            "fixture `padiff` 有以下方法。用法见[在测试与 CI 中使用](../ci.md)。",
        ),
        {"padiff_pytest.fixture.Padiff": ["assert_same", "golden", "golden_run", "golden_command"]},
    ),
    "files": (
        ("Pages, scripts and lines", "页面、脚本与记录行"),
        ("What reads and writes files beside run folders.", "读写 run 目录以外文件的函数。"),
        {
            "padiff_page.page": None,
            "padiff_page.page_parts": None,
            "padiff.repro.write_repro": None,
            "padiff_hooks.step_lines.read": None,
        },
    ),
    "errors": (
        ("Errors", "错误"),
        (
            "Every error that padiff raises on purpose derives from `padiff.PadiffError`.",
            "padiff 主动抛出的错误都派生自 `padiff.PadiffError`。",
        ),
        {
            "padiff.PadiffError": [],
            "padiff.errors.UsageError": [],
            "padiff.errors.SelectionError": [],
            "padiff.errors.OptionError": [],
            "padiff.errors.RunFolderError": [],
            "padiff.errors.TensorFileError": [],
            "padiff.errors.UnwritableFolderError": [],
            "padiff.errors.SketchOnlyError": [],
            "padiff.errors.WriterError": [],
            "padiff.errors.NothingToCompareError": [],
            "padiff.errors.RunsDifferError": [],
        },
    ),
}
#: What else to ask of mkdocstrings for a name.
MORE = {
    "padiff.LayerMap": ["inherited_members: true"],
    **{
        f"padiff_{host}.callback.PaDiffCallback": ["show_root_full_path: true"]
        for host in ("lightning", "hapi", "transformers", "paddleformers")
    },
}
COMMANDS = (
    "run", "compare", "watch", "show", "mcp", "schema", "map", "doctor", "replay", "calibrate", "resync", "port-check", "verify", "fix", "bisect", "golden", "repro", "atlas", "demo",
)  # fmt: skip
OF_COMMANDS = (
    ("Commands", "What `padiff COMMAND --help` prints. `python -m padiff` is the same command."),
    ("命令", "`padiff COMMAND --help` 的输出。`python -m padiff` 是同一个命令。"),
)


def page(name: str, language: int) -> str:
    titles, sentences, names = PAGES[name]
    lines = [f"# {titles[language]}", "", sentences[language], ""]
    for full, members in names.items():
        lines.append(f"::: {full}")
        if members is not None:
            shown = "false" if not members else "[" + ", ".join(members) + "]"
            lines += ["    options:", f"      members: {shown}", *(f"      {option}" for option in MORE.get(full, ()))]
        lines.append("")
    return "\n".join(lines)


def commands(language: int) -> str:
    title, sentence = OF_COMMANDS[language]
    lines = [f"# {title}", "", sentence, ""]
    for command in COMMANDS:
        environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
        asked = [sys.executable, "-m", "padiff", command, "--help"]
        text = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
        lines += [f"## padiff {command}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(lines)


def llms() -> str:
    """Return the list of the English pages, with the headings of each."""
    intro = (DOCS / "index.md").read_text(encoding="utf-8").split("\n\n")[1]
    lines = ["# padiff", "", f"> {' '.join(intro.split())}"]
    menu = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("  - 中文:")[0]
    for title, path in re.findall(r"^ +- ([^:\n]+):(?: (\S+\.md))?$", menu, re.MULTILINE):
        if path == "index.md":
            lines += ["", "## First", ""]
        elif path:
            lines.append(f"- [{title}]({path}){_headings((DOCS / path).read_text(encoding='utf-8'))}")
        else:
            lines += ["", f"## {title}", ""]
    skill = "../padiff/.agents/skills/align-two-trainings/SKILL.md"
    lines += ["", "## For agents", "", f"- [The skill: align two trainings]({skill})"]
    return "\n".join(lines) + "\n"


def _headings(page: str) -> str:
    """Return the headings of a page's parts, as the end of a line."""
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^## (.+)$", prose, re.MULTILINE)
    return f": {'; '.join(found)}" if found else ""


def main() -> None:
    for language, folder in enumerate(("reference", "zh/reference")):
        for name in PAGES:
            (DOCS / folder / f"{name}.md").write_text(page(name, language), encoding="utf-8")
        (DOCS / folder / "commands.md").write_text(commands(language), encoding="utf-8")
    (DOCS / "llms.txt").write_text(llms(), encoding="utf-8")


if __name__ == "__main__":
    main()
