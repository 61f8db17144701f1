"""What Megatron-Bridge needs to hear on NPU: arguments, module names, and two gradients.

`prepare` is called once for each model, before Bridge's provider is finalized. The other two are
called while a Qwen3-VL computes. Bridge's own objects are changed by registering and setting, and
where that does not reach, by a declared `Patch`.
"""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slime_npu.patching import Patch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["flat_outputs", "prepare", "register_names", "sum_gradients"]

# Arguments of Megatron's that slime does not hand on, each a field of the provider's.
_ARGUMENTS = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "gradient_accumulation_fusion",  # off on NPU: it needs a CUDA extension
    "variable_seq_lengths",
)

# MindSpeed's classes, of every branch up to core_r0.15.3 and of dev, by how their weights are
# sharded. Two things a registry of class names cannot say, and the fork's mindspeed_names.py does:
# the norm inside a LayerNormColumn linear is replicated, and MindSpeedTELinear goes by its
# parallel_mode, so it is not here.
_MODULES = {
    "column": (
        "MindSpeedTEColumnParallelLinear",
        "MindSpeedTEColumnParallelGroupedLinear",
        "MindSpeedTELayerNormColumnParallelLinear",
        "MindSpeedTEPerformanceColumnParallelGroupedLinear",
        "MindSpeedTEDotProductAttention",
    ),
    "row": (
        "MindSpeedTERowParallelLinear",
        "MindSpeedTERowParallelGroupedLinear",
        "MindSpeedTEPerformanceRowParallelGroupedLinear",
    ),
    "replicated": ("MindSpeedTELayernorm", "LinearForLastLayer"),
}


def prepare(provider: Any, args: Namespace) -> None:
    """Give Bridge's `provider` what slime's `args` say and slime does not pass on.

    Recomputation, gradient accumulation fusion and variable sequence lengths become what the
    arguments say, and arguments that the provider has no field for (MindSpeed's) become attributes
    of it. Bridge is taught the names of MindSpeed's modules; a critic's value head keeps
    its fresh weights where the checkpoint has a vocabulary's; a Qwen3-VL takes slime's
    `loss_mask`; and what it marks for NVIDIA's profiler goes nowhere. Comes before
    `provider.finalize()`, which checks the fields together.

    AttributeError where the provider has no field for an argument.
    """
    for name in _ARGUMENTS:
        if not hasattr(args, name):
            continue
        if not hasattr(provider, name):
            raise AttributeError(
                f"{type(provider).__name__} has no field {name!r}, though Megatron has the"
                " argument. The model was not built. slime_npu.bridge has to learn what this"
                " Bridge calls it."
            )
        setattr(provider, name, getattr(args, name))
    # MindSpeed's features ask the model's configuration for their arguments. Megatron's own gets
    # them all (MindSpeed wraps its constructor); a provider of Bridge's is made without them.
    for name, value in vars(args).items():
        if not hasattr(provider, name):
            setattr(provider, name, value)
    register_names()
    VALUE_HEAD_WEIGHT.apply()
    VALUE_HEAD_BIAS.apply()
    _let_ranges_be_marked()
    if type(provider).__name__.startswith("Qwen3VL"):
        _let_qwen3_vl_take_a_loss_mask()


def register_names() -> None:
    """Teach Bridge's AutoMapping how MindSpeed's modules and slime's value head are sharded.

    Idempotent. From core_r0.16 on MindSpeed's classes have Transformer Engine's names, which
    AutoMapping knows.
    """
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    for parallelism, names in _MODULES.items():
        for name in names:
            AutoMapping.register_module_type(name, parallelism)
            # What the name is once the fork's mindspeed_names.py has read it.
            AutoMapping.register_module_type(name.replace("MindSpeedTE", "TE"), parallelism)


_HEAD = "LinearForLastLayer"  # the class of slime's value head


def _keep_value_head(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def hf_to_megatron(self: Any, hf_weights: Tensor, megatron_module: Module) -> Any:
        if (
            type(megatron_module).__name__ == _HEAD
            and hf_weights.shape != megatron_module.weight.shape
        ):
            return None  # as for a rank that gets no part of a weight
        return load(self, hf_weights, megatron_module)

    return hf_to_megatron


def _leave_out_value_head(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_conversion_tasks(
        self: Any, hf_pretrained: Any, megatron_model: Any, *positional: Any, **named: Any
    ) -> Any:
        from megatron.core import parallel_state

        tasks = build(self, hf_pretrained, megatron_model, *positional, **named)
        mapped = [task for task in tasks if task is not None]
        has_head = any(
            type(module).__name__ == _HEAD for chunk in megatron_model for module in chunk.modules()
        )
        # Only the last stage sees whether it is the head's bias that Bridge does not know.
        may_miss = has_head or not parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        return mapped if len(tasks) - len(mapped) <= may_miss else tasks

    return build_conversion_tasks


VALUE_HEAD_WEIGHT = Patch(
    target="megatron.bridge.models.conversion.param_mapping:AutoMapping.hf_to_megatron",
    make=_keep_value_head,
    what="A critic's value head is not loaded from a checkpoint's lm_head of another shape.",
    why="Bridge stops at the shapes; its list of allowed mismatches (from v0.3.0 on) is an argument"
    " that slime does not give.",
    until="slime passes allowed_mismatched_params, or we follow no release with Bridge any more",
    expects="(self, hf_weights, megatron_module)",
)


VALUE_HEAD_BIAS = Patch(
    target="megatron.bridge.models.conversion.model_bridge:"
    "MegatronModelBridge.build_conversion_tasks",
    make=_leave_out_value_head,
    what="A critic's value head may have a bias, which no checkpoint has.",
    why="Bridge warns of a parameter it cannot name, and then fails on the task it did not make.",
    until="Bridge passes over what it cannot name, or we follow no release with Bridge any more",
    expects=(
        "(self, hf_pretrained, megatron_model)",
        "(self, hf_pretrained, megatron_model, weight_dtype=None)",
    ),
)


def _drop_loss_mask(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def forward_without_loss_mask(
        self: Module, *positional: Any, loss_mask: Tensor | None = None, **named: Any
    ) -> Any:
        return forward(self, *positional, **named)

    return forward_without_loss_mask


LOSS_MASK = Patch(
    target="megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model:Qwen3VLModel.forward",
    make=_drop_loss_mask,
    what="Qwen3VLModel.forward takes a loss_mask, and does nothing with it.",
    why="slime passes one to every model. Only multi-token prediction reads it there, which a"
    " Qwen3-VL has not; slime masks its losses itself.",
    until="v0.3.0 is the oldest Bridge we follow (#2023)",
    expects="(self, input_ids, position_ids=None, attention_mask=None, labels=None,"
    " inference_params=None, packed_seq_params=None, extra_block_kwargs=None, pixel_values=None,"
    " pixel_values_videos=None, image_grid_thw=None, video_grid_thw=None, image_input_mask=None)",
)


def _let_qwen3_vl_take_a_loss_mask() -> None:
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model import Qwen3VLModel

    parameters = inspect.signature(Qwen3VLModel.forward, follow_wrapped=False).parameters
    if "loss_mask" not in parameters:
        LOSS_MASK.apply()


def _do_nothing(mark: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(mark)
    def marked(*_: Any) -> int:
        return 0  # the range's depth

    return marked


RANGES = tuple(
    Patch(
        target=f"torch.cuda.nvtx:{name}",
        make=_do_nothing,
        what=f"torch.cuda.nvtx.{name} does nothing where torch has no CUDA.",
        why="Bridge's Qwen3-VL marks ranges for NVIDIA's profiler (from v0.3.0 on), which raises"
        " where torch is built without CUDA.",
        until="transfer_to_npu covers torch.cuda.nvtx, or Bridge marks ranges through Megatron's"
        " nvtx_range_push",
        expects=signature,
    )
    for name, signature in (("range_push", "(msg)"), ("range_pop", "()"))
)


def _let_ranges_be_marked() -> None:
    import torch

    if torch.version.cuda is None:
        for patch in RANGES:
            patch.apply()


def sum_gradients(embeds: Sequence[Tensor], tp_size: int) -> list[Tensor]:
    """`embeds` as they are; backward, each one's gradients summed over the tensor parallel group.

    For what every rank computes whole and then uses a part of: without the sum each rank's
    gradient is that of its part. `tp_size` is the number of parts, 1 where nothing is cut.
    ValueError where it is not the size of Megatron's tensor parallel group.
    """
    from megatron.core import parallel_state, tensor_parallel

    if tp_size == 1:
        return list(embeds)
    group = parallel_state.get_tensor_model_parallel_world_size()
    if tp_size != group:
        raise ValueError(
            f"The deepstack embeddings are cut into {tp_size} parts, but the tensor parallel group"
            f" has {group} ranks: their gradients cannot be summed over it. Nothing was computed."
        )
    return [tensor_parallel.copy_to_tensor_model_parallel_region(embed) for embed in embeds]


def flat_outputs(handler: Callable[..., Any]) -> Callable[..., Any]:
    """`handler`, which checkpoints a function, for functions that return tensors in lists.

    Recomputation gives gradients to the tensors a function returns, not to those in a list it
    returns. So the lists are opened inside the checkpoint and filled again outside, in their
    places; how many tensors each holds may change from call to call.
    """

    @functools.wraps(handler)
    def handle(function: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
        lengths: list[int | None] = []

        def flat(*positional: Any) -> tuple[Any, ...]:
            outputs = function(*positional)
            lengths[:] = [len(out) if isinstance(out, list) else None for out in outputs]
            return tuple(
                one for out in outputs for one in (out if isinstance(out, list) else (out,))
            )

        results = iter(handler(flat))
        return tuple(
            next(results) if length is None else [next(results) for _ in range(length)]
            for length in lengths
        )

    return handle
