"""Starts a DP x TP world on the embedded default model, encodes photographs and mirrored crops of them over HTTP, and
shows that each crop is nearest to its own original.

    python launch/demo.py [--nproc 4] [--tp-size 2] [--device cpu]

Needs the extra `[demo]`. Writes out/demo.png: every crop beside the photograph that the server found nearest.
Exit code 0 where enough crops were right and the world ended cleanly.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import skimage.data
from PIL import Image, ImageDraw, ImageOps

# Photographs inside scikit-image's own wheel: nothing is downloaded.
PHOTOS = (
    "astronaut",
    "brick",
    "camera",
    "cell",
    "chelsea",
    "clock",
    "coffee",
    "coins",
    "grass",
    "gravel",
    "hubble_deep_field",
    "immunohistochemistry",
    "moon",
    "rocket",
)
ENOUGH = 11
START_TIMEOUT_S = 600.0
THUMB = 160


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=4, help="ranks in the world")
    parser.add_argument("--tp-size", type=int, default=2, help="ranks that share one copy of the model")
    parser.add_argument("--device", default="cpu", help="cpu, or auto to give each rank a GPU of its own")
    args = parser.parse_args()
    photos = [Image.fromarray(getattr(skimage.data, name)()).convert("RGB") for name in PHOTOS]
    crops = [mirrored_crop(photo) for photo in photos]
    port = free_port()
    command = ["torchrun", "--nproc-per-node", str(args.nproc), "-m", "spmd_encoder"]
    command += ["--tp-size", str(args.tp_size), "--device", args.device, "--port", str(port)]
    shape = f"{args.nproc // args.tp_size} replicas of {args.tp_size} ranks each"
    print(f"starting {shape}: {' '.join(command)}", flush=True)
    command[:1] = [sys.executable, "-m", "torch.distributed.run"]
    # The demo is the same for everybody, whatever the shell has set for other servers.
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SPMD_ENCODER_")}
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        world = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        try:
            right = show(f"http://127.0.0.1:{port}", world, Path(log.name), photos, crops)
        except BaseException:
            print("--- the end of the server's log ---", Path(log.name).read_text(errors="replace")[-8000:], sep="\n")
            raise
        finally:
            end(world)
        codes = re.findall(r"ends with exit code (\d+)", Path(log.name).read_text(errors="replace"))
    clean = codes == ["0"] * args.nproc
    print(f"the world ended {'cleanly' if clean else 'badly'}; exit codes of the ranks: {' '.join(codes)}")
    print(f"{right} of {len(PHOTOS)} mirrored crops are nearest to their own photograph; {ENOUGH} are enough")
    return 0 if clean and right >= ENOUGH else 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(world: subprocess.Popen[bytes]) -> None:
    """SIGTERM drains the world and ends it."""
    world.send_signal(signal.SIGTERM)
    try:
        world.wait(60)
    except subprocess.TimeoutExpired:
        world.kill()
        world.wait()


def show(
    url: str, world: subprocess.Popen[bytes], log: Path, photos: list[Image.Image], crops: list[Image.Image]
) -> int:
    """Encode everything and print the table; returns how many crops are nearest to their own photograph."""
    began = time.monotonic()
    wait_ready(url, world, log)
    print(f"ready after {time.monotonic() - began:.1f} s; encoding {len(photos) + len(crops)} pictures", flush=True)
    originals, first = encode(url, photos)
    changed, second = encode(url, crops)
    print(f"answered by replicas {first} (photographs) and {second} (crops)\n")
    likeness = unit(changed) @ unit(originals).T
    nearest = likeness.argmax(1)
    print(f"{'mirrored crop of':<24}{'nearest photograph':<24}{'cosine':>8}   ")
    for index, name in enumerate(PHOTOS):
        verdict = "right" if nearest[index] == index else "wrong"
        print(f"{name:<24}{PHOTOS[nearest[index]]:<24}{likeness[index, nearest[index]]:>8.3f}   {verdict}")
    sheet = contact_sheet(crops, [photos[i] for i in nearest], nearest == np.arange(len(photos)))
    out = Path("out/demo.png")
    out.parent.mkdir(exist_ok=True)
    sheet.save(out)
    print(f"\nlook at {out}: each crop beside the photograph that was found nearest")
    return int((nearest == np.arange(len(photos))).sum())


def wait_ready(url: str, world: subprocess.Popen[bytes], log: Path) -> None:
    """Shows what the server says of the model that it fetches and makes at its first start."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with log.open(errors="replace") as said:
        while time.monotonic() < deadline:
            for line in said:
                if line.startswith("demo model:"):
                    print(line.rstrip(), flush=True)
            if world.poll() is not None:
                raise SystemExit("the world ended before it was ready; its log is above")
            try:
                with urllib.request.urlopen(f"{url}/health/ready", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
    raise SystemExit(f"the world was not ready within {START_TIMEOUT_S:.0f} s; its log is above")


def encode(url: str, pictures: list[Image.Image]) -> tuple[np.ndarray[Any, Any], str]:
    """One request. Returns float32 `[pictures, dim]` and the replicas that answered."""
    items = [{"image": "data:image/png;base64," + base64.b64encode(png(picture)).decode()} for picture in pictures]
    body = json.dumps({"items": items, "output": "pooled"}).encode()
    request = urllib.request.Request(f"{url}/v1/encode", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        data = json.load(reply)["data"]
        replicas = reply.headers["x-spmd-replica"]
    vectors = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in data]
    return np.stack(vectors), replicas


def mirrored_crop(image: Image.Image) -> Image.Image:
    """The middle three quarters of both sides, mirrored."""
    w, h = image.size
    return ImageOps.mirror(image.crop((w // 8, h // 8, w - w // 8, h - h // 8)))


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def unit(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    lengths: np.ndarray[Any, Any] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / lengths)


def contact_sheet(left: list[Image.Image], right: list[Image.Image], good: np.ndarray[Any, Any]) -> Image.Image:
    columns = 4
    rows = -(-len(left) // columns)
    sheet = Image.new("RGB", (columns * (2 * THUMB + 24), rows * (THUMB + 24)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        x, y = (index % columns) * (2 * THUMB + 24) + 8, (index // columns) * (THUMB + 24) + 8
        sheet.paste(ImageOps.fit(a, (THUMB, THUMB)), (x, y))
        sheet.paste(ImageOps.fit(b, (THUMB, THUMB)), (x + THUMB + 4, y))
        colour = "green" if good[index] else "red"
        draw.text((x, y + THUMB + 4), PHOTOS[index], fill="black")
        draw.rectangle((x - 3, y - 3, x + 2 * THUMB + 6, y + THUMB + 2), outline=colour, width=3)
    return sheet


if __name__ == "__main__":
    sys.exit(main())
