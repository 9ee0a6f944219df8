"""Trainings with planted faults: repositories, configs, packages and environments to bisect."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from padiff_cli.main import main

#: Trains a small net. Each key of `DEFAULTS` changes one thing of it.
TRAINING = """
import torch
from torch import nn

def train(c):
    torch.manual_seed(c["seed"])
    act = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}[c["activation"]]
    net = nn.Sequential(
        nn.Linear(8, c["width"]), nn.LayerNorm(c["width"], eps=c["eps"]), act(), nn.Linear(c["width"], 4)
    )
    if c["init"] == "scaled":
        with torch.no_grad():
            net[0].weight.mul_(c["gain"])
    rule = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[c["optimizer"]]
    options = {"momentum": c["momentum"]} if c["optimizer"] == "sgd" else {"betas": (0.9, c["beta2"])}
    optimizer = rule(net.parameters(), lr=c["lr"], weight_decay=c["decay"], **options)
    data = torch.Generator().manual_seed(1)
    for step in range(c["steps"]):
        x = torch.randn(16, 8, generator=data) * c["scale"]
        y = torch.randint(0, 4, (16,), generator=data)
        if step == c.get("fails_at"):
            raise ValueError(f"step {step}")
        if step >= c["late"]:
            optimizer.param_groups[0]["lr"] = c["lr"] * c["late_factor"]
        loss = nn.functional.cross_entropy(net(x), y, label_smoothing=c["smoothing"])
        loss.backward()
        if c["clip"]:
            nn.utils.clip_grad_norm_(net.parameters(), c["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
"""
DEFAULTS: dict[str, Any] = {
    "seed": 0, "activation": "relu", "width": 16, "eps": 1e-05, "init": "plain", "gain": 1.0, "optimizer": "sgd",
    "momentum": 0.9, "beta2": 0.999, "lr": 0.1, "decay": 0.0, "steps": 6, "scale": 1.0, "late": 4, "late_factor": 1.0,
    "smoothing": 0.0, "clip": False, "clip_norm": 1.0,
}  # fmt: skip
#: Keys that a config holds and the training ignores.
IDLE = ("name", "log_every", "save_dir", "notes", "eval_every", "workers", "color", "host", "user", "tag", "port")


def run_bisect(capsys: Any, *words: str | Path) -> tuple[int, dict[str, Any], str]:
    """Run `padiff bisect` with these words and ``--json``: exit code, JSON, and what it printed."""
    place = words.index("--")
    code = main([str(word) for word in ("bisect", "--json", "out.json", *words[:place], *words[place:])])
    captured = capsys.readouterr()
    path = Path("out.json")
    content = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    return code, content, captured.out + captured.err


def script(head: str, call: str) -> str:
    """Return a script: the training, and how it gets its settings."""
    return f"{TRAINING}\n{head}\ntrain({call})\n"


def git(folder: Path, *words: str) -> str:
    """Run git in a folder."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def repository(folder: Path, changes: Sequence[dict[str, Any]]) -> list[str]:
    """Make a repository with one commit for each change of the settings, after a first one; return their hashes.

    An empty change edits the documents. A key ``broken`` gives a script that does not run.
    """
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    settings, hashes = dict(DEFAULTS), []
    for number, change in enumerate([{}, *changes]):
        settings |= change
        broken = settings.pop("broken", False)
        text = script("import sys\nsys.exit('a broken commit')" if broken else "", "SETTINGS")
        lines = "\n".join(f"    {key!r}: {value!r}," for key, value in settings.items())
        (folder / "train.py").write_text(f"SETTINGS = {{\n{lines}\n}}\n{text}")
        (folder / "README").write_text(f"commit {number}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", f"change {number}: {', '.join(change) or 'documents'}")
        hashes.append(git(folder, "rev-parse", "HEAD"))
    return hashes


def configs(folder: Path, changes: dict[str, Any], count: int = 12, suffix: str = "json") -> tuple[Path, Path]:
    """Write two configs that differ in so many keys: in those of the changes, spread among idle ones."""
    import yaml

    idle = list(IDLE[: count - len(changes)])
    keys, every = [], max(1, count // len(changes)) if changes else count
    for number, key in enumerate(changes):
        keys += [*idle[number * (every - 1) : (number + 1) * (every - 1)], key]
    keys += [key for key in idle if key not in keys]
    paths = []
    for side in ("good", "bad"):
        values = {
            key: changes.get(key, f"new {key}") if side == "bad" else DEFAULTS.get(key, f"old {key}") for key in keys
        }
        rest = {key: value for key, value in DEFAULTS.items() if key not in keys}
        content = {"train": values, "fixed": rest}
        paths.append(folder / f"{side}.{suffix}")
        text = json.dumps(content) if suffix == "json" else yaml.safe_dump(content, sort_keys=False)
        paths[-1].write_text(text)
    return paths[0], paths[1]


CONFIG_HEAD = """
import json, sys
content = json.load(open(sys.argv[1]))
settings = {**content["fixed"], **content["train"]}
"""


def wheel(folder: Path, version: str, source: str, name: str = "padiffplanted", changelog: str = "") -> None:
    """Write a wheel of a package that has one module."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if changelog:
        files[f"{name}/CHANGELOG.md"] = changelog
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
