"""`padiff bisect` on planted faults: commits, configs, packages, environments. Expected culprits are those planted."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kit.forking import interpreter

from .planted import CONFIG_HEAD, DEFAULTS, TRAINING, configs, git, repository, run_bisect, script, wheel

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
#: Each of these runs a training five to fourteen times; the search itself is tested in `test_search`.
LONG = pytest.mark.skipif("PADIFF_LONG" not in os.environ, reason="a minute long: set PADIFF_LONG=1")


@pytest.fixture(autouse=True)
def _folder(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    if "package" not in request.node.name:
        # Trials are forks of one process: a virtual environment needs an interpreter of its own.
        monkeypatch.setattr(sys, "executable", str(interpreter()))


def commits(tmp_path, monkeypatch, capsys, changes, *words):
    hashes = repository(tmp_path / "repo", changes)
    monkeypatch.chdir(tmp_path / "repo")
    code, content, text = run_bisect(
        capsys,
        "--dir",
        tmp_path / "b",
        "--good",
        hashes[0],
        "--bad",
        hashes[-1],
        *words,
        "--",
        sys.executable,
        "train.py",
    )
    return hashes, code, content, text


# -- commits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [pytest.param(1, marks=LONG), 6, pytest.param(8, marks=LONG)])
def test_one_of_eight_commits_is_found_in_log2_runs(tmp_path, monkeypatch, capsys, place):
    changes = [{"momentum": 0.5} if number == place else {} for number in range(1, 9)]
    hashes, code, content, text = commits(tmp_path, monkeypatch, capsys, changes)
    assert code == 0, text
    assert content["culprits"] == [hashes[place]]
    assert content["search_runs"] <= math.ceil(math.log2(8)) + 2
    assert f"change {place}: momentum" in text
    assert "'momentum': 0.5" in text  # its own diff
    assert content["diagnostic"]["outcome"] == "differ"
    assert content["diagnostic"]["stage"] == "update"
    assert content["findings"][0]["place"]["stage"] == "update"
    # Nothing of it is left in the repository.
    assert len(git(Path(), "worktree", "list").splitlines()) == 1
    assert git(Path(), "status", "--porcelain") == ""


@LONG
@pytest.mark.parametrize(
    ("count", "first", "second"),
    [
        pytest.param(12, (3, {"lr": 0.2}), (8, {"eps": 0.01}), id="at two places"),
        pytest.param(9, (2, {"lr": 0.2}), (6, {"lr": 0.3}), id="at one place"),
        pytest.param(8, (1, {"late_factor": 3.0}), (5, {"decay": 0.3}), id="one shows only later"),
    ],
)
def test_two_commits_are_both_found(tmp_path, monkeypatch, capsys, count, first, second):
    faults = dict([first, second])
    changes = [faults.get(number, {}) for number in range(count)]
    hashes, code, content, text = commits(tmp_path, monkeypatch, capsys, changes)
    assert code == 0, text
    assert sorted(content["culprits"]) == sorted(hashes[number + 1] for number in faults)


@LONG
def test_a_commit_that_does_not_run_is_skipped(tmp_path, monkeypatch, capsys):
    changes = [{} for _ in range(8)]
    changes[3], changes[4], changes[6] = {"broken": True}, {"broken": True, "note": 1}, {"smoothing": 0.2}
    hashes, code, content, text = commits(tmp_path, monkeypatch, capsys, changes)
    assert code == 0, text
    assert content["culprits"] == [hashes[7]]
    assert any(trial["verdict"] == "skip" for trial in content["trials"])


def test_a_commit_that_fails_behind_the_fault_is_judged(tmp_path, monkeypatch, capsys):
    changes = [{} for _ in range(6)]
    changes[1], changes[2], changes[4] = {"fails_at": 3}, {"smoothing": 0.2}, {"fails_at": None}
    hashes, code, content, text = commits(tmp_path, monkeypatch, capsys, changes)
    assert (code, content["culprits"]) == (0, [hashes[3]]), text
    assert not any(trial["verdict"] == "skip" for trial in content["trials"])


@LONG
def test_a_culprit_hidden_by_broken_commits_is_one_of_several_suspects(tmp_path, monkeypatch, capsys):
    changes = [{} for _ in range(6)]
    changes[2], changes[3], changes[4] = {"broken": True, "smoothing": 0.2}, {"broken": True, "n": 2}, {"n": 3}
    hashes, code, content, text = commits(tmp_path, monkeypatch, capsys, changes)
    assert code == 3, text
    assert content["culprits"] == []
    assert content["findings"][0]["suspects"] == hashes[3:6]
    assert "one of these" in text


@LONG
@pytest.mark.parametrize("fault", [{"momentum": 0.5}, {"activation": "gelu"}], ids=["setting", "tensor"])
def test_a_fault_that_was_taken_back_in_between_does_not_mislead(tmp_path, monkeypatch, capsys, fault):
    # The first difference of good and bad is of the fault; one commit changes the seed for a while.
    changes = [{} for _ in range(10)]
    changes[3], changes[5], changes[8] = {"seed": 5}, {"seed": 0}, fault
    hashes, code, content, text = commits(tmp_path, monkeypatch, capsys, changes)
    assert code == 0, text
    assert hashes[9] in content["culprits"]
    assert not set(content["culprits"]) - {hashes[9]}


@LONG
def test_a_merge_history_names_the_commit_of_the_branch(tmp_path, monkeypatch, capsys):
    hashes = repository(tmp_path / "repo", [{}, {}])
    repo = tmp_path / "repo"
    monkeypatch.chdir(repo)
    git(repo, "checkout", "-q", "-b", "side", hashes[1])
    for number, value in enumerate((0.9, 0.5, 0.5)):
        text = (repo / "train.py").read_text()
        for old in ("0.9", "0.5"):
            text = text.replace(f"'momentum': {old}", f"'momentum': {value}")
        (repo / "train.py").write_text(text)
        (repo / "notes").write_text(f"{number}")
        git(repo, "add", "-A")
        git(repo, "commit", "-q", "-m", f"side {number}")
        hashes.append(git(repo, "rev-parse", "HEAD"))
    git(repo, "checkout", "-q", "main")
    git(repo, "merge", "-q", "--no-ff", "-m", "merge", "side")
    code, content, text = run_bisect(
        capsys, "--dir", tmp_path / "b", "--good", hashes[0], "--bad", "HEAD", "--", sys.executable, "train.py"
    )
    assert code == 0, text
    assert content["culprits"] == [hashes[4]]


def test_a_trial_that_runs_the_users_own_checkout_is_refused(tmp_path, monkeypatch, capsys):
    hashes = repository(tmp_path / "repo", [{}, {"momentum": 0.5}])
    monkeypatch.chdir(tmp_path / "repo")
    own = (
        f"exec(compile(open({str(tmp_path / 'repo/train.py')!r}).read(), {str(tmp_path / 'repo/train.py')!r}, 'exec'))"
    )
    command = ("sh", "-c", f"echo {own!r} > started.py; exec {sys.executable} started.py")
    code, _, text = run_bisect(capsys, "--dir", tmp_path / "b", "--good", hashes[0], "--", *command)
    assert code == 2, text
    assert "it ran train.py of your own checkout, not of this commit" in " ".join(text.split())


@LONG
def test_runs_that_match_have_no_culprit(tmp_path, monkeypatch, capsys):
    _, code, content, text = commits(tmp_path, monkeypatch, capsys, [{}, {}])
    assert code == 1
    assert content["culprits"] == []
    assert content["outcome"] == "match"
    assert "--steps" in text


@LONG
def test_a_training_that_does_not_repeat_itself_is_said(tmp_path, monkeypatch, capsys):
    hashes = repository(tmp_path / "repo", [{}, {}, {}])
    monkeypatch.chdir(tmp_path / "repo")
    path = Path("train.py")
    for number in range(2):
        path.write_text(path.read_text().replace('torch.manual_seed(c["seed"])', "torch.seed()") + f"# {number}\n")
        git(Path(), "commit", "-qam", f"unseeded {number}")
    code, content, text = run_bisect(
        capsys, "--dir", tmp_path / "b", "--good", "HEAD~1", "--bad", "HEAD", "--", sys.executable, "train.py"
    )
    assert code == 3, text
    assert content["culprits"] == []
    assert "does not repeat itself" in text
    assert hashes


@LONG
def test_an_interrupted_bisection_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    changes = [{"momentum": 0.5} if number == 3 else {} for number in range(1, 9)]
    hashes, code, content, _ = commits(tmp_path, monkeypatch, capsys, changes)
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "b/trials").glob("*/trial.json")}
    assert code == 0
    assert content["new_runs"] == content["runs"]
    again = ("--dir", tmp_path / "b", "--good", hashes[0], "--bad", hashes[-1], "--", sys.executable, "train.py")
    code, repeated, _ = run_bisect(capsys, *again)
    assert code == 0
    assert repeated["culprits"] == content["culprits"]
    assert repeated["new_runs"] == 0
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    # A trial's file that is no trial is not believed.
    for path in runs:
        path.write_text('{"steps": "many"}')
    code, repeated, _ = run_bisect(capsys, *again)
    assert repeated["culprits"] == content["culprits"]
    assert repeated["new_runs"] == content["runs"]
    # Another bisection is not mixed into the folder.
    code, _, text = run_bisect(capsys, *again[:2], "--good", hashes[1], *again[4:])
    assert code == 2
    assert "holds another bisection" in text


# -- configs --------------------------------------------------------------------------------------------------------


def keys(tmp_path, capsys, changes, *words, suffix="json", head=CONFIG_HEAD):
    good, bad = configs(tmp_path, changes, suffix=suffix)
    (tmp_path / "train.py").write_text(script(head, "settings"))
    return run_bisect(
        capsys, "--dir", tmp_path / "b", "--config", good, bad, *words, "--", sys.executable, "train.py", "{config}"
    )


@LONG
@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 0.3},
        {"eps": 0.01, "lr": 0.3},  # two causes, at different places
        {"lr": 0.3, "decay": 0.2},  # two causes at one place
        {"clip": True, "clip_norm": 0.01},  # they act only together
        {"optimizer": "adam", "momentum": 0.5},  # the first one hides the second
        {"init": "scaled", "gain": 3.0},
        {"seed": 3, "activation": "gelu"},  # the first one comes before the second
        {"late_factor": 2.0, "smoothing": 0.1},  # one shows in step 4 only
    ],
    ids=lambda changes: "+".join(changes),
)
def test_keys_of_twelve_that_make_the_runs_differ_are_found(tmp_path, capsys, changes):
    code, content, text = keys(tmp_path, capsys, changes)
    assert code == 0, text
    assert sorted(content["culprits"]) == sorted(f"train.{key}" for key in changes)
    together = {"clip", "init"} & set(changes)
    assert any(len(finding["culprits"]) == 2 for finding in content["findings"]) == bool(together)


@LONG
def test_one_key_of_twelve_takes_few_runs(tmp_path, capsys):
    code, content, text = keys(tmp_path, capsys, {"activation": "tanh"})
    assert code == 0, text
    assert content["culprits"] == ["train.activation"]
    assert content["search_runs"] <= math.ceil(math.log2(12)) + 2
    assert content["runs"] <= math.ceil(math.log2(12)) + 4


def test_a_key_that_the_diagnostic_names_is_tried_first(tmp_path, capsys, monkeypatch):
    # Else the share of the time that a start takes, and with it the load of the machine, decides how long trials are.
    monkeypatch.setattr("padiff_cli.bisect.trials.Trial.is_mostly_start", True)
    code, content, text = keys(tmp_path, capsys, {"lr": 0.3})
    assert code == 0, text
    assert content["culprits"] == ["train.lr"]
    assert (content["search_runs"], content["runs"]) == (3, 4)


@LONG
def test_a_yaml_config_keeps_its_numbers_as_they_are_written(tmp_path, capsys):
    head = f"""
import re, sys, yaml
text = open(sys.argv[1]).read()
assert re.search(r"^ *rate: [13]e-1$", text, re.M), text  # other readers than PyYAML take it for a number
content = yaml.safe_load(text)
settings = {{**{DEFAULTS!r}, "lr": float(content["optim"]["rate"]), "smoothing": content["smoothing"]}}
"""
    (tmp_path / "train.py").write_text(script(head, "settings"))
    Path("good.yaml").write_text("# tuned\noptim:\n  rate: 1e-1\n  name: a\nsmoothing: 0.0\nold: 1\n")
    Path("bad.yaml").write_text("optim:\n  rate: 3e-1\n  name: b\nsmoothing: 0.0\nnew: [1, 2]\n")
    code, content, text = run_bisect(
        capsys, "--dir", "b", "--config", "good.yaml", "bad.yaml", "--", sys.executable, "train.py", "{config}"
    )
    assert code == 0, text
    assert content["culprits"] == ["optim.rate"]


# -- packages -------------------------------------------------------------------------------------------------------

PACKAGE_HEAD = f"""
import padiffplanted
settings = {{**{DEFAULTS!r}, **padiffplanted.SETTINGS}}
"""


def packages(tmp_path, monkeypatch, changes):
    settings, notes = {}, "# Changelog\n"
    for number, change in enumerate(changes):
        settings |= change
        notes = f"# Changelog\n\n## 1.{number}.0\n\n- set {', '.join(change) or 'nothing'}\n{notes[11:]}"
        wheel(tmp_path / "wheels", f"1.{number}.0", f"SETTINGS = {settings!r}\n", changelog=notes)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "train.py").write_text(script(PACKAGE_HEAD, "settings"))


@LONG
def test_the_version_of_a_package_is_found(tmp_path, monkeypatch, capsys):
    packages(tmp_path, monkeypatch, [{}, {}, {"beta2": 0.9}, {"lr": 0.2}, {}, {}])
    code, content, text = run_bisect(
        capsys, "--dir", "b", "--package", "padiffplanted==1.0.0..1.5.0", "--", sys.executable, "train.py"
    )
    assert code == 0, text
    assert content["culprits"] == ["padiffplanted==1.3.0"]
    assert "set lr" in text  # the changelog's lines of this version
    assert "set beta2" not in text


@pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv")
@pytest.mark.parametrize("lists", ["pip", pytest.param("uv", marks=LONG)])  # uv fetches pip from the index
def test_the_version_of_a_package_is_found_with_uv(tmp_path, monkeypatch, capsys, lists):
    packages(tmp_path, monkeypatch, [{}, {"lr": 0.2}, {}])
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    if lists == "uv":  # an environment that uv made has no pip
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    code, content, text = run_bisect(
        capsys, "--dir", "b", "--package", "padiffplanted==1.0.0..1.2.0", "--", sys.executable, "train.py"
    )
    assert code == 0, text
    assert content["culprits"] == ["padiffplanted==1.1.0"]
    assert any((tmp_path / "cache").rglob("padiffplanted*"))  # uv installed it


@LONG
def test_two_versions_of_a_package_are_found(tmp_path, monkeypatch, capsys):
    packages(tmp_path, monkeypatch, [{}, {"lr": 0.2}, {}, {"activation": "tanh"}])
    code, content, text = run_bisect(
        capsys, "--dir", "b", "--package", "padiffplanted==1.0.0..1.3.0", "--", sys.executable, "train.py"
    )
    assert code == 0, text
    assert sorted(content["culprits"]) == ["padiffplanted==1.1.0", "padiffplanted==1.3.0"]


@LONG
def test_of_several_packages_the_one_that_matters_is_found(tmp_path, monkeypatch, capsys):
    packages(tmp_path, monkeypatch, [{}, {"scale": 2.0}, {}])
    for number in range(4):
        wheel(tmp_path / "wheels", f"2.{number}", "", name="padiffidle")
    code, content, text = run_bisect(
        capsys, "--dir", "b", "--package", "padiffidle==2.0..2.3", "--package", "padiffplanted==1.0.0..1.2.0",
        "--", sys.executable, "train.py",
    )  # fmt: skip
    assert code == 0, text
    assert content["culprits"] == ["padiffplanted==1.1.0"]


@LONG
def test_a_version_of_a_package_that_is_not_there_is_said_with_those_that_are(tmp_path, monkeypatch, capsys):
    packages(tmp_path, monkeypatch, [{}, {}])
    code, _, text = run_bisect(
        capsys, "--dir", "b", "--package", "padiffplanted==1.0.0..1.9.0", "--", sys.executable, "train.py"
    )
    assert code == 2
    assert "1.9.0" in text
    assert "1.0.0, 1.1.0" in text


# -- environments ---------------------------------------------------------------------------------------------------

ENVIRONMENT_HEAD = f"""
import os
settings = dict({DEFAULTS!r})
if os.environ.get("FAST_MATH"): settings["activation"] = "gelu"
if int(os.environ.get("OMP_NUM_THREADS", 1)) >= 3: settings["smoothing"] = 0.2
"""


@LONG
def test_a_variable_and_a_number_of_threads_are_found(tmp_path, capsys):
    (tmp_path / "train.py").write_text(script(ENVIRONMENT_HEAD, "settings"))
    code, content, text = run_bisect(
        capsys, "--dir", "b", "--env", "TZ=UTC..CET", "FAST_MATH=..1", "LANG=C..C.UTF-8", "OMP_NUM_THREADS=1..4",
        "--", sys.executable, "train.py",
    )  # fmt: skip
    assert code == 0, text
    assert sorted(content["culprits"]) == ["FAST_MATH", "OMP_NUM_THREADS"]
    assert "OMP_NUM_THREADS=3" in text  # from how many threads on


# -- git bisect run -------------------------------------------------------------------------------------------------


def test_git_bisect_run_works_with_the_exit_codes_of_compare(tmp_path, monkeypatch):
    changes = [{"momentum": 0.5} if number == 3 else {} for number in range(1, 6)]
    changes[0] = {"broken": True}
    hashes = repository(tmp_path / "repo", changes)
    padiff = f"{sys.executable} -m padiff"
    git(tmp_path / "repo", "checkout", "-q", hashes[0])
    environment = {**os.environ, "PADIFF_QUIET": "1"}
    run = f"{padiff} run --existing overwrite --dir ../{{}} -- {sys.executable} train.py"
    subprocess.run(run.format("good"), shell=True, cwd=tmp_path / "repo", env=environment, check=True)
    git(tmp_path / "repo", "bisect", "start", hashes[-1], hashes[0])
    test = f"rm -rf ../now; {run.format('now')}; {padiff} compare --exit-codes git ../good ../now"
    text = subprocess.run(
        ["git", "bisect", "run", "sh", "-c", test],
        cwd=tmp_path / "repo",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert f"{hashes[3]} is the first bad commit" in text.stdout, text.stdout + text.stderr


@LONG
def test_json_of_the_result_is_complete(tmp_path, capsys):
    code, content, text = keys(tmp_path, capsys, {"lr": 0.3})
    assert code == 0, text
    assert set(content) >= {
        "schema_version", "kind", "outcome", "culprits", "findings", "diagnostic", "runs", "search_runs", "new_runs",
        "seconds", "trials", "folder",
    }  # fmt: skip
    assert json.dumps(content)
    assert TRAINING


RANKS = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.Generator().manual_seed({seed})
for step in range(2):
    optimizer.zero_grad()
    net(torch.randn(3, 4, generator=data)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_difference_in_the_second_process_only_is_judged_there(tmp_path, monkeypatch, capsys):
    root = tmp_path / "repo"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    hashes = []
    for number in range(5):
        (root / "train.py").write_text(RANKS.format(seed=f"{5 if number < 2 else 6} * dist.get_rank()"))
        (root / "README").write_text(str(number))
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", f"change {number}")
        hashes.append(git(root, "rev-parse", "HEAD"))
    monkeypatch.chdir(root)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    words = ("--dir", tmp_path / "b", "--good", hashes[0], "--first", "--", *launcher, "train.py")
    code, content, text = run_bisect(capsys, *words)
    assert code == 0, text
    assert content["culprits"] == [hashes[2]], text
    assert content["findings"][0]["place"]["rank"] == 1
