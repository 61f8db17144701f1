"""Reports: every outcome is said, nothing hostile gets through, every format stays whole."""

import base64
import html
import io
import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt  # rich brings it
from rich.cells import cell_len
from rich.console import Console

from rebase import report
from rebase.errors import NeedsPerson
from rebase.git import ObjectId
from rebase.outcome import (
    Audit,
    Broken,
    Conflict,
    ForkReport,
    Hunk,
    Kind,
    Outcome,
    Pin,
    Report,
    Site,
    Stale,
    Status,
    Taken,
    Unparsed,
    UpstreamCommit,
)


def oid(digits: str) -> ObjectId:
    return ObjectId((digits * 40)[:40])


SPLIT = UpstreamCommit(
    oid("1a2b3c4d5e"), "split rollout engines (#1931)", "A. Author", "2026-05-02", 1931
)
OTHERS = tuple(
    UpstreamCommit(oid(f"{n}"), f"refactor {n}", "王小明", "2026-04-12") for n in range(2, 6)
)
V1, V2 = Pin(oid("ab"), "v0.2.2"), Pin(oid("cd"), "v0.3.0")


def applied(change: str = "jit.py", **more: Any) -> Outcome:
    return Outcome(change, f"[NPU] {change}", Status.APPLIED, oid("e"), oid("f"), **more)


def in_conflict(*conflicts: Conflict, **more: Any) -> Outcome:
    return Outcome("ray.py", "[NPU] ray", Status.CONFLICT, oid("e"), conflicts=conflicts, **more)


def content(*hunks: Hunk, **more: Any) -> Conflict:
    return Conflict(b"slime/ray/rollout.py", Kind.CONTENT, hunks, **more)


def slime(*outcomes: Outcome, **more: Any) -> ForkReport:
    return ForkReport("slime", "git", V1, V2, "leads", outcomes, **more)


STAYS = ForkReport("mindspeed", "git", V1, V1, "stays")
AUDIT = Audit(
    "slime", V2,
    (Site("slime/a.py", 12, "Actor.run", "torch.cuda", "torch.cuda.Stream"),),
    (Broken("slime.a.run", "ours calls it", "slime/a.py:3 takes no b", (SPLIT,)),),
    (Unparsed("slime/b.py", 7, "invalid syntax", ("b.patch",)),),
    accepted=5, kept=2, before=4,
    stale=(Stale("slime/c.py: torch.cuda.Event", "as it was"),),
    notes=("The tree has no x.",),
)  # fmt: skip
HUNK = Hunk(506, b"was = 1\nsame\n", b"now = 1\nsame\n", b"want = 1\nsame\n")


def run(*forks: ForkReport, landed: bool = False, **more: Any) -> Report:
    return Report("sync", forks, landed, **more)


def shown(data: Report, width: int = 160, **more: Any) -> str:
    """What a pipe gets, at a width."""
    return printed(lambda console: report.show(data, console), width, **more)


def on_terminal(data: Report, width: int = 160) -> str:
    """What a terminal without colours gets."""
    return shown(data, width, force_terminal=True, color_system=None)


def printed(show: Callable[[Console], None], width: int = 160, **more: Any) -> str:
    file = io.StringIO()
    show(Console(file=file, width=width, **more))
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


def encoded(data: Report, encoding: str) -> str:
    """What a terminal of this encoding gets; an error where it cannot show a character."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    report.show(data, Console(file=file, width=160))
    file.flush()
    return raw.getvalue().decode(encoding)


# What is said


def test_each_fork_has_a_line_with_its_pins_why_and_counts() -> None:
    taken = replace(applied("mask.patch"), status=Status.ALREADY_UPSTREAM)
    sglang = ForkReport(
        "sglang", "archives", Pin(oid("dce8b060")), Pin(oid("1"), "v0.5.12"), "follows slime"
    )
    text = shown(run(slime(applied(), taken, in_conflict()), sglang, STAYS))
    lines = [re.split(r"\s{2,}", line) for line in text.splitlines()[:3]]
    assert lines == [
        ["✗ slime", "v0.2.2 → v0.3.0", "leads", "1 applied", "1 already upstream", "1 conflict"],
        ["✓ sglang", "dce8b060d → v0.5.12", "follows slime (archives)", "nothing to replay"],
        ["= mindspeed", "v0.2.2", "stays", "nothing to replay"],
    ]


def test_the_forks_stay_readable_where_their_line_does_not_fit() -> None:
    lines = shown(run(slime(applied()), STAYS), 40).splitlines()
    assert lines[:4] == [
        "✓ slime      v0.2.2 → v0.3.0",
        "    leads  1 applied",
        "= mindspeed  v0.2.2",
        "    stays  nothing to replay",
    ]


def test_a_tag_that_moved_shows_both_commits() -> None:
    moved = slime(applied())
    text = shown(run(replace(moved, new=Pin(oid("cd"), "v0.2.2"))))
    assert "v0.2.2 (ababababa) → v0.2.2 (cdcdcdcdc)" in text


def test_what_was_plainly_applied_is_counted_and_not_listed() -> None:
    text = shown(run(slime(applied("a.py", places=("x.py:1",)), applied("b.py"))))
    assert "2 applied" in text
    assert "a.py" not in text


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            applied(taken=(Taken(b"a.py", 2, 5, (SPLIT,)),)),
            ['a.py: 2 of 5 hunks already upstream in 1a2b3c4d5 "split rollout engines" (#1931), '
             "A. Author, 2026-05-02"],
        ),
        (
            replace(applied(), status=Status.ALREADY_UPSTREAM, taken=(Taken(b"a.py", 3, 3),)),
            ["already upstream  [NPU] jit.py",
             "a.py: already upstream; the history names no commit"],
        ),
        (
            replace(applied(), status=Status.ALREADY_UPSTREAM),
            ["upstream already has all of it"],
        ),
        (applied(remembered=True), ["conflict resolved as a person did before"]),
        (applied(new_places=("a.py:1", "b.py:2")), ["also edited in 2 new places:", "b.py:2"]),
        (applied(note="Look at [/npu]."), ["Look at [/npu]."]),
        (
            replace(applied(), status=Status.NOT_NEEDED, note="No call is left."),
            ["not needed  [NPU] jit.py", "No call is left."],
        ),
        (
            replace(applied(), status=Status.NOT_NEEDED, note="No call is left.", by=(SPLIT,)),
            ['since 1a2b3c4d5 "split rollout engines" (#1931), A. Author, 2026-05-02'],
        ),
        (replace(applied(), status=Status.SKIPPED), ["skipped  [NPU] jit.py"]),
        (
            in_conflict(content(HUNK), note="May come from a.py.", taken=(Taken(b"b", 1, 2),)),
            ["May come from a.py.", "b: 1 of 2 hunks already upstream"],
        ),
        (in_conflict(), ["✗ slime  ray.py  conflict"]),
    ],
)  # fmt: skip
def test_whatever_is_not_plainly_applied_is_listed_with_why(
    outcome: Outcome, said: list[str]
) -> None:
    text = shown(run(slime(outcome)))
    rendered = plain(report.markdown(run(slime(outcome))))
    assert outcome.change in text
    assert outcome.change in rendered
    for words in said:
        assert words in text
        if "  " not in words:
            assert words in rendered


def test_a_conflict_says_what_where_and_since_which_commit() -> None:
    text = shown(run(slime(in_conflict(content(HUNK, who=(SPLIT,))))))
    assert "✗ slime  ray.py  slime/ray/rollout.py:506  content" in text
    assert 'since 1a2b3c4d5 "split rollout engines" (#1931), A. Author, 2026-05-02' in text


def test_only_the_newest_three_commits_are_named() -> None:
    text = shown(run(slime(in_conflict(content(HUNK, who=(SPLIT, *OTHERS))))))
    assert "refactor 3" in text
    assert "refactor 4" not in text
    assert "and 2 more" in text


def test_a_change_upstream_made_and_rewrote_may_be_skipped() -> None:
    text = shown(run(slime(in_conflict(content(HUNK, rewritten=(SPLIT,))))))
    assert 'upstream made this itself in 1a2b3c4d5 "split rollout engines"' in text
    assert "and rewrote it since; if nothing is missing: forkman skip slime" in text


def test_a_conflict_without_hunks_shows_what_git_said() -> None:
    gone = Conflict(b"a.py", Kind.MODIFY_DELETE, detail="a.py deleted\nand modified.")
    text = shown(run(slime(in_conflict(gone))))
    assert "a.py  modify/delete" in text
    assert "    a.py deleted\n    and modified." in text


def test_a_fork_out_of_reach_is_named_with_problem_and_todo() -> None:
    lost = slime(problem="No route to host.", todo="Check the network.", unreachable=True)
    text = shown(run(lost, STAYS))
    assert "out of reach" in text
    assert "\nslime\n  No route to host.\n  Check the network.\n" in text
    assert text.endswith("Nothing was written: slime could not be carried.\n")


def test_notes_of_forks_and_of_the_run_are_said() -> None:
    data = run(replace(STAYS, notes=("Archives have no history.",)), notes=("Tag v1 moved.",))
    for text in (shown(data), plain(report.markdown(data))):
        assert "Archives have no history." in text
        assert "Tag v1 moved." in text


# Audits


def test_what_an_audit_found_is_listed_and_a_person_is_needed() -> None:
    data = run(slime(applied(), audit=AUDIT))
    assert data.exit_code == 1
    for text in (shown(data), plain(report.markdown(data))):
        for said in (
            "3 findings",
            "1 site of CUDA-only code, accepted by nobody:",
            "slime/a.py:12  torch.cuda.Stream in Actor.run",
            "broken contract slime.a.run: slime/a.py:3 takes no b",
            'since 1a2b3c4d5 "split rollout engines" (#1931), A. Author, 2026-05-02',
            "relied on: ours calls it",
            "slime/b.py:7 does not parse after b.patch: invalid syntax",
            "4 findings not new, for the old pin has them too",
            "The tree has no x.",
            "forkman audit slime --at v0.3.0 --accept REASON",
        ):
            assert " ".join(said.split()) in " ".join(text.split()), text
        assert "is gone" not in text


def test_findings_end_with_the_commands_that_accept_them() -> None:
    assert shown(run(slime(applied(), audit=AUDIT))).endswith(
        "Nothing was written: 3 findings to look at.\n"
        "To accept residue that you looked at, and go on:\n"
        "  forkman audit slime --at v0.3.0 --accept REASON\n"
        "  forkman sync\n"
    )
    broken = replace(AUDIT, residue=())
    assert shown(run(slime(applied(), audit=broken))).endswith("2 findings to look at.\n")


def test_an_audit_that_found_nothing_is_not_mentioned() -> None:
    clean = Audit("slime", V2, accepted=5, kept=2)
    data = run(slime(applied(), audit=clean), landed=True)
    assert data.exit_code == 0
    assert shown(data) == shown(run(slime(applied()), landed=True))


def test_many_sites_are_cut_and_counted() -> None:
    sites = tuple(replace(AUDIT.residue[0], line=n) for n in range(1, 60))
    text = shown(run(slime(applied(), audit=replace(AUDIT, residue=sites))))
    assert "slime/a.py:40 " in text
    assert "slime/a.py:41 " not in text
    assert "and 19 more" in text


# Hunks


def test_the_sides_stand_beside_each_other_with_upstreams_line_numbers() -> None:
    lines = on_terminal(run(slime(in_conflict(content(HUNK)))), 160).splitlines()
    at = next(n for n, line in enumerate(lines) if "upstream now" in line)
    assert [re.split(r"\s*│\s*", line.strip()) for line in lines[at : at + 3]] == [
        ["", "upstream now", "our change wants", "before both"],
        ["506", "now = 1", "want = 1", "was = 1"],
        ["507", "same", "same", "same"],
    ]


def test_the_base_goes_below_where_three_columns_are_too_narrow() -> None:
    text = on_terminal(run(slime(in_conflict(content(HUNK)))), 100)
    assert re.search(r"upstream now +│ our change wants\n", text)
    assert re.search(r"│ before both\n +│ was = 1\n", text)


def test_the_sides_are_stacked_on_a_narrow_terminal() -> None:
    text = on_terminal(run(slime(in_conflict(content(HUNK)))), 80)
    order = [text.index(title) for title in ("upstream now", "our change wants", "before both")]
    assert order == sorted(order)
    assert "506 │ now = 1\n" in text


def test_a_base_that_one_side_kept_is_not_shown_again() -> None:
    hunk = Hunk(1, b"a\n", b"a\n", b"b\n")
    assert "before both" not in shown(run(slime(in_conflict(content(hunk)))))


def test_a_side_without_lines_and_one_without_final_newline_say_so() -> None:
    text = shown(run(slime(in_conflict(content(Hunk(1, b"", b"", b"end"))))))
    assert "(no lines)" in text
    assert "\\ No newline at end of file" in text


def test_long_hunks_are_cut_in_the_middle_and_the_rest_is_counted() -> None:
    long = b"".join(b"x%d\n" % n for n in range(100))
    text = shown(run(slime(in_conflict(content(Hunk(1, b"", long, b""))))), 80)
    assert re.findall(r"x\d+$", text, re.M) == [f"x{n}" for n in (*range(16), *range(92, 100))]
    assert "… 76 lines left out …" in text
    assert re.search(r"^ +100 │ x99$", text, re.M)


def test_long_lines_and_many_hunks_are_cut_and_counted() -> None:
    hunks = (Hunk(1, b"", b"x" * 5000 + b"\n", b""), *(replace(HUNK, line=n) for n in range(2, 16)))
    text = shown(run(slime(in_conflict(content(*hunks)))))
    assert "… (4600 more characters)" in text
    assert "and 3 more, from lines 13, 14, 15" in text


def test_wide_characters_keep_the_columns_aligned() -> None:
    hunk = Hunk(1, b"", "宽字符\nnarrow\n".encode(), b"a\nb\n")
    lines = on_terminal(run(slime(in_conflict(content(hunk)))), 100).splitlines()
    rows = [line for line in lines if line.count("│") == 2]
    assert len(rows) == 3
    assert len({cell_len(line[: line.rindex("│")]) for line in rows}) == 1


def test_tabs_are_expanded() -> None:
    text = shown(run(slime(in_conflict(content(Hunk(1, b"", b"\tx\ty\n", b""))))), 80)
    assert "1 │     x   y\n" in text


# What became of it, and what to do now


def test_conflicts_end_with_the_exact_commands() -> None:
    other = replace(slime(in_conflict()), fork="two words")
    assert shown(run(slime(in_conflict()), other)).endswith(
        "Nothing was written: 2 conflicts to resolve.\n"
        "To resolve:\n"
        "  forkman edit slime  then  forkman continue slime\n"
        "  forkman edit 'two words'  then  forkman continue 'two words'\n"
    )


def test_a_landing_lists_what_was_written() -> None:
    text = shown(run(slime(applied()), landed=True, written=("a.toml", "b.patch")))
    assert text.endswith("Landed: 1 fork moved, 2 files written.\nWritten:\n  a.toml\n  b.patch\n")


def test_a_landing_says_which_forks_stayed_behind() -> None:
    data = run(slime(applied()), replace(STAYS, unreachable=True), landed=True)
    assert shown(data).endswith(
        "Landed: 1 fork moved, 0 files written; mindspeed could not be carried.\n"
    )


def test_a_dry_run_lists_what_would_be_and_how_to_do_it() -> None:
    data = replace(run(slime(applied()), dry=True, written=("a",)), command="sync --dry-run")
    assert shown(data).endswith(
        "Nothing was written: this was a dry run.\nWould have been written:\n  a\n"
        "To land it:\n  forkman sync\n"
    )
    resolve = "  forkman sync\n  forkman edit slime  then  forkman continue slime\n"
    assert shown(replace(data, forks=(slime(in_conflict()),))).endswith(resolve)


def test_files_that_went_are_told_apart_from_those_written() -> None:
    text = shown(run(slime(applied()), landed=True, written=("a.toml",), removed=("b.patch",)))
    assert text.endswith("1 file written.\nWritten:\n  a.toml\nRemoved:\n  b.patch\n")


def test_many_written_paths_are_counted() -> None:
    text = shown(run(slime(applied()), landed=True, written=tuple(f"p{n}" for n in range(25))))
    assert text.endswith("  p19\n  and 5 more\n")


@pytest.mark.parametrize("landed", [False, True])
def test_a_night_in_which_nothing_moved_says_so(landed: bool) -> None:
    data = run(STAYS, landed=landed)
    assert shown(data).endswith("Nothing moved: every fork stands where it should.\n")
    assert "Nothing moved: every fork stands where it should." in plain(report.markdown(data))
    lost = run(STAYS, replace(STAYS, fork="sglang", unreachable=True), landed=landed)
    assert shown(lost).endswith("Nothing moved: sglang could not be carried.\n")


def test_an_error_says_what_happened_what_is_kept_and_what_to_do() -> None:
    error = NeedsPerson("slime: a.py\nis in [/npu].", kept="Pins \x1b are kept.", todo="Edit it.")
    assert printed(lambda console: report.show_error(error, console)) == (
        "✗ slime: a.py\n  is in [/npu].\n\n  Pins \\x1b are kept.\n\n  Edit it.\n"
    )


def test_an_error_without_todo_has_two_paragraphs() -> None:
    error = NeedsPerson("Broken.")
    assert printed(lambda console: report.show_error(error, console)) == (
        "✗ Broken.\n\n  Nothing was changed.\n"
    )


# Terminals, pipes and encodings


def test_a_pipe_gets_paths_and_commands_whole() -> None:
    path = "a/" * 60 + "b.py"
    conflict = Conflict(path.encode(), Kind.OTHER, detail=f"{path} is a directory " * 2)
    fork = replace(slime(in_conflict(conflict)), fork="f" * 90)
    text = shown(run(fork, landed=True, written=(path,)), 60)
    assert f"{path}  other" in text
    assert f"\n    {path} is a directory {path} is a directory" in text
    assert f"\n  {path}\n" in text
    assert f"forkman edit {'f' * 90}  then  forkman continue {'f' * 90}\n" in text


@pytest.mark.parametrize("width", [60, 80, 90, 120, 140, 200])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    wide = Hunk(99, b"base " * 50, "宽 ".encode() * 90, b"x" * 300)
    fork = slime(
        applied("a-long-name-of-a-change.patch", taken=(Taken(b"dir/" * 9, 1, 2, OTHERS),)),
        in_conflict(content(wide, who=(SPLIT,))),
        notes=("A sentence of some length. " * 9,),
    )
    for line in on_terminal(run(fork, STAYS), width).splitlines():
        assert cell_len(line) <= width, line


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "gbk"])
def test_any_encoding_shows_everything(encoding: str) -> None:
    hunk = Hunk(1, b"", "宽 é → 😀\n".encode(), b"")
    text = encoded(run(slime(in_conflict(content(hunk, who=OTHERS)))), encoding)
    assert "x slime" in text
    assert "v0.2.2 -> v0.3.0" in text
    if encoding == "ascii":
        assert "\\u5bbd \\xe9 -> \\U0001f600" in text


def test_colour_is_left_out_where_it_is_not_wanted() -> None:
    def show(console: Console) -> None:
        report.show(run(slime(applied(note="x"), in_conflict(content(HUNK)))), console)

    assert "\x1b[" in printed(show, force_terminal=True, color_system="standard")
    assert "\x1b[" not in printed(show)


# Hostile words


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("a[mask] [/npu] :smile:", "a[mask] [/npu] :smile:"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\nb\r", "a\\nb\\r"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x9b31m", "\\u009b31m"),
        (b"caf\xe9 \xc3\xa9", "caf\\xe9 é"),
        ("caf\udce9 \ud800", "caf\\xe9 \\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("全角\u3000空白", "全角\u3000空白"),
        ("a\tb", "a   b"),
    ],
)
def test_what_is_no_printable_character_is_shown_as_an_escape(raw: str | bytes, seen: str) -> None:
    assert report.visible(raw) == seen


HOSTILE = (
    st.text(st.characters(exclude_categories=()), max_size=30)
    | st.binary(max_size=30).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
    | st.lists(
        st.sampled_from(
            ["|", "`", "```", "~~~", "</details>", "</code>", "<!--", "<script>", "\n", "\r\n",
             "\n\n", "\\", "\\|", "*", "_", "- ", "# ", "> ", "@octocat", "#1", "&#124;", "[x](y)",
             "![", "http://a.b", "\x1b[2J", "\u202e", "\u2028", "\t", "    ", "[/npu]", "[red]",
             "{task}", "$(x)", "'", '"', "1. ", "===", ":tag:", "x", "宽"]
        ),
        max_size=8,
    ).map("".join)
)  # fmt: skip
RAW = HOSTILE.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary(max_size=40)
COMMITS = st.lists(
    st.builds(
        UpstreamCommit,
        st.just(oid("a")),
        HOSTILE,
        HOSTILE,
        HOSTILE,
        st.none() | st.integers(0, 9999),
    ),
    max_size=5,
).map(tuple)
FEW = st.lists(HOSTILE, max_size=3).map(tuple)
CONFLICTS = st.builds(
    Conflict,
    RAW,
    st.sampled_from(Kind),
    st.lists(st.builds(Hunk, st.integers(1, 10**6), RAW, RAW, RAW), max_size=3).map(tuple),
    COMMITS,
    COMMITS,
    HOSTILE,
)
OUTCOMES = st.builds(
    Outcome,
    HOSTILE,
    HOSTILE,
    st.sampled_from(Status),
    st.just(oid("e")),
    st.just(None),
    st.lists(st.builds(Taken, RAW, st.integers(1, 2), st.integers(2, 3), COMMITS), max_size=2).map(
        tuple
    ),
    st.lists(CONFLICTS, max_size=2).map(tuple),
    FEW,
    FEW,
    COMMITS,
    st.booleans(),
    HOSTILE,
)
PINS = st.builds(Pin, st.sampled_from([oid("a"), oid("b")]), st.none() | HOSTILE)
AUDITS = st.builds(
    Audit,
    HOSTILE,
    PINS,
    st.lists(st.builds(Site, HOSTILE, st.just(3), HOSTILE, HOSTILE, HOSTILE), max_size=3).map(
        tuple
    ),
    st.lists(st.builds(Broken, HOSTILE, HOSTILE, HOSTILE, COMMITS), max_size=2).map(tuple),
    st.lists(st.builds(Unparsed, HOSTILE, st.just(3), HOSTILE, FEW), max_size=2).map(tuple),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 9),
    st.lists(st.builds(Stale, HOSTILE, HOSTILE), max_size=2).map(tuple),
    FEW,
)
FORKS = st.builds(
    ForkReport,
    HOSTILE,
    st.sampled_from(["git", "archives"]),
    PINS,
    PINS,
    HOSTILE,
    st.lists(OUTCOMES, max_size=2).map(tuple),
    HOSTILE,
    HOSTILE,
    st.booleans(),
    FEW,
    st.none() | AUDITS,
)
REPORTS = st.builds(
    Report,
    HOSTILE,
    st.lists(FORKS, max_size=2).map(tuple),
    st.booleans(),
    st.booleans(),
    FEW,
    FEW,
)


def unprintable(text: str) -> set[str]:
    found = {c for c in text if unicodedata.category(c) in {"Cc", "Cf", "Cs", "Zl", "Zp"}}
    return found - {"\n"}


@settings(max_examples=120, deadline=None)
@given(data=REPORTS, width=st.sampled_from([60, 100, 160]), terminal=st.booleans())
def test_no_control_character_reaches_a_terminal(data: Report, width: int, terminal: bool) -> None:
    text = on_terminal(data, width) if terminal else shown(data, width)
    assert not unprintable(text)


@settings(max_examples=60, deadline=None)
@given(data=REPORTS, encoding=st.sampled_from(["ascii", "latin-1", "gbk"]))
def test_no_report_fails_on_any_encoding(data: Report, encoding: str) -> None:
    assert not unprintable(encoded(data, encoding))


# JSON


def test_the_json_is_as_documented() -> None:
    conflict = content(HUNK, who=(SPLIT,))
    outcomes = applied(taken=(Taken(b"a.py", 1, 2),)), in_conflict(conflict)
    fork = slime(*outcomes, audit=AUDIT)
    found = json.loads(report.to_json(run(fork, dry=True, written=("a",), notes=("n",))))
    commit = {
        "id": SPLIT.id, "subject": SPLIT.subject, "author": "A. Author", "date": "2026-05-02",
        "pull_request": 1931,
    }  # fmt: skip
    expected = {
        "version": 1,
        "command": "sync",
        "forks": [{
            "fork": "slime",
            "source": "git",
            "old": {"commit": oid("ab"), "tag": "v0.2.2"},
            "new": {"commit": oid("cd"), "tag": "v0.3.0"},
            "how": "leads",
            "outcomes": [{
                "change": "jit.py",
                "subject": "[NPU] jit.py",
                "status": "applied",
                "tree": oid("e"),
                "commit": oid("f"),
                "taken": [{"path": "a.py", "hunks": 1, "total": 2, "by": []}],
                "conflicts": [],
                "places": [],
                "new_places": [],
                "by": [],
                "remembered": False,
                "note": "",
            }, {
                "change": "ray.py",
                "subject": "[NPU] ray",
                "status": "conflict",
                "tree": oid("e"),
                "commit": None,
                "taken": [],
                "conflicts": [{
                    "path": "slime/ray/rollout.py",
                    "kind": "content",
                    "hunks": [{
                        "line": 506,
                        "base": "was = 1\nsame\n",
                        "upstream": "now = 1\nsame\n",
                        "ours": "want = 1\nsame\n",
                    }],
                    "who": [commit],
                    "rewritten": [],
                    "detail": "",
                }],
                "places": [],
                "new_places": [],
                "by": [],
                "remembered": False,
                "note": "",
            }],
            "problem": "",
            "todo": "",
            "unreachable": False,
            "notes": [],
            "audit": {
                "fork": "slime",
                "at": {"commit": oid("cd"), "tag": "v0.3.0"},
                "residue": [{
                    "path": "slime/a.py",
                    "line": 12,
                    "scope": "Actor.run",
                    "kind": "torch.cuda",
                    "code": "torch.cuda.Stream",
                }],
                "contracts": [{
                    "contract": "slime.a.run",
                    "why": "ours calls it",
                    "detail": "slime/a.py:3 takes no b",
                    "by": [commit],
                }],
                "unparsed": [{
                    "path": "slime/b.py",
                    "line": 7,
                    "detail": "invalid syntax",
                    "changes": ["b.patch"],
                }],
                "accepted": 5,
                "kept": 2,
                "before": 4,
                "stale": [{"what": "slime/c.py: torch.cuda.Event", "reason": "as it was"}],
                "notes": ["The tree has no x."],
            },
        }],
        "landed": False,
        "dry": True,
        "written": ["a"],
        "removed": [],
        "notes": ["n"],
    }  # fmt: skip
    assert found == expected
    assert json.dumps(found) == json.dumps(expected)  # the keys' order too


@settings(max_examples=100, deadline=None)
@given(REPORTS)
def test_json_is_ascii_unicode_and_holds_every_byte(data: Report) -> None:
    text = report.to_json(data)
    assert text.isascii()
    found = json.loads(text)
    json.dumps(found, ensure_ascii=False).encode()  # no lone surrogates
    for fork, fork_found in zip(data.forks, found["forks"], strict=True):
        for outcome, outcome_found in zip(fork.outcomes, fork_found["outcomes"], strict=True):
            for conflict, made in zip(outcome.conflicts, outcome_found["conflicts"], strict=True):
                assert exact(made, "path") == conflict.path
                for hunk, hunk_made in zip(conflict.hunks, made["hunks"], strict=True):
                    assert exact(hunk_made, "base") == hunk.base
                    assert exact(hunk_made, "ours") == hunk.ours


def exact(made: dict[str, str], key: str) -> bytes:
    encoded = made.get(f"{key}_base64")
    return made[key].encode() if encoded is None else base64.b64decode(encoded)


def test_bytes_that_are_no_utf8_have_a_readable_and_an_exact_form() -> None:
    conflict = Conflict(b"caf\xe9.py", Kind.OTHER)
    found = json.loads(report.to_json(run(slime(in_conflict(conflict)))))
    made = found["forks"][0]["outcomes"][0]["conflicts"][0]
    assert made["path"] == "caf\ufffd.py"
    assert base64.b64decode(made["path_base64"]) == b"caf\xe9.py"


# Markdown

GITHUB = MarkdownIt("commonmark").enable("table")


def plain(markdown: str) -> str:
    """The text a reader of the rendered page sees."""
    page = re.sub(r"</(?:p|li|h\d|td|pre|summary)>", "\n", GITHUB.render(markdown))
    return html.unescape(re.sub(r"</?[a-z][^>]*>", "", page))


def test_markdown_has_the_forks_the_commands_and_the_conflict() -> None:
    text = report.markdown(run(slime(applied(), in_conflict(content(HUNK, who=(SPLIT,))))))
    assert "```sh\nforkman edit slime\nforkman continue slime\n```" in text
    assert "upstream now, from line 506\n\n```py\nnow = 1\nsame\n```" in text
    page = plain(text)
    assert "slime/ray/rollout.py:506 content" in page
    assert 'since 1a2b3c4d5 "split rollout engines" (#1931), A. Author, 2026-05-02' in page


def test_a_file_cannot_choose_to_be_drawn() -> None:
    conflict = replace(content(HUNK), path=b"x.mermaid")
    assert "mermaid\n" not in report.markdown(run(slime(in_conflict(conflict))))


def test_fences_are_longer_than_any_in_the_code() -> None:
    hunk = Hunk(1, b"", b"````\n</details>\n", b"")
    text = report.markdown(run(slime(in_conflict(content(hunk)))))
    assert "`````py\n````\n</details>\n`````" in text


@settings(max_examples=150, deadline=None)
@given(REPORTS)
def test_markdown_keeps_its_structure_whatever_it_quotes(data: Report) -> None:
    text = report.markdown(data)
    assert not unprintable(text)
    tokens = GITHUB.parse(text)
    rows = [n for n, token in enumerate(tokens) if token.type == "tr_open"]
    assert len(rows) == 1 + len(data.forks)
    # markdown-it pads and cuts rows to the header's columns, so the source is counted too
    source = [line for line in text.split("\n") if line.startswith("| ")]
    assert [line.count("|") for line in source[: len(rows) + 1]] == [6] * (len(rows) + 1)
    blocks = [token.content for token in tokens if token.type == "html_block"]
    assert {tag for block in blocks for tag in re.findall(r"</?\w+", block)} <= {
        "<details", "</details", "<summary", "</summary", "<code", "</code",
    }  # fmt: skip
    assert sum("<details>" in block for block in blocks) == sum(
        "</details>" in block for block in blocks
    )
    for token in tokens:
        for part in token.children or ():
            assert part.type in {"text", "html_inline", "strong_open", "strong_close"}
            if part.type == "html_inline":
                assert part.content in {"<code>", "</code>"}


@settings(max_examples=80, deadline=None)
@given(REPORTS)
def test_nobody_is_mentioned_by_a_summary(data: Report) -> None:
    page = GITHUB.render(report.markdown(data))
    outside = re.sub(r"<(code|pre)\b.*?</\1>", "", page, flags=re.S)
    assert "@" not in outside
    assert not re.search(r"(?<!&)#\d", outside)


def test_a_summary_stays_below_githubs_limit_and_says_what_is_missing() -> None:
    line = "字".encode() * 390 + b"\n"
    hunk = Hunk(1, line * 20, line * 21, line * 22)
    conflicts = tuple(replace(content(*[hunk] * 10), path=b"%d.py" % n) for n in range(10))
    text = report.markdown(run(slime(in_conflict(*conflicts))))
    assert 900_000 < len(text.encode()) < 1 << 20
    assert re.search(r"\*\*\d+ of \d+ parts of this report are left out:\*\*", text)
    assert len([line for line in text.split("\n") if line.startswith("```")]) % 2 == 0
    assert "forkman edit slime" in text


# Progress


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(report.time, "monotonic", clock.monotonic)
    return clock


def lines_of(work: Callable[[Callable[[str, int, int], None]], None]) -> list[str]:
    def show(console: Console) -> None:
        with report.progress(console) as task:
            work(task)

    return printed(show).splitlines()


def test_without_a_terminal_progress_is_a_line_every_few_seconds_and_at_each_end(
    clock: Clock,
) -> None:
    def work(task: Callable[[str, int, int], None]) -> None:
        for second in range(13):
            clock.now += 1
            task("fetch slime", second, 13)
        task("fetch slime", 13, 13)
        task("fetch slime", 13, 13)
        task("fetch sglang", 2, 2)

    assert lines_of(work) == [
        "fetch slime: 30%", "fetch slime: 69%", "fetch slime: 100%", "fetch sglang: 100%",
    ]  # fmt: skip


def test_a_task_of_unknown_length_is_told_at_the_end(clock: Clock) -> None:
    def work(task: Callable[[str, int, int], None]) -> None:
        task("read", 0, 0)
        task("read", 7, 0)
        task("wait", 0, 0)

    assert lines_of(work) == ["read: 7", "wait"]


def test_a_task_may_begin_again(clock: Clock) -> None:
    def work(task: Callable[[str, int, int], None]) -> None:
        for done in (1, 0, 1):
            task("replay", done, 1)

    assert lines_of(work) == ["replay: 100%", "replay: 100%"]


def test_progress_stays_when_the_work_fails(clock: Clock) -> None:
    def show(console: Console) -> None:
        with pytest.raises(NeedsPerson), report.progress(console) as task:
            task("replay", 1, 4)
            raise NeedsPerson("Broken.")

    assert printed(show) == "replay: 25%\n"


def test_on_a_terminal_progress_is_a_bar_that_leaves_nothing_behind() -> None:
    file = io.StringIO()
    console = Console(
        file=file, width=80, force_terminal=True, force_interactive=True, color_system=None
    )
    with report.progress(console) as task:
        task("remote: [/npu] \x1b[31m {x}", 1, 4)
        task("unknown", 3, 0)
        task("done", 1, 1)
    text = file.getvalue()
    assert "remote: [/npu] \\x1b[31m {x}" in text
    assert "25%" in text
    assert "\x1b[31m" not in text
    assert text.rstrip().endswith("\x1b[2K")  # the last line is erased


def test_a_report_needs_no_progress_bar_and_no_git_library() -> None:
    code = "import sys, rebase.report; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    modules = set(loaded.stdout.split())
    assert not modules & {"rich.progress", "rich.markdown", "pygments", "pygit2", "git"}
