"""Without an NPU our trees compute what upstream's compute: both are run, and every bit compared.

What runs is in `gpu_host`, a program of its own: once with upstream's tree, then with the tree that
the queue makes of it, on a host whose slime_npu says that there is no NPU, and on one without
slime_npu. `tests/test_gpu_path.py` compares what cannot be run, as syntax trees.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("pygit2", reason="needs what forkman depends on, to make the trees")
import releases

Trees = tuple[tuple[str, str], ...]
# The releases that the first pins stand nearest to.
CORE, BRIDGE, SGLANG = ("megatron", "0.16.0"), ("megatron-bridge", "0.3.0"), ("sglang", "0.5.7")


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Trees, bool], Path]:
    """The function that makes a folder of upstream's files, or of ours."""

    @cache
    def make(trees: Trees, ours: bool) -> Path:
        folder = tmp_path_factory.mktemp("ours" if ours else "upstream")
        for fork, version in trees:
            every = releases.of(fork)
            carried = every.carried(every.tag(version))
            files = releases.Files(carried.objects, carried.after if ours else carried.before)
            for path in files.paths():
                parts = Path(os.fsdecode(path)).parts
                below = parts[1:] if parts[0] in ("src", "python") else parts
                if below and below[0] in ("megatron", "sglang"):
                    to = folder.joinpath(*below)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    to.write_bytes(files.read(path) or b"")
        return folder

    return make


def started(group: str, tree: Path, slime_npu: str, out: Path) -> subprocess.Popen[bytes]:
    """A process on a host without an NPU. slime_npu: what it says, "0", or "absent"."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLIME_NPU", "ASCEND", "LD_"))
    } | {
        "PYTHONPATH": os.pathsep.join((str(tree), str(releases.ROOT))),
        "SLIME_NPU": slime_npu,
        "TORCHDYNAMO_DISABLE": str(int(group == "megatron_alone")),  # compiling takes minutes
    }
    program = Path(__file__).with_name("gpu_host.py")
    with out.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, program, group], env=environment, stdout=file, stderr=file
        )


def answers(process: subprocess.Popen[bytes], out: Path) -> dict[str, dict[str, object]]:
    process.wait(timeout=300)
    said = out.read_text("utf-8", "replace")
    lines = [line for line in said.splitlines() if line.startswith("answers: ")]
    assert lines, said[-3000:]
    found: dict[str, dict[str, object]] = json.loads(lines[0].removeprefix("answers: "))
    assert all(found.values()), "a check without answers shows nothing"
    return found


@pytest.mark.reference
@pytest.mark.parametrize(
    ("group", "trees"),
    [
        ("megatron", (CORE,)),
        ("megatron_alone", (CORE,)),
        ("bridge", (CORE, BRIDGE)),
        ("sglang", (SGLANG,)),
    ],
    ids=["megatron", "megatron without Transformer Engine", "bridge", "sglang"],
)
def test_without_an_npu_ours_answers_as_upstream_does(
    group: str, trees: Trees, tree: Callable[[Trees, bool], Path], tmp_path: Path
) -> None:
    upstream, ours = tree(trees, False), tree(trees, True)
    runs = {"upstream": (upstream, "0"), "ours": (ours, "0"), "ours alone": (ours, "absent")}
    outs = {name: tmp_path / name for name in runs}
    processes = {name: started(group, *run, outs[name]) for name, run in runs.items()}
    found = {name: answers(process, outs[name]) for name, process in processes.items()}
    assert found["ours"] == found["upstream"]
    assert found["ours alone"] == found["upstream"]
