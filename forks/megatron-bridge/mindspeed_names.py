"""AutoMapping knows MindSpeed's modules by Transformer Engine's names."""

from rebase.recipe import Code, Recipe, Rule, replace

recipe = Recipe(
    subject="[NPU] Know MindSpeed's Transformer Engine modules",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        AutoMapping chooses how to shard a weight by its module's class name. MindSpeed before
        core_r0.16 calls MindSpeedTE... what Transformer Engine calls TE..., and
        `register_module_type` cannot teach it two of them: the layer norm inside a fused linear
        is replicated while the linear is not, and TELinear goes by its parallel_mode.
    """,
    how="""
        The prefix goes where the name is read, so every rule there is, for every class there
        will be, holds for MindSpeed's too. Without MindSpeed no class has the prefix.
    """,
    until="We follow no MindSpeed branch with classes named MindSpeedTE... any more.",
    rules=(
        Rule(
            find=Code("type($MODULE).__name__", inside="AutoMapping._detect_parallelism_type"),
            edit=replace('type($MODULE).__name__.replace("MindSpeedTE", "TE")'),
            expect=("*:AutoMapping._detect_parallelism_type",),
            needed=Code({"kind": "class_definition"}, inside="AutoMapping"),
        ),
    ),
)
