"""`padiff run` and the processes below it: those that a script starts, and those of a launcher given as the command."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from hard.children import run_child, started
from kit.forking import interpreter

import padiff
import padiff_cli
from padiff_cli.run import launch, startup
from padiff_cli.run.hosts import HOSTS

pytestmark = pytest.mark.slow

# What each script prints of its training: weights before each step, as a run has them.
TORCH = """
import os, sys, time, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def train(number, say="", ranks=0, port=0):
    if ranks:
        if "RANK" not in os.environ:
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=number, world_size=ranks)
        else:
            dist.init_process_group("gloo")
            number = dist.get_rank()
    torch.manual_seed(0 if ranks else number)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    model = torch.nn.parallel.DistributedDataParallel(net) if ranks else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(number)
    for step in range(3):
        if not (ranks and number):
            print(say or number, step, net[0].weight.detach().numpy().tobytes().hex(), flush=True)
        loss = model(torch.randn(6, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if ranks:
        dist.barrier()
        time.sleep(0.5)  # a rank that ends first closes connections that others may still read
        dist.destroy_process_group()
"""
PADDLE = """
import sys, warnings
warnings.simplefilter("ignore")
import paddle
import paddle.distributed as dist

def train():
    dist.init_parallel_env()
    paddle.seed(0)
    net = paddle.nn.Sequential(paddle.nn.Linear(4, 3), paddle.nn.ReLU(), paddle.nn.Linear(3, 1))
    model = paddle.DataParallel(net)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=net.parameters())
    paddle.seed(dist.get_rank())
    for step in range(3):
        if not dist.get_rank():
            with open("printed", "a") as file:  # paddle's launcher has standard output elsewhere
                print(0, step, net[0].weight.numpy().tobytes().hex(), file=file)
        loss = model(paddle.randn([6, 4])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
"""
SPAWNED = """
if __name__ == "__main__":
    for run in range(2):
        with __import__("socket").create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        mp.spawn(train, (f"run{run}", 2, port), nprocs=2)
"""
LAUNCHED = """
if __name__ == "__main__":
    train(0, ranks=2)
    sys.exit(3 if dist.is_available() and "three" in sys.argv else 0)
"""
HOGWILD = """
if __name__ == "__main__":
    context = mp.get_context(sys.argv[1])
    if "first" in sys.argv:
        train(7)
    for number in range(2):
        process = context.Process(target=train, args=(number,))
        process.start()
        process.join()
        print(process.exitcode)
"""
ALONE = """
if __name__ == "__main__":
    train(0)
    if "fails" in sys.argv:
        raise KeyError("of the script")
    if "exits" in sys.argv:
        os._exit(5)
"""
PARENT = """
import subprocess, sys
for number in range(2):
    print(subprocess.run([sys.executable, "child.py", *sys.argv[1:]]).returncode, flush=True)
"""
LOADER = """
class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.layer = torch.nn.Linear(4, 4)  # in training mode, and called in the workers
    def __getitem__(self, index):
        with torch.enable_grad():
            return self.layer(torch.full((4,), index / 16)).detach()
    def __len__(self):
        return 16

if __name__ == "__main__":
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Data(), 4, num_workers=2, multiprocessing_context=sys.argv[1])
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, batch in enumerate(loader):
        print(0, step, net.weight.detach().numpy().tobytes().hex())
        loss = net(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
LIGHTNING = """
import logging, sys, warnings
warnings.simplefilter("ignore")
import torch
import pytorch_lightning as pl
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
    def training_step(self, batch, index):
        if self.global_rank == 0:
            print(0, index, self.net.weight.detach().numpy().tobytes().hex(), flush=True)
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
if __name__ == "__main__":
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4))
    trainer = pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         accelerator="cpu", enable_model_summary=False, devices=2, strategy=sys.argv[1])
    trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=4))
"""

PYTHON, PADIFF = [sys.executable, "-W", "ignore"], [sys.executable, "-m", "padiff", "run", "--dir", "R"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*command: object, **environment: str):
    """Run a command in this folder. What it prints, what a script wrote for it, its code and its errors."""
    Path("printed").unlink(missing_ok=True)
    done = run_child([*map(str, command)], timeout=200, env={**ENVIRONMENT, **environment})
    lines = [*done.stdout.splitlines(), *(Path("printed").read_text().splitlines() if Path("printed").exists() else [])]
    done.lines = sorted(line for line in lines if line[:1].isdigit() or line.startswith("run"))
    return done


def forked(*words: object, **environment: str):
    """`padiff run`, where not the start of processes is tested: all have the frameworks already."""
    return call(interpreter(), *PADIFF[1:], *words, **environment)


def printed_weights(lines: list[str], say: object) -> dict[int, bytes]:
    words = (line.split() for line in lines if line.count(" ") == 2)
    return {int(step): bytes.fromhex(weight) for name, step, weight in words if name == str(say)}


def recorded(folder: str, rank: int = 0) -> dict[int, bytes]:
    """The first layer's weight of each recorded step."""
    opened = padiff.open_run(folder)
    assert opened.finished(), folder
    found = {}
    for number in opened.numbers():
        step = next(step for step in opened.steps(number) if step.rank == rank)
        weight = next(record for record in step.records if record.stage == "weight")
        found[number] = np.asarray(weight.value).tobytes()
    return found


def folders() -> list[str]:
    return sorted(path.name for path in Path().glob("R*"))


# The fork trains on with the optimizer of its parent.
GOES_ON = """
if __name__ == "__main__":
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    def steps(number):
        for step in range(3):
            print(number, step, net.weight.detach().numpy().tobytes().hex(), flush=True)
            loss = net(torch.randn(6, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    steps(7)
    process = mp.get_context("fork").Process(target=steps, args=(1,))
    process.start()
    process.join()
    print(process.exitcode)
"""
CASES = {
    "a fork that goes on": (TORCH + GOES_ON, ["train.py"], {"R": 7, "R-worker-0": 1}, 1),
    "torch.multiprocessing.spawn, twice": (TORCH + SPAWNED, ["train.py"], {"R": "run0", "R-2": "run1"}, 2),
    "torchrun": (TORCH + LAUNCHED, [*TORCHRUN, "train.py"], {"R": 0}, 2),
    "hogwild, spawned": (TORCH + HOGWILD, ["train.py", "spawn"], {"R-worker-0": 0, "R-worker-1": 1}, 1),
    "hogwild, forkserver": (TORCH + HOGWILD, ["train.py", "forkserver"], {"R-worker-0": 0, "R-worker-1": 1}, 1),
    "hogwild, forked, the parent first": (
        TORCH + HOGWILD,
        ["train.py", "fork", "first"],
        {"R": 7, "R-worker-0": 0, "R-worker-1": 1},
        1,
    ),
    "subprocess": (PARENT, ["train.py"], {"R-worker-0": 0, "R-worker-1": 0}, 1),
    "data workers, forked": (TORCH + LOADER, ["train.py", "fork"], {"R": 0}, 1),
    "data workers, spawned": (TORCH + LOADER, ["train.py", "spawn"], {"R": 0}, 1),
    "paddle.distributed.spawn": (
        PADDLE + "\nif __name__ == '__main__': dist.spawn(train, nprocs=2, backend='gloo')",
        ["train.py"],
        {"R": 0},
        2,
    ),
    "paddle.distributed.launch": (
        PADDLE + "\ntrain()",
        ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--backend", "gloo", "train.py"],
        {"R": 0},
        2,
    ),
    "lightning, ddp": (LIGHTNING, ["train.py", "ddp"], {"R": 0}, 2),
    "lightning, ddp_spawn": (LIGHTNING, ["train.py", "ddp_spawn"], {"R": 0}, 2),
    "accelerate": (  # on a CPU it starts one process, unless there is MPI
        TORCH + ALONE,
        ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
         "--mixed_precision", "no", "--dynamo_backend", "no", "train.py"],
        {"R": 0},
        1,
    ),
}  # fmt: skip
NEEDED = {"paddle": "paddle", "lightning": "pytorch_lightning", "accelerate": "accelerate"}


@pytest.mark.parametrize("name", CASES)
def test_processes_are_recorded_and_print_what_they_print_without(name):
    needed = next((package for begin, package in NEEDED.items() if name.startswith(begin)), "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    text, arguments, expected, ranks = CASES[name]
    Path("train.py").write_text(text)
    Path("child.py").write_text(TORCH + ALONE)
    unchanged = call(interpreter(), "-W", "ignore", *arguments)
    # A module is a launcher here: given as the command.
    done = forked(*(["--", interpreter()] if arguments[0] == "-m" else []), *arguments)
    assert (done.returncode, done.lines) == (unchanged.returncode, unchanged.lines), done.stderr + unchanged.stderr
    assert folders() == sorted(expected), done.stderr
    for folder, say in expected.items():
        opened = padiff.open_run(folder)
        for number in opened.numbers():
            assert [step.rank for step in opened.steps(number)] == list(range(ranks))
        weights = recorded(folder)
        assert weights == printed_weights(unchanged.lines, say) and len(weights) >= 3
    if not name.startswith("paddle.distributed.launch"):  # of which the ranks write into files
        assert done.stderr.count("padiff: recording ") == len(expected), done.stderr
        assert done.stderr.count("padiff: recorded ") == len(expected)
    assert "not recorded" not in done.stderr


@pytest.mark.parametrize(
    ("command", "code", "expected"),
    [
        (["bash", "-c", "export PYTHONPATH=.; python train.py; python -I train.py; exit 7"], 7, ["R", "R-2"]),
        (["python", "train.py", "fails"], 1, ["R"]),
        (["python", "train.py", "exits"], 5, ["R"]),
        (["python", "-c", "import torch; print(1)"], 0, []),
        (["bash", "-c", "echo 1; kill -TERM $$"], -signal.SIGTERM, []),
    ],
)
def test_a_command_ends_as_without(command, code, expected):
    if expected and not launch._is_installed():
        pytest.skip("the hook's .pth file is not installed")
    Path("train.py").write_text(TORCH + ALONE)
    forks = {"PATH": f"{interpreter().parent}:{os.environ['PATH']}"}
    unchanged = call(*command, **forks)
    # The first one in fresh interpreters, which read the hook's file as they start.
    done = call(*PADIFF, "--", *command) if code == 7 else forked("--", *command, **forks)
    assert (done.returncode, done.stdout) == (unchanged.returncode, unchanged.stdout) and done.returncode == code
    assert folders() == expected
    for folder in expected:
        opened = padiff.open_run(folder)
        numbers = opened.numbers()  # of a process that exits at once, without the step that was being written
        assert numbers == [0, 1, 2][: len(numbers)] and len(numbers) >= (1 if "exits" in command else 3)
        assert opened.finished() == (code in (0, 7))
    said = [line for line in done.stderr.splitlines() if line not in unchanged.stderr.splitlines()]
    if code != 1:  # tracebacks of forks have more lines
        assert all(line.startswith("padiff: ") for line in said), said
    assert ("padiff: python is not recorded: no process made a step" in done.stderr) == (
        "-c" in command[1:] and code == 0
    )


def test_ctrl_c_reaches_a_command_as_without():
    Path("train.py").write_text(
        "import signal, time\n"
        "try:\n    print('begun', flush=True)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('stopped')\n"
    )
    with started([*PADIFF, "--", sys.executable, "train.py"], env=ENVIRONMENT) as process:
        assert process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "stopped\n"), err


def test_a_rank_that_is_killed_leaves_whole_steps():
    text = TORCH.replace(
        "        optimizer.step()\n", "        optimizer.step()\n        step and number and os._exit(9)\n"
    )
    assert text != TORCH
    Path("train.py").write_text(text + HOGWILD)
    done = forked("train.py", "spawn")
    assert done.stdout.endswith("9\n")
    whole, left = padiff.open_run("R-worker-0"), padiff.open_run("R-worker-1")
    assert whole.finished() and whole.numbers() == [0, 1, 2]
    assert not left.finished() and left.numbers() in ([], [0], [0, 1])
    for number in left.numbers():  # the writer's thread may not have come to any
        assert all(record.value.size for record in left.steps(number)[0].records)


def test_a_folder_that_holds_a_run_is_refused_once_by_the_parent():
    Path("train.py").write_text("print('begun')")
    for held in ("R", "R-worker-3"):
        Path(held).mkdir()
        Path(held, "run.json").write_text("{}")
        for command in (["train.py"], ["--", "python", "train.py"]):
            done = call(*PADIFF, *command)
            assert done.returncode == 2 and not done.stdout
            why = "holds a run already: give another --dir, or --existing overwrite or resume"
            assert done.stderr == f"padiff: {held} {why}\n"
        Path(held, "run.json").unlink()


def test_a_command_that_is_not_there_is_misuse():
    for command in (["--", "no-such-command"], ["no-such-script.py"]):
        done = call(*PADIFF, *command)
        assert done.returncode == 2 and done.stderr.startswith("padiff: there is no script"), done.stderr


def test_a_model_that_is_compiled_in_place_before_its_optimizer_is_made_is_recorded_from_the_first_call():
    Path("train.py").write_text(
        "import torch\nnet = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))\n"
        "net.compile(backend='eager')\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for step in range(2):\n    net(torch.randn(6, 4)).square().sum().backward()\n    optimizer.step()\n"
    )
    done = forked("--", interpreter(), "train.py")
    assert done.returncode == 0 and "no layer of the recorded model was called" not in done.stderr, done.stderr
    [step] = padiff.open_run("R").steps(0)
    assert "forward" in {record.stage for record in step.records}
    mean = next(record for record in step.records if record.slot == "running_mean")
    assert not mean.value.any()  # as it was before the first call


def test_workers_of_a_second_launch_overwrite_those_of_the_first_if_asked():
    Path("train.py").write_text(TORCH + HOGWILD)
    forked("train.py", "fork")
    before = recorded("R-worker-1")
    done = forked("--existing", "overwrite", "--every", "2", "train.py", "fork")
    assert folders() == ["R-worker-0", "R-worker-1"] and "Traceback" not in done.stderr
    assert recorded("R-worker-1") == {number: before[number] for number in (0, 2)}


@pytest.mark.parametrize("folder", ["a user's", ""])
def test_a_python_without_the_pth_file_has_the_hook_from_its_path(folder):
    """The interpreter below the virtual environment, which finds the frameworks by PYTHONPATH alone."""
    if folder:
        Path(folder).mkdir()
        Path(folder, "sitecustomize.py").write_text("print('customized')")
    Path("train.py").write_text("print(0)" if folder else TORCH + ALONE)
    root = Path(padiff_cli.__file__).parents[1]
    places = [folder, next(place for place in sys.path if place.endswith("site-packages")), *integrations(root)]
    path = os.pathsep.join(filter(None, places))
    show, train = f"import os, sys; {SHOW}", "exec(open('train.py').read())"
    shown, unchanged = call(sys._base_executable, "-c", show, PYTHONPATH=path), call(interpreter(), "train.py")
    command = [sys._base_executable, "-c", f"{show}; {train}"]
    done = call(sys._base_executable, *PADIFF[1:], "--", *command, PYTHONPATH=path)
    # Once in padiff's own process, which is one, and once in the command.
    assert done.stdout == ("customized\n" if folder else "") + shown.stdout + unchanged.stdout, done.stderr
    assert folder or recorded("R") == printed_weights(unchanged.lines, 0)
    assert done.returncode == shown.returncode == unchanged.returncode == 0


SHOW = "print([place for place in sys.path if 'padiff' not in place])"


def integrations(root: Path) -> list[str]:
    return [str(root), *map(str, (root / "integrations").glob("*"))]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1 {", "padiff: this process is not recorded: JSONDecodeError: "),
        (
            '1 {"script": "train.py", "dir_path": "R", "options": {"detail": "odd"}}',
            "padiff: this process is not recorded",
        ),
    ],
)
def test_an_error_of_the_hook_is_a_line_and_ends_no_process(value, said):
    Path("train.py").write_text(TORCH + ALONE)
    unchanged, done = call(interpreter(), "train.py"), call(interpreter(), "train.py", **{startup.VARIABLE: value})
    assert (done.returncode, done.stdout) == (0, unchanged.stdout)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(said), done.stderr
    assert not folders()


def test_a_process_that_is_not_recorded_imports_nothing_of_padiff():
    code = (
        "import sys, torch, multiprocessing\n"
        "print(sorted(name for name in sys.modules if name.startswith('padiff')))\n"
        "print(multiprocessing.get_context('fork').Pool(1).map(len, [(), (1,)]))"
    )
    done = call(*PADIFF, "--", sys.executable, "-c", code)
    names = ["padiff_cli", "padiff_cli.after_import", "padiff_cli.run", "padiff_cli.run.startup"]
    assert done.stdout.splitlines()[0] == str(names) and done.stdout.splitlines()[1] == "[0, 1]"
    for environment in ({}, {startup.VARIABLE: ""}):
        code = "import sys; print([name for name in sys.modules if name.startswith('padiff')])"
        assert call(*PYTHON, "-c", code, **environment).stdout == "[]\n"


def test_a_padiff_run_below_another_one_records_alone():
    Path("train.py").write_text(TORCH + ALONE)
    inner = [sys.executable, "-m", "padiff", "run", "--dir", "inner", "train.py"]
    done = call(*PADIFF, "--", *inner)
    assert done.returncode == 0 and recorded("inner") == printed_weights(done.lines, 0)
    assert not folders() and done.stderr.count("padiff: recording ") == 1


def test_the_hook_waits_for_all_trainers():
    """But for paddle.Model, which gets its optimizer before it trains."""
    assert set(startup.TRAINERS) == {host.module for host in HOSTS} - {"paddle.hapi.model"}
