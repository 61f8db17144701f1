"""Is this an NPU host, and what do its devices have.

Whether the host has NPUs is decided once per process, without importing torch (which raises where
torch_npu is installed and CANN is not), from three things:

1. torch_npu is installed;
2. the dynamic loader finds CANN (`libascendcl.so`);
3. the driver shows a device, `/dev/davinci<n>`, or `/dev/vdavinci<n>` for a part of one; or the
   CANN found is the simulator's.

Nothing here asks `torch.cuda` or counts the visible devices: `transfer_to_npu` makes
`torch.cuda.is_available()` answer for NPUs, and a driver or actor that was given no device
(`ASCEND_RT_VISIBLE_DEVICES=""`) still has to name NPUs when it asks Ray for some.

`SLIME_NPU=1` or `0` in the environment decides instead, for hosts that cannot know: a head node
without devices that submits to an NPU cluster says 1.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"

_log = logging.getLogger(__name__)
_devices = Path("/dev")


class NoNPU(RuntimeError):
    """This host has no NPU that can be used; the message says what is missing."""


def is_npu(strict: bool = False) -> bool:
    """Whether this host computes on NPUs; the same answer for the life of the process.

    Raises `NoNPU`, which says what is missing, where `strict` and there is none; ValueError
    where SLIME_NPU is neither 0 nor 1.
    """
    missing = _missing()
    if strict and missing:
        raise NoNPU(f"no NPU can be used here: {missing}")
    return not missing


@functools.cache
def _missing() -> str:
    """What this host lacks to be an NPU host; empty where it lacks nothing."""
    wish = os.environ.get("SLIME_NPU", "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"SLIME_NPU={wish!r}: 1 is an NPU host, 0 is none, unset finds out")
    missing = {"0": "SLIME_NPU=0 says so", "1": ""}[wish] if wish else _find_missing()
    _log.info("this host has no NPU: %s", missing) if missing else _log.info("this host has NPUs")
    return missing


def _find_missing() -> str:
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        cann = ctypes.CDLL("libascendcl.so")  # by name, as torch_npu's own libraries ask for it
    except OSError as error:
        return (
            f"torch_npu is installed but CANN does not load ({error}); source CANN's set_env.sh, "
            f"or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to import torch without it"
        )
    if hasattr(cann, "simulated_error"):
        return ""
    if not any(_devices.glob("davinci[0-9]*")) and not any(_devices.glob("vdavinci[0-9]*")):
        return f"torch_npu and CANN are installed but {_devices} has no davinci device"
    return ""


def visible(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """The physical ids this process may use, in the order of their local indices.

    None where ASCEND_RT_VISIBLE_DEVICES is unset: all of the host's; [] where it gives none.
    Raises ValueError where the list is not ascending ids with commas between: CANN cuts such a
    list short, or sees no device at all.
    """
    value = environ.get(VISIBLE)
    if value is None:
        return None
    if value in ("", "NoDevFiles"):  # the second is what container tools write for none
        return []
    ids = value.split(",")
    if not all(i.isascii() and i.isdecimal() for i in ids):
        raise ValueError(f"{VISIBLE}={value!r}: not numbers with commas between, as in 4,5,6,7")
    numbers = [int(i) for i in ids]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"{VISIBLE}={value!r}: the ids must ascend, or CANN cuts the list short")
    return [str(i) for i in numbers]


@dataclass(frozen=True)
class Memory:
    """A device's memory in bytes; `used` counts every process, the other two this one."""

    total: int
    free: int
    used: int
    allocated: int
    reserved: int


@dataclass(frozen=True)
class Properties:
    """What a device is: its index here, its id on the host, its name and its memory in bytes."""

    index: int
    physical_id: str
    name: str
    memory: int


def _npu() -> Any:
    is_npu(strict=True)
    import torch_npu

    return torch_npu.npu


def current() -> torch.device:
    """The device this thread computes on."""
    import torch

    return torch.device("npu", _npu().current_device())


def set_device(index: int) -> None:
    """Make the visible device `index` current.

    Raises ValueError, naming the visible devices, where there is no such index.
    """
    npu = _npu()
    count = npu.device_count()
    if not 0 <= index < count:
        raise ValueError(
            f"no local device {index}: this process sees {count} "
            f"({VISIBLE}={os.environ.get(VISIBLE, 'unset')}); a physical id becomes a local "
            f"index with slime_npu.ray.local_index"
        )
    npu.set_device(index)


def synchronize(index: int | None = None) -> None:
    """Wait for everything queued on the device, the current one by default."""
    _npu().synchronize(index)


def empty_cache() -> None:
    """Give cached memory that nothing uses any more back to the device.

    Unreachable tensors in reference cycles are collected first, and what is queued may still use
    memory, so the device finishes it.
    """
    npu = _npu()
    gc.collect()
    npu.synchronize()
    npu.empty_cache()


def memory(index: int | None = None) -> Memory:
    """The memory of a device, the current one by default."""
    npu = _npu()
    free, total = npu.mem_get_info(index)
    return Memory(
        total=total,
        free=free,
        used=total - free,
        allocated=npu.memory_allocated(index),
        reserved=npu.memory_reserved(index),
    )


def properties(index: int | None = None) -> Properties:
    """What a device is, the current one by default."""
    npu = _npu()
    index = npu.current_device() if index is None else index
    ids = visible()
    return Properties(
        index=index,
        physical_id=str(index) if ids is None else ids[index],
        name=npu.get_device_name(index),
        memory=npu.get_device_properties(index).total_memory,
    )
