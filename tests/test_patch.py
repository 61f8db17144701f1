import itertools
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebase import patch
from rebase.errors import EnvironmentFault, UsageError
from rebase.git import EMPTY_TREE, ObjectId
from rebase.objects import EXECUTABLE, FILE, SUBMODULE, SYMLINK, Entry, Objects

Files = dict[bytes, tuple[int, bytes]]  # path → mode and content (a submodule's: its commit)

# What a user's configuration can do to a diff or to git-apply.
HOSTILE = """
[diff]
    noprefix = true
    mnemonicPrefix = true
    context = 0
    interHunkContext = 9
    renames = copies
    orderFile = {folder}/order
    suppressBlankEmpty = true
    algorithm = patience
    external = false
    ignoreSubmodules = all
    submodule = log
    wsErrorHighlight = all
    relative = true
[diff "odd"]
    textconv = wc
    xfuncname = "."
[color]
    ui = always
[core]
    attributesFile = {folder}/attributes
    autocrlf = true
    quotePath = false
[apply]
    whitespace = fix
    ignoreWhitespace = change
"""


def hostile(folder: Path) -> str:
    """The text of a hostile configuration, and the files it names."""
    folder.mkdir(exist_ok=True)
    (folder / "order").write_text("z*\n")
    (folder / "attributes").write_text("* diff=odd text eol=crlf\n*.py -diff\n")
    return HOSTILE.format(folder=folder)


def repository(path: Path) -> Objects:
    subprocess.run(["git", "init", "--quiet", "--bare", path], check=True)
    return Objects(path)


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return repository(tmp_path / "repo.git")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return repository(tmp_path_factory.mktemp("patch") / "repo.git")


def make(objects: Objects, files: Files | dict[bytes, bytes]) -> ObjectId:
    """The tree that holds `files`."""
    edits = {}
    for path, file in files.items():
        mode, content = (FILE, file) if isinstance(file, bytes) else file
        id = ObjectId(content.decode()) if mode == SUBMODULE else objects.write("blob", content)
        edits[path] = Entry(mode, id)
    return objects.splice(EMPTY_TREE, edits)


def read(objects: Objects, tree: ObjectId, path: bytes) -> bytes:
    entry = objects.find(tree, path)
    assert entry
    return objects.read(entry.id)


LINES = b"".join(b"line %d\n" % number for number in range(1, 41))


# -- the law: applying a diff gives the other tree -----------------------------------------------

# `d` is a file in some trees and a directory in others.
PATHS = [b"a.py", b"d", b"d/b.py", b"d/e/c", b"two words", b'q"uote\\', b"caf\xe9", b"\xe4\xb8\xad",
         b"new\nline", b"tab\t", b"-p", b"b/a.py", b"dev/null"]  # fmt: skip
line = st.sampled_from(
    [b"x", b"", b"y\r", b"--- a/a.py", b"+++ b/d", b"@@ -1 +1 @@", b"-", b"diff --git a/d b/d",
     b"\\ No newline at end of file", b"caf\xe9", b"tab\t ", b"-- ", b"GIT binary patch"]
)  # fmt: skip
text = st.builds(
    lambda lines, end: b"\n".join(lines) + end,
    st.lists(line, max_size=12),
    st.sampled_from([b"", b"\n"]),
)
binary = st.builds(lambda head, tail: head + b"\0" + tail, st.binary(max_size=80), text)
file = st.one_of(
    st.tuples(st.sampled_from([FILE, EXECUTABLE]), st.one_of(text, binary)),
    st.tuples(st.just(SYMLINK), st.sampled_from([b"a.py", b"../../etc", b"d"])),
    st.tuples(st.just(SUBMODULE), st.sampled_from([b"1" * 40, b"2" * 40])),
)


@st.composite
def trees(draw: st.DrawFn) -> Files:
    files = draw(st.dictionaries(st.sampled_from(PATHS), file, max_size=6))
    if b"d" in files:
        files = {path: file for path, file in files.items() if not path.startswith(b"d/")}
    return files


@settings(max_examples=60, deadline=None)
@given(before=trees(), after=trees())
def test_applying_a_diff_gives_the_other_tree_and_back(
    shared: Objects, before: Files, after: Files
) -> None:
    old, new = make(shared, before), make(shared, after)
    text = patch.diff(shared, old, new)
    assert patch.apply(shared, old, text) == new
    assert patch.apply(shared, old, text, three_way=True) == new
    assert patch.apply(shared, new, text, reverse=True) == old
    assert patch.paths(text) == shared.changed(old, new).keys()


@settings(max_examples=40, deadline=None)
@given(before=trees(), after=trees())
def test_the_parts_of_a_split_diff_give_the_same_tree(
    shared: Objects, before: Files, after: Files
) -> None:
    old, new = make(shared, before), make(shared, after)
    text = patch.diff(shared, old, new)
    parts = patch.split_files(text)
    assert len({path for path, _ in parts}) == len(parts)
    assert sorted(b"".join(part for _, part in parts)) == sorted(text)
    # A file that becomes a directory has to go before the files in it come.
    order = sorted(parts, key=lambda part: b"\ndeleted file mode" not in part[1])
    *_, last = [old, *patch.apply_series(shared, old, [part for _, part in order])]
    assert last == new


def test_a_commit_stands_for_its_tree(objects: Objects) -> None:
    tree = make(objects, {b"a": b"1\n"})
    commit = objects.commit(tree, [], b"A <a@b> 0 +0000", b"m\n")
    assert patch.diff(objects, EMPTY_TREE, commit) == patch.diff(objects, EMPTY_TREE, tree)
    assert patch.diff(objects, commit, tree) == b""


# -- the same bytes everywhere -------------------------------------------------------------------

SAMPLE = (
    {b"a.py": LINES, b"gone": b"x\n", b"bin": b"\0old", b"z": b"\xe9\r\n\r\nend", b"mode": b"m\n",
     b"f.py": b"def f():\n" + LINES},
    {b"a.py": LINES.replace(b"line 7\n", b"").replace(b"line 9\n", b"\n \nnine \n"),
     b"moved": b"x\n", b"bin": b"\0new" * 90, b"z": b"\xe9\r\n\r\nEnd",
     b"mode": (EXECUTABLE, b"m\n"), b"f.py": b"def f():\n" + LINES.replace(b"30", b"thirty"),
     b"\xe4\xb8\xad": b"cjk\n"},
)  # fmt: skip


def test_a_hostile_configuration_changes_no_byte(objects: Objects, tmp_path: Path) -> None:
    old, new = (make(objects, files) for files in SAMPLE)
    expected = patch.diff(objects, old, new)
    # In the user's home, read by a fresh process...
    home = tmp_path / "home"
    configuration = hostile(home)
    (home / ".gitconfig").write_text(configuration)
    script = (
        "import sys; from pathlib import Path; from rebase import patch; "
        "from rebase.objects import Objects; "
        "sys.stdout.buffer.write(patch.diff(Objects(Path(sys.argv[1])), *sys.argv[2:]))"
    )
    variables = {"HOME": str(home), "XDG_CONFIG_HOME": str(home), "GIT_DIFF_OPTS": "-u0"}
    for locale in ("C", "C.UTF-8"):
        done = subprocess.run(
            [sys.executable, "-c", script, objects.git.directory, old, new],
            env=os.environ | variables | {"LANG": locale, "LC_ALL": locale},
            capture_output=True,
            check=True,
        )
        assert done.stdout == expected
    # ... and in the repository's own file.
    with (objects.git.directory / "config").open("a") as file:
        file.write(configuration)
    assert patch.diff(objects, old, new) == expected
    assert patch.apply(objects, old, expected) == new


def test_another_git_makes_the_same_bytes(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.environ.get("FORKMAN_TEST_GIT")
    if not other:
        pytest.skip("FORKMAN_TEST_GIT names no second git")
    moved = b"".join(b"%d\n\n" % (number * 7 % 40) for number in range(200))
    old, new = (make(objects, files) for files in SAMPLE)
    shuffled = make(objects, {b"a.py": LINES * 3}), make(objects, {b"a.py": moved + LINES})
    here = [patch.diff(objects, old, new), patch.diff(objects, *shuffled)]
    monkeypatch.setattr(
        "rebase.git._USER", os.environ | {"PATH": f"{Path(other).parent}:{os.environ['PATH']}"}
    )
    assert [patch.diff(objects, old, new), patch.diff(objects, *shuffled)] == here


@pytest.mark.parametrize("size", [0, 1, 0xFFFF, 0x10000, 200_000])
def test_binary_content_is_deflated_without_zlib(size: int) -> None:
    content = bytes(number * 31 % 256 for number in range(size))
    assert zlib.decompress(patch._stored(content)) == content


def test_a_binary_patch_can_be_taken_back(objects: Objects) -> None:
    old, new = make(objects, {b"x": b"\0a" * 70_000}), make(objects, {b"x": b"\0b"})
    text = patch.diff(objects, old, new)
    index = {"GIT_INDEX_FILE": str(objects.git.directory / "index")}
    objects.git.run("read-tree", new, env=index)
    objects.git.run("apply", "--cached", "-R", input=text, env=index)
    assert objects.git.run("write-tree", env=index).decode().strip() == old


# -- taking patches apart ------------------------------------------------------------------------


def test_a_line_that_looks_like_a_header_is_a_line() -> None:
    text = (
        b"Preamble\n\ndiff --git a/x b/x\nindex 1111..2222 100644\n--- a/x\n+++ b/x\n"
        b"@@ -1,3 +1,3 @@\n"
        b" diff --git a/no b/no\n--- a/no\n+++ b/no\n @@ -1 +1 @@\n"
        b"diff --git a/y b/y\nindex 33333..444444 100644\n--- a/y\n+++ b/y\n@@ -1 +1 @@\n"
        b"-a\r\n\\ No newline at end of file\n+\xe9\n-- \n2.39.5\n"
    )
    (x, first), (y, second) = patch.split_files(text)
    assert (x, y) == (b"x", b"y")
    assert first + second == text[len(b"Preamble\n\n") : -len(b"-- \n2.39.5\n")]


def test_a_rename_keeps_both_names_in_one_diff() -> None:
    text = (
        b"diff --git a/old name b/new name\nsimilarity index 100%\n"
        b"rename from old name\nrename to new name\n"
        b"diff --git a/m b/m\nold mode 100644\nnew mode 100755\n"
    )
    assert [path for path, _ in patch.split_files(text)] == [b"new name", b"m"]
    assert patch.paths(text) == {b"old name", b"new name", b"m"}


def test_a_diff_without_gits_header_applies(objects: Objects) -> None:
    tree = make(objects, {b"d/a": b"1\n2\n"})
    text = b"--- a/d/a\t2020-01-01 00:00:00\n+++ b/d/a\t2020-01-02\n@@ -1,2 +1,2 @@\n-1\n+one\n 2\n"
    assert patch.paths(text) == {b"d/a"}
    assert read(objects, patch.apply(objects, tree, text), b"d/a") == b"one\n2\n"


def test_the_last_line_may_lack_its_newline(objects: Objects) -> None:
    tree = make(objects, {b"a": b"1\n", b"b": b"1\n"})
    text = patch.diff(objects, tree, make(objects, {b"a": b"2\n", b"b": b"2\n"}))[:-1]
    (_, first), (_, last) = patch.split_files(text)
    assert (first + last).endswith(b"\n+2\n")


# -- applying ------------------------------------------------------------------------------------


def test_an_empty_patch_changes_nothing(objects: Objects) -> None:
    tree = make(objects, {b"a": b"1\n"})
    assert patch.apply(objects, tree, b"") == tree


def test_lines_may_have_moved(objects: Objects) -> None:
    old, new = make(objects, {b"a": LINES}), make(objects, {b"a": LINES.replace(b"20\n", b"X\n")})
    moved = make(objects, {b"a": b"new\n" * 9 + LINES, b"other": b"stays\n"})
    result = patch.apply(objects, moved, patch.diff(objects, old, new))
    assert read(objects, result, b"a") == b"new\n" * 9 + LINES.replace(b"20\n", b"X\n")
    assert read(objects, result, b"other") == b"stays\n"


def test_a_series_yields_the_tree_after_each_patch(objects: Objects) -> None:
    states = [make(objects, {b"a": b"%d\n" % number, b"b": b"b\n"}) for number in range(4)]
    steps = [patch.diff(objects, old, new) for old, new in itertools.pairwise(states)]
    assert list(patch.apply_series(objects, states[0], steps)) == states[1:]


def test_white_space_is_content(objects: Objects) -> None:
    old, new = make(objects, {b"a": b"x\n"}), make(objects, {b"a": b"x\n  trailing \t\n\n\n"})
    text = patch.diff(objects, old, new)
    assert patch.apply(objects, old, text) == new
    with pytest.raises(patch.Rejected):
        patch.apply(objects, make(objects, {b"a": b" x\n"}), text)


def test_a_three_way_application_uses_the_blob_the_patch_names(objects: Objects) -> None:
    old = make(objects, {b"a": LINES})
    wanted = make(objects, {b"a": LINES.replace(b"line 20\n", b"ours\n")})
    text = patch.diff(objects, old, wanted)
    text = text.replace(b"0000" * 10, b"0000" * 2)
    full = objects.find(old, b"a")
    assert full
    text = text.replace(full.id.encode(), full.id[:9].encode())  # abbreviated, as real patches are
    upstream = make(objects, {b"a": LINES.replace(b"line 18\n", b"theirs\n")})
    with pytest.raises(patch.Rejected):
        patch.apply(objects, upstream, text)
    merged = patch.apply(objects, upstream, text, three_way=True)
    assert b"line 17\ntheirs\nline 19\nours\n" in read(objects, merged, b"a")


# -- saying why not ------------------------------------------------------------------------------


def rejected(objects: Objects, tree: ObjectId, text: bytes, *, three_way: bool = False) -> str:
    with pytest.raises(patch.Rejected) as caught:
        patch.apply(objects, tree, text, three_way=three_way)
    return str(caught.value)


def test_each_failed_hunk_says_what_it_expected_and_what_is_there(objects: Objects) -> None:
    old = make(objects, {b"d/a": LINES})
    new = make(objects, {b"d/a": LINES.replace(b"line 5\n", b"5\n").replace(b"line 30\n", b"30\n")})
    text = patch.diff(objects, old, new)
    tree = make(objects, {b"d/a": b"one more\n" + LINES.replace(b"line 28\n", b"l\x1bne 28\n")})
    assert rejected(objects, tree, text) == (
        'd/a: hunk 2 (line 27): expected "line 28", the file has "l\\x1bne 28" in line 29'
    )


def test_a_hunk_that_is_there_already_is_called_so(objects: Objects) -> None:
    old, new = make(objects, {b"a": LINES}), make(objects, {b"a": LINES.replace(b"20", b"X")})
    text = patch.diff(objects, old, new)
    assert rejected(objects, new, text) == "a: hunk 1 (line 17): the file already has this change"


def test_a_file_shorter_or_longer_than_expected_is_rejected(objects: Objects) -> None:
    old, new = make(objects, {b"a": b"1\n2\n"}), make(objects, {b"b": b""})
    text = patch.diff(objects, old, new)
    longer, shorter = make(objects, {b"a": b"1\n2\n3\n"}), make(objects, {b"a": b"1\n"})
    assert 'expected its end, the file has "3" in line 3' in rejected(objects, longer, text)
    assert 'expected "2", the file has its end in line 2' in rejected(objects, shorter, text)


def test_a_hunk_that_is_no_longer_at_the_beginning_says_so(objects: Objects) -> None:
    text = patch.diff(
        objects, make(objects, {b"a": LINES}), make(objects, {b"a": b"new\n" + LINES})
    )
    longer = make(objects, {b"a": b"license\nmore\n" + LINES})
    assert rejected(objects, longer, text) == (
        "a: hunk 1 (line 1): begins the file in the patch; here its lines begin in line 3"
    )


def test_white_space_at_the_end_of_a_line_is_shown(objects: Objects) -> None:
    text = patch.diff(objects, make(objects, {b"a": b"1\r\n2"}), make(objects, {b"a": b"x\n"}))
    for there, words in (
        (b"1\n2", r'expected "1\r", the file has "1" in line 1'),
        (b"1 \r\n2", r'expected "1\r", the file has "1 \r" in line 1'),
        (b"1\r\n2\n", 'expected "2" without a line end, the file has "2" in line 2'),
    ):
        assert words in rejected(objects, make(objects, {b"a": there}), text)


@pytest.mark.parametrize(
    ("upstream", "reason"),
    [
        ({}, "a: does not exist"),
        ({b"a": (SYMLINK, b"a.py")}, "a: "),
        ({b"a/x": b"1\n"}, "a: "),
    ],
)
def test_what_is_no_longer_a_file_is_named(objects: Objects, upstream: Files, reason: str) -> None:
    text = patch.diff(objects, make(objects, {b"a": b"1\n"}), make(objects, {b"a": b"2\n"}))
    assert rejected(objects, make(objects, upstream), text).startswith(reason)


def test_a_creation_does_not_overwrite(objects: Objects) -> None:
    text = patch.diff(objects, EMPTY_TREE, make(objects, {b"a": b"1\n"}))
    other = rejected(objects, make(objects, {b"a": b"2\n"}), text)
    same = rejected(objects, make(objects, {b"a": b"1\n"}), text)
    assert other == "a: is to be created, but exists, with other content"
    assert same == "a: is to be created, but exists, with the same content"


def test_only_the_files_at_fault_are_named(objects: Objects) -> None:
    """`b.py` is the end of another path in git's message."""
    old = make(objects, {b"b.py": b"1\n", b"d/b.py": b"1\n"})
    new = make(objects, {b"b.py": b"2\n", b"d/b.py": b"2\n"})
    tree = make(objects, {b"b.py": b"1\n", b"d/b.py": b"other\n"})
    text = patch.diff(objects, old, new)
    assert rejected(objects, tree, text) == (
        'd/b.py: hunk 1 (line 1): expected "1", the file has "other" in line 1'
    )


def test_a_changed_binary_file_is_rejected(objects: Objects) -> None:
    text = patch.diff(objects, make(objects, {b"a": b"\0a"}), make(objects, {b"a": b"\0b"}))
    assert "a: is binary" in rejected(objects, make(objects, {b"a": b"\0c"}), text)


def test_a_three_way_conflict_is_rejected(objects: Objects) -> None:
    old, new = make(objects, {b"a": LINES}), make(objects, {b"a": LINES.replace(b"20", b"X")})
    tree = make(objects, {b"a": LINES.replace(b"20", b"Y")})
    text = patch.diff(objects, old, new)
    assert 'the file has "line Y" in line 20' in rejected(objects, tree, text, three_way=True)


def test_a_blob_that_a_three_way_application_lacks_is_named(objects: Objects) -> None:
    text = patch.diff(objects, make(objects, {b"a": LINES}), make(objects, {b"a": b"X\n" + LINES}))
    lost = b"1234567890" * 4
    text = b"".join(
        b"index %s..%s 100644\n" % (lost, lost) if part.startswith(b"index ") else part
        for part in text.splitlines(keepends=True)
    )
    message = rejected(objects, make(objects, {b"a": b"other\n"}), text, three_way=True)
    assert f"blob {lost.decode()}, which the patch was made from, is not in" in message


def test_a_repository_that_cannot_be_written_is_not_the_patchs_fault(objects: Objects) -> None:
    old, new = make(objects, {b"a": b"1\n"}), make(objects, {b"a": b"2\n"})
    text = patch.diff(objects, old, new).replace(b"+2", b"+3")
    store = objects.git.directory / "objects"
    store.rename(store.with_name("elsewhere"))
    store.mkdir()
    (store / "info").mkdir()
    (store / "info" / "alternates").write_text(f"{store.with_name('elsewhere')}\n")
    blob = "00750edc07d6415dcc07ae0351e9397b0222b7ba"  # of 3\n, which is to be written
    (store / blob[:2]).write_bytes(b"in the way")
    with pytest.raises(EnvironmentFault, match="git cannot apply a patch in") as caught:
        patch.apply(Objects(objects.git.directory), old, text)
    assert ": unable to create temporary file: Not a directory; unable" in caught.value.what


# -- hostile and damaged patches -----------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [b"../x", b"/etc/passwd", b"a/../../x", b".git/config", b"a/.GIT/hooks/x", b"git~1/config",
     b".git./config", b"./x", b"a//b", b".g\xe2\x80\x8cit/config", b".git::$INDEX_ALLOCATION/x"],
)  # fmt: skip
def test_a_path_that_leaves_the_tree_is_refused(objects: Objects, path: bytes) -> None:
    text = (
        b"diff --git a/%s b/%s\nnew file mode 100644\n--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+x\n"
    )
    with pytest.raises(UsageError, match=r"leaves the tree, or is git's own") as caught:
        patch.apply(objects, EMPTY_TREE, text % (path, path, path))
    assert patch.show(path) in caught.value.what


def test_a_quoted_path_is_judged_by_what_it_stands_for(objects: Objects) -> None:
    text = b'diff --git "a/\\056\\056/x" "b/\\056\\056/x"\nold mode 100644\nnew mode 100755\n'
    with pytest.raises(UsageError, match="leaves the tree"):
        patch.apply(objects, make(objects, {b"x": b""}), text)


def test_nothing_is_written_through_a_symbolic_link(objects: Objects) -> None:
    text = patch.diff(objects, EMPTY_TREE, make(objects, {b"link/x": b"1\n"}))
    linked = make(objects, {b"link": (SYMLINK, b"/etc")})
    assert "symbolic link" in rejected(objects, linked, text)
    both = patch.diff(objects, EMPTY_TREE, linked) + text
    assert "symbolic link" in rejected(objects, EMPTY_TREE, both)


@pytest.mark.parametrize(
    "text",
    [
        b"diff --git x.py x.py\n--- x.py\n+++ x.py\n@@ -1 +1 @@\n-1\n+2\n",
        b"diff --git d/x.py d/x.py\n--- d/x.py\n+++ d/x.py\n@@ -1 +1 @@\n-1\n+2\n",
        b"--- x.py\n+++ x.py\n@@ -1 +1 @@\n-1\n+2\n",
        b"--- d/x.py\t(revision 1)\n+++ d/x.py\t(working copy)\n@@ -1 +1 @@\n-1\n+2\n",
        b"diff --git d/x.py d/x.py\nnew file mode 100644\n--- /dev/null\n+++ d/x.py\n"
        b"@@ -0,0 +1 @@\n+2\n",
        b"diff --git d/x.py d/x.py\nold mode 100644\nnew mode 100755\n",
        b"diff --git d/x.py e/y z\nsimilarity index 100%\nrename from d/x.py\nrename to e/y z\n",
        b'diff --git "d/x.py\\t" "d/x.py\\t"\nold mode 100644\nnew mode 100755\n',
    ],
)
def test_a_patch_without_prefixes_is_refused_by_that_name(objects: Objects, text: bytes) -> None:
    tree = make(objects, {b"x.py": b"1\n", b"d/x.py": b"1\n"})
    with pytest.raises(UsageError, match=r"x\.py.* without the prefixes a/ and b/") as caught:
        patch.apply(objects, tree, text)
    assert "git -c diff.noprefix=false diff" in caught.value.todo


@pytest.mark.parametrize("prefixes", [("a/", "b/"), ("i/", "w/"), ("a/", "a/"), ("old/", "new/")])
def test_other_prefixes_count_as_git_has_it(objects: Objects, prefixes: tuple[str, str]) -> None:
    old, new = (prefix.encode() + b"d/x y.py" for prefix in prefixes)
    text = b"--- %s\n+++ %s\n@@ -1 +1 @@\n-1\n+2\n" % (old, new)
    for header in (b"", b"diff --git %s %s\n" % (old, new)):
        tree = patch.apply(objects, make(objects, {b"d/x y.py": b"1\n"}), header + text)
        assert read(objects, tree, b"d/x y.py") == b"2\n"


@pytest.mark.parametrize(
    ("damaged", "what"),
    [
        (b"diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1,3 +1,3 @@\n 1\n-2\n", "ends early"),
        (b"diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n 1\nwrapped\n", "ends early"),
        (b"diff --git a/a b/a\nindex 1..2\nBinary files a/a and b/a differ\n", "does not hold"),
        (b"diff --git a/a b/a\n--- a/a\n+++ b/a\n", "damaged"),
        (b"some words\n", "no diff"),
    ],
)
def test_a_damaged_patch_is_a_usage_error(objects: Objects, damaged: bytes, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        patch.apply(objects, make(objects, {b"a": b"1\n2\n3\n"}), damaged)
