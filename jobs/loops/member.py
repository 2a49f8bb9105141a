"""A loop that joins a training as a member, without a launcher.

python member.py runs/members            in any number of terminals or single-node jobs
touch runs/members/STOP                  stops all members; `rm` the file before you continue
python member.py runs/members --replay   repeats the training, and compares each model
"""

import sys

import torch
from torch import nn

import mpigossip

# CHUNKS is the number of chunks of the whole training, and H the number of steps per chunk.
CHUNKS = 60
H = 20

torch.manual_seed(0)
features = torch.randn(4096, 20)
targets = (features @ torch.randn(20, 4)).argmax(1)


def batches(chunk):
    """Yield H batches of 32 samples, which depend on the chunk only, not on the member."""
    draw = torch.Generator().manual_seed(chunk)
    for picked in torch.randint(len(features), (H, 32), generator=draw):
        yield features[picked], targets[picked]


model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

again = "--replay" in sys.argv
with mpigossip.join(sys.argv[1], model, optimizer, chunks=CHUNKS, replay=again) as member:  # <-
    for chunk in member:  # <- a number below CHUNKS; this member has claimed this chunk
        # The learning rate depends on the progress of all members.
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - member.progress / CHUNKS)
        for inputs, classes in batches(chunk):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), classes)
            loss.backward()
            optimizer.step()
        member.log(loss=loss, lr=group["lr"])
    finished = member.finished

if not finished:
    sys.exit(75)  # The member was asked to leave. After this code, batch scripts queue it again.
accuracy = (model(features).argmax(1) == targets).float().mean()
print(f"the average of the last models gets {accuracy:.1%} right")
