"""Engines from the fork server beside spawned ones: `make bench-starts` (some minutes).

A gateway with the two embedded models starts, answers, loses an engine and gets it back, by turns with the
fork server and without. Printed are medians, and the ratio forked / spawned.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
from servers import free_port, machine

TOKENS = 96
WITHIN_S = 300.0
ENGINE = "smollm2"


def get(url: str) -> dict[str, object]:
    """The JSON of a page; empty while there is none."""
    try:
        with urlopen(url, timeout=2) as answer:
            found: dict[str, object] = json.load(answer)
            return found
    except OSError:
        return {}


def decode(url: str) -> tuple[float, str]:
    """Seconds of an answer of `TOKENS` tokens, and the answer."""
    body = {"model": ENGINE, "prompt": "The capital of France is", "max_tokens": TOKENS, "temperature": 0}
    asked = Request(f"{url}/v1/completions", json.dumps(body | {"ignore_eos": True}).encode())
    asked.add_header("Content-Type", "application/json")
    began = time.monotonic()
    with urlopen(asked, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return time.monotonic() - began, text


def until_whole(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until both engines are ready."""
    latest = time.monotonic() + WITHIN_S
    while get(f"{url}/readyz").get("engines") != {"ready": 2}:
        assert process.poll() is None
        assert time.monotonic() < latest
        time.sleep(0.05)


def processes(pid: int) -> list[psutil.Process]:
    """The cores of a gateway's engines, in the order of their starts."""
    below = psutil.Process(pid).children(recursive=True)
    return sorted((one for one in below if "EngineCor" in one.name()), key=lambda one: one.create_time())


def pss_mib(core: psutil.Process) -> float:
    """Memory of an engine's processes, what they share counted by its share."""
    return float(sum(one.memory_full_info().pss for one in (core, *core.children(recursive=True)))) / 2**20


def one_round(forked: bool, folder: Path) -> tuple[dict[str, float], str]:
    """Start a gateway, measure, and stop it."""
    port = free_port()
    own = {"BATON_SUPERVISION__FORK_SERVER": str(forked).lower(), "BATON_LOG_FORMAT": "json"}
    command = [str(Path(sys.executable).parent / "baton"), "serve", "--port", str(port)]
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    began = time.monotonic()
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, env=os.environ | own) as gateway:
        until_whole(url, gateway)
        seen = {"`make serve`, both engines ready, s": time.monotonic() - began}
        starts = re.findall(r'"engine": "([^"]+)", "seconds": ([0-9.]+)', log.read_text())
        seen |= {f"start of `{name}`, s": float(seconds) for name, seconds in starts}
        decode(url)
        timed = [decode(url) for _ in range(5)]
        seen[f"{TOKENS} tokens, s"] = statistics.median(seconds for seconds, _ in timed)
        cores = processes(gateway.pid)
        seen["memory (PSS) of the second engine, MiB"] = min(map(pss_mib, cores))
        lost = max(cores, key=pss_mib)
        lost.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        while get(f"{url}/readyz").get("engines") == {"ready": 2}:
            time.sleep(0.01)
        until_whole(url, gateway)
        decode(url)
        seen["a killed engine answers again, s"] = time.monotonic() - killed
        gateway.terminate()
    return seen, timed[0][1]


def main() -> None:
    """Compare, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    seen: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    texts: set[str] = set()
    for number in range(options.rounds):
        for forked in (True, False) if number % 2 == 0 else (False, True):
            with tempfile.TemporaryDirectory() as folder:
                figures, text = one_round(forked, Path(folder))
            seen[forked].append(figures)
            texts.add(text)
            print(f"{'forked' if forked else 'spawned'}: {figures}", file=sys.stderr)
    command = f"make bench-starts ARGS='{' '.join(sys.argv[1:])}'"
    print(f"## starts: {datetime.date.today()}, {machine()}, `{command}`\n")
    print("| figure | forked | spawned | ratio |\n|---|---|---|---|")
    for name in seen[True][0]:
        forked, spawned = (statistics.median(one[name] for one in seen[key]) for key in (True, False))
        print(f"| {name} | {forked:.2f} | {spawned:.2f} | {forked / spawned:.2f} |")
    print(f"\nThe same {TOKENS} tokens in every round: {'yes' if len(texts) == 1 else 'NO'}.")


if __name__ == "__main__":
    main()
