"""Learning from a simulation that needs every action as soon as it is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributions import Categorical

from benchmarks.wide.workloads.base import TRAINING, Output, Program, Workload

__all__ = ["WORKLOADS"]

_STEPS = 30


class _Pole:
    """A pole on a cart, in plain Python, as in the usual exercise."""

    def __init__(self) -> None:
        self.state = (0.0, 0.0, 0.05, 0.0)

    def step(self, action: int) -> tuple[tuple[float, ...], float]:
        place, speed, angle, turning = self.state
        force = 10.0 if action == 1 else -10.0
        push = (force + 0.05 * turning * turning * math.sin(angle)) / 1.1
        swing = 9.8 * math.sin(angle) - math.cos(angle) * push
        swing /= 0.5 * (4.0 / 3.0 - 0.1 * math.cos(angle) ** 2 / 1.1)
        gain = push - 0.05 * swing * math.cos(angle) / 1.1
        self.state = (place + 0.02 * speed, speed + 0.02 * gain, angle + 0.02 * turning, turning + 0.02 * swing)
        return self.state, 1.0 if abs(self.state[2]) < 0.21 else 0.0


def policy_gradient(device: str) -> Program:
    """An episode of a fixed number of steps, then one update from its log-probabilities."""
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def turn() -> Sequence[Output]:
        pole, logarithms, rewards = _Pole(), [], []
        state: tuple[float, ...] = pole.state
        for _ in range(_STEPS):
            choice = Categorical(logits=policy(torch.tensor(state, device=device)))
            action = choice.sample()
            logarithms.append(choice.log_prob(action))
            state, reward = pole.step(int(action.item()))
            rewards.append(reward)
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        advantage = torch.tensor(returns, device=device)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        loss = -(torch.stack(logarithms) * advantage).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item(), *state]

    return Program(turn, lambda: list(policy.parameters()))


WORKLOADS = (
    Workload(
        "policy-gradient",
        "REINFORCE: 30 states one at a time, a sampled action read at each",
        policy_gradient,
        TRAINING,
    ),
)
