"""The native Qwen3-VL: positions, weights, output and gradients are those of transformers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import IMAGE, VIDEO, VISION_END, VISION_START

from slime_npu.qwen3_vl import positions, provider

reference = pytest.mark.reference
plumbing = pytest.mark.plumbing

World = list[dict[str, Any]]


# Positions

HF = SimpleNamespace(
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    vision_start_token_id=VISION_START,
    vision_config=SimpleNamespace(spatial_merge_size=2),
)
text = st.lists(st.integers(1, 99), max_size=4).map(lambda tokens: (tokens, None, None))
sides = st.integers(1, 3).map((2).__mul__)


@st.composite
def images(draw: Any) -> tuple[list[int], list[int], None]:
    height, width = draw(sides), draw(sides)
    tokens = [VISION_START, *[IMAGE] * (height * width // 4), VISION_END]
    return tokens, [1, height, width], None


@st.composite
def videos(draw: Any) -> tuple[list[int], None, list[int]]:
    """Frames with a time as text before each, as Qwen3-VL's processor writes them."""
    time, height, width = draw(st.integers(1, 3)), draw(sides), draw(sides)
    frame = [7, 8, VISION_START, *[VIDEO] * (height * width // 4), VISION_END]
    return frame * time, None, [time, height, width]


pieces = st.lists(st.one_of(text, images(), videos()), min_size=1, max_size=6)
sequences = pieces.filter(lambda made: any(tokens for tokens, _, _ in made))


def assembled(*parts: list[tuple[list[int], Any, Any]]) -> tuple[Any, Any, Any]:
    import torch

    flat = [piece for part in parts for piece in part]
    tokens = torch.tensor([[token for piece, _, _ in flat for token in piece]])
    grids = [[piece[kind] for piece in flat if piece[kind]] for kind in (1, 2)]
    return tokens, *(torch.tensor(grid) if grid else None for grid in grids)


@reference
@settings(deadline=None)
@given(sequences)
def test_positions_are_transformers(sequence: list[tuple[list[int], Any, Any]]) -> None:
    import torch

    tiny_models.import_transformers()
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    tokens, image_grids, video_grids = assembled(sequence)
    wanted, _ = Qwen3VLModel.get_rope_index(
        SimpleNamespace(config=HF), tokens, image_grids, video_grids
    )
    found = positions(HF, tokens, image_grids, video_grids)
    assert torch.equal(found, wanted)
    assert found.dtype == tokens.dtype


@reference
@settings(deadline=None)
@given(st.lists(sequences, min_size=2, max_size=3))
def test_each_packed_sequence_has_positions_of_its_own(
    packed: list[list[tuple[list[int], Any, Any]]],
) -> None:
    import torch

    ends = [0]
    for sequence in packed:
        ends.append(ends[-1] + sum(len(tokens) for tokens, _, _ in sequence))
    found = positions(HF, *assembled(*packed), ends)
    alone = [positions(HF, *assembled(sequence)) for sequence in packed]
    assert torch.equal(found, torch.cat(alone, dim=2))


@reference
@pytest.mark.parametrize(
    ("tokens", "grids", "says"),
    [
        ([1, IMAGE], [], "no patches"),
        ([1, IMAGE, 2], [[1, 4, 4]], "4 patches"),
        ([1, IMAGE], [[1, 4, 4]], "4 patches"),
        ([1, 2], [[1, 2, 2]], r"Grids \[\(1, 2, 2\)\] have no tokens"),
    ],
)
def test_pictures_that_do_not_fit_the_prompt_are_an_error(
    tokens: list[int], grids: list[list[int]], says: str
) -> None:
    import torch

    with pytest.raises(ValueError, match=says):
        positions(HF, torch.tensor([tokens]), torch.tensor(grids).view(-1, 3))


# The model in one world


def world(checkpoint: Path, tp: int, pp: int) -> dict[str, Any]:
    import torch

    torch.compiler.set_stance("force_eager")
    tiny_models.start(tp, pp)
    tiny_models.use_layers("TE")
    from safetensors.torch import load_file

    plain = build(checkpoint, tp, pp)
    full = build(
        checkpoint,
        tp,
        pp,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    weights: dict[str, Any] = {}
    for name, parameter in tiny_models.named_parameters(plain):
        weights |= hugging_face(checkpoint, name, tiny_models.joined(name, parameter))
    saved = load_file(checkpoint / "model.safetensors")
    prompt = tiny_models.on_npu(tiny_models.prompt())
    wrapped = tiny_models.wrap(plain)
    logits = tiny_models.run(wrapped, prompt, weigh=square)
    result = {
        "names": sorted(weights),
        "wrong": [name for name in weights if not torch.equal(weights[name], saved[name])],
        "unsaved": {name for name, _ in plain.named_parameters()} - set(plain.sharded_state_dict()),
        "logits": tiny_models.whole_vocabulary(logits),
        "gradients": gradients(checkpoint, wrapped),
    }
    wrapped = tiny_models.wrap(full)
    tiny_models.run(wrapped, prompt, weigh=square)
    result["recomputed"] = gradients(checkpoint, wrapped)
    if pp == 1:
        with torch.no_grad():
            words = {"input_ids": prompt["input_ids"][:, :4]}  # no picture begins before
            result["text"] = tiny_models.whole_vocabulary(plain(words["input_ids"]))
            film = plain(**tiny_models.on_npu(tiny_models.film()))
            result["film"] = tiny_models.whole_vocabulary(film)
            result["packed"] = tiny_models.whole_vocabulary(plain(**packed(prompt)))
    half = plain.bfloat16()
    if pp == 1:
        rotary = half.vision_model.rotary_pos_emb.inv_freq
        result["phases"] = (rotary.dtype, half.vision_model.patch_embed.proj.weight.dtype)
    return result


def square(logits: Any) -> Any:
    return logits.float() ** 2


def build(checkpoint: Path, tp: int, pp: int, **changes: Any) -> Any:
    """As slime v0.3.1 does with --spec."""
    from megatron.core import parallel_state

    args = tiny_models.arguments(
        checkpoint, tp, pp, transformer_impl="transformer_engine", **changes
    )
    provide = provider(args, tiny_models.config(args), None)
    model = provide(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        vp_stage=None,
    )
    tiny_models.load(model, checkpoint)
    return model.npu()


def hugging_face(checkpoint: Path, name: str, whole: Any) -> dict[str, Any]:
    from slime_npu.megatron import qwen3_vl_to_hf

    return dict(qwen3_vl_to_hf(tiny_models.arguments(checkpoint), name, whole.cpu()))


def gradients(checkpoint: Path, wrapped: Any) -> dict[str, Any]:
    """By Hugging Face's names: what is linear on weights is so on their gradients."""
    tiny_models.finalize(wrapped)
    found: dict[str, Any] = {}
    for name, parameter in tiny_models.named_parameters(wrapped.module):
        whole = tiny_models.joined(name, parameter, parameter.main_grad)
        found |= hugging_face(checkpoint, name, whole)
    return found


def packed(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt twice in one row."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    length = prompt["input_ids"].shape[1]
    ends = torch.tensor([0, length, 2 * length], dtype=torch.int32).npu()
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in prompt.items()}
    twice["input_ids"] = twice["input_ids"].view(1, -1)
    return twice | {
        "packed_seq_params": PackedSeqParams("thd", ends, ends, None, None, length, length)
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="module")
def alone(ranks: Any, checkpoint: Path) -> World:
    return ranks(world, 1, checkpoint, 1, 1)


@pytest.fixture(scope="module")
def tensor_parallel(ranks: Any, checkpoint: Path) -> World:
    return ranks(world, 2, checkpoint, 2, 1)


@pytest.fixture(scope="module")
def pipeline_parallel(ranks: Any, checkpoint: Path) -> World:
    return ranks(world, 2, checkpoint, 1, 2)


@pytest.fixture(params=["alone", "tensor_parallel", "pipeline_parallel"])
def any_world(request: pytest.FixtureRequest) -> World:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def transformers(checkpoint: Path) -> dict[str, Any]:
    return by_transformers(checkpoint)


def by_transformers(checkpoint: Path) -> dict[str, Any]:
    """What transformers makes of the prompt on the CPU: logits, and every gradient."""
    tiny_models.import_transformers()
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint)
    prompt = tiny_models.prompt()
    text = model(input_ids=prompt["input_ids"][:, :4]).logits.detach()
    film = model(**tiny_models.film()).logits.detach()
    logits = model(**prompt).logits
    square(logits).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits.detach(), "text": text, "film": film, "gradients": gradients}


@plumbing
def test_weights_go_both_ways_bit_for_bit(any_world: World, transformers: dict[str, Any]) -> None:
    assert [rank["wrong"] for rank in any_world] == [[]] * len(any_world)
    names = {name for rank in any_world for name in rank["names"]}
    assert names == transformers["gradients"].keys()


@plumbing
def test_megatrons_checkpoints_hold_every_parameter(any_world: World) -> None:
    for rank in any_world:
        assert rank["names"] and not rank["unsaved"]


@reference
def test_the_model_says_what_transformers_says(
    any_world: World, transformers: dict[str, Any]
) -> None:
    """Within 5e-6 where logits are around 1: float32, only the order of sums differs."""
    import torch

    logits = transformers["logits"]
    assert logits.abs().max() > 1
    torch.testing.assert_close(any_world[-1]["logits"], logits, rtol=0, atol=5e-6)


@reference
@pytest.mark.parametrize("how", ["gradients", "recomputed"])
def test_every_gradient_is_transformers(
    any_world: World, transformers: dict[str, Any], how: str
) -> None:
    """Deepstack's too, under sequence parallelism too: to 1e-4 of each tensor's largest."""
    import torch

    for rank in any_world:
        for name, found in rank[how].items():
            wanted = transformers["gradients"][name]
            atol = 1e-4 * wanted.abs().max().item()
            assert atol > 0, name
            torch.testing.assert_close(
                found, wanted, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


@reference
@pytest.mark.parametrize("what", ["text", "film"])
def test_text_alone_and_videos_are_transformers_too(
    alone: World, tensor_parallel: World, transformers: dict[str, Any], what: str
) -> None:
    import torch

    for rank in (*alone, *tensor_parallel):
        torch.testing.assert_close(rank[what], transformers[what], rtol=0, atol=5e-6)


@reference
def test_packed_sequences_do_not_see_each_other(
    alone: World, tensor_parallel: World, transformers: dict[str, Any]
) -> None:
    import torch

    twice = torch.cat([transformers["logits"]] * 2, dim=1)
    for rank in (*alone, *tensor_parallel):
        torch.testing.assert_close(rank["packed"], twice, rtol=0, atol=5e-6)


@reference
def test_a_cast_to_bfloat16_leaves_the_vision_towers_phases(alone: World) -> None:
    import torch

    assert [rank["phases"] for rank in alone] == [(torch.float32, torch.bfloat16)]


def tied(checkpoint: Path) -> dict[str, Any]:
    """Output and embedding gradients of a model whose two ends are on two stages."""
    tiny_models.start(pp=2)
    tiny_models.use_layers("TE")
    model = build(checkpoint, 1, 2, untie_embeddings_and_output_weights=False)
    wrapped = tiny_models.wrap(model)
    logits = tiny_models.run(wrapped, tiny_models.on_npu(tiny_models.prompt()), weigh=square)
    tiny_models.finalize(wrapped)
    weight = model.shared_embedding_or_output_weight()
    return {"logits": logits, "gradient": weight.main_grad.cpu()}


@reference
def test_tied_embeddings_have_one_gradient_on_both_stages(ranks: Any, tmp_path: Path) -> None:
    import torch

    checkpoint = tiny_models.qwen3_vl(tmp_path, tie_word_embeddings=True)
    first, last = ranks(tied, 2, checkpoint)
    wanted = by_transformers(checkpoint)
    torch.testing.assert_close(last["logits"], wanted["logits"], rtol=0, atol=5e-6)
    gradient = wanted["gradients"]["model.language_model.embed_tokens.weight"]
    atol = 1e-4 * gradient.abs().max().item()
    for stage in (first, last):
        torch.testing.assert_close(stage["gradient"], gradient, rtol=0, atol=atol)


# What it refuses


def refused(checkpoint: Path, text_checkpoint: Path, short_checkpoint: Path) -> dict[str, str]:
    tiny_models.start()
    tiny_models.use_layers("TE")

    def said(checkpoint: Path = checkpoint, **changes: Any) -> str:
        args = tiny_models.arguments(checkpoint, transformer_impl="transformer_engine", **changes)
        config = tiny_models.config(args)
        with pytest.raises(ValueError) as error:
            provider(args, config, None)(True, False)
        return str(error.value)

    return {
        "text model": said(text_checkpoint),
        "arguments": said(num_layers=3, rotary_base=10000, use_rope_scaling=True),
        "vocabulary": said(padded_vocab_size=150),
        "first stage": said(short_checkpoint, num_layers=1),
    }


def forward_with_a_cut_prompt(checkpoint: Path) -> str:
    tiny_models.start()
    tiny_models.use_layers("TE")
    inputs = tiny_models.on_npu(tiny_models.prompt())
    inputs["position_ids"] = inputs["input_ids"].expand(3, 1, -1)
    inputs["pixel_values"] = inputs["pixel_values"][:16]
    inputs["image_grid_thw"] = inputs["image_grid_thw"][:1]
    with pytest.raises(ValueError) as error:
        build(checkpoint, 1, 1)(**inputs)
    return str(error.value)


@plumbing
def test_what_cannot_be_built_is_an_error_that_names_it(
    ranks: Any, checkpoint: Path, tmp_path: Path
) -> None:
    text = tiny_models.qwen3(tmp_path / "text")
    short = tiny_models.qwen3_vl(tmp_path / "short", num_hidden_layers=1)
    [said] = ranks(refused, 1, checkpoint, text, short)
    assert "is a qwen3, not a qwen3_vl" in said["text model"]
    assert "--num-layers: 3, not 4" in said["arguments"]
    assert "--rotary-base: 10000, not 5000000.0" in said["arguments"]
    assert "--use-rope-scaling: True, not False" in said["arguments"]
    assert "--vocab-size" in said["vocabulary"]
    assert "first pipeline stage has 1 language layers" in said["first stage"]


@plumbing
def test_features_without_tokens_are_an_error(ranks: Any, checkpoint: Path) -> None:
    [said] = ranks(forward_with_a_cut_prompt, 1, checkpoint)
    assert "6 tokens 151 stand for 4 patches" in said
