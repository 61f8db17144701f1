"""slime's accelerator registry knows the NPU."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_before

recipe = Recipe(
    subject="[NPU] Register the NPU as an accelerator",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        slime asks a registry for devices, streams, caches, visible devices and the communication
        backend. `register_accelerator` is public, but slime loads no plugin before its first
        question, which each Ray worker asks for itself.
    """,
    how="""
        One conditional where upstream registers its own backends, which every question passes.
        slime_npu registers above cuda's priority, as torch.cuda says it is available once
        torch_npu stands in for it. Without an NPU the registry holds what upstream put there.
    """,
    until="slime loads accelerators from packages' entry points, or has an NPU backend.",
    rules=(
        Rule(
            find=Code('if "cuda" not in $REGISTRY: $$$', inside="_register_builtin_backends"),
            edit=(
                insert_before('if is_npu() and "npu" not in $REGISTRY:\n    register()'),
                add_import(
                    "from slime_npu.slime import is_npu, register",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("slime/utils/accelerator/__init__.py",),
            upstream=Code('register_accelerator("npu", $$$)', inside="_register_builtin_backends"),
            needed=Code({"kind": "function_definition"}, inside="register_accelerator"),
        ),
    ),
)
