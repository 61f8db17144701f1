"""Actors and bundles ask Ray for NPUs."""

from collections.abc import Iterable

from rebase.recipe import (
    Code,
    Edit,
    Lost,
    Place,
    Recipe,
    Rule,
    Splice,
    add_argument,
    add_import,
    insert_after,
    insert_before,
    replace,
)


def first(code: str) -> Edit:
    """An edit: `code` as the first statement of the function found."""

    def edit(place: Place) -> Iterable[Splice]:
        body = place.code.field("body")
        if body is None:
            raise Lost("this is no function with a body")
        statement = next(node for node in body.named_children() if node.kind() != "comment")
        if statement.text().split() == code.split():
            return ()
        return insert_before(code)(place.source.place(statement))

    return edit


npu = add_import(
    "from slime_npu.ray import bundle, device_ids, is_npu, options",
    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
)
npu_options = add_import(
    "from slime_npu.ray import is_npu, options",
    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
)
npu_ids = add_import(
    "from slime_npu.ray import device_ids, is_npu, local_index",
    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
)

# `num_gpus=0` is right on every host; what asks for a share asks for it by name.
share = Code(
    {
        "pattern": {"context": "actor(num_gpus=$SHARE)", "selector": "keyword_argument"},
        "not": {"regex": r"^num_gpus\s*=\s*\d+$"},
        "inside": {
            "kind": "argument_list",
            "inside": {"kind": "call", "has": {"field": "function", "regex": r"\.options$"}},
        },
    },
    where="slime/ray/",
)

reads_ids = Code("ray.get_gpu_ids()", where="slime/ray/")

recipe = Recipe(
    subject="[NPU] Ask Ray for NPUs",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Ray knows an NPU as the resource "NPU", whose ids are strings that `get_gpu_ids` does not
        give; `num_gpus` and "GPU" bundles wait for ever on a host without GPUs.
    """,
    how="""
        Where an actor's share or a bundle is named, slime_npu names NPUs instead; where ids are
        read, it reads theirs. `options` also takes back the `num_gpus=1` of an actor's class, so
        declarations stay as they are. Without an NPU each call gets the arguments upstream wrote.
    """,
    until="Upstream asks Ray for the accelerator's own resource.",
    rules=(
        Rule(
            find=share,
            edit=(
                replace('**(options($SHARE) if is_npu() else {"num_gpus": $SHARE})'),
                npu_options,
            ),
            expect=("slime/ray/actor_group.py", "slime/ray/rollout.py"),
            upstream=Code('options($SHARE) if is_npu() else {"num_gpus": $SHARE}'),
        ),
        Rule(
            find=Code('$NAME = [{"GPU": 1, "CPU": 1} for $I in $RANGE]', where="slime/ray/"),
            edit=(
                insert_after("if is_npu():\n    $NAME = [bundle(1) for $I in $RANGE]"),
                npu,
            ),
            expect=("slime/ray/placement_group.py",),
            needed=Code({"kind": "string", "regex": '^"GPU"$'}, where="slime/ray/"),
        ),
        Rule(
            find=Code("InfoActor.options($$$)", where="slime/ray/"),
            edit=(add_argument("**(options(1) if is_npu() else {})"), npu),
            expect=("slime/ray/placement_group.py",),
            needed=reads_ids,
        ),
        Rule(
            find=Code({"kind": "function_definition"}, inside="InfoActor.get_ip_and_gpu_id"),
            edit=(
                first("""
                    if is_npu():
                        return ray.util.get_node_ip_address(), int(device_ids()[0])
                """),
                npu,
            ),
            expect=("slime/ray/placement_group.py",),
            needed=reads_ids,
        ),
        Rule(
            find=Code({"kind": "function_definition"}, inside="get_local_gpu_id"),
            edit=(first("if is_npu():\n    return local_index(device_ids()[0])"), npu_ids),
            expect=("slime/ray/train_actor.py",),
            needed=reads_ids,
        ),
    ),
)
