"""A person at work: from a conflict in the report to a landed sync, and the branch to edit."""

import json
import subprocess
from collections.abc import Callable

import pytest
from conftest import RECIPE, Files, Project, Repo, dockerfile, lines

RESOLVED = lines({5: "theirs 5, by device", 25: "upstream 25"})


def release(project: Project, fork: str, tag: str, files: Files, after: str = "v1.1") -> str:
    upstream = project.upstream(fork)
    upstream.git("checkout", "--quiet", after)
    return upstream.commit(files, f"Release {tag} (#33)", tag)


def worktree(project: Project, fork: str = "lead") -> Repo:
    return Repo(project.root / ".forkman" / "worktrees" / fork)


@pytest.fixture
def conflict(solo: Project) -> Project:
    """Upstream's v1.2 has another line where our change "Rank by device" has its own."""
    release(solo, "lead", "v1.2", {"app.py": lines({5: "theirs 5", 25: "upstream 25"})})
    assert solo.forkman("sync").code == 1
    return solo


@pytest.fixture
def resolving(conflict: Project) -> Project:
    """The same, opened."""
    conflict.ok("edit", "lead")
    return conflict


def landed(project: Project, app: str = RESOLVED) -> bool:
    return project.pin("lead") == "v1.2" and project.built("lead", "app.py") == app


# -- from the report to a landed sync ------------------------------------------------------------


def test_the_report_names_the_command_that_opens_the_conflict(conflict: Project) -> None:
    said = conflict.forkman("sync").out
    assert "lead  rank-by-device.patch  app.py:5  content" in said
    assert "forkman edit lead  then  forkman continue lead" in said
    done = conflict.ok("edit", "lead")
    assert done.out.splitlines() == [
        "lead: rank-by-device.patch, change 1 of 2 onto v1.2, is in conflict in",
        "  app.py",
        f"The worktree is {worktree(conflict).path}",
        "Resolve it there, then: forkman continue lead",
        "Or: forkman skip lead, forkman abort lead",
    ]
    assert "<<<<<<< HEAD\ntheirs 5\n" in worktree(conflict).read("app.py")
    assert worktree(conflict).git("status", "--porcelain") == "UU app.py"


def edit(tree: Repo) -> None:
    tree.write({"app.py": RESOLVED})


def edit_and_add(tree: Repo) -> None:
    edit(tree)
    tree.git("add", "app.py")


def edit_and_commit(tree: Repo) -> None:
    edit(tree)
    tree.git("commit", "--quiet", "--all", "--message", "whatever")


@pytest.mark.parametrize("resolve", [edit, edit_and_add, edit_and_commit])
def test_a_conflict_resolved_in_an_editor_lands(
    resolving: Project, resolve: Callable[[Repo], None]
) -> None:
    resolve(worktree(resolving))
    done = resolving.ok("continue", "lead")
    assert "Landed: 1 fork moved" in done.out
    assert landed(resolving)
    assert resolving.series("lead") == ["rank-by-device.patch", "add-the-runtime.patch"]
    assert "Subject: Rank by device\n" in resolving.patch("lead", "rank-by-device.patch")
    assert not worktree(resolving).path.exists()
    assert "Nothing moved" in resolving.ok("sync").out


def test_a_marker_left_over_is_named_with_its_line(resolving: Project) -> None:
    text = worktree(resolving).read("app.py")
    worktree(resolving).write({"app.py": text.replace(">>>>>>> ", "")})
    done = resolving.forkman("continue", "lead")
    assert done.code == 1
    assert "app.py:5: a conflict marker" in done.err
    assert not landed(resolving)


def test_markers_count_also_when_they_were_added(resolving: Project) -> None:
    worktree(resolving).git("add", "app.py")
    done = resolving.forkman("continue", "lead")
    assert done.code == 1
    assert "app.py:5: a conflict marker" in done.err


@pytest.mark.parametrize("marker", ["||||||| 1234567", "=======", ">>>>>>> Rank by device"])
def test_each_marker_of_a_conflict_counts(resolving: Project, marker: str) -> None:
    left = RESOLVED.replace("line 6\n", f"{marker}\nline 6\n")
    worktree(resolving).write({"app.py": left})
    done = resolving.forkman("continue", "lead")
    assert done.code == 1
    assert "app.py:6: a conflict marker" in done.err
    assert worktree(resolving).read("app.py") == left


@pytest.mark.parametrize("code", ["<<<<<<< HEAD", "=======", "||||||| old"])
def test_code_that_looks_like_a_marker_is_code(solo: Project, code: str) -> None:
    looks = {8: code, 25: "upstream 25"}
    release(solo, "lead", "v1.2", {"app.py": lines(looks | {5: "theirs 5"})})
    solo.forkman("sync")
    solo.ok("edit", "lead")
    worktree(solo).write({"app.py": lines(looks | {5: "both 5"})})
    solo.ok("continue", "lead")
    assert solo.built("lead", "app.py") == lines(looks | {5: "both 5"})


def test_a_file_that_git_does_not_know_is_not_thrown_away(resolving: Project) -> None:
    edit(worktree(resolving))
    worktree(resolving).write({"moved_there.py": "ours\n"})
    done = resolving.forkman("continue", "lead")
    assert done.code == 1
    assert "moved_there.py" in done.err and "git add" in done.err
    worktree(resolving).git("add", "moved_there.py")
    resolving.ok("continue", "lead")
    assert landed(resolving)
    assert resolving.built("lead", "moved_there.py") == "ours\n"


def test_skip_leaves_the_change_out_of_the_branch_and_the_queue(resolving: Project) -> None:
    report = resolving.report("skip", "lead")
    assert [each["status"] for each in report["forks"]["lead"]["outcomes"]] == [
        "skipped", "applied",
    ]  # fmt: skip
    assert landed(resolving, lines({5: "theirs 5", 25: "upstream 25"}))
    assert resolving.series("lead") == ["add-the-runtime.patch"]


@pytest.mark.parametrize("undo", [["reset", "--hard"], ["checkout", "--ours", "app.py"]])
def test_a_resolution_that_leaves_nothing_of_the_change_is_no_skip(
    resolving: Project, undo: list[str]
) -> None:
    before = resolving.files()
    worktree(resolving).git(*undo)
    done = resolving.forkman("continue", "lead")
    assert done.code == 1
    assert "lead: nothing of rank-by-device.patch is left" in done.err
    assert "To leave the change out: forkman skip lead." in done.err
    assert resolving.files() == before and worktree(resolving).path.exists()
    resolving.ok("skip", "lead")


def test_abort_forgets_the_replay_and_its_conflicts(resolving: Project) -> None:
    before = resolving.files()
    done = resolving.ok("abort", "lead")
    assert f"Removed {worktree(resolving).path}" in done.out
    assert not worktree(resolving).path.exists()
    assert resolving.files() == before
    assert resolving.forkman("continue", "lead").code == 2
    assert "Nothing was open." in resolving.ok("abort", "lead").out


def test_after_an_abort_edit_opens_the_branch_and_sync_the_conflict(resolving: Project) -> None:
    resolving.ok("abort", "lead")
    resolving.ok("edit", "lead")
    assert worktree(resolving).read("app.py") == lines({5: "ours 5"})
    resolving.ok("abort", "lead")
    assert resolving.forkman("sync").code == 1
    resolving.ok("edit", "lead")
    assert "<<<<<<< HEAD" in worktree(resolving).read("app.py")


def test_a_deleted_file_that_we_change_has_to_be_decided(solo: Project) -> None:
    release(solo, "lead", "v1.2", {"app.py": None})
    done = solo.forkman("sync")
    assert done.code == 1 and "modify/delete" in done.out
    solo.ok("edit", "lead")
    done = solo.forkman("continue", "lead")
    assert done.code == 1
    assert "app.py: keep it (git add) or delete it (git rm)" in done.err
    worktree(solo).git("rm", "--quiet", "app.py")
    done = solo.forkman("continue", "lead")
    assert done.code == 1 and "forkman skip lead" in done.err
    solo.ok("skip", "lead")
    assert solo.pin("lead") == "v1.2"
    assert solo.series("lead") == ["add-the-runtime.patch"]


def test_a_deleted_file_may_be_kept(solo: Project) -> None:
    release(solo, "lead", "v1.2", {"app.py": None})
    solo.forkman("sync")
    solo.ok("edit", "lead")
    worktree(solo).git("add", "app.py")
    solo.ok("continue", "lead")
    assert solo.built("lead", "app.py") == lines({5: "ours 5"})


def test_conflicts_come_one_after_the_other(solo: Project) -> None:
    solo.change("lead", "Again", {"app.py": lines({5: "ours 5", 15: "ours 15"})})
    theirs = {5: "theirs 5", 15: "theirs 15", 25: "upstream 25"}
    release(solo, "lead", "v1.2", {"app.py": lines(theirs)})
    assert solo.forkman("sync").out.count("  content\n") == 2
    solo.ok("edit", "lead")
    worktree(solo).write({"app.py": lines(theirs | {5: "both 5"})})
    done = solo.forkman("continue", "lead")
    assert done.code == 1
    assert "again.patch, change 3 of 3 onto v1.2, is in conflict" in done.out
    worktree(solo).write({"app.py": lines(theirs | {5: "both 5", 15: "both 15"})})
    solo.ok("continue", "lead")
    assert solo.built("lead", "app.py") == lines(theirs | {5: "both 5", 15: "both 15"})


def test_the_landing_still_says_what_upstream_took_of_the_other_changes(solo: Project) -> None:
    edits = {5: "ours 5", 12: "ours 12", 20: "ours 20"}
    solo.change("lead", "Twelve and twenty", {"app.py": lines(edits)})
    release(solo, "lead", "v1.2", {"app.py": lines({12: "ours 12", 25: "upstream 25"})})
    theirs = {5: "theirs 5", 12: "ours 12", 25: "upstream 25"}
    solo.upstream("lead").commit({"npu.py": "import slime_npu\n"}, "Add the runtime (#41)")
    solo.upstream("lead").commit({"app.py": lines(theirs)}, "Five (#42)", "v1.3")
    assert solo.forkman("sync").code == 1
    solo.ok("edit", "lead")
    worktree(solo).write({"app.py": lines(theirs | {5: "both 5"})})

    rank, runtime, twelve = solo.report("continue", "lead")["forks"]["lead"]["outcomes"]

    assert (rank["status"], rank["note"]) == ("applied", "Resolved by hand.")
    assert (runtime["status"], runtime["taken"][0]["by"][0]["pull_request"]) == (
        "already upstream", 41,
    )  # fmt: skip
    (taken,) = twelve["taken"]
    assert (twelve["status"], taken["path"], taken["hunks"], taken["total"]) == (
        "applied", "app.py", 1, 2,
    )  # fmt: skip
    assert taken["by"][0]["pull_request"] == 33


def test_the_landing_still_says_what_was_remembered(solo: Project) -> None:
    solo.change("lead", "Again", {"app.py": lines({5: "ours 5", 15: "ours 15"})})
    before = solo.files()
    release(solo, "lead", "v1.2", {"app.py": lines({15: "theirs 15", 25: "upstream 25"})})
    solo.forkman("sync")
    solo.ok("edit", "lead")
    resolved = {5: "ours 5", 15: "both 15", 25: "upstream 25"}
    worktree(solo).write({"app.py": lines(resolved)})
    solo.ok("continue", "lead")
    for name, content in before.items():  # as if it had not landed
        (solo.root / name).write_bytes(content)
    theirs = {5: "theirs 5", 15: "theirs 15", 25: "upstream 25"}
    release(solo, "lead", "v1.3", {"app.py": lines(theirs)})
    assert solo.forkman("sync").out.count("  content\n") == 1
    solo.ok("edit", "lead")
    worktree(solo).write({"app.py": lines(theirs | {5: "both 5"})})
    done = solo.ok("continue", "lead")
    assert "conflict resolved as a person did before (git rerere remembered)" in done.out
    assert solo.built("lead", "app.py") == lines(resolved | {5: "both 5"})


def test_a_conflict_in_a_queue_that_is_a_branch_lands_in_the_mirror(solo: Project) -> None:
    fork = solo.queue_as_branch("lead")
    release(solo, "lead", "v1.2", {"app.py": lines({5: "theirs 5", 25: "upstream 25"})})
    assert solo.forkman("sync").code == 1
    solo.ok("edit", "lead")
    edit(worktree(solo))
    (note,) = solo.report("continue", "lead")["forks"]["lead"]["notes"]
    assert landed(solo)
    subprocess.run(note.partition(": ")[2], shell=True, check=True, capture_output=True)
    assert fork.git("log", "-2", "--format=%s", "npu") == "Add the runtime\nRank by device"


def test_a_branch_that_is_the_queue_is_edited_and_pushed(solo: Project) -> None:
    solo.queue_as_branch("lead")
    solo.ok("fetch")
    solo.ok("edit", "lead")
    worktree(solo).commit({"more.py": "more\n"}, "More")
    done = solo.forkman("save", "lead")
    assert done.code == 2
    command = done.err.partition("Push your commits there: ")[2].strip()
    subprocess.run(command, shell=True, check=True, capture_output=True)
    solo.ok("abort", "lead")
    solo.ok("sync")
    assert solo.built("lead", "more.py") == "more\n"


# -- what is open --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [("sync",), ("sync", "lead"), ("rebase", "lead", "--onto", "v1.1"), ("edit", "lead")],
)
def test_a_second_replay_is_refused_and_says_what_is_open(
    resolving: Project, command: tuple[str, ...]
) -> None:
    done = resolving.forkman(*command)
    assert done.code == 1
    assert f"lead: its replay onto v1.2 is open in {worktree(resolving).path}" in done.err
    assert "forkman continue lead, forkman skip lead, or forkman abort lead" in done.err
    assert "<<<<<<<" in worktree(resolving).read("app.py")


def test_status_shows_what_is_open(resolving: Project) -> None:
    assert (
        "lead has a conflict open: forkman continue, skip or abort lead"
        in resolving.ok("status").out
    )


@pytest.mark.parametrize("content", ["", '{"target": {"fork": "le', "[]", '{"run": null}', "null"])
def test_a_damaged_note_of_what_is_open_keeps_the_worktree(
    resolving: Project, content: str
) -> None:
    edit(worktree(resolving))
    note = resolving.root / ".forkman" / "open" / "lead.json"
    note.write_text(content)
    for command in ("continue", "skip", "abort", "edit", "save", "sync"):
        done = resolving.forkman(command, *(["lead"] if command != "sync" else []))
        assert done.code == 1, command
        assert f"lead: {note}, which says what is open on it, cannot be read" in done.err
        assert "Traceback" not in done.err
    assert worktree(resolving).read("app.py") == RESOLVED
    assert resolving.forkman("status").code in (0, 1)
    assert "Traceback" not in resolving.forkman("status").err


def test_a_queue_that_changed_meanwhile_voids_the_replay(resolving: Project) -> None:
    edit(worktree(resolving))
    resolving.change("lead", "Later", {"later.py": "later\n"})
    done = resolving.forkman("continue", "lead")
    assert done.code == 1
    assert "its queue or its pin changed since this replay was opened" in done.err
    resolving.ok("abort", "lead")
    assert resolving.forkman("sync").code == 1


def test_an_export_leaves_an_open_replay_open(resolving: Project) -> None:
    resolving.ok("export")
    edit(worktree(resolving))
    resolving.ok("continue", "lead")
    assert landed(resolving)


def test_a_conflict_that_is_history_by_now_opens_the_branch(conflict: Project) -> None:
    conflict.ok("sync", "--to", "v1.1")
    conflict.ok("edit", "lead")
    assert worktree(conflict).read("app.py") == lines({5: "ours 5", 25: "upstream 25"})


# -- git remembers -------------------------------------------------------------------------------


def test_the_same_conflict_on_the_next_release_is_resolved_as_before(resolving: Project) -> None:
    edit(worktree(resolving))
    before = resolving.files()
    resolving.ok("continue", "lead")
    for name, content in before.items():  # as if it had not landed, or on a release branch
        (resolving.root / name).write_bytes(content)
    release(
        resolving, "lead", "v1.3",
        {"app.py": lines({5: "theirs 5", 20: "more", 25: "upstream 25"})},
    )  # fmt: skip
    report = resolving.report("sync")
    assert report["landed"]
    outcome = report["forks"]["lead"]["outcomes"][0]
    assert (outcome["status"], outcome["remembered"]) == ("applied", True)
    assert resolving.built("lead", "app.py") == lines(
        {5: "theirs 5, by device", 20: "more", 25: "upstream 25"}
    )


def test_a_resolution_that_was_aborted_is_not_remembered(solo: Project) -> None:
    solo.change("lead", "Again", {"app.py": lines({5: "ours 5", 15: "ours 15"})})
    theirs = {5: "theirs 5", 15: "theirs 15", 25: "upstream 25"}
    release(solo, "lead", "v1.2", {"app.py": lines(theirs)})
    solo.forkman("sync")
    solo.ok("edit", "lead")
    worktree(solo).write({"app.py": lines(theirs | {5: "a mistake"})})
    assert solo.forkman("continue", "lead").code == 1  # the other one is taken up
    solo.ok("abort", "lead")
    report = solo.report("sync")
    assert [each["status"] for each in report["forks"]["lead"]["outcomes"]] == [
        "conflict", "applied", "conflict",
    ]  # fmt: skip


def test_an_abort_keeps_what_was_remembered_before(resolving: Project) -> None:
    edit(worktree(resolving))
    resolving.ok("continue", "lead")
    remembered = sorted((resolving.mirror("lead").path / "rr-cache").rglob("postimage*"))
    resolving.change("lead", "Again", {"app.py": lines({5: "ours 5", 15: "ours 15"})})
    theirs = {5: "theirs 5", 15: "theirs 15", 25: "upstream 25"}
    release(resolving, "lead", "v1.3", {"app.py": lines(theirs)}, "v1.2")
    assert resolving.forkman("sync").code == 1
    resolving.ok("edit", "lead")
    resolving.ok("abort", "lead")
    assert remembered
    assert sorted((resolving.mirror("lead").path / "rr-cache").rglob("postimage*")) == remembered


# -- several forks -------------------------------------------------------------------------------


@pytest.fixture
def two(project: Project) -> Project:
    """Conflicts in lead and in engine."""
    engine = {18: "theirs 18", 28: "upstream 28"}
    release(project, "engine", "v0.7", {"serve.py": lines(engine)}, "v0.6")
    trainer = project.upstream("trainer").git("rev-parse", "main")
    app = {"app.py": lines({5: "theirs 5", 25: "upstream 25"})}
    release(project, "lead", "v1.2", app | {"Dockerfile": dockerfile("v0.7", trainer)})
    assert project.forkman("sync").code == 1
    return project


def resolve_engine(project: Project) -> None:
    project.ok("edit", "engine")
    worktree(project, "engine").write(
        {"serve.py": lines({10: "lead 10 again", 18: "both 18", 28: "upstream 28"})}
    )


def test_forks_are_resolved_one_after_the_other_and_land_together(two: Project) -> None:
    before = two.files()
    two.ok("edit", "lead")
    edit(worktree(two))
    done = two.forkman("continue", "lead")
    assert done.code == 1
    assert "engine" in done.out and "Nothing was written: 1 conflict to resolve." in done.out
    assert two.files() == before

    resolve_engine(two)
    done = two.ok("continue", "engine")

    assert "Landed: 3 forks moved" in done.out
    assert landed(two)
    assert two.pins()["engine"] == "v0.7"
    assert "both 18" in two.built("engine", "serve.py")
    assert two.series("trainer") == ["four.patch"]


def test_sync_lands_a_resolution_that_waited_for_another_fork(two: Project) -> None:
    two.ok("edit", "lead")
    edit(worktree(two))
    two.forkman("continue", "lead")
    (two.root / "forks" / "engine" / "series").write_text("")
    (two.root / "forks" / "engine" / "serve-on-npu.patch").unlink()
    two.ok("sync")
    assert landed(two)
    assert not worktree(two).path.exists()
    assert "open" not in two.ok("status", "--json").out.replace('"open": ""', "")


def test_a_resolved_replay_waits_for_the_others(two: Project) -> None:
    two.ok("edit", "lead")
    edit(worktree(two))
    two.forkman("continue", "lead")
    for command in ("edit", "adopt"):
        done = two.forkman(command, "lead", *([__file__] if command == "adopt" else []))
        assert done.code == 1
        assert "lead: its replay onto v1.2 is resolved and waits to land." in done.err
    report = two.report("sync")
    first, *_ = report["forks"]["lead"]["outcomes"]
    assert (first["status"], first["note"]) == ("applied", "Resolved by hand.")
    assert not report["landed"]  # for engine's conflict is still there


def test_status_tells_a_resolved_replay_from_a_conflict(two: Project) -> None:
    two.ok("edit", "lead")
    edit(worktree(two))
    assert two.forkman("continue", "lead").code == 1
    two.ok("edit", "engine")
    said = two.ok("status").out
    assert "lead has a resolved replay open: forkman continue or abort lead" in said
    assert "engine has a conflict open: forkman continue, skip or abort engine" in said


def test_a_branch_that_somebody_edits_is_not_landed_over(two: Project) -> None:
    two.ok("edit", "trainer")
    worktree(two, "trainer").commit({"mine.py": "mine\n"}, "Mine")
    resolve_engine(two)
    two.forkman("continue", "engine")
    two.ok("edit", "lead")
    edit(worktree(two))
    done = two.forkman("continue", "lead")
    assert done.code == 1
    assert "trainer: its branch is open for editing" in done.err
    two.ok("save", "trainer")
    done = two.forkman("continue", "lead")
    assert done.code == 0, done.said
    assert landed(two)
    assert two.series("trainer") == ["four.patch", "mine.patch"]


def test_a_run_that_could_not_carry_all_forks_is_run_again(two: Project) -> None:
    engine = two.upstream("engine")
    engine.path.rename(engine.path.with_name("away"))
    two.mirror("engine").path.rename(two.folder / "mirror")
    assert two.forkman("sync").code == 1
    two.ok("edit", "lead")
    edit(worktree(two))
    done = two.forkman("continue", "lead")
    assert done.code == 1
    assert "It lands together with engine, which could not be carried then" in done.err
    assert "forkman sync" in done.err
    engine.path.with_name("away").rename(engine.path)
    report = two.report("sync")
    assert report["forks"]["lead"]["outcomes"][0]["note"] == "Resolved by hand."


# -- editing a branch ----------------------------------------------------------------------------


@pytest.fixture
def editing(solo: Project) -> Project:
    """lead's branch, open: Rank by device, Add the runtime."""
    solo.ok("fetch")
    solo.ok("edit", "lead")
    return solo


def saved(project: Project) -> dict[str, list[str]]:
    done = project.forkman("save", "lead", "--json")
    assert done.code == 0, done.said
    found: dict[str, list[str]] = json.loads(done.out)
    return {key: names for key, names in found.items() if names}


def rebase(project: Project, script: str, onto: str = "v1.0") -> None:
    """An interactive rebase in which `script` (for sed) edits the list of commits."""
    done = subprocess.run(
        ["git", "-c", f"sequence.editor=sed -i '{script}'", "rebase", "--interactive", onto],
        cwd=worktree(project).path,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_branch_is_opened_as_commits_on_the_pin(editing: Project) -> None:
    log = worktree(editing).git("log", "--format=%s %an", "v1.0..HEAD")
    assert log.splitlines() == ["Add the runtime Ann Maintainer", "Rank by device Ann Maintainer"]


def test_saving_what_nobody_edited_changes_nothing(editing: Project) -> None:
    before = editing.files()
    assert saved(editing) == {"kept": ["rank-by-device.patch", "add-the-runtime.patch"]}
    assert editing.files() == before
    assert not worktree(editing).path.exists()


def test_an_amended_commit_is_its_change_edited(editing: Project) -> None:
    worktree(editing).write({"npu.py": "import slime_npu.all\n"})
    worktree(editing).git("commit", "--quiet", "--all", "--amend", "--no-edit")
    assert saved(editing) == {
        "kept": ["rank-by-device.patch"], "changed": ["add-the-runtime.patch"],
    }  # fmt: skip
    assert "+import slime_npu.all" in editing.patch("lead", "add-the-runtime.patch")


def test_a_new_message_keeps_the_changes_file(editing: Project) -> None:
    worktree(editing).git(
        "commit", "--quiet", "--amend", "--message", "Add the runtime\n\nBecause.\n"
    )
    assert saved(editing)["changed"] == ["add-the-runtime.patch"]
    assert "Because." in editing.patch("lead", "add-the-runtime.patch")


def test_a_new_commit_is_a_new_change(editing: Project) -> None:
    worktree(editing).commit({"more.py": "more\n"}, "[NPU] More: of it")
    assert saved(editing)["added"] == ["npu-more-of-it.patch"]
    assert editing.series("lead")[-1] == "npu-more-of-it.patch"


def test_commits_in_another_order_are_the_queue_in_that_order(editing: Project) -> None:
    rebase(editing, "1{h;d};2G")
    saved(editing)
    assert editing.series("lead") == ["add-the-runtime.patch", "rank-by-device.patch"]


def test_another_order_alone_is_told(solo: Project) -> None:
    solo.ok("sync")
    solo.ok("edit", "lead")
    rebase(solo, "1{h;d};2G", "v1.1")
    assert solo.ok("save", "lead").out.splitlines() == [
        "2 changes are as they were, and the queue is in another order.",
        "The exports are of the old queue now: forkman export",
    ]
    assert solo.series("lead") == ["add-the-runtime.patch", "rank-by-device.patch"]


def test_a_dropped_commit_leaves_the_queue(editing: Project) -> None:
    rebase(editing, "1d")
    assert saved(editing)["removed"] == ["rank-by-device.patch"]
    assert editing.series("lead") == ["add-the-runtime.patch"]
    assert not (editing.root / "forks" / "lead" / "rank-by-device.patch").exists()


def test_what_is_not_committed_is_not_saved(editing: Project) -> None:
    before = editing.files()
    worktree(editing).write({"npu.py": "half done\n"})
    done = editing.forkman("save", "lead")
    assert done.code == 1
    assert "not everything" in done.err and "M npu.py" in done.err
    assert editing.files() == before
    assert worktree(editing).read("npu.py") == "half done\n"


def test_a_rebase_that_is_not_finished_is_not_saved(editing: Project) -> None:
    before = editing.files()
    rebase(editing, "1s/pick/edit/")
    done = editing.forkman("save", "lead")
    assert done.code == 1
    assert "a git rebase is not finished" in done.err
    assert editing.files() == before


def test_a_branch_with_a_merge_is_not_saved(editing: Project) -> None:
    tree = worktree(editing)
    tree.git("checkout", "--quiet", "-b", "side", "HEAD~1")
    tree.commit({"side.py": "side\n"}, "Side")
    tree.git("merge", "--quiet", "--no-edit", "HEAD@{2}")
    done = editing.forkman("save", "lead")
    assert done.code == 1
    assert "has merges" in done.err


def test_a_branch_on_another_base_is_not_saved(editing: Project) -> None:
    worktree(editing).git("checkout", "--quiet", "--orphan", "other")
    worktree(editing).commit({}, "Other")
    done = editing.forkman("save", "lead")
    assert done.code == 1
    assert "does not stand on" in done.err


def test_untracked_files_keep_the_worktree(editing: Project) -> None:
    worktree(editing).write({"notes.txt": "do not lose me\n"})
    done = editing.ok("save", "lead")
    assert "The worktree stays" in done.out and "notes.txt" in done.out
    assert worktree(editing).read("notes.txt") == "do not lose me\n"
    worktree(editing).write({"notes.txt": None})
    editing.ok("save", "lead")
    assert not worktree(editing).path.exists()


def test_a_save_may_follow_one_that_kept_the_worktree(editing: Project) -> None:
    worktree(editing).commit({"more.py": "more\n"}, "More")
    worktree(editing).write({"notes.txt": "do not lose me\n"})
    assert "added  more.patch" in editing.ok("save", "lead").out
    worktree(editing).write({"notes.txt": None})
    worktree(editing).commit({"again.py": "again\n"}, "Again")
    assert saved(editing)["added"] == ["again.patch"]
    assert editing.series("lead")[-2:] == ["more.patch", "again.patch"]
    assert not worktree(editing).path.exists()


def test_a_queue_edited_meanwhile_is_not_overwritten(editing: Project) -> None:
    worktree(editing).commit({"more.py": "more\n"}, "More")
    editing.change("lead", "Meanwhile", {"meanwhile.py": "x\n"})
    before = editing.files()
    done = editing.forkman("save", "lead")
    assert done.code == 1
    assert "its queue or its pin changed since the branch was opened" in done.err
    assert editing.files() == before
    assert worktree(editing).read("more.py") == "more\n"


def test_an_open_branch_refuses_a_sync_and_export_leaves_it_open(editing: Project) -> None:
    worktree(editing).commit({"more.py": "more\n"}, "More")
    done = editing.forkman("sync")
    assert done.code == 1
    assert "lead: its branch is open for editing" in done.err
    editing.ok("export")
    assert worktree(editing).read("more.py") == "more\n"
    assert saved(editing)["added"] == ["more.patch"]


def test_saving_where_nothing_is_open_says_how_to_open(solo: Project) -> None:
    done = solo.forkman("save", "lead")
    assert done.code == 2
    assert "forkman edit lead" in done.err


@pytest.fixture
def recipes(solo: Project) -> Project:
    """lead's branch, open, with a recipe as its last commit."""
    release(solo, "lead", "v1.2", {"greet.py": "def hello(you):\n    greet(you)\n"})
    solo.ok("sync")
    solo.queue("lead", "greeting.py", RECIPE)
    solo.ok("edit", "lead")
    return solo


def test_a_recipe_is_a_commit_that_saves_as_itself(recipes: Project) -> None:
    assert worktree(recipes).read("greet.py") == "def hello(you):\n    slime_npu.greet(you)\n"
    worktree(recipes).commit({"more.py": "more\n"}, "More")
    assert "greeting.py" in saved(recipes)["kept"]
    assert recipes.series("lead")[-2:] == ["greeting.py", "more.patch"]
    assert recipes.patch("lead", "greeting.py") == RECIPE


def test_what_a_recipe_makes_is_not_edited_by_hand(recipes: Project) -> None:
    worktree(recipes).write({"greet.py": "def hello(you):\n    other.greet(you)\n"})
    worktree(recipes).git("commit", "--quiet", "--all", "--amend", "--no-edit")
    done = recipes.forkman("save", "lead")
    assert done.code == 1
    assert "edits what the recipe greeting.py makes" in done.err
    assert recipes.patch("lead", "greeting.py") == RECIPE


def test_a_dropped_recipe_leaves_the_queue(recipes: Project) -> None:
    worktree(recipes).git("reset", "--quiet", "--hard", "HEAD~1")
    assert saved(recipes)["removed"] == ["greeting.py"]


def test_a_recipe_that_is_not_needed_at_the_pin_stays_in_the_queue(solo: Project) -> None:
    guarded = RECIPE.replace("expect=(", "needed=Code('greet($WHO)'), expect=(")
    solo.queue("lead", "greeting.py", guarded)
    solo.ok("fetch")
    solo.ok("edit", "lead")
    worktree(solo).commit({"more.py": "more\n"}, "More")
    assert "greeting.py" in saved(solo)["kept"]
    assert "greeting.py" in solo.series("lead")


def test_a_recipe_in_conflict_is_corrected_where_it_is_written(recipes: Project) -> None:
    recipes.ok("abort", "lead")
    release(recipes, "lead", "v1.3", {"greet.py": "def hello(you):\n    wave(you)\n"}, "v1.2")
    assert recipes.forkman("sync").code == 1
    done = recipes.forkman("edit", "lead")
    assert done.code == 1
    assert "Correct the recipe (forks/lead/greeting.py), then sync again." in done.err
    path = recipes.root / "forks" / "lead" / "greeting.py"
    both = '{"any": [{"pattern": "greet($WHO)"}, {"pattern": "wave($WHO)"}]}'
    path.write_text(RECIPE.replace('"greet($WHO)"', both))
    recipes.ok("sync")
    assert "slime_npu.greet(you)" in recipes.built("lead", "greet.py")
