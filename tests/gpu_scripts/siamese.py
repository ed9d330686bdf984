"""One network for two images, with a weight initialisation of its own and a threshold."""

import torch
from torch import nn


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(4 * 25 * 2, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
        self.sigmoid = nn.Sigmoid()
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, one, two):
        both = torch.cat((self.features(one), self.features(two)), 1)
        return self.sigmoid(self.fc(both))


torch.manual_seed(2)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = SiameseNetwork().to(device)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
criterion = nn.BCELoss()
ones, twos, same = torch.rand(5, 8, 1, 12, 12), torch.rand(5, 8, 1, 12, 12), torch.randint(2, (5, 8)).float()
for one, two, target in zip(ones, twos, same, strict=True):
    one, two, target = one.to(device), two.to(device), target.to(device)
    optimizer.zero_grad()
    outputs = model(one, two).squeeze()
    loss = criterion(outputs, target)
    loss.backward()
    optimizer.step()
    pred = torch.where(outputs > 0.5, 1, 0)
    print(f"loss {loss.item():.6f} correct {pred.eq(target.view_as(pred)).sum().item()}")
