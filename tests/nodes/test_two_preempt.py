"""Several models of a higher class that ask for room at one moment: none counts on what makes way for another, nothing
makes way in vain, and replicas go one at a time (ND-33)."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodes.plans import Drain, Start, Stop
from nodes.state import Cluster
from tests.nodes.simulation import Simulation, a_model, machine

some = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def full_fleets(draw: st.DrawFn) -> tuple[Simulation, int]:
    """Every card is held by a replica of its own, of the lowest class; how many cards there are."""
    cards = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    nodes = tuple(machine(f"n{number}", cards=count) for number, count in enumerate(cards))
    low = a_model("low", least=sum(cards), most=sum(cards), capacity_class="spot")
    world = Simulation(Cluster(nodes=nodes, models=(low,)))
    world.run(60 * sum(cards), step=5)
    assert len(world.ready("low")) == sum(cards)
    return world, sum(cards)


@some
@given(
    full_fleets(),
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["guaranteed", "standard"])), min_size=2, max_size=4),
    st.booleans(),
)
def test_what_makes_way_makes_it_for_one_and_no_more_than_is_taken(
    full: tuple[Simulation, int], asked: list[tuple[int, str]], busy: bool
) -> None:
    world, cards = full
    if busy:
        world.busy["low"] = 2
    for number, (wanted, capacity_class) in enumerate(asked):
        world.change(a_model(f"high{number}", least=1, most=1, cards=wanted, capacity_class=capacity_class))
    world.done.clear()
    for _ in range(60 * len(asked)):
        world.run(10, step=5)
        leaving = [replica for replica in world.replicas("low") if replica.wanted != "run"]
        assert len(leaving) <= 1
    taken = sum(wanted for number, (wanted, _) in enumerate(asked) if world.ready(f"high{number}"))
    began = [action for action in world.done if isinstance(action, Drain | Stop) and action.model == "low"]
    assert len({action.replica for action in began}) == taken, "as many made way as cards were taken"
    assert len(world.ready("low")) == cards - taken
    assert not [action for action in world.done if isinstance(action, Start) and action.model.name == "low"]
    for number, (wanted, _) in enumerate(asked):
        fits_alone = any(len(node.gpus) >= wanted for node in world.cluster.nodes)
        if not world.ready(f"high{number}") and fits_alone:
            assert taken, "somebody else has its place"


@some
@given(full_fleets(), st.integers(1, 3))
def test_the_same_room_is_promised_once_in_one_pass_and_in_the_next(full: tuple[Simulation, int], wanted: int) -> None:
    """Two that want the same, on a fleet with one place for it: one gets it, the other takes nothing from anybody."""
    world, _ = full
    only = max(world.cluster.nodes, key=lambda node: len(node.gpus))
    wanted = min(wanted, len(only.gpus))
    pinned = {"only_nodes": (only.name,)}
    for name in ("one", "two"):
        world.change(a_model(name, least=1, most=1, cards=wanted, capacity_class="guaranteed", **pinned))
    world.done.clear()
    world.run(900, step=5)
    placed = [name for name in ("one", "two") if world.ready(name)]
    assert len(placed) == min(2, len(only.gpus) // wanted)
    gone = {a.replica for a in world.done if isinstance(a, Drain | Stop) and a.model == "low"}
    assert len(gone) == wanted * len(placed)
