"""What slime's Megatron backend asks for on NPU: value heads, layer names and Qwen3-VL's weights.

A Megatron parameter's name is that of the module tree, behind as many `module.` as there are
wrappers: `module.module.language_model.decoder.layers.3.mlp.linear_fc1.weight`. A Hugging Face
name is that of a Qwen3-VL checkpoint: `model.language_model.layers.3.mlp.gate_proj.weight`
(https://huggingface.co/Qwen/Qwen3-VL-8B-Instruct, `model.safetensors.index.json`).

Two tensors differ in more than their names. Megatron interleaves queries, keys and values by group,
`[q … q, k, v]` for each key-value head, where Hugging Face has three tensors; and it stacks the
gate on the up projection, where Hugging Face has two.
"""

from __future__ import annotations

import functools
import inspect
import re
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from slime_npu.device import is_npu

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["global_name", "is_npu", "loaders", "qwen3_vl_from_hf", "qwen3_vl_to_hf", "value_head"]

Named = list[tuple[str, "Tensor"]]


class Reader(Protocol):
    """What slime reads a checkpoint with (`hf_to_megatron.common.SafetensorReader`)."""

    def __contains__(self, name: str) -> bool: ...
    def get_tensor(self, name: str) -> Tensor: ...


# Value heads


def value_head(get_provider: Callable[..., Callable[..., Module]]) -> Callable[..., Any]:
    """`get_provider(args, role)`, whose models have a critic's value head where it belongs.

    A vision language model makes its output in `language_model.output_layer`, so the head is moved
    there, or made there where `get_provider` makes none (slime with Bridge, before v0.2.3). Under
    sequence parallelism its bias is marked like its weight, so that ranks add up their gradients.
    The head's class is slime's own, `LinearForLastLayer`, of the module that defines
    `get_provider`. Models of any other role are left as they are.
    """

    @functools.wraps(get_provider)
    def get_provider_with_head(args: Namespace, role: str = "actor") -> Callable[..., Module]:
        provide = get_provider(args, role)
        if role != "critic":
            return provide

        @functools.wraps(provide)
        def provide_with_head(*positional: Any, **named: Any) -> Module:
            model = provide(*positional, **named)
            _put_head(model, _head_class(get_provider))
            return model

        return provide_with_head

    return get_provider_with_head


def _head_class(get_provider: Callable[..., Any]) -> Any:
    name = "LinearForLastLayer"
    names = inspect.unwrap(get_provider).__globals__
    if name not in names:
        raise RuntimeError(
            f"{names.get('__name__')} defines {get_provider.__name__} but no {name}, the class of a"
            " critic's value head. No model was built. The fork's value_head.py has to learn where"
            " this slime keeps it."
        )
    return names[name]


def _put_head(model: Any, head_class: Any) -> None:
    owner = getattr(model, "language_model", model)
    if not owner.post_process:
        return
    if owner is not model and hasattr(model, "output_layer"):
        owner.output_layer = model.output_layer
        del model.output_layer
    elif not isinstance(owner.output_layer, head_class):
        owner.output_layer = head_class(
            input_size=model.config.hidden_size, output_size=1, config=model.config
        )
    head = owner.output_layer
    if model.config.sequence_parallel and head.bias is not None:
        head.bias.sequence_parallel = True


# Names


def global_name(name: str, offset: int) -> str:
    """`name` with a language model's layer counted over the whole pipeline.

    `offset` is the number of layers before this stage's first. A vision tower stands on one stage,
    so its layers, like every name without `language_model.decoder.layers`, stay as they are.
    """
    return re.sub(
        r"^((?:module\.)*language_model\.decoder\.layers\.)(\d+)(?=\.)",
        lambda found: f"{found[1]}{int(found[2]) + offset}",
        name,
    )


_WHOLE = {
    "embedding.word_embeddings.weight": "model.language_model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.language_model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    # A norm is part of the linear that follows it (Transformer Engine), or a module of its own.
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
_GATE_UP = "mlp.linear_fc1.weight"


def _vision_name(name: str) -> str | None:
    tower = name.removeprefix("vision_model.")
    return None if tower == name else f"model.visual.{tower}"


def _layer_name(name: str) -> tuple[str, str]:
    """The Hugging Face layer a language model's parameter is in, and what it is there."""
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if found is None:
        raise _unknown(name)
    return f"model.language_model.layers.{found[1]}", found[2]


def _bare(name: str) -> str:
    return re.sub(r"^(?:module\.)*(?:language_model\.)?", "", name)


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"No tensor of a Qwen3-VL checkpoint belongs to Megatron's parameter {name!r}. Nothing was"
        " converted. Dense models are known, with or without Transformer Engine's fused norms; for"
        " another model use slime's own converter or Bridge."
    )


# Weights


def qwen3_vl_to_hf(args: Namespace, name: str, param: Tensor) -> Named:
    """Hugging Face's names and tensors for one whole parameter of a Qwen3-VL, any shards joined.

    `args` are Megatron's: `num_attention_heads`, `num_query_groups`, `hidden_size`, and
    `kv_channels`, the size of a head (None: hidden size by heads). Layers in `name` count over
    the whole pipeline. ValueError for a name that no Qwen3-VL has.
    """
    name = _bare(name)
    if (whole := _vision_name(name) or _WHOLE.get(name)) is not None:
        return [(whole, param)]
    layer, rest = _layer_name(name)
    if rest in _LAYER:
        return [(f"{layer}.{_LAYER[rest]}", param)]
    if rest == _GATE_UP:
        gate, up = param.chunk(2)
        return [(f"{layer}.mlp.gate_proj.weight", gate), (f"{layer}.mlp.up_proj.weight", up)]
    if found := _QKV.fullmatch(rest):
        head = getattr(args, "kv_channels", None) or args.hidden_size // args.num_attention_heads
        queries = args.num_attention_heads // args.num_query_groups
        grouped = param.view(args.num_query_groups, queries + 2, head, *param.shape[1:])
        return [
            (f"{layer}.self_attn.{part}_proj.{found[1]}", heads.reshape(-1, *param.shape[1:]))
            for part, heads in zip("qkv", grouped.split([queries, 1, 1], dim=1), strict=True)
        ]
    raise _unknown(name)


def qwen3_vl_from_hf(name: str, reader: Reader, config: Any) -> Tensor:
    """The whole tensor for Megatron's parameter `name`, from a Qwen3-VL checkpoint.

    `config` is the checkpoint's (`transformers.Qwen3VLConfig`). A model with tied embeddings has
    no `lm_head.weight`, its embeddings stand in; a value head's bias is in no checkpoint and starts
    at zero, as slime makes it. ValueError for a name that no Qwen3-VL has.
    """
    import torch

    name = _bare(name)
    if name == "output_layer.bias":
        return torch.zeros(1)
    if name == "output_layer.weight" and _WHOLE[name] not in reader:
        name = "embedding.word_embeddings.weight"
    if (whole := _vision_name(name) or _WHOLE.get(name)) is not None:
        return reader.get_tensor(whole)
    layer, rest = _layer_name(name)
    if rest in _LAYER:
        return reader.get_tensor(f"{layer}.{_LAYER[rest]}")
    if rest == _GATE_UP:
        return torch.cat(
            [reader.get_tensor(f"{layer}.mlp.{p}_proj.weight") for p in ("gate", "up")]
        )
    if found := _QKV.fullmatch(rest):
        parts = [reader.get_tensor(f"{layer}.self_attn.{p}_proj.{found[1]}") for p in "qkv"]
        groups = config.text_config.num_key_value_heads
        grouped = [part.view(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])
    raise _unknown(name)


def loaders() -> dict[str, Callable[[str, Reader, Any], Tensor]]:
    """What slime's table of Hugging Face loaders lacks, by the checkpoint's `model_type`."""
    return {"qwen3_vl": qwen3_vl_from_hf}
