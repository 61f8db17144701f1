"""Megatron on NPU: names and weights of Qwen3-VL, value heads, and training as on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_npu.megatron import (
    global_name,
    loaders,
    qwen3_vl_from_hf,
    qwen3_vl_to_hf,
    value_head,
)

reference = pytest.mark.reference
plumbing = pytest.mark.plumbing


# Names

wrappers = st.integers(0, 3).map("module.".__mul__)
parameters = st.sampled_from(
    [
        "mlp.linear_fc1.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "input_layernorm.weight",
    ]
)
counts = st.integers(0, 200)


@reference
@given(wrappers, counts, counts, parameters)
def test_a_language_models_layer_gets_the_offset(
    wrapper: str, layer: int, offset: int, rest: str
) -> None:
    name = f"{wrapper}language_model.decoder.layers.{{}}.{rest}"
    assert global_name(name.format(layer), offset) == name.format(layer + offset)


@reference
@given(wrappers, counts, counts, parameters)
def test_every_other_name_stays(wrapper: str, layer: int, offset: int, rest: str) -> None:
    for inner in (
        f"vision_model.decoder.layers.{layer}.{rest}",  # Bridge from v0.4.0 on
        f"vision_model.blocks.{layer}.attn.qkv.weight",
        f"vision_model.language_model.decoder.layers.{layer}.{rest}",
        f"decoder.layers.{layer}.{rest}",  # a text model's: slime adds the offset itself
        "language_model.embedding.word_embeddings.weight",
        "language_model.output_layer.weight",
    ):
        assert global_name(wrapper + inner, offset) == wrapper + inner


@reference
@given(wrappers, counts, counts, counts, parameters)
def test_offsets_add_up(wrapper: str, layer: int, one: int, two: int, rest: str) -> None:
    name = f"{wrapper}language_model.decoder.layers.{layer}.{rest}"
    assert global_name(global_name(name, one), two) == global_name(name, one + two)


# Weights


class Checkpoint(dict[str, Any]):
    """A checkpoint in memory, read as slime reads one."""

    get_tensor = dict.__getitem__


sizes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))


def describe(groups: int, queries: int, head: int, hidden: int) -> tuple[Namespace, Namespace]:
    heads = groups * queries
    args = Namespace(
        num_attention_heads=heads, num_query_groups=groups, kv_channels=head, hidden_size=hidden
    )
    return args, Namespace(text_config=Namespace(num_key_value_heads=groups))


@reference
@settings(deadline=None)
@given(sizes, st.sampled_from(["weight", "bias"]))
def test_queries_keys_and_values_come_back_as_they_went(
    size: tuple[int, int, int, int], kind: str
) -> None:
    import torch

    groups, queries, head, hidden = size
    args, config = describe(*size)
    name = f"module.module.language_model.decoder.layers.7.self_attention.linear_qkv.{kind}"
    rows = groups * (queries + 2) * head
    whole = torch.randn(rows, hidden) if kind == "weight" else torch.randn(rows)
    parts = qwen3_vl_to_hf(args, name, whole)
    layer = "model.language_model.layers.7.self_attn"
    assert [part for part, _ in parts] == [f"{layer}.{p}_proj.{kind}" for p in "qkv"]
    assert [len(part) for _, part in parts] == [groups * n * head for n in (queries, 1, 1)]
    assert torch.equal(qwen3_vl_from_hf(name, Checkpoint(parts), config), whole)


@reference
def test_a_groups_queries_stand_before_its_key_and_its_value() -> None:
    import torch

    args, _ = describe(2, 2, 1, 1)
    name = "language_model.decoder.layers.0.self_attention.linear_qkv.bias"
    parts = dict(qwen3_vl_to_hf(args, name, torch.arange(8)))
    assert [part.tolist() for part in parts.values()] == [[0, 1, 4, 5], [2, 6], [3, 7]]


@reference
def test_heads_without_a_size_share_the_hidden_one() -> None:
    import torch

    args, _ = describe(2, 2, 3, 12)
    args.kv_channels = None
    name = "language_model.decoder.layers.0.self_attention.linear_qkv.weight"
    shapes = [tuple(part.shape) for _, part in qwen3_vl_to_hf(args, name, torch.zeros(24, 12))]
    assert shapes == [(12, 12), (6, 12), (6, 12)]


@reference
@pytest.mark.parametrize(
    "name",
    [
        "module.module.mtp.layers.0.eh_proj.weight",
        "module.module.language_model.decoder.layers.0.mlp.experts.linear_fc1.weight0",
        "module.module.language_model.decoder.layers.0.self_attention.linear_gate.weight",
        "module.module.decoder",
    ],
)
def test_a_parameter_no_qwen3_vl_has_is_an_error(name: str) -> None:
    import torch

    args, config = describe(1, 1, 1, 1)
    bare = name.removeprefix("module.module.").removeprefix("language_model.")
    with pytest.raises(ValueError, match=bare):
        qwen3_vl_to_hf(args, name, torch.zeros(3, 1))
    with pytest.raises(ValueError, match=bare):
        qwen3_vl_from_hf(name, Checkpoint(), config)


@reference
def test_tied_embeddings_are_the_output_too() -> None:
    import torch

    embeddings = torch.randn(3, 2)
    tied = Checkpoint({"model.language_model.embed_tokens.weight": embeddings})
    name = "module.module.language_model.output_layer.weight"
    assert qwen3_vl_from_hf(name, tied, None) is embeddings
    untied = Checkpoint(tied | {"lm_head.weight": (head := torch.randn(3, 2))})
    assert qwen3_vl_from_hf(name, untied, None) is head


@reference
def test_a_value_heads_bias_starts_at_zero() -> None:
    name = "module.module.language_model.output_layer.bias"
    assert qwen3_vl_from_hf(name, Checkpoint(), None).tolist() == [0.0]


@reference
def test_slimes_table_learns_the_dense_model_only() -> None:
    assert loaders() == {"qwen3_vl": qwen3_vl_from_hf}


# Value heads


def slimes() -> Any:
    """What slime has in its model_provider module: a head's class, and what makes providers."""
    import torch
    from megatron.core import tensor_parallel

    class LinearForLastLayer(torch.nn.Linear):
        def __init__(self, input_size: int, output_size: int, *, config: Any) -> None:
            super().__init__(input_size, output_size)
            self.sequence_parallel = config.sequence_parallel
            if self.sequence_parallel:
                self.weight.sequence_parallel = True

        def forward(
            self, input_: Any, weight: Any = None, runtime_gather_output: Any = None
        ) -> Any:
            logits = super().forward(input_)
            if self.sequence_parallel:
                gather = tensor_parallel.gather_from_sequence_parallel_region
                logits = gather(logits, tensor_parallel_output_grad=False)
            return logits, None

    names: dict[str, Any] = {"LinearForLastLayer": LinearForLastLayer, "__name__": "model_provider"}
    source = """
def get_model_provider_func(args, role="actor"):
    def model_provider(pre_process=True, post_process=True, vp_stage=None):
        model = args.provide(pre_process, post_process, vp_stage)
        if role == "critic" and post_process and args.has_head:
            model.output_layer = LinearForLastLayer(
                input_size=model.config.hidden_size, output_size=1, config=model.config
            )
        return model
    return model_provider
"""
    exec(source, names)
    return names["get_model_provider_func"]


def critics(checkpoint: Path, tp: int) -> dict[str, dict[str, Any]]:
    """Value heads under sequence parallelism: by slime alone, moved, and made."""
    import inspect

    import torch

    tiny_models.start(tp)
    tiny_models.use_layers("MindSpeedTE")
    from slime_npu.qwen3_vl import provider

    def critic(has_head: bool, mended: bool) -> dict[str, Any]:
        args = tiny_models.arguments(checkpoint, tp, transformer_impl="transformer_engine")
        args.has_head = has_head
        args.provide = provider(args, tiny_models.config(args))
        get_provider = value_head(slimes()) if mended else slimes()
        provide = get_provider(args, "critic")
        model = provide(pre_process=True, post_process=True)
        outer = hasattr(model, "output_layer")
        if outer:  # to where it belongs, but its bias is not marked
            model.language_model.output_layer = model.output_layer
            del model.output_layer
        head = model.language_model.output_layer
        tiny_models.load(model, checkpoint)
        with torch.no_grad():
            head.weight.copy_(torch.linspace(-1, 1, head.weight.numel()).view_as(head.weight))
        wrapped = tiny_models.wrap(model.npu())
        values = wrapped(**tiny_models.on_npu(tiny_models.prompt()))
        (values.float() ** 2).sum().backward()
        tiny_models.finalize(wrapped)
        return {
            "outer": outer,
            "head": type(head).__name__,
            "shape": tuple(values.shape),
            "marked": getattr(head.bias, "sequence_parallel", False),
            "bias": head.bias.main_grad.cpu(),
            "weight": head.weight.main_grad.cpu(),
            "parameters": list(inspect.signature(provide).parameters),
            "actor's": type(get_provider(args, "actor")().language_model.output_layer).__name__,
            "first stage's": hasattr(provide(post_process=False).language_model, "output_layer"),
        }

    return {
        "slime's": critic(has_head=True, mended=False),
        "moved": critic(has_head=True, mended=True),
        "made": critic(has_head=False, mended=True),
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def alone(ranks: Any, checkpoint: Path) -> dict[str, dict[str, Any]]:
    [rank] = ranks(critics, 1, checkpoint, 1)
    return rank


@pytest.fixture(scope="module")
def pair(ranks: Any, checkpoint: Path) -> list[dict[str, dict[str, Any]]]:
    return ranks(critics, 2, checkpoint, 2)


@plumbing
@pytest.mark.parametrize("how", ["moved", "made"])
def test_a_vision_language_critics_head_makes_its_values(
    alone: dict[str, dict[str, Any]], pair: list[dict[str, dict[str, Any]]], how: str
) -> None:
    for rank in (alone, *pair):
        critic = rank[how]
        assert not critic["outer"]
        assert critic["head"] == "LinearForLastLayer"
        assert critic["shape"] == (1, 20, 1)
        assert critic["parameters"] == ["pre_process", "post_process", "vp_stage"]
        assert critic["actor's"] == "ColumnParallelLinear"
        assert not critic["first stage's"]


@plumbing
@pytest.mark.parametrize("how", ["moved", "made"])
def test_a_value_heads_gradients_are_those_of_one_rank(
    alone: dict[str, dict[str, Any]], pair: list[dict[str, dict[str, Any]]], how: str
) -> None:
    import torch

    assert not alone[how]["marked"]
    for rank in pair:
        assert rank[how]["marked"]
        for part in ("weight", "bias"):
            torch.testing.assert_close(rank[how][part], alone[how][part], rtol=1e-4, atol=1e-4)


@plumbing
def test_without_the_mark_ranks_biases_drift_apart(pair: list[dict[str, dict[str, Any]]]) -> None:
    import torch

    one, two = (rank["slime's"] for rank in pair)
    assert one["outer"]
    assert torch.equal(one["weight"], two["weight"])
    assert not torch.equal(one["bias"], two["bias"])


@plumbing
def test_a_slime_that_keeps_the_heads_class_elsewhere_is_an_error() -> None:
    from slime_npu.megatron import value_head

    def get_model_provider_func(args: Namespace, role: str) -> Any:
        return lambda **_: Namespace(post_process=True)

    with pytest.raises(RuntimeError, match="defines get_model_provider_func but no LinearForLast"):
        value_head(get_model_provider_func)(Namespace(), "critic")()


# The queue's changes on the installed megatron-core


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.patched("megatron", tmp_path_factory.mktemp("patched"))


FUSER = """
import torch
if hasattr(torch, "npu"):
    from torch_npu.contrib import transfer_to_npu
from megatron.core import jit
from megatron.core.fusions import fused_bias_swiglu
compiled = hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable")
print(jit.__file__, jit.jit_fuser is torch.compile, compiled)
"""


def fuser(folder: Path | None, npu: bool) -> list[str]:
    """megatron.core.jit's file, whether jit_fuser is torch.compile, whether functions go by it."""
    paths = [*([str(folder)] if folder else []), os.environ["PYTHONPATH"]]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
    if not npu:  # a host without CANN; torch must not load torch_npu there
        environment |= {"SLIME_NPU": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-W", "ignore", "-c", FUSER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


@plumbing
def test_with_the_change_jit_fuser_is_eager_on_npu(queue: Path) -> None:
    file, *fused = fuser(queue, npu=True)
    assert Path(file).is_relative_to(queue)
    assert fused == ["False", "False"]


@plumbing
def test_with_the_change_jit_fuser_is_upstreams_on_cpu(queue: Path) -> None:
    file, *fused = fuser(queue, npu=False)
    assert Path(file).is_relative_to(queue)
    assert fused == fuser(None, npu=False)[1:] == ["True", "True"]


def train(tp: int, devices: list[str], folder: Path | None) -> dict[str, dict[str, Any]]:
    """Three steps of a tiny Qwen3 with Megatron's own DDP; losses, and this rank's gradients."""
    import torch

    if folder:
        sys.path.insert(0, str(folder))
    else:
        torch.compiler.set_stance("force_eager")  # else nothing runs on NPU
    tiny_models.start(tp)
    from megatron.core import jit

    assert jit.__file__.startswith(str(folder)) == bool(folder)
    return {device: train_on(device, tp) for device in devices}


def train_on(device: str, tp: int) -> dict[str, Any]:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    if device == "cpu":
        tiny_models.stay_on_cpu()
    args = tiny_models.arguments(Path(), tp, sequence_parallel=False)
    torch.manual_seed(0)
    model = GPTModel(
        tiny_models.config(args, bias_activation_fusion=True, bias_dropout_fusion=True),
        get_gpt_layer_local_spec(qk_layernorm=True),
        args.padded_vocab_size,
        args.max_position_embeddings,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    wrapped = tiny_models.wrap(model.to(device))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, args.vocab_size, (2, 17), generator=generator, device="cpu")
    inputs, labels = tokens[:, :-1].to(device), tokens[:, 1:].contiguous().to(device)
    places = torch.arange(16).expand(2, -1).to(device)
    mask = tiny_models.causal_mask(16).to(device)
    losses = []
    for _ in range(3):
        wrapped.zero_grad_buffer()
        loss = wrapped(inputs, places, mask, labels=labels).mean()
        loss.backward()
        tiny_models.finalize(wrapped)
        for parameter in wrapped.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "gradients": {name: p.main_grad.cpu() for name, p in model.named_parameters()},
        "devices": {p.device.type for p in model.parameters()},
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["TP 1", "TP 2"])
def upstream(ranks: Any, request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return ranks(train, request.param, request.param, ["npu", "cpu"], None)


def assert_trains_alike(npu: dict[str, Any], cpu: dict[str, Any]) -> None:
    import torch

    assert npu["devices"] == {"npu"} and cpu["devices"] == {"cpu"}
    assert npu["losses"] == cpu["losses"]
    for name, gradient in cpu["gradients"].items():
        assert torch.equal(npu["gradients"][name], gradient), name
    assert npu["losses"][2] < npu["losses"][0]


@plumbing
def test_upstreams_megatron_trains_on_an_npu_as_on_the_cpu(
    upstream: list[dict[str, dict[str, Any]]],
) -> None:
    for rank in upstream:
        assert_trains_alike(rank["npu"], rank["cpu"])


@plumbing
def test_megatron_with_the_queues_changes_trains_on_an_npu_as_on_the_cpu(
    ranks: Any, queue: Path, upstream: list[dict[str, dict[str, Any]]]
) -> None:
    changed = ranks(train, len(upstream), len(upstream), ["npu"], queue)
    for rank, upstreams in zip(changed, upstream, strict=True):
        assert_trains_alike(rank["npu"], upstreams["cpu"])
