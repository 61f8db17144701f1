"""The NPU in slime's accelerator registry.

slime (after v0.3.1) asks a registry for devices, streams, memory, visible devices and backends,
and takes the available one with the highest priority. `register` adds the NPU with slime's own
`register_accelerator`; nothing of slime's is replaced. Reference: slime 624b824a8,
slime/utils/accelerator (base.py is the contract, torch_accelerator.py what cuda and musa share).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from slime_npu import distributed
from slime_npu.device import VISIBLE, is_npu
from slime_npu.ray import local_index

__all__ = ["PRIORITY", "is_npu", "register"]

# cuda has 100, and torch.cuda says it is available once transfer_to_npu stands in for it; the
# highest of slime's own is musa's 200.
PRIORITY = 1000


def register() -> None:
    """Register "npu" with slime, above every accelerator of slime's own; again changes nothing.

    It counts from slime's first question in this process on. `SLIME_ACCELERATOR`, where it is set,
    still decides.

    Raises RuntimeError where slime has no registry, or one with another contract.
    """
    try:
        from slime.utils.accelerator import register_accelerator
    except ImportError as error:
        raise RuntimeError(
            f"this slime has no accelerator registry ({error}), and nothing was registered: slime "
            "has one from after v0.3.1 on, and before it the fork's other changes name the NPU"
        ) from error
    register_accelerator(
        "npu",
        _backend_class(),
        is_available=is_npu,
        priority=PRIORITY,
        communication_backends=("hccl",),
    )


@functools.cache
def _backend_class() -> Callable[[], Any]:
    """Our backend, a class of slime's and so made where slime is imported."""
    try:
        from slime.utils.accelerator.torch_accelerator import TorchAccelerator
    except ImportError as error:
        raise RuntimeError(
            f"slime's adapter for torch's device modules is gone ({error}); nothing was "
            "registered, and slime_npu.slime has to follow"
        ) from error

    class NPUAccelerator(TorchAccelerator):
        """torch.npu in slime's terms; what is not here, slime's adapter does."""

        name = "npu"
        device_type = "npu"
        communication_backend_name = "hccl"
        visible_devices_env = VISIBLE

        def _module(self) -> Any:
            import torch_npu

            return torch_npu.npu

        def is_available(self) -> bool:
            # Of the host: an actor without a device still names NPUs and hccl.
            return is_npu()

        def communication_backend(self, default: str = "nccl") -> str:
            return distributed.backend(default)

        def resolve_visible_device_id(self, physical_device_id: int | float | str) -> int:
            # slime's own takes an id that is not visible for an index, which is another device.
            if isinstance(physical_device_id, float) and physical_device_id.is_integer():
                physical_device_id = int(physical_device_id)
            return local_index(str(physical_device_id).strip())

        def attach_oom_observer(self, callback: Callable[[int, int, int, int], None]) -> bool:
            import torch_npu

            torch_npu._C._npu_attach_out_of_memory_observer(callback)
            return True

        def supports(self, capability: str) -> bool:
            if capability == "bf16":
                return bool(self._module().is_bf16_supported())
            return bool(super().supports(capability))

    missing = sorted(NPUAccelerator.__abstractmethods__)
    if missing:
        raise RuntimeError(
            f"slime's accelerators now have to answer {', '.join(missing)}, which neither its "
            "adapter nor slime_npu does; nothing was registered, and slime_npu.slime has to follow"
        )
    return NPUAccelerator
