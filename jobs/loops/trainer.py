"""A small GPT-2 trained by the Trainer of transformers; the lines marked <- decentralize it.

    mpirun -n 3 python trainer.py --out runs/trainer
    mpirun -n 3 python trainer.py --out runs/trainer --resume 20   # if it was stopped at step 20

The program accumulates gradients, clips them, uses dropout and a schedule and writes the Trainer's
own checkpoints, in one folder per node. SIGTERM, ``touch runs/trainer/run/STOP`` and the end of the
allocation stop it after any step, with a checkpoint and exit code 75; the last line of the output
says which step to resume. It predicts the bytes of a text, by default of this file.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import transformers

import mpigossip  # <-

CONTEXT = 32
BATCH = 4
ACCUMULATE = 2
RATE = 3e-3


def samples_of(text):
    """Return the samples of a file: each has CONTEXT bytes, as inputs and labels of the model."""
    data = torch.tensor(list(Path(text).read_bytes()))
    rows = data[: len(data) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(world, options):
    """Train from the first step, or from a checkpoint, to the last step."""
    data = samples_of(options.text)
    data = data[world.rank :: world.size]  # <-
    out = options.out / f"node-{world.rank}"  # <-
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    optimizer = mpigossip.Gossip(world, model, optimizer, run=options.out / "run")  # <-
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 10, options.steps)
    arguments = transformers.TrainingArguments(
        str(out),
        max_steps=options.steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        save_steps=options.save_every,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=options.cpu,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        optimizers=(optimizer, scheduler),
        callbacks=[mpigossip.Gossip.callback(transformers)],  # <-
    )
    resumed = str(out / f"checkpoint-{options.resume}") if options.resume else None
    loss = trainer.train(resume_from_checkpoint=resumed).training_loss
    parameters = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    print(f"rank {world.rank}: loss {loss:.4f}, {hashlib.sha256(parameters).hexdigest()}")


def main():
    """Read the options and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--resume", type=int, default=0, help="step of the checkpoint to resume")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    parser.add_argument("--text", default=__file__)
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    options = parser.parse_args()
    torch.manual_seed(1337)
    with mpigossip.world() as world:  # <-
        train(world, options)


if __name__ == "__main__":
    main()
