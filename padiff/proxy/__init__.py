"""``create_model`` and its proxy model, PaDiff's original interface to the recorder."""

from padiff.proxy.dataloader import check_dataloader
from padiff.proxy.dump_root import get_dump_root_path, set_dump_root_path
from padiff.proxy.model import ProxyModel, create_model

__all__ = ["ProxyModel", "check_dataloader", "create_model", "get_dump_root_path", "set_dump_root_path"]
