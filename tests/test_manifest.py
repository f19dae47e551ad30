"""Stages are skipped, resumed or refused by their fingerprint; changed files are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meki_edge import manifest
from meki_edge.errors import UserError
from meki_edge.manifest import FILE_NAME, Manifest, StageOutput


def run_stage(out: Path, config: dict, source: Path, *, force: bool = False) -> Manifest:
    output = StageOutput(out, stage="pack", config=config, inputs={"source": source}, force=force)
    if output.complete is not None:
        return output.complete
    (output.partial / "sub").mkdir(exist_ok=True)
    (output.partial / "sub" / "a.bin").write_bytes(source.read_bytes() * config["times"])
    (output.partial / "scratch").write_text("left behind")
    return output.finish(roles={"sub/a.bin": "data"}, metrics={"score": 1.5})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"abc")
    return path


def test_a_finished_stage_reads_back_and_is_skipped(tmp_path: Path, source: Path) -> None:
    made = run_stage(tmp_path / "out", {"times": 2}, source)
    assert manifest.load(tmp_path / "out", stages=("pack",)) == made
    assert made.file(tmp_path / "out", "data").read_bytes() == b"abcabc"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [FILE_NAME, "sub"]
    before = (tmp_path / "out" / "sub" / "a.bin").stat().st_mtime_ns
    assert run_stage(tmp_path / "out", {"times": 2}, source) == made
    assert (tmp_path / "out" / "sub" / "a.bin").stat().st_mtime_ns == before


def test_another_fingerprint_is_refused_and_forced(tmp_path: Path, source: Path) -> None:
    run_stage(tmp_path / "out", {"times": 2}, source)
    with pytest.raises(UserError, match="config.times was 2 and is now 3"):
        run_stage(tmp_path / "out", {"times": 3}, source)
    source.write_bytes(b"xyz")
    with pytest.raises(UserError, match=f"inputs.source was .*: {source} has changed"):
        run_stage(tmp_path / "out", {"times": 2}, source)
    run_stage(tmp_path / "out", {"times": 1}, source, force=True)
    assert (tmp_path / "out" / "sub" / "a.bin").read_bytes() == b"xyz"


def test_an_interrupted_stage_is_unfinished_and_resumes(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    half = StageOutput(out, stage="pack", config={"times": 2}, inputs={"source": source})
    (half.partial / "work").write_text("so far")
    with pytest.raises(UserError, match="has not finished"):
        manifest.load(out)
    again = StageOutput(out, stage="pack", config={"times": 2}, inputs={"source": source})
    assert (again.partial / "work").read_text() == "so far"
    with pytest.raises(UserError, match="unfinished work of another run"):
        StageOutput(out, stage="pack", config={"times": 9}, inputs={"source": source})


@pytest.mark.parametrize("force", [False, True])
def test_a_stop_while_files_are_moved_into_place_resumes(tmp_path: Path, source: Path, force: bool) -> None:
    out = tmp_path / "out"
    half = StageOutput(out, stage="pack", config={"times": 2}, inputs={"source": source})
    (out / "sub").mkdir()
    (out / "sub" / "a.bin").write_text("moved already")
    del half
    run_stage(out, {"times": 2}, source, force=force)
    assert (out / "sub" / "a.bin").read_bytes() == b"abcabc"


@pytest.mark.parametrize("force", [False, True])
def test_foreign_files_are_never_touched(tmp_path: Path, source: Path, force: bool) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="no stage of meki-edge recorded"):
        run_stage(tmp_path / "out", {"times": 1}, source, force=force)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_force_does_not_replace_another_stage(tmp_path: Path, source: Path) -> None:
    run_stage(tmp_path / "out", {"times": 1}, source)
    with pytest.raises(UserError, match="holds the result of `meki-edge pack`"):
        StageOutput(tmp_path / "out", stage="train", config={}, inputs={}, force=True)
    assert (tmp_path / "out" / "sub" / "a.bin").exists()


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_is_an_input_is_refused_before_anything_is_removed(
    tmp_path: Path, source: Path, force: bool
) -> None:
    run_stage(tmp_path / "in", {"times": 1}, source)
    for out, given in ((tmp_path / "in", tmp_path / "in"), (tmp_path, source)):
        with pytest.raises(UserError, match="is, or holds, the input 'made'"):
            StageOutput(out, stage="pack", config={}, inputs={"made": given}, force=force)
    assert (tmp_path / "in" / "sub" / "a.bin").exists()


def test_two_processes_do_not_share_a_directory(tmp_path: Path) -> None:
    output = StageOutput(tmp_path / "out", stage="pack", config={}, inputs={})
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from meki_edge.errors import UserError\n"
        "from meki_edge.manifest import StageOutput\n"
        "try:\n"
        "    StageOutput(Path(sys.argv[1]), stage='pack', config={}, inputs={}, force=sys.argv[2] == 'force')\n"
        "except UserError as error:\n"
        "    sys.exit(error.what)\n"
    )
    for force in ("", "force"):
        done = subprocess.run(
            [sys.executable, "-c", script, str(output.directory), force], capture_output=True, text=True
        )
        assert "another process is working in this directory" in done.stderr


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.write_bytes(b"abcabd"), "contents changed"),
        (lambda path: path.write_bytes(b"abc"), "has 3 bytes, the manifest says 6"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_verify_finds_damage(tmp_path: Path, source: Path, damage, what: str) -> None:
    made = run_stage(tmp_path / "out", {"times": 2}, source)
    manifest.verify(tmp_path / "out", made)
    assert manifest.first_change(tmp_path / "out", made) is None
    damage(tmp_path / "out" / "sub" / "a.bin")
    with pytest.raises(UserError, match=what) as caught:
        manifest.verify(tmp_path / "out", made)
    assert str(manifest.first_change(tmp_path / "out", made)) == str(caught.value)


def test_the_wrong_directory_is_explained(tmp_path: Path, source: Path) -> None:
    run_stage(tmp_path / "out", {"times": 1}, source)
    with pytest.raises(UserError, match="this is the output of `meki-edge pack`"):
        manifest.load(tmp_path / "out", stages=("train",))
    with pytest.raises(UserError, match="no manifest.json is here"):
        manifest.load(tmp_path)
    (tmp_path / "out" / FILE_NAME).write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        manifest.load(tmp_path / "out")


def test_a_manifest_that_reaches_outside_its_directory_is_refused(tmp_path: Path, source: Path) -> None:
    run_stage(tmp_path / "out", {"times": 1}, source)
    path = tmp_path / "out" / FILE_NAME
    path.write_text(path.read_text().replace("sub/a.bin", "../source"))
    with pytest.raises(UserError, match="outside"):
        manifest.load(tmp_path / "out")
    with pytest.raises(UserError, match="outside"):
        run_stage(tmp_path / "out", {"times": 1}, source, force=True)
    assert source.exists()


@pytest.mark.parametrize("place", ["file/out", "/proc/out"])
def test_a_place_that_takes_no_directory(tmp_path: Path, source: Path, place: str) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(UserError, match="the output directory cannot be made"):
        run_stage(tmp_path / place, {"times": 2}, source)
