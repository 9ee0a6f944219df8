"""Both sides, each in a process of its own, as they would be on two machines: only the run folder goes over.

python main.py [FOLDER]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    train = [HERE / "train_lightning.py", folder / "torch"]
    replay = [HERE / "replay_hapi.py", folder / "torch", folder / "paddle"]
    for command in (train, replay):
        subprocess.run([sys.executable, "-W", "ignore", *command], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
