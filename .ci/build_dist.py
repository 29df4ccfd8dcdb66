"""Build the wheel and the source distribution into dist/ and check both. `make dist` runs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
GENERATED = {"PKG-INFO"}  # what the build adds to the files of the project


def main() -> None:
    for old in DIST.glob("gradwire-*"):
        old.unlink()
    build(DIST)  # the wheel is built from the source distribution here ...
    check_files(next(DIST.glob("*.tar.gz")))
    check_twice()
    artifacts = sorted(DIST.glob("gradwire-*"))
    run("twine", "check", "--strict", *map(str, artifacts))
    run("check_wheel_contents", str(next(DIST.glob("*.whl"))))
    check_links(next(DIST.glob("*.whl")))
    for path in artifacts:
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:,.0f} KiB")


def build(folder: Path, *options: str) -> None:
    """Build with the installed hatchling, whose version constraints.txt gives, rather than with one that pip looks up."""
    run("build", "--no-isolation", "--outdir", str(folder), *options, str(ROOT))


def check_twice() -> None:
    """Check that a second build, with the wheel built from the working tree, gives the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), "--sdist", "--wheel")  # ... and from the working tree here
        for path in sorted(Path(folder).iterdir()):
            if path.read_bytes() != (DIST / path.name).read_bytes():
                sys.exit(f"{path.name}: a second build gave other bytes")


def check_files(archive: Path) -> None:
    """Check that the source distribution has the files under version control, and no others."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        print("Not a git checkout: the files of the source distribution were not compared.")
        return
    with tarfile.open(archive) as tar:
        packed = {member.name.partition("/")[2] for member in tar if not member.isdir()} - GENERATED
    tracked = set(listed.stdout.splitlines())
    if packed != tracked:
        missing, unknown = sorted(tracked - packed), sorted(packed - tracked)
        sys.exit(
            f"The source distribution lacks {missing} and has {unknown}, which git does not track: "
            "see [tool.hatch.build.targets.sdist] in pyproject.toml"
        )


def check_links(wheel: Path) -> None:
    """Check that the description has no relative link or picture: the package index could not resolve it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (item for item in archive.namelist() if item.endswith(".dist-info/METADATA"))
        _, _, description = archive.read(name).decode().partition("\n\n")
    targets = re.findall(r"""\]\(([^)\s]+)|\b(?:src|href)=["']([^"']+)""", description)
    relative = [link or source for link, source in targets if not (link or source).startswith(("https://", "#"))]
    if relative or not targets:
        sys.exit(f"The package index cannot resolve {relative or 'anything'}: see fancy-pypi-readme in pyproject.toml")


def run(module: str, *arguments: str) -> None:
    print("$", module, *arguments, flush=True)
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
