"""Tiny random models on the real megatron-core, for the tests that need one.

`qwen3` and `qwen3_vl` save Hugging Face checkpoints; a head has 128 channels, and there are more
language layers than deepstack ones, as MindSpeed and the pipeline want it. `start` makes a rank
ready for Megatron, on a simulated NPU or on the CPU. `patched` copies an installed package with a
fork's recipes applied, in a process of its own since slime_npu knows nothing of `rebase`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
IMAGE, VIDEO, VISION_START, VISION_END = 151, 152, 150, 149

TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "rope_theta": 5000000.0,
    "dtype": "float32",
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [1, 2],
}


# Checkpoints


def qwen3_vl_config(**text: Any) -> Any:
    from transformers import Qwen3VLConfig

    rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    text = {**TEXT, "rope_scaling": rope, **text}
    return Qwen3VLConfig(
        text_config=text,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def qwen3_vl(folder: Path, **text: Any) -> Path:
    """A dense Qwen3-VL with random weights, as a checkpoint in `folder`."""
    import_transformers()
    from transformers import Qwen3VLForConditionalGeneration

    return _save(Qwen3VLForConditionalGeneration(qwen3_vl_config(**text)), folder)


def qwen3(folder: Path) -> Path:
    """A dense Qwen3 with random weights, as a checkpoint in `folder`."""
    import_transformers()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(Qwen3ForCausalLM(Qwen3Config(**TEXT)), folder)


def _save(model: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases: no two alike, and far from 1 and 0
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        else:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder)
    return folder


def import_transformers() -> None:
    """Before transformers: torchvision asks for two operators that only its CUDA build has."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)


_libraries: list[Any] = []


def prompt() -> dict[str, Any]:
    """Twenty tokens, with two pictures of different sizes among them, on the CPU."""
    import torch

    torch.manual_seed(1)
    first = [VISION_START, *[IMAGE] * 4, VISION_END]
    second = [VISION_START, *[IMAGE] * 2, VISION_END]
    tokens = [1, 2, 3, *first, 5, 6, *second, 7, 8, 9, 4, 11]
    return {
        "input_ids": torch.tensor([tokens]),
        "pixel_values": torch.randn(16 + 8, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4]]),
    }


def film() -> dict[str, Any]:
    """A video of two frames after a picture, on the CPU."""
    import torch

    torch.manual_seed(2)
    picture = [VISION_START, *[IMAGE] * 2, VISION_END]
    frame = [VISION_START, *[VIDEO] * 4, VISION_END]
    tokens = [1, *picture, 2, 21, *frame, 22, *frame, 3, 4]
    return {
        "input_ids": torch.tensor([tokens]),
        "pixel_values": torch.randn(8, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 2, 4]]),
        "pixel_values_videos": torch.randn(2 * 16, 3 * 2 * 4 * 4),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
    }


def on_npu(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.npu() for name, tensor in inputs.items()}


# Megatron


def start(tp: int = 1, pp: int = 1) -> None:
    """This rank's NPU, Megatron's groups and seeds. Comes before anything imports Megatron."""
    # torch's broadcast subscripts it, and torch_npu has none to tell unless it is told.
    os.environ.setdefault("TORCH_NPU_DEVICE_CAPABILITY", "8.0")
    import torch
    import torch_npu  # noqa: F401
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,npu:hccl")
    import_transformers()

    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def stay_on_cpu() -> None:
    """From here on this rank's Megatron computes on the CPU, over gloo."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_global_memory_buffer()  # it lies on the NPU
    parallel_state._set_global_memory_buffer()
    torch.cuda.current_device = lambda: "cpu"  # Megatron asks for no other device
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()


def use_layers(prefix: str) -> None:
    """Stands in for the layers that MindSpeed gives Megatron in Transformer Engine's place.

    As there, a norm is part of the linear that follows it, and stands sequence parallelism, which
    torch's does not. The classes' names begin with `prefix`, "MindSpeedTE" or "TE". Comes before
    Bridge is imported, as it binds the function.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import transformer_block

    spec = _layer_spec(prefix)
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = lambda *_, **__: spec
    transformer_block.LayerNormImpl = spec.submodules.self_attention.submodules.q_layernorm


def name_layers(prefix: str) -> None:
    for name, made in _layers.items():
        made.__name__ = prefix + name.replace(
            "Layernorm", "Norm" if prefix == "TE" else "Layernorm"
        )


_layers: dict[str, type] = {}


def import_bridge() -> None:
    """Bridge, which imports Transformer Engine whether or not it uses it.

    What stands in for that is there to be imported, as MindSpeed's is; using it raises. It comes
    after Megatron, which does without.
    """
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    sys.meta_path.append(_TransformerEngine())


class _TransformerEngine(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in ("transformer_engine", "transformer_engine_torch"):
            return None
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = functools.partial(_Name.__getattr__, _Unusable)  # type: ignore[method-assign]


class _Name(type):
    def __getattr__(cls, name: str) -> _Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (_Unusable,), {})


class _Unusable(metaclass=_Name):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"there is no Transformer Engine here: {type(self).__name__}")


def _layer_spec(prefix: str) -> Any:
    import torch
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    def rms_norm(hidden: Any, weight: Any, eps: float) -> Any:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * weight

    def norm_weight(size: int, config: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel
        return weight

    class Norm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
            super().__init__()
            self.config, self.eps = config, eps
            self.weight = norm_weight(hidden_size, config)

        def forward(self, hidden: Any) -> Any:
            return rms_norm(hidden, self.weight, self.eps)

    class NormColumn(ColumnParallelLinear):
        def __init__(self, input_size: int, output_size: int, **named: Any) -> None:
            super().__init__(input_size, output_size, **named)
            self.layer_norm_weight = norm_weight(input_size, self.config)

        def forward(self, hidden: Any) -> Any:
            eps = self.config.layernorm_epsilon
            return super().forward(rms_norm(hidden, self.layer_norm_weight, eps))

    class Row(RowParallelLinear):
        pass

    class Attention(DotProductAttention):
        """Megatron's own, which knows no packed sequences, on each of them."""

        def forward(
            self,
            query: Any,
            key: Any,
            value: Any,
            attention_mask: Any,
            attn_mask_type: Any = None,
            packed_seq_params: Any = None,
            **named: Any,
        ) -> Any:
            whole = super().forward
            if packed_seq_params is None:
                return whole(query, key, value, attention_mask, attn_mask_type, **named)
            sizes = packed_seq_params.cu_seqlens_q.diff().tolist()
            each = zip(*(part.split(sizes) for part in (query, key, value)), strict=True)
            batched = ([part[:, None] for part in parts] for parts in each)
            outputs = [whole(*parts, None, attn_mask_type, **named) for parts in batched]
            return torch.cat(outputs)[:, 0]

    _layers.update(Layernorm=Norm, LayerNormColumnParallelLinear=NormColumn, RowParallelLinear=Row)
    name_layers(prefix)
    attention = SelfAttentionSubmodules(NormColumn, Attention, Row, Norm, Norm)
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention
            ),
            self_attn_bda=get_bias_dropout_add,
            mlp=ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=NormColumn, linear_fc2=Row)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def arguments(checkpoint: Path, tp: int = 1, pp: int = 1, **changes: Any) -> Namespace:
    """What Megatron's and slime's parsers would make of a command line for TEXT."""
    given = {
        "hf_checkpoint": str(checkpoint),
        "num_layers": TEXT["num_hidden_layers"],
        "hidden_size": TEXT["hidden_size"],
        "ffn_hidden_size": TEXT["intermediate_size"],
        "num_attention_heads": TEXT["num_attention_heads"],
        "num_query_groups": TEXT["num_key_value_heads"],
        "kv_channels": TEXT["head_dim"],
        "padded_vocab_size": TEXT["vocab_size"],
        "vocab_size": TEXT["vocab_size"],
        "max_position_embeddings": TEXT["max_position_embeddings"],
        "rotary_base": TEXT["rope_theta"],
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
        "transformer_impl": "local",
        "fp16_lm_cross_entropy": False,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": tp > 1,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "num_experts": None,
    }
    return Namespace(**{**given, **changes})


def config(args: Namespace, **changes: Any) -> Any:
    """The TransformerConfig that Megatron makes of those arguments."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_query_groups": args.num_query_groups,
        "kv_channels": args.kv_channels,
        "qk_layernorm": args.qk_layernorm,
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "sequence_parallel": args.sequence_parallel,
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**{**given, **changes})


def causal_mask(length: int) -> Any:
    """Megatron's: True is masked, [1, 1, length, length], on the CPU."""
    import torch

    return torch.ones(1, 1, length, length, device="cpu").triu(1).bool()


def load(model: Any, checkpoint: Path) -> None:
    """A Qwen3-VL's weights, cut as slime cuts what its loaders give it."""
    import torch
    from megatron.core import parallel_state
    from safetensors.torch import load_file
    from transformers import AutoConfig

    from slime_npu.megatron import loaders

    class Reader(dict[str, Any]):
        get_tensor = dict.__getitem__

    hf = AutoConfig.from_pretrained(checkpoint)
    reader = Reader(load_file(checkpoint / "model.safetensors"))
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            whole = loaders()[hf.model_type](name, reader, hf)
            if name.endswith("output_layer.weight") and len(parameter) == 1:
                continue  # a value head
            if getattr(parameter, "tensor_model_parallel", False):
                halves = whole.chunk(2) if "linear_fc1" in name else [whole]
                parts = [half.chunk(size, parameter.partition_dim)[rank] for half in halves]
                whole = torch.cat(parts, parameter.partition_dim)
            parameter.copy_(whole)


def named_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """By their names over the whole pipeline, as slime makes them."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from slime_npu.megatron import global_name

    offset = get_transformer_layer_offset(model.config)
    for name, parameter in model.named_parameters():
        yield global_name(f"module.module.{name}", offset), parameter


def joined(name: str, parameter: Any, part: Any = None) -> Any:
    """The whole of a parameter whose parts the tensor parallel ranks hold, as slime joins it.

    Or of its gradient, if that is `part`.
    """
    import torch
    from megatron.core import parallel_state

    part = parameter.data if part is None else part
    if not getattr(parameter, "tensor_model_parallel", False):
        return part
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    torch.distributed.all_gather(parts, part, group=group)
    if "linear_fc1" in name:
        parts = [
            half for halves in zip(*(p.chunk(2) for p in parts), strict=True) for half in halves
        ]
    return torch.cat(parts, parameter.partition_dim)


def run(model: Any, inputs: dict[str, Any], weigh: Any = None) -> Any:
    """The last stage's output for one batch, by Megatron's own schedule; None on other stages.

    With `weigh`, which makes a loss of it, backward too.
    """
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.model_type = ModelType.encoder_or_decoder
    outputs = []

    def step(_: Any, model: Any) -> Any:
        def loss(output: Any) -> Any:
            outputs.append(output.detach().cpu())
            return (output if weigh is None else weigh(output)).sum(), {}

        return model(**inputs), loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([None]),
        model=[model],
        num_microbatches=1,
        seq_length=inputs["input_ids"].shape[1],
        micro_batch_size=1,
        forward_only=weigh is None,
    )
    return outputs[0] if outputs else None


def whole_vocabulary(logits: Any) -> Any:
    """Logits of which each tensor parallel rank has a part; None stays None."""
    from megatron.core import tensor_parallel

    if logits is None:
        return None
    return tensor_parallel.gather_from_tensor_model_parallel_region(logits.npu()).cpu()


def wrap(model: Any) -> Any:
    """In Megatron's own data parallel wrapper, with gradients in `main_grad`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def finalize(wrapped: Any) -> None:
    """Megatron's own sums of gradients over ranks, before the optimizer's step."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([wrapped])


# Patched copies


def patched(fork: str, into: Path) -> Path:
    """A folder to put before all others on sys.path: the fork's package, its recipes applied."""
    package = {"megatron": "megatron.core", "megatron-bridge": "megatron.bridge"}[fork]
    target = into / package.replace(".", "/")
    if not target.exists():
        found = importlib.util.find_spec(package)
        assert found is not None and found.origin is not None
        source = Path(found.origin).parent
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    environment = dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    command = [sys.executable, __file__, fork, str(into)]
    subprocess.run(command, check=True, env=environment)
    return into


class Folder:
    """A folder of source files, as a recipe reads it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def paths(self, under: bytes = b"") -> Iterator[bytes]:
        for path in sorted(self.root.rglob("*.py")):
            name = path.relative_to(self.root).as_posix().encode()
            if name.startswith(under):
                yield name

    def read(self, path: bytes) -> bytes | None:
        file = self.root / path.decode()
        return file.read_bytes() if file.is_file() else None

    def grep(self, literal: bytes, paths: Iterator[bytes]) -> list[bytes]:
        return [path for path in paths if literal in (self.read(path) or b"")]


def apply_recipes(fork: str, root: Path) -> None:
    from rebase.recipe import load

    queue = PROJECT / "forks" / fork
    for line in (queue / "series").read_text(encoding="utf-8").splitlines():
        name = line.partition("#")[0].strip()
        if not name:
            continue
        result = load(queue / name, (queue / name).read_bytes()).run(Folder(root))
        if result.conflicts:
            sys.exit(f"{fork}/{name} does not apply to the installed package: {result.conflicts}")
        for path, content in result.edits.items():
            (root / path.decode()).write_bytes(content)
        print(name, result.status.name, *result.places)


if __name__ == "__main__":
    apply_recipes(sys.argv[1], Path(sys.argv[2]))
