"""Tensors on an NPU are float, half or bfloat16 tensors too."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_after

recipe = Recipe(
    subject="[NPU] Know the tensor types of an NPU",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        The tuples by which Float16Module tells which tensors to convert name torch's types on CPU
        and CUDA only, so what lies on an NPU keeps its type.
    """,
    how="""
        After each such tuple one conditional that adds the NPU's type. A host without torch_npu
        has no torch.npu, so nothing names it there.
    """,
    until="Upstream asks for a tensor's dtype and not for its type.",
    rules=(
        Rule(
            find=Code("$NAME = (torch.$TYPE, torch.cuda.$TYPE)", where="megatron/core/"),
            edit=(
                insert_after("""
                    if is_npu():
                        $NAME += (torch.npu.$TYPE,)
                """),
                add_import(
                    "from slime_npu.device import is_npu",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("megatron/core/transformer/module.py",) * 3,
            needed=Code(
                {"kind": "function_definition"}, inside="fp32_to_float16", where="megatron/core/"
            ),
        ),
    ),
)
