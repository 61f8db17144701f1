"""Stand-ins for what this stack imports and no package index has, so that it imports at all.

torchair's native half and NNAL's libatb come with CANN, sgl_kernel_npu and torchvision's operators
with builds for NPU. Each imports; using one of them says what it is, and fails.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.metadata
import subprocess
import sys
import types
from pathlib import Path

from slime_npu import simulator

_libraries: list = []  # torch forgets what a library has registered when it is collected


class Absent(types.ModuleType):
    """A module or package of which every name can be imported and nothing used."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def use(*args, **kwargs):
            raise NotImplementedError(f"{self.__name__}.{name} is not here, only its name is")

        return _Names(name, (), {"__new__": use})


class _Names(type):
    """A class, or an enumeration, of which every name is known."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Kernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "sgl_kernel_npu":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass


def torchair() -> None:
    """torchair imports: torch_npu's wheel has its Python half, CANN what its native half needs."""
    native = Absent("torchair.core._torchair")
    native.FinalizeGraphEngine = lambda: None  # what it does as the process ends
    sys.modules[native.__name__] = native


def sgl_kernels() -> None:
    """sgl_kernel_npu imports."""
    sys.meta_path.insert(0, _Kernels())


def torchvision() -> None:
    """torchvision imports beside a torch that its native half was not built for."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def atb(folder: Path) -> None:
    """torch_npu's ATB operators have their own schemas, and the one SGLang calls a kernel.

    Before torch_npu is imported; `folder` is for the library that stands for NNAL's.
    """
    wheel = importlib.metadata.distribution("torch_npu").locate_file("torch_npu/lib")
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", Path(wheel) / "libop_plugin_atb.so"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.split()[-1] for line in listed.stdout.splitlines() if " U _ZN3atb" in line]
    source = "\n".join(f"int {name}(void) {{ __builtin_trap(); }}" for name in names)
    library = folder / "libatb.so"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libatb.so", "-o", library, "-xc", "-"]
    subprocess.run(command, input=source, text=True, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    import torch
    import torch_npu  # noqa: F401

    kernels = torch.library.Library("atb", "IMPL")
    kernels.impl("_npu_flash_attention_unpad", _flash_attention_unpad, "PrivateUse1")
    _libraries.append(kernels)


def _flash_attention_unpad(query, key, value, seq_len, scale_value, num_heads, num_kv_heads, out):
    """Attention within each sequence, the tokens of all in a row: (tokens, heads, head size)."""
    import torch

    assert seq_len.device.type == "cpu" and seq_len.dtype == torch.int32  # it takes no other
    assert int(seq_len.sum()) == query.shape[0] == key.shape[0] == value.shape[0]
    simulator.count("_npu_flash_attention_unpad")
    groups = num_heads // num_kv_heads
    start = 0
    for length in seq_len.tolist():
        q, k, v = (x[start : start + length].transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        weights = torch.softmax(q.float() @ k.float().transpose(1, 2) * scale_value, -1)
        out[start : start + length] = (weights @ v.float()).transpose(0, 1).to(out.dtype)
        start += length
