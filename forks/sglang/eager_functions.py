"""Functions that every step runs are not compiled on NPU."""

from collections.abc import Iterable

from rebase.recipe import Code, Lost, Place, Recipe, Rule, Splice, add_argument, add_import


def disable_on_npu(place: Place) -> Iterable[Splice]:
    """One more argument for the `torch.compile(…)` that decorates the function."""
    call = place.code.find(pattern="torch.compile($$$)")
    if call is None:
        raise Lost("nothing compiles this function")
    return add_argument("disable=is_npu()")(place.source.place(call))


def compiled(name: str, *also: dict[str, object]) -> Code:
    """The definition of `name` with its `@torch.compile(…)`."""
    decorator = {"kind": "decorator", "has": {"pattern": "torch.compile($$$)"}}
    rule = {"kind": "decorated_definition", "all": [{"has": decorator}, *also]}
    return Code(rule, inside=name, where="python/sglang/srt/")


def eager(name: str) -> Rule:
    """`name` is not compiled on NPU."""
    disable = {"kind": "keyword_argument", "has": {"field": "name", "pattern": "disable"}}
    return Rule(
        find=compiled(name),
        edit=(disable_on_npu, add_import("from sglang.srt.utils import is_npu")),
        expect=(f"*:{name}",),
        upstream=compiled(
            name, {"has": {"kind": "decorator", "has": {**disable, "stopBy": "end"}}}
        ),
        needed=compiled(name),
    )


recipe = Recipe(
    subject="[NPU] Run the embedding mask and the overlap schedule's lookup eagerly",
    by="forkman maintainers <forkman@localhost>",
    date="2026-08-01T00:00:00+00:00",
    why="""
        On NPU get_compiler_backend is torchair, which an inference host need not have, and
        these are a few element-wise operations.
    """,
    how="`disable=is_npu()`; False, without an NPU, is torch.compile's default.",
    upstream="https://github.com/sgl-project/sglang/pull/16115 (the embedding mask)",
    until="v0.5.9 is the oldest release we follow.",
    rules=(eager("get_masked_input_and_mask"), eager("_resolve_future_token_ids")),
)
