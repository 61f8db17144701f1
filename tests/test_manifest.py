"""Manifests: what they hold, how mistakes in them are told, what a new pin changes."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rebase import address
from rebase import manifest as m
from rebase.errors import ExitCode, UsageError
from rebase.git import ObjectId
from rebase.outcome import Pin

ROOT = Path(__file__).parent.parent
ID, OTHER = ObjectId("1" * 40), ObjectId("abcdef0123" * 4)

LEADER = f"""\
[upstream]
url = "https://git.example/lead.git"
releases = {{ tags = 'v(?P<version>.+)' }}
[pin]
commit = "{ID}"
tag = "v1.0"
[queue]
path = "forks/lead"
[export]
name = "lead.patch"
"""
FOLLOWER = f"""\
# Why this fork is here.
[upstream]
url = "git@git.example:group/engine.git"   # scp-like
releases = {{ tags = 'core_v(?P<version>.+)' }}

[archives]
package = "engine-core"
tag = "core_v{{version}}"
prefix = "python"
pin = '0.16.0' # the nearest

# Between releases.
[pin]
commit = '{ID}' # branch dev

# The image says it.
[follow]
fork = "lead"
file = "docker/Dockerfile"
pattern = '^ARG ENGINE=(\\S+)$'

[[layers]]
fork = "lead"
path = "docker/patch/{{}}"
order = {{ file = "docker/Dockerfile", pattern = ' (engine[\\w-]*\\.patch)' }}
patches = [
    # the first
    {{ path = "docker/patch/engine.patch", blob = "{ID}" }}, # so far alone
]

[queue]
url = "ssh://git.example/fork.git"
ref = "npu"

[export]
name = "engine.patch"
"""
STACK = 'leader = "lead"\n[runtime]\ncann = "8.5.0"\ntriton-ascend = "*"\n'


@pytest.fixture
def project(tmp_path):
    """A project of two forks; the test breaks what it wants to see told."""
    write(tmp_path, stack=STACK, lead=LEADER, engine=FOLLOWER)
    return tmp_path


def write(root, **files):
    (root / "manifests").mkdir(exist_ok=True)
    for name, content in files.items():
        (root / "manifests" / f"{name}.toml").write_text(content)


def fork(name, *, follow=None, layer=None):
    text = LEADER.replace("lead", name)
    if follow:
        text += f"[follow]\nfork = '{follow}'\nfile = 'F'\npattern = '(x)'\n"
    if layer:
        text += f"[[layers]]\nfork = '{layer}'\npath = 'p'\n"
        text += f"patches = [{{ path = 'p', blob = '{ID}' }}]\n"
    return text


def parse(text, name="engine"):
    return m.parse(text.encode(), Path(f"/project/manifests/{name}.toml"))


def mistakes(call, *args):
    with pytest.raises(UsageError) as raised:
        call(*args)
    assert raised.value.exit_code is ExitCode.USAGE
    return raised.value.what.splitlines()


# What a manifest holds


def test_the_audit_names_files_and_folders():
    assert parse(f'{LEADER}[audit]\npaths = ["pkg", "train.py"]\n').audit == ("pkg", "train.py")
    assert parse(LEADER).audit == ()


def test_a_manifest_is_read_into_frozen_data():
    engine = parse(FOLLOWER)
    assert engine.fork == "engine"
    assert engine.pin == Pin(ID)
    assert engine.archives == m.Archives("engine-core", "core_v{version}", "0.16.0", "python")
    assert engine.archives.tag_of("0.17.1") == "core_v0.17.1"
    assert engine.queue == m.QueueBranch("ssh://git.example/fork.git", "npu")
    assert engine.layers[0].patches == (m.LayerPatch("docker/patch/engine.patch", ID),)
    assert engine.export == "engine.patch"
    with pytest.raises(dataclasses.FrozenInstanceError):
        engine.pin = Pin(OTHER)


def test_the_project_lists_the_leader_first_and_each_fork_after_what_it_needs(tmp_path):
    write(
        tmp_path,
        stack=STACK,
        lead=LEADER,
        alpha=fork("alpha", follow="zulu"),
        beta=fork("beta", layer="alpha"),
        gamma=fork("gamma"),
        zulu=fork("zulu", follow="lead"),
    )
    project = m.load(tmp_path)
    assert list(project.forks) == ["lead", "gamma", "zulu", "alpha", "beta"]
    assert dict(project.stack.runtime) == {"cann": "8.5.0", "triton-ascend": "*"}


def test_hidden_files_and_other_files_beside_the_manifests_are_none(project):
    (project / "manifests" / ".engine.toml").write_text("not TOML")
    (project / "manifests" / "engine.toml~").write_text("not TOML")
    (project / "manifests" / "README.md").write_text("not TOML")
    assert list(m.load(project).forks) == ["lead", "engine"]


def test_the_root_is_found_from_any_folder_below_it(project, monkeypatch):
    below = project / "forks" / "lead"
    below.mkdir(parents=True)
    assert m.find_root(below) == project
    monkeypatch.chdir(below)
    assert m.find_root(Path()) == project


def test_outside_a_project_it_is_said_what_was_looked_for(tmp_path):
    [said] = mistakes(m.find_root, tmp_path)
    assert str(tmp_path) in said and "manifests/stack.toml" in said


# Mistakes


def test_all_mistakes_of_all_files_come_at_once(project):
    write(
        project,
        stack=STACK.replace('"8.5.0"', "8.5"),
        lead=LEADER.replace(ID, "abc").replace('tag = "v1.0"', 'tga = "v1.0"'),
        engine=FOLLOWER.replace("[export]", "[export"),
        third=fork("third", follow="leed").replace("path =", "paths ="),
    )
    assert mistakes(m.load, project) == [
        "manifests/engine.toml: Expected ']' at the end of a table declaration"
        " (at line 35, column 8)",
        "manifests/lead.toml: pin.commit: 'abc' is no full object id; 40 hexadecimal digits, "
        "as git rev-parse prints them",
        "manifests/lead.toml: pin.tga: no such key; did you mean tag?",
        "manifests/stack.toml: runtime.cann: 8.5 is not a text in quotes",
        "manifests/third.toml: queue.paths: no such key; did you mean path?",
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (f"'{ID}'", f"'{ID[:39]}A'", "pin.commit: '1111"),
        (f"commit = '{ID}'", "", "pin.commit: missing; a text in quotes is needed here"),
        (f"'{ID}'", f"'{ID}'\ntag='-x'", "pin.tag: '-x' is no name that git"),
        (f"'{ID}'", f"'{ID}'\ntag='a..b'", "pin.tag: 'a..b' is no name that git"),
        ('ref = "npu"', 'ref = "npu.lock"', "queue.ref: 'npu.lock'"),
        ('[export]\nname = "engine.patch"', "", "export: missing; a table of name is needed here"),
        ('ref = "npu"', "", "queue: needs path, or url and ref"),
        ('ref = "npu"', 'ref = "npu"\npath = "forks/engine"', "queue: needs path, or url and ref"),
        ("{ tags =", "{ prereleases = 1, tags =", "prereleases: 1 is not true or false"),
        ("{ tags =", "{ branches = '(?P<version>x)', tags =", "releases: needs tags or branches"),
        ("(?P<version>", "(", "upstream.releases.tags: 'core_v(.+)' has no group (?P<version>"),
        ("(?P<version>", "(?P<version", "is no regular expression"),
        ("(\\S+)", "\\S+", "follow.pattern: '^ARG ENGINE=\\\\S+$' has not one group"),
        ("(\\S+)", "(\\S)(\\S+)", "has not one group"),
        ('fork = "lead"\nfile', 'fork = "engine"\nfile', "follow.fork: 'engine' is no fork"),
        ('fork = "lead"\nfile', 'fork = "laed"\nfile', "did you mean lead?"),
        ('fork = "lead"\npath', 'fork = "nobody"\npath', "layers[0].fork: 'nobody'"),
        ("docker/patch/{}", "docker/patch", "layers[0]: path 'docker/patch' needs one {}"),
        ("docker/patch/{}", "docker/{}/{}", "layers[0]: path 'docker/{}/{}' needs one {}"),
        ("order =", "# order =", "no order says what stands there"),
        ("docker/patch/engine", "elsewhere/engine", "which path 'docker/patch/{}' does not make"),
        ("docker/patch/engine", "docker/patch/../x", "patches[0].path: 'docker/patch/../x.patch'"),
        ('file = "docker/Dockerfile"\n', 'file = "/etc/passwd"\n', "follow.file: '/etc/passwd'"),
        ('file = "docker/Dockerfile"\n', 'file = ".GIT/config"\n', "follow.file: '.GIT/config'"),
        ('"core_v{version}"', '"core_v"', "archives.tag: 'core_v' is no tag for every release"),
        ('"core_v{version}"', '"v{version}"', "archives.tag: makes 'v0.16.0' of 0.16.0, which is"),
        ("'0.16.0'", "'newest'", "archives.pin: 'newest' is no version"),
        ('"engine-core"', '"-r/etc/passwd"', "archives.package: '-r/etc/passwd'"),
        ('"engine.patch"', '"../engine.patch"', "export.name: '../engine.patch' is no name"),
        ('"engine.patch"', '"lead.patch"', "is engine's already"),
        ("[[layers]]", "[layers]", "layers: {'fork': 'lead'"),
        ("[archives]", "[audit]\n[archives]", "audit.paths: missing; an array is needed here"),
        ("[archives]", "[audit]\npaths = ['a/']\n[archives]", "audit.paths[0]: 'a/' is no path"),
        ("[archives]", "[audit]\npaths = 'a'\n[archives]", "audit.paths: 'a' is not an array"),
        ("[archives]", "[archives]\n\"a\\u001b[31m\" = 1", "archives.'a\\x1b[31m': no such key"),
    ],
)  # fmt: skip
def test_a_mistake_names_file_and_key_and_what_would_be_right(project, old, new, said):
    assert old in FOLLOWER
    write(project, engine=FOLLOWER.replace(old, new, 1))
    [line] = mistakes(m.load, project)
    assert line.startswith("manifests/") and said in line and line.isprintable()


@pytest.mark.parametrize("path", ["/abs", "../out", "forks/../..", "forks", "docs/x", "forks/.git"])
def test_a_queue_is_a_folder_under_forks(project, path):
    write(project, lead=LEADER.replace("forks/lead", path))
    [line] = mistakes(m.load, project)
    assert line.startswith(f"manifests/lead.toml: queue.path: '{path}' is no folder for a queue")


def test_a_queue_that_a_symbolic_link_leads_out_of_the_project_is_refused(project, tmp_path):
    (project / "forks").mkdir()
    (project / "forks" / "lead").symlink_to("/tmp")
    [line] = mistakes(m.load, project)
    assert "queue.path" in line and "symbolic link" in line


def test_two_forks_do_not_share_a_queue(project):
    write(project, other=fork("other").replace("forks/other", "forks/lead"))
    [line] = mistakes(m.load, project)
    assert line == (
        "manifests/other.toml: queue.path: forks/lead is lead's already; each fork has its own"
    )


def test_forks_that_wait_for_each_other_are_named(project):
    write(project, a=fork("a", follow="b"), b=fork("b", layer="a"))
    [line] = mistakes(m.load, project)
    assert "a → b → a" in line or "b → a → b" in line


def test_the_leader_follows_nobody_and_exists(project):
    write(project, lead=fork("lead", follow="engine"))
    assert any("lead leads" in line for line in mistakes(m.load, project))
    write(project, stack=STACK.replace("lead", "laed", 2).replace("laeder", "leader"), lead=LEADER)
    [line] = mistakes(m.load, project)
    assert line == (
        "manifests/stack.toml: leader: 'laed' is no fork that fits here; did you mean lead?"
    )


def test_a_missing_stack_and_a_wrong_file_name_are_told(project):
    (project / "manifests" / "stack.toml").unlink()
    write(project, Third=fork("third"))
    lines = mistakes(m.load, project)
    assert len(lines) == 2
    assert lines[0].startswith("manifests/Third.toml: the name of the file is no slug")
    assert lines[1].startswith("manifests/stack.toml: missing")


def test_bytes_that_are_no_utf8_are_told_with_their_line(project):
    (project / "manifests" / "lead.toml").write_bytes(b"# ok\n# caf\xe9\n")
    assert mistakes(m.load, project) == [
        "manifests/lead.toml: line 2 is not UTF-8, which TOML is written in"
    ]


# Addresses


@pytest.mark.parametrize(
    "url",
    [
        "https://git.example/a.git",
        "http://127.0.0.1:8080/a.git",
        "ssh://git@git.example:2222/a",
        "git@git.example:a/b.git",
        "host:a",
        "git@[::1]:a/b.git",
        "file:///srv/a.git",
        "/srv/a b.git",
        "../a.git",
        "mirrors/x:y.git",
    ],
)
def test_addresses_git_may_be_given(url):
    address.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ext::sh -c true",
        "EXT::x",
        "fd::17",
        "https::https://git.example/a",
        "--upload-pack=touch x",
        "-x",
        "ssh://-oProxyCommand=x/a",
        "ssh://git@-oProxyCommand=x/a",
        "git@-oProxyCommand=x:a",
        "host:-x",
        "ftp://git.example/a",
        "https:///a",
        "a\nb",
        "a\x1b[31m",
    ],
)
def test_addresses_that_run_programs_or_pass_for_options_are_refused(url):
    [said] = mistakes(address.check, url)
    assert said.isprintable()


def test_a_relative_path_starts_at_its_base(tmp_path):
    assert address.locate("../a.git", tmp_path) == f"{tmp_path}/../a.git"
    for url in ("/a.git", "git@host:a.git", "https://host/a", "file:///a"):
        assert address.locate(url, tmp_path) == url


# Releases


def test_releases_sort_as_pep_440_says():
    names = ["core_v0.16.0", "core_v0.15.0rc7", "core_v0.15.0", "core_v0.9.0", "core_v0.15.0rc10"]
    others = ["v0.17.0", "core_r0.18.0", "core_v0.17.0_x", "xcore_v1.0", "core_v"]
    assert m.releases(parse(FOLLOWER), names + others) == [
        "core_v0.9.0", "core_v0.15.0", "core_v0.16.0",
    ]  # fmt: skip
    assert m.releases(parse(FOLLOWER), names + others, prereleases=True) == [
        "core_v0.9.0", "core_v0.15.0rc7", "core_v0.15.0rc10", "core_v0.15.0", "core_v0.16.0",
    ]  # fmt: skip


def test_a_post_release_comes_after_its_release_and_a_beta_is_no_release():
    lead = parse(LEADER)
    names = ["v0.5.12.post1", "v0.5.12", "v0.5.9", "v0.6.0.beta", "v0.6.0.dev1"]
    assert m.releases(lead, names) == ["v0.5.9", "v0.5.12", "v0.5.12.post1"]
    assert m.newest(lead, names) == "v0.5.12.post1"
    assert m.newest(lead, names, prereleases=True) == "v0.6.0.beta"
    assert m.newest(lead, ["main"]) is None


def test_branches_can_be_the_releases_and_prereleases_can_be_the_rule():
    text = LEADER.replace(
        "tags = 'v(?P<version>.+)'", "branches = 'core_r(?P<version>.+)', prereleases = true"
    )
    mind = parse(text)
    assert mind.upstream.releases.refs == "branches"
    assert m.newest(mind, ["core_r0.9.0", "core_r0.18.0", "core_r0.19.0rc1"]) == "core_r0.19.0rc1"
    assert m.newest(mind, ["core_r0.18.0", "core_r0.19.0rc1"], False) == "core_r0.18.0"


@given(st.permutations(["v1.0", "v1.0.0", "v1", "v1.0+local.2", "v1.0+local.1", "v0.9"]))
@settings(max_examples=20)
def test_equal_versions_have_one_order(names):
    assert m.releases(parse(LEADER), names) == [
        "v0.9", "v1", "v1.0", "v1.0.0", "v1.0+local.1", "v1.0+local.2",
    ]  # fmt: skip


# Following, and layers


def test_a_followed_file_names_the_pin():
    content = b"FROM x\nARG ENGINE=core_v0.17.0\nRUN git checkout ${ENGINE}\n# \xff\n"
    assert m.followed(parse(FOLLOWER), content) == "core_v0.17.0"
    assert m.followed(parse(FOLLOWER), content * 2) == "core_v0.17.0"  # twice the same is one


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"ARG OTHER=1\n", "nothing there matches '^ARG ENGINE=(\\\\S+)$'"),
        (b"ARG ENGINE=a1\nARG ENGINE=b2\n", "finds 'a1', 'b2' there, not one"),
        (b"ARG ENGINE=--upload-pack=x\n", "it says '--upload-pack=x'"),
        (b"ARG ENGINE=a..b\n", "it says 'a..b'"),
        (b"ARG ENGINE=a\x1b[31m\n", "it says 'a\\x1b[31m'"),
    ],
)
def test_a_followed_file_that_does_not_name_one_revision_is_told(content, said):
    [line] = mistakes(m.followed, parse(FOLLOWER), content)
    assert line.startswith("engine follows lead's docker/Dockerfile") and said in line
    assert line.isprintable()


@pytest.mark.parametrize(
    ("value", "revision"),
    [
        ("nightly-dev-20260107-dce8b060", "dce8b060"),
        ("v0.5.9", "v0.5.9"),
        ("v0.5.12.post1-cu129", "v0.5.12.post1"),
        ("v0.5.0rc0-cu126", "v0.5.0rc0"),
    ],
)
def test_sglang_is_found_in_each_form_slime_has_written_it(value, revision):
    sglang = m.load(ROOT).forks["sglang"]
    assert m.followed(sglang, f"ARG SGLANG_IMAGE_TAG={value}\nFROM x\n".encode()) == revision


def test_an_image_tag_of_an_unknown_form_is_not_guessed():
    sglang = m.load(ROOT).forks["sglang"]
    assert mistakes(m.followed, sglang, b"ARG SGLANG_IMAGE_TAG=latest\n")


def test_megatron_never_follows_a_branch():
    megatron = m.load(ROOT).forks["megatron"]
    for revision in (ID, "core_v0.14.0"):
        assert m.followed(megatron, f"ARG MEGATRON_COMMIT={revision}\n".encode()) == revision
    assert mistakes(m.followed, megatron, b"ARG MEGATRON_COMMIT=main\n")


def test_a_layer_without_an_order_is_one_path():
    [layer] = parse(fork("x", layer="lead")).layers
    assert m.layer_paths(layer, None) == ["p"]


def test_a_layer_of_several_patches_has_them_in_the_order_they_are_applied():
    [layer] = parse(FOLLOWER).layers
    one = b"COPY patch/engine.patch /x/\nRUN git apply engine.patch && rm engine.patch\n"
    several = b"COPY engine*.patch /x/\nfor p in engine.patch engine-b.patch engine-a.patch; do\n"
    assert m.layer_paths(layer, one) == ["docker/patch/engine.patch"]
    assert m.layer_paths(layer, several) == [
        "docker/patch/engine.patch",
        "docker/patch/engine-b.patch",
        "docker/patch/engine-a.patch",
    ]


def test_an_order_that_names_nothing_or_leads_elsewhere_is_told():
    [layer] = parse(FOLLOWER.replace("' (engine[\\w-]*\\.patch)'", "'apply (\\S+)'")).layers
    [line] = mistakes(m.layer_paths, layer, b"FROM x\n")
    assert "lead's docker/Dockerfile" in line and "apply" in line
    [line] = mistakes(m.layer_paths, layer, b"git apply ../../.git/hooks/x\n")
    assert "docker/patch/../../.git/hooks/x" in line


# A new pin

ids = st.text("0123456789abcdef", min_size=40, max_size=40).map(ObjectId)
tags = st.none() | st.from_regex(r"[a-zé'][a-z0-9\"'/.]{0,8}[a-z0-9]", fullmatch=True).filter(
    lambda tag: not any(bad in tag for bad in ("..", "//", "/.", ".lock"))
)
patch_lists = st.lists(
    st.builds(lambda i, blob: m.LayerPatch(f"docker/patch/e{i}.patch", blob), st.integers(0), ids),
    min_size=1,
    max_size=4,
    unique_by=lambda patch: patch.path,
)


def comments(text):
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


@given(ids, tags, patch_lists, st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=60)
def test_a_new_pin_changes_the_pin_and_nothing_else(commit, tag, patches, newline):
    text = FOLLOWER.replace("\n", newline)
    before = parse(text)
    written = m.with_pin(text.encode(), Pin(commit, tag), [patches], archive="0.17.0").decode()
    assert before.archives
    assert parse(written) == dataclasses.replace(
        before,
        pin=Pin(commit, tag),
        archives=dataclasses.replace(before.archives, pin="0.17.0"),
        layers=(dataclasses.replace(before.layers[0], patches=tuple(patches)),),
    )
    kept = [c for c in comments(text) if len(patches) == 1 or c not in SAID_OF_PATCHES]
    assert comments(written) == kept
    again = m.with_pin(written.encode(), Pin(commit, tag), [patches], archive="0.17.0").decode()
    assert again == written


SAID_OF_PATCHES = [" the first", " so far alone"]  # goes with the list it was said of


def test_the_same_pin_keeps_every_byte():
    for text in (FOLLOWER, LEADER):
        read = parse(text)
        layers = [layer.patches for layer in read.layers]
        assert m.with_pin(text.encode(), read.pin, layers).decode() == text


def test_only_the_lines_of_the_pin_change_and_quotes_stay():
    written = m.with_pin(FOLLOWER.encode(), Pin(OTHER), archive="0.17.0").decode()
    assert written == FOLLOWER.replace(f"'{ID}'", f"'{OTHER}'").replace("'0.16.0'", "'0.17.0'")


def test_a_tag_is_set_beside_the_commit_and_goes_with_it():
    with_tag = m.with_pin(FOLLOWER.encode(), Pin(OTHER, "core_v0.17.0")).decode()
    assert f"commit = '{OTHER}' # branch dev\ntag = \"core_v0.17.0\"\n" in with_tag
    assert m.with_pin(with_tag.encode(), Pin(ID)).decode() == FOLLOWER
    assert 'tag = "v1.1"' in m.with_pin(LEADER.encode(), Pin(OTHER, "v1.1")).decode()


@pytest.mark.parametrize(
    ("form", "tagged"),
    [
        (f"pin = {{ commit = '{ID}' }} # c\n", f"pin = {{ commit = '{ID}',  tag = \"v2\"}} # c\n"),
        (f"pin.commit = '{ID}' # c\n", f"pin.commit = '{ID}' # c\npin.tag = \"v2\"\n"),
    ],
)
def test_however_the_pin_is_written_a_tag_finds_its_place(form, tagged):
    pinned = LEADER[LEADER.index("[pin]") : LEADER.index("[queue]")]
    text = form + LEADER.replace(pinned, "# the queue\n")
    written = m.with_pin(text.encode(), Pin(ID, "v2")).decode()
    assert written == text.replace(form, tagged)
    assert parse(written).pin == Pin(ID, "v2")


def test_a_new_tag_keeps_a_file_without_final_newline_and_its_line_ends():
    rest, pinned = LEADER.split("[pin]")[0], f"[pin]\r\ncommit = '{ID}'"
    tail = LEADER[LEADER.index("[queue]") :].replace("\n", "\r\n")
    text = rest.replace("\n", "\r\n") + tail + pinned
    for ends in ("", "\r\n"):
        written = m.with_pin((text + ends).encode(), Pin(ID, "v2")).decode()
        assert parse(written).pin == Pin(ID, "v2")
        assert written.startswith(text) and written.endswith(f'tag = "v2"{ends}')


def test_patches_without_a_layer_are_a_mistake_of_the_caller():
    with pytest.raises(ValueError):
        m.with_pin(LEADER.encode(), layers=[[m.LayerPatch("p", ID)]])


# The five


def test_the_manifests_of_this_project_are_right():
    project = m.load(ROOT)
    assert next(iter(project.forks)) == project.stack.leader == "slime"
    assert {"slime", "sglang", "megatron", "megatron-bridge", "mindspeed"} <= set(project.forks)
    for manifest in project.forks.values():
        text = manifest.path.read_bytes()
        layers = [layer.patches for layer in manifest.layers]
        assert m.with_pin(text, manifest.pin, layers) == text
        assert manifest.upstream.url.startswith("https://")


def test_reading_manifests_loads_neither_git_libraries_nor_writers():
    code = (
        "import sys, pathlib, rebase.manifest as m; m.load(pathlib.Path(sys.argv[1]));"
        "print(*sorted({'pygit2', 'git', 'rich', 'tomlkit', 'pydantic', 'click'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code, ROOT], capture_output=True, check=True)
    assert done.stdout.split() == []
