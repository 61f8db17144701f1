"""MindSpeed in a process: it adapts Megatron before Megatron is imported, and again with arguments.

`adapt` is the first thing a process does with Megatron, `repatch` the first thing it does with its
arguments. Both are what the slime fork calls (`forks/slime/mindspeed.py`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from slime_npu.device import is_npu
from slime_npu.patching import Patch

__all__ = ["MindSpeedError", "adapt", "is_npu", "repatch"]

_ADAPTOR = "mindspeed.megatron_adaptor"
_PARALLEL_STATE = "megatron.core.parallel_state"


class MindSpeedError(RuntimeError):
    """MindSpeed cannot adapt this process now; the message says why, and nothing was changed."""


def _named_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.npu.", "torch.cuda.") if isinstance(answer, str) else answer

    return type


TENSOR_TYPE = Patch(
    target="torch:Tensor.type",
    make=_named_cuda,
    what="Tensor.type() of a tensor on an NPU answers 'torch.cuda...'",
    why="Megatron's optimizers look for parameters whose type() is one of 'torch.cuda...Tensor' "
    "and refuse every other",
    until="Megatron asks a tensor for its device and dtype",
    expects=None,
)


def _of_any_device(original: Callable[[], tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    @functools.wraps(original)
    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return original()

    return get_device_capability


DEVICE_CAPABILITY = Patch(
    target="mindspeed.core.fusions.grouped_matmul:get_device_capability",
    make=_of_any_device,
    what="MindSpeed's get_device_capability, which it puts into torch.cuda, takes a device",
    why="torch.distributed.broadcast asks for the capability of a tensor's device (torch 2.13)",
    until="MindSpeed core_r0.15.3 is no longer followed; core_r0.16.0 takes one",
    expects="()",
)


def adapt() -> None:
    """Let MindSpeed adapt this process: once, and before Megatron is imported.

    torch.cuda becomes torch.npu (torch_npu's `transfer_to_npu`), MindSpeed replaces its parts of
    Megatron, and `Tensor.type()` says 'torch.cuda...' for tensors on an NPU, by MindSpeed's hand
    or, where it has none for that, by `TENSOR_TYPE`. What a MindSpeed lacks for this torch is added
    (`DEVICE_CAPABILITY`). Called again it does nothing.

    Raises `slime_npu.device.NoNPU` on a host without NPUs, and MindSpeedError where MindSpeed is
    not installed or Megatron was imported first. What MindSpeed raises while it is imported is
    passed on; it has imported parts of Megatron by then, so such a process has to start again.
    """
    if _ADAPTOR not in sys.modules:
        is_npu(strict=True)
        if importlib.util.find_spec("mindspeed") is None:
            raise MindSpeedError(
                "MindSpeed is not installed, and Megatron does not run on NPUs without it: "
                "install the branch that fits Megatron's release from "
                "https://gitcode.com/Ascend/MindSpeed"
            )
        if "megatron.core" in sys.modules:
            raise MindSpeedError(
                f"megatron.core was imported in this process ({os.getpid()}) before MindSpeed, "
                "and its modules hold what MindSpeed would have replaced. Call "
                "slime_npu.mindspeed.adapt(), or import slime.backends.megatron_utils, before "
                "anything that imports Megatron; `python -X importtime` shows what does"
            )
    # broadcast subscripts a device's capability (torch 2.13), and torch_npu tells none unless it is
    # told one. 8 has bfloat16 and no fp8.
    os.environ.setdefault("TORCH_NPU_DEVICE_CAPABILITY", "8.0")
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    importlib.import_module(_ADAPTOR)

    import torch

    if isinstance(torch.Tensor.type, types.MethodDescriptorType):  # nobody wrapped it
        TENSOR_TYPE.apply()
    capability = sys.modules.get(DEVICE_CAPABILITY.target.partition(":")[0])
    if capability and not inspect.signature(capability.get_device_capability).parameters:
        DEVICE_CAPABILITY.apply()


def repatch(args: Any) -> None:
    """Let MindSpeed choose its replacements again, by Megatron's arguments.

    `args` is a Namespace or a mapping of names to values; the names are Megatron's and
    MindSpeed's options. Comes after `adapt` and before Megatron's parallel groups are made, since
    those of context parallelism are MindSpeed's. The same arguments again change nothing.

    Raises MindSpeedError where `adapt` was not called or the groups are there, and TypeError
    where `args` has no names.
    """
    if isinstance(args, Mapping):
        named = dict(args)
    elif hasattr(args, "__dict__"):
        named = dict(vars(args))
    else:
        raise TypeError(f"repatch takes a Namespace or a dict of arguments, not {args!r}")
    if _ADAPTOR not in sys.modules:
        raise MindSpeedError(
            "MindSpeed has not adapted this process, so there is nothing to choose again: call "
            "slime_npu.mindspeed.adapt() before Megatron is imported"
        )
    state = sys.modules.get(_PARALLEL_STATE)
    if state is not None and state.model_parallel_is_initialized():
        raise MindSpeedError(
            "Megatron's parallel groups are already made, and MindSpeed's choice among them with "
            "these arguments would come too late; they are still as they were. Call "
            "slime_npu.mindspeed.repatch(args) before initialize_model_parallel, or "
            "destroy_model_parallel first"
        )
    sys.modules[_ADAPTOR].repatch(named)
