"""The cache of pinned host memory is emptied only where there is one."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_before

recipe = Recipe(
    subject="[NPU] Leave CUDA's host cache alone",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        Before a training actor sleeps, slime calls torch._C._host_emptyCache. Torch without CUDA,
        which torch_npu runs on, has no such function, and transfer_to_npu makes none.
    """,
    how="One conditional that takes the wish back; the device's cache is emptied before it.",
    until="Upstream asks its accelerator for this too.",
    rules=(
        Rule(
            find=Code(
                {
                    "kind": "if_statement",
                    "has": {"pattern": "torch._C._host_emptyCache()", "stopBy": "end"},
                    "regex": r"^if clear_host_memory\s*:",
                },
                inside="clear_memory",
            ),
            edit=(
                insert_before("if is_npu():\n    clear_host_memory = False"),
                add_import(
                    "from slime_npu.device import is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("slime/utils/memory_utils.py",),
            needed=Code("torch._C._host_emptyCache()"),
        ),
    ),
)
