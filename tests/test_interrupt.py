"""Ctrl-C in both commands as real processes: a signal to each while it is at some work, and what it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_conversion import FAST, TEXT, make_base, tokenizer  # noqa: F401

from conversion import hub
from hla_hf import to_hla


ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
# A console script, but for its last directory, which it begins to write and never ends.
HALF_WRITTEN = """
import sys, time
sys.argv[0] = "hla-convert"
import {module}
from transformers import PreTrainedModel
save = PreTrainedModel.save_pretrained
def save_slowly(self, directory, *args, **options):
    save(self, directory, *args, **options)
    if ".partial-" in str(directory):
        print("half written", flush=True)
        time.sleep(600)
PreTrainedModel.save_pretrained = save_slowly
{module}.main()
"""
AGAIN, RESUME = "the same command begins again", "--resume"


@pytest.fixture(scope="module")
def files(tokenizer, tmp_path_factory):  # noqa: F811
    """A base checkpoint, its conversion, and text that takes a while to read."""
    root = tmp_path_factory.mktemp("interrupted")
    base = make_base(tokenizer, root / "base")
    tokenizer.save_pretrained(root / "hla")
    to_hla(base, hla_window=4, hla_chunk_size=16).save_pretrained(root / "hla")
    (root / "text.jsonl").write_text((json.dumps({"text": TEXT}) + "\n") * 200)
    return root


def interrupted(words, folder, moment, presses=1):
    """The last line of a command that gets Ctrl-C when it prints `moment`, or that directory exists."""
    log = folder.parent / f"{folder.name}.log"
    folder.mkdir()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output
        )
        deadline = time.monotonic() + 300
        while not (moment.is_dir() if isinstance(moment, Path) else moment in log.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        try:
            code = process.wait(timeout=300)
        finally:
            process.kill()
    text = log.read_text()
    assert code in (130, -signal.SIGINT)[:presses], text  # for a shell both are 130
    assert "Traceback" not in text and "Exception" not in text, text
    return text.splitlines()[-1]


def test_an_upload_stops_with_the_command_that_makes_up_for_it(tmp_path, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(hub.HfApi, "create_repo", interrupted)
    with pytest.raises(KeyboardInterrupt, match=f"upload it with: hf upload me/hla {tmp_path} --private"):
        hub.upload(tmp_path, "me/hla", private=True)


SAMPLED = ["--tokens", 200_000]
MOMENTS = {
    # what is printed, how it is started, with what it takes long at that moment; what is said, what is left
    "importing": (" torch.", ["-X", "importtime", "-m"], [], AGAIN, []),
    "sampling": ("sampling text", ["-m"], SAMPLED, AGAIN, []),
    "evaluating": ("evaluating before", ["-m"], ["--data", "text.jsonl", *SAMPLED], AGAIN, []),
    "training": ("attention transfer", ["-m"], ["--steps", 100_000], RESUME, ["hla.interrupted"]),
    "writing": ("half written", ["-c"], [], RESUME, ["hla.interrupted"]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_conversion_stops_with_one_line_and_nothing_half_written(files, tmp_path, moment):
    printed, start, options, said, left = MOMENTS[moment]
    start = [*start, HALF_WRITTEN.format(module="conversion.convert") if start == ["-c"] else "conversion.convert"]
    options = [files / x if x == "text.jsonl" else x for x in options]
    words = [*start, files / "base", "--output", tmp_path / "run" / "hla", *FAST, "--hla-slots", 0, *options]
    assert said in interrupted(words, tmp_path / "run", printed, presses=2 if moment == "writing" else 1)
    assert [x.name for x in (tmp_path / "run").iterdir()] == left


@pytest.mark.parametrize("moment", ["importing", "loading", "evaluating", "training", "writing"])
def test_a_run_stops_with_one_line_and_nothing_half_written(files, tmp_path, moment):
    out = tmp_path / "run" / "out"
    printed = {"importing": " torch.", "loading": "OMP_WAIT_POLICY", "evaluating": out, "training": "training: "}
    settings = {"model": files / "hla", "output": out, "data": files / "text.jsonl", "seq_len": 32, "eval_rows": 2,
                "steps": 1, "trackers": "none"}  # fmt: skip
    settings |= {"loading": {"eval_rows": 2000}, "evaluating": {"eval_rows": 2000}, "training": {"steps": 100_000}}.get(
        moment, {}
    )
    start = ["-X", "importtime"] if moment == "importing" else []
    start += ["-m", "training.finetune"]
    if moment == "writing":
        start = ["-c", HALF_WRITTEN.format(module="training.finetune")]
    words = [*start, *(word for name, value in settings.items() for word in (f"--{name}", value))]
    last = interrupted(words, tmp_path / "run", printed.get(moment, "half written"), presses=1 + (moment == "writing"))
    if moment in ("training", "writing"):
        left = {x.name for x in out.iterdir() if not x.name.startswith("checkpoint-")}
        assert RESUME in last and left == ({"adapter", "curves.png"} if moment == "writing" else set())
    else:
        assert AGAIN in last and list((tmp_path / "run").iterdir()) == [], last
