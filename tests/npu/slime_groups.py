"""Makes slime's own placement groups and training actors, and prints where each of them is.

Run by test_examples.py with one tree of slime on the path, patched or not, on a host with NPUs or
with GPUs: `python slime_groups.py NPU|GPU`. Each actor is slime's TrainRayActor, which looks for
its device as it starts; it does not train. slime/ray/rollout.py, which imports SGLang, is left out.
"""

import json
import os
import sys
import types
from argparse import Namespace


def without_rollout():
    """Stands in for modules that load SGLang and Megatron, in each process before slime's own."""
    rollout = types.ModuleType("slime.ray.rollout")
    rollout.RolloutManager = None
    sys.modules["slime.ray.rollout"] = rollout


without_rollout()

import ray  # noqa: E402
from slime.ray import placement_group  # noqa: E402
from slime.ray.train_actor import TrainRayActor  # noqa: E402


class Actor(TrainRayActor):
    """A training actor that only says where it is."""

    sleep = wake_up = train = save_model = update_weights = None
    connect_actor_critic = _get_parallel_config = None

    def init(self, *args, **kwargs):
        return 0

    def where(self, kind):
        ids = ray.get_runtime_context().get_accelerator_ids()[kind]
        return {"rank": os.environ["RANK"], "local": os.environ["LOCAL_RANK"], "ids": ids}


def main(kind):
    modules = types.ModuleType("slime.backends.megatron_utils.actor")
    modules.MegatronTrainRayActor = Actor
    sys.modules["slime.backends.megatron_utils"] = types.ModuleType("slime.backends.megatron_utils")
    sys.modules["slime.backends.megatron_utils.actor"] = modules
    asked = {"num_gpus": 16} if kind == "GPU" else {"resources": {"NPU": 16}, "num_gpus": 0}
    ray.init(
        address="local",
        num_cpus=32,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": without_rollout},
        **asked,
    )
    args = Namespace(**json.loads(os.environ["SLIME_ARGUMENTS"]))
    groups = placement_group.create_placement_groups(args)
    found = {"rollout": groups["rollout"][2], "bundles": groups["actor"][0].bundle_specs}
    for role in ("actor", "critic"):
        nodes, devices = (getattr(args, f"{role}_num_{n}") for n in ("nodes", "gpus_per_node"))
        group = placement_group.allocate_train_group(args, nodes, devices, groups[role])
        if hasattr(group, "create"):
            group.create()
        found[role] = ray.get([actor.where.remote(kind) for actor in group._actor_handlers])
    print(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
