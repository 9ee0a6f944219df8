"""What the programs of `benchmarks/goldens.py` share: planted faults, and sums in another order."""

import os

FAULT = os.environ.get("GOLDEN_FAULT", "")
SIZE = 1e-4


def times(name: str) -> float:
    """Return 1, or a little more if this fault is planted."""
    return 1.0 + SIZE if name == FAULT else 1.0


def term(name: str) -> float:
    """Return the factor of a small term, or 0 if this fault drops it."""
    return 0.0 if name == FAULT else SIZE


def spoil(name: str, tensor) -> None:
    """Make a weight a little larger if this fault is planted."""
    if name == FAULT:
        import numpy as np

        values = tensor.detach().numpy() * np.float32(1.0 + SIZE)
        if hasattr(tensor, "set_value"):
            tensor.set_value(values)
        else:
            import torch

            tensor.data.copy_(torch.from_numpy(values))


def begin_torch() -> None:
    """Seed torch, and change how it computes as the environment asks."""
    import torch

    torch.manual_seed(0)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    if os.environ.get("GOLDEN_ONEDNN") == "off":
        torch.backends.mkldnn.enabled = False
    if os.environ.get("GOLDEN_SUMS") == "halves":
        plain = torch.nn.functional.linear

        def linear(x, weight, bias=None):
            result = plain(x[..., 1::2], weight[:, 1::2]) + plain(x[..., ::2], weight[:, ::2])
            return result if bias is None else result + bias

        torch.nn.functional.linear = linear


def begin_paddle() -> None:
    """Seed paddle, and change how it computes as the environment asks."""
    import paddle

    paddle.seed(0)
    paddle.set_device("cpu")
    if os.environ.get("GOLDEN_SUMS") == "halves":

        def linear(x, weight, bias=None, name=None):
            result = x[..., 1::2] @ weight[1::2] + x[..., ::2] @ weight[::2]
            return result if bias is None else result + bias

        paddle.nn.functional.linear = linear
        paddle.nn.layer.common.F.linear = linear
