"""Groups that slime makes past torch.distributed's front door talk hccl."""

from rebase.recipe import Code, Recipe, Rule, add_import, replace

recipe = Recipe(
    subject="[NPU] Update weights and join actor and critic over hccl",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        torch_npu's transfer_to_npu turns nccl into hccl in `init_process_group` and `new_group`.
        slime makes its weight update and actor-critic groups with a private helper of torch's,
        and tells SGLang's engines the same name, so these stay nccl and fail.
    """,
    how="""
        The name is chosen where it is written. Where upstream asks its accelerator registry
        instead, the NPU backend that we register answers (accelerator.py).
    """,
    until="We follow no release without slime/utils/accelerator any more.",
    rules=(
        Rule(
            find=Code(
                {"pattern": {"context": 'group(backend="nccl")', "selector": "keyword_argument"}},
                where="slime/backends/megatron_utils/",
            ),
            edit=(
                replace('backend="hccl" if is_npu() else "nccl"'),
                add_import(
                    "from slime_npu.device import is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=(
                "slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py",
                "slime/backends/megatron_utils/update_weight/update_weight_from_distributed.py",
            ),
            known=("slime/backends/megatron_utils/actor.py",),
            upstream=Code('"hccl" if $NPU else "nccl"', where="slime/backends/megatron_utils/"),
            needed=Code(
                {"kind": "string", "regex": "^.nccl.$"},
                where="slime/backends/megatron_utils/update_weight/",
            ),
        ),
    ),
)
