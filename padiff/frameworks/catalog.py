"""Names that may appear in generated code: layers, optimizers, losses and arguments. No run can add a name."""

from __future__ import annotations

from padiff.frameworks.argument_names import SPELLINGS, ArgumentNames
from padiff.frameworks.losses import LOSS_SETTINGS, ROLES, WEIGHTS
from padiff.frameworks.optimizer_catalog import classes
from padiff.frameworks.settings import LAYER_SETTINGS
from padiff.system.code import ForeignCodeError, Vocabulary


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Classes of layers, by framework.
LAYERS = {
    "torch": _words(
        "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d "
        "AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d BatchNorm3d Bilinear "
        "CELU ChannelShuffle CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d "
        "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d CosineSimilarity CrossMapLRN2d "
        "Dropout Dropout1d Dropout2d Dropout3d ELU Embedding EmbeddingBag FeatureAlphaDropout Flatten Fold "
        "FractionalMaxPool2d FractionalMaxPool3d GELU GLU GRU GRUCell GroupNorm Hardshrink Hardsigmoid Hardswish "
        "Hardtanh Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d LPPool1d LPPool2d LPPool3d LSTM LSTMCell "
        "LayerNorm LazyBatchNorm1d LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d "
        "LazyConvTranspose1d LazyConvTranspose2d LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d "
        "LazyInstanceNorm3d LazyLinear LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MaxPool1d MaxPool2d "
        "MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish MultiheadAttention PReLU PairwiseDistance PixelShuffle "
        "PixelUnshuffle RMSNorm RNN RNNCell RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d ReflectionPad3d "
        "ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU SiLU Sigmoid Softmax Softmax2d Softmin Softplus "
        "Softshrink Softsign SyncBatchNorm Tanh Tanhshrink Threshold Transformer TransformerDecoder "
        "TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer Unflatten Unfold Upsample "
        "UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d"
    ),
    "paddle": _words(
        "AdaptiveAvgPool1D AdaptiveAvgPool1d AdaptiveAvgPool2D AdaptiveAvgPool2d AdaptiveAvgPool3D "
        "AdaptiveAvgPool3d AdaptiveMaxPool1D AdaptiveMaxPool1d AdaptiveMaxPool2D AdaptiveMaxPool2d "
        "AdaptiveMaxPool3D AdaptiveMaxPool3d AlphaDropout AvgPool1D AvgPool2D AvgPool3D BatchNorm BatchNorm1D "
        "BatchNorm2D BatchNorm3D BiRNN Bilinear CELU ChannelShuffle CircularPad1D CircularPad1d CircularPad2D "
        "CircularPad2d CircularPad3D CircularPad3d ConstantPad1D ConstantPad1d ConstantPad2D ConstantPad2d "
        "ConstantPad3D ConstantPad3d Conv1D Conv1DTranspose Conv1d Conv2D Conv2DTranspose Conv2d Conv3D "
        "Conv3DTranspose Conv3d CosineSimilarity Dropout Dropout2D Dropout3D ELU Embedding FeatureAlphaDropout "
        "Flatten Fold FractionalMaxPool2D FractionalMaxPool3D GELU GLU GRU GRUCell GroupNorm Hardshrink Hardsigmoid "
        "Hardswish Hardtanh Identity InstanceNorm1D InstanceNorm2D InstanceNorm3D LPPool1D LPPool1d LPPool2D "
        "LPPool2d LSTM LSTMCell LayerNorm LeakyReLU Linear LocalResponseNorm LogSigmoid LogSoftmax MaxPool1D "
        "MaxPool2D MaxPool3D MaxUnPool1D MaxUnPool2D MaxUnPool3D MaxUnpool1d MaxUnpool2d MaxUnpool3d Maxout Mish "
        "MultiHeadAttention PReLU Pad1D Pad2D Pad3D PairwiseDistance PixelShuffle PixelUnshuffle RNN RReLU ReLU "
        "ReLU6 ReflectionPad1D ReflectionPad1d ReflectionPad2D ReflectionPad2d ReflectionPad3D ReflectionPad3d "
        "ReplicationPad1D ReplicationPad1d ReplicationPad2D ReplicationPad2d ReplicationPad3D ReplicationPad3d SELU "
        "SiLU Sigmoid Silu SimpleRNN SimpleRNNCell Softmax Softmax2D Softplus Softshrink Softsign SpectralNorm "
        "Swish SyncBatchNorm Tanh Tanhshrink ThresholdedReLU Transformer TransformerDecoder TransformerDecoderLayer "
        "TransformerEncoder TransformerEncoderLayer Unflatten Unfold Upsample UpsamplingBilinear2D "
        "UpsamplingBilinear2d UpsamplingNearest2D UpsamplingNearest2d ZeroPad1D ZeroPad1d ZeroPad2D ZeroPad2d "
        "ZeroPad3D ZeroPad3d"
    ),
}
#: Classes of optimizers, by framework.
OPTIMIZERS = {
    "torch": _words("ASGD Muon SparseAdam") | classes("torch").keys(),
    "paddle": _words("ASGD") | classes("paddle").keys(),
}
#: Arguments of the functions that a script calls.
ARGUMENTS = _words(
    "act align_corners align_mode alpha antialias approximate attn_mask axes axis batch1 batch2 beta bias "
    "bias_after_scale ceil_mode chunks condition copy correction count_include_pad data_format decimals delta "
    "descending destination diagonal dilation dilations dim dim0 dim1 dimension dims divisor_override dropout_p "
    "dtype enable_gqa end end_dim eps epsilon equation exclusive fill_value grid groups ignore_index index "
    "indexing input input1 input2 is_causal is_huber k keepdim keepdims kernel_size kernel_sizes key label "
    "label_smoothing lambd largest length log_target logit m mask mat1 mat2 max max_norm max_val min min_val "
    "mode momentum n negative_slope non_blocking norm_type normalized_shape num num_classes num_columns "
    "num_groups num_or_sections num_rows offset operands ord other out_dtype output_padding output_size "
    "output_sizes p pad pad_from_left_axis padding padding_idx padding_mode paddings perm pos_weight query "
    "recompute_scale_factor reduce reduction repeat_times repeats return_indices return_mask rounding_mode "
    "running_mean running_var scale scale_factor scale_grad_by_freq shape shape_or_dtype shifts size "
    "size_average sizes slope soft_label sorted source sparse sparse_grad split_size split_size_or_sections "
    "split_sizes stable start start_axis start_dim step steps stop stop_axis stride strides target tensor "
    "tensors threshold training transpose_x transpose_y unbiased upscale_factor use_global_stats "
    "use_input_stats use_softmax value vec1 vec2 weight x x1 x2 y"
)


def is_loss(function: str, settings: object = ()) -> bool:
    """Return True if a loss function, and all names of its settings, are known."""
    return function in ROLES and set(settings) <= {*LOSS_SETTINGS, *WEIGHTS, "function"}  # type: ignore[call-overload]


def _vocabulary(framework: str, spelling: ArgumentNames) -> Vocabulary:
    """Return the names that a line which fixes a setting may contain, for one framework."""
    functional = f"{spelling.layers}.functional"
    losses = {*ROLES, *(name for name, _ in spelling.losses.values())}
    arguments = {
        spelling.rate,
        *(argument for argument, _ in spelling.values.values()),
        *LAYER_SETTINGS,
        *spelling.arguments.values(),
        *LOSS_SETTINGS,
        *spelling.loss_arguments.values(),
        *WEIGHTS,
        "is_huber",
        "grad_clip",
        *_WITHOUT[framework],
        *([spelling.parameters] if spelling.parameters else []),
    }
    chains = {
        *(f"{spelling.optimizers}.{name}" for name in OPTIMIZERS[framework]),
        *(f"{spelling.layers}.{name}" for name in LAYERS[framework]),
        *(f"{functional}.{name}" for name in losses),
        *_CLIPS[framework],
    }
    return Vocabulary(
        variables=frozenset({"model", "grad_clip", "labels"}),
        functions=frozenset({"float"}),
        chains=frozenset(chains),
        members=frozenset({"parameters", "train", "eval", "sum", "numel"}),
        keywords=frozenset(arguments),
    )


# Arguments that create a layer without parameters, and an optimizer with weights in float32.
_WITHOUT = {
    "torch": ("affine", "elementwise_affine", "bias"),
    "paddle": ("weight_attr", "bias_attr", "multi_precision"),
}
_CLIPS = {
    "torch": ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"),
    "paddle": (
        "paddle.nn.ClipGradByGlobalNorm", "paddle.nn.ClipGradByNorm", "paddle.nn.ClipGradByValue",
        "paddle.regularizer.L1Decay",
    ),
}  # fmt: skip
#: Names that lines which fix a setting may contain, by framework.
FIXES = {framework: _vocabulary(framework, spelling) for framework, spelling in SPELLINGS.items()}


def checked_fix(framework: str, line: str) -> str:
    """Return the line of code that fixes a setting, or an empty text if a name in it is outside the catalog."""
    vocabulary = FIXES.get(framework)
    if vocabulary is None:
        return ""
    try:
        vocabulary.check_code(line)
    except ForeignCodeError:
        return ""
    return line
