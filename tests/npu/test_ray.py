"""Real Ray: clusters of 8 and 16 simulated NPUs, of four of them, and of GPUs, by the same code."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of this test's own, on loopback
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray")

from slime_npu import device, environ, simulator  # noqa: E402
from slime_npu.ray import bundle, device_ids, is_npu, local_index, options, preflight  # noqa: E402

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
WAIT = 60  # seconds for anything that a cluster is asked

pytestmark = pytest.mark.plumbing


@contextlib.contextmanager
def host(decided: str):
    """This process on an NPU host ("1"), or on none ("0")."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIME_NPU", decided)
        device._missing.cache_clear()
        yield
    device._missing.cache_clear()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def cluster(decided: str, *arguments: str, dashboard: int = 0, **variables: str):
    """A cluster of one node, as `ray start` makes it, with this process as its driver."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # socket paths are short
    port = free_port()
    # What the test's own process has for itself; PYTHONPATH is how a worker finds this file.
    bare = {n: v for n, v in os.environ.items() if not n.startswith(("SLIME_NPU", "ASCEND_"))}
    paths = [variables.pop("PYTHONPATH", ""), str(ROOT), str(Path(__file__).parent)]
    start = subprocess.Popen(
        [
            *(BIN / "ray", "start", "--head", "--block", "--disable-usage-stats"),
            *("--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}"),
            *("--object-store-memory=80000000", f"--include-dashboard={bool(dashboard)}"),
            *((f"--dashboard-port={dashboard}",) if dashboard else ()),
            *arguments,
        ],
        env=bare
        | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        | {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
        | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        for line in start.stdout:
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail(f"ray start ended with {start.wait()}")
        with host(decided):
            ray.init(f"127.0.0.1:{port}", log_to_driver=False, logging_level="ERROR")
            try:
                yield
            finally:
                ray.shutdown()
    finally:
        start.send_signal(signal.SIGTERM)
        try:
            start.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(start.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@ray.remote(num_gpus=1)
class Actor:
    """Declared as upstream declares its actors; the options say what it gets."""

    def answer(self):
        ids = device_ids()
        return {
            "ids": ids,
            "visible": os.environ.get(device.VISIBLE),
            "index": local_index(ids[0]) if ids else None,
            "is_npu": is_npu(),
        }

    def ids_as_ray_gives_them(self):
        return ray.get_runtime_context().get_accelerator_ids()["NPU"], device_ids()

    def torch_devices(self):
        import torch

        device.set_device(local_index(device_ids()[0]))
        return torch.npu.device_count(), str(device.current()), device.properties().physical_id


def answers(*actors_options, method="answer"):
    """What one actor for each of the options says; all live at once, and none afterwards."""
    actors = [Actor.options(**these).remote() for these in actors_options]
    try:
        return ray.get([getattr(actor, method).remote() for actor in actors], timeout=WAIT)
    finally:
        for actor in actors:
            ray.kill(actor)


def answer(**actor_options):
    return answers(actor_options)[0]


@contextlib.contextmanager
def placement_group(bundles):
    group = ray.util.placement_group(bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=WAIT)
        yield group
    finally:
        ray.util.remove_placement_group(group)


def within(group, index):
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}


def with_variables(**variables):
    return {"runtime_env": {"env_vars": variables}}


SEES_ALL = with_variables(**{environ.NOSET: "1"})


def ids_of_a_group(count):
    """The devices of each bundle, asked for as slime asks."""
    with placement_group([bundle(1) for _ in range(count)]) as group:
        return [a["ids"] for a in answers(*(options(1) | within(group, i) for i in range(count)))]


def ids_of_shares(*shares):
    """The devices of actors that take shares of one bundle."""
    with placement_group([bundle(1)]) as group:
        each = ({"num_cpus": share} | options(share) | within(group, 0) for share in shares)
        return [a["ids"] for a in answers(*each)]


def resources_come_free():
    """Ray learns a moment later that an actor is gone."""
    until = time.monotonic() + WAIT
    while ray.available_resources().get("CPU") != ray.cluster_resources().get("CPU"):
        assert time.monotonic() < until
        time.sleep(0.1)


class TestArguments:
    """What is written, without a cluster."""

    @pytest.mark.parametrize("share", [0, 0.2, 0.4, 1, 1.0, 8])
    def test_upstreams_arguments_stay_without_an_npu(self, share):
        with host("0"):
            assert options(share) == {"num_gpus": share}
            assert bundle(share) == {"GPU": share, "CPU": share}

    @pytest.mark.parametrize("share", [0, 0.2, 0.4, 1, 8])
    def test_an_npu_is_a_resource_and_takes_back_the_declared_gpu(self, share):
        with host("1"):
            assert options(share) == {"num_gpus": 0, "resources": {"NPU": share}}
            assert bundle(share) == {"NPU": share, "CPU": share}

    def test_a_bundle_of_one_is_what_upstream_writes(self):
        with host("0"):
            assert bundle(1) == {"GPU": 1, "CPU": 1}

    @pytest.mark.parametrize("share", [1.5, 1.0001, 7.5])
    def test_above_one_shares_are_whole(self, share):
        with host("1"), pytest.raises(ValueError, match="above one device, shares are whole"):
            options(share)

    @pytest.mark.parametrize("share", [-1, -0.1, float("nan"), float("inf")])
    def test_a_share_is_no_less_than_nothing(self, share):
        with host("1"), pytest.raises(ValueError, match="a share is 0 or more"):
            bundle(share)


visible_ids = st.sets(st.integers(0, 63), min_size=1).map(sorted)


class TestLocalIndex:
    @given(visible_ids)
    def test_each_visible_id_has_its_place(self, ids):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(device.VISIBLE, ",".join(map(str, ids)))
            assert [local_index(i) for i in ids] == list(range(len(ids)))
            assert [local_index(str(i)) for i in ids] == list(range(len(ids)))

    @given(visible_ids, st.integers(0, 63))
    def test_no_other_id_ever_has_one(self, ids, other):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(device.VISIBLE, ",".join(map(str, ids)))
            if other not in ids:
                with pytest.raises(ValueError, match=f"NPU {other} is not visible"):
                    local_index(other)

    def test_the_sixth_of_four_to_seven_is_the_second(self, monkeypatch):
        monkeypatch.setenv(device.VISIBLE, "4,5,6,7")
        assert local_index("6") == 2

    def test_an_id_is_no_index(self, monkeypatch):
        monkeypatch.setenv(device.VISIBLE, "4,5,6,7")
        with pytest.raises(ValueError, match=r"NPU 2 is not visible.*='4,5,6,7'"):
            local_index(2)

    def test_where_all_are_visible_id_and_index_agree(self, monkeypatch):
        monkeypatch.delenv(device.VISIBLE, raising=False)
        assert (local_index("11"), local_index(3)) == (11, 3)

    def test_where_none_is_visible_no_id_has_an_index(self, monkeypatch):
        monkeypatch.setenv(device.VISIBLE, "")
        with pytest.raises(ValueError, match="NPU 0 is not visible"):
            local_index(0)

    @pytest.mark.parametrize("wrong", ["", "npu:0", -1, "1.0", None, 1.0])
    def test_an_id_is_a_number(self, monkeypatch, wrong):
        monkeypatch.delenv(device.VISIBLE, raising=False)
        with pytest.raises(ValueError, match="a physical id is a number"):
            local_index(wrong)


@pytest.fixture(scope="class")
def eight_npus():
    with cluster("1", "--num-cpus=16", '--resources={"NPU": 8}', SLIME_NPU="1"):
        yield


@pytest.mark.usefixtures("eight_npus")
class TestEightNPUs:
    def test_a_bundle_each_gives_eight_ids(self):
        assert sorted(ids_of_a_group(8)) == [[str(i)] for i in range(8)]

    def test_two_fifths_and_a_fifth_share_a_device(self):
        train, rollout = ids_of_shares(0.4, 0.2)
        assert train == rollout
        assert len(train) == 1

    def test_ray_itself_refuses_one_and_a_half(self):
        with pytest.raises(ValueError, match=r"1\.5 is invalid"):
            Actor.options(num_gpus=0, resources={"NPU": 1.5}).remote()

    def test_ray_itself_refuses_gpus_as_a_resource_even_none(self):
        with pytest.raises(ValueError, match="'num_gpus' keyword"):
            Actor.options(resources={"GPU": 0}).remote()

    def test_several_devices_come_ascending(self):
        ids = answer(**options(4))["ids"]
        assert len(ids) == 4
        assert ids == sorted(ids, key=int)

    def test_an_actor_with_none_is_still_on_an_npu_host(self):
        none = {"ids": [], "index": None, "is_npu": True}
        says_so = with_variables(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="1")
        unsaid, said = answers(options(0), options(0) | says_so)
        assert unsaid == none | {"visible": None}
        assert said == none | {"visible": ""}

    def test_an_actor_sees_its_own_device_as_the_first(self):
        given = answer(**options(1))
        assert (given["visible"], given["index"]) == (given["ids"][0], 0)

    def test_an_actor_that_sees_all_finds_its_own_by_id(self):
        with placement_group([bundle(1) for _ in range(8)]) as group:
            where = (options(1) | SEES_ALL | within(group, i) for i in (3, 7))
            for given in answers(*where):
                assert given["visible"] is None
                assert given["index"] == int(given["ids"][0])

    def test_devices_hidden_after_the_node_started_are_an_error(self):
        hidden = options(1) | with_variables(**{device.VISIBLE: "4,5"})
        with (
            placement_group([bundle(1) for _ in range(8)]) as group,
            pytest.raises(ray.exceptions.RayTaskError, match="Set it for `ray start`"),
        ):
            answers(*(hidden | within(group, i) for i in range(3)))

    def test_preflight_passes_where_all_is_there(self):
        resources_come_free()
        preflight(8)

    def test_preflight_never_waits(self, caplog):
        start = time.monotonic()
        with placement_group([bundle(1) for _ in range(6)]):
            while ray.available_resources().get("NPU") != 2:
                assert time.monotonic() < start + WAIT
            asked = time.monotonic()
            preflight(8)
            assert time.monotonic() - asked < 5
        assert (
            "8 NPUs were asked for, and the cluster's 8 are there, but only 2 free" in caplog.text
        )

    def test_preflight_refuses_more_than_there_are(self):
        with pytest.raises(RuntimeError, match=r"9 NPUs were asked for.*has 8: \S+ has 8"):
            preflight(9)

    def test_preflight_refuses_gpus_on_a_cluster_of_npus(self):
        with host("0"), pytest.raises(RuntimeError, match=r"has 8 NPUs and no GPU.*SLIME_NPU=1"):
            preflight(8)


@pytest.fixture(scope="class")
def eight_gpus():
    with cluster("0", "--num-cpus=4", "--num-gpus=8", SLIME_NPU="0"):
        yield


@pytest.mark.usefixtures("eight_gpus")
class TestEightGPUs:
    def test_devices_shares_and_ids_are_what_they_are_on_npus(self):
        assert sorted(ids_of_a_group(4)) == [[str(i)] for i in range(4)]
        train, rollout = ids_of_shares(0.4, 0.2)
        assert train == rollout
        assert answer(**options(0))["ids"] == []

    def test_preflight_refuses_npus_on_a_cluster_of_gpus(self):
        with host("1"), pytest.raises(RuntimeError, match=r"has 8 GPUs and no NPU.*SLIME_NPU=0"):
            preflight(8)

    def test_preflight_refuses_bundles_without_their_cpus(self):
        with pytest.raises(RuntimeError, match="8 CPUs were asked for, but the cluster has 4"):
            preflight(8)


def simulated(devices: int) -> dict[str, str]:
    return simulator.environment(devices)


@pytest.fixture(scope="class")
def four_of_eight():
    if reason := simulator.real_npu():
        pytest.skip(reason)
    start = simulated(8) | {environ.NOSET: "1", device.VISIBLE: "4,5,6,7"}
    with cluster("1", "--num-cpus=8", **start):
        yield


@pytest.mark.usefixtures("four_of_eight")
class TestFourOfEightNPUs:
    def test_ray_finds_the_visible_ones_by_itself(self):
        assert ray.cluster_resources()["NPU"] == 4
        assert ray.cluster_resources()["accelerator_type:Ascend910B3"] == 1

    def test_ids_are_the_hosts(self):
        assert sorted(ids_of_a_group(4)) == [["4"], ["5"], ["6"], ["7"]]

    def test_several_ids_ascend_though_ray_gives_them_in_any_order(self):
        seeded = options(4) | with_variables(PYTHONHASHSEED="2")
        [(given, ours)] = answers(seeded, method="ids_as_ray_gives_them")
        assert given != ours  # with this seed
        assert sorted(given) == ours == ["4", "5", "6", "7"]

    def test_torch_computes_on_the_device_that_ray_gave(self):
        with placement_group([bundle(1) for _ in range(4)]) as group:
            each = [options(1) | within(group, i) for i in range(4)]
            sixth = each[[a["ids"] for a in answers(*each)].index(["6"])]
            assert answers(sixth, method="torch_devices") == [(4, "npu:2", "6")]


JOB = """
import json, os, ray
from slime_npu import environ
from slime_npu.ray import device_ids, is_npu, local_index, options, preflight
ray.init(log_to_driver=False)
preflight(16)
@ray.remote(num_gpus=1)
class Actor:
    def answer(self):
        ids = device_ids()
        index = [local_index(i) for i in ids]
        return is_npu(), ids, index, os.environ.get(environ.NOSET), os.environ["HCCL_EXEC_TIMEOUT"]
sees_all = {"runtime_env": {"env_vars": {environ.NOSET: "1"}}}
actors = [Actor.options(**options(8)).remote(), Actor.options(**options(8), **sees_all).remote()]
answers = ray.get([actor.answer.remote() for actor in actors], timeout=90)
print("answer", json.dumps([[is_npu(), os.environ.get(environ.NOSET)], *answers]))
"""


class TestAJobOnSixteenNPUs:
    def test_every_process_of_a_submitted_job_has_its_environment(self):
        if reason := simulator.real_npu():
            pytest.skip(reason)
        port = free_port()
        own = simulated(16)
        with cluster("1", "--num-cpus=16", dashboard=port, **own):
            assert ray.cluster_resources()["NPU"] == 16
            paths = os.pathsep.join([own["PYTHONPATH"], str(ROOT)])
            job = environ.job(minutes=7, environ=own | {"PYTHONPATH": paths})
            done = subprocess.run(
                [
                    *(BIN / "ray", "job", "submit", f"--address=http://127.0.0.1:{port}"),
                    f"--runtime-env-json={json.dumps({'env_vars': job})}",
                    *("--", sys.executable, "-c", JOB),
                ],
                capture_output=True,
                text=True,
                timeout=150,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("answer "))
        driver, plain, sees_all = json.loads(line.removeprefix("answer "))
        assert driver == [True, "1"]
        # Ray took the variable out of the job's environment; an actor that sets it keeps it.
        assert plain == [True, [str(i) for i in range(8)], list(range(8)), None, "420"]
        assert sees_all == [True, [str(i) for i in range(8, 16)], list(range(8, 16)), "1", "420"]
