"""Megatron-Bridge on NPU: weights there and back, a Qwen3-VL's output, and its gradients."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_npu.bridge import LOSS_MASK, flat_outputs

reference = pytest.mark.reference
plumbing = pytest.mark.plumbing

World = list[dict[str, Any]]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.patched("megatron-bridge", tmp_path_factory.mktemp("patched"))


# Bridge's models in one world


def world(
    qwen3: Path, qwen3_vl: Path, tp: int, pp: int, folder: Path | None, prefix: str
) -> dict[str, Any]:
    """What Bridge makes of both checkpoints on this rank."""
    import torch

    if folder:
        sys.path.insert(0, str(folder))
    torch.compiler.set_stance("force_eager")
    tiny_models.start(tp, pp)
    tiny_models.use_layers(prefix)
    tiny_models.import_bridge()
    import megatron.bridge
    from safetensors.torch import load_file

    assert megatron.bridge.__file__.startswith(str(folder)) == bool(folder)
    results: dict[str, Any] = {"tp": tp}
    for name, checkpoint in (("qwen3", qwen3), ("qwen3_vl", qwen3_vl)):
        bridge, model = build(checkpoint, tp, pp)
        bridge.load_hf_weights([model])
        exported = dict(bridge.export_hf_weights([model], cpu=True))
        results[name] = differences(load_file(checkpoint / "model.safetensors"), exported)

    whole = {}
    for name, parameter in tiny_models.named_parameters(model):
        whole |= ours(qwen3_vl, name, tiny_models.joined(name, parameter).cpu())
    results["ours"] = differences(exported, whole, missing_is_fine=pp > 1)

    results["sums"] = sums(tp)
    results["value head"] = load_critic(qwen3_vl, tp, pp)
    results["gradients"] = {}
    for recompute in (False, True) if folder and pp == 1 else (False,):
        full = {"recompute_granularity": "full", "recompute_method": "uniform"}
        changes = {**full, "recompute_num_layers": 1} if recompute else {}
        bridge, model = build(qwen3_vl, tp, pp, **changes)
        bridge.load_hf_weights([model])
        wrapped = tiny_models.wrap(model)
        logits = tiny_models.run(wrapped, tiny_models.on_npu(tiny_models.prompt()), weigh=square)
        results["logits"] = tiny_models.whole_vocabulary(logits)
        tiny_models.finalize(wrapped)
        results["gradients"][recompute] = {
            name: parameter.main_grad.cpu()
            for name, parameter in model.named_parameters()
            if name.startswith("vision_model.")
        }
    return results


def sums(tp: int) -> tuple[list[float], str]:
    """A gradient summed over ranks, each of which has its own; and what a wrong size says."""
    import torch

    from slime_npu.bridge import sum_gradients

    embeds = torch.zeros(3, requires_grad=True, device="npu")
    [same] = sum_gradients([embeds], tp)
    assert torch.equal(same, embeds)
    (same * (torch.distributed.get_rank() + 1)).sum().backward()
    with pytest.raises(ValueError) as error:
        sum_gradients([embeds], 3)
    return embeds.grad.tolist(), str(error.value)


def load_critic(checkpoint: Path, tp: int, pp: int) -> bool | None:
    """Whether a value head keeps its weights as Bridge loads a checkpoint; None without one."""
    import torch

    class LinearForLastLayer(torch.nn.Linear):
        pass

    bridge, model = build(checkpoint, tp, pp)
    language = model.language_model
    if language.post_process:
        language.output_layer = LinearForLastLayer(64, 1).npu()
        language.output_layer.weight.data.fill_(0.5)
    bridge.load_hf_weights([model])
    if not language.post_process:
        return None
    return bool((language.output_layer.weight == 0.5).all())


def square(logits: Any) -> Any:
    return logits.float() ** 2


def build(checkpoint: Path, tp: int, pp: int, **changes: Any) -> tuple[Any, Any]:
    """Bridge, and a model by its provider, prepared as slime's fork has it."""
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from slime_npu.bridge import prepare

    bridge = AutoBridge.from_hf_pretrained(str(checkpoint))
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.tensor_model_parallel_size = tp
    provider.pipeline_model_parallel_size = pp
    provider.sequence_parallel = tp > 1
    args = tiny_models.arguments(checkpoint, tp, pp, gradient_accumulation_fusion=False, **changes)
    prepare(provider, args)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    model = provider.provide(
        parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    )
    return bridge, model.npu()


def ours(checkpoint: Path, name: str, whole: Any) -> dict[str, Any]:
    from slime_npu.megatron import qwen3_vl_to_hf

    return dict(qwen3_vl_to_hf(tiny_models.arguments(checkpoint), name, whole))


def differences(
    wanted: dict[str, Any], found: dict[str, Any], missing_is_fine: bool = False
) -> list[str]:
    """Tensors that are not bit for bit what they should be, too many, or missing."""
    import torch

    names = found.keys() if missing_is_fine else wanted.keys() | found.keys()
    return sorted(
        name
        for name in names
        if name not in wanted
        or name not in found
        or wanted[name].dtype != found[name].dtype
        or not torch.equal(wanted[name], found[name])
    )


@pytest.fixture(scope="module")
def alone(ranks: Any, qwen3: Path, qwen3_vl: Path, queue: Path) -> World:
    return ranks(world, 1, qwen3, qwen3_vl, 1, 1, queue, "MindSpeedTE")


@pytest.fixture(scope="module")
def tensor_parallel(ranks: Any, qwen3: Path, qwen3_vl: Path, queue: Path) -> World:
    return ranks(world, 2, qwen3, qwen3_vl, 2, 1, queue, "MindSpeedTE")


@pytest.fixture(scope="module")
def pipeline_parallel(ranks: Any, qwen3: Path, qwen3_vl: Path, queue: Path) -> World:
    return ranks(world, 2, qwen3, qwen3_vl, 1, 2, queue, "MindSpeedTE")


@pytest.fixture(scope="module")
def upstream(ranks: Any, qwen3: Path, qwen3_vl: Path) -> World:
    """Tensor parallel, without the queue's changes, and so without MindSpeed's names."""
    return ranks(world, 2, qwen3, qwen3_vl, 2, 1, None, "TE")


@pytest.fixture(params=["alone", "tensor_parallel", "pipeline_parallel"])
def any_world(request: pytest.FixtureRequest) -> World:
    return request.getfixturevalue(request.param)


@plumbing
@pytest.mark.parametrize("model", ["qwen3", "qwen3_vl"])
def test_weights_come_back_bit_for_bit(any_world: World, model: str) -> None:
    for rank in any_world:
        assert rank[model] == []


@plumbing
def test_our_names_and_tensors_are_bridges(any_world: World) -> None:
    for rank in any_world:
        assert rank["ours"] == []


@pytest.fixture(scope="module")
def transformers_logits(qwen3_vl: Path) -> Any:
    import torch

    tiny_models.import_transformers()
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(qwen3_vl)
    with torch.no_grad():
        return model(**tiny_models.prompt()).logits


@reference
def test_a_qwen3_vl_in_megatron_says_what_transformers_says(
    any_world: World, transformers_logits: Any
) -> None:
    """Within 5e-6 where logits are around 1: float32, only the order of sums differs."""
    import torch

    assert transformers_logits.abs().max() > 1
    logits = any_world[-1]["logits"]
    torch.testing.assert_close(logits, transformers_logits, rtol=0, atol=5e-6)


@plumbing
def test_a_value_head_keeps_its_weights(any_world: World) -> None:
    *others, last = any_world
    assert last["value head"] is True
    assert {rank["value head"] for rank in others} <= {True, None}


# Arguments and names


@pytest.fixture(scope="module")
def prepared(ranks: Any, queue: Path) -> dict[str, Any]:
    [found] = ranks(prepare_all, 1, queue)
    return found


@plumbing
def test_the_provider_gets_what_the_arguments_say(prepared: dict[str, Any]) -> None:
    assert prepared["fields"] == {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
        "recompute_modules": ["core_attn"],
        "distribute_saved_activations": False,
        "gradient_accumulation_fusion": False,
        "variable_seq_lengths": True,
    }
    # MindSpeed's features ask the configuration, and Megatron's own has every argument
    assert prepared["others"] == "disable"
    assert prepared["missing"].startswith("SimpleNamespace has no field 'recompute_granularity'")
    assert prepared["patches"] == [
        "AutoMapping.hf_to_megatron",
        "MegatronModelBridge.build_conversion_tasks",
        "range_push",
        "range_pop",
    ]


@plumbing
def test_bridge_knows_all_of_mindspeeds_names(prepared: dict[str, Any]) -> None:
    for name, parallelism in {
        "MindSpeedTEColumnParallelLinear": "column",
        "MindSpeedTEColumnParallelGroupedLinear": "column",
        "MindSpeedTELayerNormColumnParallelLinear": "column",
        "MindSpeedTEPerformanceColumnParallelGroupedLinear": "column",
        "TEPerformanceColumnParallelGroupedLinear": "column",
        "MindSpeedTERowParallelLinear": "row",
        "MindSpeedTERowParallelGroupedLinear": "row",
        "MindSpeedTEPerformanceRowParallelGroupedLinear": "row",
        "MindSpeedTELayernorm": "replicated",
        "TELayernorm": "replicated",
        "LinearForLastLayer": "replicated",
    }.items():
        assert prepared["registry"][name] == parallelism, name


@plumbing
def test_a_fused_norm_is_whole_and_a_linear_goes_by_its_mode(
    ranks: Any, prepared: dict[str, Any]
) -> None:
    """What a registry of names cannot say, the fork's mindspeed_names.py does."""
    assert prepared["detected"] == ["replicated", "column", "row"]
    [upstream] = ranks(prepare_all, 1, None)
    assert upstream["detected"] == ["column", "column", None]


def prepare_all(folder: Path | None) -> dict[str, Any]:
    """Bridge's own Qwen3-VL provider, prepared twice; and how three weights would be cut."""
    if folder:
        sys.path.insert(0, str(folder))
    tiny_models.start()
    tiny_models.import_bridge()
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider

    from slime_npu.bridge import prepare
    from slime_npu.patching import applied

    fields = {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 3,
        "recompute_modules": ["core_attn"],
        "distribute_saved_activations": False,
        "gradient_accumulation_fusion": False,
        "variable_seq_lengths": True,
    }
    provider = Qwen3VLModelProvider(num_layers=4, hidden_size=64, num_attention_heads=4)
    for _ in range(2):
        prepare(provider, SimpleNamespace(**fields, hidden_size=1, moe_zero_memory="disable"))
    with pytest.raises(AttributeError) as error:
        prepare(SimpleNamespace(), SimpleNamespace(**fields))
    assert provider.hidden_size == 64
    registry = AutoMapping._MODULE_TYPE_REGISTRY

    def detected(class_name: str, weight: str) -> str | None:
        module = type(class_name, (), {"parallel_mode": "row"})()
        try:
            return AutoMapping(f"a.{weight}", "b")._detect_parallelism_type(module)
        except ValueError:
            return None

    return {
        "fields": {name: getattr(provider, name) for name in fields},
        "others": provider.moe_zero_memory,
        "missing": str(error.value),
        "patches": [patch.target.partition(":")[2] for patch in applied()],
        "detected": [
            detected("MindSpeedTELayerNormColumnParallelLinear", "layer_norm_weight"),
            detected("MindSpeedTELayerNormColumnParallelLinear", "weight"),
            detected("MindSpeedTELinear", "weight"),
        ],
        "registry": {name: kind for kind, names in registry.items() for name in names},
    }


class Model:
    """Qwen3VLModel's forward before Bridge v0.3.0, by its signature."""

    def forward(
        self,
        input_ids,
        position_ids=None,
        attention_mask=None,
        labels=None,
        inference_params=None,
        packed_seq_params=None,
        extra_block_kwargs=None,
        pixel_values=None,
        pixel_values_videos=None,
        image_grid_thw=None,
        video_grid_thw=None,
        image_input_mask=None,
    ):
        return input_ids, labels


@plumbing
def test_an_older_qwen3_vl_takes_slimes_loss_mask() -> None:
    patch = dataclasses.replace(LOSS_MASK, target=f"{__name__}:Model.forward")
    with pytest.raises(TypeError):
        Model().forward(1, loss_mask=2)
    assert patch.apply()
    try:
        assert Model().forward(1, labels=3, loss_mask=2) == (1, 3)
        assert Model().forward(1) == (1, None)
    finally:
        patch.undo()


# Gradients


@plumbing
def test_gradients_are_summed_over_the_ranks_that_cut(any_world: World) -> None:
    for rank, result in enumerate(any_world):
        gradient, error = result["sums"]
        size = result["tp"]
        expected = sum(range(1, size + 1)) if size > 1 else rank + 1
        assert gradient == [expected] * 3
        assert f"3 parts, but the tensor parallel group has {size} ranks" in error


@reference
@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 3))
def test_what_a_checkpoint_returns_in_lists_has_its_gradients(first: int, second: int) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    hidden = torch.tensor([1.0, 5.0], requires_grad=True)

    def function(count: int) -> Any:
        def layer(hidden: Any) -> tuple[Any, list[Any], None, list[Any]]:
            features = [weight * hidden * n for n in range(1, count + 1)]
            return hidden * weight, features, None, [hidden + weight]

        return layer

    def handler(layer: Any) -> Any:
        return checkpoint(layer, hidden, use_reentrant=True)

    def gradients(handle: Any) -> tuple[list[int], Any, Any]:
        weight.grad = hidden.grad = None
        lengths = []
        total = torch.zeros(())
        for count in (first, second):
            out, features, none, others = handle(function(count))
            assert none is None
            lengths += [len(features), len(others)]
            total = total + sum(part.square().sum() for part in (out, *features, *others))
        total.backward()
        return lengths, weight.grad, hidden.grad

    def direct(layer: Any) -> Any:
        return layer(hidden)

    lengths, *found = gradients(flat_outputs(handler))
    wanted_lengths, *wanted = gradients(direct)
    assert lengths == wanted_lengths
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    if first:  # upstream's fault, and why it must be mended
        assert not handler(function(first))[1][0].requires_grad


@reference
def test_a_vision_towers_gradients_are_those_of_tensor_parallel_1(
    alone: World, tensor_parallel: World
) -> None:
    import torch

    [one] = alone
    for rank in tensor_parallel:
        for name, gradient in one["gradients"][False].items():
            assert gradient.abs().max() > 0, name
            torch.testing.assert_close(
                rank["gradients"][False][name], gradient, rtol=1e-3, atol=1e-4, msg=name
            )


@reference
def test_without_the_change_deepstack_gradients_are_half(alone: World, upstream: World) -> None:
    import torch

    [one] = alone
    deepstack = [name for name in one["gradients"][False] if "deepstack_merger_list" in name]
    assert len(deepstack) == 2 * 6
    for rank in upstream:
        for name in deepstack:
            half = one["gradients"][False][name] / 2
            found = rank["gradients"][False][name]
            torch.testing.assert_close(found, half, rtol=1e-3, atol=1e-4, msg=name)


@reference
def test_recomputation_changes_no_gradient(alone: World, tensor_parallel: World) -> None:
    import torch

    for rank in (*alone, *tensor_parallel):
        for name, gradient in rank["gradients"][False].items():
            torch.testing.assert_close(
                rank["gradients"][True][name], gradient, rtol=1e-4, atol=1e-5, msg=name
            )
