"""A rollout of geo3k: the model may check an answer with a tool, then gives it.

The model writes `<tool_call>{"name": "calc_score", "arguments": {"answer": "12"}}</tool_call>` and
is told whether that answer is right; a turn without a call is its answer. slime calls `generate` on
each sample (`--custom-generate-function-path`) and `reward` after it (`--custom-rm-path`). Tokens
the model wrote are trained on; what the tool says is masked out.

`play` is the conversation itself and knows neither slime nor a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

TOOL = "calc_score"

# What a problem of the data set ends with (dataset.py).
INSTRUCTION = (
    "Think step by step. Before you give your answer you may check it with the tool "
    f"`{TOOL}`: write <tool_call>"
    f'{{"name": "{TOOL}", "arguments": {{"answer": "your answer"}}}}'
    "</tool_call> and wait for what it says. Give your final answer in \\boxed{}."
)

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_EXAMPLE = json.dumps({"name": TOOL, "arguments": {"answer": "12"}})


@dataclass(frozen=True)
class Turn:
    """What the server gave: the text, its tokens, the log-probability of each, and why it ended."""

    text: str
    tokens: list[int]
    log_probs: list[float]
    finish: str  # "stop", "length" or "abort"
    meta: dict[str, Any]


@dataclass(frozen=True)
class Played:
    """How a conversation ended: "completed", "truncated" or "aborted", and the last turn's text."""

    status: str
    answer: str


# Asked with all tokens so far and how many may follow.
Complete = Callable[[list[int], int], Awaitable[Turn]]
# Told of tokens as they come: the server's (with its Turn) and the tool's (with None).
Append = Callable[[list[int], Turn | None], None]


async def play(
    complete: Complete,
    append: Append,
    observe: Callable[[str], list[int]],
    right: Callable[[str], bool],
    prompt: list[int],
    limit: int,
    turns: int,
) -> Played:
    """At most `turns` answers of the model, the tool's between them, `limit` tokens in all.

    observe  the tokens by which the model hears what the tool says, up to its next turn
    right    whether an answer is right
    """
    tokens, last = list(prompt), ""
    for turn in range(turns):
        reply = await complete(tokens, limit)
        if reply.tokens:
            append(reply.tokens, reply)
        tokens, limit, last = tokens + reply.tokens, limit - len(reply.tokens), reply.text
        if reply.finish == "abort":
            return Played("aborted", last)
        if reply.finish == "length":
            return Played("truncated", last)
        said = respond(reply.text, right, last_check=turn + 2 == turns)
        if said is None or turn + 1 == turns:
            break
        heard = observe(said)
        if len(heard) >= limit:  # nothing could follow it
            return Played("truncated", last)
        append(heard, None)
        tokens, limit = tokens + heard, limit - len(heard)
    return Played("completed", last)


def respond(text: str, right: Callable[[str], bool], last_check: bool) -> str | None:
    """What the tool says to the last call in `text`; None where it holds no call.

    A call it cannot read is answered with how to write one, so that the model can.
    """
    calls = _CALL.findall(text)
    if not calls:
        return None
    answer = _answer(calls[-1])
    if answer is not None and right(answer):
        return f"{answer} is right. Give it as your final answer in \\boxed{{}}."
    told = f"This is no call of {TOOL}." if answer is None else f"{answer} is wrong."
    if last_check:
        return f"{told} You cannot check again: now give your final answer in \\boxed{{}}."
    if answer is None:
        return f"{told} Write <tool_call>{_EXAMPLE}</tool_call>."
    return f"{told} Look for the mistake, or try another way."


def _answer(call: str) -> str | None:
    """The answer that a call asks to check; None where it is no call of the tool."""
    try:
        asked = json.loads(call)
    except ValueError:
        return None
    if not isinstance(asked, dict) or asked.get("name") != TOOL:
        return None
    given = asked.get("arguments")
    answer = given.get("answer") if isinstance(given, dict) else None
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return None
    return str(answer).strip() or None


def observation(tokenizer: Any, said: str, **options: Any) -> list[int]:
    """What follows a finished turn of the model, by the chat template: the tool's, its next begun.

    Raises ValueError where the template writes earlier turns anew when one is added: then tokens
    already sampled would not be those the model is trained on.
    """
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    heard = [*asked, {"role": "tool", "content": said}]
    options = {"tokenize": False, **options}
    before = tokenizer.apply_chat_template(asked, add_generation_prompt=False, **options).rstrip()
    after = tokenizer.apply_chat_template(heard, add_generation_prompt=True, **options)
    if not after.startswith(before):
        raise ValueError("this chat template changes earlier turns when the tool's is added")
    ids: list[int] = tokenizer.encode(after[len(before) :], add_special_tokens=False)
    return ids


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """What slime calls for each sample: plays it against the rollout server, and returns it."""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils import processing_utils
    from slime.utils.http_utils import post

    if args.partial_rollout:
        raise ValueError("--partial-rollout: this example cannot go on with a half-played sample")
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    inputs = {k: v for k, v in (sample.multimodal_inputs or {}).items() if v is not None}
    prompt = _prepare(sample, state, processing_utils, inputs)
    images = [processing_utils.encode_image_for_rollout_engine(i) for i in inputs.get("images", ())]

    async def complete(tokens: list[int], limit: int) -> Turn:
        payload: dict[str, Any] = {
            "input_ids": tokens,
            "sampling_params": {**sampling_params, "max_new_tokens": limit},
            "return_logprob": True,
        }
        if images:
            payload["image_data"] = images
        output = await post(url, payload)
        meta = output["meta_info"]
        new = meta.get("output_token_logprobs", [])
        return Turn(
            output["text"],
            [t[1] for t in new],
            [t[0] for t in new],
            meta["finish_reason"]["type"],
            meta,
        )

    def append(tokens: list[int], turn: Turn | None) -> None:
        _append(args, sample, tokens, turn)

    limit = sampling_params["max_new_tokens"]
    if args.rollout_max_context_len is not None:
        limit = min(limit, args.rollout_max_context_len - len(prompt))
    if limit <= 0:
        played = Played("truncated", "")
    else:
        played = await play(
            complete,
            append,
            lambda said: observation(
                state.tokenizer, said, **(args.apply_chat_template_kwargs or {})
            ),
            lambda answer: _right(f"\\boxed{{{answer}}}", sample.label),
            prompt,
            limit,
            args.max_turns,
        )
    sample.status = type(sample).Status(played.status)
    sample.response = state.tokenizer.decode(
        sample.tokens[len(prompt) :], skip_special_tokens=False
    )
    sample.metadata = {**(sample.metadata or {}), "answer": played.answer}
    return sample


async def reward(args: Any, sample: Any) -> float:
    r"""What slime calls after it: 1 where the last turn's \boxed{} answer is the label, else 0.

    Only the last turn counts: what the tool said holds answers too.
    """
    return float(_right(sample.metadata["answer"], sample.label))


def _right(text: str, label: Any) -> bool:
    from slime.rollout.rm_hub.math_utils import grade_answer_verl

    return bool(grade_answer_verl(text, str(label)))


def _prepare(sample: Any, state: Any, processing_utils: Any, inputs: dict[str, Any]) -> list[int]:
    """The prompt's tokens, images counted; what training needs of the images goes into `sample`."""
    if state.processor:
        wrap = getattr(processing_utils, "build_processor_kwargs", dict)  # from v0.2.3 on
        output = state.processor(text=sample.prompt, **wrap(inputs))
        prompt = list(output["input_ids"][0])
        tensors = {k: v for k, v in output.items() if k not in ("input_ids", "attention_mask")}
        sample.multimodal_train_inputs = tensors or None
    else:
        prompt = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    sample.tokens = list(prompt)
    sample.response_length = 0
    sample.loss_mask = []
    sample.rollout_log_probs = []
    return prompt


def _append(args: Any, sample: Any, tokens: list[int], turn: Turn | None) -> None:
    """Tokens of the response, as this slime's samples keep them."""
    if hasattr(sample, "append_response_tokens"):  # from v0.3.1 on
        sample.append_response_tokens(
            args,
            tokens=tokens,
            log_probs=turn.log_probs if turn else None,
            trainable=turn is not None,
            meta_info=turn.meta if turn else None,
        )
        return
    sample.tokens += tokens
    sample.response_length += len(tokens)
    sample.loss_mask += [int(turn is not None)] * len(tokens)
    sample.rollout_log_probs += turn.log_probs if turn else [0.0] * len(tokens)
    if turn:
        sample.update_from_meta_info(args, turn.meta)
