"""The NPU in slime's accelerator registry; each scenario has a process of its own.

slime with a registry is on no package index. The scenarios run with a package that has the
registry's face, and with the real one where FORKMAN_SLIME names its tree.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REAL = os.environ.get("FORKMAN_SLIME", "")

REGISTRY = """
registered = {}


def register_accelerator(name, factory, is_available=None, priority=0, communication_backends=()):
    registered[name] = (priority, factory, is_available, communication_backends)


def get_accelerator():
    from slime.utils.accelerator.torch_accelerator import CUDAAccelerator

    register_accelerator("cuda", CUDAAccelerator, CUDAAccelerator().is_available, 100, ("nccl",))
    register_accelerator("musa", None, lambda: False, 200, ("mccl",))
    usable = [entry[:2] for entry in registered.values() if entry[2]()]
    return max(usable, key=lambda entry: entry[0])[1]()


def is_accelerator_backend(backend):
    return any(name in backend for entry in registered.values() for name in entry[3])
"""

ADAPTER = """
import abc

import torch


class Accelerator(abc.ABC):
    @abc.abstractmethod
    def is_available(self): ...

    @abc.abstractmethod
    def device(self, index=None): ...

    @abc.abstractmethod
    def empty_cache(self): ...

    def communication_backend(self, default="nccl"):
        return self.communication_backend_name if default == "nccl" else default

    def weight_update_backend(self, default="nccl"):
        return self.communication_backend(default)

    visible_devices_env = "CUDA_VISIBLE_DEVICES"

    def supports(self, capability):
        return False


class TorchAccelerator(Accelerator):
    def accelerator_module(self):
        return self._module()

    def current_device(self):
        return self._module().current_device()

    def device_name(self, index=None):
        return f"{self.device_type}:{self.current_device() if index is None else index}"

    def device(self, index=None):
        return torch.device(self.device_name(index))

    def mem_get_info(self, device=None):
        return self._module().mem_get_info(device)

    def memory_allocated(self, device=None):
        return self._module().memory_allocated(device)

    def memory_reserved(self, device=None):
        return self._module().memory_reserved(device)

    def set_device(self, index):
        self._module().set_device(index)

    def device_count(self):
        return self._module().device_count()

    def synchronize(self, device=None):
        self._module().synchronize(device)

    def empty_cache(self):
        self._module().empty_cache()

    def current_stream(self, device=None):
        return self._module().current_stream(device)

    def autocast(self, *args, **kwargs):
        return torch.autocast(self.device_type, *args, **kwargs)


class CUDAAccelerator(TorchAccelerator):
    name = device_type = "cuda"
    communication_backend_name = "nccl"

    def _module(self):
        return torch.cuda

    def is_available(self):
        return torch.cuda.is_available()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A package with the face of slime's registry."""
    folder = tmp_path_factory.mktemp("made")
    package = folder / "slime" / "utils" / "accelerator"
    package.mkdir(parents=True)
    (folder / "slime" / "__init__.py").touch()
    (folder / "slime" / "utils" / "__init__.py").touch()
    (package / "__init__.py").write_text(REGISTRY)
    (package / "torch_accelerator.py").write_text(ADAPTER)
    return folder


def run(scenario: str, folder: Path, path: Path | str, **environment: str):
    """What a scenario returns, run in a process that finds slime in this path."""
    result = folder / f"{scenario}.json"
    path = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, scenario, result],
        env=os.environ | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.fixture(
    scope="module",
    params=[
        "made",
        pytest.param(
            "real",
            marks=pytest.mark.skipif(not REAL, reason="slime: FORKMAN_SLIME is not set"),
        ),
    ],
)
def answers(request, made, tmp_path_factory):
    """What slime's accelerator answers on a host with devices 4 to 7 of eight."""
    path = made if request.param == "made" else REAL
    folder = tmp_path_factory.mktemp(request.param)
    return run("ask", folder, path, ASCEND_RT_VISIBLE_DEVICES="4,5,6,7")


@pytest.mark.plumbing
def test_slime_takes_the_npu_though_torch_cuda_is_available(answers):
    assert answers["torch.cuda is available"]
    assert answers["name"] == answers["name once more"] == "npu"


@pytest.mark.plumbing
def test_a_device_is_the_npus(answers):
    assert answers["count"] == 4
    assert answers["device"] == ["npu:0", "npu:2"]
    assert answers["tensor"] == "npu:2"


@pytest.mark.plumbing
def test_backends_are_hccl_where_slime_says_nccl(answers):
    assert answers["backends"] == ["hccl", "hccl", "cpu:gloo,npu:hccl", "gloo"]


@pytest.mark.plumbing
def test_groups_of_hccl_are_an_accelerators(answers):
    assert answers["is an accelerator's"] == [True, False]


@pytest.mark.plumbing
def test_a_physical_id_is_an_index_among_the_visible_devices(answers):
    assert answers["variable"] == "ASCEND_RT_VISIBLE_DEVICES"
    assert answers["local"] == [0, 2, 3, 1]


@pytest.mark.plumbing
def test_an_id_that_is_not_visible_is_an_error_and_no_other_device(answers):
    assert "NPU 1 is not visible" in answers["not visible"]


@pytest.mark.plumbing
def test_memory_is_the_devices(answers):
    free, total = answers["memory"]
    assert 0 < free <= total
    assert answers["allocated"] >= 1 << 20
    assert answers["reserved after the cache was emptied"] < answers["reserved"]


@pytest.mark.plumbing
def test_streams_and_autocast_are_the_npus(answers):
    assert "npu" in answers["stream"].lower()
    assert answers["autocast"] == ["npu:2", "torch.bfloat16"]


@pytest.mark.plumbing
def test_running_out_of_memory_is_observed(answers):
    assert answers["observed"]


@pytest.mark.plumbing
def test_bfloat16_is_a_capability_and_cudas_kernels_are_not(answers):
    assert answers["supports"] == [True, False]


@pytest.mark.plumbing
def test_without_a_device_the_npu_is_still_what_slime_takes(made, tmp_path):
    answer = run("ask_for_names", tmp_path, made, ASCEND_RT_VISIBLE_DEVICES="")
    assert answer == {"name": "npu", "backend": "hccl"}


@pytest.mark.plumbing
def test_a_slime_without_a_registry_is_named(made, tmp_path):
    (tmp_path / "slime").mkdir()
    answer = run("ask_for_names", tmp_path, tmp_path)
    assert "has no accelerator registry" in answer["error"]


@pytest.mark.plumbing
def test_a_contract_that_asks_for_more_is_named(made, tmp_path):
    package = tmp_path / "slime" / "utils" / "accelerator"
    package.mkdir(parents=True)
    more = "    @abc.abstractmethod\n    def reset_peak(self): ...\n\n    @abc.abstractmethod\n"
    (package / "__init__.py").write_text(REGISTRY)
    (package / "torch_accelerator.py").write_text(
        ADAPTER.replace("    @abc.abstractmethod\n", more, 1)
    )
    answer = run("ask_for_names", tmp_path, tmp_path)
    assert "now have to answer reset_peak" in answer["error"]
    assert answer["registered"] == []


# -- in a process of its own -----------------------------------------------------------------------


def ask_for_names():
    from slime_npu import slime

    try:
        slime.register()
    except RuntimeError as error:
        registry = sys.modules.get("slime.utils.accelerator")
        return {"error": str(error), "registered": list(getattr(registry, "registered", {}))}
    from slime.utils.accelerator import get_accelerator

    accelerator = get_accelerator()
    return {"name": accelerator.name, "backend": accelerator.communication_backend()}


def ask():
    import torch
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    from slime_npu import slime

    slime.register()
    slime.register()
    from slime.utils.accelerator import get_accelerator, is_accelerator_backend

    npu = get_accelerator()
    found = {"torch.cuda is available": torch.cuda.is_available(), "name": npu.name}
    slime.register()
    found["name once more"] = get_accelerator().name
    found["count"] = npu.device_count()
    first = str(npu.device())
    npu.set_device(2)
    found["device"] = [first, str(npu.device())]
    found["tensor"] = str(torch.ones(1, device=npu.device()).device)
    found["backends"] = [
        npu.communication_backend(),
        npu.weight_update_backend(),
        npu.communication_backend("cpu:gloo,cuda:nccl"),
        npu.communication_backend("gloo"),
    ]
    found["is an accelerator's"] = [
        is_accelerator_backend("cpu:gloo,npu:hccl"),
        is_accelerator_backend("gloo"),
    ]
    found["variable"] = npu.visible_devices_env
    found["local"] = [npu.resolve_visible_device_id(i) for i in (4, "6", "7 ", 5.0)]
    try:
        npu.resolve_visible_device_id(1)
    except ValueError as error:
        found["not visible"] = str(error)

    held = torch.ones(1 << 18, device=npu.device())
    cached = torch.ones(1 << 25, device=npu.device())
    found["memory"] = npu.mem_get_info()
    found["allocated"] = npu.memory_allocated()
    del cached
    found["reserved"] = npu.memory_reserved()
    npu.synchronize()
    npu.empty_cache()
    found["reserved after the cache was emptied"] = npu.memory_reserved()
    found["stream"] = str(npu.current_stream())
    with npu.autocast(dtype=torch.bfloat16):
        product = held[:4].view(2, 2) @ held[:4].view(2, 2)
    found["autocast"] = [str(product.device), str(product.dtype)]
    found["supports"] = [npu.supports("bf16"), npu.supports("triton_kernels")]
    found["observed"] = False

    def observe(*event):
        found["observed"] = True

    assert npu.attach_oom_observer(observe)
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(1 << 45, dtype=torch.uint8, device=npu.device())
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(globals()[sys.argv[1]]()))
