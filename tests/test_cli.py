"""The command line as a user meets it: exit codes, three-part errors, JSON, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from tiny import TINY
from typer.testing import CliRunner

from meki_edge import cli, console
from meki_edge.errors import UserError
from meki_edge.options import parse_layers, parse_lengths, parse_memory_options, parse_moe

COMMAND = [sys.executable, "-m", "meki_edge.cli"]
TRAIN = "--steps 2 --batch-size 2 --window-length 16 --warmup-steps 1 --precision fp32".split()


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.fixture(scope="session")
def model_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.mark.parametrize(
    ("options", "code", "what"),
    [
        (["--memory-option", "memory_dim=8"], 1, "options of a memory, but no memory"),
        (["--memory", "meki", "--memory-option", "memory_dim"], 1, "'memory_dim' is not name=value"),
        (["--memory", "meki", "--memory-option", "memory_dim=8", "--memory-option", "memory_dim=9"], 1, "given twice"),
        (["--memory", "meki", "--memory-layers", "9-1"], 1, "'9-1' is not a list of layers"),
        (["--memory", "meki", "--memory-layers", "0-99999999999"], 1, "is not a list of layers"),
        (["--memory", "mekki"], 1, "unknown memory 'mekki'; did you mean 'meki'?"),
        (["--moe", "2/3"], 1, "'2/3' is not EXPERTS/ACTIVE"),
        (["--preset", "demo"], 1, "the model's shape must come from one place"),
        (["--batch-size", "0"], 2, "--batch-size"),
        (["--seed", "99999999999999999999999"], 2, "--seed"),
        (["--memory", "meki", "--memory-option", "memory_dim=99999999999"], 1, "not enough memory"),
    ],
)
def test_bad_options_of_train(
    tokens_dir: Path, model_config: Path, tmp_path: Path, options: list[str], code: int, what: str
) -> None:
    done = run("train", tokens_dir, "-o", tmp_path / "out", "--config", model_config, *TRAIN, *options, COLUMNS="200")
    assert done.returncode == code and what in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("-5", "'-5' is no number of tokens from 1"),
        ("256,0", "'0' is no number"),
        ("256,", "a number is missing"),
        ("", "a number is missing"),
        ("٢٥٦", "'٢٥٦' is no number"),
        ("²", "'²' is no number"),
        ("9" * 5000, "is no number"),
        ("1k", "'1k' is no number"),
    ],
)
def test_lengths_that_are_none(text: str, wrong: str) -> None:
    assert parse_lengths("256, 1024", "--x", "256,512") == (256, 1024)
    with pytest.raises(UserError) as caught:
        parse_lengths(text, "--x", "256,512")
    assert f"{text!r} is not a list of lengths: " in caught.value.what and wrong in caught.value.what
    assert caught.value.fix == "write it as 256,512"


@pytest.mark.parametrize(
    "text", ["١", "0-٣", "1-", "-1", "1--2", "9" * 5000, "٨/٢", "8/²", f"{'9' * 5000}/2", "0/0", "8/"]
)
def test_other_numbers_take_plain_digits_too(text: str) -> None:
    assert parse_layers("0, 2-4") == parse_layers("3-4,2,0") == (0, 2, 3, 4) and parse_moe("8/2") == (8, 2)
    with pytest.raises(UserError, match="is not a list of layers"):
        parse_layers(text)
    with pytest.raises(UserError, match="is not EXPERTS/ACTIVE"):
        parse_moe(text)
    assert parse_memory_options([f"memory_dim={'9' * 5000}"]) == {"memory_dim": "9" * 5000}


@pytest.mark.parametrize(("option", "example"), [("--memory-layers", "0,2-5"), ("--split-layers", "1,2")])
def test_the_advice_about_layers_is_one_that_the_option_takes(option: str, example: str, tmp_path: Path) -> None:
    """A graph cannot be cut before layer 0."""
    commands = {
        "--memory-layers": ["train", "tokens", "--preset", "demo", "--steps", "1", "--memory", "meki"],
        "--split-layers": ["export", "checkpoint", "tokens"],
    }
    done = CliRunner().invoke(cli.app, [*commands[option], "-o", str(tmp_path / "out"), option, "1,x"])
    assert isinstance(done.exception, UserError) and done.exception.fix == f"write it as {example}"


@pytest.mark.parametrize("columns", [20, 80])
def test_a_result_names_its_directory_on_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long: it is there to be copied."""
    path = "/a/long/path [with] spaces/" + "x" * 200
    lines = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=lines, width=columns, highlight=False))
    console.show_metrics({"loss": 1.5}, title=f"train → {path}")
    assert lines.getvalue().splitlines()[0] == f"train → {path}"
    assert lines.getvalue().splitlines()[1].split() == ["loss", "1.5"]


def test_a_path_that_is_too_long() -> None:
    done = run("inspect", "n" * 300)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "File name too long" in done.stderr


def test_an_error_says_what_where_and_what_to_do(tmp_path: Path) -> None:
    done = run("inspect", tmp_path / "br[red]" / "rom.safetensors")
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and [line.split(":")[0].strip() for line in lines] == ["error", "where", "do"]
    assert "br[red]" in lines[1]


def test_json_is_all_that_stdout_holds(tokens_dir: Path, model_config: Path, tmp_path: Path) -> None:
    done = run("train", tokens_dir, "-o", tmp_path / "o[x]", "--config", model_config, *TRAIN, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["train_tokens"] == 2 * 2 * 16
    again = run("train", tokens_dir, "-o", tmp_path / "o[x]", "--config", model_config, *TRAIN)
    assert again.returncode == 0 and "o[x]" in again.stderr.replace("\n", "")
    other = run("reparam", tmp_path / "o[x]", tokens_dir, "-o", tmp_path / "o[x]", "--force")
    assert other.returncode == 1 and (tmp_path / "o[x]" / "model.safetensors").is_file()


def test_an_ascii_terminal_is_no_obstacle() -> None:
    done = run("memories", "--preset", "demo", "--vocab-size", 4096, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_says_that_the_command_resumes(
    tokens_dir: Path, model_config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    arguments = ["train", tokens_dir, "-o", tmp_path / "out", "--config", model_config, *TRAIN, "--steps", "100000"]
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    log = tmp_path / "out" / ".partial" / "running.jsonl"
    while process.poll() is None and not (log.is_file() and log.stat().st_size):
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, 143) and "resumes there" in errors and "Traceback" not in errors
    assert not (tmp_path / "out" / "manifest.json").exists()
