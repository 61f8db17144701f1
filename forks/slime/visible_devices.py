"""SGLang's engine counts devices by the NPU's own list of visible ones."""

from rebase.recipe import Code, Recipe, Rule, add_import, insert_before

recipe = Recipe(
    subject="[NPU] Map device ids by ASCEND_RT_VISIBLE_DEVICES",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        The engine turns the physical id that Ray gave into an index among the visible devices,
        and reads CUDA_VISIBLE_DEVICES for them. An NPU's are in ASCEND_RT_VISIBLE_DEVICES.
    """,
    how="""
        One conditional before the variable is read. Where upstream asks its accelerator
        registry instead, the NPU backend that we register answers (accelerator.py).
    """,
    until="We follow no release without slime/utils/accelerator any more.",
    rules=(
        Rule(
            find=Code(
                '$VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")', inside="_to_local_gpu_id"
            ),
            edit=(
                insert_before("if is_npu():\n    return local_index(physical_gpu_id)"),
                add_import(
                    "from slime_npu.ray import is_npu, local_index",
                    otherwise="is_npu = bool  # bool() is False: no slime_npu, no NPU",
                ),
            ),
            expect=("slime/backends/sglang_utils/sglang_engine.py",),
            needed=Code(
                {"kind": "string", "regex": "^.CUDA_VISIBLE_DEVICES.$"},
                where="slime/backends/sglang_utils/",
            ),
        ),
    ),
)
