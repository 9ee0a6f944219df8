"""transformers' Trainer against PaddleFormers', each in a process of its own.

python main.py [FOLDER]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import padiff

HERE = Path(__file__).parent


def main(folder: Path) -> None:
    for script in ("train_hf.py", "train_pf.py"):
        subprocess.run([sys.executable, "-W", "ignore", HERE / script, folder], check=True, stdout=subprocess.DEVNULL)
    report = padiff.compare_runs(folder / "hf", folder / "pf")
    print(report.first_diff.message if report.first_diff else "The runs match.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
