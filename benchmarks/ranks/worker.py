"""One process of a program's trainings. Arguments: the program, and the trainings (JSON): name, folder, options."""

from __future__ import annotations

import json
import os
import sys
import traceback

from benchmarks.ranks import kit


def main(program: str, trainings: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = kit.module(program)
    if module.PROGRAM.framework == "torch":
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        barrier = torch.distributed.barrier
    else:
        import paddle

        paddle.distributed.init_parallel_env()
        barrier = paddle.distributed.barrier
    for name, folder, options in json.loads(trainings):
        barrier()
        try:
            module.train(name, rank, world, kit.recorder(folder, **options))
        except Exception:
            print(f"{program}, {name}:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    barrier()
    if module.PROGRAM.framework == "torch":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
