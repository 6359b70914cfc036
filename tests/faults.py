"""A run of train.py with one fault in it, to see what the guard says.

    python tests/faults.py FAULT [config/FILE.py ...] [--key=value ...]

Each fault replaces one function and then calls train.main(): train.py has no switch for any of them.
"""
import os
import sys
import time

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import model  # noqa: E402
import prepare  # noqa: E402
import train  # noqa: E402


def rate_zero():
    return train, "learning_rate", lambda step, c: 0.0


def no_step():
    return torch.optim.AdamW, "step", lambda self, closure=None: None


def huge_rate():
    """300 times the rate that was asked for; give --grad_clip=0 with it."""
    right = train.learning_rate
    return train, "learning_rate", lambda step, c: 300 * right(step, c)


def loss_times_accumulation():
    """The sum of the losses is divided by the targets of one micro-batch instead of those of all."""
    right = train.Batches.take

    def take(self):
        x, y, valid = right(self)
        return x, y, valid // self.accumulation
    return train.Batches, "take", take


def mask_off():
    """Every position sees the whole window; nothing else of the attention changes."""
    def attend(q, k, v, mask):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return model, "attend", attend


def targets_shifted_by_zero():
    right = train.Batches.read

    def read(self, first):
        x, _ = right(self, first)
        return x, x.clone()
    return train.Batches, "read", read


def five_documents():
    """The train split ends behind its fifth document."""
    right = prepare.Corpus.__init__

    def init(self, data_dir, check=True):
        right(self, data_dir, check)
        ids = np.fromfile(f"{data_dir}/train.bin", self.dtype)
        end = int(np.flatnonzero(ids == self.eot_id)[4]) + 1
        self.meta["splits"]["train"] = dict(five=dict(offset=0, tokens=end, documents=5, bytes=end))
    return prepare.Corpus, "__init__", init


def nan_weight():
    """One weight is NaN from the third update on."""
    right, done = torch.optim.AdamW.step, []

    def step(self, closure=None):
        right(self, closure)
        done.append(1)
        if len(done) == 3:
            with torch.no_grad():
                self.param_groups[0]["params"][1].view(-1)[7] = float("nan")
    return torch.optim.AdamW, "step", step


def data_wait():
    """Every batch comes 200 ms late."""
    right = train.Batches.take
    return train.Batches, "take", lambda self: time.sleep(0.2) or right(self)


def bad_batch():
    """The batch of update 150 is random ids: the curve has one spike."""
    right = train.Batches.read

    def read(self, first):
        x, y = right(self, first)
        if first == 149 * self.per_step:
            y = torch.randint(self.corpus.vocab_size, y.shape, generator=torch.Generator().manual_seed(0))
        return x, y
    return train.Batches, "read", read


def rate_in_waves():
    """Every 20 updates the rate is 100 times as high for 5."""
    right = train.learning_rate
    return train, "learning_rate", lambda step, c: right(step, c) * (100 if step % 20 < 5 else 1)


FAULTS = {f.__name__: f for f in (
    rate_zero, no_step, huge_rate, rate_in_waves, loss_times_accumulation, mask_off, targets_shifted_by_zero,
    five_documents, bad_batch, nan_weight, data_wait)}


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in FAULTS:
        print(f"{__doc__}\nFAULT is one of: {', '.join(FAULTS)}", file=sys.stderr)
        sys.exit(2)
    setattr(*FAULTS[sys.argv.pop(1)]())
    train.main()


if __name__ == "__main__":
    main()
