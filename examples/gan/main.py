"""A GAN with two optimizers, in torch and in paddle; one model holds both networks.

    python main.py [FOLDER]

The fault: the port's optimizer of the discriminator has paddle's default beta1, not the 0.5 of GANs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
import torch

import padiff

NOISE, SIZE, BATCH, STEPS = 8, 12, 16, 4


def real(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples, and noise for two fakes."""
    chance = np.random.default_rng(step)
    return (
        chance.normal(2.0, 0.5, (BATCH, SIZE)).astype(np.float32),
        chance.normal(size=(2, BATCH, NOISE)).astype(np.float32),
    )


class TorchGan(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = torch.nn.Sequential(torch.nn.Linear(NOISE, 32), torch.nn.ReLU(), torch.nn.Linear(32, SIZE))
        self.critic = torch.nn.Sequential(torch.nn.Linear(SIZE, 32), torch.nn.LeakyReLU(0.2), torch.nn.Linear(32, 1))


class PaddleGan(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = paddle.nn.Sequential(paddle.nn.Linear(NOISE, 32), paddle.nn.ReLU(), paddle.nn.Linear(32, SIZE))
        self.critic = paddle.nn.Sequential(
            paddle.nn.Linear(SIZE, 32), paddle.nn.LeakyReLU(0.2), paddle.nn.Linear(32, 1)
        )


def train_torch(folder: Path) -> None:
    gan, judge = TorchGan(), torch.nn.functional.binary_cross_entropy_with_logits
    of_critic = torch.optim.Adam(gan.critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_generator = torch.optim.Adam(gan.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    with padiff.record(gan, folder, optimizer=[of_critic, of_generator], existing="overwrite") as rec:
        for step in range(STEPS):
            samples, noise = map(torch.from_numpy, real(step))
            one, zero = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
            of_critic.zero_grad()
            judge(gan.critic(samples), one).add(judge(gan.critic(gan.generator(noise[0]).detach()), zero)).backward()
            of_critic.step()
            of_generator.zero_grad()
            judge(gan.critic(gan.generator(noise[1])), one).backward()
            of_generator.step()
            rec.try_dump()  # both optimizers have stepped: here a step ends


def train_paddle(folder: Path, reference: Path) -> None:
    gan, judge = PaddleGan(), paddle.nn.functional.binary_cross_entropy_with_logits
    padiff.start_from(reference, gan)
    of_critic = paddle.optimizer.Adam(2e-4, parameters=gan.critic.parameters())
    of_generator = paddle.optimizer.Adam(2e-4, beta1=0.5, parameters=gan.generator.parameters())
    with padiff.record(gan, folder, optimizer=[of_critic, of_generator], existing="overwrite") as rec:
        for step in range(STEPS):
            samples, noise = map(paddle.to_tensor, real(step))
            one, zero = paddle.ones([BATCH, 1]), paddle.zeros([BATCH, 1])
            of_critic.clear_grad()
            judge(gan.critic(samples), one).add(judge(gan.critic(gan.generator(noise[0]).detach()), zero)).backward()
            of_critic.step()
            of_generator.clear_grad()
            judge(gan.critic(gan.generator(noise[1])), one).backward()
            of_generator.step()
            rec.try_dump()


def main(folder: Path) -> None:
    train_torch(folder / "torch")
    train_paddle(folder / "paddle", folder / "torch")
    report = padiff.compare_runs(folder / "torch", folder / "paddle")
    print(report.first_diff.message if report.first_diff else "The runs match.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
