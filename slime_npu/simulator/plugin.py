"""pytest on simulated NPUs: `pytest -p slime_npu.simulator.plugin`.

Owns: loading the simulator before tests are imported, the tiers that say what a test proves, and
two fixtures. `npu_calls` counts the NPU operators a test calls; `ranks` runs a function on several
processes, as torchrun does.

Where there is a real NPU the simulator stays out of the way, and the same tests run on that.
"""

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from slime_npu import simulator

TIERS = {
    "schema": "calls are checked against the wheel's own schemas and Meta kernels",
    "plumbing": "real torch_npu, ProcessGroupHCCL and Ray, wired together",
    "reference": "numbers, from reference kernels on a CPU",
    "hardware": "what only a real NPU shows; skipped where there is none",
}


def pytest_configure(config: pytest.Config) -> None:
    for tier, meaning in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {meaning}")
    if simulator.real_npu() is None:
        try:
            simulator.load_from_environment()
        except simulator.SimulatorError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if simulator.loaded():
        for item in items:
            if item.get_closest_marker("hardware"):
                item.add_marker(pytest.mark.skip(reason="needs a real NPU; this one is simulated"))


@pytest.fixture
def npu_calls() -> Counter[str]:
    """How often this test called each NPU operator, by its name (`npu_rms_norm`)."""
    simulator.calls().clear()
    return simulator.calls()


Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """`ranks(function, world_size, *args, timeout=120)`: what it returned on each rank, in order.

    The function must be importable, its arguments and result picklable; tensors come back on the
    CPU. It finds RANK, LOCAL_RANK,
    WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, which is otherwise
    the caller's. The first rank that fails ends the others, and its error is the test's.
    """
    return run_ranks


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
) -> list[Any]:
    # A server that has imported torch_npu forks each rank: seconds of imports happen only once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch_npu"])
    environment = dict(os.environ) | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    processes: dict[Any, tuple[int, Any]] = {}  # by the end of the pipe that brings its result
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_rank, args=(there, own, function, args), daemon=True)
        process.start()
        there.close()
        processes[here] = rank, process
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while open_ones := [end for end, (rank, _) in processes.items() if rank not in results]:
            ready = wait(open_ones, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                late = sorted(processes[end][0] for end in open_ones)
                raise TimeoutError(f"ranks {late} did not finish within {timeout:g} s")
            for end in open_ones:
                if end in ready:
                    rank, process = processes[end]
                    results[rank] = _result(end, rank, process)
    finally:
        for end, (_, process) in processes.items():
            end.close()
            if len(results) < world_size:
                process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def _rank(
    end: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import torch

    try:
        answer = True, function(*args)
    except BaseException as error:
        answer = False, (error, traceback.format_exc())
    data = io.BytesIO()
    try:
        torch.save(answer, data)
    except Exception:  # this cannot travel; what it says can
        what = RuntimeError(f"{answer[1]!r} cannot be pickled")
        data = io.BytesIO()
        torch.save((False, (what, traceback.format_exc())), data)
    end.send_bytes(data.getvalue())


def _result(end: Connection, rank: int, process: Any) -> Any:
    import torch

    try:
        data = end.recv_bytes()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"rank {rank} ended without a result, exit code {process.exitcode}"
        ) from None
    worked, value = torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")
    if worked:
        return value
    error, text = value
    error.add_note(f"on rank {rank}:\n{text}")
    raise error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
