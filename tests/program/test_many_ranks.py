"""Programs of many ranks: what every plan's program keeps to, and what the checker refuses. No processes."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shares import FEATURES, TOKENS, Model, Part, plans

import autobd
from autobd.cluster import Cluster
from autobd.costs import analytic
from autobd.errors import PlanError
from autobd.planner import STRATEGIES, Assignment, Plan, plan
from autobd.program import Edge, Instruction, Op, Program, build
from autobd.program.check import check

SENDS, TAKES = (Op.SCATTER, Op.RELAY, Op.RELAY_STUDENT), (Op.LOAD, Op.RECEIVE, Op.RECEIVE_STUDENT)
RIGHTLY = ("wait for each other", "cannot be handed over", "whose own boundary it takes")


def split(blocks, masked):
    def model(width):
        parts = [Part(False, width if i else FEATURES, width, True, 0.0) for i in range(blocks)]
        return Model(parts, [None] * blocks, [masked and i % 2 == 1 for i in range(blocks)], width)

    example = {"x": torch.randn(4, TOKENS, FEATURES), "mask": torch.ones(4, TOKENS)}
    teacher, student = model(6), model(6)
    cuts = list(zip(teacher.cuts, student.cuts, strict=True))
    return autobd.split(teacher, student, example, cuts=cuts)


SPLITS = {(blocks, masked): split(blocks, masked) for blocks in range(1, 6) for masked in (False, True)}


@st.composite
def programs(draw, kinds=("relay", "prefix", "store", "mixed"), strategies=("mine", "tr")):
    of = draw(st.sampled_from(list(SPLITS)))
    devices = ("cpu",) * draw(st.integers(1, 5))
    chosen = replace(draw(plans(of[0], devices, kinds)), strategy=draw(st.sampled_from(strategies)))
    try:
        return build(chosen, SPLITS[of], own_input=draw(st.booleans()))
    except PlanError as error:
        if "mixed" in kinds or "prefix" in kinds:
            assume(not any(text in str(error) for text in RIGHTLY))
        raise


def of(program, *ops):
    return [(rank, i) for rank, own in enumerate(program.ranks) for i in own if i.op in ops]


@settings(deadline=None)
@given(programs())
def test_every_message_is_sent_and_taken_once_by_its_ends(program):
    check(program)
    for ops, end in ((SENDS, "source"), (TAKES, "target")):
        found = Counter((edge, rank) for rank, i in of(program, *ops) for edge in i.edges)
        assert found == Counter((n, getattr(edge, end)) for n, edge in enumerate(program.edges))
    assert all(edge.source != edge.target for edge in program.edges)
    assert all(edge.source == 0 for edge in program.edges if edge.kind == "inputs")


@settings(deadline=None)
@given(programs())
def test_every_block_is_trained_by_its_replicas_alone(program):
    for a in program.plan.assignments:
        for block in a.blocks:
            for op in (Op.STUDENT_FORWARD, Op.STUDENT_BACKWARD):
                found = Counter((r, i.microbatch) for r, i in of(program, op) if i.block == block)
                assert found == Counter((r, part) for r in a.ranks for part in range(a.microbatches))
            assert sorted(r for r, i in of(program, Op.UPDATE) if i.block == block) == sorted(a.ranks)
            reduced = [r for r, i in of(program, Op.ALL_REDUCE) if i.block == block]
            assert sorted(reduced) == (sorted(a.ranks) if a.replicated else [])
    assert all(not program.ranks[rank] for rank in program.plan.idle if rank)


@settings(deadline=None)
@given(programs())
def test_instructions_come_after_what_they_need(program):
    for own in program.ranks:
        place = {(i.op, i.block): n for n, i in enumerate(own)}
        for n, i in enumerate(own):
            assert all(earlier < n for earlier in i.after)
            if i.op is Op.UPDATE:
                assert place[Op.STUDENT_FORWARD, i.block] < place[Op.STUDENT_BACKWARD, i.block] < n
                before = {own[k].op for k in i.after}
                replicated = any(i.block in a.blocks and a.replicated for a in program.plan.assignments)
                gate = Op.BARRIER if program.plan.barrier else Op.ALL_REDUCE if replicated else Op.STUDENT_BACKWARD
                assert before == {gate}
        for number in {i.assignment for i in own}:
            mine = [i.op for i in own if i.assignment == number]
            if Op.STUDENT_FORWARD in mine:
                assert max(n for n, op in enumerate(mine) if op is Op.TEACHER_FORWARD) < mine.index(Op.STUDENT_FORWARD)
            if Op.RELAY in mine:
                assert mine.index(Op.RELAY) < mine.index(Op.STUDENT_FORWARD)


@settings(deadline=None)
@given(programs(kinds=("relay",)))
def test_teacher_relaying_runs_each_teacher_block_once_for_each_share(program):
    found = Counter((rank, i.block) for rank, i in of(program, Op.TEACHER_FORWARD))
    assert found == Counter((rank, b) for a in program.plan.assignments for rank in a.ranks for b in a.blocks)
    handed = [e for e in program.edges if e.kind == "teacher"]
    assert {e.block for e in handed} == {a.blocks[-1] for a in program.plan.assignments[:-1]}


@settings(deadline=None)
@given(programs(kinds=("prefix",)))
def test_without_relaying_each_assignment_repeats_the_teachers_prefix(program):
    found = Counter((rank, i.block, i.assignment) for rank, i in of(program, Op.TEACHER_FORWARD))
    wanted = [
        (rank, b, n)
        for n, a in enumerate(program.plan.assignments)
        for rank in a.ranks
        for b in range(a.blocks[-1] + 1)
    ]
    assert found == Counter(wanted)
    assert not [e for e in program.edges if e.kind == "teacher"]


@settings(deadline=None)
@given(programs())
def test_there_is_a_barrier_in_teacher_relaying_without_decoupled_update_alone(program):
    barriers = Counter(rank for rank, _ in of(program, Op.BARRIER))
    assert barriers == (Counter(r for a in program.plan.assignments for r in a.ranks) if program.plan.barrier else {})


@settings(deadline=None)
@given(programs())
def test_the_students_own_boundaries_travel_only_with_student_relaying(program):
    kinds = {e.kind for e in program.edges}
    ops = {i.op for own in program.ranks for i in own}
    if not program.own_input:
        assert "student" not in kinds
        assert ops.isdisjoint({Op.STUDENT_BOUNDARY, Op.RELAY_STUDENT, Op.RECEIVE_STUDENT})
        return
    where = {b: a for a in program.plan.assignments for b in a.blocks}
    apart = {b for b in where if b + 1 in where and where[b].ranks != where[b + 1].ranks}
    assert apart <= {e.block for e in program.edges if e.kind == "student"}


@settings(deadline=None)
@given(programs())
def test_the_code_of_every_rank_reads_nothing_that_it_has_not_made(program):
    for rank in range(len(program.ranks)):
        calls = []

        class Recorder:
            def __getattr__(self, name, calls=calls):
                return lambda *arguments, part=0: calls.append(name) or name

        program.compile(rank)(Recorder(), "batch")
        assert calls == [i.op.value for i in program.ranks[rank]]


@pytest.mark.parametrize("own_input", [False, True])
@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_can_be_built(strategy, ranks, own_input):
    for of_blocks in SPLITS.values():
        check(build(plan(analytic(of_blocks, Cluster(("cpu",) * ranks)), strategy), of_blocks, own_input))


# ------------------------------------------------------------------ what is refused


@settings(deadline=None)
@given(programs(), st.data())
def test_a_program_that_lacks_a_message_is_refused(program, data):
    ends = [(r, n) for r, own in enumerate(program.ranks) for n, i in enumerate(own) if i.edges]
    assume(ends)
    rank, n = data.draw(st.sampled_from(ends))
    edges = list(program.ranks[rank][n].edges)
    edges.remove(data.draw(st.sampled_from(edges)))
    own = list(program.ranks[rank])
    own[n] = replace(own[n], edges=tuple(edges))
    broken = replace(program, ranks=(*program.ranks[:rank], tuple(own), *program.ranks[rank + 1 :]))
    with pytest.raises(PlanError, match="times a step"):
        check(broken)


@settings(deadline=None)
@given(programs(), st.data())
def test_a_program_in_which_something_comes_before_what_it_needs_is_refused(program, data):
    pairs = [(r, k, n) for r, own in enumerate(program.ranks) for n, i in enumerate(own) for k in i.after]
    assume(pairs)
    rank, k, n = data.draw(st.sampled_from(pairs))
    order = list(range(len(program.ranks[rank])))
    order[k], order[n] = n, k
    new = {old: at for at, old in enumerate(order)}
    own = [program.ranks[rank][old] for old in order]
    own = tuple(replace(i, after=tuple(new[a] for a in i.after)) for i in own)
    with pytest.raises(PlanError):
        check(replace(program, ranks=(*program.ranks[:rank], own, *program.ranks[rank + 1 :])))


@settings(deadline=None)
@given(programs(), st.data())
def test_replicas_that_do_not_reduce_alike_are_refused(program, data):
    gates = [(r, n) for r, own in enumerate(program.ranks) for n, i in enumerate(own) if i.op is Op.ALL_REDUCE]
    assume(gates)
    rank, n = data.draw(st.sampled_from(gates))
    own = [replace(i, after=()) for k, i in enumerate(program.ranks[rank]) if k != n]
    with pytest.raises(PlanError, match="reduce in different orders"):
        check(replace(program, ranks=(*program.ranks[:rank], tuple(own), *program.ranks[rank + 1 :])))


def two_ranks(first, second, *edges, replicas=False):
    """A program of two ranks from (op, block, edges) each; every instruction needs all before it."""
    assignments = (
        (Assignment((0, 1), (0, 1), (1, 1), "store"),)
        if replicas
        else (Assignment((0,), (0,), (2,), "relay"), Assignment((1,), (1,), (2,), "relay"))
    )
    ranks = tuple(
        tuple(Instruction(op, block, edges=e, after=tuple(range(n))) for n, (op, block, e) in enumerate(own))
        for own in (first, second)
    )
    return Program(Plan("mine", 2, ("cpu", "cpu"), assignments), edges, (((), ()),) * len(assignments), ranks)


HERE, THERE = Edge(0, 1, "teacher", 0, 0), Edge(1, 0, "student", 0, 1)


def test_ranks_that_both_receive_first_are_refused():
    good = two_ranks(
        [(Op.RELAY, 0, (0,)), (Op.RECEIVE, 1, (1,))], [(Op.RECEIVE, 0, (0,)), (Op.RELAY_STUDENT, 1, (1,))], HERE, THERE
    )
    check(good)
    swapped = tuple(replace(i, after=()) for i in reversed(good.ranks[0]))
    with pytest.raises(PlanError, match="wait for each other for ever") as error:
        check(replace(good, ranks=(swapped, good.ranks[1])))
    assert "rank 0 at receive of block 1" in str(error.value)
    assert "rank 1 at receive of block 0" in str(error.value)


def test_an_update_whose_replicas_wait_for_it_is_refused():
    first = [(Op.ALL_REDUCE, 0, ()), (Op.UPDATE, 0, ()), (Op.RELAY, 0, (0,))]
    check(two_ranks(first, [(Op.ALL_REDUCE, 0, ()), (Op.UPDATE, 0, ()), (Op.RECEIVE, 0, (0,))], HERE, replicas=True))
    late = [(Op.RECEIVE, 0, (0,)), (Op.ALL_REDUCE, 0, ()), (Op.UPDATE, 0, ())]
    with pytest.raises(PlanError, match="rank 0 at update of block 0; rank 1 at receive of block 0"):
        check(two_ranks(first, late, HERE, replicas=True))


def test_a_student_boundary_that_is_taken_before_it_is_made_is_refused():
    of_blocks = SPLITS[2, False]
    mine = (Assignment((1,), (0,), (4,), "prefix"), Assignment((0,), (0,), (4,), "prefix"))
    build(Plan("mine", 4, ("cpu",), mine), of_blocks)
    with pytest.raises(PlanError, match="Rank 0 trains block 1 before block 0"):
        build(Plan("mine", 4, ("cpu",), mine), of_blocks, own_input=True)


def test_a_plan_that_parts_blocks_that_train_a_weight_together_is_refused():
    parts = [Part(False, 3, 3, True, 0.0) for _ in range(3)]
    parts[2].mix = parts[1].mix
    student = Model(parts, [None] * 3, [False] * 3, 3)
    teacher = Model([Part(False, 3, 3, True, 0.0) for _ in range(3)], [None] * 3, [False] * 3, 3)
    example = {"x": torch.randn(4, TOKENS, FEATURES)}
    cuts = list(zip(teacher.cuts, student.cuts, strict=True))
    stages = (Assignment((0, 1), (0,), (4,), "relay"), Assignment((2,), (1,), (4,), "relay"))
    own = Plan("mine", 4, ("cpu", "cpu"), stages)
    build(own, autobd.split(teacher, student, example, cuts=cuts, ties="first"))
    together = autobd.split(teacher, student, example, cuts=cuts, ties="together")
    with pytest.raises(PlanError, match="blocks \\[1, 2\\], which train a weight together"):
        build(own, together)
    for strategy in STRATEGIES:
        for ranks in (2, 3):
            build(plan(analytic(together, Cluster(("cpu",) * ranks)), strategy), together)
