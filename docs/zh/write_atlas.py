"""Write the Chinese page of the atlas from the English one: ``python docs/zh/write_atlas.py``.

``padiff atlas --markdown`` writes the English page. Calls and figures are taken from it; the words are translated here.
A row that has no translation yet stays English, and is named on standard error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
GROUPS = {
    "Losses": "损失", "Activations": "激活函数", "Normalisation": "归一化", "Pooling": "池化", "Dropout": "Dropout",
    "Attention": "注意力", "Embeddings": "Embedding", "Recurrent": "循环网络", "Images": "图像", "Optimizers": "优化器",
    "Schedules": "学习率调度", "Clipping": "梯度裁剪", "Initialisation": "初始化", "Reductions": "归约",
    "Arithmetic": "算术", "Indexing": "索引",
}  # fmt: skip
#: What stands before the first table.
HEAD = """# torch {torch} 与 paddle {paddle}：用同样的写法调用

本页由 `padiff atlas --markdown` 的结果生成：每一行的两个调用都运行过，"这样写"一列的调用也运行过，其结果与另一侧一致。"同样的写法"指逐行移植的人会写出的代码：两侧都有的参数取相同的值，其余取默认值。全部在 CPU 上以 float32 运行（优化器为 float64）。

torch {torch} 与 paddle {paddle}：{all} 项中有 {differ} 项不同。其中 {none} 项没有已知的一致写法。

`nn`、`F` 和 `init` 指 `torch.nn`、`torch.nn.functional` 和 `torch.nn.init`，或 `paddle.nn`、`paddle.nn.functional` 和 `paddle.nn.initializer`。两侧层的权重相同。两个数值或形状依次为 torch 的和 paddle 的：取两者相差最大之处，前面是整个差的范数与 torch 数值的范数之比（相对 L2）。有闭式解时，表中说明哪一侧与 float64 的闭式解一致。随机数按标准差和绝对值的 99 % 分位数比较。"""
#: Of a row's first cell: the name, and the note behind it.
NAMES = {
    "cross_entropy, ignored labels, mean": "cross_entropy，有被忽略的标签，求平均",
    "cross_entropy, labels of -1 ignored, mean": "cross_entropy，忽略标签 -1，求平均",
    "cross_entropy of large logits": "cross_entropy，很大的 logits",
    "cross_entropy, smoothing and ignored labels": "cross_entropy，标签平滑且有被忽略的标签",
    "cross_entropy, smoothing and class weights": "cross_entropy，标签平滑且有类别权重",
    "cross_entropy of maps, classes in the second axis": "cross_entropy，图，类别在第二个轴",
    "smooth_l1_loss, beta 0.5": "smooth_l1_loss，beta 为 0.5",
    "SmoothL1Loss, beta 0.5": "SmoothL1Loss，beta 为 0.5",
    "ctc_loss of logits": "ctc_loss，输入为 logits",
    "cosine_similarity, tiny vectors": "cosine_similarity，极小的向量",
    "leaky_relu, gradient at 0": "leaky_relu，在 0 处的梯度",
    "Softmax, axis by default, of 3 axes": "Softmax，默认的轴，3 个轴",
    "log_softmax of large values": "log_softmax，很大的值",
    "LogSoftmax, axis by default, of 3 axes": "LogSoftmax，默认的轴，3 个轴",
    "BatchNorm2d, running_mean after a step": "BatchNorm2d，一个 step 之后的 running_mean",
    "BatchNorm2d, running_var, momentum by default": "BatchNorm2d，running_var，默认的 momentum",
    "InstanceNorm2d, number of parameters by default": "InstanceNorm2d，默认的参数个数",
    "RMSNorm": "RMSNorm",
    "weight_norm, number of lengths": "weight_norm，长度的个数",
    "AvgPool2d, padded": "AvgPool2d，有 padding",
    "AvgPool2d, padded, ceil_mode": "AvgPool2d，有 padding，ceil_mode",
    "AvgPool1d, padded": "AvgPool1d，有 padding",
    "AvgPool3d, padded": "AvgPool3d，有 padding",
    "alpha_dropout, training by default": "alpha_dropout，training 的默认值",
    "MultiheadAttention, order of axes by default": "MultiheadAttention，默认的轴顺序",
    "MultiheadAttention, boolean mask": "MultiheadAttention，布尔掩码",
    "MultiheadAttention, weights": "MultiheadAttention，注意力权重",
    "scaled_dot_product_attention, order of axes": "scaled_dot_product_attention，轴的顺序",
    "TransformerEncoderLayer, evaluating, boolean mask": "TransformerEncoderLayer，评估模式，布尔掩码",
    "embedding, padding_idx": "embedding，padding_idx",
    "Embedding, padding_idx": "Embedding，padding_idx",
    "embedding, padding_idx counted from the end": "embedding，从末尾计数的 padding_idx",
    "LSTM, order of axes by default": "LSTM，默认的轴顺序",
    "GRUCell, outputs": "GRUCell，输出",
    "pad, all axes": "pad，所有轴",
    "pad of a matrix": "pad，矩阵",
    "grid_sample": "grid_sample",
    "grid_sample, bicubic": "grid_sample，bicubic",
    "affine_grid": "affine_grid",
    "Adagrad, epsilon by default": "Adagrad，默认的 epsilon",
    "Adadelta, defaults": "Adadelta，默认值",
    "Adamax": "Adamax",
    "Adamax, learning rate by default": "Adamax，默认的学习率",
    "RMSprop": "RMSprop",
    "RMSprop, rho by default, next to no epsilon": "RMSprop，默认的 rho，epsilon 几乎为零",
    "RMSprop, defaults": "RMSprop，默认值",
    "RMSprop, centered, momentum": "RMSprop，centered，momentum",
    "ASGD": "ASGD",
    "SGD, learning rate of a group": "SGD，参数组的学习率",
    "polynomial decay, end by default": "多项式衰减，默认的终值",
    "OneCycleLR": "OneCycleLR",
    "clip by global norm": "按全局范数裁剪",
    "clip each by its norm": "各自按范数裁剪",
    "Linear, weight by default": "Linear，默认的权重",
    "Linear, bias by default": "Linear，默认的 bias",
    "Conv2d, weight by default": "Conv2d，默认的权重",
    "Conv2d, bias by default": "Conv2d，默认的 bias",
    "ConvTranspose2d, weight by default": "ConvTranspose2d，默认的权重",
    "Embedding by default": "Embedding，默认的权重",
    "MultiheadAttention, projection of queries, by default": "MultiheadAttention，query 投影，默认值",
    "MultiheadAttention, projection of the output, by default": "MultiheadAttention，输出投影，默认值",
    "TransformerEncoderLayer, linear1 by default": "TransformerEncoderLayer，linear1 的默认值",
    "uniform_": "uniform_",
    "median of an even number": "median，偶数个元素",
    "median over an axis": "median，沿一个轴",
    "nanmedian of an even number": "nanmedian，偶数个元素",
    "max over an axis": "max，沿一个轴",
    "max over an axis, gradient with ties": "max，沿一个轴，有并列时的梯度",
    "sort": "sort",
    "linalg.norm of a matrix, 2": "linalg.norm，矩阵，2",
    "cumsum, axis left out": "cumsum，不写轴",
    "fmod of negative numbers": "fmod，负数",
    "atan2, gradient at 0": "atan2，在 0 处的梯度",
    "xlogy at 0": "xlogy，在 0 处",
    "gather": "gather",
    "scatter": "scatter",
    "split by a number": "split，给出一个数",
    "chunk of a size that does not divide": "chunk，不能整除",
    "x.size": "x.size",
    "cat of floats and whole numbers": "cat，浮点数与整数",
    "linear, matrix (out, in)": "linear，矩阵为（输出，输入）",
}
_AS_FUNCTION, _FROM_ZERO = "与函数相同", "paddle 的 bias 从零开始"
NOTES = {
    "with a negative ignore_index paddle's mean divides by all rows, those with an ignored label too": "ignore_index 为负时，paddle 的均值除以所有行数，包括标签被忽略的行",
    "as with -100": "与 -100 的情况相同",
    "on a CPU paddle takes no logit for more than 64 below the largest one, so no loss exceeds 64": "在 CPU 上，paddle 把比最大值低 64 以上的 logit 当作低 64，因此损失不会超过 64",
    "paddle turns the labels into one-hot rows before it looks for ignored ones": "paddle 先把标签转为 one-hot，再处理被忽略的标签",
    "torch divides by the weights of the labels, paddle by those of the smoothed labels": "torch 除以标签的权重，paddle 除以平滑后标签的权重",
    "paddle's classes are in the last axis by default": "paddle 的类别默认在最后一个轴",
    "paddle's is Huber's loss unless `is_huber=False`: delta times torch's": "除非 `is_huber=False`，paddle 的是 Huber 损失：torch 的 delta 倍",
    "paddle takes logits and normalises them itself, torch takes logarithms of probabilities": "paddle 接受 logits 并自己归一化，torch 接受对数概率",
    "epsilon bounds each norm in torch, and in paddle the product of the squared norms": "epsilon 在 torch 中是每个范数的下限，在 paddle 中是范数平方之积的下限",
    "at exactly 0 paddle takes the slope of the positive side": "恰好为 0 时，paddle 取正侧的斜率",
    "torch takes axis 0 of tensors with 3 axes where none is given (and warns), paddle the last one": "没有指定轴时，对 3 个轴的张量，torch 取轴 0（并警告），paddle 取最后一个轴",
    "on a CPU paddle gives nothing below -64": "在 CPU 上，paddle 的结果不会小于 -64",
    "as with Softmax": "与 Softmax 相同",
    "paddle's momentum is the share of the old value, torch's that of the new one": "paddle 的 momentum 是旧值的比例，torch 的是新值的比例",
    "paddle keeps the biased variance of a batch, torch the unbiased one: n / (n - 1) times it, with n values in a channel; no argument changes it": "paddle 保存 batch 的有偏方差，torch 保存无偏方差：前者的 n / (n - 1) 倍，n 为一个通道的元素个数；没有参数可以改变",
    "torch's has no weight and no bias unless `affine=True`": "除非 `affine=True`，torch 的没有权重和 bias",
    "paddle has no such layer; torch's epsilon is that of the dtype by default": "paddle 没有这个层；torch 的 epsilon 默认为 dtype 的 epsilon",
    "`dim=0` is the outputs of torch's matrix, and the inputs of paddle's, which lies the other way round": "`dim=0` 在 torch 的矩阵中是输出，在 paddle 的矩阵（方向相反）中是输入",
    "paddle leaves padded places out of the count by default, torch counts them": "paddle 默认不把 padding 的位置计入个数，torch 计入",
    "paddle has windows that lie in the padding behind the image, and their mean is not a number; torch leaves them out": "paddle 有完全落在图像之后 padding 中的窗口，其均值为 NaN；torch 去掉这样的窗口",
    "torch's function does nothing unless `training=True`, paddle's does": "除非 `training=True`，torch 的函数不起作用，paddle 的起作用",
    "(sequence, batch, width) in torch, (batch, sequence, width) in paddle": "torch 为（序列，batch，宽度），paddle 为（batch，序列，宽度）",
    "True keeps a place out in torch and lets it in in paddle": "True 在 torch 中表示遮住该位置，在 paddle 中表示保留",
    "torch gives the mean over the heads, paddle each head's": "torch 给出各个头的均值，paddle 给出每个头的",
    "(batch, heads, sequence, width) in torch, (batch, sequence, heads, width) in paddle": "torch 为（batch，头，序列，宽度），paddle 为（batch，序列，头，宽度）",
    "paddle gives zeros at padding_idx whatever the table holds; torch looks the row up, and gives it no gradient": "在 padding_idx 处，不论表中是什么，paddle 都输出零；torch 查表，但不给梯度",
    "as with the function": _AS_FUNCTION,
    "as with a positive one": "与正数的情况相同",
    "paddle gives the output and the state, which are the same": "paddle 给出输出和状态，两者相同",
    "paddle begins with the first axis where all are given, torch always with the last one": "给出所有轴时，paddle 从第一个轴开始，torch 总是从最后一个轴开始",
    "as with all axes": "与给出所有轴的情况相同",
    "corners are aligned by default in paddle": "paddle 默认对齐角点",
    "paddle has no such mode": "paddle 没有这种模式",
    "epsilon is 1e-10 in torch, 1e-6 in paddle": "epsilon 在 torch 中为 1e-10，在 paddle 中为 1e-6",
    "learning rate 1.0 and rho 0.9 in torch, 0.001 and 0.95 in paddle": "torch 的学习率为 1.0、rho 为 0.9，paddle 为 0.001 和 0.95",
    "torch adds epsilon to the size of the gradient, paddle to the decayed maximum; it shows in tiny gradients only, and no argument changes it": "torch 把 epsilon 加到梯度的绝对值上，paddle 加到衰减后的最大值上；只在极小的梯度中显现，没有参数可以改变",
    "0.002 in torch, 0.001 in paddle": "torch 为 0.002，paddle 为 0.001",
    "torch adds epsilon to the root, paddle adds it below the root; paddle's set to the square of torch's comes near where gradients are far larger, and no argument gives the same": "torch 把 epsilon 加在平方根之外，paddle 加在根号之内；把 paddle 的设为 torch 的平方，在梯度远大于它时接近，没有参数能完全相同",
    "alpha is 0.99 in torch, rho 0.95 in paddle": "torch 的 alpha 为 0.99，paddle 的 rho 为 0.95",
    "the place of epsilon, its size (1e-8 in torch, 1e-6 in paddle), and alpha (0.99) against rho (0.95)": "epsilon 的位置和大小（torch 为 1e-8，paddle 为 1e-6），以及 alpha（0.99）与 rho（0.95）",
    "the place of epsilon": "epsilon 的位置",
    "two methods of one name: Polyak's averaging in torch, averaged gradients of batches in paddle, which with one batch is SGD": "同名的两种方法：torch 为 Polyak 平均，paddle 为各 batch 梯度的平均，只有一个 batch 时就是 SGD",
    "a group's learning rate is the rate in torch, and what the rate is multiplied by in paddle": "参数组的学习率在 torch 中就是学习率，在 paddle 中是乘到学习率上的倍数",
    "paddle ends at 1e-4, torch at 0": "paddle 的终值为 1e-4，torch 为 0",
    "torch ends at the first rate over 1e4, paddle at 1e-4": "torch 的终值为初始值除以 1e4，paddle 为 1e-4",
    "torch divides by the norm + 1e-6; so does paddle's clip_grad_norm_, but not its ClipGradByGlobalNorm": "torch 除以范数 + 1e-6；paddle 的 clip_grad_norm_ 也是，ClipGradByGlobalNorm 不是",
    "torch divides by the norm + 1e-6": "torch 除以范数 + 1e-6",
    "uniform within 1 / inputs ** 0.5 in torch, Xavier's uniform in paddle": "torch 为 1 / 输入数 ** 0.5 之内的均匀分布，paddle 为 Xavier 均匀分布",
    "paddle's biases start at zero": _FROM_ZERO,
    "uniform within 1 / fan_in ** 0.5 in torch, Kaiming's normal in paddle": "torch 为 1 / fan_in ** 0.5 之内的均匀分布，paddle 为 Kaiming 正态分布",
    "standard normal in torch, Xavier's uniform in paddle": "torch 为标准正态分布，paddle 为 Xavier 均匀分布",
    "torch draws for the three projections as one matrix": "torch 把三个投影作为一个矩阵来初始化",
    "0 to 1 in torch, -1 to 1 in paddle": "torch 为 0 到 1，paddle 为 -1 到 1",
    "of two middle values torch takes the lower one, paddle their mean": "中间有两个值时，torch 取较小的，paddle 取均值",
    "torch gives the indices too, and the lower of two middle values": "torch 还给出下标，并取两个中间值中较小的",
    "as with the median": "与 median 相同",
    "torch gives the indices too": "torch 还给出下标",
    "torch gives it all to the element whose index it returns, paddle shares it evenly": "torch 把梯度全部给返回下标的那个元素，paddle 平均分配",
    "the largest singular value in torch, the root of the sum of squares in paddle": "torch 为最大奇异值，paddle 为平方和的平方根",
    "torch requires the axis; paddle flattens without it": "torch 必须给出轴；paddle 不给出时展平",
    "paddle has the remainder with the divisor's sign only": "paddle 只有符号与除数相同的余数",
    "paddle has none; written out, 0 * log(0) is not a number": "paddle 没有；直接写出时 0 * log(0) 为 NaN",
    "paddle's gather takes whole rows, as torch's index_select does": "paddle 的 gather 取整行，与 torch 的 index_select 相同",
    "paddle's scatter writes whole rows": "paddle 的 scatter 写整行",
    "the number is the size of a part in torch, and the number of parts in paddle": "这个数在 torch 中是每份的大小，在 paddle 中是份数",
    "torch makes parts of equal size, perhaps fewer than asked for; paddle refuses": "torch 分成大小相同的份，可能少于要求的份数；paddle 拒绝",
    "the number of elements in paddle": "在 paddle 中是元素个数",
    "paddle casts nothing": "paddle 不做类型转换",
    "paddle's matrix is (in, out)": "paddle 的矩阵为（输入，输出）",
}  # fmt: skip
#: Of the cells behind the two calls.
WORDS = (
    (r"paddle's is ([-\d.e]+) times torch's", r"paddle 是 torch 的 \1 倍"),
    (r"relative L2 ", "相对 L2 "),
    (r" against ", " 对 "),
    (r"; float64 agrees with (\w+)", r"；float64 与 \1 一致"),
    (r"(torch|paddle) raises (\w+)", r"\1 抛出 \2"),
    (r"or, in torch:", "或者在 torch 中："),
    (r"^in torch:", "在 torch 中："),
    (r"no call of either is known that agrees", "没有已知的一致写法"),
)


def _cells(row: str) -> list[str]:
    return re.split(r"(?<!\\) \| ", row.strip("| \n"))


def _outside_of_code(text: str) -> str:
    parts = re.split(r"(`[^`]*`)", text)
    for pattern, words in WORDS:
        parts = [part if part.startswith("`") else re.sub(pattern, words, part) for part in parts]
    return "".join(parts)


def row(line: str) -> str:
    first, *calls, differs, so = _cells(line)
    name, _, note = first.partition("<br>")
    for what, known in ((name, NAMES), (note, NOTES)):
        if what and what.replace("\\|", "|") not in known:
            print(f"no translation yet: {what}", file=sys.stderr)
    head = NAMES.get(name, name) + (f"<br>{NOTES.get(note, note)}" if note else "")
    return f"| {' | '.join([head, *calls, _outside_of_code(differs), _outside_of_code(so)])} |"


def page(english: str) -> str:
    title = re.search(r"^# Torch (\S+) and paddle (\S+),", english)
    counts = re.search(r"(\d+) of (\d+) probes differ. For (\d+) of them", english)
    assert title and counts
    facts = dict(zip(("differ", "all", "none"), counts.groups()), torch=title[1], paddle=title[2])
    lines = [HEAD.format(**facts), ""]
    for line in english[english.index("## ") :].splitlines():
        if line.startswith("## "):
            line = f"## {GROUPS.get(line[3:], line[3:])}"
        elif line.startswith("| what "):
            line = "| 内容 | torch | paddle | 差别 | 这样写 |"
        elif line.startswith("The same: "):
            line = f"相同的有：{line[len('The same: ') : -1]}。"
        elif line.startswith("| ") and not line.startswith("| ---"):
            line = row(line)
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (DOCS / "zh/atlas.md").write_text(page((DOCS / "atlas.md").read_text(encoding="utf-8")), encoding="utf-8")
