"""Two networks that train each other, with labels and noise made on the device."""

import torch
from torch import nn

torch.manual_seed(4)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def weights_init(m):
    if "Conv" in m.__class__.__name__:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in m.__class__.__name__:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
)  # fmt: skip
netD = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
)  # fmt: skip
netG.apply(weights_init), netD.apply(weights_init)
netG, netD = netG.to(device), netD.to(device)
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
images = torch.rand(5, 8, 1, 8, 8) * 2 - 1
torch.manual_seed(5)
for i, data in enumerate(images):
    netD.zero_grad()
    real = data.to(device)
    label = torch.full((8,), 1, dtype=real.dtype, device=device)
    errD_real = criterion(netD(real), label)
    errD_real.backward()
    noise = torch.randn(8, 6, 1, 1, device=device)
    fake = netG(noise)
    label.fill_(0)
    errD_fake = criterion(netD(fake.detach()), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1)
    output = netD(fake)
    errG = criterion(output, label)
    errG.backward()
    optimizerG.step()
    errD = errD_real + errD_fake
    print(f"[{i}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f} D(G(z)): {output.mean().item():.4f}")
