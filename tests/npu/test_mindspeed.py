"""MindSpeed adapts a process once, before Megatron; each scenario has a process of its own.

MindSpeed is on no package index. Most scenarios run with a package that has the face which adapt
and repatch use; the last ones run with the real one where FORKMAN_MINDSPEED names its tree and,
after a colon, that of the Megatron-LM it adapts.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import absent
import pytest

from slime_npu import mindspeed
from slime_npu.device import NoNPU

REAL = os.environ.get("FORKMAN_MINDSPEED", "")
with_mindspeed = pytest.mark.skipif(not REAL, reason="MindSpeed: FORKMAN_MINDSPEED is not set")

ADAPTOR = """
import torch
from torch_npu.contrib import transfer_to_npu

from mindspeed.core.fusions import grouped_matmul

given = []


def repatch(args):
    given.append([(name, value) for name, value in args.items()])
    torch.cuda.get_device_capability = grouped_matmul.get_device_capability
"""
GROUPED_MATMUL = """
def get_device_capability():
    return 9, 0
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A package with MindSpeed's face, which leaves Tensor.type() alone as core_r0.17 does."""
    folder = tmp_path_factory.mktemp("made")
    fusions = folder / "mindspeed" / "core" / "fusions"
    fusions.mkdir(parents=True)
    (folder / "mindspeed" / "__init__.py").touch()
    (folder / "mindspeed" / "megatron_adaptor.py").write_text(ADAPTOR)
    (fusions / "grouped_matmul.py").write_text(GROUPED_MATMUL)
    return folder


def run(scenario: str, folder: Path, *paths: str, **environment: str):
    """What a scenario returns, run in a process that finds these paths first."""
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    result = folder / f"{scenario}.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, scenario, result],
        env=os.environ | environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def adapted(made):
    return run("adapt_and_repatch", made, str(made))


@pytest.fixture(scope="module")
def refused(made):
    return run("refusals", made, MADE=str(made))


@pytest.mark.plumbing
def test_adapting_twice_changes_nothing_the_second_time(adapted):
    assert adapted["second adapt"] == []


@pytest.mark.plumbing
def test_torch_cuda_is_the_npus(adapted):
    assert adapted["cuda device"] == "npu:0"
    assert adapted["cuda available"]


@pytest.mark.plumbing
def test_a_tensors_type_is_cudas_where_mindspeed_leaves_it(adapted):
    assert adapted["types"] == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"]
    assert adapted["type of a CPU tensor"] == "torch.FloatTensor"
    assert adapted["converted"] == "torch.float64"
    assert mindspeed.TENSOR_TYPE.target in adapted["patches"]


@pytest.mark.plumbing
def test_the_change_of_a_tensors_type_can_be_undone(adapted):
    assert adapted["type without the patch"] == "torch.npu.FloatTensor"


@pytest.mark.plumbing
def test_groups_that_ask_for_nccl_are_hccl(adapted):
    assert adapted["backends"] == ["hccl", "hccl"]


@pytest.mark.plumbing
def test_broadcast_runs_though_torch_asks_for_a_capability(adapted):
    assert adapted["broadcast"] == [7.0]


@pytest.mark.plumbing
def test_broadcast_runs_though_mindspeed_answers_for_no_device(adapted):
    assert adapted["broadcast after repatch"] == [7.0]
    assert mindspeed.DEVICE_CAPABILITY.target in adapted["patches"]


@pytest.mark.plumbing
def test_repatch_gives_mindspeed_a_dict_of_what_it_was_given(adapted):
    arguments = [["context_parallel_size", 2], ["use_flash_attn", True]]
    assert adapted["given"] == [arguments, arguments]


@pytest.mark.plumbing
def test_repatch_comes_before_the_parallel_groups(adapted):
    assert "parallel groups are already made" in adapted["after the groups"]
    assert "as they were" in adapted["after the groups"]
    assert adapted["given after the groups"] == 0


@pytest.mark.plumbing
def test_repatch_works_again_once_the_groups_are_gone(adapted):
    assert adapted["given after destroying the groups"] == 1


@pytest.mark.plumbing
def test_without_mindspeed_adapt_says_what_to_install(refused):
    assert "MindSpeed is not installed" in refused["no MindSpeed"]


@pytest.mark.plumbing
def test_repatch_comes_after_adapt(refused):
    assert "has not adapted this process" in refused["repatch first"]


@pytest.mark.plumbing
def test_adapt_comes_before_megatron(refused):
    assert "megatron.core was imported" in refused["Megatron first"]
    assert "import slime.backends.megatron_utils, before" in refused["Megatron first"]


@pytest.mark.plumbing
def test_a_refusal_changes_nothing(refused):
    assert refused["changed"] == []


@pytest.mark.plumbing
def test_a_host_without_npus_is_not_adapted(made):
    answer = run("adapt_here", made, str(made), SLIME_NPU="0")
    assert answer == {"error": NoNPU.__name__, "torch": False}


@pytest.mark.parametrize("wrong", [None, 3, ["context_parallel_size"]])
def test_repatch_takes_names(wrong):
    with pytest.raises(TypeError, match="a Namespace or a dict"):
        mindspeed.repatch(wrong)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return run("real_mindspeed", tmp_path_factory.mktemp("real"), REAL)


@with_mindspeed
@pytest.mark.plumbing
def test_the_real_mindspeed_answers_for_a_tensors_type(real):
    assert real["type"] == "torch.cuda.FloatTensor"
    assert mindspeed.TENSOR_TYPE.target not in real["our patches"]


@with_mindspeed
@pytest.mark.plumbing
def test_broadcast_runs_with_the_real_mindspeed(real):
    assert real["broadcast"] == [7.0]


@with_mindspeed
@pytest.mark.plumbing
def test_the_real_mindspeed_makes_megatrons_element_wise_functions_eager(real):
    assert real["jit_fuser"].startswith("mindspeed.")


@with_mindspeed
@pytest.mark.plumbing
def test_the_real_mindspeed_chooses_by_the_arguments_of_either_kind(real):
    assert real["first choice"] == 0
    assert real["with context parallelism"] > 0
    assert real["from a dict"] == real["from a Namespace"] == real["again"]


@with_mindspeed
@pytest.mark.plumbing
def test_the_real_mindspeed_makes_context_parallel_groups_after_repatch(real):
    assert real["its initialize_model_parallel"] == [False, True]


# -- in a process of its own -----------------------------------------------------------------------


def error_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return str(error)
    return None


def adapt_here():
    try:
        mindspeed.adapt()
    except Exception as error:
        return {"error": type(error).__name__, "torch": "torch" in sys.modules}
    return {}


def adapt_and_repatch():
    import torch

    mindspeed.adapt()
    before = changeable()
    mindspeed.adapt()
    found = {"second adapt": changed(before)}

    from slime_npu import patching

    one = torch.ones(1, device="cuda")
    found["cuda device"] = str(one.device)
    found["cuda available"] = torch.cuda.is_available()
    found["types"] = [one.type(), torch.nn.Parameter(one.bfloat16()).type()]
    found["type of a CPU tensor"] = torch.ones(1).type()
    found["converted"] = str(torch.ones(1).type(torch.float64).dtype)
    found["patches"] = [patch.target for patch in patching.applied()]

    import torch.distributed as dist

    address = f"file://{sys.argv[2]}.store"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    group = dist.new_group([0], backend="nccl")
    found["backends"] = [dist.get_backend(), dist.get_backend(group)]
    seven = torch.full((1,), 7.0, device="cuda")
    dist.broadcast(seven, 0)
    found["broadcast"] = seven.tolist()

    from megatron.core import parallel_state

    adaptor = sys.modules["mindspeed.megatron_adaptor"]
    args = {"context_parallel_size": 2, "use_flash_attn": True}
    mindspeed.repatch(argparse.Namespace(**args))
    mindspeed.repatch(args)
    found["given"] = adaptor.given[:]
    adaptor.given.clear()
    dist.broadcast(seven, 0)
    found["broadcast after repatch"] = seven.tolist()
    parallel_state.initialize_model_parallel()
    found["after the groups"] = error_of(mindspeed.repatch, args)
    found["given after the groups"] = len(adaptor.given)
    parallel_state.destroy_model_parallel()
    mindspeed.repatch(args)
    found["given after destroying the groups"] = len(adaptor.given)

    mindspeed.TENSOR_TYPE.undo()
    found["type without the patch"] = one.type()
    return found


def refusals():
    before = changeable()
    found = {"no MindSpeed": error_of(mindspeed.adapt)}
    found["repatch first"] = error_of(mindspeed.repatch, {})
    sys.path.insert(0, os.environ["MADE"])
    import megatron.core  # noqa: F401

    found["Megatron first"] = error_of(mindspeed.adapt)
    found["changed"] = changed(before)
    found["changed"] += [name for name in sys.modules if name.startswith("mindspeed.")]
    return found


def changeable():
    """What adapting a process replaces."""
    import torch

    names = "torch.cuda", "torch.empty", "Tensor.cuda", "Tensor.type", "init_process_group"
    owners = torch, torch, torch.Tensor, torch.Tensor, torch.distributed
    return {n: getattr(o, n.rpartition(".")[2]) for n, o in zip(names, owners, strict=True)}


def changed(before):
    return [name for name, value in changeable().items() if value is not before[name]]


def real_mindspeed():
    absent.torchair()
    import torch

    mindspeed.adapt()

    from mindspeed.patch_utils import MindSpeedPatchesManager

    from slime_npu import patching

    def chosen():
        return {
            name: (patch.final_patch_func.__qualname__, len(patch.wrappers))
            for name, patch in MindSpeedPatchesManager.patches_info.items()
            if hasattr(patch.final_patch_func, "__qualname__")
        }

    def context():
        return sum("context_parallel" in name or "ring" in name for name in chosen())

    def made_by_mindspeed():
        function = parallel_state.initialize_model_parallel
        return "/mindspeed/core/context_parallel/" in function.__code__.co_filename

    import megatron.core.jit
    from megatron.core import parallel_state

    found = {"type": torch.ones(1, device="cuda").type()}
    found["our patches"] = [patch.target for patch in patching.applied()]
    found["jit_fuser"] = megatron.core.jit.jit_fuser.__module__
    found["first choice"] = context()
    first = made_by_mindspeed()
    args = {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}
    mindspeed.repatch(argparse.Namespace(**args))
    found["from a Namespace"] = chosen()
    found["with context parallelism"] = context()
    found["its initialize_model_parallel"] = [first, made_by_mindspeed()]
    mindspeed.repatch(args)
    found["from a dict"] = chosen()
    mindspeed.repatch(args)
    found["again"] = chosen()
    address = f"file://{sys.argv[2]}.store"
    torch.distributed.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    seven = torch.full((1,), 7.0, device="cuda")
    torch.distributed.broadcast(seven, 0)
    found["broadcast"] = seven.tolist()
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(globals()[sys.argv[1]]()))
