"""A newcomer's run, on real data: a small student learns handwritten digits from a teacher, block by block."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from .api import distill
from .blocks import split
from .errors import InputError
from .recipe import KL, Recipe
from .tables import quantity, table

TEACHER_EPOCHS, BLOCKWISE_EPOCHS, FINISH_EPOCHS, BATCH = 20, 20, 4, 32
TEMPERATURE = 4.0


class Stage(nn.Module):
    """Two convolutions around a shortcut: full ones for the teacher, depthwise-separable ones for the student."""

    def __init__(self, channels: int, out: int, stride: int, separable: bool) -> None:
        super().__init__()
        convolution = separable_convolution if separable else full_convolution
        self.conv1 = convolution(channels, out, stride)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = convolution(out, out, 1)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


def full_convolution(channels: int, out: int, stride: int) -> nn.Module:
    """3 x 3 over all channels."""
    return nn.Conv2d(channels, out, 3, stride, 1, bias=False)


def separable_convolution(channels: int, out: int, stride: int) -> nn.Module:
    """3 x 3 in each channel, then 1 x 1 over channels: an eighth of the weights (a full one over a grey image)."""
    if channels == 1:
        return full_convolution(channels, out, stride)
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
        nn.Conv2d(channels, out, 1, bias=False),
    )


def network(separable: bool) -> nn.Sequential:
    """Five stages and a classifier over 1 x 8 x 8 images; teacher and student have the same boundaries."""
    sizes = [(1, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1)]
    stages = [Stage(*size, separable) for size in sizes]
    return nn.Sequential(*stages, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)))


@dataclass(frozen=True)
class Demo:
    """Test accuracies of the run (0 to 1), student passes over the data, and seconds in all."""

    accuracy: dict[str, float]
    passes: dict[str, int]
    seconds: float


def run(seed: int = 0, progress: bool = True) -> Demo:
    """Train the teacher, distil, finish end to end, train the same student from scratch, and print what came out."""
    started = time.perf_counter()
    train_set, test_set = digits(seed)
    loader = DataLoader(train_set, BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        teacher, student = network(separable=False), network(separable=True)
        scratch = copy.deepcopy(student)
        print(f"digits: {len(train_set)} training and {len(test_set)} test images, 1 x 8 x 8\n")
        print(split(teacher, student, torch.zeros(BATCH, 1, 8, 8), logits=True), "\n")
        fit(teacher, loader, TEACHER_EPOCHS, "teacher", progress)
        accuracy = {"teacher": score(teacher, test_set), "student, untrained": score(student, test_set)}
        result = distill(
            teacher,
            student,
            loader,
            recipe=Recipe(lr=decay, epochs=BLOCKWISE_EPOCHS, logits=True),
            seed=seed,
            progress=progress,
        )
        accuracy["student, assembled"] = score(student, test_set)
        fit(student, loader, FINISH_EPOCHS, "finish", progress, teacher)
        accuracy["student, finished end to end"] = score(student, test_set)
        fit(scratch, loader, BLOCKWISE_EPOCHS + FINISH_EPOCHS, "scratch", progress)
        accuracy["same student from scratch"] = score(scratch, test_set)
    every = BLOCKWISE_EPOCHS + FINISH_EPOCHS
    passes = dict(zip(accuracy, (0, 0, BLOCKWISE_EPOCHS, every, every), strict=True))
    demo = Demo(accuracy, passes, time.perf_counter() - started)
    print(f"{result.history}\n")
    models = (teacher, student, student, student, scratch)
    print(
        table(
            ["model", "parameters", "student passes", "test accuracy"],
            [
                (name, quantity(sum(p.numel() for p in m.parameters())), passes[name] or "-", f"{100 * value:.1f} %")
                for (name, value), m in zip(accuracy.items(), models, strict=True)
            ],
        )
    )
    print(f"\n{demo.seconds:.0f} s in all, seed {seed}")
    return demo


def decay(block: int, progress: float) -> float:
    """The learning rate of every block: from 3e-3 down to 3e-4, linearly."""
    return 3e-3 * (1 - 0.9 * progress)


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's handwritten digits, standardised: four fifths to train, one fifth to test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "The demo's data comes with scikit-learn, which is not installed.", do="pip install 'autobd[demo]'"
        ) from None
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images = (images - images.mean()) / images.std()
    cut = len(order) * 4 // 5
    train, test = order[:cut], order[cut:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def fit(
    model: nn.Module,
    loader: DataLoader[tuple[Tensor, ...]],
    epochs: int,
    name: str,
    progress: bool,
    teacher: nn.Module | None = None,
) -> None:
    """Train end to end: on labels, or on a teacher's logits and labels alike."""
    steps = epochs * len(loader)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3 if teacher is None else 1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    model.train()
    with tqdm(total=steps, desc=name, unit="step", disable=not progress, dynamic_ncols=True) as bar:
        for _ in range(epochs):
            for images, labels in loader:
                logits = model(images)
                loss = functional.cross_entropy(logits, labels)
                if teacher is not None:
                    with torch.no_grad():
                        targets = teacher.eval()(images)
                    loss = loss + KL(TEMPERATURE)(logits, targets).mean()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                bar.update()


def score(model: nn.Module, dataset: TensorDataset) -> float:
    """Accuracy in eval mode."""
    images, labels = dataset.tensors
    with torch.no_grad():
        return float((model.eval()(images).argmax(1) == labels).float().mean())
