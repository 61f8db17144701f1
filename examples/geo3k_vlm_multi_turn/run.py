"""The command line of both scripts: what to train, on which nodes, and `--dry-run`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from geo3k_vlm_multi_turn import training
from slime_npu import environ, launcher

EXAMPLES = Path(__file__).resolve().parents[1]
DESCRIPTION = """\
Trains Qwen3-VL on geo3k by {name} on Ascend NPUs, with slime. On several nodes, run it on one with
--nodes and --host, and on each of the others with --join.
"""
EPILOG = """\
What follows -- goes to slime's train.py after all else, where the last of two wins:
    … --model /models/Qwen3-VL-8B-Instruct --data /data/train.parquet -- --save /ckpt --lr 5e-7
It ends with the job's exit code; 2: refused, nothing was started; 3: Ray failed; 130: Ctrl-C.
"""


def main(algorithm: training.Algorithm, words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    extra: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, extra = words[:at], words[at + 1 :]
    given = _parser(algorithm).parse_args(words)
    try:
        return _run(algorithm, given, extra)
    except (ValueError, environ.NoCANN) as error:
        print(f"Nothing was started: {error}", file=sys.stderr)
        return launcher.REFUSED
    except launcher.LaunchError as error:
        start = "Nothing was started: " if error.code == launcher.REFUSED else ""
        print(f"{start}{error}", file=sys.stderr)
        return error.code


def _run(algorithm: training.Algorithm, given: argparse.Namespace, extra: Sequence[str]) -> int:
    sizes = training.Sizes(
        **{f.name: getattr(given, f.name) for f in dataclasses.fields(training.Sizes)}
    )
    cluster = launcher.Cluster(
        host=given.host if given.join is None else given.join,
        nodes=sizes.nodes,
        devices=sizes.devices,
        cpus=given.cpus,
        port=given.port,
        dashboard_port=given.dashboard_port,
        there=given.ray,
    )
    if given.join is not None:
        if given.dry_run:
            raise ValueError("--dry-run shows the other nodes' command where --join is not given")
        return launcher.serve(cluster, given.host, environ.job(given.number))
    slime = training.Slime(given.slime or _checkout("slime", "--slime"))
    megatron = given.megatron or _checkout("megatron.training", "--megatron")
    if not (megatron / "megatron" / "training").is_dir():
        raise ValueError(f"{megatron} is no checkout of Megatron-LM: it has no megatron/training")
    model, data = _existing(given)
    arguments = training.arguments(algorithm, slime, model, data, sizes)
    command = [
        sys.executable,
        str(slime.root / "train.py"),
        *training.command_line(arguments),
        *extra,
    ]
    _check_backend(command)
    refusals: list[str] = []
    try:
        variables = environ.job(given.number)
    except environ.NoCANN as error:
        if not given.dry_run:
            raise
        refusals, variables = [str(error)], {}
    paths = [EXAMPLES, EXAMPLES.parent, slime.root, megatron]
    before = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    variables["PYTHONPATH"] = ":".join([*map(str, paths), *filter(None, [before])])
    job = launcher.Job(command, variables, sizes.nodes * (sizes.train + sizes.rollout))
    if not given.dry_run:
        return launcher.launch(job, cluster)
    print(launcher.script(job, cluster))
    refusals = refusals or launcher.refusals(job, cluster)
    for reason in refusals:
        print(f"It would be refused here: {reason}", file=sys.stderr)
    return launcher.REFUSED if refusals else 0


def _parser(algorithm: training.Algorithm) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION.format(name=algorithm.name.upper()),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    path = {"type": _path, "metavar": "PATH"}
    parser.add_argument("--model", **path, help="Qwen3-VL's Hugging Face checkpoint, a folder")
    parser.add_argument("--data", **path, help="the train.parquet that dataset.py wrote")
    parser.add_argument("--slime", **path, help="slime's checkout [where it is installed from]")
    parser.add_argument("--megatron", **path, help="Megatron-LM's [where it is installed from]")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what it would run; run nothing"
    )

    group = parser.add_argument_group("sizes")
    told = dict(re.findall(r"^    (\w+)  +(.+)$", training.Sizes.__doc__ or "", re.MULTILINE))
    for field in dataclasses.fields(training.Sizes):
        flag = f"--{field.name.replace('_', '-')}"
        about = f"{told[field.name]} [{field.default}]"
        group.add_argument(flag, type=int, default=field.default, metavar="N", help=about)

    group = parser.add_argument_group("Ray")
    group.add_argument("--host", default="127.0.0.1", help="this node's address [127.0.0.1]")
    group.add_argument(
        "--join", metavar="HEAD", help="only give this node to the run at address HEAD"
    )
    group.add_argument(
        "--ray", action="store_true", help="use the Ray that runs at --host, and leave it"
    )
    group.add_argument(
        "--port", type=int, default=6379, help="of Ray's head; it takes the next too [6379]"
    )
    group.add_argument("--dashboard-port", type=int, default=8265, help="likewise [8265]")
    group.add_argument(
        "--cpus",
        type=int,
        help="processors that Ray counts on each node, one an NPU at least [all]",
    )
    group.add_argument(
        "--number", type=int, default=0, help="tells runs that share a host apart [0]"
    )
    return parser


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _existing(given: argparse.Namespace) -> tuple[training.Model, Path]:
    """The model and the data, or a ValueError that says how to get what is missing."""
    if given.model is None:
        raise ValueError(
            "no model: give --model FOLDER. To get it: "
            "hf download Qwen/Qwen3-VL-8B-Instruct --local-dir FOLDER"
        )
    model = training.Model.read(given.model)
    script = Path(__file__).with_name("dataset.py")
    if given.data is None:
        raise ValueError(f"no data: give --data FILE. To make it: python {script} --to FOLDER")
    if not given.data.is_file():
        raise ValueError(
            f"no data at {given.data}. To make it: python {script} --to {given.data.parent}"
        )
    return model, given.data


def _checkout(module: str, flag: str) -> Path:
    """The folder that holds a module's top package, without importing the module itself."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{module} is not installed: give its checkout with {flag}")
    return Path(next(iter(spec.submodule_search_locations))).parents[module.count(".")]


def _check_backend(command: Sequence[str]) -> None:
    """Only Megatron trains on NPUs; anything else would end without having trained."""
    asked = [os.environ.get("SLIME_SCRIPT_TRAIN_BACKEND", "megatron")]
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--train-backend"):
            asked.append(word.partition("=")[2] or following)
    wrong = sorted(set(asked) - {"megatron"})
    if wrong:
        raise ValueError(f"backend {wrong[0]!r}: on NPUs only 'megatron' trains")
