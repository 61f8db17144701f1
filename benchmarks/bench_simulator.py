"""What the simulator costs: operators on a simulated NPU against the CPU's, in the same process.

    python benchmarks/bench_simulator.py [--runs N] [--json] [--check]

- a four-element add, which is nearly all overhead, and the same in place;
- a 2048×2048 float32 matrix product, which is nearly all work;
- a training step (forward, backward, AdamW) of a two-layer perceptron;
- an all_reduce of 4 MiB between two processes, against gloo's;
- starting: `import torch` with torch_npu on the simulator, against torch alone.

Times are the fastest of runs in which the contenders take turns: what else the machine does can
only add to them.
`--check` exits with 1 if the add costs more than 20 times the CPU's, or the product more than 1.1.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from slime_npu import simulator
from slime_npu.simulator.plugin import run_ranks

LIMITS = {"add of 4": 20.0, "product of 2048×2048": 1.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="runs of each (default: 15)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--check", action="store_true", help="fail where it costs too much")
    options = parser.parse_args()
    simulator.load()
    numbers = operators(options.runs) | collectives() | starts()
    print(json.dumps(numbers, indent=2) if options.json else table(numbers))
    over = [name for name, limit in LIMITS.items() if ratio(numbers[name]) > limit]
    for name in over:
        print(f"{name}: {ratio(numbers[name]):.2f} times the CPU's, over {LIMITS[name]}")
    sys.exit(1 if over and options.check else 0)


# -- what is measured ------------------------------------------------------------------------------

Pair = dict[str, float]  # microseconds: "npu" and "cpu"


def operators(runs: int) -> dict[str, Pair]:
    import torch
    import torch_npu  # noqa: F401

    def small(device: str) -> Callable[[], object]:
        one, two = torch.ones(4, device=device), torch.ones(4, device=device)
        return lambda: one + two

    def in_place(device: str) -> Callable[[], object]:
        one, two = torch.ones(4, device=device), torch.ones(4, device=device)
        return lambda: one.add_(two)

    def product(device: str) -> Callable[[], object]:
        one, two = torch.randn(2048, 2048).to(device), torch.randn(2048, 2048).to(device)
        return lambda: one @ two

    def step(device: str) -> Callable[[], object]:
        layers = torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
        model = torch.nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(64, 256).to(device)

        def train() -> None:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

        return train

    return {
        "add of 4": versus(small, runs, calls=2000),
        "add of 4 in place": versus(in_place, runs, calls=2000),
        "product of 2048×2048": versus(product, runs, calls=1),
        "training step": versus(step, runs, calls=5),
    }


def versus(make: Callable[[str], Callable[[], object]], runs: int, calls: int) -> Pair:
    contenders = {device: make(device) for device in ("npu", "cpu")}
    times: dict[str, list[float]] = {device: [] for device in contenders}
    for run in range(runs + 1):
        for device, call in contenders.items():
            started = time.perf_counter()
            for _ in range(calls):
                call()
            if run:  # the first warms up
                times[device].append((time.perf_counter() - started) / calls * 1e6)
    return {device: min(some) for device, some in times.items()}


def collectives() -> dict[str, Pair]:
    return {"all_reduce of 4 MiB": run_ranks(all_reduce, 2)[0]}


def all_reduce() -> Pair:
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")

    def make(device: str) -> Callable[[], object]:
        tensor = torch.zeros(1 << 20, device=device)
        return lambda: dist.all_reduce(tensor)

    numbers = versus(make, runs=9, calls=3)
    dist.destroy_process_group()
    return numbers


def starts() -> dict[str, Pair]:
    plain = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", "import torch"]
    return {"import torch": {"npu": started(command, os.environ), "cpu": started(command, plain)}}


def started(command: list[str], environment: Mapping[str, str]) -> float:
    begun = time.perf_counter()
    folder = Path(__file__).parents[1]
    subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - begun) * 1e6


# -- how it looks ----------------------------------------------------------------------------------


def ratio(pair: Pair) -> float:
    return pair["npu"] / pair["cpu"]


def table(numbers: dict[str, Pair]) -> str:
    rows = [f"{'':24}{'npu µs':>14}{'cpu µs':>14}{'times':>9}"]
    rows += [
        f"{name:24}{pair['npu']:14,.1f}{pair['cpu']:14,.1f}{ratio(pair):9.2f}"
        for name, pair in numbers.items()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    main()
