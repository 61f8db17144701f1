"""The examples: their arguments, data set, rollout and command line; and all of it in slime itself.

What needs slime and Megatron at the commits this stack has runs where FORKMAN_STACK names a folder
that tests/npu/stack.py made, and is skipped by name elsewhere.
"""

import argparse
import asyncio
import dataclasses
import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from test_launcher import ports

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLE = PROJECT / "examples" / "geo3k_vlm_multi_turn"
sys.path[:0] = [str(PROJECT / "examples")]

from geo3k_vlm_multi_turn import dataset, rollout, training  # noqa: E402
from geo3k_vlm_multi_turn.training import GRPO, PPO, Model, Sizes, Slime, command_line  # noqa: E402

pytestmark = pytest.mark.plumbing

EIGHT_B = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
}

# Which of its own arguments a slime declares that decide how it is spoken to, by release.
SLIMES = {
    "v0.2.2": ("critic-lr", "critic-num-gpus-per-node", "megatron-to-hf-mode"),
    "v0.3.0": ("megatron-config-path", "megatron-to-hf-mode"),
    "v0.3.1": ("megatron-config-path",),
}


def write_model(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**EIGHT_B, **changes}))
    return folder


def write_slime(folder, flags):
    """A tree that declares these arguments, and has no others of slime's."""
    (folder / "slime" / "utils").mkdir(parents=True, exist_ok=True)
    (folder / "train.py").touch()
    lines = [f'parser.add_argument("--{flag}")' for flag in flags]
    (folder / "slime" / "utils" / "arguments.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def model(tmp_path):
    return Model.read(write_model(tmp_path / "model"))


@pytest.fixture(params=SLIMES)
def slime(request, tmp_path):
    return Slime(write_slime(tmp_path / request.param, SLIMES[request.param]))


def arguments(algorithm, slime, model, **sizes):
    return training.arguments(algorithm, slime, model, Path("/data/train.parquet"), Sizes(**sizes))


# -- the arguments ---------------------------------------------------------------------------------


def test_the_algorithms_differ_only_where_they_say_so(slime, model):
    grpo, ppo = arguments(GRPO, slime, model), arguments(PPO, slime, model)
    differ = {flag for flag in grpo | ppo if grpo.get(flag) != ppo.get(flag)}
    own = {*GRPO.arguments, *PPO.arguments}
    critics = {flag for flag in differ - own if flag.startswith("critic-")}
    assert differ - own - critics <= {"megatron-config-path", "actor-num-gpus-per-node"}
    assert {flag: ppo[flag] for flag in PPO.arguments} == dict(PPO.arguments)


def test_a_critic_s_learning_rate_arrives_in_the_words_of_each_slime(slime, model):
    ppo = arguments(PPO, slime, model)
    if slime.takes("critic-lr"):
        assert ppo["critic-lr"] == 1e-5 and "megatron-config-path" not in ppo
    else:
        import yaml

        (critic,) = yaml.safe_load(Path(ppo["megatron-config-path"]).read_text())["megatron"]
        assert critic["role"] == "critic" and critic["overrides"] == {"lr": 1e-5}
        assert not [flag for flag in ppo if flag.startswith("critic-")]


def test_a_critic_has_half_of_the_devices_only_where_slime_gives_it_its_own(slime, model):
    ppo = arguments(PPO, slime, model)
    actor, critic = ppo["actor-num-gpus-per-node"], ppo.get("critic-num-gpus-per-node")
    own = slime.takes("critic-num-gpus-per-node")
    assert (actor, critic, ppo["rollout-num-gpus"]) == ((4, 4, 8) if own else (8, None, 8))


def test_a_slime_without_bridge_takes_our_provider(slime, model):
    grpo = arguments(GRPO, slime, model)
    if slime.takes("megatron-to-hf-mode"):
        assert grpo["megatron-to-hf-mode"] == "bridge" and "spec" not in grpo
    else:
        assert grpo["spec"] == ["slime_npu.qwen3_vl", "provider"]


def test_a_slime_that_takes_a_critic_s_arguments_in_no_form_we_know_is_refused(tmp_path, model):
    slime = Slime(write_slime(tmp_path / "s", ["megatron-to-hf-mode"]))
    with pytest.raises(ValueError, match="neither --megatron-config-path nor --critic-lr"):
        arguments(PPO, slime, model)


def test_what_is_no_tree_of_slime_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no source tree of slime"):
        Slime(tmp_path)


words = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1).filter(
    lambda word: not word.startswith("-")
)
values = st.one_of(
    words, st.integers(0), st.floats(0, 1e6), st.booleans(), st.none(), st.lists(words, min_size=1)
)


@given(st.dictionaries(st.from_regex(r"[a-z]+(-[a-z]+)*", fullmatch=True), values))
def test_a_command_line_is_read_back_as_what_was_said(said):
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for flag, value in said.items():
        if isinstance(value, bool) or value is None:
            parser.add_argument(f"--{flag}", dest=flag, action="store_true")
        elif isinstance(value, list):
            parser.add_argument(f"--{flag}", dest=flag, nargs="+")
        else:
            parser.add_argument(f"--{flag}", dest=flag, type=type(value))
    read = vars(parser.parse_args(command_line(said)))
    assert read == {f: bool(v) if v is None else v for f, v in said.items()}


def test_every_flag_has_a_contract_in_the_audit(slime, model):
    held = set()
    for file in PROJECT.glob("forks/*/contracts.toml"):
        contracts = tomllib.loads(file.read_text())["contract"]
        prefix = "--sglang-" if file.parent.name == "sglang" else "--"
        held |= {c["flag"].replace("--", prefix, 1) for c in contracts if "flag" in c}
    for algorithm in (GRPO, PPO):
        used = {f"--{flag}" for flag in arguments(algorithm, slime, model)}
        assert used <= held, f"in no forks/*/contracts.toml: {sorted(used - held)}"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"train": 16}, "16 NPUs that train and 8 that generate are 24; a node has 16"),
        ({"train": 6, "tensor_parallel": 4}, "tensor parallel 4 does not divide"),
        ({"train": 7, "tensor_parallel": 1}, "7 is odd"),
        ({"train": 6, "tensor_parallel": 3}, "8 key-value heads"),
        ({"prompts": 3, "samples": 1, "tensor_parallel": 2}, "do not spread evenly over 2"),
        ({"rollout": 0}, "rollout: at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_what_does_not(tmp_path, model, sizes, message):
    slime = Slime(write_slime(tmp_path / "s", SLIMES["v0.2.2"]))
    with pytest.raises(ValueError, match=re.escape(message)):
        arguments(PPO, slime, model, **sizes)


def test_a_small_model_runs_by_the_same_builder(tmp_path, slime):
    small = {"hidden_size": 64, "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 160}
    text = {**EIGHT_B["text_config"], **small, "rope_theta": None, "tie_word_embeddings": True}
    text["rope_parameters"] = {"rope_theta": 10000.0}  # where transformers 5 writes it
    model = Model.read(write_model(tmp_path / "small", text_config=text))
    made = arguments(GRPO, slime, model, devices=2, train=1, rollout=1, tensor_parallel=1)
    expected = {"hidden-size": 64, "num-layers": 4, "rotary-base": 10000, "vocab-size": 160}
    assert {flag: made[flag] for flag in expected} == expected
    assert not made["untie-embeddings-and-output-weights"] and not made["sequence-parallel"]


@pytest.mark.parametrize("folder", ["absent", "llama"])
def test_what_is_no_qwen3_vl_is_refused(tmp_path, folder):
    write_model(tmp_path / "llama", model_type="llama")
    with pytest.raises(ValueError, match=r"no model at|holds a 'llama'"):
        Model.read(tmp_path / folder)


# -- the data set ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small geo3k: images of several kinds, as Hugging Face's parquet has them."""
    from datasets import Dataset, Features, Image, Sequence, Value
    from PIL import Image as Picture

    black = Picture.new("RGBA", (8, 6), (0, 0, 0, 0))  # nothing drawn on transparent paper
    red = Picture.new("RGB", (12, 4), "red")
    rows = {
        "images": [[red], [red, red], [black], [Picture.new("L", (5, 5), 7)]],
        "problem": ["<image>Find x.", "Find y.", "Is <image> blank?", "<image>\\angle 1?"],
        "answer": ["12", "2 \\sqrt { 3 }", "yes", "0.5"],
    }
    features = Features(
        {"images": Sequence(Image()), "problem": Value("string"), "answer": Value("string")}
    )
    folder = tmp_path_factory.mktemp("geometry3k")
    Dataset.from_dict(rows, features=features).to_parquet(folder / "train-00000.parquet")
    return folder


def prepare(source, to, *words):
    command = [sys.executable, EXAMPLE / "dataset.py", "--from", source, "--to", to, *words]
    return subprocess.run(command, capture_output=True, text=True)


def read(file):
    import pyarrow.parquet as pq

    return pq.read_table(file).to_pylist()


def picture(uri):
    import base64

    from PIL import Image

    start = "data:image/png;base64,"
    assert uri.startswith(start)
    return Image.open(io.BytesIO(base64.b64decode(uri.removeprefix(start), validate=True)))


def test_the_data_set_is_prepared_by_its_command_with_a_progress_bar(source, tmp_path):
    done = prepare(source, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 problems" in done.stdout and "4/4" in done.stderr
    rows = read(tmp_path / "train.parquet")
    assert [row["answer"] for row in rows] == ["12", "2 \\sqrt { 3 }", "yes", "0.5"]
    assert all(row["problem"].endswith(rollout.INSTRUCTION) for row in rows)


def test_each_image_has_its_place_in_the_problem(source, tmp_path):
    dataset.write(dataset.load(str(source), "train"), tmp_path / "train.parquet")
    rows = read(tmp_path / "train.parquet")
    assert [row["problem"].count("<image>") for row in rows] == [1, 2, 1, 1]
    assert [len(row["images"]) for row in rows] == [1, 2, 1, 1]


def test_images_keep_their_pixels_and_transparency_is_white(source, tmp_path):
    dataset.write(dataset.load(str(source), "train"), tmp_path / "train.parquet")
    rows = read(tmp_path / "train.parquet")
    found = [picture(row["images"][0]) for row in rows]
    assert [(i.size, i.mode, i.getpixel((0, 0))) for i in found] == [
        ((12, 4), "RGB", (255, 0, 0)),
        ((12, 4), "RGB", (255, 0, 0)),
        ((8, 6), "RGB", (255, 255, 255)),
        ((5, 5), "RGB", (7, 7, 7)),
    ]


def test_the_images_are_what_the_model_s_own_loader_reads(source, tmp_path):
    tiny_models.import_transformers()
    from qwen_vl_utils import process_vision_info

    dataset.write(dataset.load(str(source), "train"), tmp_path / "train.parquet")
    images = read(tmp_path / "train.parquet")[1]["images"]
    content = [{"type": "image", "image": image} for image in images]
    loaded, _ = process_vision_info([{"role": "user", "content": content}], image_patch_size=16)
    assert [image.getpixel((0, 0)) for image in loaded] == [(255, 0, 0)] * 2


GOOD = {"images": [], "problem": "Find x.", "answer": "1"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "problem": "<image>Find x."}, "row 1 has 0 images and 1 places for them"),
        ({**GOOD, "problem": " "}, "row 1 has no problem"),
        ({**GOOD, "answer": None}, "row 1 has no answer"),
        ({**GOOD, "images": [{"bytes": b"no image"}]}, "row 1 has an image that cannot be read"),
        ({**GOOD, "images": [{"bytes": None}]}, "row 1 has no image but a NoneType"),
    ],
)
def test_a_row_that_cannot_be_converted_leaves_what_was_there(tmp_path, row, message):
    target = tmp_path / "train.parquet"
    dataset.write([GOOD], target)
    before = target.read_bytes()
    with pytest.raises(ValueError, match=re.escape(message)):
        dataset.write([GOOD, row], target)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_source_without_the_columns_is_an_error(tmp_path):
    from datasets import Dataset

    Dataset.from_dict({"question": ["?"]}).to_parquet(tmp_path / "train.parquet")
    done = prepare(tmp_path, tmp_path / "out")
    assert done.returncode == 1
    assert "no column answer, images, problem" in done.stderr


def test_a_folder_without_the_split_is_an_error(source, tmp_path):
    done = prepare(source, tmp_path, "--split", "test")
    assert done.returncode == 1
    assert "no test*.parquet in this folder" in done.stderr


# -- the rollout -----------------------------------------------------------------------------------


def call(answer):
    said = json.dumps({"name": "calc_score", "arguments": {"answer": answer}})
    return f"Let me see. <tool_call>{said}</tool_call>"


def played(script, limit=10_000, turns=3):
    """`play` against a server that says `script`; tokens are characters."""
    asked, heard = [], []

    async def complete(tokens, left):
        text, finish = script[len(asked)]
        text = text[:left]
        asked.append((list(tokens), left))
        return rollout.Turn(text, [ord(c) for c in text], [-0.5] * len(text), finish, {})

    def append(tokens, turn):
        heard.append(("model" if turn else "tool", "".join(map(chr, tokens))))

    def observe(said):
        return [ord(c) for c in f"[{said}]"]

    end = rollout.play(complete, append, observe, lambda a: a == "12", [63], limit, turns)
    return asyncio.run(end), asked, heard


def test_a_turn_without_a_call_is_the_answer():
    end, asked, heard = played([("It is 12.", "stop")])
    assert end == rollout.Played("completed", "It is 12.")
    assert (len(asked), heard) == (1, [("model", "It is 12.")])


def test_the_tool_says_whether_an_answer_is_right_and_the_model_goes_on():
    end, _, heard = played([(call("11"), "stop"), (call(12), "stop"), ("It is 12.", "stop")])
    assert end.answer == "It is 12."
    assert [who for who, _ in heard] == ["model", "tool", "model", "tool", "model"]
    assert "11 is wrong" in heard[1][1] and "12 is right" in heard[3][1]


def test_after_three_turns_the_tool_is_not_asked_any_more():
    end, asked, heard = played([(call("1"), "stop"), (call("2"), "stop"), (call("12"), "stop")])
    assert end == rollout.Played("completed", call("12"))
    assert len(asked) == 3 and heard[-1][0] == "model"
    assert "You cannot check again" in heard[3][1] and "again" not in heard[1][1]


@pytest.mark.parametrize(("finish", "status"), [("length", "truncated"), ("abort", "aborted")])
def test_a_turn_that_did_not_end_by_itself_is_the_last(finish, status):
    end, asked, _ = played([(call("11"), "stop"), (call("12"), finish)])
    assert (end.status, len(asked)) == (status, 2)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[1]",
        '{"name": "other", "arguments": {"answer": "12"}}',
        '{"name": "calc_score"}',
        '{"name": "calc_score", "arguments": "12"}',
        '{"name": "calc_score", "arguments": {"answer": " "}}',
        '{"name": "calc_score", "arguments": {"answer": true}}',
        '{"name": "calc_score", "arguments": {"answer": ["12"]}}',
    ],
)
def test_a_call_that_cannot_be_read_is_answered_with_how_to_write_one(text):
    said = rollout.respond(f"<tool_call>{text}</tool_call>", lambda answer: True, last_check=False)
    assert said.startswith("This is no call of calc_score. Write <tool_call>")
    assert rollout.respond(said, lambda answer: answer == "12", last_check=False).startswith(
        "12 is"
    )


turn = st.tuples(
    st.one_of(
        st.builds(call, st.sampled_from(["11", "12", " "])), st.text(min_size=1, max_size=20)
    ),
    st.sampled_from(["stop", "stop", "stop", "length", "abort"]),
)


@given(st.lists(turn, min_size=3, max_size=3), st.integers(1, 400))
def test_whatever_the_model_says_the_conversation_keeps_its_bounds(script, limit):
    end, asked, heard = played(script, limit)
    said = [ord(c) for _, text in heard for c in text]
    assert 1 <= len(asked) <= 3 and len(said) <= limit
    for tokens, left in asked:  # each turn is asked with exactly what came before it
        assert tokens == [63, *said[: len(tokens) - 1]] and left == limit - (len(tokens) - 1)
    assert not heard or heard[-1][0] == "model"
    assert end.status in ("completed", "truncated", "aborted")


class Template:
    """A tokenizer whose tokens are characters; with `forget` only the last turn is shown."""

    def __init__(self, forget=False):
        self.forget = forget

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **options):
        shown = messages[-1:] if self.forget else messages
        turns = "".join(f"<{m['role']}>{m['content']}</>\n" for m in shown)
        return turns + ("<assistant>" if add_generation_prompt else "") + options.get("end", "")

    def encode(self, text, add_special_tokens):
        return [ord(c) for c in text]


def test_an_observation_is_what_the_template_puts_after_a_finished_turn():
    ids = rollout.observation(Template(), "11 is wrong.")
    assert "".join(map(chr, ids)) == "\n<tool>11 is wrong.</>\n<assistant>"


def test_a_template_that_changes_earlier_turns_is_refused():
    with pytest.raises(ValueError, match="changes earlier turns"):
        rollout.observation(Template(forget=True), "11 is wrong.")


# -- the command line ------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path):
    """Everything a run needs, as options; and the environment of a simulated host."""
    model, data = write_model(tmp_path / "model"), tmp_path / "train.parquet"
    dataset.write([GOOD], data)
    slime = write_slime(tmp_path / "slime", SLIMES["v0.2.2"])
    (tmp_path / "Megatron-LM" / "megatron" / "training").mkdir(parents=True)
    options = {
        "--model": str(model),
        "--data": str(data),
        "--slime": str(slime),
        "--megatron": str(tmp_path / "Megatron-LM"),
        "--cpus": "16",
    }
    return options, os.environ | {"SLIME_NPU_SIMULATOR_DEVICES": "16"}


def run(host, *words, algorithm="grpo", program=None, **changes):
    options, environ = host
    options = [w for pair in (options | changes).items() if pair[1] is not None for w in pair]
    program = program or [sys.executable, EXAMPLE / f"run_geo3k_vlm_multi_turn_{algorithm}_npu.py"]
    return subprocess.run(
        [*program, *options, *words], env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_dry_run_prints_environment_ray_and_arguments_and_runs_nothing(host, algorithm):
    options = host[0]
    done = run(host, "--dry-run", "--", "--lr", "3e-7", algorithm=algorithm)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout.replace("\\\n", ""), comments=True)
    chosen = {"grpo": GRPO, "ppo": PPO}[algorithm]
    slime, model = Slime(Path(options["--slime"])), Model.read(Path(options["--model"]))
    made = training.arguments(chosen, slime, model, Path(options["--data"]))
    train = [str(slime.root / "train.py"), *command_line(made), "--lr", "3e-7"]
    assert words[-len(train) :] == train
    assert words[words.index("start") + 1] == "--head" and "submit" in words
    exported = dict(w.split("=", 1) for w in words if re.match(r"[A-Z_]+=", w))
    assert exported["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert {str(PROJECT), str(slime.root)} <= set(exported["PYTHONPATH"].split(":"))


MISSING = [
    ({"--model": None}, "no model: give --model FOLDER. To get it: hf download"),
    ({"--model": "/nowhere"}, "no model at /nowhere"),
    ({"--data": None}, "no data: give --data FILE. To make it: python"),
    ({"--data": "/nowhere/train.parquet"}, "no data at /nowhere/train.parquet"),
    ({"--slime": "/nowhere"}, "/nowhere is no source tree of slime"),
    ({"--slime": None}, "slime is not installed: give its checkout with --slime"),
    ({"--megatron": "/nowhere"}, "/nowhere is no checkout of Megatron-LM"),
]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize(("changes", "message"), MISSING, ids=[str(c) for c, _ in MISSING])
def test_what_is_missing_is_an_error_before_anything_starts(host, changes, message, dry):
    done = run(host, *dry, **changes)
    assert done.returncode == 2
    assert f"Nothing was started: {message}" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("extra", [["--train-backend", "fsdp"], ["--train-backend=fsdp"]])
def test_another_backend_is_an_error_before_anything_starts(host, extra):
    done = run(host, "--", *extra)
    assert done.returncode == 2
    assert "backend 'fsdp': on NPUs only 'megatron' trains" in done.stderr


def test_another_backend_in_the_environment_of_old_scripts_is_too(host):
    options, environ = host
    done = run((options, environ | {"SLIME_SCRIPT_TRAIN_BACKEND": "fsdp"}))
    assert (done.returncode, "backend 'fsdp'" in done.stderr) == (2, True)


def test_too_few_npus_are_an_error_before_anything_starts(host):
    options, environ = host
    done = run((options, environ | {"SLIME_NPU_SIMULATOR_DEVICES": "8"}))
    assert done.returncode == 2
    assert "16 NPUs were asked for, and this node has 8" in done.stderr


def test_a_host_without_npus_is_an_error_and_its_dry_run_says_so(host):
    options, environ = host
    for words in ([], ["--dry-run"]):
        done = run((options, environ | {"SLIME_NPU": "0"}), *words)
        assert done.returncode == 2
        assert "no NPU can be used here: SLIME_NPU=0 says so" in done.stderr


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Sizes)])
def test_each_size_is_an_option(host, name):
    flag = f"--{name.replace('_', '-')}"
    done = run(host, flag, "0", "--dry-run")
    assert (done.returncode, f"{name}: at least 1" in done.stderr) == (2, True)


def test_a_run_ends_as_train_py_does_in_the_environment_of_the_dry_run(host):
    train = """
        import os, sys
        import geo3k_vlm_multi_turn.rollout, slime_npu
        print("trains with", *sys.argv[1:3], os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
        sys.exit(7)
    """
    Path(host[0]["--slime"], "train.py").write_text(textwrap.dedent(train))
    where = {f"--{name.replace('_', '-')}": str(port) for name, port in ports().items()}
    options, environ = host
    environ = environ | {"RAY_AUTH_MODE": "disabled"}
    done = run((options, environ), **where)
    assert (done.returncode, "trains with --num-layers 36 1" in done.stdout) == (7, True), done


def cann(folder):
    """An installed CANN, as far as its set_env.sh shows."""
    folder.mkdir(parents=True)
    (folder / "set_env.sh").write_text(f"export ASCEND_HOME_PATH={folder}\nexport FOUND={folder}\n")
    return folder


def shell(algorithm, environ, folder):
    """A run script, with a `python3` that says which CANN it got."""
    python = folder / "bin" / "python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$FOUND" "$@"\nexit 7\n')
    python.chmod(0o755)
    environ = {"HOME": str(folder), "PATH": f"{python.parent}:{os.environ['PATH']}", **environ}
    script = EXAMPLE / f"run_{algorithm}_npu.sh"
    return subprocess.run(
        ["bash", script, "--nodes", "2"], env=environ, capture_output=True, text=True
    )


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    ("where", "variable"),
    [
        ("opt/cann", "ASCEND_HOME_PATH"),
        ("opt/ascend-toolkit/latest", "ASCEND_TOOLKIT_HOME"),
        ("Ascend/ascend-toolkit", None),
        ("Ascend/cann", None),
    ],
)
def test_a_shell_script_sources_cann_and_passes_everything_on(tmp_path, algorithm, where, variable):
    home = cann(tmp_path / where)
    done = shell(algorithm, {variable: str(home)} if variable else {}, tmp_path)
    script = EXAMPLE / f"run_geo3k_vlm_multi_turn_{algorithm}_npu.py"
    assert (done.returncode, done.stdout) == (7, f"{home} {script} --nodes 2\n"), done.stderr


@pytest.mark.parametrize("environ", [{}, {"ASCEND_HOME_PATH": "/nowhere/cann"}])
def test_a_shell_script_without_cann_says_where_it_looked(tmp_path, environ):
    done = shell("grpo", environ, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nowhere/cann is no CANN" in done.stderr or f"{tmp_path}/Ascend" in done.stderr


# -- in slime itself -------------------------------------------------------------------------------

RELEASES = ("v0.2.2", "v0.2.3", "v0.2.4", "v0.3.0", "v0.3.1")


@pytest.fixture
def stack(request):
    """The folder with one release's trees."""
    folder = os.environ.get("FORKMAN_STACK")
    if folder is None:
        pytest.skip("FORKMAN_STACK names no folder of patched trees (tests/npu/stack.py makes one)")
    return Path(folder) / request.param


def every_release(*releases):
    return pytest.mark.parametrize("stack", releases or RELEASES, indirect=True)


def in_stack(stack, script, *words, slime="slime", kind="NPU", **environ):
    """The JSON that a script of tests/npu prints, with this stack's trees on the path."""
    from slime_npu import environ as npu

    here = [PROJECT, PROJECT / "examples", PROJECT / "tests" / "npu"]
    trees = [stack / slime, stack / "megatron", stack / "mindspeed", stack / "sglang" / "python"]
    path = ":".join(map(str, [*trees, *here]))
    if kind == "GPU":
        ours = {"SLIME_NPU": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        hidden = ("SLIME_NPU_SIMULATOR", "PYTHONPATH", "ASCEND")
        outer = {n: v for n, v in os.environ.items() if not n.startswith(hidden)}
    else:
        ours = npu.job() | {"SLIME_NPU_SIMULATOR_DEVICES": "16"}
        path, outer = f"{path}:{ours['PYTHONPATH']}", dict(os.environ)
    done = subprocess.run(
        [sys.executable, PROJECT / "tests" / "npu" / script, *words],
        env={**outer, **ours, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled", **environ},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("{"))  # Ray speaks too
    return json.loads(said)


@every_release()
@pytest.mark.parametrize("algorithm", [GRPO, PPO], ids=["grpo", "ppo"])
def test_slime_s_own_parser_takes_every_argument(stack, algorithm, model):
    slime = Slime(stack / "slime")
    full = json.loads((model.path / "config.json").read_text())
    full["vision_config"] = {"model_type": "qwen3_vl"}
    (model.path / "config.json").write_text(json.dumps(full))
    made = arguments(algorithm, slime, model)
    found = in_stack(stack, "slime_parse.py", *command_line(made))
    assert found["unknown"] == []
    got = found["values"]
    for flag, value in made.items():
        name = flag.replace("-", "_")
        if name in got and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            assert got[name] == value, flag
    assert (got["max_turns"], got["offload_train"]) == (3, False)
    assert got["load"] == got["hf_checkpoint"] == str(model.path)
    assert got["world_size"] == made["actor-num-gpus-per-node"]
    assert got["use_critic"] is (algorithm is PPO)
    if algorithm is PPO:
        assert got["critic_lr"] == 1e-5


@every_release()
def test_the_model_is_what_slime_s_own_script_says(stack, model):
    script = stack / "slime" / "scripts" / "models" / "qwen3-8B.sh"
    show = f'source {shlex.quote(str(script))} && printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    environ = os.environ | {"MODEL_ARGS_ROTARY_BASE": "5000000"}
    said = subprocess.check_output(["bash", "-c", show], env=environ, text=True).split("\n")[:-1]
    ours = command_line(model.arguments())

    def pairs(words):
        line = " ".join(words).replace("1e-6", "1e-06")
        return sorted(part.strip() for part in line.split("--") if part.strip())

    assert pairs(ours) == pairs(said)


def group_arguments(slime, model):
    """PPO's, as slime's placement groups read them."""
    made = arguments(PPO, slime, model)
    actor = made["actor-num-gpus-per-node"]
    return json.dumps(
        {
            "debug_train_only": False,
            "debug_rollout_only": False,
            "colocate": False,
            "rollout_external": False,
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": actor,
            "critic_num_nodes": 1,
            "critic_num_gpus_per_node": actor,
            "rollout_num_gpus": made["rollout-num-gpus"],
            "use_critic": True,
            "kl_coef": 0,
            "train_env_vars": {},
            "offload_train": False,
            "train_backend": "megatron",
            "use_routing_replay": False,
        }
    )


@every_release("v0.2.2", "v0.3.1")
def test_each_training_actor_is_on_its_own_npu(stack, model):
    slime = Slime(stack / "slime")
    asked = group_arguments(slime, model)
    found = in_stack(stack, "slime_groups.py", "NPU", SLIME_ARGUMENTS=asked)
    assert found["bundles"] == [{"NPU": 1.0, "CPU": 1.0}] * 16
    assert found["rollout"] == list(range(8, 16))
    first = 4 if slime.takes("critic-num-gpus-per-node") else 0
    devices = 4 if first else 8
    for role, start in (("actor", 0), ("critic", first)):
        assert found[role] == [
            {"rank": str(i), "local": str(start + i), "ids": [str(start + i)]}
            for i in range(devices)
        ]


@every_release("v0.2.2", "v0.3.1")
def test_on_gpus_the_groups_are_what_unpatched_slime_makes(stack, model):
    asked = group_arguments(Slime(stack / "slime"), model)
    patched, unpatched = (
        in_stack(stack, "slime_groups.py", "GPU", slime=tree, kind="GPU", SLIME_ARGUMENTS=asked)
        for tree in ("slime", "unpatched")
    )
    assert patched == unpatched
    assert patched["bundles"] == [{"GPU": 1.0, "CPU": 1.0}] * 16


@every_release("v0.2.2", "v0.3.1")
def test_slime_plays_and_rewards_the_prepared_problems(stack, tmp_path):
    found = in_stack(stack, "slime_rollout.py", str(tmp_path))
    ends = {name: (f["status"], f["reward"], f["turns"]) for name, f in found.items()}
    assert ends == {
        "checks first": ("completed", 1, 2),
        "corrects itself": ("completed", 1, 3),
        "never stops asking": ("completed", 0, 3),
        "answers at once": ("completed", 0, 1),
        "runs out of tokens": ("truncated", 0, 1),
    }
    for one in found.values():
        assert one["asked with its own tokens"]
        assert one["images"] == [1] * one["turns"] and one["image patches"] == [24, 1536]
        assert "tool_response" not in one["trained"]  # only the model's own tokens are trained on
        assert all(log_prob == (-0.5 if mask else 0) for mask, log_prob in one["log_probs"])
    assert "11 is wrong" in found["corrects itself"]["response"]
