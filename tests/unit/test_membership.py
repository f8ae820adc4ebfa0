"""Who trains together: every rule of the state machine, and random histories against what always has to hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_ddp.elastic.members import AT_ONCE, DRAIN, RESIZE, Arrival, FormedGeneration, Member, Notice
from elastic_ddp.elastic.membership import GATHER_S, LEFT, PATIENCE_S, SETTLE_S, SUPERSEDED, Membership

DEAD = "its process ended"
BROKEN = "connection closed by peer"


def member(name: str, node: str = "n", group: str = "g", size: int = 2, rank: int = 0) -> Member:
    return Member(
        id=name, group=group, group_size=size, rank_in_group=rank, node=node, node_id=f"id of {node}", pid=100 + rank
    )


class Club:
    """A membership whose clock stands still, and those who come to it, by name."""

    def __init__(self, max_workers: int = 8, min_workers: int = 1, size: int = 2) -> None:
        self.membership = Membership(min_workers=min_workers, max_workers=max_workers)
        self.size = size
        self.now = 100.0
        self.members: dict[str, Member] = {}

    def arrive(
        self,
        name: str,
        step: int | None = None,
        *,
        node: str = "n",
        group: str = "g",
        between_steps: bool = True,
        lost: str | None = None,
        rank: int | None = None,
        committed: int | None = None,
    ) -> str | None:
        rank = len(self.members) if rank is None else rank
        known = self.members.setdefault(name, member(name, node, group, self.size, rank))
        arrival = Arrival(member=known, step=step, between_steps=between_steps, committed=committed, at_s=self.now)
        return self.membership.arrive(arrival, lost=lost)

    def all_arrive(self, names: Iterable[str], step: int | None = None) -> None:
        for name in names:
            assert self.arrive(name, step) is None

    def form(self) -> FormedGeneration | None:
        return self.membership.form(self.now)

    def formed(self) -> FormedGeneration:
        generation = self.form()
        assert generation is not None
        return generation

    def names(self) -> list[str]:
        """Who is in the generation that can be formed now, in rank order."""
        return [each.id for each in self.formed().members]

    @property
    def wants_change(self) -> bool:
        return self.membership.wants_change(self.now)


def club_of(names: str, max_workers: int = 8, min_workers: int = 1, nodes: dict[str, str] | None = None) -> Club:
    """A club with a healthy first generation."""
    club = Club(max_workers, min_workers, size=len(names))
    for name in names:
        assert club.arrive(name, node=(nodes or {}).get(name, "n")) is None
    assert sorted(club.names()) == sorted(names)
    return club


# The first generation.


def test_the_first_generation_waits_for_the_whole_group() -> None:
    club = Club(size=3)
    assert club.form() is None
    club.all_arrive("ab")
    club.now += GATHER_S - 0.1
    assert club.form() is None
    club.all_arrive("c")
    generation = club.formed()
    assert (generation.number, generation.reason) == (1, "start")
    assert [each.id for each in generation.members] == ["a", "b", "c"]
    assert club.membership.current == generation
    assert club.form() is None


def test_a_member_that_asks_again_counts_once() -> None:
    club = Club(size=2)
    club.all_arrive("aa")
    assert club.form() is None
    club.all_arrive("b")
    assert club.names() == ["a", "b"]


def test_the_first_generation_goes_without_those_who_do_not_come_in_time() -> None:
    club = Club(size=3)
    club.all_arrive("a")
    club.now += GATHER_S / 2
    club.all_arrive("b")
    club.now += GATHER_S / 2  # counted from the first
    assert club.names() == ["a", "b"]


def test_members_of_the_first_generation_that_come_at_once_are_ranked_as_in_their_group() -> None:
    club = Club(size=3)
    for name, rank in (("c", 2), ("a", 0), ("b", 1)):
        assert club.arrive(name, rank=rank) is None
    assert club.names() == ["a", "b", "c"]


def test_who_dies_before_the_first_generation_is_not_in_it() -> None:
    club = Club(size=3)
    club.all_arrive("abc")
    assert not club.membership.lose("b", DEAD)
    assert club.form() is None
    club.now += GATHER_S
    assert club.names() == ["a", "c"]


def test_below_min_workers_nothing_forms_however_long_it_takes() -> None:
    club = Club(min_workers=3, size=2)
    club.all_arrive("ab")
    club.now += 100 * GATHER_S
    assert club.form() is None
    club.all_arrive("c")
    assert club.names() == ["a", "b", "c"]


def test_survivors_below_min_workers_wait_for_newcomers() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.lose("a", DEAD)
    club.all_arrive("b", 3)
    club.now += 100 * GATHER_S
    assert club.form() is None
    club.all_arrive("c")
    assert club.names() == ["b", "c"]


def test_a_minimum_that_is_lowered_lets_those_who_wait_go_on() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.lose("a", DEAD)
    club.all_arrive("b", 3)
    assert club.form() is None
    club.membership.min_workers = 1
    assert club.names() == ["b"]


# Losses.


def test_survivors_form_at_once_when_the_dead_one_is_known() -> None:
    club = club_of("abc")
    assert club.membership.lose("b", DEAD)
    club.all_arrive("ac", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "c"]
    assert (generation.number, generation.reason, generation.first_step) == (2, "worker lost", 5)
    assert club.membership.loss is None


def test_no_generation_forms_while_a_living_member_has_not_come() -> None:
    club = club_of("abc")
    assert club.arrive("a", 5, lost=BROKEN) is None
    assert club.arrive("b", 5, lost=BROKEN) is None
    club.now += 100 * GATHER_S
    assert club.form() is None
    club.membership.lose("c", DEAD)
    assert club.names() == ["a", "b"]


def test_a_death_that_comes_to_be_known_last_lets_those_who_wait_form() -> None:
    club = club_of("abcd")
    for name in "ab":
        assert club.arrive(name, 5, lost=BROKEN) is None
    assert not club.membership.lose("c", DEAD)  # the generation was broken already
    assert club.form() is None
    assert not club.membership.lose("d", DEAD)
    assert club.names() == ["a", "b"]


def test_two_losses_at_once_make_one_generation() -> None:
    club = club_of("abcd")
    assert club.membership.lose("a", DEAD)
    assert not club.membership.lose("d", "it was silent for 5 s")
    assert club.membership.loss == DEAD  # the first word counts
    club.all_arrive("bc", 5)
    generation = club.formed()
    assert (generation.number, [each.id for each in generation.members]) == (2, ["b", "c"])
    assert club.form() is None
    assert club.membership.lost() == {"a": DEAD, "d": "it was silent for 5 s"}


def test_one_who_dies_while_it_waits_is_not_waited_for() -> None:
    club = club_of("abc")
    club.membership.lose("a", DEAD)
    club.all_arrive("b", 5)
    assert not club.membership.lose("b", DEAD)
    assert club.form() is None
    club.all_arrive("c", 5)
    assert club.names() == ["c"]


def test_a_newcomer_that_dies_while_it_waits_breaks_nothing() -> None:
    club = club_of("ab")
    club.all_arrive("c")
    assert not club.membership.lose("c", DEAD)
    club.now += SETTLE_S
    assert club.membership.loss is None
    assert not club.wants_change


def test_a_broken_connection_without_a_death_makes_a_generation_of_the_same_members() -> None:
    club = club_of("abc")
    for name in "cab":
        assert club.arrive(name, 5, lost=BROKEN) is None
    generation = club.formed()
    assert (generation.number, generation.reason) == (2, "worker lost")
    assert [each.id for each in generation.members] == ["a", "b", "c"]


def test_the_first_word_of_how_a_generation_broke_counts() -> None:
    club = club_of("abc")
    club.arrive("a", 5, lost="the first")
    club.arrive("b", 5, lost="the second")
    assert club.membership.loss == "the first"


def test_a_loss_that_one_outside_of_the_generation_reports_is_none_of_it() -> None:
    club = club_of("ab")
    assert club.arrive("c", lost=BROKEN) is None
    assert club.membership.loss is None


def test_one_presumed_dead_that_returns_is_refused() -> None:
    club = club_of("ab")
    club.membership.lose("a", "it was silent for 5 s")
    assert club.arrive("a", 5, lost=BROKEN) == "it was silent for 5 s"
    assert club.membership.is_gone("a") == "it was silent for 5 s"
    club.all_arrive("b", 5)
    assert club.names() == ["b"]
    assert club.arrive("a", 5) == "it was silent for 5 s"
    assert club.membership.loss is None


def test_without_survivors_newcomers_gather_as_at_the_start() -> None:
    club = club_of("ab")
    club.membership.lose("a", DEAD)
    club.membership.lose("b", DEAD)
    club.all_arrive("c")
    assert club.form() is None
    club.all_arrive("d")
    generation = club.formed()
    assert [each.id for each in generation.members] == ["c", "d"]
    assert (generation.source, generation.first_step, generation.reason) == (None, None, "worker lost")


def test_one_that_left_is_no_loss_and_is_not_waited_for() -> None:
    club = club_of("ab")
    club.membership.retire("a")
    assert not club.membership.lose("a", DEAD)  # its process ends after that
    assert club.membership.lost() == {}
    assert club.membership.is_gone("a") == LEFT
    assert club.membership.num_alive == 1
    club.all_arrive("b", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["b"], "workers left")


def test_one_that_died_stays_dead_when_it_retires() -> None:
    club = club_of("ab")
    club.membership.lose("a", DEAD)
    club.membership.retire("a")
    assert club.membership.lost() == {"a": DEAD}


def test_those_who_train_and_those_who_wait_are_alive() -> None:
    club = club_of("abc")
    assert club.membership.num_alive == 3
    club.all_arrive("d")
    assert club.membership.num_alive == 4
    club.membership.lose("a", DEAD)
    club.membership.retire("b")
    club.all_arrive("c", 5)
    assert club.membership.num_alive == 2


# Newcomers.


def test_a_newcomer_waits_until_those_who_train_are_asked_to_let_it_in() -> None:
    club = club_of("ab")
    assert not club.wants_change
    club.all_arrive("c")
    assert not club.wants_change
    assert club.form() is None  # nobody of the generation waits
    club.now += SETTLE_S
    assert club.wants_change
    club.all_arrive("a", 5)
    assert club.form() is None
    club.all_arrive("b", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "b", "c"]
    assert generation.reason == "workers joined"
    assert not club.wants_change


def test_as_many_newcomers_as_there_is_room_for_do_not_wait_for_others() -> None:
    club = club_of("ab", max_workers=4)
    club.all_arrive("c")
    assert not club.wants_change
    club.all_arrive("d")
    assert club.wants_change


def test_nobody_is_asked_to_let_in_more_than_there_is_room_for() -> None:
    club = club_of("ab", max_workers=2)
    club.all_arrive("c")
    club.now += 100 * SETTLE_S
    assert not club.wants_change


def test_newcomers_join_the_survivors_of_a_loss_without_being_asked_for() -> None:
    club = club_of("ab", max_workers=2)
    club.all_arrive("c")
    club.membership.lose("a", DEAD)
    club.all_arrive("b", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["b", "c"], "worker lost")


def test_a_generation_that_broke_is_not_asked_to_change() -> None:
    club = club_of("ab")
    club.all_arrive("c")
    club.membership.lose("a", DEAD)
    club.now += SETTLE_S
    assert not club.wants_change


def test_newcomers_are_left_out_when_a_survivor_is_not_between_steps() -> None:
    club = club_of("abc")
    club.all_arrive("d")
    club.membership.lose("a", DEAD)
    club.arrive("b", 5, between_steps=False)
    club.arrive("c", 5)
    assert club.names() == ["b", "c"]
    club.now += SETTLE_S  # and are let in when the evaluation is over
    assert club.wants_change
    club.all_arrive("bc", 6)
    assert club.names() == ["b", "c", "d"]


def test_a_generation_knows_whether_some_of_its_members_were_amid_something() -> None:
    club = club_of("abc")
    assert club.membership.current is not None and not club.membership.current.amid
    club.membership.lose("a", DEAD)
    club.arrive("b", 5, between_steps=False)
    club.arrive("c", 5)
    assert club.formed().amid
    club.all_arrive("bc", 6)
    assert not club.formed().amid


def test_all_wait_where_there_are_too_few() -> None:
    club = club_of("abc", min_workers=2)
    assert not club.membership.all_wait()
    club.membership.lose("a", DEAD)
    club.membership.lose("b", DEAD)
    assert not club.membership.all_wait()
    club.all_arrive("c", 5)
    assert club.form() is None and club.membership.all_wait()
    club.all_arrive("d")
    assert club.names() == ["c", "d"]
    assert not club.membership.all_wait()


def test_newcomers_that_are_left_out_do_not_keep_survivors_from_finishing_what_they_do() -> None:
    club = club_of("ab", min_workers=2)
    club.all_arrive("c")
    club.membership.lose("a", DEAD)
    club.arrive("b", 5, between_steps=False)
    assert club.names() == ["b"]


def test_max_workers_is_not_exceeded_and_who_came_first_gets_in_first() -> None:
    club = club_of("ab", max_workers=3)
    for name in "dc":
        club.now += 1
        club.all_arrive(name)
    club.all_arrive("ab", 5)
    assert club.names() == ["a", "b", "d"]
    assert not club.wants_change
    club.membership.lose("a", DEAD)
    club.all_arrive("bd", 7)
    assert club.names() == ["b", "d", "c"]


def in_prospect(club: Club, also: str | None = None) -> list[str]:
    """Who would be in the next generation, in rank order."""
    newcomer = member(also, "n") if also is not None else None
    places = club.membership.prospects(club.now, newcomer)
    assert [place for place, _ in sorted(places.values())] == list(range(len(places)))
    assert all(size == len(places) for _, size in places.values())
    return sorted(places, key=lambda each: places[each])


def test_members_and_newcomers_are_told_the_places_that_they_get() -> None:
    club = club_of("abc", max_workers=4, nodes={"a": "x", "b": "y", "c": "x"})
    assert in_prospect(club) == ["a", "c", "b"]
    assert in_prospect(club, also="d") == ["a", "c", "b", "d"]
    club.arrive("d", node="y")
    assert in_prospect(club) == in_prospect(club, also="e") == ["a", "c", "b", "d"], "there is room for one"
    club.membership.ask_to_leave(["c"])
    assert in_prospect(club, also="e") == ["a", "b", "d", "e"], "who comes takes the place of who goes"
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "b", "d"]


def test_nothing_is_in_prospect_where_nothing_is_known() -> None:
    club = Club(size=2)
    club.arrive("a")
    assert in_prospect(club) == in_prospect(club, also="b") == [], "nobody trains yet"
    club = club_of("ab", min_workers=2)
    club.membership.lose("a", DEAD)
    assert in_prospect(club, also="c") == [], "a generation that broke is waited for by all"
    club = club_of("ab")
    club.membership.ask_to_leave("ab")
    assert in_prospect(club) == [], "they are to commit before they go"


def test_the_first_generation_takes_no_more_than_max_workers() -> None:
    club = Club(max_workers=2, size=3)
    club.all_arrive("abc")
    assert club.names() == ["a", "b"]


# Who has the state.


def test_at_the_start_nobody_has_any_state() -> None:
    club = Club()
    club.all_arrive("ab")
    generation = club.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (None, (0, 1), None)


def test_the_source_is_the_most_advanced_and_the_others_receive() -> None:
    club = club_of("abcd")
    club.membership.lose("d", DEAD)
    club.arrive("a", 5)
    club.arrive("b", 6)
    club.arrive("c", 5)
    club.arrive("e")
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "b", "c", "e"]
    assert (generation.source, generation.receivers, generation.first_step) == (1, (0, 2, 3), 6)


def test_nobody_who_is_up_to_date_receives() -> None:
    club = club_of("abc")
    club.membership.lose("a", DEAD)
    club.all_arrive("bc", 6)
    generation = club.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (0, (), 6)


def test_a_state_of_no_steps_is_a_state() -> None:
    club = club_of("ab")
    club.all_arrive("ab", 0)
    club.arrive("c")
    generation = club.formed()
    assert (generation.source, generation.receivers, generation.first_step) == (0, (2,), 0)


def test_a_generation_that_broke_while_it_formed_starts_from_the_newest_commit_again() -> None:
    club = club_of("abc")
    club.membership.lose("a", DEAD)
    club.all_arrive("bc", None)
    generation = club.formed()
    assert (generation.source, generation.first_step) == (None, None)


# Ranks.


def test_ranks_are_grouped_by_node_in_the_order_of_the_nodes_seniors() -> None:
    club = Club(size=5)
    for name, node in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "z"), ("e", "y")):
        club.arrive(name, node=node)
    assert club.names() == ["a", "c", "b", "e", "d"]


def test_rank_0_is_a_survivor_if_there_is_one_and_newcomers_rank_after_those_of_their_node() -> None:
    club = Club(size=3)
    for name, node in (("a", "x"), ("b", "y"), ("c", "z")):
        club.arrive(name, node=node)
    club.formed()
    club.arrive("d", node="x")
    club.arrive("e", node="z")
    club.membership.lose("a", DEAD)
    club.all_arrive("cb", 5)
    assert club.names() == ["b", "c", "e", "d"]


# Leaving.


def test_members_that_are_asked_to_leave_are_left_out_of_the_next_generation() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave(["b"])
    assert club.wants_change
    club.all_arrive("abc", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "c"]
    assert (generation.reason, generation.receivers) == ("workers left", ())


def test_who_joins_while_another_leaves_is_told_of_both() -> None:
    club = club_of("ab", max_workers=2)
    club.all_arrive("c")
    club.membership.ask_to_leave("a")
    club.all_arrive("ab", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["b", "c"], "workers joined and left")


def test_the_last_holder_of_the_newest_state_is_kept_once_and_then_asked_to_go() -> None:
    club = club_of("ab", max_workers=3)
    club.membership.ask_to_leave("ab")
    club.all_arrive("c")
    club.all_arrive("ab", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["a", "c"]
    assert (generation.source, generation.receivers, generation.brief) == (0, (1,), True)
    assert club.wants_change
    club.all_arrive("ac", 5)
    generation = club.formed()
    assert [each.id for each in generation.members] == ["c"]
    assert (generation.source, generation.receivers, generation.first_step) == (0, (), 5)
    assert not generation.brief
    assert generation.reason == "workers left"


def test_one_who_is_kept_for_its_state_takes_the_place_of_a_newcomer() -> None:
    club = club_of("a", max_workers=2)
    club.membership.ask_to_leave("a")
    club.all_arrive("bc")
    club.all_arrive("a", 5)
    assert club.names() == ["a", "b"]


def test_one_who_leaves_is_kept_if_it_alone_made_the_last_step() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave("b")
    club.membership.lose("c", DEAD)
    club.arrive("a", 5)
    club.arrive("b", 6)
    generation = club.formed()
    assert sorted(each.id for each in generation.members) == ["a", "b"]
    assert generation.first_step == 6
    assert generation.members[generation.source or 0].id == "b"
    assert club.wants_change


def test_one_who_should_leave_is_kept_when_nobody_else_is_there() -> None:
    club = club_of("a")
    club.membership.ask_to_leave("a")
    club.all_arrive("a", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["a"], "workers leave")


def test_members_that_all_leave_go_once_the_newest_state_is_committed() -> None:
    club = club_of("ab")
    club.membership.ask_to_leave("ab")
    club.arrive("a", 5, committed=5)
    club.arrive("b", 5)
    assert club.form() is None
    assert club.membership.dismissed == {"a": DRAIN, "b": DRAIN}
    assert club.membership.lost() == {}
    club.all_arrive("cd")
    generation = club.formed()
    assert [each.id for each in generation.members] == ["c", "d"]
    assert (generation.source, generation.number) == (None, 2)


def test_of_members_that_all_leave_one_commits_first_and_makes_no_step() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("ab")
    club.arrive("a", 5, committed=4)
    club.arrive("b", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.brief, generation.receivers) == (["a"], True, ())
    assert club.membership.dismissed == {"b": DRAIN}
    club.arrive("a", 5, committed=5)
    assert club.form() is None
    assert club.membership.dismissed == {"b": DRAIN, "a": DRAIN}


def test_a_survivor_that_leaves_commits_though_there_are_fewer_than_min_workers() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.lose("b", DEAD)
    club.arrive("a", 5, lost=BROKEN)
    assert club.form() is None
    club.membership.ask_to_leave("a")
    assert club.names() == ["a"]


def test_a_step_that_outlasts_three_quarters_of_a_notice_is_broken() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("b", Notice(DRAIN, club.now, 20.0))
    club.now += 14.9
    assert not club.membership.break_if_overdue(club.now)
    club.now += 0.1
    assert club.membership.break_if_overdue(club.now)
    assert not club.membership.break_if_overdue(club.now)
    club.all_arrive("abc", 5)
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["a", "c"], "workers joined and left")


def test_a_notice_breaks_one_generation_and_no_other() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("b", Notice(DRAIN, club.now, 20.0))
    club.now += 15
    assert club.membership.break_if_overdue(club.now)
    for name in "ab":  # an evaluation has to be made again, and a alone does not hold the newest state
        club.arrive(name, 5 if name == "b" else 4, between_steps=False)
    assert club.names() == ["a", "b"]
    club.now += 1
    assert not club.membership.break_if_overdue(club.now)


def test_one_whose_time_is_nearly_up_leaves_in_an_evaluation_too_if_others_hold_the_state() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave("b", Notice(DRAIN, club.now, 20.0))
    club.now += 15
    assert club.membership.break_if_overdue(club.now)
    for name in "abc":
        club.arrive(name, 5, between_steps=False)
    assert club.names() == ["a", "c"]
    assert club.membership.dismissed == {"b": DRAIN}


def test_a_generation_in_which_state_is_handed_on_is_not_broken_by_a_notice() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("ab", Notice(DRAIN, club.now, 20.0))
    club.now += 10
    club.all_arrive("ab", 5)
    assert club.formed().brief
    club.now += 6
    assert not club.membership.break_if_overdue(club.now)


def test_of_two_notices_the_one_that_leaves_less_time_counts() -> None:
    club = club_of("ab", min_workers=2, nodes={"b": "x"})
    assert club.membership.drain("id of x", Notice(DRAIN, club.now, 600.0))
    assert club.membership.drain("id of x", Notice(DRAIN, club.now, 60.0))
    assert not club.membership.drain("id of x", Notice(DRAIN, club.now, 60.0)), "that is no news"
    assert not club.membership.drain("id of x", Notice(DRAIN, club.now, 600.0))
    club.membership.ask_to_leave("b", Notice(DRAIN, club.now, 600.0))
    club.now += 30
    assert club.wants_change, "half of the minute is over"
    assert club.membership.has_time(club.now, 14.9)
    assert not club.membership.has_time(club.now, 15.0)


def test_a_generation_knows_whether_it_has_the_members_of_the_one_before() -> None:
    club = club_of("ab")
    club.all_arrive("ab", 5)
    assert club.formed().again
    club.all_arrive("abc", 6)
    assert not club.formed().again


def test_one_who_waits_to_leave_breaks_nothing() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("b", Notice(DRAIN, club.now, 20.0))
    club.arrive("b", 5)
    club.now += 20
    assert not club.membership.break_if_overdue(club.now)


def test_one_with_notice_stays_while_it_is_needed_for_half_of_the_time() -> None:
    club = club_of("ab", min_workers=2)
    club.membership.ask_to_leave("b", Notice(DRAIN, club.now, 20.0))
    assert not club.wants_change
    club.now += 9.9
    assert not club.wants_change
    club.now += 0.1
    assert club.wants_change
    club.all_arrive("ab", 5)
    assert club.form() is None  # and a keeps the state until there are enough
    assert club.membership.dismissed == {"b": DRAIN}
    club.all_arrive("c")
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.source) == (["a", "c"], 0)


def test_one_with_notice_leaves_as_soon_as_another_has_come() -> None:
    club = club_of("ab", min_workers=2, max_workers=2)
    club.membership.ask_to_leave("b", Notice(DRAIN, club.now, 20.0))
    club.all_arrive("c")
    assert club.wants_change
    club.all_arrive("ab", 5)
    assert club.names() == ["a", "c"]
    assert club.membership.dismissed == {"b": DRAIN}


def test_a_generation_is_not_formed_again_for_a_newcomer_that_is_not_enough_to_let_anybody_go() -> None:
    club = club_of("abc", min_workers=3, max_workers=3)
    for name in "bc":
        club.membership.ask_to_leave(name, Notice(DRAIN, club.now, 120.0))
    club.all_arrive("d")
    club.now += PATIENCE_S
    assert not club.wants_change
    club.all_arrive("e")
    assert club.wants_change
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "d", "e"]


def test_one_with_notice_still_counts_when_another_is_lost() -> None:
    club = club_of("abc", min_workers=2)
    club.membership.ask_to_leave("c", Notice(DRAIN, club.now, 20.0))
    club.membership.lose("b", DEAD)
    club.all_arrive("ac", 5)
    assert club.names() == ["a", "c"]


def test_a_node_that_is_drained_lets_its_members_go_and_nobody_in() -> None:
    club = club_of("abc", nodes={"c": "x"})
    assert club.membership.drain("id of x", AT_ONCE)
    assert not club.membership.drain("id of x", AT_ONCE)
    assert club.wants_change
    assert club.arrive("d", node="x") == LEFT
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "b"]
    assert club.membership.dismissed == {"d": DRAIN, "c": DRAIN}


def test_a_newcomer_that_is_told_to_go_is_let_go_at_once() -> None:
    club = club_of("ab")
    club.all_arrive("c")
    club.membership.ask_to_leave("c")
    assert club.membership.dismissed == {"c": DRAIN}
    assert not club.wants_change


def test_a_run_that_is_made_smaller_lets_the_last_ranks_go() -> None:
    club = club_of("abcd")
    club.membership.wanted = 2
    assert club.wants_change
    club.all_arrive("abcd", 5)
    assert club.names() == ["a", "b"]
    assert club.membership.dismissed == {"c": RESIZE, "d": RESIZE}
    assert not club.wants_change


def test_who_stays_waits_where_one_that_goes_commits_the_newest_state() -> None:
    club = club_of("ab")
    club.membership.wanted = 1
    club.membership.ask_to_leave("b")
    club.membership.lose("nobody", DEAD)
    club.arrive("a", 5, lost=BROKEN)
    club.arrive("b", 6, lost=BROKEN)
    brief = club.formed()
    assert ([each.id for each in brief.members], brief.brief, brief.receivers) == (["b"], True, ())
    assert club.arrive("b", 6, committed=6) is None
    assert club.names() == ["a"]
    assert club.membership.dismissed == {"b": DRAIN}


def test_a_run_that_is_made_smaller_while_it_breaks_keeps_one_who_made_the_last_step() -> None:
    club = club_of("abc")
    club.membership.wanted = 1
    club.arrive("a", 5, lost=BROKEN)
    club.arrive("b", 5)
    club.arrive("c", 6)
    assert club.names() == ["c"]


def test_a_newcomer_that_was_not_wanted_any_more_is_let_go() -> None:
    club = club_of("abc", max_workers=4)
    club.all_arrive("d")
    club.membership.wanted = 2
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "b"]
    assert club.membership.dismissed == {"c": RESIZE, "d": RESIZE}


def test_nobody_leaves_in_the_midst_of_an_evaluation() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave("a")
    club.membership.lose("c", DEAD)
    club.arrive("a", 5, between_steps=False)
    club.arrive("b", 5, between_steps=False)
    assert club.names() == ["a", "b"]
    assert club.wants_change


# Groups.


def test_a_restarted_group_supersedes_the_one_before() -> None:
    club = club_of("ab")
    assert club.arrive("c", group="h") is None
    assert club.membership.lost() == {"a": SUPERSEDED, "b": SUPERSEDED}
    assert club.form() is None
    assert club.arrive("d", group="h") is None
    generation = club.formed()
    assert ([each.id for each in generation.members], generation.reason) == (["c", "d"], "worker lost")
    assert generation.source is None


def test_a_late_member_of_an_old_group_is_refused_and_takes_nobodys_place() -> None:
    club = Club(size=2)
    club.arrive("a", group="g")
    club.arrive("c", group="h")
    assert club.arrive("b", group="g") == SUPERSEDED  # it never came before
    assert club.arrive("a", group="g", lost=BROKEN) == SUPERSEDED
    assert club.membership.loss is None
    assert club.form() is None
    club.arrive("d", group="h")
    assert club.names() == ["c", "d"]


def test_a_newcomer_of_the_same_group_supersedes_nobody() -> None:
    club = club_of("ab")
    assert club.arrive("c", group="g") is None
    assert club.membership.lost() == {}


# Reasons.


def test_a_generation_of_the_same_members_without_a_loss_was_formed_again() -> None:
    club = club_of("ab")
    club.all_arrive("ab", 5)
    assert club.formed().reason == "formed again"


def test_what_ended_a_generation_is_forgotten_with_the_next() -> None:
    club = club_of("abc")
    club.membership.lose("a", DEAD)
    club.all_arrive("bc", 5)
    assert club.formed().reason == "worker lost"
    club.all_arrive("bcd", 6)
    assert club.formed().reason == "workers joined"


# What does not hold yet.


def test_one_who_asks_again_has_waited_since_it_first_came() -> None:
    club = Club(size=2)
    for _ in range(int(GATHER_S)):  # a member that waits asks once a second
        club.all_arrive("a")
        club.now += 1
    assert club.form() is not None


def test_a_newcomer_that_asks_again_is_let_in_all_the_same() -> None:
    club = club_of("ab")
    club.all_arrive("c")
    club.now += SETTLE_S
    assert club.wants_change
    club.all_arrive("c")
    assert club.wants_change


def test_a_newcomer_waits_longer_for_those_on_their_way() -> None:
    club = club_of("ab")
    club.membership.on_their_way = 1
    club.all_arrive("c")
    club.now += SETTLE_S
    assert not club.wants_change
    club.now += PATIENCE_S
    assert club.wants_change
    club.membership.on_their_way = 0
    assert club.wants_change


def test_one_who_was_left_out_is_not_let_in_again() -> None:
    club = club_of("abc")
    club.membership.ask_to_leave("c")
    club.all_arrive("abc", 5)
    assert club.names() == ["a", "b"]
    club.now += SETTLE_S
    assert not club.wants_change


def test_max_workers_is_not_exceeded_by_one_who_is_kept_for_its_state() -> None:
    club = club_of("a", max_workers=1)
    club.all_arrive("b")
    club.membership.ask_to_leave("a")
    club.all_arrive("a", 5)
    assert len(club.formed().members) == 1


def test_when_all_should_leave_a_holder_of_the_newest_state_is_kept() -> None:
    club = club_of("ab")
    club.membership.ask_to_leave("ab")
    club.arrive("a", 5)
    club.arrive("b", 6, lost=BROKEN)
    assert club.formed().first_step == 6


# Random histories.


@dataclass
class Worker:
    """A worker as it is in truth, whatever the membership knows of it."""

    member: Member
    at_s: float
    step: int | None = None
    waits: bool = True
    alive: bool = True
    """Neither dead, nor presumed so, nor gone for good."""
    leaving: bool = False
    between_steps: bool = True


class Histories(RuleBasedStateMachine):
    """Workers come, train, die, lose connections, are asked to leave and go, in any order. When the membership forms
    a generation it has to be the right one, and when it does not there has to be a reason."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: dict[str, Worker] = {}
        self.generation: FormedGeneration | None = None
        self.broken = False
        self.now = 0.0
        self.number = 0

    @initialize(
        size=st.integers(1, 4),
        max_workers=st.integers(1, 4),
        min_workers=st.integers(1, 2),
    )
    def begin(self, size: int, max_workers: int, min_workers: int) -> None:
        min_workers = min(min_workers, max_workers)
        self.group, self.size = 0, size
        self.membership = Membership(min_workers=min_workers, max_workers=max_workers)
        for _ in range(size):
            self.a_worker_starts(node="x")

    # What is so.

    def current(self) -> list[Worker]:
        return [self.workers[each.id] for each in self.generation.members] if self.generation is not None else []

    def survivors(self) -> list[Worker]:
        return [each for each in self.current() if each.alive]

    def training(self) -> list[Worker]:
        return [each for each in self.survivors() if not each.waits]

    def waiting(self) -> list[Worker]:
        return [each for each in self.workers.values() if each.alive and each.waits]

    def newcomers(self) -> list[Worker]:
        current = {each.member.id for each in self.current()}
        return [each for each in self.waiting() if each.member.id not in current]

    def any_of(self, data: st.DataObject, workers: list[Worker]) -> Worker:
        return data.draw(st.sampled_from(sorted(workers, key=lambda each: int(each.member.id))))

    def says_arrival(self, worker: Worker, lost: str | None = None) -> None:
        arrival = Arrival(member=worker.member, step=worker.step, between_steps=worker.between_steps, at_s=worker.at_s)
        assert self.membership.arrive(arrival, lost=lost) is None

    def comes_back(self, worker: Worker, lost: str | None, between_steps: bool = True) -> None:
        worker.waits, worker.at_s, worker.between_steps = True, self.now, between_steps
        self.broken = self.broken or lost is not None
        self.says_arrival(worker, lost)

    # What happens.

    @precondition(lambda self: len(self.waiting()) + len(self.training()) < 7)
    @rule(node=st.sampled_from("xyz"))
    def a_worker_starts(self, node: str) -> None:
        self.number += 1
        name = str(self.number)
        new = member(name, node, f"g{self.group}", self.size, rank=self.number)
        self.workers[name] = Worker(new, self.now)
        self.says_arrival(self.workers[name])
        self.form()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def a_worker_asks_again(self, data: st.DataObject) -> None:
        self.says_arrival(self.any_of(data, self.waiting()))
        self.form()

    @rule(seconds=st.sampled_from([SETTLE_S / 2, SETTLE_S, GATHER_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.form()

    @precondition(lambda self: not self.broken and self.current() and self.training() == self.current())
    @rule()
    def a_step_is_made(self) -> None:
        for each in self.current():
            each.step = (each.step or 0) + 1

    @precondition(lambda self: self.training() or self.waiting())
    @rule(data=st.data(), how=st.sampled_from([DEAD, "it was silent for 5 s"]), nearly_done=st.booleans())
    def a_worker_dies(self, data: st.DataObject, how: str, nearly_done: bool) -> None:
        dead = self.any_of(data, self.training() + self.waiting())
        in_generation = dead in self.current()
        if in_generation and nearly_done and not self.broken and self.training() == self.current():
            for each in self.training():  # some made the step in which it died, and others did not
                each.step = (each.step or 0) + data.draw(st.integers(0, 1))
        dead.alive = False
        assert self.membership.lose(dead.member.id, how) == (in_generation and not self.broken)
        self.broken = self.broken or in_generation
        self.form()

    @precondition(lambda self: not self.broken and self.current() and self.training() == self.current())
    @rule(data=st.data())
    def connections_break_in_a_step(self, data: st.DataObject) -> None:
        for each in self.training():
            each.step = (each.step or 0) + data.draw(st.integers(0, 1))
            self.comes_back(each, BROKEN)
            self.form()

    @precondition(lambda self: any(not each.alive for each in self.workers.values()))
    @rule(data=st.data())
    def one_presumed_dead_returns(self, data: st.DataObject) -> None:
        gone = self.any_of(data, [each for each in self.workers.values() if not each.alive])
        arrival = Arrival(member=gone.member, step=gone.step, between_steps=True, at_s=self.now)
        assert self.membership.arrive(arrival, lost=BROKEN) is not None
        self.form()

    @precondition(lambda self: self.training())
    @rule(data=st.data(), in_evaluation=st.booleans())
    def a_survivor_notices_a_loss(self, data: st.DataObject, in_evaluation: bool) -> None:
        self.comes_back(self.any_of(data, self.training()), BROKEN, between_steps=not in_evaluation)
        self.form()

    @precondition(
        lambda self: self.training() and self.training() == self.survivors() and self.membership.wants_change(self.now)
    )
    @rule()
    def a_step_ends_where_a_change_is_wanted(self) -> None:
        for each in self.training():
            self.comes_back(each, None)
            self.form()

    @precondition(lambda self: self.broken and self.training())
    @rule()
    def all_survivors_notice_a_loss(self) -> None:
        for each in self.training():
            self.comes_back(each, BROKEN)
            self.form()

    @precondition(lambda self: any(not each.leaving for each in self.survivors()))
    @rule(data=st.data())
    def a_worker_is_asked_to_leave(self, data: st.DataObject) -> None:
        leaving = self.any_of(data, [each for each in self.survivors() if not each.leaving])
        leaving.leaving = True
        self.membership.ask_to_leave([leaving.member.id])
        self.form()

    @precondition(lambda self: self.waiting() or self.training())
    @rule(data=st.data())
    def a_worker_goes_for_good(self, data: st.DataObject) -> None:
        going = self.any_of(data, self.training() + self.waiting())
        going.alive = False
        self.membership.retire(going.member.id)
        self.form()

    @rule()
    def the_group_is_started_again(self) -> None:
        self.group += 1
        self.broken = self.broken or bool(self.survivors())
        for each in self.workers.values():
            each.alive = False
        for _ in range(self.size):
            self.a_worker_starts(node="x")

    # What has to hold.

    def form(self) -> None:
        waiting, survivors = self.waiting(), self.survivors()
        before = self.generation
        broken = self.broken
        formed = self.membership.form(self.now)
        for name in self.membership.dismissed:
            assert self.workers[name].leaving
            self.workers[name].alive = False
        if formed is None:
            self.check_that_there_is_a_reason(waiting, survivors)
            return
        members = [self.workers[each.id] for each in formed.members]
        self.check_members(members, waiting, survivors)
        self.check_state(formed, members, waiting, survivors)
        self.check_ranks(members, survivors)
        assert formed.number == (before.number + 1 if before is not None else 1)
        before_ids = {each.id for each in before.members} if before is not None else set()
        ids = {each.id for each in formed.members}
        if formed.brief:
            expected = "workers leave"
        elif before is None:
            expected = "start"
        elif broken:
            expected = "worker lost"
        else:
            words = [word for word, moved in (("joined", ids - before_ids), ("left", before_ids - ids)) if moved]
            expected = f"workers {' and '.join(words)}" if words else "formed again"
        assert formed.reason == expected
        self.generation, self.broken = formed, False
        for each in members:
            each.waits, each.step = False, formed.first_step or 0
        assert self.membership.form(self.now) is None  # nobody is in two generations at once

    def check_that_there_is_a_reason(self, waiting: list[Worker], survivors: list[Worker]) -> None:
        if any(not each.waits for each in survivors) or not waiting:
            return
        too_few = len([each for each in waiting if not each.leaving]) < self.membership.min_workers
        if survivors:
            assert too_few
            assert all(each.between_steps for each in survivors) or len(waiting) == len(survivors)
            return
        gathered = len(waiting) >= self.size or self.now - min(each.at_s for each in waiting) >= GATHER_S
        assert too_few or not gathered

    def check_members(self, members: list[Worker], waiting: list[Worker], survivors: list[Worker]) -> None:
        assert all(each in waiting for each in members)  # so they are alive, and train nowhere
        assert all(each.waits for each in survivors)
        assert len({each.member.id for each in members}) == len(members)
        assert 1 <= len(members) <= self.membership.max_workers
        if not survivors:
            assert len(waiting) >= self.size or self.now - min(each.at_s for each in waiting) >= GATHER_S
        if all(each.between_steps for each in survivors):
            assert len(members) >= self.membership.min_workers or any(each.leaving for each in members)
        else:
            assert all(each in survivors for each in members)
            return
        assert all(each in members for each in survivors if not each.leaving)
        # Who leaves is kept only where nobody else has the newest state: one to hand it over, or all to commit it.
        if any(each.leaving for each in members):
            newest = max(each.step or 0 for each in waiting)
            assert not any(each.step == newest and not each.leaving for each in waiting)
            assert sum(each.leaving for each in members) == 1

    def check_state(
        self, formed: FormedGeneration, members: list[Worker], waiting: list[Worker], survivors: list[Worker]
    ) -> None:
        steps = [each.step for each in members if each.step is not None]
        assert formed.first_step == max(steps, default=None)
        if formed.source is None:
            assert not steps
        else:
            assert members[formed.source].step == formed.first_step
        assert formed.receivers == tuple(
            rank for rank, each in enumerate(members) if each.step is None or each.step != formed.first_step
        )
        asked = waiting if all(each.between_steps for each in survivors) else survivors
        if any(not each.leaving for each in asked):  # the newest state of all is not lost
            assert formed.first_step == max((each.step for each in asked if each.step is not None), default=None)

    def check_ranks(self, members: list[Worker], survivors: list[Worker]) -> None:
        nodes = [each.member.node for each in members]
        runs = [node for place, node in enumerate(nodes) if place == 0 or nodes[place - 1] != node]
        assert len(runs) == len(set(runs))
        if any(each in survivors for each in members):
            assert members[0] in survivors

    @invariant()
    def a_change_is_wanted_when_somebody_waits_for_it(self) -> None:
        if self.generation is None:
            return
        wanted = self.membership.wants_change(self.now)
        if self.broken or not self.survivors():
            assert not wanted, "there is nobody to be asked"
            return
        leaving = any(each.leaving and each.alive for each in self.current())
        newcomers = [each for each in self.newcomers() if not each.leaving]
        room = self.membership.max_workers - len(self.current())
        if leaving or (room > 0 and any(self.now - each.at_s >= SETTLE_S for each in newcomers)):
            assert wanted
        elif not self.newcomers():
            assert not wanted

    @invariant()
    def places_in_prospect_are_those_of_a_generation(self) -> None:
        if self.generation is None:
            return
        places = self.membership.prospects(self.now)
        assert sorted(places.values()) == [(rank, len(places)) for rank in range(len(places))]
        alive = {each.member.id for each in [*self.waiting(), *self.training()]}
        assert places.keys() <= alive and len(places) <= self.membership.max_workers
        assert not (places and self.broken)

    @invariant()
    def the_living_are_counted(self) -> None:
        assert self.membership.num_alive == len(self.waiting()) + len(self.training())


Histories.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHistories = Histories.TestCase
