"""The first linear of an MLP is split along dimension 0, whatever MindSpeed marks."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_after, insert_before

npu = add_import(
    "from slime_npu.megatron import is_npu",
    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
)

recipe = Recipe(
    subject="[NPU] Join and split linear_fc1 along dimension 0",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        MindSpeed's grouped linear marks a column's weights as split along dimension 1, though
        they are split along 0. slime halves linear_fc1 along 0 and then joins the parts along
        what the weight says; where it loads weights itself, it does both by what it says.
    """,
    how="One conditional in each branch for linear_fc1, so that both happen along 0.",
    until="No MindSpeed we follow marks a column as dimension 1.",
    rules=(
        Rule(
            find=Code(
                "$PARTS = [$P[0] for $P in $PARTS] + [$P[1] for $P in $PARTS]",
                where="slime/backends/megatron_utils/",
            ),
            edit=(insert_after("if is_npu():\n    partition_dim = 0"), npu),
            expect=(
                "slime/backends/megatron_utils/update_weight/common.py:all_gather_param",
                "slime/backends/megatron_utils/update_weight/common.py:all_gather_params_async",
            ),
        ),
        Rule(
            find=Code(
                "$GATE, $UP = $WHOLE.chunk(2, dim=partition_dim)",
                where="slime/backends/megatron_utils/hf_to_megatron/",
            ),
            edit=(insert_before("if is_npu():\n    partition_dim = 0"), npu),
            expect=("slime/backends/megatron_utils/hf_to_megatron/common.py",),
            needed=Code(
                "$PARAMETER.partition_dim", where="slime/backends/megatron_utils/hf_to_megatron/"
            ),
        ),
    ),
)
