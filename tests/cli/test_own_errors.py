"""An error in any function that watches a script under `padiff run` changes nothing of what the script does."""

from __future__ import annotations

import json
from pathlib import Path

import kit
import pytest

from cli.test_run_command import HAPI, LIGHTNING, call, inside, script  # noqa: F401
from cli.test_run_loops import DCGAN, HEAD

pytestmark = pytest.mark.slow

# Runs the script in a fork for each function: the process has imported what all of them need.
SWEEP = """
import atexit, json, os, runpy, sys, traceback
sys.path.insert(0, {tests!r})
from hard.own_errors import Planting, name_of
from padiff_cli.main import main
from padiff_cli.run import startup
planting, number = Planting(*{files!r}), 0

class Executed(BaseException):
    "The launcher becomes the script's process: the fork goes on as that."

def execute(program, words):
    raise Executed

os.execv = execute

def recorded(folder, script):
    try:
        return main(["run", "--dir", folder, script])
    except Executed:
        pass
    sys.argv, code = [script], 0
    with open(startup.__file__.replace("startup.py", "padiff_processes.pth")) as hook:
        exec(hook.read())
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        code = left.code or 0
    except Exception as error:
        sys.last_value, code = error, 1
        traceback.print_exc()
    atexit._run_exitfuncs()
    return code

def run(start, folder, script="train.py"):
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(folder + ".out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(folder + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        code, result = 70, None
        try:
            code, result = start(lambda: recorded(folder, script))
        except SystemExit as left:
            code = left.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os.write(write, json.dumps(result).encode())
            os._exit(code)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    with open(folder + ".out") as out, open(folder + ".err") as err:
        return code, out.read(), err.read(), text

def listed(train):
    codes = []
    def watched():
        codes.append(train())
    calls = planting.enough(watched)
    named = [[name_of(code), code.co_firstlineno] for code in calls]
    return codes[0], named

def planted(name, line):
    def start(train):
        def fail(frame, event, _):
            if event == "call" and frame.f_code.co_firstlineno == line and planting._counts(frame):
                if name_of(frame.f_code) == name:
                    raise ArithmeticError("planted")
        sys.setprofile(fail)
        try:
            return train(), None
        finally:
            sys.setprofile(None)
    return start

code, plain, err, text = run(listed, "all")
wrong, functions = [], json.loads(text) or []
# What the other framework's script calls, too, fails in one of the two, by turns.
_, _, _, text = run(listed, "other", "other.py") if os.path.exists("other.py") else (0, "", "", "[]")
common = sorted({{name for name, _ in functions}} & {{name for name, _ in json.loads(text)}})
left = set(common[{turn}::2])
functions = [each for each in functions if each[0] not in left]
for number, (name, line) in enumerate(functions):
    if name.endswith("launch.py:become"):  # which only replaces the process
        continue
    after = run(planted(name, line), f"run-{{number}}")
    if after[:2] != (code, plain):
        wrong.append([name, after[0], after[1] == plain, after[2][-400:]])
print(json.dumps([code, plain, err, len(functions), wrong]))
"""
WATCHES = (
    "finding.py",
    "after_import.py",
    "run/loop.py",
    "run/iterations.py",
    "run/launch.py",
    "run/processes.py",
    "run/recording.py",
    "run/startup.py",
    "padiff/system/frames.py",
)
HOSTS = ("run/hosts.py",)
SCRIPTS = {
    "torch": (HEAD["torch"] + DCGAN, WATCHES, 40),
    "paddle": (HEAD["paddle"] + DCGAN, WATCHES, 40),
    "lightning": (LIGHTNING.replace("{package}", "lightning.pytorch"), HOSTS, 5),
    "hapi": (HAPI, HOSTS, 5),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_error_of_the_watch_never_reaches_the_script(name):
    text, files, least = SCRIPTS[name]
    Path("train.py").write_text(text if name in HEAD else script(text).read_text())
    turn = 0
    if name in HEAD:
        (other,) = HEAD.keys() - {name}
        Path("other.py").write_text(SCRIPTS[other][0])
        turn = [*HEAD].index(name)
    unchanged = call("train.py")
    tests = str(Path(kit.__file__).parent.parent)
    Path("sweep.py").write_text(SWEEP.format(tests=tests, turn=turn, files=[f"padiff_cli/{file}" for file in files]))
    done = call("sweep.py")
    assert done.returncode == 0, done.stderr
    code, stdout, stderr, planted, wrong = json.loads(done.stdout.splitlines()[-1])
    assert (code, stdout) == (0, unchanged.stdout), stderr
    assert planted >= least, stderr
    assert not wrong, "\n".join(map(str, wrong))
