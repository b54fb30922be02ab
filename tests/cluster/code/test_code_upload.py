"""The code of the ranks on its way to a node: whole, verified, or not at all; harmless when many bring it at once."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from testkit.connections import LocalConnection
from testkit.waiting import wait_for

from cluster.agent.code import check_code, install, install_code
from cluster.agent.messages import code_id_of, code_path
from cluster.code import CodeArchive, CodeError, CodeFolder, build_archive, code_folder, upload_code
from cluster.ssh.hosts import Host
from engine.config.cluster import ClusterConfig

Connect = Callable[[Host], LocalConnection]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    (root / "engine" / "deep").mkdir(parents=True)
    for name in ("__init__", "train", "deep/__init__", "deep/leaf"):
        (root / "engine" / f"{name}.py").write_text(f"NAME = {name!r}\n")
    return root


@pytest.fixture
def archive(sources: Path) -> CodeArchive:
    return build_archive(sources)


@pytest.fixture
def place(tmp_path: Path) -> CodeFolder:
    return CodeFolder(str(tmp_path / "node" / "code"), is_shared=False)


def connect(host: Host) -> LocalConnection:
    return LocalConnection(host.name)


def hosts(count: int = 1) -> list[Host]:
    return [Host(f"n{number}", "127.0.0.1") for number in range(1, count + 1)]


def upload(archive: CodeArchive, place: CodeFolder, count: int = 1) -> None:
    upload_code(hosts(count), archive, place, connect)


def test_equal_sources_give_equal_archives_whatever_their_dates(sources: Path, archive: CodeArchive) -> None:
    for path in sources.rglob("*.py"):
        os.utime(path, (1, 1))
        path.chmod(0o644)
    (sources / "engine" / "__pycache__").mkdir()
    (sources / "engine" / "__pycache__" / "train.pyc").write_bytes(b"old")
    assert build_archive(sources) == archive
    (sources / "engine" / "train.py").write_text("NAME = 'other'\n")
    assert build_archive(sources).code_id != archive.code_id


def test_it_holds_what_ranks_import_which_is_all_that_they_need(tmp_path: Path) -> None:
    place, archive = CodeFolder(str(tmp_path / "code"), is_shared=False), build_archive()
    names = zipfile.ZipFile(io.BytesIO(archive.data)).namelist()
    assert all(name.startswith("engine/") and name.endswith(".py") for name in names)
    upload(archive, place)
    script = "import engine.train, engine.config.settings; print(engine.train.__file__)"
    code = code_path(place.root, archive.code_id)
    environment = {"PYTHONPATH": code, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == f"{code}/engine/train.py", done.stderr


def test_code_is_installed_once_and_then_found(archive: CodeArchive, place: CodeFolder) -> None:
    code = Path(code_path(place.root, archive.code_id))
    assert check_code(f"{__file__}/x", archive.code_id) == f"{__file__}/x: Not a directory"
    assert check_code(str(code), archive.code_id) == "missing"
    upload(archive, place)
    os.utime(code, (1, 1))
    first = code.stat().st_ino
    upload(archive, place)
    assert code.stat().st_ino == first
    assert time.time() - code.stat().st_mtime < 600  # it was used just now
    assert check_code(str(code), archive.code_id) == "good"
    assert (code.stat().st_mode & 0o777, Path(place.root).stat().st_mode & 0o777) == (0o600, 0o700)
    assert list(Path(place.root).iterdir()) == [code]


def link(code: Path) -> None:
    code.unlink()
    code.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    "damage",
    [
        lambda code: code.write_bytes(code.read_bytes()[:-1] + b"x"),
        lambda code: code.write_bytes(code.read_bytes()[:-1]),
        link,
        lambda code: code.chmod(0o666),
    ],
    ids=["changed", "cut off", "linked", "writable"],
)
def test_damaged_code_is_never_used_and_is_repaired(
    archive: CodeArchive, place: CodeFolder, damage: Callable[[Path], object]
) -> None:
    upload(archive, place)
    code = Path(code_path(place.root, archive.code_id))
    damage(code)
    assert check_code(str(code), archive.code_id) not in ("good", "missing")
    upload(archive, place)
    assert check_code(str(code), archive.code_id) == "good"
    assert code.read_bytes() == archive.data


def test_an_archive_that_does_not_arrive_whole_is_refused(archive: CodeArchive, place: CodeFolder) -> None:
    for data in (archive.data[:-40], archive.data[:100], b"nonsense"):
        with pytest.raises(CodeError, match="n1: cannot lay the code of the ranks: the archive"):
            upload(dataclasses.replace(archive, data=data), place)
        assert list(Path(place.root).iterdir()) == []


@pytest.mark.parametrize("is_damaged", [False, True])
def test_many_that_bring_or_repair_it_at_once_leave_one_that_is_good(
    archive: CodeArchive, place: CodeFolder, is_damaged: bool
) -> None:
    code = code_path(place.root, archive.code_id)
    if is_damaged:
        upload(archive, place)
        Path(code).write_bytes(b"")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: install(place.root, archive.code_id, archive.data, str(number)), range(24)))
    assert [str(path) for path in Path(place.root).iterdir()] == [code]
    assert check_code(code, archive.code_id) == "good"


@pytest.mark.needs("root")
def test_a_place_in_which_others_could_change_or_exchange_the_code_is_refused(
    archive: CodeArchive, place: CodeFolder
) -> None:
    upload(archive, place)
    root, code = Path(place.root), code_path(place.root, archive.code_id)
    root.parent.chmod(0o777)
    with pytest.raises(
        CodeError, match=f"n1: .*{root.parent} belongs to root and has mode 0777: .*chmod go-w {root.parent}"
    ):
        upload(archive, place)
    assert check_code(code, archive.code_id) != "good"
    root.parent.chmod(0o1777)
    root.parent.parent.chmod(0o777)  # what is further above is no matter
    assert check_code(code, archive.code_id) == "good"
    os.chown(root.parent, 1, 1)
    assert f"{root.parent} belongs to daemon and has mode 1777" in check_code(code, archive.code_id)
    os.chown(root.parent, 0, 0)
    Path(code).unlink()
    Path(code).mkdir()
    with pytest.raises(CodeError, match=rf"{code}\.part-\w+: Is a directory"):
        upload(archive, place)
    assert list(root.iterdir()) == [Path(code)]


def test_a_place_that_cannot_be_written_is_named_with_all_its_nodes(archive: CodeArchive, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CodeError, match=r"n\[1-3\]: cannot lay the code of the ranks: .*/file"):
        upload(archive, CodeFolder(str(tmp_path / "file" / "code"), is_shared=False), 3)


def test_old_code_goes_and_what_is_new_or_in_use_stays(tmp_path: Path) -> None:
    day, now = 86400.0, time.time()
    names = [f"{number:064d}.zip" for number in range(8)]
    for number, name in enumerate(names):
        (tmp_path / name).touch()
        age = number * day if number > 5 else number * day / 10  # the sixth is one too many, but young
        os.utime(tmp_path / name, (now - age, now - age))
    torn = tmp_path / f"{9:064d}.zip.part-x"
    torn.touch()
    os.utime(torn, (now - 20 * day, now - 20 * day))
    stranger = tmp_path / "notes.txt"
    stranger.write_text("mine")
    os.utime(stranger, (1, 1))
    held = {"PYTHONPATH": str(tmp_path / names[7])}
    with subprocess.Popen(["sleep", "30"], env={**os.environ, **held}) as user:
        try:
            environ = Path(f"/proc/{user.pid}/environ")  # empty while the kernel still loads the program
            wait_for(lambda: str(tmp_path).encode() in environ.read_bytes())
            question = {
                "root": str(tmp_path),
                "code_id": code_id_of(b"new"),
                "folders": [],
                "private": [],
                "nonce": "n",
            }
            assert install_code({**question, "keep": 6, "age_s": day}, b"new") == {"state": "good"}
        finally:
            user.kill()
    new = Path(code_path("", code_id_of(b"new"))).name
    assert {path.name for path in tmp_path.iterdir()} == {*names[:6], names[7], stranger.name, new}


def test_a_shared_folder_gets_it_once_and_one_that_is_not_shared_is_found_out(
    archive: CodeArchive, tmp_path: Path
) -> None:
    place = code_folder(ClusterConfig(shared_folder=str(tmp_path)), "me")
    assert place == CodeFolder(f"{tmp_path}/.burst-me/code", is_shared=True)
    assert code_folder(ClusterConfig(node_folder="/n/"), "me") == CodeFolder("/n/code", is_shared=False)
    upload(archive, place, 3)
    (code,) = Path(place.root).iterdir()
    assert check_code(str(code), archive.code_id) == "good"

    def own_home(host: Host) -> LocalConnection:
        return LocalConnection(host.name, {"HOME": str(tmp_path / host.name)})

    with pytest.raises(CodeError, match="n2: ~/code on it does not hold the code that the first node wrote"):
        upload_code(hosts(2), archive, CodeFolder("~/code", is_shared=True), own_home)


@pytest.fixture
def group_umask() -> Iterator[None]:
    """The umask of systems that give every user a group of its own."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("group_umask")
def test_folders_of_shared_code_are_for_their_user_alone_whatever_the_umask(
    archive: CodeArchive, tmp_path: Path
) -> None:
    place = code_folder(ClusterConfig(shared_folder=str(tmp_path)), "me")
    upload(archive, place)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in (".burst-me", ".burst-me/code")}
    assert modes == {".burst-me": 0o700, ".burst-me/code": 0o700}


def test_shared_folder_of_ours_that_a_group_may_write_is_made_private(archive: CodeArchive, tmp_path: Path) -> None:
    (tmp_path / ".burst-me/code").mkdir(parents=True)
    (tmp_path / ".burst-me").chmod(0o775)
    upload(archive, code_folder(ClusterConfig(shared_folder=str(tmp_path)), "me"))
    assert (tmp_path / ".burst-me").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", [".burst-me/checkpoints", ".burst-me"])
def test_folder_for_checkpoints_that_is_another_users_is_refused(
    archive: CodeArchive, place: CodeFolder, tmp_path: Path, name: str
) -> None:
    wanted = tmp_path / ".burst-me/checkpoints"
    wanted.mkdir(parents=True)
    (tmp_path / name).chmod(0o777)
    os.chown(tmp_path / name, 1, 1)
    with pytest.raises(CodeError, match=f"n1: .*{tmp_path / name} belongs to daemon and has mode 0777"):
        upload_code(hosts(), archive, place, connect, private=[str(wanted)])


def test_folders_for_containers_are_made_first(archive: CodeArchive, place: CodeFolder, tmp_path: Path) -> None:
    wanted = tmp_path / "cache" / "deep"
    for _ in range(2):
        upload_code(hosts(), archive, place, connect, {"n1": (str(wanted),)})
        assert wanted.stat().st_mode & 0o777 == 0o700
