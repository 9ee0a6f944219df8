"""Two trainings under Lightning: the second is compared with the first while it runs, and stops where they part.

    python main.py [FOLDER]

The fault: the second one's AdamW decays ten times as much.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch

from padiff_lightning import PaDiffCallback

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    def __init__(self, decay: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        self.decay = decay

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=self.decay)


def train(callback: PaDiffCallback, decay: float) -> int:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(80, 16), torch.randint(0, 4, (80,)))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(decay), torch.utils.data.DataLoader(data, batch_size=8))
    return trainer.global_step


def main(folder: Path) -> None:
    train(PaDiffCallback(folder / "reference", existing="overwrite"), decay=0.01)
    callback = PaDiffCallback(
        folder / "candidate", existing="overwrite", reference=folder / "reference", on_diff="stop"
    )
    steps = train(callback, decay=0.1)
    print(f"The second training stopped after {steps} of 10 steps.")
    print(callback.first_diff.message if callback.first_diff else "The runs match.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
