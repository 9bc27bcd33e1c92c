"""ResNet-50 teaches ResNet-18 on images of your own.

    python examples/resnet50_to_resnet18.py PATH        # PATH/train and PATH/val with a folder for each class
    python examples/resnet50_to_resnet18.py --smoke     # generated images, to see that it runs

The teacher is torchvision's, with its weights (they are downloaded) and a new last layer that is trained first; or
`--teacher FILE`, the state_dict of a ResNet-50 of your own.
"""

import torch
import torchvision
from ladder import Workload, arguments, end_to_end, judged, ladder
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms

import autobd


def generated(count, seed):
    """Images of 64 pixels, with one of four patterns."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    patterns = torch.stack(
        [(rows // 8) % 2, (columns // 8) % 2, ((rows + columns) // 8) % 2, (rows * columns // 64) % 2]
    )
    images = patterns[labels].unsqueeze(1).float() + torch.randn(count, 3, 64, 64, generator=generator)
    return TensorDataset(images, labels)


def folders(path):
    """Training and validation images of 224 pixels."""
    norm = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    train = transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), norm]
    )
    val = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), norm])
    return [torchvision.datasets.ImageFolder(f"{path}/{n}", t) for n, t in (("train", train), ("val", val))]


def main():
    parser = arguments(__doc__.splitlines()[0], blocks=3, finish=2)
    parser.add_argument("path", nargs="?")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--teacher", help="state_dict of a ResNet-50")
    parser.add_argument("--teacher-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    if not options.smoke and not options.path:
        parser.error("PATH, or --smoke")
    train, val = (generated(128, 1), generated(64, 2)) if options.smoke else folders(options.path)
    classes = 4 if options.smoke else len(train.classes)
    workers = 0 if options.smoke else options.workers
    batch_size = 16 if options.smoke else options.batch_size

    def loader(seed):
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(train, batch_size, True, num_workers=workers, drop_last=True, generator=generator)

    torch.manual_seed(0)
    known = options.teacher or options.smoke
    teacher = torchvision.models.resnet50(weights=None if known else "DEFAULT")
    teacher.fc = nn.Linear(teacher.fc.in_features, classes)
    work = Workload(
        teacher, lambda: torchvision.models.resnet18(num_classes=classes), loader,
        autobd.Validation(DataLoader(val, 64, num_workers=workers)), autobd.KL(), functional.cross_entropy,
        recipe={"logits": True}, lr=1e-3,
    )  # fmt: skip
    if options.teacher:
        teacher.load_state_dict(torch.load(options.teacher, weights_only=True))
    else:
        end_to_end(work, teacher, 0, options.teacher_epochs, distil=False)
    print(f"teacher: {judged(work, teacher):.4f}")
    ladder(work, options)


if __name__ == "__main__":
    main()
