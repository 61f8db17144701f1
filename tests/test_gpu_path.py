"""What runs without an NPU is what upstream wrote: each change is inert there.

Every file that a change touches is compared with upstream's as a syntax tree, for a host without
an NPU: `is_npu()` is False, so conditionals on it fold to what is left of them, and the import of
slime_npu, which stands in a `try`, goes. What is left must be upstream's, node for node. Two kinds
of code run on NPU only and are left out: methods whose name ends in `_npu`, to which SGLang's
operators dispatch there, and modules for its Ascend backend. `tests/npu` runs both sides.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import releases

NPU_ONLY = re.compile(r"(^|/)(npu|ascend)(_|/)|_npu_")
# An argument that a change adds, with the value it has without an NPU: what is the default there.
DEFAULTS = {("ParallelLMHead", "use_attn_tp_group", False), ("torch.compile", "disable", False)}
# What a change may import besides: what every module of SGLang may.
IMPORTS = {
    "from sglang.srt.utils import is_npu",
    "from sglang.srt.server_args import get_global_server_args",
}


class _WithoutNpu(ast.NodeTransformer):
    """A module as it runs where `is_npu()` is False."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if _is(node.test, False):
            return node.orelse
        return node.body if _is(node.test, True) else node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if _is(node.test, False):
            return node.orelse
        return node.body if _is(node.test, True) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        decides, passes = (False, True) if isinstance(node.op, ast.And) else (True, False)
        values: list[ast.expr] = []
        for value in node.values:
            if _is(value, decides):
                # what stands before it is asked for still
                return ast.Constant(decides) if not values else node
            if not _is(value, passes):
                values.append(value)
        if not values:
            return ast.Constant(passes)
        return values[0] if len(values) == 1 else ast.BoolOp(node.op, values)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant):
            return ast.Constant(not node.operand.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        if called == "is_npu" and not node.args:
            return ast.Constant(False)
        match node:
            # a class's name: only MindSpeed's begin so, and MindSpeed is for NPU
            case ast.Call(
                func=ast.Attribute(value=named, attr="replace"),
                args=[ast.Constant("MindSpeedTE"), ast.Constant("TE")],
            ) if ast.unparse(named).endswith(".__name__"):
                return named
        keywords: list[ast.keyword] = []
        for keyword in node.keywords:
            if keyword.arg is None and isinstance(keyword.value, ast.Dict):
                keys = keyword.value.keys
                assert all(isinstance(key, ast.Constant) for key in keys)
                keywords += [
                    ast.keyword(key.value, value)
                    for key, value in zip(keys, keyword.value.values, strict=True)
                    if isinstance(key, ast.Constant)
                ]
            elif not any(
                (called, keyword.arg) == (name, argument) and _is(keyword.value, value)
                for name, argument, value in DEFAULTS
            ):
                keywords.append(keyword)
        node.keywords = keywords
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(False) if node.id == "_is_npu" and _reads(node) else node

    def visit_Try(self, node: ast.Try) -> ast.AST | None:
        """The guarded import binds `is_npu`, to False where there is no slime_npu."""
        match node:
            case ast.Try(
                body=[ast.ImportFrom(module=str(module))],
                handlers=[ast.ExceptHandler(type=ast.Name("ModuleNotFoundError"), body=[fallback])],
            ) if module.partition(".")[0] == "slime_npu":
                assert ast.unparse(fallback) == "is_npu = bool"
                return None
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name.endswith("_npu"):
            node.body = [ast.Pass()]
        self.generic_visit(node)
        return node


def _is(node: ast.AST, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _reads(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def imports(tree: ast.Module) -> set[str]:
    """The imports at module level, a statement a name."""
    return {
        ast.unparse(type(node)(**{**vars(node), "names": [alias]}))
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def without_npu(content: bytes) -> tuple[str, set[str]]:
    """A file as it runs without an NPU: its code but for module level imports, and these."""
    tree = ast.parse(content)
    found = imports(tree)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return ast.dump(_WithoutNpu().visit(tree)), found


def differences(path: str, before: bytes, after: bytes) -> Iterator[str]:
    """What of a changed file is not upstream's on a host without an NPU."""
    if NPU_ONLY.search(path):
        return
    (old, had), (new, has) = without_npu(before), without_npu(after)
    if old != new:
        yield f"{path}: other code"
    if more := (has - had - IMPORTS) | (had - has):
        yield f"{path}: {', '.join(sorted(more))}"


UPSTREAM = """\
import torch

from sglang.srt.utils import get_bool


def f(x, name):
    group = new_group(backend="nccl")
    actor = Actor.options(num_gpus=1).remote(x)
    if "head" in name:
        return type(x).__name__
    return group
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import torch\n", "import torch\nfrom sglang.srt.utils import is_npu\n"),
        (
            "\n\ndef f",
            "\ntry:\n    from slime_npu.ray import is_npu, options\n"
            "except ModuleNotFoundError:\n    is_npu = bool\n\ndef f",
        ),
        ('    if "', '    if is_npu() and x:\n        x = 1\n    if "'),
        ('    if "head" in name', '    if "head" in name and (not is_npu() or x.tied)'),
        ('"nccl"', '"hccl" if is_npu() else "nccl"'),
        ("num_gpus=1", '**(options(1) if is_npu() else {"num_gpus": 1})'),
        ("num_gpus=1", "num_gpus=1, **(options(1) if is_npu() else {})"),
        ("__name__", '__name__.replace("MindSpeedTE", "TE")'),
    ],
)
def test_what_asks_for_an_npu_first_is_inert(old: str, new: str) -> None:
    assert old in UPSTREAM
    changed = UPSTREAM.replace(old, new, 1)
    assert list(differences("f.py", UPSTREAM.encode(), changed.encode())) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import torch\n", "import torch\nimport slime_npu\n"),
        ("import torch\n", ""),
        (
            "\n\ndef f",
            "\ntry:\n    from torch import npu\nexcept ModuleNotFoundError:\n    npu = 0\n\ndef f",
        ),
        ('    if "', '    if x:\n        x = 1\n    if "'),
        ('    if "', '    if x and is_npu():\n        x = 1\n    if "'),
        ('    if "', '    if not is_npu():\n        x = 1\n    if "'),
        ('    if "head" in name', '    if "head" in name and (x.tied or not is_npu())'),
        ('"nccl"', '"nccl" if is_npu() else "hccl"'),
        ('"nccl"', 'backend("nccl")'),
        ("num_gpus=1", '**(options(1) if is_npu() else {"num_gpus": 1, "resources": {}})'),
        ("num_gpus=1", "**options(1)"),
        ("__name__", '__name__.replace("TE", "MindSpeedTE")'),
    ],
)
def test_what_a_gpu_host_would_notice_is_seen(old: str, new: str) -> None:
    assert old in UPSTREAM
    changed = UPSTREAM.replace(old, new, 1)
    assert list(differences("f.py", UPSTREAM.encode(), changed.encode()))


@pytest.mark.parametrize("fork", releases.OLDEST)
def test_at_every_release_the_code_without_an_npu_is_upstreams(fork: str) -> None:
    every = releases.of(fork)
    found = {
        (tag, difference)
        for tag in every.tags
        for path, before, after in every.carried(tag).touched()
        for difference in differences(path, before, after)
    }
    assert found == set()


@pytest.mark.skipif(
    "FORKMAN_STACK" not in os.environ,
    reason="slime is on no package index: FORKMAN_STACK names its trees (tests/npu/stack.py)",
)
def test_in_every_slime_the_code_without_an_npu_is_upstreams() -> None:
    found, files = set(), 0
    for upstream in sorted(Path(os.environ["FORKMAN_STACK"]).glob("*/unpatched/slime")):
        ours = upstream.parents[1] / "slime" / "slime"
        for path in sorted(ours.rglob("*.py")):
            name = str(path.relative_to(ours))
            before, after = (upstream / name).read_bytes(), path.read_bytes()
            if before != after:
                files += 1
                found |= {
                    f"{upstream.parents[1].name} {each}"
                    for each in differences(name, before, after)
                }
    assert files and found == set()


def test_at_every_release_the_head_has_the_default_that_the_change_gives_it() -> None:
    every = releases.of("sglang")
    for tag in every.tags:
        source = every.carried(tag).files().read(
            b"python/sglang/srt/layers/vocab_parallel_embedding.py"
        )  # fmt: skip
        assert source
        [head] = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef) and node.name == "ParallelLMHead"
        ]
        [init] = [node for node in head.body if getattr(node, "name", "") == "__init__"]
        assert isinstance(init, ast.FunctionDef)
        arguments = [*init.args.args, *init.args.kwonlyargs]
        defaults = [*init.args.defaults, *init.args.kw_defaults]
        given = {
            argument.arg: default
            for argument, default in zip(reversed(arguments), reversed(defaults), strict=False)
        }
        default = given["use_attn_tp_group"]
        assert default is not None and _is(default, False), tag
