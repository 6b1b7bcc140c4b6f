"""The block pool under any sequence of calls: no block is lost, doubled, or changed while it is held."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from function_runtime.engine.blocks import BlockPool

TOTAL = 9


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.tables: list[list[int]] = []
        self.content: dict[bytes, int] = {}
        self.next = 0

    @precondition(lambda self: self.pool.available)
    @rule(new=st.booleans(), data=st.data())
    def allocate(self, new: bool, data: st.DataObject) -> None:
        if new or not self.tables:
            self.tables.append([])
        table = data.draw(st.sampled_from(self.tables))
        block = self.pool.allocate(table[-1] if table else None)
        assert all(block not in other for other in self.tables)
        self.content = {chain: b for chain, b in self.content.items() if b != block}
        table.append(block)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        chain = self.next.to_bytes(4, "big")
        self.next += 1
        if block not in self.content.values():
            self.content[chain] = block
        self.pool.publish(block, chain)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(sorted(self.content)))
        found = self.pool.find([chain, b"unknown"], 16)[0]
        assert found == [self.content[chain]]
        self.pool.hold(found[0])
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.pool.release(table)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        chain = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.forget(self.content.pop(chain))
        assert self.pool.find([chain], 16)[0] == []

    @rule(more=st.integers(0, 2 * TOTAL))
    def resize(self, more: int) -> None:
        total = max(self.pool.used + more, 1)
        numbers = self.pool.numbers_within(total)
        assert len(set(numbers.values())) == len(numbers) and all(number < total for number in numbers.values())
        self.pool.renumber(total, numbers)
        self.tables = [[numbers[block] for block in table] for table in self.tables]
        held = {block for table in self.tables for block in table}
        kept = {chain: numbers[block] for chain, block in self.content.items() if block in numbers}
        given_up = self.content.keys() - kept.keys()
        assert all(self.pool.find([chain], 16)[0] == [] for chain in given_up)
        assert not given_up or len(held | set(kept.values())) == total, "nothing is given up for which there is room"
        self.content = kept

    @invariant()
    def every_block_is_held_or_available(self) -> None:
        held = {block for table in self.tables for block in table}
        assert self.pool.used == len(held)
        assert len(self.pool._free) <= self.pool.total
        for block in range(self.pool.total):
            assert self.pool.holders(block) == sum(table.count(block) for table in self.tables)
        for chain, block in self.content.items():
            assert self.pool.find([chain], 16)[0] == [block]


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase


def test_blocks_of_a_sequence_are_neighbours_where_possible() -> None:
    pool = BlockPool(8)
    first = [pool.allocate(None)]
    first.append(pool.allocate(first[-1]))
    assert first == [0, 1]


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    pool = BlockPool(3)
    table = [pool.allocate(None) for _ in range(3)]
    for index, block in enumerate(table):
        pool.publish(block, bytes([index]))
    pool.release(table)
    pool.allocate(None)
    assert pool.find([b"\0", b"\1", b"\2"], 16)[0] == table[:2]


def test_releasing_what_is_not_held_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="released"):
        BlockPool(2).release([0])
