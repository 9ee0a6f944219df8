"""Small models with random weights, the ways to call one, and faults in the call: a trainer's and a generator's forward.

A way returns nothing: it calls the model with all sequences. A fault changes what a way does, or the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

VOCABULARY = 101
#: Lengths of the sequences.
LENGTHS = (7, 4, 10, 5)


class Expected(NamedTuple):
    """What the report of a fault has to say.

    Attributes:
        where: regular expression of the place.
        words: regular expression of the cause; empty where none can be named.
    """

    where: str
    words: str = ""


@dataclass(frozen=True)
class Options:
    """What a fault changes of a call."""

    shift: int = 0  # added to all positions of packed sequences
    restart: bool = True  # positions of packed sequences restart
    blocks: bool = True  # packed sequences do not see each other
    mask: bool = True  # padding is masked
    positions: bool = True  # positions leave out the padding on the left
    dropped: tuple[int, int] | None = None  # sequence and token that a cache never gets
    forgotten: int = 0  # entries that the cache loses after the prefill
    late: int = 0  # added to the positions of tokens that are decoded
    prefill: int = 3
    tail: int = 0  # last tokens that are not given to the model, as those that were sampled last


@dataclass(frozen=True)
class Fault:
    way: str
    expected: Expected
    options: Options = field(default_factory=Options)
    change: Callable[[Any], object] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    reference: str = "padded"


def sequences(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def model_of(family: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY}
    if family == "gpt2":
        config = small | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64} | config
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    elif family == "opt":
        sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
        model = transformers.OPTForCausalLM(transformers.OPTConfig(**(small | sizes | config)))
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
        kinds = {
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        }
        configs, models = kinds[family]
        model = models(configs(**(small | sizes | config)))
    for parameter in model.parameters():  # weights of random models are so small that attention is nearly uniform
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model.to(dtype).eval()


def padded(model: Any, texts: list[torch.Tensor], options: Options) -> None:
    """One batch, padded on the right."""
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    model(input_ids=pad_sequence(texts, batch_first=True), attention_mask=mask)


def left(model: Any, texts: list[torch.Tensor], options: Options) -> None:
    """One batch, padded on the left."""
    ids, mask, positions = _left(texts)
    more = {"attention_mask": mask} if options.mask else {}
    model(input_ids=ids, **more, **({"position_ids": positions} if options.positions else {}))


def _left(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    length = max(map(len, texts))
    ids = torch.stack([torch.cat([text.new_zeros(length - len(text)), text]) for text in texts])
    mask = torch.stack([torch.arange(length) >= length - len(text) for text in texts]).long()
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def packed(model: Any, texts: list[torch.Tensor], options: Options) -> None:
    """All sequences in one row, without padding, with a mask of blocks."""
    ids = torch.cat(texts)[None]
    one = [torch.arange(len(text)) for text in texts]
    positions = torch.cat(one)[None] if options.restart else torch.arange(ids.shape[1])[None]
    number = torch.cat([torch.full((len(text),), k) for k, text in enumerate(texts)])
    sees = torch.tril(torch.ones(len(number), len(number), dtype=torch.bool))
    if options.blocks:
        sees &= number[:, None] == number[None]
    mask = torch.zeros(sees.shape, dtype=next(model.parameters()).dtype).masked_fill(~sees, float("-inf"))
    model(input_ids=ids, position_ids=positions + options.shift, attention_mask=mask[None, None], use_cache=False)


def decoded(model: Any, texts: list[torch.Tensor], options: Options) -> None:
    """Each sequence by itself: some tokens at once, then token by token with a cache."""
    for number, text in enumerate(texts):
        text = text[: len(text) - options.tail]
        if options.dropped is not None and options.dropped[0] == number:
            text = torch.cat([text[: options.dropped[1]], text[options.dropped[1] + 1 :]])
        out = model(input_ids=text[None, : options.prefill], use_cache=True)
        cache = out.past_key_values
        if options.forgotten:
            cache.crop(cache.get_seq_length() - options.forgotten)
        for place in range(options.prefill, len(text)):
            more = {}
            if options.late or options.forgotten:
                more["position_ids"] = torch.tensor([[place + options.late]])
            out = model(input_ids=text[None, place : place + 1], past_key_values=cache, use_cache=True, **more)
            cache = out.past_key_values


def batched(model: Any, texts: list[torch.Tensor], options: Options) -> None:
    """A batch padded on the left, as `generate` does: the first tokens at once, then one of each sequence."""
    ids, mask, positions = _left(texts)
    first = ids.shape[1] - min(map(len, texts)) + 1
    out = None
    for begin, end in [(0, first), *((k, k + 1) for k in range(first, ids.shape[1] - options.tail))]:
        more = {"attention_mask": mask[:, :end]} if options.mask else {}
        if options.positions:
            more["position_ids"] = positions[:, begin:end] + (options.late if begin else 0)
        cache = None if out is None else out.past_key_values
        out = model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, **more)


WAYS = {"padded": padded, "left": left, "packed": packed, "decoded": decoded, "batched": batched}


def scaled_logits(temperature: float) -> Callable[[Any], object]:
    """A model that divides its logits by a temperature."""

    def change(model: Any) -> None:
        forward = model.forward

        def scaled(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            out.logits = out.logits / temperature
            return out

        scaled.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
        model.forward = scaled

    return change


def call(model: Any, way: str, options: Options | None = None, texts: list[torch.Tensor] | None = None) -> None:
    """Call a model with all sequences, without gradients."""
    with torch.inference_mode():
        WAYS[way](model, sequences() if texts is None else texts, Options() if options is None else options)


def record(model: Any, folder: str, way: str, options: Options | None = None, **recording: Any) -> None:
    """Record one step: the calls of a model with all sequences."""
    import padiff

    with padiff.record(model, folder, **recording) as rec:
        call(model, way, options)
        rec.end_step()
