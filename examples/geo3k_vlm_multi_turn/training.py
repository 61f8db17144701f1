"""The arguments that slime trains Qwen3-VL with, for both algorithms and at every release.

`GRPO` and `PPO` hold what is the algorithm's own; all else is said once, in `arguments`. How a
release of slime wants things said is read from its source (`Slime`), not from its version:

| slime | a critic's arguments | its devices | Qwen3-VL comes from |
| --- | --- | --- | --- |
| v0.2.2 – v0.2.4 | `--critic-lr` | its own, half of those that train | Megatron-Bridge |
| v0.3.0 | `--megatron-config-path` | the actor's | Megatron-Bridge |
| v0.3.1 | `--megatron-config-path` | the actor's | slime_npu.qwen3_vl |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_npu.sglang import server_arguments

HERE = Path(__file__).resolve().parent

# A flag's values: one, several, True for a flag that takes none; False and None leave it out.
Value = str | int | float | list[Any] | bool | None
Arguments = dict[str, Value]


@dataclass(frozen=True)
class Algorithm:
    """What one algorithm has that the other has not.

    critic  the file that says how its critic differs from the actor; None where it has no critic
    """

    name: str
    arguments: Mapping[str, Value]
    critic: Path | None = None


GRPO = Algorithm(
    name="grpo",
    arguments={
        "advantage-estimator": "grpo",
        "kl-loss-type": "low_var_kl",
        "eps-clip": 0.2,
        "eps-clip-high": 0.28,
    },
)

PPO = Algorithm(
    name="ppo",
    arguments={
        "advantage-estimator": "ppo",
        "kl-loss-type": "k1",
        "eps-clip": 4e-4,
        "normalize-advantages": True,
        "num-critic-only-steps": 1,
    },
    critic=HERE / "critic.yaml",
)


@dataclass(frozen=True)
class Sizes:
    """How large a run is. The defaults train Qwen3-VL-8B on one node of 16 NPUs of 64 GB.

    nodes            nodes, all alike
    devices          NPUs of each node
    train            of these, NPUs that train
    rollout          and NPUs that generate, an engine each
    tensor_parallel  NPUs over which training splits a layer
    rollouts         rollouts in all; each is one step of the optimizer
    prompts          problems of a rollout
    samples          answers to each problem
    response         tokens of an answer, all its turns together
    tokens           tokens that an NPU trains on at once
    """

    nodes: int = 1
    devices: int = 16
    train: int = 8
    rollout: int = 8
    tensor_parallel: int = 4
    rollouts: int = 3000
    prompts: int = 32
    samples: int = 8
    response: int = 4096
    tokens: int = 16384


@dataclass(frozen=True)
class Slime:
    """A source tree of slime, asked what it takes."""

    root: Path

    def __post_init__(self) -> None:
        if not (self.root / "train.py").is_file() or not self._arguments.is_file():
            raise ValueError(
                f"{self.root} is no source tree of slime: it lacks train.py or "
                f"slime/utils/arguments.py. Give its checkout with --slime"
            )

    @property
    def _arguments(self) -> Path:
        return self.root / "slime" / "utils" / "arguments.py"

    def takes(self, flag: str) -> bool:
        """Whether slime itself declares `--flag`."""
        return f'"--{flag}"' in self._arguments.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Model:
    """A Hugging Face checkpoint of Qwen3-VL; `text` is its language model's configuration."""

    path: Path
    text: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Model:
        """Raises ValueError where `path` holds no such checkpoint."""
        file = path / "config.json"
        if not file.is_file():
            raise ValueError(f"no model at {path}: it has no config.json. Give its folder")
        config = json.loads(file.read_text(encoding="utf-8"))
        if config.get("model_type") != "qwen3_vl":
            raise ValueError(
                f"{path} holds a {config.get('model_type')!r}; this example trains 'qwen3_vl'"
            )
        text = dict(config["text_config"])
        text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
        return cls(path, text)

    @property
    def _rope_theta(self) -> float:
        """Where transformers 4 writes it, or 5."""
        theta = self.text.get("rope_theta") or self.text["rope_parameters"]["rope_theta"]
        return int(theta) if theta == int(theta) else theta

    def arguments(self) -> Arguments:
        """The model in Megatron's words."""
        text = self.text
        return {
            "num-layers": text["num_hidden_layers"],
            "hidden-size": text["hidden_size"],
            "ffn-hidden-size": text["intermediate_size"],
            "num-attention-heads": text["num_attention_heads"],
            "group-query-attention": True,
            "num-query-groups": text["num_key_value_heads"],
            "kv-channels": text["head_dim"],
            "qk-layernorm": True,
            "swiglu": True,
            "disable-bias-linear": True,
            "normalization": "RMSNorm",
            "norm-epsilon": text["rms_norm_eps"],
            "use-rotary-position-embeddings": True,
            "rotary-base": self._rope_theta,
            "vocab-size": text["vocab_size"],
            "untie-embeddings-and-output-weights": not text["tie_word_embeddings"],
        }


def arguments(
    algorithm: Algorithm, slime: Slime, model: Model, data: Path, sizes: Sizes | None = None
) -> Arguments:
    """What slime's train.py is called with, by flag; `command_line` writes it out.

    Raises ValueError where the sizes do not fit each other, the model or slime.
    """
    sizes = sizes or Sizes()
    own_devices = algorithm.critic is not None and slime.takes("critic-num-gpus-per-node")
    actor = sizes.train // 2 if own_devices else sizes.train
    _check(sizes, model, actor, own_devices)
    return {
        # The model.
        **model.arguments(),
        "hf-checkpoint": str(model.path),
        "load": str(model.path),
        "ref-load": str(model.path),
        **_provider(slime),
        # Devices. slime sorts them by node: training has the first, generation the others.
        "actor-num-nodes": sizes.nodes,
        "actor-num-gpus-per-node": actor,
        **(
            {"critic-num-nodes": sizes.nodes, "critic-num-gpus-per-node": actor}
            if own_devices
            else {}
        ),
        "rollout-num-gpus": sizes.nodes * sizes.rollout,
        "rollout-num-gpus-per-engine": 1,
        "num-gpus-per-node": sizes.devices,
        # The task.
        "prompt-data": str(data),
        "input-key": "problem",
        "label-key": "answer",
        "multimodal-keys": '{"image": "images"}',
        "apply-chat-template": True,
        "rollout-shuffle": True,
        "custom-generate-function-path": "geo3k_vlm_multi_turn.rollout.generate",
        "custom-rm-path": "geo3k_vlm_multi_turn.rollout.reward",
        "custom-config-path": str(HERE / "turns.yaml"),
        "num-rollout": sizes.rollouts,
        "rollout-batch-size": sizes.prompts,
        "n-samples-per-prompt": sizes.samples,
        "global-batch-size": sizes.prompts * sizes.samples,
        "rollout-max-response-len": sizes.response,
        "rollout-temperature": 1,
        # The algorithm.
        **algorithm.arguments,
        **_critic(algorithm, slime),
        "kl-coef": 0,
        "kl-loss-coef": 0,
        "entropy-coef": 0,
        # The optimizer, its states on the host.
        "optimizer": "adam",
        "lr": 1e-6,
        "lr-decay-style": "constant",
        "weight-decay": 0.1,
        "adam-beta1": 0.9,
        "adam-beta2": 0.98,
        "optimizer-cpu-offload": True,
        "overlap-cpu-optimizer-d2h-h2d": True,
        "use-precision-aware-optimizer": True,
        # Training.
        "train-backend": "megatron",
        "tensor-model-parallel-size": sizes.tensor_parallel,
        "sequence-parallel": sizes.tensor_parallel > 1,
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": 1,
        "use-dynamic-batch-size": True,
        "max-tokens-per-gpu": sizes.tokens,
        "balance-data": True,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "accumulate-allreduce-grads-in-fp32": True,
        "attention-softmax-in-fp32": True,
        "attention-backend": "flash",
        "use-flash-attn": True,
        "no-gradient-accumulation-fusion": True,
        # Generation.
        **{f"sglang-{name.replace('_', '-')}": value for name, value in _server().items()},
    }


def command_line(arguments: Arguments) -> list[str]:
    """The arguments as words for `train.py`."""
    words: list[str] = []
    for flag, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{flag}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    return words


def _server() -> dict[str, Any]:
    """SGLang's own arguments: an engine's memory and batches, and what it needs on NPU."""
    return server_arguments(
        mem_fraction_static=0.6,
        chunked_prefill_size=32768,
        max_prefill_tokens=4000,
        max_total_tokens=327680,
        cuda_graph_bs=[4, *range(8, 257, 8)],
    )


def _provider(slime: Slime) -> Arguments:
    """What makes the model: Bridge, or our own provider in a slime that has it no more."""
    if slime.takes("megatron-to-hf-mode"):
        return {"megatron-to-hf-mode": "bridge"}
    return {"spec": ["slime_npu.qwen3_vl", "provider"]}


def _critic(algorithm: Algorithm, slime: Slime) -> Arguments:
    """What the critic has of its own, in this slime's words."""
    if algorithm.critic is None:
        return {}
    if slime.takes("megatron-config-path"):
        return {"megatron-config-path": str(algorithm.critic)}
    import yaml

    (role,) = yaml.safe_load(algorithm.critic.read_text(encoding="utf-8"))["megatron"]
    given = {f"critic-{name}": value for name, value in role["overrides"].items()}
    for flag in given:
        if not slime.takes(flag):
            raise ValueError(
                f"the slime at {slime.root} has neither --megatron-config-path nor "
                f"--{flag}, which {algorithm.critic} asks for"
            )
    return given


def _check(sizes: Sizes, model: Model, actor: int, own_devices: bool) -> None:
    """Raise ValueError where sizes do not fit, with what would."""
    wrong = [name for name, value in vars(sizes).items() if value < 1]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: at least 1")
    used = sizes.train + sizes.rollout
    if used > sizes.devices:
        raise ValueError(
            f"{sizes.train} NPUs that train and {sizes.rollout} that generate are {used}; "
            f"a node has {sizes.devices}"
        )
    if own_devices and sizes.train % 2:
        raise ValueError(f"actor and critic halve the NPUs that train, and {sizes.train} is odd")
    if actor % sizes.tensor_parallel:
        who = f"half of {sizes.train}" if own_devices else str(sizes.train)
        raise ValueError(
            f"tensor parallel {sizes.tensor_parallel} does not divide the NPUs of an actor ({who})"
        )
    heads = model.text["num_key_value_heads"]
    if heads % sizes.tensor_parallel:
        raise ValueError(
            f"tensor parallel {sizes.tensor_parallel} does not divide the model's {heads} "
            f"key-value heads"
        )
    batch, replicas = sizes.prompts * sizes.samples, sizes.nodes * actor // sizes.tensor_parallel
    if batch % replicas:
        raise ValueError(
            f"{sizes.prompts} problems with {sizes.samples} answers each do not spread evenly over "
            f"{replicas} replicas of the model"
        )
