"""Qwen3-VL on megatron-core, for where Bridge is gone (slime v0.3.1 on).

    python train.py … --spec slime_npu.qwen3_vl provider --hf-checkpoint <Qwen3-VL>

The language model is megatron-core's GPTModel, the vision tower transformers', whole on every
tensor parallel rank of the first pipeline stage. Nothing of either is rewritten:

mRoPE      GPTModel's own, with the angles of the three axes interleaved as Qwen3-VL wants them.
deepstack  what the tower's inner layers see is added to the output of the first language layers.
           It reaches them as TransformerBlock's `context`, which a layer without cross attention
           hands on, so that recomputation saves it and gives it its gradient; a hook on each of
           those layers adds its part.
gradients  the tower's outputs are cut for sequence parallelism by Megatron's own scatter, which
           gives every rank the whole gradient back. So the replicated towers stay equal.

The model's names are those that Bridge gives them, `language_model` and `vision_model`; weights go
both ways by `slime_npu.megatron.qwen3_vl_from_hf` and slime's converter to Hugging Face.

The architecture: Qwen3-VL Technical Report, https://arxiv.org/abs/2511.21631, and transformers'
modeling_qwen3_vl.py, against which the tests compare.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["positions", "provider"]


def provider(args: Namespace, config: Any, vp_stage: int | None = None) -> Callable[..., Module]:
    """What makes the model: `provide(pre_process, post_process, vp_stage)`, as slime calls it.

    `args` are Megatron's with slime's `hf_checkpoint`, `config` the TransformerConfig made of them;
    `vp_stage` is not needed before the model is made. ValueError, with every argument that is
    wrong, where they describe another language model than the checkpoint's, and for mixtures of
    experts and context parallelism, which this model has not.
    """
    from transformers import AutoConfig

    hf = AutoConfig.from_pretrained(args.hf_checkpoint)
    _check(args, config, hf)
    config.mrope_section = _rope(hf.text_config)["mrope_section"]
    config.apply_rope_fusion = False  # a fused kernel takes one position for a token, not three

    def provide(
        pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> Module:
        return _model_class()(args, config, hf, pre_process, post_process, vp_stage)

    return provide


def _rope(text_config: Any) -> dict[str, Any]:
    """Transformers 5 has one dictionary where 4 has two fields."""
    rope = getattr(text_config, "rope_parameters", None) or text_config.rope_scaling
    return {"rope_theta": getattr(text_config, "rope_theta", None), **rope}


def _check(args: Namespace, config: Any, hf: Any) -> None:
    if hf.model_type != "qwen3_vl":
        raise ValueError(
            f"{args.hf_checkpoint} is a {hf.model_type}, not a qwen3_vl; no model was built. Leave"
            " --spec away, or give the checkpoint of a dense Qwen3-VL."
        )
    text, rope = hf.text_config, _rope(hf.text_config)
    wanted = {
        "--num-layers": (config.num_layers, text.num_hidden_layers),
        "--hidden-size": (config.hidden_size, text.hidden_size),
        "--ffn-hidden-size": (config.ffn_hidden_size, text.intermediate_size),
        "--num-attention-heads": (config.num_attention_heads, text.num_attention_heads),
        "--num-query-groups": (config.num_query_groups, text.num_key_value_heads),
        "--kv-channels": (config.kv_channels, text.head_dim),
        "--rotary-base": (args.rotary_base, rope["rope_theta"]),
        "--rotary-percent": (args.rotary_percent, 1.0),
        "--use-rope-scaling": (
            args.use_rope_scaling,
            rope.get("rope_type", "default") != "default",
        ),
        "--norm-epsilon": (config.layernorm_epsilon, text.rms_norm_eps),
        "--normalization": (config.normalization, "RMSNorm"),
        "--qk-layernorm": (config.qk_layernorm, True),
        "--swiglu": (config.gated_linear_unit, True),
        "--add-qkv-bias": (config.add_qkv_bias, text.attention_bias),
        "--disable-bias-linear": (not config.add_bias_linear, True),
        "--untie-embeddings-and-output-weights": (
            args.untie_embeddings_and_output_weights,
            not hf.tie_word_embeddings,
        ),
        "--num-experts": (config.num_moe_experts or 0, 0),
        "--mtp-num-layers": (config.mtp_num_layers or 0, 0),
        "--context-parallel-size": (config.context_parallel_size, 1),
        "--vocab-size": (args.padded_vocab_size >= text.vocab_size, True),
    }
    wrong = [
        f"{name}: {given}, not {want}" for name, (given, want) in wanted.items() if given != want
    ]
    if wrong:
        raise ValueError(
            f"The arguments do not describe the language model of {args.hf_checkpoint}, or what"
            f" slime_npu.qwen3_vl can build; no model was built. {'; '.join(wrong)}."
        )


def _layer_spec(args: Namespace) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    if args.transformer_impl == "transformer_engine":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    return gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=True)


@functools.cache
def _model_class() -> type:
    """The model's class, made on first use since its base is Megatron's."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import MegatronModule

    class Qwen3VL(MegatronModule):  # type: ignore[misc]
        """GPTModel with a vision tower before it on the first pipeline stage."""

        def __init__(
            self,
            args: Namespace,
            config: Any,
            hf: Any,
            pre_process: bool,
            post_process: bool,
            vp_stage: int | None,
        ) -> None:
            super().__init__(config=config)
            self.hf = hf
            self.pre_process = pre_process
            self.post_process = post_process
            self.vp_stage = vp_stage
            self.language_model = GPTModel(
                config=config,
                transformer_layer_spec=_layer_spec(args),
                vocab_size=args.padded_vocab_size,
                max_sequence_length=args.max_position_embeddings,
                pre_process=pre_process,
                post_process=post_process,
                fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
                parallel_output=True,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type="mrope",
                rotary_base=args.rotary_base,
                scatter_embedding_sequence_parallel=False,  # images come in before the cut
                vp_stage=vp_stage,
            )
            self.share_embeddings_and_output_weights = (
                self.language_model.share_embeddings_and_output_weights
            )
            rotary = self.language_model.rotary_pos_emb
            rotary.forward = functools.partial(_interleaved_angles, rotary.inv_freq)
            self.vision_model = None
            if pre_process:
                _hook_deepstack(self.language_model.decoder.layers, hf.vision_config)
                self.vision_model = _vision_model(args, hf, config.params_dtype)
                self._vision_inv_freq = self.vision_model.rotary_pos_emb.inv_freq.clone()
                self.vision_model.to(next(self.language_model.parameters()).device)

        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            super()._apply(*args, **kwargs)
            if self.vision_model is not None:
                # Float16Module casts buffers too, and angles made of bfloat16 are radians off.
                rotary = self.vision_model.rotary_pos_emb
                rotary.inv_freq = self._vision_inv_freq.to(rotary.inv_freq.device)
            return self

        def set_input_tensor(self, input_tensor: Any) -> None:
            self.language_model.set_input_tensor(input_tensor)

        def shared_embedding_or_output_weight(self) -> Tensor:
            return self.language_model.shared_embedding_or_output_weight()

        def forward(
            self,
            input_ids: Tensor,
            position_ids: Tensor | None = None,
            attention_mask: Tensor | None = None,
            labels: Tensor | None = None,
            packed_seq_params: Any = None,
            loss_mask: Tensor | None = None,
            pixel_values: Tensor | None = None,
            image_grid_thw: Tensor | None = None,
            pixel_values_videos: Tensor | None = None,
            video_grid_thw: Tensor | None = None,
        ) -> Tensor:
            """As GPTModel's, with a processor's images and videos.

            `input_ids` is [batch, sequence]; packed sequences are one row, cut by
            `packed_seq_params.cu_seqlens_q`. Every stage is given all of it, as positions come
            from the grids. `position_ids`, [3, batch, sequence], replaces those positions.
            """
            if position_ids is None:
                packed = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
                position_ids = positions(
                    self.hf,
                    input_ids,
                    image_grid_thw,
                    video_grid_thw,
                    None if packed is None else packed.tolist(),
                )
            embeds = deepstack = None
            if self.pre_process:
                media = (
                    (self.hf.image_token_id, pixel_values, image_grid_thw),
                    (self.hf.video_token_id, pixel_values_videos, video_grid_thw),
                )
                embeds, deepstack = self._embed(input_ids, media)
                if self.config.sequence_parallel:
                    scatter = tensor_parallel.scatter_to_sequence_parallel_region
                    embeds = scatter(embeds)
                    deepstack = None if deepstack is None else scatter(deepstack)
            return self.language_model(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                decoder_input=embeds,
                labels=labels,
                packed_seq_params=packed_seq_params,
                loss_mask=loss_mask,
                extra_block_kwargs={"context": deepstack},
            )

        def _embed(
            self, input_ids: Tensor, media: Sequence[tuple[int, Tensor | None, Tensor | None]]
        ) -> tuple[Tensor, Tensor | None]:
            """Embeddings, [sequence, batch, hidden], and what is to be added after each of the
            first layers, [sequence, layers, batch, hidden], zero where there is text; None where
            there is only text.
            """
            embeds = self.language_model.embedding(input_ids=input_ids, position_ids=None)
            embeds = embeds.transpose(0, 1).clone()
            deepstack = None
            for token, pixels, grids in media:
                if pixels is None:
                    continue
                merged, inner = _see(self.vision_model, pixels, grids)
                there = input_ids == token
                if merged.shape[0] != there.sum():
                    raise ValueError(
                        f"{int(there.sum())} tokens {token} stand for {merged.shape[0]} patches of"
                        " a picture. Nothing was computed; the prompt was cut, or it was made for"
                        " other pictures."
                    )
                embeds[there] = merged.to(embeds.dtype)
                if deepstack is None:
                    deepstack = embeds.new_zeros(len(inner), *embeds.shape)
                deepstack[:, there] = torch.stack(inner).to(embeds.dtype)
            embeds = embeds.transpose(0, 1).contiguous()
            return embeds, None if deepstack is None else deepstack.permute(2, 0, 1, 3).contiguous()

    return Qwen3VL


# The vision tower


def _vision_model(args: Namespace, hf: Any, dtype: Any) -> Module:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    tower = Qwen3VLVisionModel._from_config(hf.vision_config, dtype=dtype)
    if args.recompute_granularity == "full":
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in tower.parameters():
        # Megatron's marks for what every tensor parallel rank has whole.
        parameter.tensor_model_parallel = False
        parameter.partition_dim = -1
        parameter.partition_stride = 1
        parameter.average_gradients_across_tp_domain = True
    return tower


def _see(tower: Module, pixels: Tensor, grids: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """What the tower makes of pictures: [patches, hidden], and that of each deepstack layer."""
    if grids is None:
        raise ValueError("Pictures came without their grids (…_grid_thw). Nothing was computed.")
    seen = tower(pixels.to(tower.dtype), grid_thw=grids)
    if isinstance(seen, tuple):  # transformers 4
        merged, inner = seen
    else:
        merged, inner = seen.pooler_output, seen.deepstack_features
    return merged, inner


def _hook_deepstack(layers: Sequence[Module], vision_config: Any) -> None:
    count = len(vision_config.deepstack_visual_indexes)
    if len(layers) < count:
        raise ValueError(
            f"The first pipeline stage has {len(layers)} language layers, but what the vision tower"
            f" sees is added after the first {count}. No model was built; give the first stage more"
            " layers (--decoder-first-pipeline-num-layers), or use fewer stages."
        )
    for index, layer in enumerate(layers[:count]):
        layer.register_forward_hook(functools.partial(_add_deepstack, index))


def _add_deepstack(
    index: int, layer: Module, inputs: Any, output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None] | None:
    hidden, deepstack = output
    return None if deepstack is None else (hidden + deepstack[:, index], deepstack)


# Positions


def positions(
    hf: Any,
    input_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    boundaries: Sequence[int] | None = None,
) -> Tensor:
    """Where each token is in time, height and width: [3, batch, sequence], of `input_ids`' type.

    Text counts up on all three axes. A picture's patches, merged, have its row and column, and what
    follows it goes on after the largest of them. Each frame of a video is a picture of its own,
    for Qwen3-VL writes times as text between them. `boundaries`, [0, …, sequence], are the ends of
    packed sequences, each of which starts from 0; without them each row is one sequence.

    `hf` is the checkpoint's config. ValueError where tokens and grids do not fit together.
    """
    import torch

    pictures = {
        hf.image_token_id: _grids(image_grid_thw, split_frames=False),
        hf.video_token_id: _grids(video_grid_thw, split_frames=True),
    }
    merge = hf.vision_config.spatial_merge_size
    rows = []
    for tokens in input_ids.tolist():
        ends = boundaries or [0, len(tokens)]
        pieces = [_sequence_positions(tokens[a:b], pictures, merge) for a, b in pairwise(ends)]
        rows.append(torch.cat(pieces, dim=1))
    for token, grids in pictures.items():
        if unused := list(grids):
            raise ValueError(
                f"Grids {unused} have no tokens {token} in the prompt. Nothing was computed; the"
                " prompt was cut, or it was made for other pictures."
            )
    return torch.stack(rows, dim=1).to(input_ids)


def _grids(grid_thw: Tensor | None, *, split_frames: bool) -> Iterator[tuple[int, int, int]]:
    for time, height, width in [] if grid_thw is None else grid_thw.tolist():
        yield from [(1, height, width)] * time if split_frames else [(time, height, width)]


def _sequence_positions(
    tokens: list[int], pictures: dict[int, Iterator[tuple[int, int, int]]], merge: int
) -> Tensor:
    import torch

    pieces: list[Tensor] = []
    at = start = 0  # the token, and the position that comes next
    while at < len(tokens):
        end = at
        while end < len(tokens) and tokens[end] not in pictures:
            end += 1
        pieces.append(torch.arange(start, start + end - at).expand(3, -1))
        start += end - at
        if end < len(tokens):
            token = tokens[end]
            time, height, width = next(pictures[token], (0, 0, 0))
            size = (time, height // merge, width // merge)
            picture = torch.cartesian_prod(*map(torch.arange, size)).T + start
            count = picture.shape[1]
            if count == 0 or tokens[end : end + count] != [token] * count:
                raise ValueError(
                    f"At token {end} of a sequence {count or 'no'} patches of a picture should"
                    f" begin, by its grid {time, height, width}, but the tokens {token} there do"
                    " not fit. Nothing was computed; the prompt was cut, or it was made for other"
                    " pictures."
                )
            pieces.append(picture)
            start += max(size)
            end += count
        at = end
    return torch.cat(pieces, dim=1) if pieces else torch.empty(3, 0, dtype=torch.long)


def _interleaved_angles(
    inv_freq: Tensor, position_ids: Tensor, mrope_section: Sequence[int], *_: Any, **__: Any
) -> Tensor:
    """Rotary angles in radians, [sequence, batch, 1, head dim], in float32.

    Of each three frequencies one turns with time, one with height and one with width, until
    `mrope_section` of them have; the rest turn with time.
    """
    import torch

    angles = position_ids.to(inv_freq.device)[..., None].float() * inv_freq.float()
    mixed = angles[0].clone()
    for axis in (1, 2):
        turns = slice(axis, 3 * mrope_section[axis], 3)
        mixed[..., turns] = angles[axis][..., turns]
    return torch.cat((mixed, mixed), dim=-1).transpose(0, 1)[:, :, None].contiguous()
