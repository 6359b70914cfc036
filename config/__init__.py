"""Settings: one frozen dataclass a script, overridden by config files and --key=value, later wins.

    python train.py config/train_0p5b.py --learning_rate=3e-4

A config file is plain Python that assigns keys. Every key, its type and its default stand in the script's `Config`;
the comment behind a field is its help text.
"""
import contextlib
import dataclasses
import difflib
import inspect
import math
import os
import re
import runpy
import sys
from types import ModuleType


class Refused(Exception):
    """Settings, data or a disk this job will not start with. The message is one line for a person; exit code 2."""


def _end_in_one_line(kind, error, trace):
    """An uncaught exception: a refusal or a missing package is one line, from rank 0 alone, and exit code 2."""
    script = os.path.basename(sys.argv[0]) or "python"
    if issubclass(kind, ModuleNotFoundError) and error.name:
        message = f"the package '{error.name}' is not installed: run `make setup`, then `source .venv/bin/activate`"
    elif issubclass(kind, Refused):
        message = str(error)
    elif issubclass(kind, BrokenPipeError):  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    else:
        return sys.__excepthook__(kind, error, trace)
    if os.environ.get("RANK", "0") == "0":
        print(f"{script}: {message}", file=sys.__stderr__, flush=True)  # torch.distributed swaps sys.stderr here
    sys.exit(2)


sys.excepthook = _end_in_one_line


def convert(key, kind, value, origin):
    """`value` (text from the command line, or a Python value from a file) as a field's type. Raises Refused."""
    wrong = f"{origin}: {key} expects {kind.__name__}, got {value!r}"
    if kind is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        if str(value).lower() in words:
            return words[str(value).lower()]
        wrong += " (true, false, 1 or 0)"
    elif kind is str and isinstance(value, str):
        return value
    elif kind is tuple and isinstance(value, (str, dict, list, tuple)):
        # given once or several times on the command line, as a list in a file
        return (value,) if isinstance(value, (str, dict)) else tuple(value)
    elif kind in (int, float) and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        for read in (int, float):  # "3e-4"; also "1e3" for an int, since it is whole
            with contextlib.suppress(ValueError, OverflowError):
                number = read(value)
                if (isinstance(value, str) or number == value) and math.isfinite(number) and kind(number) == number:
                    return kind(number)
    raise Refused(wrong)


def helps(config_class):
    """{key: help text}, read from the comment behind each field, inherited ones included."""
    lines = [line for c in config_class.__mro__[:-1] for line in inspect.getsource(c).splitlines()]
    return {m[1]: m[2] for line in lines if (m := re.match(r"\s+(\w+): \w+ = .*?#\s*(.*)", line))}


def show_help(config_class, doc):
    script = os.path.basename(sys.argv[0])
    print(f"{doc.strip()}\n\nusage: python {script} [config/FILE.py ...] [--key=value ...]\n")
    text = helps(config_class)
    for field in dataclasses.fields(config_class):
        left = f"  --{field.name}={field.default!r}"
        print(f"{left:<40} {field.type.__name__:<6} {text.get(field.name, '')}")


def read_file(path):
    """{key: value} of a config file. Raises Refused naming file and line."""
    if not os.path.isfile(path):
        raise Refused(f"config file {path} does not exist")
    try:
        values = runpy.run_path(path)
    except Exception as error:
        last = error.__traceback__
        while last.tb_next:
            last = last.tb_next
        line = getattr(error, "lineno", None) or last.tb_lineno
        raise Refused(f"config file {path}, line {line}: {type(error).__name__}: {error}") from None
    return {k: v for k, v in values.items() if not k.startswith("_") and not isinstance(v, ModuleType)}


def load(config_class, argv, doc="", positional=None):
    """A `config_class` with the defaults overridden by `argv`, the words after the script's name.

    `--help` prints every key and exits. `positional`, if given, is a list that takes the words which are neither
    a `.py` file nor a `--key`. Raises Refused, with the nearest key's name for an unknown one.
    """
    for stream in (sys.stdout, sys.stderr):  # text that the locale has no letters for must not end a run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    values, given = {}, {}

    def take(key, value, origin):
        if key not in fields:
            meant = [field for field in fields if "".join(w[0] for w in field.split("_")) == key]  # lr: learning_rate
            near = (meant or difflib.get_close_matches(key, fields, n=1, cutoff=0))[0]
            raise Refused(f"{origin}: unknown key '{key}'; the nearest is '{near}' (--help lists all)")
        values[key] = convert(key, fields[key].type, value, origin)

    for word in argv:
        if word in ("--help", "-h"):
            show_help(config_class, doc)
            sys.exit(0)
        if not word.startswith("--"):
            if word.endswith(".py") or positional is None:
                for key, value in read_file(word).items():
                    take(key, value, word)
            else:
                positional.append(word)
            continue
        key, equals, value = word[2:].partition("=")
        if key in fields and not equals:
            raise Refused(f"{word} needs a value: --{key}={fields[key].default!r}")
        if key in fields and fields[key].type is tuple:
            given[key] = value = given.get(key, ()) + (value,)
        take(key, value, "command line")
    return config_class(**values)


def to_argv(config, config_class):
    """The keys of `config_class` as command-line words, for a script that starts another."""
    return [f"--{field.name}={getattr(config, field.name)}" for field in dataclasses.fields(config_class)]
