"""Public names of padiff; type checkers read this file, and the package reads it for lazy imports."""

from padiff.align import Alignment as Alignment
from padiff.auto import auto_diff as auto_diff
from padiff.check import check_grads as check_grads
from padiff.check import check_params as check_params
from padiff.check import check_report as check_report
from padiff.check import check_weights as check_weights
from padiff.compare import NoisePolicy as NoisePolicy
from padiff.compare import Tolerance as Tolerance
from padiff.compare import compare_runs as compare_runs
from padiff.dump import open_run as open_run
from padiff.errors import PadiffError as PadiffError
from padiff.proxy import ProxyModel as ProxyModel
from padiff.proxy import check_dataloader as check_dataloader
from padiff.proxy import create_model as create_model
from padiff.proxy import get_dump_root_path as get_dump_root_path
from padiff.proxy import set_dump_root_path as set_dump_root_path
from padiff.recorder import Recorder as Recorder
from padiff.recorder import record as record
from padiff.recorder.options import Detail as Detail
from padiff.recorder.options import Schedule as Schedule
from padiff.records import Report as Report
from padiff.replaying import Replay as Replay
from padiff.replaying import calibrate as calibrate
from padiff.replaying import replay as replay
from padiff.replaying import resync as resync
from padiff.replaying.feeding import batches as batches
from padiff.weights import add_special_init as add_special_init
from padiff.weights import assign_weight as assign_weight
from padiff.weights import start_from as start_from
from padiff.weights.carried_state import LayerMap as LayerMap

__version__: str
