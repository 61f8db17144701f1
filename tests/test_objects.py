"""The object database: what is made here is what git would have made."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebase.errors import EnvironmentFault
from rebase.git import EMPTY_TREE, ObjectId
from rebase.objects import EXECUTABLE, FILE, SUBMODULE, SYMLINK, TREE, Entry, Objects

AUTHOR = b"A. Author <a@example.com> 1700000000 +0800"


@pytest.fixture
def objects(tmp_path):
    return repository(tmp_path / "mirror.git")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One repository for all examples of a law: objects do not get in each other's way."""
    return repository(tmp_path_factory.mktemp("shared") / "mirror.git")


def repository(path: Path) -> Objects:
    subprocess.run(["git", "init", "-q", "--bare", path], check=True)
    return Objects(path)


def git(objects: Objects, *args: str, input: bytes = b"") -> bytes:
    return subprocess.run(
        ["git", *args], cwd=objects.git.directory, input=input, check=True, capture_output=True
    ).stdout


def blob(objects: Objects, content: bytes, mode: int = FILE) -> Entry:
    return Entry(mode, objects.write("blob", content))


def tree(objects: Objects, files: dict[bytes, bytes]) -> ObjectId:
    return objects.splice(EMPTY_TREE, {p: blob(objects, content) for p, content in files.items()})


def packs(objects: Objects) -> list[Path]:
    return list((objects.git.directory / "objects/pack").glob("*.pack"))


# -- objects -------------------------------------------------------------------------------------


def test_an_object_can_be_read_before_it_is_written(objects):
    id = objects.write("blob", b"content")
    assert objects.read(id) == b"content"
    assert subprocess.run(["git", "cat-file", "-e", id], cwd=objects.git.directory).returncode


def test_a_few_objects_become_files_and_many_one_pack(objects):
    few = [objects.write("blob", b"%d" % number) for number in range(5)]
    objects.flush()
    assert not packs(objects)
    many = [objects.write("blob", os.urandom(number * 50)) for number in range(200)]
    objects.flush()
    assert len(packs(objects)) == 1
    git(objects, "fsck", "--strict")
    assert git(objects, "cat-file", "blob", few[3]) == b"3"
    assert git(objects, "cat-file", "blob", many[199]) == objects.read(many[199])


def test_what_the_repository_has_is_not_written_again(objects):
    for _ in range(2):
        for number in range(50):
            objects.write("blob", b"%d" % number)
        objects.flush()
    assert len(packs(objects)) == 1


def test_an_object_that_is_missing_says_what_to_do(objects):
    with pytest.raises(EnvironmentFault) as caught:
        objects.read(ObjectId("1" * 40))
    assert "lacks object 1111" in caught.value.what
    assert "forkman fetch" in caught.value.todo


@pytest.mark.parametrize("count", [1, 100])
def test_a_repository_that_cannot_be_written_is_a_fault_of_the_environment(objects, count):
    for number in range(count):
        objects.write("blob", b"%d" % number)
    shutil.rmtree(objects.git.directory / "objects")
    (objects.git.directory / "objects").write_text("in the way")
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        objects.flush()


def test_a_folder_that_is_no_repository_is_a_fault_of_the_environment(tmp_path):
    with pytest.raises(EnvironmentFault, match="cannot be opened as a repository"):
        Objects(tmp_path)


# -- trees ---------------------------------------------------------------------------------------


names = st.sampled_from([b"a", b"a.b", b"a-b", b"a0", b"b", b"\xff", "变".encode(), b"x y", b"\n"])
paths = st.lists(names, min_size=1, max_size=3).map(b"/".join)
entries = st.one_of(
    st.builds(
        lambda mode, digit: (mode, digit), st.sampled_from([FILE, EXECUTABLE, SYMLINK]),
        st.sampled_from([b"1", b"2"]),
    ),
    st.just((SUBMODULE, b"3" * 40)),
)  # fmt: skip


@st.composite
def states(draw: st.DrawFn) -> dict[bytes, tuple[int, bytes]]:
    """Files by path, none below another."""
    found: dict[bytes, tuple[int, bytes]] = {}
    for path, entry in draw(st.dictionaries(paths, entries, max_size=8)).items():
        if not any((path + b"/").startswith(p + b"/") or p.startswith(path + b"/") for p in found):
            found[path] = entry
    return found


def as_entries(objects: Objects, state: dict[bytes, tuple[int, bytes]]) -> dict[bytes, Entry]:
    return {
        path: Entry(mode, ObjectId(content.decode()))
        if mode == SUBMODULE
        else blob(objects, content, mode)
        for path, (mode, content) in state.items()
    }


@given(states(), states())
def test_splicing_in_what_changed_between_two_trees_leads_from_one_to_the_other(shared, old, new):
    before = shared.splice(EMPTY_TREE, as_entries(shared, old))
    after = shared.splice(EMPTY_TREE, as_entries(shared, new))
    changed = shared.changed(before, after)
    assert shared.splice(before, {path: now for path, (_, now) in changed.items()}) == after
    assert shared.splice(after, {path: was for path, (was, _) in changed.items()}) == before


@given(states())
def test_what_is_spliced_in_is_found_and_nothing_else(shared, state):
    wanted = as_entries(shared, state)
    made = shared.splice(EMPTY_TREE, wanted)
    assert dict(shared.walk(made)) == wanted
    assert {path: shared.find(made, path) for path in wanted} == wanted


def test_trees_are_the_ones_git_makes(objects):
    state = {
        b"a/x": (FILE, b"1"), b"a.b": (FILE, b"2"), b"a0": (SYMLINK, b"1"),
        b"lib": (SUBMODULE, b"3" * 40), b"\xff y": (EXECUTABLE, b"2"),
    }  # fmt: skip
    files = as_entries(objects, state)
    made = objects.splice(EMPTY_TREE, files)
    objects.flush()
    listed = b"".join(
        b"%06o %s 0\t%s\0" % (entry.mode, entry.id.encode(), path) for path, entry in files.items()
    )
    git(objects, "update-index", "-z", "--index-info", input=listed)
    assert git(objects, "write-tree").decode().strip() == made
    git(objects, "fsck", "--strict")


def test_a_path_below_a_file_is_not_found(objects):
    made = tree(objects, {b"a": b"1", b"b/c": b"2"})
    assert objects.find(made, b"a/x") is None
    assert objects.find(made, b"b/x") is None
    found = objects.find(made, b"b")
    assert found
    assert found.mode == TREE


def test_a_directory_goes_with_its_last_file(objects):
    made = tree(objects, {b"a": b"1", b"b/c/d": b"2"})
    assert objects.splice(made, {b"b/c/d": None}) == tree(objects, {b"a": b"1"})


def test_deleting_what_is_not_there_changes_nothing(objects):
    made = tree(objects, {b"a": b"1"})
    assert objects.splice(made, {b"b": None, b"a/b": None, b"c/d": None}) == made


def test_renames_are_found_as_git_finds_them(objects):
    content = b"".join(b"line %d\n" % number for number in range(20))
    old = tree(objects, {b"old name": content, b"kept": b"kept\n"})
    new = tree(objects, {b"new\nname": content + b"more\n", b"kept": b"kept\n", b"added": b"x\n"})
    assert objects.renames(old, new) == {b"new\nname": b"old name"}


# -- commits -------------------------------------------------------------------------------------


def test_a_commit_is_the_one_git_makes(objects):
    made = tree(objects, {b"a": b"1"})
    first = objects.commit(made, [], AUTHOR, b"First\n")
    second = objects.commit(made, [first], AUTHOR, b"Second\n\nparent of nothing\n")
    objects.flush()
    who = {"NAME": "A. Author", "EMAIL": "a@example.com", "DATE": "1700000000 +0800"}
    env = {f"GIT_{role}_{key}": value
           for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}  # fmt: skip
    by_git = subprocess.run(
        ["git", "commit-tree", made, "-p", first, "-F", "-"],
        cwd=objects.git.directory, env=os.environ | env, check=True, capture_output=True,
        input=b"Second\n\nparent of nothing\n",
    )  # fmt: skip
    assert by_git.stdout.decode().strip() == second
    assert objects.tree_of(second) == made
    assert objects.parents_of(second) == [first]
    assert objects.parents_of(first) == []


# -- merges --------------------------------------------------------------------------------------


def test_trees_without_a_conflict_merge_into_one(objects):
    base = tree(objects, {b"a": b"1\n", b"b": b"2\n"})
    ours = tree(objects, {b"a": b"ours\n", b"b": b"2\n"})
    theirs = tree(objects, {b"a": b"1\n", b"b": b"theirs\n", b"c": b"new\n"})
    merge = objects.merge(base, ours, theirs)
    assert merge.clean
    assert merge.tree == tree(objects, {b"a": b"ours\n", b"b": b"theirs\n", b"c": b"new\n"})


def test_a_conflict_has_its_stages_and_what_git_says(objects):
    base, ours, theirs = (tree(objects, {b"x y": text}) for text in (b"1\n", b"2\n", b"3\n"))
    merge = objects.merge(base, ours, theirs)
    assert not merge.clean
    assert merge.stages == {
        b"x y": {n: blob(objects, text) for n, text in ((1, b"1\n"), (2, b"2\n"), (3, b"3\n"))}
    }
    ((where, kind, message),) = merge.notes
    assert (where, kind) == ((b"x y",), "CONFLICT (contents)")
    assert message == "CONFLICT (content): Merge conflict in x y"


def test_messages_call_the_sides_by_what_they_are(objects):
    base, theirs = tree(objects, {b"a": b"1\n"}), tree(objects, {b"a": b"2\n"})
    ((_, _, message),) = objects.merge(base, EMPTY_TREE, theirs).notes
    assert message.startswith("CONFLICT (modify/delete): a deleted in upstream and modified in our")


def test_files_are_merged_as_they_are_in_whole_trees(objects):
    contents = [
        b"",
        b"a\nb\nc\n",
        b"A\nb\nc\n",
        b"a\nb\nC\n",
        b"a\r\nb\r\nc\r\n",
        b"\0binary",
        b"a\nb",
    ]
    blobs = [objects.write("blob", content) for content in contents]
    merges = [(base, ours, theirs) for base in blobs for ours in blobs for theirs in blobs]
    merged = objects.merge_files(merges)
    for (base, ours, theirs), result in list(zip(merges, merged, strict=True))[::7]:
        whole = objects.merge(
            *(objects.tree({b"f": Entry(FILE, id)}) for id in (base, ours, theirs))
        )
        entry = objects.find(whole.tree, b"f")
        assert entry
        assert result == (entry.id if whole.clean else None)


def test_a_file_merge_that_was_made_is_not_made_again(objects, monkeypatch):
    base, ours, theirs = (
        objects.write("blob", content) for content in (b"1\n2\n3\n", b"0\n2\n3\n", b"1\n2\n4\n")
    )
    (merged,) = objects.merge_files([(base, ours, theirs)])
    assert merged
    assert objects.read(merged) == b"0\n2\n4\n"
    monkeypatch.setattr(objects, "merge", None)
    assert objects.merge_files([(base, ours, theirs)] * 2) == [merged, merged]
