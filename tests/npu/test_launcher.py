"""slime_npu.launcher on real Ray: a job's exit code is the launcher's, and it ends only its own."""

import asyncio
import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from slime_npu import launcher
from slime_npu.launcher import LOST, REFUSED, Cluster, Job

pytestmark = pytest.mark.plumbing

PROJECT = Path(__file__).resolve().parents[2]
LAUNCH = """
import json, sys
from slime_npu.launcher import Cluster, Job, LaunchError, launch
job, cluster = json.loads(sys.argv[1])
try:
    sys.exit(launch(Job(**job), Cluster(**cluster)))
except LaunchError as error:
    print(error, file=sys.stderr)
    sys.exit(error.code)
"""
SLEEPS = "import time; print('it sleeps', flush=True); time.sleep(300)"


@pytest.fixture(autouse=True)
def orphans_come_here():
    """What a launcher leaves behind becomes a child of this process, and so cannot hide."""
    subreaper = 36  # PR_SET_CHILD_SUBREAPER
    libc = ctypes.CDLL(None)
    libc.prctl(subreaper, 1, 0, 0, 0)
    yield
    libc.prctl(subreaper, 0, 0, 0, 0)


@pytest.fixture
def environ():
    """What launchers here are started with: 16 NPUs, and a Ray that asks for no token."""
    folder = tempfile.mkdtemp(dir="/tmp")  # short, as the paths of sockets are
    yield os.environ | {
        "TMPDIR": folder,
        "SLIME_NPU_SIMULATOR_DEVICES": "16",
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": f"{PROJECT}:{os.environ.get('PYTHONPATH', '')}",
    }
    shutil.rmtree(folder, ignore_errors=True)


def ports():
    """A head's four free ports: two pairs, each of one port and the next."""
    found = []
    while len(found) < 2:
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("", 0))
            port = one.getsockname()[1]
            two.bind(("", port + 1))
            found.append(port)
    return {"port": found[0], "dashboard_port": found[1]}


@pytest.fixture(scope="module")
def foreign():
    """Somebody else's Ray of 16 NPUs, and a process that is only called so."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = Cluster(devices=16, cpus=16, **ports())
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    with (folder / "log").open("w") as log:
        ray = subprocess.Popen(
            cluster.head(str(folder)), stdout=log, stderr=log, start_new_session=True
        )
    named = subprocess.Popen(["bash", "-c", "exec -a raylet sleep 600"])
    deadline = time.monotonic() + 90
    while True:
        with contextlib.suppress(launcher._Unreachable):
            if launcher._nodes(cluster):
                break
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.5)
    yield Cluster(**{**vars(cluster), "there": True})
    assert ray.poll() is None, "somebody else's Ray was ended"
    assert named.poll() is None, "a process was ended for its name"
    named.kill()
    named.wait()
    ray.terminate()
    ray.wait(60)
    shutil.rmtree(folder, ignore_errors=True)
    patch.undo()


@contextlib.contextmanager
def launched(code, cluster, environ, devices=16):
    """A launcher that runs `code` in Python as its job."""
    job = {
        "command": [sys.executable, "-c", code],
        "environ": {"GREETING": "a 'b' $c"},
        "devices": devices,
    }
    before = children()
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, json.dumps([job, vars(cluster)])],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)
    deadline = time.monotonic() + 60  # a keeper outlives a launcher that was killed
    while (left := children() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left, "\n".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in left)


def children():
    """The children of this process that run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(stat.parent.name))
    return found


def until(process, text):
    """Read the launcher's output until `text` has come."""
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, seen + process.stderr.read()
        seen += line
    return seen


def driver(text):
    """The process of a job: Python that runs `text` itself."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if words[1:2] == [b"-c"] and words[2].decode() == text:
                return int(entry.parent.name)
    raise AssertionError("the job does not run")


def alone(**changes):
    return Cluster(devices=16, cpus=16, **ports(), **changes)


def test_a_job_s_exit_code_log_and_environment_on_a_ray_of_our_own(environ, foreign):
    code = "import os, sys; print('hello', os.environ['GREETING']); sys.exit(7)"
    with launched(code, alone(), environ) as process:
        out, error = process.communicate(timeout=120)
    assert process.returncode == 7, error
    assert "hello a 'b' $c" in out


def test_ctrl_c_ends_the_job_and_our_ray(environ, foreign):
    with launched(SLEEPS, alone(), environ) as process:
        until(process, "it sleeps")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_a_killed_launcher_leaves_nothing(environ, foreign):
    with launched(SLEEPS, alone(), environ) as process:
        until(process, "it sleeps")
        process.kill()
        process.communicate(timeout=60)


def test_a_ray_that_dies_under_the_job_is_said(environ, foreign):
    with launched(SLEEPS, alone(), environ) as process:
        until(process, "it sleeps")
        for entry in Path("/proc").glob("[0-9]*/stat"):
            name = entry.read_text().partition("(")[2].rpartition(")")[0]
            if name == "gcs_server" and below(int(entry.parent.name), process.pid):
                os.kill(int(entry.parent.name), signal.SIGKILL)
        _, error = process.communicate(timeout=120)
    assert process.returncode == LOST
    assert "Ray went away under the job" in error


def test_a_keeper_that_is_asked_to_end_while_it_ends_the_rest_still_ends_it():
    left = "sleep 300 & echo $!; exit 0"  # Ray went away by itself, and left a process
    command = [sys.executable, "-P", launcher.__file__, str(os.getpid()), "sh", "-c", left]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        pid = int(keeper.stdout.readline())
        time.sleep(1)
        keeper.terminate()
        keeper.wait(timeout=60)
    assert not Path(f"/proc/{pid}").exists()


def test_a_keeper_whose_launcher_was_killed_before_it_could_know_starts_nothing(tmp_path):
    command = [sys.executable, "-P", launcher.__file__, "1", "touch", str(tmp_path / "started")]
    assert subprocess.run(command, timeout=60).returncode == LOST
    assert not (tmp_path / "started").exists()


def test_a_signal_that_comes_while_the_log_is_read_is_not_lost():
    async def tail():
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt) as error, launcher._signals():
        asyncio.run(tail())
    assert error.value.number == signal.SIGTERM


def below(pid, ancestor):
    while pid > 1:
        if pid == ancestor:
            return True
        with contextlib.suppress(OSError):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            continue
        return False
    return False


def test_a_job_on_a_ray_that_was_there(environ, foreign):
    with launched("print('joined')", foreign, environ) as process:
        out, error = process.communicate(timeout=60)
    assert (process.returncode, "joined" in out) == (0, True), error


def test_a_job_that_is_killed_ends_as_its_signal_says(environ, foreign):
    code = f"{SLEEPS}  # killed"
    with launched(code, foreign, environ) as process:
        until(process, "it sleeps")
        os.kill(driver(code), signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL


def test_ctrl_c_on_a_ray_that_was_there_stops_the_job_and_nothing_else(environ, foreign):
    code = f"{SLEEPS}  # stopped"
    with launched(code, foreign, environ) as process:
        until(process, "it sleeps")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    with pytest.raises(AssertionError, match="does not run"):
        driver(code)
    assert launcher._nodes(foreign)


def test_too_few_npus_in_a_ray_that_was_there_are_refused(environ, foreign):
    with launched("print(1)", foreign, environ, devices=17) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == REFUSED
    assert "needs 17 NPUs of Ray, and there are 16" in error


def test_no_ray_where_one_was_to_be_is_refused(environ):
    cluster = Cluster(there=True, **ports())
    with launched("print(1)", cluster, environ) as process:
        _, error = process.communicate(timeout=60)
    assert process.returncode == REFUSED
    assert f"no Ray at {cluster.dashboard}" in error


def refused(**changes):
    job = Job(command=["true"], environ={}, devices=changes.pop("needs", 8))
    return launcher.refusals(job, Cluster(**{**ports(), "devices": 8, "cpus": 32, **changes}))


@pytest.fixture
def eight(monkeypatch):
    monkeypatch.setattr(launcher, "device_refusals", lambda devices, environ: [])


def test_nothing_refuses_what_can_run(eight):
    assert refused() == []


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_a_port_that_is_taken_is_refused(eight, which):
    free = Cluster(**ports())
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", free.ports[which]))
        somebody.listen()
        (reason,) = refused(port=free.port, dashboard_port=free.dashboard_port)
    assert f"port {free.ports[which]} cannot be used" in reason


def test_more_npus_than_the_nodes_have_are_refused(eight):
    (reason,) = refused(needs=17, nodes=2, host="192.0.2.1")
    assert "17 NPUs, and 2 nodes of 8 are 16" in reason


def test_fewer_processors_than_npus_are_refused(eight):
    (reason,) = refused(cpus=7)
    assert "8 NPUs comes with a processor, and there are 7" in reason


def test_several_nodes_need_an_address_they_can_reach(eight):
    (reason,) = refused(nodes=2)
    assert "cannot meet at 127.0.0.1" in reason


def test_no_ray_package_is_refused(monkeypatch):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    (reason,) = refused()
    assert "pip install 'ray[default]'" in reason


def count_devices(environ, devices):
    code = f"from slime_npu import launcher; print(launcher.device_refusals({devices}, {{}}))"
    return subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)


def test_the_devices_of_this_node_are_counted_by_its_driver(environ):
    assert count_devices(environ, 16).strip().endswith("[]")


def test_fewer_devices_than_asked_for_are_refused(environ):
    assert "17 NPUs were asked for, and this node has 16" in count_devices(environ, 17)


def test_devices_that_are_not_visible_do_not_count(environ):
    said = count_devices(environ | {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}, 16)
    assert "this node has 3 (ASCEND_RT_VISIBLE_DEVICES='0,1,2')" in said


def test_a_host_without_npus_is_refused(environ):
    said = count_devices(environ | {"SLIME_NPU": "0"}, 16)
    assert "no NPU can be used here" in said


def test_the_script_of_a_dry_run_is_what_is_run(tmp_path):
    job = Job(["python", "train.py", "--a", "1 2", "--b"], {"X": "it's"}, 32)
    text = launcher.script(job, Cluster(host="192.0.2.1", nodes=2, devices=16))
    words = shlex.split(text.replace(" &\n", "\n").replace("\\\n", ""), comments=True)
    assert words[:2] == ["export", "X=it's"]
    head = Cluster(host="192.0.2.1", nodes=2, devices=16).head(launcher._FOLDER)
    assert words[2 : 2 + len(head)] == head
    assert words[-6:] == ["--", "python", "train.py", "--a", "1 2", "--b"]
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
