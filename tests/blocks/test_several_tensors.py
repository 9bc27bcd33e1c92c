"""Cuts that several tensors cross, and values that are carried along. The oracles are plain PyTorch loops."""

import copy
import itertools

import pytest
import torch
from torch import nn

import autobd
from autobd.blocks.carve import carve
from autobd.blocks.cuts import cut_at, obstacle
from autobd.blocks.dataflow import Dataflow
from autobd.blocks.verify import verify_blocks


def conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    """Two levels down and up; what a level gives on the way down is read on the way up (trouble report 27)."""

    def __init__(self, width, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.down1, self.down2, self.bottom = conv(3, 4), conv(4, 6), nn.Sequential(*conv(6, width), *conv(width, 6))
        self.up2, self.up1 = conv(12, 4), conv(8, 4)
        self.pool, self.rise, self.head = nn.MaxPool2d(2), nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        c = self.up2(torch.cat([self.rise(c), b], 1))
        return self.head(self.up1(torch.cat([self.rise(c), a], 1)))


class TwoStreams(nn.Module):
    """Two token streams that mix now and then."""

    def __init__(self, width, depth, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed1, self.embed2 = nn.Linear(6, 4), nn.Linear(6, 8)
        self.stages = nn.ModuleList(Mix(width) for _ in range(depth))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        a, b = self.embed1(x), self.embed2(x)
        for stage in self.stages:
            a, b = stage(a, b)
        return self.head(torch.cat([a, b], -1).mean(1))


class Mix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 4))
        self.b = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, a, b):
        both = torch.cat([a, b], -1)
        return a + self.a(both), b + self.b(both)


class PreviousTwo(nn.Module):
    """Every cell reads the two cells before it, as in NASNet."""

    def __init__(self, width, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(6, 8)
        self.cells = nn.ModuleList(Cell(width) for _ in range(6))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        before = now = self.stem(x)
        for cell in self.cells:
            before, now = now, cell(now, before)
        return self.head((before + now).mean(1))


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, now, before):
        return self.layers(torch.cat([now, before], -1))


PAIRS = {
    "U-Net": (lambda: UNet(32, 0), lambda: UNet(5, 1), torch.randn(4, 3, 8, 8)),
    "two streams": (lambda: TwoStreams(32, 6, 0), lambda: TwoStreams(6, 6, 1), torch.randn(4, 5, 6)),
    "previous two": (lambda: PreviousTwo(32, 0), lambda: PreviousTwo(6, 1), torch.randn(4, 5, 6)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_networks_without_single_tensor_cuts_are_cut_where_several_cross(name):
    teacher, student, x = PAIRS[name][0](), PAIRS[name][1](), PAIRS[name][2]
    split = autobd.split(teacher, student, x)
    assert len(split) >= 4, str(split)
    assert max(len(p.teacher.returns) for p in split.pairs) >= 2
    assert split.verify().exact
    assert str(split.explain()).count("tensors cross")


def test_a_unet_equals_a_plain_loop_in_which_each_level_is_learned_once():
    teacher, student, x = PAIRS["U-Net"][0](), PAIRS["U-Net"][1](), PAIRS["U-Net"][2]
    mine = copy.deepcopy(student)
    names = ["down1", "down2", "bottom", "up2"]
    result = autobd.distill(
        teacher,
        student,
        [x, x + 1],
        cuts=[(n, n) for n in names],
        recipe=autobd.Recipe(block_input="teacher", lr=1e-2),
        progress=False,
    )
    assert [len(p.student.returns) for p in result.split.pairs] == [1, 2, 3, 2, 1]
    assert [p.student.distilled for p in result.split.pairs] == [(0,), (1,), (2,), (1,), (0,)]
    t, s = teacher.eval(), mine
    blocks = [
        lambda m, v: m.down1(v["x"]),
        lambda m, v: m.down2(m.pool(v["a"])),
        lambda m, v: m.bottom(m.pool(v["b"])),
        lambda m, v: m.up2(torch.cat([m.rise(v["c"]), v["b"]], 1)),
        lambda m, v: m.head(m.up1(torch.cat([m.rise(v["d"]), v["a"]], 1))),
    ]
    parts = [s.down1, s.down2, s.bottom, s.up2, nn.ModuleList([s.up1, s.head])]
    optimizers = [torch.optim.AdamW(p.parameters(), lr=1e-2) for p in parts]
    scales = [None] * 5
    for batch in (x, x + 1):
        values = {"x": batch}
        with torch.no_grad():
            for name, block in zip("abcde", blocks, strict=True):
                values[name] = block(t, values)
        for i, (name, block) in enumerate(zip("abcde", blocks, strict=True)):
            wanted = values[name]
            scales[i] = wanted.square().mean() if scales[i] is None else scales[i]
            optimizers[i].zero_grad()
            ((block(s, values) - wanted).square().mean() / scales[i]).backward()
            optimizers[i].step()
    for key, value in mine.state_dict().items():
        assert torch.allclose(student.state_dict()[key], value, atol=1e-6), key


class Masked(nn.Module):
    """A mask that an activation decides is read by every layer."""

    def __init__(self, width, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)) for _ in range(4)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        mask = x.sum(-1, keepdim=True) > 0
        for layer in self.layers:
            x = x + layer(x).masked_fill(mask, 0.0)
        return self.head(x.mean(1))


def test_a_mask_that_an_activation_decides_is_carried_from_the_teacher():
    teacher, student, x = Masked(16, 0), Masked(4, 1), torch.randn(4, 5, 6)
    mine = copy.deepcopy(student)
    result = autobd.distill(teacher, student, [x], blocks=4, progress=False)
    carried = [sum(not b.distilled for b in p.teacher.returns) for p in result.split.pairs]
    assert carried == [1, 1, 1, 0]
    assert result.verification.exact
    for p in result.split.pairs[1:]:
        assert [b.dtype for b in p.student.receives] == [torch.float32, torch.bool]
    assert any(not torch.equal(a, b) for a, b in zip(mine.parameters(), student.parameters(), strict=True))


def test_what_is_folded_into_the_batch_crosses_a_cut():
    class Windows(nn.Module):
        def __init__(self, width, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8)) for _ in range(4)))

        def forward(self, x):
            rows, tokens, _ = x.shape
            x = self.layers(self.embed(x).reshape(rows * tokens, 8))
            return self.head(x.reshape(rows, tokens, 8).mean(1))

    result = autobd.distill(Windows(16, 0), Windows(4, 1), [torch.randn(n, 5, 6) for n in (4, 3, 1)], progress=False)
    assert len(result.split) >= 4
    assert {b.folded for p in result.split.pairs[:-1] for b in p.teacher.returns} == {5}
    assert result.split.verify(2).exact


def test_every_block_has_something_to_learn():
    class Late(nn.Module):
        """A mask is made from an activation that then crosses alone, and with the mask."""

        def __init__(self, width, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.gate = nn.Linear(6, 8), nn.Linear(8, 8)
            self.layers = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            x = self.embed(x)
            mask = self.gate(x) > 0
            return self.head(self.layers(x).masked_fill(mask, 0.0) + x)

    for blocks in (2, 3):
        split = autobd.split(Late(16, 0), Late(4, 1), torch.randn(4, 6), blocks=blocks)
        assert all(p.student.distilled and p.teacher.distilled for p in split.pairs), str(split)


def test_what_a_block_changes_in_place_it_learns():
    class Partly(nn.Module):
        """Half of the channels are changed in place by every layer."""

        def __init__(self, width, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)) for _ in "1234"
            )

        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x[:, :4] += layer(x.clone())
            return self.head(x)

    result = autobd.distill(Partly(16, 0), Partly(4, 1), [torch.randn(4, 6)], progress=False)
    assert len(result.split) >= 4
    assert all(p.student.distilled == (0,) for p in result.split.pairs)
    assert result.verification.exact


def test_two_views_of_what_is_changed_later_do_not_cross_a_cut():
    class Halves(nn.Module):
        def __init__(self, width, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)) for _ in "123"
            )

        def forward(self, x):
            x = self.embed(x) * 1
            a, b = x[:, :4], x[:, 4:]
            z = self.layers[0](x.clone())
            a.add_(z[:, :4])
            z = self.layers[1](x + z)
            b.mul_(z[:, 4:])
            return self.head(self.layers[2](x + z) + x)

    captured = autobd.capture(Halves(4, 1), torch.randn(4, 6))
    flow = Dataflow(captured, "output", trained=True)
    cuts = [cut_at(flow, i) for i in range(len(flow.order)) if obstacle(flow, i) is None]
    for pair in itertools.combinations(cuts, 2):
        assert verify_blocks(captured, "output", carve(flow, list(pair)), 3, "student").exact
    reasons = {obstacle(flow, i) for i in range(len(flow.order))}
    assert "two views of a tensor cross that is changed in place later" in reasons


def test_rows_that_are_not_in_the_order_of_the_batch_do_not_cross_a_cut():
    class Windows(nn.Module):
        def __init__(self, width, seed, time_first):
            super().__init__()
            torch.manual_seed(seed)
            self.time_first, self.embed, self.head = time_first, nn.Linear(6, 8), nn.Linear(8, 3)
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for _ in "123")
            )

        def forward(self, x):
            rows, tokens, _ = x.shape
            x = self.embed(x)
            x = self.layers((x.transpose(0, 1) if self.time_first else x).reshape(rows * tokens, 8))
            x = x.view(tokens, rows, 8).transpose(0, 1) if self.time_first else x.view(rows, tokens, 8)
            return self.head(x.mean(1))

    x = torch.randn(4, 5, 6)
    for sides in itertools.product((False, True), repeat=2):
        split = autobd.split(Windows(12, 0, sides[0]), Windows(4, 1, sides[1]), x)
        folded = {b.folded for p in split.pairs for side in (p.teacher, p.student) for b in side.returns}
        assert folded == ({1} if any(sides) else {1, 5})
    with pytest.raises(autobd.errors.SplitError, match="order of the batch"):
        autobd.split(Windows(12, 0, True), Windows(4, 1, True), x, cuts=[("layers.0", "layers.0")])


def test_tensors_of_two_towers_are_paired_by_the_inputs_they_are_made_of():
    class Towers(nn.Module):
        def __init__(self, width, seed, swapped):
            super().__init__()
            torch.manual_seed(seed)
            self.swapped, self.a, self.b, self.head = swapped, nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
            self.x, self.y = (nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for _ in "xy")

        def forward(self, p, q):
            if self.swapped:
                b = self.b(q)
                a = self.a(p)
            else:
                a = self.a(p)
                b = self.b(q)
            return self.head((self.x(a) + b) * (self.y(b) - a))

    example = torch.randn(4, 6), torch.randn(4, 6)
    for swapped in (False, True):
        split = autobd.split(Towers(12, 0, False), Towers(4, 1, swapped), example)
        for pair in split.pairs:
            for adapter in pair.adapters:
                assert adapter.teacher.made_of == adapter.student.made_of
    split = autobd.split(Towers(12, 0, False), Towers(4, 1, True), example, cuts=[("b", "a")])
    assert [(a.teacher.node.name, a.student.node.name) for a in split.pairs[0].adapters] == [("b", "b"), ("a", "a")]


def test_a_student_may_view_what_its_teacher_gives_with_other_strides():
    class Tokens(nn.Module):
        def __init__(self, transposed, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.stem, self.transposed = nn.Conv2d(3, 8, 3), transposed
            self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.stem(x)
            x = (
                x.flatten(2).transpose(1, 2)
                if self.transposed
                else x.permute(0, 2, 3, 1).reshape(len(x), 16, 8).contiguous()
            )
            x = self.mix(x) if self.transposed else self.mix(x.view(len(x) * 16, 8)).view(len(x), 16, 8)
            return self.head(x.mean(1))

    student = Tokens(False, 1)
    before = copy.deepcopy(student)
    result = autobd.distill(Tokens(True, 0), student, [torch.randn(4, 3, 6, 6)], blocks=2, progress=False)
    assert result.verification.exact
    assert result.history.steps == 1
    assert all(not torch.equal(a, b) for a, b in zip(before.parameters(), student.parameters(), strict=True))
