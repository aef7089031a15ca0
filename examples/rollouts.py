"""Reinforcement learning: one process trains a policy, two others act by it. Each sample says which version made it.

python examples/rollouts.py

The task is a bandit: the policy sees a digit, names one, and is rewarded if that is right. A step of the training uses
the samples of one version, so one process that does everything has the same losses to the bit: both are printed.
"""

import multiprocessing
from multiprocessing.queues import Queue

import torch
from sklearn.datasets import load_digits

import tensorwire as tw

STEPS, ACTORS, BATCH = 60, 2, 128
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # which digits, what was named, rewards


def policy() -> torch.nn.Module:
    """The same in every process, before the first version."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))


@torch.no_grad()
def act(model: torch.nn.Module, step: int, actor: int) -> Sample:
    """What an actor does by the weights of ``step``."""
    random = torch.Generator().manual_seed(1000 * step + actor)
    seen = torch.randint(len(images), (BATCH,), generator=random)
    named = torch.multinomial(model(images[seen]).softmax(1), 1, generator=random)[:, 0]
    return seen, named, (named == labels[seen]).float()


def loss_of(model: torch.nn.Module, samples: list[Sample]) -> torch.Tensor:
    """REINFORCE, with the mean reward as its baseline."""
    seen, named, rewards = (torch.cat(parts) for parts in zip(*samples, strict=True))
    chosen = model(images[seen]).log_softmax(1).gather(1, named[:, None])[:, 0]
    return -(chosen * (rewards - rewards.mean())).mean()


def run_actor(job: str, actor: int, made: Queue) -> None:
    """Acts by each version of the weights, until there is none any more."""
    model = policy()
    with tw.store.connect(job) as reader:
        for version in reader.follow(model):
            parts = act(model, version.step, actor)
            made.put((version, actor, [part.tolist() for part in parts]))
            if version.step == STEPS - 1:
                return


def together() -> list[float]:
    """The training, with actors in processes of their own."""
    context = multiprocessing.get_context("spawn")
    made, losses, model = context.Queue(), [], policy()
    with tw.init() as job:
        publish = tw.store.Every(1, when_held="wait")
        optimizer = tw.torch.StoreOptimizer(model, torch.optim.Adam, lr=1e-2, fused=True, publish=publish)
        actors = [context.Process(target=run_actor, args=(job.name, a, made)) for a in range(ACTORS)]
        for process in actors:
            process.start()
        for step in range(STEPS):
            got = sorted((made.get(timeout=60.0) for _ in range(ACTORS)), key=lambda sample: sample[1])
            assert {version.step for version, _, _ in got} == {step}, "samples of another version"
            loss = loss_of(model, [tuple(map(torch.tensor, parts)) for _, _, parts in got])
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for process in actors:
            process.join()
    return losses


def alone() -> list[float]:
    """The same in one process."""
    losses, model = [], policy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        loss = loss_of(model, [act(model, step, actor) for actor in range(ACTORS)])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


if __name__ == "__main__":
    ours, theirs = together(), alone()
    for step in range(0, STEPS, 10):
        print(f"step {step:2}  loss with {ACTORS} actors {ours[step]:.6f}, in one process {theirs[step]:.6f}")
    print("the losses are the same" if ours == theirs else "the losses DIFFER")
