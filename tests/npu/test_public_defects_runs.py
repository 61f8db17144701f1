"""Defects of the public NPU patches that only Ray, torch or a job shows; none of them is ours."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray")

from slime_npu import device  # noqa: E402
from slime_npu.ray import bundle, options  # noqa: E402

ROOT = Path(__file__).parents[2]


class Actor:
    """What slime makes of Ray's actors."""


@pytest.fixture
def gpu_host(monkeypatch: pytest.MonkeyPatch):
    """This process on a host without NPUs."""
    monkeypatch.setenv("SLIME_NPU", "0")
    device._missing.cache_clear()
    yield
    device._missing.cache_clear()


# -- GPUs asked for as a custom resource -----------------------------------------------------------


@pytest.mark.plumbing
@pytest.mark.parametrize("n", [0, 0.2, 1])
def test_ray_takes_our_share_of_a_gpu_and_no_resource_called_gpu(gpu_host, n: float) -> None:
    actor = ray.remote(num_gpus=1)(Actor)
    with pytest.raises(ValueError, match="GPU"):
        actor.options(num_cpus=1, num_gpus=0, resources={"GPU": n})
    # as forks/slime/ray_resources.py has it
    assert options(n) == {"num_gpus": n}
    actor.options(num_cpus=1, **options(n))
    assert bundle(1) == {"GPU": 1, "CPU": 1}


# -- torch_npu installed, and no device ------------------------------------------------------------

PUBLIC = """
import torch, types
torch.npu = types.SimpleNamespace(is_available=lambda: False)  # as torch_npu is without a device
def is_npu():
    if not hasattr(torch, "npu"):
        return False
    if not torch.npu.is_available():
        raise RuntimeError
    return True
is_npu()
"""
OURS = "from slime_npu.device import is_npu; print(is_npu())"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process on a host that has torch_npu and no NPU, neither real nor simulated."""
    bare = {n: v for n, v in os.environ.items() if not n.startswith(("SLIME_NPU", "LD_", "ASCEND"))}
    bare |= {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=bare, capture_output=True, text=True, timeout=120
    )


@pytest.mark.plumbing
@pytest.mark.skipif(
    any(Path("/dev").glob("davinci[0-9]*")), reason="needs a host without an NPU; this one has one"
)
def test_a_host_with_torch_npu_and_no_device_is_no_npu_host_and_no_error() -> None:
    assert "RuntimeError" in python(PUBLIC).stderr
    done = python(OURS)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


# -- a run that failed, and said it had not --------------------------------------------------------

# A job's worker names a backend that its torch does not have.
WRONG = (
    "import torch; torch.distributed.init_process_group("
    "'no_such_backend', store=torch.distributed.HashStore(), rank=0, world_size=1)"
)
LAUNCH = """
import json, sys
from slime_npu.launcher import Cluster, Job, launch
job, cluster = json.loads(sys.argv[1])
sys.exit(launch(Job(**job), Cluster(**cluster)))
"""


def ports() -> dict[str, int]:
    """Free ports of a head: each with the next one."""
    found: list[int] = []
    while len(found) < 2:
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("", 0))
            port = one.getsockname()[1]
            two.bind(("", port + 1))
            found.append(port)
    return {"port": found[0], "dashboard_port": found[1]}


@pytest.mark.plumbing
def test_a_run_with_the_wrong_backend_does_not_end_as_if_it_had_worked(tmp_path: Path) -> None:
    job = [sys.executable, "-c", WRONG]
    log = tmp_path / "log"
    # a script whose last command shows or keeps the log, as the public one, ends with that one's 0
    shell = subprocess.run(
        ["bash", "-c", f'"$@" 2>&1 | tee {log} >&2', "run", *job],
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert shell.returncode == 0 and "no_such_backend" in log.read_text()

    what = [
        {"command": job, "environ": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "devices": 1},
        {"devices": 1, "cpus": 2} | ports(),
    ]
    path = (str(ROOT), os.environ.get("PYTHONPATH"))
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, json.dumps(what)],
        env=os.environ | {"SLIME_NPU": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "no_such_backend" in done.stdout
