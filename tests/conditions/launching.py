"""Starts two processes of a script, with their ranks in the environment as launchers set them."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from subprocess import STDOUT

from hard.children import started


def environments(processes: int) -> list[dict[str, str]]:
    """What launchers set for each rank, on ports that are free."""
    with ExitStack() as stack:  # all open at once, so that no port is given out twice
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(processes + 1)]
        ports = [each.getsockname()[1] for each in free]
    places = [f"127.0.0.1:{port}" for port in ports]
    return [
        {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[-1]),
            "GLOO_SOCKET_IFNAME": "lo",
            "PADDLE_MASTER": places[-1],
            "PADDLE_DISTRI_BACKEND": "gloo",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(processes),
            "PADDLE_CURRENT_ENDPOINT": places[rank],
            "PADDLE_TRAINER_ENDPOINTS": ",".join(places[:-1]),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        for rank in range(processes)
    ]


def launch(script, *arguments, python=(sys.executable,), seconds=120, processes=2):
    """Start processes as `torchrun` and `paddle.distributed.launch` do, and wait for them."""
    command = [*python, "-W", "ignore", script, *arguments]
    with ExitStack() as stack:  # a rank whose partner is gone waits for it
        running = [stack.enter_context(started(command, env=env, stderr=STDOUT)) for env in environments(processes)]
        outputs = [process.communicate(timeout=seconds)[0][-2000:] for process in running]
    assert [process.returncode for process in running] == [0] * processes, "\n".join(outputs)
