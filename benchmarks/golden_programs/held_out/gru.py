import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from kit import begin_torch, spoil, times
from torch import nn

FAULTS = ("weight", "scale", "loss", "lr")
begin_torch()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(70, 24, padding_idx=0)
        self.reader = nn.GRU(24, 32, bidirectional=True, batch_first=True)
        self.dense = nn.Linear(64, 32)
        self.tags = nn.Linear(32, 9)

    def forward(self, ids):
        states, _ = self.reader(self.words(ids))
        return self.tags(torch.tanh(self.dense(states)) * times("scale"))


tagger = Tagger()
spoil("weight", tagger.reader.weight_hh_l0)
optimizer = torch.optim.Adagrad(tagger.parameters(), lr=0.02 * times("lr"))
for _ in range(3):
    ids, tags = torch.randint(0, 70, (10, 15)), torch.randint(0, 9, (10, 15))
    logits = tagger(ids)
    loss = -logits.log_softmax(-1).gather(-1, tags[..., None]).mean() * times("loss")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
