"""Is this an NPU host: every way it may lack something, decided without importing torch."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_npu import device

ROOT = Path(__file__).parents[2]
OURS = ("device", "ray", "distributed", "environ", "patching")

pytestmark = pytest.mark.plumbing
without_npu = pytest.mark.skipif(
    any(Path("/dev").glob("davinci[0-9]*")), reason="this host has a real NPU"
)


@pytest.fixture
def undecided(monkeypatch):
    """A process that has not asked yet, and that nobody overrides."""
    monkeypatch.delenv("SLIME_NPU", raising=False)
    device._missing.cache_clear()
    yield
    device._missing.cache_clear()


def python(code: str, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, on a host without CANN unless it brings one."""
    bare = {n: v for n, v in os.environ.items() if not n.startswith(("SLIME_NPU", "ASCEND_"))}
    bare.pop("LD_LIBRARY_PATH", None)
    bare.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=bare | {"PYTHONPATH": str(ROOT)} | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


def answer(code: str, *flags: str, **environ: str):
    """What code prints as JSON on its last line."""
    done = python(code, *flags, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WHY = """
import json, logging
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("slime_npu").addHandler(Keep())
logging.getLogger("slime_npu").setLevel("INFO")
from pathlib import Path
from slime_npu import device
{before}
answers = [device.is_npu() for _ in range(3)]
print(json.dumps([answers, lines]))
"""


@pytest.mark.parametrize("module", OURS)
def test_imports_with_the_standard_library_alone(module):
    code = f"import sys, slime_npu.{module}; print({{'torch', 'ray'}} & set(sys.modules) or '')"
    done = python(code, "-S")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_false_and_one_log_line_where_torch_npu_is_not_installed():
    answers, lines = answer(WHY.format(before=""), "-S")
    assert answers == [False] * 3
    assert lines == ["this host has no NPU: torch_npu is not installed"]


@without_npu
def test_false_and_one_log_line_where_cann_is_missing():
    answers, lines = answer(WHY.format(before=""))
    assert answers == [False] * 3
    [line] = lines
    assert "CANN does not load (libascendcl.so: cannot open" in line
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in line


@pytest.fixture(scope="module")
def empty_cann(tmp_path_factory):
    """A folder with a libascendcl.so that loads: all that is asked of CANN here."""
    folder = tmp_path_factory.mktemp("cann")
    library = folder / "libascendcl.so"
    subprocess.run(["cc", "-shared", "-xc", os.devnull, "-o", library], check=True)
    return str(folder)


@without_npu
def test_false_and_one_log_line_where_a_device_is_missing(empty_cann):
    answers, lines = answer(WHY.format(before=""), LD_LIBRARY_PATH=empty_cann)
    assert answers == [False] * 3
    assert lines == [
        "this host has no NPU: torch_npu and CANN are installed but /dev has no davinci device"
    ]


@pytest.mark.parametrize("name", ["davinci0", "davinci12", "vdavinci100"])
def test_true_where_nothing_is_missing(empty_cann, tmp_path, name):
    (tmp_path / name).touch()
    before = f"device._devices = Path({str(tmp_path)!r})"
    answers, lines = answer(WHY.format(before=before), LD_LIBRARY_PATH=empty_cann)
    assert answers == [True] * 3
    assert lines == ["this host has NPUs"]


@without_npu
def test_the_drivers_manager_alone_is_no_device(empty_cann, tmp_path):
    (tmp_path / "davinci_manager").touch()
    before = f"device._devices = Path({str(tmp_path)!r})"
    assert answer(WHY.format(before=before), LD_LIBRARY_PATH=empty_cann)[0] == [False] * 3


@without_npu
def test_false_though_import_torch_fails_without_cann():
    code = """
import json
from slime_npu.device import is_npu
before = is_npu()
try:
    import torch
    failed = ""
except RuntimeError as error:
    failed = str(error)
print(json.dumps([before, is_npu(), failed]))
"""
    before, after, failed = answer(code)
    assert (before, after) == (False, False)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in failed


@without_npu
def test_false_though_torch_npu_does_not_import_without_cann():
    code = """
import json
import torch
try:
    import torch_npu
    failed = ""
except ImportError as error:
    failed = str(error)
from slime_npu.device import is_npu
print(json.dumps([is_npu(), failed]))
"""
    is_npu, failed = answer(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert not is_npu
    assert "libhccl.so" in failed


@without_npu
def test_not_fooled_by_torch_cuda_being_available():
    code = """
import json, torch
torch.cuda.is_available = lambda: True
from slime_npu.device import is_npu
print(json.dumps([torch.cuda.is_available(), is_npu()]))
"""
    assert answer(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == [True, False]


SIMULATED = """
import json
import slime_npu.simulator
slime_npu.simulator.load(8)
import torch
from slime_npu import device
"""


@without_npu
def test_an_override_holds_under_transfer_to_npu():
    code = f"""{SIMULATED}
import os
from torch_npu.contrib import transfer_to_npu
answers = [torch.cuda.is_available(), device.is_npu()]
device._missing.cache_clear()
os.environ["SLIME_NPU"] = "0"
print(json.dumps([*answers, torch.cuda.is_available(), device.is_npu()]))
"""
    assert answer(code) == [True, True, True, False]


@without_npu
def test_a_process_that_was_given_no_device_is_still_on_an_npu_host():
    code = f"{SIMULATED}\nprint(json.dumps([torch.npu.device_count(), device.is_npu()]))"
    assert answer(code, ASCEND_RT_VISIBLE_DEVICES="") == [0, True]


@without_npu
def test_strict_says_what_is_missing(undecided, monkeypatch):
    monkeypatch.setenv("SLIME_NPU", "0")
    assert not device.is_npu()
    with pytest.raises(device.NoNPU, match="no NPU can be used here: SLIME_NPU=0 says so"):
        device.is_npu(strict=True)


def test_strict_is_quiet_where_there_is_one(undecided, monkeypatch):
    monkeypatch.setenv("SLIME_NPU", "1")
    assert device.is_npu(strict=True)


def test_decided_once(undecided, monkeypatch):
    monkeypatch.setenv("SLIME_NPU", "1")
    assert device.is_npu()
    monkeypatch.setenv("SLIME_NPU", "0")
    assert device.is_npu()


def test_decided_with_one_log_line(undecided, monkeypatch, caplog):
    monkeypatch.setenv("SLIME_NPU", "0")
    with caplog.at_level(logging.INFO, "slime_npu"):
        for _ in range(3):
            device.is_npu()
    assert [r.getMessage() for r in caplog.records] == ["this host has no NPU: SLIME_NPU=0 says so"]


@pytest.mark.parametrize("value", ["yes", "2", "true", " 1"])
def test_an_override_that_says_neither_is_an_error(undecided, monkeypatch, value):
    monkeypatch.setenv("SLIME_NPU", value)
    with pytest.raises(ValueError, match="1 is an NPU host, 0 is none"):
        device.is_npu()


def test_nothing_is_asked_of_the_host_where_an_override_decides(undecided, monkeypatch):
    monkeypatch.setenv("SLIME_NPU", "1")
    monkeypatch.setattr(device, "_find_missing", lambda: pytest.fail("the host was asked"))
    assert device.is_npu()


def test_visible_is_none_where_all_are():
    assert device.visible({}) is None


@pytest.mark.parametrize("value", ["", "NoDevFiles"])
def test_visible_is_empty_where_none_is_given(value):
    assert device.visible({device.VISIBLE: value}) == []


@given(st.sets(st.integers(0, 63), min_size=1))
def test_visible_reads_what_ray_writes(ids):
    ascending = [str(i) for i in sorted(ids)]
    assert device.visible({device.VISIBLE: ",".join(ascending)}) == ascending


@pytest.mark.parametrize("value", ["5,4", "4,4", "0,2,1"])
def test_visible_refuses_ids_that_do_not_ascend(value):
    with pytest.raises(ValueError, match="must ascend"):
        device.visible({device.VISIBLE: value})


@pytest.mark.parametrize("value", ["1, 2", "4;5", "1,", ",", "a", "-1", "0-3", "²"])
def test_visible_refuses_what_cann_would_cut(value):
    with pytest.raises(ValueError, match="not numbers with commas between"):
        device.visible({device.VISIBLE: value})


@without_npu
def test_devices_answer_for_themselves():
    code = f"""{SIMULATED}
import gc
index = device.current().index
device.set_device(2)
properties = device.properties()
try:
    device.set_device(4)
    refused = ""
except ValueError as error:
    refused = str(error)
cycle = [torch.empty(1 << 20, dtype=torch.uint8, device="npu")]
cycle.append(cycle)
device.synchronize()
full = device.memory()
gc.disable()
del cycle
device.empty_cache()
empty = device.memory()
print(json.dumps([index, str(device.current()), refused, *map(vars, (properties, full, empty))]))
"""
    index, current, refused, properties, full, empty = answer(
        code, ASCEND_RT_VISIBLE_DEVICES="4,5,6,7"
    )
    assert (index, current) == (0, "npu:2")
    assert properties["index"] == 2
    assert properties["physical_id"] == "6"
    assert properties["memory"] == full["total"] == 64 << 30
    assert properties["name"].startswith("Ascend")
    assert "no local device 4: this process sees 4 (ASCEND_RT_VISIBLE_DEVICES=4,5,6,7)" in refused
    assert 1 << 20 <= full["allocated"] <= full["reserved"] <= full["used"]
    assert full["used"] + full["free"] == full["total"]
    assert empty["allocated"] == empty["reserved"] == 0


@without_npu
def test_devices_are_an_error_on_a_host_without():
    code = """
from slime_npu import device
device.current()
"""
    done = python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode != 0
    assert "slime_npu.device.NoNPU: no NPU can be used here: torch_npu is installed" in done.stderr


@pytest.mark.hardware
@pytest.mark.skipif(
    not any(Path("/dev").glob("davinci[0-9]*")), reason="needs a real NPU: /dev/davinci*"
)
def test_a_real_npu_is_found(undecided):
    assert device.is_npu(strict=True)
    assert device.memory().total > 0
