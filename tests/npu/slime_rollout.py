"""Plays the example's rollout with slime's own code against a scripted server, and prints it.

Run by test_examples.py with one patched stack on the path: `python slime_rollout.py FOLDER`. slime
loads the data set that the example's dataset.py wrote, by a real Qwen3-VL processor whose tokens
are bytes, and plays and rewards each sample by the functions the example's arguments name.
"""

import asyncio
import json
import sys
from argparse import Namespace
from pathlib import Path

import absent

SPECIAL = [
    f"<|{name}|>"
    for name in (
        "endoftext",
        "im_start",
        "im_end",
        "vision_start",
        "vision_end",
        "image_pad",
        "video_pad",
    )
]

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\n' }}
{%- if message.role == 'tool' %}{{- '<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- elif message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def call(answer):
    said = json.dumps({"name": "calc_score", "arguments": {"answer": answer}})
    return f"Let me see. <tool_call>{said}</tool_call><|im_end|>"


# What the server says to each problem, turn by turn, and why each turn ended.
SCRIPTS = {
    "checks first": [(call("12"), "stop"), ("It is \\boxed{12}.<|im_end|>", "stop")],
    "corrects itself": [
        (call("11"), "stop"),
        (call("12"), "stop"),
        ("It is \\boxed{12}.<|im_end|>", "stop"),
    ],
    "never stops asking": [(call("1"), "stop"), (call("2"), "stop"), (call("12"), "stop")],
    "answers at once": [("It is \\boxed{11}.<|im_end|>", "stop")],
    "runs out of tokens": [("It is so long", "length")],
}


def tokenizer(folder):
    from transformers import Qwen2TokenizerFast
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    (folder / "vocab.json").write_text(json.dumps(letters))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    made = Qwen2TokenizerFast(
        vocab_file=str(folder / "vocab.json"),
        merges_file=str(folder / "merges.txt"),
        additional_special_tokens=SPECIAL,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    made.chat_template = TEMPLATE
    return made


def processor(folder):
    from transformers import Qwen2VLImageProcessorFast, Qwen3VLProcessor, Qwen3VLVideoProcessor

    made = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorFast(patch_size=16),
        tokenizer=tokenizer(folder),
        video_processor=Qwen3VLVideoProcessor(patch_size=16),
        chat_template=TEMPLATE,
    )
    made.save_pretrained(folder)
    return made


def write_dataset(file):
    from geo3k_vlm_multi_turn import dataset
    from PIL import Image

    image = Image.new("RGB", (96, 64), "white")
    rows = [{"images": [image], "problem": f"<image>{name}", "answer": "12"} for name in SCRIPTS]
    dataset.write(rows, file)


async def serve(asked, words):
    """A server of /generate that plays SCRIPTS; its port."""
    from aiohttp import web

    async def generate(request):
        payload = await request.json()
        heard = words.decode(payload["input_ids"])
        name = next(name for name in SCRIPTS if f"{name}\n" in heard)
        turn = sum(1 for n, _ in asked if n == name)
        asked.append((name, payload))
        text, finish = SCRIPTS[name][turn]
        tokens = words.encode(text, add_special_tokens=False)
        meta = {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "prompt_tokens": len(payload["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
        }
        return web.json_response({"text": text, "meta_info": meta})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return site._server.sockets[0].getsockname()[1]


def arguments(folder):
    return Namespace(
        hf_checkpoint=str(folder),
        sglang_server_concurrency=8,
        sglang_dp_size=1,
        sglang_router_ip="127.0.0.1",
        sglang_speculative_algorithm=None,
        sglang_router_policy=None,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        rollout_external=False,
        rollout_temperature=1,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=4096,
        rollout_max_context_len=None,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        rollout_sample_hook_path=None,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        use_distributed_post=False,
        custom_generate_function_path="geo3k_vlm_multi_turn.rollout.generate",
        custom_rm_path="geo3k_vlm_multi_turn.rollout.reward",
        group_rm=False,
        apply_chat_template_kwargs={},
        max_turns=3,
    )


async def play(folder):
    from slime.rollout import sglang_rollout
    from slime.utils import http_utils
    from slime.utils.data import Dataset

    words = processor(folder).tokenizer
    write_dataset(folder / "train.parquet")
    args, asked = arguments(folder), []
    args.sglang_router_port = await serve(asked, words)
    http_utils.init_http_client(args)
    state = sglang_rollout.GenerateState(args)
    data = Dataset(
        str(folder / "train.parquet"),
        state.tokenizer,
        state.processor,
        None,
        prompt_key="problem",
        multimodal_keys={"image": "images"},
        label_key="answer",
        apply_chat_template=True,
    )
    found = {}
    for index, name in enumerate(SCRIPTS):
        sample = await sglang_rollout.generate_and_rm(
            args, data[index], dict(state.sampling_params)
        )
        start = len(sample.tokens) - sample.response_length
        trained = [t for t, m in zip(sample.tokens[start:], sample.loss_mask, strict=True) if m]
        payloads = [payload for n, payload in asked if n == name]
        found[name] = {
            "status": sample.status.value,
            "reward": sample.reward,
            "turns": len(payloads),
            "trained": words.decode(trained),
            "response": sample.response,
            "log_probs": sorted(set(zip(sample.loss_mask, sample.rollout_log_probs, strict=True))),
            "asked with its own tokens": all(
                payload["input_ids"] == sample.tokens[: len(payload["input_ids"])]
                for payload in payloads
            ),
            "images": [len(payload["image_data"]) for payload in payloads],
            "image patches": list(sample.multimodal_train_inputs["pixel_values"].shape),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    absent.torchair()
    absent.torchvision()
    absent.sgl_kernels()
    asyncio.run(play(Path(sys.argv[1])))
