"""A few threads serve many tasks fairly; a task that waits, blocks or fails costs the others nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from deltapost.errors import StoreUnavailable
from deltapost.streams import START
from deltapost.streams.memory import MemoryLog
from deltapost_aggregator.context import Health
from deltapost_aggregator.pool import Doorbell, Mail, Next, Pool
from fixtures.served import eventually

THREADS = 2


class Counted:
    """A task whose steps are counted."""

    def __init__(self, name: str, step: Callable[[int], Next]) -> None:
        self.name = name
        self.steps = 0
        self._step = step

    def step(self) -> Next:
        self.steps += 1
        return self._step(self.steps)


def mail(stream: str, position: str = START) -> Mail:
    return Mail(stream, position, 600.0)


class Running:
    def __init__(self) -> None:
        self.health = Health()
        self.log = MemoryLog()
        self.pool = Pool(self.health)
        self.bell = Doorbell(self.pool, self.log, self.health)
        self._stop = threading.Event()
        self.threads = [threading.Thread(target=self.pool.serve) for _ in range(THREADS)]
        self.threads.append(threading.Thread(target=self._ring))
        for thread in self.threads:
            thread.start()

    def _ring(self) -> None:
        while not self._stop.is_set():
            self.bell.step(0.2)

    def add(self, name: str, step: Callable[[int], Next]) -> Counted:
        task = Counted(name, step)
        self.pool.add(task)
        return task

    def close(self) -> None:
        self._stop.set()
        self.pool.stop()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.close()


def test_a_waiting_task_is_stepped_when_its_mail_comes_and_only_then(running: Running) -> None:
    tasks = [running.add(str(number), lambda _, n=number: mail(f"s{n}")) for number in range(50)]  # type: ignore[misc]
    eventually(lambda: all(task.steps == 1 for task in tasks))

    running.pool.ring(["s7"])

    eventually(lambda: tasks[7].steps == 2)
    assert [task.steps for task in tasks] == [1] * 7 + [2] + [1] * 42


def test_mail_rings_for_the_task_that_awaits_it(running: Running) -> None:
    def read(_: int) -> Next:
        entries = running.log.read("letters", START, limit=9)
        return mail("letters", entries[-1].id if entries else START)

    task = running.add("reader", read)
    eventually(lambda: task.steps >= 1)

    running.log.append("letters", b"one")

    eventually(lambda: task.steps == 2)


def test_mail_that_comes_while_its_task_runs_is_not_forgotten(running: Running) -> None:
    inside, released = threading.Event(), threading.Event()

    def read(step: int) -> Next:
        if step == 1:
            inside.set()
            released.wait(30)
            return mail("letters")
        return mail("letters", running.log.read("letters", START, limit=9)[-1].id)

    task = running.add("reader", read)
    assert inside.wait(30)
    running.log.append("letters", b"one")
    released.set()

    eventually(lambda: task.steps == 2)


def test_one_that_is_woken_while_it_runs_is_stepped_again(running: Running) -> None:
    inside, released = threading.Event(), threading.Event()

    def step(number: int) -> Next:
        if number == 1:
            inside.set()
            released.wait(30)
        return mail("letters")

    task = running.add("woken", step)
    assert inside.wait(30)
    running.pool.wake([task])
    released.set()

    eventually(lambda: task.steps == 2)


def test_a_blocked_task_holds_one_thread_only(running: Running) -> None:
    released = threading.Event()

    def block(_: int) -> Next:
        released.wait(30)
        return "done"

    running.add("blocked", block)
    others = [running.add(str(number), lambda step: "again" if step < 20 else "done") for number in range(10)]

    eventually(lambda: all(task.steps == 20 for task in others))
    released.set()


def test_those_that_are_always_ready_take_turns() -> None:
    pool = Pool(Health())
    order: list[int] = []

    def turn(number: int) -> Callable[[int], Next]:
        def step(count: int) -> Next:
            order.append(number)
            if len(order) == 12:
                pool.stop()
            return "again"

        return step

    for number in range(4):
        pool.add(Counted(str(number), turn(number)))
    pool.serve()

    assert order == [0, 1, 2, 3] * 3


def test_a_failing_task_shows_what_is_wrong_and_comes_back(running: Running) -> None:
    def step(number: int) -> Next:
        if number == 1:
            raise StoreUnavailable("no answer")
        return mail("letters")

    task = running.add("run x fragment 3", step)

    eventually(lambda: running.health.problems() == {"run x fragment 3": "no answer"} or task.steps > 1)
    eventually(lambda: task.steps == 2 and running.health.problems() == {})


def test_a_task_that_is_done_is_stepped_no_more(running: Running) -> None:
    task = running.add("done", lambda _: "done")
    eventually(lambda: task.steps == 1)

    running.pool.wake([task])
    marker = running.add("marker", lambda step: "again" if step < 20 else "done")
    eventually(lambda: marker.steps == 20)

    assert task.steps == 1
