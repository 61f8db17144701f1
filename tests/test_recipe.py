"""Recipes: what they find again, what they say of themselves, and what they leave alone."""

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebase import recipe as recipes
from rebase.errors import UsageError
from rebase.outcome import Kind, Status
from rebase.recipe import (
    AddFile,
    Code,
    Edit,
    Find,
    Lost,
    NewFile,
    Recipe,
    Result,
    Rule,
    Splice,
    Text,
    add_argument,
    add_entry,
    add_import,
    add_parameter,
    insert_after,
    insert_before,
    load,
    remove_decorator,
    replace,
)


class Files(dict[bytes, bytes]):
    """A tree in memory."""

    def paths(self, under: bytes = b"") -> Iterable[bytes]:
        return [path for path in self if path.startswith(under)]

    def read(self, path: bytes) -> bytes | None:
        return self.get(path)

    def grep(self, literal: bytes, paths: Iterable[bytes]) -> Iterable[bytes]:
        return [path for path in paths if literal in self.get(path, b"")]


def a_recipe(*rules: Rule | AddFile) -> Recipe:
    return Recipe(
        subject="Ask for the NPU",
        by="A Maintainer <a@example.com>",
        date="2026-08-01T12:00:00+02:00",
        why="Upstream asks for\n   CUDA.",
        how="One conditional.",
        until="Upstream asks for any device.",
        rules=rules,
    )


GUARD = insert_after("if is_npu():\n    device = 'npu'")
DEVICE = Rule(find=Code("device = 'cuda'"), edit=GUARD, expect=("a/device.py",))


def run(rule: Rule | AddFile, **files: str | bytes) -> Result:
    """Run one rule on files named by keyword: `a__device` is a/device.py, `x_sh` is x.sh."""
    return a_recipe(rule).run(tree(**files))


def tree(**files: str | bytes) -> Files:
    def path(name: str) -> bytes:
        name = name.replace("__", "/")
        return (f"{name[:-3]}.sh" if name.endswith("_sh") else f"{name}.py").encode()

    return Files(
        {
            path(name): text if isinstance(text, bytes) else text.encode()
            for name, text in files.items()
        }
    )


def edited(edit: Edit | tuple[Edit, ...], find: Find, text: str) -> str:
    """What an edit makes of a file that has one place."""
    result = run(Rule(find=find, edit=edit, expect=("f.py",)), f=text)
    assert result.status is Status.APPLIED, result
    content = result.edits[b"f.py"]
    assert isinstance(content, bytes)
    return content.decode()


# -- how a recipe ends -----------------------------------------------------------------------------


def test_applied_names_every_place() -> None:
    result = run(DEVICE, a__device="import os\ndevice = 'cuda'\n", b="x = 1\n")
    assert result == Result(
        Status.APPLIED,
        {b"a/device.py": b"import os\ndevice = 'cuda'\nif is_npu():\n    device = 'npu'\n"},
        places=("a/device.py:2",),
    )


def test_an_anchor_that_was_removed_is_a_conflict_that_names_the_nearest_code() -> None:
    files = {"a__device": "x = 1\n", "b": "def f():\n    my_device = pick('cuda')\n", "c": "pass\n"}
    result = run(DEVICE, **files)
    assert (result.status, result.edits) == (Status.CONFLICT, {})
    (conflict,) = result.conflicts
    assert (conflict.path, conflict.kind) == (b"a/device.py", Kind.ANCHOR_LOST)
    assert conflict.detail == (
        "`device = 'cuda'` is not where the recipe expects it (a/device.py)."
        " Nearest: b.py:2 `my_device = pick('cuda')`."
    )


def test_a_file_that_is_gone_is_named() -> None:
    (conflict,) = run(DEVICE, b="x = 1\n").conflicts
    assert "a/device.py is not in the tree." in conflict.detail
    assert "Nothing in the tree resembles it." in conflict.detail


def test_an_anchor_renamed_is_a_conflict_that_names_its_new_self() -> None:
    (conflict,) = run(DEVICE, a__device="def f():\n    the_device = 'cuda'\n").conflicts
    assert "Nearest: a/device.py:2 `the_device = 'cuda'`." in conflict.detail


def test_the_nearest_code_is_that_which_holds_most_of_the_pattern() -> None:
    rule = Rule(Code("npu.fused_ropes($$$)"), insert_before("x()"), expect=("f.py",))
    (conflict,) = run(rule, f="npu.fuse()\na, b = npu.fused_rope(q, k, cache, 64)\n").conflicts
    assert "Nearest: f.py:2 `a, b = npu.fused_rope(" in conflict.detail


def test_an_anchor_that_moved_within_reach_is_followed_and_reported() -> None:
    result = run(DEVICE, a__device="x = 1\n", a__accelerator="device = 'cuda'\n")
    assert result.status is Status.APPLIED
    assert result.places == result.new_places == ("a/accelerator.py:1",)
    assert result.note == "Moved: what was expected at a/device.py is at a/accelerator.py:1."


def test_an_anchor_that_moved_out_of_reach_is_a_conflict_that_says_where_it_is() -> None:
    rule = Rule(Code("device = 'cuda'", where="a/device.py"), GUARD, expect=("a/device.py",))
    result = run(rule, a__device="x = 1\n", b="class Of:\n    device = 'cuda'\n")
    assert result.status is Status.CONFLICT
    assert "Nearest: b.py:2 in Of `device = 'cuda'`." in result.conflicts[0].detail


def test_a_duplicated_anchor_is_changed_everywhere_and_the_copy_reported_as_new() -> None:
    rule = Rule(Code("device = 'cuda'"), GUARD, expect=("a/device.py:setup",))
    text = "def warm_up():\n    device = 'cuda'\n\n\ndef setup():\n    device = 'cuda'\n"
    result = run(rule, a__device=text)
    assert result.places == ("a/device.py:2", "a/device.py:6")
    assert result.new_places == ("a/device.py:2",)


def test_a_new_file_with_the_anchor_is_changed_and_reported_as_new() -> None:
    result = run(DEVICE, a__device="device = 'cuda'\n", z__new="device = 'cuda'\n")
    assert set(result.edits) == {b"a/device.py", b"z/new.py"}
    assert result.new_places == ("z/new.py:1",)


def test_a_reformatted_anchor_is_found() -> None:
    rule = Rule(Code("init(rank, device='cuda')"), insert_before("prepare()"), expect=("f.py",))
    text = "x = init(  # start\n    rank,\n    device='cuda',\n)\n"
    assert run(rule, f=text).edits == {b"f.py": b"prepare()\n" + text.encode()}


def test_upstream_that_did_exactly_this_is_already_upstream() -> None:
    done = "device = 'cuda'\n\nif is_npu():\n\tdevice = 'npu'\n"
    result = run(DEVICE, a__device=done)
    assert (result.status, result.already) == (Status.ALREADY_UPSTREAM, ((b"a/device.py", 1, 1),))
    assert result.note == "Already upstream: a/device.py:1 `device = 'cuda'`."


def test_upstream_that_did_it_its_own_way_is_recognised_and_named() -> None:
    rule = Rule(
        Code("device = 'cuda'"),
        GUARD,
        expect=("a/device.py:old", "a/device.py:new"),
        upstream=Code("accelerator($$$)"),
    )
    text = "def new():\n    device = accelerator(0)\n\n\ndef old():\n    device = 'cuda'\n"
    result = run(rule, a__device=text)
    assert (result.status, result.places) == (Status.APPLIED, ("a/device.py:6",))
    assert result.note == "Already upstream: a/device.py:2 `accelerator(0)`."
    result = run(rule, a__device=text.replace("'cuda'", "accelerator(1)"))
    assert result.status is Status.ALREADY_UPSTREAM
    assert result.already == ((b"a/device.py", 2, 2), (b"a/device.py", 6, 6))


def test_upstreams_answer_in_one_definition_does_not_speak_for_another() -> None:
    rule = Rule(Code("device = 'cuda'"), GUARD, expect=("f.py:g",), upstream=Code("accelerator()"))
    result = run(rule, f="def g():\n    device = 'cuda'\n\n\ndef h():\n    accelerator()\n")
    assert (result.status, result.places) == (Status.APPLIED, ("f.py:2",))


def test_a_guard_that_finds_nothing_says_the_recipe_is_not_needed() -> None:
    rule = Rule(Code("x"), GUARD, expect=("f.py",), needed=Code("torch.cuda.init()", where="a/"))
    result = run(rule, f="torch.cuda.init()\n")
    assert (result.status, result.edits) == (Status.NOT_NEEDED, {})
    assert result.note == "Not needed: nothing under a/ matches `torch.cuda.init()`."


def test_a_guard_that_finds_its_code_makes_a_lost_anchor_a_conflict() -> None:
    rule = Rule(Code("device = 'cuda'"), GUARD, expect=("f.py",), needed=Code("cuda()"))
    assert run(rule, f="cuda()\n").status is Status.CONFLICT


def test_fewer_places_than_expected_are_a_conflict_and_the_rest_is_still_offered() -> None:
    rule = Rule(Code("device = 'cuda'"), GUARD, expect=("f.py:A", "f.py:B"))
    result = run(rule, f="class A:\n    device = 'cuda'\n")
    assert result.status is Status.CONFLICT
    assert result.places == ("f.py:2",)
    assert set(result.edits) == {b"f.py"}
    assert "(f.py in B)" in result.conflicts[0].detail


def test_a_known_place_is_no_news_where_it_is_and_no_loss_where_it_is_not() -> None:
    rule = Rule(Code("device = 'cuda'"), GUARD, expect=("f.py:A",), known=("f.py:B",))
    with_both = run(rule, f="class A:\n    device = 'cuda'\nclass B:\n    device = 'cuda'\n")
    with_one = run(rule, f="class A:\n    device = 'cuda'\n")
    assert (with_both.new_places, len(with_both.places)) == ((), 2)
    assert (with_one.status, with_one.conflicts) == (Status.APPLIED, ())


def test_inside_tells_definitions_apart_by_whole_names() -> None:
    rule = Rule(Code("go()", inside="B.run"), insert_before("x()"), expect=("f.py:B.run",))
    text = (
        "class AB:\n    def run(self):\n        go()\nclass B:\n    def run(self):\n        go()\n"
    )
    result = run(rule, f=text)
    assert (result.places, result.new_places) == (("f.py:6",), ())


def test_a_statement_that_shares_its_line_is_a_conflict_and_not_broken_code() -> None:
    result = run(DEVICE, a__device="if cuda: device = 'cuda'\n")
    assert result.conflicts[0].detail == "line 1: the statement in line 1 shares its line."


def test_an_edit_that_would_break_the_file_is_a_conflict() -> None:
    rule = Rule(Code("def f($$$): $$$"), add_parameter("device"), expect=("f.py",))
    result = run(rule, f="def f(a, b=1):\n    pass\n")
    assert (result.status, result.edits) == (Status.CONFLICT, {})
    assert "would break line 1" in result.conflicts[0].detail


def test_edits_that_overlap_are_a_conflict() -> None:
    rule = Rule(Code("f($A)"), replace("g($A)"), expect=("f.py", "f.py"))
    result = run(rule, f="f(f(1))\n")
    assert result.conflicts[0].detail == "two edits overlap in line 1."


# -- edits -----------------------------------------------------------------------------------------


def test_inserted_lines_take_the_indentation_of_their_place() -> None:
    text = "if x:\n\tfor y in z:\n\t\tgo()  # now\n"
    assert edited(insert_after("if is_npu():\n    wait()"), Code("go()"), text) == (
        "if x:\n\tfor y in z:\n\t\tgo()  # now\n\t\tif is_npu():\n\t\t\twait()\n"
    )


def test_lines_before_a_decorated_function_go_before_its_decorators() -> None:
    text = "class A:\n  @property\n  def f(self): return 1\n"
    assert edited(insert_before("g = 2"), Code("def f(self): $$$"), text) == (
        "class A:\n  g = 2\n  @property\n  def f(self): return 1\n"
    )


def test_a_replacement_keeps_what_the_pattern_caught() -> None:
    text = "x = init('nccl',\n         rank)  # why\n"
    assert edited(replace("init(backend(), $$$REST)"), Code("init('nccl', $$$REST)"), text) == (
        "x = init(backend(), rank)  # why\n"
    )


def test_a_replacement_that_holds_what_it_replaces_is_recognised() -> None:
    rule = Rule(
        Code("type($X).__name__"), replace("type($X).__name__.strip('_')"), expect=("f.py",)
    )
    assert run(rule, f="n = type(m).__name__\n").edits == {
        b"f.py": b"n = type(m).__name__.strip('_')\n"
    }
    assert run(rule, f="n = type(m).__name__.strip('_')\n").status is Status.ALREADY_UPSTREAM


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f()", "f(device=d,)"),
        ("f(1)", "f(1, device=d)"),
        ("f(1, )", "f(1, device=d, )"),
        ("f(\n    1,  # one\n)", "f(\n    1,  # one\n    device=d,\n)"),
        ("f(\n    1  # one\n)", "f(\n    1,  # one\n    device=d,\n)"),
        ("f(1,\n  2)", "f(1,\n  2, device=d)"),
    ],
)
def test_an_argument_is_added_in_the_calls_own_layout(before: str, after: str) -> None:
    assert edited(add_argument("device=d"), Code("f($$$)"), f"x = {before}\n") == f"x = {after}\n"


def test_an_argument_given_otherwise_is_a_conflict_and_the_same_one_is_already_upstream() -> None:
    rule = Rule(Code("f($$$)"), add_argument("device=d"), expect=("f.py",))
    assert run(rule, f="f(device=d)\n").status is Status.ALREADY_UPSTREAM
    assert "there is `device=e` already" in run(rule, f="f(device=e)\n").conflicts[0].detail


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(): pass", "def f(device=None,): pass"),
        ("def f(a, *b): pass", "def f(a, *b, device=None): pass"),
        ("def f(a, **k) -> int: pass", "def f(a, device=None, **k) -> int: pass"),
        ("def f(\n    a,\n): pass", "def f(\n    a,\n    device=None,\n): pass"),
    ],
)
def test_a_parameter_goes_where_python_allows_it(before: str, after: str) -> None:
    find = Code({"kind": "function_definition"})
    assert edited(add_parameter("device=None"), find, before + "\n") == after + "\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{'a'}", "{'a', 'b', 'c'}"),
        ("{\n    'a',\n}", "{\n    'a',\n    'b',\n    'c',\n}"),
        ("{\n    'a'\n}", "{\n    'a',\n    'b',\n    'c',\n}"),
        ("[]", "['b','c',]"),
        ("()", "('b','c',)"),
        ("('a',)", "('a', 'b', 'c',)"),
    ],
)
def test_entries_are_added_in_the_collections_own_layout(before: str, after: str) -> None:
    edit = (add_entry("'b'"), add_entry("'c'"))
    text = edited(edit, Code("NAMES = $X"), f"NAMES = {before}\n")
    assert text == f"NAMES = {after}\n"
    assert {"b", "c"} <= set(ast.literal_eval(after))


def test_an_entry_of_a_dict_goes_by_its_key() -> None:
    rule = Rule(Code("D = $X"), add_entry("'x:y': 2"), expect=("f.py",))
    assert run(rule, f="D = {'x:z': 1}\n").edits == {b"f.py": b"D = {'x:z': 1, 'x:y': 2}\n"}
    assert run(rule, f="D = {'x:y': 2}\n").status is Status.ALREADY_UPSTREAM
    assert run(rule, f="D = {'x:y': 1}\n").status is Status.CONFLICT


def test_a_decorator_is_removed_with_its_line_and_the_others_stay() -> None:
    text = "@first\n@jit(cache=1)\n@last\ndef f(): pass\n"
    assert edited(remove_decorator("jit"), Code("def f(): $$$"), text) == (
        "@first\n@last\ndef f(): pass\n"
    )


IMPORT = add_import("from slime_npu.device import is_npu")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from b import (\n c)\ngo()\nimport z\n", "from b import (\n c)\n{}\ngo()\nimport z\n"),
        ('# licence\n\n"""What."""\ngo()\n', '# licence\n\n"""What."""\n\n{}\ngo()\n'),
        ("go()\n", "{}\ngo()\n"),
        ("def f():\n    import a\n    go()\n", "{}\ndef f():\n    import a\n    go()\n"),
    ],
)  # fmt: skip
def test_an_import_goes_after_those_there_are(before: str, after: str) -> None:
    statement = "from slime_npu.device import is_npu"
    assert edited(IMPORT, Code("go()"), before) == after.format(statement)


def test_a_guarded_import_says_what_holds_without_the_module() -> None:
    edit = add_import("import slime_npu", otherwise="def is_npu():\n    return False")
    text = "import a\ndef f():\n  go()\n"
    assert edited(edit, Code("go()"), text) == (
        "import a\n\ntry:\n  import slime_npu\nexcept ModuleNotFoundError:\n"
        "  def is_npu():\n    return False\n\ndef f():\n  go()\n"
    )


def test_an_import_that_is_there_is_not_repeated_also_where_it_is_guarded() -> None:
    there = (
        "try:\n    from slime_npu.device import is_npu, x\nexcept ImportError:\n    is_npu = bool\n"
    )
    edit = (IMPORT, insert_after("b()"))
    assert edited(edit, Code("go()"), there + "go()\n") == there + "go()\nb()\n"


def test_an_import_never_takes_a_name_that_means_something_else() -> None:
    rule = Rule(Code("go()"), IMPORT, expect=("f.py",))
    result = run(rule, f="from upstream.utils import is_npu\ngo()\n")
    assert "`is_npu` is another thing in line 1" in result.conflicts[0].detail


def test_text_is_found_in_a_script_whatever_its_white_space() -> None:
    rule = Rule(
        Text("pkill -9 python", where="run.sh"), insert_before("stop_npu"), expect=("run.sh",)
    )
    result = run(rule, run_sh="set -e\n  pkill \t-9  python || true\n")
    assert result.edits == {b"run.sh": b"set -e\n  stop_npu\n  pkill \t-9  python || true\n"}
    assert result.places == ("run.sh:2",)


def test_text_is_replaced_as_it_stands_dollars_included() -> None:
    rule = Rule(Text("--gpus $N"), replace("--npus $N"), expect=("run.sh",))
    assert run(rule, run_sh="go --gpus $N\n").edits == {b"run.sh": b"go --npus $N\n"}
    lost = run(rule, run_sh="go --gpus=$N\n")
    assert "Nearest: run.sh:1 `go --gpus=$N`." in lost.conflicts[0].detail


def test_text_replaced_by_more_of_itself_is_recognised() -> None:
    rule = Rule(Text("stop ray"), replace("stop ray --force"), expect=("run.sh",))
    assert run(rule, run_sh="stop ray\n").edits == {b"run.sh": b"stop ray --force\n"}
    assert run(rule, run_sh="stop ray --force\n").status is Status.ALREADY_UPSTREAM


def test_a_file_is_added_once() -> None:
    added = AddFile("slime_npu.pth", "import x\n", executable=True)
    assert run(added).edits == {b"slime_npu.pth": NewFile(b"import x\n", executable=True)}
    same = a_recipe(added).run(Files({b"slime_npu.pth": b"import x\n"}))
    assert same.status is Status.ALREADY_UPSTREAM
    (conflict,) = a_recipe(added).run(Files({b"slime_npu.pth": b"other\n"})).conflicts
    assert (conflict.kind, conflict.hunks[0].upstream) == (Kind.ADD_ADD, b"other\n")


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", ".git/config", "a/.GIT/x", "a\nb", "", "."])
def test_a_file_is_added_only_inside_the_tree(path: str) -> None:
    with pytest.raises(ValueError, match="no path below"):
        AddFile(path, "")


def test_rules_see_the_same_tree_and_their_edits_of_one_file_add_up() -> None:
    first = Rule(Code("a()"), (insert_after("x()"), IMPORT), expect=("f.py",))
    second = Rule(Code("b()"), (insert_after("y()"), IMPORT), expect=("f.py",))
    result = a_recipe(first, second).run(tree(f="a()\nb()\n"))
    assert result.edits == {b"f.py": b"from slime_npu.device import is_npu\na()\nx()\nb()\ny()\n"}
    assert result.places == ("f.py:1", "f.py:2")


# -- what is left alone ----------------------------------------------------------------------------


def test_line_ends_stay_and_inserted_lines_get_those_of_their_place() -> None:
    result = run(DEVICE, a__device="import os\ndevice = 'cuda'\r\nx = 1\n")
    assert result.edits[b"a/device.py"] == (
        b"import os\ndevice = 'cuda'\r\nif is_npu():\r\n    device = 'npu'\r\nx = 1\n"
    )


def test_a_last_line_without_its_end_stays_without() -> None:
    result = run(DEVICE, a__device="x = 1\r\ndevice = 'cuda'")
    assert result.edits[b"a/device.py"] == (
        b"x = 1\r\ndevice = 'cuda'\r\nif is_npu():\r\n    device = 'npu'"
    )


def test_latin_1_and_a_byte_order_mark_stay() -> None:
    latin = b"# -*- coding: latin-1 -*-\n# caf\xe9 \xff\ndevice = 'cuda'\n"
    content = run(DEVICE, a__device=latin).edits[b"a/device.py"]
    assert isinstance(content, bytes) and content.startswith(latin)
    marked = b"\xef\xbb\xbfgo()\n"
    result = run(Rule(Code("go()"), (IMPORT, insert_before("x()")), expect=("f.py",)), f=marked)
    assert result.edits[b"f.py"] == (
        b"\xef\xbb\xbffrom slime_npu.device import is_npu\nx()\ngo()\n"
    )


_LINES = st.lists(
    st.sampled_from(
        ["x = 1", "# caf\xe9 \u4e2d\u6587", "", "\tpass", "if x:", "    y = '\u2028'", "\x0c", "@a"]
    ),
    max_size=8,
)  # fmt: skip
_ENDS = st.lists(st.sampled_from(["\n", "\r\n"]), min_size=20, max_size=20)


@settings(max_examples=150, deadline=None)
@given(_LINES, _LINES, _ENDS, st.booleans(), st.sampled_from(["utf-8", "latin-1"]))
def test_an_edit_leaves_every_other_byte_alone(
    before: list[str], after: list[str], ends: list[str], final: bool, encoding: str
) -> None:
    lines = [*before, "anchor here", *after]
    text = "".join(line + end for line, end in zip(lines, ends, strict=False))
    content = (text if final else text.rstrip("\r\n")).encode(encoding, "ignore")
    find = Text("anchor here")
    files = Files({b"f": content})

    inserted = a_recipe(Rule(find, insert_after("one\ntwo"), expect=("f",))).run(files).edits[b"f"]
    assert isinstance(inserted, bytes)
    added = [bit for bit in (b"\r\none\r\ntwo", b"\none\ntwo") if inserted.count(bit) == 1]
    assert inserted.replace(added[0], b"") == content

    replaced = a_recipe(Rule(find, replace("other"), expect=("f",))).run(files).edits[b"f"]
    assert replaced == content.replace(b"anchor here", b"other")


_CODE = st.lists(
    st.sampled_from(
        ["import os\n", "def f(a):\r\n    return a\r\n", "# \xe9\u4e2d\n", "\n",
         "x = [\n  1,\n]\r\n", "class A:\n\tb = 'c'\n", "'''\r\n# text\n'''\n",
         "if x: pass\n", "\x0c\n"]
    ),
    max_size=6,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(_CODE, _CODE, st.sampled_from(["\n", "\r\n", ""]))
def test_an_edit_of_code_leaves_every_other_byte_alone(
    before: list[str], after: list[str], end: str
) -> None:
    head = "".join(before).encode()
    tail = "".join(after).encode() if end else b""
    rule = Rule(Code("start(device)"), replace("start(npu)"), expect=("f.py",))
    content = head + b"start( device )" + end.encode() + tail
    assert run(rule, f=content).edits == {b"f.py": head + b"start(npu)" + end.encode() + tail}


# -- recipe files ----------------------------------------------------------------------------------

A_FILE = '''\
"""What it is for."""
import re
from rebase.recipe import Code, Recipe, Rule, insert_after

def edit(place):
    depth = int(place.text.split("(")[1][0])
    return insert_after(f"wait({10 // depth})")(place)

recipe = Recipe(
    subject="Wait",
    by="Ä Maintainer <a@example.com>",
    date="2026-08-01T12:00:00+02:00",
    why="It is too fast.",
    how="It waits.",
    upstream="https://example.com/pull/1",
    until="It is slow enough.",
    rules=(Rule(find=Code("go($$$)"), edit=edit, expect=("f.py",)),),
)
'''
PATH = Path("forks/megatron/wait.py")


def test_a_recipe_file_is_loaded_and_run() -> None:
    result = load(PATH, A_FILE.encode()).run(tree(f="go(2)\n"))
    assert result.edits == {b"f.py": b"go(2)\nwait(5)\n"}


def test_author_date_and_message_make_the_commit_the_same_everywhere() -> None:
    recipe = load(PATH, A_FILE.encode())
    assert recipe.author == "Ä Maintainer <a@example.com> 1785578400 +0200".encode()
    assert recipe.message() == (
        b"Wait\n\nIt is too fast.\n\nHow: It waits.\n\n"
        b"Upstream: https://example.com/pull/1\n\nUntil: It is slow enough.\n"
    )


def test_an_exception_in_a_recipes_function_names_its_file_and_line() -> None:
    recipe = load(PATH, A_FILE.encode())
    with pytest.raises(UsageError, match=r"forks/megatron/wait\.py:7: ZeroDivisionError: "):
        recipe.run(tree(f="go(0)\n"))


def test_a_recipes_function_can_say_that_the_code_is_not_what_it_knows() -> None:
    def edit(place: recipes.Place) -> Iterable[Splice]:
        raise Lost("go has a lap now")

    result = run(Rule(Code("go($$$)"), edit, expect=("f.py",)), f="go(1)\n")
    assert result.conflicts[0].detail == "line 1: go has a lap now."


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("import re", "import torch", ":2: imports torch; a recipe imports rebase.recipe"),
        ("import re", "from . import x", ":2: imports .; "),
        ("import re", "from rebase import git", ":2: imports rebase; "),
        ("import re", "import rebase.objects", ":2: imports rebase.objects; "),
        ("import re", "import re as", ":2: this is not Python: "),
        ("import re", "1 / 0", ":2: ZeroDivisionError: "),
        ("import re", "raise SystemExit(0)", ":2: SystemExit: 0"),
        ("import re", "from rebase.recipe import nothing", ":2: ImportError: "),
        ("import re", "x = '\0'", "this is not Python: "),
        ("recipe = Recipe", "change = Recipe", ": does not set `recipe` to a Recipe"),
        ("by=", "author=", ":9: TypeError: "),
        ("Wait", "Wait\\n", ":9: ValueError: subject is one line of text"),
        ("<a@example.com>", "a@example.com", ":9: ValueError: by is `Name <email>`"),
        ("+02:00", "", ":9: ValueError: date needs its offset"),
        ("2026-08-01", "1. August", ":9: ValueError: "),
        ('"It waits."', '" "', ":9: ValueError: how is empty"),
        ('("f.py",)', '"f.py"', ":17: ValueError: expect is a tuple"),
        ('("f.py",)', "()", ":17: ValueError: expect is a tuple"),
        ("edit=edit", "edit=()", ":17: ValueError: edit is empty"),
        ('"go($$$)"', '""', ":17: ValueError: Code has nothing to look for"),
    ],
)
def test_a_wrong_recipe_file_is_told_where_it_is_wrong(old: str, new: str, what: str) -> None:
    with pytest.raises(UsageError) as error:
        load(PATH, A_FILE.replace(old, new, 1).encode())
    assert error.value.what.startswith("forks/megatron/wait.py")
    assert what in error.value.what


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('Code("go($$$)")', 'Code({"kind": "nothing"})', "wait.py: ast-grep cannot use"),
        ('Code("go($$$)")', 'Code({"patern": "go"})', "wait.py: ast-grep cannot use"),
        ("edit=edit", 'edit=insert_after("$LAP")', "wait.py: the pattern has no $LAP to fill in"),
        ("edit=edit", "edit=lambda place: None", "returns no splices"),
    ],
)
def test_what_only_a_run_can_see_is_told_too(old: str, new: str, what: str) -> None:
    with pytest.raises(UsageError) as error:
        load(PATH, A_FILE.replace(old, new, 1).encode()).run(tree(f="go(2)\n"))
    assert what in error.value.what


def test_the_documentations_example_is_complete() -> None:
    assert recipes.__doc__
    example = recipes.__doc__.partition("complete:\n")[2].partition("**Find.**")[0]
    source = "\n".join(line.removeprefix("    ") for line in example.strip("\n").split("\n"))
    recipe = load(Path("example.py"), source.encode())
    upstream = "import os\n\n\nclass Device:\n    def health(self):\n        return HEALTHY\n"
    result = recipe.run(Files({b"project/device.py": upstream.encode()}))
    assert result.edits[b"project/device.py"] == (
        b"import os\nimport slime_npu\nfrom slime_npu.device import is_npu\n\n\nclass Device:\n"
        b"    def health(self):\n        if is_npu():\n            return slime_npu.health()\n"
        b"        return HEALTHY\n"
    )


def test_a_file_without_the_patterns_words_is_never_parsed() -> None:
    class Watched(Files):
        def read(self, path: bytes) -> bytes | None:
            assert path == b"a/device.py"
            return super().read(path)

    files = Watched(tree(a__device="device = 'cuda'\n", b="x = 1\n", c="y = 2\n"))
    assert a_recipe(DEVICE).run(files).status is Status.APPLIED


def test_importing_recipes_loads_no_git_library_and_no_parser() -> None:
    script = "import sys, rebase.recipe; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert not {b"pygit2", b"git", b"ast_grep_py"} & set(loaded.stdout.split())


# -- the recipes of this repository ----------------------------------------------------------------

FORKS = Path(__file__).parents[1] / "forks"
OURS = sorted(FORKS.glob("*/*.py"))


def ours(name: str) -> Recipe:
    return load(FORKS / name, (FORKS / name).read_bytes())


@pytest.mark.parametrize("path", OURS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_recipe_here_loads_and_is_in_its_forks_series(path: Path) -> None:
    series = (path.parent / "series").read_text().splitlines()
    assert path.name in [line for line in series if not line.startswith("#")]
    recipe = load(path, path.read_bytes())
    assert recipe.message().splitlines()[0].startswith(b"[NPU] ")


JIT = """\
import torch


def make():
    global jit_fuser
    try:
        jit_fuser = torch.compile
    except ImportError:
        pass


make()


@jit_fuser
def f():
    pass
"""


@pytest.mark.parametrize(("npu", "eager"), [(None, False), (False, False), (True, True)])
def test_jit_fuser_is_eager_on_npu_only(
    npu: bool | None, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ours("megatron/eager_jit.py").run(Files({b"megatron/core/jit.py": JIT.encode()}))
    content = result.edits[b"megatron/core/jit.py"]
    torch = type(sys)("torch")
    torch.compile = lambda function: "compiled"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    if npu is not None:
        device = type(sys)("slime_npu.device")
        device.is_npu = lambda: npu  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "slime_npu", type(sys)("slime_npu"))
        monkeypatch.setitem(sys.modules, "slime_npu.device", device)
    else:
        monkeypatch.setitem(sys.modules, "slime_npu", None)
        monkeypatch.setitem(sys.modules, "slime_npu.device", None)
    names: dict[str, object] = {}
    assert isinstance(content, bytes)
    exec(content, names)
    assert (names["f"] == "compiled") is not eager


def test_jit_fuser_is_not_needed_where_nothing_wears_it() -> None:
    files = Files({b"megatron/core/jit.py": b"jit_fuser = 1\n"})
    assert ours("megatron/eager_jit.py").run(files).status is Status.NOT_NEEDED


def test_mindspeeds_modules_are_known_by_transformer_engines_names() -> None:
    source = (
        b"class AutoMapping:\n    def _detect_parallelism_type(self, module):\n"
        b"        return type(module).__name__\n"
    )
    result = ours("megatron-bridge/mindspeed_names.py").run(Files({b"m.py": source}))
    content = result.edits[b"m.py"]
    names: dict[str, object] = {}
    assert isinstance(content, bytes)
    exec(content, names)
    mapping = names["AutoMapping"]()  # type: ignore[operator]
    for name, known in (
        ("MindSpeedTEColumnParallelLinear", "TEColumnParallelLinear"),
        ("MindSpeedTELayerNormColumnParallelLinear", "TELayerNormColumnParallelLinear"),
        ("MindSpeedTELinear", "TELinear"),
        ("TELinear", "TELinear"),
        ("MindSpeedMC2ColumnParallelLinear", "MindSpeedMC2ColumnParallelLinear"),
    ):
        assert mapping._detect_parallelism_type(type(name, (), {})()) == known


def test_rope_falls_back_in_every_class_that_does_not_ask_itself() -> None:
    method = (
        "class {}:\n    def forward_npu(self, positions, query, key{}):\n{}"
        "        return torch_npu.npu_mrope(positions, query, key)\n\n\n"
    )
    asks = "        if self.cos_sin_cache.dtype == torch.float:\n            return 1\n"
    source = (
        method.format("RotaryEmbedding", ", offsets=None", "")
        + method.format("MRotaryEmbedding", "", "")
        + method.format("NewEmbedding", "", "")
        + method.format("AskingEmbedding", "", asks)
    )
    result = ours("sglang/native_rope.py").run(Files({b"rope.py": source.encode()}))
    content = result.edits[b"rope.py"]
    assert isinstance(content, bytes)
    assert content.count(b"query, key, offsets)") == 1
    assert content.count(b"if query.dtype != self.cos_sin_cache.dtype:") == 3
    assert result.new_places == ("rope.py:13",)


def test_a_dotted_name_is_found_however_its_dots_are_laid_out() -> None:
    layouts = (
        "x = torch.compile",
        "x = torch.\\\n    compile",
        "x = (\n  torch  # it\n  .compile)",
    )
    for layout in layouts:
        rule = Rule(find=Code("torch.compile"), edit=insert_before("import torch"), expect=("*",))
        assert run(rule, a=layout + "\n").status is Status.APPLIED
