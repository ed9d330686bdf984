"""REINFORCE: one small forward pass for each decision, a backward over a whole episode."""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(543)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(4, 16), nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return F.softmax(self.affine2(F.relu(self.affine1(x))), dim=1)


class Pole:
    """An environment on the host."""

    def __init__(self):
        self.state = torch.tensor([0.1, 0.0, -0.1, 0.0])

    def step(self, action):
        force = 1.0 if action == 1 else -1.0
        self.state = self.state + torch.tensor([self.state[1] * 0.1, force * 0.1, self.state[3] * 0.1, -force * 0.15])
        return self.state.clone(), 1.0, bool(self.state.abs().max() > 0.6)


policy = Policy().to(device)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
torch.manual_seed(9)
for episode in range(3):
    env = Pole()
    state, ep_reward = env.state, 0
    for _ in range(15):
        probs = policy(state.float().unsqueeze(0).to(device))
        m = Categorical(probs)
        action = m.sample()
        policy.saved_log_probs.append(m.log_prob(action))
        state, reward, done = env.step(action.item())
        policy.rewards.append(reward)
        ep_reward += reward
        if done:
            break
    R, returns = 0, deque()
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.appendleft(R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_loss = torch.cat([-p * R for p, R in zip(policy.saved_log_probs, returns.tolist(), strict=True)]).sum()
    optimizer.zero_grad()
    policy_loss.backward()
    optimizer.step()
    print(f"Episode {episode}\tLast reward: {ep_reward:.2f}\tloss: {policy_loss.item():.5f}")
    del policy.rewards[:], policy.saved_log_probs[:]
