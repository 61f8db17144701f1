"""Element-wise fused functions run eagerly on NPU."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_after

recipe = Recipe(
    subject="[NPU] Run element-wise fused functions eagerly",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        `jit_fuser` hands about fifty element-wise functions to torch.compile. On NPU they must run
        eagerly, and each release decorates more of them.
    """,
    how="""
        One conditional where the name is made, before its importers bind it, so that every
        decorator, today's and tomorrow's, is covered. Without an NPU, or without slime_npu,
        the name is what upstream makes it.
    """,
    until="Upstream lets an accelerator choose its own fuser.",
    rules=(
        Rule(
            find=Code("jit_fuser = torch.compile", where="megatron/core/"),
            edit=(
                insert_after("""
                    if is_npu():
                        jit_fuser = lambda function: function
                """),
                add_import(
                    "from slime_npu.device import is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("megatron/core/jit.py",),
            needed=Code({"kind": "decorator", "has": {"pattern": "jit_fuser"}}, where="megatron/"),
        ),
    ),
)
