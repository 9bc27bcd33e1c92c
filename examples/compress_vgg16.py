"""The compression workload of the Pipe-BD paper: VGG-16 to a depthwise-separable one, at 32 pixels.

python examples/compress_vgg16.py                      # handwritten digits, enlarged (needs scikit-learn)
python examples/compress_vgg16.py --cifar10 PATH       # torchvision's CIFAR-10, as it lies there
python examples/compress_vgg16.py --images PATH        # folders PATH/train and PATH/val with a folder for each class
"""

import torch
import torchvision
from ladder import Workload, arguments, end_to_end, judged, ladder
from models import depthwise, vgg
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms

import autobd
from autobd.demo import digits


def data(options):
    """Training set, test set, number of classes."""
    if options.cifar10 or options.images:
        prepared = transforms.Compose([
            transforms.Resize((32, 32)), transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.25,) * 3)
        ])  # fmt: skip
        if options.cifar10:
            sets = [torchvision.datasets.CIFAR10(options.cifar10, train, prepared) for train in (True, False)]
        else:
            sets = [torchvision.datasets.ImageFolder(f"{options.images}/{part}", prepared) for part in ("train", "val")]
        return *sets, len(sets[0].classes)

    def enlarged(given):
        images, labels = given.tensors
        return TensorDataset(functional.interpolate(images, size=32, mode="bilinear").expand(-1, 3, -1, -1), labels)

    return *map(enlarged, digits(0)), 10


def main():
    parser = arguments(__doc__.splitlines()[0], blocks=6, finish=2)
    parser.add_argument("--cifar10")
    parser.add_argument("--images")
    parser.add_argument("--teacher-epochs", type=int, default=6)
    options = parser.parse_args()
    train, test, classes = data(options)

    def loader(seed):
        return DataLoader(train, 64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(seed))

    def kd(output, wanted):
        return autobd.KL()(output, wanted)

    torch.manual_seed(0)
    work = Workload(
        vgg(classes), lambda: depthwise(vgg(classes)), loader, autobd.Validation(list(DataLoader(test, 256))), kd,
        functional.cross_entropy, options={"blocks": 5}, recipe={"logits": True}, whole_lr=1e-3,
    )  # fmt: skip
    end_to_end(work, work.teacher, 0, options.teacher_epochs, distil=False)
    print(f"teacher: {judged(work, work.teacher):.4f}")
    ladder(work, options)


if __name__ == "__main__":
    main()
