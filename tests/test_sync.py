"""sync: everything is decided first, all forks are told about, and it lands together or not at all.

The stack is the one that conftest makes: lead names engine's tag and trainer's commit.
"""

import json
import shutil
import subprocess

import pytest
from conftest import RECIPE, Files, Host, Project, Repo, dockerfile, layer_patch, lines

ENGINE = {10: "lead 10 again", 18: "ours 18", 28: "upstream 28"}


def release(project: Project, tag: str, files: Files) -> str:
    """The leader's next release after v1.1."""
    lead = project.upstream("lead")
    lead.git("checkout", "--quiet", "v1.1")
    return lead.commit(files, f"Release {tag} (#33)", tag)


def name_followers(project: Project, engine: str, trainer: str | None = None) -> Files:
    """The leader's Dockerfile that names these."""
    trainer = trainer or project.upstream("trainer").git("rev-parse", "main")
    return {"Dockerfile": dockerfile(engine, trainer)}


# -- where forks go ------------------------------------------------------------------------------


def test_the_leader_goes_to_its_newest_release_and_the_followers_where_it_says(
    project: Project,
) -> None:
    report = project.report("sync")
    trainer = project.upstream("trainer").git("rev-parse", "main")
    assert project.pins() == {"lead": "v1.1", "engine": "v0.6", "trainer": trainer}
    assert {fork: each["how"] for fork, each in report["forks"].items()} == {
        "lead": "leads",
        "engine": "follows lead Dockerfile",
        "trainer": "follows lead Dockerfile",
    }


def test_prereleases_are_taken_where_the_manifest_says_so(project: Project) -> None:
    project.edit_manifest("lead", "(?P<version>.+)' }", "(?P<version>.+)', prereleases = true }")
    project.ok("sync")
    assert project.pin("lead") == "v2.0rc1"


@pytest.mark.parametrize(
    ("to", "pin"), [("v1.0", "v1.0"), ("v2.0rc1", "v2.0rc1"), ("latest", "v1.1"), ("main", None)]
)
def test_the_leader_goes_where_it_is_told(solo: Project, to: str, pin: str | None) -> None:
    head = solo.upstream("lead").commit({"new.py": "x\n"}, "Ahead")
    report = solo.report("sync", "--to", to)
    assert solo.pin("lead") == (pin or head)
    assert report["forks"]["lead"]["how"] == "as asked"
    assert report["command"] == f"sync --to {to}"


def test_a_commit_may_be_abbreviated_and_gets_its_release_tag(solo: Project) -> None:
    commit = solo.upstream("lead").git("rev-parse", "v1.1")
    solo.ok("sync", "--to", commit[:10])
    assert solo.manifest("lead")["pin"] == {"commit": commit, "tag": "v1.1"}


def test_to_nowhere_names_what_upstream_does_not_have(solo: Project) -> None:
    before = solo.files()
    for command in (["sync", "--to", "v9.9"], ["rebase", "lead", "--onto", "v9.9"]):
        done = solo.forkman(*command)
        assert done.code == 2
        assert "lead: upstream has no 'v9.9'." in done.err
    assert solo.files() == before


def test_only_the_named_forks_move_and_a_follower_stays_with_the_leader(project: Project) -> None:
    project.ok("sync", "lead")
    assert project.pins()["lead"] == "v1.1"
    assert project.pins()["engine"] == "v0.5"
    project.ok("sync", "engine")
    assert project.pins()["engine"] == "v0.6"
    assert project.pins()["trainer"] == "v0.1"


def test_a_leader_ahead_of_its_newest_release_is_not_taken_back(solo: Project) -> None:
    solo.ok("sync", "--to", "v2.0rc1")
    report = solo.report("sync")
    assert solo.pin("lead") == "v2.0rc1"
    assert report["forks"]["lead"]["how"] == "leads; stays, as v1.1 is behind it"


def test_a_fork_that_follows_nobody_stays(project: Project) -> None:
    text = project.manifest_path("trainer").read_text()
    start, end = text.index("[follow]"), text.index("[pin]")
    project.manifest_path("trainer").write_text(text[:start] + text[end:])
    report = project.report("sync")
    assert (project.pins()["trainer"], report["forks"]["trainer"]["how"]) == ("v0.1", "stays")


def test_an_unknown_fork_is_told_apart_from_those_there_are(project: Project) -> None:
    done = project.forkman("sync", "engin")
    assert done.code == 2
    assert "There is no fork 'engin'" in done.err and "lead, engine, trainer" in done.err


def test_one_fork_goes_alone_with_rebase(project: Project) -> None:
    report = project.report("rebase", "trainer", "--onto", "main")
    assert project.pins()["lead"] == "v1.0"
    assert project.pins()["trainer"] == project.upstream("trainer").git("rev-parse", "main")
    assert report["command"] == "rebase trainer --onto main"


# -- what lands ----------------------------------------------------------------------------------


def test_pins_queues_and_exports_land_together(project: Project) -> None:
    report = project.report("sync")
    assert report["landed"]
    assert project.built("engine", "serve.py") == lines(ENGINE)
    assert project.built("lead", "npu.py") == "import slime_npu\n"
    index = json.loads((project.root / "exports" / "index.json").read_text())
    assert {fork: entry["pin"] for fork, entry in index["forks"].items()} == {
        fork: {"tag": None} | project.manifest(fork)["pin"] for fork in index["forks"]
    }
    assert project.ok("verify").out.count("✓") == 3


def test_a_layer_is_recorded_by_the_hash_it_has_at_the_leaders_pin(project: Project) -> None:
    project.ok("sync")
    (layer,) = project.manifest("engine")["layers"]
    assert layer["patches"] == [
        {
            "path": "engine.patch",
            "blob": project.upstream("lead").git("rev-parse", "v1.1:engine.patch"),
        }
    ]


def test_a_layer_that_changes_moves_a_fork_whose_pin_stays(project: Project) -> None:
    trainer = project.upstream("trainer").git("rev-parse", "main")
    old = project.upstream("engine")
    old.git("checkout", "--quiet", "v0.5")
    layer = layer_patch(old, {"serve.py": lines({10: "another 10"})})
    release(project, "v1.2", {"Dockerfile": dockerfile("v0.5", trainer), "engine.patch": layer})
    project.ok("sync")
    assert project.pins()["engine"] == "v0.5"
    assert project.built("engine", "serve.py") == lines({10: "another 10", 18: "ours 18"})


def test_a_manifest_keeps_its_comments(project: Project) -> None:
    project.ok("sync")
    text = project.manifest_path("lead").read_text()
    assert "# lead, as a person writes it" in text
    assert 'tag = "v1.1"  # the release\n' in text


def test_the_queues_patches_fit_the_new_pin(project: Project) -> None:
    project.ok("sync")
    checkout = Repo.new(project.folder / "checkout")
    checkout.git("fetch", "--quiet", str(project.upstream("lead").path), "v1.1")
    checkout.git("checkout", "--quiet", "--detach", "FETCH_HEAD")
    for name in project.series("lead"):
        checkout.git("am", "--quiet", str(project.root / "forks" / "lead" / name))
    assert checkout.read("app.py") == lines({5: "ours 5", 25: "upstream 25"})


def test_what_upstream_has_leaves_the_queue_and_is_reported(project: Project) -> None:
    report = project.report("sync")
    assert project.series("trainer") == ["four.patch"]
    assert not (project.root / "forks" / "trainer" / "twelve.patch").exists()
    outcome = report["forks"]["trainer"]["outcomes"][0]
    assert (outcome["change"], outcome["status"]) == ("twelve.patch", "already upstream")
    assert outcome["taken"][0]["by"][0]["pull_request"] == 12


def test_a_second_sync_says_that_nothing_moved_and_changes_no_file(project: Project) -> None:
    project.ok("sync")
    before = project.files()
    done = project.ok("sync")
    assert "Nothing moved: every fork stands where it should." in done.out
    assert project.files() == before


def test_a_queue_keeps_its_bytes_while_its_fork_does_not_move(project: Project) -> None:
    before = {name: raw for name, raw in project.files().items() if name.startswith("forks")}
    project.ok("sync", "lead", "--to", "v1.0")
    after = {name: raw for name, raw in project.files().items() if name.startswith("forks")}
    assert after == before


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(project: Project) -> None:
    before = project.files()
    report = project.report("sync", "--dry-run")
    assert project.files() == before
    assert (report["landed"], report["dry"]) == (False, True)
    assert "manifests/lead.toml" in report["written"]
    assert "forks/trainer/twelve.patch" in report["removed"]


def test_exports_go_where_they_are_told_and_those_that_are_no_more_go(project: Project) -> None:
    out = project.root / "build" / "out"
    project.ok("sync", "--to", "v1.0", "--out", "build/../build/out")
    (out / "trainer" / "mine.patch").write_text("not forkman's\n")
    assert (out / "trainer" / "0002-four.patch").exists()
    project.ok("sync", "--out", "build/out")
    assert sorted(path.name for path in (out / "trainer").iterdir()) == [
        "0001-four.patch", "mine.patch",
    ]  # fmt: skip
    assert not (project.root / "exports").exists()


def test_export_writes_the_patches_at_the_pins_there_are(project: Project) -> None:
    project.ok("export")
    assert project.pins()["engine"] == "v0.5"
    assert project.built("engine", "serve.py") == lines({10: "lead 10", 18: "ours 18"})


def test_diff_shows_how_a_branch_changed_between_its_last_two_pins(solo: Project) -> None:
    for number, tag in enumerate(("v1.9", "v1.10"), 20):
        release(solo, tag, {"app.py": lines({25: "upstream 25", number: "more"})})
        solo.ok("sync", "--to", tag)
    said = solo.ok("diff", "lead").out
    assert said == solo.ok("diff", "lead", "v1.9", "v1.10").out
    assert "Rank by device" in said and "Add the runtime" in said
    assert solo.ok("diff", "lead", "v1.0").out == solo.ok("diff", "lead", "v1.0", "v1.10").out
    assert "Known are: v1.0, v1.9, v1.10." in solo.forkman("diff", "lead", "v1.0", "v7").err


# -- what keeps a group from landing -------------------------------------------------------------


def test_an_upstream_out_of_reach_keeps_the_group_from_landing(project: Project) -> None:
    shutil.move(project.upstream("engine").path, project.folder / "away")
    before = project.files()
    done = project.forkman("sync")
    assert done.code == 3
    assert "! engine" in done.out and "out of reach" in done.out
    assert "2 applied" in done.out  # lead was carried all the same
    assert project.files() == before
    shutil.move(project.folder / "away", project.upstream("engine").path)
    project.ok("sync")


def test_a_leader_out_of_reach_is_no_fault_of_its_followers(project: Project) -> None:
    shutil.move(project.upstream("lead").path, project.folder / "away")
    report = project.report("sync")
    assert {fork for fork, each in report["forks"].items() if each["unreachable"]} == {
        "lead", "engine", "trainer",
    }  # fmt: skip
    assert project.forkman("sync").code == 3


def test_without_the_network_what_was_fetched_before_is_used_and_that_is_said(
    project: Project,
) -> None:
    project.ok("fetch")
    shutil.rmtree(project.upstream("engine").path)
    report = project.report("sync")
    assert report["landed"]
    (note,) = report["forks"]["engine"]["notes"]
    assert "could not be fetched" in note and "What was fetched before is used." in note


def test_the_conflicts_of_all_forks_come_in_one_run_and_nothing_is_written(
    project: Project,
) -> None:
    engine = project.upstream("engine")
    engine.commit({"serve.py": lines({18: "theirs 18", 28: "upstream 28"})}, "Faster (#8)", "v0.7")
    release(project, "v1.2", name_followers(project, "v0.7") | {"app.py": lines({5: "theirs 5"})})
    before = project.files()

    report = project.report("sync")

    assert not report["landed"]
    assert project.files() == before
    assert {
        fork: [
            (conflict["path"], hunk["base"], hunk["upstream"], hunk["ours"], who["pull_request"])
            for outcome in each["outcomes"]
            for conflict in outcome["conflicts"]
            for hunk in conflict["hunks"]
            for who in conflict["who"]
        ]
        for fork, each in report["forks"].items()
    } == {
        "lead": [("app.py", "line 5\n", "theirs 5\n", "ours 5\n", 33)],
        "engine": [("serve.py", "line 18\n", "theirs 18\n", "ours 18\n", 8)],
        "trainer": [],
    }
    done = project.forkman("sync")
    assert done.code == 1
    assert "forkman edit lead  then  forkman continue lead" in done.out
    assert "forkman edit engine  then  forkman continue engine" in done.out


def test_a_followed_tag_that_upstream_lacks_is_named_with_who_names_it(project: Project) -> None:
    release(project, "v1.2", name_followers(project, "v0.9"))
    done = project.forkman("sync")
    assert done.code == 1
    assert "engine: lead's Dockerfile names v0.9, which" in done.out
    assert project.pins()["lead"] == "v1.0"


def test_a_followed_file_that_names_nothing_shows_the_pattern(project: Project) -> None:
    release(project, "v1.2", {"Dockerfile": "FROM scratch\n"})
    done = project.forkman("sync")
    assert done.code == 1
    assert "nothing there matches '^ARG ENGINE=(.+)$'" in done.out


def test_a_followed_file_that_is_gone_is_named(project: Project) -> None:
    release(project, "v1.2", {"Dockerfile": None})
    done = project.forkman("sync")
    assert done.code == 1
    assert "lead v1.2 has no Dockerfile." in done.out


def test_a_layer_that_is_gone_is_named(project: Project) -> None:
    release(project, "v1.2", {"engine.patch": None})
    done = project.forkman("sync")
    assert done.code == 1
    assert "engine: its layer engine.patch is not in lead v1.2." in done.out


def test_a_layer_that_does_not_apply_is_named_with_its_hunk(project: Project) -> None:
    engine = project.upstream("engine")
    engine.commit({"serve.py": lines({10: "other 10"})}, "Ten", "v0.7")
    release(project, "v1.2", name_followers(project, "v0.7"))
    done = project.forkman("sync")
    assert done.code == 1
    assert "lead's engine.patch" in done.out
    assert "hunk 1 (line 7)" in done.out and "other 10" in done.out


def test_a_patch_edited_by_hand_is_named_with_the_hunk_that_fails(project: Project) -> None:
    path = project.root / "forks" / "lead" / "rank-by-device.patch"
    path.write_text(path.read_text().replace("-line 5", "-line five"))
    done = project.forkman("sync")
    assert done.code == 1
    assert "lead: rank-by-device.patch does not apply on its own pin:" in done.out
    assert "app.py: hunk 1" in done.out and "line five" in done.out
    assert project.pins()["engine"] == "v0.5"


def test_mistakes_in_manifests_are_told_all_at_once(project: Project) -> None:
    project.edit_manifest("lead", 'tag = "v1.0"', 'tag = "-x"')
    project.edit_manifest("engine", 'fork = "lead"', 'fork = "leed"')
    project.edit_manifest("trainer", "[export]", "[exports]")
    done = project.forkman("sync")
    assert done.code == 2
    assert "manifests/lead.toml: pin.tag: '-x'" in done.err
    assert "manifests/engine.toml: follow.fork: 'leed'" in done.err
    assert "manifests/engine.toml: layers[0].fork: 'leed'" in done.err
    assert "manifests/trainer.toml: exports: no such key" in done.err


# -- upstreams that change their past ------------------------------------------------------------


def move_tag(project: Project) -> tuple[str, str]:
    """Upstream moves the tag that lead is pinned at; its old and new commit."""
    lead = project.upstream("lead")
    old = lead.git("rev-parse", "v1.0")
    lead.git("checkout", "--quiet", "v1.0")
    new = lead.commit({"app.py": lines({30: "moved"})}, "Moved")
    lead.git("tag", "--force", "v1.0")
    return old, new


def test_a_tag_that_upstream_moved_is_shown_and_not_used(solo: Project) -> None:
    solo.upstream("lead").git("tag", "--delete", "v1.1")
    solo.ok("sync")
    old, new = move_tag(solo)
    report = solo.report("sync")
    assert solo.manifest("lead")["pin"] == {"commit": old, "tag": "v1.0"}
    (note,) = report["forks"]["lead"]["notes"]
    assert f"moved the tag v1.0 from {old[:9]} to {new[:9]}" in note


def test_a_new_mirror_does_not_take_a_moved_tag_either(solo: Project) -> None:
    solo.upstream("lead").git("tag", "--delete", "v1.1")
    old, new = move_tag(solo)
    done = solo.forkman("sync")
    assert done.code == 1
    assert f"upstream's tag v1.0 names {new} now, and the pin says that it is {old}" in done.out
    assert solo.manifest("lead")["pin"]["commit"] == old


@pytest.mark.parametrize("fetched", [True, False])
def test_a_moved_tag_is_taken_when_told(solo: Project, fetched: bool) -> None:
    solo.upstream("lead").git("tag", "--delete", "v1.1")
    if fetched:
        solo.ok("fetch")
    old, new = move_tag(solo)
    notes = solo.report("sync", "--accept-moved-tags")["forks"]["lead"]["notes"]
    accepted = f"Upstream moved the tag v1.0 from {old[:9]} to {new[:9]}; accepted."
    assert notes == ([accepted] if fetched else [])
    assert solo.manifest("lead")["pin"] == {"commit": new, "tag": "v1.0"}
    assert solo.built("lead", "app.py") == lines({5: "ours 5", 30: "moved"})


def force_push(project: Project) -> None:
    """Upstream throws its history away and begins anew."""
    lead = project.upstream("lead")
    lead.git("checkout", "--quiet", "--orphan", "anew")
    lead.commit({"app.py": lines({2: "anew"})}, "Anew", "v3.0")
    lead.git("branch", "--force", "main", "anew")
    lead.git("tag", "--delete", "v1.0", "v1.1", "v2.0rc1")


def test_a_pin_that_upstream_threw_away_is_kept_in_the_mirror(solo: Project) -> None:
    lead = solo.upstream("lead")
    solo.ok("sync")
    lead.git("checkout", "--quiet", "v1.0")
    lead.commit({"app.py": lines({2: "v3"})}, "Three", "v3.0")
    lead.git("tag", "--delete", "v1.1", "v2.0rc1")
    lead.git("branch", "--force", "main", "v3.0")
    lead.git("reflog", "expire", "--expire=now", "--all")
    lead.git("gc", "--quiet", "--prune=now")
    solo.ok("sync")
    assert solo.pin("lead") == "v3.0"
    assert solo.built("lead", "app.py") == lines({2: "v3", 5: "ours 5"})


def test_a_pin_that_no_ref_of_upstream_reaches_is_asked_for_by_its_id(solo: Project) -> None:
    force_push(solo)
    solo.ok("sync")
    assert solo.pin("lead") == "v3.0"


def test_a_pin_that_is_nowhere_any_more_is_named_with_what_to_do(solo: Project) -> None:
    old = solo.manifest("lead")["pin"]["commit"]
    force_push(solo)
    lead = solo.upstream("lead")
    lead.git("reflog", "expire", "--expire=now", "--all")
    lead.git("gc", "--quiet", "--prune=now")
    done = solo.forkman("sync")
    assert done.code == 1
    assert f"does not have the commit {old}, its pin." in done.out
    assert "--upstream lead=URL" in done.out
    shutil.rmtree(solo.mirror("lead").path)  # of the new history, which shares nothing
    # with a clone that still has it, as colleagues do
    solo.ok("sync", "--upstream", f"lead={solo.branch('lead').path}", "--to", "v1.1")
    assert solo.pin("lead") == "v1.1"


# -- sources -------------------------------------------------------------------------------------


def test_another_address_serves_for_one_run(solo: Project) -> None:
    away = solo.folder / "away"
    shutil.move(solo.upstream("lead").path, away)
    solo.ok("sync", "--upstream", f"lead={away}")
    assert solo.pin("lead") == "v1.1"
    assert solo.manifest("lead")["upstream"]["url"] == "../upstreams/lead"


@pytest.mark.parametrize(
    "url", ["ext::sh -c touch% /tmp/owned", "-oProxyCommand=x", "ssh://-oProxyCommand=x/y", ""]
)
def test_an_address_that_git_would_run_is_refused(solo: Project, url: str) -> None:
    done = solo.forkman("sync", "--upstream", f"lead={url}")
    assert done.code == 2
    assert "Traceback" not in done.err
    solo.edit_manifest("lead", "../upstreams/lead", url)
    assert solo.forkman("sync").code == 2
    assert not (solo.root / ".forkman" / "mirrors").exists()


def test_a_source_that_is_no_repository_of_the_project_is_a_persons_mistake(
    project: Project,
) -> None:
    project.ok("fetch", "lead")
    done = project.forkman("sync", "--upstream", f"lead={project.upstream('engine').path}")
    assert done.code == 1
    assert "lead" in done.out and "another project" in done.out
    assert "engine" in done.out
    assert project.pins()["lead"] == "v1.0"


def test_a_shallow_source_that_has_the_pins_is_enough_and_is_named(solo: Project) -> None:
    solo.ok("sync")
    shutil.rmtree(solo.root / ".forkman")
    shallow, lead = solo.folder / "shallow", solo.upstream("lead")
    lead.commit({"more": "more\n"}, "Two", "v2.0")
    lead.git("clone", "--quiet", "--bare", "--depth=3", lead.path.as_uri(), str(shallow))
    report = solo.report("sync", "--upstream", f"lead={shallow}")
    assert report["landed"] and solo.pin("lead") == "v2.0"
    end = lead.git("rev-parse", "v1.1")[:9]
    assert f"is shallow: its history ends at {end}" in report["forks"]["lead"]["notes"][0]


def test_a_shallow_source_without_the_pin_says_which_commit_is_missing(solo: Project) -> None:
    shallow, lead = solo.folder / "shallow", solo.upstream("lead")
    lead.git("clone", "--quiet", "--bare", "--depth=1", lead.path.as_uri(), str(shallow))
    done = solo.forkman("sync", "--upstream", f"lead={shallow}", "--to", "main")
    assert done.code == 1
    assert f"does not have the commit {lead.git('rev-parse', 'v1.0')}" in done.out


def test_a_host_gives_history_first_and_contents_of_the_pins_only(
    solo: Project, host: Host
) -> None:
    (host.folder / "git").mkdir()
    lead = solo.upstream("lead")
    lead.git("clone", "--quiet", "--bare", str(lead.path), str(host.folder / "git" / "lead"))
    solo.ok("sync", "--upstream", f"lead={host.address}/git/lead")
    assert solo.built("lead", "app.py") == lines({5: "ours 5", 25: "upstream 25"})
    mirror = solo.mirror("lead")
    ahead = mirror.git("rev-parse", "v2.0rc1:app.py")
    missing = mirror.git("rev-list", "--objects", "--all", "--missing=print")
    assert f"?{ahead}" in missing.splitlines()


def archived(project: Project, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader can be reached only as releases on a package index."""
    monkeypatch.setenv("PIP_INDEX_URL", f"{host.address}/simple/")
    text = project.manifest_path("lead").read_text()
    archives = '[archives]\npackage = "lead"\ntag = "v{version}"\npin = "1.0"  # nearest\n[pin]'
    project.manifest_path("lead").write_text(text.replace("[pin]", archives))
    host.publish("lead", "1.0", {"app.py": lines()})
    host.publish("lead", "1.1", {"app.py": lines({25: "upstream 25"})})
    shutil.rmtree(project.upstream("lead").path)


def test_release_archives_are_used_where_git_cannot_reach(
    solo: Project, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(solo, host, monkeypatch)
    report = solo.report("sync")
    assert report["landed"]
    fork = report["forks"]["lead"]
    assert (fork["source"], fork["how"], fork["new"]["tag"]) == (
        "archives", "newest release", "v1.1",
    )  # fmt: skip
    assert "could not be fetched" in fork["notes"][0]
    assert solo.manifest("lead")["archives"]["pin"] == "1.1"
    assert solo.pin("lead") == "v1.0"  # where git is the source, nothing moved
    assert "+ours 5" in solo.export("lead")
    assert "Nothing moved" in solo.ok("sync").out


def test_main_is_the_newest_release_where_only_archives_can_be_reached(
    solo: Project, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(solo, host, monkeypatch)
    report = solo.report("sync", "lead", "--to", "main")
    assert report["landed"]
    assert report["forks"]["lead"]["new"]["tag"] == "v1.1"


def test_archives_fetched_before_are_used_when_the_index_is_away_too(
    solo: Project, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(solo, host, monkeypatch)
    solo.ok("fetch")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple/")
    report = solo.report("sync")
    assert report["forks"]["lead"]["new"]["tag"] == "v1.1"
    assert "What was fetched before is used." in report["forks"]["lead"]["notes"][0]


# -- queues --------------------------------------------------------------------------------------


def branch_queue(project: Project) -> Repo:
    """Keep trainer's queue as a branch, with a merge in it."""
    branch = project.branch("trainer")
    branch.git("checkout", "--quiet", "-b", "topic", "HEAD~1")
    branch.commit({"topic.py": "topic\n"}, "Topic")
    branch.git("checkout", "--quiet", "npu")
    branch.git("merge", "--quiet", "--no-edit", "topic")
    return project.queue_as_branch("trainer")


def test_a_queue_may_be_a_branch_whose_merges_are_left_out_and_named(project: Project) -> None:
    merge = branch_queue(project).git("rev-parse", "npu")
    report = project.report("sync")
    assert report["landed"]
    fork = report["forks"]["trainer"]
    assert [(each["subject"], each["status"]) for each in fork["outcomes"]] == [
        ("Twelve", "already upstream"), ("Four", "applied"), ("Topic", "applied"),
    ]  # fmt: skip
    assert fork["notes"][0].endswith(f"as git rebase does: {merge[:9]}.")
    assert project.built("trainer", "topic.py") == "topic\n"


def test_a_branch_is_pushed_by_the_command_that_the_report_gives(project: Project) -> None:
    fork = branch_queue(project)
    note = project.report("sync")["forks"]["trainer"]["notes"][-1]
    said, _, command = note.partition(": ")
    assert said == "Push its branch npu, before the next sync"
    subprocess.run(command, shell=True, check=True, capture_output=True)
    assert fork.git("log", "--format=%s", "npu").splitlines()[:3] == [
        "Topic", "Four", "Twelve, from the NPU people (#12)",
    ]  # fmt: skip
    report = project.report("sync")
    assert [each["status"] for each in report["forks"]["trainer"]["outcomes"]] == ["applied"] * 2
    assert report["forks"]["trainer"]["notes"] == []


def test_a_branch_that_was_not_pushed_is_asked_for_again(project: Project) -> None:
    branch_queue(project)
    command = project.report("sync")["forks"]["trainer"]["notes"][-1].partition(": ")[2]
    done = project.forkman("sync")
    assert done.code == 1
    assert "does not stand on the pin" in done.out and command in done.out


def test_what_was_pushed_to_a_branch_meanwhile_is_not_to_be_thrown_away(project: Project) -> None:
    fork = branch_queue(project)
    read = fork.git("rev-parse", "npu")
    project.ok("sync")
    clone = project.branch("trainer")
    pushed = clone.commit({"later.py": "later\n"}, "Later")
    clone.git("push", "--quiet", str(fork.path), "npu")

    done = project.forkman("sync")

    assert done.code == 1
    assert "does not stand on the pin" in done.out
    assert f"Somebody pushed to it since that was landed ({read[:9]} → {pushed[:9]})" in done.out
    assert "refs/forkman/states/" not in done.out.partition("git push")[2]
    commands = [line for line in done.out.splitlines() if line.strip().startswith("git ")]
    for command in commands:
        subprocess.run(command, shell=True, check=True, capture_output=True, cwd=clone.path)
    project.ok("sync")
    assert project.built("trainer", "later.py") == "later\n"
    assert project.built("trainer", "topic.py") == "topic\n"


def test_a_branch_that_another_machine_landed_is_pushed_from_there(project: Project) -> None:
    branch_queue(project)
    project.ok("sync")
    shutil.rmtree(project.root / ".forkman")
    done = project.forkman("sync")
    assert done.code == 1
    assert "If a sync on another machine set this pin, push npu from there" in done.out


def test_the_changes_of_a_branch_are_named_by_their_subjects(project: Project) -> None:
    branch_queue(project)
    project.branch("trainer").commit({"four.py": "four\n"}, "Four")
    project.branch("trainer").git("push", "--quiet", "../../forks/trainer.git", "npu")
    report = project.report("sync")
    outcomes = report["forks"]["trainer"]["outcomes"]
    assert [each["change"] for each in outcomes] == ["twelve", "four", "topic", "four-2"]
    assert sorted(path.name for path in (project.root / "exports" / "trainer").iterdir()) == [
        "0001-four.patch", "0002-topic.patch", "0003-four-2.patch",
    ]  # fmt: skip


def test_the_log_of_a_branch_shows_what_the_last_replay_read(project: Project) -> None:
    branch_queue(project)
    done = project.forkman("log", "trainer")
    assert done.code == 2
    assert "its queue is the branch npu of ../forks/trainer.git" in done.err
    assert "forkman sync --dry-run trainer" in done.err
    project.ok("sync", "--dry-run", "trainer")
    rows = project.ok("log", "trainer").out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["twelve", "four", "topic"]


def test_a_branch_that_is_not_there_is_named(project: Project) -> None:
    branch_queue(project)
    project.edit_manifest("trainer", 'ref = "npu"', 'ref = "gone"')
    done = project.forkman("sync")
    assert done.code == 1
    assert "trainer.git has no branch gone." in done.out


def recipe_between_patches(project: Project) -> None:
    """A queue in which a patch before and one after the recipe edit the recipe's own file."""
    lead = project.upstream("lead")
    for tag, name in (("v1.2", "greet.py"), ("v1.3", "greet.py")):
        body = "def hello(you):\n    greet(you)\n" + lines()
        moved = "" if tag == "v1.2" else "# moved down by upstream\n\n\n"
        release(project, tag, {name: moved + body, "Dockerfile": "FROM scratch\n"})
    branch = project.branch("lead")
    branch.git("fetch", "--quiet", "--tags", str(lead.path))
    branch.git("checkout", "--quiet", "--detach", "v1.2")
    folder = project.root / "forks" / "lead"
    for name in [*project.series("lead"), "series"]:
        (folder / name).unlink()
    commit = lead.git("rev-parse", "v1.2")
    project.edit_manifest("lead", lead.git("rev-parse", "v1.0"), commit)
    project.edit_manifest("lead", '"v1.0"', '"v1.2"')
    start = "def hello(you):\n    greet(you)\n"
    project.change("lead", "Before", {"greet.py": start + lines({28: "before"})})
    project.queue("lead", "greeting.py", RECIPE)
    branch.commit(
        {"greet.py": start.replace("greet(", "slime_npu.greet(") + lines({28: "before"})}, "recipe"
    )
    project.change(
        "lead",
        "After",
        {
            "greet.py": start.replace("greet(", "slime_npu.greet(")
            + lines({3: "after", 28: "before"})
        },
    )


def test_a_recipe_is_replayed_between_patches_and_finds_its_place_anew(solo: Project) -> None:
    recipe_between_patches(solo)
    report = solo.report("sync")
    assert solo.pin("lead") == "v1.3"
    outcomes = report["forks"]["lead"]["outcomes"]
    assert [(each["change"], each["status"]) for each in outcomes] == [
        ("before.patch", "applied"), ("greeting.py", "applied"), ("after.patch", "applied"),
    ]  # fmt: skip
    assert outcomes[1]["places"] == ["greet.py:5"]
    assert solo.series("lead") == ["before.patch", "greeting.py", "after.patch"]
    assert "    slime_npu.greet(you)\n" in solo.built("lead", "greet.py")
    assert "after\n" in solo.built("lead", "greet.py")


def test_a_recipe_whose_code_is_gone_is_a_conflict(solo: Project) -> None:
    recipe_between_patches(solo)
    release(solo, "v1.4", {"greet.py": "def hello(you):\n    wave(you)\n" + lines()})
    report = solo.report("sync")
    assert not report["landed"]
    outcome = report["forks"]["lead"]["outcomes"][1]
    assert (outcome["status"], outcome["conflicts"][0]["kind"]) == ("conflict", "anchor lost")
