"""Process groups on NPU: backends, addresses, ports and timeouts.

HCCL stands where upstream names NCCL. The environment variables here are CANN's own; their formats
are from its environment variable reference (CANN 8.5, envref_07_0143, _0144, _0077 and _0078).
"""

from __future__ import annotations

import ipaddress
import math
from pathlib import Path

from slime_npu.device import is_npu

_kernel = Path("/proc/sys/net/ipv4")


def backend(name: str) -> str:
    """The backend to use where upstream names `name`, for one device type or several.

    On NPU "nccl" is "hccl" and "cpu:gloo,cuda:nccl" is "cpu:gloo,npu:hccl"; everywhere else, and
    for every other backend, the name stays as it is.
    """
    if not is_npu():
        return name
    return ",".join(_on_npu(part) for part in name.split(","))


def _on_npu(part: str) -> str:
    device, colon, name = part.rpartition(":")
    device = "npu" if device.strip() == "cuda" else device
    return f"{device}{colon}{'hccl' if name.strip().lower() == 'nccl' else name}"


def init_method(host: str, port: int | str) -> str:
    """`tcp://host:port` for `init_process_group`, an IPv6 address in brackets (RFC 3986, 3.2.2).

    Raises ValueError where the port is none, or the host is empty or more than a host.
    """
    number = int(port)
    if not 0 < number < 65536 or number != float(port):
        raise ValueError(f"port {port}: ports are 1 to 65535")
    name = host.strip()
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    if not name:
        raise ValueError("an empty host name: give the address of rank 0")
    if not set(name) & set(":/[]"):
        return f"tcp://{name}:{number}"
    try:
        ipaddress.IPv6Address(name)
    except ValueError:
        raise ValueError(
            f"{host!r} is no host: give a name or an address, without a port"
        ) from None
    return f"tcp://[{name}]:{number}"


def port_ranges(job: int = 0, ports: int = 128) -> dict[str, str]:
    """HCCL's port ranges, on the host and on its NPUs, for one of the jobs that share them.

    Jobs with different numbers get ranges that do not meet, above the ports that the kernel hands
    out by itself; within a range each process finds a free port. `ports` is the size of either
    range, at least the number of processes per host.

    Raises ValueError where no such range is left.
    """
    if job < 0 or ports < 1:
        raise ValueError(f"job {job} with {ports} ports: jobs count from 0, ports from 1")
    kernels = _last_ephemeral_port()
    first = kernels + 1 + 2 * ports * job
    last = first + 2 * ports - 1
    if last > 65535:
        raise ValueError(
            f"job {job} with 2 x {ports} ports needs {first}-{last}, and ports end at 65535: ask "
            f"for fewer, or lower net.ipv4.ip_local_port_range, which ends at {kernels}"
        )
    return {
        "HCCL_HOST_SOCKET_PORT_RANGE": f"{first}-{first + ports - 1}",
        "HCCL_NPU_SOCKET_PORT_RANGE": f"{first + ports}-{last}",
    }


def _last_ephemeral_port() -> int:
    """The last of the ports that the kernel hands out by itself; Linux's default elsewhere."""
    try:
        return int((_kernel / "ip_local_port_range").read_text().split()[1])
    except FileNotFoundError:
        return 60999


def timeouts(minutes: float) -> dict[str, str]:
    """HCCL's timeouts, in seconds, for process groups that wait `minutes` for their peers.

    Connecting may wait 120 to 7200 s, CANN's own limits; within them both wait equally long.
    Raises ValueError where `minutes` is not above 0.
    """
    seconds = round(minutes * 60) if math.isfinite(minutes) else 0
    if seconds < 1:
        raise ValueError(f"a timeout of {minutes} minutes: nothing would ever be waited for")
    return {
        "HCCL_CONNECT_TIMEOUT": str(min(max(seconds, 120), 7200)),
        "HCCL_EXEC_TIMEOUT": str(seconds),
    }
