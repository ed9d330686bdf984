"""The ``Trainer`` of transformers: checkpoints saved and resumed, accumulation, clipping, gradient checkpointing."""

import sys

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

transformers.logging.set_verbosity_error()
CONFIG = GPT2Config(
    n_layer=2, n_head=2, n_embd=16, vocab_size=31, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)


class Words(torch.utils.data.Dataset):
    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return 16

    def __getitem__(self, index):
        words = (torch.arange(8) * (index + 1)) % 31 if self.tensors else [i * (index + 1) % 31 for i in range(8)]
        return {"input_ids": words, "labels": words}


class Prints(TrainerCallback):
    def on_log(self, _args, _state, _control, logs=None, **_):
        print([f"{logs[name]:.5f}" for name in ("loss", "grad_norm") if name in logs])


def train(name, resume=None, tensors=True, **options):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG)
    arguments = TrainingArguments(
        output_dir=name, max_steps=4, per_device_train_batch_size=4, save_steps=2, logging_steps=1, report_to=[],
        disable_tqdm=True, learning_rate=1e-2, seed=1, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Words(tensors), callbacks=[Prints()])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    assert model.device.type == sys.argv[-1]


train("plain")
train("plain", resume="plain/checkpoint-2")
train("lists", tensors=False)
train("more", gradient_accumulation_steps=2, max_grad_norm=0.5, gradient_checkpointing=True)
