"""A container engine in the folder ~/engine: it pulls, checks digests, tags and removes.

images.json   name -> what `image inspect` shows        layers/DIGEST   what it pulled
full   a full disk                                      hung   it hangs when it pulls
"""

import hashlib
import json
import sys
import time
import urllib.request
from pathlib import Path

FOLDER = Path.home() / "engine"
IMAGES, LAYERS = FOLDER / "images.json", FOLDER / "layers"


def fetch(base: str, kind: str, digest: str) -> bytes:
    with urllib.request.urlopen(f"{base}/{kind}/{digest}", timeout=60) as answer:
        body = answer.read()
    if f"sha256:{hashlib.sha256(body).hexdigest()}" != digest:
        sys.exit("filesystem layer verification failed for digest " + digest)
    return body


def pull(reference: str) -> dict:
    host, _, rest = reference.partition("/")
    name, _, digest = rest.partition("@")
    base = f"http://{host}/v2/{name}"
    if (FOLDER / "hung").exists():
        time.sleep(60)
    manifest = json.loads(fetch(base, "manifests", digest))
    config = json.loads(fetch(base, "blobs", manifest["config"]["digest"]))
    for row, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        path = LAYERS / row["digest"]
        if path.exists():
            continue
        if (FOLDER / "full").exists():
            sys.exit("failed to register layer: no space left on device")
        body = fetch(base, "blobs", row["digest"])
        assert f"sha256:{hashlib.sha256(body).hexdigest()}" == diff_id
        path.write_bytes(body)
    facts = {key: config[key.lower()] for key in ("Architecture", "Os", "Created", "Config")}
    size = sum(row["size"] for row in manifest["layers"])
    return {
        **facts,
        "Size": size,
        "Id": manifest["config"]["digest"],
        "RootFS": {"Layers": config["rootfs"]["diff_ids"]},
    }


def main(words: list[str]) -> None:
    LAYERS.mkdir(parents=True, exist_ok=True)
    images = json.loads(IMAGES.read_text()) if IMAGES.exists() else {}
    match words:
        case ["version"]:
            print("Client:\n Version: 28.2.2\nServer:\n Engine:\n  Version: 20.10.24")
        case ["image", "inspect", "--", name]:
            found = [image for tag, image in images.items() if name in (tag, image["Id"])]
            print(json.dumps(found[:1]))
            if not found:
                sys.exit(f"Error: No such image: {name}")
        case ["pull", reference]:
            images[reference] = pull(reference)
        case ["tag", old, new]:
            images[new] = next(image for tag, image in images.items() if old in (tag, image["Id"]))
        case ["image", "rm", reference]:
            del images[reference]
        case _:
            sys.exit(f"unknown command: {words}")
    IMAGES.write_text(json.dumps(images))


main(sys.argv[1:])
