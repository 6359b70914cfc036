"""What is left when a process, a rank, a disk or the power fails: the newest checkpoint, and a run that goes on.

The faults and the processes they happen in are crash.py's; `make faults` kills far more often than this.
"""
import itertools
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import time

import pytest
import torch
from conftest import column, rows, train_here
from crash import (
    PHASES,
    WORDS,
    Forked,
    PowerCuts,
    Tally,
    Torchrun,
    ended,
    killed_again_and_again,
    marks,
    same_run,
    screen,
)

from config import Refused
from model import load_weights, newest_verified, why_bad


@pytest.fixture(scope="module")
def words(data_dir):
    """Settings of a run of 12 steps that saves at every second one and keeps the last alone."""
    return (*WORDS, f"--data_dir={data_dir}", "--weights_interval=0", "--max_steps=12")


@pytest.fixture(scope="module")
def straight(words, tmp_path_factory):
    """The run that nothing happened to, with two checkpoints kept."""
    out = str(tmp_path_factory.mktemp("straight") / "out")
    assert run(words, out, more=["--keep_last=2"])[0] == 0
    return out


@pytest.fixture(scope="module")
def begun(words, tmp_path_factory):
    """A run that was killed behind its first save, at step 2."""
    out = str(tmp_path_factory.mktemp("begun") / "out")
    assert run(words, out, dict(at="step", nth=3, do="kill"))[0] == -9 and newest_verified(out)[0] == 2
    return out


def run(words, out, *faults, begin=Forked, more=()):
    """(exit code, seconds from the last fault to the end) of one run with these faults in it."""
    code = ended(begin((*words, *more, f"--out_dir={out}"), faults))
    did = marks(out, "did")
    return code, time.time() - did[-1]["time"] if did else 0.0


def record(out):
    with open(f"{out}/run.json") as f:
        return json.load(f)


def saved(out):
    """Names in ckpt, without endings where a checkpoint has its json."""
    names = sorted(os.listdir(f"{out}/ckpt"))
    return [name for name in names if not name.endswith(".json") or name[:-4] + "pt" not in names]


# ---- SIGKILL and power cuts

def test_killed_at_every_operation_of_a_save_and_ten_times_at_random_a_run_loses_nothing(words, tmp_path):
    words, tally, rng, runs = (*words, "--max_steps=50"), Tally(), random.Random(0), 0
    assert run(words, tmp_path / "straight")[0] == 0
    took = column(tmp_path / "straight", "elapsed_s", "run_end")[0]

    def plans():
        yield dict(at="rename", nth=3, do="kill")  # a checkpoint is there: each save from now on deletes one
        yield from (dict(at="operation", nth=nth, do="kill") for nth in range(1, 14))
        while tally.kills["at random"] < 10:
            yield rng.uniform(0, took)
        yield from itertools.repeat(None)
    todo = plans()
    while tally.kills["at random"] < 10:
        runs += 1
        killed_again_and_again(Forked, (*words, f"--out_dir={tmp_path}/{runs}"), todo, tally)
        tally.unequal += not same_run(tmp_path / str(runs), tmp_path / "straight", 50)
    assert set(tally.kills) == {*PHASES, "at random"} and tally.kills.total() == 24, tally
    assert (tally.unloadable, tally.lost_steps, tally.unequal) == (0, 0, 0)


SMALL = ("--n_layer=1", "--n_embd=8", "--ffn_hidden=8", "--save_interval=1", "--weights_interval=3", "--keep_last=1")


def test_every_state_that_a_power_cut_could_leave_has_the_last_checkpoint_saved(data_dir, tmp_path):
    cuts = PowerCuts(f"{tmp_path}/out", f"{tmp_path}/scratch")
    assert cuts.follow(train_here, data_dir, cuts.out, *SMALL, "--max_steps=4") == 0
    assert cuts.bad == [] and len(cuts.states) > 60


@pytest.mark.parametrize("forgotten", [".pt.tmp", ".json.tmp", "/ckpt", "/out"])
def test_a_forgotten_fsync_would_be_noticed(data_dir, tmp_path, forgotten):
    cuts = PowerCuts(f"{tmp_path}/out", f"{tmp_path}/scratch")
    after = cuts.after
    cuts.after = lambda name, *paths: (name == "fsync" and paths[0].endswith(forgotten)) or after(name, *paths)
    cuts.follow(train_here, data_dir, cuts.out, *SMALL, "--max_steps=2")
    assert cuts.bad


# ---- disks that fail

@pytest.mark.parametrize("nth", range(1, 14))
def test_an_error_in_any_operation_of_a_save_is_said_and_the_next_save_is_tried(words, straight, begun, tmp_path, nth):
    out = shutil.copytree(begun, tmp_path / "out")
    assert run(words, out, dict(at="operation", nth=nth, do="EIO"))[0] == 0
    assert saved(out) == ["step_00000012.pt"] and "Input/output error" in screen(out)
    assert column(out, "loss") == column(straight, "loss")
    assert len(rows(out, "alarm")) == (nth <= 11)  # the last two delete the older one, whose failure is only said


def test_a_last_save_that_fails_and_one_that_a_signal_asked_for_end_with_1_and_keep_the_one_before(words, tmp_path):
    assert run(words, tmp_path / "a", dict(at="fsync", nth=6, do="EIO"))[0] == 1
    assert saved(tmp_path / "a") == ["step_00000010.pt"] and record(tmp_path / "a")["exit_code"] == 1
    assert run(words, tmp_path / "b", dict(at="step", nth=3, do="term"), dict(at="fsync", nth=2, do="EIO"))[0] == 1
    assert saved(tmp_path / "b") == ["step_00000002.pt"] and newest_verified(tmp_path / "b")
    assert run(words, tmp_path / "a")[0] == 0 and column(tmp_path / "a", "step") == list(range(1, 13))


def mounted(folder, *options):
    """A mount over `folder`, or the reason why this machine does not allow one."""
    os.makedirs(folder, exist_ok=True)
    done = subprocess.run(["mount", *options, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB, about six checkpoints of the tiny shape."""
    yield mounted(str(tmp_path / "disk"), "-t", "tmpfs", "-o", "size=2m", "tmpfs")
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_disk_that_fills_under_a_run_costs_the_saves_of_that_time_and_nothing_else(words, straight, small_disk):
    out = f"{small_disk}/out"
    assert run(words, out, dict(at="step", nth=3, do=f"head -c 9M /dev/zero > {small_disk}/full 2> /dev/null; true"),
               dict(at="step", nth=7, do=f"rm {small_disk}/full"))[0] == 0
    assert "the save of step 4 failed" in screen(out) and "the save of step 6 failed" in screen(out)
    assert saved(out) == ["step_00000012.pt"] and record(out)["status"] == "finished"
    assert column(out, "loss") == column(straight, "loss")  # no line of the log is missing either
    assert [row["step"] for row in rows(out, "alarm")] == [4, 6]


def test_a_disk_that_stays_full_ends_with_1_and_the_checkpoint_from_before(words, straight, small_disk):
    out = f"{small_disk}/out"
    fill = dict(at="step", nth=3, do=f"head -c 9M /dev/zero > {small_disk}/full 2> /dev/null; true")
    assert run(words, out, fill)[0] == 1
    assert saved(out) == ["step_00000002.pt"] and newest_verified(out)[0] == 2
    os.unlink(f"{small_disk}/full")
    assert run(words, out)[0] == 0 and column(out, "loss") == column(straight, "loss")


def test_a_disk_of_less_than_two_checkpoints_is_refused_at_the_start(words, small_disk):
    with open(f"{small_disk}/half", "wb") as f:
        f.write(bytes(2**20 + 2**19))
    assert run(words, f"{small_disk}/out")[0] == 2 and "room for" in screen(f"{small_disk}/out")


def test_a_folder_that_can_not_be_written_is_refused_at_the_start(words, tmp_path):
    out = mounted(str(tmp_path / "out"), "--bind", str(tmp_path / "out"))
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", out], check=True)
        assert run(words, out)[0] == 2 and "can't be written: Read-only file system" in screen(out)
    finally:
        subprocess.run(["umount", out], check=True)


def test_a_folder_that_turns_read_only_is_said_and_used_again_when_it_can_be_written(words, straight, tmp_path):
    out = str(tmp_path / "out")
    mounted(f"{out}/ckpt", "--bind", f"{out}/ckpt")
    try:
        assert run(words, out, dict(at="step", nth=3, do=f"mount -o remount,bind,ro {out}/ckpt"),
                   dict(at="step", nth=6, do=f"mount -o remount,bind,rw {out}/ckpt"))[0] == 0
    finally:
        subprocess.run(["umount", f"{out}/ckpt"], check=True)
    assert "Read-only file system" in screen(out) and [row["step"] for row in rows(out, "alarm")] == [4]
    assert saved(out) == ["step_00000012.pt"] and column(out, "loss") == column(straight, "loss")


def test_a_limit_on_the_size_of_files_stops_the_saves_and_not_the_run(words, tmp_path):
    out = tmp_path / "out"  # what `ulimit -f 200` sets
    assert run(words, out, dict(at="start", nth=1, do="prlimit --fsize=204800 --pid $PPID"))[0] == 1
    assert screen(out).count("File too large") == 6 and saved(out) == []
    assert column(out, "step") == list(range(1, 13))


# ---- files that are not what they should be

def test_what_lies_about_in_ckpt_is_not_taken_for_a_checkpoint(words, straight, tmp_path):
    out = tmp_path / "out"
    assert run(words, out, dict(at="step", nth=11, do="kill"), more=["--save_interval=1"])[0] == -9
    assert saved(out) == ["step_00000010.pt"]
    for old in (9, 11):  # the older one complete, the newer one never finished
        shutil.copy(out / "ckpt" / "step_00000010.pt", out / "ckpt" / f"step_{old:08d}.pt{'.tmp' * (old > 9)}")
    open(out / "ckpt" / "step_00000011.json.tmp", "w").close()
    os.makedirs(out / "ckpt" / "step_00000012.pt")
    os.makedirs(out / "ckpt" / "step_00000099.pt")
    assert newest_verified(out)[0] == 10
    assert run(words, out)[0] == 0
    assert rows(out, "resume")[0]["step"] == 10 and same_run(out, straight, 12)
    assert saved(out) == ["step_00000012.pt", "step_00000012.pt.corrupt", "step_00000099.pt"]


def damaged_copy(straight, out, damage):
    """`straight` with `damage` done to the bytes of its newest checkpoint; the path of that."""
    shutil.copytree(straight, out)
    path = f"{out}/ckpt/step_00000012.pt"
    with open(path, "rb") as f:
        data = bytearray(f.read())
    with open(path, "wb") as f:
        f.write(damage(data))
    return path


def flipped(data, bit):
    data[bit // 8] ^= 1 << bit % 8
    return data


def test_each_of_50_flipped_bits_and_20_truncations_is_noticed(straight, tmp_path):
    path, rng = damaged_copy(straight, tmp_path / "out", lambda data: data), random.Random(0)
    with open(path, "rb") as f:
        whole = f.read()
    assert newest_verified(tmp_path / "out") == (12, path)
    damages = [flipped(bytearray(whole), rng.randrange(8 * len(whole))) for _ in range(50)]
    damages += [whole[:size] for size in (0, 1, len(whole) - 1, *rng.sample(range(len(whole)), 17))]
    for damage in damages:
        with open(path, "wb") as f:
            f.write(damage)
        heard = []
        assert newest_verified(tmp_path / "out", warn=heard.append)[0] == 10 and path in heard[0]


def test_each_flipped_bit_of_the_json_is_noticed(straight, tmp_path):
    path = damaged_copy(straight, tmp_path / "out", lambda data: data)
    said = path[:-len(".pt")] + ".json"
    with open(said, "rb") as f:
        whole = f.read()
    for bit in range(0, 8 * len(whole), 5):
        with open(said, "wb") as f:
            f.write(flipped(bytearray(whole), bit))
        assert why_bad(path), (bit, flipped(bytearray(whole), bit))


class Foreign:
    pass


FOREIGN = dict(picture=b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40, empty=b"", text=b"no checkpoint",
               pickle=pickle.dumps(dict(model={}, step=12)), code=pickle.dumps(Foreign()))


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_refused_by_whoever_reads_it(straight, tmp_path, kind):
    path = damaged_copy(straight, tmp_path / "out", lambda data: FOREIGN[kind])
    assert newest_verified(tmp_path / "out")[0] == 10
    with pytest.raises(Refused, match=r"step_00000012\.pt"):
        load_weights(path)
    os.unlink(path[:-len(".pt")] + ".json")
    with pytest.raises(Refused, match="no checkpoint of this project"):
        load_weights(path)


def test_a_torch_file_of_something_else_is_refused(tmp_path):
    for i, content in enumerate(([1, 2], dict(model={}), dict(model={}, settings={}, vocab_size=1, eot_id=0))):
        torch.save(content, tmp_path / f"{i}.pt")
        with pytest.raises(Refused, match="no checkpoint of this project"):
            load_weights(str(tmp_path / f"{i}.pt"))


@pytest.mark.parametrize("damage", [lambda data: FOREIGN["picture"], lambda data: flipped(data, 4 * len(data)),
                                    lambda data: data[:len(data) // 2]])
def test_a_run_over_a_damaged_checkpoint_takes_the_one_before_and_says_so(words, straight, tmp_path, damage):
    out = tmp_path / "out"
    damaged_copy(straight, out, damage)
    assert run(words, out)[0] == 0
    assert "step_00000012.pt is not used" in screen(out) and rows(out, "resume")[0]["step"] == 10
    assert same_run(out, straight, 12)


# ---- signals, ranks that die, ranks that hang

@pytest.mark.parametrize("at, nth, step", [("start", 1, 0), ("first_pass", 1, 0), ("step", 1, 0), ("step", 3, 3),
                                           ("save", 2, 5), ("evaluate", 1, 3), ("evaluate", 4, 12)])
def test_sigterm_in_any_phase_ends_with_143_and_the_same_command_goes_on(words, straight, tmp_path, at, nth, step):
    out, more = tmp_path / "out", ["--eval_interval=3"]
    code, seconds = run(words, out, dict(at=at, nth=nth, do="term"), more=more)
    assert code == 143 and seconds < 10
    newest = newest_verified(out)
    assert (newest[0] if newest else 0) == step
    if step or at == "step":  # the record begins behind the first pass
        assert (record(out)["status"], record(out)["exit_code"]) == ("stopped", 143)
    assert run(words, out, more=more)[0] == 0 and column(out, "loss") == column(straight, "loss")
    assert column(out, "step", "eval") == [3, 6, 9, 12]


def test_a_signal_before_the_first_update_whose_exception_is_lost_ends_within_seconds(words, tmp_path):
    code, seconds = run(words, tmp_path / "out", dict(at="first_pass", nth=1, do="term swallowed"))
    assert code == 143 and seconds < 10 and not os.path.exists(tmp_path / "out" / "ckpt")


def test_a_second_signal_after_5_seconds_ends_a_save_that_hangs(words, tmp_path):
    job = Forked((*words, f"--out_dir={tmp_path}/out"), [dict(at="fsync", nth=2, do="sleep")])
    for _ in range(600):
        if marks(tmp_path / "out", "did"):
            break
        time.sleep(0.05)
    job.terminate()
    assert job.wait(5.5) is None
    job.terminate()
    assert job.wait(5) == 143 and newest_verified(tmp_path / "out")[0] == 2


def test_a_hang_on_one_device_ends_with_its_stack_on_disk(words, tmp_path):
    code, seconds = run(words, tmp_path / "out", dict(at="step", nth=3, do="sleep"), more=["--dist_timeout_s=2"])
    assert code == 1 and seconds < 10
    assert "in act" in (tmp_path / "out" / "hang.rank0.txt").read_text()


def test_sigterm_under_torchrun_before_the_first_update_ends_all_ranks_at_once(words, tmp_path):
    code, seconds = run(words, tmp_path / "out", dict(at="first_pass", nth=1, do="term agent"), begin=Torchrun)
    assert code == 1 and seconds < 28 and not os.path.exists(tmp_path / "out" / "ckpt")


def test_sigterm_under_torchrun_in_an_evaluation_ends_all_ranks_with_that_step_saved(words, tmp_path):
    code, seconds = run(words, tmp_path / "out", dict(at="evaluate", nth=1, do="term agent"), begin=Torchrun,
                        more=["--eval_interval=3"])
    assert code == 1 and seconds < 28 and newest_verified(tmp_path / "out")[0] == 3
    assert (record(tmp_path / "out")["status"], record(tmp_path / "out")["exit_code"]) == ("stopped", 143)


def test_a_rank_that_refuses_at_the_start_ends_the_others_with_its_reason(words, tmp_path):
    code, seconds = run(words, tmp_path / "out", dict(at="start", nth=1, do="refuse", rank=1), begin=Torchrun)
    assert code == 1 and seconds < 28
    assert screen(tmp_path / "out").count("train.py: rank 1: a fault was injected") == 1


@pytest.mark.parametrize("do, said", [("kill", r"rank +: 1 [\s\S]*Signal 9"), ("raise", "a fault was injected")])
def test_a_rank_that_dies_ends_the_job_which_goes_on_at_its_last_checkpoint(words, tmp_path, do, said):
    out = tmp_path / "out"
    code, seconds = run(words, out, dict(at="step", nth=5, do=do, rank=1), begin=Torchrun, more=["--dist_timeout_s=8"])
    assert code == 1 and seconds < 28 and re.search(said, screen(out))
    assert newest_verified(out)[0] == 4
    assert run(words, out)[0] == 0 and rows(out, "resume")[0]["step"] == 4
    assert column(out, "step") == list(range(1, 13))


def test_a_rank_that_hangs_ends_the_job_in_bounded_time_and_its_stack_is_on_disk(words, tmp_path):
    out = tmp_path / "out"
    code, seconds = run(words, out, dict(at="step", nth=5, do="sleep", rank=1), begin=Torchrun,
                        more=["--dist_timeout_s=4"])
    assert code == 1 and seconds < 28
    assert "in act" in (out / "hang.rank1.txt").read_text() and newest_verified(out)[0] == 4
