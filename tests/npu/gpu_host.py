"""What a host without an NPU computes with a source tree: a program, for upstream's and for ours.

    PYTHONPATH=TREE python gpu_host.py GROUP

Prints what the checks of one group answer, as JSON. It computes on the CPU, as a host without an
NPU does where it has no GPU either: what is shown is that Python takes upstream's way. Packages
with kernels for GPUs (Transformer Engine, sgl_kernel, vLLM, Apex, torchvision) are stand-ins that
nothing here calls; in the group `megatron_alone` the first and Apex are absent.
"""

import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

STAND_INS = {"transformer_engine", "sgl_kernel", "vllm", "apex", "torchvision"}


class _Nothing(type):
    """A class that stands for anything its module may be asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def without_npu(absent: set[str]) -> None:
    """Make this process one of a host that has no torch_npu, nor the packages that are absent."""
    STAND_INS.difference_update(absent)
    sys.modules["torch_npu"] = None  # type: ignore[assignment]
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if os.environ.get("SLIME_NPU") == "absent":
        sys.modules["slime_npu"] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, _Finder())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (  # Megatron asks which it is
        "2.8.0" if name.replace("_", "-") == "transformer-engine" else version(name)
    )


def said(tensor: Any) -> str:
    """A tensor's type, shape and every bit."""
    content = tensor.detach().contiguous().view(-1).double().numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def named(thing: object) -> str:
    """A class or function by its name; other things by how they print."""
    return getattr(thing, "__qualname__", None) or repr(thing)


# -- Megatron core ---------------------------------------------------------------------------------


def megatron_fuser() -> dict[str, Any]:
    import torch
    from megatron.core import jit

    answers = {"at first": jit.jit_fuser is torch.compile}
    jit.disable_jit_fuser()
    answers["disabled"] = named(jit.jit_fuser)
    jit.enable_jit_fuser()
    answers["enabled"] = jit.jit_fuser is torch.compile
    from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu

    for function in (fused_bias_swiglu.swiglu, fused_bias_dropout.bias_dropout_add_fused_train):
        answers[named(function)] = hasattr(function, "_torchdynamo_orig_callable")
    return answers


def megatron_types() -> dict[str, Any]:
    import torch
    from megatron.core.transformer import module

    answers: dict[str, Any] = {
        name: [kind.__name__ for kind in value]
        for name, value in vars(module).items()
        if name.endswith("_TYPES")
    }
    given = [torch.ones(2, dtype=kind) for kind in (torch.float, torch.half, torch.bfloat16)]
    nested = (given[0], [given[1], given[2]], torch.ones(2, dtype=torch.long), "text")

    def kinds(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [kinds(each) for each in value]
        return str(getattr(value, "dtype", value))

    answers["fp16"] = kinds(module.fp32_to_float16(nested, lambda value: value.half()))
    answers["fp32"] = kinds(module.float16_to_fp32(nested))
    return answers


def megatron_specs() -> dict[str, Any]:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    def tree(spec: Any) -> Any:
        if not isinstance(spec, specs.ModuleSpec):
            return named(spec)
        inner = vars(spec.submodules) if spec.submodules else {}
        return {named(spec.module): {name: tree(part) for name, part in inner.items()}}

    answers = {"names": sorted(name for name in vars(specs) if name != "is_npu")}
    for name in ("get_gpt_layer_local_spec", "get_gpt_layer_with_transformer_engine_spec"):
        try:
            answers[name] = tree(getattr(specs, name)())
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def megatron_training() -> dict[str, Any]:
    """Three steps of a tiny GPT: losses, and every gradient."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: torch.device("cpu")  # where buffers are made
    CudaRNGStatesTracker.fork = lambda tracker: nullcontext()  # nothing drops out
    torch.manual_seed(7)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True,
        hidden_dropout=0.0, attention_dropout=0.0, gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, pipeline_dtype=torch.float32,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(32, (2, 8))
    positions = torch.arange(8).expand(2, -1)
    mask = torch.ones(2, 1, 8, 8).triu(1).bool()
    answers: dict[str, Any] = {}
    for step in range(3):
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        answers[f"loss {step}"] = loss.item()
    for name, parameter in model.named_parameters():
        answers[name] = said(parameter.grad)
    return answers


# -- Megatron-Bridge -------------------------------------------------------------------------------


def bridge_names() -> dict[str, Any]:
    import torch
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    names = {name for names in AutoMapping._MODULE_TYPE_REGISTRY.values() for name in names}
    names |= {"TELinear", "TELayerNormColumnParallelLinear", "LayerNorm", "Linear", "TE", "MTE"}
    answers = {}
    for name in sorted(names):
        for parameter in ("decoder.weight", "decoder.layer_norm_weight"):
            mapping = AutoMapping(parameter, "model.weight")
            module = type(name, (torch.nn.Module,), {"parallel_mode": "row"})()
            try:
                answers[f"{name} {parameter}"] = mapping._detect_parallelism_type(module)
            except ValueError as error:
                answers[f"{name} {parameter}"] = type(error).__name__
    return answers


def bridge_deepstack() -> dict[str, Any]:
    import torch
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import split_deepstack_embs

    torch.manual_seed(7)
    where = torch.rand(2, 8) < 0.5
    answers = {}
    for size in (1, 2, 4):
        for rank in range(size):
            given = [torch.randn(int(where.sum()), 4, requires_grad=True) for _ in range(3)]
            mask, parts = split_deepstack_embs(where, given, tp_size=size, tp_rank=rank)
            torch.cat([part * (n + 1) for n, part in enumerate(parts)]).sum().backward()
            answers[f"{rank} of {size}"] = [
                said(mask), *map(said, parts), *(said(each.grad) for each in given)
            ]  # fmt: skip
    return answers


def bridge_recompute() -> dict[str, Any]:
    """A recomputed block of three layers, and what recomputation is given."""
    import torch
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import transformer_block as block

    handed = []

    def checkpoint(forward: Callable[..., Any], distribute: bool, *arguments: Any) -> Any:
        handed.append([type(each).__name__ for each in arguments])
        return forward(*arguments)

    block.tensor_parallel.checkpoint = checkpoint
    torch.manual_seed(7)
    weight = torch.randn(4, 4, requires_grad=True)

    class Layer:
        def __init__(self, number: int) -> None:
            self.layer_number = number

        def __call__(self, hidden_states: Any, context: Any, **others: Any) -> Any:
            return hidden_states @ weight * self.layer_number, context

    layers = [Layer(number + 1) for number in range(3)]
    answers: dict[str, Any] = {}
    for method in ("uniform", "block"):
        this = types.SimpleNamespace(
            config=types.SimpleNamespace(
                recompute_method=method, recompute_num_layers=1, fp8=None, fp4=None,
                distribute_saved_activations=False,
            ),
            num_layers_per_pipeline_rank=3, pre_process=True, layers=layers,
            _get_layer=layers.__getitem__,
            _deepstack_process=lambda hidden, mask, embeds: hidden + embeds.sum(),
        )  # fmt: skip
        hidden = torch.randn(2, 1, 4, requires_grad=True)
        embeds = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
        out = block.Qwen3VLTransformerBlock._checkpointed_forward(
            this, hidden, None, None, None, None, None, None, False,
            visual_pos_masks=torch.ones(1, 2).bool(), deepstack_visual_embeds=embeds,
        )  # fmt: skip
        out.sum().backward()
        answers[method] = [said(out), said(hidden.grad), *(said(each.grad) for each in embeds)]
    answers["handed"] = handed
    return answers


# -- SGLang ----------------------------------------------------------------------------------------


def sglang_compiled() -> dict[str, Any]:
    """How the functions that we keep eager on NPU are compiled."""
    import torch

    compiled = {}
    real = torch.compile

    def compile(function: Any = None, **options: Any) -> Any:
        def remember(function: Any) -> Any:
            options.pop("backend", None)
            compiled[named(function)] = {"disable": False} | options
            return real(function, **options)

        return remember if function is None else remember(function)

    torch.compile = compile
    import sglang.srt.layers.vocab_parallel_embedding
    import sglang.srt.managers.overlap_utils  # noqa: F401

    return {name: compiled[name] for name in (
        "get_masked_input_and_mask", "_resolve_future_token_ids",
    )}  # fmt: skip


def sglang_rope() -> dict[str, Any]:
    import torch
    from sglang.srt import server_args
    from sglang.srt.layers import rotary_embedding as rope

    server_args.set_global_server_args_for_scheduler(
        types.SimpleNamespace(rl_on_policy_target=None)
    )
    torch.manual_seed(7)
    answers = {}
    for size in (64, 128):
        plain = rope.RotaryEmbedding(size, size, 64, 10000, True, torch.float32)
        answers[f"cache {size}"] = said(plain.cos_sin_cache)
        query, key = torch.randn(5, 2 * size), torch.randn(5, size)
        for kind in (torch.float32, torch.bfloat16):
            rotated = plain.forward_native(torch.arange(5), query.to(kind), key.to(kind))
            answers[f"{size} {kind}"] = [said(each) for each in rotated]
        sections = [size // 4, size // 8, size // 8]
        many = rope.MRotaryEmbedding(size, size, 64, 10000, True, torch.float32, sections)
        rotate = getattr(many, "_forward_native", many.forward_native)
        rotated = rotate(torch.arange(15).view(3, 5), query, key)
        answers[f"sections {size}"] = [said(each) for each in rotated]
    return answers


def sglang_heads() -> dict[str, Any]:
    """What Qwen3's output head is made with."""
    import torch
    from sglang.srt.models import qwen3, qwen3_vl

    made: list[Any] = []

    class Head(torch.nn.Module):
        def __init__(self, *sizes: Any, **options: Any) -> None:
            super().__init__()
            made.append([*sizes, {"use_attn_tp_group": False} | options])

    class Whatever(torch.nn.Module):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__()

    alone = types.SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
    config = types.SimpleNamespace(
        vocab_size=32, hidden_size=8, tie_word_embeddings=False, vision_config=None,
        encoder_only=False, language_only=False,
    )  # fmt: skip
    qwen3.ParallelLMHead = qwen3_vl.ParallelLMHead = Head
    qwen3.get_pp_group = lambda: alone
    qwen3.Qwen3Model = qwen3.LogitsProcessor = qwen3.Pooler = Whatever
    qwen3.Qwen3ForCausalLM(config)
    return {"made": made}


def sglang_weights() -> dict[str, Any]:
    """Which parameters Qwen3-VL's load_weights writes, with a tied head and without."""
    import torch
    from sglang.srt.models import qwen3, qwen3_vl  # noqa: F401 - in this order, or they go in a circle

    answers = {}
    for tied in (True, False):
        parameters = {
            name: torch.nn.Parameter(torch.zeros(4, 2))
            for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
        }
        this = types.SimpleNamespace(
            config=types.SimpleNamespace(tie_word_embeddings=tied, encoder_only=False),
            pp_group=types.SimpleNamespace(is_first_rank=True, is_last_rank=True),
            named_parameters=lambda remove_duplicate=True, given=parameters: given.items(),
            model=types.SimpleNamespace(start_layer=0, end_layer=2),
        )
        weights = [
            (name, torch.full((4, 2), float(number + 1)))
            for number, name in enumerate(("lm_head.weight", "model.embed_tokens.weight"))
        ]
        qwen3_vl.Qwen3VLForConditionalGeneration.load_weights(this, iter(weights))
        answers[f"tied {tied}"] = {name: said(each) for name, each in parameters.items()}
    return answers


GROUPS = {
    "megatron": (megatron_fuser, megatron_types, megatron_specs),
    "megatron_alone": (megatron_specs, megatron_training),
    "bridge": (bridge_names, bridge_deepstack, bridge_recompute),
    "sglang": (sglang_compiled, sglang_rope, sglang_heads, sglang_weights),
}

if __name__ == "__main__":
    group = sys.argv[1]
    without_npu({"transformer_engine", "apex"} if group == "megatron_alone" else set())
    answers = {check.__name__: check() for check in GROUPS[group]}
    print("answers:", json.dumps(answers, sort_keys=True, default=str))
