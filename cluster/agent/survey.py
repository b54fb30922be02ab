"""Answers what a launch must know of this node. It changes nothing here."""

import glob
import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import time
from typing import Any, Callable, Optional

from cluster.agent.code import expand
from cluster.agent.folder import holder, safe_name
from cluster.agent.memory import memory_limit_bytes
from cluster.agent.processes import NODE_VARIABLE, RUN_ID_VARIABLE, Helpers, all_pids, read_environ
from cluster.agent.start import lock_folder

_TOOL_S = 20.0
_HASH_S = 10.0
_EDGE_BYTES = 1 << 20
_MAX_FILES = 20000
_HASHED_FILES = 64
_MAX_LISTED = 50
_PORTS = (20000, 30000)  # below those that systems give to outgoing connections
_PYTHON = """
import importlib.util, json, sys
found = {"executable": sys.executable, "version": "%d.%d.%d" % sys.version_info[:3], "modules": {}}
for name in sys.argv[1:]:
    try:
        present = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        present = False
    found["modules"][name] = None
    if present:
        found["modules"][name] = ""
        try:
            import importlib.metadata
            found["modules"][name] = importlib.metadata.version(name)
        except Exception:
            pass
print("\\n" + json.dumps(found))
"""


def survey(question: dict[str, Any]) -> dict[str, Any]:
    """Facts by name; what cannot be found out says why under the same name with "_problem"."""
    home = os.path.expanduser("~")
    root = expand(question["root"], home) or os.path.join(home, ".burst")
    code_root = expand(question["code_root"], home) or os.path.join(root, "code")
    found: dict[str, Any] = {
        "home": home,
        "user": _user(),
        "uid": os.getuid(),
        "gid": os.getgid(),
        "groups": sorted(os.getgroups()),
        "root": root,
        "code_root": code_root,
        "has_infiniband_devices": os.path.isdir("/dev/infiniband"),
    }
    parts: dict[str, Callable[[], Any]] = {
        "python": lambda: find_python(expand(question["python"], home), question["modules"]),
        "gpus": find_gpus,
        "gpu_processes": find_gpu_processes,
        "memory_bytes": find_memory,
        "disk": lambda: find_disk(root),
        "port": lambda: find_port(question["port"]),
        "lock": lambda: find_lock(question["node"]),
        "runs": lambda: find_runs(question["node"]),
        "data": lambda: find_data(question["data"], home),
        "engine": lambda: find_engine(question["engine"]),
        "image": lambda: find_image(question["engine"], question["image"]),
    }
    for name, find in parts.items():
        key, value = attempt(name, find)
        found[key] = value
    return found


def attempt(name: str, find: Callable[[], Any]) -> tuple[str, Any]:
    """What to put under which name: one fact that is strange must not hide the others."""
    try:
        return name, find()
    except Problem as problem:
        return name + "_problem", str(problem)
    except Exception as error:
        return name + "_problem", f"{type(error).__name__}: {error}"


class Problem(Exception):
    """Why a fact is not known."""


def find_python(given: Optional[str], modules: list[str]) -> dict[str, Any]:
    """The Python of the ranks: its path, version, and the versions of modules (None: not there), none imported."""
    name = given or "python3"
    status, out, said = run([name, "-c", _PYTHON, *modules])
    try:
        return dict(json.loads(out.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        raise Problem("{}: {}".format(name, said or f"ended with {status}")) from None


def find_gpus() -> list[dict[str, Any]]:
    """Name and memory of every GPU; none without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    status, out, said = run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    if status:
        if "No devices were found" in out + said:
            return []
        raise Problem(said or f"nvidia-smi ended with {status}")
    rows = [line.rpartition(",") for line in out.splitlines() if line.strip()]
    return [{"name": name.strip(), "memory_mib": int(mib) if mib.strip().isdigit() else 0} for name, _, mib in rows]


def find_gpu_processes() -> list[dict[str, Any]]:
    """Who computes on the GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "pid,used_memory,process_name"
    status, out, _ = run(["nvidia-smi", "--query-compute-apps=" + fields, "--format=csv,noheader,nounits"])
    found = []
    for line in out.splitlines() if not status else []:
        cells = [cell.strip() for cell in line.split(",", 2)]
        if len(cells) == 3 and cells[0].isdigit():
            found.append({"pid": int(cells[0]), "mib": cells[1], "name": cells[2], "user": _owner(int(cells[0]))})
    return found[:_MAX_LISTED]


def find_memory() -> int:
    """RAM, or the limit of the control group where that is less."""
    limit = memory_limit_bytes()
    if limit is None:
        raise Problem("/proc/meminfo does not tell")
    return limit


def find_disk(root: str) -> int:
    """Free bytes where `root` is or will be, and we may write."""
    folder = os.path.abspath(root)
    while not os.path.isdir(folder):
        if os.path.lexists(folder):
            raise Problem(f"{folder} is not a folder")
        folder = os.path.dirname(folder)
    found = os.statvfs(folder)
    if found.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK | os.X_OK):
        raise Problem(f"{folder} is not writable")
    if not found.f_favail and found.f_files:
        raise Problem(f"{folder} has no free inodes")
    return found.f_bavail * found.f_frsize


def find_port(wanted: Optional[int]) -> int:
    """A port that nobody listens on: the wanted one, or one of our choice."""
    candidates = [wanted] if wanted else [random.randrange(*_PORTS) for _ in range(200)]
    for port in candidates:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("0.0.0.0", port))
                listener.listen(1)  # two sockets with SO_REUSEADDR may share a port, but not listen
                return port
            except OSError as error:
                reason = error.strerror
    raise Problem(f"port {wanted}: {reason}" if wanted else f"no free port: {reason}")


def find_lock(node: str) -> Optional[dict[str, str]]:
    """Who holds this node, as the lock's file says; None when nobody does."""
    path = os.path.join(lock_folder(), safe_name(node) + ".lock")
    try:
        inode = os.lstat(path).st_ino
    except OSError:
        return None
    return {"run_id": "?", **holder(path)} if _is_locked(inode) else None


def _is_locked(inode: int) -> bool:
    """By the kernel's table: taking the lock to find out could get in somebody's way."""
    with open("/proc/locks") as file:
        return any(
            line.split()[1] == "FLOCK" and line.rstrip().split(":")[-1].split()[0] == str(inode) for line in file
        )


def find_runs(node: str) -> list[dict[str, Any]]:
    """Processes of runs of ours on this node; one that has ended shows no environment."""
    found = []
    for pid in all_pids():
        environ = read_environ(pid) or {}
        run_id = environ.get(RUN_ID_VARIABLE.encode())
        if run_id and environ.get(NODE_VARIABLE.encode()) == node.encode():
            found.append({"pid": pid, "run_id": run_id.decode("utf-8", "replace")})
    return found[:_MAX_LISTED]


def find_data(entries: list[dict[str, Any]], home: str) -> list[dict[str, Any]]:
    """Per entry of data.paths: its files' number, bytes and a hash of names, sizes and edges, or what is wrong."""
    deadline = time.time() + _HASH_S
    return [_look_at(expand(entry["path"], home) or "", entry["suffixes"], deadline) for entry in entries]


def _look_at(path: str, suffixes: list[str], deadline: float) -> dict[str, Any]:
    found: dict[str, Any] = {"path": path}
    try:
        files = _list_files(path, suffixes)
        if not files:
            return dict(found, problem="no such file or folder" if not os.path.exists(path) else "holds no such files")
        digest, total = hashlib.sha256(), 0
        base = path if os.path.isdir(path) else os.path.dirname(path)
        for number, name in enumerate(files):
            size = os.stat(name).st_size
            total += size
            digest.update(f"{os.path.relpath(name, base)} {size}\n".encode("utf-8", "surrogateescape"))
            if number < _HASHED_FILES and time.time() < deadline:
                digest.update(_edges(name, size))
            elif not os.access(name, os.R_OK):
                raise PermissionError(13, "Permission denied", name)
        late = time.time() > deadline
        return dict(found, files=len(files), bytes=total, digest=None if late else digest.hexdigest())
    except OSError as error:
        return dict(found, problem=f"{error.filename or path}: {error.strerror}")


def _list_files(path: str, suffixes: list[str]) -> list[str]:
    """As the trainer will list them: a file, the files of a folder that are not hidden, or what a pattern matches."""
    if os.path.isdir(path):
        found: list[str] = []
        for parent, names, files in os.walk(path):
            names[:] = sorted(name for name in names if not name.startswith("."))
            wanted = [name for name in files if not suffixes or name.endswith(tuple(suffixes))]
            found += [os.path.join(parent, name) for name in sorted(wanted) if not name.startswith(".")]
            if len(found) > _MAX_FILES:
                break
        return found[:_MAX_FILES]
    if os.path.lexists(path) or not any(character in path for character in "*?["):
        return [path] if os.path.isfile(path) else []
    return sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))[:_MAX_FILES]


def _edges(path: str, size: int) -> bytes:
    """A hash of the first and the last MiB."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(_EDGE_BYTES))
        if size > _EDGE_BYTES:
            file.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    return digest.digest()


def find_engine(command: list[str]) -> bool:
    """Whether a container engine is asked for, and answers."""
    if not command:
        return False
    status, out, said = run([*command, "version", "--format", "{{json .}}"])
    try:
        server = json.loads(out).get("Server") if not status else None
    except (ValueError, AttributeError):
        server = None
    if not server:
        raise Problem(said or f"{command[0]} ended with {status}")
    return True


def find_image(command: list[str], image: Optional[str]) -> Optional[str]:
    """The identity of the run's image; None when the node has no such image, or none is asked for."""
    if not command or not image:
        return None
    from cluster.image.node.identity import image_identity

    status, out, said = run([*command, "image", "inspect", "--", image])
    if status:
        if "no such image" in said.lower():
            return None
        raise Problem(said or f"{command[0]} ended with {status}")
    return image_identity(json.loads(out)[0])


def run(argv: list[str]) -> tuple[int, str, str]:
    """(exit code, output, the last of stderr in one line) of a tool; 127 when there is none."""
    try:
        done = Helpers().run(argv, _TOOL_S)
    except subprocess.TimeoutExpired:
        return 124, "", f"{argv[0]} did not answer within {_TOOL_S:.0f} s"
    except OSError as error:
        return 127, "", f"cannot run {argv[0]}: {error.strerror}"
    said = " ".join(done.stderr.decode("utf-8", "replace").split())
    return done.returncode, done.stdout.decode("utf-8", "replace"), said[-300:]


def _user() -> str:
    return _name_of(os.getuid())


def _owner(pid: int) -> str:
    try:
        return _name_of(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return "?"


def _name_of(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
