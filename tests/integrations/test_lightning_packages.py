"""Lightning comes as two packages, `pytorch-lightning` and `lightning`; either is enough, and both may be there."""

from __future__ import annotations

import copy
import json
import pickle

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from hard.children import run_child
from kit.forking import python_with_frameworks

import padiff
from padiff_lightning import PaDiffCallback

from .lit import QUIET, Lit, loader, net
from .tensorboards import events

HOSTS = {"pytorch-lightning": pytorch_lightning, "lightning": lightning.pytorch}


@pytest.fixture(params=HOSTS)
def host(request):
    """Each package; this process has loaded both."""
    return HOSTS[request.param]


def module_of(host, rate=0.1):
    class Module(host.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.losses, self.fail_at, self.rate = [], None, rate

        training_step, configure_optimizers = Lit.training_step, Lit.configure_optimizers

    return Module()


def fitted(host, folder, callbacks, data=None, ckpt_path=None, **options):
    trainer = host.Trainer(**{**QUIET, "max_epochs": 1, "callbacks": callbacks, **options})
    trainer.fit(module_of(host), data or loader(3), ckpt_path=ckpt_path)
    return trainer


# -- a process that has loaded both ----------------------------------------------------------------------------------


def test_a_callback_that_is_not_in_a_list_is_taken_by_the_trainer_of_either(host, tmp_path):
    fitted(host, tmp_path / "run", PaDiffCallback(tmp_path / "run"))
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 1, 2] and run.finished()


def test_it_is_one_class_with_one_name_and_a_callback_of_both():
    callback = PaDiffCallback("nowhere")
    assert type(callback) is PaDiffCallback
    assert repr(callback).startswith("<padiff_lightning.callback.PaDiffCallback object at ")
    for host in HOSTS.values():
        assert isinstance(callback, host.Callback) and issubclass(PaDiffCallback, host.Callback)
        assert callback.state_key == "PaDiffCallback"


def test_a_users_own_subclass_is_one_too(host, tmp_path):
    class Mine(PaDiffCallback):
        began = 0

        def __init__(self, folder):
            super().__init__(folder, every_n_steps=2)

        def on_train_start(self, trainer, pl_module):
            self.began += 1
            super().on_train_start(trainer, pl_module)

    own = Mine(tmp_path / "run")
    fitted(host, tmp_path / "run", own)
    assert own.began == 1 and own.state_key.endswith("Mine")
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 2]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_it_is_copied_and_pickled_whole(host, again, tmp_path):
    callback = again(PaDiffCallback(tmp_path / "run", every_n_steps=2))
    assert type(callback) is PaDiffCallback
    fitted(host, tmp_path / "run", callback)
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 2]


def test_a_checkpoint_of_one_package_goes_on_in_the_other(tmp_path):
    trainer = fitted(lightning.pytorch, tmp_path / "run", PaDiffCallback(tmp_path / "run"))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    states = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    assert states["PaDiffCallback"] == {"step": 3}
    fitted(
        pytorch_lightning,
        tmp_path / "run",
        PaDiffCallback(tmp_path / "run"),
        ckpt_path=tmp_path / "last.ckpt",
        max_epochs=2,
    )
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("own", [False, True], ids=["as it is", "subclassed"])
def test_the_tensorboard_logger_of_either_is_found(host, own, tmp_path):
    kind = host.loggers.TensorBoardLogger
    logger = (type("Mine", (kind,), {}) if own else kind)(tmp_path, name="logs", version=0)
    fitted(host, tmp_path / "run", PaDiffCallback(tmp_path / "run"), logger=logger)
    assert [step for step, _ in events(logger.log_dir)["0_verdict/loss"]] == [0, 1, 2]


# -- processes in which one package, the other, both or none is installed ----------------------------------------------

# Modules are found as ever, but not those of packages that are to be missing: as on a machine without them.
ABSENT = """
import json, sys
from importlib.machinery import PathFinder
missing, order, folder = json.loads(sys.argv[1])
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in missing else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
assert not {"pytorch_lightning", "lightning_fabric", "lightning"} & sys.modules.keys()
"""

TRAIN = """
import importlib, logging, pickle, warnings
warnings.simplefilter("ignore")
for what in order:
    if what == "padiff":
        from padiff_lightning import PaDiffCallback
    elif what == "callback":
        callback = PaDiffCallback(folder, every_n_steps=2)
    elif what == "subclass":
        class Mine(PaDiffCallback):
            pass
        callback = Mine(folder, every_n_steps=2)
    elif what == "unpickled":
        callback = pickle.loads(open(folder + ".pickle", "rb").read())
    else:
        pl = importlib.import_module(what)
        # As LightningCLI finds a class that is given by its name.
        assert issubclass(importlib.import_module("padiff_lightning").PaDiffCallback, pl.Callback)
import torch
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)
    def training_step(self, batch, index):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
logging.getLogger(pl.__name__).setLevel(logging.ERROR)
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, logger=pl.loggers.TensorBoardLogger(folder + "-logs"), callbacks=callback,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(5, 4), batch_size=1))
assert issubclass(PaDiffCallback, pl.Callback)
print("loaded:", *(name for name in ("pytorch_lightning", "lightning.pytorch") if name in sys.modules))
"""

ALL = ("pytorch_lightning", "lightning_fabric", "lightning")
MISSING = {"both": (), "pytorch-lightning": ("lightning",), "lightning": ("pytorch_lightning", "lightning_fabric")}


def in_process(code, installed, order=(), folder=""):
    """Runs code where only some packages are installed; what came of it."""
    given = json.dumps([MISSING.get(installed, ALL), order, str(folder)])
    return run_child([*python_with_frameworks(), "-c", ABSENT + code, given])


@pytest.mark.parametrize(
    ("installed", "order", "loads"),
    [
        ("pytorch-lightning", "padiff callback pytorch_lightning", "pytorch_lightning"),
        ("lightning", "padiff callback lightning.pytorch", "lightning.pytorch"),
        ("both", "lightning.pytorch padiff callback", "lightning.pytorch"),
        ("both", "padiff pytorch_lightning callback", "pytorch_lightning"),
        ("both", "padiff lightning.pytorch subclass", "lightning.pytorch"),
        ("both", "padiff lightning.pytorch unpickled", "lightning.pytorch"),
        # Nothing says yet which one it will be.
        ("both", "padiff callback lightning.pytorch", "pytorch_lightning lightning.pytorch"),
    ],
    ids=lambda value: value,
)
def test_whatever_is_installed_and_imported_first_the_trainer_takes_it_and_no_other_package_is_loaded(
    installed, order, loads, tmp_path
):
    (tmp_path / "run.pickle").write_bytes(pickle.dumps(PaDiffCallback(tmp_path / "run", every_n_steps=2)))
    done = in_process(TRAIN, installed, order=order.split(), folder=tmp_path / "run")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"loaded: {loads}"
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 2, 4] and run.finished()
    (log_dir,) = (tmp_path / "run-logs").glob("*/version_0")
    assert [step for step, _ in events(log_dir)["0_verdict/loss"]] == [0, 2, 4]


DEMO = """
from padiff_demo import data, lightning_run
images, labels = data.batches(1)
lightning_run.train(lightning_run.initial_weights(0), images[:4], labels[:4], folder)
print("loaded:", *(name for name in ("pytorch_lightning", "lightning.pytorch") if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("installed", "loads"),
    [("pytorch-lightning", "pytorch_lightning"), ("lightning", "lightning.pytorch")],
    ids=lambda value: value,
)
def test_the_demo_trains_with_either(installed, loads, tmp_path):
    done = in_process(DEMO, installed, folder=tmp_path / "run")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"loaded: {loads}"
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2, 3]


def test_without_lightning_the_callback_says_what_to_install():
    done = in_process("import padiff_lightning", "none")
    assert done.returncode == 1
    assert done.stderr.endswith("Error: Lightning is not installed: pip install 'pytorch-lightning>=2.2'\n")


@pytest.mark.parametrize(
    ("installed", "also", "reported"),
    [
        ("none", [], "Lightning is not installed: pip install 'pytorch-lightning>=2.2'"),
        ("both", ["sklearn"], "No module named 'sklearn'"),
    ],
    ids=["Lightning", "sklearn"],
)
def test_without_what_it_needs_the_demo_says_so_in_one_line(installed, also, reported, tmp_path):
    # What is preloaded may have brought it along.
    forgotten = "[sys.modules.pop(name) for name in [*sys.modules] if name.partition('.')[0] in missing]"
    code = f"missing += {also!r}\n{forgotten}\nfrom padiff_cli.main import main\nsys.exit(main(['demo', folder]))"
    done = in_process(code, installed, folder=tmp_path / "demo")
    end = "; all that it needs comes with: pip install 'padiff-hooks[demo]'\n"
    assert (done.returncode, done.stderr) == (2, f"padiff: the demo can't run: {reported}{end}")
