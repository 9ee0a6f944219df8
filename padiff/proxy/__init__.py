"""``create_model`` and its proxy model, PaDiff's original interface to the recorder."""

from padiff.proxy.model import ProxyModel, check_dataloader, create_model, get_dump_root_path, set_dump_root_path

__all__ = ["ProxyModel", "check_dataloader", "create_model", "get_dump_root_path", "set_dump_root_path"]
