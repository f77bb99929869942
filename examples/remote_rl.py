"""Trains an agent on CartPole with observers in other processes, which ask the agent's policy what to do.

    python examples/remote_rl.py        # needs pip install gymnasium

Each observer has an environment of its own. The agent has them play an episode each, at the same time; they call its
policy back, and return what they have seen. The agent then learns from all episodes by REINFORCE.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.server.remote import local_owners
from shoal.server.remote.stepper import at_once

OBSERVERS, GAMMA, MOST_STEPS = 2, 0.99, 200


class Observer(nn.Module):
    """An environment, and the way to the agent's policy at `address`."""

    def __init__(self, address: str, token: str, seed: int) -> None:
        super().__init__()
        import gymnasium

        self.environment = gymnasium.make("CartPole-v1")
        self.policy = shoal.remote(address, "policy", token=token)
        self.draw = torch.Generator().manual_seed(seed)
        self.environment.reset(seed=seed)

    @torch.no_grad()
    def forward(self, most: int) -> dict[str, Tensor]:
        """Plays an episode of at most that many steps; returns observations [steps, 4], actions and rewards [steps]."""
        seen, done, rewards = [], [], []
        state, _ = self.environment.reset()
        for _ in range(most):
            seen.append(torch.as_tensor(state, dtype=torch.float32))
            odds = self.policy(seen[-1]).softmax(-1)
            done.append(torch.multinomial(odds, 1, generator=self.draw))
            state, reward, failed, cut, _ = self.environment.step(int(done[-1]))
            rewards.append(float(reward))
            if failed or cut:
                break
        return {"seen": torch.stack(seen), "done": torch.cat(done), "rewards": torch.tensor(rewards)}


FACTORIES = [Observer]


def returns(rewards: Tensor) -> Tensor:
    """Discounted sums of what follows each step, [steps]."""
    total, found = 0.0, []
    for reward in reversed(rewards.tolist()):
        total = reward + GAMMA * total
        found.append(total)
    return torch.tensor(found[::-1])


def train(addresses: list[str], token: str, episodes: int) -> list[float]:
    """Returns the mean length of the episodes that observers have played at the same time."""
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    lengths = []
    with shoal.Owner({"policy": policy}) as agent:
        observers = [
            shoal.remote(addresses[number % len(addresses)], Observer, agent.address, agent.token, number, token=token)
            for number in range(OBSERVERS)
        ]
        for episode in range(episodes):
            played = at_once(lambda observer: observer(MOST_STEPS), observers)
            gains = torch.cat([returns(each["rewards"]) for each in played])
            gains = (gains - gains.mean()) / (gains.std() + 1e-6)
            seen, done = (torch.cat([each[name] for each in played]) for name in ("seen", "done"))
            loss = (F.cross_entropy(policy(seen), done, reduction="none") * gains).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lengths.append(len(seen) / OBSERVERS)
            if episode % 10 == 0:
                print(f"episode {episode}: {lengths[-1]:.0f} steps, loss {loss.item():.3f}", flush=True)
        del observers
    return lengths


def main() -> None:
    torch.set_num_threads(1)
    with local_owners(FACTORIES, OBSERVERS) as (addresses, token):
        lengths = train(addresses, token, 30)
    first, last = sum(lengths[:10]) / 10, sum(lengths[-10:]) / 10
    print(f"the pole stood for {first:.0f} steps at first, {last:.0f} after {len(lengths)} episodes")


if __name__ == "__main__":
    main()
