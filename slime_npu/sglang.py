"""The arguments SGLang serves Qwen3-VL with on NPU.

All of it is configuration that SGLang has from our first pin on (dce8b060, after v0.5.7): nothing
of SGLang's is replaced at run time. What has no option is in the fork's queue (`forks/sglang`): the
rope of bfloat16 queries with a float32 cache, and deepstack embeddings added after the residual.

    enable_precise_embedding_interpolation
        the vision tower's position embedding is interpolated from corner to corner of its table,
        as transformers does it and the model was trained. SGLang's default is another grid,
        off by more than 2 on a table drawn from N(0, 1).
    mm_attention_backend
        "ascend_attn" is the NPU's attention operator in the vision tower; SGLang's default where
        there is no CUDA is torch's own attention. The text model's is "ascend" on NPU already.
    disable_radix_cache
        keys and values are not shared between prompts: how the run this stack was made for serves
        (Qwen3-VL-8B on geo3k). Give False to share them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["command_line", "server_arguments"]

_DEFAULTS: dict[str, Any] = {
    "device": "npu",
    "disable_radix_cache": True,
    "mm_attention_backend": "ascend_attn",
}
_ALWAYS: dict[str, tuple[Any, str]] = {
    "device": ("npu", "these are the arguments for NPUs"),
    "enable_precise_embedding_interpolation": (
        True,
        "any other interpolation gives the images positions that the model was not trained with",
    ),
    "mm_enable_dp_encoder": (
        False,
        "the vision tower is tensor parallel here; its data parallel form was not shown to compute "
        "the same on NPU",
    ),
}


def server_arguments(**given: Any) -> dict[str, Any]:
    """Keyword arguments of SGLang's `ServerArgs` and `Engine`: those given, and what NPUs need.

    A default here (disable_radix_cache, mm_attention_backend) gives way to what is given.

    Raises ValueError where what is given makes the model wrong or cannot run on NPU.
    """
    for name, (needed, reason) in _ALWAYS.items():
        if given.get(name, needed) != needed:
            raise ValueError(
                f"SGLang on NPU: {name}={given[name]!r} is refused, it has to be {needed!r}: "
                f"{reason}"
            )
    always = {name: needed for name, (needed, _) in _ALWAYS.items() if needed}
    return _DEFAULTS | given | always


def command_line(arguments: Mapping[str, Any], prefix: str = "--") -> list[str]:
    """The same arguments as words of a command: `--sglang-` is the prefix slime gives them.

    True is a bare flag; False and None, which are SGLang's own defaults, leave the option away;
    several values become several words; a mapping becomes JSON.
    """
    return list(_words(arguments, prefix))


def _words(arguments: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        yield f"{prefix}{name.replace('_', '-')}"
        if isinstance(value, Mapping):
            yield json.dumps(value)
        elif isinstance(value, list | tuple):
            yield from map(str, value)
        elif value is not True:
            yield str(value)
