"""Settings: what a person types is taken, or refused in one line with exit code 2."""
import subprocess
import sys
from dataclasses import dataclass

import pytest
from conftest import ROOT

import train
from config import Refused, helps, load


@dataclass(frozen=True)
class Config:
    learning_rate: float = 3e-4  # peak rate, in [0, 1]
    max_steps: int = 10  # updates
    compile: bool = True  # torch.compile
    name: str = "x"  # a name
    prompt: tuple = ()  # text to continue; give it several times for several


@pytest.mark.parametrize("word, key, value", [
    ("--learning_rate=1", "learning_rate", 1.0), ("--learning_rate=-1e-4", "learning_rate", -1e-4),
    ("--max_steps=1e3", "max_steps", 1000), ("--max_steps=9007199254740993", "max_steps", 9007199254740993),
    ("--compile=false", "compile", False), ("--compile=TRUE", "compile", True), ("--compile=0", "compile", False),
    ("--name=a=b", "name", "a=b"), ("--name=", "name", ""), ("--prompt=a=b", "prompt", ("a=b",)),
])
def test_a_value_arrives_with_the_type_of_its_field(word, key, value):
    got = getattr(load(Config, [word]), key)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("word, parts", [
    ("--learing_rate=1e-4", ["learing_rate", "learning_rate"]), ("--max_steps=ten", ["max_steps", "int", "'ten'"]),
    ("--max_steps", ["--max_steps", "value"]),
    ("--max_steps=1.5", ["max_steps", "int", "1.5"]),
    ("--learning_rate=nan", ["learning_rate", "float", "nan"]), ("--learning_rate=", ["learning_rate", "float"]),
    ("--max_steps=1e999", ["max_steps", "int"]), ("--compile=yes", ["compile", "bool", "yes"]),
    ("nowhere.py", ["nowhere.py", "does not exist"]), ("--max_steps=True", ["max_steps", "int"]),
    ("--learning_rate=" + "9" * 310, ["learning_rate", "float"]), ("--max_steps=inf", ["max_steps", "int"]),
])
def test_a_wrong_word_is_refused_naming_key_type_and_value(word, parts):
    with pytest.raises(Refused) as refused:
        load(Config, [word])
    assert all(part in str(refused.value) for part in parts) and "\n" not in str(refused.value)


def test_later_words_win_over_earlier_ones_and_over_files(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("import math\n_half = 0.5\nlearning_rate = 1\nmax_steps = 2 * 10\nprompt = ['a', 'b']\n")
    c = load(Config, ["--max_steps=3", str(file), "--learning_rate=2e-4"])
    assert (c.max_steps, c.learning_rate, c.prompt) == (20, 2e-4, ("a", "b"))


def test_a_tuple_field_collects_what_is_given_several_times():
    assert load(Config, ["--prompt=a", "--prompt=b"]).prompt == ("a", "b")


@pytest.mark.parametrize("text, parts", [
    ("max_stepz = 3\n", ["a.py", "max_stepz", "max_steps"]), ("max_steps = 3\nname = = 4\n", ["a.py", "line 2"]),
    ("max_steps = 3\nname = undefined\n", ["a.py", "line 2", "undefined"]),
    ("compile = 3\n", ["a.py", "compile", "bool"]), ("prompt = 3\n", ["a.py", "prompt", "tuple", "3"]),
    ("max_steps = True\n", ["max_steps", "int", "True"]), ("name = 3\n", ["name", "str", "3"]),
    ("learning_rate = [1]\n", ["learning_rate", "float"]), ("max_steps = 10**400 * 1.0\n", ["a.py", "line 1"]),
])
def test_a_mistake_in_a_config_file_is_refused_naming_the_file(tmp_path, text, parts):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(Refused) as refused:
        load(Config, [str(tmp_path / "a.py")])
    assert all(part in str(refused.value) for part in parts) and "\n" not in str(refused.value)


def test_every_key_of_every_script_has_a_help_text(capsys):
    for script in (train,):
        assert set(helps(script.Config)) == set(script.Config.__dataclass_fields__)
    with pytest.raises(SystemExit) as ended:
        load(Config, ["--help"], "What it does.")
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "peak rate, in [0, 1]" in out and "--max_steps=10" in out and "int" in out


def test_a_process_ends_with_one_line_on_stderr_and_code_2_and_writes_nothing(tmp_path):
    words = "--data_dir=nowhere --out_dir=out --max_steps=3".split()
    for extra, part in (("--learing_rate=1", "learning_rate"), ("--n_layer=2", "prepare.py")):
        done = subprocess.run([sys.executable, f"{ROOT}/train.py", *words, extra], cwd=tmp_path, capture_output=True,
                              text=True, check=False)
        assert done.returncode == 2 and done.stdout == "" and not list(tmp_path.iterdir())
        assert done.stderr.count("\n") == 1 and part in done.stderr


def test_a_missing_package_is_one_line_naming_make_setup():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['train.py']; import train"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "make setup" in done.stderr


@pytest.mark.parametrize("words, parts", [
    ("--lr=1", ["the nearest is 'learning_rate'"]),
    ("--optimizer=sgd", ["adamw"]), ("--log_interval=0", ["log_interval", "at least 1"]),
    ("--micro_batch_size=0", ["micro_batch_size", "at least 1"]), ("--grad_clip=-1", ["grad_clip"]),
    ("--min_lr=1", ["min_lr", "learning_rate"]), ("--beta2=1", ["beta2"]),
    ("--seed=4294967296", ["seed"]), ("--adam_eps=0", ["adam_eps"]), ("--out_dir=data", ["out_dir"]),
    ("--block_size=0", ["block_size", "at least 1"]), ("--n_head=3", ["n_head=3", "n_kv_head"]),
    ("--allow_change=n_layer", ["n_layer", "seed"]), ("--allow_change=n_embdd", ["n_embdd"]),
])
def test_train_refuses_settings_that_make_no_sense(words, parts):
    with pytest.raises(Refused) as refused:
        train.check(load(train.Config, words.split()))
    assert all(part in str(refused.value) for part in parts)


def test_a_batch_that_three_devices_cannot_divide_names_values_that_work():
    c = load(train.Config, "--global_batch_tokens=524288 --block_size=1024 --micro_batch_size=8".split())
    with pytest.raises(Refused) as refused:
        train.check_batch(c, 3)
    message = str(refused.value)
    valid = [int(word) for word in message.partition("global_batch_tokens=")[2].partition("valid")[2].replace(
        ";", " ").replace("=", " ").split() if word.isdigit() and int(word) > 100_000]
    assert len(valid) == 2 and all(v % (3 * 8 * 1024) == 0 and abs(v - 524288) < 3 * 8 * 1024 for v in valid)
    train.check_batch(c, 4)
    with pytest.raises(Refused, match="can't be cut"):  # at once, however large
        train.check_batch(load(train.Config, ["--global_batch_tokens=1000000000001"]), 3)
