"""Shares, bundles and ids of devices in Ray's terms.

A GPU is Ray's `num_gpus` and the bundle resource "GPU"; an NPU is the resource "NPU", of which an
actor holds a fraction of one or a whole number. Each function here takes what upstream writes for
GPUs and gives that back unchanged on a host without NPUs.

Ids are strings. Ray gives physical ones: with `ASCEND_RT_VISIBLE_DEVICES=4,5,6,7` at `ray start`
they are "4" to "7", and "6" is index 2 in a process that sees these four. The variable belongs to
`ray start`: set in a job's runtime environment it narrows what a worker sees without the node
knowing, and ids no longer say which device was given.

Ray names several devices of such a node in any order, in ASCEND_RT_VISIBLE_DEVICES too, which CANN
reads only while it ascends. The environment of `slime_npu.environ` keeps Ray from writing it.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from slime_npu.device import VISIBLE, is_npu, visible

__all__ = ["bundle", "device_ids", "is_npu", "local_index", "options", "preflight"]

_log = logging.getLogger(__name__)


def options(num_gpus: float) -> dict[str, Any]:
    """Keyword arguments of `.options()` for an actor or task that holds `num_gpus` devices.

    On NPU they also take back the `num_gpus` with which its class may have been declared.
    Raises ValueError where Ray would refuse, or wait for, such a share.
    """
    if not is_npu():
        return {"num_gpus": num_gpus}
    return {"num_gpus": 0, "resources": {"NPU": _share(num_gpus)}}


def bundle(num_gpus: float) -> dict[str, float]:
    """A placement bundle of `num_gpus` devices, with a CPU each. Raises as `options` does."""
    if not is_npu():
        return {"GPU": num_gpus, "CPU": num_gpus}
    share = _share(num_gpus)
    return {"NPU": share, "CPU": share}


def _share(num_gpus: float) -> float:
    if not math.isfinite(num_gpus) or num_gpus < 0:
        raise ValueError(f"{num_gpus} NPUs: a share is 0 or more")
    if num_gpus != int(num_gpus):
        if num_gpus > 1:
            raise ValueError(f"{num_gpus} NPUs: above one device, shares are whole numbers")
        return num_gpus
    return int(num_gpus)


def device_ids() -> list[str]:
    """The physical ids that Ray gave this actor or task; [] where it asked for none.

    They ascend, on NPUs: Ray itself gives several in any order. Raises RuntimeError where more are
    named than were asked for.
    """
    import ray

    if not is_npu():
        return [str(i) for i in ray.get_gpu_ids()]
    context = ray.get_runtime_context()
    ids = sorted(context.get_accelerator_ids()["NPU"], key=int)
    share = context.get_assigned_resources().get("NPU", 0)
    if share and len(ids) > math.ceil(share):
        raise RuntimeError(
            f"Ray names the NPUs {', '.join(ids)} for a share of {share:g}, so it cannot be known "
            f"which was given: {VISIBLE} was changed after the node started. Set it for "
            f"`ray start`, not in the job's runtime environment"
        )
    return ids


def local_index(physical_id: int | str) -> int:
    """The index of a physical NPU among those this process sees (ASCEND_RT_VISIBLE_DEVICES).

    Raises ValueError where it does not see it: another device would belong to somebody else.
    """
    wanted = str(physical_id)
    if not (wanted.isascii() and wanted.isdecimal()):
        raise ValueError(f"NPU {physical_id!r}: a physical id is a number")
    ids = visible()
    if ids is None:
        return int(wanted)
    try:
        return ids.index(str(int(wanted)))
    except ValueError:
        raise ValueError(
            f"NPU {wanted} is not visible to this process ({VISIBLE}={','.join(ids)!r})"
        ) from None


def preflight(num_gpus: int) -> None:
    """Check that the connected cluster has `num_gpus` devices, each with a CPU; waits for nothing.

    A placement group that asks for what a cluster has not waits for ever. Raises RuntimeError
    where it would: other devices than the cluster has, or more. Devices that are there but held
    by others are logged, as they may come free.
    """
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    asked = bundle(num_gpus)
    name, other = ("NPU", "GPU") if is_npu() else ("GPU", "NPU")
    if num_gpus and not total.get(name) and total.get(other):
        if other == "NPU":
            reason = "this process found no NPU; where it only submits, set SLIME_NPU=1 for the job"
        else:
            reason = "this process found NPUs; set SLIME_NPU=0 to use the GPUs"
        raise RuntimeError(
            f"{num_gpus} {name}s were asked for, but the cluster has {total[other]:g} {other}s "
            f"and no {name}: {reason}"
        )
    for resource, amount in asked.items():
        if amount > total.get(resource, 0):
            raise RuntimeError(
                f"{amount} {resource}s were asked for, but the cluster has "
                f"{total.get(resource, 0):g}: {_nodes(resource)}"
            )
        if amount > free.get(resource, 0):
            _log.warning(
                "%s %ss were asked for, and the cluster's %g are there, but only %g free: the job "
                "waits until others end",
                amount,
                resource,
                total[resource],
                free.get(resource, 0),
            )


def _nodes(resource: str) -> str:
    """Which node brings how many, for a message."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return ", ".join(
        f"{node['NodeManagerAddress']} has {node['Resources'].get(resource, 0):g}" for node in nodes
    )
