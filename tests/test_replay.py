"""What a replay says about each change, on small histories made for the case."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rebase.branch import recipe_step
from rebase.git import ObjectId
from rebase.history import History
from rebase.objects import EXECUTABLE, FILE, SUBMODULE, Entry, Objects
from rebase.outcome import Kind, Outcome, Status, Taken, UpstreamCommit
from rebase.queue import RecipeFile
from rebase.replay import Edit, Step, replay

Files = dict[str, bytes | Entry]
AUTHOR = b"A. Author <a@example.com> 1700000000 +0800"


class Upstream:
    """An upstream with a base and commits after it, and our changes, made on the base."""

    def __init__(self, folder: Path, base: Files) -> None:
        subprocess.run(["git", "init", "-q", "--bare", folder / "mirror.git"], check=True)
        self.objects = Objects(folder / "mirror.git")
        self.files = self.ours = base
        self.base = self.tip = self._commit(base, [], "Base")
        self.steps: list[Step] = []

    def _commit(self, files: Files, parents: list[ObjectId], message: str) -> ObjectId:
        return self.objects.commit(self.tree(files), parents, AUTHOR, message.encode())

    def tree(self, files: Files) -> ObjectId:
        return self.objects.splice(
            self.objects.tree({}),
            {
                name.encode(): file
                if isinstance(file, Entry)
                else Entry(FILE, self.objects.write("blob", file))
                for name, file in files.items()
            },
        )

    def goes_on(self, message: str, **files: bytes | Entry | None) -> ObjectId:
        """Upstream commits these files (None deletes one); `_` in a name stands for the dot."""
        self.files = _with(self.files, files)
        self.tip = self._commit(self.files, [self.tip], message)
        return self.tip

    def we_change(self, message: str, **files: bytes | Entry | None) -> None:
        """One more change of ours."""
        before = self.tree(self.ours)
        self.ours = _with(self.ours, files)
        edit = Edit(before, self.tree(self.ours))
        self.steps.append(Step(f"{len(self.steps)}.patch", AUTHOR, message.encode(), edit))

    def replay(self, *steps: Step) -> list[Outcome]:
        self.objects.flush()
        history = History(self.objects.git, self.base, self.tip)
        outcomes = list(replay(self.objects, steps or self.steps, self.tip, history))
        self.objects.flush()
        return outcomes

    def outcome(self) -> Outcome:
        """The outcome of the only change."""
        (outcome,) = self.replay()
        return outcome

    def content(self, tree: ObjectId, path: str) -> bytes:
        entry = self.objects.find(tree, path.encode())
        assert entry
        return self.objects.read(entry.id)


def _with(files: Files, edits: dict[str, bytes | Entry | None]) -> Files:
    named = {name.replace("_", "."): file for name, file in edits.items()}
    return {name: file for name, file in (files | named).items() if file is not None}


def text(*lines: str) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def numbered(count: int, **lines: str) -> bytes:
    """Lines `1` to `count`, some replaced: `_3="x"`."""
    return text(*(lines.get(f"_{number}", str(number)) for number in range(1, count + 1)))


# -- applied -------------------------------------------------------------------------------------


def test_a_change_to_what_upstream_left_alone_is_applied(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n", "b.py": b"b\n"})
    upstream.goes_on("Elsewhere", b_py=b"B\n")
    upstream.we_change("Ours", a_py=b"A\n")
    outcome = upstream.outcome()
    assert outcome.status is Status.APPLIED
    assert outcome.tree == upstream.tree({"a.py": b"A\n", "b.py": b"B\n"})


def test_changes_to_one_file_by_both_are_merged(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(9)})
    upstream.goes_on("Top", a_py=numbered(9, _1="upstream"))
    upstream.we_change("Bottom", a_py=numbered(9, _9="ours"))
    outcome = upstream.outcome()
    assert outcome.status is Status.APPLIED
    assert upstream.content(outcome.tree, "a.py") == numbered(9, _1="upstream", _9="ours")


def test_several_changes_to_a_file_that_upstream_changed_build_on_each_other(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(20)})
    upstream.goes_on("Top", a_py=numbered(20, _1="upstream"))
    upstream.we_change("Middle", a_py=numbered(20, _10="ours"))
    upstream.we_change("Bottom", a_py=numbered(20, _10="ours", _20="ours too"))
    first, second = upstream.replay()
    assert upstream.content(first.tree, "a.py") == numbered(20, _1="upstream", _10="ours")
    assert upstream.content(second.tree, "a.py") == numbered(
        20, _1="upstream", _10="ours", _20="ours too"
    )


def test_a_change_follows_a_file_that_upstream_renamed_and_edited(tmp_path):
    upstream = Upstream(tmp_path, {"old.py": numbered(20)})
    upstream.goes_on("Rename", old_py=None, new_py=numbered(20, _1="upstream"))
    upstream.we_change("Ours", old_py=numbered(20, _20="ours"))
    outcome = upstream.outcome()
    assert outcome.status is Status.APPLIED
    assert outcome.tree == upstream.tree({"new.py": numbered(20, _1="upstream", _20="ours")})


def test_the_branch_is_a_commit_a_change_with_our_author_and_message(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n", "b.py": b"b\n"})
    upstream.we_change("First\n\nWhy.\n", a_py=b"A\n")
    upstream.we_change("Second", b_py=b"B\n")
    first, second = upstream.replay()
    shown = upstream.objects.read(second.commit)
    assert shown == b"tree %s\nparent %s\nauthor %s\ncommitter %s\n\nSecond" % (
        second.tree.encode(), first.commit.encode(), AUTHOR, AUTHOR,
    )  # fmt: skip
    assert first.subject == "First"


def test_the_same_replay_gives_the_same_commits_everywhere(tmp_path, monkeypatch):
    def replayed(folder: Path) -> list[Outcome]:
        folder.mkdir()
        upstream = Upstream(folder, {"a.py": numbered(9), "b.py": b"b\n"})
        upstream.goes_on("Top", a_py=numbered(9, _1="upstream"))
        upstream.we_change("Bottom", a_py=numbered(9, _9="ours"))
        upstream.we_change("New", c_py=b"c\n")
        return upstream.replay()

    here = replayed(tmp_path / "here")
    (tmp_path / ".gitconfig").write_text("[user]\n name = Other\n[merge]\n conflictStyle = diff3\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_COMMITTER_NAME", "Other")
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    assert replayed(tmp_path / "there") == here


def test_a_change_that_is_empty_from_the_start_stays_a_commit(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n"})
    upstream.we_change("Only words")
    outcome = upstream.outcome()
    assert outcome.status is Status.APPLIED
    assert outcome.commit


def test_attributes_in_the_tree_do_not_change_how_files_are_merged(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(3), ".gitattributes": b"*.py merge=union\n"})
    upstream.goes_on("Theirs", a_py=numbered(3, _2="upstream"))
    upstream.we_change("Ours", a_py=numbered(3, _2="ours"))
    assert upstream.outcome().status is Status.CONFLICT


# -- already upstream ----------------------------------------------------------------------------


def by(upstream: Upstream, id: ObjectId, subject: str, pull_request: int | None) -> UpstreamCommit:
    return UpstreamCommit(id, subject, "A. Author", "2023-11-15", pull_request)


def test_a_change_that_upstream_made_is_already_upstream_and_the_commit_is_named(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(9)})
    fix = upstream.goes_on("Fix it (#16115)", a_py=numbered(9, _5="fixed"))
    upstream.goes_on("Go on", a_py=numbered(9, _1="more", _5="fixed"))
    upstream.we_change("Fix it", a_py=numbered(9, _5="fixed"))
    outcome = upstream.outcome()
    assert outcome.status is Status.ALREADY_UPSTREAM
    assert outcome.commit is None
    assert outcome.tree == upstream.objects.tree_of(upstream.tip)
    assert outcome.taken == (Taken(b"a.py", 1, 1, (by(upstream, fix, "Fix it (#16115)", 16115),)),)


def test_of_several_files_those_that_upstream_took_are_left_out(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n", "b.py": b"b\n", "c.py": b"c\n"})
    took = upstream.goes_on("Merge pull request #7 from x/y", a_py=b"A\n", c_py=b"C\n")
    upstream.we_change("All three", a_py=b"A\n", b_py=b"B\n", c_py=b"C\n")
    outcome = upstream.outcome()
    commit = by(upstream, took, "Merge pull request #7 from x/y", 7)
    assert outcome.status is Status.APPLIED
    assert outcome.taken == (Taken(b"a.py", 1, 1, (commit,)), Taken(b"c.py", 1, 1, (commit,)))
    tip = upstream.objects.tree_of(upstream.tip)
    assert upstream.objects.changed(tip, outcome.tree).keys() == {b"b.py"}


def test_of_several_hunks_those_that_upstream_took_are_left_out(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(30)})
    took = upstream.goes_on("Take the first", a_py=numbered(30, _5="ours", _15="theirs"))
    upstream.we_change("Both", a_py=numbered(30, _5="ours", _25="ours too"))
    outcome = upstream.outcome()
    assert outcome.status is Status.APPLIED
    assert outcome.taken == (Taken(b"a.py", 1, 2, (by(upstream, took, "Take the first", None),)),)
    assert upstream.content(outcome.tree, "a.py") == numbered(
        30, _5="ours", _15="theirs", _25="ours too"
    )


def test_hunks_that_upstream_brought_in_different_commits_name_them_all(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(30)})
    one = upstream.goes_on("One", a_py=numbered(30, _5="ours"))
    two = upstream.goes_on("Two", a_py=numbered(30, _5="ours", _25="ours too"))
    upstream.we_change("Both", a_py=numbered(30, _5="ours", _25="ours too"))
    (taken,) = upstream.outcome().taken
    assert {commit.id for commit in taken.by} == {one, two}


def test_an_added_file_that_upstream_took_and_went_on_with_is_already_upstream(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n"})
    took = upstream.goes_on("Add it", new_py=numbered(9))
    upstream.goes_on("Go on", new_py=numbered(9, _5="more"))
    upstream.we_change("Add it", new_py=numbered(9))
    outcome = upstream.outcome()
    assert outcome.status is Status.ALREADY_UPSTREAM
    assert outcome.taken == (Taken(b"new.py", 1, 1, (by(upstream, took, "Add it", None),)),)


def test_what_upstream_had_at_the_path_besides_files_is_no_hunk_of_ours(tmp_path):
    upstream = Upstream(tmp_path, {"lib": numbered(9), "b.py": b"b\n"})
    upstream.goes_on("Submodule", lib=Entry(SUBMODULE, ObjectId("1" * 40)))
    upstream.goes_on("Back", lib=numbered(9, _1="more"))
    upstream.goes_on("Take it", lib=numbered(9, _1="more", _5="fixed"))
    upstream.we_change("Fix", lib=numbered(9, _5="fixed"))
    assert upstream.outcome().status is Status.ALREADY_UPSTREAM


def test_what_upstream_took_and_reverted_is_applied_again(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(9)})
    upstream.goes_on("Fix", a_py=numbered(9, _5="fixed"))
    upstream.goes_on("Revert", a_py=numbered(9))
    upstream.goes_on("Go on", a_py=numbered(9, _1="more"))
    upstream.we_change("Fix", a_py=numbered(9, _5="fixed"))
    outcome = upstream.outcome()
    assert (outcome.status, outcome.taken) == (Status.APPLIED, ())
    assert upstream.content(outcome.tree, "a.py") == numbered(9, _1="more", _5="fixed")


def test_what_upstream_took_and_rewrote_is_a_conflict_that_names_the_commit(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(9)})
    took = upstream.goes_on("Take it (#3)", a_py=numbered(9, _5="fixed"))
    rewrote = upstream.goes_on("Better (#4)", a_py=numbered(9, _5="fixed better"))
    upstream.we_change("Fix", a_py=numbered(9, _5="fixed"))
    outcome = upstream.outcome()
    assert outcome.status is Status.CONFLICT
    (conflict,) = outcome.conflicts
    assert conflict.rewritten == (by(upstream, took, "Take it (#3)", 3),)
    assert [commit.id for commit in conflict.who] == [rewrote, took]


def block(*inserted: str) -> bytes:
    body = ["def forward(self, x):", "    residual = x", "", "    x = self.attention(x)"]
    return text(*body, *inserted, "    x = x + residual", "", "    return x", *map(str, range(9)))


def test_a_statement_that_git_would_duplicate_is_recognised(tmp_path):
    # Upstream took the statement with an empty line where ours has one of spaces. git keeps both.
    upstream = Upstream(tmp_path, {"a.py": block()})
    took = upstream.goes_on("Offload (#9)", a_py=block("", "    x = offload(x)"))
    upstream.we_change("Offload", a_py=block("    ", "    x = offload(x)"))
    outcome = upstream.outcome()
    assert outcome.status is Status.ALREADY_UPSTREAM
    assert outcome.taken == (Taken(b"a.py", 1, 1, (by(upstream, took, "Offload (#9)", 9),)),)
    assert upstream.content(outcome.tree, "a.py").count(b"offload(x)") == 1


def test_a_statement_that_upstream_added_at_another_place_is_added_at_ours_too(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(30)})
    upstream.goes_on("There", a_py=numbered(30, _25="25\nsynchronize()"))
    upstream.we_change("Here", a_py=numbered(30, _5="5\nsynchronize()"))
    outcome = upstream.outcome()
    assert (outcome.status, outcome.taken) == (Status.APPLIED, ())
    assert upstream.content(outcome.tree, "a.py").count(b"synchronize()") == 2


@pytest.mark.parametrize("theirs", ["  x = offload(x)", "    x = offload(x) ", "    x=offload(x)"])
def test_white_space_in_a_statement_is_never_ignored(tmp_path, theirs):
    upstream = Upstream(tmp_path, {"a.py": block()})
    upstream.goes_on("Offload", a_py=block(theirs))
    upstream.we_change("Offload", a_py=block("    x = offload(x)"))
    outcome = upstream.outcome()
    assert (outcome.status, outcome.taken) == (Status.CONFLICT, ())


def test_a_change_that_an_earlier_change_of_ours_contains_is_listed_without_a_commit(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n"})
    upstream.we_change("Ours", a_py=b"A\n")
    again = replace(upstream.steps[0], name="again.patch")
    first, second = upstream.replay(upstream.steps[0], again)
    assert first.status is Status.APPLIED
    assert second.status is Status.ALREADY_UPSTREAM
    assert second.taken == (Taken(b"a.py", 1, 1, ()),)


# -- conflicts -----------------------------------------------------------------------------------


def test_a_conflict_shows_the_lines_of_all_three_and_who_changed_them(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(30)})
    upstream.goes_on("Elsewhere", a_py=numbered(30, _1="one\nand a half"))
    split = upstream.goes_on("Split (#1931)", a_py=numbered(30, _1="one\nand a half", _20="theirs"))
    upstream.we_change("Ours", a_py=numbered(30, _20="ours"))
    outcome = upstream.outcome()
    assert outcome.status is Status.CONFLICT
    assert (outcome.commit, outcome.tree) == (None, upstream.objects.tree_of(upstream.tip))
    (conflict,) = outcome.conflicts
    assert (conflict.path, conflict.kind) == (b"a.py", Kind.CONTENT)
    (hunk,) = conflict.hunks
    assert (hunk.line, hunk.base, hunk.upstream, hunk.ours) == (
        21, b"20\n", b"theirs\n", b"ours\n",
    )  # fmt: skip
    assert conflict.who == (by(upstream, split, "Split (#1931)", 1931),)


def test_lines_are_counted_in_the_file_as_upstream_has_it(tmp_path):
    # Our other hunks, and our changes before this one, have moved the lines.
    upstream = Upstream(tmp_path, {"a.py": numbered(40)})
    upstream.goes_on("Theirs", a_py=numbered(40, _30="theirs"))
    upstream.we_change("Before", a_py=numbered(40, _2="2\n2.1\n2.2"))
    upstream.we_change("Ours", a_py=numbered(40, _2="2\n2.1\n2.2", _10="10\n10.1", _30="ours"))
    _, outcome = upstream.replay()
    assert [hunk.line for hunk in outcome.conflicts[0].hunks] == [30]


def test_lines_that_upstream_removed_name_the_commit_that_removed_them(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(30)})
    upstream.goes_on("Elsewhere", a_py=numbered(30, _1="one"))
    without = numbered(30, _1="one").replace(b"20\n", b"")
    removed = upstream.goes_on("Remove", a_py=without)
    upstream.we_change("Ours", a_py=numbered(30, _20="ours"))
    (conflict,) = upstream.outcome().conflicts
    (hunk,) = conflict.hunks
    assert (hunk.line, hunk.base, hunk.upstream, hunk.ours) == (20, b"20\n", b"", b"ours\n")
    assert conflict.who == (by(upstream, removed, "Remove", None),)


def test_two_places_in_one_file_are_two_hunks_of_one_conflict(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(30)})
    one = upstream.goes_on("One", a_py=numbered(30, _5="theirs"))
    two = upstream.goes_on("Two", a_py=numbered(30, _5="theirs", _25="theirs"))
    upstream.we_change("Ours", a_py=numbered(30, _5="ours", _25="ours"))
    (conflict,) = upstream.outcome().conflicts
    assert [hunk.line for hunk in conflict.hunks] == [5, 25]
    assert [commit.id for commit in conflict.who] == [two, one]


def test_a_file_that_both_added_differently_is_an_add_add_conflict(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n"})
    added = upstream.goes_on("Add (#2)", new_py=b"theirs\n")
    upstream.we_change("Add", new_py=b"ours\n")
    (conflict,) = upstream.outcome().conflicts
    assert (conflict.path, conflict.kind) == (b"new.py", Kind.ADD_ADD)
    assert conflict.hunks[0].ours == b"ours\n"
    assert conflict.who == (by(upstream, added, "Add (#2)", 2),)


def test_a_file_that_upstream_deleted_and_we_change_names_the_deletion(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n", "b.py": b"b\n"})
    upstream.goes_on("Edit", a_py=b"edited\n")
    deleted = upstream.goes_on("Drop it (#5)", a_py=None)
    upstream.we_change("Ours", a_py=b"A\n")
    (conflict,) = upstream.outcome().conflicts
    assert (conflict.path, conflict.kind) == (b"a.py", Kind.MODIFY_DELETE)
    assert conflict.who == (by(upstream, deleted, "Drop it (#5)", 5),)
    assert conflict.detail.startswith("CONFLICT (modify/delete): a.py deleted in upstream")


def test_a_file_that_both_renamed_differently_is_a_rename_conflict(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(20)})
    upstream.goes_on("Rename", a_py=None, theirs_py=numbered(20))
    upstream.we_change("Rename", a_py=None, ours_py=numbered(20))
    outcome = upstream.outcome()
    assert outcome.status is Status.CONFLICT
    assert [(conflict.path, conflict.kind) for conflict in outcome.conflicts] == [
        (b"a.py", Kind.RENAME)
    ]
    assert "theirs.py in upstream and to ours.py in our change" in outcome.conflicts[0].detail


def test_a_file_that_both_added_with_different_modes_is_a_mode_conflict(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n"})
    blob = upstream.objects.write("blob", b"run\n")
    upstream.goes_on("Add", run_sh=Entry(FILE, blob))
    upstream.we_change("Add", run_sh=Entry(EXECUTABLE, blob))
    (conflict,) = upstream.outcome().conflicts
    assert (conflict.path, conflict.kind) == (b"run.sh", Kind.MODE)


def test_a_binary_file_that_both_changed_is_a_conflict_without_hunks(tmp_path):
    upstream = Upstream(tmp_path, {"a.bin": b"\0base"})
    upstream.goes_on("Theirs", a_bin=b"\0theirs")
    upstream.we_change("Ours", a_bin=b"\0ours")
    (conflict,) = upstream.outcome().conflicts
    assert (conflict.path, conflict.kind, conflict.hunks) == (b"a.bin", Kind.OTHER, ())
    assert "binary" in conflict.detail


def test_a_submodule_that_both_moved_is_a_conflict(tmp_path):
    def at(digit: str) -> Entry:
        return Entry(SUBMODULE, ObjectId(digit * 40))

    upstream = Upstream(tmp_path, {"lib": at("1")})
    upstream.goes_on("Theirs", lib=at("2"))
    upstream.we_change("Ours", lib=at("3"))
    (conflict,) = upstream.outcome().conflicts
    assert (conflict.path, conflict.kind) == (b"lib", Kind.OTHER)
    assert "submodule" in conflict.detail


def test_a_file_where_upstream_has_a_directory_keeps_its_own_name_in_the_conflict(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n"})
    upstream.goes_on("Package", **{"pkg/x_py": b"x\n"})
    upstream.we_change("Module", pkg=b"ours\n")
    (conflict,) = upstream.outcome().conflicts
    assert (conflict.path, conflict.kind) == (b"pkg", Kind.OTHER)
    assert "directory in the way" in conflict.detail


def test_code_that_looks_like_conflict_markers_is_code(tmp_path):
    heading = ["Title", "=======", "<<<<<<< HEAD", "||||||| base", ">>>>>>> theirs"]
    upstream = Upstream(tmp_path, {"a.rst": text(*heading, "text", "=======", "end")})
    upstream.goes_on("Theirs", a_rst=text(*heading, "=======", "theirs", "=======", "end"))
    upstream.we_change("Ours", a_rst=text(*heading, "ours", "=======", "=======", "end"))
    (conflict,) = upstream.outcome().conflicts
    (hunk,) = conflict.hunks
    assert b"theirs" in hunk.upstream
    assert b"ours" not in hunk.upstream
    assert b"ours" in hunk.ours
    assert b"theirs" not in hunk.ours
    assert hunk.upstream.rstrip(b"\n") in text(*heading, "=======", "theirs", "=======", "end")


def test_latin_1_lines_stay_the_bytes_they_are(tmp_path):
    upstream = Upstream(tmp_path, {"a.txt": b"caf\xe9\n"})
    upstream.goes_on("Theirs", a_txt=b"th\xe9\n")
    upstream.we_change("Ours", a_txt=b"caf\xe8\n")
    (hunk,) = upstream.outcome().conflicts[0].hunks
    assert (hunk.base, hunk.upstream, hunk.ours) == (b"caf\xe9\n", b"th\xe9\n", b"caf\xe8\n")


def test_crlf_files_have_conflicts_with_crlf_lines(tmp_path):
    upstream = Upstream(tmp_path, {"a.txt": b"1\r\n2\r\n3\r\n"})
    upstream.goes_on("Theirs", a_txt=b"1\r\ntheirs\r\n3\r\n")
    upstream.we_change("Ours", a_txt=b"1\r\nours\r\n3\r\n")
    (hunk,) = upstream.outcome().conflicts[0].hunks
    assert (hunk.line, hunk.base, hunk.upstream, hunk.ours) == (
        2, b"2\r\n", b"theirs\r\n", b"ours\r\n",
    )  # fmt: skip


def test_what_upstream_took_is_left_out_of_the_conflict_too(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(30)})
    upstream.goes_on("Take", a_py=numbered(30, _5="ours"))
    upstream.goes_on("Theirs", a_py=numbered(30, _5="ours", _25="theirs"))
    upstream.we_change("Both", a_py=numbered(30, _5="ours", _25="ours too"))
    outcome = upstream.outcome()
    assert outcome.status is Status.CONFLICT
    assert [(taken.hunks, taken.total) for taken in outcome.taken] == [(1, 2)]
    assert [hunk.line for hunk in outcome.conflicts[0].hunks] == [25]


def test_one_run_shows_every_conflict_and_applies_the_rest(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n", "b.py": b"b\n", "c.py": b"c\n"})
    upstream.goes_on("Theirs", a_py=b"theirs\n", c_py=b"theirs\n")
    upstream.we_change("One", a_py=b"ours\n")
    upstream.we_change("Two", b_py=b"ours\n")
    upstream.we_change("Three", c_py=b"ours\n")
    outcomes = upstream.replay()
    assert [outcome.status for outcome in outcomes] == [
        Status.CONFLICT, Status.APPLIED, Status.CONFLICT,
    ]  # fmt: skip
    assert outcomes[2].note == ""


def test_a_conflict_that_an_earlier_one_may_have_caused_says_so(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": numbered(9)})
    upstream.goes_on("Theirs", a_py=numbered(9, _5="theirs"))
    upstream.we_change("One", a_py=numbered(9, _5="ours"))
    upstream.we_change("Two", a_py=numbered(9, _5="ours, and more"))
    _, second = upstream.replay()
    assert second.note == "May come from the conflict in 0.patch."


# -- what was resolved before, and recipes ---------------------------------------------------------


def test_a_conflict_that_a_person_resolved_before_is_applied_as_it_was_then(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n"})
    upstream.goes_on("Theirs", a_py=b"theirs\n")
    upstream.we_change("Ours", a_py=b"ours\n")
    resolved = upstream.tree({"a.py": b"both\n"})
    met: list[tuple[str, Edit, ObjectId]] = []

    def recall(step: Step, edit: Edit, head: ObjectId) -> ObjectId:
        met.append((step.name, edit, head))
        return resolved

    history = History(upstream.objects.git, upstream.base, upstream.tip)
    (outcome,) = replay(upstream.objects, upstream.steps, upstream.tip, history, recall)
    assert (outcome.status, outcome.tree, outcome.remembered) == (Status.APPLIED, resolved, True)
    assert met == [("0.patch", upstream.steps[0].does, upstream.tip)]


# Upstream's own answer has `ask_npu`; the recipe is needed where there is a class Device.
RECIPE = b"""
from rebase.recipe import Code, Recipe, Rule, replace

recipe = Recipe(
    subject="Ask the NPU", by="A. Author <a@example.com>", date="2026-01-01T00:00:00+00:00",
    why="a", how="b", until="c",
    rules=(
        Rule(
            find=Code("cuda()"),
            edit=replace("npu()"),
            expect=("*",),
            upstream=Code("ask_npu($$$)"),
            needed=Code({"kind": "class_definition", "has": {"field": "name", "regex": "Device"}}),
        ),
    ),
)
"""
DEVICE = b"class Device:\n    def find(self):\n        return cuda()\n"


def recipe(folder: Path) -> Step:
    path = folder / "r.py"
    path.write_bytes(RECIPE)
    return recipe_step(RecipeFile("r.py", RECIPE, path))


def test_a_recipe_edits_the_tree_as_the_changes_before_it_left_it(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": DEVICE, "b.py": b"b\n"})
    upstream.goes_on("Theirs", b_py=b"cuda()\n")
    upstream.we_change("Ours", **{"c.py": b"cuda()\n"})

    _, outcome = upstream.replay(*upstream.steps, recipe(tmp_path))
    assert outcome.status is Status.APPLIED
    assert outcome.places == ("a.py:3", "b.py:1", "c.py:1")
    device = DEVICE.replace(b"cuda", b"npu")
    assert outcome.tree == upstream.tree({"a.py": device, "b.py": b"npu()\n", "c.py": b"npu()\n"})
    assert upstream.objects.tree_of(outcome.commit) == outcome.tree


def test_a_recipe_that_is_not_needed_makes_no_commit(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": b"a\n"})
    (outcome,) = upstream.replay(recipe(tmp_path))
    assert (outcome.status, outcome.commit, outcome.by) == (Status.NOT_NEEDED, None, ())
    assert outcome.tree == upstream.objects.tree_of(upstream.tip)


def test_a_recipe_that_upstream_has_done_names_the_commit_that_did_it(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": DEVICE})
    done = upstream.goes_on("Ask it (#7)", a_py=DEVICE.replace(b"cuda()", b"ask_npu(\n    1)"))
    upstream.goes_on("Move it", a_py=b"import os\n" + upstream.files["a.py"])
    upstream.goes_on("Not of it", **{"b.py": b"b\n"})

    (outcome,) = upstream.replay(recipe(tmp_path))
    assert outcome.status is Status.ALREADY_UPSTREAM
    assert [(commit.id, commit.pull_request) for commit in outcome.by] == [(done, 7)]


def test_a_recipe_is_no_longer_needed_since_the_commit_that_took_the_last_of_it(tmp_path):
    other = b"class Device:\n    pass\n"
    upstream = Upstream(tmp_path, {"a.py": DEVICE, "b.py": other})
    upstream.goes_on("Here first", a_py=None)
    upstream.goes_on("It moves", **{"b.py": None, "c.py": other})
    last = upstream.goes_on("Now there is none (#9)", c_py=b"")
    upstream.goes_on("Not of it", c_py=b"c\n")

    (outcome,) = upstream.replay(recipe(tmp_path))
    assert outcome.status is Status.NOT_NEEDED
    assert [commit.id for commit in outcome.by] == [last]


def test_a_base_with_layers_that_was_made_just_now_has_a_history(tmp_path):
    upstream = Upstream(tmp_path, {"a.py": DEVICE})
    upstream.objects.flush()
    done = upstream.goes_on("Layers", a_py=DEVICE.replace(b"cuda()", b"ask_npu()"))
    history = History(upstream.objects.git, upstream.base, upstream.tip)
    (outcome,) = replay(upstream.objects, [recipe(tmp_path)], upstream.tip, history)
    assert [commit.id for commit in outcome.by] == [done]


def test_whom_a_recipe_names_does_not_depend_on_what_a_blobless_mirror_lacks(tmp_path):
    whole = Upstream(tmp_path, {"a.py": DEVICE})
    done = whole.goes_on("Ask it", a_py=DEVICE.replace(b"cuda()", b"ask_npu()"))
    whole.goes_on("Touch it", a_py=b"import os\n" + whole.files["a.py"])
    objects = blobless(whole, tmp_path / "copy.git")
    history = History(objects.git, whole.base, whole.tip)
    (outcome,) = replay(objects, [recipe(tmp_path)], whole.tip, history)
    assert [commit.id for commit in outcome.by] == [done]


def test_a_recipe_fetches_the_files_it_looks_through_at_once(tmp_path, monkeypatch):
    many = {f"{n}.py": b"class Device%d:\n    pass\n" % n for n in range(30)}
    whole = Upstream(tmp_path, {**many, "a.py": DEVICE})
    objects = blobless(whole, tmp_path / "copy.git")
    fetches = []
    fetch = objects.git.run_as_user
    monkeypatch.setattr(
        objects.git, "run_as_user", lambda *a, **k: fetches.append(a) or fetch(*a, **k)
    )
    stays = History(objects.git, whole.tip, whole.tip)
    (outcome,) = replay(objects, [recipe(tmp_path)], whole.tip, stays)
    assert (outcome.places, len(fetches)) == (("a.py:3",), 1)


def blobless(whole: Upstream, copy: Path) -> Objects:
    """A partial clone of an upstream's mirror, without its files."""
    whole.objects.flush()
    git = whole.objects.git
    git.run("update-ref", "refs/heads/main", whole.tip)
    git.run("config", "uploadpack.allowFilter", "true")
    git.run("config", "uploadpack.allowAnySHA1InWant", "true")
    source = git.directory.absolute().as_uri()
    subprocess.run(["git", "clone", "-q", "--bare", "--filter=blob:none", source, copy], check=True)
    return Objects(copy)
