"""Backends, addresses, ports and timeouts: where upstream names NCCL, HCCL must come out."""

import ipaddress
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_npu import device, distributed

pytestmark = pytest.mark.plumbing


@pytest.fixture(scope="module")
def on_npu():
    yield from _host("1")


@pytest.fixture
def on_gpu():
    yield from _host("0")


def _host(decided):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIME_NPU", decided)
        device._missing.cache_clear()
        yield
    device._missing.cache_clear()


PAIRS = [
    ("nccl", "hccl"),
    ("NCCL", "hccl"),
    ("cuda:nccl", "npu:hccl"),
    ("cpu:gloo,cuda:nccl", "cpu:gloo,npu:hccl"),
    ("cuda:nccl,cpu:gloo", "npu:hccl,cpu:gloo"),
    ("cpu:gloo, cuda:nccl", "cpu:gloo,npu:hccl"),
    ("gloo", "gloo"),
    ("hccl", "hccl"),
    ("cpu:gloo,npu:hccl", "cpu:gloo,npu:hccl"),
]


@pytest.mark.parametrize(("upstream", "ours"), PAIRS)
def test_hccl_stands_where_upstream_names_nccl(on_npu, upstream, ours):
    assert distributed.backend(upstream) == ours


@pytest.mark.parametrize(("upstream", "ours"), PAIRS)
def test_upstreams_backend_stays_without_an_npu(on_gpu, upstream, ours):
    assert distributed.backend(upstream) == upstream


parts = st.sampled_from(["nccl", "gloo", "hccl", "cuda:nccl", "cpu:gloo", "npu:hccl", "xpu:xccl"])


@given(st.lists(parts, min_size=1).map(",".join))
def test_a_backend_for_npu_stays_what_it_is(on_npu, name):
    once = distributed.backend(name)
    assert distributed.backend(once) == once
    assert "nccl" not in once
    assert len(once.split(",")) == len(name.split(","))


@given(st.ip_addresses(v=6), st.integers(1, 65535))
def test_an_ipv6_address_is_found_again_in_its_init_method(address, port):
    parsed = urlsplit(distributed.init_method(str(address), port))
    assert ipaddress.ip_address(parsed.hostname) == address
    assert parsed.port == port


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("10.0.0.1", 29500, "tcp://10.0.0.1:29500"),
        ("node-3.example", "29500", "tcp://node-3.example:29500"),
        ("::1", 29500, "tcp://[::1]:29500"),
        ("[::1]", 29500, "tcp://[::1]:29500"),
        ("fe80::1%eth0", 29500, "tcp://[fe80::1%eth0]:29500"),
    ],
)
def test_init_methods_bracket_ipv6_and_nothing_else(host, port, expected):
    assert distributed.init_method(host, port) == expected


@pytest.mark.parametrize("host", ["h:29500", "tcp://h", "[::1", "::1]", "a/b"])
def test_an_init_method_takes_no_more_than_a_host(host):
    with pytest.raises(ValueError, match="is no host"):
        distributed.init_method(host, 1)


@pytest.mark.parametrize("port", [0, -1, 65536, "65536", 1.5])
def test_an_init_method_needs_a_port(port):
    with pytest.raises(ValueError, match="ports are 1 to 65535"):
        distributed.init_method("::1", port)


@pytest.mark.parametrize("host", ["", " ", "[]"])
def test_an_init_method_needs_a_host(host):
    with pytest.raises(ValueError, match="address of rank 0"):
        distributed.init_method(host, 29500)


def ranges(variables):
    """The ports in the two variables, read as CANN's reference describes them."""
    assert variables.keys() == {"HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"}
    for value in variables.values():
        first, last = re.fullmatch(r"(\d+)-(\d+)", value).groups()
        yield range(int(first), int(last) + 1)


@given(st.sets(st.integers(0, 16), min_size=2, max_size=2), st.integers(1, 128))
def test_no_two_jobs_share_a_port(jobs, size):
    taken = [r for job in jobs for r in ranges(distributed.port_ranges(job, size))]
    assert [len(r) for r in taken] == [size] * 4
    assert len(set().union(*taken)) == 4 * size


def test_ports_are_none_that_the_kernel_hands_out(tmp_path, monkeypatch):
    (tmp_path / "ip_local_port_range").write_text("1024\t62000\n")
    monkeypatch.setattr(distributed, "_kernel", tmp_path)
    assert min(min(r) for r in ranges(distributed.port_ranges(0))) == 62001


def test_ports_keep_off_linuxs_own_where_the_kernel_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "_kernel", tmp_path)
    assert min(min(r) for r in ranges(distributed.port_ranges(0))) == 61000


def test_ports_lie_above_the_kernels_own_range_here():
    last = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[1])
    assert all(r.start > last for r in ranges(distributed.port_ranges(0, 1)))


def test_no_ports_left_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "ip_local_port_range").write_text("1024 65535")
    monkeypatch.setattr(distributed, "_kernel", tmp_path)
    with pytest.raises(ValueError, match=r"ports end at 65535.*ip_local_port_range"):
        distributed.port_ranges(0)


@pytest.mark.parametrize(("job", "size"), [(-1, 1), (0, 0)])
def test_jobs_and_ports_are_counted_from_the_start(job, size):
    with pytest.raises(ValueError, match="jobs count from 0, ports from 1"):
        distributed.port_ranges(job, size)


@pytest.mark.parametrize(
    ("minutes", "connect", "execute"),
    [(10, "600", "600"), (1, "120", "60"), (300, "7200", "18000"), (0.5, "120", "30")],
)
def test_timeouts_are_seconds_within_canns_limits(minutes, connect, execute):
    assert distributed.timeouts(minutes) == {
        "HCCL_CONNECT_TIMEOUT": connect,
        "HCCL_EXEC_TIMEOUT": execute,
    }


@pytest.mark.parametrize("minutes", [0, -1, 0.001, float("inf"), float("nan")])
def test_no_timeout_is_an_error(minutes):
    with pytest.raises(ValueError, match="nothing would ever be waited for"):
        distributed.timeouts(minutes)


def one_group_for_both(host, port):
    """Sums over two ranks, on the CPU and on the NPU, in one group made as upstream makes it."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    device.set_device(rank)
    dist.init_process_group(
        distributed.backend("cpu:gloo,cuda:nccl"),
        init_method=distributed.init_method(host, port),
        rank=rank,
        world_size=2,
    )
    sums = {}
    for where in ("cpu", "npu"):
        x = torch.full((4,), rank + 1.0, device=where)
        dist.all_reduce(x)
        sums[x.device.type] = x.tolist()
    alone = dist.new_group(backend=distributed.backend("nccl"))
    y = torch.full((2,), float(rank), device="npu")
    dist.broadcast(y, 1, group=alone)
    name = dist.get_backend(alone)
    dist.destroy_process_group()
    return sums, name, y.tolist()


def _port(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _has_ipv6():
    try:
        return _port("::1") > 0
    except OSError:
        return False


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param(
            "::1", marks=pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 on loopback")
        ),
    ],
)
def test_gloo_and_hccl_work_in_one_group_over_any_address(ranks, monkeypatch, host):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    answers = ranks(one_group_for_both, 2, host, _port(host), timeout=90)
    assert answers == [({"cpu": [3.0] * 4, "npu": [3.0] * 4}, "hccl", [1.0, 1.0])] * 2
