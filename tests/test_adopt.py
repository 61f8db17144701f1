"""adopt: existing patches become changes, as downstream has them, all of them or none."""

import json
import re
from pathlib import Path

import pytest
from conftest import Files, Project, Repo, lines


@pytest.fixture
def lead(solo: Project) -> Project:
    """The leading fork, fetched: app.py has 30 lines, the fifth of them ours."""
    solo.ok("fetch")
    return solo


@pytest.fixture
def theirs(lead: Project) -> Repo:
    """Where downstream makes its patches: upstream at the pin, with our branch on it."""
    return lead.branch("lead")


def patch(project: Project, name: str, content: str | bytes) -> str:
    path = project.folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def diff(repo: Repo, files: Files, *options: str) -> str:
    """What `git diff` says of an edit, which is taken back."""
    repo.write(files)
    repo.git("add", "--all")
    text = repo.git("diff", "--cached", *options) + "\n"
    repo.git("reset", "--quiet", "--hard")
    return text


def subjects(project: Project) -> list[str]:
    return [change["subject"] for change in json.loads(project.ok("log", "lead", "--json").out)]


# -- what can be adopted -------------------------------------------------------------------------


def test_a_bare_diff_becomes_a_change_named_after_its_file(lead: Project, theirs: Repo) -> None:
    text = diff(theirs, {"app.py": lines({5: "ours 5", 20: "adopted"})})
    done = lead.ok("adopt", "lead", patch(lead, "npu-mask.patch", text))
    assert "npu-mask.patch  1 file  npu-mask" in done.out
    assert lead.series("lead")[-1] == "npu-mask.patch"
    mail = lead.patch("lead", "npu-mask.patch")
    assert "From: Ann Maintainer <maintainer@example.org>\n" in mail
    assert "Subject: npu-mask\n" in mail
    lead.ok("export")
    assert lead.built("lead", "app.py") == lines({5: "ours 5", 20: "adopted"})


def test_blob_ids_may_be_of_mixed_lengths(lead: Project, theirs: Repo) -> None:
    edits = {"app.py": lines({5: "ours 5", 7: "x"}), "npu.py": "import npu\n", "new.py": "new\n"}
    lengths = iter((7, 11, 40))

    def shorten(ids: re.Match[str]) -> str:
        length = next(lengths)
        return f"index {ids[1][:length]}..{ids[2][:length]}"

    text = re.sub(r"index (\w+)\.\.(\w+)", shorten, diff(theirs, edits, "--full-index"))
    lead.ok("adopt", "lead", patch(lead, "mixed.patch", text))
    lead.ok("export")
    assert {name: lead.built("lead", name) for name in edits} == edits


def test_a_diff_may_have_words_around_it(lead: Project, theirs: Repo) -> None:
    text = diff(theirs, {"more.py": "more\n"})
    lead.ok("adopt", "lead", patch(lead, "more.patch", f"Applied in CI.\n\n{text}\nThe end.\n"))
    assert "The end" not in lead.patch("lead", "more.patch")


def test_a_mail_keeps_author_date_and_message(lead: Project, theirs: Repo) -> None:
    theirs.commit({"more.py": "more\n"}, "[NPU] More: of it\n\nBecause.")
    theirs.git("commit", "--quiet", "--amend", "--no-edit", "--date=2020-02-02T02:02:02+0800",
               "--author=李 <li@example.org>")  # fmt: skip
    lead.ok("adopt", "lead", patch(lead, "a", theirs.git("format-patch", "-1", "-k", "--stdout")))
    assert lead.series("lead")[-1] == "npu-more-of-it.patch"
    mail = lead.patch("lead", "npu-more-of-it.patch")
    assert "Date: Sun, 02 Feb 2020 02:02:02 +0800\n" in mail and "Because." in mail
    assert "li@example.org" in mail


def test_a_series_in_one_file_becomes_its_changes_without_the_cover_letter(
    lead: Project, theirs: Repo
) -> None:
    for number in (10, 20, 30):
        theirs.commit({"app.py": lines({5: "ours 5", number: "x"})}, f"Line {number}")
    series = theirs.git("format-patch", "-3", "--cover-letter", "--stdout")
    lead.ok("adopt", "lead", patch(lead, "series.mbox", series + "\n"))
    assert lead.series("lead")[-3:] == ["line-10.patch", "line-20.patch", "line-30.patch"]


def test_a_cover_letter_in_a_file_of_its_own_is_left_out_and_named(
    lead: Project, theirs: Repo
) -> None:
    for number in (10, 20):
        theirs.commit({"app.py": lines({5: "ours 5", number: "x"})}, f"Line {number}")
    theirs.git("format-patch", "-2", "--cover-letter", "--output-directory", "fp")
    files = sorted(str(path) for path in (theirs.path / "fp").iterdir())
    done = lead.ok("adopt", "lead", *files)
    assert f"Left out, a cover letter: {files[0]}" in done.out
    assert lead.series("lead")[-2:] == ["line-10.patch", "line-20.patch"]


def test_a_squashed_diff_may_be_split_by_file(lead: Project, theirs: Repo) -> None:
    text = diff(theirs, {"app.py": lines({5: "ours 5", 9: "x"}), "a/b.py": "new\n", "c.py": "c\n"})
    lead.ok("adopt", "lead", "--split", "file", patch(lead, "squashed.patch", text))
    assert lead.series("lead")[-3:] == ["a-b-py.patch", "app-py.patch", "c-py.patch"]
    assert subjects(lead)[-3:] == ["a/b.py", "app.py", "c.py"]
    assert "From squashed.patch." in lead.patch("lead", "c-py.patch")


def test_a_rename_is_one_change_when_split(lead: Project, theirs: Repo) -> None:
    text = diff(theirs, {"app.py": None, "core.py": lines({5: "ours 5"}), "c.py": "c\n"}, "-M")
    assert "rename from app.py" in text
    lead.ok("adopt", "lead", "--split", "file", patch(lead, "squashed.patch", text))
    assert len(lead.series("lead")) == 2 + 2


def test_a_patch_whose_context_moved_is_merged_with_the_blob_it_names(
    lead: Project, theirs: Repo
) -> None:
    theirs.git("checkout", "--quiet", "--detach", "v1.0")
    text = diff(theirs, {"app.py": lines({7: "adopted"})})  # where line 5 was not ours yet
    done = lead.ok("adopt", "lead", patch(lead, "seven.patch", text))
    assert "(merged: its context was not there as it says)" in done.out
    assert "ours 5" in lead.patch("lead", "seven.patch")


def test_several_patches_go_on_each_other(lead: Project, theirs: Repo) -> None:
    first = diff(theirs, {"app.py": lines({5: "ours 5", 10: "ten"})})
    theirs.commit({"app.py": lines({5: "ours 5", 10: "ten"})}, "Ten")
    second = diff(theirs, {"app.py": lines({5: "ours 5", 10: "ten again"})})
    lead.ok("adopt", "lead", patch(lead, "b.patch", first), patch(lead, "a.patch", second))
    assert lead.series("lead")[-2:] == ["b.patch", "a.patch"]


def test_equal_names_stay_apart(lead: Project, theirs: Repo) -> None:
    for number, subject in enumerate(("Fix NPU!", "fix npu", "修复", "修复"), 10):
        text = theirs.commit({f"{number}.py": "x\n"}, subject) and theirs.git(
            "format-patch", "-1", "-k", "--stdout"
        )
        lead.ok("adopt", "lead", patch(lead, "same.patch", text + "\n"))
    assert lead.series("lead")[-4:] == [
        "fix-npu.patch", "fix-npu-2.patch", "change.patch", "change-2.patch",
    ]  # fmt: skip
    assert subjects(lead)[-4:] == ["Fix NPU!", "fix npu", "修复", "修复"]


def test_what_is_adopted_survives_the_next_sync(lead: Project, theirs: Repo) -> None:
    text = diff(theirs, {"app.py": lines({5: "ours 5", 20: "adopted"})})
    lead.ok("adopt", "lead", patch(lead, "npu-mask.patch", text))
    lead.ok("sync")
    assert lead.built("lead", "app.py") == lines({5: "ours 5", 20: "adopted", 25: "upstream 25"})


# -- what cannot: nothing is adopted -------------------------------------------------------------


def refused(project: Project, code: int, *patches: str) -> str:
    """Try to adopt; what forkman says, when it adopted nothing."""
    before = project.files()
    done = project.forkman("adopt", "lead", *patches)
    assert done.code == code, done.said
    assert project.files() == before
    assert "Traceback" not in done.err
    return done.err


def test_all_are_adopted_or_none(lead: Project, theirs: Repo) -> None:
    good = patch(lead, "good.patch", diff(theirs, {"good.py": "good\n"}))
    bad = patch(lead, "bad.patch", diff(theirs, {"app.py": lines({5: "ours 5", 9: "x"})}).replace(
        "line 8", "line eight").replace("index ", "index 1"))  # fmt: skip
    assert "Nothing was adopted." in refused(lead, 1, good, bad)


def test_a_patch_that_does_not_apply_is_told_with_file_hunk_and_line(
    lead: Project, theirs: Repo
) -> None:
    text = diff(theirs, {"app.py": lines({5: "ours 5", 9: "x"})})
    text = text.replace(" line 8", " line eight").replace("index ", "index 1")
    said = refused(lead, 1, patch(lead, "bad.patch", text))
    assert "bad.patch (bad) does not apply on its branch at v1.0" in said
    assert "app.py" in said


def test_all_parts_of_a_split_patch_that_do_not_apply_are_told(lead: Project, theirs: Repo) -> None:
    theirs.commit({"other.py": lines(), "third.py": lines()}, "What upstream does not have")
    edits = {"good.py": "good\n", "other.py": lines({9: "x"}), "third.py": lines({9: "x"})}
    text = diff(theirs, edits)
    said = refused(lead, 1, "--split", "file", patch(lead, "squashed.patch", text))
    for name in ("other.py", "third.py"):
        assert f"squashed.patch ({name}) does not apply on its branch at v1.0" in said
    assert "good.py" not in said
    assert "Nothing was adopted." in said


def test_a_patch_that_is_there_already_is_named(lead: Project, theirs: Repo) -> None:
    text = theirs.git("diff", "v1.0", "HEAD") + "\n"
    said = refused(lead, 2, patch(lead, "all.patch", text))
    assert "all.patch (all) changes nothing: the branch has it." in said


def test_a_patch_that_is_there_already_is_known_without_the_blobs_it_names(
    lead: Project, theirs: Repo
) -> None:
    text = theirs.git("diff", "v1.0", "HEAD", "--", "app.py") + "\n"
    text = "\n".join(
        "index 1234567..89abcde 100644" if line.startswith("index ") else line
        for line in text.split("\n")
    )
    said = refused(lead, 2, patch(lead, "all.patch", text))
    assert "changes nothing: the branch has it." in said


@pytest.mark.parametrize(
    "path", ["../out.py", "/etc/out.py", ".git/hooks/x", "a/.GIT/config", "a/../../x"]
)
def test_a_path_that_leads_elsewhere_is_refused(lead: Project, path: str) -> None:
    text = (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n"
        f"+++ b/{path}\n@@ -0,0 +1 @@\n+x\n"
    )
    said = refused(lead, 2, patch(lead, "evil.patch", text))
    assert "evil.patch" in said and path in said
    assert not (lead.folder / "out.py").exists()


def test_a_path_through_a_symbolic_link_is_refused(lead: Project) -> None:
    text = (
        "diff --git a/link b/link\nnew file mode 120000\n--- /dev/null\n+++ b/link\n"
        "@@ -0,0 +1 @@\n+/tmp\n\\ No newline at end of file\n"
        "diff --git a/link/x b/link/x\nnew file mode 100644\n--- /dev/null\n+++ b/link/x\n"
        "@@ -0,0 +1 @@\n+x\n"
    )
    assert "link" in refused(lead, 1, patch(lead, "evil.patch", text))


@pytest.mark.parametrize("content", [b"", b"\0\xff binary \0", b"just words\n"])
def test_a_file_without_a_diff_is_refused(lead: Project, content: bytes) -> None:
    assert "there is no diff in it" in refused(lead, 2, patch(lead, "empty.patch", content))


def test_cover_letters_alone_are_refused(lead: Project, theirs: Repo) -> None:
    theirs.commit({"x.py": "x\n"}, "X")
    cover = theirs.git("format-patch", "-1", "--cover-letter", "--stdout").partition("\nFrom ")[0]
    files = [patch(lead, name, cover) for name in ("0000-a.patch", "0000-b.patch")]
    assert "there is no diff in it" in refused(lead, 2, files[0])
    assert "there is no diff in it" in refused(lead, 2, *files)


def test_a_damaged_patch_is_refused_with_its_line(lead: Project, theirs: Repo) -> None:
    text = diff(theirs, {"app.py": lines({5: "ours 5", 9: "x"})})
    cut = "\n".join(text.split("\n")[:-4]) + "\n"
    said = refused(lead, 2, patch(lead, "cut.patch", cut))
    assert "cut.patch: The patch is damaged" in said


def test_a_mail_without_an_author_is_refused(lead: Project, theirs: Repo) -> None:
    text = "Subject: x\nDate: Mon, 1 Jan 2024 00:00:00 +0000\n\n---\n" + diff(
        theirs, {"x.py": "x\n"}
    )
    assert "it has no From:" in refused(lead, 2, patch(lead, "mail.patch", text))


def test_a_file_that_is_not_there_is_named(lead: Project) -> None:
    assert "nowhere.patch cannot be read" in refused(lead, 2, "nowhere.patch")


def test_nobody_can_adopt_a_bare_diff_without_a_name(
    lead: Project, theirs: Repo, tmp_path: Path
) -> None:
    text = diff(theirs, {"x.py": "x\n"})
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[user]\nuseConfigOnly = true\n")
    done = lead.process("adopt", "lead", patch(lead, "x.patch", text), env={"HOME": str(home)})
    assert done.code == 2
    assert "git does not know who you are" in done.err


def test_a_branch_as_queue_takes_commits_not_patches(lead: Project) -> None:
    lead.edit_manifest("lead", 'path = "forks/lead"', 'url = "x"\nref = "npu"')
    said = refused(lead, 2, patch(lead, "x.patch", "x"))
    assert "its queue is the branch npu of x" in said


def test_a_fork_never_fetched_says_what_to_fetch(solo: Project) -> None:
    said = refused(solo, 2, patch(solo, "x.patch", "diff --git a/x b/x\n"))
    assert "forkman fetch lead" in said


def test_an_open_branch_is_not_adopted_under(lead: Project, theirs: Repo) -> None:
    lead.ok("edit", "lead")
    said = refused(lead, 1, patch(lead, "x.patch", diff(theirs, {"x.py": "x\n"})))
    assert "open for editing" in said
