"""How code travels: modules as one text behind its length, and the few lines that make modules of it again.

Python 3.9, standard library only. What arrives is never written to the node's disk.
"""

import json
import os
from collections.abc import Sequence

OLD_PYTHON = "burst needs Python 3.9 or newer as python3"
_BOOT = """
import json, os, sys, types
if sys.version_info < (3, 9): sys.exit("OLD_PYTHON")
def take(size):
    parts = b""
    while len(parts) < size:
        data = os.read(0, size - len(parts))
        if not data: sys.exit(1)
        parts += data
    return parts
carried = take(int(take(10)))
for name, source in json.loads(carried.decode("ascii")):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""


def boot_code(module: str, call: str = "main()") -> str:
    """Python for `python3 -c` that reads `packed` modules from stdin and then calls `call` of `module`.

    `call` may name `carried`, the bytes that came: so the code can be handed on to another process.
    """
    return (_BOOT.replace("OLD_PYTHON", OLD_PYTHON) + f'sys.modules["{module}"].{call}').strip()


def pack_modules(names: Sequence[str], root: str) -> bytes:
    """The sources of modules `names` below folder `root`, each after those that it imports."""
    sources = []
    for name in names:
        with open(os.path.join(root, *name.split(".")) + ".py", encoding="utf-8") as file:
            sources.append((name, file.read()))
    return json.dumps(sources).encode("ascii")


def with_length(body: bytes) -> bytes:
    """`body` behind its length in ten digits, as `boot_code` reads it."""
    return f"{len(body):010d}".encode("ascii") + body
