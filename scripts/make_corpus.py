#!/usr/bin/env python3
"""Makes the text that the quickstart trains on, outside git: build/corpus/{*.txt, corpus.json}.

The King James Bible (every twentieth chapter held out) and the Jargon File (never trained on) come out of Debian's
packages, or the text is the user's own (--text). Where no package can be had, documentation found on the system stands
in and corpus.json says so. The folder is written beside its place and renamed when complete; a complete one is reused.
Tokens and baselines are qeffect's business, not ours.
"""
import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ["bible-kjv", "bible-kjv-text", "jargon-text"]
HOLD_OUT_EVERY = 20
JARGON_ENTRIES = slice(600_000, 800_000)  # of its letters: about as much as is held out of the Bible
# The texts that documented figures were measured on; another package version trains as well but is another text.
KNOWN_SHA256 = {
    "kjv_train.txt": "e72a9f7df710fdc6176891266ca3d80a326e526148c2da5eaab364b696d809ea",
    "kjv_valid.txt": "e318fe99adec9c088bba12eba17ee301d611e0c83520d19149fc287a078c4f18",
    "jargon.txt": "94670395d1d480597139e828d79536735f6d68a48d2e63f7e8fc81f284c44ac2",
}
SYSTEM_TEXT = ["/usr/share/common-licenses", "/usr/share/perl", "/usr/share/doc", "/usr/share/perl5"]
SYSTEM_TEXT_BYTES = 4_000_000


class NoPackages(Exception):
    pass


def fetch_packages(into: Path) -> None:
    """Downloads and unpacks PACKAGES below `into`; installs nothing and needs no root."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NoPackages("there is no apt-get here")
    debs = into / "debs"
    debs.mkdir(parents=True)
    download = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root"]
    if run(download + ["download"] + PACKAGES, debs).returncode != 0:
        # No package lists, as in a new container, or stale ones: fetch some of our own, which takes no rights.
        lists = into / "lists"
        (lists / "partial").mkdir(parents=True)
        cache = into / "cache"
        (cache / "archives" / "partial").mkdir(parents=True)
        download += ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={cache}"]
        run(download + ["update"], debs)
        result = run(download + ["download"] + PACKAGES, debs)
        if result.returncode != 0:
            raise NoPackages((result.stderr.strip().splitlines() or ["apt-get download failed"])[-1])
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(deb), str(into)], check=True)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def package_texts(unpacked: Path) -> dict[str, str]:
    library = unpacked / "usr/lib"
    # The program looks for its data in the folder it is started in.
    bible = run(["../bin/bible", "-f", "gen1:1-rev22:21"], library)
    if bible.returncode != 0 or len(bible.stdout) < 4_000_000:
        raise NoPackages(f"the program 'bible' did not print its text: {bible.stderr.strip() or 'output too short'}")
    train, valid = split_chapters(bible.stdout)
    jargon = gzip.decompress((unpacked / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes()).decode("utf-8")
    return {"kjv_train.txt": train, "kjv_valid.txt": valid, "jargon.txt": jargon[JARGON_ENTRIES]}


def split_chapters(tagged: str) -> tuple[str, str]:
    """Verses 'Ge1:1 In the beginning…' → (training text, held-out text): no tags, a blank line after each chapter."""
    chapters: list[list[str]] = []
    current = None
    for line in tagged.splitlines():
        tag, verse = line.split(" ", 1)
        chapter = tag.split(":")[0]
        if chapter != current:
            chapters.append([])
            current = chapter
        chapters[-1].append(verse.strip())
    return hold_out("\n".join(verses) + "\n\n" for verses in chapters)


def hold_out(pieces) -> tuple[str, str]:
    kept: tuple[list[str], list[str]] = ([], [])
    for number, piece in enumerate(pieces, start=1):
        kept[number % HOLD_OUT_EVERY == 0].append(piece)
    return "".join(kept[0]), "".join(kept[1])


def split_blocks(text: str) -> tuple[str, str]:
    """Any text → (training text, held-out text): the last of every twenty blocks is held out, cut at line ends."""
    size = max(256, min(4096, len(text) // 200))
    blocks, start = [], 0
    while start < len(text):
        end = text.find("\n", start + size)
        # One endless line is cut all the same.
        end = min(len(text), start + 2 * size if end < 0 or end > start + 2 * size else end + 1)
        blocks.append(text[start:end])
        start = end
    return hold_out(blocks)


def system_text() -> str:
    """Documentation of this machine, in a fixed order, as much as the Bible's size."""
    parts, total = [], 0
    for top in SYSTEM_TEXT:
        for path in sorted(Path(top).rglob("*")):
            if total >= SYSTEM_TEXT_BYTES:
                return "\n".join(parts)
            if not path.is_file() or path.is_symlink():
                continue
            try:
                data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                text = data.decode("utf-8")
            except (OSError, EOFError, UnicodeDecodeError):
                continue
            if "\0" not in text:
                parts.append(text)
                total += len(text)
    return "\n".join(parts)


def describe(texts: dict[str, str], source: str, note: str) -> dict:
    names = list(texts)
    encoded = {name: text.encode("utf-8") for name, text in texts.items()}
    return {
        "source": source,
        "note": note,
        "train": Path(names[0]).stem,
        "valid": Path(names[1]).stem,
        "other": [Path(name).stem for name in names[2:]],
        "files": {n: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in encoded.items()},
    }


def make_default(scratch: Path) -> tuple[dict[str, str], str, str]:
    try:
        fetch_packages(scratch)
        texts = package_texts(scratch)
    except NoPackages as why:
        train, valid = split_blocks(system_text())
        note = (
            f"The packages {', '.join(PACKAGES)} could not be had ({why}), so this is documentation found on this "
            "machine: documented figures do not apply to it. Remove the folder to try again."
        )
        return {"system_train.txt": train, "system_valid.txt": valid}, "documentation found on this machine", note
    digests = {name: hashlib.sha256(text.encode("utf-8")).hexdigest() for name, text in texts.items()}
    note = "" if digests == KNOWN_SHA256 else (
        "The packages hold another version of the text than the documented figures were measured on.")
    return texts, "Debian packages " + ", ".join(PACKAGES), note


def make_own(path: Path) -> tuple[dict[str, str], str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        sys.exit(f"make_corpus.py: {path} cannot be read as UTF-8 text: {why}")
    train, valid = split_blocks(text)
    if len(valid.encode("utf-8")) < 2048:
        sys.exit(f"make_corpus.py: {path} has {len(text)} characters, which leaves {len(valid)} held out: give at least "
                 "50,000 characters, so that the held-out blocks fill a few windows.")
    return {"text_train.txt": train, "text_valid.txt": valid}, str(path), ""


def publish(folder: Path, texts: dict[str, str], source: str, note: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=folder.name + ".", dir=folder.parent))
    fresh.chmod(0o755)
    try:
        for name, text in texts.items():
            (fresh / name).write_bytes(text.encode("utf-8"))
        (fresh / "corpus.json").write_text(json.dumps(describe(texts, source, note), indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """corpus.json is there and every file it lists has its size."""
    try:
        listed = json.loads((folder / "corpus.json").read_text())["files"]
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in listed.items())
    except (OSError, ValueError, KeyError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the quickstart's text. Prints the folder's note, if any.")
    parser.add_argument("folder", type=Path, help="where the corpus goes, e.g. build/corpus")
    parser.add_argument("--text", type=Path, help="a text file of your own instead of Debian's packages")
    args = parser.parse_args()
    if args.text or not is_complete(args.folder):
        with tempfile.TemporaryDirectory() as scratch:
            publish(args.folder, *(make_own(args.text) if args.text else make_default(Path(scratch))))
    corpus = json.loads((args.folder / "corpus.json").read_text())
    sizes = ", ".join(f"{name} {entry['bytes']:,} bytes" for name, entry in corpus["files"].items())
    print(f"{args.folder}: {sizes}")
    print(f"from {corpus['source']}" + (f"\nNote: {corpus['note']}" if corpus["note"] else ""))


if __name__ == "__main__":
    main()
