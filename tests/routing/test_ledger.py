"""What the store has not counted yet: never forgotten, and at worst counted twice until the next answer."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from routing.ledger import MOST_READS, Ledger

KEYS = st.sampled_from(["a", "b"])


class Accounts(RuleBasedStateMachine):
    """A gateway's loops around a store: what is settled, what the store has, and what it last said."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger[str] = Ledger()
        self.truth = {"a": 0, "b": 0}
        self.journal: list[tuple[str, int]] = []
        self.batch: list[tuple[str, int]] = []
        self.store = {"a": 0, "b": 0}
        self.said = {"a": 0, "b": 0}
        self.last = 0

    reads = Bundle("reads")

    @rule(key=KEYS, amount=st.integers(1, 50))
    def settle(self, key: str, amount: int) -> None:
        self.truth[key] += amount
        self.journal.append((key, amount))
        self.ledger.settled(key, amount)

    @rule()
    def take_a_batch(self) -> None:
        self.batch += self.journal
        self.journal = []
        self.ledger.mark()

    @rule(commits=st.integers(0, 5))
    def flush(self, commits: int) -> None:
        """The store takes some of the batch; only all of it is a flush."""
        for key, amount in self.batch[:commits]:
            self.store[key] += amount
        self.batch = self.batch[commits:]
        if not self.batch:
            self.ledger.flushed()

    @rule(target=reads)
    def ask(self) -> tuple[int, dict[str, int]]:
        return self.ledger.asked(), dict(self.store)

    @rule(read=reads)
    def answer(self, read: tuple[int, dict[str, int]]) -> None:
        ticket, said = read
        if ticket >= self.last:  # reads are answered in turn, or not at all
            self.last, self.said = ticket, {key: max(said[key], self.said[key]) for key in said}
            self.ledger.answered(ticket)

    @invariant()
    def nothing_is_forgotten(self) -> None:
        for key, real in self.truth.items():
            assert self.said[key] + self.ledger.uncounted(key) >= real

    def teardown(self) -> None:
        self.take_a_batch()
        self.flush(10**6)
        self.answer(self.ask())
        assert self.said == self.truth
        assert [self.ledger.uncounted(key) for key in self.truth] == [0, 0]


Accounts.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAccounts = Accounts.TestCase


def test_reads_that_are_never_answered_take_bounded_memory_and_lose_nothing() -> None:
    ledger: Ledger[str] = Ledger()
    for _ in range(100):
        ledger.settled("a", 1)
        ledger.mark()
        ledger.flushed()
        ticket = ledger.asked()
    assert len(ledger._reads) == MOST_READS
    assert ledger.uncounted("a") == 100
    ledger.answered(ticket)
    assert ledger.uncounted("a") == 0


def test_the_answer_to_an_earlier_question_leaves_what_was_flushed_after_it() -> None:
    ledger: Ledger[str] = Ledger()
    early = ledger.asked()
    ledger.settled("a", 7)
    ledger.mark()
    ledger.flushed()
    late = ledger.asked()
    ledger.answered(early)
    assert ledger.uncounted("a") == 7
    ledger.answered(late)
    assert ledger.uncounted("a") == 0


def test_a_new_period_starts_from_nothing() -> None:
    ledger: Ledger[str] = Ledger()
    for step in (ledger.asked, ledger.flushed, ledger.mark, lambda: None):
        ledger.settled("a", 1)
        ledger.settled("b", 1)
        ledger.mark()
        ledger.flushed()
        step()
    ledger.forget("a")
    assert (ledger.uncounted("a"), ledger.uncounted("b")) == (0, 4)
