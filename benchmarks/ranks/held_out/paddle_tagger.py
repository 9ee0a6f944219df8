"""An LSTM tagger of paddle whose script averages gradients, with accumulation and a scheduler, on two processes."""

from contextlib import nullcontext

import numpy as np

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "paddle_tagger",
    "paddle",
    2,
    (
        Planted("embedding left out", step=0, rank=1, places="table", words=("not reduced",)),
        Planted("scheduler of one rank", step=1, rank=1, words=("rate", "update")),
        Planted("own clip", step=0, rank=1, words=("factor", "clip", "norm", "update")),
        Planted("sum for mean", alone=False, step=0, words=(r"\b2\b", "times")),
        Planted("rank 1 loads an old weight", rank=1, step=EVENT, places="tag", words=("rank 1",)),
        Planted("same sentences", step=0, words=("same batch",)),
        Planted("seeded by rank", step=0, rank=1, words=("begin", "start", "seed")),
    ),
    ("", "wrapped"),
)


def train(name, rank, world, record):
    import paddle
    import paddle.distributed as dist
    from paddle import nn

    class Tagger(nn.Layer):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(23, 8)
            self.memory = nn.LSTM(8, 9)
            self.tag = nn.Linear(9, 5)

        def forward(self, ids):
            return self.tag(self.memory(self.table(ids))[0])

    paddle.seed(6 + (rank if name == "seeded by rank" else 0))
    tagger = Tagger()
    model = paddle.DataParallel(tagger) if name == "wrapped" else tagger
    rate = paddle.optimizer.lr.StepDecay(0.01, 1, 0.5)
    clip = nn.ClipGradByGlobalNorm(0.1 if rank else 0.15) if name == "own clip" else None
    optimizer = paddle.optimizer.AdamW(rate, parameters=tagger.parameters(), grad_clip=clip)
    old = tagger.tag.weight.numpy()
    with record(model, optimizer=optimizer) as rec:
        for i in range(STEPS):
            ids = np.random.default_rng(i).integers(0, 23, (8, 6))
            ids = ids[:4] if name == "same sentences" else ids[rank * 4 :][:4]
            total = 0.0
            for number, few in enumerate(np.split(ids, 2)):
                skip = name == "wrapped" and number == 0
                with model.no_sync() if skip else nullcontext():
                    logits = model(paddle.to_tensor(few))
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), paddle.to_tensor(few.reshape(-1) % 5)) / 2
                    loss.backward()
                total += float(loss)
            if model is tagger:
                for path, p in tagger.named_parameters():
                    if name == "embedding left out" and path.startswith("table"):
                        continue
                    dist.all_reduce(p.grad)
                    if name != "sum for mean":
                        paddle.assign(p.grad / world, p.grad)
            if name == "rank 1 loads an old weight" and rank == 1 and i == EVENT:
                tagger.tag.weight.set_value(old)
            optimizer.step()
            optimizer.clear_grad()
            if not (name == "scheduler of one rank" and rank == 1):
                rate.step()
            if rec is not None:
                rec.log_loss(total)
                rec.try_dump()
