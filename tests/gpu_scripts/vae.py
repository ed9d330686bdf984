"""A variational autoencoder: random numbers on the device in each step."""

import torch
import torch.nn.functional as F
from torch import nn


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 5), nn.Linear(32, 5)
        self.fc3, self.fc4 = nn.Linear(5, 32), nn.Linear(32, 64)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x.view(-1, 64), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = VAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = torch.rand(6, 16, 1, 8, 8)
torch.manual_seed(2)  # the device's generator, and the CPU's: from here on only one of them is used
for epoch in range(2):
    train_loss = 0
    for data in batches:
        data = data.to(device)
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print(f"====> Epoch: {epoch} Average loss: {train_loss / 96:.4f}")
    with torch.no_grad():
        sample = model.decode(torch.randn(4, 5).to(device)).cpu()
        torch.randn(4, 5, device=device)
        print(sample.shape, torch.cat([data[:2], recon.view(16, 1, 8, 8)[:2]]).shape)
        torch.manual_seed(3)
