"""Roles, words and numbers in the names of layers, across the spellings of many libraries."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from padiff.records import Both

# Start of a name, and wrappers that may follow the word for the role.
_START = r"(?:^|[._])"
_END = r"(?:[._](?:linear|proj|dense|conv|fc|layer|weight|\d+))?$"
_ATTENTION = r"(?:attn|attention|attentions|self_attn|cross_attn|mha|msa|selfattention|encdecattention|att)\w*"

# Family -> value -> spellings. The first value that matches is used.
_ROLES: dict[str, tuple[tuple[str, str], ...]] = {
    "attention part": (
        ("qkv", r"(?:qkv\w*|c_attn|query_key_value|w_?qkv|in_proj\w*|to_qkv|proj_qkv|linear_qkv|fused_qkv)"),
        ("kv", r"(?:kv|to_kv|kv_proj|key_value|w_?kv|kv_linear|proj_kv|kv_b_proj)"),
        ("q", r"(?:q|query|queries|w_?q|to_q|(?:linear|lin|fc|proj|dense|w)_?q|q_?(?:proj|lin|linear|fc|dense|layer)|"
              r"query_(?:proj|layer|projection|linear|dense)|q_proj_weight)"),
        ("k", r"(?:k|key|keys|w_?k|to_k|(?:linear|lin|fc|proj|dense|w)_?k|k_?(?:proj|lin|linear|fc|dense|layer)|"
              r"key_(?:proj|layer|projection|linear|dense)|k_proj_weight)"),
        ("v", r"(?:v|value|values|w_?v|to_v|(?:linear|lin|fc|proj|dense|w)_?v|v_?(?:proj|lin|linear|fc|dense|layer)|"
              r"value_(?:proj|layer|projection|linear|dense)|v_proj_weight)"),
        ("o", rf"(?:(?:out|o)_?(?:proj|lin|linear|fc|dense)|to_out|w_?o|o|linear_out|proj_out|fc_o|linear_o|proj_o|"
              rf"dense_o|(?:{_ATTENTION})[._](?:\w+[._])*?(?:output[._]dense|c_proj|dense|proj|out|output|o|linear|"
              rf"projection|fc|fc_out|merge))"),
    ),
    "mlp part": (
        ("gate_up", r"(?:gate_up\w*|gate_and_up\w*|up_gate\w*|w13|w12|wi_fused|fused_gate\w*)"),
        ("gate", r"(?:gate|gate_?proj|w1|wi_0|linear_gate|w_gate|gate_linear)"),
        ("up", r"(?:up|up_?proj|w3|wi_1|linear_up|w_up|up_linear)"),
        ("out", r"(?:down|down_?proj|w2|w_down|fc_?2|linear_?2|lin_?2|dense_?2|dense_4h_to_h|ffn_output|fc_out|"
                r"linear_down|w_out|mlp[._]c_proj|\w*ffn[._](?:2|3|4|output)|mlp[._](?:2|3|4|output)|"
                r"(?:output|ffn|mlp|feed_forward|densereludense|densegatedactdense|layer_?ff)[._](?:dense|wo))"),
        ("in", r"(?:fc_?1|linear_?1|lin_?1|dense_?1|intermediate[._]dense|intermediate|c_fc|dense_h_to_4h|fc_in|wi|"
               r"w_in|ffn|\w*ffn[._]0|mlp[._]0)"),
    ),
    "embedding": (
        ("position", r"\w*pos(?:ition)?(?:al)?\w*|wpe"),
        ("segment", r"\w*(?:token_type|segment|task_type)\w*"),
        ("word", r"wte|\w*(?:word_emb|tok_emb|token_emb|embed_tok|word_embed)\w*|shared|tokens"),
        ("class", r"(?:cls|class)_(?:token|emb\w*)"),
        ("distillation", r"dist\w*_token"),
    ),
    "recurrent part": (
        ("ih", r"(?:\w+[._])?(?:(?:weight|bias|w|b)_?)?(?:ih|i2h|x2h|xh)(?:_l\d+)?(?:_reverse)?"),
        ("hh", r"(?:\w+[._])?(?:(?:weight|bias|w|b)_?)?(?:hh|h2h)(?:_l\d+)?(?:_reverse)?"),
    ),
    "gate": (
        ("input gate", r"(?:input_gate|gate_i|w_?i|i_gate|in_gate|[xhwu]_?i|w_?[xhi]i|(?:ih|hh|x2h|h2h)_i)"),
        ("forget gate", r"(?:forget_gate|gate_f|w_?f|f_gate|forget|[xhwu]_?f|w_?[xhi]f|(?:ih|hh|x2h|h2h)_f)"),
        ("cell gate", r"(?:cell_gate|gate_g|gate_c|w_?g|w_?c|g_gate|c_gate|cell|candidate|[xhwu]_?[gc]|w_?[xhi][gc]|"
                      r"(?:ih|hh|x2h|h2h)_[gc])"),
        ("output gate", r"(?:output_gate|gate_o|w_?o|o_gate|out_gate|[xhwu]_?o|w_?[xhi]o|(?:ih|hh|x2h|h2h)_o)"),
        ("reset gate", r"(?:reset_gate|gate_r|w_?r|r_gate|reset|[xhwu]_?r|w_?[xhi]r|(?:ih|hh|x2h|h2h)_r)"),
        ("update gate", r"(?:update_gate|gate_z|w_?z|z_gate|update|[xhwu]_?z|w_?[xhi]z|(?:ih|hh|x2h|h2h)_z)"),
        ("new gate", r"(?:new_gate|gate_n|w_?n|n_gate|new|[xhwu]_?n|w_?[xhi]n|(?:ih|hh|x2h|h2h)_n)"),
    ),
}  # fmt: skip

# Words with a meaning anywhere in a path.
_PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "tower": (
        ("decoder", r"(?:^|[._])(?:\w*decoder|dec)(?:[._]|\d|$)"),
        ("encoder", r"(?:^|[._])(?:\w*encoder|enc)(?:[._]|\d|$)"),
    ),
    "modality": (
        ("vision", r"(?:^|[._])(?:vision|visual|image)\w*"),
        ("text", r"(?:^|[._])(?:text|language)\w*"),
        ("audio", r"(?:^|[._])(?:audio|speech)\w*"),
    ),
    "attention of": (
        ("another", r"cross_?att|encoder_attn|encdec|enc_dec_att|multihead_attn|inter_?att|src_att"),
        ("itself", r"self_?att|attention\.self|selfattention"),
    ),
    "direction": (("backward", r"_reverse|(?:^|[._])(?:bw|backward|cell_bw)(?:[._]|\d|$)"),
                  ("forward", r"(?:^|[._])(?:fw|cell_fw)(?:[._]|\d|$)")),
    "branch": (("shortcut", r"(?:^|[._])(?:downsample|shortcut|short|identity|skip|residual_conv|proj_shortcut|sc)"
                            r"(?:[._]|\d|$)"),),
    "sampling": (("down", r"(?:^|[._])(?:down(?!_?sampl)|contract)\w*"),
                 ("up", r"(?:^|[._])(?:up(?!_?sampl)|expan)\w*")),
    "tower of two": (("left", r"(?:^|[._])(?:left|query_encoder|student|online|actor|generator|gen|policy|source|src)"
                              r"(?:[._]|\d|$)"),
                     ("right", r"(?:^|[._])(?:right|passage_encoder|teacher|target|critic|discriminator|disc|tgt)"
                               r"(?:[._]|\d|$)")),
}  # fmt: skip

# Normalisations of a block, by the part to which they belong; the number is the position among the block's.
_NORMS = (
    ("the end", 9, r"(?:ln_f|norm_f|final_norm|ln_post|post_layernorm|norm_final)$"),
    ("another", 2, r"(?:encoder_attn_layer_norm|cross_attn\w*norm|encoder_attn_norm|norm_cross|ln_cross)$"),
    ("mlp", 3, r"(?:ffn_norm|ffn_layer_norm|mlp_norm|post_attention_layernorm|post_attention_norm|layernorm_after|"
               r"output_layer_norm|full_layer_layer_norm|ff_norm|norm_ffn|norm_mlp|ln_mlp|ln_ffn|norm_ff|"
               r"(?<!attention\.)output\.layernorm)$"),
    ("", 3, r"final_layer_norm$"),
    ("attention", 1, r"(?:attention\.output\.layernorm|self_attn_layer_norm|sa_layer_norm|attention_norm|attn_norm|"
                     r"input_layernorm|layernorm_before|attn_layer_norm|norm_attn|ln_attn|pre_attention_norm|"
                     r"attention\.layernorm|sa_norm|attn_ln|norm_mha)$"),
)  # fmt: skip

_SAME_WORD = {
    "attention": "attn", "attentions": "attn", "att": "attn", "mha": "attn", "msa": "attn",
    "ln": "norm", "layernorm": "norm", "batchnorm": "norm", "bn": "norm", "gn": "norm", "rmsnorm": "norm",
    "linear": "fc", "dense": "fc", "lin": "fc", "projection": "proj", "conv2d": "conv", "embeddings": "embed",
    "embedding": "embed", "emb": "embed", "embed": "embed", "tok": "token", "tokens": "token", "word": "token",
    "pos": "position", "positional": "position", "positions": "position", "ffn": "mlp", "feedforward": "mlp",
    "ff": "mlp",
    "blocks": "block", "layers": "block", "layer": "block", "h": "block", "stages": "stage", "heads": "head",
    "classifier": "head", "cls": "class", "downsample": "shortcut", "short": "shortcut", "skip": "shortcut",
    "gamma": "weight", "scale": "weight", "beta": "bias", "offset": "bias", "se": "squeeze", "reduction": "reduce",
    "depthwise": "dw", "pointwise": "pw", "enc": "encoder", "dec": "decoder", "out": "output", "in": "input",
    "transition": "trans", "denseblock": "block", "features": "feature",
}  # fmt: skip
_WORD = re.compile(r"[a-z]+|\d+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_IN_ATTENTION = re.compile(_ATTENTION + r"[._]")


class _Family:
    """The values of one family of roles, with the patterns of their spellings.

    Args:
        values: each value with its pattern; the first pattern that matches decides.
    """

    def __init__(self, values: Iterable[tuple[str, str]]) -> None:
        values = list(values)
        self._values = [(value, re.compile(spelt)) for value, spelt in values]
        # Most paths have no role in most families: one search for all patterns shows that.
        self._any = re.compile("|".join(f"(?:{spelt})" for _, spelt in values))

    def value(self, path: str) -> str:
        """Return the role in a path, or an empty string."""
        if self._any.search(path) is None:
            return ""
        return next(value for value, spelt in self._values if spelt.search(path))


_TELLING = {
    family: _Family((value, f"{_START}(?:{spelt}){_END}") for value, spelt in values)
    for family, values in _ROLES.items()
}
_TELLING_PLACES = {family: _Family(values) for family, values in _PLACES.items()}
_TELLING_NORMS = tuple((of, number, re.compile(spelt)) for of, number, spelt in _NORMS)


@dataclass(frozen=True)
class Name:
    """Meaning of a path.

    Attributes:
        roles: pairs of family and value.
        words: words in the path, in a common spelling.
        numbers: numbers in the path.
        skeleton: the path without its numbers.
        norm: position of a normalisation within its block, 0 if not known.
    """

    roles: frozenset[tuple[str, str]]
    words: frozenset[str]
    numbers: tuple[int, ...]
    skeleton: str
    norm: int


@lru_cache(maxsize=1 << 16)
def read(path: str, inner: str) -> Name:
    """Return the meaning of a path: roles from the full path, words and numbers from its end `inner`."""
    roles, norm = _roles_of(path)
    words, numbers = [], []
    for word in _WORD.findall(_HUMP.sub("_", inner).lower()):
        if word.isdigit():
            numbers.append(int(word))
        else:
            words.append(_SAME_WORD.get(word, word))
    return Name(
        roles=roles,
        words=frozenset(words),
        numbers=tuple(numbers),
        skeleton=re.sub(r"\d+", "#", inner),
        norm=norm,
    )


@lru_cache(maxsize=1 << 16)
def _roles_of(path: str) -> tuple[frozenset[tuple[str, str]], int]:
    """Return the roles in a path, and the position of a normalisation within its block."""
    lower = path.lower()
    roles = {
        (family, value)
        for table in (_TELLING, _TELLING_PLACES)
        for family, values in table.items()
        if (value := values.value(lower))
    }
    by_family = dict(roles)
    if by_family.get("attention part") == "o" and by_family.get("mlp part") == "out":
        # wo and output.dense may be of an attention or of an MLP: the path decides.
        roles.discard(("mlp part", "out") if _IN_ATTENTION.search(lower) else ("attention part", "o"))
    if by_family.keys() & {"attention part", "mlp part"}:
        roles = {(family, value) for family, value in roles if family != "gate"}
    norm = next(((of, number) for of, number, spelt in _TELLING_NORMS if spelt.search(lower)), ("", 0))
    if norm[0]:
        roles.add(("norm of", norm[0]))
    return frozenset(roles), norm[1]


def role(path: str, family: str) -> str:
    """Return the role of one family in a path, or an empty string."""
    return _TELLING[family].value(path.lower())


# Two words mean the same if this share of the pairs with either word have both.
_LINKED = 0.75

_RECURRENT_PART = re.compile(r"(?:ih|hh|i2h|h2h|x2h|xh)")


def without_recurrent_part(path: str) -> str:
    """Return a path without the word for input or state, so that it is the same for both parts of a recurrent cell."""
    return _RECURRENT_PART.sub("", path.lower())


#: Different roles of a family that the same layer may have.
_COMPATIBLE = (frozenset({"in", "gate"}), frozenset({"in", "up"}), frozenset({"in", "gate_up"}))


#: Comparable parts of a path: roles and words.
NameKey = tuple[frozenset[tuple[str, str]], frozenset[str]]


#: Words of the reference and of the candidate that mean the same in these two models.
Linked = frozenset[tuple[str, str]]


def agreement(reference: NameKey, candidate: NameKey, linked: Linked = frozenset()) -> tuple[int, int, float]:
    """Return the number of equal roles, the number of contradictory roles, and the share of common words, 0 to 1."""
    theirs = dict(candidate[0])
    agree = contradict = 0
    for family, value in reference[0]:
        if family in theirs and value == theirs[family]:
            agree += 1
        elif family in theirs and frozenset((value, theirs[family])) not in _COMPATIBLE:
            contradict += 1
    total = len(reference[1]) + len(candidate[1])
    shared = len(reference[1] & candidate[1])
    unshared = candidate[1] - reference[1]
    # doc and document, step and steps
    shared += sum(
        any(_begins(word, theirs) or (word, theirs) in linked for theirs in unshared)
        for word in reference[1] - candidate[1]
    )
    return agree, contradict, 2 * shared / total if total else 0.0


def vocabulary(paths: Iterable[Both[str]]) -> Linked:
    """Return words that the two models use for the same thing, learnt from the paths of certain pairs.

    Two words are linked if each occurs nearly only in pairs with the other.
    """
    counts: Both[Counter[str]] = Both(Counter(), Counter())
    together: Counter[tuple[str, str]] = Counter()
    for pair in set(paths):
        words = pair.map(lambda path: read(path, path).words)
        for count, side in zip(counts, words):
            count.update(side)
        together.update((a, b) for a in words.reference for b in words.candidate)
    return frozenset(
        (a, b)
        for (a, b), n in together.items()
        if a != b and n > 1 and n >= _LINKED * (counts.reference[a] + counts.candidate[b] - n)
    )


def _begins(first: str, second: str) -> bool:
    return min(len(first), len(second)) >= 3 and (first.startswith(second) or second.startswith(first))
