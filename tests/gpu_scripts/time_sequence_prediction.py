"""LSTM cells in double precision, step by step, trained by L-BFGS, which calls the model as often as it likes."""

import numpy as np
import torch
from torch import nn


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

    def forward(self, input, future=0):
        outputs = []
        h1, c1, h2, c2 = (torch.zeros(input.size(0), 8, dtype=torch.double, device=input.device) for _ in range(4))
        for t in input.split(1, dim=1):
            h1, c1 = self.lstm1(t, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            output = self.linear(h2)
            outputs += [output]
        for _ in range(future):
            h1, c1 = self.lstm1(output, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            output = self.linear(h2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


np.random.seed(0)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
data = np.sin(np.arange(12) + np.random.randint(-8, 8, 6).reshape(6, 1) / 1.0).astype("float64")
input, target = torch.from_numpy(data[2:, :-1]).to(device), torch.from_numpy(data[2:, 1:]).to(device)
seq = Sequence()
seq.double().to(device)
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
for i in range(2):
    print("STEP: ", i)

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(input), target)
        print(f"loss: {loss.item():.8f}")
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        pred = seq(input, future=3)
        print(f"test loss: {criterion(pred[:, :-3], target).item():.8f}", pred.detach().cpu().numpy().shape)
