"""SGLang's own Qwen3-VL code on NPUs, against transformers, and the arguments it is served with.

SGLang is the release on the package index; it runs in a process of its own (`observe`), as it needs
stand-ins for packages that are on no index, which no other test should meet.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import absent
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_npu import sglang, simulator

DEPTH, DEEPSTACK = 3, (0, 1)
WORDS = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1).filter(str.isidentifier)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `observe` saw, and its log."""
    path = tmp_path_factory.mktemp("sglang") / "seen.json"
    done = subprocess.run(
        [sys.executable, __file__, path], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


@pytest.mark.reference
def test_the_default_position_embedding_is_not_the_models(seen):
    assert seen["default"]["positions"] > 1
    assert seen["default"]["output"] > 0.1


@pytest.mark.reference
def test_with_our_arguments_the_vision_tower_computes_what_transformers_computes(seen):
    assert seen["ours"]["positions"] < 1e-5
    assert seen["ours"]["output"] < 2e-6
    assert seen["ours"]["shape"] == [23, 64 * (1 + len(DEEPSTACK))]


@pytest.mark.reference
def test_torchs_attention_and_the_npus_agree(seen):
    assert seen["torch attention"]["output"] < 2e-6


@pytest.mark.plumbing
def test_with_our_arguments_attention_in_the_vision_tower_is_the_npus(seen):
    assert seen["ours"]["calls"]["_npu_flash_attention_unpad"] == DEPTH
    assert "_npu_flash_attention_unpad" not in seen["default"]["calls"]


@pytest.mark.plumbing
def test_rope_in_the_vision_tower_is_the_npus(seen):
    assert seen["ours"]["calls"]["npu_rotary_mul"] == 2 * DEPTH


@pytest.mark.reference
def test_deepstack_is_added_after_the_residual(seen):
    assert seen["deepstack"]["error"] < 1e-5
    assert seen["deepstack"]["residual"] == 0
    assert seen["deepstack"]["calls"] == {"npu_add_rms_norm": 1}


@pytest.mark.reference
def test_the_phase_of_rope_is_computed_in_float32(seen):
    assert seen["rope"]["bfloat16 cache"] < 2**-8


@pytest.mark.reference
def test_bfloat16_queries_meet_a_float32_cache(seen):
    assert seen["rope"]["float32 cache"] < 2**-7
    assert seen["rope"]["calls"] == {}


@pytest.mark.plumbing
def test_sglang_takes_our_arguments(seen):
    assert seen["arguments"] == sglang.server_arguments(chunked_prefill_size=32768)


def test_what_is_given_is_kept():
    assert sglang.server_arguments(tp_size=4, disable_radix_cache=False) == {
        "device": "npu",
        "tp_size": 4,
        "disable_radix_cache": False,
        "mm_attention_backend": "ascend_attn",
        "enable_precise_embedding_interpolation": True,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "cuda"},
        {"mm_enable_dp_encoder": True},
        {"enable_precise_embedding_interpolation": False},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_is_wrong_on_npu_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* is refused"):
        sglang.server_arguments(**wrong)


def test_what_is_right_anyway_is_not_refused():
    assert sglang.server_arguments(mm_enable_dp_encoder=False)["mm_enable_dp_encoder"] is False


def test_the_command_line_is_slimes_with_its_prefix():
    words = sglang.command_line(
        {"device": "npu", "disable_radix_cache": True, "log": None, "bs": [1, 2], "js": {"a": 1}},
        "--sglang-",
    )
    assert words == [
        *("--sglang-device", "npu", "--sglang-disable-radix-cache"),
        *("--sglang-bs", "1", "2", "--sglang-js", '{"a": 1}'),
    ]


@given(st.dictionaries(WORDS, st.booleans() | st.integers(0) | WORDS))
def test_a_command_line_says_what_the_arguments_say(arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, value in arguments.items():
        option = f"--x-{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(option, dest=name, action="store_true")
        else:
            parser.add_argument(option, dest=name, type=type(value))
    assert vars(parser.parse_args(sglang.command_line(arguments, "--x-"))) == arguments


# -- in SGLang's own process -----------------------------------------------------------------------


def observe() -> dict:
    """Runs SGLang's vision tower, norm and rope on a simulated NPU; what they gave, as data."""
    stand_in()
    import torch
    from sglang.srt import distributed, server_args
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

    def serve(**arguments):
        arguments = server_args.ServerArgs(model_path="dummy", **arguments)
        server_args.set_global_server_args_for_scheduler(arguments)
        return arguments

    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    wanted = sglang.server_arguments(chunked_prefill_size=32768)
    parsed = parser.parse_args(["--model-path", "dummy", *sglang.command_line(wanted)])
    parsed = server_args.ServerArgs.from_cli_args(parsed)

    torch.npu.set_device(0)
    serve(device="npu")
    address = f"file://{sys.argv[1]}.store"
    distributed.init_distributed_environment(1, 0, address, 0, backend="hccl")
    distributed.initialize_model_parallel()
    set_attention_groups()
    found = {"arguments": {name: getattr(parsed, name) for name in wanted}}
    with torch.inference_mode():
        found["default"] = tower(serve(device="npu"))
        found["ours"] = tower(serve(**sglang.server_arguments()))
        found["torch attention"] = tower(
            serve(**sglang.server_arguments(mm_attention_backend="sdpa"))
        )
        found["deepstack"] = deepstack(RMSNorm)
        found["rope"] = rope(RotaryEmbedding)
    return found


def tower(arguments) -> dict:
    """SGLang's tower and transformers' with the same random weights, on the same two images."""
    import torch
    from sglang.srt.models.qwen3_vl import Qwen3VLMoeVisionModel
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    config = Qwen3VLVisionConfig(
        depth=DEPTH,
        hidden_size=144,  # two heads of 72, the 8B model's head size
        num_heads=2,
        intermediate_size=96,
        patch_size=4,
        out_hidden_size=64,
        num_position_embeddings=64,
        deepstack_visual_indexes=list(DEEPSTACK),
    )
    torch.manual_seed(0)
    theirs = Qwen3VLVisionModel._from_config(config, attn_implementation="eager").eval()
    torch.nn.init.normal_(theirs.pos_embed.weight)
    with torch.device("npu"):
        ours = Qwen3VLMoeVisionModel(config)
    renamed = {
        name.replace("attn.qkv.", "attn.qkv_proj."): w for name, w in theirs.state_dict().items()
    }
    assert ours.load_weights(renamed.items()) == set(dict(ours.named_parameters()))

    grid = torch.tensor([[1, 6, 10], [2, 4, 4]])  # an image, and a video of two frames
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4)
    simulator.calls().clear()
    got = ours(pixels.npu(), grid).cpu()
    calls = dict(simulator.calls())
    output, deep = theirs(pixels, grid)
    positions = ours.fast_pos_embed_interpolate(grid).cpu()
    return {
        "positions": distance(positions, theirs.fast_pos_embed_interpolate(grid)),
        "output": distance(got, torch.cat([output, *deep], 1)),
        "shape": list(got.shape),
        "calls": calls,
    }


def deepstack(norm_class) -> dict:
    """SGLang's norm, given a deepstack embedding, against transformers' order."""
    import torch
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

    hidden, residual, addition = torch.randn(3, 5, 64)
    theirs = Qwen3VLTextRMSNorm(64, eps=1e-6)
    torch.nn.init.normal_(theirs.weight)
    ours = norm_class(64, eps=1e-6).npu()
    ours.weight.data.copy_(theirs.weight)
    simulator.calls().clear()
    got, carried = ours(hidden.npu(), residual.npu(), post_residual_addition=addition.npu())
    return {
        "error": distance(got.cpu(), theirs((hidden + residual) + addition)),
        "residual": distance(carried.cpu(), (residual + addition) + hidden),
        "calls": dict(simulator.calls()),
    }


def rope(rope_class) -> dict:
    """SGLang's rotary embedding at far positions against the same in float64."""
    import torch

    size, base = 128, 5_000_000
    position = torch.tensor([0, 1, 1000, 30_000])
    phase = position[:, None].double() * base ** -(torch.arange(0, size, 2).double() / size)
    exact = torch.cat([phase.cos(), phase.sin()], -1)
    made = {
        dtype: rope_class(size, size, 32768, base, True, dtype).npu()
        for dtype in (torch.bfloat16, torch.float32)
    }
    query, key = torch.randn(2, len(position), 2 * size).bfloat16()
    simulator.calls().clear()
    turned, _ = made[torch.float32].forward_npu(position.npu(), query.npu(), key.npu())
    first, second = query.double().view(-1, 2, 2, size // 2).unbind(2)
    cos, sin = exact[:, None].chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return {
        "bfloat16 cache": distance(made[torch.bfloat16].cos_sin_cache.cpu()[position], exact),
        "float32 cache": distance(turned.cpu(), expected.flatten(1)) / float(expected.abs().max()),
        "calls": dict(simulator.calls()),
    }


def distance(one, other) -> float:
    return float((one.double() - other.double()).abs().max())


def set_attention_groups() -> None:
    """One rank: what the scheduler sets up before it makes a model."""
    from sglang.srt import distributed
    from sglang.srt.layers import dp_attention

    dp_attention._ATTN_TP_RANK, dp_attention._ATTN_TP_SIZE = 0, 1
    dp_attention._ATTN_TP_GROUP = distributed.get_tp_group()


def stand_in() -> None:
    absent.atb(Path(sys.argv[1]).parent)
    absent.torchair()
    absent.sgl_kernels()
    absent.torchvision()
    import torch_npu
    from torch_npu._init.patches.monkey_patches import _apply_patches

    torch_npu._apply_patches = _apply_patches  # its name up to torch_npu 2.12


if __name__ == "__main__":
    os.environ |= {"TORCHDYNAMO_DISABLE": "1"}
    Path(sys.argv[1]).write_text(json.dumps(observe()))
