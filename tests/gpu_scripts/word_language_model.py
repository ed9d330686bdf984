"""A recurrent language model: truncated backpropagation, clipping, annealing, and text made word by word."""

import math

import torch
from torch import nn

torch.manual_seed(1111)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
NTOKEN, BPTT = 23, 5


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(NTOKEN, 16)
        self.rnn = nn.LSTM(16, 16, 2)
        self.decoder = nn.Linear(16, NTOKEN)
        self.decoder.weight = self.encoder.weight

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return torch.log_softmax(self.decoder(output).view(-1, NTOKEN), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(2, bsz, 16), weight.new_zeros(2, bsz, 16)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous().to(device)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


model = RNNModel().to(device)
criterion = nn.NLLLoss()
corpus = batchify(torch.randint(NTOKEN, (200,)), 4)
lr, best = 5.0, None
for epoch in range(2):
    model.train()
    total, hidden = 0.0, model.init_hidden(4)
    for i in range(0, corpus.size(0) - 1, BPTT):
        seq_len = min(BPTT, len(corpus) - 1 - i)
        data, targets = corpus[i : i + seq_len], corpus[i + 1 : i + 1 + seq_len].view(-1)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total += len(data) * loss.item()
    val_loss = total / (len(corpus) - 1)
    print(f"| end of epoch {epoch} | loss {val_loss:5.3f} | ppl {math.exp(val_loss):8.3f}")
    if best is None or val_loss < best:
        best = val_loss
        torch.save(model, "model.pt")
    else:
        lr /= 4.0
with open("model.pt", "rb") as f:
    model = torch.load(f, map_location=device, weights_only=False)
    model.rnn.flatten_parameters()
model.eval()
torch.manual_seed(7)
hidden = model.init_hidden(1)
input = torch.tensor([[3]]).to(device)
with torch.no_grad():
    for _ in range(8):
        output, hidden = model(input, hidden)
        word_idx = torch.multinomial(output.squeeze().div(1.0).exp().cpu(), 1)[0]
        input.fill_(word_idx)
        print(word_idx.item(), end=" ")
print()
